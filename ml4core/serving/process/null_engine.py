"""An engine that computes nothing, for a server: what remains of a request is the server's part."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ml4core.engine.args import EngineArgs
from ml4core.engine.block_pool import BlockPool
from ml4core.engine.core import EngineCore
from ml4core.engine.kv_groups import KVGroup
from ml4core.engine.kv_manager import KVManager
from ml4core.engine.resolve import step_limits
from ml4core.engine.sampler_io import Logprob, SampledToken
from ml4core.engine.scheduler import SchedulerConfig
from ml4core.engine.steps import StepInput, StepResult
from ml4core.serving.opening import open_tokenizer
from ml4core.serving.process.wire import Facts

BLOCK_SIZE = 64
TEXT = " and"
"""What is said again and again."""


@dataclass(frozen=True)
class _NullStep:
    result_: StepResult

    def result(self) -> StepResult:
        return self.result_


class TalkingRunner:
    """The same token for each draw; its logprob is 0, that of any other minus infinity.

    ``seconds``: that a step takes.
    """

    def __init__(self, token: int, seconds: float) -> None:
        self._plain = SampledToken(token, None)
        self._told = SampledToken(token, {token: Logprob(0.0, 1)})
        self._seconds = seconds

    def launch(self, step: StepInput) -> _NullStep:
        if self._seconds:
            time.sleep(self._seconds)
        told, plain = self._told, self._plain
        tokens = [[plain if r.params.logprobs is None else told] for r in step.rows]
        certain = Logprob(0.0, 1)
        prompts = [[{token: certain} for token in prompt.next_ids] for prompt in step.prompts]
        return _NullStep(StepResult(tokens, prompts))


def open_null(args: EngineArgs, seconds: float) -> tuple[Facts, Any]:
    """What a server opens in place of ``args.model``, with its tokenizer and limits, and pages for
    all sequences that may run. Raises ``CheckpointError``.
    """
    args, tokenizer, spec = open_tokenizer(args)
    longest = args.max_model_len or spec.max_position
    sequences, rows = step_limits(args)
    groups = [KVGroup("latent"), KVGroup("index")]
    blocks = sequences * -(-longest // BLOCK_SIZE) + 1
    pools = {group.name: BlockPool(group.name, blocks) for group in groups}
    config = SchedulerConfig(max_num_seqs=sequences, max_num_batched_tokens=rows)
    caching = args.enable_prefix_caching
    kv = KVManager(groups, pools, BLOCK_SIZE, step_rows=rows, caching=caching)
    token = tokenizer.encode(TEXT)[-1]
    core = EngineCore(
        TalkingRunner(token, seconds),
        kv,
        config,
        vocab_size=spec.vocab_size,
        max_model_len=longest,
        eos_ids=frozenset({tokenizer.eos_id}),
    )
    report = {"backend": {"name": "null", "distribution": "ml4core"}, "model": args.model}
    facts = Facts(
        folder=args.model,
        tokenizer=str(tokenizer.path),
        vocab_size=spec.vocab_size,
        max_model_len=longest,
        max_num_seqs=sequences,
        room=core.kv.room(longest - 1) + 1,
        report=report,
    )
    return facts, SimpleNamespace(core=core, close=lambda: None, tell_fault=lambda: None)
