"""kvrelay inside a Python program, without a server or HTTP, but with the same engines, router and hand-off.

    from kvrelay import LLM, SamplingParams
    with LLM("./my-checkpoint", prefill=1, decode=1) as llm:
        for output in llm.generate(["Once upon a time"], SamplingParams(max_tokens=32)):
            print(output.text)

``LLM`` blocks; ``AsyncLLM`` runs on the caller's event loop and streams. Both hold an EmbeddedCluster: the workers and
the router of ``kvrelay serve`` in one process, joined by in-memory planes instead of NATS, ZMQ and NIXL.
"""

from kvrelay.llm.async_llm import AsyncLLM
from kvrelay.llm.llm import LLM
from kvrelay.llm.outputs import CompletionOutput, RequestOutput, TextDelta
from kvrelay.llm.params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "TextDelta"]
