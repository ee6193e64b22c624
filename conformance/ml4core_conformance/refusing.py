"""UNSUPPORTED is proven: a deployment that needs what is undeclared must be refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ml4core.api import Refused
from ml4core_conformance.check import CheckFailed

if TYPE_CHECKING:
    from ml4core_conformance.subject import Subject

_SIZES: Mapping[str, Mapping[str, Any]] = {
    "parallel:tp": {"tensor_parallel_size": 2},
    "parallel:pp": {"pipeline_parallel_size": 2},
    "parallel:dp": {"data_parallel_size": 2},
    "parallel:dcp": {"decode_context_parallel_size": 2, "tensor_parallel_size": 2},
    "parallel:pcp": {"prefill_context_parallel_size": 2},
    "parallel:ep": {"enable_expert_parallel": True, "tensor_parallel_size": 2},
    "parallel:multi_node": {"nnodes": 2},
    "spec:dspark": {"speculative_config": {"method": "dspark", "num_speculative_tokens": 3}},
    "act:fp32": {"dtype": "float32"},
    "act:bf16": {"dtype": "bfloat16"},
}


def fields(words: Iterable[str]) -> dict[str, Any]:
    """Fields of a ``Deployment`` that needs these words, as the engine would fill them."""
    words = sorted(words)
    changes: dict[str, Any] = {"needs": frozenset(words)}
    formats = {word.partition(":")[2] for word in words if word.startswith("weights:")}
    if formats:
        changes["weight_formats"] = frozenset(formats)
    for word in words:
        prefix, _, name = word.partition(":")
        if prefix in ("kv", "index"):
            changes[f"{prefix}_layout"] = name
        changes |= _SIZES.get(word, {})
    return changes


def prove_refusal(subject: Subject, missing: Iterable[str]) -> str:
    """The refusal of a deployment that needs the words. Raises ``CheckFailed`` if the backend
    opens it, or if its refusal leaves a word out.
    """
    missing = sorted(missing)
    deployment = subject.deployment(**fields(missing))
    try:
        session = subject.backend.open(deployment)
    except Refused as refused:
        text = "\n".join(f"{each.subject} {each.reason}" for each in refused.refusals)
        unnamed = [word for word in missing if not _names(text, word)]
        if unnamed:
            raise CheckFailed(
                f"silent refusal: a deployment that needs {', '.join(missing)} is refused, but no "
                f"reason names {', '.join(unnamed)}; the reasons are: {refused}"
            ) from None
        return "; ".join(
            str(each)
            for each in refused.refusals
            if any(_names(f"{each.subject} {each.reason}", word) for word in missing)
        )
    session.close()
    raise CheckFailed(
        f"silent support: {', '.join(missing)} is not declared, yet a deployment that needs it "
        "opens; declare it, or refuse it (ml4core.api.refuse_missing does)"
    )


def _names(text: str, word: str) -> bool:
    return re.search(rf"(?<![\w:/.-]){re.escape(word)}(?![\w:/-])", text) is not None
