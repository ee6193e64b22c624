"""Forms of a checkpoint that can be planned for. Imports nothing heavy: commands need the names."""

from __future__ import annotations

from typing import Literal, get_args

Variant = Literal["fp8", "nvfp4", "mxfp4", "bf16"]
VARIANTS: tuple[str, ...] = get_args(Variant)
"""``fp8``: blocks of 128 x 128 wherever they apply; ``nvfp4`` and ``mxfp4``: routed experts so, the
rest as in ``fp8``; embedding, output, router, norms, drafter and vision encoder are bf16 in each.
"""

PUBLISHED = "Mistral Large 4, published shape"
"""The model that is planned for where none is named."""
