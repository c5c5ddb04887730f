"""What each API does with each field of a request's body: the only place that decides it.

A field is *done* (the request's struct has it), *refused* (by name, with our name for the same or with the reason), or
*advice* (accepted; the answer is correct without it). Any other name is unknown. A field that another API does is
refused, never ignored. ``tools/field_table.py`` writes these tables into the documentation.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from kvrelay.errors import InvalidInputError
from kvrelay.frontend.anthropic import CountTokensRequest, MessagesRequest
from kvrelay.frontend.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationFields,
    TokenizeRequest,
)
from kvrelay.frontend.responses import InputTokensRequest, ResponsesRequest

_log = logging.getLogger(__name__)

_Rule = TypeVar("_Rule")
MAX_LOGGED = 1000
_MAX_HARMLESS_BYTES = 64
_NULL = b"null"
_EMPTY = frozenset({_NULL, b"false", b"[]", b"{}", b'""'})
"""Values that ask for nothing."""


class Ours(msgspec.Struct, frozen=True):
    """Our name for another server's field. An API that lacks our ``field`` refuses the other name without a hint.
    ``hint`` replaces the name in the message; without a field it holds for every API."""

    field: str = ""
    hint: str = ""

    def __str__(self) -> str:
        return self.hint or self.field


class Refusal(msgspec.Struct, frozen=True):
    """``reason`` completes "NAME is not supported"; empty: there is nothing more to say. ``harmless`` is a value that
    asks for nothing. Null and empty values never do, nor does false unless true is the harmless one."""

    reason: str = ""
    harmless: object = None


class FieldTable(msgspec.Struct, frozen=True):
    """The fields of one API; each name is in one of the four at most. ``renamed`` are refused with our name."""

    done: frozenset[str]
    renamed: Mapping[str, Ours]
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


def _by_name(*rows: tuple[str, _Rule]) -> dict[str, _Rule]:
    """Each row's names, separated by spaces, with its rule."""
    return {name: rule for names, rule in rows for name in names.split()}


RENAMED = _by_name(
    ("max_new_tokens max_output_tokens max_length n_predict num_predict", Ours("max_tokens")),
    ("min_new_tokens", Ours("min_tokens")),
    ("stop_sequences", Ours("stop")),
    ("repeat_penalty", Ours("repetition_penalty")),
    ("random_seed sampling_seed", Ours("seed")),
    ("num_return_sequences", Ours("n")),
    ("num_beams", Ours("n", "n, without beams")),
    ("stop_ids", Ours("stop_token_ids")),
    ("bad_words_ids", Ours("bad_words")),
    ("do_sample", Ours("temperature", "temperature, 0 for greedy")),
    ("grammar", Ours("structured_outputs", "structured_outputs.grammar")),
    ("schema output_format", Ours("response_format")),
    ("functions", Ours("tools")),
    ("function_call", Ours("tool_choice")),
    ("extra_key", Ours("cache_salt")),
    ("no_stop_trim", Ours("include_stop_str_in_output")),
    ("return_prompt_token_ids", Ours("return_token_ids")),
    ("thinking", Ours("chat_template_kwargs")),
    ("betas", Ours(hint="the header anthropic-beta")),
    ("request_id rid", Ours(hint="the header x-request-id")),
    ("input_ids", Ours(hint="/v1/completions with token ids as prompt")),
)
"""Other servers' names, and ours for the same."""

_TEXT_ONLY, _WHOLE = "only text is served", "send the whole conversation as input"
REFUSED = _by_name(
    (
        "moderation access_programs logits_processors vllm_xargs watermarking enable_response_messages "
        "return_hidden_states return_routed_experts task custom_logit_processor custom_params min_p_decay",
        Refusal(),
    ),
    ("routed_experts_prompt_start routed_experts_start_len", Refusal(harmless=0)),
    ("spaces_between_special_tokens", Refusal(harmless=True)),
    (
        "audio image mm_processor_kwargs media_io_kwargs images_config max_dynamic_patch min_dynamic_patch "
        "use_audio_in_video",
        Refusal(_TEXT_ONLY),
    ),
    ("modalities", Refusal(_TEXT_ONLY, harmless=["text"])),
    ("suffix", Refusal("a prompt is only continued at its end")),
    ("web_search_options", Refusal("there are no tools of the server's own")),
    ("mcp_servers", Refusal("call them in the client, as tools")),
    ("use_beam_search early_stopping", Refusal("there are no beams")),
    ("length_penalty", Refusal("there are no beams", harmless=1)),
    ("prompt_embeds", Refusal("a prompt is text or token ids")),
    ("documents", Refusal("send them in a message")),
    ("chat_template", Refusal("the checkpoint's own is used")),
    ("guided_whitespace_pattern", Refusal("the model chooses white space, within JSON's bounds")),
    ("structural_tag", Refusal("use tools or a grammar")),
    ("stop_regex", Refusal("use stop, or a grammar")),
    ("kv_transfer_params ec_transfer_params", Refusal("the router chooses the workers")),
    ("thinking_token_budget", Refusal("max_tokens bounds the answer with its reasoning", harmless=-1)),
    ("include_reasoning", Refusal("a reasoning parser separates it, and it is always returned", harmless=True)),
    ("stream_reasoning", Refusal("a stream has the reasoning as it comes", harmless=True)),
    ("truncation_side", Refusal("truncate_prompt_tokens keeps the last tokens", harmless="left")),
    ("logprob_token_ids", Refusal("ask for logprobs")),
    ("return_token_offsets", Refusal("logprobs have text_offset")),
    ("return_prompt_text", Refusal("return_token_ids returns the prompt's tokens")),
    ("return_cached_tokens_details", Refusal("usage has prompt_tokens_details")),
    ("return_meta_info", Refusal("usage and the headers have it")),
    ("repetition_detection", Refusal("use repetition_penalty")),
    ("dry_multiplier no_repeat_ngram_size", Refusal("use repetition_penalty", harmless=0)),
    ("typical_p tfs", Refusal("use top_p or min_p", harmless=1)),
    ("top_a mirostat", Refusal("use top_p or min_p", harmless=0)),
    ("lora_path lora_request", Refusal("an adapter is a model of its own; name it in model")),
    ("session_params container thread", Refusal("nothing is kept between requests")),
    ("previous_input_messages previous_response", Refusal(_WHOLE)),
    ("previous_response_id", Refusal("no response is kept; send the whole conversation as input")),
    ("conversation", Refusal("no conversation is kept; send all of it as input")),
    ("compaction context_management", Refusal("send as much of the conversation as fits")),
    ("truncation", Refusal("send as much of the conversation as fits", harmless="disabled")),
    ("background", Refusal("a response runs while its client waits for it")),
    ("fallbacks", Refusal("one model answers")),
    ("inference_geo", Refusal("the server does not know where it runs")),
    ("speed", Refusal("there is one speed", harmless="standard")),
    ("personality", Refusal("describe it in the instructions")),
)
"""Fields that change an answer and that no API here does."""

