"""Checks and times kernels on a GPU, in one call: ``python -m ml4core_cuda.check --out DIR``.

Every case is compared with a plain fp64 reference, made here from decoded rows, and timed in a
graph on inputs that rotate through more memory than the caches hold. Peers that are installed are
timed in the same run. The result is ``check.json``; a table is printed. Ends with 1 if a kernel is
wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml4core_cuda.interpreter import is_on


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ml4core_cuda.check", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for check.json")
    parser.add_argument("-k", default="", metavar="WORDS", help="only cases with this in the name")
    parser.add_argument("--device", default="cuda", help="torch device; cpu runs the interpreter")
    parser.add_argument("--no-times", action="store_true", help="compare only")
    options = parser.parse_args(arguments)
    interpreted = options.device == "cpu"
    if interpreted != is_on():
        want = "TRITON_INTERPRET=1 set" if interpreted else "TRITON_INTERPRET unset"
        parser.error(f"--device {options.device} wants {want}")
    from ml4core_cuda.kernels.checks import cases
    from ml4core_cuda.kernels.timing import Timer

    timer = None if interpreted or options.no_times else Timer(options.device)
    found: list[dict[str, Any]] = []
    for case in cases(options.device, small=interpreted):
        if options.k not in case.name:
            continue
        found.append(case.run(timer))
        print(_line(found[-1]), flush=True)
    facts: dict[str, Any] = {"device": _device(options.device), "cases": found}
    if timer is not None:
        facts["copy_bytes_per_second"] = timer.copy_rate()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "check.json").write_text(json.dumps(facts, indent=1), "utf-8")
    wrong = [one["name"] for one in found if not one["right"]]
    print(f"{len(found)} cases, {len(wrong)} wrong{': ' if wrong else ''}{', '.join(wrong)}")
    return 1 if wrong or not found else 0


def _line(one: dict[str, Any]) -> str:
    times = "  ".join(
        f"{who} {each['median_us']:.1f} us" for who, each in one.get("times", {}).items()
    )
    target = f"  target {one['target_us']:.1f} us" if one.get("target_us") else ""
    verdict = "right" if one["right"] else f"WRONG ({one['told']})"
    return f"{one['name']:52} {verdict:8} error {one['error']:.2g}  {times}{target}"


def _device(name: str) -> dict[str, str]:
    import torch
    import triton

    facts = {"torch": torch.__version__, "triton": triton.__version__, "name": name}
    if name != "cpu":
        properties = torch.cuda.get_device_properties(name)
        facts |= {"name": properties.name, "arch": f"sm_{properties.major}{properties.minor}"}
    return facts


if __name__ == "__main__":
    sys.exit(main())
