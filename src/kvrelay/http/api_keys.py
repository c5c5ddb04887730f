"""API keys at rest: their SHA-256 digests and limits, from a file and from the settings, and the match of a request.

A key is 32 random bytes, so its digest needs no salt and no slow hash. Every comparison takes the same time, whichever
key matches and however much of it is right. This module does not know HTTP beyond the authorization header's text.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

import msgspec

from kvrelay.config import KeyLimits
from kvrelay.config.files import read_file
from kvrelay.errors import ConfigError, InvalidInputError

_log = logging.getLogger(__name__)

KEY_PREFIX = "kvr-"
NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
DIGEST = re.compile(r"[0-9a-fA-F]{64}")
NUMBER = re.compile(r"-?[0-9]{1,18}")
MAX_FILE_BYTES = 1 << 20
LIMIT_NAMES = tuple(item.name for item in fields(KeyLimits))
NO_LIMITS = KeyLimits()
SALT_PREFIX = "kvrelay-key:"
"""How the salts of keys begin; no client may name one."""


class ApiKey(msgspec.Struct, frozen=True):
    """The stored data of a key."""

    digest: bytes
    limits: KeyLimits = NO_LIMITS


class KeyChanges(msgspec.Struct, frozen=True):
    """The changes of a new keys file: names, in order. The keys in ``changed`` have another digest or other limits."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    @classmethod
    def between(cls, before: Mapping[str, ApiKey], after: Mapping[str, ApiKey]) -> KeyChanges:
        return cls(
            added=tuple(sorted(after.keys() - before.keys())),
            removed=tuple(sorted(before.keys() - after.keys())),
            changed=tuple(sorted(name for name in before.keys() & after.keys() if before[name] != after[name])),
        )

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def __str__(self) -> str:
        kinds = (("added", self.added), ("removed", self.removed), ("changed", self.changed))
        return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in kinds if names)


def new_api_key(name: str, limits: KeyLimits = NO_LIMITS) -> tuple[str, str]:
    """A new key, and the line of the keys file that admits it. Raises ConfigError for an invalid name."""
    if NAME.fullmatch(name) is None:
        raise ConfigError(f"{name!r} is not a key name: expected up to 64 letters, digits and . _ @ -", param="name")
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    given = {name: getattr(limits, name) for name in LIMIT_NAMES}
    words = [f"{name}={value}" for name, value in given.items() if value is not None]
    return key, " ".join([f"{name}:{digest_of(key).hex()}", *words])


def digest_of(key: str) -> bytes:
    """The digest that is stored of a key. Header text arrives as Latin-1, whatever the client's encoding."""
    return hashlib.sha256(key.encode("latin-1")).digest()


def cache_salt_of(name: str, salt: str | None, *, is_shared: bool) -> str | None:
    """The cache salt of a request with the key of this name, whose client named ``salt``. Without ``is_shared`` no two
    keys share cached prefixes, so no key can find out what others have asked. The salt comes from the name: a renewed
    key keeps its cached prefixes, and all frontends agree.

    Raises InvalidInputError for a client's salt that could be a key's.
    """
    if not name or is_shared:
        if salt is not None and salt.startswith(SALT_PREFIX):
            raise InvalidInputError(f"cache_salt must not begin with {SALT_PREFIX}", param="cache_salt")
        return salt
    own = "" if salt is None else ":" + hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{SALT_PREFIX}{name}{own}"


class KeyRevokedError(InvalidInputError):
    """The key that admitted a request has been removed."""

    status = 401


OWN_KEY = "default"
"""The name of the key of ``--api-key``."""


