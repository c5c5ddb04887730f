"""The request plane's door: ZMQ between processes, loopback within one."""

from kvrelay.core.zmq_keys import CurveKeys, new_curve_keys
from kvrelay.rpc.base import Peer, RpcClient, RpcServer
from kvrelay.rpc.heartbeat import Heartbeat
from kvrelay.rpc.zmq_client import ZmqRpcClient
from kvrelay.rpc.zmq_server import ZmqRpcServer
from kvrelay.rpc.zmq_socket import Context, shared_context

__all__ = [
    "Context",
    "CurveKeys",
    "Heartbeat",
    "Peer",
    "RpcClient",
    "RpcServer",
    "ZmqRpcClient",
    "ZmqRpcServer",
    "new_curve_keys",
    "shared_context",
]
