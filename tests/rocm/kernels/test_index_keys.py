"""Index keys in tiles: one rule of the writers, the gather and the paged reader, byte for byte."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from ml4core.api import KVCache
from ml4core.api.known_layouts import index_layout
from ml4core.formats import index_pages, kv_rows
from ml4core_triton.kernels.tiles import code_offset, scale_offset

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

BLOCK = 32


def cache_of(device: torch.device, rows: torch.Tensor, layout: str = "tiled16_f32") -> KVCache:
    """Pages of ``rows`` [blocks, BLOCK, 128]."""
    found = index_layout(layout)
    parts = tuple(part.to(device) for part in found.pack(rows, None))
    return KVCache(found, BLOCK, parts)


@triton.jit
def offsets_kernel(out, BLOCK_SIZE: tl.constexpr, TILED: tl.constexpr):
    """int64 [BLOCK_SIZE, 129]: where the rule puts a token's codes, then its scale."""
    token = tl.arange(0, BLOCK_SIZE)
    column = tl.arange(0, 128)
    place = out + token[:, None] * 129 + column[None, :]
    tl.store(place, code_offset(token[:, None], column[None, :], 128, TILED).to(tl.int64))
    tl.store(out + token * 129 + 128, scale_offset(token, 128, BLOCK_SIZE).to(tl.int64))


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("order", ["tiled16", "planar"])
def test_the_rule_gives_the_published_offsets(
    device: torch.device, order: str, block_size: int
) -> None:
    found = torch.zeros(block_size, 129, dtype=torch.int64, device=device)
    offsets_kernel[(1,)](found, BLOCK_SIZE=block_size, TILED=order == "tiled16")
    found = found.cpu()
    assert torch.equal(found[:, :128], index_pages.value_offsets(block_size, order))
    assert torch.equal(found[:, 128:], index_pages.scale_offsets(block_size)[:, :1])
    if (order, block_size) == ("tiled16", 64):
        vectors = {(0, 15): 15, (0, 16): 256, (1, 0): 16, (15, 127): 2047, (16, 0): 2048}
        for (token, column), offset in (vectors | {(63, 127): 8191}).items():
            assert int(found[token, column]) == offset


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("rope", [64, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_launch_writes_what_three_ops_write(
    device: torch.device, rope: int, interleaved: bool, dtype: torch.dtype
) -> None:
    from ml4core_rocm.kernels.index_key_write import index_key_write

    draw = torch.Generator().manual_seed(rope + interleaved)
    key = (3 * torch.randn(9, 128, generator=draw) + 0.5).to(dtype)
    key[4] = 2.0  # a constant row: what is left is the bias
    weight, bias = torch.rand(128, generator=draw) + 0.5, torch.randn(128, generator=draw)
    positions = torch.tensor([0, 1, 7, 8191, 8192, 65536, 2**20 - 1, 3, 2])
    frequency = 10000.0 ** (-torch.arange(rope // 2) / 32) if rope else None
    slots = torch.tensor([0, 17, 31, 32, 63, 95, 40, -1, 4 * BLOCK])  # the last two write nothing
    cache = cache_of(device, torch.zeros(4, BLOCK, 128))
    before = cache.parts[0].clone()
    index_key_write(
        cache,
        slots.to(device),
        key.to(device),
        weight.to(device),
        bias.to(device),
        1e-6,
        positions.to(device),
        None if frequency is None else frequency.to(device),
        interleaved,
    )
    wide = key.double()
    centred = wide - wide.mean(-1, keepdim=True)
    normed = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    want = normed * weight.double() + bias.double()
    if rope:
        angle = positions.double()[:, None] * frequency.double()
        first, second = (
            (want[:, 0:rope:2], want[:, 1:rope:2])
            if interleaved
            else (want[:, : rope // 2], want[:, rope // 2 : rope])
        )
        low = first * angle.cos() - second * angle.sin()
        high = first * angle.sin() + second * angle.cos()
        joined = (
            torch.stack((low, high), -1).flatten(-2) if interleaved else torch.cat((low, high), -1)
        )
        want = torch.cat((joined, want[:, rope:]), -1)
    codes, scales = kv_rows.quantize_index(want.float(), "e4m3fn")
    pages = cache.parts[0].cpu()
    found_codes, found_scales = index_pages.unpack_page(pages, "tiled16", "f32")
    written = slots[:7]
    flat = found_codes.flatten(0, 1)[written]
    # Where fp32 and fp64 stand on either side of a tie, codes are neighbours.
    assert (flat.int() - codes[:7].int()).abs().max() <= 1
    assert (flat != codes[:7]).float().mean() < 1e-3
    assert torch.equal(found_scales.flatten()[written], scales[:7])
    untouched = torch.ones(4 * BLOCK, dtype=torch.bool)
    untouched[written] = False
    unpacked = index_pages.unpack_page(before.cpu(), "tiled16", "f32")[0].flatten(0, 1)
    assert torch.equal(found_codes.flatten(0, 1)[untouched], unpacked[untouched])


@pytest.mark.parametrize("layout", ["tiled16_f32", "planar_f32"])
def test_gathered_keys_are_the_pages_tokens(device: torch.device, layout: str) -> None:
    from ml4core_rocm.kernels.gather_index_keys import gather_index_keys

    draw = torch.Generator().manual_seed(3)
    rows = torch.randn(6, BLOCK, 128, generator=draw)
    cache = cache_of(device, rows, layout)
    table = torch.tensor([[3, 1, 5], [0, 4, 77], [2, 0, 0]], dtype=torch.int32)
    starts = torch.tensor([0, 70, 70, 75], dtype=torch.int32)  # 70 keys, none, 5
    codes, scales = gather_index_keys(cache, table.to(device), starts.to(device), 80, 70)
    want = cache.layout.unpack(cache.parts, None).flatten(0, 1).cpu()
    places = [int(table[0, p // BLOCK]) * BLOCK + p % BLOCK for p in range(70)]
    places += [int(table[2, 0]) * BLOCK + p for p in range(5)]
    found = kv_rows.dequantize_index(codes.cpu()[:75], scales.cpu()[:75], "e4m3fn")
    assert torch.equal(found, want[places])


@pytest.mark.parametrize("heads", [3, 32])
def test_queries_become_codes_and_their_scales_weights(device: torch.device, heads: int) -> None:
    from ml4core_rocm.kernels.index_queries import index_queries

    draw = torch.Generator().manual_seed(heads)
    q = torch.randn(5, heads, 128, generator=draw) * 10.0 ** torch.arange(-3, 2).view(5, 1, 1)
    weights = torch.randn(5, heads, generator=draw)
    codes, found = index_queries(q.to(device), weights.to(device), 0.25)
    want, scales = kv_rows.quantize_index(q, "e4m3fn")
    assert torch.equal(codes.cpu(), want)
    assert torch.equal(found.cpu(), weights * 0.25 * scales)


def test_pages_that_are_not_there_gather_zeros(device: torch.device) -> None:
    from ml4core_rocm.kernels.gather_index_keys import gather_index_keys

    cache = cache_of(device, torch.ones(2, BLOCK, 128))
    table = torch.tensor([[0, 2, -1]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 100], dtype=torch.int32, device=device)
    codes, scales = gather_index_keys(cache, table, starts, 100, 100)
    assert bool((codes[:32] != 0).all())
    assert not codes[32:].any()
    assert bool((scales[32:] == 1).all())


@pytest.mark.parametrize("layout", ["planar_ue8m0x4", "fp32"])
def test_a_cache_of_another_order_is_not_read_in_silence(device: torch.device, layout: str) -> None:
    from ml4core_rocm.kernels.gather_index_keys import gather_index_keys

    cache = cache_of(device, torch.zeros(2, BLOCK, 128), layout)
    ints = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=f"'{layout}'"):
        gather_index_keys(cache, ints[None], ints, 1, 1)
