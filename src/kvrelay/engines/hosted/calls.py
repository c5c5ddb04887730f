"""The calls of a backend that are under way: a task for each, in the host's event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from kvrelay.engines.hosted.backend import AnswerError, BackendError, BackendRefusedError, UnconfirmedError
from kvrelay.errors import KvrelayError

_log = logging.getLogger(__name__)

T = TypeVar("T")
Failed = Callable[[str, KvrelayError], None]


class BackendCalls:
    """Used in ``loop`` alone. ``name``: the backend's. ``on_change`` is called after each function that a call has
    called."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop, on_change: Callable[[], None]) -> None:
        self._name = name
        self._loop = loop
        self._on_change = on_change
        self._answers: dict[str, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        """Those that are cancelled, and those that no request waits for."""

    def start(
        self,
        request_id: str,
        answer: AsyncGenerator[T, None],
        receive: Callable[[str, T], None],
        failed: Failed,
        at_rest: Callable[[], None] | None = None,
    ) -> None:
        """``receive`` gets each item of the answer, ``failed`` the error that ends it, also one that ``receive``
        raises. ``at_rest`` is called when the backend is done with the request, also after ``cancel``."""
        task = self._loop.create_task(self._follow(request_id, answer, receive, failed))
        self._answers[request_id] = task
        task.add_done_callback(lambda done: self._ended(request_id, done, at_rest))

    def cancel(self, request_id: str) -> None:
        """Closes the answer, by which the backend notices that it is not needed."""
        task = self._answers.pop(request_id, None)
        if task is not None and task is not asyncio.current_task(self._loop):
            self._background.add(task)
            task.cancel()

    def ask(self, question: Callable[[], Coroutine[Any, Any, None]], purpose: str) -> None:
        """Ask the backend for what no request waits for."""

        async def asking() -> None:
            try:
                await question()
            except Exception as exc:  # noqa: BLE001 - whatever it is, requests go on
                _log.warning("%s did not %s: %r", self._name, purpose, exc)

        task = self._loop.create_task(asking())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def changed(self) -> None:
        """Something has come of a call in another way than by its answer."""
        self._on_change()

    def tasks(self) -> list[asyncio.Task[None]]:
        return [*self._answers.values(), *self._background]

    async def _follow(
        self, request_id: str, answer: AsyncGenerator[T, None], receive: Callable[[str, T], None], failed: Failed
    ) -> None:
        task = asyncio.current_task()

        def fail(error: KvrelayError) -> None:
            if self._answers.get(request_id) is task:
                reason = error.in_full if isinstance(error, BackendError) else error.message
                _log.warning("request %s: %s", request_id, reason)
                failed(request_id, error)
                self._on_change()

        try:
            try:
                async for item in answer:
                    receive(request_id, item)
                    self._on_change()
                    if self._answers.get(request_id) is not task:
                        return
            finally:
                await answer.aclose()
        except UnconfirmedError as exc:
            fail(exc)
            raise
        except (AnswerError, BackendRefusedError) as exc:
            fail(exc)
        except Exception:  # noqa: BLE001 - whatever it is, somebody waits for the answer
            _log.exception("request %s failed at %s", request_id, self._name)
            fail(AnswerError(f"asking {self._name} failed"))

    def _ended(self, request_id: str, task: asyncio.Task[None], at_rest: Callable[[], None] | None) -> None:
        self._background.discard(task)
        if self._answers.get(request_id) is task:
            del self._answers[request_id]
        if not task.cancelled() and isinstance(task.exception(), UnconfirmedError):
            _log.error("request %s: %s; its staging blocks are not used again", request_id, task.exception())
        elif at_rest is not None:
            at_rest()
            self._on_change()
