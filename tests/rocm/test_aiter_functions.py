"""What adapters ask of AITER's functions, release by release."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch

from ml4core_rocm import aiter_functions

from .fake_aiter import RELEASES, install


@pytest.mark.parametrize("release", RELEASES)
def test_releases_that_fit_are_taken_and_others_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, release: str
) -> None:
    install(monkeypatch, release)
    reasons = aiter_functions.refusals(aiter_functions.FUNCTIONS)
    if release == "0.1.18":
        assert [reason.reason for reason in reasons] == [
            f"aiter 0.1.18: top_k_per_row_{kind} takes no argument 'stable'"
            for kind in ("prefill", "decode")
        ]
        assert "0.1.20" in reasons[0].remedy
    else:
        assert reasons == ()


def test_what_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """B124: what the library has is looked at, not what its name or version promises."""
    (reason,) = aiter_functions.refusals(["mla_decode_fwd"])
    assert reason.reason == "the library aiter is not installed"
    install(monkeypatch)
    import aiter.mla

    monkeypatch.delattr(aiter.mla, "mla_decode_fwd")
    (reason,) = aiter_functions.refusals(["mla_decode_fwd"])
    assert reason.reason == "aiter 0.1.21: aiter.mla has no mla_decode_fwd"
    monkeypatch.setitem(sys.modules, "aiter.mla", None)
    (reason,) = aiter_functions.refusals(["mla_decode_fwd"])
    assert "aiter.mla can't be imported" in reason.reason


NORM = "rmsnorm2d_fwd(Tensor input, Tensor weight, float epsilon, SymInt sensitive=0) -> Tensor"


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        (NORM, ""),
        (NORM.replace("(", "(Tensor dummy, ", 1), ""),
        (NORM.replace("input", "x"), "rmsnorm2d_fwd takes x in place 0, where input is given"),
        ("another(Tensor input) -> Tensor", "rmsnorm2d_fwd doesn't tell what it takes"),
    ],
)
def test_functions_behind_torch_ops_are_told_by_their_schema(
    monkeypatch: pytest.MonkeyPatch, schema: str, fault: str
) -> None:
    """The library wraps its norms and products so: their own signature is (*args, **kwargs)."""
    install(monkeypatch)
    import aiter

    monkeypatch.setattr(aiter, "rmsnorm2d_fwd", lambda *args, **kwargs: None)
    with torch.library._scoped_library("aiter", "FRAGMENT") as library:
        library.define(schema)
        found = aiter_functions.refusals(["rmsnorm2d_fwd"])
    assert [one.reason for one in found] == ([f"aiter 0.1.21: {fault}"] if fault else [])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("input weight epsilon", ""),
        ("input weight epsilon extra=1", ""),
        ("weight input epsilon", "takes weight in place 0, where input is given"),
        ("input weight", "takes nothing in place 2, where epsilon is given"),
        ("input weight epsilon extra", "needs an argument 'extra', which is not known here"),
    ],
)
def test_order_and_names_are_compared(text: str, fault: str) -> None:
    parameters = [
        inspect.Parameter(
            word.partition("=")[0],
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=1 if "=" in word else inspect.Parameter.empty,
        )
        for word in text.split()
    ]
    function = aiter_functions.FUNCTIONS["rmsnorm2d_fwd"]
    found = aiter_functions.mismatch(function, inspect.Signature(parameters))
    assert found == (f"rmsnorm2d_fwd {fault}" if fault else "")
