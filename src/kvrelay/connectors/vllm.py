"""``kv_connector_module_path`` of servers that were configured before the connector moved. For one release."""

from kvrelay.engines.connector.vllm import KvrelayConnector

__all__ = ["KvrelayConnector"]
