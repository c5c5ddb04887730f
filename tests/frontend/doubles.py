"""A cluster without engines: a worker that answers by a script, a small tokenizer, a frontend on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from tests.contracts.faulty_broker import FaultyBroker
from tests.patience import noticed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from kvrelay.config import FrontendConfig, MetricsConfig, RouterConfig, WorkerRole
from kvrelay.control.base import Keys, Lease
from kvrelay.core.activity import Activity
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.messages import (
    AbortRequest,
    GenerateRequest,
    OutputBatch,
    Ping,
    Pong,
    PrefillLost,
    RequestRefused,
    SessionPaused,
    TokenOutput,
)
from kvrelay.core.status import FinishReason
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import WorkerUnavailableError
from kvrelay.frontend.api.server import Frontend
from kvrelay.router import Router
from kvrelay.rpc.base import Peer
from kvrelay.rpc.loopback import LoopbackNetwork
from kvrelay.rpc.wire import Message

EOS, BOS = 0, 1
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
TEXTS = (
    "The quick brown fox jumps over the lazy dog. Once upon a time there was a small town by the sea.",
    "Grüße aus Köln, naïve café; 你好，世界！ 🙂🙃 emoji and 日本語 text, ñandú.",
)


def byte_level_tokenizer(vocab_size: int = 400) -> Tokenizer:
    """A byte-level BPE trained on a few lines: most characters beyond ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>", "<|begin|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def write_model_dir(path: Path) -> Path:
    """What a frontend reads of a checkpoint."""
    path.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "bos_token": {"content": "<|begin|>"}, "chat_template": CHAT_TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@dataclass
class Script:
    """What a worker does with a request. ``tokens`` is repeated over by position, so that a continued request goes on
    where it stood; ``per_output`` tokens come at once, one output every ``delay_s`` (0: every turn of the loop)."""

    tokens: tuple[int, ...] = (10,)
    stop_at: int | None = None
    per_output: int = 1
    delay_s: float = 0.0
    refuse: RequestRefused | None = None
    refuses: str = ""
    """Only requests whose id ends so."""
    die_after: int | None = None
    fail_after: int | None = None
    hang: bool = False
    cached: int = 0
    lose_at: int | None = None
    """The output that begins with this token is lost on its way."""
    repeat: bool = False
    """Everything is said twice."""
    splits: bool = False
    """Tokens that come at once are outputs of their own, in one message."""
    marks: tuple[bytes, bytes] = (b"", b"")
    """What comes with the first and with the last output."""
    waits_for_prefill_lost: bool = False
    """The decode half of a pair that gets no KV: it begins when it hears that its prefill worker is lost."""


