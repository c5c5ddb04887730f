"""What each API does with each field of a request's body: the only place that decides it.

A field is *done* (the request's struct has it), *refused* (by name, with our name for the same or with the reason), or
*advice* (accepted; the answer is correct without it). Any other name is unknown. A field that another API does is
refused, never ignored. ``tools/field_table.py`` writes these tables into the documentation.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvrelay.errors import InvalidInputError
from kvrelay.frontend.anthropic.requests import CountTokensRequest, MessagesRequest
from kvrelay.frontend.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
)
from kvrelay.frontend.responses.requests import ResponsesRequest

_log = logging.getLogger(__name__)

MAX_LOGGED = 1000
_MAX_HARMLESS_BYTES = 64
_NULL = b"null"
_EMPTY = frozenset({_NULL, b"false", b"[]", b"{}", b'""'})
"""Values that ask for nothing."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """``reason`` completes "NAME is not supported"; empty: there is nothing more to say. ``harmless`` is a value that
    asks for nothing. Null and empty values never do, nor does false unless true is the harmless one."""

    reason: str = ""
    harmless: object = None


@dataclass(frozen=True, slots=True)
class FieldTable:
    """The fields of one API; each name is in one of the four at most. ``renamed`` are refused with our name."""

    done: frozenset[str]
    renamed: Mapping[str, str]
    refused: Mapping[str, Refusal]
    advice: frozenset[str]

    @property
    def names(self) -> frozenset[str]:
        return self.done | self.renamed.keys() | self.refused.keys() | self.advice

    def check(self, name: str, value: bytes) -> None:
        """Raises InvalidInputError if a field of this name and JSON value is refused."""
        if name in self.renamed and value != _NULL:
            raise InvalidInputError(f"{name} is not a field here; use {self.renamed[name]}", param=name)
        refusal = self.refused.get(name)
        if refusal is None or (value in _EMPTY and not (value == b"false" and refusal.harmless is True)):
            return
        is_short = len(value) <= _MAX_HARMLESS_BYTES
        if refusal.harmless is not None and is_short and msgspec.json.decode(value) == refusal.harmless:
            return
        reason = f": {refusal.reason}" if refusal.reason else ""
        raise InvalidInputError(f"{name} is not supported{reason}", param=name)


RENAMED = {
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_length": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "repeat_penalty": "repetition_penalty",
    "random_seed": "seed",
    "sampling_seed": "seed",
    "num_return_sequences": "n",
    "stop_ids": "stop_token_ids",
    "bad_words_ids": "bad_words",
    "num_beams": "n, without beams",
    "do_sample": "temperature, 0 for greedy",
    "grammar": "structured_outputs.grammar",
    "schema": "response_format",
    "output_format": "response_format",
    "betas": "the header anthropic-beta",
    "functions": "tools",
    "function_call": "tool_choice",
    "extra_key": "cache_salt",
    "no_stop_trim": "include_stop_str_in_output",
    "return_prompt_token_ids": "return_token_ids",
    "request_id": "the header x-request-id",
    "rid": "the header x-request-id",
    "input_ids": "/v1/completions with token ids as prompt",
    "thinking": "chat_template_kwargs",
}
"""Other servers' names, and ours for the same: a field, or a hint that does not begin with a field's name. Where an API
has no such field, the name is refused without it."""

_BEAMS = "there are no beams"
_IMAGES = "only text is served"
_KEPT = "nothing is kept between requests"
_ROUTED = "the router chooses the workers"

REFUSED = {
    # OpenAI
    "suffix": Refusal("a prompt is only continued at its end"),
    "audio": Refusal(_IMAGES),
    "modalities": Refusal("only text is served", harmless=["text"]),
    "moderation": Refusal(),
    "web_search_options": Refusal("there are no tools of the server's own"),
    "image": Refusal(_IMAGES),
    "access_programs": Refusal(),
    # vLLM
    "use_beam_search": Refusal(_BEAMS),
    "length_penalty": Refusal(_BEAMS, harmless=1),
    "early_stopping": Refusal(_BEAMS),
    "logits_processors": Refusal(),
    "prompt_embeds": Refusal("a prompt is text or token ids"),
    "mm_processor_kwargs": Refusal(_IMAGES),
    "media_io_kwargs": Refusal(_IMAGES),
    "documents": Refusal("send them in a message"),
    "chat_template": Refusal("the checkpoint's own is used"),
    "guided_whitespace_pattern": Refusal("the model chooses white space, within JSON's bounds"),
    "structural_tag": Refusal("use tools or a grammar"),
    "kv_transfer_params": Refusal(_ROUTED),
    "ec_transfer_params": Refusal(_ROUTED),
    "thinking_token_budget": Refusal("max_tokens bounds the answer with its reasoning", harmless=-1),
    "include_reasoning": Refusal("a reasoning parser separates it, and it is always returned", harmless=True),
    "spaces_between_special_tokens": Refusal(harmless=True),
    "truncation_side": Refusal("truncate_prompt_tokens keeps the last tokens", harmless="left"),
    "logprob_token_ids": Refusal("ask for logprobs"),
    "return_token_offsets": Refusal("logprobs have text_offset"),
    "return_prompt_text": Refusal("return_token_ids returns the prompt's tokens"),
    "routed_experts_prompt_start": Refusal(harmless=0),
    "vllm_xargs": Refusal(),
    "repetition_detection": Refusal("use repetition_penalty"),
    "watermarking": Refusal(),
    "enable_response_messages": Refusal(),
    "previous_input_messages": Refusal("send the whole conversation as input"),
    "previous_response": Refusal("send the whole conversation as input"),
    # SGLang
    "lora_path": Refusal("a model is served as it is"),
    "session_params": Refusal(_KEPT),
    "stop_regex": Refusal("use stop, or a grammar"),
    "return_hidden_states": Refusal(),
    "return_routed_experts": Refusal(),
    "routed_experts_start_len": Refusal(harmless=0),
    "return_cached_tokens_details": Refusal("usage has prompt_tokens_details"),
    "return_meta_info": Refusal("usage and the headers have it"),
    "stream_reasoning": Refusal("a stream has the reasoning as it comes", harmless=True),
    "task": Refusal(),
    "custom_logit_processor": Refusal(),
    "custom_params": Refusal(),
    "images_config": Refusal(_IMAGES),
    "max_dynamic_patch": Refusal(_IMAGES),
    "min_dynamic_patch": Refusal(_IMAGES),
    "use_audio_in_video": Refusal(_IMAGES),
    "bootstrap_host": Refusal(_ROUTED),
    "bootstrap_port": Refusal(_ROUTED),
    "bootstrap_room": Refusal(_ROUTED),
    "routed_dp_rank": Refusal(_ROUTED),
    "data_parallel_rank": Refusal(_ROUTED),
    "ngram_corpus_id": Refusal(),
    # llama.cpp, TGI and others
    "typical_p": Refusal("use top_p or min_p", harmless=1),
    "top_a": Refusal("use top_p or min_p", harmless=0),
    "tfs": Refusal("use top_p or min_p", harmless=1),
    "mirostat": Refusal("use top_p or min_p", harmless=0),
    "min_p_decay": Refusal(),
    "dry_multiplier": Refusal("use repetition_penalty", harmless=0),
    "no_repeat_ngram_size": Refusal("use repetition_penalty", harmless=0),
    "lora_request": Refusal("a model is served as it is"),
    # Anthropic
    "container": Refusal(_KEPT),
    "mcp_servers": Refusal("call them in the client, as tools"),
    "compaction": Refusal("send as much of the conversation as fits"),
    "fallbacks": Refusal("one model answers"),
    "thread": Refusal(_KEPT),
    "inference_geo": Refusal("the server does not know where it runs"),
    "speed": Refusal("there is one speed", harmless="standard"),
    # OpenAI's responses
    "previous_response_id": Refusal("no response is kept; send the whole conversation as input"),
    "conversation": Refusal("no conversation is kept; send all of it as input"),
    "background": Refusal("a response runs while its client waits for it"),
    "context_management": Refusal("send as much of the conversation as fits"),
    "truncation": Refusal("send as much of the conversation as fits", harmless="disabled"),
}
"""Fields that no API here does."""

ADVICE = frozenset(
    {
        "service_tier", "store", "metadata", "user", "verbosity", "prediction", "prompt_cache_key",
        "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "guided_decoding_backend",
        "separate_reasoning", "cache_control", "session_id", "custom_labels", "disagg_prefill_dp_rank",
        "stream_interval", "return_mm_kwargs", "diagnostics", "user_profile_id", "workspace_id", "billing_policy",
        "fallback_credit_token",
    }
)  # fmt: skip
"""Hints: the answer does not depend on them."""


def _table(
    kind: type[msgspec.Struct],
    renamed: Mapping[str, str] | None = None,
    refused: Mapping[str, Refusal] | None = None,
    advice: frozenset[str] = frozenset(),
) -> FieldTable:
    """The common tables, and this API's own entries. An API's struct goes before both."""
    done = frozenset(kind.__struct_fields__)
    own = (renamed or {}).keys() | (refused or {}).keys() | advice
    renamed = {name: ours for name, ours in {**RENAMED, **(renamed or {})}.items() if name not in done}
    renamed = {name: ours for name, ours in renamed.items() if _first_name(ours) in done | _NO_NAMES}
    common = {name: refusal for name, refusal in REFUSED.items() if name not in own}
    refused = {name: refusal for name, refusal in {**common, **(refused or {})}.items() if name not in done}
    advice = (ADVICE - own | advice) - done
    foreign = {name: Refusal("this API does not have it") for name in _ALL_DONE | RENAMED.keys()}
    settled = done | renamed.keys() | refused.keys() | advice
    refused |= {name: refusal for name, refusal in foreign.items() if name not in settled}
    return FieldTable(done, renamed, refused, advice)


def _first_name(ours: str) -> str:
    return re.split(r"\W", ours, maxsplit=1)[0]


_NO_NAMES = frozenset({"", "a", "the"})
"""How a hint may begin that does not name a field."""
_KINDS: tuple[type[msgspec.Struct], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    ResponsesRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
)
_ALL_DONE = frozenset(name for kind in _KINDS for name in kind.__struct_fields__) - ADVICE
_LENGTH = {name: "max_output_tokens" for name, ours in RENAMED.items() if ours == "max_tokens"}
_MESSAGES_RENAMED = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "schema": "output_config.format",
    "output_format": "output_config.format",
    "instructions": "system",
    "reasoning_effort": "output_config.effort",
}
_PROMPT = {"input": "messages", "prompt": "messages"}
_SAMPLING = frozenset(GenerationFields.__struct_fields__) - {"model", "add_special_tokens", "truncate_prompt_tokens"}
"""Fields that do not change the prompt's tokens."""

