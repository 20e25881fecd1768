"""The same model executed in other ways; nothing here is needed to understand the decoder.

Runners (subclasses of model.Runner): cpu_runner.py, compiled.py (CUDA), placement.py (several devices). Layers:
linears.py, cpu_attention.py, the kernels that they call (kernels.py and cpp/), and for several processes those of
parallel.py. Also packing.py, runtime.py and nonfinite.py.
"""
