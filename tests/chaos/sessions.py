"""Agents of a chaos run: sessions of turns with tools between them, while workers are killed, frozen and drained.

Each turn repeats the conversation, and its answer is known. Half of the agents have a key of their own that lies: it
promises to be back, and leaves; it ends a session, and goes on with it; each of its tools has a new name.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from tests.chaos.answers import FIRST_PLAIN_TOKEN, KnownPrompt, Verdict
from tests.chaos.client import ChaosClient

FIRST_LEN, MAX_LEN = (90, 250), 600
"""Tokens of a session's first prompt, and of its last one."""
RESULT_LEN, MAX_ANSWER = (10, 60), 30
TOOLS_S = (0.1, 0.6, 2.0)
"""Medians of the tools' times."""
MAX_TOOL_S = 8.0
DAY_S = 86400.0
P_LEAVES = 0.5
"""How likely it is that a liar leaves instead of returning."""


class Key(enum.StrEnum):
    """Of which API key a session is."""

    HONEST = "honest"
    LIAR = "liar"


@dataclass(slots=True)
class Found:
    """``returns``: turns that were answered, but for the first of each session. ``repeated``: tokens of these that the
    session had before; ``cached``: those of them whose KV was found."""

    returns: int = 0
    repeated: int = 0
    cached: int = 0


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
        self.found = {key: Found() for key in Key}
        self.verdicts = {key: Counter[Verdict]() for key in Key}

    async def keep_working(self, number: int, seed: int, stop: asyncio.Event) -> None:
        """One session after the other, until ``stop``."""
        rng = random.Random(f"{seed} agent {number}")
        key = Key.LIAR if number % 2 else Key.HONEST
        while not stop.is_set():
            await self._session(rng, key, stop)

    async def _session(self, rng: random.Random, key: Key, stop: asyncio.Event) -> None:
        history = self._tokens(rng, FIRST_LEN)
        num_repeated = 0
        while len(history) <= MAX_LEN and not stop.is_set():
            tool = rng.randrange(len(TOOLS_S))
            hints = {"tool": f"tool {tool}"} if key is Key.HONEST else self._lie(rng)
            prompt = KnownPrompt(
                history, rng.randint(1, MAX_ANSWER), stream=rng.random() < 0.8, hints=hints, api_key=self._api_keys[key]
            )
            prompt = self._answered(prompt)
            record = await self._client.ask(prompt)
            self.verdicts[key][record.verdict] += 1
            if num_repeated and record.verdict is Verdict.RIGHT:
                found = self.found[key]
                found.returns += 1
                found.repeated += num_repeated
                found.cached += min(record.num_cached, num_repeated)
            if key is Key.LIAR and rng.random() < P_LEAVES:
                return
            num_repeated = len(history) + len(prompt.answer)
            history = history + prompt.answer + self._tokens(rng, RESULT_LEN)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), min(TOOLS_S[tool] * rng.lognormvariate(0.0, 0.6), MAX_TOOL_S))

    def _lie(self, rng: random.Random) -> dict[str, object]:
        lie = next(self._lies)
        return rng.choice([{"retain_s": DAY_S}, {"tool": f"tool number {lie}", "retain_s": DAY_S}, {"release": True}])

    def _tokens(self, rng: random.Random, lengths: tuple[int, int]) -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_PLAIN_TOKEN, self._vocab_size) for _ in range(rng.randint(*lengths)))
