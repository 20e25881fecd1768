"""Weights in few bits: schemes, block layouts, rounding."""
