"""The contract of both carriers: what one rank begins, all ranks hear; who leaves or is lost, all ranks hear."""

from __future__ import annotations

import errno
import os
import random
import socket
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.dp.groups import CARRIERS, FACTS, Heard, address_for, formed, join_all
from tests.patience import PATIENCE_S, until

from kvrelay.dp import member as member_module
from kvrelay.dp import server as server_module
from kvrelay.dp import shared_steps as shared_steps_module
from kvrelay.dp.addresses import GroupAddress
from kvrelay.dp.beats import LOADING_SILENCE_S, SilenceDetector
from kvrelay.dp.member import GroupMember
from kvrelay.dp.messages import (
    AllLeft,
    AllReady,
    CoordinatorHello,
    Ended,
    Formed,
    FrameReader,
    FromRank,
    RankInfo,
    RegPart,
    encode,
)
from kvrelay.dp.protocol import StartStep, StepsUntil, raised
from kvrelay.dp.shared_steps import SharedSteps, create_descriptors
from kvrelay.errors import AddressInUseError, ConfigError, FatalError, ProtocolError

each_carrier = pytest.mark.parametrize("carrier", CARRIERS)


@each_carrier
def test_what_one_rank_begins_all_ranks_hear(carrier: str, tmp_path: Path):
    with formed(carrier, tmp_path, num_ranks=3, lookahead=24) as members:
        assert {member.carrier for member in members} == {carrier}
        assert len({member.group_id for member in members}) == 1
        heard = [Heard(member) for member in members]
        members[2].start_step(StartStep(1))
        for each in heard:
            each.wait_for(StepsUntil(25))
        members[0].start_step(StartStep(25))
        members[1].start_step(StartStep(26))
        for each in heard:
            each.wait_for(StepsUntil(50))


