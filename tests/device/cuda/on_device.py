"""What is run where there is a GPU, each in one command that leaves its results in a folder:

    python tests/device/cuda/on_device.py STEP --out DIR [--budget-s SECONDS] [words for the step]

Steps: ``kernels`` (``ml4core_cuda.check``: every kernel checked, timed and tuned), ``tests`` (the
tests of this folder, and those marked ``accelerator``), ``conformance`` (the whole suite, into
``cuda.json``), ``start`` (what the start of ``ml4-tiny`` takes: profile, caches against their
plan, captures; and its speed with graphs against eager), ``bench`` (``start``, ops, and steps of
``ml4-tiny``, graphs and eager), ``sanitize`` (memcheck of a reduced set, NOT-RUN where the tool
doesn't start). A step that is out of time is interrupted, and what it found until then is kept.
Needs no installation: plugins are found beside this file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROJECTS = (".", "backends/triton", "backends/cuda", "conformance")
BATCHES = (1, 8, 64)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=sorted(STEPS))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=560.0)
    options, words = parser.parse_known_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    with installed() as environment:
        commands = STEPS[options.step](options.out.resolve(), words, options.budget_s)
        share = options.budget_s / len(commands)
        codes = [run(name, command, options.out, environment, share) for name, command in commands]
    return max(codes)


@contextmanager
def installed(projects: Sequence[str] = PROJECTS) -> Iterator[dict[str, str]]:
    """An environment in which the projects are found as after an installation: their folders on the
    path, and their names, versions and entry points beside them.
    """
    with tempfile.TemporaryDirectory() as folder:
        for project in projects:
            text = (ROOT / project / "pyproject.toml").read_text("utf-8")
            facts = tomllib.loads(text)["project"]
            info = Path(folder) / f"{facts['name'].replace('-', '_')}-{facts['version']}.dist-info"
            info.mkdir()
            lines = ["Metadata-Version: 2.1", f"Name: {facts['name']}"]
            lines += [f"Version: {facts['version']}"]
            lines += [f"Keywords: {','.join(facts['keywords'])}"] if facts.get("keywords") else []
            (info / "METADATA").write_text("\n".join(lines) + "\n", "utf-8")
            groups = facts.get("entry-points", {})
            entries = "\n".join(
                f"[{group}]\n" + "".join(f"{name} = {where}\n" for name, where in found.items())
                for group, found in groups.items()
            )
            (info / "entry_points.txt").write_text(entries, "utf-8")
        paths = [folder, *(str(ROOT / project) for project in projects)]
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        yield dict(os.environ) | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def run(
    name: str, command: Sequence[str], out: Path, environment: dict[str, str], seconds: float
) -> int:
    """Its exit code; what it says is shown, and kept in ``NAME.log``."""
    print(f"== {name}: {' '.join(command)}", flush=True)
    log = (out / f"{name}.log").open("w", encoding="utf-8")
    with (
        log,
        subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True
        ) as process,
    ):
        try:
            code = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                code = process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
    text = (out / f"{name}.log").read_text("utf-8", "replace")
    print(text[-2500:], flush=True)
    print(f"== {name} ended with {code}", flush=True)
    return abs(code)


Commands = list[tuple[str, list[str]]]


def kernels(out: Path, words: list[str], budget: float) -> Commands:
    command = [sys.executable, "-m", "ml4core_cuda.check", "--out", str(out)]
    return [("kernels", [*command, "--budget-s", str(budget - 30), *words])]


def tests(out: Path, words: list[str], budget: float) -> Commands:
    chosen = words or ["tests/device/cuda", "tests/device/test_compose_on_device.py",
                       "tests/device/test_chaining_on_device.py"]  # fmt: skip
    report = f"--junitxml={out / 'tests.xml'}"
    return [("tests", [sys.executable, "-m", "pytest", "-q", "-ra", report, *chosen])]


def conformance(out: Path, words: list[str], budget: float) -> Commands:
    command = [sys.executable, "-m", "ml4core", "conformance", "run", "--backend", "cuda"]
    command += ["--json", str(out / "cuda.json"), "--junit", str(out / "cuda.xml")]
    return [("conformance", [*command, *words])]


def bench(out: Path, words: list[str], budget: float) -> Commands:
    python = [sys.executable, "-m", "ml4core", "bench"]
    begun = start(out, [], budget)
    ops = ["ops", "--backend", "cuda", "--json", str(out / "ops.json")]
    found = [*begun, ("ops", [*python, *ops, "--plot", str(out / "roofline.svg"), *words])]
    for name, more in (("graphs", []), ("eager", ["--enforce-eager"])):
        step = ["step", "ml4-tiny", "--backend", "cuda", "--part", "model", "--context", "512"]
        for batch in BATCHES:
            step += ["--batch-size", str(batch)]
        found.append((name, [*python, *step, *more, "--json", str(out / f"tiny-{name}.json")]))
    return found


def start(out: Path, words: list[str], budget: float) -> Commands:
    script = str(Path(__file__).with_name("started.py"))
    return [("start", [sys.executable, script, "--out", str(out), *words])]


def sanitize(out: Path, words: list[str], budget: float) -> Commands:
    tool = shutil.which("compute-sanitizer") or "compute-sanitizer"
    script = "import torch; torch.zeros(1, device='cuda').add_(1)"
    chosen = words or ["tests/device/cuda/attention/test_kernels.py"]
    checked = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable]
    return [
        ("sanitizer-starts", [*checked, "-c", script]),
        ("sanitizer", [*checked, "-m", "pytest", "-q", "-x", *chosen]),
    ]


STEPS = {
    "kernels": kernels,
    "tests": tests,
    "conformance": conformance,
    "bench": bench,
    "start": start,
    "sanitize": sanitize,
}

if __name__ == "__main__":
    sys.exit(main())
