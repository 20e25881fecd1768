"""Quantized weights: schemes, block layouts, rounding, packing."""
