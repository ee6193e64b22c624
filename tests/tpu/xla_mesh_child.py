"""Run in the side environment: a layer over 8 virtual devices of torch-xla beside one device, by
value, and a reduction of torch-xla's own that doesn't reduce. As JSON. The argument is a file for
the traced graph of the layer with kernels for tpu7x within.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {
    "PJRT_DEVICE": "CPU",
    "CPU_NUM_DEVICES": "8",
    "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8",
}

import torch
import torch_xla  # noqa: TID253  # this is the environment for it
import torch_xla.core.xla_model as model  # noqa: TID253
import torch_xla.distributed.spmd as spmd  # noqa: TID253
import torch_xla.runtime as runtime  # noqa: TID253

runtime.use_spmd()
torch_xla._XLAC._init_computation_client()

from ml4core_tpu.bridge import host_environment  # noqa: E402

host_environment()

import jax  # noqa: E402, TID253

jax.config.update("jax_use_shardy_partitioner", False)  # its annotations are unknown to torch-xla

import mesh_case as case  # noqa: E402
import numpy as np  # noqa: E402

from ml4core_tpu.kernels.fp4_experts import NVFP4  # noqa: E402
from ml4core_tpu.kernels.layer.form import Form, Matrix, form_of  # noqa: E402
from ml4core_tpu.kernels.layer.mesh import (  # noqa: E402
    DATA,
    TENSOR,
    argument_specs,
    local_layer,
    mapped_layer,
)
from ml4core_tpu.kernels.layer.program import decoder_layer  # noqa: E402
from ml4core_tpu.kernels.target import Target  # noqa: E402
from ml4core_tpu.lazy_call import LazyCall  # noqa: E402

MESH = spmd.Mesh(np.arange(8), (case.DATA, case.TENSOR), (DATA, TENSOR))


def placed(value: np.ndarray, spec: Any) -> torch.Tensor:
    lazy = torch.from_numpy(np.ascontiguousarray(value)).to(torch_xla.device())
    axes = (*spec, *(None,) * (value.ndim - len(spec)))
    spmd.mark_sharding(lazy, MESH, axes)
    return lazy


def own_form(target: Target) -> Form:
    return form_of(local_layer(case.LAYER, case.TENSOR), case.KINDS, target=target)


def traced(call: LazyCall, target: Target, given: tuple[Any, ...]) -> list[torch.Tensor]:
    """The layer over the mesh within torch-xla's graph; its results, flat."""
    leaves, tree = jax.tree.flatten(given)
    specs = jax.tree.leaves(argument_specs(given))
    lazy = tuple(placed(one, spec) for one, spec in zip(leaves, specs, strict=True))
    mapped = mapped_layer(own_form(target), MESH.get_jax_mesh(), given)

    def program(*arrays: Any) -> list[Any]:
        return jax.tree.leaves(mapped(*jax.tree.unflatten(tree, arrays)))

    return list(call(program, lazy, ("layer", target)))


def main() -> None:
    weights, norm = case.layer_weights()
    held, states = [case.caches() for _ in range(case.DATA)], case.states()
    steps = case.STEPS["both"]
    single = jax.jit(partial(decoder_layer, form_of(case.LAYER, case.KINDS)))
    each = [
        single(weights, one, own, state, state, None, norm)
        for one, own, state in zip(steps, held, states, strict=True)
    ]
    want = jax.tree.leaves(jax.tree.map(lambda *parts: np.concatenate(parts), *each))
    given = case.whole(weights, steps, held, states, norm)
    found = [one.cpu().numpy() for one in traced(LazyCall(), "host", given)]
    rows = case.real_rows(steps)
    error = max(
        float(np.abs(got - right)[rows].max())
        for got, right in zip(found[:2], want[:2], strict=True)
    )
    other = sum(int((got != right).sum()) for got, right in zip(found[2:], want[2:], strict=True))
    print(json.dumps({"layer": error, "selected_or_stored_otherwise": other}), flush=True)
    reductions()
    packed = given[0] | {"experts_w13": fp4(256, 128), "experts_w2": fp4(128, 128)}
    graph = traced(LazyCall("tpu"), "tpu", (packed, *given[1:]))
    proto = torch_xla._XLAC._get_xla_tensors_hlo_proto(graph)
    Path(sys.argv[1]).write_bytes(proto)
    print(json.dumps({"graph": len(proto)}), flush=True)


def fp4(rows: int, columns: int) -> Matrix:
    """Packed experts, of zeros: the graph is compiled, and doesn't run."""
    width = -(-columns // NVFP4.block) * NVFP4.block
    parts = {
        "data": np.zeros((8, width // 2, rows), np.uint8),
        "scale": np.zeros((8, width // NVFP4.group, rows), np.uint8),
        "row_scale": np.ones((8, 1, rows), np.float32),
    }
    return Matrix(parts, "x-ml4core-tpu/nvfp4")


def reductions() -> None:
    """Of 0 .. 7 over eight devices: by JAX's ``psum``, and by torch-xla's within its region."""
    every = spmd.Mesh(np.arange(8), (8,), ("all",))
    lazy = torch.arange(8.0, device=torch_xla.device()).reshape(8, 1)
    spmd.mark_sharding(lazy, every, ("all", None))
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, "all"),
        mesh=every.get_jax_mesh(),
        in_specs=jax.P("all"),
        out_specs=jax.P("all"),
        check_vma=False,
    )
    right = LazyCall()(summed, (lazy,), "psum").cpu().flatten().tolist()
    local = spmd.enable_manual_sharding(lazy, ("all", None), mesh=every)
    reduced = model.all_reduce(model.REDUCE_SUM, local.global_tensor)
    back = spmd.disable_manual_sharding(reduced, ("all", None), (8, 1), mesh=every)
    theirs = back.global_tensor.cpu().flatten().tolist()
    print(json.dumps({"psum": right, "all_reduce": theirs}), flush=True)


if __name__ == "__main__":
    main()
