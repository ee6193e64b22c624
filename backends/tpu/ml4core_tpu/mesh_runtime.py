"""The devices of a session that spans several: JAX's own of this process, and through its
distributed runtime those of the other hosts.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterator
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Literal

from ml4core.api import Deployment, Refusal, Refused
from ml4core_tpu.runtimes import LAZY, runtime_of
from ml4core_tpu.tpu_start import local_devices, start_tpus

if TYPE_CHECKING:
    from jax.sharding import Mesh

_MEET_S = 120
"""How long hosts wait for each other at the start."""
_PART_S = 5
"""How long a host that ends waits for others to do so, too."""
_LAST_WORDS_S = 0.2
"""Between what a host says as it leaves, and its being gone."""
_LEFT = "ml4core/left/{}"
_DEVICES_FLAG = "--xla_force_host_platform_device_count"


def spans(deployment: Deployment) -> bool:
    """Whether layers run on several devices."""
    return deployment.tensor_parallel_size * deployment.data_parallel_size > 1


def mesh_refusals(deployment: Deployment) -> tuple[Refusal, ...]:
    """Why layers can't run on the devices of this deployment, as far as that is known without
    them.
    """
    if not spans(deployment):
        return ()
    return tuple(sorted({*_unmapped(deployment), *_undivided(deployment)}))


def told_mesh(deployment: Deployment) -> str:
    """For the start-up report."""
    tensor, data = deployment.tensor_parallel_size, deployment.data_parallel_size
    how = "whole experts over all" if deployment.enable_expert_parallel else "experts by width"
    return f"data {data} x tensor {tensor}, {how}; host {deployment.data_parallel_rank} of {data}"


def _unmapped(deployment: Deployment) -> Iterator[Refusal]:
    subject = _mesh(deployment)
    if deployment.enforce_eager:
        reason = "--enforce-eager: op by op nothing runs on more than one device"
        yield Refusal("tpu", subject, reason, "no --enforce-eager")
    if runtime_of(deployment) == LAZY:
        reason = f"tpu.runtime={LAZY}: its sessions run on one device"
        yield Refusal("tpu", subject, reason, "tpu.runtime=jax")


def _undivided(deployment: Deployment) -> Iterator[Refusal]:
    """Sizes of the model that don't divide. Weights are refused where blocks would be cut."""
    tensor = deployment.tensor_parallel_size
    ranks = tensor * deployment.data_parallel_size
    layers = deployment.model.layers if deployment.model else ()

    def refusal(what: str, count: int, over: int, flag: str) -> Refusal:
        reason = f"{count} {what} don't divide among {over} ranks"
        works = ", ".join(str(n) for n in range(1, over) if count % n == 0)
        return Refusal("tpu", flag, reason, f"{works} ranks")

    for layer in layers:
        cut = [("query heads", layer.heads), ("inner values of a dense layer", layer.dense_width)]
        if layer.moe is not None:
            cut.append(("inner values of shared experts", layer.moe.shared_width))
        for what, count in cut:
            if count and count % tensor:
                yield refusal(what, count, tensor, f"--tensor-parallel-size {tensor}")
        if layer.moe is None:
            continue
        if deployment.enable_expert_parallel and layer.moe.experts % ranks:
            yield refusal("experts", layer.moe.experts, ranks, _mesh(deployment))
        elif not deployment.enable_expert_parallel and layer.moe.expert_width % ranks:
            width = layer.moe.expert_width
            yield refusal("inner values of an expert", width, ranks, _mesh(deployment))


def _mesh(deployment: Deployment) -> str:
    tensor, data = deployment.tensor_parallel_size, deployment.data_parallel_size
    flags = f"--tensor-parallel-size {tensor}"
    return flags if data == 1 else f"{flags} --data-parallel-size {data}"


def target_of(deployment: Deployment) -> Literal["tpu", "host"]:
    """What the kernels of a session are made for: a TPU compiles them, and on the host XLA
    interprets them. Nothing else asks what a device is.
    """
    return "tpu" if deployment.device.kind == "real" else "host"


