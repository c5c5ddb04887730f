"""A control plane with discovery on one server (etcd), and its queue and events on another."""

from __future__ import annotations

from typing import Protocol

from kvrelay.control.base import ControlPlane, Discovery, EventBus, PrefillQueue


class ClosableDiscovery(Discovery, Protocol):
    """A discovery service with a connection of its own."""

    async def close(self) -> None: ...


class ComposedControlPlane:
    """``plane``'s queue and events with ``discovery``; owns both."""

    def __init__(self, plane: ControlPlane, discovery: ClosableDiscovery) -> None:
        self._plane = plane
        self._discovery = discovery

    def __repr__(self) -> str:
        return f"ComposedControlPlane({self._discovery!r}, {self._plane!r})"

    @property
    def discovery(self) -> Discovery:
        return self._discovery

    @property
    def prefill_queue(self) -> PrefillQueue:
        return self._plane.prefill_queue

    @property
    def events(self) -> EventBus:
        return self._plane.events

    @property
    def is_connected(self) -> bool:
        return self._plane.is_connected

    async def close(self) -> None:
        await self._discovery.close()
        await self._plane.close()
