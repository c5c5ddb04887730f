"""KV between workers of one host, through memory that both have mapped. The door is ``transport.ShmTransport``."""
