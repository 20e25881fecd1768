"""The machine around the program: cache folders, temporary files, limits, memory."""
