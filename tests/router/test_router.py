"""The router behind its contract: every policy, workers that come, go, change roles, fail."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from kvrelay.config import RouterConfig, WorkerRole
from kvrelay.core.clock import ManualClock
from kvrelay.core.event_log import KvEventLog
from kvrelay.core.events import AllBlocksCleared, BlockRemoved, BlockStored, LoadMetrics
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import ConfigError, WorkerUnavailableError
from kvrelay.router import IndexState, Router, RouterStage, RoutingRequest
from kvrelay.router.indexer import KvIndexer
from kvrelay.router.policies import KvPolicy

PLAIN = ("round-robin", "random", "least-loaded", "power-of-two")
OVERLAP = ("kv", "dynamo-v0")


def worker(name: str, role: WorkerRole = WorkerRole.DECODE, epoch: int = 0, block_size: int = 4) -> WorkerInfo:
    return WorkerInfo(
        worker_id=name,
        epoch=epoch,
        role=role,
        model="m",
        model_path="",
        address="tcp://127.0.0.1:1",
        max_model_len=4096,
        block_size=block_size,
        num_blocks=100,
        vocab_size=1000,
        kv_compatibility="x",
    )


def router(policy: str, *names: str) -> Router:
    built = Router(RouterConfig(router=policy), 4, ManualClock())  # type: ignore[arg-type]
    for name in names:
        built.add_worker(worker(name))
    return built


def publish(
    built: Router, log: KvEventLog, token_ids: Sequence[int], block_size: int = 4, lora: str | None = None
) -> None:
    """The worker has computed ``token_ids`` and says so."""
    hashes = compute_sequence_hashes(token_ids, block_size, lora=lora)
    built.apply_events(log.append([BlockStored(None, hashes, block_size)]))


def load_of(name: str, waiting: int = 0, usage: float = 0.0, seq: int = 0) -> LoadMetrics:
    return LoadMetrics(name, 0, 8, 0, 100, waiting, usage, 0.0, seq)


def request(request_id: str, num_tokens: int = 10, **fields: object) -> RoutingRequest:
    return RoutingRequest(request_id=request_id, token_ids=tuple(range(num_tokens)), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", PLAIN + OVERLAP)
def test_every_policy_chooses_among_the_registered(policy: str) -> None:
    built = router(policy, "a", "b", "c")
    chosen = {built.choose(request(f"r{number}")).worker_id for number in range(60)}
    assert chosen == {"a", "b", "c"}


@pytest.mark.parametrize("policy", PLAIN + OVERLAP)
def test_excluded_workers_are_not_chosen(policy: str) -> None:
    built = router(policy, "a", "b", "c")
    for number in range(30):
        given = request(f"r{number}", exclude=("a", "c", "gone"))
        assert [candidate.worker_id for candidate in built.explain(given).candidates] == ["b"]
        assert built.choose(given).worker_id == "b"


@pytest.mark.parametrize("policy", PLAIN + OVERLAP)
def test_without_a_candidate_a_retryable_error_is_raised(policy: str) -> None:
    built = router(policy)
    with pytest.raises(WorkerUnavailableError):
        built.choose(request("r"))
    built.add_worker(worker("a"))
    with pytest.raises(WorkerUnavailableError):
        built.choose(request("r", exclude=("a",)))
    built.add_worker(worker("p", WorkerRole.PREFILL))
    with pytest.raises(WorkerUnavailableError):
        built.choose(request("r", exclude=("a",)))


def test_an_explanation_shows_every_candidate_as_it_was() -> None:
    built = router("least-loaded", "a", "b")
    first = built.choose(request("r1", 10))
    why = built.explain(request("r2", 6))
    second = built.choose(request("r2", 6))
    assert {first.worker_id, second.worker_id} == {"a", "b"}
    assert why.worker_id == second.worker_id
    shown = {candidate.worker_id: candidate for candidate in why.candidates}
    loaded = shown[first.worker_id]
    assert (loaded.prefill_tokens, loaded.decode_tokens, loaded.score) == (10, 10, -20)
    assert msgspec.json.decode(msgspec.json.encode(why), type=type(why)) == why


def test_reasons_are_logged_at_debug_level_only(caplog: pytest.LogCaptureFixture) -> None:
    built = router("least-loaded", "a", "b")
    built.choose(request("r1"))
    assert not caplog.records
    caplog.set_level(logging.DEBUG)
    placed = built.choose(request("r2")).worker_id
    (line,) = caplog.messages
    assert line.startswith(f"request r2: RoutingExplanation(worker_id={placed!r}")
    assert "CandidateScore(worker_id='a'" in line
    assert "CandidateScore(worker_id='b'" in line


def test_load_leaves_with_the_request() -> None:
    built = router("least-loaded", "a", "b")
    heavy = built.choose(request("heavy", 100)).worker_id
    other = "b" if heavy == "a" else "a"
    assert [built.choose(request(f"r{number}", 10)).worker_id for number in range(3)] == [other] * 3
    built.first_token("heavy")
    built.finished("heavy", 5)
    assert built.choose(request("next")).worker_id == heavy


def test_explaining_places_nothing() -> None:
    built = router("least-loaded", "a")
    for _ in range(3):
        assert built.explain(request("r")).candidates[0].decode_tokens == 0


def test_a_role_change_takes_the_worker_out_and_back() -> None:
    built = router("round-robin", "a", "b")
    built.add_worker(worker("a", WorkerRole.PREFILL, epoch=1))
    assert {built.choose(request(f"r{number}")).worker_id for number in range(4)} == {"b"}
    built.add_worker(worker("a", WorkerRole.DECODE, epoch=0))  # a late echo of the past
    assert {built.choose(request(f"s{number}")).worker_id for number in range(4)} == {"b"}
    built.add_worker(worker("a", WorkerRole.BOTH, epoch=2))
    assert {built.choose(request(f"t{number}")).worker_id for number in range(4)} == {"a", "b"}


def test_the_prefill_stage_chooses_prefill_workers() -> None:
    built = Router(RouterConfig(router="round-robin"), 4, ManualClock(), RouterStage.PREFILL)
    for name, role in (("p", WorkerRole.PREFILL), ("d", WorkerRole.DECODE), ("x", WorkerRole.BOTH)):
        built.add_worker(worker(name, role))
    assert {built.choose(request(f"r{number}")).worker_id for number in range(4)} == {"p", "x"}


def test_the_policy_changes_at_run_time_and_load_stays() -> None:
    built = router("round-robin", "a", "b")
    loaded = built.choose(request("r1", 50)).worker_id
    built.configure(dataclasses.replace(built.config, router="least-loaded"))
    decision = built.choose(request("r2"))
    assert decision.policy == "least-loaded"
    assert decision.worker_id != loaded


def test_an_impossible_block_size_is_refused() -> None:
    with pytest.raises(ConfigError):
        Router(RouterConfig(), 0, ManualClock())


@pytest.mark.parametrize("policy", OVERLAP)
def test_requests_go_to_the_worker_that_holds_their_prefix(policy: str) -> None:
    built = router(policy, "a", "b", "c")
    publish(built, KvEventLog("b", 0), range(400))
    for number in range(5):
        prompt = (*range(400), *(1000 + number,) * 10)
        why = built.explain(RoutingRequest(f"r{number}", prompt))
        assert [candidate.overlap_blocks for candidate in why.candidates] == [0, 100, 0]
        decision = built.choose(RoutingRequest(f"r{number}", prompt))
        assert (decision.worker_id, decision.overlap_blocks) == ("b", 100)
        assert decision.hit_rate == pytest.approx(400 / 410)
        built.finished(f"r{number}", 3)


def test_only_what_has_to_be_prefilled_counts_as_prefill() -> None:
    built = router("kv", "a")
    publish(built, KvEventLog("a", 0), range(400))
    built.choose(request("r1", 410))
    shown = built.explain(request("r2", 8)).candidates[0]
    assert (shown.prefill_tokens, shown.decode_tokens) == (10, 410)


def test_cache_salts_do_not_share_prefixes() -> None:
    built = router("kv", "a")
    publish(built, KvEventLog("a", 0), range(400))
    assert built.explain(request("r", 400)).overlap_blocks == 100
    assert built.explain(request("r", 400, cache_salt="tenant")).overlap_blocks == 0


def test_the_default_does_not_herd() -> None:
    """One hot prefix of 2,000 tokens, 400 requests at once: nobody idles, nobody has more than 1.3 of the mean."""
    built = router("kv", "a", "b", "c", "d")
    logs = {name: KvEventLog(name, 0) for name in "abcd"}
    publish(built, logs["a"], range(2000))
    placed: Counter[str] = Counter()
    for number in range(400):
        decision = built.choose(RoutingRequest(f"r{number}", (*range(2000), *range(number, number + 100))))
        placed[decision.worker_id] += 1
        publish(built, logs[decision.worker_id], range(2000))
        built.first_token(f"r{number}")
    assert max(placed.values()) / 100 <= 1.3
    assert min(placed.values()) >= 80


def test_a_burst_of_equal_prompts_is_not_computed_everywhere() -> None:
    """What was placed and is still being prefilled counts as held, before any event says so."""
    built = router("kv", "a", "b", "c", "d")
    first = built.choose(request("r0", 4000)).worker_id
    assert [built.choose(request(f"r{number}", 4000)).worker_id for number in range(1, 4)] == [first] * 3
    plain = router("dynamo-v0", "a", "b", "c", "d")
    assert plain.choose(request("r0", 4000)).overlap_blocks == plain.choose(request("r1", 4000)).overlap_blocks == 0


@pytest.mark.parametrize("cleared", [False, True], ids=["evicted", "cleared"])
def test_a_placed_prefix_that_was_evicted_does_not_count_as_held(cleared: bool) -> None:
    """Or else a worker that has just joined gets nothing while the others' caches overflow."""
    built = router("kv", "a")
    log = KvEventLog("a", 0)
    built.choose(request("r", 400))
    publish(built, log, range(400))
    built.first_token("r")
    built.finished("r", 10)
    built.add_worker(worker("new"))
    assert built.explain(request("again", 400)).worker_id == "a"
    gone = AllBlocksCleared() if cleared else BlockRemoved(compute_sequence_hashes(range(400), 4))
    built.apply_events(log.append([gone]))
    assert built.explain(request("again", 400)).worker_id == "new"


