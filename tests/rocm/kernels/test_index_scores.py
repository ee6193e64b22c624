"""Scores of the indexer: what codes meet in, by the sums of an architecture's matrix units."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ml4core_conformance.case import OpCase
from ml4core_conformance.cases import cases_of
from ml4core_conformance.subject import Subject
from ml4core_triton.kernels import score_keys
from ml4core_triton.kernels.target import Target, ahead

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.runtime.interpreter"),
]

CASES = [
    case
    for case in cases_of("indexer_logits")
    if case.variant in ("tiled16_f32+bf16", "planar_f32+fp32")
    and case.name in ("ragged", "negative", "mixed-zero")
]

COMPILE = """\
import re
from triton.backends.compiler import GPUTarget
from ml4core_rocm.aot_cases import kernel, keys_of, paged, scored
from ml4core_triton import aot
from ml4core_triton.aot_cases import case
from ml4core_triton.kernels.target import Target, ahead

for layout in ("tiled16_f32", "planar_f32"):
    for rows in (1, 4):
        given = (*scored(8 * rows, 32), keys_of(layout), *paged(8, rows))
        one = case("scores", kernel("indexer_logits"), *given)
        for launch in aot.launches(one, ahead(Target("sm_90", 132)), near=False):
            ptx = aot.compiled(launch, GPUTarget("cuda", 90, 32), near=False).asm["ptx"]
            print(*re.findall(r"(?:wgmma|mma)\\.\\S+\\.f32\\S+", ptx), sep="\\n")
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="launches there are for that GPU")
@pytest.mark.parametrize(
    ("arch", "case"),
    [(arch, CASES[0]) for arch in ("gfx950", "gfx942")] + [("sm_90", case) for case in CASES],
    ids=lambda value: value.id if isinstance(value, OpCase) else value,
)
def test_codes_meet_as_they_are_where_sums_are_exact(
    arch: str,
    case: OpCase,
    conforms: Callable[[OpCase], None],
    subjects: Callable[[str], Subject],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other form, in float16, conforms too; gfx950's is judged on every case elsewhere."""
    forms: set[bool] = set()
    scores = score_keys.scores

    def noted(*args: Any, codes: bool, **named: Any) -> Any:
        forms.add(codes)
        return scores(*args, codes=codes, **named)

    monkeypatch.setattr(score_keys, "scores", noted)
    monkeypatch.setattr(subjects("gfx950"), "_evaluations", {})  # those of other forms are kept
    with ahead(Target(arch, 8)):
        conforms(case)
    assert len(CASES) == 6
    assert forms == {arch == "gfx950"}


def test_sources_for_hopper_have_no_fp8_products(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = done.stdout.split()
    assert len(found) >= 4, "a product in each of the four"
    assert {name.partition(".f32")[2] for name in found} == {".f16.f16"}, found
