"""The HTTP service: OpenAI's API in front of the workers.

A request is validated, tokenized, routed, sent to a worker and answered token by token. If its worker is lost, another
worker continues it. ``pipeline`` shows this path on one page; ``server`` puts the parts together.
"""

from kvrelay.frontend.api.server import Frontend, run_frontend
from kvrelay.frontend.cluster.view import RouterFactory, RpcClientFactory

__all__ = ["Frontend", "RouterFactory", "RpcClientFactory", "run_frontend"]
