"""The former name of ``engines.connector``, which a plain ``vllm serve`` may still be started with."""
