"""The vision block of params.json as the encoder's dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from ml4core.api import VisionSpec
from ml4core.models.errors import shown
from ml4core.models.params import Count, Strict
from ml4core.models.params_file import PARAMS_FILE, refusal

NORM_EPS = 1e-5
"""Of every norm of the encoder and before the projector; params.json has no key for it."""

TokenId = Annotated[int, Field(ge=-1)]
"""An id, or -1 where the tokenizer's file is to tell it."""


class VisionEncoder(Strict):
    """The block `vision_encoder`, or `multimodal.vision_encoder_args`."""

    hidden_size: Count
    num_hidden_layers: Annotated[int, Field(ge=1, le=10_000)]
    num_attention_heads: Count
    intermediate_size: Count
    num_channels: Count
    patch_size: Count
    image_size: Count
    max_image_size: Count | None = None
    """Longest side that preprocessing leaves; `image_size` where it is not stated."""
    rope_theta: Annotated[float, Field(gt=1)]
    spatial_merge_size: Count = 1
    mm_projector_id: Literal["", "patch_merge"] | None = None
    """`patch_merge`: a layer joins patches. Not stated: one does if there is more than one."""
    add_pre_mm_projector_layer_norm: bool = False
    adapter_bias: bool = True
    image_token_id: TokenId | None = None
    """The tokenizer's ids are used, not this one, nor the next two."""
    image_break_token_id: TokenId | None = None
    image_end_token_id: TokenId | None = None


def vision_spec(
    blocks: Mapping[str, Any], output_size: int, where: str = PARAMS_FILE
) -> VisionSpec | None:
    """The encoder that a params.json describes; None if it describes none.

    `blocks` is the file's content, or `ModelSpec.extras`: of it only `vision_encoder` and
    `multimodal` are read. `output_size` is the decoder's width; `where` names the file in messages.

    Raises CheckpointError that lists every fault: unknown and missing keys, wrong values, and keys
    that contradict each other.
    """
    name, block = _block(blocks, where)
    if block is None:
        return None
    if not isinstance(block, Mapping):
        raise refusal([f"{name}: {shown(block)}; must be an object"], where)
    try:
        encoder = VisionEncoder.model_validate(dict(block))
    except ValidationError as error:
        raise refusal(_problems(name, error), where) from error
    if problems := _contradictions(name, encoder):
        raise refusal(problems, where)
    return VisionSpec(
        hidden_size=encoder.hidden_size,
        layers=encoder.num_hidden_layers,
        heads=encoder.num_attention_heads,
        head_dim=encoder.hidden_size // encoder.num_attention_heads,
        ffn_width=encoder.intermediate_size,
        patch_size=encoder.patch_size,
        channels=encoder.num_channels,
        image_size=encoder.max_image_size or encoder.image_size,
        rope_theta=encoder.rope_theta,
        spatial_merge_size=encoder.spatial_merge_size,
        patch_merger=_merges(encoder),
        pre_projector_norm=encoder.add_pre_mm_projector_layer_norm,
        adapter_bias=encoder.adapter_bias,
        norm_eps=NORM_EPS,
        output_size=output_size,
    )


def _block(blocks: Mapping[str, Any], where: str) -> tuple[str, Any]:
    """The block that describes the encoder, None for none, and its name."""
    outer = blocks.get("vision_encoder")
    multimodal = blocks.get("multimodal")
    if multimodal is not None and not isinstance(multimodal, Mapping):
        raise refusal([f"multimodal: {shown(multimodal)}; must be an object"], where)
    inner = (multimodal or {}).get("vision_encoder_args")
    if inner is None:
        return "vision_encoder", outer
    if outer not in (None, inner):
        text = "vision_encoder: differs from multimodal.vision_encoder_args; leave one out"
        raise refusal([text], where)
    return "multimodal.vision_encoder_args", inner


def _problems(name: str, error: ValidationError) -> list[str]:
    problems = []
    for entry in error.errors(include_url=False):
        key = ".".join((name, *map(str, entry["loc"])))
        if entry["type"] == "extra_forbidden":
            accepted = ", ".join(VisionEncoder.model_fields)
            problems.append(f"{key}: unknown key; accepted: {accepted}")
        elif entry["type"] == "missing":
            problems.append(f"{key}: missing; it has no default")
        else:
            problems.append(f"{key}: {shown(entry['input'])}; {entry['msg']}")
    return problems


def _contradictions(name: str, encoder: VisionEncoder) -> list[str]:
    problems = []
    width, heads = encoder.hidden_size, encoder.num_attention_heads
    if width % (2 * heads):
        problems.append(
            f"{name}.hidden_size: {width}; must be a multiple of 2 * num_attention_heads, "
            f"{2 * heads}: rotation works on pairs in each head"
        )
    if encoder.max_image_size is not None and encoder.max_image_size > encoder.image_size:
        problems.append(
            f"{name}.max_image_size: {encoder.max_image_size}; at most image_size, "
            f"{encoder.image_size}, up to which positions are trained"
        )
    if encoder.spatial_merge_size > 1 and not _merges(encoder):
        problems.append(
            f"{name}.mm_projector_id: {encoder.mm_projector_id!r}; spatial_merge_size "
            f"{encoder.spatial_merge_size} needs 'patch_merge'"
        )
    return problems


def _merges(encoder: VisionEncoder) -> bool:
    if encoder.mm_projector_id is None:
        return encoder.spatial_merge_size > 1
    return encoder.mm_projector_id == "patch_merge"
