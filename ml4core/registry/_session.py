"""Opens a backend's session, and names the backend in whatever goes wrong there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeAlias, TypeVar, cast

from ml4core.api import (
    STAGES,
    Accepted,
    Candidate,
    Capabilities,
    Capture,
    CapturingExecutor,
    Collectives,
    Deployment,
    Device,
    DeviceMemory,
    Fault,
    KVCache,
    KVLayout,
    LayerSpec,
    ModelPart,
    Refusal,
    Refused,
    Rejected,
    Segment,
    Session,
    StepBuckets,
    StepExecutor,
    StepOutput,
    StepShape,
    VisionShape,
    Weight,
)
from ml4core.registry._loading import LoadedPlugin
from ml4core.registry._records import PluginRecord
from ml4core.registry._text import describe, lacks_memory, one_line

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., object])
V = TypeVar("V")
Step: TypeAlias = Callable[..., StepOutput]
Weights: TypeAlias = "Mapping[str, Tensor | Weight]"

_MEMBERS = (
    "device", "ops", "layouts", "executor", "collectives",
    "providers", "prepare_weights", "alloc_kv", "fault", "close",
)  # fmt: skip
_CAPTURING = ("captures", "captures_shape", "drop")
_MEMORY = ("figures", "reset_peak", "release")
_logger = logging.getLogger(__name__)


def open_session(plugin: LoadedPlugin, deployment: Deployment) -> Session:
    """The backend's session, which checks each answer of the plugin but those within a step.

    Raises:
        Refused: with the backend's reasons; or the one that it failed, or broke the contract of
            ``Session``. The same holds for each method of the session, but for ``fault``, whose
            failure is a fault, and ``close``, whose failure is logged.
        MemoryError: the device has too little memory.
    """
    calls = _Calls(plugin.record)
    _check_device(calls, deployment.device)
    declared: object = calls.guard("capabilities()", plugin.backend.capabilities, deployment.device)
    if not isinstance(declared, Capabilities):
        calls.refuse("capabilities()", f"returned {_shown(declared)}, no Capabilities")
    opened: object = calls.guard("open()", plugin.backend.open, deployment)
    session = _CheckedSession(opened, calls, declared)
    try:
        _ask_undeclared(session, declared, deployment)
    except BaseException:
        session.close()
        raise
    return session


class _Calls:
    """Calls into one plugin."""

    def __init__(self, record: PluginRecord) -> None:
        self.record = record

    def guard(self, subject: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Refused:
            raise
        except (Exception, SystemExit) as error:
            if lacks_memory(error):
                raise MemoryError(f"backend {self.record}: {subject}: {error}") from error
            self.refuse(subject, f"raised {describe(error)}", error)

    def refuse(
        self, subject: str, reason: str, cause: BaseException | None = None, remedy: str = ""
    ) -> NoReturn:
        name = self.record.name
        text = f"{self.record.distribution} {self.record.version} {reason}"
        raise Refused([Refusal(name, subject, text, remedy)], what=f"--backend {name}") from cause


class _CheckedExecutor:
    def __init__(self, executor: StepExecutor, calls: _Calls) -> None:
        self._executor = executor
        self._calls = calls

    def compile(self, step: Step, shape: StepShape) -> Step:
        compiled = self._calls.guard("executor.compile()", self._executor.compile, step, shape)
        if not callable(compiled):
            self._calls.refuse("executor.compile()", f"returned {_shown(compiled)}, no callable")
        return compiled

    def eager_break(self, function: F) -> F:
        return self._executor.eager_break(function)


class _CheckedCapturing(_CheckedExecutor):
    def __init__(self, executor: CapturingExecutor, calls: _Calls) -> None:
        super().__init__(executor, calls)
        self._capturing = executor

    @property
    def captures(self) -> Sequence[Capture]:
        return self._calls.guard("executor.captures", lambda: self._capturing.captures)

    def captures_shape(self, shape: StepShape) -> bool:
        subject = "executor.captures_shape()"
        return bool(self._calls.guard(subject, self._capturing.captures_shape, shape))

    def drop(self) -> None:
        self._calls.guard("executor.drop()", self._capturing.drop)


class _CheckedSession:
    """A ``Session`` around that of a plugin. What a step calls is the plugin's own."""

    def __init__(self, session: object, calls: _Calls, declared: Capabilities) -> None:
        self._calls = calls
        self._declared = declared
        found = calls.guard("open()", lambda: [m for m in _MEMBERS if hasattr(session, m)])
        lacking = [member for member in _MEMBERS if member not in found]
        self._session = cast(Session, session)
        try:
            if lacking:
                kind = type(session).__name__
                lacks = ", ".join(lacking)
                calls.refuse("open()", f"returned a {kind} that is no Session: it lacks {lacks}")
            self.device: Device = calls.guard("device", lambda: self._session.device)
            self.collectives: Collectives | None = calls.guard(
                "collectives", lambda: self._session.collectives
            )
            self.ops: Mapping[str, Callable[..., object]] = self._mapping(
                "ops", lambda: self._session.ops, callable, "callable"
            )
            self.layouts: Mapping[str, KVLayout] = self._mapping(
                "layouts", lambda: self._session.layouts, _is_layout, "KVLayout"
            )
            executor = calls.guard("executor", lambda: self._session.executor)
            if not all(callable(getattr(executor, m, None)) for m in ("compile", "eager_break")):
                calls.refuse("executor", f"is {_shown(executor)}, which lacks the calls of one")
            if all(hasattr(executor, m) for m in _CAPTURING):
                capturing = cast(CapturingExecutor, executor)
                self.executor: _CheckedExecutor = _CheckedCapturing(capturing, calls)
            else:
                self.executor = _CheckedExecutor(executor, calls)
            memory = calls.guard("memory", lambda: getattr(self._session, "memory", None))
            lacking = [m for m in _MEMORY if not callable(getattr(memory, m, None))]
            if memory is not None and lacking:
                told = ", ".join(lacking)
                calls.refuse("memory", f"has {_shown(memory)} there, which lacks {told}")
            self.memory: DeviceMemory | None = memory
            buckets = calls.guard(
                "step_buckets", lambda: getattr(self._session, "step_buckets", None)
            )
            if not isinstance(buckets, StepBuckets | None):
                calls.refuse("step_buckets", f"has {_shown(buckets)} there, no StepBuckets")
            self.step_buckets: StepBuckets | None = buckets
            switches = calls.guard("switches", lambda: getattr(self._session, "switches", {}))
            if not isinstance(switches, Mapping) or not all(
                isinstance(word, str) for pair in switches.items() for word in pair
            ):
                calls.refuse("switches", f"has {_shown(switches)} there, no words by word")
            self.switches: Mapping[str, str] = switches
        except BaseException:
            if "close" in found:
                self.close()
            raise

    def _mapping(
        self, name: str, read: Callable[[], object], right: Callable[[object], bool], wanted: str
    ) -> Mapping[str, V]:
        value = self._calls.guard(name, read)
        if not isinstance(value, Mapping):
            self._calls.refuse(name, f"has {_shown(value)} there, not a mapping")
        for key, one in value.items():
            if not isinstance(key, str) or not right(one):
                self._calls.refuse(name, f"has {_shown(one)} as {_shown(key)}, no {wanted}")
        return value

    def providers(
        self, stage: str, layer: LayerSpec | None, shape: StepShape | VisionShape
    ) -> Sequence[Candidate]:
        subject = f"providers of stage {stage}"
        found: object = self._calls.guard(subject, self._session.providers, stage, layer, shape)
        if not isinstance(found, tuple | list):
            self._calls.refuse(subject, f"returned {_shown(found)}, no sequence of candidates")
        for candidate in found:
            if problem := _problem(candidate):
                self._calls.refuse(subject, problem)
            if isinstance(candidate, Accepted) and f"stage:{stage}" not in self._declared:
                reason = f"offers it by {candidate.provider!r} and does not declare it"
                self._calls.refuse(f"stage:{stage}", reason, remedy="declare it as a capability")
        return found

    def prepare_weights(
        self, weights: Weights, layer: LayerSpec | None, part: ModelPart = "decoder"
    ) -> Weights:
        where = "outside of the layers" if layer is None else f"of layer {layer.index}"
        subject = f"prepare_weights {where}{'' if part == 'decoder' else f' ({part})'}"
        prepare = self._session.prepare_weights
        prepared: object = self._calls.guard(subject, prepare, weights, layer, part)
        if not isinstance(prepared, Mapping):
            self._calls.refuse(subject, f"returned {_shown(prepared)}, no mapping of weights")
        return prepared

    def alloc_kv(self, layout: KVLayout, blocks: int, block_size: int) -> KVCache:
        subject = f"alloc_kv of a {layout.role} cache"
        allocate = self._session.alloc_kv
        cache: object = self._calls.guard(subject, allocate, layout, blocks, block_size)
        if problem := _misfit(cache, layout, blocks, block_size):
            self._calls.refuse(subject, problem)
        return cast(KVCache, cache)

    def fault(self) -> Fault | None:
        try:
            fault: object = self._session.fault()
        except (Exception, SystemExit) as error:
            return Fault("backend", f"{self._calls.record} can't tell: {describe(error)}", 0)
        if fault is None or isinstance(fault, Fault):
            return fault
        return Fault(
            "backend", f"{self._calls.record} answered {_shown(fault)}, which is no Fault", 0
        )

    def close(self) -> None:
        try:
            self._session.close()
        except (Exception, SystemExit) as error:
            _logger.warning("backend %s failed in close(): %s", self._calls.record, describe(error))


