"""A process of two that share a model out: FOLDER STORE RANK OUT."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from core.parallel.exchanges import PROMPT, calls
from core.parallel.ranks import generate, open_runner
from ml4core.engine.collectives import TorchCollectives

folder, store, rank, out = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
ranks = TorchCollectives()
assert (ranks.rank, ranks.world_size) == (int(rank), 2)
found = calls(ranks)
trace = generate(open_runner(folder, ranks, expert_parallel=True), PROMPT, 3)
logits = torch.stack([step.logits[0] for step in trace.steps])
torch.save({"calls": found, "ids": trace.ids, "logits": logits}, out)
dist.barrier()
dist.destroy_process_group()
