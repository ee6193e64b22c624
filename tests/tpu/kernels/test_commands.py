"""``ml4 tpu aot`` from its flags to its lines."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from typer.testing import CliRunner, Result

from ml4core_tpu.commands import app

pytestmark = pytest.mark.skipif(
    find_spec("libtpu") is None, reason="there is no libtpu: pip install libtpu==0.0.42.1"
)


def call(*words: str) -> Result:
    return CliRunner().invoke(app, ["aot", *words], env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_a_kernel_is_compiled_and_told_of() -> None:
    found = call("-k", "^router/64 rows$")
    assert found.exit_code == 0, found.output
    head, names, line, tally = found.output.splitlines()
    assert head == "tpu7x:2x2x1: 8 devices of TPU7x"
    assert len(names.split()) > 10
    assert line.startswith("router/64 rows")
    assert tally.startswith("1 programs; 0 refused")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_layer_tells_its_collectives_and_kernels() -> None:
    found = call("--model", "--topology", "tpu7x:2x2x4", "-k", "sharer")
    assert found.exit_code == 0, found.output
    assert "tpu7x:2x2x4: 32 devices" in found.output
    assert "collectives: 2 all-reduce, 1 all-gather, 1 reduce-scatter" in found.output
    assert "sparse_mla" in found.output


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--topology", "v7x:2x2x1"), "knows no slice"),
        (("-k", "nothing like it"), "no case has"),
        (("--model", "-k", "nothing like it"), "no case has"),
        (("--model", "--topology", "v6e:2x2"), "v6e:2x2 has 4 devices; works: a slice of 8"),
        (("-k", "("), "'(' is no regular expression: missing )"),
        (("--model", "-k", "*"), "'*' is no regular expression: nothing to repeat"),
    ],
)
def test_what_can_not_be_is_a_wrong_command_line(words: tuple[str, ...], text: str) -> None:
    found = call(*words)
    assert found.exit_code == 2
    assert text in found.output