def _check_device(calls: _Calls, device: Device) -> None:
    import torch

    try:
        torch.device(device.torch_device)
    except (RuntimeError, TypeError) as error:
        found = f"offers {device.name!r} as torch device {_shown(device.torch_device)}"
        calls.refuse("device", f"{found}, which torch does not know: {one_line(str(error))}")


def _ask_undeclared(session: Session, declared: Capabilities, deployment: Deployment) -> None:
    """Raises ``Refused`` for a stage that a session offers and does not declare: before weights are
    loaded, where steps of the usual forms tell. ``providers`` refuses the rest.
    """
    none, decode, prefill = Segment(0, 0, 0), Segment(1, 1, 1), Segment(1, 512, 512)
    pages = -(-deployment.max_model_len // deployment.block_size)
    spec = deployment.model
    groups = [("latent", pages), *([("index", pages)] if spec.index_owners else [])]
    kinds = {layer.kind: layer for layer in spec.layers}
    for name, stage in STAGES.items():
        if not stage.per_layer or f"stage:{name}" in declared:
            continue
        for layer in kinds.values():
            session.providers(name, layer, StepShape(decode, none, none, tuple(groups), 1))
            session.providers(name, layer, StepShape(none, none, prefill, tuple(groups), 1))


def _problem(candidate: object) -> str:
    """What is wrong with a candidate for a stage; empty if nothing."""
    if isinstance(candidate, Accepted):
        call = cast(object, candidate.call)
        if not callable(call):
            return f"accepted by {candidate.provider!r} with {_shown(call)}, no callable"
        return ""
    if isinstance(candidate, Rejected):
        reasons = cast(object, candidate.refusals)
        if isinstance(reasons, tuple | list) and reasons and all(map(_is_refusal, reasons)):
            return ""
        return f"rejected by {candidate.provider!r} with {_shown(reasons)}; wanted: Refusals"
    return f"returned {_shown(candidate)} among the candidates, neither Accepted nor Rejected"


def _misfit(cache: object, layout: KVLayout, blocks: int, block_size: int) -> str:
    """How a cache differs from what was asked for; empty if it does not."""
    if not isinstance(cache, KVCache):
        return f"returned {_shown(cache)}, not a KVCache"
    if (cache.layout.id, cache.block_size) != (layout.id, block_size):
        return (
            f"returned layout {cache.layout.id!r} with pages of {cache.block_size} tokens; asked "
            f"for {layout.id!r} with {block_size}"
        )
    found = [_form(part) for part in cache.parts]
    wanted = [(part.shape(blocks, block_size), part.dtype) for part in layout.parts]
    return "" if found == wanted else f"returned parts {found}; the layout wants {wanted}"


def _form(part: object) -> tuple[object, str]:
    """Shape and dtype of an array of any library."""
    shape, dtype = getattr(part, "shape", None), str(getattr(part, "dtype", type(part).__name__))
    return None if shape is None else tuple(shape), dtype.removeprefix("torch.")


def _is_layout(value: object) -> bool:
    return isinstance(value, KVLayout)


def _is_refusal(value: object) -> bool:
    return isinstance(value, Refusal)


def _shown(value: object) -> str:
    try:
        return one_line(repr(value))
    except Exception:  # a plugin's repr may fail too
        return f"a {type(value).__name__}"
