"""Weights by part and rank: the published sizes, and cuts that keep every value."""

from __future__ import annotations

import pytest

from ml4core.planning.formats import held_bytes, stored_bytes
from ml4core.planning.model import published_model
from ml4core.planning.parts import PARTS
from ml4core.planning.ranks import Ranks
from ml4core.planning.variants import VARIANTS
from ml4core.planning.weights import PartBytes, kept, rank_shape, requantised

GIB = 2**30
MODELS = {variant: published_model(variant) for variant in VARIANTS}


def by_part(variant: str, **sizes: int | bool) -> dict[str, PartBytes]:
    return MODELS[variant].table.by_part(Ranks(**sizes), kept("bf16"))  # type: ignore[arg-type]


def total(parts: dict[str, PartBytes]) -> float:
    return sum(part.rank for part in parts.values()) / GIB


@pytest.mark.parametrize(("variant", "published"), [("fp8", 128), ("nvfp4", 76)])
def test_a_rank_of_eight_holds_what_was_published(variant: str, published: float) -> None:
    parts = by_part(variant, tp=8)
    del parts["drafter"]
    assert total(parts) == pytest.approx(published, rel=0.005)


@pytest.mark.parametrize(("variant", "gigabytes"), [("fp8", 1061), ("mxfp4", 578)])
def test_the_checkpoint_is_as_large_as_was_published(variant: str, gigabytes: float) -> None:
    assert MODELS[variant].table.stored / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_every_part_is_listed() -> None:
    assert tuple(by_part("fp8")) == PARTS


def test_routed_experts_by_hand() -> None:
    values = 71 * 128 * 3 * 6144 * 6144
    assert by_part("fp8", tp=8)["routed experts"].rank == values // 8 * (1 + 4 / 128**2)
    assert by_part("mxfp4", tp=8)["routed experts"].rank == values * 0.53125 / 8
    assert by_part("nvfp4", tp=8)["routed experts"].stored == values * 0.5625 + 71 * 128 * 3 * 4
    assert by_part("bf16", tp=8)["routed experts"].rank == values * 2 // 8


def test_what_every_rank_holds_does_not_shrink() -> None:
    one, eight = by_part("fp8"), by_part("fp8", tp=8)
    for part in ("indexer", "router", "norms", "drafter", "vision"):
        assert eight[part].rank == one[part].rank == one[part].held, part
    for part in ("embedding", "output", "routed experts", "shared experts", "dense"):
        assert 8 * eight[part].rank == one[part].rank, part
    latent = 63 * 576 * 6144  # wkv_a, on every rank; rows of NoPE layers are fewer
    assert one["attention"].rank / 8 < eight["attention"].rank < one["attention"].rank / 8 + latent


def test_context_parallel_ranks_share_out_no_weight() -> None:
    assert by_part("fp8", tp=8, dcp=8) == by_part("fp8", tp=8)


def test_experts_go_over_all_replicas_whole_or_by_width() -> None:
    width = by_part("bf16", tp=8, dp=4)
    whole = by_part("bf16", tp=8, dp=4, expert_parallel=True)
    alone = by_part("bf16", tp=8)
    assert whole["routed experts"].rank == width["routed experts"].rank
    assert 4 * whole["routed experts"].rank == alone["routed experts"].rank
    assert whole["attention"] == alone["attention"], "a replica has all of it"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_shares_add_up_to_no_less_than_the_whole(variant: str, tp: int) -> None:
    for lot in MODELS[variant].table.lots:
        count, rows, columns = rank_shape(lot, Ranks(tp=tp))
        assert count * rows * columns * tp >= lot.count * lot.rows * lot.columns
        assert rank_shape(lot, Ranks()) == (lot.count, lot.rows, lot.columns)


@pytest.mark.parametrize(
    ("format", "rows", "columns", "held", "stored"),
    [
        ("fp32", 3, 5, 60, 60),
        ("bf16", 3, 5, 30, 30),
        ("fp8_block", 576, 6144, 576 * 6144 + 5 * 48 * 4, 576 * 6144 + 5 * 48 * 4),
        ("fp8_tensor", 3, 5, 19, 19),
        ("nvfp4", 10, 64, 10 * (32 + 4 + 4), 10 * (32 + 4) + 4),
        ("mxfp4", 10, 64, 10 * (32 + 2), 10 * (32 + 2)),
    ],
)
def test_bytes_of_formats(format: str, rows: int, columns: int, held: int, stored: int) -> None:
    assert held_bytes(format, rows, columns) == held
    assert stored_bytes(format, rows, columns) == stored


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ValueError, match=r"'int3'.*known are fp32"):
        held_bytes("int3", 1, 1)
    with pytest.raises(ValueError, match=r"'fp6'.*known are fp8"):
        published_model("fp6")


def test_experts_that_are_converted_while_they_are_loaded() -> None:
    """What was published of a rank of eight: 125 GiB become 69."""
    table = MODELS["fp8"].table.without("drafter", "vision")
    ranks, quark = Ranks(tp=8), MODELS["mxfp4"].table.without("drafter", "vision")
    kept_fp8 = table.by_part(ranks, kept("bf16"))
    converted = table.by_part(ranks, requantised(kept("bf16")))
    assert total(kept_fp8) == pytest.approx(125, rel=0.02)
    assert total(converted) == pytest.approx(69, rel=0.03)
    assert total(converted) == total(quark.by_part(ranks, kept("bf16")))
