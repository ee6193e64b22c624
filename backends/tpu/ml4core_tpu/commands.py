"""``ml4 tpu``: what the backend's programs cost, without a TPU."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ml4core_tpu.aot import Case, Compiled

app = typer.Typer(
    help="The TPU backend: programs compiled ahead of time.",
    no_args_is_help=True,
    add_completion=False,
)

TENSOR = 8
"""Tensor ranks: the devices of a host."""


@app.callback()
def main() -> None:
    """The TPU backend."""


def _regex(text: str) -> str:
    """``text``, if it can be searched for."""
    try:
        re.compile(text)
    except re.error as error:
        raise typer.BadParameter(f"{text!r} is no regular expression: {error}") from None
    return text


@app.command()
def aot(
    topology: Annotated[
        list[str] | None,
        typer.Option(
            help="Slice to compile for, as libtpu calls it; may be repeated. tpu7x:2x2x1 if none "
            "is given; with --model tpu7x:2x2x4, too."
        ),
    ] = None,
    keyword: Annotated[
        str,
        typer.Option(
            "-k", metavar="REGEX", callback=_regex, help="Only cases whose name has this."
        ),
    ] = "",
    model: Annotated[
        bool,
        typer.Option(
            "--model",
            help="Whole layers of the published model over all devices of the slice: 8 tensor "
            "ranks a host, hosts as data ranks, experts over all. And its encoder of images, on "
            "one of them.",
        ),
    ] = False,
) -> None:
    """Compile kernels ahead and print seconds, memory, work and its floor of each.

    Needs jax and libtpu, and no TPU; the network is left alone. Ends with 1 if one is refused.
    """
    from ml4core_tpu.libraries import find_libtpu, find_runtime

    missing = [*find_runtime()[1], *find_libtpu(())[1]]
    if missing:
        raise typer.BadParameter("; ".join(map(str, missing)))
    slices = topology or ["tpu7x:2x2x1", *(["tpu7x:2x2x4"] if model else [])]
    tallies = [_slice(one, keyword, model) for one in slices]
    if not sum(count for count, _ in tallies):
        raise typer.BadParameter(f"no case has {keyword!r} in its name")
    if any(refused for _, refused in tallies):
        raise typer.Exit(1)


@app.command()
def buckets(
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Rows of a step at most; the backend's default if left out."),
    ] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Requests of a step at most, of one replica.")
    ] = None,
    max_model_len: Annotated[
        int,
        typer.Option(min=1, help="Tokens of a request at most; by default the published context."),
    ] = 1 << 20,
    block_size: Annotated[int | None, typer.Option(min=1, help="Tokens of a page.")] = None,
) -> None:
    """Print the sizes that each device's programs are made for. Needs no TPU.

    Ends with 1 for pages that a session would refuse.
    """
    from ml4core_tpu.backend import TpuBackend
    from ml4core_tpu.capabilities import capabilities
    from ml4core_tpu.sizes import sizes

    defaults = capabilities(TpuBackend.reference_device).defaults
    given = {
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "block_size": block_size,
    }
    rows, requests, page = (value or int(defaults[name]) for name, value in given.items())
    lines = list(sizes(rows, requests, max_model_len, page))
    typer.echo("\n".join(lines))
    if any(line.startswith("REFUSED") for line in lines):
        raise typer.Exit(1)


def _slice(topology: str, keyword: str, model: bool) -> tuple[int, int]:
    """Compiles the cases for one slice; how many, and how many of them were refused."""
    from ml4core_tpu.aot import Refused, devices_of

    try:
        devices = devices_of(topology)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--topology") from None
    if model and len(devices) % TENSOR:
        raise typer.BadParameter(
            f"--model cuts layers over {TENSOR} tensor ranks, and {topology} has {len(devices)} "
            f"devices; works: a slice of {TENSOR} devices, or a multiple, as tpu7x:2x2x1",
            param_hint="--topology",
        )
    typer.echo(f"{topology}: {len(devices)} devices of {devices[0].device_kind}")
    typer.echo(
        f"{'case':38} {'seconds':>7} {'args MiB':>9} {'temp MiB':>9} {'alias MiB':>9} "
        f"{'VMEM MiB':>9} {'SMEM KiB':>9} {'least MiB':>9} {'GFLOP':>8} {'floor us':>8}"
    )
    refused = count = heavy = 0
    for case in _cases(devices, model):
        if not re.search(keyword, case.name):
            continue
        count += 1
        try:
            found = _compiled(case, devices, model)
        except Refused as error:
            refused += 1
            typer.echo(f"{case.name:38} REFUSED {error}")
            continue
        heavy += found.heavy
        refused += found.too_large
        for line in _told(found, model):
            typer.echo(line)
    typer.echo(f"{count} programs; {refused} refused; {heavy} count over 1.5 times their least")
    return count, refused


def _cases(devices: list[Any], model: bool) -> Iterable[Case]:
    if not model:
        from ml4core_tpu.aot_cases import all_cases

        return all_cases()
    from ml4core_tpu.kernels.layer.aot_cases import model_cases
    from ml4core_tpu.kernels.layer.mesh import mesh_of
    from ml4core_tpu.kernels.vision.aot_cases import image_cases

    layers = model_cases(mesh_of(devices, len(devices) // TENSOR, TENSOR))
    return chain(layers, image_cases(devices[0]))


def _compiled(case: Case, devices: list[Any], model: bool) -> Compiled:
    from ml4core_tpu.aot import compile_case, compile_program

    return compile_program(case, case.arguments) if model else compile_case(case, devices[0])


def _told(found: Compiled, model: bool) -> Iterator[str]:
    from ml4core_tpu.backend import HBM_BYTES

    case = found.case
    yield (
        f"{case.name:38} {found.seconds:7.2f} {_mib(found.arguments)} {_mib(found.temporaries)} "
        f"{_mib(found.aliased)} {_mib(found.vmem)} {found.smem / 1024:9.1f} "
        f"{_mib(case.least_bytes)} {case.flops / 1e9:8.2f} {case.floor_s * 1e6:8.1f}"
        + (f"  HEAVY: counts{_mib(int(found.counted))} MiB" if found.heavy else "")
        + (f"  FAULT: a device has{_mib(HBM_BYTES)} MiB" if found.too_large else "")
    )
    if not model:
        return
    collectives = ", ".join(f"{count} {kind}" for kind, count in found.collectives.items())
    yield f"    collectives: {collectives or 'none'}"
    for kernel in found.kernels:
        yield (
            f"    {kernel.name:18} {kernel.programs:8} programs, VMEM {kernel.vmem / 2**20:6.2f} "
            f"MiB, SMEM {kernel.smem / 1024:6.1f} KiB, {kernel.copies} places that copy"
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:9.2f}"
