"""What a step costs on the host, beside the model: an accelerator waits for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ml4core.bench import generation
from ml4core.bench.null import NullRunner
from ml4core.bench.timing import Span, Spread, spread, timed
from ml4core.engine.block_pool import BlockPool
from ml4core.engine.core import EngineCore
from ml4core.engine.kv_groups import KVGroup
from ml4core.engine.kv_manager import KVManager
from ml4core.engine.scheduler import SchedulerConfig

TARGETS: Mapping[int, float] = MappingProxyType({1: 0.15e-3, 32: 0.5e-3, 256: 2e-3})
"""Running requests -> seconds a step at most, on one core that nobody else uses."""

CONTEXT = 512
"""Tokens of each prompt."""

VOCAB = 1000
BLOCK_SIZE = 64


@dataclass(frozen=True)
class HostCost:
    """Seconds of one step of decodes, detokenisation not among them.

    Attributes:
        overlap: whether a step was kept in flight.
        target: None where none is set for that many requests.
    """

    requests: int
    overlap: bool
    seconds: Spread
    target: float | None


def null_core(requests: int, tokens: int, *, overlap: bool) -> EngineCore:
    """An engine core with both KV groups and the prefix cache, over a runner that computes nothing,
    with room for ``requests`` of ``tokens``.
    """
    groups = [KVGroup("latent"), KVGroup("index")]
    blocks = requests * -(-tokens // BLOCK_SIZE) + 1
    pools = {group.name: BlockPool(group.name, blocks) for group in groups}
    config = SchedulerConfig(max_num_seqs=requests, max_num_batched_tokens=max(8192, requests))
    rows = config.max_num_batched_tokens * (2 if overlap else 1)
    kv = KVManager(groups, pools, BLOCK_SIZE, step_rows=rows, caching=True)
    return EngineCore(
        NullRunner(), kv, config, vocab_size=VOCAB, max_model_len=tokens, overlap=overlap
    )


def steps(requests: int, repeats: int, *, overlap: bool = False) -> list[Span]:
    """``repeats`` steps in which each of the running requests gets a token."""
    core = null_core(requests, CONTEXT + repeats + 8, overlap=overlap)
    prompts = generation.random_prompts(requests, CONTEXT, VOCAB, seed=0)
    with generation.decoding(core, prompts, repeats + 2):
        core.step()  # the first step that has decodes alone
        return [timed(core.step) for _ in range(repeats)]


def measure(requests: Sequence[int], repeats: int) -> list[HostCost]:
    """Without a step in flight, then with one, for each count of running requests."""
    found = []
    for overlap in (False, True):
        for count in requests:
            spans = steps(count, repeats, overlap=overlap)
            seconds = spread([span.wall for span in spans])
            found.append(HostCost(count, overlap, seconds, TARGETS.get(count)))
    return found
