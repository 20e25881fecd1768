"""What a command does with whole checkpoints: convert, quantize, verify, plan, doctor, benchmark, evaluate."""
