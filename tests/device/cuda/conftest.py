"""Kernels in Triton's interpreter on the host, or on the GPU where there is one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ml4core.api import OPS
from ml4core_conformance import compare
from ml4core_conformance.case import OpCase
from ml4core_conformance.check import Measure
from ml4core_conformance.oracle import oracle
from ml4core_conformance.oracle.expected import Exact, Float, Selected
from ml4core_conformance.placement import on_cpu
from ml4core_conformance.tolerances import tolerance

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read as triton is imported, so before any kernel is


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def judged(device: torch.device) -> Callable[..., None]:
    """Calls an op on a case and holds its results against the oracle."""

    def judge(op: Callable[..., Any], case: OpCase, seed: int = 0) -> None:
        arguments, spec = case.arguments(seed), OPS[case.op]
        given = [_placed(arguments.get(arg.name), device) for arg in spec.args]
        while given and given[-1] is None:
            given.pop()
        named = {"act": case.options["act"]} if "act" in case.options else {}
        returned = op(*given, **named)
        values = (returned,) if len(spec.returns) == 1 else returned
        results = dict(zip((one.name for one in spec.returns), values, strict=True))
        for name, want in oracle(case.op)(case.options, arguments).results.items():
            base, _, part = name.partition(".")
            value = results[base]
            if want is None:
                assert value is None
                continue
            found = on_cpu(value.parts[part] if part else value)
            if isinstance(want, Float):
                _near(name, found, want, case)
            elif isinstance(want, Exact):
                compare.exact(name, found, want, case.id)
            elif isinstance(want, Selected):
                _chosen(found, want)

    return judge


def _placed(value: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return value
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if hasattr(value, "parts"):
        parts = {name: part.to(device) for name, part in value.parts.items()}
        return type(value)(value.format, value.shape, parts)
    return value


def _near(name: str, found: torch.Tensor, want: Float, case: OpCase) -> None:
    assert found.shape == want.value.shape
    assert str(found.dtype) == f"torch.{want.dtype}"
    assert found.is_contiguous()
    bound = tolerance(case.op, case.variant, want.dtype)
    compare.anomalies(name, found, want, case.id)
    measures: list[Measure] = [
        compare.elements(name, found, want, bound, case.id),
        *compare.structure(name, found, want, bound, case.id),
        *compare.bias(name, found, want, bound, case.id),
    ]
    for one in measures:
        assert one.error <= one.bound, f"{one.what} {one.ratio:.3g} of its bound at {one.where}"
    exact = case.options.get("exact", ())
    if exact is True or (exact and name in exact):
        assert torch.equal(found, want.value.to(found.dtype)), f"{name} isn't rounded to nearest"


def _chosen(found: torch.Tensor, want: Selected) -> None:
    assert found.dtype == want.value.dtype
    scores = want.scores.nan_to_num(0.0)
    assert bool(((found >= 0) & (found < scores.shape[-1])).all())
    judged = want.visible > 0
    gaps = (scores.gather(-1, found) - scores.gather(-1, want.value)).abs()
    assert bool((gaps <= want.margin.unsqueeze(-1))[judged].all())
    firm = judged & (want.margin == 0)
    assert torch.equal(found[firm], want.value[firm])
    assert all(len(set(row.tolist())) == row.numel() for row in found)
