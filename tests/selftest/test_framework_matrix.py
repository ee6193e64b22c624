"""The committed support matrix is made from the committed results, and from nothing else."""

from __future__ import annotations

from pathlib import Path

from ml4core_conformance.report.matrix import to_markdown
from ml4core_conformance.results import load

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "support-matrix.md"
COMMAND = (
    "ml4 conformance matrix conformance/results/*.json --also cuda --also rocm --also tpu "
    "--write docs/support-matrix.md"
)


def test_the_support_matrix_is_current() -> None:
    files = sorted((ROOT / "conformance" / "results").glob("*.json"))
    assert files
    made = to_markdown([load(file) for file in files], ("cuda", "rocm", "tpu"))
    assert PAGE.read_text("utf-8") == made, f"make it anew: {COMMAND}"


def test_the_documentation_says_how_it_is_made() -> None:
    assert COMMAND in (ROOT / "docs" / "conformance.md").read_text("utf-8")
