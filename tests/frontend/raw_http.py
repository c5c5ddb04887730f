"""Bytes to a socket and back: what no HTTP client would send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, object]:
        value = json.loads(self.body)
        assert isinstance(value, dict)
        return value

    @property
    def error(self) -> dict[str, object]:
        error = self.json["error"]
        assert isinstance(error, dict)
        assert set(error) == {"message", "type", "param", "code"}
        assert "\n" not in error["message"]
        return error


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> RawClient:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def read_answer(self) -> Answer:
        """One answer with a content length or a chunked body."""
        async with asyncio.timeout(60):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
            if headers.get("transfer-encoding") == "chunked":
                body = await self._read_chunks()
            elif "content-length" in headers:
                body = await self.reader.readexactly(int(headers["content-length"]))
            else:
                body = await self.reader.read()
        return Answer(int(lines[0].split(" ")[1]), headers, body)

    async def _read_chunks(self) -> bytes:
        body = b""
        while True:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            data = await self.reader.readexactly(size + 2)
            body += data[:-2]
            if size == 0:
                return body

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            pass


def request_bytes(method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def send(
    port: int, method: str, path: str, body: bytes | dict[str, object] = b"", headers: Mapping[str, str] | None = None
) -> Answer:
    """One request on a connection of its own."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    client = await RawClient.connect(port)
    try:
        client.writer.write(request_bytes(method, path, data, headers))
        return await client.read_answer()
    finally:
        await client.close()


def events(body: bytes) -> list[dict[str, object]]:
    """The JSON of a stream's events; the last one must be [DONE]."""
    texts = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    assert texts[-1] == b"[DONE]"
    return [json.loads(text) for text in texts[:-1]]
