"""``kv_connector_module_path`` of servers that were configured for the removed connector."""

from kvrelay.config import NO_STOCK_STAGING
from kvrelay.errors import ConfigError

raise ConfigError(NO_STOCK_STAGING)
