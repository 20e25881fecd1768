"""Tools for checkpoints and machines: convert, quantize, verify, plan, doctor, selftest, benchmark, evaluate."""
