"""The same model executed in other ways; nothing here is needed to understand the decoder.

Runners (subclasses of model.Runner): compiled.py, cuda_graphs.py, fused.py (Triton), placement.py (several devices),
parallel.py and sharding.py (several processes). Layers: linears.py, quantized_weight.py, cpu_attention.py,
and the kernels they call: kernels.py and cpp/, triton_kernels.py. Also runtime.py and nonfinite.py.
"""
