"""The HTTP service: its routes, which fields each API takes, its description, and the parts put together."""
