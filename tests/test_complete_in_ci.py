"""Tests skip what they have no library for; continuous integration has all of them."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

LIBRARIES = (
    "cv2",
    "jax",
    "llguidance",
    "openai",
    "opentelemetry.sdk",
    "starlette",
    "transformers",
    "triton",
)


@pytest.mark.skipif("CI" not in os.environ, reason="holds for continuous integration: CI is set")
@pytest.mark.parametrize("name", LIBRARIES)
def test_no_library_is_missing(name: str) -> None:
    assert find_spec(name) is not None, f"{name} is not installed; make .venv/.installed-dev"
