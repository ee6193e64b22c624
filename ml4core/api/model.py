"""The model as a table of layers. Every trait is per layer; no code branches on a model's name.

Letters in shapes: ``T`` rows of a step, ``H`` hidden, ``N`` heads, ``L`` latent rank, ``R`` rope
dims, ``P`` q.k dims without rope, ``V`` value dims a head, ``Hi`` index heads, ``D`` index head
dim, ``K`` index top-k, ``E`` experts, ``I`` expert width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from ml4core.api.vision import VisionSpec

if TYPE_CHECKING:
    from ml4core.api.speculation import DraftSpec

SSMaxKind = Literal["none", "llama4", "log", "pow", "floor"]


@dataclass(frozen=True)
class YarnSpec:
    """YaRN: frequencies below ``beta_slow`` rotations are divided by ``factor``, above
    ``beta_fast`` they stay.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    apply_scale: bool = False
    """Whether the magnitude correction m = 0.1 ln(factor) + 1 applies; then the softmax scale has
    m**2 in it.
    """


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding of ``dim`` dims. ``lerope`` says how learned frequencies are stored, if they
    are.
    """

    dim: int
    theta: float
    interleaved: bool = True
    yarn: YarnSpec | None = None
    lerope: Literal["none", "multiplier", "log", "absolute"] = "none"
    lerope_scope: Literal["global", "layer"] = "global"


@dataclass(frozen=True)
class SSMaxSpec:
    """Scale of the query by position (scalable softmax), ``n`` = visible keys = position + 1.

    - ``llama4``: 1 + beta ln(1 + floor(position / original_max_position))
    - ``log``: s ln(n) + b, with learned s and b a head (s = ``scale``, b = 0 where no tensor
      exists)
    - ``pow``: (1 + n / original_max_position) ** beta
    - ``floor``: 1 + beta ln(max(n / original_max_position, 1))
    """

    kind: SSMaxKind = "none"
    beta: float = 0.1
    original_max_position: int = 8192
    scale: float = 1.0
    per_head: bool = False
    """A learned factor a head (tensor ``scale`` [N]) multiplies the kind's value (for ``log`` it is
    s).
    """
    bias: bool = False
    """A learned bias a head (tensor ``bias`` [N]); ``log`` only."""
    n_limit: int | None = None
    """Cap of n, for checkpoints trained with n = min(position + 1, top-k)."""


@dataclass(frozen=True)
class IndexerSpec:
    """The DSA indexer of a layer that owns one."""

    heads: int
    head_dim: int
    topk: int
    rope_dim: int
    """0 on NoPE layers. The rotated dims come first."""
    rope_interleaved: bool = True
    query_input: Literal["hidden", "q_lora"] = "hidden"
    query_norm: bool = True
    norm_eps: float = 1e-6
    hadamard: bool = False
    ssmax: SSMaxSpec = SSMaxSpec()

    @property
    def scale(self) -> float:
        """head_dim^-0.5 * heads^-0.5, of the real head count."""
        return float(self.head_dim**-0.5 * self.heads**-0.5)


@dataclass(frozen=True)
class MoESpec:
    experts: int
    topk: int
    expert_width: int
    shared_width: int = 0
    """Width of all shared experts together; 0 for none."""
    routed_scale: float = 1.0
    renormalize: bool = True
    first_expert: int = 0
    """Id of the first expert that this rank has; how many it has, its weights tell."""


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer. ``heads`` and widths are those on this rank."""

    index: int
    hidden_size: int
    heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int
    norm_eps: float
    softmax_scale: float
    rope: RopeSpec | None
    ssmax: SSMaxSpec
    kv_source: int
    """The layer whose latent cache this one reads; its own index for an owner."""
    topk_source: int | None
    """The layer whose selection this one uses; None: attends to every visible key."""
    indexer: IndexerSpec | None
    """Set on layers that own an indexer."""
    dense_width: int | None
    """Width of the dense feed-forward; None on MoE layers."""
    moe: MoESpec | None

    @property
    def owns_kv(self) -> bool:
        return self.kv_source == self.index

    @property
    def owns_index(self) -> bool:
        return self.topk_source == self.index

    @property
    def q_dim(self) -> int:
        """Width of a head's query before absorption."""
        return self.nope_dim + self.rope_dim

    @property
    def absorbed_dim(self) -> int:
        """Width of a head's query after absorption, and of the part of a cache row that it
        meets.
        """
        return self.kv_lora_rank + self.rope_dim

    @property
    def kind(self) -> str:
        """The traits that decide which provider serves it, as one word a trait: layers of one kind
        are bound alike.
        """
        index = (
            "no_index"
            if self.topk_source is None
            else ("index_owner" if self.owns_index else "index_sharer")
        )
        return "+".join(
            (
                "rope" if self.rope_dim else "nope",
                "kv_owner" if self.owns_kv else "kv_consumer",
                index,
                "moe" if self.moe else "dense",
            )
        )


@dataclass(frozen=True)
class ModelSpec:
    """A whole decoder. ``assumptions`` maps each unpublished choice in force to the text that says
    where it came from.
    """

    name: str
    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_position: int
    tied_embeddings: bool
    layers: tuple[LayerSpec, ...]
    taps: tuple[int, ...] = ()
    """Layers after which the summed residual is handed to a drafter."""
    assumptions: Mapping[str, str] = field(default_factory=dict, hash=False)
    extras: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Blocks of other parts, as they stand in the file: ``mtp``, ``vision_encoder``,
    ``quantization``.
    """
    vision: VisionSpec | None = None
    """The encoder of images; None where there is none, or none is wanted."""
    draft: DraftSpec | None = None
    """The drafter; None where there is none, or none is wanted. Its ``taps`` are those above."""

    @cached_property
    def kv_owners(self) -> tuple[int, ...]:
        return tuple(layer.index for layer in self.layers if layer.owns_kv)

    @cached_property
    def index_owners(self) -> tuple[int, ...]:
        return tuple(layer.index for layer in self.layers if layer.owns_index)