def open_mesh(deployment: Deployment) -> Mesh:
    """The mesh [data, tensor] of all hosts' devices. Waits for the other hosts, two minutes at
    most. Raises ``Refused`` where this process has too few devices, or has others already.
    """
    real = deployment.device.kind == "real"
    if real:
        start_tpus()
    else:
        from ml4core_tpu.bridge import host_environment

        host_environment()
    import jax

    from ml4core_tpu.kernels.layer.mesh import mesh_of

    tensor, data = deployment.tensor_parallel_size, deployment.data_parallel_size
    if not real:
        _virtual_devices(jax.config, tensor)
    if data > 1:
        _meet(deployment)
    platform = "tpu" if real else "cpu"
    local = local_devices(platform)
    if real:
        local_devices("cpu")  # rows and plans come from there
    if len(local) < tensor:
        name = deployment.device.name
        reason = f"JAX has {len(local)} devices in this process ({name}), and {tensor} are needed"
        remedy = f"a process that hasn't used JAX, or XLA_FLAGS={_DEVICES_FLAG}={tensor} for it"
        if real:
            remedy = f"--tensor-parallel-size {len(local)} or less, or more chips for the process"
        raise Refused([Refusal("tpu", _mesh(deployment), reason, remedy)])
    own = sorted(local, key=lambda device: device.id)[:tensor]
    if data == 1:
        return mesh_of(own, 1, tensor)
    rank = deployment.data_parallel_rank
    if own[0].process_index != rank:  # what libtpu says, whatever JAX's runtime was told
        process = own[0].process_index
        reason = f"this host is process {process} of its slice, and would be replica {rank}"
        remedy = f"--data-parallel-start-rank {process}, which is $TPU_WORKER_ID"
        raise Refused([Refusal("tpu", f"--data-parallel-start-rank {rank}", reason, remedy)])
    every = sorted(jax.devices(platform), key=lambda device: (device.process_index, device.id))
    rows = [[one for one in every if one.process_index == rank][:tensor] for rank in range(data)]
    return mesh_of([one for row in rows for one in row], data, tensor)


def _virtual_devices(config: Any, count: int) -> None:
    """As many devices of the host as are needed, if JAX hasn't started."""
    if _DEVICES_FLAG in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # it has: ``open_mesh`` counts what there is
        return


def _meet(deployment: Deployment) -> None:
    """Joins the runtimes of all hosts."""
    import jax

    rank, data = deployment.data_parallel_rank, deployment.data_parallel_size
    where = deployment.data_parallel_runtime_address
    if jax.distributed.is_initialized():
        if (jax.process_index(), jax.process_count()) != (rank, data):
            reason = (
                f"this process is {jax.process_index()} of {jax.process_count()} of JAX already, "
                f"and would have to be {rank} of {data}"
            )
            raise Refused([Refusal("tpu", _mesh(deployment), reason, "a process of its own")])
        return
    config: Any = jax.config
    if deployment.device.kind == "interpreted":
        config.update("jax_cpu_collectives_implementation", "gloo")
    # Else the end of one host would end the processes of all others, without a word,
    config.update("jax_enable_recoverability", True)
    # and SIGTERM would be JAX's: a server that is asked to stop would go on.
    config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            where,
            data,
            rank,
            initialization_timeout=_MEET_S,
            shutdown_timeout_seconds=_PART_S,
        )
    except RuntimeError as error:
        reason = f"JAX's runtimes of {data} hosts didn't meet at {where}: {error}"
        remedy = "a port that the first host is free to listen on, and a process of its own"
        raise Refused([Refusal("tpu", _mesh(deployment), reason, remedy)]) from error
    atexit.register(leave, at_exit=True)  # runs before JAX's own


def leave(at_exit: bool = False) -> None:
    """Leaves the other hosts' runtimes, if this process has joined them. The first host stays until
    its process ends, and then for as long as others do, within a few seconds: a host whose first
    is gone is aborted by JAX. May be called twice.
    """
    import jax

    if not jax.distributed.is_initialized():
        return
    from jax._src import distributed

    client: Any = distributed.global_state.client
    first = jax.process_index() == 0
    if first and not at_exit:
        return
    try:
        if first:
            end = monotonic() + _PART_S
            for rank in range(1, jax.process_count()):
                left = max(0, int(1000 * (end - monotonic())))
                client.blocking_key_value_get(_LEFT.format(rank), left)
            sleep(_LAST_WORDS_S)
        else:
            client.key_value_set(_LEFT.format(jax.process_index()), "")
            jax.distributed.shutdown()
    except RuntimeError:  # the others don't leave, or the first is gone
        return
