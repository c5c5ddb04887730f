"""``kvrelay chat``: a conversation in the terminal, with a running server or with one that the command starts."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import click
import msgspec

from kvrelay.core.decoding import error_text
from kvrelay.errors import FatalError, InvalidInputError, WorkerUnavailableError
from kvrelay.launch.frontend_calls import MAX_ERROR_CHARS, http_connection

COMMANDS = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"
CONNECT_TIMEOUT_S, MODELS_TIMEOUT_S = 10.0, 30.0
PIECE_TIMEOUT_S = 600.0
"""Until the next piece of an answer: its prompt may be long, and the machine slow."""
MAX_BYTES = 2**20
"""Of a line, and of what is no stream: another server may answer without an end."""


class ChatServer(msgspec.Struct, frozen=True):
    """An OpenAI server, as the chat uses it."""

    url: str
    api_key: str = ""

    def model(self) -> str:
        """The first served model. Raises WorkerUnavailableError."""
        with self._ask("GET", "/models", None, MODELS_TIMEOUT_S) as answer:
            models = json.loads(answer.read(MAX_BYTES)).get("data", [])
            if not models:
                raise WorkerUnavailableError(f"{self.url} serves no model")
            return str(models[0]["id"])

    def stream(self, body: dict[str, Any]) -> Iterator[str]:
        """The answer's text as it arrives; closing the iterator stops the answer.

        Raises InvalidInputError for a refused request, WorkerUnavailableError if the server or the stream fails.
        """
        content = json.dumps({**body, "stream": True})
        with self._ask("POST", "/chat/completions", content, PIECE_TIMEOUT_S) as answer:
            while line := answer.readline(MAX_BYTES):
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if len(line) == MAX_BYTES:
                    raise ValueError("a line has no end")
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise WorkerUnavailableError(event["error"]["message"])
                for choice in event["choices"]:
                    yield choice["delta"].get("content") or ""
            raise WorkerUnavailableError(f"{self.url} ended the answer early")

    @contextmanager
    def _ask(self, method: str, path: str, body: str | None, timeout_s: float) -> Iterator[http.client.HTTPResponse]:
        """The answer, while its connection is open; if it breaks off, is a foreign one, or says nothing for
        ``timeout_s``: WorkerUnavailableError. Raises InvalidInputError for a refused request."""
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        connection, base = http_connection(self.url, CONNECT_TIMEOUT_S)
        with closing(connection):
            try:
                connection.connect()
                connection.sock.settimeout(timeout_s)
                connection.request(method, f"{base.removesuffix('/v1')}/v1{path}", body, headers)
                answer = connection.getresponse()
            except (OSError, ValueError, http.client.HTTPException) as exc:
                raise WorkerUnavailableError(f"no server answers at {self.url}: {exc}") from exc
            if answer.status != 200:
                raise InvalidInputError(
                    f"{self.url} answers {answer.status}: {error_text(answer.read(MAX_BYTES), MAX_ERROR_CHARS)}"
                )
            try:
                yield answer
            except (OSError, http.client.HTTPException) as exc:
                raise WorkerUnavailableError(f"{self.url} ended the answer early: {exc!r}") from exc
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as exc:
                raise WorkerUnavailableError(f"{self.url} does not answer as OpenAI's API does: {exc!r}") from exc


@click.command()
@click.argument("model", required=False)
@click.option("--url", help="Address of a running server, e.g. http://127.0.0.1:8000; default: start one for MODEL.")
@click.option("--api-key", default="", envvar="KVRELAY_API_KEY", show_envvar=True, help="Key of that server.")
@click.option("--system", "system_prompt", help="System prompt; default: none.")
@click.option("--max-tokens", default=512, type=click.IntRange(1), help="Longest answer, in tokens.")
@click.option("--temperature", type=click.FloatRange(0.0, 100.0), help="Temperature; 0: greedy; default: the model's.")
def chat(
    model: str | None,
    url: str | None,
    api_key: str,
    system_prompt: str | None,
    max_tokens: int,
    temperature: float | None,
) -> int:
    """Talk to MODEL: a checkpoint to serve for this chat with prefill and decode apart, or, with --url, the name of a
    served model. Piped lines are answered one by one.

    Example: kvrelay chat ./SmolLM2-135M-Instruct.Q4_1.gguf
    """
    options: dict[str, Any] = {"max_tokens": max_tokens}
    if temperature is not None:
        options["temperature"] = temperature
    with _server(model, url, api_key) as server:
        options["model"] = model if url and model else server.model()
        if sys.stdin.isatty():
            click.echo(f"{options['model']}: {COMMANDS}")
        return _converse(server, options, [{"role": "system", "content": system_prompt}] if system_prompt else [])


def _converse(server: ChatServer, options: dict[str, Any], opening: list[dict[str, str]]) -> int:
    """The exit code: of the last refusal, 0 without one."""
    messages, code = list(opening), 0
    while (line := _read_line()) is not None:
        text = line.strip()
        if text == "/exit":
            break
        if text == "/reset":
            messages = list(opening)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            answer = _print_answer(server.stream({**options, "messages": messages}))
        except InvalidInputError as exc:
            # Most likely the conversation has outgrown the model's context; the earlier messages still fit.
            click.echo(f"kvrelay: {exc.message}", err=True)
            code = exc.exit_code
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
    return code


def _read_line() -> str | None:
    """The next line; None at the end of input, and for Ctrl-C while no answer is running."""
    try:
        return input("> " if sys.stdin.isatty() else "")
    except (EOFError, KeyboardInterrupt):
        return None


def _print_answer(pieces: Iterator[str]) -> str:
    """Print the pieces as they arrive; Ctrl-C stops the answer and keeps the printed part."""
    said: list[str] = []
    try:
        for piece in pieces:
            said.append(piece)
            click.echo(piece, nl=False)
    except KeyboardInterrupt:
        pass
    finally:
        pieces.close()  # type: ignore[attr-defined]
        click.echo()
    return "".join(said)


@contextmanager
def _server(model: str | None, url: str | None, api_key: str) -> Iterator[ChatServer]:
    """The server at ``url``, or a new one that runs while this context is open."""
    if url:
        yield ChatServer(url, api_key)
        return
    from kvrelay.core.child_process import start_child_process
    from kvrelay.launch.children import kvrelay_command
    from kvrelay.launch.models import resolve_model

    command = kvrelay_command("serve", str(resolve_model(model)), "--prefill", "1", "--decode", "1", "--port", "0")
    # In a process group of its own: Ctrl-C stops an answer, not the server.
    process = start_child_process(command, stdout=subprocess.PIPE, death_signal=signal.SIGTERM)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        if " at http" not in line:
            raise FatalError(f"the server did not start (exit code {process.wait()})")
        yield ChatServer(line.split(" at ", 1)[1].split()[0])
    finally:
        process.terminate()
        process.wait()
