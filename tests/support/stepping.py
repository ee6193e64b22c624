"""Sequences and step plans for tests that drive a runner by hand, without a scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch

from ml4core.api import KVLayout, ModelSpec, Segment, StepBuckets, StepPlan, StepShape
from ml4core.engine.block_pool import BlockPool
from ml4core.planning import kv
from ml4core.planning.kv import Pools

_NONE = Segment(0, 0, 0)


@dataclass
class Sequence:
    """Tokens of a request and the pages that hold their keys.

    Attributes:
        token_ids: prompt, then output.
        prompt_len: tokens of the prompt.
        computed: tokens whose keys are in the caches. Set by the engine after a step.
        pages: page ids by group, in order of position.
    """

    token_ids: list[int]
    prompt_len: int
    computed: int = 0
    pages: dict[str, list[int]] = field(default_factory=dict)

    def grow(self, pools: dict[str, BlockPool], tokens: int, block_size: int) -> None:
        """Makes room for ``tokens`` tokens in every group, or raises ``PoolExhausted`` and changes
        nothing.
        """
        need = {g: -(-tokens // block_size) - len(self.pages.get(g, [])) for g in pools}
        taken: dict[str, list[int]] = {}
        try:
            for group, count in need.items():
                taken[group] = pools[group].allocate(max(0, count))
        except MemoryError:
            for group, pages in taken.items():
                pools[group].release(reversed(pages))
            raise
        for group, pages in taken.items():
            self.pages.setdefault(group, []).extend(pages)

    def release(self, pools: dict[str, BlockPool]) -> None:
        for group, pages in self.pages.items():
            pools[group].release(reversed(pages))
        self.pages = {}


def plan_pools(
    spec: ModelSpec,
    layouts: Mapping[str, KVLayout],
    block_size: int,
    tokens_each: int,
    sequences: int,
) -> Pools:
    """Pools that hold ``sequences`` sequences of ``tokens_each`` tokens of the decoder at once."""
    return kv.pools_for(kv.target_groups(spec, layouts), block_size, tokens_each, sequences)


def build_plan(
    work: Seq[tuple[Sequence, int]],
    groups: Seq[str],
    block_size: int,
    device: torch.device | str = "cpu",
    *,
    verify_rows: int = 0,
    pad_requests: int = 0,
    pad_rows: int = 0,
    pad_pages: int = 0,
    pad_logits: int = 0,
    all_logits: bool = False,
    buckets: StepBuckets | None = None,
) -> StepPlan:
    """The plan of a step in which each sequence computes its next ``rows`` tokens.

    Args:
        work: pairs (sequence, rows). One row is a decode, ``verify_rows`` rows (if set) a verify
            window, anything else a prefill chunk. They may come in any order; rows of the plan
            stand as [decodes][verify windows][chunks]. Pages for them must be there already.
        pad_requests, pad_rows: lower bounds of the last segment's requests and rows; for plans
            without chunks, rows follow from requests.
        pad_pages: lower bound of the block tables' width.
        pad_logits: lower bound of the logit rows; those beyond the real ones repeat row 0.
        all_logits: logits of every real row, in row order; else of each sequence's last row, in row
            order.
        buckets: sizes to which each segment, the tables and the logit rows are padded besides.

    Raises ``ValueError`` for rows without tokens, or without pages to write to.
    """
    if not work:
        raise ValueError("a step needs at least one sequence")
    for sequence, rows in work:
        _check(sequence, rows, groups, block_size)
    decodes = [item for item in work if item[1] == 1]
    verifies = [item for item in work if item[1] > 1 and item[1] == verify_rows]
    chunks = sorted((i for i in work if i[1] not in (1, verify_rows)), key=lambda i: i[1])
    segments = [_NONE, _NONE, _NONE]
    spans: list[tuple[Sequence | None, int]] = []  # request, rows held
    padded_tail = 0
    buckets = buckets or StepBuckets()
    kinds = ((decodes, 1), (verifies, verify_rows), (chunks, 0))
    names = ("decode", "verify", "prefill_requests")
    last = max(i for i, (items, _) in enumerate(kinds) if items)
    for i, (items, width) in enumerate(kinds):
        if not items:
            continue
        requests = buckets.padded(names[i], len(items))
        if i == last:
            requests = max(requests, pad_requests)
        spans += [(sequence, rows) for sequence, rows in items]
        if width:
            spans += [(None, width)] * (requests - len(items))
            segments[i] = Segment(requests, requests * width, width)
        else:
            spans += [(None, 0)] * (requests - len(items))
            real = sum(rows for _, rows in items)
            rows = max(buckets.padded("prefill_rows", real), pad_rows)
            padded_tail = rows - real
            exact = not (pad_rows or buckets.prefill_rows)
            segments[i] = Segment(requests, rows, items[-1][1] if exact else rows)
    pads = (padded_tail, pad_pages, pad_logits)
    return _tensors(spans, segments, pads, groups, block_size, device, all_logits, buckets)


def _check(sequence: Sequence, rows: int, groups: Seq[str], block_size: int) -> None:
    """A row without a page would be written to the null page, where padding reads."""
    left = len(sequence.token_ids) - sequence.computed
    if not 1 <= rows <= left:
        raise ValueError(
            f"{rows} rows of a sequence of {len(sequence.token_ids)} tokens, {sequence.computed} "
            f"of which are computed; it must be 1 to {left}"
        )
    end = sequence.computed + rows
    for group in groups:
        held = len(sequence.pages.get(group, ())) * block_size
        if end > held:
            raise ValueError(
                f"the step ends at token {end} of a sequence whose {group} pages hold {held} "
                "tokens; grow it first"
            )


def _tensors(
    spans: list[tuple[Sequence | None, int]],
    segments: list[Segment],
    pads: tuple[int, int, int],
    groups: Seq[str],
    block_size: int,
    device: torch.device | str,
    all_logits: bool,
    buckets: StepBuckets,
) -> StepPlan:
    padded_tail, pad_pages, pad_logits = pads
    ids: list[int] = []
    positions: list[int] = []
    visible: list[int] = []
    row_request: list[int] = []
    starts = [0]
    logits: list[int] = []
    for request, (sequence, rows) in enumerate(spans):
        row_request += [request] * rows
        starts.append(starts[-1] + rows)
        if sequence is None:
            ids += [0] * rows
            positions += [0] * rows
            visible += [0] * rows
            continue
        first = sequence.computed
        ids += sequence.token_ids[first : first + rows]
        positions += range(first, first + rows)
        visible += range(first + 1, first + rows + 1)
        logits += range(starts[-2], starts[-1]) if all_logits else [starts[-1] - 1]
    ids += [0] * padded_tail
    positions += [0] * padded_tail
    visible += [0] * padded_tail
    row_request += [len(spans) - 1] * padded_tail
    # Pages that hold no key yet are left out: ops read every page of a table.
    used = max(-(-(s.computed + rows) // block_size) for s, rows in spans if s is not None)
    width = max(buckets.padded("pages", used), pad_pages)
    tables: dict[str, torch.Tensor] = {}
    slots: dict[str, torch.Tensor] = {}
    position = torch.tensor(positions, dtype=torch.int64)
    owner = torch.tensor(row_request, dtype=torch.int64)
    real = torch.tensor(visible) > 0
    for group in groups:
        table = torch.zeros(len(spans), width, dtype=torch.int32)
        for request, (sequence, _) in enumerate(spans):
            if sequence is not None and sequence.pages[group]:
                pages = sequence.pages[group][:width]
                table[request, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        page = table[owner, position // block_size].long()
        slots[group] = torch.where(real, page * block_size + position % block_size, -1).to(device)
        tables[group] = table.to(device)
    decode, verify, prefill = segments
    fewest = 0 if prefill.rows else decode.requests + verify.rows
    padded = buckets.padded("logits", max(len(logits), fewest))
    logits += [0] * (max(padded, pad_logits) - len(logits))
    pages_wide = tuple((group, width) for group in groups)
    shape = StepShape(decode, verify, prefill, pages_wide, len(logits))
    return StepPlan(
        shape=shape,
        token_ids=torch.tensor(ids, dtype=torch.int64, device=device),
        positions=position.to(device),
        row_request=owner.to(device),
        query_start=torch.tensor(starts, dtype=torch.int32, device=device),
        visible=torch.tensor(visible, dtype=torch.int32, device=device),
        block_tables=tables,
        slots=slots,
        logits_indices=torch.tensor(logits, dtype=torch.int64, device=device),
    )
