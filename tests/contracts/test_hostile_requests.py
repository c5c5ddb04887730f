"""No value that a request carries ends an engine: what a worker would decode and add ends with tokens or a refusal."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvrelay.config import EngineConfig, MockConfig, RunnerConfig, WorkerConfig
from kvrelay.core.clock import ManualClock
from kvrelay.core.handoff import HandoffId
from kvrelay.core.messages import PROTOCOL_VERSION, GenerateRequest, TokenOutput
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.core.token_ids import to_bytes
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engines.registry import build_executor
from kvrelay.errors import KvrelayError, ProtocolError
from kvrelay.executors.torch.checkpoints import make_model
from kvrelay.placement.cost import PlacementState
from kvrelay.rpc.wire import decode_message

ENGINE = EngineConfig(num_blocks=24, block_size=8, max_model_len=64, max_num_seqs=6, max_num_batched_tokens=48)
RUNNER = RunnerConfig(device="cpu", dtype="float32", attention_backend="torch", num_threads=1)
NUM_REQUESTS = {"mock": 1_500, "torch": 150}
NUM_REQUESTS_OF_MATRIX = {"mock": 90_000, "torch": 10_000}
MAX_BURST = 12

INTEGERS = (0, 1, 2, 3, 5, 20, 21, 63, 64, 65, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
NUMBERS = (0.0, -0.0, 5e-324, 1e-300, 1e-45, 1e-38, 1e-6, 1e-5, 0.5, 1 - 2**-53, 1.0, 2.0, 100.0, 1e38, 1e39, 1e300)
SPECIAL_NUMBERS = (float("nan"), float("inf"), float("-inf"), 3, "1", None, True)
GRAMMARS = (
    ("regex", "[ab]{1,3}"),
    ("regex", ""),
    ("regex", "("),
    ("json_schema", '{"enum":[1,true]}'),
    ("json_schema", "{"),
    ("lark", 'start: "a"+'),
    ("none", "x"),
)
SMALL = {"temperature", "top_p", "min_p"}


class Values:
    """Mostly sound values, so that many requests get far, with one or a few that are not."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._random = random.Random(seed)
        self._vocab_size = vocab_size

    def integer(self) -> Any:
        roll = self._random.random()
        if roll < 0.03:
            return self._random.choice(SPECIAL_NUMBERS)
        value = self._random.choice(INTEGERS)
        return -value if self._random.random() < 0.3 and value <= 2**63 else value

    def number(self) -> Any:
        if self._random.random() < 0.1:
            return self._random.choice(SPECIAL_NUMBERS)
        return self._random.choice(NUMBERS) * self._random.choice((1, 1, 1, -1))

    def token(self, wild: float = 0.02) -> Any:
        if self._random.random() < wild:
            edges = (self._vocab_size - 1, self._vocab_size, 2**31 - 1, 2**31, 2**32 - 1, -1, self.integer())
            return self._random.choice(edges)
        return self._random.randrange(min(self._vocab_size, 40))

    def tokens(self, longest: int, wild: float = 0.02) -> list[Any]:
        return [self.token(wild) for _ in range(self._random.randint(0, longest))]

    def sampling(self) -> dict[str, Any]:
        pick, count = self._random.choice, self._random.randint
        sound = {
            "max_tokens": count(1, 20),
            "min_tokens": count(0, 3),
            "temperature": pick((0.0, 0.0, 1e-5, 0.7, 100.0)),
            "top_k": pick((0, -1, 1, 2, 64, 65, 2**31 - 1)),
            "top_p": pick((1.0, 0.5, 1e-300, 5e-324)),
            "min_p": pick((0.0, 0.5, 1.0, 1e-300)),
            "repetition_penalty": pick((1.0, 1e-6, 100.0)),
            "presence_penalty": pick((0.0, -2.0, 2.0)),
            "frequency_penalty": pick((0.0, -2.0, 2.0)),
            "logit_bias": {self.token(0.0): pick((-100.0, 100.0, 0.0)) for _ in range(count(0, 4))} or None,
            "seed": pick((None, 0, -(2**63), 2**64 - 1, 7)),
            "stop_token_ids": self.tokens(3, 0.0),
            "ignore_eos": pick((True, False)),
            "logprobs": pick((None, None, 0, 1, 20)),
            "prompt_logprobs": pick((None, None, None, 0, 20)),
            "grammar": None if count(0, 9) else dict(zip(("kind", "source"), pick(GRAMMARS))),
            "cache_salt": pick((None, None, "s", "s" * 1024, "\0")),
        }
        wild = {
            "logit_bias": {self.token(0.3): self.number() for _ in range(count(1, 4))},
            "stop_token_ids": pick((self.tokens(4, 0.3), [1] * 1025, 3)),
            "ignore_eos": self.integer(),
            "grammar": self.integer(),
            "cache_salt": pick(("", "s" * 1025, 3)),
            "logprobs": self.integer(),
            "prompt_logprobs": self.integer(),
            "seed": self.integer(),
            "max_tokens": self.integer(),
            "min_tokens": self.integer(),
            "top_k": self.integer(),
        }
        values = {name: value for name, value in sound.items() if self._random.random() < 0.4}
        if self._random.random() < 0.5:
            name = pick(list(sound))
            values[name] = wild[name] if name in wild else self.number()
        return values

    def message(self, request_id: str) -> bytes:
        """As a frontend's frame; not always one that decodes."""
        prompt = self.tokens(60, 0.0)
        if self._random.random() < 0.1 and prompt:
            prompt[self._random.randrange(len(prompt))] = self._random.choice((self._vocab_size, 2**31, 2**32 - 1))
        body = {
            "type": "GenerateRequest",
            "request_id": request_id,
            "worker_id": "w",
            "prompt": to_bytes(prompt or [5]) if prompt or self._random.random() < 0.5 else b"",
            "sampling": self.sampling(),
        }
        more = {
            "output_token_ids": self.tokens(12),
            "priority": self.integer(),
            "tenant": self._random.choice(("", "a", "b")),
            "slo_ttft_ms": self.number(),
            "report_interval": self.integer(),
            "holder": ["other", self.integer()],
            "explain": True,
        }
        body |= {name: value for name, value in more.items() if self._random.random() < 0.15}
        return bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(body)

    def mode(self) -> dict[str, Any]:
        """How the worker adds it: mostly to be computed here."""
        roll = self._random.random()
        if roll < 0.1:
            return {"mode": PrefillMode.HANDOFF, "num_load_tokens": self._random.choice((0, 0, 8, 16, 7, -8, 2**40))}
        if roll < 0.2:
            return {
                "mode": PrefillMode.REMOTE,
                "handoff_number": self._random.choice((0, 2**62 + self._random.getrandbits(61))),
            }
        return {}


