"""The composition root: which process holds what, and the starting and supervising of processes."""
