"""A backend's own ops are checked in a shape's first step, and called bare from then on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core.api import OPS, Capabilities, Deployment
from ml4core.compose import contract
from ml4core.compose.contract import CheckedOp, ContractError, FirstStep
from ml4core.compose.ops import COMPOSED
from ml4core.cpu.backend import CpuBackend
from ml4core.engine import resolve
from ml4core.engine.runner import ModelRunner
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.mistral_large4 import forward
from ml4core.models.tensors import load_model_spec
from ml4core.models.weights import load_layers
from support.stepping import build_plan, plan_pools

from .conftest import Rig

Ops = Mapping[str, Callable[..., Any]]


def foreign(name: str) -> Callable[..., Any]:
    """An op that core can't take for its own."""
    return lambda *args: COMPOSED[name](*args)


HONEST = {name: foreign(name) for name in COMPOSED}


def rig_of(folder: Path, ops: Ops) -> Rig:
    opened = Checkpoint.open(folder)
    spec = load_model_spec(opened)
    backend = CpuBackend()
    device = backend.probe().devices[0]
    deployment = Deployment(
        spec, device, "float32", "fp32", "fp32", attention_config={"mla_form": "absorbed"}
    )
    session = backend.open(deployment)
    session.ops = ops
    features = frozenset({"feature:compose", *(f"op:{name}" for name in ops)})
    runner = ModelRunner(session, "theirs", deployment, Capabilities(features))
    runner.load(load_layers(opened, spec, torch.float32))
    layouts = {"latent": resolve.latent(deployment), "index": resolve.index(deployment)}
    runner.allocate_kv(plan_pools(spec, layouts, 16, 512, 4))
    return Rig(runner)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The op of each result that is looked at."""
    seen: list[str] = []
    real = contract.misfit

    def counted(spec: Any, *args: Any) -> str:
        seen.append(spec.name)
        return real(spec, *args)

    monkeypatch.setattr(contract, "misfit", counted)
    return seen


def test_a_shape_is_checked_in_its_first_step_only(
    short_checkpoint: Path, prompt: Any, checks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = prompt(40)
    want = rig_of(short_checkpoint, {}).logits(ids, 20, 20)
    assert checks == []
    rig = rig_of(short_checkpoint, HONEST)
    calls: list[str] = []
    real = CheckedOp.__call__

    def counted(self: CheckedOp, *args: Any) -> Any:
        calls.append(self._spec.name)
        return real(self, *args)

    monkeypatch.setattr(CheckedOp, "__call__", counted)
    sequence = rig.sequence(ids)
    first = rig.step((sequence, 20), all_logits=True).logits
    called_in_a_step = set(checks)
    assert {"embed", "gemm", "kv_write", "topk", "sparse_mla", "moe_experts"} <= called_in_a_step
    # Forms that came again, as those of the next layer do, were not looked at twice.
    assert len(checks) < len(calls)
    assert checks.count("topk") == 1
    checks.clear()
    second = rig.step((sequence, 20), all_logits=True).logits
    # Core's own `sparse_mla` may read whole pages under a mask.
    torch.testing.assert_close(torch.cat((first, second)), want, rtol=1e-4, atol=1e-4)
    # The first step's shape again: what comes before the layers is looked up once more.
    for expected in (["embed"], []):
        checks.clear()
        calls.clear()
        rig.step((rig.sequence(ids), 20), all_logits=True)
        assert (calls, checks) == (expected, [])


LIES: dict[str, tuple[str, Callable[..., Any], str]] = {
    "double": (
        "rms_norm",
        lambda *args: COMPOSED["rms_norm"](*args).double(),
        r"result 'out' is float64 \[20, 128\]; wanted is float32 or bfloat16 \[..., H\] = "
        r"\[20, 128\]",
    ),
    "narrow": (
        "gemm",
        lambda *args: COMPOSED["gemm"](*args)[:, :-1],
        r"result 'out' is float32 \[20, \d+\]; wanted is float32 or bfloat16 \[T, N\]",
    ),
    "long": (
        "topk",
        lambda *args: [one.long() for one in COMPOSED["topk"](*args)],
        r"result 'positions' is int64 \[20, 16\]; wanted is int32 \[T, k\] = \[20, 16\]",
    ),
    "short": ("router", lambda *args: COMPOSED["router"](*args)[:1], "wanted are 2 results"),
    "none": ("embed", lambda *args: None, "result 'out' is None"),
    "functional": ("kv_write", lambda cache, *_: cache, "returned a KVCache; wanted is nothing"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_names_backend_op_and_result(short_checkpoint: Path, prompt: Any, lie: str) -> None:
    name, op, message = LIES[lie]
    rig = rig_of(short_checkpoint, {name: op})
    told = rf"backend 'theirs', op '{name}' \(.*lambda.*\): .*{message}"
    with pytest.raises(ContractError, match=told):
        rig.logits(prompt(20))


def test_a_checked_step_is_exported(short_checkpoint: Path, prompt: Any, checks: list[str]) -> None:
    rig = rig_of(short_checkpoint, HONEST)
    runner = rig.runner
    plan = build_plan([(rig.sequence(prompt(24)), 24)], tuple(runner.pools), runner.block_size)
    bound, _ = runner._bind(plan.shape)

    class Step(torch.nn.Module):
        def forward(self, weights: Any, plan: Any, kv: Any) -> Any:
            return forward(bound, weights, plan, kv)

    args = (runner.weights, plan, runner.kv)
    with torch.no_grad():
        exported = torch.export.export(Step(), args, strict=False)
    assert "topk" in checks
    got = exported.module()(*args)
    torch.testing.assert_close(got.logits, runner.step(plan).logits, rtol=1e-5, atol=1e-5)


def test_a_compiler_traces_the_op_alone_and_once() -> None:
    first = FirstStep({"silu_mul": CheckedOp(OPS["silu_mul"], HONEST["silu_mul"], "x")})
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def stage(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = first.ops["silu_mul"](x)
        return y

    compiled = torch.compile(first.begins(stage), backend=backend, fullgraph=True)
    x = torch.randn(3, 8)
    for _ in range(3):
        assert torch.equal(compiled(x), COMPOSED["silu_mul"](x))
    assert len(graphs) == 1
