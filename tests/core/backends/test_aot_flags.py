"""Flags of ``ml4 cuda aot`` and ``ml4 rocm aot`` that can't be taken."""

from __future__ import annotations

import importlib

import pytest
from typer.testing import CliRunner


@pytest.mark.parametrize("backend", ["cuda", "rocm"])
def test_what_is_no_regular_expression_is_a_wrong_command_line(backend: str) -> None:
    app = importlib.import_module(f"ml4core_{backend}.commands").app
    done = CliRunner().invoke(app, ["aot", "-k", "("], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert done.exit_code == 2
    assert "'(' is no regular expression: missing )" in done.output
