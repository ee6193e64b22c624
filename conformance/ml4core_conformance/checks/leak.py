"""What an engine on the subject leaves behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ml4core.engine.core import EngineCore
from ml4core.engine.outputs import SequenceOutput
from ml4core.engine.sampling_params import SamplingParams
from ml4core_conformance.check import Check, CheckFailed, is_slow
from ml4core_conformance.draw import Draw
from ml4core_conformance.rigs.engines import checkpoint, engine
from ml4core_conformance.rigs.served import page_bytes
from ml4core_conformance.subject import Subject

LEAK_STEPS = 1000
INTERPRETED_STEPS = 100
"""On a device that interprets its kernels, where a step takes seconds."""


def checks() -> list[Check]:
    return [
        Check(
            "system.leak",
            "system",
            leaks_nothing,
            f"{LEAK_STEPS} steps of requests that come, end, are cancelled and preempted leave no "
            f"page in use and no tensor behind; {INTERPRETED_STEPS} where kernels are interpreted.",
            unit="engine/leak",
            timeout_s=300.0,
        ),
    ]


def leaks_nothing(subject: Subject) -> None:
    steps = LEAK_STEPS // 5 if subject.small else LEAK_STEPS
    if is_slow(subject.device):
        steps = min(steps, INTERPRETED_STEPS)
    # Two layers of the tiny model: what is counted here is pages, not logits.
    sizes: dict[str, Any] = {"layers": 2, "heads": 2, "experts": 2, "nope_every": None}
    with checkpoint(**sizes) as folder:
        flags: dict[str, Any] = {
            "max_num_batched_tokens": 48,
            "max_model_len": 192,
            # Four requests do not fit at their full length.
            "kv_cache_memory_bytes": 8 * page_bytes(subject, folder),
        }
        with engine(subject, folder, **flags) as opened:
            tensors = [
                _mixed(opened.core, subject.seeds[0], number, steps // 2) for number in (0, 1)
            ]
            stats = opened.core.stats()
    used = {name: part for name, part in stats.usage.items() if part}
    if used:
        raise CheckFailed(f"with no request open, parts of pools are in use: {used}")
    if not stats.preemptions:
        raise RuntimeError("no request was preempted; the pools of this check are too large")
    grown = tensors[1] - tensors[0]
    if grown > steps // 20:
        raise CheckFailed(f"{grown} more tensors are alive after {steps // 2} further steps")


def _mixed(core: EngineCore, seed: int, round: int, steps: int) -> int:
    """Steps of requests that come and go; tensors that are alive when all of them have ended."""
    draw = Draw(seed, f"leak/{round}")
    alive: dict[str, int] = {}  # sequences by request
    for step in range(steps):
        kind = int(draw.integers(1, high=10))
        if kind < 4 and len(alive) < 8:
            name, length = f"{round}/{step}", int(draw.integers(1, low=1, high=120))
            count = 1 + (kind == 3)
            params = SamplingParams(
                temperature=float(kind % 2), max_tokens=1 + length % 60, n=count, ignore_eos=True
            )
            core.add_request(name, [1 + length] * length, params)
            alive[name] = count
        elif kind == 9 and alive:
            core.abort(list(alive)[int(draw.integers(1, high=len(alive)))])
        _note(core.step(), alive)
        if core.fault is not None:
            raise CheckFailed(f"step {step} stops the engine: {core.fault}")
    for name in list(alive):
        core.abort(name)
    while core.has_work:
        _note(core.step(), alive)
    if alive:
        raise CheckFailed(f"requests that were cancelled never end: {', '.join(alive)}")
    return _tensors()


def _note(outputs: Sequence[SequenceOutput], alive: dict[str, int]) -> None:
    for output in outputs:
        if output.finish_reason is not None:
            alive[output.request_id] -= 1
            if not alive[output.request_id]:
                del alive[output.request_id]


def _tensors() -> int:
    import gc

    gc.collect()
    return sum(type(one) is Tensor for one in gc.get_objects())
