"""What generates with a model besides generate.py: batches, drafts, sessions, answers."""
