"""Muon for matrices, AdamW for the rest, and the rate over a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Coefficients of the quintic iteration that drives singular values to about one.
_NEWTON = (3.4445, -4.7750, 2.0315)
_STEPS = 5


def orthogonalised(x: Tensor) -> Tensor:
    """The nearest matrices with equal singular values, about; x [n, rows, columns]."""
    a, b, c = _NEWTON
    tall = x.shape[-2] > x.shape[-1]
    y = x.transpose(-1, -2) if tall else x
    y = y.bfloat16() if x.is_cuda else y.float()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_STEPS):
        square = y @ y.transpose(-1, -2)
        polynomial = torch.baddbmm(square, square, square, beta=b, alpha=c)
        y = torch.baddbmm(y, polynomial, y, beta=a)
    return (y.transpose(-1, -2) if tall else y).to(x.dtype)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised. Matrices of one shape are worked on together.

    A parameter of three dimensions is a stack of matrices.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            list(params), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    shapes[p.shape[-2:]].append(p)
            for shape, params in shapes.items():
                buffers = [self._buffer(p) for p in params]
                grads = [p.grad for p in params if p.grad is not None]
                torch._foreach_lerp_(buffers, grads, 1 - momentum)
                ahead = torch._foreach_lerp(grads, buffers, momentum)
                stacked = torch.cat([g.reshape(-1, *shape) for g in ahead])
                update = orthogonalised(stacked)
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                torch._foreach_mul_(params, 1 - rate * group["weight_decay"])
                counts = [p.numel() // shape.numel() for p in params]
                parts = [
                    part.view_as(p) for part, p in zip(update.split(counts), params, strict=True)
                ]
                torch._foreach_add_(params, parts, alpha=-rate * scale)

    def _buffer(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        buffer: Tensor = state["momentum"]
        return buffer


class Optimizers:
    """Both optimizers of a run. `factor` scales every rate."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        self.rates = [[group["lr"] for group in part.param_groups] for part in parts]

    @property
    def params(self) -> list[nn.Parameter]:
        return [p for part in self.parts for group in part.param_groups for p in group["params"]]

    def step(self, factor: float) -> None:
        for part, rates in zip(self.parts, self.rates, strict=True):
            for group, rate in zip(part.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


EMBEDDING_RATE = 6e-3
OUTPUT_RATE = 3e-3
VECTOR_RATE = 3e-3
FREQUENCY_RATE = 1e-4
"""Small: a multiplier of the fastest frequency turns position 2,048 by 2,048 times its change."""
MATRIX_RATE = 0.02
MATRIX_DECAY = 0.04

_TABLES = {
    "embedding": EMBEDDING_RATE,
    "output": OUTPUT_RATE,
    "rope_freqs": FREQUENCY_RATE,
    "markov_w1": EMBEDDING_RATE,
    "markov_w2": OUTPUT_RATE,
    "mask_embeddings": EMBEDDING_RATE,
}


def make_optimizers(
    named: Iterable[tuple[str, nn.Parameter]],
    scale: float = 1.0,
    weight_decay: float = MATRIX_DECAY,
) -> Optimizers:
    """Muon for what multiplies hidden states, AdamW for tables, vectors and the router.

    `scale` multiplies all rates; `weight_decay` is that of matrices.
    """
    matrices: list[nn.Parameter] = []
    others: dict[float, list[nn.Parameter]] = defaultdict(list)
    for name, p in named:
        leaf = name.rsplit(".", 1)[-1]
        if leaf in _TABLES:
            others[_TABLES[leaf]].append(p)
        elif p.ndim < 2 or leaf in ("gate", "weights_proj"):
            others[VECTOR_RATE].append(p)
        else:
            matrices.append(p)
    adam = torch.optim.AdamW(
        [{"params": params, "lr": rate * scale} for rate, params in others.items()],
        betas=(0.9, 0.95),
        eps=1e-10,
        weight_decay=0.0,
        fused=any(p.is_cuda for params in others.values() for p in params),
    )
    muon = Muon(matrices, MATRIX_RATE * scale, 0.95, weight_decay)
    return Optimizers(adam, muon)


def rate_factor(step: int, steps: int, warm_up: int, cooldown: int) -> float:
    """Up over `warm_up` steps, then one, then down to zero over the last `cooldown`."""
    rise = min(1.0, (step + 1) / max(1, warm_up))
    fall = min(1.0, (steps - step) / max(1, cooldown))
    return min(rise, fall)
