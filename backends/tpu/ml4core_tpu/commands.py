"""``ml4 tpu``: what the backend's programs cost, without a TPU."""

from __future__ import annotations

import re
from typing import Annotated

import typer

app = typer.Typer(
    help="The TPU backend: programs compiled ahead of time.",
    no_args_is_help=True,
    add_completion=False,
)


@app.callback()
def main() -> None:
    """The TPU backend."""


@app.command()
def aot(
    topology: Annotated[
        str, typer.Option(help="Slice to compile for, as libtpu calls it.")
    ] = "tpu7x:2x2x1",
    keyword: Annotated[
        str, typer.Option("-k", metavar="REGEX", help="Only cases whose name has this.")
    ] = "",
) -> None:
    """Compile kernels ahead and print seconds, memory, work and its floor of each.

    Needs jax and libtpu, and no TPU; the network is left alone. Ends with 1 if one is refused.
    """
    from ml4core_tpu.aot import HBM_BYTES, Refused, compile_case, devices_of
    from ml4core_tpu.aot_cases import all_cases
    from ml4core_tpu.libraries import find_libtpu, find_runtime

    missing = [*find_runtime()[1], *find_libtpu(())[1]]
    if missing:
        raise typer.BadParameter("; ".join(map(str, missing)))
    try:
        devices = devices_of(topology)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--topology") from None
    typer.echo(f"{topology}: {len(devices)} devices of {devices[0].device_kind}")
    typer.echo(
        f"{'case':38} {'seconds':>7} {'args MiB':>9} {'temp MiB':>9} {'alias MiB':>9} "
        f"{'least MiB':>9} {'GFLOP':>8} {'floor us':>8}"
    )
    refused = count = heavy = 0
    for case in all_cases():
        if not re.search(keyword, case.name):
            continue
        count += 1
        try:
            found = compile_case(case, devices[0])
        except Refused as error:
            refused += 1
            typer.echo(f"{case.name:38} REFUSED {error}")
            continue
        heavy += found.heavy
        too_large = found.hbm > HBM_BYTES
        refused += too_large
        typer.echo(
            f"{case.name:38} {found.seconds:7.2f} {_mib(found.arguments)} "
            f"{_mib(found.temporaries)} {_mib(found.aliased)} {_mib(case.least_bytes)} "
            f"{case.flops / 1e9:8.2f} {case.floor_s * 1e6:8.1f}"
            + (f"  HEAVY: counts{_mib(int(found.counted))} MiB" if found.heavy else "")
            + (f"  FAULT: a device has{_mib(int(HBM_BYTES))} MiB" if too_large else "")
        )
    typer.echo(f"{count} programs; {refused} refused; {heavy} count over 1.5 times their least")
    if not count:
        raise typer.BadParameter(f"no case has {keyword!r} in its name")
    if refused:
        raise typer.Exit(1)


def _mib(size: int) -> str:
    return f"{size / 2**20:9.2f}"
