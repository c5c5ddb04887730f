"""The NATS control plane beyond the contracts: connecting, logins, faults of one process, the server process."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import msgspec
import pytest
import uvloop
from tests.contracts.control_servers import expire_lease, wipe
from tests.contracts.discovery_contract import eventually_puts
from tests.contracts.prefill_queue_contract import PARTITION, prefill
from tests.contracts.waiting import eventually, watching
from tests.control.configured_server import configured_server
from tests.patience import PATIENCE_S, listening, stop, until

from kvrelay.config import ControlConfig
from kvrelay.control import connect_control
from kvrelay.control.base import ControlPlane, Keys, PrefillDelivery
from kvrelay.control.nats import jetstream as jetstream_module
from kvrelay.control.nats.bucket import Bucket
from kvrelay.control.nats.client import TcpTransport, nats_errors
from kvrelay.control.nats.connection import (
    REQUEST_TIMEOUT_S,
    ControlDeniedError,
    NatsConnection,
    NatsMessage,
    NoRespondersError,
    RequestTimeoutError,
    ask_again,
)
from kvrelay.control.nats.discovery import NatsDiscovery
from kvrelay.control.nats.event_bus import NatsEventBus
from kvrelay.control.nats.jetstream import ConsumerInfo, Delivery, JetStream, parse_ack_subject
from kvrelay.control.nats.lease import NatsLease
from kvrelay.control.nats.plane import NatsControlPlane
from kvrelay.control.nats.prefill_queue import NatsPrefillQueue
from kvrelay.control.nats_process import NatsServerProcess, find_binary
from kvrelay.control.queue_order import CLASSES
from kvrelay.errors import (
    AddressInUseError,
    ConfigError,
    ControlUnavailableError,
    PayloadTooLargeError,
    RetryElsewhereError,
)


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServerProcess]:
    process = NatsServerProcess()
    process.start()
    yield process
    process.stop()


@contextlib.asynccontextmanager
async def plane(url: str, namespace: str = "test", **settings: float) -> AsyncIterator[ControlPlane]:
    control = await connect_control(ControlConfig(control=url, namespace=namespace, **settings))
    try:
        yield control
    finally:
        await control.close()


def send(process: NatsServerProcess, signum: signal.Signals) -> None:
    assert process.pid is not None
    os.kill(process.pid, signum)


async def test_a_cancellation_that_comes_with_the_answer_is_not_lost() -> None:
    """``asyncio.wait_for`` in 3.11 swallows it, and a loop around the request would then never end."""
    answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    class Client:
        is_connected = True
        max_payload = 1024

        async def request(self, subject: str, data: bytes, **_: object) -> object:
            return await asyncio.wait_for(answer, PATIENCE_S)

    connection = NatsConnection(Client(), "nats://nowhere")
    asking = asyncio.create_task(connection.request("subject", b""))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answer.set_result("answer")
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()


def test_a_request_in_flight_fails_when_its_connection_is_lost(tmp_path: Path) -> None:
    """Its answer cannot come any more. A keepalive that waited for it would be the last one of a short lease."""
    server = NatsServerProcess(store_dir=tmp_path)

    async def scenario() -> None:
        connection = await NatsConnection.connect(server.start(), PATIENCE_S)
        heard: list[object] = []

        async def hear(message: object) -> None:
            heard.append(message)

        await connection.subscribe("silent", hear)
        asking = asyncio.create_task(connection.request("silent", b"", timeout_s=10 * PATIENCE_S))
        await eventually(lambda: bool(heard))
        server.kill()
        with pytest.raises(ControlUnavailableError, match="no connection"):
            await asyncio.wait_for(asking, PATIENCE_S)
        await connection.close()

    try:
        asyncio.run(scenario())
    finally:
        server.stop()


# -- connecting -------------------------------------------------------------------------------------------------------


def test_namespaces_do_not_see_each_other(nats: NatsServerProcess) -> None:
    async def scenario() -> None:
        async with plane(nats.url, "one") as one, plane(nats.url, "two-B_2") as two:
            await one.discovery.put("kvrelay/one/config/x", b"1")
            await one.prefill_queue.push(prefill("a"))
            assert await two.discovery.list("") == {}
            assert await two.prefill_queue.size() == 0
            assert await one.prefill_queue.size() == 1
            assert one.is_connected

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "value", [b"", b"{", b'{"ttl_s": 0}', b'{"ttl_s": -1}', b'{"ttl_s": 1e300}', b'{"holder": "\xff"}']
)
def test_a_malformed_lease_is_passed_over(nats: NatsServerProcess, value: bytes) -> None:
    async def scenario() -> None:
        async with plane(nats.url, "noise") as control:
            await control.discovery.put("kvrelay/noise/leases/stranger", value)
            await control.discovery.put("kvrelay/noise/config/x", value)
            assert await control.discovery.get("kvrelay/noise/config/x") == value

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "url", ["", "http://h:1", "nats://", "nats://h:0x1", "nats://h:99999", "nats://h:4222?x=1", "h"]
)
def test_a_malformed_control_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        asyncio.run(connect_control(ControlConfig(control=url)))


@pytest.mark.parametrize("namespace", ["", "a.b", "a b", "a/b", "*", "ü", "x" * 65])
def test_a_malformed_namespace_is_refused(namespace: str) -> None:
    with pytest.raises(ConfigError, match="namespace"):
        asyncio.run(connect_control(ControlConfig(control="nats://127.0.0.1:1", namespace=namespace)))


def test_an_unknown_discovery_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="consul"):
        asyncio.run(connect_control(ControlConfig(control="nats://127.0.0.1:1", discovery="consul://h:1")))


def test_connecting_without_a_server_fails(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ControlUnavailableError) as caught:
        asyncio.run(connect_control(ControlConfig(control="nats://u:secret@127.0.0.1:1", connect_timeout_s=0.5)))
    assert "nats://127.0.0.1:1" in caught.value.message
    assert "\n" not in caught.value.message
    assert "secret" not in caught.value.message
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert capfd.readouterr().err == ""


def test_a_server_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    process = NatsServerProcess(tmp_path)
    process.start()
    process.kill()

    async def scenario() -> None:
        starting = asyncio.get_running_loop().run_in_executor(None, lambda: (time.sleep(0.3), process.start()))
        async with plane(process.url, connect_timeout_s=PATIENCE_S) as control:
            assert control.is_connected
        await starting

    try:
        asyncio.run(scenario())
    finally:
        process.stop()


@pytest.mark.parametrize("answers", [b"", b"INFO {}\r\n"])
def test_leaving_while_the_server_is_away(tmp_path: Path, answers: bytes) -> None:
    """With a pull under way and a reconnection that gets nowhere: its end is no error."""
    server = NatsServerProcess(store_dir=tmp_path)
    url = server.start()

    async def scenario() -> None:
        errors: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        reached, is_over = asyncio.Event(), asyncio.Event()

        async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(answers)
            reached.set()
            await is_over.wait()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

        control = await connect_control(ControlConfig(control=url, namespace="test"))
        pulling = asyncio.create_task(control.prefill_queue.pull("x", 30.0))
        await asyncio.sleep(0.1)
        server.end()
        silent = await asyncio.start_server(accept, "127.0.0.1", int(url.rsplit(":", 1)[1]))
        async with silent, asyncio.timeout(PATIENCE_S):
            await reached.wait()
            pulling.cancel()
            await asyncio.wait([pulling])
            await control.close()
            is_over.set()
            await asyncio.sleep(0.05)
        assert errors == []

    try:
        asyncio.run(scenario())
    finally:
        server.stop()


async def test_only_a_silent_server_is_pinged_and_one_that_does_not_answer_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvrelay.control.nats.connection.PING_INTERVAL_S", 2.0)
    monkeypatch.setattr("kvrelay.control.nats.client.PING_TIMEOUT_S", 1.0)
    pings, talks, answers = 0, True, True
    is_left = asyncio.Event()

    async def talk(writer: asyncio.StreamWriter) -> None:
        while talks:
            writer.write(b"PING\r\n")
            await asyncio.sleep(0.05)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal pings
        writer.write(b'INFO {"server_id":"x","version":"2.11.0","max_payload":1000,"proto":1,"headers":true}\r\n')
        talking = None
        while line := await reader.readline():
            pings += line == b"PING\r\n"
            if line == b"PING\r\n" and answers:
                writer.write(b"PONG\r\n")
                talking = talking or asyncio.create_task(talk(writer))
        is_left.set()
        writer.close()

    async with listening(serve) as port:
        connection = await NatsConnection.connect(f"nats://127.0.0.1:{port}", PATIENCE_S)
        await asyncio.sleep(3.0)
        assert pings == 1, "of the login"
        talks = False
        await eventually(lambda: pings >= 3)
        assert connection.is_connected
        answers = False
        await asyncio.wait_for(is_left.wait(), PATIENCE_S)
        await connection.close()


GREETING = b'INFO {"server_id":"x","version":"2.11.0","max_payload":1000,"proto":1,"headers":true}\r\n'


@pytest.mark.parametrize(
    ("farewell", "greeting"),
    [
        (b"-ERR 'User Authentication Expired'\r\n", GREETING),
        (b"-ERR 'Authorization Violation'\r\n", GREETING),
        (b"-ERR 'maximum subscriptions exceeded'\r\n", GREETING),
        (b"", b"INFO\r\n"),
        (b"", b"INFO " + bytes(100_000) + b"\r\n"),
    ],
)
async def test_no_fault_of_a_server_ends_the_client(farewell: bytes, greeting: bytes) -> None:
    """Its reason may pass: a login is renewed, a limit raised. ``greeting``: of the next connection."""
    greetings = [GREETING, greeting, GREETING]
    logins: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greetings.pop(0) if greetings else GREETING)
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                if line == b"PING\r\n":
                    writer.write(b"PONG\r\n")
                if line.startswith(b"CONNECT"):
                    logins.append(writer)

    async with listening(serve) as port:
        connection = await NatsConnection.connect(f"nats://127.0.0.1:{port}", PATIENCE_S)
        try:
            for _ in range(2):
                await eventually(lambda: connection.is_connected and len(logins) > 0)
                last = logins.pop()
                last.write(farewell)
                last.close()
            await eventually(lambda: connection.is_connected and len(logins) > 0)
        finally:
            await connection.close()


@pytest.mark.parametrize("error", [asyncio.CancelledError(), AttributeError("writelines"), ConnectionResetError()])
def test_errors_of_the_library_on_closing_are_swallowed(nats: NatsServerProcess, error: BaseException) -> None:
    async def scenario() -> None:
        connection = await NatsConnection.connect(nats.url, 5.0)
        close = connection.client.close

        async def failing() -> None:
            await close()
            raise error

        connection.client.close = failing
        await connection.close()

    asyncio.run(scenario())


def test_a_server_without_jetstream_is_refused(tmp_path: Path) -> None:
    process = NatsServerProcess(tmp_path)
    process.start()
    port = int(process.address.rsplit(":", 1)[1])
    process.end()
    bare = subprocess.Popen([str(find_binary()), "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL)
    try:
        with pytest.raises(ControlUnavailableError, match="JetStream is not available"):
            asyncio.run(connect_control(ControlConfig(control=process.address, connect_timeout_s=PATIENCE_S)))
    finally:
        bare.kill()
        bare.wait()
        process.stop()


@pytest.mark.parametrize("name", ["ünï 你好", 'a "quoted" \\ $HOME #', os.fsdecode(b"latin\xfc\n")], ids=range(3))
def test_a_directory_may_have_any_name(name: str, tmp_path: Path) -> None:
    process = NatsServerProcess(tmp_path / name)
    try:
        process.start()
        assert process.room_problem() is None
        assert (tmp_path / name / "jetstream").is_dir()
        assert sorted(path.name for path in tmp_path.iterdir()) == [name]
    finally:
        process.stop()


def test_a_wrong_token_is_refused_and_the_right_one_accepted(tmp_path: Path) -> None:
    process = NatsServerProcess(tmp_path, token="to:ken")
    url = process.start()
    try:
        asyncio.run(only_the_right_login(url, process.address, secret="ken@"))
    finally:
        process.stop()


def test_a_wrong_password_is_refused_and_the_right_one_accepted(tmp_path: Path) -> None:
    with configured_server(tmp_path, 'authorization { user: "u", password: "p@ss/word" }') as address:
        url = f"nats://u:p%40ss%2Fword@{address}"
        asyncio.run(only_the_right_login(url, f"nats://{address}", secret="ss/word"))


async def only_the_right_login(url: str, address: str, secret: str) -> None:
    async with plane(url) as control:
        await control.discovery.put("kvrelay/test/config/x", b"1")
        assert secret not in repr(control)
    # At once: nobody waits for so long.
    for refused in (address, address.replace("//", "//nobody:wrong@")):
        with pytest.raises(ControlUnavailableError, match=r"[Aa]uthorization"):
            await connect_control(ControlConfig(control=refused, connect_timeout_s=3600.0))


def test_a_prefill_too_large_for_the_server_is_refused_by_name(nats: NatsServerProcess) -> None:
    async def scenario() -> None:
        connection = await NatsConnection.connect(nats.url, PATIENCE_S)
        with pytest.raises(PayloadTooLargeError):
            await connection.publish("a", b"x" * (connection.max_payload_bytes + 1))
        await connection.close()
        await connection.close()
        with pytest.raises(ControlUnavailableError):
            await connection.publish("a", b"")

    asyncio.run(scenario())


async def test_an_answer_too_large_for_the_server_is_an_error_at_once(nats: NatsServerProcess) -> None:
    connection = await NatsConnection.connect(nats.url, PATIENCE_S)
    bus = NatsEventBus(connection)

    async def much(data: bytes) -> bytes:
        return bytes(connection.max_payload_bytes + 1)

    await bus.serve("much", much)
    with pytest.raises(RetryElsewhereError, match="more than the control server accepts"):
        await bus.request("much", b"", PATIENCE_S)
    await connection.close()


@pytest.mark.parametrize("is_service", [False, True])
async def test_a_subscription_that_is_not_certain_is_none(
    nats: NatsServerProcess, monkeypatch: pytest.MonkeyPatch, *, is_service: bool
) -> None:
    """Its caller tries again, and would get everything twice."""
    connection = await NatsConnection.connect(nats.url, PATIENCE_S)
    bus = NatsEventBus(connection)
    flush, heard = connection.flush, list[str]()

    async def answer(data: bytes) -> bytes:
        return data

    async def subscribe(name: str) -> None:
        if is_service:
            await bus.serve("news", answer)
        else:
            await bus.subscribe("news", lambda *_: heard.append(name))

    async def silence() -> None:
        raise RequestTimeoutError("no answer")

    monkeypatch.setattr(connection, "flush", silence)
    with pytest.raises(RequestTimeoutError):
        await subscribe("one")
    monkeypatch.setattr(connection, "flush", flush)
    if is_service:
        with pytest.raises(RetryElsewhereError, match="no service"):
            await bus.request("news", b"", PATIENCE_S)
    else:
        await subscribe("two")
        await bus.publish("news", b"")
        await eventually(lambda: "two" in heard)
        await connection.flush()
        assert heard == ["two"]
    await connection.close()


async def test_a_subscription_whose_drain_gets_no_answer_is_not_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library would keep it for ever, and renew it after each gap."""
    server = NatsServerProcess()
    connection = await NatsConnection.connect(server.start(), PATIENCE_S)
    renewed, heard = asyncio.Event(), list[str]()
    connection.on_reconnected(renewed.set)

    async def hear(message: NatsMessage) -> None:
        heard.append(message.subject)

    async def silence() -> None:
        raise nats_errors.FlushTimeoutError

    try:
        drained = await connection.subscribe("drained", hear)
        await connection.subscribe("kept", hear)
        with monkeypatch.context() as patch:
            patch.setattr(connection.client, "flush", silence)
            with pytest.raises(RequestTimeoutError):
                await connection.drain(drained)
        server.kill()
        server.start()
        await asyncio.wait_for(renewed.wait(), PATIENCE_S)
        for subject in ("drained", "kept"):
            await connection.publish(subject, b"")
        await eventually(lambda: "kept" in heard)
        assert heard == ["kept"]
    finally:
        await connection.close()
        server.stop()


