"""``--kv-transfer-config``: a JSON object with the keys of the peer-to-peer design, as options of our commands.

    {"kv_role": "kv_producer", "send_type": "PUT_ASYNC", "kv_port": 21001, "proxy_ip": "10.0.0.1", "proxy_port": 4222}

Keys may also stand in a nested ``kv_connector_extra_config``. It does not know the command line; flags win over it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvrelay.config.addresses import bare_host, host_port
from kvrelay.config.loading import ENV_PREFIX, nearest
from kvrelay.errors import ConfigError

NAME = "kv_transfer_config"
NESTED = "kv_connector_extra_config"
ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both"}
CONTROL_VARIABLE = f"{ENV_PREFIX}CONTROL"
NATS_PORT = 4222
SEND_TYPES = ("PUT", "PUT_ASYNC", "GET")


@dataclass(frozen=True, slots=True)
class _Key:
    """How a key's value is read, and which option it is for one worker and for ``serve``. None: the command refuses it;
    empty: it is used in another way."""

    read: Callable[[str, Any], object]
    worker: str | None
    serve: str | None


def _whole(low: int, high: int = 2**53) -> Callable[[str, Any], int]:
    def read(name: str, value: Any) -> int:
        try:
            number = float(value)  # "1e9" is usual for sizes
        except (TypeError, ValueError) as exc:
            raise ConfigError(f"{name} must be a number, got {value!r}", param=NAME) from exc
        if isinstance(value, bool) or not number.is_integer() or not low <= number <= high:
            raise ConfigError(f"{name} must be a whole number between {low} and {high}, got {value!r}", param=NAME)
        return int(number)

    return read


def _one_of(choices: Mapping[str, object]) -> Callable[[str, Any], object]:
    def read(name: str, value: Any) -> object:
        if not isinstance(value, str) or value not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}", param=NAME)
        return choices[value]

    return read


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a text, got {value!r}", param=NAME)
    return value


_PORT, _RANKS, _COUNT = _whole(0, 65535), _whole(1, 64), _whole(1, 64)
KEYS: dict[str, _Key] = {
    "kv_connector": _Key(_one_of({"P2pNcclConnector": "p2p", "P2pConnector": "p2p"}), "transport", "transport"),
    "kv_role": _Key(_one_of(ROLES), "role", None),
    "kv_buffer_size": _Key(_whole(0), "kv_buffer_size", "kv_buffer_size"),
    "kv_parallel_size": _Key(_COUNT, "", ""),
    "kv_rank": _Key(_whole(0, 63), "", None),
    "kv_port": _Key(_PORT, "kv_port", "kv_port"),
    "proxy_ip": _Key(_text, "", ""),
    "proxy_port": _Key(_PORT, "", ""),
    "http_port": _Key(_PORT, "metrics_port", "port"),
    "send_type": _Key(_one_of({name: name for name in SEND_TYPES}), "send_type", "send_type"),
    "kv_producers_parallel_size": _Key(_COUNT, "", "num_prefill"),
    "kv_producers_tensor_parallel_size": _Key(_RANKS, "tp", "tp_prefill"),
    "kv_producers_pipeline_parallel_size": _Key(_RANKS, "pp", "pp_prefill"),
    "kv_consumers_parallel_size": _Key(_COUNT, "", "num_decode"),
    "kv_consumers_tensor_parallel_size": _Key(_RANKS, "tp", "tp_decode"),
    "kv_consumers_pipeline_parallel_size": _Key(_RANKS, "pp", "pp_decode"),
}


def read_kv_transfer_config(text: str, *, is_serve: bool) -> dict[str, object]:
    """The options that ``text`` stands for, by their names in ``kvrelay serve`` or ``kvrelay worker``.

    ``proxy_ip`` and ``proxy_port`` name the control server: workers send their heartbeats there. Its login is in
    ``KVRELAY_CONTROL``, or as in a URL before the host (``USER:PASSWORD@HOST``): the design has no key for it.
    ``http_port`` is a worker's monitoring port, and with serve the frontend's. Of the parallel sizes a worker takes
    those of its role. ``kv_rank`` and ``kv_parallel_size`` are checked and not used: workers find each other by
    discovery. Raises ConfigError, for an unknown key with the nearest known one.
    """
    given = _flat(text)
    options: dict[str, object] = {"transport": "p2p"}
    role = str(given.get("kv_role", ""))
    for name, value in given.items():
        if name not in KEYS:
            raise ConfigError(f"unknown key {name} in --kv-transfer-config{nearest(name, KEYS)}", param=NAME)
        key = KEYS[name]
        option, read = (key.serve if is_serve else key.worker), key.read(name, value)
        if option is None:
            raise ConfigError(f"{name} is for one worker, and serve starts several: leave it out", param=NAME)
        if option and (is_serve or _concerns(name, role)):
            options[option] = read
    if "proxy_ip" in given or "proxy_port" in given:
        if not given.get("proxy_ip") or not given.get("proxy_port"):
            raise ConfigError("proxy_ip and proxy_port go together in --kv-transfer-config", param=NAME)
        login, host = _login_and_host(str(given["proxy_ip"]))
        port = _PORT("proxy_port", given["proxy_port"])
        if not _is_known_control(host, port):
            options["control"] = f"nats://{login}{host_port(host, port)}"
        elif login:  # the environment's URL may have TLS, too, which this one cannot name
            raise ConfigError(f"proxy_ip has a login, and so has {CONTROL_VARIABLE}: leave one out", param=NAME)
    if "kv_rank" in given and "kv_parallel_size" in given:
        rank, size = int(given["kv_rank"]), int(given["kv_parallel_size"])
        if rank >= size:
            raise ConfigError(f"kv_rank {rank} is no place among {size} instances (kv_parallel_size)", param=NAME)
    return options


def _login_and_host(text: str) -> tuple[str, str]:
    """``proxy_ip`` as the login with its @ (or nothing) and the host. Raises ConfigError without showing the login."""
    login, at, host = text.strip().rpartition("@")
    host = bare_host(host)
    try:
        parts = urlsplit(f"nats://{login}{at}{host_port(host, NATS_PORT)}")
        is_host = parts.hostname == host.lower() and " " not in host and bool(parts.username) == bool(at)
    except ValueError:
        is_host = False
    if not is_host:
        raise ConfigError(
            "proxy_ip must be a host or an address, with a login before it as in a URL (USER:PASSWORD@HOST) or none; "
            "proxy_port is its port",
            param=NAME,
        )
    return login + at, host


def _is_known_control(host: str, port: int) -> bool:
    """Whether the environment has a URL of this control server, with its login. Raises ConfigError if it has another
    server's."""
    given = [url.strip() for url in os.environ.get(CONTROL_VARIABLE, "").split(",") if url.strip()]
    try:
        known = {(url.hostname, url.port or NATS_PORT) for url in map(urlsplit, given)}
    except ValueError:
        known = set()
    if given and (host.lower(), port) not in known:
        raise ConfigError(
            f"proxy_ip and proxy_port name {host_port(host, port)}, and {CONTROL_VARIABLE} names another server: "
            "leave one out",
            param=NAME,
        )
    return bool(given)


def _concerns(name: str, role: str) -> bool:
    """Producers' sizes are not a consumer's."""
    is_producer = role == "kv_producer"
    return not (name.startswith("kv_producers_") and not is_producer) and not (
        name.startswith("kv_consumers_") and is_producer
    )


def _flat(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"--kv-transfer-config is not JSON: {exc}", param=NAME) from exc
    nested = given.pop(NESTED, {}) if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(nested, dict):
        raise ConfigError('--kv-transfer-config must be a JSON object, e.g. \'{"kv_role": "kv_producer"}\'', param=NAME)
    return {**nested, **given}
