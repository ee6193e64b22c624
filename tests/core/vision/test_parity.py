"""The encoder and its projector compute what Hugging Face transformers' do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ml4core.api import VisionSpec, VisionWeights
from ml4core.models.pixtral_images import ImageBatch, patch_images

from .support import (
    BLOCK,
    CELLS,
    WIDTH,
    difference,
    encode,
    encode_images,
    random_images,
    random_tensors,
    read,
    spec_of,
    write,
)

BOUND = 1e-4
"""Of each embedding's largest difference over its largest value."""
SEEN = 100 * BOUND
"""What a fault must cause at least."""

# Hugging Face's name of a module -> Mistral's.
_LAYER: Mapping[str, str] = {
    "attention.q_proj": "attention.wq",
    "attention.k_proj": "attention.wk",
    "attention.v_proj": "attention.wv",
    "attention.o_proj": "attention.wo",
    "attention_norm": "attention_norm",
    "feed_forward.gate_proj": "feed_forward.w1",
    "feed_forward.up_proj": "feed_forward.w3",
    "feed_forward.down_proj": "feed_forward.w2",
    "ffn_norm": "ffn_norm",
}
_PROJECTOR: Mapping[str, str] = {
    "norm": "pre_mm_projector_norm",
    "patch_merger.merging_layer": "patch_merger.merging_layer",
    "linear_1": "vision_language_adapter.w_in",
    "linear_2": "vision_language_adapter.w_out",
}


@pytest.fixture(scope="module", autouse=True)
def judge_is_installed() -> None:
    """Skips this module where transformers is missing or lacks a model; fails there under CI."""
    try:
        from transformers import Mistral3Model, PixtralVisionModel  # noqa: F401
    except ImportError as error:
        reason = f"needs transformers 5.24 (pip install 'ml4core[test]'): {error}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)


def half_split(matrix: Tensor, heads: int) -> Tensor:
    """Rows of wq or wk [N A, d] in Hugging Face's order: a pair's two rows lie A/2 apart."""
    return matrix.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)


def theirs_of(
    tensors: Mapping[str, Tensor], module: str, ours: str
) -> Iterator[tuple[str, Tensor]]:
    for leaf in ("weight", "bias"):
        if (tensor := tensors.get(f"{ours}.{leaf}")) is not None:
            yield f"{module}.{leaf}", tensor


