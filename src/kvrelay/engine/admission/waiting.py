"""A queue of requests in their order of service.

Removal is lazy: a removed request stays in the heap, unseen, until it reaches the top.
"""

from __future__ import annotations

import heapq

from kvrelay.engine.request import Request


class WaitingQueue:
    """A priority queue with removal from anywhere."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, bool, int], Request]] = []
        self._members: set[Request] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def members(self) -> list[Request]:
        """All waiting requests, in no order."""
        return list(self._members)

    def push(self, request: Request) -> None:
        self._members.add(request)
        heapq.heappush(self._heap, (request.key, request))

    def peek(self) -> Request | None:
        """The most urgent request, left in place."""
        heap = self._heap
        while heap and heap[0][1] not in self._members:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def remove(self, request: Request) -> None:
        """Remove ``request`` from any position. Raises KeyError if it does not wait."""
        self._members.remove(request)
        if self._heap and self._heap[0][1] is request:
            heapq.heappop(self._heap)