def test_a_light_load_stays_where_its_prefix_is() -> None:
    """The counterpart: one request at a time never leaves the worker that holds its prefix."""
    built = router("kv", "a", "b", "c", "d")
    publish(built, KvEventLog("c", 0), range(2000))
    for number in range(20):
        assert built.choose(request(f"r{number}", 2050)).worker_id == "c"
        built.finished(f"r{number}", 10)


def test_dynamo_v0_follows_what_is_published() -> None:
    built = router("dynamo-v0", "a", "b")
    publish(built, KvEventLog("a", 0), range(40))
    assert built.explain(request("r", 160)).worker_id == "a"
    built.apply_metrics(load_of("a", waiting=3, usage=0.5))
    assert built.explain(request("r", 160)).worker_id == "b"
    assert [shown.score for shown in built.explain(request("r", 160)).candidates] == pytest.approx([-1.0, 0.0])


def test_the_index_is_made_when_a_policy_begins_to_need_it() -> None:
    asked: list[tuple[str, bytes]] = []
    config = RouterConfig(router="round-robin")
    built = Router(config, 4, ManualClock(), request_replay=lambda name, data: asked.append((name, data)))
    built.add_worker(worker("a"))
    log = KvEventLog("a", 0)
    publish(built, log, range(40))
    assert asked == []
    built.configure(dataclasses.replace(built.config, router="kv"))
    ((name, question),) = asked
    built.apply_replay(name, log.serve_replay(question))
    assert built.explain(request("r", 40)).overlap_blocks == 10
    built.configure(dataclasses.replace(built.config, overlap_weight=0.5))
    assert built.explain(request("r", 40)).candidates[0].score == -20
    built.configure(dataclasses.replace(built.config, router="random"))
    built.apply_replay(name, log.serve_replay(question))
    assert built.index_state("a") is IndexState.NONE
    assert built.indexed_blocks("a") == []


