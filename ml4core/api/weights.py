"""A weight as it lies in memory: a format, a logical shape, and the arrays that hold it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

WEIGHT_FORMATS = ("fp32", "bf16", "fp8_block", "fp8_tensor", "nvfp4", "mxfp4")
"""The open formats. A backend's own packed form is ``x-<distribution>/<name>``."""


@dataclass(frozen=True)
class Weight:
    """A matrix ``[N, K]``, or a stack of them ``[E, N, K]``, in the torch convention (out, in).

    ``parts`` by format:

    - ``fp32``, ``bf16``: ``data`` with the logical shape.
    - ``fp8_block``: ``data`` uint8 e4m3fn, ``scale`` fp32 ``[..., ceil(N/128), ceil(K/128)]``;
      value = data * scale.
    - ``fp8_tensor``: ``data`` uint8 e4m3fn, ``scale`` fp32 ``[...]`` with one number a matrix.
    - ``nvfp4``: ``data`` uint8 ``[..., N, K/2]`` (low nibble = even k), ``scale`` uint8 e4m3fn
      ``[..., N, K/16]``, ``global_scale`` fp32 ``[..., N]``, the *multiplier* of each row (rows of
      w1 and w3 may differ).
    - ``mxfp4``: ``data`` uint8 ``[..., N, K/2]``, ``scale`` uint8 e8m0 ``[..., N, K/32]``.
    """

    format: str
    shape: tuple[int, ...]
    parts: Mapping[str, Tensor]

    @property
    def data(self) -> Tensor:
        return self.parts["data"]

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts.values())


GLOBAL_WEIGHTS: Mapping[str, str] = MappingProxyType(
    {
        "embedding": "tensor [vocab, H]",
        "final_norm": "tensor [H]",
        "output": "Weight [vocab, H]; the embedding's own data if tied",
    }
)
"""Names of the weights outside of layers, as a backend receives them."""

LAYER_WEIGHTS: Mapping[str, str] = MappingProxyType(
    {
        "attention_norm": "tensor [H]",
        "ffn_norm": "tensor [H]",
        "wq": "Weight [N (P+R), H]; a head's rope dims come last. Without q-LoRA",
        "wq_a": "Weight [Q, H]. With q-LoRA",
        "q_a_norm": "tensor [Q]. With q-LoRA",
        "wq_b": "Weight [N (P+R), Q]. With q-LoRA",
        "wkv_a": "Weight [L+R, H], latent first. Latent owners",
        "kv_a_norm": "tensor [L]. Latent owners",
        "w_uk": "Weight [N, L, P], unquantised: absorbs the query's P dims into the latent",
        "w_uv": "Weight [N, V, L], unquantised",
        "wo": "Weight [H, N V]",
        "inv_freq": "fp32 tensor [R/2]: YaRN and learned multipliers included. Rope layers",
        "ssmax_scale": "fp32 tensor [N]. Where the spec says per_head",
        "ssmax_bias": "fp32 tensor [N]. Where the spec says bias",
        "index_wq": "Weight [Hi D, H or Q]. Index owners, as all that follow",
        "index_q_norm_weight": "fp32 tensor [D] or [Hi, D]. With query_norm",
        "index_q_norm_bias": "fp32 tensor [D] or [Hi, D]. With query_norm",
        "index_wk": "Weight [D, H]",
        "index_k_norm_weight": "fp32 tensor [D]",
        "index_k_norm_bias": "fp32 tensor [D]",
        "index_weights_proj": "Weight fp32 [Hi, H]",
        "index_ssmax_scale": "fp32 tensor [Hi]",
        "index_ssmax_bias": "fp32 tensor [Hi]",
        "gate": "fp32 tensor [E, H]. MoE layers, as those that follow",
        "experts_w13": "Weight [E, 2I, H]: w1 (gate), then w3 (up)",
        "experts_w2": "Weight [E, H, I]",
        "experts_w13_input_scale": "fp32 tensor [E], all experts' on every rank: the fixed "
        "scale of w13's input, x = code * scale. Where the checkpoint has them",
        "experts_w2_input_scale": "fp32 tensor [E], as the one before, of w2's input",
        "shared_w13": "Weight [2 Is, H]. With shared experts",
        "shared_w2": "Weight [H, Is]. With shared experts",
        "dense_w13": "Weight [2 D, H]. Dense layers",
        "dense_w2": "Weight [H, D]. Dense layers",
    }
)
"""Names of one layer's weights, as a backend receives them. Norms keep the checkpoint's dtype."""
