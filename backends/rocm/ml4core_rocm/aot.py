"""Compiles kernels ahead, with no GPU: what each takes of registers and LDS, whether it spills, and
which matrix instructions it has.

One architecture a process: compilers before 3.7 carry what they lowered for one over to the next.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ml4core_triton import aot
from ml4core_triton.aot import Case, Launch

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

    return aot.launches(case, ahead(arch), near=True)


def compile_launch(case: Case, launch: Launch, arch: str) -> Compiled:
    """Compiles for ``gfx950`` or ``gfx942``. Raises what triton raises."""
    from triton.backends.compiler import GPUTarget

    compiled = aot.compiled(launch, GPUTarget("hip", arch, 64), near=True)
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
