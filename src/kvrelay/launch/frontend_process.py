"""Assembles one frontend process from control plane, routers and HTTP service."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from functools import partial
from urllib.parse import urlsplit

from kvrelay.config import ControlConfig, DisaggConfig, FrontendConfig, MetricsConfig, RouterConfig
from kvrelay.control.base import Keys
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.garbage import spare_what_stays
from kvrelay.errors import ConfigError
from kvrelay.frontend.api.server import Frontend
from kvrelay.http import raise_descriptor_limit
from kvrelay.launch.process import SWITCH_INTERVAL_S, on_terminate
from kvrelay.launch.request_plane import client_of, connected, frontend_keys, new_caller_id, require_api_key
from kvrelay.router import ReplayRequester, Router, RouterStage
from kvrelay.rpc import shared_context

_log = logging.getLogger(__name__)


def cluster_name(control: ControlConfig) -> str:
    """A name that exactly the frontends of one cluster share: control plane and namespace, without credentials."""
    urls = [urlsplit(url.strip()) for url in f"{control.control},{control.discovery}".split(",")]
    hosts = sorted(url.netloc.rpartition("@")[2].lower().replace("localhost", "127.0.0.1") for url in urls)
    return "/".join((control.namespace, *hosts))


async def run_frontend_process(
    frontend: FrontendConfig,
    router: RouterConfig,
    control: ControlConfig,
    disagg: DisaggConfig,
    monitoring: MetricsConfig,
) -> None:
    """Run until SIGTERM. Raises ConfigError, ControlUnavailableError, AddressInUseError."""
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
    async with (
        connected(control) as plane,
        frontend_keys(plane, control, stop.set, name) as ours,
        shared_context() as context,
    ):
        served = Frontend(
            frontend,
            plane,
            Keys(control.namespace),
            partial(client_of, keys=ours, context=context),
            router_of,
            cluster_name(control),
            disagg,
            monitoring,
            name,
        )
        try:
            await served.start()
            spare_what_stays()
            _log.info("listening at %s", served.url)
            await stop.wait()
            if served.num_open_requests:
                print(
                    f"kvrelay: the frontend waits up to {frontend.shutdown_timeout_s:g} s for "
                    f"{served.num_open_requests} open request(s); a second Ctrl-C or SIGTERM ends them at once",
                    file=sys.stderr,
                )
        finally:
            await served.close()
