"""Tokens and page tables of the running requests as arrays, from which step plans are gathered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ml4core.api import Segment, StepPlan, StepShape
from ml4core.engine.block_pool import NULL_PAGE
from ml4core.engine.request import Request
from ml4core.engine.scheduler import Work

FIRST_SLOTS = 64
"""Slots at first; their count doubles when more requests run."""

_NONE = Segment(0, 0, 0)
Ints = NDArray[np.int64]


class Pads(NamedTuple):
    """Lower bounds of a plan's sizes, with the meaning that ``build_plan`` gives them."""

    requests: int = 0
    rows: int = 0
    pages: int = 0
    logits: int = 0


def in_row_order(work: Sequence[Work], verify_rows: int = 0) -> list[Work]:
    """[decodes][verify windows][prefill chunks, shortest first], else as they come."""
    decodes = [w for w in work if w.end - w.start == 1]
    if len(decodes) == len(work):
        return decodes
    verifies = [w for w in work if w.end - w.start == verify_rows > 1]
    chunks = [w for w in work if w.end - w.start not in (1, verify_rows)]
    return decodes + verifies + sorted(chunks, key=lambda w: w.end - w.start)


class BatchState:
    """A slot for each running request: a row of tokens, and a row of page ids for each group.

    Its plans equal those of ``build_plan``, without a pass over tokens or pages in Python.
    """

    def __init__(
        self, max_num_seqs: int, groups: Sequence[str], block_size: int, device: torch.device | str
    ) -> None:
        self._groups = tuple(groups)
        self._block_size = block_size
        self._device = torch.device(device)
        self._most = max_num_seqs
        self._free: list[int] = []
        # [slots, tokens] and [slots, pages]; both sizes double as they are outgrown.
        self._tokens = np.zeros((0, 1024), np.int32)
        self._tables = {group: np.zeros((0, 16), np.int32) for group in groups}
        # By slot and group: pages taken over, and how many of them are the nulls in front.
        self._synced: list[dict[str, tuple[int, int]]] = []

    def bind(self, request: Request) -> None:
        """Gives an admitted request a slot and copies its tokens and pages."""
        if not self._free:
            self._add_slots()
        request.slot = slot = self._free.pop()
        self._tokens = _widened(self._tokens, request.num_tokens)
        self._tokens[slot, : request.num_tokens] = request.token_ids
        self._synced[slot] = dict.fromkeys(self._groups, (0, 0))
        self.sync(request)

    def _add_slots(self) -> None:
        have = len(self._synced)
        count = min(self._most, max(FIRST_SLOTS, 2 * have))
        self._tokens = _lengthened(self._tokens, count)
        self._tables = {group: _lengthened(t, count) for group, t in self._tables.items()}
        self._synced += [{} for _ in range(count - have)]
        self._free += range(count - 1, have - 1, -1)

    def unbind(self, request: Request) -> None:
        """Takes the slot back, if the request has one. Beyond a request's pages a row is null."""
        slot = request.slot
        if slot < 0:
            return
        for group, (taken, _) in self._synced[slot].items():
            self._tables[group][slot, :taken] = NULL_PAGE
        self._free.append(slot)
        request.slot = -1

    def sync(self, request: Request) -> None:
        """Takes over what changed in a request's page tables: new pages at the end, and null pages
        where a window has passed.
        """
        slot = request.slot
        for group in self._groups:
            pages = request.pages[group]
            self._tables[group] = _widened(self._tables[group], len(pages))
            row = self._tables[group][slot]
            taken, passed = self._synced[slot][group]
            row[taken : len(pages)] = pages[taken:]
            while passed < len(pages) and pages[passed] == NULL_PAGE:
                row[passed] = NULL_PAGE
                passed += 1
            self._synced[slot][group] = (len(pages), passed)

    def append(self, requests: Sequence[Request]) -> None:
        """Takes over the newest token of each of these running requests."""
        if not requests:
            return
        places = np.array([request.num_tokens for request in requests]) - 1
        self._tokens = _widened(self._tokens, int(places.max()) + 1)
        slots = [request.slot for request in requests]
        self._tokens[slots, places] = [request.output_ids[-1] for request in requests]

    def build(
        self,
        work: Sequence[Work],
        *,
        verify_rows: int = 0,
        pads: Pads | None = None,
        every_row: Sequence[int] = (),
    ) -> StepPlan:
        """The plan of work that is ``in_row_order``. Logits are those of each request's last row,
        or of all its rows for the places in ``every_row``, in row order. Rows whose token is not
        known yet hold any token.
        """
        pads = pads or Pads()
        requests = len(work)
        slots = np.array([w.request.slot for w in work])
        first = np.array([w.start for w in work])
        ends = np.array([w.end for w in work])
        rows = ends - first
        segments, spans = _segments(rows, verify_rows, pads)
        starts = np.zeros(requests + 1, np.int64)
        np.cumsum(rows, out=starts[1:])
        total = int(starts[-1])
        owner = np.arange(requests) if total == requests else np.repeat(np.arange(requests), rows)
        position = np.arange(total) + (first - starts[:-1])[owner]
        row_slots = slots[owner]

        padded = segments[0].rows + segments[1].rows + segments[2].rows
        count = requests + len(spans)
        width = max(int(-(-ends.max() // self._block_size)), pads.pages)
        self._tokens = _widened(self._tokens, int(ends.max()))
        ids, positions = _zeros(padded), _zeros(padded)
        ids[:total] = self._tokens[row_slots, position]
        positions[:total] = position
        visible = np.zeros(padded, np.int32)
        visible[:total] = position + 1
        page, offset = np.divmod(position, self._block_size)
        tables, places = {}, {}
        for group in self._groups:
            self._tables[group] = _widened(self._tables[group], width)
            table = np.zeros((count, width), np.int32)
            table[:requests] = self._tables[group][slots, :width]
            place = np.full(padded, -1, np.int64)
            place[:total] = table[owner, page] * np.int64(self._block_size) + offset
            tables[group] = self._to_device(table)
            places[group] = self._to_device(place)
        query_start = np.concatenate([starts, total + np.cumsum(spans)]) if spans else starts
        wanted = _wanted(starts, owner, every_row)
        logits = _zeros(max(len(wanted), pads.logits))
        logits[: len(wanted)] = wanted
        return StepPlan(
            shape=StepShape(*segments, tuple((g, width) for g in self._groups), len(logits)),
            token_ids=self._to_device(ids),
            positions=self._to_device(positions),
            row_request=self._to_device(_owners(owner, spans, padded)),
            query_start=self._to_device(query_start.astype(np.int32)),
            visible=self._to_device(visible),
            block_tables=tables,
            slots=places,
            logits_indices=self._to_device(logits),
        )

    def _to_device(self, values: NDArray[np.generic]) -> torch.Tensor:
        tensor = torch.from_numpy(values)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)


def _segments(
    rows: Ints, verify_rows: int, pads: Pads
) -> tuple[tuple[Segment, Segment, Segment], list[int]]:
    """The three segments, and the rows that each padded request of the last one holds."""
    decodes = int((rows == 1).sum())
    verifies = int((rows == verify_rows).sum()) if verify_rows > 1 else 0
    chunks = len(rows) - decodes - verifies
    segments = [_NONE, _NONE, _NONE]
    spans: list[int] = []
    counts = (decodes, verifies, chunks)
    last = max(kind for kind, count in enumerate(counts) if count)
    for kind, width in ((0, 1), (1, verify_rows)):
        if counts[kind]:
            held = max(counts[kind], pads.requests) if kind == last else counts[kind]
            segments[kind] = Segment(held, held * width, width)
            spans += [width] * (held - counts[kind])
    if chunks:
        held = max(chunks, pads.requests)
        real = int(rows[-chunks:].sum())
        total = max(real, pads.rows)
        segments[2] = Segment(held, total, total if pads.rows else int(rows[-1]))
        spans = [0] * (held - chunks)
    decode, verify, prefill = segments
    return (decode, verify, prefill), spans


def _owners(owner: Ints, spans: Sequence[int], padded: int) -> Ints:
    """The request of each row; rows of padding that no request holds count to the last one."""
    if len(owner) == padded:
        return owner
    first = int(owner[-1]) + 1
    result = np.full(padded, first + len(spans) - 1, np.int64)
    result[: len(owner)] = owner
    held = np.repeat(np.arange(first, first + len(spans)), spans)
    result[len(owner) : len(owner) + len(held)] = held
    return result


def _wanted(starts: Ints, owner: Ints, every_row: Sequence[int]) -> Ints:
    """The rows whose logits are wanted."""
    if not every_row:
        return starts[1:] - 1
    chosen = np.zeros(len(owner), bool)
    chosen[starts[1:] - 1] = True
    whole = np.zeros(len(starts) - 1, bool)
    whole[list(every_row)] = True
    return np.flatnonzero(chosen | whole[owner])


def _zeros(count: int) -> Ints:
    return np.zeros(count, np.int64)


def _lengthened(array: NDArray[np.int32], rows: int) -> NDArray[np.int32]:
    """The same with rows of zeros behind."""
    longer = np.zeros((rows, array.shape[1]), array.dtype)
    longer[: len(array)] = array
    return longer


def _widened(values: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    """An array at least ``width`` wide, zero beyond what was there."""
    if width <= values.shape[1]:
        return values
    wider = np.zeros((values.shape[0], max(width, 2 * values.shape[1])), np.int32)
    wider[:, : values.shape[1]] = values
    return wider
