"""What one process of a check does: each work is judged, timed beside its peers, and its sizes
searched, every step into the journal.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ml4core.api import KVCache, Weight
from ml4core_cuda.measure import layer_works, peers, product_works
from ml4core_cuda.measure.journal import Facts, Journal, OutOfTime
from ml4core_cuda.measure.suite import chosen
from ml4core_cuda.measure.timing import Timer
from ml4core_cuda.measure.work import Inputs, Sizes, Work
from ml4core_cuda.tuned import forced

_BEST = 4
"""Candidates of a search that are timed again, longer."""


class Runner:
    """Works on one device.

    Attributes:
        timer: None in the interpreter, which has no times.
    """

    def __init__(self, journal: Journal, device: str, *, timed: bool) -> None:
        self.journal = journal
        self.device = torch.device(device)
        self.timer = Timer(device) if timed else None
        self._held: tuple[str, list[Inputs]] = ("", [])

    def facts(self) -> None:
        """Device, versions, peers, and the copy's rate."""
        self.journal.do("device", self._device)
        if self.timer is not None:
            rate = self.timer.copy_rate
            self.journal.do("copy", lambda: {"bytes_per_second": rate()})

    def _device(self) -> Facts:
        import triton

        found: Facts = {"torch": torch.__version__, "triton": triton.__version__}
        found |= {"name": str(self.device), "peers": peers.installed()}
        if self.device.type == "cuda":
            seen = torch.cuda.get_device_properties(self.device)
            found |= {"name": seen.name, "arch": f"sm_{seen.major}{seen.minor}"}
            found |= {"cuda": torch.version.cuda, "memory": seen.total_memory}
        return found

    def check(self, work: Work) -> bool:
        """Whether the kernel is right, or isn't judged."""
        if work.error is None:
            return True

        def judge() -> Facts:
            inputs = work.make(0, self.device)
            assert work.error is not None
            return {"error": work.error(inputs, work.call(*inputs))}

        facts = self.journal.do(f"check/{work.name}", judge)
        return "failed" not in facts and facts["error"] <= 1.0

    def time(self, work: Work) -> None:
        """Ours with the sizes that it has, then each peer."""
        if self.timer is None:
            return
        self.journal.do(f"time/{work.name}", lambda: self._timed(work, work.call))
        for name, peer in work.peers.items():
            self.journal.do(f"peer/{work.name}/{name}", partial(self._peer, work, peer))
        if work.part in ("layer", "slice"):
            self.journal.do(f"kernels/{work.name}", lambda: self._kernels(work))

    def tune(self, work: Work) -> None:
        """Each tiling of the work in turn; those found stay while the next is searched."""
        if self.timer is None:
            return
        with ExitStack() as stack:
            for kernel, shape, candidates in work.tuned:
                best = self._best(work, kernel, shape, candidates)
                if best is not None:
                    stack.enter_context(forced(kernel, shape, best))

    def _best(
        self, work: Work, kernel: str, shape: str, candidates: tuple[Sizes, ...]
    ) -> Sizes | None:
        key, times = f"{work.name}/{kernel}/{shape}", {}
        for sizes in candidates:
            text = json.dumps(dict(sizes), sort_keys=True)
            with forced(kernel, shape, sizes):
                facts = self.journal.do(
                    f"try/{key}/{text}", lambda: self._timed(work, work.call, repeats=3)
                )
            if "failed" not in facts:
                times[text] = float(facts["median_us"])
        best: dict[str, float] = {}
        for text in sorted(times, key=lambda one: times[one])[:_BEST]:
            sizes = json.loads(text)
            with forced(kernel, shape, sizes):
                facts = self.journal.do(f"again/{key}/{text}", lambda: self._judged(work))
            if "failed" not in facts and facts.get("error", 0.0) <= 1.0:
                best[text] = float(facts["median_us"])
        if not best:
            return None
        text = min(best, key=lambda one: best[one])
        own = self.journal.do(f"own/{key}", lambda: self._timed(work, work.call))
        self.journal.do(
            f"tuned/{key}",
            lambda: {
                "kernel": kernel,
                "shape": shape,
                "sizes": json.loads(text),
                "us": best[text],
                "default_us": own.get("median_us", float("inf")),
            },
        )
        return dict(json.loads(text)) if best[text] < own.get("median_us", float("inf")) else None

    def _judged(self, work: Work) -> Facts:
        """Right too, with the sizes in force."""
        found = self._timed(work, work.call)
        if work.error is not None:
            inputs = self._sets(work)[0]
            found["error"] = work.error(inputs, work.call(*inputs))
        return found

    def _timed(self, work: Work, call: Callable[..., Any], repeats: int = 15) -> Facts:
        assert self.timer is not None
        sets = self._sets(work)
        queue = [lambda each=each: call(*each) for each in sets]
        return self.timer.time(queue, repeats, self._least(work)).to_json()

    def _peer(self, work: Work, peer: Callable[..., Callable[[], Any]]) -> Facts:
        assert self.timer is not None
        sets = self._sets(work)
        calls = [peer(*each) for each in sets]
        facts: Facts = {}
        found = calls[0]()
        if work.error is not None and found is not None:
            facts["error"] = work.error(sets[0], found)
        return facts | self.timer.time(calls, 15, self._least(work)).to_json()

    def _kernels(self, work: Work) -> Facts:
        assert self.timer is not None
        calls = [lambda each=each: work.call(*each) for each in self._sets(work)]
        found = self.timer.kernels(calls)
        return {"sum_us": round(sum(found.values()), 3), "kernels": found}

    def _least(self, work: Work) -> int:
        """Calls of a graph: fewer of what takes long."""
        return 4 if work.flops > 10**12 or work.nbytes > 1 << 30 else 16

    def _sets(self, work: Work) -> list[Inputs]:
        """Inputs that rotate through more memory than is cached; kept for the next step of the same
        work.
        """
        assert self.timer is not None
        if self._held[0] != work.name:
            self.release()
            first = work.make(0, self.device)
            held = sum(nbytes(value) for value in first)
            count = self.timer.copies(work.nbytes or held, held)
            sets = [first, *(work.make(seed, self.device) for seed in range(1, count))]
            self._held = (work.name, sets)
        return self._held[1]

    def release(self) -> None:
        """Gives the memory of inputs back."""
        self._held = ("", [])
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def nbytes(value: object) -> int:
    """Of the tensors in a value."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Weight):
        return value.nbytes
    if isinstance(value, KVCache):
        return sum(map(nbytes, value.parts))
    if isinstance(value, Mapping):
        return sum(map(nbytes, value.values()))
    return sum(map(nbytes, value)) if isinstance(value, tuple | list) else 0


def run(path: Path, device: str, words: str, until: float, steps: str) -> int:
    """Every step of the chosen works; 1 if the time ran out before the last.

    ``steps``: letters of what is done: c check, t time, s search.
    """
    timed = device != "cpu"
    journal = Journal(path, until)
    runner = Runner(journal, device, timed=timed)
    works = chosen(words, small=not timed)
    try:
        runner.facts()
        right = [work for work in works if "c" not in steps or runner.check(work)]
        for letter, step in (("t", runner.time), ("s", runner.tune)):
            part = ""
            for work in right if letter in steps else ():
                if work.part != part:
                    runner.release()
                    product_works.forget()
                    layer_works.forget()
                    part = work.part
                step(work)
    except OutOfTime:
        return 1
    return 0
