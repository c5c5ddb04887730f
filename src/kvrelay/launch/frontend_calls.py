"""Short HTTP calls to a frontend, off the event loop: health checks, and an operator's questions to its router."""

from __future__ import annotations

import asyncio
import http.client
import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urlsplit

from rich import box
from rich.console import Console
from rich.table import Table

from kvrelay.core.decoding import UNREADABLE, error_text
from kvrelay.errors import InvalidInputError, KvrelayError, WorkerUnavailableError

MAX_ERROR_CHARS = 2000  # a terminal shows them
MAX_ANSWER_BYTES = 256 * 1024 * 1024
"""More than the largest index that a router shows. Another server may answer without an end."""


async def http_call(
    url: str,
    method: str,
    path: str,
    *,
    body: object = None,
    api_key: str | None = None,
    timeout_s: float = 10.0,
    verify: bool = True,
) -> tuple[int, bytes]:
    """Status and body of the answer; ``body`` is sent as JSON. ``verify=False`` takes any certificate.

    Raises InvalidInputError for an invalid URL, WorkerUnavailableError if no answer comes within ``timeout_s``.
    """
    return await asyncio.to_thread(_call, url, method, path, body, api_key, timeout_s, verify)


def http_connection(url: str, timeout_s: float, *, verify: bool = True) -> tuple[http.client.HTTPConnection, str]:
    """A connection that is not open yet, and the path of ``url`` without a slash at its end. Raises
    InvalidInputError."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("it needs http:// or https:// and a host, e.g. http://127.0.0.1:8000")
        # Without a port http.client would search the host for one, and an IPv6 address has colons.
        connection = http.client.HTTPConnection(parts.hostname, parts.port or 80, timeout=timeout_s)
        if parts.scheme == "https":
            context = ssl.create_default_context() if verify else ssl._create_unverified_context()
            port = parts.port or 443
            connection = http.client.HTTPSConnection(parts.hostname, port, timeout=timeout_s, context=context)
    except ValueError as exc:
        raise InvalidInputError(f"{url!r} is not an http URL: {exc}", param="url") from exc
    return connection, parts.path.rstrip("/")


def _call(
    url: str, method: str, path: str, body: object, api_key: str | None, timeout_s: float, verify: bool
) -> tuple[int, bytes]:
    connection, base = http_connection(url, timeout_s, verify=verify)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        connection.request(method, base + path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        content = response.read(MAX_ANSWER_BYTES + 1)
        if len(content) > MAX_ANSWER_BYTES:
            raise ValueError(f"the answer is above {MAX_ANSWER_BYTES} bytes")
        return response.status, content
    except (OSError, ValueError, http.client.HTTPException) as exc:
        raise WorkerUnavailableError(f"no frontend answers at {url}: {exc or type(exc).__name__}") from exc
    finally:
        connection.close()


FIRST_ORDINARY_TOKEN = 32
FAR_FUTURE_S = 10**11


async def explain_route(url: str, prompt: str | list[int], model: str | None, api_key: str | None) -> dict[str, Any]:
    """The JSON of ``POST /v1/kvrelay/route``. Raises WorkerUnavailableError, InvalidInputError, KvrelayError."""
    return await _ask(url, "POST", "/v1/kvrelay/route", api_key, {"model": model, "prompt": prompt})


async def routing_state(url: str, api_key: str | None = None, *, blocks: bool = False) -> dict[str, Any]:
    """The JSON of ``GET /v1/kvrelay/router``; with ``blocks`` also the index. Raises as ``explain_route``."""
    return await _ask(url, "GET", f"/v1/kvrelay/router?blocks={int(blocks)}", api_key, None)


async def request_waterfall(url: str, request_id: str, api_key: str | None = None) -> dict[str, Any]:
    """The JSON of ``GET /debug/requests/ID``. Raises as ``explain_route``."""
    return await _ask(url, "GET", f"/debug/requests/{quote(request_id, safe='')}", api_key, None)


async def cluster_snapshot(url: str, api_key: str | None = None) -> dict[str, Any]:
    """The JSON of ``GET /debug/cluster`` without its history. Raises as ``explain_route``."""
    return await _ask(url, "GET", f"/debug/cluster?since={FAR_FUTURE_S}", api_key, None)


async def listed_requests(url: str, limit: int, order: str, api_key: str | None = None) -> list[dict[str, Any]]:
    """Of ``GET /debug/requests``. Raises as ``explain_route``."""
    answer = await _ask(url, "GET", f"/debug/requests?order={order}&limit={limit}", api_key, None)
    with understood(url):
        return list(answer["requests"])


def made_up_prompt(num_tokens: int) -> list[int]:
    """A prompt that no cache holds, so that only load decides. Raises InvalidInputError."""
    if num_tokens < 1:
        raise InvalidInputError("a prompt has at least one token", param="explain_tokens")
    return [FIRST_ORDINARY_TOKEN + number * 7919 % 211 for number in range(num_tokens)]


@contextmanager
def understood(url: str) -> Iterator[None]:
    """What ``url`` answered is read or shown: another server, or a frontend of another release, answers anything.
    Raises WorkerUnavailableError."""
    try:
        yield
    except (*UNREADABLE, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as exc:
        raise WorkerUnavailableError(
            f"no frontend of this release answers at {url}: {exc!r}"[:MAX_ERROR_CHARS]
        ) from exc


async def _ask(url: str, method: str, path: str, api_key: str | None, body: object) -> dict[str, Any]:
    base = url.rstrip("/").removesuffix("/v1")
    status, content = await http_call(base, method, path, body=body, api_key=api_key)
    with understood(base):
        answer: Any = json.loads(content)
    if status == 200 and isinstance(answer, dict):
        return answer
    raise KvrelayError(f"{base} answers {status}: {error_text(content, MAX_ERROR_CHARS)}")


def wide_console() -> Console:
    """So wide that no column of a table is cut, even in a narrow terminal or a pipe."""
    return Console(width=1000)


def plain_table(*names: str, caption: str | None = None) -> Table:
    """Without a frame."""
    return Table(*names, caption=caption, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)


def decision_table(answer: dict[str, Any]) -> None:
    """Print a decision as a table of all candidates, with the chosen one marked. Overlap with the prompt, pending
    prefill and context in flight are in tokens. By seconds the score is minus the sum of the times."""
    decision = answer["decision"]
    console = wide_console()
    console.print(
        f"{decision['policy']}: {answer['num_prompt_tokens']} tokens of {answer['model']} go to "
        f"{decision['worker_id']}, which holds {decision['hit_rate']:.0%} (frontend {answer['pid']})",
        highlight=False,
        soft_wrap=True,
    )
    table = plain_table("worker")
    terms = ("first_token_s", "lost_prefix_s", "decode_s", "load_s")
    times = [name for name in terms if any(candidate[name] is not None for candidate in decision["candidates"])]
    titles = (name.removesuffix("_s").replace("_", " ") for name in times)
    for column in ("score", *titles, "overlap", "pending", "context", "waiting", "KV used"):
        table.add_column(column, justify="right")
    for candidate in decision["candidates"]:
        chosen = candidate["worker_id"] == decision["worker_id"]
        table.add_row(
            candidate["worker_id"] + (" *" if chosen else ""),
            f"{candidate['score']:,.4g}" if abs(candidate["score"]) < 1000 else f"{candidate['score']:,.0f}",
            *(f"{candidate[name] or 0.0:.4f} s" for name in times),
            f"{candidate['overlap_blocks'] * answer['block_size']:,}",
            f"{candidate['prefill_tokens']:,}",
            f"{candidate['decode_tokens']:,}",
            str(candidate["num_waiting"]),
            f"{candidate['cache_usage']:.0%}",
            style="bold" if chosen else "",
        )
    console.print(table)
    if answer.get("pair"):
        _pair_table(answer["pair"], console)
    console.print(counts_line(answer["counts"]), highlight=False, soft_wrap=True)


def counts_line(counts: dict[str, Any]) -> str:
    """What the frontend has decided since its start, and what was refused and why; zeros are left out."""
    parts = [f"placed without costs: {counts['fallbacks']}"]
    for title, key in (("prefills", "places"), ("refused by workers", "refusals"), ("refused here", "rejections")):
        found = [f"{reason} {count}" for reason, count in sorted(counts[key].items()) if count]
        parts.append(f"{title}: {', '.join(found) or 'none'}")
    return "since this frontend's start: " + "; ".join(parts)


def _estimates(pair: dict[str, Any]) -> str:
    """Seconds to the first token by each way that was open."""
    ways = pair.get("ways") or {}
    return "".join(f", {way} {ways[way][0]:.4f} s" for way in ("local", "pair", "queue") if ways.get(way))


def _pair_table(pair: dict[str, Any], console: Console) -> None:
    """The way of a request of the orders auto and prefill-first: the estimates, then the pair and the cheapest others,
    in seconds or in tokens of prefill."""
    decode, prefill = pair["decode"]["worker_id"], pair["prefill"]
    if prefill is None:
        console.print(
            f"no pair: {decode} places the prefill ({pair['place']}{_estimates(pair)})", highlight=False, soft_wrap=True
        )
        return
    console.print(
        f"pair{_estimates(pair)}: {prefill['worker_id']} prefills, holding {prefill['hit_rate']:.0%}; "
        f"{decode} decodes, holding {pair['decode']['hit_rate']:.0%}",
        highlight=False,
        soft_wrap=True,
    )
    if not pair["candidates"]:
        return
    digits = 4 if pair["unit"] == "s" else 0
    table = plain_table("prefill worker", "decode worker", caption="~: the transfer's time is estimated, not measured")
    for column in (f"cost, {pair['unit']}", "prefill", "decode", "transfer"):
        table.add_column(column, justify="right")
    for candidate in pair["candidates"]:
        chosen = (candidate["prefill_worker_id"], candidate["decode_worker_id"]) == (prefill["worker_id"], decode)
        table.add_row(
            candidate["prefill_worker_id"] + (" *" if chosen else ""),
            candidate["decode_worker_id"],
            *(f"{candidate[name]:,.{digits}f}" for name in ("cost", "prefill_cost", "decode_cost")),
            f"{'' if candidate['is_transfer_measured'] else '~'}{candidate['transfer_cost']:,.{digits}f}",
            style="bold" if chosen else "",
        )
    console.print(table)