TABLES: Mapping[type[msgspec.Struct], FieldTable] = {
    CompletionRequest: _table(
        CompletionRequest,
        {
            "max_completion_tokens": "max_tokens",
            "top_logprobs": "logprobs, a number",
            "messages": "/v1/chat/completions",
            "input": "prompt",
        },
    ),
    ChatCompletionRequest: _table(
        ChatCompletionRequest,
        {"prompt": "messages", "input": "messages", "system": "a message of role system", "instructions": "messages"},
    ),
    ResponsesRequest: _table(
        ResponsesRequest,
        {
            **_LENGTH,
            "max_tokens": "max_output_tokens",
            "max_completion_tokens": "max_output_tokens",
            "messages": "input",
            "system": "instructions",
            "schema": "text.format",
            "output_format": "text.format",
            "response_format": "text.format",
            "reasoning_effort": "reasoning.effort",
            "thinking": "reasoning.effort",
        },
        {"prompt": Refusal("no prompt template is kept; send instructions and input")},
        frozenset({"stream_options"}),
    ),
    MessagesRequest: _table(MessagesRequest, {**_MESSAGES_RENAMED, **_PROMPT}),
    CountTokensRequest: _table(
        CountTokensRequest,
        {**_MESSAGES_RENAMED, **_PROMPT},
        advice=frozenset(MessagesRequest.__struct_fields__) - frozenset(CountTokensRequest.__struct_fields__),
    ),
    TokenizeRequest: _table(TokenizeRequest, {"input": "prompt or messages"}, advice=_SAMPLING),
    DetokenizeRequest: _table(DetokenizeRequest),
}
"""By kind of body."""


class RequestFields:
    """Checks the names in bodies. ``mode``, for unknown ones: ``refuse``, ``warn`` or ``ignore``. Thread-safe."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def check(self, kind: type[msgspec.Struct], given: Mapping[str, msgspec.Raw]) -> None:
        """Raises InvalidInputError for a field that is refused in a body of this ``kind``."""
        table = TABLES[kind]
        if given.keys() <= table.done:
            return
        for name, value in given.items():
            if name in table.done:
                continue
            table.check(name, bytes(value))
            if name in table.advice or (name in table.refused and bytes(value) != _NULL):
                self._log_once(f"the field {name} is accepted and has no effect")
            elif name not in table.renamed and name not in table.refused:
                self._unknown(name[:64])

    def _unknown(self, name: str) -> None:
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
