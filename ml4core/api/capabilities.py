"""The closed vocabulary in which a backend says what it can do and a deployment what it needs.

A word is ``prefix:name``. Undeclared means no. Only ``kv:x-<dist>/<name>`` and
``index:x-<dist>/<name>`` are open, for private cache layouts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from ml4core.api.ops import OPS
from ml4core.api.stages import STAGES
from ml4core.api.weights import WEIGHT_FORMATS

_NAMES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "op": tuple(OPS),
        "stage": tuple(STAGES),
        "kv": ("fp8_ds_mla", "e4m3", "e4m3fnuz", "bf16", "fp32", "nvfp4_ds_mla"),
        "index": ("planar_f32", "planar_ue8m0x4", "tiled16_f32", "lane33_ue8m0", "fp32"),
        "weights": WEIGHT_FORMATS,
        # What inputs of products are. Where a deployment needs one of the last four, products with
        # quantised weights quantise their bf16 input first, fp8_tensor with a scale a row, nvfp4
        # with a global scale a row: amax / 2688.
        "act": ("fp32", "bf16", "fp8_block", "fp8_tensor", "mxfp4", "nvfp4"),
        "parallel": ("tp", "pp", "dp", "ep", "dcp", "pcp", "multi_node"),
        "spec": ("dspark", "probabilistic_drafts", "block_verification"),
        "feature": (
            "compose",  # core binds its own composition for what the backend lacks
            "graph_capture",
            "async_scheduling",
            "deterministic",  # same bits from run to run
            "batch_invariant",  # same bits whatever the batch mates
            "prefix_caching",
            "images",
            "ep_weight_filter",
            "spanning_session",  # one session drives all tensor parallel ranks of a replica
            "kv_transfer",
            "host_offload",
            "load_time_mxfp4",
            "latency_decode",
        ),
    }
)

VOCABULARY: frozenset[str] = frozenset(
    f"{prefix}:{name}" for prefix, names in _NAMES.items() for name in names
)
_DEFAULTS: Mapping[str, str] = MappingProxyType(
    {"kv": "kv:", "fp8": "kv:", "index": "index:", "dtype": "", "block_size": ""}
    | {"max_num_seqs": "", "max_num_batched_tokens": ""}
)
"""Keys of ``Capabilities.defaults``, and the prefix of the words that are their values."""
_LIMITS = ("max_topk", "max_heads", "max_verify_rows")
_DTYPES = ("float32", "bfloat16")
_PRIVATE = re.compile(r"(kv|index):x-[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


def check_words(words: Iterable[str]) -> frozenset[str]:
    """The words as a set. Raises ``ValueError`` that lists each word outside the vocabulary."""
    words = frozenset(words)
    unknown = sorted(w for w in words if w not in VOCABULARY and not _PRIVATE.fullmatch(w))
    if unknown:
        prefixes = ", ".join(f"{prefix}:" for prefix in _NAMES)
        raise ValueError(
            f"unknown capability words {unknown}; known prefixes are {prefixes} and the words are "
            "ml4core.api.VOCABULARY; private layouts are written kv:x-<dist>/<name>"
        )
    return words


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do on one device.

    Attributes:
        features: words of the vocabulary.
        defaults: what ``auto`` means here. Keys: ``dtype`` (a ``--dtype`` value), ``kv`` (layout
            for ``--kv-cache-dtype auto``), ``fp8`` (layout for ``fp8`` and ``fp8_e4m3``), ``index``
            (index key layout), ``block_size`` (tokens a page), ``max_num_seqs`` and
            ``max_num_batched_tokens`` (sequences and rows of a step at most).
        limits: upper bounds, 1 or above, of what it serves: ``max_topk`` (index top-k),
            ``max_heads`` (query heads), ``max_verify_rows`` (rows of a verify window); absent means
            none.

    Raises ``ValueError`` for words, keys or values that mean nothing.
    """

    features: frozenset[str]
    defaults: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "features", check_words(self.features))
        defaults = {key: str(value) for key, value in self.defaults.items()}
        problems = [*_default_problems(defaults), *_limit_problems(self.limits)]
        if problems:
            raise ValueError("; ".join(problems))
        object.__setattr__(self, "defaults", MappingProxyType(defaults))
        object.__setattr__(self, "limits", MappingProxyType(dict(self.limits)))

    def __contains__(self, word: str) -> bool:
        return word in self.features

    def missing(self, needs: Iterable[str]) -> tuple[str, ...]:
        """The needed words that are not declared, sorted. With ``feature:compose`` every op and
        stage counts as declared.
        """
        composed = ("op:", "stage:") if "feature:compose" in self.features else ()
        return tuple(
            word
            for word in sorted(check_words(needs))
            if word not in self.features and not word.startswith(composed)
        )

    def names(
        self, prefix: Literal["op", "stage", "kv", "index", "weights", "act"] | str
    ) -> tuple[str, ...]:
        """The declared names with this prefix, sorted."""
        start = f"{prefix}:"
        return tuple(sorted(w[len(start) :] for w in self.features if w.startswith(start)))

    def to_json(self) -> dict[str, object]:
        return {
            "features": sorted(self.features),
            "defaults": dict(self.defaults),
            "limits": dict(self.limits),
        }


def _default_problems(defaults: Mapping[str, str]) -> Iterator[str]:
    for key, value in defaults.items():
        prefix = _DEFAULTS.get(key)
        if prefix is None:
            yield f"unknown default {key!r}; known are {', '.join(_DEFAULTS)}"
        elif prefix:
            word = prefix + value
            if word not in VOCABULARY and not _PRIVATE.fullmatch(word):
                known = ", ".join(_NAMES[prefix[:-1]])
                yield f"default {key!r} is {value!r}, and there is no word {word}; works: {known}"
        elif key == "dtype":
            if value not in _DTYPES:
                yield f"default 'dtype' is {value!r}; works: {' or '.join(_DTYPES)}"
        elif not re.fullmatch(r"[1-9][0-9]{0,9}", value):
            yield f"default {key!r} is {value!r}; works: a whole number from 1"


def _limit_problems(limits: Mapping[str, int]) -> Iterator[str]:
    for name, value in limits.items():
        if name not in _LIMITS:
            yield f"unknown limit {name!r}; known are {', '.join(_LIMITS)}"
        elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
            yield f"limit {name!r} is {value!r}; works: a whole number from 1"
