"""For one release: where a plain ``vllm serve`` looked for the connector, which now works only in a worker's vLLM."""
