"""The same model executed otherwise: runners, linear layers, kernels, devices, processes."""
