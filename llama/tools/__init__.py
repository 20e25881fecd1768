"""Tools for checkpoints and machines: convert and quantize, verify, plan, doctor, selftest, benchmark, perplexity."""