def test_a_sample_of_a_worker_repeats_the_unanswered_question() -> None:
    clock, asked = ManualClock(), []
    built = Router(RouterConfig(router="kv"), 4, clock, request_replay=lambda *question: asked.append(question))
    built.add_worker(worker("a"))
    built.add_worker(worker("a"))
    built.apply_metrics(load_of("a"))
    assert len(asked) == 1
    clock.advance(3)
    built.apply_metrics(load_of("a"))
    assert asked == [asked[0]] * 2


def test_a_worker_with_other_blocks_is_chosen_but_not_for_its_prefixes(caplog: pytest.LogCaptureFixture) -> None:
    built = Router(RouterConfig(router="kv"), 4, ManualClock())
    built.add_worker(worker("odd", block_size=8))
    publish(built, KvEventLog("odd", 0), range(400), block_size=8)
    decision = built.choose(request("r", 400))
    assert (decision.worker_id, decision.overlap_blocks) == ("odd", 0)
    assert "not indexed" in caplog.text


def test_a_removed_worker_takes_its_prefixes_along() -> None:
    built = router("kv", "a", "b")
    publish(built, KvEventLog("a", 0), range(400))
    built.remove_worker("a")
    decision = built.choose(request("r", 400))
    assert (decision.worker_id, decision.overlap_blocks) == ("b", 0)


