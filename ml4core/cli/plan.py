"""``ml4 plan``: what fits, with no device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ml4core.cli import output, streams
from ml4core.cli.exits import ERROR
from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import ArgumentsError
from ml4core.engine.switches import with_environment
from ml4core.planning.variants import PUBLISHED, Variant
from ml4core.registry import AUTO

if TYPE_CHECKING:
    from ml4core.planning.model import PlannedModel
    from ml4core.planning.plan import PlanOptions


def plan(
    args: EngineArgs,
    weights: Annotated[
        Variant | None,
        typer.Option(
            help="Form of the weights, where no tensors tell it: FP8 blocks; routed experts in "
            "NVFP4 or MXFP4 and the rest in FP8; or bf16. Default: fp8."
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="A device by name, for its memory.", metavar="NAME")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Memory of one device.", metavar="GIB")
    ] = None,
    reserve: Annotated[
        float | None,
        typer.Option(help="Memory beside weights and caches; default: a formula.", metavar="GIB"),
    ] = None,
    held: Annotated[
        Literal["kept", "decoded"],
        typer.Option(
            help="What the backend holds of quantised matrices: themselves, or their values in "
            "--dtype, as cpu does."
        ),
    ] = "kept",
    context: Annotated[
        list[int] | None,
        typer.Option(help="Count the requests that fit at this length; may be repeated.", min=1),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object.")] = False,
) -> None:
    """Show what fits: weights, cache bytes a token, tokens, requests. Needs no device.

    MODEL: a checkpoint, of which only headers are read, or a params.json. Left out: the published
    shape of Mistral Large 4.
    """
    from ml4core.planning.launch import named_backend
    from ml4core.planning.plan import make_plan
    from ml4core.planning.proposals import propose
    from ml4core.planning.report import to_json

    args = with_environment(args)
    options = _options(device, memory, reserve, held)
    model = _model(args, weights)
    named = named_backend(args, model.spec)
    if named is not None:
        options = replace(options, backend=named.backend, layouts=named.layouts)
    made = make_plan(model, args, options)
    if problems := [
        f"--context: {length} is above the longest context; works: up to {made.max_model_len}"
        for length in context or ()
        if length > made.max_model_len
    ]:
        raise ArgumentsError(problems)
    proposals = propose(made)
    facts = to_json(made, proposals, context or ())
    facts["device"] = device
    if as_json:
        output.write_json(facts)
    else:
        from ml4core.cli.plan_text import text

        output.write(text(facts, streams.results()))
    if named is None and args.backend != AUTO:
        output.note(
            f"note: --backend {args.backend} has no device here that tells its defaults and layouts"
        )
    if not made.fits:
        works = ", or ".join(map(str, proposals)) or "nothing that was tried: other flags together"
        output.note(f"error: does not fit: {made.shortfall}; works: {works}")
        raise typer.Exit(ERROR)


def _options(
    device: str | None, memory: float | None, reserve: float | None, held: str
) -> PlanOptions:
    """Raises ``ArgumentsError`` with all that is wrong."""
    from ml4core.planning.devices import find_device
    from ml4core.planning.plan import PlanOptions

    problems = []
    sizes: dict[str, Any] = {}
    fp8 = PlanOptions.fp8
    if device is not None and memory is not None:
        problems.append(f"--memory: {memory:g} contradicts --device {device}; leave one out")
    elif device is not None:
        try:
            found = find_device(device)
        except ValueError as error:
            problems.append(f"--device: {error}")
        else:
            memory, fp8 = found.memory_gib, found.fp8
    for name, value, least in (("memory", memory, 1 / 2**30), ("reserve", reserve, 0.0)):
        if value is None:
            continue
        if not least <= value <= 2**20:  # False for NaN
            bound = "above 0" if name == "memory" else "0 or above"
            problems.append(f"--{name}: {value:g} is out of range; works: GiB, {bound}")
        else:
            sizes[name] = int(value * 2**30)
    if problems:
        raise ArgumentsError(problems)
    return PlanOptions(decoded=held == "decoded", fp8=fp8, **sizes)


def _model(args: EngineArgs, weights: str | None) -> PlannedModel:
    from ml4core.models.checkpoint import Checkpoint
    from ml4core.models.hub import resolve_model
    from ml4core.planning.model import checkpoint_model, published_model

    if args.model == PUBLISHED:
        return published_model(weights or "fp8")
    path = resolve_model(args.model, args.revision, args.download_dir)
    checkpoint = Checkpoint.open(path, require_tensors=False)
    if weights is not None and checkpoint.tensors:
        raise ArgumentsError(
            [f"--weights: {weights}, but the tensors of {path} tell their formats; leave it out"]
        )
    return checkpoint_model(checkpoint, weights)
