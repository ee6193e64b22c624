"""Compiles kernels ahead, with no GPU: what each takes of registers and LDS, whether it spills, and
which matrix instructions it has.

The ops themselves are called, on tensors without data, and their launches recorded instead of made.
So what is compiled is what a session of such shapes launches. One architecture a process: compilers
before 3.7 carry what they lowered for one over to the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_INT32_MAX = 2**31 - 1
_OPTIONS = ("num_warps", "num_stages", "num_ctas", "matrix_instr_nonkdim", "waves_per_eu", "kpack")
_MATRIX = re.compile(r"\bv_s?mfmac?_\w+")
_FIGURES = {
    "vgprs": "vgpr_count",
    "agprs": "agpr_count",
    "vgpr_spills": "vgpr_spill_count",
    "sgpr_spills": "sgpr_spill_count",
    "scratch_bytes": "private_segment_fixed_size",
}
"""Field of ``Compiled`` -> entry of the code object's metadata."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        arguments: by name of the kernel's parameters.
        options: ``num_warps`` and the like.
        programs: of its grid.
    """

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]
    programs: int

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)


@dataclass(frozen=True)
class Case:
    """An op's call at shapes worth knowing.

    Attributes:
        call: calls the op on tensors of the ``meta`` device.
        hot: whether a spill is a fault: what a decode step of the full model launches.
        wants: architecture -> a pattern that a matrix instruction of one of its kernels matches.
        archs: those it is for; all if none is named.
    """

    name: str
    call: Callable[[], object]
    hot: bool = True
    wants: Mapping[str, str] = field(default_factory=dict)
    archs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Compiled:
    """What the assembly says of one launch on one architecture.

    Attributes:
        warps: waves of 64 lanes a program.
        stages: of its pipeline; all but one are asked for ahead.
        vgprs, agprs: a lane; the former are all, the latter those of them that matrix instructions
            alone reach.
        lds_bytes: a program.
        vgpr_spills: registers that are kept elsewhere: in memory, or in other registers.
        sgpr_spills: scalars that are kept in vector registers.
        scratch_bytes: private memory a lane; 0 where nothing is kept there.
        matrix: names of its matrix instructions, sorted.
        fp8: FP8 types in its intermediate code, sorted, as MLIR writes them.
        wants: the pattern asked of the case.
        tile: its constants that are numbers, by name: sizes of its tile among them.
    """

    case: str
    kernel: str
    arch: str
    programs: int
    warps: int
    stages: int
    vgprs: int
    agprs: int
    lds_bytes: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    matrix: tuple[str, ...]
    fp8: tuple[str, ...]
    hot: bool
    wants: str
    tile: dict[str, int] = field(default_factory=dict)


def launches(case: Case, arch: str) -> list[Launch]:
    """The launches of a case on an architecture, each distinct one once."""
    from ml4core_rocm.kernels.target import ahead

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
        programs = 1
        for size in grid:
            programs *= size
        found.append(Launch(self, arguments, options, programs))

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
    and so is None; addresses and sizes that 16 divides are told to be such, and arrays below 2 GiB
    to be reached by 32-bit offsets.
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
            continue
        signature[parameter.name] = _type_of(value)
        if hasattr(value, "dtype"):
            attributes[place] = [["tt.divisibility", 16]]
            if value.numel() * value.element_size() <= _INT32_MAX:
                attributes[place].append(["tt.pointer_range", 32])
        elif type(value) is int and value % 16 == 0:
            attributes[place] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def compile_launch(case: Case, launch: Launch, arch: str) -> Compiled:
    """Compiles for ``gfx950`` or ``gfx942``. Raises what triton raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = specialised(launch)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    target = GPUTarget("hip", arch, 64)
    compiled = triton.compile(source, target=target, options=dict(launch.options))
    assembly = compiled.asm["amdgcn"]
    return Compiled(
        case.name,
        launch.name,
        arch,
        launch.programs,
        launch.options.get("num_warps", 4),
        launch.options.get("num_stages", 2),
        **figures(assembly),
        lds_bytes=int(compiled.metadata.shared),
        matrix=tuple(sorted(set(_MATRIX.findall(assembly)))),
        fp8=tuple(sorted(set(re.findall(r"f8E\w+?(?=[,>\s])", str(compiled.asm["ttgir"]))))),
        hot=case.hot,
        wants=case.wants.get(arch, ""),
        tile={
            name: value
            for name, value in launch.arguments.items()
            if name.isupper() and type(value) is int
        },
    )


def figures(assembly: str) -> dict[str, int]:
    """The entries of ``_FIGURES`` in the metadata of one kernel's assembly. ``RuntimeError`` where
    one is missing.
    """
    found = {}
    for name, entry in _FIGURES.items():
        match = re.search(rf"^[\s-]*\.{entry}:\s*(\d+)", assembly, re.MULTILINE)
        if match is None:
            raise RuntimeError(f"the assembly doesn't tell .{entry} in its metadata")
        found[name] = int(match[1])
    return found


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
