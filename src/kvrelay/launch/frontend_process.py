"""One frontend process: control plane, router and HTTP service, put together."""

from __future__ import annotations

from kvrelay.config import ControlConfig, FrontendConfig, RouterConfig


async def run_frontend_process(frontend: FrontendConfig, router: RouterConfig, control: ControlConfig) -> None:
    """Run until SIGTERM."""
    raise NotImplementedError
