"""Run by itself, as torch-xla's libtpu and JAX's don't share a process: compiles a graph that
torch-xla has traced, for the 8 devices of a host of tpu7x, without one. The argument is its file.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from time import perf_counter

from ml4core_tpu.aot import devices_of

DEVICES = devices_of("tpu7x:2x2x1")

import numpy as np  # noqa: E402
from jax._src.interpreters import mlir  # noqa: E402, TID253
from jax._src.lib import xla_client  # noqa: E402, TID253
from jax._src.lib.mlir import ir  # noqa: E402, TID253
from jaxlib import _jax  # noqa: E402


def main() -> None:
    computation = xla_client.XlaComputation(Path(sys.argv[1]).read_bytes())
    text = _jax.mlir.xla_computation_to_mlir_module(computation)
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = 1, len(DEVICES)
    build = options.executable_build_options
    build.num_replicas, build.num_partitions = 1, len(DEVICES)
    build.use_spmd_partitioning = True
    ids = np.array([[device.id for device in DEVICES]])
    build.device_assignment = xla_client.DeviceAssignment.create(ids)
    start = perf_counter()
    program = DEVICES[0].client.compile(module, xla_client.DeviceList(tuple(DEVICES)), options)
    (made,) = (one.to_string() for one in program.hlo_modules())
    found = {
        "seconds": perf_counter() - start,
        "kernels": len(re.findall(r'custom_call_target="tpu_custom_call"', made)),
        "all_reduces": len(re.findall(r" all-reduce(?:-start)?\(", made)),
    }
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
