"""What a watcher believes, with a clock moved by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.control.base import WatchEvent, WatchKind
from kvrelay.control.lease_table import LeaseTable
from kvrelay.control.unleased import UnleasedEntries, needs_lease
from kvrelay.core.clock import ManualClock

TTL_S = 10.0


def put(key: str, value: bytes) -> WatchEvent:
    return WatchEvent(WatchKind.PUT, key, value)


def setting(name: str) -> str:
    """The key of an entry that needs no lease."""
    return f"kvrelay/test/config/{name}"


def gone(key: str) -> WatchEvent:
    return WatchEvent(WatchKind.DELETE, key)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def table(clock: ManualClock) -> LeaseTable:
    return LeaseTable(clock)


def test_changes_are_events_and_repetitions_are_not(table: LeaseTable) -> None:
    key = setting("a")
    assert table.put(key, b"1", None, 1) == [put(key, b"1")]
    assert table.put(key, b"1", None, 2) == []
    assert table.put(key, b"2", None, 3) == [put(key, b"2")]
    assert table.delete(key) == [gone(key)]
    assert table.delete(key) == []


def test_an_entry_lives_with_its_lease(table: LeaseTable) -> None:
    assert table.put("a", b"1", "L", 1) == []
    assert table.refresh("L", TTL_S, 2) == [put("a", b"1")]
    assert table.put("b", b"2", "L", 3) == [put("b", b"2")]
    assert table.end("L") == [gone("a"), gone("b")]
    assert table.end("L") == []
    assert table.put("c", b"3", "L", 4) == []
    assert table.visible == {}
    assert list(table.strays()) == ["c"]


def test_strays_are_neither_settings_nor_entries_of_living_leases(table: LeaseTable) -> None:
    """The keeper deletes them."""
    table.put("kvrelay/test/workers/w", b"1", "L", 1)
    table.put(setting("a"), b"1", None, 2)
    assert list(table.strays()) == ["kvrelay/test/workers/w"]
    table.refresh("L", TTL_S, 3)
    assert table.strays() == {}


def test_the_last_put_decides_about_the_lease(table: LeaseTable) -> None:
    table.refresh("L", TTL_S, 1)
    table.refresh("M", TTL_S, 2)
    table.put(setting("a"), b"1", "L", 3)
    table.put("b", b"1", "L", 4)
    assert table.put(setting("a"), b"1", None, 5) == []
    assert table.put("b", b"1", "M", 6) == []
    assert table.end("L") == []
    assert table.end("M") == [gone("b")]


def test_a_lease_is_due_when_it_was_not_refreshed(table: LeaseTable, clock: ManualClock) -> None:
    table.refresh("L", TTL_S, 1)
    clock.advance(6.0)
    table.refresh("M", TTL_S, 2)
    assert table.next_due_s() == 1010.0
    clock.advance(4.0)
    assert table.due() == ["L"]
    table.refresh("L", TTL_S, 3)
    assert table.due() == []
    assert table.next_due_s() == 1016.0
    assert table.lease("L") is not None
    assert table.lease("N") is None


def test_a_takeover_gives_every_lease_a_share_of_its_time_to_live(table: LeaseTable, clock: ManualClock) -> None:
    table.refresh("L", TTL_S, 1)
    table.refresh("M", TTL_S, 2)
    clock.advance(60.0)
    table.trust_all()
    assert table.due() == []
    table.refresh("M", TTL_S, 3)
    clock.advance(TTL_S / 2)
    assert table.due() == ["L"]


def test_a_lease_that_the_server_has_lost_is_timed_by_every_watcher(table: LeaseTable, clock: ManualClock) -> None:
    """Nobody will announce its end, not even to those who hear no refreshes."""
    table.refresh("L", TTL_S, 1)
    table.refresh("M", TTL_S, 2)
    table.begin_resync()
    table.refresh("M", TTL_S, 2)
    table.end_resync()
    clock.advance(TTL_S)
    assert table.due(only_missing=True) == ["L"]
    assert table.next_due_s(only_missing=True) == clock.now()
    table.end("L")
    assert table.next_due_s(only_missing=True) is None


def test_a_lease_that_the_server_has_is_timed_by_the_keeper_alone(table: LeaseTable, clock: ManualClock) -> None:
    table.refresh("L", TTL_S, 1)
    clock.advance(TTL_S)
    assert (table.due(), table.due(only_missing=True)) == (["L"], [])


def test_a_keepalive_of_the_future_came_now(table: LeaseTable, clock: ManualClock) -> None:
    """The server's clock was set back since."""
    table.refresh("L", TTL_S, 1, age_s=-60.0)
    clock.advance(TTL_S)
    assert table.due() == ["L"]


