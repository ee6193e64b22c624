"""params.json as typed data: Mistral's published keys, and keys of ours for what is not published.

A key that is not known is refused, everywhere but in the blocks of other parts (`mtp`, vision,
quantisation), which are kept as they stand. `None` means that the file does not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from ml4core.api import SSMaxKind

Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Block = dict[str, Any]

MAX_TOPK = 1 << 20
"""A selection takes a row of this many positions for each token, whatever the context."""


class Strict(BaseModel):
    """A block whose keys are closed and whose values are of the stated JSON type."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Yarn(Strict):
    """`beta` and `alpha`: rotations above and below which a frequency counts as fast or slow."""

    original_max_position_embeddings: Count | None = None
    factor: Annotated[float, Field(ge=1)]
    beta: Positive | None = None
    alpha: Positive | None = None
    apply_scale: bool | None = None


class Llama4Scaling(Strict):
    """The family's form of SSMax of kind `llama4`."""

    original_max_position_embeddings: Count
    beta: Annotated[float, Field(ge=0)]


class SSMax(Strict):
    """Scale of the query by position. `per_head` and `bias` say that learned tensors exist."""

    kind: SSMaxKind | None = None
    beta: float | None = None
    original_max_position_embeddings: Count | None = None
    scale: float | None = None
    n: Literal["context", "topk"] | None = None
    """What n counts: all visible keys, or at most the index top-k."""
    per_head: bool | None = None
    bias: bool | None = None


class LeRoPE(Strict):
    """Learned frequencies: the block says that they exist, `storage` how the tensor holds them."""

    storage: Literal["multiplier", "log", "absolute"] | None = None
    scope: Literal["global", "layer"] | None = None


class TopkSchedule(Strict):
    """Layer l shares iff max(l - offset + 1, 0) is no multiple of freq."""

    freq: Count
    offset: Index


def _topk_pattern(value: object) -> object:
    if isinstance(value, Mapping):
        try:
            return TopkSchedule.model_validate(value)
        except ValidationError:  # its paths would show which alternative was tried, not the key
            raise ValueError(
                "must have freq, 1 or more, and offset, 0 or more, and no other key"
            ) from None
    if not isinstance(value, str) or set(value) - {"F", "S"}:
        raise ValueError("must be text of F (full) and S (shared), one a layer, or {freq, offset}")
    return value


class Indexer(Strict):
    """The DSA indexer. Which layers own one: `types`, or `topk_pattern`."""

    n_heads: Count | None = None
    head_dim: Count
    topk: Annotated[int, Field(ge=1, le=MAX_TOPK)]
    types: list[Literal["full", "shared"]] | None = None
    topk_pattern: Annotated[str | TopkSchedule | None, PlainValidator(_topk_pattern)] = None
    nope_owners: bool | None = None
    """Whether every NoPE layer owns an indexer."""
    query_input: Literal["hidden", "q_lora"] | None = None
    rope_interleave: bool | None = None
    q_norm: bool | None = None
    norm_eps: Positive | None = None
    hadamard: bool | None = None
    ssmax: SSMax | None = None
    scale_fmt: Literal["ue8m0"] | None = None
    """Scale of cached keys; every index layout writes powers of two."""


class MoE(Strict):
    num_experts: Annotated[int, Field(ge=1, le=100_000)]
    num_experts_per_tok: Count
    num_shared_experts: Index
    expert_hidden_dim: Count | None = None
    shared_expert_hidden_dim: Count | None = None
    """Width of all shared experts together."""
    first_k_dense_replace: Index = 0
    route_every_n: Count = 1
    routed_scale: Positive | None = None
    num_expert_groups: int | None = None
    num_expert_groups_per_tok: int | None = None
    expert_parallel: int | None = None
    """How it was trained, as the next; no meaning here."""
    expert_model_parallel: int | None = None
    renorm_strategy: Literal["WEIGHTS", "NONE"] | None = None
    use_load_balancing_bias: bool | None = None


class Params(Strict):
    """A whole params.json."""

    model_type: Literal["transformer"] | None = None
    activation: Literal["silu"] | None = None
    dim: Count
    n_layers: Annotated[int, Field(ge=1, le=10_000)]
    n_heads: Count
    n_kv_heads: Count | None = None
    head_dim: Count | None = None
    """Width of a rope layer's query head; tells nothing new, so it is only compared."""
    hidden_dim: Count | None = None
    norm_eps: Positive | None = None
    vocab_size: Count | None = None
    tied_embeddings: bool = False
    max_position_embeddings: Count | None = None
    max_seq_len: Count | None = None
    """Only read where max_position_embeddings is not stated."""
    sliding_window: Any = None
    """Null, or a list of nulls: every layer sees the whole context."""

    q_lora_rank: Count | None = None
    kv_lora_rank: Count
    qk_nope_head_dim: Count | None = None
    qk_rope_head_dim: Index
    v_head_dim: Count | None = None
    rope_theta: Annotated[float, Field(gt=1)] | None = None
    rope_interleave: bool = True
    yarn: Yarn | None = None
    llama_4_scaling: Llama4Scaling | None = None
    ssmax: SSMax | None = None
    lerope: LeRoPE | None = None

    nope_layers: list[Index] | None = None
    nope_every: Count | None = None
    """n: layers l with l % n == n - 1 have no rotary embedding."""
    nope_qk_head_dim: Count | None = None
    nope_wkv_a_rope_rows: bool | None = None
    """Whether wkv_a of NoPE layers has rows for a rope part, which are then dropped."""
    kv_sharing: dict[str, Index] | None = None
    """Consumer layer -> the layer whose latent it reads."""
    kv_sharing_own_wkv_b: bool | None = None

    indexer: Indexer | None = None
    moe: MoE | None = None

    quantization: Block | None = None
    quantization_config: Block | None = None
    vision_encoder: Block | None = None
    multimodal: Block | None = None
    mtp: Block | None = None
