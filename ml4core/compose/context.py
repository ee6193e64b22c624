"""What a composition closes over: the layer, the bound ops and the group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ml4core.api import Collectives, LayerSpec, ModelSpec
from ml4core.compose.single_rank import SingleRank

Ops = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class StageContext:
    """Constants of a binding.

    Attributes:
        layer: None for stages of the whole model.
        dtype: of activations and the residual.
        replicas: collectives of the ranks that have the same part of the model in each replica,
            which all have rows of their own; routed experts are shared out over them, too.
        mla_form: ``absorbed``, ``unabsorbed``, or ``auto``: the cheaper one for each piece.
    """

    model: ModelSpec
    layer: LayerSpec | None
    ops: Ops
    collectives: Collectives
    dtype: torch.dtype
    mla_form: str = "auto"
    replicas: Collectives = field(default_factory=SingleRank)

    @property
    def spec(self) -> LayerSpec:
        if self.layer is None:
            raise ValueError("this stage is bound for a layer, but no layer was given")
        return self.layer
