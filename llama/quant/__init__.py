"""Quantization: schemes, rounding, and the block layouts of files (Q4_0, Q4_K, ...) and kernels."""
