"""The evaluated load: its requests for servers, again and again with other tokens, and arrivals for the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from kvrelay.bench.formats import read_conversations
from kvrelay.bench.load.datasets import DEFAULT_VOCAB_SIZE, FIRST_ORDINARY_TOKEN
from kvrelay.bench.load.request import LoadClass, LoadRequest, random_arrivals
from kvrelay.bench.report.metrics import Outcome, RequestRecord
from kvrelay.errors import InvalidInputError
from kvrelay.simulate.arrival import Arrival, RecordedArrival
from kvrelay.simulate.loads import MAX_TOKENS

SHORTEST = 8
"""Tokens of a prompt or an answer that is not shortened further."""


class Point(msgspec.Struct, frozen=True):
    """How the load is sent: at ``rate`` requests per second with gamma gaps of shape ``burstiness``, or by
    ``concurrency`` clients of which each sends its next request after its answer; or, with ``idle_s``, nothing for so
    long. ``settings``: run-time settings ``disagg.*`` that are in force meanwhile. ``order``: as of ``--order``.
    ``shown``: case and point in the rows; None: the server's name, and this one's. ``has_phases``: rows tell the first
    tokens' phases, too."""

    name: str
    rate: float | None = None
    concurrency: int = 0
    burstiness: float = 1.0
    order: str | None = None
    settings: dict[str, str] = {}
    shown: tuple[str, str] | None = None
    has_phases: bool = False
    idle_s: float = 0.0


class EvaluatedLoad(msgspec.Struct, frozen=True):
    """``arrivals`` fit the model's context. ``num_shortened``: so many had to be shortened. ``vocab_size``: of the
    model; only as many ids are used as every vocabulary has."""

    arrivals: tuple[Arrival, ...]
    vocab_size: int
    context: int
    num_shortened: int = 0

    @property
    def mean_answer(self) -> float:
        return float(np.mean([one.answer_tokens for one in self.arrivals]))

    @property
    def mean_prompt(self) -> float:
        return float(np.mean([one.prompt_tokens for one in self.arrivals]))

    def requests(self, salt: int) -> Iterator[LoadRequest]:
        """Without end, in the load's order. Prompts share what they share in the load, within a round; those of other
        rounds and salts share nothing, so that no server finds the prompts of an earlier case in its cache."""
        num_ids = min(self.vocab_size, DEFAULT_VOCAB_SIZE) - FIRST_ORDINARY_TOKEN
        for turn in itertools.count():
            mixed = np.random.default_rng([salt, turn]).permutation(num_ids) + FIRST_ORDINARY_TOKEN
            for index, one in enumerate(self.arrivals):
                # A recording has the ids of its own vocabulary, and all of a prompt that was shortened.
                ids = np.asarray(one.prompt(index, num_ids))[: one.prompt_tokens] % num_ids
                prompt = tuple(mixed[ids].tolist())
                yield LoadRequest(prompt, one.answer_tokens, len(prompt), priority=one.priority)

    def at(self, point: Point, salt: int, num: int, number: int = 0) -> LoadClass:
        """``num`` requests as a server gets them at this point. Tokens depend on ``salt``, times on ``number``: as many
        have the same times for all points of a rate, and in proportion for other rates. The last one comes at
        ``num / rate``."""
        offsets = None
        if point.rate is not None:
            drawn = random_arrivals(np.random.default_rng([number, 1]), point.rate, point.burstiness)
            times = list(itertools.islice(drawn, num))
            offsets = iter([time_s * num / point.rate / times[-1] for time_s in times])
        return LoadClass("load", self.requests(salt), offsets, point.concurrency or None, num)

    def shortened(self, times: int, most: int = MAX_TOKENS) -> EvaluatedLoad:
        """With prompts and answers so many times as short, but for the shortest, and answers of at most ``most``."""
        return msgspec.structs.replace(
            self,
            arrivals=tuple(
                msgspec.structs.replace(
                    one,
                    prompt_tokens=_shorter(one.prompt_tokens, times),
                    answer_tokens=min(_shorter(one.answer_tokens, times), most),
                    hash_tokens=max(one.hash_tokens // times, 1),
                )
                for one in self.arrivals
            ),
        )


def _shorter(num_tokens: int, times: int) -> int:
    return max(num_tokens // times, min(num_tokens, SHORTEST))


def fitted(arrivals: Sequence[Arrival], vocab_size: int, context: int) -> EvaluatedLoad:
    """The load with prompts and answers that fit ``context`` tokens together; an answer has at most half of them."""
    found = []
    for one in arrivals:
        answer = min(one.answer_tokens, context // 2)
        prompt = min(one.prompt_tokens, context - answer - 1)
        found.append(msgspec.structs.replace(one, answer_tokens=answer, prompt_tokens=prompt))
    return EvaluatedLoad(tuple(found), vocab_size, context, sum(one != now for one, now in zip(arrivals, found)))


def conversations_load(path: Path, tokens_of: Callable[[str], tuple[int, ...]], like: EvaluatedLoad) -> EvaluatedLoad:
    """Each conversation of the file up to its last answer as a prompt, for the model of ``like``; at most as many as it
    has requests. Raises InvalidInputError for a file without an answer, or of another format."""
    found: list[Arrival] = []
    for one in read_conversations(path):
        *before, last = one.turns
        if last.role != "assistant" or not before or len(found) == len(like.arrivals):
            continue
        prompt, answer = tokens_of("\n".join(turn.content for turn in before)), len(tokens_of(last.content))
        if prompt and answer:
            found.append(RecordedArrival(time_s=0.0, prompt_tokens=len(prompt), answer_tokens=answer, token_ids=prompt))
    if not found:
        raise InvalidInputError(f"{path}: no conversation ends with an answer, so it is no load", param="dataset")
    return fitted(found, like.vocab_size, like.context)


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """An answered request of a measured run, in seconds: when it was sent, and how long its first and its last token
    took."""

    sent_s: float
    prompt_tokens: int
    answer_tokens: int
    ttft_s: float
    e2e_s: float


def sent_of(records: Sequence[RequestRecord]) -> list[Sent]:
    """The answered ones, by time of sending, from the first one's on."""
    good = sorted((one for one in records if one.outcome is Outcome.OK), key=lambda one: one.sent_ns)
    found = []
    for one in good:
        after_s, num_tokens = (one.sent_ns - good[0].sent_ns) / 1e9, max(one.output_tokens, 1)
        found.append(Sent(after_s, one.prompt_tokens, num_tokens, one.ttft_s or one.e2e_s, one.e2e_s))
    return found


def answered_per_s(sent: Sequence[Sent]) -> float:
    """Until the last answer, so that it counts answers which take longer than the sending; 0 without any."""
    return len(sent) / max(one.sent_s + one.e2e_s for one in sent) if sent else 0.0


def replayed(sent: Sequence[Sent], clients: int = 0) -> list[Arrival]:
    """The same requests for the simulator: at the same times, or with ``clients`` each after the answer of the one that
    its client sent before; then requests go round."""
    return [
        Arrival(
            time_s=0.0 if clients else one.sent_s,
            prompt_tokens=one.prompt_tokens,
            answer_tokens=one.answer_tokens,
            after=at - clients if 0 < clients <= at else None,
        )
        for at, one in enumerate(sent)
    ]
