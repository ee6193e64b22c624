"""The parts of ``ml4 bench step`` by name. Imports no torch: the command line reads them."""

from __future__ import annotations

PARTS = ("host", "model", "load", "compare")
"""In the order in which they run."""
DEFAULT_PARTS = PARTS[:3]

SEEDED = "a small model with seeded weights"
"""What is measured where no MODEL is given."""
