"""An exchange is answered once, and tells its connection whether another request may follow."""

from __future__ import annotations

import pytest

from kvrelay.http.exchange import Exchange, HttpRequest, Response


class Outlet:
    """Notes what the connection would do."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.ends: list[bool] = []
        """Whether the connection is kept, for each end."""

    def send(self, data: bytes) -> None:
        self.sent.append(data)

    def body_changed(self) -> None: ...

    def exchange_done(self, keep_alive: bool) -> None:
        self.ends.append(keep_alive)


def begun(http_minor: int = 1) -> tuple[Exchange, Outlet]:
    outlet = Outlet()
    return Exchange(HttpRequest("GET", "/", http_minor=http_minor), outlet, keep_alive=True), outlet


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_second_answer_is_refused(is_stream: bool) -> None:
    exchange, outlet = begun()
    if is_stream:
        exchange.start_stream(b"text/plain")
    else:
        exchange.respond(Response(200))
    with pytest.raises(RuntimeError, match="answered already"):
        exchange.respond(Response(500))
    assert len(outlet.sent) == 1


@pytest.mark.parametrize(("http_minor", "is_kept"), [(1, True), (0, False)])
def test_only_the_end_of_the_connection_ends_a_stream_without_chunks(http_minor: int, is_kept: bool) -> None:
    exchange, outlet = begun(http_minor)
    exchange.start_stream(b"text/plain")
    exchange.write(b"a")
    exchange.finish()
    assert outlet.ends == [is_kept]
    assert (b"connection: keep-alive" in outlet.sent[0]) is is_kept
    assert (outlet.sent[1:] == [b"a"]) is not is_kept


def test_nothing_is_sent_to_a_client_that_is_gone_and_its_exchange_still_ends() -> None:
    for answer in (lambda exchange: exchange.respond(Response(200)), Exchange.finish):
        exchange, outlet = begun()
        exchange.gone()
        exchange.gone()
        answer(exchange)
        assert (outlet.sent, outlet.ends) == ([], [True])
