"""The process whose memory is measured: reads ``EngineArgs`` from stdin, writes JSON to stdout."""

from __future__ import annotations

import json
import pickle
import resource
import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from ml4core.api import Weight
from ml4core.engine.backend_choice import choose_backend
from ml4core.engine.llm import Engine, open_engine
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.hub import resolve_model

_STATUS = Path("/proc/self/status")


def main() -> None:
    try:
        print(json.dumps(_load()))
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")


def _load() -> dict[str, int]:
    args = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(1)
    before: list[int] = []

    def progress(done: int, total: int) -> None:
        if not before:  # all that opening takes beside weights is there by now
            before.append(resident() - done)

    with redirect_stdout(sys.stderr):
        choice = choose_backend(args)
        tensors = Checkpoint.open(resolve_model(args.model, args.revision, args.download_dir))
        torch.ones(64, 64) @ torch.ones(64, 64)  # what a product's library takes
        engine = open_engine(args, choice=choice, sequences=1, tokens_each=1, progress=progress)
        top = peak()
    sizes = [info.nbytes for info in tensors.tensors.values()]
    parts = layer_bytes(engine)
    engine.close()
    return {
        "before": before[0],
        "peak": top,
        "model": sum(parts),
        "layer": max(parts),
        "file": sum(sizes),
        "largest": max(sizes),
    }


def layer_bytes(engine: Engine) -> list[int]:
    """Bytes on the host of the outer weights and of each layer. What is shared counts once."""
    weights = engine.runner.weights
    assert weights is not None
    seen: set[int] = set()
    return [_bytes(part.values(), seen) for part in (weights.top, *weights.layers)]


def _bytes(values: Iterable[Any], seen: set[int]) -> int:
    total = 0
    for value in values:
        parts: Mapping[str, Any] = value.parts if isinstance(value, Weight) else {"": value}
        for part in parts.values():
            if isinstance(part, torch.Tensor) and part.device.type == "cpu":
                storage = part.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    total += storage.nbytes()
    return total


def resident() -> int:
    """Bytes in memory now; the peak so far where the system doesn't tell."""
    return _status("VmRSS") or peak()


def peak() -> int:
    """Most bytes in memory so far, of this program alone: ``getrusage`` also counts the process
    that it was started by, and is asked only where there is nothing better.
    """
    found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return _status("VmHWM") or found * (1 if sys.platform == "darwin" else 1024)


def _status(key: str) -> int:
    if not _STATUS.exists():
        return 0
    for line in _STATUS.read_text("ascii", "replace").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return 0
