"""Triton's interpreter, told to patch its language once a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ml4core_triton import interpreter

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled here")


@pytest.fixture
def kernels() -> Any:
    from . import nested_kernels

    return nested_kernels


def run(kernels: Any, fail: bool = False) -> torch.Tensor:
    x = torch.arange(24, dtype=torch.float32).reshape(3, 8)
    out = torch.full((3,), -1.0)
    kernels.sums_of_squares[(3,)](x, out, WIDTH=8, FAIL=fail)
    return out


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the functions for which Triton's own patch is made, from here on."""
    from triton.runtime import interpreter as theirs

    found: list[str] = []
    by_itself = getattr(theirs._patch_lang, "__wrapped__", theirs._patch_lang)

    def told(fn: Any) -> Any:
        found.append(fn.__name__)
        return by_itself(fn)

    monkeypatch.setattr(theirs, "_patch_lang", told)
    interpreter.patch_once()
    return found


def test_a_launch_patches_once_however_many_functions_it_calls(
    kernels: Any, patches: list[str]
) -> None:
    run(kernels)  # the first one also patches what the functions of Triton's own library see
    patches.clear()
    assert run(kernels).tolist() == [140.0, 1100.0, 3084.0]
    assert patches == ["sums_of_squares"]


@pytest.mark.parametrize("fail", [False, True])
def test_the_language_is_as_it_was_after_a_launch(kernels: Any, fail: bool) -> None:
    import triton.language as tl

    if fail:
        with pytest.raises(Exception, match="not wanted"):
            run(kernels, fail=True)
    else:
        run(kernels)
    assert tl.core.is_builtin(tl.load)
    assert tl.core.is_builtin(tl.math.exp2)
    assert tl.core.is_builtin(tl.tensor.__add__)


def test_twice_is_once() -> None:
    from triton.runtime import interpreter as theirs

    interpreter.patch_once()
    before = theirs._patch_lang
    interpreter.patch_once()
    assert theirs._patch_lang is before


def test_an_interpreter_of_another_make_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter as theirs

    monkeypatch.delattr(theirs, "_patch_lang")
    interpreter.patch_once()
    assert not hasattr(theirs, "_patch_lang")
