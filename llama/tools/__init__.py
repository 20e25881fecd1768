"""Work on a checkpoint or the machine: convert, quantize, verify, plan, doctor, benchmark, evaluate."""
