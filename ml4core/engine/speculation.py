"""Speculative decoding: drafts are judged, and drafted anew, on the device and within one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ml4core.api import DraftOutput, Sampling, StepOutput, StepPlan, StepShape, Verifier
from ml4core.compose.contract import ContractError
from ml4core.engine.feeding import Made
from ml4core.engine.sampler import Sampler
from ml4core.engine.sampler_draws import Draws
from ml4core.engine.sampler_io import SamplerRow
from ml4core.engine.speculative_config import SpeculativeConfig
from ml4core.engine.transfers import floats, ints

if TYPE_CHECKING:
    from ml4core.engine.steps import StepInput


class Drafting(NamedTuple):
    """What a proposer is given after a step: its rows, and the requests to draft for.

    ``R`` is 0 where the step drew nothing; else it counts the plan's requests.

    Attributes:
        accepted: [T] bool, rows of tokens that count: neither padding nor rejected drafts.
        anchors: [R] int64, the newest token of each request.
        drafts: [R] bool, whether a request is drafted for; else its anchor may be anything.
        sampling: how drafts are drawn; ``positions`` are those of the anchors.
        rows: the requests that are drafted for, by their number.
    """

    plan: StepPlan
    taps: tuple[Tensor, ...]
    accepted: Tensor
    anchors: Tensor
    drafts: Tensor
    sampling: Sampling
    rows: Mapping[int, SamplerRow]


class Proposer(Protocol):
    """Makes drafts. Its outputs have ``num_speculative_tokens`` drafts or more."""

    def propose(self, drafting: Drafting) -> DraftOutput: ...


class Speculation:
    """Draws of a step with verify windows, and the drafts behind them.

    Every window has the same width: the newest token's row and one for each draft. Nothing waits
    for the device.
    """

    def __init__(
        self,
        proposer: Proposer,
        judge: Callable[[StepShape], Verifier],
        config: SpeculativeConfig,
        vocab_size: int,
        slots: int = 1,
    ) -> None:
        """``judge``: gives what judges windows of a step's shape. ``slots``: requests that run
        together, at first.
        """
        self._proposer = proposer
        self._judge = judge
        self._config = config
        self._vocab = vocab_size
        self._depth = config.num_speculative_tokens
        self._slots = slots
        self._logits: Tensor | None = None  # [slots, N, vocab] fp32, of drafts that are drawn

    def run(
        self, step: StepInput, output: StepOutput, sampler: Sampler
    ) -> tuple[Made, list[Draws]]:
        """What the step's draws gave, with drafts; and the draws: of single rows, then of windows,
        each if there are any.
        """
        device, width, windows = output.logits.device, self._depth + 1, step.windows
        single = [i for i in range(len(step.drawn)) if i not in windows]
        found: list[Draws] = []
        ids = torch.empty(0, width, dtype=torch.int64, device=device)
        counts = torch.empty(0, dtype=torch.int64, device=device)
        if single:
            logits = output.logits[ints([step.drawn[i] for i in single], device)]
            rows = [step.rows[i] for i in single]
            if step.feed is not None:  # one that follows a window was planned too far ahead
                rows = [row.window(1)[0] for row in rows]
            found.append(sampler.draw(logits, rows))
            ids = torch.nn.functional.pad(found[0].ids, (0, self._depth), value=-1)
            counts = torch.ones(len(single), dtype=torch.int64, device=device)
        if windows:
            found.append(self._verify(step, output, sampler))
            own, at = found[-1], windows.start
            assert own.counts is not None
            ids = torch.cat((ids[:at], own.ids, ids[at:]))
            # A count that can't be must not reach beyond the ids: the host will refuse it.
            counts = torch.cat((counts[:at], own.counts.clamp(1, width), counts[at:]))
        drafts = self._draft(step, output, ids, counts, sampler.origin)
        return Made(ids, counts, drafts), found

    def _verify(self, step: StepInput, output: StepOutput, sampler: Sampler) -> Draws:
        windows, width, plan = step.windows, self._depth + 1, step.plan
        first, row = step.drawn[windows.start], step.first_rows[windows.start]
        logits = output.logits[first : first + len(windows) * width]
        rows = slice(row, row + len(windows) * width)
        real = plan.visible[rows].view(-1, width) > 0
        draft_ids = torch.where(real, plan.token_ids[rows].view(-1, width), -1)[:, 1:].contiguous()
        draft_logits = None
        if self._config.drawn:
            kept = self._kept(max(step.slots), logits)
            draft_logits = kept[ints([step.slots[i] for i in windows], logits.device)]
        judge = self._judge(plan.shape)
        if self._config.block:
            judge = partial(judge, block=True)
        own, most = [step.rows[i] for i in windows], [step.most[i] for i in windows]
        return sampler.verify(logits, own, judge, draft_ids, draft_logits, most)

    def _draft(
        self, step: StepInput, output: StepOutput, ids: Tensor, counts: Tensor, origin: str
    ) -> Tensor:
        """Drafts [D, N] for the places behind what each draw emitted. Stores the step's rows."""
        plan, device = step.plan, ids.device
        rows = {r: row for r, row in zip(step.requests, step.rows, strict=True)}
        if not rows and not step.others_draw:
            none = torch.empty(0, dtype=torch.int64, device=device)
            sampling = Sampling(torch.empty(0, device=device), none, none)
            drafting = Drafting(
                plan, output.taps, plan.visible > 0, none, none.to(torch.bool), sampling, rows
            )
            self._proposer.propose(drafting)
            return none.view(0, self._depth)
        total = plan.shape.requests
        numbers = ints([step.requests, step.first_rows], device)
        at, first = numbers
        anchors = torch.zeros(total, dtype=torch.int64, device=device)
        positions, kept = torch.zeros_like(anchors), torch.full_like(anchors, plan.shape.rows)
        anchors.index_copy_(0, at, ids.gather(1, (counts - 1).unsqueeze(-1)).squeeze(-1))
        anchors.clamp_(0, self._vocab - 1)
        positions.index_copy_(0, at, plan.positions[first] + counts)
        if step.windows:
            own = slice(step.windows.start, step.windows.stop)
            kept.index_copy_(0, at[own], counts[own])
        start = plan.query_start[plan.row_request].to(torch.int64)
        offset = torch.arange(plan.shape.rows, device=device) - start
        drafts = torch.zeros(total, dtype=torch.bool, device=device)
        drafting = Drafting(
            plan,
            output.taps,
            (plan.visible > 0) & (offset < kept[plan.row_request]),
            anchors,
            drafts.index_fill_(0, at, True),
            self._sampling(rows, total, positions),
            rows,
        )
        proposed = self._proposer.propose(drafting)
        self._check(proposed, total, origin)
        if self._config.drawn and rows:
            self._keep(step.slots, proposed.logits[at, : self._depth])
        return proposed.ids[at, : self._depth]

    def _check(self, proposed: DraftOutput, requests: int, origin: str) -> None:
        """Raises ``ContractError`` for drafts of another shape or dtype than they must have."""
        count = max((self._depth, *proposed.ids.shape[1:2]))  # more of them are dropped
        found = tuple((one.dtype, tuple(one.shape)) for one in proposed)
        ids, logits = (requests, count), (requests, count, self._vocab)
        if found != (wanted := ((torch.int64, ids), (torch.float32, logits))):
            raise ContractError(f"{origin}stage 'draft_block' returned {found}; wanted: {wanted}")

    def _sampling(self, rows: Mapping[int, SamplerRow], total: int, positions: Tensor) -> Sampling:
        heat, seeds = [0.0] * total, [0] * total
        for request, row in rows.items():
            seeds[request] = row.seed
            if self._config.drawn:
                heat[request] = row.params.temperature
        device = positions.device
        return Sampling(floats(heat, device), ints(seeds, device), positions)

    def _keep(self, slots: Sequence[int], logits: Tensor) -> None:
        """A draft must be judged by the law that it was drawn from."""
        self._kept(max(slots), logits).index_copy_(0, ints(slots, logits.device), logits)

    def _kept(self, slot: int, logits: Tensor) -> Tensor:
        """What is kept, with a place for this slot; zeros where nothing was drafted yet."""
        kept = self._logits
        if kept is None or slot >= kept.shape[0]:
            size = max(self._slots, 1 << slot.bit_length())
            shape = (size, self._depth, self._vocab)
            wider = torch.zeros(shape, dtype=torch.float32, device=logits.device)
            if kept is not None:
                wider[: kept.shape[0]] = kept
            self._logits = kept = wider
        return kept
