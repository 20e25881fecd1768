"""The same model executed in other ways; nothing here is needed to understand the decoder.

Runners (subclasses of model.Runner): cpu_runner.py, compiled.py, placement.py (several devices). Layers: linears.py,
packing.py, cpu_attention.py, the kernels that they call (kernels.py and cpp/), and those of parallel.py for
several processes. Also runtime.py and nonfinite.py.
"""
