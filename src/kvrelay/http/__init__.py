"""A small HTTP/1.1 server: connections, limits and streamed answers. It knows nothing of models or tokens.

``HttpServer`` listens; each request becomes an ``Exchange`` that the application answers.
"""

from kvrelay.http.exchange import Exchange, HttpApplication, HttpRequest, Response
from kvrelay.http.limits import HttpLimits
from kvrelay.http.listening import open_listener, raise_descriptor_limit, reserve_port, server_tls
from kvrelay.http.server import HttpServer

__all__ = [
    "Exchange",
    "HttpApplication",
    "HttpLimits",
    "HttpRequest",
    "HttpServer",
    "Response",
    "open_listener",
    "raise_descriptor_limit",
    "reserve_port",
    "server_tls",
]
