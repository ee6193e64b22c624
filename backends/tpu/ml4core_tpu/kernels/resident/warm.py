"""What a step asks of devices beside its layers, asked once for each of its sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ml4core.api import DRAFT_GROUP, DraftPlan, DraftSpec, DraftStep, Sampling, Segment, StepShape
from ml4core_tpu.bridge import bucket
from ml4core_tpu.buckets import doubling
from ml4core_tpu.kernels.resident.devices import Devices
from ml4core_tpu.kernels.resident.tensor import rows_tensor
from ml4core_tpu.torch_ops import LEAST_ROWS


def warm_between(
    devices: Devices,
    tokens: Sequence[int],
    logits: int,
    state: tuple[int, torch.dtype],
    taps: int,
    product: Callable[[Tensor], object],
) -> None:
    """Core's own between layers, and ``product`` of the rows whose logits are wanted.

    Args:
        tokens: rows of a step.
        logits: the most of them whose logits are wanted.
        state: width and dtype of rows.
        taps: layers whose rows a drafter gets.
    """
    width, dtype = state
    for rows in tokens:
        real = torch.zeros(rows, dtype=torch.bool)
        flag = rows_tensor(devices.put(real), devices, rows)
        fault = torch.zeros((), dtype=torch.bool) | (flag & real).any()
        fault | fault
        held = devices.put(torch.zeros(rows, width, dtype=dtype))
        states = rows_tensor(held, devices, rows)
        if taps:
            torch.cat([states] * taps, dim=-1)
        wanted = doubling(LEAST_ROWS, bucket(min(logits, rows), LEAST_ROWS))
        for count in wanted:
            taken = states[torch.zeros(count, dtype=torch.int64)]
            if rows == tokens[-1]:
                product(taken)


def padding_drafts(
    spec: DraftSpec, devices: Devices, tokens: Sequence[int], requests: int, dtype: torch.dtype
) -> Iterator[DraftStep]:
    """Steps of a drafter that write nothing: context rows of each size without requests, and
    requests of each size without context, of up to ``requests``.
    """
    for rows in tokens:
        state = devices.put(torch.zeros(rows, spec.hidden_size, dtype=dtype))
        taps = (rows_tensor(state, devices, rows),) * len(spec.taps)
        yield _padding(spec.depth, rows, 0, taps)
    sizes = {
        (bucket(count, LEAST_ROWS), bucket(count * spec.depth, LEAST_ROWS), bucket(count)): count
        for count in range(1, requests + 1)
    }
    none = torch.zeros(0, spec.hidden_size, dtype=dtype)
    for count in sorted(set(sizes.values())):
        yield _padding(spec.depth, 0, count, (none,) * len(spec.taps))


def _padding(depth: int, rows: int, requests: int, taps: tuple[Tensor, ...]) -> DraftStep:
    none = Segment(0, 0, 0)
    blocks = Segment(requests, requests * depth, depth) if requests else none
    context = Segment(1, rows, rows) if rows else none
    shape = StepShape(none, blocks, context, ((DRAFT_GROUP, 1),), requests * depth)
    long = torch.zeros(requests, dtype=torch.int64)
    plan = DraftPlan(
        torch.zeros(rows, dtype=torch.int64),
        torch.full((rows,), -1),
        long,
        torch.full((requests, depth), -1),
        torch.zeros(requests, 1, dtype=torch.int32),
        Sampling(torch.zeros(requests), long, long),
    )
    return DraftStep(shape, plan, taps)
