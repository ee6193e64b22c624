"""Writes every golden file anew: ``python -m ml4core_conformance.golden``."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ml4core_conformance.cache_inputs import Role
from ml4core_conformance.golden import build, file_name
from ml4core_conformance.oracle.layouts import INDEX_LAYOUTS, LATENT_LAYOUTS


def main(folder: Path) -> None:
    names: list[tuple[Role, str]] = [("latent", id) for id in LATENT_LAYOUTS]
    names += [("index", id) for id in INDEX_LAYOUTS]
    for role, id in names:
        made = build(role, id)
        np.savez_compressed(
            folder / file_name(role, id),
            rows=made.rows.numpy(),
            slots=made.slots.numpy(),
            scale=np.float32(made.scale),
            pages=made.pages.numpy(),
        )


if __name__ == "__main__":
    main(Path(__file__).parent)
