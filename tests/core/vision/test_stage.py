"""What the stage promises beyond its numbers: images apart, padding without trace, fixed shapes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ml4core.api import (
    Accepted,
    Refusal,
    Refused,
    Rejected,
    Segment,
    StepShape,
    VisionShape,
    VisionSpec,
    VisionWeights,
    Weight,
)
from ml4core.compose import bind as binding
from ml4core.compose import vision
from ml4core.compose.bind import bind_global_stage
from ml4core.models.pixtral_images import ImageBatch, patch_images
from ml4core.models.pixtral_weights import rope_2d_freqs

from .support import (
    CELLS,
    bind,
    context_of,
    difference,
    encode,
    encode_images,
    open_session,
    random_images,
    read,
    spec_of,
)

Encoder = tuple[VisionSpec, VisionWeights]
NOISE = 1e-5
"""fp32, sums in another order."""


def test_an_image_alone_equals_the_image_among_others(encoder: Encoder) -> None:
    images = random_images(encoder[0], CELLS)
    together = encode_images(*encoder, images)
    for index, image in enumerate(images):
        (alone,) = encode_images(*encoder, [image])
        assert difference(together[index], alone) <= NOISE, f"image {index}"


def test_other_images_leave_no_trace(encoder: Encoder) -> None:
    spec, weights = encoder
    images = random_images(spec, CELLS)
    others = random_images(spec, CELLS, seed=1)
    first = encode_images(spec, weights, images)
    second = encode_images(spec, weights, [images[0], others[1], images[2]])
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[2], second[2])
    assert difference(second[1], first[1]) > 0.1


def test_patches_of_one_image_see_each_other(encoder: Encoder) -> None:
    spec, weights = encoder
    (image,) = random_images(spec, [(4, 5)])
    (before,) = encode_images(spec, weights, [image])
    image[:, -1, -1] += 5.0  # in the last cell
    (after,) = encode_images(spec, weights, [image])
    assert difference(after[:1], before[:1]) > 100 * NOISE


@pytest.mark.parametrize("junk", [math.nan, math.inf, 1e30])
def test_padding_leaves_no_trace(encoder: Encoder, junk: float) -> None:
    spec, weights = encoder
    images = random_images(spec, CELLS)
    plain = patch_images(spec, images)
    real, cells = len(plain.patches), sum(plain.counts)
    padded = patch_images(spec, images, pad_to=real + 5 * spec.cell_patches)
    clean = encode(spec, weights, padded)
    assert clean.shape == (cells + 5, spec.output_size)
    assert difference(clean[:cells], encode(spec, weights, plain)) <= NOISE
    padded.patches[real:] = junk
    padded.positions[real:] = 10**6
    found = encode(spec, weights, padded)
    assert torch.equal(found[:cells], clean[:cells])
    assert found.isfinite().all()


def test_padding_may_stand_between_images(encoder: Encoder) -> None:
    spec, weights = encoder
    images = random_images(spec, CELLS)
    one, two = (patch_images(spec, [image], pad_to=80) for image in images[:2])
    joined = ImageBatch(
        torch.cat((one.patches, two.patches)),
        torch.cat((one.positions, two.positions)),
        torch.cat((one.image_ids, torch.where(two.image_ids < 0, -1, 7).to(torch.int32))),
        (),
    )
    found = encode(spec, weights, joined)
    apart = encode_images(spec, weights, images[:2])
    assert difference(found[: len(apart[0])], apart[0]) <= NOISE
    assert difference(found[20 : 20 + len(apart[1])], apart[1]) <= NOISE


def test_tiles_of_rows_change_nothing(encoder: Encoder, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, weights = encoder
    batch = patch_images(spec, random_images(spec, CELLS))
    whole = encode(spec, weights, batch)
    row = 4 * spec.heads * len(batch.patches)
    monkeypatch.setattr(vision, "_SCORE_BYTES", 11 * row)  # 84 rows: the last tile is ragged
    assert difference(encode(spec, weights, batch), whole) <= NOISE


def test_bf16_is_near_fp32(encoder: Encoder, folder) -> None:
    spec, weights = encoder
    batch = patch_images(spec, random_images(spec, CELLS))
    exact = encode(spec, weights, batch)
    _, narrow = read(folder, torch.bfloat16)
    found = encode(spec, narrow, batch, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    error = float((found.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt())
    assert 1e-4 < error < 0.03


class Stage(torch.nn.Module):
    def __init__(self, call) -> None:
        super().__init__()
        self.call = call

    def forward(self, weights, patches, positions, image_ids):
        return self.call(weights, patches, positions, image_ids)


def test_export_gives_the_same_numbers(encoder: Encoder) -> None:
    spec, weights = encoder
    batches = [
        patch_images(spec, random_images(spec, cells, seed=seed), pad_to=96)
        for seed, cells in enumerate((CELLS, ((2, 2), (1, 5), (3, 3), (1, 1)), ((4, 6),)))
    ]
    first = batches[0]
    args = (weights, first.patches, first.positions, first.image_ids)
    with torch.no_grad():
        exported = torch.export.export(Stage(bind(spec, 96)), args, strict=False)
    names = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    data_dependent = {"item", "_local_scalar_dense", "nonzero", "unique", "masked_select"}
    assert not data_dependent & {name.split(".")[1] for name in names if name.count(".") == 2}
    run = exported.module()
    # Other images, more and fewer of them: nothing of the first batch was baked in.
    for batch in batches:
        found = run(weights, batch.patches, batch.positions, batch.image_ids)
        assert difference(found, encode(spec, weights, batch)) <= NOISE


def test_frequencies_even_for_rows_odd_for_columns() -> None:
    # f_i = 16^(-2i/8) = 1, 1/2, 1/4, 1/8.
    spec = replace(spec_of(), head_dim=8, rope_theta=16.0)
    assert rope_2d_freqs(spec).tolist() == [1.0, 0.25, 0.5, 0.125]
    assert spec.row_pairs == 2
    # An odd number of pairs: rows have one more. 8^(-2i/6) = 1, 1/2, 1/4.
    spec = replace(spec, head_dim=6, rope_theta=8.0)
    assert rope_2d_freqs(spec).tolist() == pytest.approx([1.0, 0.25, 0.5], rel=1e-7)
    assert spec.row_pairs == 2
    # 10^(-i/13) with i = 0, 2, 50 for rows, 1, 51 for columns.
    found = rope_2d_freqs(replace(spec, head_dim=104, rope_theta=1e4))
    assert found.dtype == torch.float32
    golden = [1.0, 0.70170383, 1.4251027e-4, 0.83767764, 1.1937766e-4]
    assert found[[0, 1, 25, 26, 51]].tolist() == pytest.approx(golden, rel=1e-6)


def test_merger_unfolds_channel_by_channel() -> None:
    # Two channels, patches of one pixel, one cell of 2 x 2: column (c * 2 + dy) * 2 + dx.
    spec = replace(
        spec_of(),
        hidden_size=2,
        layers=0,
        heads=1,
        head_dim=2,
        channels=2,
        patch_size=1,
        pre_projector_norm=False,
        adapter_bias=False,
        output_size=2,
    )
    image = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[-5.0, 0.6], [0.7, -8.0]]])
    batch = patch_images(spec, [image.numpy()])
    normed = image / (image.square().mean(0) + spec.norm_eps).sqrt()

    def weight(data: torch.Tensor) -> Weight:
        return Weight("fp32", tuple(data.shape), {"data": data})

    for column in range(8):
        merging = torch.zeros(2, 8)
        merging[0, column] = 1.0
        top = {
            "patch_conv": weight(torch.eye(2)),
            "ln_pre": torch.ones(2),
            "inv_freq": torch.ones(1),
            "merging_layer": weight(merging),
            "adapter_in": weight(torch.eye(2)),
            "adapter_out": weight(torch.eye(2)),
        }
        found = encode(spec, VisionWeights(top, ()), batch)
        channel, row, col = column // 4, column // 2 % 2, column % 2
        value = float(normed[channel, row, col])
        gelu = 0.5 * value * (1.0 + math.erf(value / math.sqrt(2.0)))
        assert found.tolist() == [[pytest.approx(gelu, rel=1e-5), 0.0]]


@pytest.mark.parametrize(
    ("patches", "positions", "ids"),
    [
        ((8, 47), (8, 2), (8,)),
        ((8, 48), (8, 1), (8,)),
        ((8, 48), (8, 2), (7,)),
        ((6, 48), (6, 2), (6,)),
    ],
)
def test_shapes_are_checked(encoder: Encoder, patches, positions, ids) -> None:
    spec, weights = encoder
    call = bind(spec, 8)
    wanted = r"must be \[T, 48\], \[T, 2\] and \[T\], T a multiple of 4"
    with pytest.raises(ValueError, match=wanted):
        call(
            weights,
            torch.zeros(patches),
            torch.zeros(positions, dtype=torch.int64),
            torch.zeros(ids, dtype=torch.int32),
        )


class Providers:
    """A session that offers given candidates, and remembers what it was asked."""

    def __init__(self, candidates) -> None:
        self.candidates = candidates
        self.asked: list[object] = []

    def providers(self, stage, layer, shape):
        self.asked.append((stage, layer, shape))
        return self.candidates


REJECTED = Rejected("slow", (Refusal("slow", "patches", "at most 64 patches, got 84"),))


def test_a_provider_is_bound_before_the_composition() -> None:
    spec, shape = spec_of(), VisionShape(84)
    fast = Accepted("fast", lambda *args: "served", "1.2")
    session = Providers([REJECTED, fast, Accepted("later", lambda *args: "no")])
    call, choice = bind_global_stage("vision_encoder", session, context_of(spec), shape)
    assert call() == "served"
    assert session.asked == [("vision_encoder", None, shape)]
    assert (choice.part, choice.layer_kind, choice.step_kind) == ("vision_encoder", "*", "*")
    assert (choice.provider, choice.chosen_by, choice.version) == ("fast", "backend", "1.2")
    assert choice.rejected == (REJECTED,)


def test_the_composition_is_bound_where_no_provider_serves(encoder: Encoder) -> None:
    spec, weights = encoder
    batch = patch_images(spec, random_images(spec, CELLS))
    session = Providers([REJECTED])
    call, choice = bind_global_stage(
        "vision_encoder", session, context_of(spec), VisionShape(len(batch.patches))
    )
    assert (choice.provider, choice.chosen_by) == ("compose", "core")
    assert choice.rejected == (REJECTED,)
    found = call(weights, batch.patches, batch.positions, batch.image_ids)
    assert torch.equal(found, encode(spec, weights, batch))


def test_a_stage_that_nobody_serves_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "_BUILDERS", {})
    none = Segment(0, 0, 0)
    shape = StepShape(Segment(2, 2, 1), none, none, (), 2)
    with pytest.raises(Refused) as refused:
        bind_global_stage("verify_and_sample", Providers([REJECTED]), context_of(None), shape)
    subjects = [refusal.subject for refusal in refused.value.refusals]
    assert subjects == ["stage:verify_and_sample", "patches"]


def test_wrong_stages_and_models_are_named() -> None:
    spec, shape = spec_of(), VisionShape(84)
    session = open_session(spec)
    for name in ("attention", "visoin_encoder"):
        with pytest.raises(ValueError, match=f"'{name}' is no stage of the whole model.*draft_bl"):
            bind_global_stage(name, session, context_of(spec), shape)
    with pytest.raises(ValueError, match="'images' has no vision encoder"):
        bind_global_stage("vision_encoder", session, context_of(None), shape)
