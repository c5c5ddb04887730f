"""Parts measured in this process, without a server: the engine, the router and its policies, the KV data plane."""
