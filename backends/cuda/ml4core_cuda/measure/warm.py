"""Compiles what a run will launch, on all cores, into the cache that the launches look in.

Run as several processes, each with its share: ``python -m ml4core_cuda.measure.warm 3 14 PARTS
sm_90``. No device is touched.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import chain

import torch

from ml4core_cuda.aot import launches
from ml4core_cuda.measure.suite import chosen
from ml4core_cuda.measure.words import DEFAULTS_DONE
from ml4core_cuda.measure.work import Work
from ml4core_cuda.tuned import forced
from ml4core_triton.aot import Ahead, Case, Launch, key_of


def main(share: int, shares: int, parts: str, arch: str) -> None:
    """Prints ``DEFAULTS_DONE`` once what is launched without a search is there."""
    works = chosen(parts, small=False)
    _compile(_each(_plain(works, arch), share, shares), arch)
    print(DEFAULTS_DONE, flush=True)
    _compile(_each(_tried(works, arch), share, shares), arch)


def _each(found: Iterator[Launch], share: int, shares: int) -> Iterator[Launch]:
    seen: set[str] = set()
    for launch in found:
        key = key_of(launch, near=False)
        if key not in seen:
            seen.add(key)
            if len(seen) % shares == share:
                yield launch


def _plain(works: list[Work], arch: str) -> Iterator[Launch]:
    return chain.from_iterable(_of(work, arch) for work in works)


def _tried(works: list[Work], arch: str) -> Iterator[Launch]:
    for work in works:
        for kernel, shape, candidates in work.tuned:
            for sizes in candidates:
                with forced(kernel, shape, sizes):
                    found = _of(work, arch)
                yield from found


def _of(work: Work, arch: str) -> list[Launch]:
    meta = torch.device("meta")
    try:
        return launches(Case(work.name, lambda: work.call(*work.make(0, meta))), arch)
    except Exception as error:  # sizes that don't go together are found out where they are tried
        print(f"{work.name}: {type(error).__name__}: {error}"[:300], file=sys.stderr, flush=True)
        return []


def _compile(found: Iterator[Launch], arch: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(Ahead(GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)))
    for launch in found:
        try:
            launch.kernel.run(grid=(1, 1, 1), warmup=True, **launch.arguments, **launch.options)
        except Exception as error:  # tried again where it is launched, and told there
            text = f"{launch.name}: {type(error).__name__}: {error}"
            print(text[:300], file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
