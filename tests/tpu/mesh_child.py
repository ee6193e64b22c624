"""Run in processes of its own: a layer over a mesh of virtual devices beside the same layer on one,
as JSON. Arguments: this process, how many there are, the port of the first, and devices of each.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

RANK, WORLD, PORT, DEVICES = (int(word) for word in sys.argv[1:5])
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

from ml4core_tpu.bridge import host_environment  # noqa: E402

host_environment()

import jax  # noqa: E402, TID253
import mesh_case as case  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402, TID253

from ml4core_tpu.kernels.layer.form import Step, form_of  # noqa: E402
from ml4core_tpu.kernels.layer.mesh import (  # noqa: E402
    argument_specs,
    local_layer,
    mapped_layer,
    mesh_of,
)
from ml4core_tpu.kernels.layer.program import decoder_layer  # noqa: E402


def main() -> None:
    if WORLD > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{PORT}", WORLD, RANK)
    mesh = mesh_of(jax.devices(), case.DATA, case.TENSOR)
    weights, norm = case.layer_weights()
    held = [case.caches() for _ in range(case.DATA)]
    single = jax.jit(partial(decoder_layer, form_of(case.LAYER, case.KINDS)))
    program = None
    for name, steps in case.STEPS.items():
        states = case.states()
        want = [
            single(weights, one, own, state, state, None, norm)
            for one, own, state in zip(steps, held, states, strict=True)
        ]
        given = case.whole(weights, steps, held, states, norm)
        shards = jax.tree.map(
            lambda value, spec: jax.make_array_from_callback(
                value.shape, NamedSharding(mesh, spec), lambda index, value=value: value[index]
            ),
            given,
            argument_specs(given),
        )
        if program is None:
            form = form_of(local_layer(case.LAYER, case.TENSOR), case.KINDS)
            program = jax.jit(mapped_layer(form, mesh, given))
        found = jax.block_until_ready(program(*shards))
        joined = jax.tree.map(lambda *parts: np.concatenate(parts), *want)
        print(json.dumps({"step": name, **compared(found, joined, steps)}), flush=True)
    print(json.dumps({"programs": program._cache_size()}), flush=True)


def compared(found: Any, want: Any, steps: list[Step]) -> dict[str, Any]:
    """Of what lies in this process: the worst error of real rows, and what differs at all."""
    real = case.real_rows(steps)
    error, finite, other = 0.0, True, 0
    for got, right in zip(found[:2], want[:2], strict=True):
        for shard in got.addressable_shards:
            mine, true = np.asarray(shard.data), np.asarray(right)[shard.index]
            rows = real[shard.index[0]]
            finite &= bool(np.isfinite(mine).all())
            error = max(error, float(np.abs(mine - true)[rows].max(initial=0.0)))
    for got, right in zip(jax.tree.leaves(found[2:]), jax.tree.leaves(want[2:]), strict=True):
        for shard in got.addressable_shards:
            other += int((np.asarray(shard.data) != np.asarray(right)[shard.index]).sum())
    return {"error": error, "finite": finite, "selected_or_stored_otherwise": other}


if __name__ == "__main__":
    main()
