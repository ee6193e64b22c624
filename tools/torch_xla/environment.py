"""Makes the side environment in which torch-xla runs on the host.

    python -m tools.torch_xla.environment FOLDER

torch-xla 2.9.0 is bound to torch 2.9, whose only x86-64 wheel on PyPI is built for CUDA. It is
installed without CUDA's libraries, and ``stand_ins`` takes their place: 1.3 GB to download and 3.2
on disk, instead of 4.1 and 7.1. ml4core and its siblings come without their own dependencies, as
ml4core asks for a newer torch; ``requirements.txt`` has the others.

What is there is kept for as long as the files that it was made of, this checkout and the Python
stay the same. What was broken off is made anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
STAND_INS = Path(__file__).with_name("stand_ins.py")
OURS = (".", "backends/tpu", "conformance")
TOOLS = ("gcc", "nm", "readelf")
_CHECK = "import torch, torch_xla; assert (torch.ones(2, device='xla') + 1).sum().item() == 4"
_LIMIT_S = 600
"""Of one command: the longest one downloads 1.3 GB."""


class NotMade(RuntimeError):
    """The environment can't be made here, or wasn't; the message says why."""


def ensure(folder: Path) -> Path:
    """The environment's Python, made if it isn't there as it should be.

    Raises ``NotMade``.
    """
    if reason := _unfit():
        raise NotMade(reason)
    folder = folder.absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder.with_name(f"{folder.name}.lock")):
            return _made(folder)
    except OSError as error:
        raise NotMade(str(error)) from error


def settings() -> dict[str, str]:
    """Variables of its processes: torch-xla takes the host, and no other environment's packages."""
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return others | {"PJRT_DEVICE": "CPU", "TPU_SKIP_MDS_QUERY": "1"}


def _unfit() -> str:
    """Why this machine can't have it; "" if it can."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"torch-xla has wheels for x86-64 Linux; this is {sys.platform} {platform.machine()}"
    if sys.version_info[:2] > (3, 13):
        here = ".".join(map(str, sys.version_info[:2]))
        return f"torch-xla 2.9 has wheels for Python 3.11 to 3.13; this is {here}"
    if missing := [name for name in TOOLS if shutil.which(name) is None]:
        return f"stand-ins for CUDA's libraries need {', '.join(missing)}: install gcc and binutils"
    return ""


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Waits for another process that makes the same environment."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _made(folder: Path) -> Path:
    python = folder / "bin" / "python"
    theirs = _digest(sys.version, sys.base_prefix, REQUIREMENTS, STAND_INS)
    ours = _digest(theirs, str(ROOT), *(ROOT / name / "pyproject.toml" for name in OURS))
    if not (python.exists() and _stamped(folder / "theirs", theirs)):
        shutil.rmtree(folder, ignore_errors=True)
        _install_theirs(folder, python)
        (folder / "theirs").write_text(theirs, "ascii")
    if not _stamped(folder / "ours", ours):
        editable = [word for name in OURS for word in ("-e", str(ROOT / name))]
        _pip(python, "--no-build-isolation", *editable)
        (folder / "ours").write_text(ours, "ascii")
    return python


def _install_theirs(folder: Path, python: Path) -> None:
    _run(sys.executable, "-m", "venv", str(folder))
    # Compiled as it is imported: most of torch never is.
    _pip(python, "--no-compile", "-r", str(REQUIREMENTS))
    # Not imported: it can't be yet.
    (torch,) = folder.glob("lib/python3*/site-packages/torch")
    _run(str(python), str(STAND_INS), str(torch))
    _run(str(python), "-c", _CHECK)


def _stamped(stamp: Path, digest: str) -> bool:
    return stamp.exists() and stamp.read_text("ascii") == digest


def _digest(*parts: str | Path) -> str:
    """Of words, and of what files hold."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part.read_bytes() if isinstance(part, Path) else part.encode())
        found.update(b"\0")
    return found.hexdigest()


def _pip(python: Path, *what: str) -> None:
    """``PIP_ARGS`` is the Makefile's."""
    more = shlex.split(os.environ.get("PIP_ARGS", ""))
    command = (str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check")
    _run(*command, *more, "--no-deps", *what)


def _run(*command: str) -> None:
    """Raises ``NotMade`` where the command fails or takes too long, with what it said of that."""
    shown = shlex.join(command)
    try:
        subprocess.run(
            command,
            env=settings(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        lines = (error.stderr.strip() or error.stdout.strip()).splitlines()
        said = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise NotMade(": ".join((f"{shown} ended with {error.returncode}", *said))) from error
    except subprocess.TimeoutExpired as error:
        raise NotMade(f"{shown} took more than {_LIMIT_S} seconds") from error


if __name__ == "__main__":
    try:
        print(ensure(Path(sys.argv[1])))
    except NotMade as reason:
        sys.exit(f"error: {reason}")
