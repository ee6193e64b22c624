"""What a conversion between number formats is asked to do. Imports nothing heavy: commands need
the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from ml4core.models.checkpoint_files import DEFAULT_SHARD_BYTES

Target = Literal["bf16", "fp8_block", "nvfp4", "mxfp4"]
NVFP4Form = Literal["compressed-tensors", "modelopt"]
MXFP4Rule = Literal["even", "floor", "roundup", "ceil"]
Parts = Literal["experts", "all"]
Rest = Literal["keep", "bf16", "fp8_block"]

DEFAULT_PARTS: Mapping[str, Parts] = MappingProxyType(
    {"bf16": "all", "fp8_block": "all", "nvfp4": "experts", "mxfp4": "experts"}
)


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """A conversion. Raises ValueError for values that are unknown or contradict each other.

    Attributes:
        to: the format of the converted matrices.
        nvfp4_form: names and global scale of NVFP4.
        mxfp4_rule: of `ml4core.formats.mxfp4.RULES`.
        parts: `experts`, the routed ones, or `all`: every matrix of the decoder but embeddings,
            lm head, router and the indexer's weights_proj. With `bf16`, `all` also decodes
            whatever else is quantised. None: the usual one for `to`.
        rest: what becomes of the decoder's other matrices when only experts are converted.
        include_output, include_drafter: take the lm head, and the drafter's matrices, for matrices
            of the decoder. Left out, they stay as they are.
        max_shard_bytes: data of one file; also what an interrupted run may have to do again.
    """

    to: Target
    nvfp4_form: NVFP4Form = "compressed-tensors"
    mxfp4_rule: MXFP4Rule = "even"
    parts: Parts | None = None
    rest: Rest = "keep"
    include_output: bool = False
    include_drafter: bool = False
    max_shard_bytes: int = DEFAULT_SHARD_BYTES

    def __post_init__(self) -> None:
        for name, value, known in (
            ("to", self.to, get_args(Target)),
            ("nvfp4_form", self.nvfp4_form, get_args(NVFP4Form)),
            ("mxfp4_rule", self.mxfp4_rule, get_args(MXFP4Rule)),
            ("parts", self.parts, (None, *get_args(Parts))),
            ("rest", self.rest, get_args(Rest)),
        ):
            if value not in known:
                raise ValueError(f"{name} {value!r}; known are {', '.join(map(str, known))}")
        if self.rest != "keep" and self.chosen == "all":
            raise ValueError(
                f"rest {self.rest!r}: parts 'all' leaves no rest; give parts 'experts', or leave "
                "rest out"
            )
        included = self.include_output or self.include_drafter
        if included and self.chosen == "experts" and self.rest == "keep":
            raise ValueError(
                "include_output, include_drafter: parts 'experts' with rest 'keep' leave them as "
                "they are; give parts 'all', or another rest"
            )
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes is {self.max_shard_bytes}; it must be 1 or more")

    @property
    def chosen(self) -> Parts:
        return self.parts or DEFAULT_PARTS[self.to]

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of `Group` that are converted, or are the rest."""
        added = {"output": self.include_output, "drafter": self.include_drafter}
        return frozenset({"experts", "decoder", *(kind for kind, on in added.items() if on)})

    def facts(self) -> dict[str, Any]:
        """All that decides about the result, as JSON."""
        return {**asdict(self), "parts": self.chosen}
