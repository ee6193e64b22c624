"""``ml4 quantize``: a checkpoint in another number format."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ml4core.cli import output
from ml4core.cli.exits import UsageError
from ml4core.cli.signals import Terminated
from ml4core.models.quantize_options import (
    DEFAULT_PARTS,
    MXFP4Rule,
    NVFP4Form,
    QuantizeOptions,
    Rest,
    Target,
)

if TYPE_CHECKING:
    from ml4core.models.quantize import QuantizeReport


def quantize(
    source: Annotated[
        Path, typer.Argument(help="A checkpoint's folder, or ml4-tiny.", metavar="SOURCE")
    ],
    target: Annotated[Path, typer.Argument(help="A new folder.", metavar="TARGET")],
    to: Annotated[
        Target,
        typer.Option("--to", help="The format of the converted matrices."),
    ],
    nvfp4_form: Annotated[
        NVFP4Form | None,
        typer.Option(
            help="Whose names and global scale NVFP4 has. By default compressed-tensors'."
        ),
    ] = None,
    mxfp4_rule: Annotated[
        MXFP4Rule | None,
        typer.Option(help="How MXFP4 finds a group's scale. By default even, as Quark."),
    ] = None,
    experts_only: Annotated[
        bool | None,
        typer.Option(
            "--experts-only/--all",
            help="Convert routed experts only, or all the decoder's matrices but embeddings, lm "
            "head, router and the indexer's weights_proj. By default experts for nvfp4 and mxfp4, "
            "all for fp8_block and bf16.",
        ),
    ] = None,
    rest: Annotated[
        Rest,
        typer.Option(help="What becomes of the other matrices, if only experts are converted."),
    ] = "keep",
    include_output: Annotated[
        bool,
        typer.Option("--include-output", help="Take the lm head for one of the decoder's too."),
    ] = False,
    include_drafter: Annotated[
        bool,
        typer.Option("--include-drafter", help="Take the drafter's matrices for such ones too."),
    ] = False,
    max_shard_bytes: Annotated[
        int | None,
        typer.Option(
            help="Bytes of one file, which a stopped run may have to do again. By default 5e9.",
            min=1,
        ),
    ] = None,
) -> None:
    """Convert a checkpoint between BF16, FP8 in 128 x 128 blocks, NVFP4 and MXFP4.

    What is quantised is decoded to bf16 first. Until it is whole, TARGET is TARGET.partial; after
    an interruption the same command goes on.
    """
    from ml4core.models.embedded import local_checkpoint
    from ml4core.models.quantize import quantize as convert
    from ml4core.models.staged_folder import staging_of

    for flag, value, format in (
        ("--nvfp4-form", nvfp4_form, "nvfp4"),
        ("--mxfp4-rule", mxfp4_rule, "mxfp4"),
    ):
        if value is not None and to != format:
            raise UsageError(f"{flag} {value}: for --to {format} only, not {to}")
    parts = DEFAULT_PARTS[to] if experts_only is None else "experts" if experts_only else "all"
    if rest != "keep" and parts == "all":
        raise UsageError(f"--rest {rest}: all matrices are converted; --experts-only leaves a rest")
    for flag, on in (("output", include_output), ("drafter", include_drafter)):
        if on and parts == "experts" and rest == "keep":
            raise UsageError(
                f"--include-{flag}: only experts are converted; works: with --all, or --rest"
            )
    options = QuantizeOptions(
        to=to,
        nvfp4_form=nvfp4_form or "compressed-tensors",
        mxfp4_rule=mxfp4_rule or "even",
        parts=parts,
        rest=rest,
        include_output=include_output,
        include_drafter=include_drafter,
        **({} if max_shard_bytes is None else {"max_shard_bytes": max_shard_bytes}),
    )
    source, target = local_checkpoint(source), target.expanduser()
    try:
        with output.progress_bar(f"quantizing to {to}") as progress:
            report = convert(source, target, options, progress)
    except (KeyboardInterrupt, Terminated):
        if staging_of(target.resolve()).exists():
            output.note(f"{staging_of(target)} holds what is done; the same command goes on")
        raise
    output.note(_text(report))


def _text(report: QuantizeReport) -> str:
    lines = [f"wrote {report.target}: {report.files} files, {report.nbytes:,} bytes"]
    if report.resumed:
        lines.append(f"{report.resumed} of the files were there from an earlier run")
    for (before, after), count in sorted(report.matrices.items()):
        change = f"{before} as they were" if before == after else f"{before} -> {after}"
        lines.append(f"{count:,} matrices {change}")
    lines += [f"note: {note}" for note in report.notes]
    return "\n".join(map(output.printable, lines))
