"""The table of operations: the one place that says what each computes, on which shapes, and what it
may write.

Ops return fresh, contiguous tensors and change nothing but the arguments named in ``writes``.
Arguments may be strided, and there may be no rows at all. All accumulate in fp32; positions and
byte offsets are 64 bit. Letters in shapes are those of ``ml4core.api.model``; further: ``R``
requests, ``B`` pages a request, ``S`` key columns (``B * block_size``), ``W`` query width (``L`` or
``L + rope dims``), ``Q`` rows a request at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ml4core.api.op_spec import Arg, OpSpec

_FLOAT = ("float32", "bfloat16")


def _x(name: str, *axes: str, optional: bool = False) -> Arg:
    return Arg(name, _FLOAT, axes, optional)


def _f32(name: str, *axes: str, optional: bool = False) -> Arg:
    return Arg(name, ("float32",), axes, optional)


def _i32(name: str, *axes: str, optional: bool = False) -> Arg:
    return Arg(name, ("int32",), axes, optional)


def _i64(name: str, *axes: str, optional: bool = False) -> Arg:
    return Arg(name, ("int64",), axes, optional)


def _value(name: str, kind: str, optional: bool = False) -> Arg:
    return Arg(name, (kind,), None, optional)


_CACHE = _value("cache", "KVCache")
_PAGED = (
    _i32("block_table", "R", "B"),
    _i32("query_start", "R+1"),
    _i32("visible", "T"),
    _value("max_rows", "int"),
)

_TABLE = (
    OpSpec(
        "embed",
        (_i64("ids", "T"), _x("weight", "vocab", "H")),
        (_x("out", "T", "H"),),
        "Rows of the table. Ids lie in [0, vocab): the caller checks them on the host.",
        corners=("first and last id", "repeated id"),
    ),
    OpSpec(
        "rms_norm",
        (_x("x", "...", "H"), _x("weight", "H"), _value("eps", "float")),
        (_x("out", "...", "H"),),
        "x * rsqrt(mean(x^2) + eps) * weight in fp32, cast once.",
        corners=("all zero row", "huge row", "one row"),
    ),
    OpSpec(
        "layer_norm",
        (_x("x", "...", "D"), _f32("weight", "D"), _f32("bias", "D"), _value("eps", "float")),
        (_f32("out", "...", "D"),),
        "Mean-subtracting LayerNorm in fp32; the result stays fp32.",
        corners=("constant row", "one row"),
    ),
    OpSpec(
        "all_reduce_rms_norm",
        (
            _x("x", "T", "H"),
            _x("residual", "T", "H"),
            _x("weight", "H", optional=True),
            _value("eps", "float"),
            _value("collectives", "Collectives"),
        ),
        (_x("residual", "T", "H"), _x("hidden", "T", "H", optional=True)),
        "residual + sum of x over ranks (added in fp32, cast to the residual's dtype), and its RMS "
        "norm if a weight is given.",
        corners=("world 1", "no weight"),
    ),
    OpSpec(
        "rope",
        (
            _x("x", "T", "N", "R"),
            _i64("positions", "T"),
            _f32("inv_freq", "R/2"),
            _value("interleaved", "bool"),
            _value("magnitude", "float"),
        ),
        (_x("out", "T", "N", "R"),),
        "Rotates pair j by angle position * inv_freq[j]: pairs (2j, 2j+1) if interleaved, else (j, "
        "j + R/2). The angle is exact "
        "to fp32 after range reduction up to position 2^20; cos and sin are fp32 and multiplied by "
        "magnitude.",
        corners=("position 0", "position 2^20", "width 0 is the identity", "both pairings"),
    ),
    OpSpec(
        "ssmax",
        (
            _x("x", "T", "N", "D"),
            _i64("positions", "T"),
            _value("spec", "SSMaxSpec"),
            _f32("scale", "N", optional=True),
            _f32("bias", "N", optional=True),
        ),
        (_x("out", "T", "N", "D"),),
        "x times the factor of its global position, by the spec's kind.",
        corners=("position 0", "either side of original_max_position", "per head"),
    ),
    OpSpec(
        "gemm",
        (
            _x("x", "T", "K"),
            _value("weight", "Weight[N,K]"),
            _value("out_dtype", "dtype", optional=True),
        ),
        (_x("out", "T", "N"),),
        "x @ weight^T with fp32 accumulation; out_dtype defaults to x's.",
        corners=("one row", "ragged last block"),
    ),
    OpSpec(
        "head_gemm",
        (_x("x", "T", "N", "A"), _value("weight", "Weight[N,B,A]")),
        (_x("out", "T", "N", "B"),),
        "out[t,n] = weight[n] @ x[t,n]: the absorbed projections of MLA.",
        corners=("one row", "one head"),
    ),
    OpSpec(
        "silu_mul",
        (_x("gate_up", "T", "2I"),),
        (_x("out", "T", "I"),),
        "silu(first half) * second half, in fp32, cast once.",
        corners=("large negative gate",),
    ),
    OpSpec(
        "kv_write",
        (_CACHE, _i64("slots", "T"), _x("latent", "T", "L"), _x("rope", "T", "R", optional=True)),
        (),
        "Writes one latent row a token in the cache's layout. Slot -1 writes nothing. Without rope "
        "the tail is written as zeros. "
        "Distinct rows have distinct slots.",
        writes=("cache",),
        corners=(
            "slot -1",
            "last slot of a page",
            "all slots -1",
            "amax 0, 448, denormal, inf, NaN",
            "strided pages",
            "no rope",
        ),
    ),
    OpSpec(
        "indexer_write",
        (_CACHE, _i64("slots", "T"), _x("key", "T", "D")),
        (),
        "Writes one index key a token in the cache's layout. Slot -1 writes nothing.",
        writes=("cache",),
        corners=(
            "slot -1",
            "last slot of a page",
            "all slots -1",
            "amax 0, 448, denormal, inf, NaN",
            "strided pages",
        ),
    ),
    OpSpec(
        "gather_kv",
        (_CACHE, _i32("slots", "...")),
        (_f32("rows", "...", "width"),),
        "Decoded rows in canonical order (latent, then rope; or index key). Slots below 0 give "
        "zeros.",
        corners=("slot -1", "page edge", "strided pages"),
    ),
    OpSpec(
        "indexer_logits",
        (
            _x("q", "T", "Hi", "D"),
            _f32("weights", "T", "Hi"),
            _value("scale", "float"),
            _CACHE,
            *_PAGED,
        ),
        (_f32("scores", "T", "S"),),
        "score[t,s] = k_scale[s] * sum_h weights[t,h] * scale * q_scale[t,h] * relu(q8[t,h] . "
        "k8[s]). With an FP8 layout q is "
        "quantised a (token, head) as the key is; with the fp32 layout nothing is. -inf at s >= "
        "visible[t]. Rows of request r are "
        "query_start[r]:query_start[r+1], at most max_rows.",
        corners=(
            "length 0",
            "ragged lengths",
            "page edge",
            "negative weights",
            "several rows a request",
        ),
    ),
    OpSpec(
        "topk",
        (_f32("scores", "T", "S"), _i32("visible", "T"), _value("k", "int")),
        (_i32("positions", "T", "k"), _i32("lens", "T"), Arg("has_nan", ("bool",), ("T",))),
        "The k largest among the first visible[t] scores, ties to the lowest position, in "
        "ascending order of position, packed in "
        "front, -1 behind. NaN is never selected and is reported; -inf is selectable when too few "
        "remain.",
        corners=(
            "fewer than k visible",
            "visible = k",
            "ties at the border",
            "all -inf",
            "NaN",
            "length 0",
            "k > S",
        ),
    ),
    OpSpec(
        "to_slots",
        (
            _i32("positions", "T", "k"),
            _i32("block_table", "R", "B"),
            _i64("row_request", "T"),
            _value("block_size", "int"),
        ),
        (_i32("slots", "T", "k"),),
        "block_table[request, position / block_size] * block_size + position % block_size; -1 "
        "stays -1.",
        corners=("-1", "page edge", "all -1"),
    ),
    OpSpec(
        "sparse_mla",
        (
            _x("q", "T", "N", "W"),
            _CACHE,
            _i32("slots", "T", "k"),
            _i32("lens", "T"),
            _value("scale", "float"),
        ),
        (_x("out", "T", "N", "L"), _f32("lse", "T", "N")),
        "Attention of absorbed queries over the first lens[t] slots of a row; slots below 0 or "
        "beyond the cache are skipped "
        "wherever they stand. Key = the first W of a row, value = its first L. lse is base e. A "
        "row without keys: 0 and -inf.",
        corners=(
            "no valid slot",
            "leading -1",
            "one valid slot",
            "length 0",
            "hostile slots",
            "poisoned unselected rows",
            "heads 1, 8, 64",
        ),
    ),
    OpSpec(
        "window_mla",
        (
            _x("q", "T", "N", "W"),
            _CACHE,
            *_PAGED,
            _value("scale", "float"),
            _value("window", "int", optional=True),
        ),
        (_x("out", "T", "N", "L"), _f32("lse", "T", "N")),
        "Attention of absorbed queries over keys max(0, visible[t] - window) .. visible[t] - 1 of "
        "the row's request; all visible keys "
        "without a window.",
        corners=(
            "length 0",
            "window edge",
            "page edge",
            "ragged lengths",
            "rows of one request with equal visible",
        ),
    ),
    OpSpec(
        "merge_lse",
        (_x("outs", "parts", "T", "N", "L"), _f32("lses", "parts", "T", "N")),
        (_x("out", "T", "N", "L"), _f32("lse", "T", "N")),
        "Joins attention over disjoint key sets. A part with lse -inf has no weight, whatever its "
        "out holds.",
        corners=("one part", "empty part", "all parts empty", "NaN in an empty part"),
    ),
    OpSpec(
        "router",
        (
            _x("x", "T", "H"),
            _f32("weight", "E", "H"),
            _value("topk", "int"),
            _value("renormalize", "bool"),
            _value("routed_scale", "float"),
        ),
        (_f32("weights", "T", "topk"), _i64("ids", "T", "topk")),
        "fp32 logits, softmax over all experts, the topk largest in descending order, ties to the "
        "lowest id, renormalised if asked, "
        "times routed_scale. A row with NaN: ids within range, weights 0.",
        corners=("ties", "all negative", "NaN row", "no renormalisation"),
    ),
    OpSpec(
        "moe_experts",
        (
            _x("x", "T", "H"),
            _value("w13", "Weight[E,2I,H]"),
            _value("w2", "Weight[E,H,I]"),
            _f32("weights", "T", "topk"),
            _i64("ids", "T", "topk"),
            _value("first_expert", "int", optional=True),
        ),
        (_x("out", "T", "H"),),
        "sum_j weights[t,j] * w2[e] (silu(w1[e] x) * (w3[e] x)), e = ids[t,j] - first_expert; w13 ="
        " [w1; w3]. Choices with e outside of [0, E) are another rank's and add nothing, as does "
        "weight 0, whatever x holds. Inner values may be rounded to x's dtype; the weighted sum is "
        "fp32, cast once.",
        corners=(
            "one row",
            "an expert without tokens",
            "all tokens to one expert",
            "weight 0",
            "experts of another rank",
        ),
    ),
    OpSpec(
        "quantize",
        (_x("x", "...", "K"), _value("format", "str"), _value("rule", "str", optional=True)),
        (_value("weight", "Weight"),),
        "A tensor in a weight format, bit for bit as ml4core.formats has it. Rules, the first of "
        "which is the default: fp8_block linear, pow2; mxfp4 even, floor, roundup, ceil.",
        corners=("zero block", "ties", "max block", "sign of zero"),
    ),
    OpSpec(
        "sample",
        (
            _x("logits", "T", "vocab"),
            _f32("temperature", "T"),
            _i64("seeds", "T"),
            _i64("positions", "T"),
        ),
        (_i64("ids", "T"),),
        "Temperature 0: the largest logit, ties to the lowest id. Above: a draw from "
        "softmax(logits / temperature) by noise that depends on (seed, position) alone, never on "
        "the batch. A position is that of the row whose logits these are.",
        corners=("temperature 0", "tie", "-inf logits", "same seed, other batch"),
    ),
    OpSpec(
        "verify_draft",
        (
            _x("logits", "R", "Q", "vocab"),
            _i64("draft_ids", "R", "Q-1"),
            _x("draft_logits", "R", "Q-1", "vocab", optional=True),
            _f32("temperature", "R"),
            _i64("seeds", "R"),
            _i64("positions", "R"),
            _value("block", "bool", optional=True),
        ),
        (_i64("ids", "R", "Q"), _i64("counts", "R")),
        "Accepts a prefix of the drafts and adds one token, so that the law of the output is that "
        "of the target. Temperature 0: equal to argmax. Without draft_logits a draft counts as "
        "certain. Draft -1 ends the run and the token is drawn from the target. With block the "
        "prefix is judged as a whole, by the rule of ``Verifier``.",
        corners=("all accepted", "none accepted", "draft -1", "depth 1, 2, 3", "temperature 0"),
    ),
)

OPS: Mapping[str, OpSpec] = MappingProxyType({spec.name: spec for spec in _TABLE})
