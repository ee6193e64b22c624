"""The parts of ``ml4 eval`` and its choices by name. Imports no torch: commands read them."""

from __future__ import annotations

PARTS = ("ppl", "retrieval", "tools", "draft", "speed")
"""In the order in which they run: perplexity, numbers found in long prompts, tool calls and JSON,
accepted drafts, and the time that these save.
"""

DEFAULT_PARTS = PARTS[:-1]
"""Those whose figures are the same on every machine."""

WEIGHTS = ("bf16", "fp8_block", "nvfp4", "mxfp4", "mxfp4-floor", "mxfp4-roundup", "mxfp4-ceil")
"""Forms that a checkpoint is converted to, to see what that costs: ``nvfp4`` and ``mxfp4`` of the
routed experts, ``mxfp4`` by the rule that is named, or by ``even``; the others of all matrices.
"""

DEFAULT_WEIGHTS = ("nvfp4", "mxfp4")
CONVERTED_BYTES = 256 << 20
"""Checkpoints up to this size are converted where no form is asked for."""

DEFAULT_LENGTHS = (512, 1024, 2048)
FULL_LENGTHS = (*DEFAULT_LENGTHS, 4096, 8192)
