"""Tools for checkpoints and machines: convert, quantize, verify, plan, doctor (facts, selftest), benchmark, evaluate."""