def tower_state(spec: VisionSpec, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The encoder's tensors as Hugging Face's model has them."""
    state = {}
    for name in ("patch_conv", "ln_pre"):
        state |= dict(theirs_of(tensors, name, f"vision_encoder.{name}"))
    for layer in range(spec.layers):
        inner = f"transformer.layers.{layer}"
        for module, ours in _LAYER.items():
            found = dict(theirs_of(tensors, f"{inner}.{module}", f"vision_encoder.{inner}.{ours}"))
            if module.endswith(("q_proj", "k_proj")):
                found = {name: half_split(tensor, spec.heads) for name, tensor in found.items()}
            state |= found
    return state


def vision_config(spec: VisionSpec) -> Any:
    from transformers import PixtralVisionConfig

    return PixtralVisionConfig(
        hidden_size=spec.hidden_size,
        intermediate_size=spec.ffn_width,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_channels=spec.channels,
        image_size=spec.image_size,
        patch_size=spec.patch_size,
        hidden_act="silu",
        rope_parameters={"rope_type": "axial", "rope_theta": spec.rope_theta},
        attn_implementation="eager",
    )


def pixels(images: Sequence[np.ndarray]) -> tuple[Tensor, list[tuple[int, int]]]:
    """Images padded to one size [B, C, H, W], and their own sizes."""
    sizes = [image.shape[1:] for image in images]
    height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
    padded = [
        F.pad(torch.from_numpy(image), (0, width - w, 0, height - h), value=7.0)
        for image, (h, w) in zip(images, sizes, strict=True)
    ]
    return torch.stack(padded), [(int(h), int(w)) for h, w in sizes]


def judge(
    spec: VisionSpec, tensors: Mapping[str, Tensor], images: Sequence[np.ndarray]
) -> list[Tensor]:
    """Embeddings [cells, H] of each image by Hugging Face's Mistral 3."""
    from transformers import Mistral3Config, Mistral3Model, MistralConfig

    text = MistralConfig(
        vocab_size=16,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        pad_token_id=None,
    )
    config = Mistral3Config(
        vision_config=vision_config(spec),
        text_config=text,
        multimodal_projector_bias=spec.adapter_bias,
        spatial_merge_size=spec.spatial_merge_size,
    )
    model = Mistral3Model(config).eval()
    model.vision_tower.load_state_dict(tower_state(spec, tensors))
    projector: dict[str, Tensor] = {}
    for module, ours in _PROJECTOR.items():
        projector |= dict(theirs_of(tensors, module, ours))
    model.multi_modal_projector.load_state_dict(projector)
    values, sizes = pixels(images)
    with torch.inference_mode():
        found = model.get_image_features(values, torch.tensor(sizes), vision_feature_layer=-1)
    return list(found.pooler_output)


def test_projector_without_bias_and_with(tmp_path: Path) -> None:
    for bias in (True, False):
        block = {**BLOCK, "adapter_bias": bias}
        tensors = random_tensors(spec_of(**block), seed=3 + bias)
        spec, weights = read(write(tmp_path / str(bias), tensors, block))
        images = random_images(spec, CELLS, seed=5)
        ours, theirs = encode_images(spec, weights, images), judge(spec, tensors, images)
        assert [len(each) for each in ours] == [15, 2, 4]
        for image, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert difference(a, b) <= BOUND, f"image {image}, bias {bias}"
            # The reference says something: its embeddings are not all alike.
            assert float((b - b.mean(0)).abs().max()) > 0.1 * float(b.abs().max())


def test_large_grid_and_other_theta(tmp_path: Path) -> None:
    # Positions far from 0, where frequencies of neighbouring pairs are told apart.
    block = {**BLOCK, "rope_theta": 100.0, "image_size": 160, "max_image_size": 160}
    tensors = random_tensors(spec_of(**block), seed=8)
    tensors["vision_encoder.patch_conv.weight"] *= 0.003  # so faint that the norm's eps counts
    spec, weights = read(write(tmp_path / "m", tensors, block))
    images = random_images(spec, ((2, 20), (19, 1)), seed=9)
    for a, b in zip(
        encode_images(spec, weights, images), judge(spec, tensors, images), strict=True
    ):
        assert difference(a, b) <= BOUND


def test_encoder_without_merger(tmp_path: Path) -> None:
    # Pixtral 12B's form: one embedding a patch, no norm before the adapter.
    from transformers import PixtralVisionModel

    block = {
        **BLOCK,
        "spatial_merge_size": 1,
        "mm_projector_id": "",
        "add_pre_mm_projector_layer_norm": False,
    }
    tensors = random_tensors(spec_of(**block), seed=11)
    spec, weights = read(write(tmp_path / "m", tensors, block))
    images = random_images(spec, ((3, 7), (5, 2)), seed=12)
    tower = PixtralVisionModel(vision_config(spec)).eval()
    tower.load_state_dict(tower_state(spec, tensors))
    values, sizes = pixels(images)
    with torch.inference_mode():
        x = tower(values, image_sizes=sizes).last_hidden_state[0]
    for stem, after in (("w_in", F.gelu), ("w_out", torch.clone)):
        name = f"vision_language_adapter.{stem}"
        x = after(F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
    assert difference(torch.cat(encode_images(spec, weights, images)), x) <= BOUND


class Case(NamedTuple):
    """What a run of ours is made of."""

    spec: VisionSpec
    weights: VisionWeights
    batch: ImageBatch


def with_top(case: Case, name: str, change: Callable[[Tensor], Tensor]) -> Case:
    top = dict(case.weights.top)
    value = top[name]
    if isinstance(value, Tensor):
        top[name] = change(value)
    else:
        top[name] = replace(value, parts={"data": change(value.data)})
    return case._replace(weights=case.weights._replace(top=top))


def flip_rope_axes(case: Case) -> Case:
    return case._replace(batch=replace(case.batch, positions=case.batch.positions.flip(-1)))


def frequencies_in_order(case: Case) -> Case:
    half = case.spec.head_dim // 2
    order = torch.arange(half)
    return with_top(
        case, "inv_freq", lambda f: f[torch.argsort(torch.cat((order[::2], order[1::2])))]
    )


def merge_patch_major(case: Case) -> Case:
    cell = case.spec.cell_patches
    return with_top(
        case,
        "merging_layer",
        lambda w: w.unflatten(1, (-1, cell)).transpose(1, 2).flatten(1),
    )


def transpose_patches(case: Case) -> Case:
    p = case.spec.patch_size
    return with_top(
        case, "patch_conv", lambda w: w.unflatten(1, (-1, p, p)).transpose(2, 3).flatten(1)
    )


def one_block(case: Case) -> Case:
    return case._replace(
        batch=replace(case.batch, image_ids=torch.zeros_like(case.batch.image_ids))
    )


def pairs_half_split(case: Case) -> Case:
    spec = case.spec

    def change(matrix: Tensor) -> Tensor:
        q, k, v = matrix.chunk(3)
        return torch.cat((half_split(q, spec.heads), half_split(k, spec.heads), v))

    layers = tuple(
        {**layer, "wqkv": replace(layer["wqkv"], parts={"data": change(layer["wqkv"].data)})}  # type: ignore[union-attr, type-var]
        for layer in case.weights.layers
    )
    return case._replace(weights=case.weights._replace(layers=layers))


def other_eps(case: Case) -> Case:
    return case._replace(spec=replace(case.spec, norm_eps=0.1))


@pytest.mark.parametrize(
    "fault",
    [
        flip_rope_axes,
        frequencies_in_order,
        merge_patch_major,
        transpose_patches,
        one_block,
        pairs_half_split,
        other_eps,
    ],
)
def test_the_comparison_sees_a_fault(fault: Callable[[Case], Case], case: Case) -> None:
    right = encode(*case)
    wrong = encode(*fault(case))
    assert difference(wrong, right) > SEEN


@pytest.fixture(scope="module")
def case(encoder: tuple[VisionSpec, VisionWeights]) -> Case:
    """A run that agrees with Hugging Face's."""
    spec, weights = encoder
    images = random_images(spec, CELLS, seed=5)
    case = Case(spec, weights, patch_images(spec, images))
    theirs = torch.cat(judge(spec, random_tensors(spec), images))
    assert difference(encode(*case), theirs) <= BOUND
    return case


def test_gelu_is_exact(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    right = encode(*case)
    exact = F.gelu
    monkeypatch.setattr(F, "gelu", lambda x: exact(x, approximate="tanh"))
    assert difference(encode(*case), right) > BOUND
