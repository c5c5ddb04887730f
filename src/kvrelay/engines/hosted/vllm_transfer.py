"""How two vLLMs with the NIXL connector exchange KV: what the prefilling one is asked, and what its answer says to the
other. For servers (``engines/openai``) and for vLLM in the worker (``engines/vllm``). Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvrelay.core.decoding import UNREADABLE
from kvrelay.engines.hosted.backend import AnswerError

Body = dict[str, Any]


class VllmTransfer:
    """Two ``vllm serve`` with ``--kv-transfer-config`` and its NIXL connector: the decode server pulls."""

    prefills_here = True

    def probe_fields(self) -> Body:
        return {}

    def prefill_body(self, body: Body) -> tuple[Body, bytes | None]:
        asked = {**one_answer(body), "max_tokens": 1, "ignore_eos": True}
        if asked.get("min_tokens"):
            asked["min_tokens"] = 1
        else:
            # The decode server ends the answer. They are kept if they are not to be sampled.
            asked.pop("stop_token_ids", None)
        none = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
        asked["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False, **none}
        return asked, None

    def params_of(self, answer: bytes) -> bytes:
        try:
            params = msgspec.json.decode(answer, type=_Prefilled).kv_transfer_params
        except UNREADABLE as exc:
            raise AnswerError(f"the prefill server's answer is no completion: {exc}") from exc
        if not params:
            raise AnswerError("the prefill server keeps no KV: start it with --kv-transfer-config and NixlConnector")
        return msgspec.json.encode(params)

    def decode_body(self, body: Body, kv_transfer_params: bytes) -> Body:
        try:
            params = msgspec.json.decode(kv_transfer_params, type=dict[str, Any])
        except UNREADABLE as exc:
            raise AnswerError(f"the kv_transfer_params are no JSON object: {exc}") from exc
        if params.get("do_remote_prefill") is not True or not params.get("remote_block_ids"):
            raise AnswerError("the kv_transfer_params name no blocks of a prefill server")
        return {**body, "kv_transfer_params": params}

    def discard_body(self, model: str, kv_transfer_params: bytes) -> Body | None:
        # One block is fetched for any prompt. Then the connector reports that it has everything it needs.
        return self.decode_body({"model": model, "prompt": [1], "max_tokens": 1, "stream": False}, kv_transfer_params)


class _Computed(msgspec.Struct):
    remote_num_tokens: int = 0


class _Prefilled(msgspec.Struct):
    kv_transfer_params: dict[str, Any] | None = None


def stops_short(kv_transfer_params: bytes, num_tokens: int) -> bool:
    """Whether the prefilling vLLM has left the end of a prompt of ``num_tokens`` to the other one, as it does for
    recurrent layers and drafters that read ahead. Then its first token stands for one of the prompt's."""
    try:
        num_computed = msgspec.json.decode(kv_transfer_params, type=_Computed).remote_num_tokens
    except UNREADABLE:
        return False
    return 0 < num_computed < num_tokens


def one_answer(body: Body) -> Body:
    """The same request, answered in one piece."""
    asked = {**body, "stream": False}
    asked.pop("stream_options", None)
    return asked
