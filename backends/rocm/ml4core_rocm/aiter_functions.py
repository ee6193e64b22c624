"""The functions of AITER that adapters call, and whether the installed release has them so.

A call by place and name is checked against the function's own signature, or that of the torch op
that it stands behind, when a session opens:
releases differ in order, names and what they can do, and a wrong order gives wrong numbers, no
error. ``aiter`` itself is imported by the check and by ``load`` only.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from ml4core.api import Refusal

_DISTRIBUTION = "amd-aiter"
_REMEDY = "amd-aiter 0.1.20 or 0.1.21; or VLLM_ROCM_USE_AITER=0"


@dataclass(frozen=True)
class Function:
    """How an adapter calls a function.

    Attributes:
        place: parameters that are given by place, in order.
        named: parameters that are given by name.
    """

    module: str
    name: str
    place: tuple[str, ...]
    named: tuple[str, ...] = ()


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FUNCTIONS: Mapping[str, Function] = MappingProxyType(
    {
        one.name: one
        for one in (
            Function(
                "aiter.mla",
                "mla_decode_fwd",
                _words(
                    "q kv_buffer o qo_indptr kv_indptr kv_indices kv_last_page_lens max_seqlen_q"
                ),
                _words(
                    "page_size nhead_kv sm_scale num_kv_splits work_meta_data work_indptr "
                    "work_info_set reduce_indptr reduce_final_map reduce_partial_map q_scale "
                    "kv_scale return_lse"
                ),
            ),
            Function(
                "aiter",
                "get_mla_metadata_info_v1",
                _words("batch_size max_seqlen_qo num_head_qo q_dtype kv_dtype"),
                _words("is_sparse fast_mode num_kv_splits max_split_per_batch"),
            ),
            Function(
                "aiter",
                "get_mla_metadata_v1",
                # work_info_set stands before work_indptr here, behind it in what the one above
                # gives.
                _words(
                    "seqlens_qo_indptr seqlens_kv_indptr kv_last_page_lens num_heads_per_head_k "
                    "num_heads_k is_causal work_metadata_ptrs work_info_set work_indptr "
                    "reduce_indptr reduce_final_map reduce_partial_map"
                ),
                _words(
                    "page_size kv_granularity max_seqlen_qo uni_seqlen_qo fast_mode "
                    "max_split_per_batch dtype_q dtype_kv"
                ),
            ),
            Function(
                "aiter.ops.triton.attention.fp8_mqa_logits",
                "fp8_mqa_logits",
                _words("Q KV kv_scales weights cu_starts cu_ends"),
                _words("clean_logits"),
            ),
            Function(
                "aiter.ops.triton.attention.pa_mqa_logits",
                "deepgemm_fp8_paged_mqa_logits",
                _words("q_fp8 kv_cache weights out_logits context_lens kv_indices max_model_len"),
                _words("Preshuffle KVBlockSize ChunkK"),
            ),
            Function(
                "aiter",
                "top_k_per_row_prefill",
                _words("logits rowStarts rowEnds indices values numRows stride0 stride1"),
                _words("k stable"),
            ),
            Function(
                "aiter",
                "top_k_per_row_decode",
                _words("logits next_n seqLens indices numRows stride0 stride1"),
                _words("k stable"),
            ),
            Function(
                "aiter.fused_moe",
                "fused_moe",
                _words("hidden_states w1 w2 topk_weight topk_ids"),
                _words("expert_mask activation quant_type w1_scale w2_scale gate_mode"),
            ),
            Function(
                "aiter",
                "gemm_a8w8_blockscale",
                _words("XQ WQ x_scale w_scale"),
                _words("dtype"),
            ),
            Function("aiter.tuned_gemm", "gemm_a16w16", _words("A B"), _words("otype")),
            Function("aiter", "silu_and_mul", _words("out input")),
            Function(
                "aiter",
                "concat_and_cache_mla",
                _words("kv_c k_pe kv_cache slot_mapping kv_cache_dtype scale"),
            ),
            Function("aiter", "rmsnorm2d_fwd", _words("input weight epsilon")),
            Function(
                "aiter",
                "rmsnorm2d_fwd_with_add",
                _words("out input residual_in residual_out weight epsilon"),
            ),
            Function(
                "aiter.dist.device_communicators.custom_all_reduce",
                "CustomAllreduce",
                _words("group device"),
                _words("max_size"),
            ),
        )
    }
)
"""Every function, and class, of which an adapter depends on order and names."""


def load(name: str) -> Callable[..., Any]:
    """A function of the table. Imports its module; ``KeyError`` for another name."""
    function = FUNCTIONS[name]
    found: Callable[..., Any] = getattr(importlib.import_module(function.module), name)
    return found


def refusals(names: Iterable[str]) -> tuple[Refusal, ...]:
    """Each reason why a function of the table can't be called as its adapter does. Imports aiter,
    if it is there.
    """
    if find_spec("aiter") is None:
        return (Refusal("rocm", "AITER", "the library aiter is not installed", _REMEDY),)
    found = []
    for name in names:
        if fault := _fault(FUNCTIONS[name]):
            found.append(Refusal("rocm", "AITER", f"aiter {release()}: {fault}", _REMEDY))
    return tuple(found)


def release() -> str:
    """The version, or ``of unknown version``. Imports nothing that isn't imported."""
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return "of unknown version"


def _fault(function: Function) -> str:
    try:
        module = importlib.import_module(function.module)
    except Exception as error:
        return f"{function.module} can't be imported: {type(error).__name__}: {error}"
    call = getattr(module, function.name, None)
    if call is None:
        return f"{function.module} has no {function.name}"
    signature = _signature(function.name, call)
    if signature is None:
        return f"{function.name} doesn't tell what it takes"
    return mismatch(function, signature)


def _signature(name: str, call: Callable[..., Any]) -> inspect.Signature | None:
    """What a function takes. Some stand behind a torch op of their name, with a wrapper that takes
    anything: of these the op's schema tells. None where nothing does.
    """
    found = inspect.signature(call)
    anything = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    if {one.kind for one in found.parameters.values()} != anything:
        return found
    import torch

    op = getattr(torch.ops.aiter, name, None)
    if op is None:
        return None
    arguments = list(op.default._schema.arguments)
    if arguments and arguments[0].name == "dummy":  # of functions that don't begin with a tensor
        del arguments[0]
    return inspect.Signature(
        [
            inspect.Parameter(
                one.name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=one.default_value if one.has_default_value() else inspect.Parameter.empty,
            )
            for one in arguments
        ]
    )


def mismatch(function: Function, signature: inspect.Signature) -> str:
    """What of a call doesn't fit a signature, in words; "" if all does."""
    parameters = signature.parameters
    names = list(parameters)
    for index, name in enumerate(function.place):
        there = names[index] if index < len(names) else "nothing"
        if there != name:
            return f"{function.name} takes {there} in place {index}, where {name} is given"
    for name in function.named:
        if name not in parameters:
            return f"{function.name} takes no argument {name!r}"
    given = {*function.place, *function.named}
    for name, parameter in parameters.items():
        optional = parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if name not in given and not optional:
            return f"{function.name} needs an argument {name!r}, which is not known here"
    return ""
