"""Whether a NATS server of our own can still store messages, and whether there is room to restart it.

If one write of a stream fails, e.g. because the disk is full, the server stores nothing more in that stream until it is
restarted, even with room again. Clients get no answer to what they publish; everything else is answered. The server's
health check knows. All functions block, for about a second at most.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from pathlib import Path
from urllib.parse import urlsplit

TIMEOUT_S = 1.0
ROOM_BYTES = 4 * 1024 * 1024
"""A restart needs room for the configuration, the log and the first messages."""
ROOM_NAME = "kvrelay-room"
MAX_ANSWER_BYTES = 65536
UNAVAILABLE = 503


def storage_problem(monitoring_url: str) -> str | None:
    """What the server's health check complains about. None: nothing, or no health check answers.

    Source: nats-server, monitoring endpoint ``healthz``.
    """
    parts = urlsplit(monitoring_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", f"{parts.path}/healthz")
        answer = connection.getresponse()
        body = answer.read(MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
    if answer.status != UNAVAILABLE:
        return None
    with contextlib.suppress(ValueError, RecursionError, LookupError, TypeError):
        return " ".join(str(json.loads(body)["error"]).split())
    return "its health check fails"


def room_problem(directory: Path) -> str | None:
    """Why ROOM_BYTES cannot be written in ``directory``; None if they can. The file is removed again.

    The free space that the file system reports does not suffice: it knows no quota and no broken disk.
    """
    path = directory / ROOM_NAME
    try:
        with path.open("wb") as file:
            file.write(bytes(ROOM_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as exc:
        return f"cannot write in {directory}: {exc.strerror}"
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    return None
