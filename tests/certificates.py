"""Self-signed certificates for loopback, made by the openssl command."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(directory: Path, *addresses: str) -> tuple[Path, Path]:
    """Certificate and key (PEM) for ``addresses`` (127.0.0.1 without any). Skips the test where there is no openssl."""
    _require_openssl()
    names = ",".join(f"IP:{address}" for address in addresses or ("127.0.0.1",))
    certificate, key = directory / "cert.pem", directory / "key.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=kvrelay-test"
    subprocess.run(
        [*words.split(), "-addext", f"subjectAltName={names}", "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
        timeout=30,
    )
    return certificate, key


def make_rsa_keys(directory: Path) -> tuple[Path, Path]:
    """A public and a private key (PEM)."""
    _require_openssl()
    public, private = directory / "public.pem", directory / "private.pem"
    for words in ("genrsa -out PRIVATE 2048", "rsa -in PRIVATE -pubout -out PUBLIC"):
        names = {"PRIVATE": str(private), "PUBLIC": str(public)}
        command = ["openssl", *(names.get(word, word) for word in words.split())]
        subprocess.run(command, check=True, capture_output=True, timeout=30)
    return public, private


def _require_openssl() -> None:
    if shutil.which("openssl") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("openssl is not installed")
