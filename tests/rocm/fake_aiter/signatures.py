"""Parameters of AITER's functions, release by release, as its sources have them.

0.1.18 is d6de7769, 0.1.20 its post1, de07f388, and 0.1.21 what e4048607 becomes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from types import MappingProxyType

RELEASES = ("0.1.18", "0.1.20.post1", "0.1.21")

_BASE: Mapping[str, str] = MappingProxyType(
    {
        "aiter.mla.mla_decode_fwd": """
            q kv_buffer o qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q page_size=1
            nhead_kv=1 sm_scale=None logit_cap=0.0 num_kv_splits=None num_kv_splits_indptr=None
            work_meta_data=None work_indptr=None work_info_set=None reduce_indptr=None
            reduce_final_map=None reduce_partial_map=None q_scale=None kv_scale=None
            intra_batch_mode=False return_logits=False return_lse=False g_kv_indptr=None
            cp_world_size=1 cp_rank=0 causal=True""",
        "aiter.get_mla_metadata_info_v1": """
            batch_size max_seqlen_qo num_head_qo q_dtype kv_dtype is_sparse fast_mode=True
            num_kv_splits=32 intra_batch_mode=False max_split_per_batch=-1""",
        "aiter.get_mla_metadata_v1": """
            seqlens_qo_indptr seqlens_kv_indptr kv_last_page_lens num_heads_per_head_k num_heads_k
            is_causal work_metadata_ptrs work_info_set work_indptr reduce_indptr reduce_final_map
            reduce_partial_map page_size=1 kv_granularity=16 max_seqlen_qo=-1 uni_seqlen_qo=-1
            fast_mode=True topk=-1 max_split_per_batch=-1 intra_batch_mode=False
            is_cp_round_robin=False mla_version=0 dtype_q_nope=None dtype_q_rope=None
            dtype_kv_nope=None dtype_kv_rope=None dtype_q=None dtype_kv=None""",
        "aiter.ops.triton.attention.fp8_mqa_logits.fp8_mqa_logits": """
            Q KV kv_scales weights cu_starts cu_ends clean_logits=True""",
        "aiter.ops.triton.attention.pa_mqa_logits.deepgemm_fp8_paged_mqa_logits": """
            q_fp8 kv_cache weights out_logits context_lens kv_indices max_model_len Preshuffle=False
            KVBlockSize=1 ChunkK=256 TotalCuCount=None WavePerEU=2 VarCtxSchedule=None""",
        "aiter.top_k_per_row_prefill": """
            logits rowStarts rowEnds indices values numRows stride0 stride1 k=2048 stable=False""",
        "aiter.top_k_per_row_decode": """
            logits next_n seqLens indices numRows stride0 stride1 k=2048 stable=False""",
        "aiter.fused_moe.fused_moe": """
            hidden_states w1 w2 topk_weight topk_ids expert_mask=None activation=0 quant_type=0
            doweight_stage1=False w1_scale=None w2_scale=None a1_scale=None a2_scale=None
            block_size_M=None num_local_tokens=None moe_sorting_dispatch_policy=0 dtype=None
            hidden_pad=0 intermediate_pad=0 bias1=None bias2=None splitk=0 swiglu_limit=None
            beta=None linear_beta=None gate_mode='separated' shared_w1=None shared_w2=None
            shared_w1_scale=None shared_w2_scale=None shared_expert_id=-1""",
        "aiter.gemm_a8w8_blockscale": """
            XQ WQ x_scale w_scale dtype=None isBpreshuffled=False""",
        "aiter.tuned_gemm.gemm_a16w16": """
            A B bias=None otype=None scale_a=None scale_b=None scale_c=None""",
        "aiter.silu_and_mul": "out input limit=0.0",
        "aiter.concat_and_cache_mla": "kv_c k_pe kv_cache slot_mapping kv_cache_dtype scale",
        "aiter.rmsnorm2d_fwd": "input weight epsilon use_model_sensitive_rmsnorm=0",
        "aiter.rmsnorm2d_fwd_with_add": """
            out input residual_in residual_out weight epsilon gemma_norm=False
            use_model_sensitive_rmsnorm=0""",
    }
)
"""Those of 0.1.20."""

_CHANGES: Mapping[str, Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "0.1.18": {
            "aiter.mla.mla_decode_fwd": (r" causal=True", ""),
            "aiter.top_k_per_row_prefill": (r" stable=False", ""),
            "aiter.top_k_per_row_decode": (r" stable=False", ""),
            "aiter.fused_moe.fused_moe": (r"beta=None.*linear_beta=None|shared_\w+=\S+", ""),
        },
        "0.1.21": {"aiter.fused_moe.fused_moe": (r"$", " stage2_scatter=None")},
    }
)
"""By release and function: a pattern, and what stands in its place."""


def signatures(release: str) -> dict[str, inspect.Signature]:
    """Each function by its full name."""
    found = {}
    for name, text in _BASE.items():
        if change := _CHANGES.get(release, {}).get(name):
            text = re.sub(*change, text)
        found[name] = _signature(text)
    return found


def _signature(text: str) -> inspect.Signature:
    parameters = []
    for word in text.split():
        name, equals, default = word.partition("=")
        given = eval(default, {}) if equals else inspect.Parameter.empty
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(name, kind, default=given))
    return inspect.Signature(parameters)
