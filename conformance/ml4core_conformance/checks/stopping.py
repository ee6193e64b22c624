"""How an engine on the subject stops, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ml4core.api import Backend, Deployment, Fault, FaultError, Session, hookimpl
from ml4core.engine.core import EngineCore
from ml4core.engine.outputs import SequenceOutput
from ml4core.engine.sampling_params import SamplingParams
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.draw import Draw
from ml4core_conformance.rigs.engines import Log, Watched, checkpoint, engine
from ml4core_conformance.rigs.served import GREEDY, NAN_TOKEN, SMOOTH, page_bytes, prompts
from ml4core_conformance.subject import Subject

LEAK_STEPS = 1000


def checks() -> list[Check]:
    return [
        Check(
            "system.fail_stop",
            "system",
            stops_on_nan,
            "A NaN stops the engine: no token of that step leaves, every request ends with an "
            "error, later steps and requests are refused, and plugins are told once.",
            variant="nan",
            unit="engine/fail_stop",
            bugs=("B001",),
        ),
        Check(
            "system.fail_stop",
            "system",
            stops_on_fault,
            "The same of a fault that the session tells of, even if it takes it back.",
            variant="device",
            unit="engine/fail_stop",
            bugs=("B108",),
        ),
        Check(
            "system.leak",
            "system",
            leaks_nothing,
            f"{LEAK_STEPS} steps of requests that come, end, are cancelled and preempted leave no "
            "page in use and no tensor behind.",
            unit="engine/leak",
            timeout_s=300.0,
        ),
    ]


class _Told:
    """A plugin that counts what it is told of faults."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    @hookimpl
    def ml4core_fault(self, fault: Fault) -> None:
        self.faults.append(fault)


class Poisoned(Watched):
    """A backend whose checkpoint has a NaN in one row of its embedding."""

    def open(self, deployment: Deployment) -> Session:
        session = super().open(deployment)
        inner: Any = session
        prepare = inner.prepare_weights

        def poisoned(weights: Any, layer: Any, *more: Any, **named: Any) -> Any:
            if layer is None and "embedding" in weights:
                table = weights["embedding"].clone()
                table[NAN_TOKEN] = torch.nan
                weights = {**weights, "embedding": table}
            return prepare(weights, layer, *more, **named)

        inner.prepare_weights = poisoned
        return session


def _stops(
    subject: Subject, wrap: Callable[[Backend], Backend], last: list[int], code: str
) -> None:
    """Serves one request, lets another one in that fails, and looks at all that follows."""
    told = _Told()
    with (
        checkpoint(**SMOOTH) as folder,
        engine(subject, folder, wrap, [told]) as opened,
    ):
        core = opened.core
        first = prompts(opened.deployment.model.vocab_size, 64)[2]
        core.add_request("sound", first, SamplingParams(temperature=0.0, max_tokens=64))
        for _ in range(3):
            core.step()
        core.add_request("faulty", last, SamplingParams(temperature=0.0, max_tokens=64))
        ended: dict[str, str | None] = {}
        for _ in range(40):
            outputs = core.step()
            if core.fault is None:
                continue
            for output in outputs:
                ended[output.request_id] = output.finish_reason
                if output.token_ids:
                    raise CheckFailed(
                        f"the step that failed gives request {output.request_id} the tokens "
                        f"{output.token_ids}"
                    )
            break
        if core.fault is None:
            raise CheckFailed(f"40 steps after a fault ({code}) the engine still serves")
        if core.fault.code != code:
            raise CheckFailed(f"the fault is {core.fault}; its code must be {code!r}")
        if ended != {"sound": "error", "faulty": "error"}:
            raise CheckFailed(f"requests end with {ended}; each open one ends with error")
        held = core.fault
        for what, call in (
            ("a step", core.step),
            ("a request", lambda: core.add_request("later", first, GREEDY)),
            ("a prompt", lambda: opened.generate([first], GREEDY)),
            ("another step", core.step),
        ):
            try:
                call()
            except FaultError:
                continue
            raise CheckFailed(f"after its fault the engine takes {what}")
        if core.fault is not held:
            raise CheckFailed(f"the fault changes from {held} to {core.fault}")
        opened.tell_fault()
        opened.tell_fault()
        if told.faults != [held]:
            raise CheckFailed(f"plugins are told {len(told.faults)} times of one fault")


def stops_on_nan(subject: Subject) -> None:
    _stops(subject, partial(Poisoned, log=Log()), [9, NAN_TOKEN, 11], "nan")


def stops_on_fault(subject: Subject) -> None:
    def once(asked: int) -> Fault | None:
        return Fault("device", "injected by the suite", 0) if asked == 6 else None

    _stops(subject, partial(Watched, log=Log(), fault=once), [9, 10, 11], "device")


def leaks_nothing(subject: Subject) -> None:
    steps = LEAK_STEPS // 5 if subject.small else LEAK_STEPS
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
