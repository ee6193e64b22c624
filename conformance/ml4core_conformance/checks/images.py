"""Images in the whole model: their embeddings stand where their tokens would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ml4core.api import StepPlan, VisionShape, VisionWeights
from ml4core_conformance import tiny
from ml4core_conformance.check import Check
from ml4core_conformance.checks.vision import CELLS, alone, batch
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.stages import EXACT
from ml4core_conformance.oracle.vision import VisionOracle
from ml4core_conformance.rigs import errors
from ml4core_conformance.rigs.passes import FLOOR, oracle_of, smooth
from ml4core_conformance.rigs.plans import Padding, make_plan
from ml4core_conformance.rigs.rig import BF16, REFERENCE, Precision, Rig
from ml4core_conformance.rigs.scenes import global_stage
from ml4core_conformance.subject import Subject

_STEPS = (6, 11, 20, 1, 1, 4)
"""Rows of each step: images begin in one and end in the next, and the last steps have none."""


def checks() -> list[Check]:
    return [
        Check(
            "model.images",
            "model",
            partial(images, precision),
            "Rows that stand for cells of images take the encoder's embeddings, in raster order, "
            "wherever steps cut an image; the logits of all rows are those of the model in fp64. A "
            "second prompt has other images in steps of the same shapes.",
            variant=precision.name,
            requires=precision.requires | {"stage:vision_encoder"},
            unit=f"images/{precision.name}",
        )
        for precision in (REFERENCE, BF16)
    ]


@dataclass(frozen=True)
class _Prompt:
    """Attributes:
    ids: one a row, of image rows too, where it means nothing.
    index: [T] int64, which cell a row stands for; -1 for text.
    """

    ids: list[int]
    index: Tensor


def _prompt(draw: Draw, vocab: int) -> _Prompt:
    """Text, then each image row by row with a token of text behind each row, and text again."""
    index, cell = [-1] * 4, 0
    for rows, columns in CELLS:
        for _ in range(rows):
            index += [*range(cell, cell + columns), -1]
            cell += columns
        index += [-1] * 2
    index += [-1] * max(0, sum(_STEPS) - len(index))
    index = index[: sum(_STEPS)]
    return _Prompt(draw.integers(len(index), high=vocab).tolist(), torch.tensor(index))


def images(precision: Precision, subject: Subject) -> None:
    for seed in subject.seeds:
        model = replace(smooth(), vision=tiny.VISION)
        dtype = getattr(torch, precision.settled(subject)["dtype"])
        rig = Rig(subject, model, tiny.weights(model, seed, dtype), precision)
        dense = tiny.vision_weights(tiny.VISION, seed, dtype)
        prepare = rig.session.prepare_weights
        prepared = VisionWeights(
            prepare(dict(dense.top), None, "vision"),
            tuple(prepare(dict(layer), None, "vision") for layer in dense.layers),
        )
        roundings = (EXACT, rig.rounding)
        encoders = [VisionOracle(tiny.VISION, dense, rounding) for rounding in roundings]
        decoders = [oracle_of(rig, rounding) for rounding in roundings]
        for number in range(2):
            draw = Draw(seed, f"images/{number}")
            given = batch(tiny.VISION, draw)
            _, encode = global_stage(rig, "vision_encoder", VisionShape(len(given[2])))[0]
            with torch.inference_mode():
                cells = encode(prepared, *(one.to(rig.device) for one in given))
            prompt = _prompt(draw, model.vocab_size)
            logits = []
            for encoder, decoder in zip(encoders, decoders, strict=True):
                rows = alone(encoder, *given)
                held = torch.where(
                    (prompt.index >= 0).unsqueeze(-1), rows[prompt.index.clamp(min=0)], torch.nan
                )
                logits.append(decoder.run(prompt.ids, held).logits)
            got = _run(rig, prompt, cells, _STEPS)
            where = f"prompt {number}, steps of {_STEPS} rows"
            errors.judge(subject, "logits", got, logits[0], logits[1], where, floor=FLOOR)


def _run(rig: Rig, prompt: _Prompt, cells: Tensor, steps: Sequence[int]) -> Tensor:
    request, found = rig.book().request(prompt.ids, rig.block_size), []
    for rows in steps:
        padding = Padding(rows=rows + 3) if rows > 1 else Padding()
        plan = make_plan([(request, rows)], rig.block_size, padding=padding, device=rig.device)
        index = prompt.index[request.computed : request.computed + rows]
        found.append(rig.step(_with_images(plan, index, cells)).logits)
        request.computed += rows
    return torch.cat(found)


def _with_images(plan: StepPlan, index: Tensor, cells: Tensor) -> StepPlan:
    """The plan with the embeddings that its rows take, and one row of padding."""
    taken = index[index >= 0]
    if not len(taken):
        return plan
    rows = torch.full((len(plan.token_ids),), -1)
    rows[: len(index)][index >= 0] = torch.arange(len(taken))
    held = cells[taken.to(cells.device)]
    padded = torch.cat((held, torch.full_like(held[:1], torch.nan)))
    return replace(
        plan,
        shape=replace(plan.shape, images=len(padded)),
        image_index=rows.to(cells.device),
        image_embeddings=padded,
    )
