"""Ranks that share a checkpoint's model out: threads of this process, or processes of their own."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ml4core.api import Backend, Collectives, Deployment, Session
from ml4core.engine import resolve
from ml4core.engine.collectives import SingleRank, TorchCollectives
from ml4core.engine.runner import ModelRunner
from ml4core.engine.thread_ranks import ThreadRank, run_ranks
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.tensors import load_model_spec
from ml4core.models.weights import load_layers
from ml4core.planning import kv
from ml4core_conformance.check import slowness
from ml4core_conformance.rigs.child import ask
from ml4core_conformance.rigs.plans import PageBook, make_plan
from ml4core_conformance.subject import Subject

STEPS = (21, 6, 3, 1, 1)
"""Rows of a prompt's steps: chunks and decodes."""
JOB = "ML4_CONFORMANCE_RANK"
"""Variable that tells a process its part, in JSON: rank, folder, ids, store."""
_BLOCKS = 8
_LIMIT_S = 240.0


def logits_of_ranks(
    subject: Subject, deployment: Deployment, folder: Path, ids: Sequence[int]
) -> list[Tensor]:
    """Logits of every row [rows, vocab] on each rank. Threads, one at a time, that meet at
    collectives; where the backend brings collectives of its own, processes over the host's network;
    and one process, with one answer, where a session drives all ranks.

    Raises ``ChildFailed`` where such a process gives no answer.
    """
    size = deployment.tensor_parallel_size
    if deployment.spanning_session or _brings_collectives(subject, deployment):
        return _by_processes(subject, deployment, folder, ids)

    def work(ranks: ThreadRank) -> Tensor:
        return _logits(subject.open(deployment), subject.backend, deployment, folder, ids, ranks)

    return run_ranks(size, work)


def _brings_collectives(subject: Subject, deployment: Deployment) -> bool:
    try:
        return subject.open(deployment).collectives is not None
    except RuntimeError:  # it looks for the group, which this process hasn't joined
        return True


def _by_processes(
    subject: Subject, deployment: Deployment, folder: Path, ids: Sequence[int]
) -> list[Tensor]:
    size = _processes(deployment)
    limit_s = _LIMIT_S * slowness(deployment.device)
    with TemporaryDirectory(prefix="ml4-ranks-") as name, ThreadPoolExecutor(size) as pool:
        common = {"folder": f"{folder}", "ids": list(ids), "store": f"{name}/store"}
        asked = [
            pool.submit(
                partial(ask, limit_s=limit_s, deployment=deployment),
                "rank",
                subject.backend,
                environment={JOB: json.dumps({**common, "rank": rank})},
            )
            for rank in range(size)
        ]
        return [torch.tensor(one.result()["logits"]) for one in asked]


def rank_process(backend: Backend, deployment: Deployment) -> dict[str, Any]:
    """What a process of ``_by_processes`` answers."""
    import torch.distributed as dist

    job = json.loads(os.environ[JOB])
    torch.set_num_threads(1)
    several = _processes(deployment) > 1
    if several:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job['store']}",
            rank=job["rank"],
            world_size=deployment.tensor_parallel_size,
        )
    session = backend.open(deployment)
    ranks: Collectives = TorchCollectives() if several else SingleRank()
    found = _logits(session, backend, deployment, Path(job["folder"]), job["ids"], ranks)
    session.close()
    if several:
        dist.destroy_process_group()
    return {"logits": found.tolist()}


def _processes(deployment: Deployment) -> int:
    return 1 if deployment.spanning_session else deployment.tensor_parallel_size


def _logits(
    session: Session,
    backend: Backend,
    deployment: Deployment,
    folder: Path,
    ids: Sequence[int],
    ranks: Collectives,
) -> Tensor:
    opened = Checkpoint.open(folder)
    capabilities = backend.capabilities(deployment.device)
    runner = ModelRunner(session, backend.name, deployment, capabilities, collectives=ranks)
    spec, size = load_model_spec(opened), deployment.block_size
    runner.load(load_layers(opened, spec, torch.float32, shard=runner.shard))
    layouts = {"latent": resolve.latent(deployment), "index": resolve.index(deployment)}
    groups = kv.target_groups(spec, layouts)
    runner.allocate_kv(kv.Pools(groups, {group.name: _BLOCKS for group in groups}, size))
    request = PageBook(_BLOCKS).request(ids, size)
    found = []
    for rows in STEPS:
        plan = make_plan([(request, rows)], size, device=deployment.device.torch_device)
        found.append(runner.step(plan).logits.cpu().clone())
        request.computed += rows
    return torch.cat(found)
