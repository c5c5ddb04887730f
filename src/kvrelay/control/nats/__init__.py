"""The control plane on a NATS server with JetStream."""
