"""``ml4 rocm``: what can be done for this backend without a GPU."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from ml4core_rocm.devices import SERVED

app = typer.Typer(add_completion=False, help="The AMD backend.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """The AMD backend."""


def _regex(text: str) -> str:
    """``text``, if it can be searched for."""
    try:
        re.compile(text)
    except re.error as error:
        raise typer.BadParameter(f"{text!r} is no regular expression: {error}") from None
    return text


@app.command()
def aot(
    keyword: Annotated[
        str,
        typer.Option("-k", metavar="REGEX", callback=_regex, help="only cases whose name has this"),
    ] = "",
    arch: Annotated[
        list[str] | None, typer.Option(help="gfx950 or gfx942; may be given twice; both if not")
    ] = None,
    triton: Annotated[
        Path | None,
        typer.Option(help="folder of another triton, from `pip install --target`"),
    ] = None,
    model: Annotated[
        bool, typer.Option("--model", help="hot kernels of a step of ML4 beside their floors")
    ] = False,
) -> None:
    """Compile kernels ahead: registers, LDS, spills of vector and scalar registers, scratch memory
    and matrix instructions of each.

    Needs triton, and no GPU. Ends with 1 if a hot kernel spills, computes in the other flavour of
    FP8, or lacks the matrix instruction that it is meant to have.
    """
    archs = sorted(arch or SERVED)
    if unknown := sorted(set(archs) - SERVED):
        raise typer.BadParameter(f"{', '.join(unknown)}; works: {', '.join(sorted(SERVED))}")
    if triton is not None and not (triton / "triton").is_dir():
        raise typer.BadParameter(f"{triton} holds no triton: pip install --target {triton} triton")
    if triton is None and find_spec("triton") is None:
        raise typer.BadParameter("triton is not installed: pip install triton, or --triton FOLDER")
    if model and archs != ["gfx950"] and arch:
        raise typer.BadParameter(
            f"--model has figures of gfx950 alone, and --arch asks for {', '.join(archs)}"
        )
    if model:
        _model(keyword, triton)
    else:
        _judged(keyword, archs, triton)


def _model(keyword: str, triton: Path | None) -> None:
    from ml4core_rocm.aot_processes import model

    typer.echo("MI350X, from the compiled code and published figures; nothing is measured")
    try:
        for line in model("gfx950", keyword, triton):
            typer.echo(line)
    except RuntimeError as error:
        raise typer.BadParameter(str(error)) from error


def _judged(keyword: str, archs: list[str], triton: Path | None) -> None:
    from ml4core_rocm.aot_processes import compiled
    from ml4core_rocm.aot_verdict import foreign, missing, spilling

    found, faults = [], []
    typer.echo(
        f"{'case':46} {'kernel':24} {'arch':6} warps VGPR AGPR    LDS VGPR-spills SGPR-spills "
        "scratch  matrix instructions"
    )
    for each in archs:
        try:
            for one in compiled(each, keyword, triton):
                found.append(one)
                typer.echo(
                    f"{one.case:46} {one.kernel:24} {one.arch:6} {one.warps:5} {one.vgprs:4} "
                    f"{one.agprs:4} {one.lds_bytes:6} {one.vgpr_spills:11} {one.sgpr_spills:11} "
                    f"{one.scratch_bytes:7}  {' '.join(one.matrix)}"
                )
                for fault in filter(None, (spilling(one), foreign(one))):
                    faults.append(f"{one.case}, {one.kernel}, {one.arch}: {fault}")
        except RuntimeError as error:
            raise typer.BadParameter(str(error)) from error
        faults += missing(one for one in found if one.arch == each)
    for fault in faults:
        typer.echo(f"FAULT  {fault}")
    typer.echo(f"{len(found)} kernels compiled; {len(faults)} faults")
    if not found:
        raise typer.BadParameter(f"no case has {keyword!r} in its name")
    if faults:
        raise typer.Exit(1)
