"""The shipped card says what the shipped figures say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ml4core.evaluation.plot import plot
from ml4core.evaluation.tables import cells
from ml4core.models.embedded import embedded_folder

ROOT = Path(__file__).parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tools import ship_tiny  # noqa: E402


@pytest.fixture(scope="module")
def figures() -> Any:
    return json.loads((embedded_folder() / ship_tiny.FIGURES).read_text("utf-8"))


def test_the_card_is_that_of_the_figures(figures: Any) -> None:
    card = (embedded_folder() / ship_tiny.CARD).read_text("utf-8")
    assert ship_tiny.with_section(card, ship_tiny.section(figures)) == card
    for part in ("shipped", "formats"):
        assert all(cell in card for cell in cells(figures[part]))


def test_the_picture_is_that_of_the_figures(figures: Any) -> None:
    shown = (embedded_folder() / ship_tiny.PLOT).read_text("utf-8")
    assert shown == plot(figures["shipped"])


def test_a_card_without_a_place_for_figures_is_refused() -> None:
    with pytest.raises(ValueError, match="0 sections of figures"):
        ship_tiny.with_section("# A card\n", "")
    text = "<!-- figures: begin. x -->\nold\n<!-- figures: end -->\n"
    assert ship_tiny.with_section(text, "new \\1\n") == text.replace("old", "new \\1")