def test_without_events_the_router_remembers_where_it_sent_things() -> None:
    built = Router(RouterConfig(router="kv", kv_events=False, approximate_ttl_s=10), 4, clock := ManualClock())
    for name in "abc":
        built.add_worker(worker(name))
    first = built.choose(request("r1", 400)).worker_id
    built.finished("r1", 1)
    again = built.choose(request("r2", 400))
    assert (again.worker_id, again.overlap_blocks) == (first, 100)
    built.configure(dataclasses.replace(built.config, overlap_weight=2.0))
    assert built.explain(request("r3", 400)).overlap_blocks == 100
    clock.advance(13)
    assert built.explain(request("r3", 400)).overlap_blocks == 0
    assert repr(built).startswith("Router(kv, LoadTable(")


def test_only_workers_that_compete_are_indexed() -> None:
    asked: list[str] = []
    built = Router(RouterConfig(router="kv"), 4, ManualClock(), request_replay=lambda name, _: asked.append(name))
    built.add_worker(worker("p", WorkerRole.PREFILL))
    log = KvEventLog("p", 0)
    publish(built, log, range(400))
    assert (asked, built.worker_ids) == ([], ())
    built.add_worker(worker("p", WorkerRole.BOTH, epoch=1))
    assert (asked, built.worker_ids) == (["p"], ("p",))
    publish(built, log, range(500, 600))
    built.add_worker(worker("p", WorkerRole.PREFILL, epoch=2))
    assert isinstance(built.indexer, KvIndexer)
    assert built.indexer.index.worker_ids == ()


@pytest.mark.parametrize("policy", ["round-robin", "random", "power-of-two"])
def test_an_explanation_takes_no_turn_and_no_draw(policy: str) -> None:
    asked, silent = (router(policy, "a", "b", "c") for _ in range(2))
    for number in range(30):
        asked.explain(request("explained", 16))
        expected = asked.explain(request("explained", 16)).worker_id
        chosen = [built.choose(request(f"r{number}", 16)).worker_id for built in (asked, silent)]
        assert chosen == [expected, expected]


