"""Short HTTP calls: what a frontend answers, and which error says that none does."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kvrelay.cli.main import run
from kvrelay.errors import InvalidInputError, KvrelayError, WorkerUnavailableError
from kvrelay.launch import frontend_calls
from kvrelay.launch.frontend_calls import http_call


class Echo(BaseHTTPRequestHandler):
    """Answers with what it was asked; the status is in the path."""

    def do_GET(self) -> None:
        length = int(self.headers.get("content-length", 0))
        said = {
            "method": self.command,
            "path": self.path,
            "body": self.rfile.read(length).decode(),
            "key": self.headers.get("authorization"),
        }
        answer = json.dumps(said).encode()
        self.send_response(404 if "missing" in self.path else 200)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Echo) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_a_call_sends_method_path_body_and_key(url: str) -> None:
    status, body = await http_call(f"{url}/prefix/", "POST", "/route?x=1", body={"prompt": "é"}, api_key="k")
    said = json.loads(body)
    assert (status, said["method"], said["path"], said["key"]) == (200, "POST", "/prefix/route?x=1", "Bearer k")
    assert json.loads(said["body"]) == {"prompt": "é"}
    status, body = await http_call(url, "GET", "/missing")
    assert (status, json.loads(body)["body"], json.loads(body)["key"]) == (404, "", None)


@pytest.mark.parametrize(("url", "port"), [("http://[::1]", 80), ("https://[::1]", 443), ("http://[::1]:81", 81)])
async def test_an_ipv6_address_needs_no_port(url: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []

    def connect(address: object, *_: object) -> None:
        called.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", connect)
    with pytest.raises(WorkerUnavailableError):
        await http_call(url, "GET", "/")
    assert called == [("::1", port)]


async def test_no_answer_and_an_invalid_url_raise_different_errors() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(WorkerUnavailableError, match="no frontend answers"):
            await http_call(f"http://127.0.0.1:{closed.getsockname()[1]}", "GET", "/health")
    for wrong in ("", "127.0.0.1:80", "ftp://host", "http://", "http://host:port"):
        with pytest.raises(InvalidInputError, match="is not an http URL"):
            await http_call(wrong, "GET", "/health")


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (404, b'{"error": "not found"}', "answers 404: not found"),
        (404, b'{"detail": "Not Found"}', "answers 404: "),
        (500, b'["x"]', "answers 500: .*x"),
        (200, b"[1]", "answers 200: .*1"),
    ],
)
async def test_the_errors_of_other_servers_may_be_any_json(
    status: int, body: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontend_calls, "_call", lambda *_: (status, body))
    with pytest.raises(KvrelayError, match=reason):
        await frontend_calls.routing_state("http://127.0.0.1:1")


async def test_a_silent_server_runs_into_the_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(WorkerUnavailableError):
        await http_call(f"http://127.0.0.1:{silent.getsockname()[1]}", "GET", "/health", timeout_s=0.05)


@pytest.mark.parametrize(
    "command", [["top", "--once"], ["top", "--once", "--json"], ["status", "--explain", "a"], ["waterfall", "id"]]
)
@pytest.mark.parametrize(
    "said",
    [
        "[" * 100_000 + "]" * 100_000,
        "<html>",
        '{"requests": 5}',
        '{"requests": [], "decision": [], "workers": null}',
        '{"requests": [], "release": 1, "now_unix": 1e300, "workers": [], "frontends": [], "decision": {}}',
    ],
)
def test_a_server_that_is_no_frontend_is_told(
    command: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(frontend_calls, "_call", lambda *_: (200, said.encode()))
    code = run([*command, "--url", "http://127.0.0.1:1"])
    shown = capsys.readouterr()
    if code == 0:  # JSON is passed on as it came
        assert "--json" in command
        assert json.loads(shown.out)["workers"] in (None, [])
    else:
        assert code == 1
        assert shown.err.startswith("kvrelay: no frontend of this release answers at http://127.0.0.1:1: ")
        assert len(shown.err.splitlines()) == 1


async def test_an_answer_has_an_end(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend_calls, "MAX_ANSWER_BYTES", 10)
    with pytest.raises(WorkerUnavailableError, match="above 10 bytes"):
        await http_call(url, "GET", "/")
