"""API keys at rest: SHA-256 digests, from a file and from the settings, and which of them a request carries.

A key is 32 random bytes, so its digest needs no salt and no slow hash. Every comparison takes the same time, whichever
key it is and however much of it is right. It does not know HTTP beyond the authorization header's text.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from kvrelay.errors import ConfigError

KEY_PREFIX = "kvr-"
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
DIGEST = re.compile(r"[0-9a-fA-F]{64}")
MAX_FILE_BYTES = 1 << 20


def new_api_key(name: str) -> tuple[str, str]:
    """A fresh key, and the line of the keys file that admits it. Raises ConfigError for a name that fits no line."""
    if NAME.fullmatch(name) is None:
        raise ConfigError(f"{name!r} is no name of a key: expected up to 64 letters, digits and . _ @ -", param="name")
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    return key, f"{name}:{digest_of(key).hex()}"


def digest_of(key: str) -> bytes:
    """What is kept of a key. Header text arrives as Latin-1, whatever the client meant by it."""
    return hashlib.sha256(key.encode("latin-1")).digest()


class ApiKeys:
    """The keys that are admitted, by name. Without any, everybody is."""

    def __init__(self, digests: Mapping[str, bytes]) -> None:
        self._digests = dict(digests)

    @classmethod
    def load(cls, api_key: str, keys_file: str) -> ApiKeys:
        """The one of the settings (named ``default``) and those of the file. Raises ConfigError."""
        digests = {"default": hashlib.sha256(api_key.encode()).digest()} if api_key else {}
        if keys_file:
            digests |= read_keys_file(Path(keys_file))
        return cls(digests)

    def __repr__(self) -> str:
        return f"ApiKeys({', '.join(self._digests)})"

    def __bool__(self) -> bool:
        return bool(self._digests)

    def name_of(self, authorization: str) -> str | None:
        """The name of the key in an authorization header, ``""`` where no key is needed, None if there is no match."""
        if not self._digests:
            return ""
        scheme, _, key = authorization.partition(" ")
        digest = digest_of(key.strip())
        found: str | None = None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found if scheme.lower() == "bearer" else None


def read_keys_file(path: Path) -> dict[str, bytes]:
    """Digests by name: one ``NAME:SHA256`` or ``SHA256`` (hexadecimal) a line; blank lines and ``#`` lines are skipped.

    Raises ConfigError with file and line.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is too large for a file of API keys", param="api_keys_file")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read API keys from {path}: {exc}", param="api_keys_file") from exc
    digests: dict[str, bytes] = {}
    for number, line in enumerate((line.strip() for line in lines), start=1):
        if not line or line.startswith("#"):
            continue
        name, _, digest = line.rpartition(":")
        name = name or f"key-{number}"
        # The line itself is not shown: it may be a key that was pasted by mistake.
        if NAME.fullmatch(name) is None or DIGEST.fullmatch(digest) is None:
            raise ConfigError(
                f"{path}, line {number}: expected NAME:SHA256, see kvrelay api-key", param="api_keys_file"
            )
        if name in digests:
            raise ConfigError(f"{path}, line {number}: a second key is named {name}", param="api_keys_file")
        digests[name] = bytes.fromhex(digest)
    if not digests:
        # Otherwise an empty file would open the service.
        raise ConfigError(f"{path} holds no API key, see kvrelay api-key", param="api_keys_file")
    return digests
