"""The same model executed in other ways; nothing here is needed to understand the decoder.

Runners (subclasses of model.Runner): cpu_runner.py, compiled.py, placement.py (several devices), parallel.py and
sharding.py (several processes). Layers: linears.py, quantized_weight.py, cpu_attention.py, and the kernels that they
call: kernels.py and cpp/. Also runtime.py and nonfinite.py.
"""
