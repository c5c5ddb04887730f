"""The prefill side of a worker: prefills pulled, computed and handed over."""
