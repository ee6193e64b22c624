"""One architecture's kernels, compiled in a process of their own: ``python -m
ml4core_rocm.aot_child ARCH [REGEX]`` prints a line of JSON for each launch; and with ``--model``
before the regex a line of text for each hot kernel of a step of the full model.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from ml4core_rocm.aot import Compiled, compile_launch, launches
from ml4core_rocm.libraries import settle_fusion
from ml4core_triton.aot import Case


def compiled(arch: str, keyword: str) -> Iterator[Compiled]:
    """Every launch of the cases whose name has ``keyword``. Imports triton."""
    from ml4core_rocm.aot_suites import all_cases

    for case in all_cases():
        if re.search(keyword, case.name) and _is_for(case, arch):
            for launch in launches(case, arch):
                yield compile_launch(case, launch, arch)


def model(arch: str, keyword: str) -> Iterator[str]:
    """Lines of each hot kernel of a step beside its floor, and the sums of each step."""
    from ml4core_rocm.aot_floor import HEAD, Work, step
    from ml4core_rocm.aot_model import SHAPES, works

    known: dict[str, list[Compiled]] = {}

    def found(work: Work) -> Compiled:
        name = work.case.name
        if name not in known:
            made = launches(work.case, arch)
            known[name] = [compile_launch(work.case, launch, arch) for launch in made]
        return max(
            (one for one in known[name] if one.kernel == work.kernel), key=lambda one: one.programs
        )

    yield HEAD
    for ranks in (4, 8):
        for shape in SHAPES:
            wanted = [w for w in works(ranks, shape) if re.search(keyword, w.case.name)]
            sums = step(wanted, found)
            yield from sums.lines
            if sums.lines:
                yield (
                    f"TP {ranks}, {shape}: {1e3 * sums.floor:.3f} ms at the floors of these "
                    f"kernels in a step, {1e3 * sums.reach:.3f} ms by what they keep in flight; "
                    f"{sums.weights / 1e9:.2f} GB of weights"
                )


def _is_for(case: Case, arch: str) -> bool:
    return not case.archs or arch in case.archs


def main(arguments: Sequence[str]) -> int:
    settle_fusion()
    plain = [word for word in arguments if word != "--model"]
    arch, keyword = (*plain, "")[:2]
    if len(plain) < len(arguments):
        for line in model(arch, keyword):
            print(line, flush=True)
        return 0
    for one in compiled(arch, keyword):
        print(json.dumps(asdict(one)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
