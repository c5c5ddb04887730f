"""Agents of a chaos run: sessions of turns with tools between them, while workers are killed, frozen and drained.

Each turn repeats the conversation, and its answer is known. Half of the agents have a key of their own that lies: it
promises to be back, and leaves; it ends a session, and goes on with it; it asks for prefetches, and leaves; each of its
tools has a new name.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from tests.chaos.answers import FIRST_PLAIN_TOKEN, KnownPrompt, Verdict
from tests.chaos.client import ChaosClient
from tests.chaos.recency import Return

FIRST_LEN, MAX_LEN = (90, 250), 600
"""Tokens of a session's first prompt, and of its last one."""
RESULT_LEN, MAX_ANSWER = (10, 60), 30
TOOLS_S = (0.1, 0.6, 2.0)
"""Medians of the tools' times."""
MAX_TOOL_S = 8.0
DAY_S = 86400.0
P_LEAVES = 0.5
"""How likely it is that a liar leaves instead of returning."""
P_PREFETCHES = 0.3
"""How likely it is that an honest one asks for a prefetch before its turn. A liar always does, and may then leave."""


class Key(enum.StrEnum):
    """Of which API key a session is."""

    HONEST = "honest"
    LIAR = "liar"


class Agents:
    """``answered`` gives a prompt with its answer. ``api_keys``: by name, as clients send them."""

    def __init__(
        self,
        client: ChaosClient,
        answered: Callable[[KnownPrompt], KnownPrompt],
        api_keys: dict[Key, str],
        vocab_size: int,
    ) -> None:
        self._client, self._answered, self._api_keys = client, answered, api_keys
        self._vocab_size = vocab_size
        self._lies = itertools.count()
        self.returns: dict[Key, list[Return]] = {key: [] for key in Key}
        """Turns that were answered, but for the first of each session."""
        self.verdicts = {key: Counter[Verdict]() for key in Key}

    async def keep_working(self, number: int, seed: int, stop: asyncio.Event) -> None:
        """One session after the other, until ``stop``."""
        rng = random.Random(f"{seed} agent {number}")
        key = Key.LIAR if number % 2 else Key.HONEST
        while not stop.is_set():
            await self._session(rng, key, stop)

    async def _session(self, rng: random.Random, key: Key, stop: asyncio.Event) -> None:
        history = self._tokens(rng, FIRST_LEN)
        num_repeated, before = 0, None
        while len(history) <= MAX_LEN and not stop.is_set():
            tool = rng.randrange(len(TOOLS_S))
            hints = {"tool": f"tool {tool}"} if key is Key.HONEST else self._lie(rng)
            prompt = KnownPrompt(
                history, rng.randint(1, MAX_ANSWER), stream=rng.random() < 0.8, hints=hints, api_key=self._api_keys[key]
            )
            prompt = self._answered(prompt)
            record = await self._client.ask(prompt)
            self.verdicts[key][record.verdict] += 1
            if before is not None and record.verdict is Verdict.RIGHT:
                self.returns[key].append(Return(before, record, num_repeated))
            if key is Key.LIAR:
                await self._prefetch(history, key)
                if rng.random() < P_LEAVES:
                    return
            num_repeated, before = len(history) + len(prompt.answer), record
            history = history + prompt.answer + self._tokens(rng, RESULT_LEN)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), min(TOOLS_S[tool] * rng.lognormvariate(0.0, 0.6), MAX_TOOL_S))
            if key is Key.HONEST and rng.random() < P_PREFETCHES:
                await self._prefetch(history, key)

    async def _prefetch(self, history: tuple[int, ...], key: Key) -> None:
        prompt = KnownPrompt(history, 1, stream=False, hints={"prefetch": True}, api_key=self._api_keys[key])
        self.verdicts[key][(await self._client.ask(prompt)).verdict] += 1

    def _lie(self, rng: random.Random) -> dict[str, object]:
        lie = next(self._lies)
        return rng.choice([{"retain_s": DAY_S}, {"tool": f"tool number {lie}", "retain_s": DAY_S}, {"release": True}])

    def _tokens(self, rng: random.Random, lengths: tuple[int, int]) -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_PLAIN_TOKEN, self._vocab_size) for _ in range(rng.randint(*lengths)))
