"""What two scripted servers know of each other's KV. Each checks the requests that its kind of server would check."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from tests.patience import PATIENCE_S

Body = dict[str, Any]


@dataclass
class VllmExchange:
    """Of servers with vLLM's NIXL connector: the prefill server keeps blocks until the decode server has them."""

    kept: dict[str, list[int]] = field(default_factory=dict)
    num_prefilled: int = 0
    num_fetched: int = 0
    num_local: int = 0
    num_discarded: int = 0
    """Fetched by a request of one token, which only frees the blocks."""
    errors: list[str] = field(default_factory=list)
    is_held: bool = False
    """Prefills wait."""
    keeps_nothing: bool = False
    """The prefill server was started without a connector."""
    loses_kv: bool = False
    """The decode server cannot get the KV."""
    tail: int = 0
    """The prefill server drops so many tokens at the prompt's end, as vLLM does for recurrent layers."""

    async def take(self, body: Body) -> Body | None:
        params = body.get("kv_transfer_params")
        if params is None:
            self.num_local += len(body["prompt"]) > 1  # a single token is the question for the form of the answer
            return {}
        if params["do_remote_decode"]:
            return await self._prefill(body, params)
        return self._fetch(body, params)

    async def _prefill(self, body: Body, params: Body) -> Body:
        wanted = {"do_remote_decode": True, "do_remote_prefill": False}
        if {name: value for name, value in params.items() if value is not None} != wanted:
            self.errors.append(f"a prefill with {params}")
        if body["max_tokens"] != 1 or body["stream"] or "stream_options" in body or not body["ignore_eos"]:
            self.errors.append(f"no prefill: {body}")
        while self.is_held:
            await asyncio.sleep(0.005)
        if self.keeps_nothing:
            return {"kv_transfer_params": None}
        self.num_prefilled += 1
        name = f"cmpl-{self.num_prefilled}"
        self.kept[name] = body["prompt"]
        body["prompt"] = body["prompt"][: len(body["prompt"]) - self.tail]
        return {
            "kv_transfer_params": {
                "do_remote_prefill": True,
                "do_remote_decode": False,
                "remote_block_ids": [[self.num_prefilled]],
                "remote_engine_id": "engine of p",
                "remote_request_id": name,
                "remote_host": "127.0.0.1",
                "remote_port": 5600,
                "tp_size": 1,
                "remote_num_tokens": len(body["prompt"]),
            }
        }

    def _fetch(self, body: Body, params: Body) -> Body | None:
        kept = self.kept.pop(params["remote_request_id"], None)
        if kept is not None and not body["stream"] and len(body["prompt"]) == body["max_tokens"] == 1:
            self.num_discarded += 1
            return {}
        if kept != body["prompt"] or not params["do_remote_prefill"] or not params["remote_block_ids"]:
            self.errors.append(f"a fetch of {params} for {body['prompt']}, where {kept} is kept")
        if self.loses_kv:
            return None
        self.num_fetched += 1
        return {}


@dataclass
class SglangExchange:
    """Of a prefill server (``bootstrap_port`` 9001 of ``host``) and a decode server: neither answers before both were
    asked for one room."""

    host: str = "127.0.0.1"
    rooms: dict[int, list[Body]] = field(default_factory=dict)
    num_without_peer: int = 0
    errors: list[str] = field(default_factory=list)

    async def take(self, body: Body) -> Body | None:
        if body.get("bootstrap_host") == "2.2.2.2":
            self.num_without_peer += 1
            return {}
        if (body.get("bootstrap_host"), body.get("bootstrap_port")) != (self.host, 9001):
            self.errors.append(f"no bootstrap server: {body}")
            return None
        asked = self.rooms.setdefault(body["bootstrap_room"], [])
        asked.append(body)
        async with asyncio.timeout(PATIENCE_S):
            while len(asked) < 2:
                await asyncio.sleep(0.005)
        plain = [{name: each[name] for name in each if name not in ("stream", "stream_options")} for each in asked]
        if plain[0] != plain[1] or asked[0]["stream"] == asked[1]["stream"]:
            self.errors.append(f"the two requests differ: {asked}")
        return {}
