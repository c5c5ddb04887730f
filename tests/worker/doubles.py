"""Two workers in one process: mock engines, in-memory control plane, loopback RPC and loopback KV transfer."""
