"""Compiles kernels ahead, with no GPU: what each takes of registers and shared memory, and whether
it spills.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from ml4core_triton import aot
from ml4core_triton.aot import Case, Launch

_LINE = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_TARGET = re.compile(r"^\.target\s+(\w+)", re.MULTILINE)


SHARED_BYTES = 227 * 1024
"""Shared memory that a program may have, on sm_90 as on sm_100."""


@dataclass(frozen=True)
class Compiled:
    """What the assembler says of one launch on one architecture.

    Attributes:
        registers: a thread.
        shared_bytes: a program.
        spill_bytes: stored and loaded, a thread.
    """

    case: str
    kernel: str
    arch: str
    warps: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    hot: bool

    @property
    def fault(self) -> str:
        """Why this must not be shipped; empty if it may."""
        if self.shared_bytes > SHARED_BYTES:
            return f"needs more shared memory than the {SHARED_BYTES} bytes of a program"
        return "hot, and spills" if self.hot and self.spill_bytes else ""


def launches(case: Case, arch: str) -> list[Launch]:
    """The launches of a case on an architecture, each distinct one once."""
    from ml4core_cuda.kernels.target import ahead

    return aot.launches(case, ahead(arch), near=False)


def compile_launch(case: Case, launch: Launch, arch: str) -> Compiled:
    """Compiles for ``sm_90`` or ``sm_100``. Raises what triton raises."""
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    compiled = aot.compiled(launch, target, near=False)
    registers, spills = _assembled(compiled.asm["ptx"])
    return Compiled(
        case.name,
        launch.name,
        arch,
        launch.options.get("num_warps", 4),
        registers,
        int(compiled.metadata.shared),
        spills,
        case.hot,
    )


def _assembled(ptx: str) -> tuple[int, int]:
    """Registers a thread and bytes spilled, by the assembler that triton brings along."""
    import triton

    target = _TARGET.search(ptx)
    arch = target[1] if target else "sm_90a"
    nvidia = triton.knobs.nvidia
    tool = nvidia.ptxas_blackwell if arch.startswith("sm_1") else nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx, "utf-8")
        done = subprocess.run(
            [tool.path, "-v", f"--gpu-name={arch}", str(file), "-o", str(file.with_suffix(".o"))],
            capture_output=True,
            text=True,
            check=True,
        )
    said = done.stdout + done.stderr
    registers, spills = _REGISTERS.search(said), _LINE.search(said)
    if registers is None or spills is None:
        raise RuntimeError(f"the assembler didn't tell its resources; it said: {said.strip()}")
    return int(registers[1]), int(spills[1]) + int(spills[2])
