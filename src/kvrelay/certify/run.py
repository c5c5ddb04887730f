"""One certification from its options to its report: the plan, unit by unit, and going on after an interruption.

unit        what is started and ended together: a pair of ends, a cluster, the engine alone
report      written after each unit; a later run of the same digest leaves out the units that it has
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.files import read_kept, to_json, write_text
from kvrelay.bench.report.machine import describe_machine
from kvrelay.certify import kv
from kvrelay.certify.answers import ladder, make_prompts
from kvrelay.certify.counters import read_octets
from kvrelay.certify.findings import CertifyReport, Group, Row, Verdict
from kvrelay.certify.holds import Harm, prove_harm, prove_lost_end
from kvrelay.certify.machine import kv_layout, watched, window_of
from kvrelay.certify.page import page_of
from kvrelay.certify.peer import EndSpec, peer_ends
from kvrelay.certify.served import (
    NOISE_CONCURRENCY,
    NUM_TOKENS,
    Reference,
    ask_reference,
    failed_row,
    judge_model,
    measure_first_tokens,
    prove_answers,
    prove_load,
    way_row,
)
from kvrelay.certify.servers import Cluster, Server, running_cluster
from kvrelay.cli.processes import run_async
from kvrelay.config import TransferConfig, load_settings
from kvrelay.errors import InvalidInputError, KvrelayError
from kvrelay.executors.checkpoint_facts import checkpoint_facts
from kvrelay.version import __version__

SEED = 20
REPORT, REFERENCE, PAGE = "certify.json", "reference.json", "certify.html"
PROVE_BLOCKS, PATH_BYTES, CARRY_BYTES = 128, 64 * 2**20, 256 * 2**20
LOST_END_TIMEOUT_S = 5.0
MAX_PROMPT = 2048
EVERYDAY_HARM = (Harm.KILL_PREFILL, Harm.KILL_DECODE, Harm.KILL_RANK)
"""What --short tries."""
PREFILL, DECODE = 0, 1
"""Of pairs of options."""
LOCAL_FLAGS = ("--prefill", "0", "--decode", "1")


class CertifyOptions(msgspec.Struct, frozen=True):
    """What to certify. ``urls``: (pair, reference) of servers that run already; None: certify starts its own.
    ``serve_flags``: for each ``kvrelay serve``. ``gpus``: giver's and taker's; None: host memory."""

    model: str
    model_path: Path
    output: Path
    engine: str = "torch"
    transports: tuple[str, ...] = ("nixl",)
    orders: tuple[str, ...] = ("decode-first", "prefill-first")
    tp: tuple[int, int] = (1, 1)
    pp: tuple[int, int] = (1, 1)
    block_size: int = 16
    dtype: str = "auto"
    groups: tuple[Group, ...] = tuple(Group)
    is_short: bool = False
    urls: tuple[str, str] | None = None
    api_key: str | None = None
    ucx_tls: str = "auto"
    device: str = "auto"
    gpus: tuple[int, int] | None = None
    serve_flags: tuple[str, ...] = ()
    command: str = ""

    @property
    def digest(self) -> str:
        """Of everything that the rows depend on."""
        plain = msgspec.structs.replace(self, output=Path(), api_key=None, command="")
        about = msgspec.json.encode((msgspec.to_builtins(plain, enc_hook=str), __version__, describe_machine()))
        return xxhash.xxh3_64_hexdigest(about)


Unit = tuple[str, Callable[[], list[Row]]]


class Certification:
    """One run. ``rows`` grows; each unit's rows are on disk before the next begins."""

    def __init__(self, options: CertifyOptions, bar: ProgressBar) -> None:
        self._options, self._bar = options, bar
        self._folder = options.output
        self.report = self._earlier() or CertifyReport(
            digest=options.digest,
            machine=describe_machine(),
            release=__version__,
            model=options.model,
            command=options.command,
            began=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self._vocab_size = 500 if options.urls else checkpoint_facts(options.model_path).vocab_size
        self._reference = self._earlier_reference()
        self._best_path: dict[str, float] = {}

    def _earlier(self) -> CertifyReport | None:
        """What an interrupted run has left here, if it was the same."""
        kept = read_kept(self._folder / REPORT, CertifyReport)
        return kept if kept and kept.digest == self._options.digest and not kept.is_complete else None

    def _earlier_reference(self) -> Reference | None:
        """What the engine alone has answered in the run that this one continues."""
        return read_kept(self._folder / REFERENCE, Reference) if self.num_done else None

    @property
    def num_done(self) -> int:
        return len(self.report.units)

    def run(self) -> CertifyReport:
        """All units that are not done. An interruption leaves the report of those that are."""
        units = list(self._units())
        for number, (name, take) in enumerate(units, 1):
            if name in self.report.units:
                continue
            self._bar.stage(f"{number}/{len(units)} {name}", 1.0)
            try:
                rows = take()
            except (KvrelayError, OSError) as exc:
                group, _, cell = name.partition(" ")
                rows = [failed_row(Group(group), cell, self._cell(), exc)]
            self._write(rows, name)
        self._write([], None)
        return self.report

    @staticmethod
    def _run_async(take: Callable[..., Coroutine[Any, Any, list[Row]]], *arguments: object) -> list[Row]:
        return run_async(take(*arguments))

    def _write(self, rows: Sequence[Row], unit: str | None) -> None:
        done = (*self.report.units, unit) if unit else self.report.units
        everything = tuple(sorted((*self.report.rows, *rows), key=lambda row: list(Group).index(row.group)))
        self.report = msgspec.structs.replace(self.report, rows=everything, units=done, is_complete=unit is None)
        write_text(self._folder / REPORT, to_json(self.report))
        write_text(self._folder / PAGE, page_of(self.report))

    # -- the plan -----------------------------------------------------------------------------------------------------

    def _units(self) -> Iterator[Unit]:
        options = self._options
        if options.urls is None:
            for transport in options.transports:
                yield from self._kv_units(transport)
            yield from self._served_units()
        else:
            yield "Right greedy answers", partial(self._run_async, self._running_answers)
            yield "Right answers under load", partial(self._run_async, self._running_load)
            if Group.FAST in options.groups:
                yield "Fast first tokens", partial(self._run_async, self._running_first_tokens)
            yield "Holds what is not ours", self._not_ours

    def _kv_units(self, transport: str) -> Iterator[Unit]:
        """Without an engine: kvrelay's own transports."""
        options = self._options
        is_theirs = options.engine == "vllm" and "kvrelay" not in options.serve_flags
        if is_theirs or options.engine == "openai":
            return  # the engine has a data plane of its own
        if Group.RIGHT in options.groups:
            yield f"Right KV by {transport}", partial(self._kv_right, transport)
        if Group.FAST in options.groups:
            yield f"Fast path of {transport}", partial(self._kv_fast, transport)
        if Group.HOLDS in options.groups:
            yield f"Holds lost ends of {transport}", partial(self._kv_holds, transport)

    def _served_units(self) -> Iterator[Unit]:
        options = self._options
        for transport in options.transports:
            if Group.RIGHT in options.groups or Group.FAST in options.groups:
                yield f"Right answers by {transport}", partial(self._run_async, self._answers, transport)
            if Group.HOLDS in options.groups:
                yield f"Holds harm with {transport}", partial(self._run_async, self._harm, transport)

    # -- KV without an engine -----------------------------------------------------------------------------------------

    def _specs(self, transport: str, num_bytes: int | None, timeout_s: float = 30.0) -> list[EndSpec]:
        """Two ends with the model's KV; ``num_bytes``: of each pool, None: a pool of few blocks."""
        options = self._options
        flags = {"transport": transport, "ucx_tls": options.ucx_tls, "transfer_timeout_s": timeout_s}
        config = load_settings(TransferConfig, environ={}, flags=flags)
        specs = []
        for number, name in enumerate(("giver", "taker")):
            tp, pp = options.tp[number], options.pp[number]
            layout = kv_layout(options.model_path, options.block_size, tp, pp, options.dtype)
            num_blocks = PROVE_BLOCKS if num_bytes is None else max(16, num_bytes // layout.block_bytes)
            gpu = None if options.gpus is None else options.gpus[number]
            is_per_rank = layout.num_ranks > 1 and gpu is None
            specs.append(EndSpec(f"certify-{name}", config, layout, num_blocks, is_per_rank, gpu))
        return specs

    def _kv_right(self, transport: str) -> list[Row]:
        cell, num_handoffs = self._kv_cell(transport), 200 if self._options.is_short else 1000
        with peer_ends(self._specs(transport, None)) as ends:
            blocks = kv.prove_blocks(*ends, cell, SEED, self._bar.update)
            return [blocks, kv.prove_reuse(*ends, cell, num_handoffs, SEED, self._bar.update)]

    def _kv_fast(self, transport: str) -> list[Row]:
        cell, log = self._kv_cell(transport), self._folder / "logs" / f"ucx-{transport}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.unlink(missing_ok=True)
        with peer_ends(self._specs(transport, PATH_BYTES), log) as ends:
            with watched() as watch:
                row = kv.measure_path(*ends, cell, num_rounds=self._num_rounds, progress=self._bar.update)
            speeds = [speed for _, speed in row.series[0].points] if row.series else []
            self._best_path[transport] = max(speeds, default=0.0)
            evidence = kv.carry(*ends, CARRY_BYTES, read_octets)
        logs = [log] if log.is_file() else []
        return [watch.judged(row), way_row(cell, evidence, logs, transport, has_rdma=has_rdma())]

    @property
    def _num_rounds(self) -> int:
        """Of measured times."""
        return 3 if self._options.is_short else 9

    def _kv_holds(self, transport: str) -> list[Row]:
        cell, rows = self._kv_cell(transport), []
        for is_taker in (False, True):
            with peer_ends(self._specs(transport, PATH_BYTES, LOST_END_TIMEOUT_S)) as ends:
                rows.append(prove_lost_end(ends, cell, is_taker=is_taker, timeout_s=LOST_END_TIMEOUT_S))
        with peer_ends(self._specs(transport, PATH_BYTES // 4)) as ends:
            rows.append(kv.prove_torn(*ends, cell, 10 if self._options.is_short else 40, self._bar.update))
        return rows

    def _kv_cell(self, transport: str) -> str:
        tls = "" if self._options.ucx_tls == "auto" else f" ucx_tls={self._options.ucx_tls}"
        return f"{transport}{tls}{self._ranks()}"

    # -- clusters -----------------------------------------------------------------------------------------------------

    def _cell(self, transport: str = "", order: str = "") -> str:
        words = [self._options.engine if self._options.urls is None else "running servers", transport, order]
        return " ".join(filter(None, words)) + self._ranks()

    def _ranks(self) -> str:
        names = [f"{name} {of[0]} to {of[1]}" for name, of in (("tp", self._options.tp), ("pp", self._options.pp))]
        used = [text for text, of in zip(names, (self._options.tp, self._options.pp)) if of != (1, 1)]
        return "".join(f" {text}" for text in used)

    def _flags(self, transport: str | None, side: int = DECODE) -> list[str]:
        """Of ``serve``; None: the engine alone, with the ranks of this side."""
        options = self._options
        flags = [str(options.model_path), "--engine", options.engine, "--served-model-name", "certified"]
        flags += ["--block-size", str(options.block_size), "--disagg-policy", "always", "--dtype", options.dtype]
        flags += ["--ucx-tls", options.ucx_tls, *options.serve_flags]
        flags += [] if options.device == "auto" else ["--device", options.device]
        if transport is None:
            return [*flags, *LOCAL_FLAGS, "--tp", str(options.tp[side]), "--pp", str(options.pp[side])]
        return [
            *flags,
            *("--transport", transport),
            *("--prefill", "1", "--decode", "1"),
            *("--tp-prefill", str(options.tp[0]), "--tp-decode", str(options.tp[1])),
            *("--pp-prefill", str(options.pp[0]), "--pp-decode", str(options.pp[1])),
        ]

    @property
    def _lengths(self) -> list[int]:
        options = self._options
        longest = min(MAX_PROMPT, checkpoint_facts(options.model_path).max_model_len - 64)
        return ladder(options.block_size, 512, window_of(options.model_path), longest, is_short=options.is_short)

    async def engine_alone(self) -> Reference:
        """What the engine alone answers; asked once, and kept beside the report."""
        path = self._folder / REFERENCE
        if self._reference is None:
            prompts = make_prompts(self._lengths, self._vocab_size, SEED)
            has_unlike_ranks = any(of[PREFILL] != of[DECODE] for of in (self._options.tp, self._options.pp))
            async with self._alone() as server:
                alone = await server.answers(prompts, NUM_TOKENS)
                if not has_unlike_ranks:
                    together = await server.answers(prompts, NUM_TOKENS, NOISE_CONCURRENCY)
            if has_unlike_ranks:
                # The prefill worker's ranks round otherwise, too: that is noise of the engine, not of the hand-off.
                async with self._alone(PREFILL) as server:
                    together = await server.answers(prompts, NUM_TOKENS, NOISE_CONCURRENCY)
            self._reference = Reference(tuple(prompts), tuple(alone), tuple(together))
            write_text(path, to_json(self._reference))
        return self._reference

    @asynccontextmanager
    async def _alone(self, side: int = DECODE) -> AsyncIterator[Server]:
        async with (
            running_cluster(self._flags(None, side), self._folder / "logs" / "alone.log") as cluster,
            Server(cluster.url, self._options.api_key) as server,
        ):
            yield server

    @asynccontextmanager
    async def _pair(self, transport: str, name: str) -> AsyncIterator[tuple[Cluster, dict[str, Server]]]:
        """A cluster with hand-offs, and a client for each order."""
        options, logs = self._options, self._folder / "logs"
        log, ucx_log = logs / f"{name}.log", logs / f"ucx-{name}-%p.log"
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            cluster = await enter(running_cluster(self._flags(transport), log, ucx_log))
            servers = {order: await enter(Server(cluster.url, options.api_key, order)) for order in options.orders}
            yield cluster, servers

    async def _answers(self, transport: str) -> list[Row]:
        options, rows = self._options, []
        reference, name = await self.engine_alone(), f"answers-{transport}"
        for log in (self._folder / "logs").glob(f"ucx-{name}-*.log"):
            log.unlink()
        carried = None
        async with AsyncExitStack() as stack:
            cluster, servers = await stack.enter_async_context(self._pair(transport, name))
            for order, server in servers.items():
                cell = self._cell(transport, order)
                if Group.RIGHT in options.groups:
                    rows += await prove_answers(server, reference, cell, self._alone, cluster, self._bar.update)
                if Group.FAST in options.groups:
                    rows.append(await self._first_tokens(server, cluster, None, cell, transport))
            server, num = next(iter(servers.values())), 120 if options.is_short else 1000
            row, carried = await prove_load(server, reference, self._cell(transport), num, cluster, self._bar.update)
            rows += [row] * (Group.RIGHT in options.groups)
        logs = sorted((self._folder / "logs").glob(f"ucx-{name}-*.log"))
        if Group.FAST in options.groups:
            # Clients, the request plane and ranks use the same interfaces.
            rows.append(way_row(self._cell(transport), carried, logs, transport, has_rdma=has_rdma(), is_alone=False))
        return rows

    async def _first_tokens(
        self, server: Server, cluster: Cluster | None, alone: Server | None, cell: str, transport: str
    ) -> Row:
        options = self._options
        lengths = [length for length in (128, 512, 1024, 1920) if length <= MAX_PROMPT]
        per_token = 0
        if cluster is not None:
            per_token = kv_layout(options.model_path, options.block_size, dtype=options.dtype).bytes_per_token
        with watched() as watch:
            asked = server, cluster, alone, cell, lengths, self._num_rounds, self._bar.update, self._vocab_size
            row = await measure_first_tokens(*asked, self._best_path.get(transport, 0.0), per_token)
        return watch.judged(row)

    async def _harm(self, transport: str) -> list[Row]:
        reference, rows = await self.engine_alone(), []
        harms = [harm for harm in Harm if not self._options.is_short or harm in EVERYDAY_HARM]
        if self._options.tp == (1, 1) and self._options.pp == (1, 1):
            harms.remove(Harm.KILL_RANK)
        async with self._pair(transport, f"harm-{transport}") as (cluster, servers):
            for harm in harms:
                server = servers[self._options.orders[0]]
                rows.append(await prove_harm(harm, server, cluster, reference, self._cell(transport), 2))
                self._bar.update(len(rows) / len(harms))
        return rows

    # -- servers that run already -------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[tuple[Server, Server, Reference]]:
        """The pair, the server alone, and what that one answers. Raises BenchError, InvalidInputError for servers of
        unlike models."""
        options, path = self._options, self._folder / REFERENCE
        assert options.urls is not None
        async with Server(options.urls[0], options.api_key) as pair, Server(options.urls[1], options.api_key) as alone:
            difference = judge_model(pair.model, alone.model)
            if difference is not None:
                raise InvalidInputError(difference)
            if self._reference is None:
                lengths = ladder(options.block_size, 512, 0, MAX_PROMPT - 64, is_short=options.is_short)
                self._reference = await ask_reference(alone, make_prompts(lengths, self._vocab_size, SEED))
                write_text(path, to_json(self._reference))
            yield pair, alone, self._reference

    async def _running_answers(self) -> list[Row]:
        cell, progress = self._cell(), self._bar.update
        async with self._running() as (pair, alone, reference):
            return await prove_answers(pair, reference, cell, lambda: nullcontext(alone), None, progress)

    async def _running_load(self) -> list[Row]:
        async with self._running() as (pair, _, reference):
            num = 60 if self._options.is_short else 1000
            return [(await prove_load(pair, reference, self._cell(), num, None, self._bar.update))[0]]

    async def _running_first_tokens(self) -> list[Row]:
        async with self._running() as (pair, alone, _):
            return [await self._first_tokens(pair, None, alone, self._cell(), "")]

    def _not_ours(self) -> list[Row]:
        """What cannot be tried at servers that others have started."""
        unread, unharmed = "the memory of these servers cannot be read from here", "these servers are not ours to kill"
        return [
            Row(Group.RIGHT, "KV, block by block", self._cell(), Verdict.SKIP, unread),
            Row(Group.HOLDS, "failures", self._cell(), Verdict.SKIP, unharmed),
        ]


def has_rdma(root: Path = Path("/")) -> bool:
    """Whether an RDMA port is active."""
    ports = (root / "sys/class/infiniband").glob("*/ports/*/state")
    return any("ACTIVE" in path.read_text(errors="replace") for path in ports)