class ApiKeys:
    """The admitted keys, by name. Without any key, every request is admitted.

    The file's keys may be replaced while requests run; requests that were admitted before are looked up by name only.
    """

    def __init__(
        self, own: Mapping[str, ApiKey], from_file: Mapping[str, ApiKey], common: KeyLimits = NO_LIMITS
    ) -> None:
        """``common``: the limits of every key that has no own ones."""
        self._common = common
        self._own = dict(own)
        self._keys: dict[str, ApiKey] = {}
        self._limits: dict[str, KeyLimits] = {}
        self.replace_file(from_file)

    @classmethod
    def load(cls, api_key: str, keys_file: str, common: KeyLimits = NO_LIMITS) -> ApiKeys:
        """The key of the settings (named ``default``) and the keys of the file. Raises ConfigError."""
        own = {OWN_KEY: ApiKey(hashlib.sha256(api_key.encode()).digest())} if api_key else {}
        return cls(own, read_keys_file(Path(keys_file)) if keys_file else {}, common)

    def __repr__(self) -> str:
        return f"ApiKeys({', '.join(self._keys)})"

    def __bool__(self) -> bool:
        return bool(self._keys)

    @property
    def names(self) -> frozenset[str]:
        """Names of the admitted keys."""
        return frozenset(self._keys)

    def replace_file(self, from_file: Mapping[str, ApiKey]) -> KeyChanges:
        """Replace the keys of the file. Returns the changes."""
        before, self._keys = self._keys, {**self._own, **from_file}
        self._limits = {name: _over(self._common, key.limits) for name, key in self._keys.items()}
        return KeyChanges.between(before, self._keys)

    def limits_of(self, name: str) -> KeyLimits:
        """The limits of the key of this name: its own, else the common ones; ``""`` (no key is needed) has only those.
        Raises KeyRevokedError if the key was removed after the request was admitted: the request must not continue
        without the key's limits."""
        if not name:
            return self._common
        limits = self._limits.get(name)
        if limits is None:
            raise KeyRevokedError("this API key has been revoked", code="invalid_api_key")
        return limits

    def name_of(self, authorization: str) -> str | None:
        """The name of the key in an authorization header, ``""`` if no key is needed, None if no key matches."""
        if not self._keys:
            return ""
        scheme, _, key = authorization.partition(" ")
        digest = digest_of(key.strip())
        found: str | None = None
        for name, known in self._keys.items():
            if hmac.compare_digest(digest, known.digest):
                found = name
        return found if scheme.lower() == "bearer" else None


def _over(common: KeyLimits, own: KeyLimits) -> KeyLimits:
    """The key's own limits, and the common ones where it has none."""
    return replace(common, **{name: value for name in LIMIT_NAMES if (value := getattr(own, name)) is not None})


def read_keys_file(path: Path) -> dict[str, ApiKey]:
    """Keys by name: one ``NAME:SHA256`` or ``SHA256`` (hexadecimal) per line, followed by limits, each a field of
    KeyLimits: ``alice:5e88... requests_per_minute=60 max_output_tokens=512``. Blank lines and ``#`` lines are skipped.

    Raises ConfigError with file and line.
    """
    keys = _read_keys(path)
    if not keys:
        # Otherwise an empty file would open the service.
        raise ConfigError(f"{path} holds no API key; make one with kvrelay api-key", param="api_keys_file")
    return keys


def append_key(path: Path, name: str, line: str) -> None:
    """Add the line of the key ``name``. A file that is not there is made, for its owner alone.

    Raises ConfigError if the file has that name or cannot be read or written.
    """
    try:
        with open(path, "a", encoding="utf-8", opener=lambda file, flags: os.open(file, flags, 0o600)) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if name in _read_keys(path):
                raise ConfigError(
                    f"{path} has a key named {name}: choose another name, or remove its line", param="name"
                )
            is_open = path.read_bytes()[-1:] not in (b"", b"\n")
            file.write(("\n" if is_open else "") + line + "\n")
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}", param="append") from exc


def _read_keys(path: Path) -> dict[str, ApiKey]:
    try:
        lines = read_file(path, MAX_FILE_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read API keys from {path}: {exc}", param="api_keys_file") from exc
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate((line.strip() for line in lines), start=1):
        if not line or line.startswith("#"):
            continue
        try:
            name, key = _parse_line(line)
        except ConfigError as exc:
            raise ConfigError(f"{path}, line {number}: {exc.message}", param="api_keys_file") from exc
        name = name or f"key-{number}"
        if name in keys:
            raise ConfigError(f"{path}, line {number}: another key is already named {name}", param="api_keys_file")
        keys[name] = key
    return keys


def _parse_line(line: str) -> tuple[str, ApiKey]:
    """Name (empty if there is none) and key. The errors do not show the line: it may hold a key, pasted by mistake."""
    admission, *words = line.split()
    name, _, digest = admission.rpartition(":")
    if (name and NAME.fullmatch(name) is None) or DIGEST.fullmatch(digest) is None:
        raise ConfigError("expected NAME:SHA256; make one with kvrelay api-key")
    return name, ApiKey(bytes.fromhex(digest), _parse_limits(words))


def _parse_limits(words: Sequence[str]) -> KeyLimits:
    values: dict[str, int] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in LIMIT_NAMES or name in values:
            raise ConfigError(f"expected limits like {LIMIT_NAMES[0]}=60; each of {', '.join(LIMIT_NAMES)} once")
        if NUMBER.fullmatch(text) is None:
            raise ConfigError(f"{name} must be a whole number")
        values[name] = int(text)
    return KeyLimits(**values)
