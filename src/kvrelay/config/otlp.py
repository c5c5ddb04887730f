"""Where traces are sent: ``--otlp-endpoint``, or OpenTelemetry's own variables in the environment.

Source: OpenTelemetry, "OTLP Exporter Configuration". The URLs of the variables begin with http also for gRPC.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from kvrelay.errors import ConfigError

PREFIX = "OTEL_EXPORTER_OTLP_"
TRACES_PATH = "/v1/traces"
GRPC_SCHEMES = ("grpc", "grpcs")
SCHEMES = (*GRPC_SCHEMES, "http", "https")


@dataclass(frozen=True, slots=True)
class OtlpEndpoint:
    """A collector. ``url``: ``grpc[s]://HOST:PORT``, or the URL that traces are posted to. It may hold a password, and
    ``headers`` a collector's key. ``is_required``: it was given to kvrelay, not found in the environment."""

    url: str = field(repr=False)
    is_required: bool
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def is_grpc(self) -> bool:
        return self.url.startswith(GRPC_SCHEMES)


def collector_of(configured: str, environ: Mapping[str, str] | None = None) -> OtlpEndpoint | None:
    """The collector; None: no traces are sent. Raises ConfigError for a URL that is none."""
    env = os.environ if environ is None else environ
    url = configured or _of_variables(env)
    if not url:
        return None
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in SCHEMES and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_valid = False
    if not is_valid or (parts.scheme in GRPC_SCHEMES and (parts.path.strip("/") or parts.username is not None)):
        raise ConfigError(
            f"{without_password(url)!r} is not an OTLP endpoint: expected grpc://HOST:4317 or http://HOST:4318{TRACES_PATH}",
            param="otlp_endpoint",
        )
    url = url.rstrip("/")
    has_path = parts.scheme in GRPC_SCHEMES or parts.path.strip("/")
    return OtlpEndpoint(url if has_path else url + TRACES_PATH, bool(configured), _headers(env))


def without_password(url: str) -> str:
    """To be shown."""
    return url.rpartition("@")[2]


def _of_variables(env: Mapping[str, str]) -> str:
    own, common = env.get(f"{PREFIX}TRACES_ENDPOINT", ""), env.get(f"{PREFIX}ENDPOINT", "")
    protocol = env.get(f"{PREFIX}TRACES_PROTOCOL") or env.get(f"{PREFIX}PROTOCOL", "")
    if protocol == "grpc":
        return (own or common).replace("http", "grpc", 1)
    return own or (common.rstrip("/") + TRACES_PATH if common.startswith("http") else common)


def _headers(env: Mapping[str, str]) -> dict[str, str]:
    """``NAME=VALUE``, separated by commas."""
    text = env.get(f"{PREFIX}TRACES_HEADERS") or env.get(f"{PREFIX}HEADERS", "")
    pairs = (pair.partition("=") for pair in text.split(",") if "=" in pair)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}
