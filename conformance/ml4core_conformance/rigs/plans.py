"""Steps as tensors, made by the suite itself: pages in no order, and padding of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ml4core.api import Segment, StepPlan, StepShape

NO_ROWS = Segment(0, 0, 0)
GROUPS = ("latent", "index")


@dataclass
class Request:
    """A sequence in the making.

    Attributes:
        ids: every token that it will have.
        pages: page ids by group.
        computed: tokens whose rows are in the caches.
    """

    ids: list[int]
    pages: dict[str, list[int]] = field(default_factory=dict)
    computed: int = 0

    def slots(self, group: str, block_size: int) -> Tensor:
        """Where each of its tokens lies: [tokens] int64."""
        position = torch.arange(len(self.ids))
        pages = torch.tensor(self.pages[group], dtype=torch.int64)
        return pages[position // block_size] * block_size + position % block_size


class PageBook:
    """Gives out pages, page 0 never, in an order without rhyme; the same for the same sizes."""

    def __init__(self, blocks: int, groups: Sequence[str] = GROUPS, stride: int = 7) -> None:
        usable = blocks - 1
        while usable % stride == 0:
            stride += 2
        self._free = {
            # Groups differ, so that one group's ids do not work as another's.
            group: [1 + (i * stride + shift) % usable for i in range(usable)]
            for shift, group in enumerate(groups)
        }

    def request(self, ids: Sequence[int], block_size: int, room: int = 0) -> Request:
        """A request with pages for its tokens and ``room`` more."""
        count = -(-(len(ids) + room) // block_size)
        pages = {}
        for group, free in self._free.items():
            if len(free) < count:
                raise ValueError(f"{count} {group} pages are wanted, {len(free)} are left")
            pages[group] = [free.pop() for _ in range(count)]
        return Request(list(ids), pages)


@dataclass(frozen=True)
class Padding:
    """Lower bounds: requests of the last segment, rows of a prefill segment, pages a request."""

    requests: int = 0
    rows: int = 0
    pages: int = 0


def make_plan(
    work: Sequence[tuple[Request, int]],
    block_size: int,
    *,
    groups: Sequence[str] = GROUPS,
    verify_rows: int = 0,
    padding: Padding = Padding(),
    device: torch.device | str = "cpu",
) -> StepPlan:
    """The step in which each request computes its next rows; logits of every real row are wanted,
    in row order.

    One row is a decode, ``verify_rows`` rows are a verify window, others a chunk. ``work`` must
    stand in that order, chunks by length.
    """
    kinds: list[list[tuple[Request | None, int]]] = [[], [], []]
    for request, rows in work:
        kinds[0 if rows == 1 else 1 if rows == verify_rows else 2].append((request, rows))
    last = max(i for i, kind in enumerate(kinds) if kind)
    segments = [NO_ROWS] * 3
    spans: list[tuple[Request | None, int]] = []
    tail = 0
    for i, kind in enumerate(kinds):
        if not kind:
            continue
        real, longest = sum(held for _, held in kind), max(held for _, held in kind)
        fill = max(0, padding.requests - len(kind)) if i == last else 0
        kind += [(None, longest if i < 2 else 0)] * fill
        total = sum(held for _, held in kind)
        if i == 2 and padding.rows > real:
            tail, total, longest = padding.rows - real, padding.rows, padding.rows
        segments[i] = Segment(len(kind), total, longest)
        spans += kind
    return _tensors(spans, segments, tail, block_size, groups, padding.pages, device)


def _tensors(
    spans: Sequence[tuple[Request | None, int]],
    segments: Sequence[Segment],
    tail: int,
    block_size: int,
    groups: Sequence[str],
    pages: int,
    device: torch.device | str,
) -> StepPlan:
    ids: list[int] = []
    positions: list[int] = []
    seen: list[int] = []
    owner: list[int] = []
    start = [0]
    for number, (request, rows) in enumerate(spans):
        first = 0 if request is None else request.computed
        ids += [0] * rows if request is None else request.ids[first : first + rows]
        positions += [0] * rows if request is None else list(range(first, first + rows))
        seen += [0] * rows if request is None else list(range(first + 1, first + rows + 1))
        owner += [number] * rows
        start.append(start[-1] + rows)
    ids += [0] * tail
    positions += [0] * tail
    seen += [0] * tail
    owner += [len(spans) - 1] * tail
    position, visible = torch.tensor(positions), torch.tensor(seen, dtype=torch.int32)
    row_request = torch.tensor(owner)
    width = max(-(-max(seen) // block_size), pages)
    tables, slots = {}, {}
    for group in groups:
        table = torch.zeros(len(spans), width, dtype=torch.int32)
        for number, (request, _) in enumerate(spans):
            if request is not None:
                held = torch.tensor(request.pages[group][:width], dtype=torch.int32)
                table[number, : len(held)] = held
        page = table[row_request, position // block_size].long()
        slot = torch.where(visible > 0, page * block_size + position % block_size, -1)
        tables[group], slots[group] = table.to(device), slot.to(device)
    wanted = (visible > 0).nonzero().squeeze(-1)
    shape = StepShape(
        segments[0],
        segments[1],
        segments[2],
        tuple((group, width) for group in groups),
        len(wanted),
    )
    return StepPlan(
        shape=shape,
        token_ids=torch.tensor(ids).to(device),
        positions=position.to(device),
        row_request=row_request.to(device),
        query_start=torch.tensor(start, dtype=torch.int32).to(device),
        visible=visible.to(device),
        block_tables=tables,
        slots=slots,
        logits_indices=wanted.to(device),
    )


def on_cpu(plan: StepPlan) -> StepPlan:
    """A copy for the oracle."""
    return replace(
        plan,
        **{
            name: getattr(plan, name).cpu()
            for name in (
                "token_ids", "positions", "row_request", "query_start", "visible", "logits_indices",
            )
        },
        block_tables={group: table.cpu() for group, table in plan.block_tables.items()},
        slots={group: slot.cpu() for group, slot in plan.slots.items()},
    )  # fmt: skip
