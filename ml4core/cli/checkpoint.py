"""``ml4 checkpoint``: makes checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ml4core.cli import output
from ml4core.models.errors import CheckpointError
from ml4core.models.seeded_config import SeededFormat


def build_app() -> typer.Typer:
    app = typer.Typer(help="Make checkpoints.", no_args_is_help=True)
    app.callback()(lambda: None)  # keeps `make` a sub-command, the only one as yet
    app.command("make")(make)
    return app


def make(
    folder: Annotated[Path, typer.Argument(help="Where to write.", metavar="FOLDER")],
    seed: Annotated[int, typer.Option(help="Of the weights.", min=0, max=2**63 - 1)] = 0,
    format: Annotated[
        SeededFormat,
        typer.Option(help="Of the matrices; four bits are of routed experts, FP8 is the rest."),
    ] = "bf16",
    if_missing: Annotated[
        bool,
        typer.Option(
            "--if-missing",
            help="Keep a complete checkpoint that is there, whatever its seed and format.",
        ),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
) -> None:
    """Write a small model with seeded random weights and a tokenizer. Same seed, same bytes.

    A run that is stopped leaves what was there before. After one that is killed, --overwrite clears
    what it left.
    """
    from ml4core.models.checkpoint_writer import content_of
    from ml4core.models.seeded import make_seeded

    occupied = content_of(folder) if folder.is_dir() else ""
    if occupied and if_missing:
        try:
            _check_complete(folder)
        except CheckpointError as error:
            if not overwrite:
                raise CheckpointError(f"{error}. --overwrite makes it anew") from error
        else:
            output.note(f"{folder} is complete")
            return
    elif occupied and not overwrite:
        ways = "--if-missing keeps a complete checkpoint, --overwrite replaces it"
        raise CheckpointError(f"{occupied}; {ways}")
    with output.busy(f"writing {folder}"):
        make_seeded(folder, seed=seed, format=format, overwrite=overwrite)
    output.note(f"wrote {folder}")


def _check_complete(folder: Path) -> None:
    """Raises CheckpointError unless all tensors of the model are there, and a tokenizer fits."""
    from ml4core.models.checkpoint import Checkpoint
    from ml4core.models.tensors import load_model_spec, validate
    from ml4core.serving.tokenizer import Tokenizer, find_tokenizer

    opened = Checkpoint.open(folder)
    spec = load_model_spec(opened)
    validate(opened, spec)
    Tokenizer.load(find_tokenizer(folder)).check_vocab(spec.vocab_size)
