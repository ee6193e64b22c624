"""Steps that chain on the device: launching one waits for nothing that is still to be computed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from ml4core.api import DRAFT_SALT, DraftOutput, StepOutput
from ml4core.compose.context import StageContext
from ml4core.compose.ops import COMPOSED
from ml4core.compose.verify import verify_and_sample
from ml4core.engine.block_pool import BlockPool
from ml4core.engine.collectives import SingleRank
from ml4core.engine.core import EngineCore
from ml4core.engine.kv_groups import KVGroup
from ml4core.engine.kv_manager import KVManager
from ml4core.engine.sampler import Sampler
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.scheduler import SchedulerConfig
from ml4core.engine.speculation import Speculation
from ml4core.engine.speculative_config import SpeculativeConfig
from ml4core.engine.steps import ModelSteps
from ml4core.engine.transfers import HostCopy, has_streams, upload

pytestmark = pytest.mark.accelerator

VOCAB = 50


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device(str(torch.accelerator.current_accelerator()))


@contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Raises where the host waits for the device; only some devices can tell."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    try:
        _tell_waits("error")
        yield
    finally:
        _tell_waits(before)


def _tell_waits(mode: int | str) -> None:
    """Sets the mode. torch warns that it is a prototype; as an error that would leave it set."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
        torch.cuda.set_sync_debug_mode(mode)


class Table:
    """A target and a drafter that look at the last token alone."""

    block_size, vocab_size = 16, VOCAB

    def __init__(self, device: torch.device) -> None:
        self.device = device
        generator = torch.Generator().manual_seed(1)
        self.target, self.draft = (
            torch.randn(VOCAB, VOCAB, generator=generator).to(device) for _ in range(2)
        )

    def launch(self, plan: Any) -> StepOutput:
        logits = self.target[plan.token_ids[plan.logits_indices]]
        return StepOutput(logits, (), torch.zeros((), dtype=torch.bool, device=self.device))

    def check(self, failed: torch.Tensor) -> None:
        assert failed.device.type == "cpu"
        assert not failed

    def propose(self, drafting: Any) -> DraftOutput:
        previous, sampling, ids, logits = drafting.anchors, drafting.sampling, [], []
        for i in range(3):
            logits.append(self.draft[previous])
            at = sampling.positions + DRAFT_SALT * (i + 1)
            previous = COMPOSED["sample"](logits[-1], sampling.temperature, sampling.seeds, at)
            ids.append(previous)
        return DraftOutput(torch.stack(ids, 1), torch.stack(logits, 1))


class Watched(ModelSteps):
    """Launches without a wait."""

    def __init__(self, device: torch.device, *parts: Any) -> None:
        super().__init__(*parts)
        self.device = device

    def launch(self, step: Any) -> Any:
        with no_waits(self.device):
            return super().launch(step)


def run(device: torch.device, overlap: bool, drafts: int, params: SamplingParams) -> Any:
    table = Table(device)
    context: Any = StageContext(None, None, COMPOSED, SingleRank(), torch.float32)  # type: ignore
    speculation = None
    if drafts:
        config = SpeculativeConfig(drafts, "probabilistic")
        judge = verify_and_sample(context, {})
        speculation = Speculation(table, lambda shape: judge, config, VOCAB)
    steps = Watched(device, table, Sampler(COMPOSED, VOCAB), speculation)
    groups = [KVGroup("latent")]
    kv = KVManager(groups, {"latent": BlockPool("latent", 99)}, 16, step_rows=64)
    core = EngineCore(
        steps, kv, SchedulerConfig(8, 64, drafts=drafts), vocab_size=VOCAB, max_model_len=64,
        device=device, overlap=overlap,
    )  # fmt: skip
    for i in range(6):
        core.add_request(str(i), [i] * (i + 1), params)
    made: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step():
            made.setdefault(output.request_id, []).extend(output.token_ids)
        if core.cause is not None:
            raise core.cause
    return made


PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=12),
    "drawn": SamplingParams(temperature=1.0, seed=5, max_tokens=12, logprobs=2),
    "penalised": SamplingParams(
        temperature=1.0, seed=5, max_tokens=12, frequency_penalty=1.0, repetition_penalty=1.2,
        logit_bias={3: 2.0}, top_k=9,
    ),
}  # fmt: skip


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("params", PARAMS)
def test_a_launch_waits_for_nothing(device: torch.device, drafts: int, params: str) -> None:
    in_turn = run(device, False, drafts, PARAMS[params])
    assert run(device, True, drafts, PARAMS[params]) == in_turn
    assert run(torch.device("cpu"), True, drafts, PARAMS[params]).keys() == in_turn.keys()


def test_arrays_come_whole_and_results_return(device: torch.device) -> None:
    arrays = [np.arange(7), np.arange(5, dtype=np.int32), np.ones((2, 3), np.float32)]
    with no_waits(device):
        sent = upload(arrays, device)
        copy = HostCopy([one * 2 for one in sent])
    for array, back in zip(arrays, copy.wait(), strict=True):
        assert back.device.type == "cpu"
        assert (back.numpy() == 2 * array).all()
    assert has_streams(device)
