"""A step is a pure function of tensors at fixed shapes: torch.export takes it whole."""

from __future__ import annotations

import pytest
import torch
import torch.utils._pytree as pytree

from ml4core.models.mistral_large4 import forward
from support.stepping import build_plan


def clone(tree):
    return pytree.tree_map_only(torch.Tensor, torch.clone, tree)


class Step(torch.nn.Module):
    def __init__(self, bound) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, weights, plan, kv):
        return forward(self.bound, weights, plan, kv)


@pytest.mark.parametrize(
    ("kind", "kv", "index", "form"),
    [
        ("decode", "fp32", "fp32", "absorbed"),
        ("prefill", "fp32", "fp32", "auto"),
        ("decode", "fp8_ds_mla", "planar_f32", "absorbed"),
        ("prefill", "bf16", "tiled16_f32", "unabsorbed"),
    ],
)
def test_export_gives_the_same_numbers(make_rig, short_checkpoint, prompt, kind, kv, index, form):
    rig = make_rig(kv=kv, index=index, form=form, folder=short_checkpoint)
    runner = rig.runner
    rows = 1 if kind == "decode" else 24

    def plan_for(lengths, seed):
        made = [rig.sequence(prompt(n, seed=seed + n)) for n in lengths]
        for sequence, length in zip(made, lengths, strict=True):
            if length > rows:
                rig.step((sequence, length - rows))
        return build_plan(
            [(s, rows) for s in made],
            tuple(runner.pools),
            runner.block_size,
            pad_requests=3,
            pad_rows=64,
            pad_pages=8,
        )

    first = plan_for((60, 33), 1)
    bound, _ = runner._bind(first.shape)
    copies = clone(runner.kv)
    with torch.no_grad():
        exported = torch.export.export(Step(bound), (runner.weights, first, copies), strict=False)
    graph_ops = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    data_dependent = {"item", "_local_scalar_dense", "nonzero", "unique", "masked_select"}
    assert not data_dependent & {name.split(".")[1] for name in graph_ops if name.count(".") == 2}
    run = exported.module()
    # Other requests of other lengths, same shape: nothing of the first plan was baked in.
    for plan in (first, plan_for((41, 77), 2)):
        assert plan.shape == first.shape
        copies = clone(runner.kv)
        expected = runner.step(plan)
        got = run(runner.weights, plan, copies)
        torch.testing.assert_close(got.logits, expected.logits, rtol=1e-5, atol=1e-5)
        assert bool(got.fault) is False
        for layer, cache in runner.kv.latent.items():
            for ours, theirs in zip(cache.parts, copies.latent[layer].parts, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
