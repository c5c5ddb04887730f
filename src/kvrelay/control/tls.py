"""The certificates that a control URL names, for NATS and etcd alike: ``?ca=FILE&cert=FILE&key=FILE``, all PEM.

``ca`` holds the authorities to trust (default: those that the client library knows). ``cert`` is this process's own
chain. ``key`` is its private key, which may be in the same file.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping

import msgspec

from kvrelay.config.files import read_file
from kvrelay.errors import ConfigError

TLS_OPTIONS = ("ca", "cert", "key")


class TlsFiles(msgspec.Struct, frozen=True):
    """Paths; None if the URL names no file. ``param`` is the setting that holds the URL."""

    param: str
    ca: str | None = None
    cert: str | None = None
    key: str | None = None

    @classmethod
    def of_url(cls, param: str, options: Mapping[str, str], *, is_tls: bool) -> TlsFiles | None:
        """None without TLS. Raises ConfigError for files that a URL without TLS would ignore."""
        given = {name: options[name] for name in TLS_OPTIONS if name in options}
        if not is_tls:
            if given:
                raise ConfigError(f"{', '.join(given)} in the {param} URL: that is not a URL with TLS", param=param)
            return None
        if "key" in given and "cert" not in given:
            raise ConfigError(f"the {param} URL names a key without a cert", param=param)
        return cls(param, **given)

    def context(self) -> ssl.SSLContext:
        """A context that trusts ``ca`` and presents ``cert``. Raises ConfigError."""
        self.pem()
        try:
            context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as exc:
            raise ConfigError(f"cannot use the TLS files of the {self.param} URL: {exc}", param=self.param) from exc
        return context

    def pem(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """The contents of ``ca``, ``key`` (from ``cert`` if not given) and ``cert``. Raises ConfigError."""
        return self._read(self.ca), self._read(self.key or self.cert), self._read(self.cert)

    def _read(self, path: str | None) -> bytes | None:
        if path is None:
            return None
        try:
            return read_file(path)
        except OSError as exc:
            raise ConfigError(f"cannot read {path} of the {self.param} URL: {exc.strerror}", param=self.param) from exc
