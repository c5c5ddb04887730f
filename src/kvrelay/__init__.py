"""kvrelay: LLM serving with prefill and decode apart, the KV cache handed over like a baton."""

__version__ = "0.1.0"
