"""The machine around the program: folders, temporary files, limits, memory."""