async def test_an_entry_that_is_dropped_does_not_come_again(nats: NatsServerProcess) -> None:
    """Neither a malformed one nor a dead one stays in the stream."""
    connection = await NatsConnection.connect(nats.url, PATIENCE_S)
    jetstream, queue = JetStream(connection), NatsPrefillQueue(connection, "dropped", max_deliveries=1)
    await queue.start()

    async def num_stored() -> int:
        return (await jetstream.stream_info("kvrelay_dropped_prefill")).state.messages

    async def pulled() -> PrefillDelivery | None:
        return await queue.pull(PARTITION, 0.0)

    await queue.push(prefill("poison"))
    delivery = await pulled()
    assert delivery is not None
    await delivery.nak()
    await jetstream.publish(f"kvrelay.dropped.prefill.queue.{PARTITION}", b"nonsense")
    async with asyncio.timeout(PATIENCE_S):
        while (queue.num_malformed, queue.num_dead) != (1, 1) or await num_stored():
            assert await pulled() is None
            await asyncio.sleep(0.02)
    await queue.close()
    await connection.close()


async def test_pushes_in_flight_share_the_creation_of_their_partition(
    nats: NatsServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start, and when the server has lost the stream."""
    consumers: list[object] = []
    refused: list[str] = []
    create_consumer, publish = JetStream.create_consumer, JetStream.publish

    async def counted(jetstream: JetStream, stream: str, config: Mapping[str, object]) -> ConsumerInfo:
        await eventually(lambda: len(refused) in (0, 20))
        consumers.append(config["name"])
        return await create_consumer(jetstream, stream, config)

    async def refusable(jetstream: JetStream, subject: str, data: bytes, headers: object = None) -> int:
        try:
            return await publish(jetstream, subject, data)
        except NoRespondersError:
            refused.append(subject)
            raise

    monkeypatch.setattr(JetStream, "create_consumer", counted)
    monkeypatch.setattr(JetStream, "publish", refusable)
    async with plane(nats.url, "shared") as control:
        queue = control.prefill_queue

        async def push_all() -> None:
            await asyncio.gather(*(queue.push(prefill(f"r{number}")) for number in range(20)))

        await push_all()
        assert len(consumers) == len(CLASSES)
        connection = await NatsConnection.connect(nats.url, PATIENCE_S)
        await connection.request("$JS.API.STREAM.DELETE.kvrelay_shared_prefill", b"")
        await connection.close()
        await push_all()
        assert len(consumers) == 2 * len(CLASSES)
        assert await queue.size(PARTITION) == 20


def test_a_flush_comes_behind_what_was_sent_before(nats: NatsServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subscriber whose flush was answered misses nothing that is published from then on."""

    async def scenario() -> None:
        connection = await NatsConnection.connect(nats.url, PATIENCE_S)
        written = bytearray()
        write, write_lines = TcpTransport.write, TcpTransport.writelines
        monkeypatch.setattr(TcpTransport, "write", lambda own, data: (written.extend(data), write(own, data)))
        monkeypatch.setattr(
            TcpTransport, "writelines", lambda own, lines: (written.extend(b"".join(lines)), write_lines(own, lines))
        )

        async def ignore(message: NatsMessage) -> None: ...

        for _ in range(3):
            await connection.subscribe("a", ignore)
        await connection.flush()
        assert [line.split()[0] for line in bytes(written).splitlines()] == [b"SUB", b"SUB", b"SUB", b"PING"]
        await connection.close()

    asyncio.run(scenario())


def test_stored_keys_are_readable_with_nats_tools(nats: NatsServerProcess) -> None:
    """The raw stream, as ``nats kv`` shows it."""

    async def scenario() -> None:
        async with plane(nats.url, "readable") as control:
            lease = await control.discovery.grant(5.0)
            await control.discovery.put(Keys("readable").worker("w-1"), b'{"role": "decode"}', lease)
            connection = await NatsConnection.connect(nats.url, PATIENCE_S)
            subject = "$JS.API.DIRECT.GET.KV_kvrelay_readable.$KV.kvrelay_readable.kvrelay.readable."
            worker = await connection.request(f"{subject}workers.w-1", b"")
            assert worker.data == b'{"role": "decode"}'
            held = await connection.request(f"{subject}leases.{lease.lease_id}", b"")
            assert b'"ttl_s":5.0' in held.data
            await connection.close()
            await lease.revoke()

    asyncio.run(scenario())


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_process_that_was_stopped_registers_again(nats: NatsServerProcess) -> None:
    """SIGSTOP for longer than a lease: the others see it go, and come back, under a new lease."""
    code = (
        "import asyncio, sys\n"
        "from kvrelay.config import ControlConfig\n"
        "from kvrelay.control import connect_control\n"
        "async def main():\n"
        "    control = await connect_control(ControlConfig(control=sys.argv[1], namespace='stopped'))\n"
        "    lease = await control.discovery.grant(0.6)\n"
        "    lease.on_lost(lambda: print('lost', flush=True))\n"
        "    await control.discovery.put('kvrelay/stopped/workers/w', b'1', lease)\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )

    async def scenario(child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        assert await asyncio.to_thread(child.stdout.readline) == "ready\n"
        async with plane(nats.url, "stopped") as control, watching(control.discovery, "kvrelay/") as watch:
            await eventually(lambda: watch.state == {"kvrelay/stopped/workers/w": b"1"})
            await asyncio.to_thread(stop, child.pid)
            await eventually(lambda: watch.state == {})
            child.send_signal(signal.SIGCONT)
            await eventually(lambda: watch.state == {"kvrelay/stopped/workers/w": b"1"})
        assert await asyncio.to_thread(child.stdout.readline) == "lost\n"

    child = subprocess.Popen([sys.executable, "-c", code, nats.url], stdout=subprocess.PIPE, text=True)
    try:
        asyncio.run(scenario(child))
    finally:
        child.kill()
        child.communicate()


def test_a_watcher_that_was_slow_does_not_end_a_living_lease(nats: NatsServerProcess) -> None:
    """Its event loop hangs for longer than the lease; the keepalives wait in its socket."""

    async def scenario() -> None:
        async with plane(nats.url, "slow") as watcher, watching(watcher.discovery, "kvrelay/") as watch:
            code = (
                "import asyncio, sys\n"
                "from kvrelay.config import ControlConfig\n"
                "from kvrelay.control import connect_control\n"
                "async def main():\n"
                "    control = await connect_control(ControlConfig(control=sys.argv[1], namespace='slow'))\n"
                "    lease = await control.discovery.grant(1.5)\n"
                "    lease.on_lost(lambda: print('lost', flush=True))\n"
                "    await control.discovery.put('kvrelay/slow/workers/w', b'1', lease)\n"
                "    await asyncio.to_thread(sys.stdin.read)\n"
                "    await control.close()\n"
                "asyncio.run(main())\n"
            )
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, nats.url, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            try:
                await eventually(lambda: bool(watch.state))
                time.sleep(2.5)  # noqa: ASYNC251 - the point
                await asyncio.sleep(0.5)
                assert watch.num_deletes == 0
            finally:
                output, _ = await child.communicate(b"")
            assert output == b""

    asyncio.run(scenario())


async def test_a_far_server_is_asked_four_times_before_a_short_lease_ends(
    nats: NatsServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer takes a fifth of the lease's time, for ever, so the answers of a server that pauses look alike."""
    asked: list[int] = []
    """After which keepalive."""
    has_lease = Bucket.has_lease
    async with plane(nats.url, "far") as control, watching(control.discovery, "kvrelay/") as watch:
        assert isinstance(control.discovery, NatsDiscovery)
        table = control.discovery.mirror.table

        async def from_afar(bucket: Bucket, lease_id: str) -> bool:
            state = table.lease(lease_id)
            assert state is not None
            asked.append(state.seq)
            await asyncio.sleep(0.2)
            return await has_lease(bucket, lease_id)

        monkeypatch.setattr(Bucket, "has_lease", from_afar)
        lease = await control.discovery.grant(1.0)
        await eventually_puts(control.discovery, "kvrelay/far/workers/w", b"1", lease)
        await eventually(lambda: bool(watch.state))
        assert isinstance(lease, NatsLease)
        await lease.stop()
        await eventually(lambda: watch.state == {})
        assert asked.count(asked[-1]) == 4


def test_a_server_that_hangs_costs_no_registration(tmp_path: Path) -> None:
    """Silent for twice the lease's time, as in a network cut: the holder cannot know whether others see it as dead, and
    counts its lease as lost; but nobody ended it."""
    process = NatsServerProcess(tmp_path)
    url = process.start()

    async def scenario() -> None:
        async with plane(url) as one, plane(url) as two, watching(two.discovery, "kvrelay/") as watch:
            lease = await one.discovery.grant(1.0)
            lost: list[str] = []
            lease.on_lost(lambda: lost.append("lost"))
            await one.discovery.put("kvrelay/test/workers/w", b"1", lease)
            await eventually(lambda: bool(watch.state))
            lease_id = lease.lease_id
            send(process, signal.SIGSTOP)
            await eventually(lambda: lost == ["lost"])
            await asyncio.sleep(1.0)
            assert lost == ["lost"]
            send(process, signal.SIGCONT)
            await asyncio.sleep(2.0)
            assert watch.num_deletes == 0
            await eventually(lambda: lease.alive_until_s > time.monotonic())
            assert lease.lease_id == lease_id
            assert watch.state == {"kvrelay/test/workers/w": b"1"}
            assert await two.discovery.list("") == watch.state

    try:
        asyncio.run(scenario())
    finally:
        process.stop()


def test_a_server_that_pauses_is_asked_again(tmp_path: Path) -> None:
    """For longer than one request may take, as when its disk is slow. Nobody's command fails for that."""
    process = NatsServerProcess(tmp_path)
    url = process.start()

    async def scenario() -> None:
        async with plane(url, connect_timeout_s=PATIENCE_S) as control:
            await control.discovery.put("kvrelay/test/config/x", b"1")
            send(process, signal.SIGSTOP)
            reading = asyncio.create_task(control.discovery.list("kvrelay/test/config/"))
            await asyncio.wait({reading}, timeout=REQUEST_TIMEOUT_S * 1.2)
            send(process, signal.SIGCONT)
            assert await reading == {"kvrelay/test/config/x": b"1"}

    try:
        asyncio.run(scenario())
    finally:
        process.stop()


async def test_only_a_request_without_an_answer_is_repeated() -> None:
    answers: list[Exception | int] = [RequestTimeoutError("slow"), RequestTimeoutError("slow"), 7]

    async def ask() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await ask_again(ask, PATIENCE_S) == 7
    answers = [ControlDeniedError("no"), 7]
    with pytest.raises(ControlDeniedError):
        await ask_again(ask, PATIENCE_S)
    answers = [RequestTimeoutError("slow"), 7]
    with pytest.raises(RequestTimeoutError):
        await ask_again(ask, 0.0)


async def test_a_revocation_is_not_missed_while_the_lease_is_looked_for(nats: NatsServerProcess) -> None:
    """The answer that the lease is there may be older than the news that it is not."""
    lost: list[str] = []

    class SlowBucket(Bucket):
        async def has_lease(self, lease_id: str) -> bool:
            is_there = await super().has_lease(lease_id)
            if not lost:
                lost.append("the key")
                await self.end_lease(lease_id)
                lease.wake()
            return is_there

    connection = await NatsConnection.connect(nats.url, PATIENCE_S)
    bucket = SlowBucket(JetStream(connection), "revoked")
    await bucket.ensure()
    lease = NatsLease(bucket, 60.0, "", is_watched=lambda: True)
    lease.on_lost(lambda: lost.append("the lease"))
    await lease.start()
    lease.wake()
    await eventually(lambda: lost == ["the key", "the lease"])
    await lease.revoke()
    await connection.close()


async def test_a_key_that_is_deleted_while_its_lease_registers_again_stays_away(nats: NatsServerProcess) -> None:
    """A worker that drains while its lease was lost leaves the list of workers for good."""
    told: list[str] = []

    class Deleting(Bucket):
        async def put(self, key: str, value: bytes, lease_id: str | None) -> int:
            told.append(key)
            if len(told) == 3:  # the first of the two again
                lease.forget("second")
                await self.delete("second")
            return await super().put(key, value, lease_id)

    connection = await NatsConnection.connect(nats.url, PATIENCE_S)
    bucket = Deleting(JetStream(connection), "again")
    await bucket.ensure()
    lease = NatsLease(bucket, 60.0, "", is_watched=lambda: True)
    await lease.start()
    await lease.put("first", b"1")
    await lease.put("second", b"2")
    old = lease.lease_id
    await expire_lease(bucket, old)
    lease.wake()
    await eventually(lambda: lease.lease_id not in ("", old))
    await lease.put("third", b"3")  # once everything is there again
    assert told == ["first", "second", "first", "third"]
    await lease.revoke()
    await connection.close()


def test_a_watcher_knows_the_first_keepalive_of_a_new_lease(nats: NatsServerProcess) -> None:
    """Otherwise it gives a process that died at once another time to live."""

    async def scenario() -> None:
        async with plane(nats.url, "first") as one, plane(nats.url, "first") as two:
            assert isinstance(two.discovery, NatsDiscovery)
            async with watching(two.discovery, "kvrelay/") as watch:
                lease = await one.discovery.grant(60.0)
                await one.discovery.put("kvrelay/first/workers/w", b"1", lease)
                await eventually(lambda: bool(watch.state))
                state = two.discovery.mirror.table.lease(lease.lease_id)
                assert state is not None
                known_seq = state.seq
                connection = await NatsConnection.connect(nats.url, PATIENCE_S)
                keepalive = await Bucket(JetStream(connection), "first").last_keepalive(lease.lease_id)
                assert keepalive is not None
                assert 0 < known_seq <= keepalive.seq  # another may have come between
                await connection.close()

    asyncio.run(scenario())


def test_a_newcomer_ends_no_living_lease_when_the_servers_clock_was_set(
    nats: NatsServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour forwards: by the server's stamps nobody has been heard for so long."""
    create_consumer = JetStream.create_consumer

    async def create_later(self: JetStream, stream: str, config: Mapping[str, object]) -> ConsumerInfo:
        info = await create_consumer(self, stream, config)
        return msgspec.structs.replace(info, created=info.created + datetime.timedelta(hours=1))

    async def scenario() -> None:
        key, lost = "kvrelay/clock/workers/w", list[str]()
        async with plane(nats.url, "clock") as one, plane(nats.url, "clock") as newcomer:
            lease = await one.discovery.grant(4.0)
            lease.on_lost(lambda: lost.append("lost"))
            await one.discovery.put(key, b"1", lease)
            monkeypatch.setattr(JetStream, "create_consumer", create_later)
            async with watching(newcomer.discovery, "kvrelay/") as watch:
                await eventually(lambda: watch.state == {key: b"1"})
                assert (watch.num_deletes, lost) == (0, [])

    asyncio.run(scenario())


def test_entries_of_dead_processes_are_deleted(nats: NatsServerProcess) -> None:
    async def scenario() -> None:
        async with plane(nats.url, "swept") as one:
            lease = await one.discovery.grant(1.0)
            for number in range(5):
                await one.discovery.put(f"kvrelay/swept/workers/{number}", b"1", lease)
        await asyncio.sleep(1.2)
        async with plane(nats.url, "swept") as two:
            assert await two.discovery.list("") == {}
            connection = await NatsConnection.connect(nats.url, PATIENCE_S)
            subject = "$JS.API.DIRECT.GET.KV_kvrelay_swept.$KV.kvrelay_swept.kvrelay.swept.workers.4"
            async with asyncio.timeout(PATIENCE_S):
                while ((await connection.request(subject, b"")).headers or {}).get("KV-Operation") != "PURGE":
                    await asyncio.sleep(0.02)
            await connection.close()

    asyncio.run(scenario())


# -- the server process -----------------------------------------------------------------------------------------------


def test_a_directory_that_cannot_be_made_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Not a directory\): make it writable, or give another .* \(--nats-dir\)"):
        NatsServerProcess(tmp_path / "file" / "data").start()


def test_the_server_keeps_port_and_data_over_restarts(tmp_path: Path) -> None:
    process = NatsServerProcess(tmp_path)
    url = process.start()
    assert process.start() == url
    assert process.is_running

    async def put() -> None:
        async with plane(url) as control:
            await control.discovery.put("kvrelay/test/config/x", b"1")

    async def get() -> bytes | None:
        async with plane(url) as control:
            return await control.discovery.get("kvrelay/test/config/x")

    try:
        asyncio.run(put())
        process.end()
        assert not process.is_running
        assert process.start() == url
        assert asyncio.run(get()) == b"1"
        process.kill()
        wipe(tmp_path)
        process.start()
        assert asyncio.run(get()) is None
    finally:
        process.stop()
        process.stop()
    assert tmp_path.exists()


def test_the_port_goes_to_no_other_program_while_the_server_is_down() -> None:
    process = NatsServerProcess()
    process.start()
    port = int(process.address.rsplit(":", 1)[1])
    try:
        process.kill()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        process.start()
    finally:
        process.stop()


def test_a_temporary_store_goes_with_the_server() -> None:
    process = NatsServerProcess()
    process.start()
    directory = process.store_dir
    assert directory is not None
    assert directory.is_dir()
    process.stop()
    assert not directory.exists()


def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import sys, threading, pathlib\n"
        "from kvrelay.control.nats_process import NatsServerProcess\n"
        "process = NatsServerProcess(pathlib.Path(sys.argv[1]))\n"
        "starter = threading.Thread(target=process.start)\n"
        "starter.start(); starter.join()\n"
        "assert process.is_running\n"
        "print(process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    pid = int(child.stdout.readline())
    assert _is_alive(pid)
    child.kill()
    child.communicate()
    until(lambda: not _is_alive(pid))


def _is_alive(pid: int) -> bool:
    """Not a zombie either: nobody may be there to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_two_servers_do_not_share_their_data(tmp_path: Path) -> None:
    """Each would overwrite what the other one has stored. The lock is the server's: it ends with it."""
    first, second = NatsServerProcess(tmp_path), NatsServerProcess(tmp_path)
    first.start()
    try:
        with pytest.raises(ConfigError, match=f"another NATS server has its data in {tmp_path}: end it"):
            second.start()
        first.kill()
        second.start()
        with pytest.raises(ConfigError, match="another NATS server"):
            first.start()
    finally:
        first.stop()
        second.stop()


def test_each_failure_to_start_a_server_has_its_own_error(tmp_path: Path) -> None:
    process = NatsServerProcess(tmp_path / "one")
    process.start()
    port = int(process.address.rsplit(":", 1)[1])
    try:
        with pytest.raises(AddressInUseError, match=str(port)):
            NatsServerProcess(tmp_path / "two", port).start()
    finally:
        process.stop()
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(ConfigError, match="file"):
        NatsServerProcess(file / "below").start()
    with pytest.raises(ConfigError, match="cannot run"):
        NatsServerProcess(tmp_path, binary=file).start()
    with pytest.raises(ControlUnavailableError, match="ended with code 1"):
        NatsServerProcess(tmp_path, binary=Path("/bin/false")).start()
    crashing = tmp_path / "crashing"
    crashing.write_text("#!/bin/sh\necho 'fatal error: out of threads' >&2\necho 'goroutine 1' >&2\nexit 2\n")
    crashing.chmod(0o700)
    with pytest.raises(ControlUnavailableError, match=r"ended with code 2: stderr: fatal error: out of threads$"):
        NatsServerProcess(tmp_path, binary=crashing).start()
    assert os.access(find_binary(), os.X_OK)


# -- wire forms -------------------------------------------------------------------------------------------------------


def test_acknowledgement_subjects_of_both_ages() -> None:
    expected = Delivery(num_delivered=3, stream_seq=17, consumer_seq=5, timestamp_s=1700000000.5, num_pending=2)
    assert parse_ack_subject("$JS.ACK.S.C.3.17.5.1700000000500000000.2") == expected
    assert parse_ack_subject("$JS.ACK._.hash.S.C.3.17.5.1700000000500000000.2") == expected
    assert parse_ack_subject("$JS.ACK._.hash.S.C.3.17.5.1700000000500000000.2.token") == expected
    for wrong in ("", "a.b", "$JS.ACK.S.C.3.17", "$JS.ACK.S.C.x.17.5.1.2"):
        with pytest.raises(ValueError, match=r"acknowledgement|invalid literal"):
            parse_ack_subject(wrong)


def test_the_plane_can_be_made_without_the_door(nats: NatsServerProcess) -> None:
    async def scenario() -> None:
        control = await NatsControlPlane.connect(nats.url, "test", 5.0)
        await control.close()
        assert not control.is_connected
        assert not control.discovery.is_connected

    asyncio.run(scenario())


async def test_a_message_is_stored_once_the_stream_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers of a cluster hear of a new stream one after the other."""
    jetstream = JetStream(object())  # type: ignore[arg-type]
    answers: list[Exception | int] = [NoRespondersError("nobody"), NoRespondersError("nobody"), 7]
    num_ensured = 0

    async def publish(subject: str, data: bytes, headers: object = None) -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def ensure() -> None:
        nonlocal num_ensured
        num_ensured += 1

    monkeypatch.setattr(jetstream, "publish", publish)
    assert await jetstream.publish_again("S", ensure, "s", b"") == 7
    assert num_ensured == 2
    monkeypatch.setattr(jetstream_module, "STREAM_TIMEOUT_S", 0.0)
    answers = [NoRespondersError("nobody"), 7]
    with pytest.raises(NoRespondersError):
        await jetstream.publish_again("S", ensure, "s", b"")


def test_a_reset_connection_is_unavailable_on_uvloop() -> None:
    """For an instant the client does not know yet that the connection is gone. uvloop then raises RuntimeError where
    asyncio drops what is written."""
    server = NatsServerProcess()
    server.start()

    async def flush_until_lost() -> list[BaseException | None]:
        connections = [await NatsConnection.connect(server.url, PATIENCE_S) for _ in range(16)]
        flushes = []
        try:
            send(server, signal.SIGSTOP)
            for connection in connections:
                await connection.publish("unread", b"")  # the kernel of a killed reader resets the connection
            await asyncio.sleep(0.05)
            send(server, signal.SIGKILL)
            while any(connection.is_connected for connection in connections):
                flushes += [asyncio.create_task(each.flush(0.1)) for each in connections if each.is_connected]
                await asyncio.sleep(0)
            return list(await asyncio.gather(*flushes, return_exceptions=True))
        finally:
            for connection in connections:
                await connection.close()

    try:
        errors = uvloop.run(flush_until_lost())
    finally:
        server.stop()
    assert [error for error in errors if not isinstance(error, ControlUnavailableError | None)] == []
