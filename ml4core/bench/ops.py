"""``ml4 bench ops``: a backend's ops beside core's compositions, and as fractions of the least time
that bytes and arithmetic take on that device.

A session may have ``clock``, which times calls as its device would run them in a step (in a graph,
say), and ``peers``: by op, by name, the same work by others. Without, calls are timed by the host,
and core's composition on the same device is the only peer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ml4core import registry
from ml4core.api import Capabilities, Deployment, Device, ModelSpec, Session
from ml4core.bench import environment
from ml4core.bench.ops_cases import SIZES, Case, Maker, cases
from ml4core.bench.timing import Spread, spread
from ml4core.compose.ops import COMPOSED

PEER = "torch compositions"
_COPIED = 256 << 20
"""Bytes of the copy that bandwidth is measured by, on an accelerator."""

Call = Callable[[], object]


class Clock(Protocol):
    """Seconds of one call, over repeats."""

    def __call__(self, calls: Sequence[Call], repeats: int) -> Sequence[float]:
        """``calls`` are the same work on inputs of their own."""
        ...


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        ops: by name; empty for all.
        size: of ``SIZES``; empty for small ones on a host, and full ones on an accelerator.
    """

    ops: tuple[str, ...] = ()
    size: str = ""
    repeats: int = 5
    threads: int = 1
    device_kind: str | None = None


class HostClock:
    """Times by the host, after what was queued is done."""

    def __init__(self, device: torch.device) -> None:
        self._waits = device.type != "cpu" and torch.accelerator.is_available()

    def __call__(self, calls: Sequence[Call], repeats: int) -> Sequence[float]:
        for call in calls:
            call()
        found = []
        for _ in range(repeats):
            self._wait()
            started = time.perf_counter()
            for call in calls:
                call()
            self._wait()
            found.append((time.perf_counter() - started) / len(calls))
        return found

    def _wait(self) -> None:
        if self._waits:
            torch.accelerator.synchronize()


def measure(backend: str, options: Options, begin: Callable[[str], object]) -> dict[str, Any]:
    """Every chosen op as JSON-able data. Raises ``Refused`` where the backend can't be opened, and
    ``ValueError`` for an op that no case has.
    """
    choice = registry.select(backend, device_kind=options.device_kind)
    device, capabilities = choice.device, choice.capabilities
    before, started = torch.get_num_threads(), time.perf_counter()
    torch.set_num_threads(options.threads)
    session = choice.backend.open(_deployment(device, capabilities))
    try:
        facts: dict[str, Any] = {"environment": environment.environment(choice, options.threads)}
        size = options.size or ("full" if _is_fast(device) else "small")
        facts |= {"size": size, "repeats": options.repeats}
        where = torch.device(device.torch_device)
        clock: Clock = getattr(session, "clock", None) or HostClock(where)
        maker = Maker(SIZES[size], where, capabilities)
        begin("rates of the device")
        facts["rates"] = rates = _rates(clock, maker, _is_fast(device))
        found = []
        with torch.inference_mode():
            for case in _chosen(maker, options.ops):
                begin(case.name)
                found.append(_one(case, session, clock, options.repeats, rates))
        facts["ops"] = found
    finally:
        session.close()
        torch.set_num_threads(before)
    facts["environment"] |= {
        "load_after": environment.load_average(),
        "seconds": round(time.perf_counter() - started, 1),
    }
    return facts


def _deployment(device: Device, capabilities: Capabilities) -> Deployment:
    """Of no model: ops alone are called."""
    defaults = capabilities.defaults
    return Deployment(
        ModelSpec("none", 8, 128, 1e-6, 128, False, ()),
        device,
        dtype=defaults.get("dtype", "float32"),
        kv_layout=defaults.get("kv", "fp32"),
        index_layout=defaults.get("index", "fp32"),
        max_model_len=128,
        enforce_eager=True,
    )


def _is_fast(device: Device) -> bool:
    return device.kind == "real" and torch.device(device.torch_device).type != "cpu"


def _chosen(maker: Maker, names: Sequence[str]) -> list[Case]:
    found = list(cases(maker))
    known = {case.op for case in found}
    if unknown := sorted(set(names) - known):
        raise ValueError(f"no case of op {unknown[0]!r}; works: {', '.join(sorted(known))}")
    return [case for case in found if not names or case.op in names]


def _one(
    case: Case, session: Session, clock: Clock, repeats: int, rates: Mapping[str, float]
) -> dict[str, Any]:
    """One line of the table. A peer that fails has its reason."""
    own, composed = session.ops.get(case.op), COMPOSED[case.op]
    floor = max(case.nbytes / rates["bytes"], case.flops / rates["flops"])
    line: dict[str, Any] = {
        "name": case.name, "op": case.op, "nbytes": case.nbytes, "flops": case.flops,
        "floor": floor, "peers": {},
    }  # fmt: skip
    copies = max(2, min(16, _COPIED // 4 // max(1, case.nbytes)))
    sets = [case.make(seed) for seed in range(copies)]
    ours = _spread(clock, own or composed, sets, repeats)
    line |= asdict(ours) | {"of_floor": floor / ours.median}
    peers: dict[str, Callable[..., object]] = dict(getattr(session, "peers", {}).get(case.op, {}))
    if own is not None and own is not composed:
        peers[PEER] = composed
    for name, call in peers.items():
        try:
            theirs = _spread(clock, call, sets, repeats)
        except Exception as error:  # a peer's failure is a finding, not ours
            line["peers"][name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
            continue
        line["peers"][name] = asdict(theirs) | {"speed_up": theirs.median / ours.median}
    return line


def _spread(
    clock: Clock, op: Callable[..., object], sets: Sequence[tuple[Any, ...]], repeats: int
) -> Spread:
    return spread(clock([partial(op, *each) for each in sets], repeats))


def _rates(clock: Clock, maker: Maker, fast: bool) -> dict[str, float]:
    """Bytes a second of a large copy, read and written, and operations a second of a large matrix
    product in the compute dtype: what floors are counted by.
    """
    size = _COPIED if fast else _COPIED // 8
    source = torch.zeros(size, dtype=torch.uint8, device=maker.device)
    target = torch.empty_like(source)
    copy = min(clock([lambda: target.copy_(source)], 5))
    side = 8192 if fast else 512
    a, b = (maker.normal(seed, side, side) for seed in (1, 2))
    product = min(clock([lambda: a @ b], 5))
    return {"bytes": 2 * size / copy, "flops": 2 * side**3 / product}