def test_the_shortest_lease_is_known(table: LeaseTable) -> None:
    assert table.shortest_ttl_s is None
    table.refresh("L", 5.0, 1)
    table.refresh("M", 3.0, 2)
    assert table.shortest_ttl_s == 3.0
    table.refresh("M", 7.0, 3)
    assert table.shortest_ttl_s == 5.0
    table.end("L")
    assert table.shortest_ttl_s == 7.0


def test_entries_of_a_lease_that_was_overdue_at_the_start_are_not_shown(table: LeaseTable, clock: ManualClock) -> None:
    table.begin_resync()
    table.put("dead", b"1", "L", 1)
    table.put("alive", b"2", "M", 2)
    table.refresh("L", TTL_S, 3, age_s=10.0)
    table.refresh("M", TTL_S, 4, age_s=9.0)
    assert table.end_resync() == [put("alive", b"2")]
    assert table.due() == []
    assert table.has_unproven
    assert table.next_due_s() == 1001.0, "of the living one"
    clock.advance(4.5)
    assert table.due() == ["M"]
    clock.advance(0.5)
    assert table.due() == ["L", "M"], "the server's clock may have been set: a living one would have been heard"
    assert table.refresh("L", TTL_S, 5) == [put("dead", b"1")]
    assert not table.has_unproven


def test_a_lease_that_is_postponed_is_due_after_the_delay(table: LeaseTable, clock: ManualClock) -> None:
    table.refresh("L", TTL_S, 1)
    clock.advance(TTL_S)
    table.postpone("L", 2.0)
    assert (table.due(), table.next_due_s()) == ([], clock.now() + 2.0)
    table.end("L")
    table.postpone("L", 2.0)
    assert table.next_due_s() is None


def test_a_gap_shows_the_difference_only(table: LeaseTable) -> None:
    table.put(setting("same"), b"1", None, 1)
    table.put(setting("changed"), b"1", None, 2)
    table.put(setting("deleted"), b"1", None, 3)
    table.put(setting("wiped"), b"1", None, 4)
    table.begin_resync()
    assert table.put(setting("same"), b"1", None, 1) == []
    assert table.put(setting("changed"), b"2", None, 5) == []
    assert table.delete(setting("deleted")) == []
    assert table.put(setting("new"), b"1", None, 7) == []
    assert table.end_resync() == [
        put(setting("changed"), b"2"),
        gone(setting("deleted")),
        put(setting("new"), b"1"),
        gone(setting("wiped")),
    ]


def test_the_living_get_one_time_to_live_after_a_gap(table: LeaseTable, clock: ManualClock) -> None:
    """The server was away for long and has lost everything: nobody could refresh."""
    table.refresh("L", TTL_S, 1)
    table.put("a", b"1", "L", 2)
    clock.advance(60.0)
    table.begin_resync()
    assert table.end_resync() == []
    assert table.due() == []
    assert table.visible == {"a": b"1"}
    table.refresh("M", TTL_S, 1)
    assert table.put("a", b"1", "M", 2) == []
    clock.advance(TTL_S)
    assert table.due() == ["L", "M"]
    assert table.end("L") == []
    assert table.visible == {"a": b"1"}


def test_an_old_lease_known_before_the_gap_gets_one_time_to_live_too(table: LeaseTable, clock: ManualClock) -> None:
    """The server was away for long and has kept everything."""
    table.refresh("L", TTL_S, 1)
    table.put("a", b"1", "L", 2)
    clock.advance(60.0)
    table.begin_resync()
    table.put("a", b"1", "L", 2)
    table.refresh("L", TTL_S, 1, age_s=60.0)
    assert table.end_resync() == []
    assert table.due() == []
    assert table.next_due_s() == clock.now() + TTL_S
    table.refresh("L", TTL_S, 3, age_s=6.0)
    assert table.next_due_s() == clock.now() + 4.0, "after the gap an age counts again"
    clock.advance(TTL_S)
    assert table.due() == ["L"]


def test_a_marker_seen_after_the_gap_counts_at_once(table: LeaseTable) -> None:
    table.refresh("L", TTL_S, 1)
    table.refresh("M", TTL_S, 2)
    table.put("a", b"1", "L", 3)
    table.put("b", b"1", "M", 4)
    table.begin_resync()
    table.put("a", b"1", "L", 3)
    table.end("L")
    table.refresh("M", TTL_S, 6)
    assert table.end_resync() == [gone("a"), gone("b")]
    assert list(table.strays()) == ["a"], "the server still has it"
    table.begin_resync()
    table.end_resync()
    assert table.strays() == {}


