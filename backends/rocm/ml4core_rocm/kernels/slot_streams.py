"""Slots of a selection as one stream, in which each row has a run of its own.

Where the rows begin depends on their lengths, which are those of every selection of a step of one
width: how many keys a row sees, at most top-k. So that is found once a step, and the stream once a
selection.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ml4core.api import KVCache, Selection, StepPlan


def starts_of(lens: Tensor) -> Tensor:
    """int32 [T + 1], where the runs of rows of ``lens`` int32 [T] begin and the last one ends."""
    starts = lens.new_zeros(lens.shape[0] + 1)
    starts[1:] = lens.cumsum(0)
    return starts


def stream_at(slots: Tensor, lens: Tensor, starts: Tensor) -> Tensor:
    """The stream int32 [T k] in which each row's slots, int32 [T, k] packed in front, begin where
    ``starts`` int32 [T + 1] says. A row with fewer than were planned, as NaN among its scores
    leaves it, reads slot 0 of the null page for the rest, and shifts no other row.
    """
    rows, keys = slots.shape
    column = torch.arange(keys, dtype=torch.int32, device=slots.device)
    planned = column < (starts[1:] - starts[:-1]).unsqueeze(1)
    # What isn't planned goes behind all, where no row looks.
    place = (starts[:-1].unsqueeze(1) + column).where(planned, rows * keys).long()
    stream = slots.new_zeros(rows * keys + 1)
    stream.scatter_(0, place.flatten(), slots.where(column < lens.unsqueeze(1), 0).flatten())
    return stream[:-1]


class Streams:
    """The stream of the forward that runs; of the one before nothing is kept.

    A forward ends where its step is over, or where the cache of its first layer comes by again: one
    step runs twice where a graph is warmed up and captured, and what the graph holds has to be made
    in it.
    """

    def __init__(self) -> None:
        self._step: StepPlan | None = None
        self._first: KVCache | None = None
        self._starts: dict[int, Tensor] = {}  # by the width of selections
        self._selection: Selection | None = None
        self._stream: Tensor | None = None

    def stream(self, step: StepPlan, cache: KVCache, selection: Selection) -> tuple[Tensor, Tensor]:
        """``starts`` and the stream for a layer over its selection; called once by each layer."""
        if self._step is not step or self._first is cache:
            self._step, self._first = step, cache
            self._starts, self._selection = {}, None
            self._forget()
        width = selection.slots.shape[1]
        if width not in self._starts:
            self._starts[width] = starts_of(selection.lens)
        starts = self._starts[width]
        if self._stream is None or self._selection is not selection:
            self._selection = selection
            self._stream = stream_at(selection.slots, selection.lens, starts)
        return starts, self._stream

    def _forget(self) -> None:
        """What else was kept of the forward before."""
