"""Every op of ``ml4core.api.OPS`` in plain torch, for any device.

No op looks at data on the host, so each can be traced at fixed shapes. Loops run over tiles whose
number follows from shapes alone and keep temporaries near ``tiles.TEMP_BYTES``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ml4core.compose.ops.attention import merge_lse, sparse_mla
from ml4core.compose.ops.gemms import embed, gemm, head_gemm, silu_mul
from ml4core.compose.ops.indexer import indexer_logits
from ml4core.compose.ops.kv import gather_kv, indexer_write, kv_write, to_slots
from ml4core.compose.ops.moe import moe_experts, router
from ml4core.compose.ops.norms import all_reduce_rms_norm, layer_norm, rms_norm
from ml4core.compose.ops.positions import rope, ssmax
from ml4core.compose.ops.sampling import sample
from ml4core.compose.ops.selection import topk
from ml4core.compose.ops.verify import verify_draft
from ml4core.compose.ops.weights import quantize
from ml4core.compose.ops.window import window_mla

COMPOSED: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        function.__name__: function
        for function in (
            embed,
            rms_norm,
            layer_norm,
            all_reduce_rms_norm,
            rope,
            ssmax,
            gemm,
            head_gemm,
            silu_mul,
            kv_write,
            indexer_write,
            gather_kv,
            indexer_logits,
            topk,
            to_slots,
            sparse_mla,
            window_mla,
            merge_lse,
            router,
            moe_experts,
            quantize,
            sample,
            verify_draft,
        )
    }
)
"""The ops by name."""

__all__ = ["COMPOSED"]
