"""How an engine on the subject stops: on a NaN, on a fault of the device, and on a step that never
ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ml4core.api import Backend, Deployment, Fault, FaultError, Session, hookimpl
from ml4core.engine.core import EngineCore
from ml4core.engine.llm import Engine
from ml4core.engine.outputs import SequenceOutput
from ml4core.engine.sampling_params import SamplingParams
from ml4core_conformance.check import Check, CheckFailed, slowness
from ml4core_conformance.rigs.engines import Log, Watched, checkpoint, engine
from ml4core_conformance.rigs.served import GREEDY, NAN_TOKEN, prompts, smooth
from ml4core_conformance.rigs.stalls import Gate, Gated
from ml4core_conformance.subject import Subject

LIMIT_S = 3.0
"""Seconds that a step of a shape seen before may take here: a hundred times what one needs."""
_STEPS = 40
"""Within so many an engine has to stop."""
_SOUND, _FAULTY = [9, 10, 11], [9, NAN_TOKEN, 11]
_LONG = SamplingParams(temperature=1.0, seed=0, max_tokens=64, ignore_eos=True)


def checks() -> list[Check]:
    rows: tuple[tuple[str, Callable[[Subject], None], str, tuple[str, ...]], ...] = (
        (
            "nan",
            stops_on_nan,
            "A NaN stops the engine: no token of that step leaves, every request ends with an "
            "error, later steps and requests are refused, and plugins are told once.",
            ("B001",),
        ),
        (
            "device",
            stops_on_fault,
            "The same of a fault that the session tells of, even if it takes it back; and of one "
            "that the backend's harness makes, if it offers that.",
            ("B108",),
        ),
        (
            "stall",
            stops_on_stall,
            "The same of a step that never ends, by the deadline of --step-timeout-s: the engine "
            "gives control back, and nothing changes once the step ends after all. It is held "
            "from without; and by the backend's harness, if it offers that.",
            (),
        ),
    )
    return [
        Check(
            "system.fail_stop",
            "system",
            run,
            doc,
            variant=variant,
            unit="engine/fail_stop",
            bugs=bugs,
        )
        for variant, run, doc, bugs in rows
    ]


@dataclass
class _Trouble:
    """Something that goes wrong in an engine that has served well until then.

    Attributes:
        code: of the fault that it has to be.
        wrap: of the backend.
        begin: makes it happen in the next step.
        prompt: of the request that comes at that moment.
        end: undoes it, as if it came to an end by itself.
    """

    code: str
    wrap: Callable[[Backend], Backend]
    begin: Callable[[], None] = lambda: None
    prompt: list[int] = field(default_factory=lambda: _SOUND)
    end: Callable[[], None] = lambda: None


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


def stops_on_nan(subject: Subject) -> None:
    _stops(subject, _Trouble("nan", partial(Poisoned, log=Log()), prompt=_FAULTY))


def stops_on_fault(subject: Subject) -> None:
    due: list[Fault] = []

    def once(asked: int) -> Fault | None:
        return due.pop() if due else None

    wrap = partial(Watched, log=Log(), fault=once)
    _stops(
        subject,
        _Trouble("device", wrap, lambda: due.append(Fault("device", "injected by the suite", 0))),
    )
    if (fail := getattr(subject.harness, "fail", None)) is not None:
        opened = _Opened(Gate())
        _stops(subject, _Trouble("device", opened, lambda: fail(opened.session)))


def stops_on_stall(subject: Subject) -> None:
    gate = Gate()
    _stops(subject, _Trouble("timeout", _Opened(gate), gate.shut, end=gate.open))
    if (stall := getattr(subject.harness, "stall", None)) is not None:
        opened = _Opened(Gate())
        with ExitStack() as released:

            def begin() -> None:
                released.callback(stall(opened.session))

            _stops(subject, _Trouble("timeout", opened, begin, end=released.close))


class _Opened:
    """Wraps a backend in a gated one, and knows the session that it opened last."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._backend: Gated | None = None

    def __call__(self, backend: Backend) -> Backend:
        self._backend = Gated(backend, Log(), self._gate)
        return self._backend

    @property
    def session(self) -> Session:
        assert self._backend is not None, "the engine opens it first"
        return self._backend.sessions[-1]


def _stops(subject: Subject, trouble: _Trouble) -> None:
    """Serves one request, begins the trouble as another one comes, and looks at all that follows.

    Shapes of steps are known by then, so that deadlines are those of the flag.
    """
    told, limit = _Told(), LIMIT_S * slowness(subject.device)
    with (
        checkpoint(**smooth(subject)) as folder,
        ExitStack() as left,
        engine(subject, folder, trouble.wrap, [told], step_timeout_s=limit) as opened,
        ExitStack() as ends,
    ):
        left.callback(_outlast, 10 * limit)
        ends.callback(trouble.end)
        core = opened.core
        first = prompts(opened.deployment.model.vocab_size, 64)[2]
        core.add_request("sound", first, _LONG)
        for _ in range(3):
            _serves(core)
        core.add_request("rehearsal", _SOUND, replace(_LONG, max_tokens=1))
        while not any(output.request_id == "rehearsal" for output in _serves(core)):
            pass
        trouble.begin()
        core.add_request("faulty", trouble.prompt, _LONG)
        ended = _fails(core, trouble.code)
        if ended != {"sound": "error", "faulty": "error"}:
            raise CheckFailed(f"requests end with {ended}; each open one ends with error")
        assert core.fault is not None
        held = core.fault
        _refuses(opened, first, held)
        opened.tell_fault()
        opened.tell_fault()
        if told.faults != [held]:
            raise CheckFailed(f"plugins are told {len(told.faults)} times of one fault")
        ends.close()
        _refuses(opened, first, held)


def _outlast(seconds: float) -> None:
    """Waits for what was given up to end, as far as it does: what comes next would meet it in the
    device, and in the interpreter of a device that is none.
    """
    for thread in threading.enumerate():
        if thread.name.startswith("ml4core-steps"):
            thread.join(seconds)


def _serves(core: EngineCore) -> list[SequenceOutput]:
    outputs = core.step()
    if core.fault is not None:
        raise CheckFailed(f"with nothing wrong yet the engine stops: {core.fault}")
    return outputs


def _fails(core: EngineCore, code: str) -> dict[str, str | None]:
    """How requests end once the engine stops."""
    for _ in range(_STEPS):
        outputs = core.step()
        for output in outputs:
            late = core.fault is not None or output.request_id == "faulty"
            if output.token_ids and late:
                raise CheckFailed(
                    f"the step that failed gives request {output.request_id} the tokens "
                    f"{output.token_ids}"
                )
        if core.fault is not None:
            break
    else:
        raise CheckFailed(f"{_STEPS} steps after a fault ({code}) the engine still serves")
    if core.fault.code != code:
        raise CheckFailed(f"the fault is {core.fault}; its code must be {code!r}")
    return {output.request_id: output.finish_reason for output in outputs}


def _refuses(opened: Engine, prompt: list[int], held: Fault) -> None:
    core = opened.core
    for what, call in (
        ("a step", core.step),
        ("a request", lambda: core.add_request("later", prompt, GREEDY)),
        ("a prompt", lambda: opened.generate([prompt], GREEDY)),
        ("another step", core.step),
    ):
        try:
            call()
        except FaultError as error:
            if error.fault != held:
                raise CheckFailed(f"{what} is refused for {error.fault}, not {held}") from None
            continue
        raise CheckFailed(f"after its fault the engine takes {what}")
    if core.fault is not held:
        raise CheckFailed(f"the fault changes from {held} to {core.fault}")
