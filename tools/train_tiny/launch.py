"""Start the processes that train together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

GRACE = 30.0
"""Seconds that the others have to end once one has failed."""


def launch(module: str, arguments: Sequence[str], processes: int) -> int:
    """Run `python -m module` that many times, numbered as torch.distributed wants it; the first
    exit status that is not zero, or zero. SIGTERM and SIGINT are passed on.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    if sys.platform == "linux":
        # All are on this machine, whose name need not lead anywhere.
        place["GLOO_SOCKET_IFNAME"] = "lo"
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "4")}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            env={**os.environ, **place, **threads, "RANK": str(i), "LOCAL_RANK": str(i)},
        )
        for i in range(processes)
    ]

    def pass_on(number: int, frame: object) -> None:
        for process in running:
            process.send_signal(number)

    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, pass_on)
    failed, since = 0, 0.0
    while any(process.poll() is None for process in running):
        if not failed:
            failed = next((p.returncode for p in running if p.returncode), 0)
            since = time.monotonic()
            if failed:
                pass_on(signal.SIGTERM, None)
        elif time.monotonic() - since > GRACE:
            # One that waits for a process that is gone hears no signal.
            for process in running:
                process.kill()
        time.sleep(0.1)
    return failed or next((p.returncode for p in running if p.returncode), 0)
