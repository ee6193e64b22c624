"""Low-bit activations are asked for, never assumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ml4core.api import Refused
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import ArgumentsError, RequestError
from ml4core.engine.llm import open_engine
from ml4core.engine.resolve import needs
from ml4core.models.seeded import make_seeded
from ml4core.registry import select

pytestmark = pytest.mark.usefixtures("probed_once")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeded(tmp_path_factory.mktemp("activations") / "micro", "micro")


def asking(folder: Path, activations: str, dtype: str = "bfloat16") -> EngineArgs:
    config = {"activations": activations}
    return EngineArgs(str(folder), backend="cpu", dtype=dtype, additional_config=config)


def test_what_is_not_asked_for_is_not_needed(folder: Path) -> None:
    engine = open_engine(EngineArgs(str(folder), dtype="bfloat16"), choice=select("cpu"))
    try:
        words = engine.deployment.needs
        assert {word for word in words if word.startswith("act:")} == {"act:bf16"}
    finally:
        engine.close()


@pytest.mark.parametrize("format", ["fp8_block", "fp8_tensor", "mxfp4", "nvfp4"])
def test_a_backend_without_them_refuses_by_their_word(folder: Path, format: str) -> None:
    with pytest.raises(Refused, match=f"act:{format}: needed, and not declared; .* are act:bf16"):
        open_engine(asking(folder, format), choice=select("cpu"))


def test_they_stand_beside_those_that_they_are_made_of(folder: Path) -> None:
    engine = open_engine(EngineArgs(str(folder)), choice=select("cpu"))
    spec = engine.deployment.model
    engine.close()
    args = asking(folder, "fp8_block")
    assert {"act:bf16", "act:fp8_block"} <= needs(spec, args, "bfloat16", "bf16", "fp32", ())


def test_unquantised_inputs_of_another_dtype_are_refused(folder: Path) -> None:
    with pytest.raises(RequestError, match="--dtype bfloat16: inputs in float32 are never"):
        open_engine(asking(folder, "mxfp4", "float32"), choice=select("cpu"))


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ArgumentsError, match="activations: 'int8'; works: fp8_block or fp8_tensor"):
        asking(Path("m"), "int8")
