"""The `mtp` block of params.json as typed data, and what would show an open choice wrong."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from ml4core.models.errors import shown
from ml4core.models.params import Count, Index, LeRoPE, Positive, Strict, Yarn
from ml4core.models.params_file import block_problems, refusal

Few = Annotated[int, Field(ge=1, le=1000)]


class Mtp(Strict):
    """The block. What is not stated follows the tensors, else the target, else a default."""

    target_layers: list[Index] | None = None
    taps: list[Index] | None = None
    """The same as `target_layers`."""
    n_layers: Few | None = None
    depth: Few | None = None
    """Drafts of one block."""
    sliding_window: Count | None = None
    window_mode: Literal["row", "block"] | None = None
    """`row`: keys less than a window from the row itself. `block`: a window before the block."""
    mask_rows: Index | None = None
    """Learned vectors: one for each row of a block, or for each but the anchor's."""
    anchor_vector: Literal["none", "add", "replace"] | None = None
    """What becomes of the anchor's own learned vector, where there is one."""
    markov_head: Literal["rnn"] | None = None
    markov_rank: Count | None = None
    head_input: Literal["normed", "residual"] | None = None
    """The state that the sequential head is given."""

    dim: Count | None = None
    """Only compared, as the next: they are the target's."""
    vocab_size: Count | None = None
    norm_eps: Positive | None = None
    n_heads: Count | None = None
    q_lora_rank: Count | None = None
    kv_lora_rank: Count | None = None
    qk_nope_head_dim: Count | None = None
    qk_rope_head_dim: Index | None = None
    v_head_dim: Count | None = None
    hidden_dim: Count | None = None
    rope_theta: Positive | None = None
    rope_interleave: bool | None = None
    yarn: Yarn | None = None
    """Null: none. Not stated: the target's."""
    lerope: LeRoPE | None = None
    """Null: none. With scope `global` the frequencies are the drafter's, or if it has none, the
    target's.
    """


_ACCEPTANCE = "no tensor shows it; only the share of accepted drafts does"
_CHECKS: Mapping[str, str] = MappingProxyType(
    {
        "n_layers": "which layers have tensors",
        "depth": "rows of mask_embeddings",
        "mask_rows": "rows of mask_embeddings",
        "markov_rank": "columns of markov_head.w1",
        "n_heads": "rows of attention.wq",
        "q_lora_rank": "presence of attention.wq_a",
        "kv_lora_rank": "columns of attention.wkv_b",
        "qk_rope_head_dim": "rows of attention.wkv_a_with_mqa",
        "qk_nope_head_dim": "rows of attention.wkv_b",
        "v_head_dim": "rows of attention.wkv_b, columns of attention.wo",
        "hidden_dim": "rows of feed_forward.w1",
        "lerope": "presence of rope_freqs",
    }
)


def check_of(key: str) -> str:
    """What shows the value of a key of the block wrong, if it is."""
    return _CHECKS.get(key, _ACCEPTANCE)


def parse_mtp(block: object, where: str) -> Mtp:
    """The block as checked data. Raises CheckpointError that lists every fault."""
    if not isinstance(block, Mapping):
        found = "missing" if block is None else f"{shown(block)}; must be an object"
        raise refusal([f"mtp: {found}; it describes the drafter"], where)
    try:
        mtp = Mtp.model_validate(dict(block))
    except ValidationError as error:
        raise refusal(block_problems(Mtp, "mtp", error), where) from error
    if mtp.taps is not None and mtp.target_layers not in (None, mtp.taps):
        raise refusal(["mtp.taps: differs from mtp.target_layers; leave one out"], where)
    return mtp
