"""Checks, times and tunes every kernel on a GPU in one call: ``python -m ml4core_cuda.check --out
DIR``.

Each kernel is held against a plain fp64 reference, timed in a graph on inputs that rotate through
more memory than the caches hold, beside peers that are installed, and its sizes are searched. A
kernel that fails stops nothing: after an error that breaks the device's context, or when nothing is
heard of it, a fresh process goes on behind it. Everything is written as it is found:
``journal.jsonl``, and from it ``check.json``, ``table.txt`` and ``measured.json``, which is the
package's ``data/measured.json`` with what was found put in.

Ends with 1 if a kernel is wrong or failed, with 2 if the time ran out before all was judged.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ml4core_cuda.measure.journal import STICKY, read

_SILENCE = 150.0
"""Seconds without a word after which a process is taken to hang."""
_RESTARTS = 40


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    found = argparse.ArgumentParser(prog="python -m ml4core_cuda.check", description=__doc__)
    found.add_argument("--out", type=Path, required=True, help="folder of the results")
    found.add_argument(
        "--only", default="", metavar="WORDS", help="parts, or beginnings of names, with commas"
    )
    found.add_argument("--device", default="cuda", help="torch device; cpu runs the interpreter")
    found.add_argument("--budget-s", type=float, default=520.0, help="seconds for all of it")
    found.add_argument(
        "--steps", default="cts", help="letters: c check, t time, s search sizes; default: cts"
    )
    found.add_argument("--arch", default="sm_90", help="what is compiled ahead on all cores")
    found.add_argument("--list", action="store_true", help="print the works, and end")
    found.add_argument("--child", type=float, metavar="UNTIL", help=argparse.SUPPRESS)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    interpreted = options.device == "cpu"
    if options.child is not None or options.list:
        return _child(options, interpreted)
    until = time.time() + options.budget_s
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    with _warming(options, environment, interpreted):
        ended = supervised(options, environment, until)
    found = write(options.out)
    wrong = [row["name"] for row in found["works"] if is_wrong(row)]
    print((options.out / "table.txt").read_text("utf-8"))
    judged = sum(row["check"] is not None for row in found["works"])
    print(f"{judged} works judged, {len(wrong)} wrong{': ' if wrong else ''}{', '.join(wrong)}")
    return 1 if wrong or not judged else (2 if ended else 0)


def is_wrong(row: dict[str, Any]) -> bool:
    check = row["check"]
    return check is not None and ("failed" in check or not check["error"] <= 1.0)


def write(out: Path) -> dict[str, Any]:
    """The results of the journal in ``out``; works that weren't reached have none."""
    from ml4core_cuda.measure.report import gathered, measured, table

    lines = list(read(out / "journal.jsonl"))
    works = json.loads((out / "works.json").read_text("utf-8"))
    found = gathered(lines, works)
    (out / "check.json").write_text(json.dumps(found, indent=1, default=str), "utf-8")
    (out / "table.txt").write_text(table(found) + "\n", "utf-8")
    if any(line["key"].startswith(("tuned/", "peer/")) for line in lines):
        (out / "measured.json").write_text(measured(found, lines), "utf-8")
    return found


def _child(options: argparse.Namespace, interpreted: bool) -> int:
    from ml4core_triton.interpreter import is_on

    if options.device != "meta" and interpreted != is_on() and not options.list:
        raise RuntimeError("the interpreter's switch isn't as --device wants it")
    from ml4core_cuda.measure.run import run
    from ml4core_cuda.measure.suite import chosen

    names = ("name", "part", "nbytes", "flops", "rate", "target", "target_us")
    works = [
        {name: getattr(work, name) for name in names}
        for work in chosen(options.only, small=interpreted)
    ]
    if options.list:
        print("\n".join(f"{work['part']:16} {work['name']}" for work in works))
        return 0
    (options.out / "works.json").write_text(json.dumps(works), "utf-8")
    journal = options.out / "journal.jsonl"
    return run(journal, options.device, options.only, options.child, options.steps)


def supervised(options: argparse.Namespace, environment: dict[str, str], until: float) -> int:
    """Processes one after the other until one comes to the end: 0, or 1 if time ran out."""
    command = [sys.executable, "-m", "ml4core_cuda.check", "--child", str(until)]
    for name in ("out", "only", "device", "steps"):
        command += [f"--{name}", str(getattr(options, name))]
    journal = options.out / "journal.jsonl"
    for _ in range(_RESTARTS):
        before = _size(journal)
        process = subprocess.Popen(command, env=environment)
        code = _watched(process, journal, until)
        if code in (0, 1):
            return code
        what = "its context broke" if code == STICKY else f"it ended with {code}"
        print(f"a process is replaced: {what}", flush=True)
        if time.time() > until:
            return 1
        if _size(journal) == before:
            raise RuntimeError(f"processes end with {code} before they begin a step")
    return 1


def _watched(process: subprocess.Popen[bytes], journal: Path, until: float) -> int:
    size, heard = _size(journal), time.monotonic()
    while True:
        try:
            return process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            pass
        if _size(journal) != size:
            size, heard = _size(journal), time.monotonic()
        late = time.time() - until > 20.0
        if late or time.monotonic() - heard > _SILENCE:
            process.kill()
            process.wait()
            return 1 if late else -9


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


@contextmanager
def _warming(
    options: argparse.Namespace, environment: dict[str, str], interpreted: bool
) -> Iterator[None]:
    """While it lasts, other cores compile; it begins once what is launched first is there."""
    cores = len(os.sched_getaffinity(0)) - 2
    if interpreted or cores < 1 or "cuda" not in options.device:
        yield
        return
    from ml4core_cuda.measure.words import DEFAULTS_DONE

    started = time.time()
    files, workers = [], []
    with tempfile.TemporaryDirectory() as folder:
        for share in range(cores):
            words = [str(share), str(cores), options.only, options.arch]
            file = Path(folder) / str(share)
            files.append(file)
            with file.open("wb") as said:
                command = [sys.executable, "-m", "ml4core_cuda.measure.warm", *words]
                workers.append(subprocess.Popen(command, env=environment, stdout=said, stderr=said))
        try:
            while time.time() - started < 90.0 and any(
                worker.poll() is None and DEFAULTS_DONE not in file.read_text("utf-8", "replace")
                for worker, file in zip(workers, files, strict=True)
            ):
                time.sleep(0.5)
            print(f"compiled ahead in {time.time() - started:.0f} s", flush=True)
            yield
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
            said_all = "".join(file.read_text("utf-8", "replace") for file in files)
            (options.out / "warm.txt").write_text(said_all[:200_000], "utf-8")


if __name__ == "__main__":
    sys.exit(main())