def test_a_lease_that_only_an_interrupted_listing_found_has_its_age(table: LeaseTable) -> None:
    for _ in range(2):
        table.begin_resync()
        table.put("dead", b"1", "L", 1)
        table.refresh("L", TTL_S, 2, age_s=60.0)
    assert table.end_resync() == []


def test_an_interrupted_listing_changes_nothing_that_is_seen(table: LeaseTable) -> None:
    table.put(setting("a"), b"1", None, 1)
    table.put(setting("b"), b"1", None, 2)
    table.begin_resync()
    table.put(setting("a"), b"2", None, 3)
    table.begin_resync()
    assert table.visible == {setting("a"): b"1", setting("b"): b"1"}
    table.put(setting("a"), b"2", None, 3)
    assert table.end_resync() == [put(setting("a"), b"2"), gone(setting("b"))]


def test_an_entry_without_a_lease_counts_only_as_a_setting(table: LeaseTable) -> None:
    table.refresh("L", TTL_S, 1)
    assert table.put("kvrelay/test/workers/w", b"1", None, 2) == []
    assert table.put("kvrelay/test/workers/w", b"1", "L", 3) == [put("kvrelay/test/workers/w", b"1")]
    assert table.put("kvrelay/test/workers/w", b"1", None, 4) == [gone("kvrelay/test/workers/w")]
    assert table.put("kvrelay/test/workers/w", b"2", None, 5) == []
    assert table.unleased.num_refused == 2


def test_an_entry_without_a_lease_counts_once_until_too_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvrelay.control.unleased.MAX_REMEMBERED", 2)
    refused = UnleasedEntries()
    for key in ("a", "b", "a", "b"):
        assert refused.refuses(key, has_lease=False)
    assert refused.num_refused == 2
    for key in ("c", "a"):
        assert refused.refuses(key, has_lease=False)
    assert refused.num_refused == 4


def test_only_a_key_below_settings_and_adapters_needs_no_lease() -> None:
    assert not needs_lease(setting("a"))
    assert not needs_lease("kvrelay/test/adapters/a")
    for key in ("kvrelay/test/config", "kvrelay/test/workers/config/a"):
        assert needs_lease(key)


def test_an_entry_that_lost_its_lease_during_a_gap_is_gone_after_it(table: LeaseTable) -> None:
    table.refresh("L", TTL_S, 1)
    table.put("kvrelay/test/workers/w", b"1", "L", 2)
    table.begin_resync()
    table.refresh("L", TTL_S, 1)
    assert table.put("kvrelay/test/workers/w", b"1", None, 3) == []
    assert table.end_resync() == [gone("kvrelay/test/workers/w")]


names = st.sampled_from(["a", setting("b"), setting("c")])
leases = st.sampled_from(["L", "M"])
steps = st.one_of(
    st.tuples(st.just("put"), names, st.sampled_from([None, "L", "M"])),
    st.tuples(st.just("delete"), names, st.none()),
    st.tuples(st.just("refresh"), leases, st.none()),
    st.tuples(st.just("end"), leases, st.none()),
)


@given(st.lists(steps, max_size=40))
def test_the_events_always_add_up_to_what_is_visible(history: list[tuple[str, str, str | None]]) -> None:
    table = LeaseTable(ManualClock())
    told: dict[str, bytes] = {}
    entries: dict[str, tuple[bytes, str | None]] = {}
    alive: set[str] = set()
    for seq, (kind, name, lease) in enumerate(history, 1):
        value = str(seq).encode()
        if kind == "put":
            events = table.put(name, value, lease, seq)
            entries[name] = (value, lease)
            if lease is None and needs_lease(name):
                del entries[name]
        elif kind == "delete":
            events = table.delete(name)
            entries.pop(name, None)
        elif kind == "refresh":
            events = table.refresh(name, TTL_S, seq)
            alive.add(name)
        else:
            events = table.end(name)
            alive.discard(name)
            entries = {key: entry for key, entry in entries.items() if entry[1] != name}
        for event in events:
            if event.kind is WatchKind.PUT:
                told[event.key] = event.value
            else:
                del told[event.key]
        expected = {key: value for key, (value, holder) in entries.items() if holder is None or holder in alive}
        assert told == table.visible == expected