@dataclass
class FakeWorker:
    """Serves the request plane over the loopback network by a script."""

    network: LoopbackNetwork
    script: Script
    worker_id: str
    requests: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    prefills_lost: list[str] = field(default_factory=list)
    paused: list[SessionPaused] = field(default_factory=list)
    publish_secret: bytes = b""

    def __post_init__(self) -> None:
        self.server = self.network.server()
        self.server.on_message(self._on_message)
        self._tasks: set[asyncio.Task[None]] = set()

    def info(self, model_dir: Path, **changes: object) -> WorkerInfo:
        info = WorkerInfo(
            worker_id=self.worker_id,
            epoch=1,
            role=WorkerRole.DECODE,
            model="tiny",
            model_path=str(model_dir),
            address=self.server.address,
            max_model_len=512,
            block_size=16,
            num_blocks=100,
            vocab_size=400,
            kv_compatibility="x",
        )
        return msgspec.structs.replace(info, **changes)

    async def die(self) -> None:
        """The process is gone: connections break, nothing more is sent."""
        for task in self._tasks:
            task.cancel()
        await self.server.close()

    def _on_message(self, peer: Peer, message: Message) -> None:
        if isinstance(message, Ping):
            self.server.send(peer, Pong(message.nonce, self.worker_id, self.publish_secret, Activity()))
        elif isinstance(message, AbortRequest):
            self.aborted.append(message.request_id)
        elif isinstance(message, PrefillLost):
            self.prefills_lost.append(message.request_id)
        elif isinstance(message, SessionPaused):
            self.paused.append(message)
        elif isinstance(message, GenerateRequest):
            self.requests.append(message)
            task = asyncio.get_running_loop().create_task(self._generate(peer, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _generate(self, peer: Peer, request: GenerateRequest) -> None:
        script = self.script
        if script.refuse is not None and request.request_id.endswith(script.refuses):
            self.server.send(peer, msgspec.structs.replace(script.refuse, request_id=request.request_id))
            return
        position, sent, is_first = len(request.output_token_ids), 0, True
        end = (
            request.sampling.max_tokens if script.stop_at is None else min(script.stop_at, request.sampling.max_tokens)
        )
        while script.waits_for_prefill_lost and request.request_id not in self.prefills_lost:
            await asyncio.sleep(0.001)
        while not script.hang and request.request_id not in self.aborted:
            if script.die_after is not None and sent >= script.die_after:
                asyncio.get_running_loop().create_task(self.die())
                return
            if script.fail_after is not None and sent >= script.fail_after:
                self._send(
                    peer, TokenOutput(request.request_id, finish_reason=FinishReason.ERROR, error="engine failed")
                )
                return
            is_half = request.pair is not None and request.pair.prefill_worker_id == self.worker_id
            at_once = request.report_interval if sent else 1
            count = min(1 if is_half else max(script.per_output, at_once), end - position)
            tokens = tuple(script.tokens[at % len(script.tokens)] for at in range(position, position + count))
            first, position, sent = position, position + count, sent + count
            reason = None
            if position >= end:
                reason = FinishReason.STOP if script.stop_at == end else FinishReason.LENGTH
            cached = script.cached if is_first else None
            decision = (
                f"told;slo={request.slo_ttft_ms:g},{request.slo_itl_ms:g}" if is_first and request.explain else ""
            )
            marks = script.marks[0] if is_first else script.marks[1] if reason is not None else b""
            is_first = False
            output = TokenOutput(
                request.request_id,
                tokens,
                reason,
                num_cached_tokens=cached,
                position=first,
                decision=decision,
                marks=marks,
            )
            outputs = _one_by_one(output) if script.splits else [output]
            for _ in range((first != script.lose_at) * (1 + script.repeat)):
                self._send(peer, *outputs)
            if reason is not None or is_half:
                return
            await asyncio.sleep(script.delay_s)

    def _send(self, peer: Peer, *outputs: TokenOutput) -> None:
        self.server.send(peer, OutputBatch(outputs))


def _one_by_one(output: TokenOutput) -> list[TokenOutput]:
    parts = [
        msgspec.structs.replace(output, token_ids=(token,), finish_reason=None, position=output.position + at)
        for at, token in enumerate(output.token_ids)
    ]
    parts[-1] = msgspec.structs.replace(parts[-1], finish_reason=output.finish_reason)
    return parts


class FakeCluster:
    """Control plane, workers, and a frontend on a real socket."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.network = LoopbackNetwork()
        self.broker = FaultyBroker()
        self.control = self.broker.plane()
        self._lease: Lease | None = None
        self.bus = self.broker.plane().events
        self.keys = Keys("test")
        self.workers: dict[str, FakeWorker] = {}
        self.frontend: Frontend | None = None

    @property
    def url(self) -> str:
        assert self.frontend is not None
        return self.frontend.url

    async def add_worker(self, worker_id: str, script: Script, **changes: object) -> FakeWorker:
        worker = self.workers[worker_id] = FakeWorker(self.network, script, worker_id)
        await worker.server.start()
        await self.register(worker, **changes)
        return worker

    async def register(self, worker: FakeWorker, **changes: object) -> None:
        value = msgspec.json.encode(worker.info(self.model_dir, **changes))
        await self.put_entry(worker.worker_id, value)

    async def put_entry(self, worker_id: str, value: bytes) -> None:
        """In the list of workers, under a lease."""
        discovery = self.control.discovery
        self._lease = self._lease or await discovery.grant(60.0)
        await discovery.put(self.keys.worker(worker_id), value, self._lease)

    async def deregister(self, worker_id: str) -> None:
        await self.control.discovery.delete(self.keys.worker(worker_id))

    async def start(self, monitoring: MetricsConfig | None = None, name: str = "", **settings: object) -> Frontend:
        config = FrontendConfig(**{"port": 0, "shutdown_timeout_s": 1.0, **settings})
        frontend = self.frontend = Frontend(
            config,
            self.control,
            self.keys,
            lambda info: self.network.client(info.address),
            lambda block_size, replay, stage: Router(
                RouterConfig(router="round-robin"), block_size, MonotonicClock(), stage, replay
            ),
            monitoring=monitoring,
            name=name,
        )
        await frontend.start()
        return frontend

    @staticmethod
    async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Let the loop run until the condition holds. What asks for a worker that is not there yet does not hold: on a
        busy machine a frontend starts without it."""

        def holds() -> bool:
            with suppress(WorkerUnavailableError):
                return condition()
            return False

        await noticed(holds, timeout_s)

    def expect_routers_know_no_more(self) -> None:
        """Once every answer has ended, no worker counts as busy with one: the next requests would avoid it."""
        if self.frontend is None or self.frontend.metrics.num_in_flight_of():
            return
        for model in self.frontend.cluster.models:
            for router in (model.router, model.pairs.prefills):
                assert "requests=0," in repr(router), "what it placed; the workers may have told of others"

    async def close(self) -> None:
        if self.frontend is not None:
            await self.frontend.close()
        for worker in self.workers.values():
            await worker.die()
        await self.control.close()


@asynccontextmanager
async def running(model_dir: Path, *scripts: Script, **settings: object) -> AsyncIterator[FakeCluster]:
    """A frontend with a worker w0, w1, ... for each script."""
    cluster = FakeCluster(model_dir)
    try:
        for number, script in enumerate(scripts):
            await cluster.add_worker(f"w{number}", script)
        await cluster.start(**settings)
        if cluster.frontend is not None and scripts:
            frontend = cluster.frontend
            await cluster.until(lambda: len(frontend.cluster.model(None).worker_ids) == len(scripts))
        yield cluster
        cluster.expect_routers_know_no_more()
    finally:
        await cluster.close()
