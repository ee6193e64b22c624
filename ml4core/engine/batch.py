"""Tokens and page tables of the running requests as arrays, from which step plans are gathered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ml4core.api import StepBuckets, StepPlan, StepShape
from ml4core.engine.block_pool import NULL_PAGE
from ml4core.engine.layout import EXACT, Ints, StepLayout, lay_out
from ml4core.engine.request import Request
from ml4core.engine.scheduler import Work
from ml4core.engine.transfers import upload

FIRST_SLOTS = 64
"""Slots at first; their count doubles when more requests run."""


Settle = Callable[[StepShape], StepShape]


class Built(NamedTuple):
    """A plan, and where the work stands in it.

    Attributes:
        logits: the plan's first logit row of each work.
    """

    plan: StepPlan
    layout: StepLayout
    logits: Ints


def in_row_order(work: Sequence[Work]) -> list[Work]:
    """[decodes][verify windows][prefill chunks, shortest first], else as they come."""
    decodes = [w for w in work if w.end - w.start == 1 and not w.window]
    if len(decodes) == len(work):
        return decodes
    windows = [w for w in work if w.window]
    chunks = [w for w in work if w.end - w.start > 1 and not w.window]
    return decodes + windows + sorted(chunks, key=lambda w: w.end - w.start)


class BatchState:
    """A slot for each running request: a row of tokens, and a row of page ids for each group.

    Its plans equal those of ``build_plan``, without a pass over tokens or pages in Python.
    """

    def __init__(
        self,
        max_num_seqs: int,
        groups: Sequence[str],
        block_size: int,
        device: torch.device | str,
        *,
        buckets: StepBuckets = EXACT,
        ahead: Mapping[str, int] | None = None,
    ) -> None:
        """``ahead``: by group, tokens behind a step's last row that its tables must show, too."""
        self._groups = tuple(groups)
        self._buckets = buckets
        self._ahead = dict.fromkeys(groups, 0) | dict(ahead or {})
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

    def extend(self, request: Request, tokens: int) -> None:
        """Takes over the newest ``tokens`` tokens of a running request, and its drafts."""
        new = [*request.output_ids[len(request.output_ids) - tokens :], *request.drafts]
        first = request.num_tokens - tokens
        self._tokens = _widened(self._tokens, first + len(new))
        self._tokens[request.slot, first : first + len(new)] = new

    def build(
        self, work: Sequence[Work], *, every_row: Sequence[int] = (), settle: Settle | None = None
    ) -> Built:
        """The plan of work that is ``in_row_order``. Logits are those of each request's last row,
        or of all its rows for verify windows and the places in ``every_row``, in row order. Rows
        whose token is not known yet hold any token.

        ``settle``: gives the shape that the plan has, in which its own has room.
        """
        count = len(work)
        slots = np.array([w.request.slot for w in work])
        first = np.array([w.start for w in work])
        ends = np.array([w.end for w in work])
        rows, held, windows, width = ends - first, ends - first, 0, 0
        if any(w.window for w in work):
            window = np.array([w.window for w in work])
            windows, width = int((window > 0).sum()), int(window.max())
            held = np.where(window > 0, window, rows)
        decodes = int(((held == 1) & (rows == 1)).sum())
        last = int(ends.max())
        counts = _logit_counts(held, windows, decodes, every_row)
        layout = lay_out(held, windows, width, self._buckets, decodes)
        shape = self._shape(layout, last, count if counts is None else int(counts.sum()))
        if settle is not None:
            shape = settle(shape)
            segments = shape.decode, shape.verify, shape.prefill
            layout = lay_out(held, windows, width, self._buckets, decodes, segments)
        total = int(rows.sum())
        owner = np.arange(count) if total == count else np.repeat(np.arange(count), rows)
        offset = np.arange(total) - (np.cumsum(rows) - rows)[owner]
        position, at = first[owner] + offset, layout.rows[owner] + offset
        row_slots = slots[owner]

        padded, requests = len(layout.row_request), len(layout.query_start) - 1
        self._tokens = _widened(self._tokens, last)
        ids, positions = _zeros(padded), _zeros(padded)
        ids[at] = self._tokens[row_slots, position]
        positions[at] = position
        visible = np.zeros(padded, np.int32)
        visible[at] = position + 1
        page, within = np.divmod(position, self._block_size)
        tables, places = [], []
        for group, wide in shape.pages:
            self._tables[group] = _widened(self._tables[group], wide)
            of_work = self._tables[group][slots, :wide]
            table = np.zeros((requests, wide), np.int32)
            table[layout.requests] = of_work
            place = np.full(padded, -1, np.int64)
            pages = of_work[owner, page]
            slots_of = pages * np.int64(self._block_size) + within
            # A drafter's group keeps no page for rows that its window has passed within the step.
            place[at] = np.where(pages > 0, slots_of, -1) if self._ahead[group] else slots_of
            tables.append(table)
            places.append(place)
        wanted, firsts = _wanted(layout, held, counts)
        logits = _zeros(shape.logits)
        logits[: len(wanted)] = wanted
        arrays: list[NDArray[np.generic]] = [ids, positions, layout.row_request, visible, logits]
        arrays += [layout.query_start.astype(np.int32), *tables, *places]
        sent = upload(arrays, self._device)
        groups = len(self._groups)
        plan = StepPlan(
            shape=shape,
            token_ids=sent[0],
            positions=sent[1],
            row_request=sent[2],
            visible=sent[3],
            logits_indices=sent[4],
            query_start=sent[5],
            block_tables=dict(zip(self._groups, sent[6 : 6 + groups], strict=True)),
            slots=dict(zip(self._groups, sent[6 + groups :], strict=True)),
        )
        return Built(plan, layout, firsts)

    def _shape(self, layout: StepLayout, last: int, wanted: int) -> StepShape:
        """Padded: of a layout whose furthest row is the token ``last``, with so many logits."""
        widths = []
        furthest = max(self._ahead.values(), default=0)
        for group in self._groups:
            # With sizes to pad to, all groups have one: else their sizes would be paired.
            keys = last + (furthest if self._buckets.pages else self._ahead[group])
            widths.append((group, self._buckets.padded("pages", -(-keys // self._block_size))))
        decode, verify, prefill = layout.segments
        # Of a step without chunks it follows from the segments: no program for another size.
        fewest = 0 if prefill.rows else decode.requests + verify.rows
        logits = self._buckets.padded("logits", max(wanted, fewest))
        return StepShape(*layout.segments, tuple(widths), logits)


def _logit_counts(held: Ints, windows: int, decodes: int, every_row: Sequence[int]) -> Ints | None:
    """Rows of each work whose logits are wanted: its last one, or all. None: of each the last."""
    if not windows and not every_row:
        return None
    whole = np.zeros(len(held), bool)
    whole[decodes : decodes + windows] = True
    whole[list(every_row)] = True
    return np.where(whole, held, 1)


def _wanted(layout: StepLayout, held: Ints, counts: Ints | None) -> tuple[Ints, Ints]:
    """The rows whose logits are wanted, and of each work the first of its own among them."""
    if counts is None:
        return layout.rows + held - 1, np.arange(len(held))
    first = layout.rows + held - counts
    ends = np.cumsum(counts)
    owner = np.repeat(np.arange(len(held)), counts)
    return first[owner] + np.arange(len(owner)) - (ends - counts)[owner], ends - counts


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
