"""A worker: an engine with a place in the cluster, its request plane, and both sides of the hand-off."""
