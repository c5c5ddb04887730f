"""The decode side of a worker: requests in, tokens out, hand-offs received."""
