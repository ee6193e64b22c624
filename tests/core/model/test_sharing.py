"""Who owns a latent, who owns an index, and what the others read."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from support.stepping import plan_pools


def test_consumers_own_no_storage_and_pools_hold_what_the_table_says(rig):
    owners = [layer.index for layer in rig.spec.layers if layer.owns_kv]
    consumers = [layer for layer in rig.spec.layers if not layer.owns_kv]
    assert [layer.index for layer in consumers] == [7, 11]
    assert {layer.kv_source for layer in consumers} == {3}
    assert sorted(rig.runner.kv.latent) == owners
    assert sorted(rig.runner.kv.index_keys) == list(rig.spec.index_owners)
    assert 7 in rig.runner.kv.index_keys, "a consumer of a latent has index keys of its own"
    layouts = {
        "latent": rig.runner.kv.latent[0].layout,
        "index": rig.runner.kv.index_keys[0].layout,
    }
    plan = plan_pools(rig.spec, layouts, 16, 512, 4)
    held = sum(c.nbytes for group in rig.runner.kv for c in group.values())
    assert held == plan.nbytes
    assert plan.bytes_per_token == 10 * 2304 + len(rig.spec.index_owners) * 512


def test_consumers_write_no_latent(make_rig, prompt):
    """Every latent write goes to the cache of the layer that runs, and only owners have one."""
    rig = make_rig()
    writes: list[int] = []
    kv_write = rig.runner.ops["kv_write"]
    by_id = {id(cache): layer for layer, cache in rig.runner.kv.latent.items()}

    def recording(cache, *args):
        writes.append(by_id[id(cache)])
        return kv_write(cache, *args)

    context = rig.runner._context
    rig.runner._context = replace(context, ops={**context.ops, "kv_write": recording})
    rig.logits(prompt(20))
    assert writes == list(rig.spec.kv_owners)


def test_consumers_read_the_owners_latent_of_the_same_step(make_rig, prompt):
    """A change of what layer 3 writes in this very step changes layer 7's attention: the write
    comes first.
    """
    rig = make_rig()
    seen: dict[int, torch.Tensor] = {}
    sparse = rig.runner.ops["sparse_mla"]
    calls = []

    def recording(q, cache, slots, lens, scale):
        out, lse = sparse(q, cache, slots, lens, scale)
        calls.append((id(cache), out))
        return out, lse

    context = rig.runner._context
    rig.runner._context = replace(context, ops={**context.ops, "sparse_mla": recording})
    rig.logits(prompt(1))
    latent3 = id(rig.runner.kv.latent[3])
    for layer, (cache, out) in enumerate(calls):
        seen[layer] = out
        assert (cache == latent3) == (layer in (3, 7, 11))
    # With one visible key attention returns its latent: all three are the row that layer 3 wrote.
    assert torch.equal(seen[3], seen[7])
    assert torch.equal(seen[3], seen[11])
    assert seen[3].abs().max() > 0


@pytest.fixture
def selections(make_rig, prompt):
    """The slots that each layer attended to in one prefill, and the layers that selected."""
    rig = make_rig()
    used: list[torch.Tensor] = []
    sparse = rig.runner.ops["sparse_mla"]

    def recording(q, cache, slots, lens, scale):
        used.append(slots)
        return sparse(q, cache, slots, lens, scale)

    context = rig.runner._context
    rig.runner._context = replace(context, ops={**context.ops, "sparse_mla": recording})
    rig.logits(prompt(120))
    return rig.spec, used


def test_a_sharer_uses_the_nearest_owner_before_it(selections):
    """B013: equal to the nearest owner's, unlike any other owner's."""
    spec, used = selections
    owners = spec.index_owners
    sharers = [layer for layer in spec.layers if not layer.owns_index]
    assert len(sharers) >= 4
    for layer in sharers:
        nearest = max(i for i in owners if i < layer.index)
        assert layer.topk_source == nearest
        assert torch.equal(used[layer.index], used[nearest])
        for other in owners:
            if other != nearest:
                assert not torch.equal(used[layer.index], used[other])


def test_a_consumer_of_a_latent_selects_for_itself(selections):
    """Trap 6: consumers don't reuse the top-k of the latent's owner."""
    _, used = selections
    assert not torch.equal(used[7], used[3])
    assert not torch.equal(used[11], used[3])


def test_taps_are_the_summed_residual_after_a_layer(make_rig, prompt, rig):
    last = len(rig.spec.layers) - 1
    tapped = make_rig(spec=replace(rig.spec, taps=(1, 5, last)))
    sequence = tapped.sequence(prompt(30))
    output = tapped.step((sequence, 30), all_logits=True)
    assert [tap.shape for tap in output.taps] == [(30, rig.spec.hidden_size)] * 3
    weights = tapped.runner.weights.top
    ops = tapped.runner.ops
    normed = ops["rms_norm"](output.taps[2], weights["final_norm"], rig.spec.norm_eps)
    torch.testing.assert_close(ops["gemm"](normed, weights["output"], torch.float32), output.logits)
    assert not torch.equal(output.taps[0], output.taps[1])


def test_nope_layers_rotate_nothing(make_rig, prompt):
    """Positions reach a NoPE layer through SSMax only: its rope op is never called."""
    rig = make_rig()
    rope = rig.runner.ops["rope"]
    calls = []
    context = rig.runner._context

    def recording(x, positions, inv_freq, interleaved, magnitude):
        calls.append(x.shape[-1])
        return rope(x, positions, inv_freq, interleaved, magnitude)

    rig.runner._context = replace(context, ops={**context.ops, "rope": recording})
    rig.logits(prompt(10))
    rope_layers = [layer for layer in rig.spec.layers if layer.rope_dim]
    index_ropes = sum(2 for layer in rope_layers if layer.owns_index)
    assert len(calls) == 2 * len(rope_layers) + index_ropes
    assert set(calls) == {64}


def test_nope_rows_have_a_zero_rope_slot_even_in_used_pages(make_rig, prompt):
    """Trap 7: the tail is written, not presumed."""
    rig = make_rig()
    rig.runner.kv.latent[3].parts[0].fill_(7.0)
    sequence = rig.sequence(prompt(20))
    rig.step((sequence, 20))
    page = rig.runner.kv.latent[3].parts[0][sequence.pages["latent"][0]]
    assert page[:16, 512:].eq(0).all()
    assert page[:16, :512].ne(7.0).any()
