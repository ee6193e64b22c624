"""The process of a rank other than 0: ``python -c "... main(socket's descriptor)"``, with a pipe as
stdin that closes when rank 0's process ends.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from ml4core import registry
from ml4core.api import FaultError, MemoryFigures, Session, StepShape
from ml4core.engine.cache_sizes import cache_groups
from ml4core.engine.kv_pool import Pools
from ml4core.engine.model_files import ModelFiles
from ml4core.engine.ranks import group
from ml4core.engine.ranks.calls import Answer, Begin, Call
from ml4core.engine.ranks.failures import failure_of
from ml4core.engine.ranks.fingerprint import fingerprint
from ml4core.engine.ranks.packing import Packed, unpack
from ml4core.engine.ranks.plans import draft_plan, step_plan
from ml4core.engine.runner import ModelRunner
from ml4core.engine.transfers import has_streams

FAILED = 1
"""Exit code after a failure that was told."""
GONE = 3
"""Exit code after rank 0's end."""
_LOOK_S = 0.05
"""Time between looks at a device that still runs: what fails there is told, if no call comes."""


def main(descriptor: int) -> None:
    """Makes the calls that rank 0 asks for, until it says that it was the last."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A terminal or a service manager tells all processes; it is rank 0 that ends the others.
        signal.signal(number, signal.SIG_IGN)
    os.set_inheritable(descriptor, False)
    threading.Thread(target=_end_with_rank_0, daemon=True).start()
    connection = Connection(descriptor)
    os._exit(_run(connection))  # what a backend's threads still do concerns nobody


def _run(connection: Connection) -> int:
    rank = worker = None
    try:
        begin = connection.recv()
        rank = begin.place.rank
        worker = Worker(begin, connection)
        worker.serve()
        return 0
    except (EOFError, ConnectionError):
        return GONE
    except BaseException as error:
        if rank is not None:
            step = worker.steps if worker is not None else 0
            with suppress(OSError):
                connection.send(failure_of(error, rank, time.monotonic(), step))
        return FAILED


def _end_with_rank_0() -> None:
    while os.read(0, 1):  # nothing is ever written to it
        pass
    os._exit(GONE)


class Worker:
    """A rank. Its public methods are the calls of rank 0; what they return is the answer."""

    def __init__(self, begin: Begin, connection: Connection) -> None:
        self.steps = 0
        self._begin = begin
        self._connection = connection
        self._device = torch.device(begin.device.torch_device)
        self._session: Session | None = None
        self._taps: tuple[torch.Tensor, ...] = ()
        self._queued: torch.Event | None = None
        self._stopped = False
        torch.set_num_threads(begin.threads)

    def serve(self) -> None:
        with group.environment(self._device, self._begin.place.host):
            while not self._stopped:
                self._wait()
                call: Call = self._connection.recv()
                value = getattr(self, call.name)(*call.arguments)
                if call.number:
                    self._connection.send(Answer(call.number, value))

    def prepare(self) -> str:
        """All that is done before ranks meet, and takes its time. Returns its ``fingerprint``."""
        begin = self._begin
        self._plugin = registry.load_plugin(registry.find(begin.backend))
        self._capabilities = self._plugin.backend.capabilities(begin.device)
        self._files = ModelFiles.open(begin.args)
        self._deployment = self._files.deployment(begin.args, begin.device, self._capabilities)
        return fingerprint(self._deployment)

    def join(self) -> None:
        group.join(self._begin.place, self._device)

    def open(self) -> None:
        self._session = registry.open_session(self._plugin, self._deployment)
        own, replicas = group.collectives(self._begin.place)
        self._runner = ModelRunner(
            self._session,
            self._plugin.backend.name,
            self._deployment,
            self._capabilities,
            collectives=own,
            replicas=replicas,
        )
        group.wait_for_ever()

    def load(self) -> None:
        """The weights of this rank; images are encoded on rank 0 alone."""
        self._files.load(self._runner, self._deployment, images=False)

    def allocate_kv(self, blocks: Mapping[str, int], block_size: int) -> None:
        """As many pages as rank 0 has: their numbers are the same."""
        assert self._session is not None
        groups = cache_groups(self._deployment, self._session.layouts)
        self._runner.allocate_kv(Pools(groups, blocks, block_size))

    def free_kv(self) -> None:
        self._taps = ()
        self._runner.free_kv()
        drop = getattr(self._runner.session.executor, "drop", None)
        if drop is not None:
            drop()

    def figures(self) -> MemoryFigures:
        assert self._runner.memory is not None
        return self._runner.memory.figures()

    def reset_peak(self) -> None:
        assert self._runner.memory is not None
        self._runner.memory.reset_peak()

    def release(self) -> None:
        assert self._runner.memory is not None
        gc.collect()
        self._runner.memory.release()

    @torch.inference_mode()
    def launch(self, shape: StepShape, names: tuple[str, ...], packed: Packed) -> None:
        self.steps += 1
        tensors = unpack(packed, self._device, group.receive)
        plan = step_plan(shape, dict(zip(names, tensors, strict=True)))
        self._taps = ()
        self._taps = self._runner.launch(plan).taps
        self._launched()

    @torch.inference_mode()
    def draft(self, packed: Packed) -> None:
        plan = draft_plan(unpack(packed, self._device, group.receive))
        self._runner.draft(plan, self._taps)
        self._launched()

    def stop(self) -> None:
        self._stopped = True
        if self._session is not None:
            self._session.close()
        group.leave()

    def _launched(self) -> None:
        fault = self._runner.session.fault()
        if fault is not None:
            raise FaultError(fault)
        if has_streams(self._device):
            self._queued = torch.Event(self._device)
            self._queued.record()

    def _wait(self) -> None:
        """For the next call. What fails on the device meanwhile is raised."""
        while self._queued is not None and not self._connection.poll(_LOOK_S):
            if self._queued.query():
                self._queued = None
