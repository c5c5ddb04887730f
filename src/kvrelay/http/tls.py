"""TLS for the HTTP server: one certificate, TLS 1.2 or later."""

from __future__ import annotations

import ssl

from kvrelay.errors import ConfigError


def server_tls(certificate: str, key: str) -> ssl.SSLContext | None:
    """The context of a listening socket from PEM files; None without a certificate. Raises ConfigError."""
    if not certificate:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # OpenSSL would ask for the password of an encrypted key on the terminal, and block a server without one.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError(f"cannot load the certificate {certificate} with the key {key}: {exc}") from exc
    return context
