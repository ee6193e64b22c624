"""Images in prompts: where their embeddings stand, and how a step gets them.

An embedding takes the place of that of an ``[IMG]`` token; breaks and ends of images are tokens as
any other. An image is encoded when the first row of it is computed, and kept while there is room:
chunks of one prompt, and prompts with the same image, share the work.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ml4core.api import StepPlan, VisionSpec
from ml4core.engine.image_inputs import ImageRows, PlacedImage, padded_rows
from ml4core.engine.image_limits import KEPT_ROWS
from ml4core.engine.transfers import upload
from ml4core.models.pixtral_images import patch_images

if TYPE_CHECKING:
    from ml4core.engine.runner import ModelRunner


class ImageEncoder:
    """Encodes images and puts their embeddings into plans."""

    def __init__(self, runner: ModelRunner, spec: VisionSpec) -> None:
        self._runner = runner
        self._spec = spec
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()

    def place(self, plan: StepPlan, wanted: Sequence[ImageRows]) -> StepPlan:
        """The plan with the embeddings that its rows take, padded to ``shape.images`` at least, as
        another replica may take more.
        """
        device = plan.token_ids.device
        index = np.full(plan.shape.rows, -1, np.int64)
        parts, total = [], 0
        for item in wanted:
            count = len(item.rows)
            index[item.rows] = np.arange(total, total + count)
            parts.append(self._embeddings(item.image)[item.first : item.first + count])
            total += count
        padded = max(padded_rows(total), plan.shape.images)
        if not parts:
            parts.append(self._none())
        embeddings = torch.cat(parts)
        embeddings = torch.nn.functional.pad(embeddings, (0, 0, 0, padded - total))
        self._forget()
        return replace(
            plan,
            shape=replace(plan.shape, images=padded),
            image_index=upload([index], device)[0],
            image_embeddings=embeddings,
        )

    def _none(self) -> Tensor:
        runner = self._runner
        return torch.empty(0, runner.spec.hidden_size, dtype=runner.dtype, device=runner.device)

    def _embeddings(self, image: PlacedImage) -> Tensor:
        found = self._kept.get(image.key)
        if found is None:
            found = self._runner.encode_images(patch_images(self._spec, [image.pixels]))
            self._kept[image.key] = found
        self._kept.move_to_end(image.key)
        return found

    def _forget(self) -> None:
        """What was used longest ago; at least one stays, which the next chunk may want."""
        while len(self._kept) > 1 and sum(map(len, self._kept.values())) > KEPT_ROWS:
            self._kept.popitem(last=False)
