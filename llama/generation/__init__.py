"""More ways to generate than the loop in generate.py: batches, speculative decoding, sessions, answers as text."""
