"""``--speculative-config``: its keys, with vLLM's names, and what a model makes of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from ml4core.api import Capabilities, DraftSpec, Refusal
from ml4core.engine.flag_spec import Check, one_of

FLAG = "--speculative-config"


def _count(value: object) -> str:
    whole = isinstance(value, int) and not isinstance(value, bool)
    return "" if whole and value >= 1 else "a whole number, 1 or above"  # type: ignore[operator]


KEYS: Mapping[str, Check] = MappingProxyType(
    {
        "method": one_of("dspark"),
        "num_speculative_tokens": _count,
        "draft_sample_method": one_of("greedy", "probabilistic"),
        "rejection_sample_method": one_of("standard", "block"),
    }
)
"""Each key with the check of its value."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """How drafts are made and judged.

    Attributes:
        num_speculative_tokens: drafts of a request and step.
        draft_sample_method: ``greedy``: the likeliest; ``probabilistic``: drawn at the request's
            temperature, and judged by the law that they were drawn from.
        rejection_sample_method: ``standard``: each draft by itself; ``block``: as a block, which
            accepts more and has the same law.
    """

    num_speculative_tokens: int
    draft_sample_method: Literal["greedy", "probabilistic"] = "greedy"
    rejection_sample_method: Literal["standard", "block"] = "standard"
    method: Literal["dspark"] = "dspark"

    @property
    def drawn(self) -> bool:
        """Whether drafts are drawn, so that their law counts."""
        return self.draft_sample_method == "probabilistic"

    @property
    def block(self) -> bool:
        return self.rejection_sample_method == "block"

    @property
    def window(self) -> int:
        """Rows of a verify window."""
        return self.num_speculative_tokens + 1

    @property
    def needs(self) -> frozenset[str]:
        """Capability words."""
        words = {f"spec:{self.method}", "stage:draft_block", "stage:verify_and_sample"}
        words |= {"op:verify_draft", "op:window_mla", "op:kv_write", "op:gemm", "op:embed"}
        words |= {"spec:probabilistic_drafts"} if self.drawn else set()
        words |= {"spec:block_verification"} if self.block else set()
        return frozenset(words)


def speculative_config(
    given: Mapping[str, Any], draft: DraftSpec | None
) -> SpeculativeConfig | None:
    """The flag's well-formed values with the drafter's own depth where they state none; None if
    nothing is asked for.
    """
    if not given or draft is None:
        return None
    return SpeculativeConfig(**({"num_speculative_tokens": draft.depth} | dict(given)))


def refusals(
    config: SpeculativeConfig,
    draft: DraftSpec,
    capabilities: Capabilities,
    max_num_batched_tokens: int,
) -> list[Refusal]:
    """What the drafter or the backend can't do, and drafts that no step would have rows for."""
    found, depth = [], config.num_speculative_tokens
    subject = f"{FLAG} num_speculative_tokens {depth}"
    if depth > draft.depth:
        reason = f"the checkpoint's drafter makes {draft.depth} drafts"
        found.append(Refusal("core", subject, reason, f"1 to {draft.depth}"))
    for most, told in (
        (capabilities.limits.get("max_verify_rows"), "the backend declares max_verify_rows"),
        (max_num_batched_tokens, "a step has at most --max-num-batched-tokens"),
    ):
        if most is not None and config.window > most:
            reason = f"a verify window takes {config.window} rows, and {told} {most}"
            works = f"1 to {most - 1}" if most > 1 else f"leave {FLAG} out"
            found.append(Refusal("core", subject, reason, works))
    return found
