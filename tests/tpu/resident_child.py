"""Run in processes of their own: an engine whose caches stay on a device, on memory that the device
tells of, and what it makes of its prompts, as JSON. The argument is ``{"flags": ..., "own": ...,
"prompts": ..., "tokens": ..., "limit": bytes of the device}``, JSON too.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax  # noqa: TID253
import torch
from spanning_child import choice

from ml4core.api import KVCache
from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import Engine, open_engine
from ml4core_tpu import resident_session
from ml4core_tpu.device_memory import Stats, TpuMemory
from ml4core_tpu.kernels.resident.tensor import DeviceTensor
from support.answers import Answers


def stats(device: Any, limit: int) -> Callable[[], Stats]:
    """What the device would tell, if it were none of the host's: all that is alive there."""
    peak = 0

    def read() -> Stats:
        nonlocal peak
        live = {
            shard.data.unsafe_buffer_pointer(): shard.data.nbytes
            for array in jax.live_arrays()
            if not array.is_deleted()
            for shard in array.addressable_shards
            if shard.device == device
        }
        used = sum(live.values())
        peak = max(peak, used)
        return {"bytes_limit": limit, "bytes_in_use": used, "peak_bytes_in_use": peak}

    return read


def caches(engine: Engine) -> list[KVCache]:
    kv = engine.runner.kv
    assert kv is not None
    return [*kv.latent.values(), *kv.index_keys.values(), *engine.runner.draft_kv]


def places(engine: Engine) -> list[Any]:
    return [part.untyped_storage().data_ptr() for one in caches(engine) for part in one.parts]


def counted() -> list[int]:
    """From here on: how often values came to the host."""
    host, count = DeviceTensor.host, [0]

    def told(self: DeviceTensor) -> torch.Tensor:
        count[0] += 1
        return host(self)

    DeviceTensor.host = told  # type: ignore[method-assign]
    return count


def main() -> None:
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    if limit := asked["limit"]:
        resident_session.told_memory = lambda devices: TpuMemory(
            [stats(device, limit) for device in devices]
        )
    config = {"device": "interpreted", "tpu": {"resident": True, **asked["own"]}}
    args = EngineArgs(backend="tpu", additional_config=config, **asked["flags"])
    engine = open_engine(args, choice=choice(), sequences=3, tokens_each=64, fill=bool(limit))
    try:
        before = places(engine)
        arrays = [part.array for one in caches(engine) for part in one.parts]
        waits, answers = counted(), Answers(engine, asked["prompts"], asked["tokens"])
        made = answers.all()
        report = engine.report()
        told = {
            "made": made,
            "waits_each_step": waits[0] / answers.steps,
            "switches": dict(report["switches"]),
            "memory": report.get("memory"),
            "in_place": places(engine) == before,
            "donated": [array.is_deleted() for array in arrays],
            "blocks": sorted({one.blocks for one in caches(engine)}),
        }
    finally:
        engine.close()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
