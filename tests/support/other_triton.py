"""Another release of triton in a folder beside, whose interpreter has what this one's lacks.

Made once, 286 MB to download and 1 GB on disk, and kept for as long as the release and the Python
stay the same. What was broken off is made anew.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

RELEASE = "3.9.0"
"""The interpreter has ``tl.dot_scaled`` from 3.8 on; before, operands are decoded in its place."""
_LIMIT_S = 300


class NotMade(RuntimeError):
    """The folder can't be made here; the message says why."""


def ensure(folder: Path) -> Path:
    """The folder, which holds ``RELEASE`` for this Python; another process that makes it is waited
    for. Raises ``NotMade``.
    """
    wanted = f"{RELEASE}, {sys.version}"
    stamp = folder / "stamp"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (stamp.exists() and stamp.read_text("utf-8") == wanted):
                shutil.rmtree(folder, ignore_errors=True)
                _install(folder)
                stamp.write_text(wanted, "utf-8")
    except OSError as error:
        raise NotMade(str(error)) from error
    return folder


def _install(folder: Path) -> None:
    """``PIP_ARGS`` is the Makefile's."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command += [*shlex.split(os.environ.get("PIP_ARGS", "")), "--no-compile", "--no-deps"]
    command += ["--target", str(folder), f"triton=={RELEASE}"]
    try:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip() or error.stdout.strip() or f"ended with {error.returncode}"
        raise NotMade(f"{shlex.join(command)}: {said.splitlines()[-1]}") from error
    except subprocess.TimeoutExpired as error:
        raise NotMade(f"{shlex.join(command)} took more than {_LIMIT_S} seconds") from error
