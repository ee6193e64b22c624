"""Compiles a published layer for tpu7x at sizes that are named, two at a time, as a warm-up does.
Says each size once it is compiled.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ml4core_tpu.aot import compile_program, devices_of
from ml4core_tpu.compilation import without_cache
from ml4core_tpu.kernels.layer.aot_cases import KINDS, layer_case
from ml4core_tpu.kernels.layer.mesh import mesh_of


def compiled(mesh: Any, rows: int) -> None:
    case = layer_case(mesh, KINDS[0], rows)
    compile_program(case, case.arguments)
    print(rows, flush=True)


def main() -> None:
    mesh = mesh_of(devices_of("tpu7x:2x2x4"), 4, 8)
    with without_cache(), ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rows: compiled(mesh, rows), map(int, sys.argv[1:])))


if __name__ == "__main__":
    main()
