"""One port, several listeners: of one cluster only."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from tests.patience import HAS_IPV6, until

from kvrelay.config import ControlConfig
from kvrelay.errors import AddressInUseError, ConfigError
from kvrelay.http import listening as listening_module
from kvrelay.http import open_listener, reserve_port
from kvrelay.launch.frontend_process import cluster_name


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_frontends_of_a_cluster_share_a_port(opened: ExitStack) -> None:
    first = opened.enter_context(open_listener("127.0.0.1", 0, "a"))
    port = first.getsockname()[1]
    second = opened.enter_context(open_listener("127.0.0.1", port, "a"))
    clients = [opened.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(40)]
    counts = {first: 0, second: 0}

    def all_accepted() -> bool:
        for listener in counts:
            with suppress(BlockingIOError):
                while True:
                    opened.enter_context(listener.accept()[0])
                    counts[listener] += 1
        return sum(counts.values()) == len(clients)

    # A client is connected a moment before its listener knows.
    until(all_accepted)
    assert min(counts.values()) > 0


@pytest.mark.parametrize(("theirs", "ours"), [("a", "b"), ("a", ""), ("", "a"), ("", "")])
def test_other_listeners_on_the_port_are_refused(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch, theirs: str, ours: str
) -> None:
    monkeypatch.setattr(listening_module, "MARK_TIMEOUT_S", 0.05)
    port = opened.enter_context(open_listener("127.0.0.1", 0, theirs)).getsockname()[1]
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(AddressInUseError, match=str(port)) as caught:
            open_listener(host, port, ours)
        assert caught.value.exit_code == 1
        assert "\n" not in caught.value.message
        assert ("another cluster" in caught.value.message) == (bool(theirs) and bool(ours))


def test_a_port_that_another_cluster_has_on_another_address_is_not_shared(opened: ExitStack) -> None:
    """The kernel would spread the connections to that address over both clusters."""
    port = opened.enter_context(open_listener("127.0.0.1", 0, "a")).getsockname()[1]
    opened.enter_context(open_listener("127.0.0.2", port, "b"))
    with pytest.raises(AddressInUseError, match="another cluster"):
        open_listener("0.0.0.0", port, "a")


@pytest.mark.parametrize("changes_hands", [False, True])
def test_the_marks_are_waited_for_and_looked_at_again(
    opened: ExitStack, monkeypatch: pytest.MonkeyPatch, changes_hands: bool
) -> None:
    """The first listener marks its port a moment after it listens; and the port may change hands meanwhile."""
    port = opened.enter_context(open_listener("127.0.0.1", 0, "a")).getsockname()[1]
    own = listening_module.__dict__["_marks"]("127.0.0.1", port)
    found = [own, {"another"}] if changes_hands else [set(), own, own]
    with monkeypatch.context() as patch:
        looks = iter(found)
        patch.setattr(listening_module, "_marks", lambda *_: next(looks))
        if changes_hands:
            with pytest.raises(AddressInUseError, match="another cluster"):
                open_listener("127.0.0.1", port, "a")
        else:
            opened.enter_context(open_listener("127.0.0.1", port, "a"))
        assert next(looks, None) is None
    opened.pop_all().close()
    open_listener("127.0.0.1", port, "b").close()  # nothing stays there


def test_a_reserved_port_is_free_for_listeners_only(opened: ExitStack) -> None:
    """Else a connection or another server may get the port between its choice and the start of a frontend."""
    reserved = opened.enter_context(reserve_port("127.0.0.1", 0))
    port = reserved.getsockname()[1]
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    first = opened.enter_context(open_listener("127.0.0.1", port, "a"))
    opened.enter_context(open_listener("127.0.0.1", port, "a"))
    opened.enter_context(socket.create_connection(("127.0.0.1", port)))
    with pytest.raises(AddressInUseError, match=str(port)):
        reserve_port("127.0.0.1", port)
    first.close()


def test_a_port_can_be_taken_over_when_its_cluster_has_left(opened: ExitStack) -> None:
    listener = open_listener("127.0.0.1", 0, "a")
    port = listener.getsockname()[1]
    second = open_listener("127.0.0.1", port, "a")
    listener.close()
    third = opened.enter_context(open_listener("127.0.0.1", port, "a"))
    second.close()
    with pytest.raises(AddressInUseError):
        open_listener("127.0.0.1", port, "b")
    third.close()
    opened.enter_context(open_listener("127.0.0.1", port, "b"))


def test_another_address_is_another_port(opened: ExitStack) -> None:
    port = opened.enter_context(open_listener("127.0.0.1", 0, "a")).getsockname()[1]
    opened.enter_context(open_listener("127.0.0.2", port, "b"))
    opened.enter_context(open_listener("127.0.0.1", port, "a"))


@pytest.mark.skipif(not HAS_IPV6, reason="this machine has no ::1")
@pytest.mark.parametrize(("host", "reached"), [("localhost", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def test_a_reservation_is_of_the_address_that_is_listened_on(opened: ExitStack, host: str, reached: str) -> None:
    """A name with several addresses: the IPv4 one."""
    port = opened.enter_context(reserve_port(host, 0)).getsockname()[1]
    listener = opened.enter_context(open_listener(host, port))
    assert listener.getsockname()[1] == port
    opened.enter_context(socket.create_connection((reached, port)))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 64, "."])
def test_a_host_that_does_not_resolve_is_refused(host: str) -> None:
    for open_it in (open_listener, reserve_port):
        with pytest.raises(ConfigError, match="cannot listen on"):
            open_it(host, 0)


def test_a_cluster_name_depends_on_control_plane_and_namespace() -> None:
    def name(control: str, **more: str) -> str:
        return cluster_name(ControlConfig(control=control, **more))

    one = name("nats://token@127.0.0.1:4222")
    assert one == name("nats://other@LOCALHOST:4222")
    assert "token" not in one
    assert name("nats://a:1,nats://b:2") == name("nats://b:2,nats://a:1")
    assert len({one, name("nats://127.0.0.1:4223"), name("nats://127.0.0.1:4222", namespace="x")}) == 3
    assert name("nats://a:1", discovery="etcd://b:2") != name("nats://a:1")
