"""``ml4 cuda``: what can be done for this backend without a GPU."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from ml4core_cuda.capabilities import SERVED
from ml4core_cuda.libraries import find_triton
from ml4core_triton.interpreter import is_on

app = typer.Typer(add_completion=False, help="The NVIDIA backend.", no_args_is_help=True)


@app.callback()
def main() -> None:
    """The NVIDIA backend."""


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
        list[str] | None, typer.Option(help="sm_90 or sm_100; may be given twice; both if not")
    ] = None,
) -> None:
    """Compile kernels ahead and print registers, shared memory and spills of each.

    Needs triton, and no GPU. Ends with 1 if a hot kernel spills, or one is too large to be loaded.
    """
    archs = sorted(arch or SERVED)
    if unknown := sorted(set(archs) - SERVED):
        raise typer.BadParameter(f"{', '.join(unknown)}; works: {', '.join(sorted(SERVED))}")
    if missing := find_triton()[1]:
        raise typer.BadParameter("; ".join(map(str, missing)))
    if is_on():
        raise typer.BadParameter("TRITON_INTERPRET is set, and interpreted kernels don't compile")
    from ml4core_cuda.aot import compile_launch, launches
    from ml4core_cuda.aot_suites import all_cases

    faults = count = 0
    typer.echo(f"{'case':58} {'kernel':26} {'arch':7} warps  regs  shared  spills")
    for case in all_cases():
        if not re.search(keyword, case.name):
            continue
        for each in archs:
            for launch in launches(case, each):
                found = compile_launch(case, launch, each)
                count += 1
                faults += bool(found.fault)
                typer.echo(
                    f"{found.case:58} {found.kernel:26} {found.arch:7} {found.warps:5} "
                    f"{found.registers:5} {found.shared_bytes:7} {found.spill_bytes:7}"
                    f"{found.fault and '  FAULT: ' + found.fault}"
                )
    typer.echo(f"{count} kernels compiled; {faults} faults: hot ones that spill, or are too large")
    if not count:
        raise typer.BadParameter(f"no case has {keyword!r} in its name")
    if faults:
        raise typer.Exit(1)
