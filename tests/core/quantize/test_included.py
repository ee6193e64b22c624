"""The lm head and the drafter: left alone unless they are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ml4core.models.checkpoint import Checkpoint
from ml4core.models.dspark import with_drafter
from ml4core.models.dspark_weights import validate_draft
from ml4core.models.embedded import embedded_folder
from ml4core.models.quantize_options import QuantizeOptions
from ml4core.models.tensors import load_model_spec, validate

HEAD = "output.weight"
DRAFT = "mtp_dspark."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model in bf16: it has both parts."""
    from ml4core.models.quantize import quantize

    folder = tmp_path_factory.mktemp("tiny") / "bf16"
    quantize(embedded_folder(), folder, QuantizeOptions("bf16"))
    return folder


def dtypes(folder: Path) -> dict[str, str]:
    return {name: info.dtype for name, info in Checkpoint.open(folder).tensors.items()}


def test_bf16_decodes_both(tiny: Path) -> None:
    found = dtypes(tiny)
    assert found[HEAD] == "BF16"
    assert {t for name, t in found.items() if name.startswith(DRAFT)} == {"BF16", "F32"}


def test_both_stay_as_they_are(tiny: Path, convert: Any) -> None:
    found = dtypes(convert(tiny, to="fp8_block"))
    assert found["layers.0.attention.wo.weight"] == "F8_E4M3"
    assert found[HEAD] == "BF16"
    assert "F8_E4M3" not in {t for name, t in found.items() if name.startswith(DRAFT)}


@pytest.mark.parametrize("to", ["fp8_block", "nvfp4", "mxfp4"])
def test_both_are_taken(tiny: Path, convert: Any, to: str) -> None:
    """The same matrices as in the shipped file, and the engine's table of tensors takes them."""
    folder = convert(tiny, to=to, parts="all", include_output=True, include_drafter=True)
    opened = Checkpoint.open(folder)
    spec = load_model_spec(opened)
    assert to in validate(opened, spec).formats
    draft = with_drafter(opened, spec).draft
    assert draft is not None
    assert to in validate_draft(opened, draft).formats
    if to == "fp8_block":
        assert dtypes(folder) == dtypes(embedded_folder())


def test_one_of_them(tiny: Path, convert: Any) -> None:
    head = dtypes(convert(tiny, "head", to="fp8_block", include_output=True))
    drafter = dtypes(convert(tiny, "drafter", to="fp8_block", include_drafter=True))
    wo = f"{DRAFT}layers.0.attention.wo.weight"
    assert (head[HEAD], head[wo]) == ("F8_E4M3", "BF16")
    assert (drafter[HEAD], drafter[wo]) == ("BF16", "F8_E4M3")
    assert drafter[f"{DRAFT}markov_head.w1.weight"] == "BF16"  # a table of rows, no product


def test_they_follow_the_rest(tiny: Path, convert: Any) -> None:
    found = dtypes(convert(tiny, to="nvfp4", rest="fp8_block", include_output=True))
    assert found[HEAD] == found["layers.1.attention.wo.weight"] == "F8_E4M3"
    assert found["layers.1.experts.0.w1.weight_packed"] == "U8"


def test_where_nothing_would_be_taken_it_is_refused() -> None:
    with pytest.raises(ValueError, match="give parts 'all', or another rest"):
        QuantizeOptions("nvfp4", include_output=True)
    with pytest.raises(ValueError, match="give parts 'all', or another rest"):
        QuantizeOptions("mxfp4", include_drafter=True)
