"""Assembles one frontend process from control plane, routers and HTTP service."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from urllib.parse import urlsplit

from kvrelay.config import ControlConfig, DisaggConfig, FrontendConfig, MetricsConfig, RouterConfig
from kvrelay.config.addresses import reached_url
from kvrelay.control.base import Keys
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.garbage import spare_what_stays
from kvrelay.errors import ConfigError
from kvrelay.frontend.api.server import Frontend
from kvrelay.http import raise_descriptor_limit
from kvrelay.launch.process import SWITCH_INTERVAL_S, on_terminate
from kvrelay.launch.request_plane import client_of, connected, frontend_known, new_caller_id, require_api_key
from kvrelay.router import ReplayRequester, Router, RouterStage
from kvrelay.rpc import new_curve_keys, shared_context

_log = logging.getLogger(__name__)


def cluster_name(control: ControlConfig) -> str:
    """A name that exactly the frontends of one cluster share: control plane and namespace, without credentials."""
    urls = [urlsplit(url.strip()) for url in f"{control.control},{control.discovery}".split(",")]
    hosts = sorted(url.netloc.rpartition("@")[2].lower().replace("localhost", "127.0.0.1") for url in urls)
    return "/".join((control.namespace, *hosts))


def ready_line(url: str, models: Sequence[str]) -> str:
    """What a person reads who has started this frontend by hand. ``models``: those that it serves so far."""
    served = ", ".join(models) or "no model yet"
    then = f"{url}/ui shows the cluster" if models else "kvrelay worker MODEL, with the same --control"
    return f"kvrelay frontend is ready: {served} at {url}/v1; next: {then}"


async def run_frontend_process(
    frontend: FrontendConfig,
    router: RouterConfig,
    control: ControlConfig,
    disagg: DisaggConfig,
    monitoring: MetricsConfig,
    *,
    announces: bool = False,
) -> None:
    """Run until SIGTERM. With ``announces`` a line says when it is ready.

    Raises ConfigError, ControlUnavailableError, AddressInUseError."""
    if not control.control:
        raise ConfigError("a frontend needs --control, e.g. --control nats://127.0.0.1:4222", param="control")
    require_api_key(frontend, control)
    raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # The side threads are enough; the tokenizer's own pool would take cores from workers on this machine.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    stop = asyncio.Event()
    on_terminate(stop.set)
    clock = MonotonicClock()

    def router_of(block_size: int, request_replay: ReplayRequester, stage: RouterStage) -> Router:
        return Router(router, block_size, clock, stage, request_replay)

    name = new_caller_id()
    keys = new_curve_keys()
    async with connected(control) as plane, shared_context() as context:
        served = Frontend(
            frontend,
            plane,
            Keys(control.namespace),
            partial(client_of, keys=keys, context=context),
            router_of,
            cluster_name(control),
            disagg,
            monitoring,
            name,
        )
        async with frontend_known(plane, control, stop.set, name, keys, served.url):
            await _serve(served, frontend, stop, announces=announces)


async def _serve(served: Frontend, config: FrontendConfig, stop: asyncio.Event, *, announces: bool) -> None:
    try:
        await served.start()
        spare_what_stays()
        _log.info("listening at %s", served.url)
        if announces:
            models = [model.name for model in served.cluster.models]
            out = sys.stderr if config.logs_to_stdout else sys.stdout
            print(ready_line(reached_url(served.url, "127.0.0.1"), models), file=out, flush=True)
        await stop.wait()
        if served.num_open_requests:
            print(
                f"kvrelay: the frontend waits up to {config.shutdown_timeout_s:g} s for "
                f"{served.num_open_requests} open request(s); a second Ctrl-C or SIGTERM ends them at once",
                file=sys.stderr,
            )
    finally:
        await served.close()