ADVICE = frozenset(
    _by_name(
        (
            "service_tier store metadata user verbosity prediction prompt_cache_key prompt_cache_options "
            "prompt_cache_retention safety_identifier guided_decoding_backend separate_reasoning cache_control "
            "session_id custom_labels stream_interval return_mm_kwargs diagnostics user_profile_id workspace_id "
            "billing_policy fallback_credit_token bootstrap_host bootstrap_port bootstrap_room routed_dp_rank "
            "data_parallel_rank disagg_prefill_dp_rank ngram_corpus_id",
            None,
        )
    )
)
"""Hints to the server: the answer does not depend on them."""


def _table(
    kind: type[msgspec.Struct],
    renamed: Mapping[str, Ours] | None = None,
    refused: Mapping[str, Refusal] | None = None,
    advice: frozenset[str] = frozenset(),
) -> FieldTable:
    """The API's struct decides first, then its own entries, then the common tables."""
    done = frozenset(kind.__struct_fields__)
    renamed, refused = renamed or {}, refused or {}
    own = renamed.keys() | refused.keys() | advice
    renamed = {
        name: ours
        for name, ours in {**RENAMED, **renamed}.items()
        if name not in done and (not ours.field or ours.field in done)
    }
    common = {name: refusal for name, refusal in REFUSED.items() if name not in own}
    refused = {name: refusal for name, refusal in {**common, **refused}.items() if name not in done}
    advice = (ADVICE - own | advice) - done
    settled = done | renamed.keys() | refused.keys() | advice
    foreign = dict.fromkeys((_ALL_DONE | RENAMED.keys()) - settled, Refusal("this API does not have it"))
    return FieldTable(done, renamed, refused | foreign, advice)


_KINDS: tuple[type[msgspec.Struct], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    ResponsesRequest,
    InputTokensRequest,
    MessagesRequest,
    CountTokensRequest,
    TokenizeRequest,
)
_ALL_DONE = frozenset(name for kind in _KINDS for name in kind.__struct_fields__) - ADVICE
_MESSAGES_RENAMED = _by_name(
    ("max_completion_tokens", Ours("max_tokens")),
    ("stop", Ours("stop_sequences")),
    ("response_format schema output_format", Ours("output_config", "output_config.format")),
    ("reasoning_effort", Ours("output_config", "output_config.effort")),
    ("instructions", Ours("system")),
    ("input prompt", Ours("messages")),
)
_RESPONSES_RENAMED = _by_name(
    ("max_tokens max_completion_tokens max_new_tokens max_length n_predict num_predict", Ours("max_output_tokens")),
    ("messages", Ours("input")),
    ("system", Ours("instructions")),
    ("schema output_format response_format", Ours("text", "text.format")),
    ("reasoning_effort thinking", Ours("reasoning", "reasoning.effort")),
)
_RESPONSES_REFUSED = {"prompt": Refusal("no prompt template is kept; send instructions and input")}
_SAMPLING = frozenset(GenerationFields.__struct_fields__) - {"model", "add_special_tokens", "truncate_prompt_tokens"}
"""Fields that do not change the prompt's tokens."""

TABLES: Mapping[type[msgspec.Struct], FieldTable] = {
    CompletionRequest: _table(
        CompletionRequest,
        _by_name(
            ("max_completion_tokens", Ours("max_tokens")),
            ("top_logprobs", Ours("logprobs", "logprobs, a number")),
            ("messages", Ours(hint="/v1/chat/completions")),
            ("input", Ours("prompt")),
        ),
    ),
    ChatCompletionRequest: _table(
        ChatCompletionRequest,
        _by_name(
            ("prompt input instructions", Ours("messages")), ("system", Ours("messages", "a message of role system"))
        ),
    ),
    ResponsesRequest: _table(ResponsesRequest, _RESPONSES_RENAMED, _RESPONSES_REFUSED, frozenset({"stream_options"})),
    InputTokensRequest: _table(
        InputTokensRequest, _RESPONSES_RENAMED, _RESPONSES_REFUSED, frozenset(ResponsesRequest.__struct_fields__)
    ),
    MessagesRequest: _table(MessagesRequest, _MESSAGES_RENAMED),
    CountTokensRequest: _table(
        CountTokensRequest, _MESSAGES_RENAMED, advice=frozenset(MessagesRequest.__struct_fields__)
    ),
    TokenizeRequest: _table(TokenizeRequest, {"input": Ours("prompt", "prompt or messages")}, advice=_SAMPLING),
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
