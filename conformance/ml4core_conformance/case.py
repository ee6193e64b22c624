"""The input of an op's check as data: how to make the arguments, and which corners they show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ml4core_conformance.draw import Draw

Arguments = dict[str, Any]
"""Arguments of an op by the names of its contract: CPU tensors, ``Weight``s of CPU tensors, plain
values, and a ``Pages`` where the contract says ``KVCache``.
"""


@dataclass(frozen=True)
class Pages:
    """A cache before a session has allocated it.

    Attributes:
        layout: id of the layout: of ``ml4core.api.known_layouts`` at the published widths (latent
            512, rope 64, index key 128), or a private one of the session.
        block_size: tokens a page.
        parts: bytes of each part as CPU tensors of the layout's shapes: ``[blocks, ...]``.
        scale: [1] fp32 where the layout has one scale for all.
        page_stride: with N > 1 the cache is every N-th page of a larger allocation, so that pages
            are strided.
        role: ``latent`` or ``index``: both have a layout called ``fp32``.
    """

    layout: str
    block_size: int
    parts: tuple[Any, ...]
    scale: Any = None
    page_stride: int = 1
    role: Literal["latent", "index"] = "latent"


@dataclass(frozen=True)
class OpCase:
    """One input of one op.

    Attributes:
        op: a name of ``ml4core.api.OPS``.
        variant: what is judged apart and needs the same capabilities, e.g. ``fp8_ds_mla`` or
            ``bf16``. Checks are ``family[op/variant]``.
        name: unique among the op's variant.
        make: arguments of a seed; the same seed gives the same.
        corners: words of ``OPS[op].corners`` that this case shows.
        requires: capability words beyond ``op:<op>``.
        small: quick enough for the self-test.
        options: facts for the oracle, e.g. a declared compute variant.
        bugs: ids of known public faults that it guards against.
        limits: by key of ``Capabilities.limits``: what it asks for. A backend that declares less
            isn't judged by it.
    """

    op: str
    variant: str
    name: str
    make: Callable[[Draw], Arguments]
    corners: frozenset[str] = frozenset()
    requires: frozenset[str] = frozenset()
    small: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    bugs: tuple[str, ...] = ()
    limits: Mapping[str, int] = field(default_factory=dict)

    def within(self, limits: Mapping[str, int]) -> bool:
        """Whether a backend of these declared limits has to serve it."""
        return all(size <= limits.get(name, size) for name, size in self.limits.items())

    @property
    def id(self) -> str:
        return f"{self.op}/{self.variant}/{self.name}"

    def arguments(self, seed: int, slow: bool = False) -> Arguments:
        """``slow``: fewer rows, where they are draws of one law."""
        return self.make(Draw(seed, self.id, slow))
