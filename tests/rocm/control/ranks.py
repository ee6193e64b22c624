"""One rank of four: a stand-in layer that publishes, waits and faults as the kernel will.

Run as a program: ``ranks.py FOLDER RANK SCENARIO``. Ranks meet by a file, agree over gloo, and
trade partial sums through memory that all of them map. Each prints lines of JSON: what it did, in
order.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ml4core.api import Fault, Refusal, Refused, Segment, StepShape
from ml4core_rocm.latency.agreement import TorchGroup
from ml4core_rocm.latency.mailbox import Mailbox
from ml4core_rocm.latency.protocol import Peers, assert_alive, reset
from ml4core_rocm.latency.states import LatencyDecode
from ml4core_rocm.latency.tags import Tags

RANKS, LAYERS, HIDDEN, STEPS, FAULTY, STALLED = 4, 3, 16, 5, 3, 2
DEADLINE_S, STALL_DEADLINE_S = 60.0, 5.0
"""The first is never reached, however busy the machine is."""
PATIENCE_S = 120.0
"""A stalled rank looks for the fault this long; far beyond what it takes."""

NONE = Segment(0, 0, 0)
DECODE = StepShape(Segment(1, 1, 1), NONE, NONE, (("latent", 1),), 1)


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def weights(rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.randn(LAYERS, HIDDEN, HIDDEN, generator=draw)


def first(token: int) -> torch.Tensor:
    """The state that a token begins with."""
    return torch.sin(torch.arange(HIDDEN) * (1.0 + token)).unsqueeze(0)


def after(total: torch.Tensor) -> torch.Tensor:
    return torch.tanh(total)


class StandIn:
    """Layers whose output is the sum of all ranks' partial products, and a token of it."""

    def __init__(self, rank: int, peers: Peers) -> None:
        self.peers = peers
        self.weights = weights(rank)

    def step(self, epoch: int, token: int, stalls: bool) -> int:
        """Raises what ``assert_alive`` raises if a rank failed anywhere."""
        state = first(token)
        for layer in range(LAYERS):
            if stalls and layer == 1:
                self.stall()
            partial = (state @ self.weights[layer]).to(torch.bfloat16)
            state = after(self.peers.all_reduce(epoch, layer, partial))
        self.peers.end_step(epoch)
        assert_alive(self.peers.word)
        return int(state.argmax())

    def stall(self) -> None:
        """As a GPU that stopped: nothing is published until the others have given up."""
        until = time.monotonic() + PATIENCE_S
        while not self.peers.failed and time.monotonic() < until:
            time.sleep(0.02)


def memory(folder: Path, rank: int, box: Mailbox) -> torch.Tensor:
    """A rank's, mapped by all. Whoever opens it first makes it, of zeros."""
    return torch.from_file(
        str(folder / f"memory.{rank}"), shared=True, size=box.nbytes // 8, dtype=torch.int64
    )


def run(folder: Path, rank: int, scenario: str) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    group = TorchGroup(dist.group.WORLD)
    decode = LatencyDecode(group, requested=True)
    box, tags = Mailbox(RANKS, 1, HIDDEN), Tags(LAYERS + 1)
    opened: list[torch.Tensor] = []
    few = Refusal("rocm", "compute units", "it has 128 of 256", "an unpartitioned GPU")
    mine = (few,) if scenario == "partition" and rank == 1 else ()

    def connect() -> tuple[Refusal, ...]:
        opened.extend(memory(folder, one, box) for one in range(RANKS))
        return ()

    decode.configure(())
    try:
        decode.bind(lambda: mine)
        decode.connect(connect, opened.clear)
        decode.load(lambda: ())
        decode.arm((1,), lambda: ())
    except Refused as refused:
        tell(refused=[str(one) for one in refused.refusals], opened=len(opened))
        return
    deadline = STALL_DEADLINE_S if scenario == "stall" else DEADLINE_S
    peers = Peers(rank, opened, box, tags, deadline)
    layers, token = StandIn(rank, peers), 0
    for epoch in range(STEPS):
        if scenario == "reset" and epoch == 2:
            dist.barrier()
            reset(opened[rank], box)
            dist.barrier()
        tag_epoch = epoch - 2 if scenario == "reset" and epoch >= 2 else epoch
        assert decode.plan(DECODE, None, (1,)).mono
        stalls = scenario == "stall" and rank == STALLED and epoch == FAULTY
        try:
            if scenario == "host error" and rank == STALLED and epoch == FAULTY:
                peers.abort(tag_epoch)  # behind a launch; what raised comes after
            token = layers.step(tag_epoch, token, stalls)
        except RuntimeError as error:
            words = peers.word.tolist()
            decode.fail(Fault("timeout", str(error).partition("\n")[0], epoch, words[1]))
            tell(failed=epoch, words=words)
            break
        tell(step=epoch, token=token)
    if decode.fault is not None:
        before = time.monotonic()
        peers.all_reduce(FAULTY + 1, 0, torch.zeros(1, HIDDEN, dtype=torch.bfloat16))
        try:
            decode.plan(DECODE, None, (1,))
        except RuntimeError as error:
            tell(refused_step=str(error), waited=time.monotonic() - before >= deadline)
        record = box.region("record").offset // 4
        tell(record=opened[rank].view(torch.int32)[record : record + 8].tolist())
    dist.barrier()
    decode.close()
    tell(state=decode.state.value)


if __name__ == "__main__":
    try:
        run(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    finally:  # threads of a group that is left to the interpreter's end can abort it
        dist.destroy_process_group()
