"""Experts that are converted on the device while they are read: bytes, and the device's memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ml4core.api import Weight
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.requant import Requant, peak
from ml4core.models.seeded import make_seeded
from ml4core.models.tensors import load_model_spec, validate
from ml4core.models.weights import load_layers

EXPERTS = ("experts_w13", "experts_w2")


def experts(folder: Path, device: str) -> list[Weight]:
    checkpoint = Checkpoint.open(folder)
    layers = load_layers(
        checkpoint, load_model_spec(checkpoint), torch.bfloat16, requant=Requant(device=device)
    )
    found = [weights[name] for _, weights in layers for name in EXPERTS if name in weights]
    return [weight for weight in found if isinstance(weight, Weight)]


@pytest.mark.accelerator
def test_peak_and_bytes(tmp_path: Path) -> None:
    """Memory of the device: the model, and less than one layer in FP8 and one expert in bf16."""
    dims = {"layers": 4, "experts": 8, "expert_width": 2048, "hidden": 1024, "vocab": 320}
    folder = make_seeded(tmp_path / "m", "micro", format="fp8_block", **dims)
    checkpoint = Checkpoint.open(folder)
    report = validate(checkpoint, load_model_spec(checkpoint))
    device = f"{torch.accelerator.current_accelerator()}:0"
    experts(folder, device)  # what the runtime makes once is made
    torch.accelerator.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    there = experts(folder, device)
    torch.accelerator.synchronize()
    kept = sum(weight.nbytes for weight in there)
    assert torch.cuda.memory_allocated(device) - before == pytest.approx(kept, rel=0.01)
    assert torch.cuda.max_memory_allocated(device) - before <= peak(kept, report).nbytes
    for one, other in zip(there, experts(folder, "cpu"), strict=True):
        for name, part in one.parts.items():
            assert str(part.device) == device
            assert torch.equal(part.cpu(), other.parts[name])