@each_carrier
def test_ranks_that_begin_steps_at_once_agree(carrier: str, tmp_path: Path):
    """Every rank hears of every step that any rank has begun, whatever the order; the last word is the same."""
    with formed(carrier, tmp_path, num_ranks=4, lookahead=3) as members:
        heard = [Heard(member) for member in members]
        highest = [0] * len(members)

        def run(number: int) -> None:
            draw = random.Random(number)
            step = 0
            for _ in range(100):
                step += draw.randrange(1, 4)
                highest[number] = step
                members[number].start_step(StartStep(step))

        threads = [threading.Thread(target=run, args=(number,)) for number in range(len(members))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # One more, so that the end is known.
        last = max(highest) + 100
        members[1].start_step(StartStep(last))
        for each in heard:
            each.wait_for(StepsUntil(last + 3))
            assert each.step == last + 3


@each_carrier
def test_all_have_left_when_the_last_has(carrier: str, tmp_path: Path):
    with formed(carrier, tmp_path) as members:
        heard = [Heard(member) for member in members]
        members[1].leave()
        members[0].start_step(StartStep(1))
        for each in heard:
            each.wait_for(StepsUntil(25))
        members[0].leave()
        for each in heard:
            each.wait_for(AllLeft())
            # Nothing that was begun before is told after.
            assert each.step == 25
            assert each.notices[-1] == AllLeft()


def test_a_step_whose_bell_comes_after_the_last_message_is_told_before_it(tmp_path: Path):
    """Shared memory and connection are two ways: a rank that ended without the step would leave the others in it."""
    address, descriptors = GroupAddress(directory=tmp_path), create_descriptors(2)
    with address.listen(1) as listener, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(GroupMember.join, address, RankInfo(1, 2, "place 1", FACTS))
        coordinator, _ = listener.accept()
        with coordinator:
            coordinator.sendall(encode(CoordinatorHello()))
            assert coordinator.recv(4096)
            socket.send_fds(coordinator, [encode(Formed("a group", len(descriptors)))], descriptors)
            member, other = joining.result(), SharedSteps(descriptors, 0, 24)
            notices, is_over = [], threading.Event()

            def deliver(notice: object) -> None:
                notices.append(notice)
                if notice == AllReady():
                    other.start_step(StartStep(26))
                if notice == AllLeft():
                    is_over.set()

            coordinator.sendall(encode(AllReady()) + encode(AllLeft()))
            member.listen(deliver)
            assert is_over.wait(PATIENCE_S)
            member.close()
            other.close()
    assert notices == [AllReady(), StepsUntil(50), AllLeft()]


def test_a_rank_that_decides_late_lowers_no_step_in_shared_memory(monkeypatch: pytest.MonkeyPatch):
    """There is no lock: another rank may begin a later step between a rank's look at the steps and its own."""
    descriptors = create_descriptors(2)
    ranks = [SharedSteps([os.dup(fd) for fd in descriptors], rank, 24) for rank in range(2)]
    heard: list[StepsUntil] = []

    def late(step: int, told: int, lookahead: int) -> int | None:
        monkeypatch.setattr(shared_steps_module, "raised", raised)
        ranks[1].start_step(StartStep(50))
        return raised(step, told, lookahead)

    monkeypatch.setattr(shared_steps_module, "raised", late)
    ranks[0].start_step(StartStep(1))
    assert [os.eventfd_read(bell) for bell in descriptors[1:]] == [1, 1]
    for rank, step in zip(ranks, (25, 74)):
        rank.start_step(StartStep(step))
    for bell in descriptors[1:]:
        os.set_blocking(bell, False)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(bell)  # they have told so
        os.set_blocking(bell, True)
    ranks[0].listen(heard.append)
    for rank in ranks:
        rank.close()
    for fd in descriptors:
        os.close(fd)
    assert heard == [StepsUntil(74)]


def test_a_rank_wakes_the_others_and_hears_its_own_step_within_the_call():
    descriptors = create_descriptors(3)
    ranks = [SharedSteps([os.dup(fd) for fd in descriptors], rank, 24) for rank in range(3)]
    heard: list[tuple[StepsUntil, int]] = []
    ranks[0].listen(lambda step: heard.append((step, threading.get_ident())))
    ranks[0].start_step(StartStep(1))
    assert heard == [(StepsUntil(25), threading.get_ident())]
    assert [os.eventfd_read(bell) for bell in descriptors[2:]] == [1, 1], "the others' bells, once"
    ranks[0].stop()
    ranks[0].start_step(StartStep(26))
    for rank in ranks:
        rank.close()
    for fd in descriptors:
        os.close(fd)
    assert heard[1:] == [], "nothing after the stop"


@each_carrier
@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_rank_ends_the_group(carrier: str, lost: int, tmp_path: Path):
    with formed(carrier, tmp_path, num_ranks=3) as members:
        heard = {rank: Heard(member) for rank, member in enumerate(members) if rank != lost}
        members[lost].close()
        for each in heard.values():
            ended = each.wait_for_kind(Ended)
            assert f"rank {lost} of the data-parallel group" in ended.reason


@each_carrier
def test_a_failed_coordinator_ends_the_group(carrier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    with formed(carrier, tmp_path) as members:
        heard = [Heard(member) for member in members]
        monkeypatch.setattr(server_module.Roster, "left", fail)
        members[1].leave()
        for each in heard:
            assert "the coordinator of the data-parallel group failed" in each.wait_for_kind(Ended).reason


@each_carrier
@pytest.mark.parametrize("are_loaded", [True, False])
def test_a_rank_that_hangs_ends_the_group(
    carrier: str, are_loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with formed(carrier, tmp_path, num_ranks=3) as members:
        server = members[0].server
        assert server is not None
        (hung,) = [server.connections[part] for part, info in server.roster.parts.items() if info.rank == 2]
        monkeypatch.setattr(SilenceDetector, "tick", lambda detector: detector is hung.silence)
        heard = [Heard(member) for member in members]
        for member in members if are_loaded else ():
            member.ready()
        # The rank that hangs hears it as well, if it continues.
        for each in heard:
            reason = each.wait_for_kind(Ended).reason
            assert "rank 2 of the data-parallel group (place 2) has sent nothing for 60 s (--rank-timeout-s)" in reason


@each_carrier
def test_a_coordinator_that_hangs_ends_the_group(carrier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with formed(carrier, tmp_path) as members:
        monkeypatch.setattr(SilenceDetector, "tick", lambda detector: detector is members[1].silence)
        heard = [Heard(member) for member in members]
        for member in members:
            member.ready()
        reason = heard[1].wait_for_kind(Ended).reason
        assert "rank 0 of the data-parallel group, its coordinator, has sent nothing for 60 s" in reason


@each_carrier
def test_an_idle_group_beats(carrier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every rank hears the coordinator again and again, and the coordinator every rank."""
    for module in (server_module, member_module):
        monkeypatch.setattr(module, "BEAT_S", 0.01)
    beats: Counter[SilenceDetector] = Counter()
    monkeypatch.setattr(SilenceDetector, "received", lambda detector: beats.update([detector]))
    monkeypatch.setattr(SilenceDetector, "tick", lambda _: False)
    with formed(carrier, tmp_path, num_ranks=3) as members:
        for member in members:
            Heard(member)
        for member in members:
            member.ready()
        until(lambda: len(beats) == 6 and min(beats.values()) > 20)


@each_carrier
def test_ranks_that_never_load_end_the_group(carrier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "LOAD_TIMEOUT_S", 0.0)
    with formed(carrier, tmp_path) as members:
        for each in [Heard(member) for member in members]:
            reason = each.wait_for_kind(Ended).reason
            assert reason == "rank 0 (place 0), 1 (place 1) of the data-parallel group did not load within 0 s"


@each_carrier
def test_while_ranks_load_they_may_be_silent_for_longer(carrier: str, tmp_path: Path):
    with formed(carrier, tmp_path, silence_s=30.0) as members:
        server = members[0].server
        assert server is not None
        detectors = [member.silence for member in members] + [each.silence for each in server.connections.values()]
        assert [each.timeout_s for each in detectors] == [LOADING_SILENCE_S] * 4
        heard = [Heard(member) for member in members]
        for member in members:
            member.ready()
        for each in heard:
            each.wait_for(AllReady())
        until(lambda: [each.timeout_s for each in detectors] == [30.0] * 4)


def test_silence_is_counted_in_ticks():
    detector = SilenceDetector(2.0)
    assert [detector.tick() for _ in range(5)] == [False] * 4 + [True]
    detector.received()
    assert not detector.tick()
    detector.allow(1.0)
    assert [detector.tick() for _ in range(3)] == [False] * 2 + [True]


# -- groups that do not come about ------------------------------------------------------------------------------------


@each_carrier
@pytest.mark.parametrize(
    ("second", "reason"),
    [
        (RankInfo(1, 2, "b", {**FACTS, "version": "2"}), r"must agree: version is 2 on rank 1 \(b\) and 1 on rank 0"),
        (RankInfo(1, 2, "b", {**FACTS, "ep": "true"}), r"must agree: ep is true on rank 1 \(b\) and None on rank 0"),
        (RankInfo(1, 3, "b", FACTS), r"rank 1 \(b\) has --dp 3, rank 0 has --dp 2"),
        (RankInfo(2, 2, "b", FACTS), r"must be 0 to 1, each once"),
    ],
)
def test_ranks_that_differ_are_refused_on_every_rank(carrier: str, second: RankInfo, reason: str, tmp_path: Path):
    results = join_all(address_for(carrier, tmp_path), [RankInfo(0, 2, "a", FACTS), second])
    for result in results:
        assert isinstance(result, ConfigError)
        with pytest.raises(ConfigError, match=reason):
            raise result


@each_carrier
def test_a_rank_that_does_not_come_is_named(carrier: str, tmp_path: Path):
    infos = [RankInfo(rank, 3, "a", FACTS) for rank in (0, 1)]
    for result in join_all(address_for(carrier, tmp_path), infos, timeout_s=0.5):
        assert isinstance(result, ConfigError)
        assert "rank 2 of the data-parallel group did not register within 0.5 s" in result.message


@each_carrier
def test_a_rank_too_many_is_refused(carrier: str, tmp_path: Path):
    address = address_for(carrier, tmp_path)
    infos = [RankInfo(rank, 2, "a", FACTS) for rank in (0, 1)]
    members = join_all(address, infos)
    try:
        with pytest.raises(ConfigError, match="is complete already"):
            GroupMember.join(address, RankInfo(1, 2, "late", FACTS))
    finally:
        for member in members:
            assert isinstance(member, GroupMember)
            member.close()


@each_carrier
def test_a_place_that_is_taken_is_refused_on_every_rank(carrier: str, tmp_path: Path):
    address = address_for(carrier, tmp_path)
    with address.listen(5) as other:
        other.settimeout(30.0)
        accepted: list[socket.socket] = []

        def foreign_service() -> None:
            connection, _ = other.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            accepted.append(connection)

        thread = threading.Thread(target=foreign_service)
        thread.start()
        first, second = join_all(address, [RankInfo(rank, 2, "a", FACTS) for rank in (0, 1)])
        thread.join()
        for connection in accepted:
            connection.close()
    assert isinstance(first, AddressInUseError)
    assert isinstance(second, FatalError)
    assert "is not the coordinator of a data-parallel group" in second.message


@each_carrier
def test_a_shortage_of_descriptors_delays_the_group_only(carrier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED]

    def fail_first(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise OSError(failures.pop(), "a failure")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_first)
    with formed(carrier, tmp_path):
        assert not failures


def test_where_no_one_listens(tmp_path: Path):
    with pytest.raises(FatalError, match="rank 0 of the data-parallel group does not listen at"):
        GroupMember.join(GroupAddress(directory=tmp_path), RankInfo(1, 2, "a", FACTS), timeout_s=0.1)


@pytest.mark.parametrize("text", ["", "host", "host:", "host:port", "host:65536", "host:0", "relative/path"])
def test_addresses_that_are_none(text: str):
    with pytest.raises(ConfigError, match="--dp-address"):
        GroupAddress.parse(text)


def test_addresses():
    assert GroupAddress.parse("/tmp/x").is_shared_memory
    assert GroupAddress.parse("[::1]:80") == GroupAddress(host="::1", port=80)
    assert str(GroupAddress.parse("10.0.0.1:29500")) == "10.0.0.1:29500"


@pytest.mark.parametrize("name", ["x" * 200, "ünï 你好"])
def test_the_directory_may_have_any_name(tmp_path: Path, name: str):
    """A Unix socket's own address has 107 bytes."""
    (tmp_path / name).mkdir()
    address = GroupAddress.parse(str(tmp_path / name))
    with address.listen(1) as listener, address.connect(1.0):
        listener.accept()[0].close()
    with pytest.raises(AddressInUseError, match=r"cannot listen at .*coordinator"):
        GroupAddress.parse(str(tmp_path / "missing")).listen(1)


def test_noise_at_the_coordinators_port_harms_no_one(tmp_path: Path):
    address = address_for("rpc", tmp_path)
    draw = random.Random(5)

    def make_noise() -> None:
        for number in range(20):
            with address.connect(30.0) as noise:
                noise.sendall(draw.randbytes(200) if number % 2 else encode(StartStep(number)))

    thread = threading.Thread(target=make_noise)
    thread.start()
    infos = [RankInfo(rank, 2, "a", FACTS) for rank in (0, 1)]
    members = join_all(address, infos)
    thread.join()
    try:
        heard = [Heard(member) for member in members if isinstance(member, GroupMember)]
        heard[0].member.start_step(StartStep(7))
        for each in heard:
            each.wait_for(StepsUntil(31))
    finally:
        for member in members:
            assert isinstance(member, GroupMember)
            member.close()


# -- frames -----------------------------------------------------------------------------------------------------------


def test_frames_arrive_in_any_pieces():
    messages = [RegPart(RankInfo(1, 2, "here", FACTS)), StartStep(2**40), StartStep(1)]
    data = b"".join(encode(message) for message in messages)
    reader = FrameReader(FromRank)
    assert [message for byte in data for message in reader.feed(bytes((byte,)))] == messages


def test_other_versions_and_lengths_are_refused():
    frame = encode(StartStep(1))
    with pytest.raises(ProtocolError, match="has version 9"):
        list(FrameReader(FromRank).feed(frame[:4] + b"\x09" + frame[5:]))
    with pytest.raises(ProtocolError, match="is no message"):
        list(FrameReader(FromRank).feed(os.urandom(3) + b"\xff" + frame))
    with pytest.raises(ProtocolError, match="malformed"):
        list(FrameReader(FromRank).feed(frame[:-1] + b"\xc1"))
