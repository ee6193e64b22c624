"""The stage ``vision_encoder``: images of unlike sizes side by side, with padding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ml4core.api import VisionShape, VisionSpec, VisionWeights
from ml4core_conformance import tiny
from ml4core_conformance.check import Check
from ml4core_conformance.draw import Draw
from ml4core_conformance.oracle.stages import EXACT
from ml4core_conformance.oracle.vision import VisionOracle
from ml4core_conformance.rigs import errors
from ml4core_conformance.rigs.rig import BF16, REFERENCE, Precision, Rig
from ml4core_conformance.rigs.scenes import global_stage
from ml4core_conformance.subject import Subject

SPECS = {
    "merged": tiny.VISION,
    "plain": replace(
        tiny.VISION,
        spatial_merge_size=1,
        patch_merger=False,
        pre_projector_norm=False,
        adapter_bias=False,
    ),
}
CELLS = ((3, 5), (1, 2), (4, 1))
"""Rows and columns of cells of the images."""


def checks() -> list[Check]:
    return [
        Check(
            "stages.vision_encoder",
            "model",
            partial(vision_encoder, name, precision),
            "Embeddings of three images side by side are those of each alone in fp64, in raster "
            "order of cells, and padded cells leave no trace.",
            variant=f"{name}/{precision.name}",
            requires=precision.requires,
            unit=f"vision/{precision.name}",
        )
        for name in SPECS
        for precision in (REFERENCE, BF16)
    ]


def vision_encoder(name: str, precision: Precision, subject: Subject) -> None:
    for seed in subject.seeds:
        spec = SPECS[name]
        model = replace(tiny.model(layers=4), vision=spec)
        dtype = getattr(torch, precision.settled(subject)["dtype"])
        rig = Rig(subject, model, tiny.weights(model, seed, dtype), precision, blocks=2)
        dense = tiny.vision_weights(spec, seed, dtype)
        prepare = rig.session.prepare_weights
        prepared = VisionWeights(
            prepare(dict(dense.top), None, "vision"),
            tuple(prepare(dict(layer), None, "vision") for layer in dense.layers),
        )
        patches, positions, ids = batch(spec, Draw(seed, f"images/{name}"))
        ways = global_stage(rig, "vision_encoder", VisionShape(len(ids)))
        exact, twin = (
            alone(VisionOracle(spec, dense, rounding), patches, positions, ids)
            for rounding in (EXACT, rig.rounding)
        )
        for who, call in ways:
            with torch.inference_mode():
                got = call(
                    prepared,
                    patches.to(rig.device),
                    positions.to(rig.device),
                    ids.to(rig.device),
                ).cpu()
            where = f"{name}, by {who}"
            errors.finite("embeddings of padding", got[len(exact) :], where)
            errors.judge(subject, "embeddings", got[: len(exact)], exact, twin, where, ("cell",))


def batch(spec: VisionSpec, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """Patches, positions and image ids of the images, and three padded cells behind."""
    side = spec.spatial_merge_size
    positions, ids = [], []
    for image, (rows, columns) in enumerate(CELLS):
        for row in range(rows):
            for column in range(columns):
                for i in range(side * side):
                    positions.append((row * side + i // side, column * side + i % side))
                    ids.append(image)
    pad = 3 * spec.cell_patches
    positions += [(0, 0)] * pad
    ids += [-1] * pad
    patches = draw.normal(len(ids), spec.patch_dim)
    patches[-pad:] = torch.nan  # it may hold anything
    return patches, torch.tensor(positions), torch.tensor(ids, dtype=torch.int32)


def alone(oracle: VisionOracle, patches: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Embeddings of the cells of each image, encoded for itself."""
    found = []
    for image in range(len(CELLS)):
        mine = ids == image
        found.append(oracle.run(patches[mine], positions[mine]))
    return torch.cat(found)
