"""A model with its tokenizer, ready to take text."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ml4core.engine.args import FLAGS, EngineArgs
from ml4core.engine.backend_choice import choose_backend
from ml4core.engine.image_limits import FLAG, image_limit
from ml4core.engine.resolve import step_limits
from ml4core.models.errors import CheckpointError
from ml4core.serving.grammars import LLGrammars
from ml4core.serving.tokenizer import Tokenizer, find_tokenizer

if TYPE_CHECKING:
    from ml4core.api import Capabilities, ModelSpec
    from ml4core.engine.llm import Engine
    from ml4core.engine.trials import Told

MIN_ROOM = 2048
"""Tokens of cache for each sequence that may run, where the context is that long."""


@dataclass(frozen=True)
class Opened:
    """``args``: with the model as a local folder. ``grammars``: those of the engine."""

    args: EngineArgs
    tokenizer: Tokenizer
    engine: Engine
    grammars: LLGrammars


def make_args(model: str, backend: str, flags: dict[str, Any]) -> EngineArgs:
    """Raises ``TypeError`` for a flag that isn't one, ``ArgumentsError`` for all bad values."""
    for name in flags:
        if name not in FLAGS:
            near = difflib.get_close_matches(name, FLAGS, 1)
            hint = f"did you mean {near[0]}?" if near else "see ml4core.engine.args.EngineArgs"
            raise TypeError(f"{name}={flags[name]!r}: no such flag; {hint}")
    return EngineArgs(model, backend=backend, **flags)


def open_tokenizer(args: EngineArgs) -> tuple[EngineArgs, Tokenizer, ModelSpec]:
    """The tokenizer, and the model as a table; ``args`` then name a local folder."""
    from ml4core.models.checkpoint import Checkpoint
    from ml4core.models.hub import resolve_model
    from ml4core.models.tensors import load_model_spec

    folder = resolve_model(args.model, args.revision, args.download_dir)
    spec = load_model_spec(Checkpoint.open(folder))
    tokenizer = Tokenizer.load(find_tokenizer(folder, args.tokenizer))
    tokenizer.check_vocab(spec.vocab_size)
    return dataclasses.replace(args, model=str(folder), revision=None), tokenizer, spec


def check_images(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    """Raises ``CheckpointError`` where images can't be made into what the encoder takes."""
    from ml4core.models.pixtral import vision_spec

    vision = vision_spec(spec.extras, spec.hidden_size)
    if vision is None:
        return  # the engine says so
    cell = tokenizer.image_cell
    if cell != vision.cell_size:
        found = "knows no images" if cell is None else f"has image tokens of {cell} pixels"
        raise CheckpointError(
            f"{tokenizer.path}: {found}; the model's encoder has cells of {vision.cell_size}"
        )
    if find_spec("cv2") is None:
        raise CheckpointError(
            f"{FLAG}: images can't be resized without OpenCV; pip install 'ml4core[serve]'"
        )


def cache_wishes(args: EngineArgs, capabilities: Capabilities, spec: ModelSpec) -> tuple[int, int]:
    """Sequences, and tokens of each, that caches are for where nothing sizes them: one whole
    context, or ``MIN_ROOM`` tokens for each sequence that may run, whichever is more.
    """
    sequences, _ = step_limits(args, capabilities)
    context = args.max_model_len or spec.max_position
    return sequences, min(context, max(MIN_ROOM, -(-context // sequences)))


def open_for_any(args: EngineArgs, starting: Told | None = None, *, serves: bool = True) -> Opened:
    """Opens for requests that are not known yet; ``serves``: see ``open_engine``.

    Without ``kv_cache_memory_bytes`` the caches have what is left of ``gpu_memory_utilization`` on
    a device that tells of its memory, else what ``cache_wishes`` says; sequences share them as they
    need. ``starting``: told how far warming up and capturing is.

    Raises as ``open_engine`` does.
    """
    from ml4core.engine.llm import open_engine  # imports torch

    choice = choose_backend(args, serves=serves)
    args, tokenizer, spec = open_tokenizer(args)
    sequences, tokens_each = cache_wishes(args, choice.capabilities, spec)
    if image_limit(args.limit_mm_per_prompt):
        check_images(tokenizer, spec)
    grammars = LLGrammars(tokenizer)
    engine = open_engine(
        args,
        choice=choice,
        sequences=sequences,
        tokens_each=tokens_each,
        eos_ids=frozenset({tokenizer.eos_id}),
        grammars=grammars,
        fill=True,
        starting=starting,
        serves=serves,
    )
    return Opened(args, tokenizer, engine, grammars)
