"""A process that is told lines and answers them: what it says at first, how its end is told, what it leaves."""

from __future__ import annotations

import psutil
import pytest

from kvrelay.bench.peer import Peer
from kvrelay.errors import TransferError

ECHO = "tests.bench.echo"


def test_a_peer_answers_line_by_line_until_its_input_ends() -> None:
    with Peer(ECHO) as peer:
        assert peer.hello == b"here\n"
        assert [peer.ask(line) for line in (b"one", b"two")] == [b"one\n", b"two\n"]
        pid = peer.pid
    assert not psutil.pid_exists(pid)
    peer.close()


def test_the_end_of_a_peer_is_told_with_its_last_words() -> None:
    with Peer(ECHO, name="the echo") as peer:
        with pytest.raises(TransferError, match="the echo ended with exit code 1: the reason") as caught:
            peer.ask(b"end")
        assert caught.value.peer == "the echo"
        with pytest.raises(TransferError, match="the reason"):
            peer.ask(b"it is gone, so this cannot be written")


def test_a_peer_that_does_not_start_says_why() -> None:
    with pytest.raises(TransferError, match=r"ended with exit code 1: .*No module named no_such_module"):
        Peer("no_such_module")


def test_a_peer_that_does_not_answer_is_killed() -> None:
    with Peer(ECHO) as peer, pytest.raises(TransferError, match="ended with exit code -9: it said nothing"):
        peer.read(0.01)
