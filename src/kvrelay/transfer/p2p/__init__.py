"""KV between peers over two-rank process groups, with control over ZMQ. The door is ``transport.P2pTransport``."""
