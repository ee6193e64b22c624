"""The order in which waiting requests are admitted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from ml4core.engine.request import Request


class RequestQueue(Protocol):
    def add(self, request: Request) -> None: ...

    def put_back(self, request: Request) -> None:
        """Returns a preempted request to where it is next, as far as the policy goes."""
        ...

    def first(self) -> Request: ...

    def remove(self, request: Request) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class FcfsQueue:
    """First come, first served."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()  # by order of arrival

    def add(self, request: Request) -> None:
        self._requests[request.order] = request

    def put_back(self, request: Request) -> None:
        self._requests[request.order] = request
        self._requests.move_to_end(request.order, last=False)

    def first(self) -> Request:
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        del self._requests[request.order]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())


def rank(request: Request) -> tuple[int, float, int]:
    """Lower is sooner; no two requests have the same."""
    return (request.priority, request.arrival, request.order)


class PriorityRequestQueue:
    """Lowest priority value first, then by arrival."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=rank)

    put_back = add

    def first(self) -> Request:
        return self._requests[0]

    def remove(self, request: Request) -> None:
        place = bisect_left(self._requests, rank(request), key=rank)
        if place == len(self._requests) or self._requests[place] is not request:
            raise KeyError(request.id)
        del self._requests[place]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)
