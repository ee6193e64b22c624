"""Kernels interpreted by XLA on the host, and how results are held against the suite's oracle."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from ml4core.api import Device, ModelSpec
from ml4core_conformance import compare
from ml4core_conformance.case import OpCase, Pages
from ml4core_conformance.oracle import oracle
from ml4core_conformance.oracle.expected import Exact, Float, Selected
from ml4core_conformance.published import published_model
from ml4core_conformance.selection import selected
from ml4core_conformance.subject import Subject
from ml4core_conformance.tolerances import tolerance
from ml4core_tpu.bridge import host_environment
from ml4core_tpu.layouts import LANE33, TILES, lane33_layout, tiles_layout

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:  # for tools
    sys.path.insert(0, str(ROOT))

host_environment()

collect_ignore_glob: list[str] = []
if find_spec("jax") is None and not os.environ.get("CI"):
    collect_ignore_glob.append("kernels/*")

DEVICE = Device("interpreted", "XLA on the host", "tpu7x", "cpu")


def pytest_report_header() -> str:
    return (
        ""
        if find_spec("jax")
        else "tests/tpu/kernels: left out, as there is no jax: pip install jax"
    )


@pytest.fixture(scope="session")
def device() -> Device:
    return DEVICE


@pytest.fixture(scope="session")
def published() -> ModelSpec:
    """The published model, of 72 layers."""
    return published_model()


@pytest.fixture(scope="session")
def subject() -> Iterator[Subject]:
    from ml4core_tpu.backend import TpuBackend

    found = Subject(TpuBackend(), DEVICE, options={"device": "interpreted"})
    yield found
    found.close()


def retiled(cache: Pages) -> Pages:
    """The same codes in the layout of TPUs: of latents in ``e4m3`` rows, or of index keys in
    ``planar_ue8m0x4``. Poisoned bytes stay poison.
    """
    blocks, size = cache.parts[0].shape[0], cache.block_size
    if cache.role == "latent":
        codes = cache.parts[0].reshape(blocks, size, -1)
        tail = codes.new_zeros(blocks, size, 128)
        tail[..., :64] = codes[..., 512:]
        return replace(cache, layout=TILES, parts=(codes[..., :512].contiguous(), tail))
    page = cache.parts[0].view(blocks, size * 132)
    keys = page[:, : size * 128].view(blocks, size, 128)
    scale = page[:, size * 128 :].view(blocks, size, 4)[..., :1]
    token = torch.cat((keys, scale, torch.zeros(blocks, size, 3, dtype=torch.uint8)), -1)
    return replace(cache, layout=LANE33, parts=(token.transpose(1, 2).contiguous(),))


@pytest.fixture
def conforms(subject: Subject) -> Callable[[OpCase, bool], None]:
    """Calls the op on a case, of caches in tiles if asked, and holds results against the oracle."""

    def run(case: OpCase, tiled: bool = False) -> None:
        session, ops = subject.session_for(frozenset())
        arguments = case.arguments(0)
        expected = oracle(case.op)(case.options, arguments)
        given = dict(arguments)
        for name, value in arguments.items():
            if isinstance(value, Pages):
                pages = retiled(value) if tiled else value
                layout = tiles_layout() if pages.role == "latent" else lane33_layout()
                cache = session.alloc_kv(layout, pages.parts[0].shape[0], pages.block_size)
                for mine, content in zip(cache.parts, pages.parts, strict=True):
                    mine.copy_(content)
                given[name] = (
                    replace(cache, scale=pages.scale) if pages.scale is not None else cache
                )
        found = ops[case.op](**given)
        results = found if isinstance(found, tuple) else (found,)
        for value, (name, want) in zip(results, expected.results.items(), strict=True):
            if isinstance(want, Float):
                bound = tolerance(case.op, case.variant, want.dtype)
                compare.anomalies(name, value, want, case.id)
                for one in (
                    compare.elements(name, value, want, bound, case.id),
                    *compare.structure(name, value, want, bound, case.id),
                ):
                    assert one.error <= one.bound, f"{one.what} at {one.where}"
            elif isinstance(want, Selected):
                selected(name, value, want, case.id)
            elif isinstance(want, Exact):
                compare.exact(name, value, want, case.id)

    return run
