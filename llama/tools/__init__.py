"""Tools for complete checkpoints and machines: convert, quantize, verify, plan, doctor, benchmark, evaluate."""
