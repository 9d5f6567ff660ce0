"""One client following one brief, in plain PyTorch: the reference for every engine."""
