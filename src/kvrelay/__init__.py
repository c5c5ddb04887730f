"""kvrelay: LLM serving with prefill and decode apart, the KV cache handed over like a baton.

``LLM`` and ``AsyncLLM`` run it inside a Python program; they are imported at first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvrelay.version import __version__

if TYPE_CHECKING:
    from kvrelay.llm import LLM, AsyncLLM, CompletionOutput, RequestOutput, SamplingParams, TextDelta


__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams", "TextDelta", "__version__"]


def __getattr__(name: str) -> object:
    """Every room imports this package: what is heavy must wait until it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvrelay import llm

    return getattr(llm, name)
