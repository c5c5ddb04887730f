"""Fields of a body that no request struct has: other servers' names, hints, and unknown fields.

A field with an effect is honoured or refused. A hint is accepted: the answer is correct without it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvrelay.errors import InvalidInputError

_log = logging.getLogger(__name__)

OURS = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "num_return_sequences": "n",
    "stop_ids": "stop_token_ids",
    "bad_words_ids": "bad_words",
    "num_beams": "n, without beams",
    "do_sample": "temperature, 0 for greedy",
    "grammar": "structured_outputs.grammar",
    "schema": "response_format",
}
"""Other servers' names, and ours for the same."""

UNSUPPORTED = frozenset(
    {
        "length_penalty", "early_stopping", "logits_processors", "typical_p", "top_a", "tfs", "mirostat", "min_p_decay",
        "dry_multiplier", "guided_whitespace_pattern", "structural_tag", "prompt_embeds", "mm_processor_kwargs",
        "web_search_options", "lora_path", "lora_request", "kv_transfer_params", "return_hidden_states",
        "no_repeat_ngram_size", "thinking", "thinking_token_budget",
    }
)  # fmt: skip
"""Fields of other servers with effects that kvrelay does not support."""

ADVICE = frozenset(
    {
        "service_tier", "store", "metadata", "user", "verbosity", "prediction", "prompt_cache_key",
        "prompt_cache_retention", "safety_identifier", "guided_decoding_backend", "separate_reasoning", "cache_control",
    }
)  # fmt: skip
"""Accepted; the answer does not depend on it."""

MAX_LOGGED = 1000


@dataclass(frozen=True, slots=True)
class OtherNames:
    """Names that an API does not have: those with ``ours`` for the same, and the ``unsupported`` ones."""

    ours: Mapping[str, str]
    unsupported: frozenset[str]


OPENAI_NAMES = OtherNames(OURS, UNSUPPORTED)
"""Of completions and chats."""


class UnknownFields:
    """``mode``: ``refuse``, ``warn`` or ``ignore``. Thread-safe."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def check(self, given: Iterable[str], known: frozenset[str], names: OtherNames = OPENAI_NAMES) -> None:
        """Raises InvalidInputError for a refused field."""
        for name in given:
            if name in ADVICE:
                self._log_once(f"the field {name} is accepted and has no effect")
            elif name not in known:
                self._unknown(name[:64], names)

    def _unknown(self, name: str, names: OtherNames) -> None:
        if name in names.ours:
            raise InvalidInputError(f"{name} is not a field here; use {names.ours[name]}", param=name)
        if name in names.unsupported:
            raise InvalidInputError(f"{name} is not supported", param=name)
        if self._mode == "refuse":
            raise InvalidInputError(f"{name} is not a field of this request", param=name)
        if self._mode == "warn":
            self._log_once(f"the unknown field {name} is ignored")

    def _log_once(self, message: str) -> None:
        with self._lock:
            if message in self._logged or len(self._logged) >= MAX_LOGGED:
                return
            self._logged.add(message)
        _log.warning("%s (this is logged once)", message.encode("unicode_escape").decode())
