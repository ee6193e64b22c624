"""What a suite of this kind has to notice at the least: kinds of faults, the mutants that stand for
each, and the families whose business it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Row:
    """A kind of fault.

    Attributes:
        faults: each fault in words, and the mutants that have it, one or more.
        dies_at: families of checks, each of which has to catch one of these mutants.
    """

    faults: Mapping[str, tuple[str, ...]]
    dies_at: tuple[str, ...]


ROWS: Mapping[int, Row] = MappingProxyType(
    {
        1: Row({"one head zeroed": ("last-head-zeroed",)}, ("ops.structure",)),
        2: Row(
            {
                "a gain of 1.2 per cent": ("attention-gain", "product-gain"),
                "truncation, not rounding": ("truncated",),
            },
            ("ops.bias", "bytes.rounding"),
        ),
        3: Row({"long sums in bfloat16": ("few-bits", "attention-few-bits")}, ("ops.elements",)),
        4: Row({"the last row unwritten": ("row-unwritten",)}, ("ops.written",)),
        5: Row(
            {"a page index off by one at a page's edge": ("page-off-by-one",)},
            ("ops.elements", "layout.cross_read"),
        ),
        6: Row({"a byte written behind its slot": ("one-byte-more",)}, ("layout.canary",)),
        7: Row(
            {"a wrong layout on which writer and reader agree": ("own-byte-order",)},
            ("layout.golden", "layout.cross_read"),
        ),
        8: Row(
            {"an exponent rounded the other way": ("scale-rounded-up", "scale-rounded-down")},
            ("bytes.quantize", "layout.golden"),
        ),
        9: Row(
            {"lse in base 2": ("lse-base-two",), "lse of an empty row 0": ("lse-of-nothing",)},
            ("ops.lse", "ops.merge"),
        ),
        10: Row(
            {
                "a duplicate": ("topk-duplicate",),
                "an unreachable index": ("topk-beyond",),
                "the weakest dropped": ("topk-weakest",),
            },
            ("ops.topk",),
        ),
        11: Row(
            {"a NoPE layer rotated": ("nope-rotated",), "rope skipped": ("rope-skipped",)},
            ("model.logits",),
        ),
        12: Row(
            {
                "a consumer writes a cache": ("consumer-writes",),
                "more is allocated": ("double-pages",),
            },
            ("model.kv_bytes",),
        ),
        13: Row({"a sharer takes another owner": ("other-owner",)}, ("model.index_share",)),
        14: Row(
            {
                "a router renormalises wrongly": ("renormalised-otherwise",),
                "no shared expert": ("no-shared-expert",),
            },
            ("ops.router", "model.logits"),
        ),
        15: Row(
            {
                "drafts always accepted": ("drafts-accepted",),
                "a wrong residual distribution": ("target-residual",),
            },
            ("spec.greedy", "spec.distribution"),
        ),
        16: Row(
            {
                "a format declared and lacking": ("claims-a-format",),
                "a format served and undeclared": ("hides-a-format",),
            },
            ("caps.over", "caps.under"),
        ),
        17: Row(
            {
                "only the first reason": ("first-reason",),
                "only on rank 0": ("rank-zero",),
                "after a collective": ("refuses-together",),
                "after an allocation": ("refuses-late",),
            },
            ("system.refusal",),
        ),
        18: Row(
            {
                "waits for ever": ("waits-for-ever",),
                "ignores the fault word": ("fault-dropped",),
                "clears it": ("fault-cleared",),
                "emits the token anyway": ("fault-a-step-late", "older-when-late"),
            },
            ("system.fail_stop",),
        ),
        19: Row(
            {
                "computes elsewhere": ("products-elsewhere",),
                "weights elsewhere": ("weights-elsewhere",),
                "caches elsewhere": ("caches-elsewhere",),
                "results elsewhere": ("results-elsewhere",),
            },
            ("system.device_honesty",),
        ),
        20: Row({"a random last bit": ("unordered-sum",)}, ("ops.repeat",)),
        21: Row(
            {
                "imports its vendor library when it is found": ("eager-import",),
                "takes the device when it is found": ("eager-device",),
            },
            ("plugin.import_light",),
        ),
        22: Row(
            {
                "a host sync in each step": ("host-sync",),
                "memory of each step kept": ("outputs-kept",),
            },
            ("perf.steady_state",),
        ),
    }
)
"""By number. Each mutant of a row dies at a family of the row."""