def test_the_state_of_a_workers_index_is_visible() -> None:
    built = router("kv", "a", "b")
    log = KvEventLog("a", 0)
    publish(built, log, range(40))
    blocks = built.indexed_blocks("a")
    assert len(blocks) == len(set(blocks)) == log.num_blocks
    assert built.indexed_blocks("b") == []
    assert built.index_state("a") is IndexState.SYNCED
    assert built.index_state("nobody") is IndexState.NONE
    built.configure(dataclasses.replace(built.config, router="random"))
    assert built.index_state("a") is IndexState.NONE
    assert built.indexed_blocks("a") == []
    built.configure(dataclasses.replace(built.config, router="kv", kv_events=False))
    assert built.index_state("a") is IndexState.APPROXIMATE


def test_a_worker_that_has_not_answered_is_catching_up() -> None:
    built = Router(RouterConfig(router="kv"), 4, ManualClock(), request_replay=lambda *_: None)
    built.add_worker(worker("a"))
    assert built.index_state("a") is IndexState.CATCHING_UP


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_overflowed_is_the_last_choice(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    built = router("kv", "a", "b")
    monkeypatch.setattr(KvPolicy, "scores", lambda policy, candidates: np.array([bad, -7.0]))
    assert {built.choose(request(f"r{number}")).worker_id for number in range(4)} == {"b"}
    assert built.choose(request("last", exclude=("b",))).worker_id == "a"
    monkeypatch.setattr(KvPolicy, "scores", lambda policy, candidates: np.array([bad, bad]))
    assert built.choose(request("all")).worker_id in ("a", "b")


def test_blocks_of_an_adapter_are_no_hit_for_the_model_or_another_adapter() -> None:
    built = Router(RouterConfig(router="kv"), 4, ManualClock())
    for name in ("a", "b"):
        built.add_worker(msgspec.structs.replace(worker(name), adapters=("sql", "chat")))
    publish(built, KvEventLog("a", 0), range(40), lora="sql")
    overlaps = {adapter: built.choose(request(f"r{adapter}", 40, adapter=adapter)) for adapter in ("", "sql", "chat")}
    assert {adapter: decision.overlap_blocks for adapter, decision in overlaps.items()} == {"": 0, "sql": 10, "chat": 0}
    assert overlaps["sql"].worker_id == "a"


@pytest.mark.parametrize("policy", PLAIN + OVERLAP)
def test_only_workers_with_its_adapter_are_candidates(policy: str) -> None:
    built = router(policy, "none")
    for name, adapters in (("sql", ("sql@1",)), ("both", ("sql@1", "chat@1"))):
        built.add_worker(msgspec.structs.replace(worker(name), adapters=adapters))

    def chosen(adapter: str, **fields: object) -> set[str]:
        asked = (request(f"{adapter}{number}", adapter=adapter, **fields) for number in range(40))
        return {built.choose(each).worker_id for each in asked}

    assert chosen("") == {"none", "sql", "both"}
    assert chosen("sql@1") == {"sql", "both"}
    assert chosen("chat@1") == {"both"}
    assert chosen("sql@1", exclude=("both", "none")) == {"sql"}
    for adapter, exclude in (("sql@2", ()), ("chat@1", ("both",))):
        with pytest.raises(WorkerUnavailableError):
            chosen(adapter, exclude=exclude)
    built.add_worker(msgspec.structs.replace(worker("new"), adapters=("sql@2",)))
    assert chosen("sql@2") == {"new"}
    built.remove_worker("new")
    with pytest.raises(WorkerUnavailableError):
        chosen("sql@2")
    for name in ("sql", "both"):
        built.remove_worker(name)
    built.add_worker(msgspec.structs.replace(worker("whole"), adapter="sql@1"))
    assert chosen("sql@1") == {"whole"}
