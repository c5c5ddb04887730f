"""A small HTTP/1.1 server: connections, limits, streamed answers, API keys, errors. It knows no models and tokens.

``HttpServer`` listens; each request becomes an ``Exchange`` that the application answers.
"""

from kvrelay.http.exchange import Exchange as Exchange
from kvrelay.http.exchange import HttpRequest as HttpRequest
from kvrelay.http.exchange import Response as Response
from kvrelay.http.limits import HttpLimits as HttpLimits
from kvrelay.http.listening import open_listener as open_listener
from kvrelay.http.listening import raise_descriptor_limit as raise_descriptor_limit
from kvrelay.http.listening import reserve_port as reserve_port
from kvrelay.http.listening import server_tls as server_tls
from kvrelay.http.server import HttpServer as HttpServer
