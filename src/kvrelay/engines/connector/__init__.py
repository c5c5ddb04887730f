"""Connectors: code that runs inside another engine's processes and gives kvrelay its KV.

    kvrelay worker process                                  vLLM's engine process
    ledgers, transports ── staging pool (shared memory) ──> vllm.KvrelayConnector
                             [block][layer][K|V][head]       scheduler half: which tokens, and when
                                                             worker half: copies between staging pool and paged KV

The worker starts vLLM and says with each request which staging blocks it owns (``terms``); vLLM's answer tells that
they are filled, or read. So both processes need no protocol of their own. Only ``vllm`` imports vLLM.
"""
