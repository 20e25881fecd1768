"""More ways to generate than generate.py: batches, speculative decoding, sessions, answers as text."""