class Run:
    """An engine that gets bursts of requests, and what became of them. The other half of each hand-off is played by
    ``answer_handoffs``."""

    def __init__(self, core: EngineCore, values: Values) -> None:
        self.core = core
        self.values = values
        self.num_refused = self.num_answered = self.num_failed = 0
        self._modes: dict[str, PrefillMode] = {}

    def add(self, request_id: str) -> None:
        try:
            message = decode_message(self.values.message(request_id))
            assert isinstance(message, GenerateRequest)
            request = Request(
                request_id,
                message.prompt_token_ids,
                message.sampling,
                output_token_ids=message.output_token_ids,
                priority=message.priority,
                tenant=message.tenant,
                placement=PlacementState(explain=message.explain),
                report_interval=message.report_interval,
                holder=message.holder,
                **self.values.mode(),
            )
            self.core.add_request(request)
        except (KvrelayError, ProtocolError):
            self.num_refused += 1
            return
        self._modes[request_id] = request.mode

    def to_end(self) -> None:
        for _ in range(10_000):
            if not self.core.has_unfinished() and not self.core.has_work():
                break
            step = self.core.step()
            for output in step.outputs:
                self._received(output)
            for remote in step.remote_prefills:
                self._answer(remote.handoff_id, len(remote.token_ids))
            for load in step.kv_loads:
                self.core.kv_loaded(load.request_id, False)
            for chunk in step.handoff_chunks:
                if chunk.last:
                    self.core.sending_finished(chunk.request_id)
                    del self._modes[chunk.request_id]
                    self.num_answered += 1
        assert not self._modes, "some requests got no end"
        self.core.check_integrity()
        assert self.core.pool.num_free == self.core.pool.num_blocks

    def _answer(self, handoff_id: HandoffId, number: int) -> None:
        """The claimant's KV has come with a token that may be none, or does not come."""
        if number % 2:
            self.core.resume_handoff(handoff_id, 1, self.values.token(0.3), None)
        else:
            self.core.compute_handoff_here(handoff_id)
        self.core.end_loan(handoff_id, 1)

    def _received(self, output: TokenOutput) -> None:
        assert all(0 <= token < self.core.executor.vocab_size for token in output.token_ids)
        if output.finish_reason is not None:
            if self._modes.pop(output.request_id) is PrefillMode.HANDOFF:
                self.core.sending_finished(output.request_id)
            self.num_failed += output.finish_reason is FinishReason.ERROR
            self.num_answered += output.finish_reason is not FinishReason.ERROR

    def plain(self) -> list[int]:
        """The answer to a request without any oddity."""
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        self.core.add_request(Request("plain", list(range(8, 30)), sampling))
        tokens: list[int] = []
        while self.core.has_work():
            tokens += [token for output in self.core.step().outputs for token in output.token_ids]
        return tokens


@pytest.fixture(params=NUM_REQUESTS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def core(kind: str, checkpoint: Path) -> Iterator[EngineCore]:
    settings = WorkerConfig(model_path=checkpoint, engine=ENGINE, runner=RUNNER, mock=MockConfig(speedup_ratio=0))
    executor = build_executor(kind, settings)
    yield EngineCore(executor, ENGINE, ManualClock(), worker_id="w")
    executor.shutdown()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    make_model(path, "llama", "tiny", dtype="float32")
    return path


def bombard(core: EngineCore, num_requests: int, seed: int) -> None:
    run = Run(core, Values(seed, core.executor.vocab_size))
    expected = run.plain()
    assert len(expected) == 8
    left = num_requests
    sizes = random.Random(seed)
    while left:
        burst = min(left, sizes.randint(1, MAX_BURST))
        for number in range(burst):
            run.add(f"r{left - number}")
        run.to_end()
        left -= burst
        if sizes.random() < 0.05 or not left:
            assert run.plain() == expected
            core.clear_cache()
    assert run.num_answered > num_requests / 3
    assert run.num_refused > num_requests / 10
    assert run.num_failed < num_requests / 20


def test_no_request_harms_the_engine(core: EngineCore, kind: str) -> None:
    bombard(core, NUM_REQUESTS[kind], 1)


@pytest.mark.matrix
@pytest.mark.timeout(3600)
def test_no_request_of_many_harms_the_engine(core: EngineCore, kind: str) -> None:
    bombard(core, NUM_REQUESTS_OF_MATRIX[kind], 2)
