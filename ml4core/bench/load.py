"""Memory at loading: the peak of a process that loads a checkpoint and does nothing else."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass

from ml4core.engine.args import EngineArgs

# The parent's path comes first: it decides which `ml4core` and which plugins the child sees.
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from ml4core.bench.load_child import main; main()"
)


@dataclass(frozen=True)
class LoadPeak:
    """Bytes of the host's memory.

    Attributes:
        before: resident when the first tensor was read, without it.
        peak: most that was resident until the last weight was laid out.
        model: what the session keeps of the weights; those on a device are not among it.
        layer: the largest layer of it, or the outer weights where they are larger.
        file: the checkpoint's tensors.
        largest: the checkpoint's largest tensor.
    """

    before: int
    peak: int
    model: int
    layer: int
    file: int
    largest: int

    @property
    def beside(self) -> int:
        """What loading took beside the model."""
        return self.peak - self.before - self.model

    @property
    def target(self) -> int:
        """Beside the model there is a layer, and the tensor that is just being read."""
        return self.layer + self.largest


def measure(args: EngineArgs) -> LoadPeak:
    """Loads ``args.model`` in a child process: this one has too much memory of its own, and what
    its allocator kept would hide a peak. Raises ``ChildProcessError`` with what it said.
    """
    child = subprocess.run(
        [sys.executable, "-c", _BOOT, json.dumps(sys.path)],
        input=pickle.dumps(args),
        capture_output=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    lines = child.stdout.decode("utf-8", "replace").splitlines()
    if child.returncode or not lines:
        words = child.stderr.decode("utf-8", "replace").strip()[-2000:]
        raise ChildProcessError(
            f"the process that loads {args.model} ended with code {child.returncode}: "
            f"{words or 'it said nothing'}"
        )
    return LoadPeak(**json.loads(lines[-1]))
