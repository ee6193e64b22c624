"""Compiles kernels ahead, with no GPU: what each takes of registers and shared memory, and whether
it spills.

The ops themselves are called, on tensors without data, and their launches recorded instead of made.
So what is compiled is what a session of such shapes launches.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_INT32_MAX = 2**31 - 1
_LINE = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_TARGET = re.compile(r"^\.target\s+(\w+)", re.MULTILINE)
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl")


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel, without its grid.

    Attributes:
        arguments: by name of the kernel's parameters.
        options: ``num_warps`` and the like.
    """

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


@dataclass(frozen=True)
class Case:
    """An op's call at shapes worth knowing.

    Attributes:
        hot: whether a spill is a fault: what a decode step of the full model launches.
        call: calls the op on tensors of the ``meta`` device.
    """

    name: str
    call: Callable[[], object]
    hot: bool = True


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


def launches(case: Case, arch: str) -> list[Launch]:
    """The launches of a case on an architecture, each distinct one once."""
    from ml4core_cuda.kernels.target import ahead

    with ahead(arch), recorded() as found:
        case.call()
    unique: dict[object, Launch] = {}
    for launch in found:
        signature, constants, attributes = specialised(launch)
        key = (
            launch.name,
            *map(str, (signature, constants, attributes, sorted(launch.options.items()))),
        )
        unique.setdefault(key, launch)
    return list(unique.values())


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """While it lasts, launches of this process are noted and not made."""
    from triton.runtime.jit import JITFunction

    found: list[Launch] = []

    def note(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        options = {key: named.pop(key) for key in _OPTIONS if key in named}
        arguments = dict(zip(self.arg_names, args, strict=False)) | named
        found.append(Launch(self, arguments, options))

    original = JITFunction.run
    JITFunction.run = note
    try:
        yield found
    finally:
        JITFunction.run = original


def specialised(
    launch: Launch,
) -> tuple[dict[str, str], dict[tuple[int, ...], Any], dict[tuple[int, ...], Any]]:
    """Signature, constants and attributes, as triton derives them from a launch: 1 is a constant,
    and so is None; addresses and sizes that 16 divides are told to be such.
    """
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments.get(parameter.name, parameter.default)
        place = (index,)
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[parameter.name] = "constexpr"
            constants[place] = value
        else:
            signature[parameter.name] = _type_of(value)
            if hasattr(value, "dtype") or (type(value) is int and value % 16 == 0):
                attributes[place] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compile_launch(case: Case, launch: Launch, arch: str) -> Compiled:
    """Compiles for ``sm_90`` or ``sm_100``. Raises what triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = specialised(launch)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    compiled = triton.compile(source, target=target, options=dict(launch.options))
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


def _type_of(value: Any) -> str:
    """The type of a launch's argument in triton's words."""
    if hasattr(value, "dtype"):
        names = {
            "float32": "fp32",
            "bfloat16": "bf16",
            "float16": "fp16",
            "bool": "i1",
            "uint8": "u8",
            "uint16": "u16",
            "int8": "i8",
            "int16": "i16",
            "int32": "i32",
            "int64": "i64",
        }
        return "*" + names[str(value.dtype).removeprefix("torch.")]
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i64" if value > _INT32_MAX or value < -_INT32_MAX - 1 else "i32"
    if isinstance(value, float):
        return "fp32"
    raise TypeError(f"no kernel takes a {type(value).__name__}")
