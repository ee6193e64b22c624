"""Arrays of devices as torch's: what is answered there, what on the host, and what is written."""

from __future__ import annotations

from typing import Any

import jax
import pytest
import torch

from ml4core_tpu.buckets import Buckets
from ml4core_tpu.kernels.layer.mesh import mesh_of
from ml4core_tpu.kernels.resident.caches import MOST_TOKENS, resident_cache
from ml4core_tpu.kernels.resident.devices import Devices
from ml4core_tpu.kernels.resident.tensor import DeviceTensor, host_of, rows_tensor
from ml4core_tpu.kernels.resident.warm import padding_drafts, warm_between
from ml4core_tpu.layouts import lane33_layout, tiles_layout


@pytest.fixture(scope="module")
def devices() -> Devices:
    return Devices(mesh_of(jax.local_devices()[:1], 1, 1), "host")


def rows(devices: Devices, values: torch.Tensor, padding: int = 3) -> DeviceTensor:
    """With rows of ones behind, which nobody may see."""
    held = torch.cat((values, torch.ones(padding, *values.shape[1:], dtype=values.dtype)))
    return rows_tensor(devices.put(held), devices, len(values))


def test_core_asks_between_layers_without_a_wait(devices: Devices) -> None:
    """A flag for each row, those that count, and rows whose logits are wanted."""
    draw = torch.randn(5, 4)
    state, flags = (
        rows(devices, draw),
        rows(devices, torch.tensor([False, True, False] + [True] * 2)),
    )
    real = torch.tensor([True, False, True, True, False])
    with torch.inference_mode():
        fault = torch.zeros((), dtype=torch.bool) | (flags & real).any()
        none = (flags & (real & False)).any()
        wanted = state[torch.tensor([4, 0])]
        joined = torch.cat((state, state), dim=-1)
    for one in (fault, none, wanted, joined):
        assert isinstance(one, DeviceTensor)
        assert one._host is None
    assert bool(fault)
    assert not bool(none)
    assert torch.equal(host_of(wanted), draw[[4, 0]])
    assert torch.equal(host_of(joined), torch.cat((draw, draw), -1))


def test_all_else_is_torchs_own_answer_on_a_copy(devices: Devices) -> None:
    draw = torch.randn(5, 4)
    state = rows(devices, draw)
    assert torch.equal(state * 2 + state, draw * 3)
    assert torch.equal(state[1:3], draw[1:3])
    assert torch.equal(state[torch.tensor([True, False, True, False, False])], draw[[0, 2]])
    assert torch.equal(torch.zeros(5, 4).copy_(state), draw)
    assert state.sum().item() == pytest.approx(draw.sum().item())
    assert (state.shape, state.dtype, state.device.type) == ((5, 4), torch.float32, "cpu")
    assert torch.equal(state[torch.tensor([-1, 2])], draw[[4, 2]])
    with pytest.raises(IndexError):
        state[torch.tensor([5])]
    with pytest.raises(RuntimeError, match="never written to"):
        state.zero_()


@pytest.mark.parametrize("layout", [tiles_layout(), lane33_layout()], ids=lambda one: one.id)
def test_a_cache_takes_what_is_written_to_it_and_to_its_views(
    devices: Devices, layout: Any
) -> None:
    cache = resident_cache(layout, 4, 128, devices)
    assert cache.nbytes == 4 * 128 * layout.bytes_per_token
    assert sum(part.untyped_storage().nbytes() for part in cache.parts) == cache.nbytes
    pages = torch.randn(4, 128, layout.width)
    for part, content in zip(cache.parts, layout.pack(pages, cache.scale), strict=True):
        want = content.clone()
        part.copy_(content)
        content.zero_()  # the cache has memory of its own
        assert torch.equal(host_of(part), want)
        part[1] = 7
        part[::2][1].zero_()
        part.view(part.shape)[3, :5].fill_(9)
        part.select(0, 0).split(64)[1].add_(1)
        want[1] = 7
        want[2] = 0
        want[3, :5] = 9
        want[0][64:128] += 1
        assert torch.equal(host_of(part), want)


def test_a_pool_has_no_more_tokens_than_slots_can_name(devices: Devices) -> None:
    with pytest.raises(ValueError, match=r"works: --num-gpu-blocks-override 16777215\)"):
        resident_cache(tiles_layout(), MOST_TOKENS // 128 + 1, 128, devices)


def test_what_stands_between_layers_is_warmed_up_for_each_size(devices: Devices) -> None:
    asked: list[int] = []
    sizes = (16, 32, 100)
    warm_between(devices, sizes, 70, (8, torch.float32), 2, lambda x: asked.append(len(x)))
    assert asked == [32, 64, 128]  # of the largest step, once each


def test_drafts_are_warmed_up_for_each_size_that_ops_have(devices: Devices) -> None:
    from ml4core_conformance import tiny

    spec = tiny.drafter(tiny.model()).draft
    assert spec is not None
    buckets = Buckets((32, 64), (8, 16), 11, 2)
    plans = [*padding_drafts(spec, devices, buckets.tokens, 11, torch.float32)]
    assert [len(one.plan.context_slots) for one in plans if not len(one.plan.anchors)] == [32, 64]
    counts = [len(one.plan.anchors) for one in plans if len(one.plan.anchors)]
    assert counts[-1] == 11
    sizes = {(32 if n * spec.depth <= 32 else 64, 8 if n <= 8 else 16) for n in range(1, 12)}
    seen = {(32 if n * spec.depth <= 32 else 64, 8 if n <= 8 else 16) for n in counts}
    assert seen == sizes
    assert all((one.plan.slots < 0).all() for one in plans)
