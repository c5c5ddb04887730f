from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.patience import PATIENCE_S

from kvrelay.cli import chat as chat_module
from kvrelay.cli.chat import ChatServer, chat
from kvrelay.errors import InvalidInputError, WorkerUnavailableError


@dataclass
class Script:
    """A scripted server: what it answers with, and what it was asked."""

    answers: list[tuple[int, list[str]]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def script() -> Iterator[Script]:
    made = Script()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, json.dumps({"data": [{"id": "the-model"}]}).encode())

        def do_POST(self) -> None:
            made.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            made.keys.append(self.headers.get("authorization"))
            status, lines = made.answers.pop(0)
            self._send(status, "".join(f"{line}\n\n" for line in lines).encode())

        def _send(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    yield made
    server.shutdown()
    server.server_close()


def said(*pieces: str) -> tuple[int, list[str]]:
    events = [json.dumps({"choices": [{"delta": {"content": piece}}]}) for piece in pieces]
    usage = json.dumps({"choices": [], "usage": {}})
    return 200, [f"data: {event}" for event in (*events, usage)] + ["data: [DONE]"]


def run(script: Script, lines: str, *arguments: str) -> Result:
    given = ["--url", script.url, *arguments]
    return CliRunner().invoke(chat, given, input=lines, catch_exceptions=False, standalone_mode=False)


def test_the_conversation_so_far_goes_with_every_question(script: Script) -> None:
    script.answers = [said("Hel", "lo."), said("Bye.")]
    result = run(script, "hi\n\nand now?\n", "--system", "Be brief.", "--max-tokens", "9", "--api-key", "k")
    assert result.stdout == "Hello.\nBye.\n"
    assert script.keys == ["Bearer k"] * 2
    assert script.asked[0] | {"messages": 0} == {"model": "the-model", "max_tokens": 9, "stream": True, "messages": 0}
    assert [(message["role"], message["content"]) for message in script.asked[1]["messages"]] == [
        ("system", "Be brief."),
        ("user", "hi"),
        ("assistant", "Hello."),
        ("user", "and now?"),
    ]


def test_reset_forgets_and_exit_ends(script: Script) -> None:
    script.answers = [said("one"), said("two")]
    run(script, "a\n/reset\nb\n/exit\nc\n")
    assert [len(asked["messages"]) for asked in script.asked] == [1, 1]


def test_a_refused_question_is_not_part_of_the_conversation(script: Script) -> None:
    refusal = json.dumps({"error": {"message": "too long"}})
    script.answers = [said("one"), (400, [refusal]), said("two")]
    result = run(script, "a\nb\nc\n")
    assert "answers 400: too long" in result.stderr
    assert result.return_value == 2  # piped lines: a script must see it
    assert [message["content"] for message in script.asked[2]["messages"]] == ["a", "one", "c"]


def test_ctrl_c_stops_the_answer_and_keeps_what_was_said(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, is_first = ChatServer.stream, True

    def interrupted(server: ChatServer, body: dict[str, Any]) -> Iterator[str]:
        nonlocal is_first
        for piece in ask(server, body):
            yield piece
            if is_first:
                is_first = False
                raise KeyboardInterrupt

    monkeypatch.setattr(ChatServer, "stream", interrupted)
    script.answers = [said("One, ", "two, ", "three"), said("ok")]
    result = run(script, "count\nstop?\n")
    assert result.stdout == "One, \nok\n"
    assert [message["content"] for message in script.asked[1]["messages"]] == ["count", "One, ", "stop?"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((200, ['data: {"choices": [{"delta": {"content": "x"}}]}']), "ended the answer early"),
        ((200, ['data: {"error": {"message": "the worker is gone"}}']), "the worker is gone"),
        ((200, ["x" * 2**21]), "a line has no end"),
        ((200, ["data: " + "[" * 100_000]), "does not answer as OpenAI's API does: RecursionError"),
        ((200, ["data: <html>"]), "does not answer as OpenAI's API does"),
        ((200, ['data: {"answer": "x"}']), "does not answer as OpenAI's API does: KeyError"),
        ((200, ['data: {"error": "no"}']), "does not answer as OpenAI's API does"),
    ],
)
def test_a_broken_stream_is_an_error(script: Script, answer: tuple[int, list[str]], message: str) -> None:
    script.answers = [answer]
    with pytest.raises(WorkerUnavailableError, match=message):
        run(script, "a\n")


def test_a_server_that_dies_within_an_answer_is_an_error() -> None:
    is_read = threading.Event()

    class Dying(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "1000")
            self.end_headers()
            self.wfile.write(b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n')
            assert is_read.wait(PATIENCE_S)
            # A reset instead of an orderly end, as of a machine that has restarted.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Dying) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        pieces = ChatServer(f"http://127.0.0.1:{server.server_port}").stream({})
        assert next(pieces) == "x"
        is_read.set()
        with pytest.raises(WorkerUnavailableError, match="ended the answer early"):
            list(pieces)
        server.shutdown()


def test_what_is_not_openais_list_of_models_is_an_error() -> None:
    for answer in (b"<html>", b"[]", b'{"data": [1]}', b'{"data": [{}]}'):

        class Foreign(BaseHTTPRequestHandler):
            body = answer

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(self.body)

            def log_message(self, *_: object) -> None: ...

        with ThreadingHTTPServer(("127.0.0.1", 0), Foreign) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            with pytest.raises(WorkerUnavailableError, match="does not answer as OpenAI's API does"):
                ChatServer(f"http://127.0.0.1:{server.server_port}").model()
            server.shutdown()


def test_a_server_that_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_module, "MODELS_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(WorkerUnavailableError, match=r"no server answers at .* timed out"):
            ChatServer(url).model()


def test_wrong_urls_are_refused() -> None:
    for url in ("ftp://host", "http://host:port", "http://[::1"):
        with pytest.raises(InvalidInputError, match="is not an http URL"):
            ChatServer(url).model()
    with pytest.raises(WorkerUnavailableError, match=r"no server answers at http://127\.0\.0\.1:1"):
        ChatServer("http://127.0.0.1:1").model()
    with pytest.raises(InvalidInputError, match="answers 404"):
        _not_found()


def _not_found() -> None:
    class Nothing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Nothing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            ChatServer(f"http://127.0.0.1:{server.server_port}/v1").model()
        finally:
            server.shutdown()
