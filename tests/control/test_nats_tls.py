"""Control URLs with TLS: errors are one line, nothing secret is sent in the clear, nothing is warned of."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from tests.certificates import make_certificate
from tests.control.configured_server import configured_server
from tests.patience import PATIENCE_S

from kvrelay.config import ControlConfig
from kvrelay.control import connect_control
from kvrelay.control.nats.connection import NatsConnection
from kvrelay.errors import ControlUnavailableError

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    directory = tmp_path_factory.mktemp("tls")
    certificate, key = make_certificate(directory)
    config = f'tls {{ cert_file: "{certificate}", key_file: "{key}" }}\nauthorization {{ user: u, password: secret }}\n'
    with configured_server(directory, config) as address:
        yield address, certificate


async def _connect_and_leave(url: str) -> None:
    control = await connect_control(ControlConfig(control=url, connect_timeout_s=60.0))
    await control.discovery.list("kvrelay/")
    await control.close()


@LOOPS
def test_a_tls_session_logs_no_warning(server, new_loop, caplog: pytest.LogCaptureFixture) -> None:
    address, certificate = server
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_connect_and_leave(f"tls://u:secret@{address}?ca={certificate}"))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@LOOPS
@pytest.mark.parametrize(
    ("scheme", "login", "with_ca", "reason"),
    [
        ("nats", "u:secret", False, "CERTIFICATE_VERIFY_FAILED"),
        ("tls", "u:secret", False, "CERTIFICATE_VERIFY_FAILED"),
        ("tls", "u:wrong", True, "uthorization"),
    ],
)
def test_each_tls_error_is_one_line(
    server, new_loop, caplog: pytest.LogCaptureFixture, *, scheme: str, login: str, with_ca: bool, reason: str
) -> None:
    address, certificate = server
    url = f"{scheme}://{login}@{address}" + (f"?ca={certificate}" if with_ca else "")
    with asyncio.Runner(loop_factory=new_loop) as runner, pytest.raises(ControlUnavailableError) as caught:
        runner.run(_connect_and_leave(url))
    assert reason in caught.value.message
    assert "\n" not in caught.value.message
    assert "secret" not in caught.value.message
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


@LOOPS
def test_a_server_without_tls_gets_no_password(new_loop) -> None:
    heard = bytearray()
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","version":"2.11.0","max_payload":1048576,"proto":1}\r\n')
        heard.extend(await reader.read())
        writer.close()
        await writer.wait_closed()
        ended.set()

    async def scenario() -> None:
        listening = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        try:
            with pytest.raises(ControlUnavailableError, match="does not speak TLS"):
                await _connect_and_leave(f"tls://u:secret@127.0.0.1:{port}")
            # No attempt leaves its socket open.
            await asyncio.wait_for(ended.wait(), 60.0)
        finally:
            listening.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(scenario())
    assert bytes(heard) == b""


def test_abandoning_an_attempt_leaks_no_cancellation() -> None:
    """A listener that says nothing: the attempt is cancelled when its time is up, this task is not."""

    async def scenario() -> int:
        ended = asyncio.Event()

        async def say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()
            await writer.wait_closed()
            ended.set()

        listening = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        with pytest.raises(ControlUnavailableError, match=r"no answer in 0\.2 s"):
            await connect_control(ControlConfig(control=f"nats://127.0.0.1:{port}", connect_timeout_s=0.2))
        await asyncio.wait_for(ended.wait(), 60.0)
        listening.close()
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    assert asyncio.run(scenario()) == 0


def _serve_and_fall_silent(listening: socket.socket, context: ssl.SSLContext, is_over: threading.Event) -> None:
    """One TLS session of a server that stops answering once the client is connected: it never takes its leave."""
    raw, _ = listening.accept()
    with raw:
        raw.sendall(
            b'INFO {"server_id":"x","version":"2.11.0","max_payload":1048576,"proto":1,"tls_required":true}\r\n'
        )
        # Closing the TLS side would send its farewell: it is closed with the raw socket, without one.
        session = context.wrap_socket(raw, server_side=True)
        heard = b""
        while b"PING" not in heard:
            heard += session.recv(65536)
        session.sendall(b"PONG\r\n")
        is_over.wait(PATIENCE_S)
        os.close(session.detach())


@LOOPS
def test_a_server_that_falls_silent_keeps_no_socket_open(new_loop, tmp_path: Path) -> None:
    """TLS waits half a minute for the farewell of the other side; the socket must not outlive ``close``."""
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    is_over = threading.Event()

    async def scenario(port: int) -> None:
        connection = await NatsConnection.connect(f"tls://127.0.0.1:{port}?ca={certificate}", PATIENCE_S)
        await connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = threading.Thread(target=_serve_and_fall_silent, args=(listening, context, is_over))
        server.start()
        try:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(scenario(listening.getsockname()[1]))
            gc.collect()  # A socket that is still open is a ResourceWarning, which is an error here.
        finally:
            is_over.set()
            server.join()
