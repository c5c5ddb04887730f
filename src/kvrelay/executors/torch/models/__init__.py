"""The models: one decoder that covers every supported family, and the reading of its weights."""
