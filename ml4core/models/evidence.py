"""What a checkpoint's tensors show about choices that params.json leaves open.

Nothing is judged here: a shape that does not divide shows nothing, and is reported later, when all
tensors are compared with the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from ml4core.models.assumptions import Evidence
from ml4core.models.fused_experts import is_fused, split_shape
from ml4core.models.tensor_names import TensorName, canonical

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name in the checkpoint -> (dtype, shape)."""


class Tensors:
    """Shapes by canonical name, as `naming` gives it; without any, everything is unknown."""

    def __init__(
        self, shapes: Shapes | None, naming: Callable[[str], TensorName | None] = canonical
    ) -> None:
        self.known = shapes is not None
        self._shapes: dict[TensorName, tuple[int, ...]] = {}
        self._stems: set[str] = set()
        for name, (_, shape) in (shapes or {}).items():
            if (key := naming(name)) is not None:
                self._add(key, tuple(shape))

    def _add(self, key: TensorName, shape: tuple[int, ...]) -> None:
        if is_fused(key):
            with suppress(ValueError):
                for name, part, _ in split_shape(key, shape):
                    self._add(name, part)
            return
        self._shapes.setdefault(key, shape)
        self._stems.add(key.stem)

    def has(self, stem: str) -> bool:
        """Whether any tensor has this stem."""
        return stem in self._stems

    def layers_with(self, inner: str) -> frozenset[int]:
        """The layers that have any tensor whose stem goes on with `inner`."""
        split = (stem.split(".", 2) for stem in self._stems if stem.startswith("layers."))
        return frozenset(int(number) for _, number, rest in split if rest.startswith(inner))

    def size(self, stem: str, axis: int = 0, *, parts: int = 1, less: int = 0) -> Evidence | None:
        """A matrix's axis over `parts`, `less` a known share; None if it shows nothing."""
        shape = self._shapes.get(TensorName(stem, "weight"))
        if shape is None or len(shape) != 2 or shape[axis] % parts:
            return None
        value = shape[axis] // parts - less
        return Evidence(value, f"{stem}.weight {list(shape)}") if value > 0 else None

    def presence(self, stem: str, what: Iterable[str]) -> Evidence | None:
        """Whether `stem` exists, told where the tensors are known; `what` must exist to tell."""
        if not self.known or not any(self.has(other) for other in what):
            return None
        return Evidence(self.has(stem), f"{stem} being {'here' if self.has(stem) else 'absent'}")
