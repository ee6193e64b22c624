"""The vision encoder: its dimensions, and its weights and shapes as a backend receives them.

Letters in shapes: ``T`` patches, ``d`` the encoder's width, ``N`` heads, ``A`` head dim, ``F``
feed-forward width, ``C`` channels, ``p`` patch size, ``s`` merge size, ``H`` the decoder's width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from ml4core.api.weights import Weight


@dataclass(frozen=True)
class VisionSpec:
    """An encoder of Pixtral's kind, and the projector behind it.

    Attributes:
        image_size: longest side of an image, in pixels, before it is rounded up to whole cells.
        rope_theta: base of the rotary frequencies, which rows and columns share out among them.
        spatial_merge_size: ``s``: a cell of s x s patches gives one embedding.
        patch_merger: whether a layer joins the patches of a cell; without one ``s`` is 1.
        pre_projector_norm: whether the encoder's output is normed before it is merged.
        adapter_bias: whether the two layers of the adapter have biases.
        norm_eps: of every norm.
        output_size: width of the embeddings, which is the decoder's.
    """

    hidden_size: int
    layers: int
    heads: int
    head_dim: int
    ffn_width: int
    patch_size: int
    channels: int
    image_size: int
    rope_theta: float
    spatial_merge_size: int
    patch_merger: bool
    pre_projector_norm: bool
    adapter_bias: bool
    norm_eps: float
    output_size: int

    @property
    def patch_dim(self) -> int:
        """Values of one patch: C p p."""
        return self.channels * self.patch_size * self.patch_size

    @property
    def cell_patches(self) -> int:
        """Patches of one cell: s s."""
        return self.spatial_merge_size * self.spatial_merge_size

    @property
    def cell_size(self) -> int:
        """Side of a cell in pixels. An image is a whole number of cells high and wide."""
        return self.patch_size * self.spatial_merge_size

    @property
    def row_pairs(self) -> int:
        """How many of a head's A/2 rotated pairs turn with the row.

        They come first; the others turn with the column.
        """
        return (self.head_dim // 2 + 1) // 2


@dataclass(frozen=True)
class VisionShape:
    """Everything about a batch of images that a compiled program depends on.

    Attributes:
        patches: ``T``, padded: a multiple of ``VisionSpec.cell_patches``.
    """

    patches: int


class VisionWeights(NamedTuple):
    """Weights as the session laid them out.

    Attributes:
        top: ``VISION_WEIGHTS`` by name.
        layers: ``VISION_LAYER_WEIGHTS`` of each of the encoder's layers.
    """

    top: Mapping[str, Tensor | Weight]
    layers: tuple[Mapping[str, Tensor | Weight], ...]


VISION_WEIGHTS: Mapping[str, str] = MappingProxyType(
    {
        "patch_conv": "Weight [d, C p p], unquantised; columns by channel, then row, then column",
        "ln_pre": "tensor [d]",
        "inv_freq": "fp32 tensor [A/2]: radians a row of the first row_pairs pairs, then radians "
        "a column of the others",
        "pre_projector_norm": "tensor [d]. With pre_projector_norm",
        "merging_layer": "Weight [d, d s s]; columns by channel, then row, then column in the "
        "cell. With patch_merger",
        "adapter_in": "Weight [H, d]",
        "adapter_in_bias": "tensor [H]. With adapter_bias",
        "adapter_out": "Weight [H, H]",
        "adapter_out_bias": "tensor [H]. With adapter_bias",
    }
)
"""Names of the weights outside of the encoder's layers, as a backend receives them."""

VISION_LAYER_WEIGHTS: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "tensor [d]",
        "ffn_norm": "tensor [d]",
        "wqkv": "Weight [3 N A, d]: wq, then wk, then wv; rotated pairs are neighbours",
        "wo": "Weight [d, N A]",
        "w13": "Weight [2 F, d]: w1 (gate), then w3 (up)",
        "w2": "Weight [d, F]",
    }
)
"""Names of the weights of one of the encoder's layers, as a backend receives them.

Norms and biases keep the checkpoint's dtype.
"""
