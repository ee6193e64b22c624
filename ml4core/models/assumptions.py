"""What is not published about the model: a default for each choice, and what would show it wrong.

A choice is taken from params.json if it says so, else from the checkpoint's tensors if they show
it, else the default holds. Whatever params.json does not say is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from ml4core.models.errors import shown

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Assumption:
    """One open choice. A default of None is worked out where it is used."""

    id: str
    default: Any
    check: str


class Evidence(NamedTuple):
    """A value that tensors show, and which."""

    value: Any
    source: str


_QUALITY = "no tensor shows it; only the quality of long answers does"

ASSUMPTIONS: Mapping[str, Assumption] = MappingProxyType(
    {
        "qk_nope_head_dim": Assumption("A1", 64, "rows of wq and wkv_b"),
        "v_head_dim": Assumption("A1", 128, "rows of wkv_b, columns of wo"),
        "nope_qk_head_dim": Assumption("A2", None, "rows of wq and wkv_b in NoPE layers"),
        "nope_wkv_a_rope_rows": Assumption("A2", False, "rows of wkv_a in NoPE layers"),
        "indexer.n_heads": Assumption("A3", 32, "rows of indexer.weights_proj"),
        "vocab_size": Assumption("A4", 131072, "rows of tok_embeddings"),
        "hidden_dim": Assumption("A5", 16384, "rows of feed_forward.w1"),
        "moe.expert_hidden_dim": Assumption("A6", 6144, "rows of experts.0.w1"),
        "moe.shared_expert_hidden_dim": Assumption("A6", None, "rows of shared_experts.w1"),
        "indexer.types": Assumption("A7", None, "which layers have indexer tensors"),
        "indexer.nope_owners": Assumption("A8", True, "which layers have indexer tensors"),
        "kv_sharing_own_wkv_b": Assumption("A9", True, "which layers have wkv_a and wkv_b"),
        "indexer.rope_interleave": Assumption("A10", True, _QUALITY),
        "indexer.q_norm": Assumption("A11", True, "presence and shape of indexer.q_norm"),
        "indexer.norm_eps": Assumption("A11", 1e-6, _QUALITY),
        "indexer.hadamard": Assumption("A12", False, _QUALITY),
        "ssmax.kind": Assumption("A13", "llama4", "presence of ssmax tensors"),
        "ssmax.n": Assumption("A13", "context", _QUALITY),
        "ssmax.scale": Assumption("A13", 1.0, "presence of ssmax tensors"),
        "indexer.ssmax.kind": Assumption("A13", "none", "presence of indexer.ssmax tensors"),
        "indexer.ssmax.n": Assumption("A13", "context", _QUALITY),
        "indexer.ssmax.scale": Assumption("A13", 1.0, "presence of indexer.ssmax tensors"),
        "lerope.storage": Assumption("A14", "multiplier", _QUALITY),
        "lerope.scope": Assumption("A14", "global", "which layers have rope_freqs"),
        "yarn.apply_scale": Assumption("A15", False, _QUALITY),
        "yarn.original_max_position_embeddings": Assumption("A16", 8192, _QUALITY),
        "ssmax.original_max_position_embeddings": Assumption("A16", 8192, _QUALITY),
        "rope_theta": Assumption("A16", 1e4, _QUALITY),
        "norm_eps": Assumption("A16", 1e-6, _QUALITY),
        "moe.routed_scale": Assumption("A16", 1.0, _QUALITY),
        "moe.renorm_strategy": Assumption("A17", "WEIGHTS", _QUALITY),
        "mtp": Assumption("A18", None, "the drafter's tensors, when it is loaded"),
        "vision_encoder": Assumption("A19", None, "the encoder's tensors, when it is loaded"),
        "indexer.scale_fmt": Assumption(
            "A20", "ue8m0", "nothing: keys are only stored at run time"
        ),
    }
)
"""Key of params.json -> the assumption that holds where the file does not state it."""


class Choices:
    """Takes one choice after the other, and keeps a record of those that the file leaves open."""

    def __init__(self) -> None:
        self._record: dict[str, str] = {}

    @property
    def record(self) -> Mapping[str, str]:
        """`id/key` -> the value in force, where it comes from, how it is checked."""
        return MappingProxyType(dict(sorted(self._record.items(), key=_by_number)))

    def take(
        self, key: str, stated: T | None, default: T | None = None, seen: Evidence | None = None
    ) -> T:
        """The value for `key`: as stated, else as `seen` in tensors, else the default."""
        if stated is not None:
            return stated
        value: T
        if seen is not None:
            value, origin = seen.value, f"not stated; taken from {seen.source}"
        else:
            value = default if default is not None else ASSUMPTIONS[key].default
            origin = "not stated; the default"
        self.note(key, f"{shown(value)}: {origin}")
        return value

    def note(self, key: str, text: str) -> None:
        """Record an open choice in words."""
        assumption = ASSUMPTIONS[key]
        self._record[f"{assumption.id}/{key}"] = f"{text}. Checked by: {assumption.check}"


def _by_number(item: tuple[str, str]) -> tuple[int, str]:
    number, key = item[0].split("/", 1)
    return int(number[1:]), key
