"""Figures as tables, as Markdown and as a picture."""

from __future__ import annotations

import math
from typing import Any
from xml.etree import ElementTree

import pytest

from ml4core.evaluation.plot import plot
from ml4core.evaluation.tables import markdown, tables


def score(text: str, weights: str, kv: str, nats: float) -> dict[str, Any]:
    return {
        "text": text,
        "weights": weights,
        "formats": ["bf16", "fp8_block"],
        "weight_bytes": 26_100_000,
        "kv": kv,
        "kv_bytes": 7484,
        "tokens": 4000,
        "nats": nats,
        "ppl": math.exp(nats),
    }


FACTS: dict[str, Any] = {
    "ppl": [
        score("books", "as stored", "fp32", 3.0),
        score("children", "as stored", "fp32", 2.0),
        score("books", "nvfp4", "fp32", 3.0 + math.log(1.02)),
        score("children", "nvfp4", "fp32", 2.0),
    ],
    "retrieval": [
        {"length": 512, "depths": [0.0, 0.5, 1.0], "found": [True, True, False]},
        {"length": 2048, "depths": [0.0, 1.0], "found": [False, True]},
    ],
    "tools": [{"kind": "JSON", "valid": [True, True], "right": [True, False]}],
    "draft": [
        {"kind": "stories", "windows": 40, "length": 2.5, "by_position": [0.8, 0.5, 0.2]},
        {"kind": "<books>", "windows": 9, "length": 1.0, "by_position": []},
    ],
}

SPREAD = {"median": 1.5, "low": 1.25, "high": 2.0, "repeats": 3}
SPEED: dict[str, Any] = {
    "kind": "stories", "tokens": 90, "alike": True, "length": 2.5,
    "plain": SPREAD, "drafted": SPREAD, "ratio": SPREAD, "cpu_ratio": SPREAD,
}  # fmt: skip


def test_tables() -> None:
    perplexity, retrieval, tools, drafts = tables(FACTS)
    same = ("26.1", "fp32, 7,484")
    assert perplexity.title == "Perplexity, tokens: 4,000 of books, 4,000 of children"
    assert perplexity.rows == (
        ("as stored (bf16, fp8_block)", *same, "3.0000", "20.09", "", "2.0000", "7.39", ""),
        ("nvfp4", *same, "3.0198", "20.49", "+2.00%", "2.0000", "7.39", "+0.00%"),
    )
    assert retrieval.columns == ("prompt tokens", "found", "0%", "50%", "100%")
    assert retrieval.rows == (
        ("512", "2 of 3", "yes", "yes", "no"),
        ("2,048", "1 of 2", "no", "", "yes"),
    )
    assert tools.rows == (("JSON", "2", "100%", "50%"),)
    assert drafts.rows == (
        ("stories", "40", "2.50", "80%", "50%", "20%"),
        ("<books>", "9", "1.00", "", "", ""),
    )
    for table in (perplexity, retrieval, tools, drafts):
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_the_table_of_speeds() -> None:
    (table,) = tables({"speed": [SPEED, {**SPEED, "alike": False}]})
    ratio = "1.50 [1.25 .. 2.00]"
    assert table.rows == (
        ("stories", "2.50", "1.5", "1.5", ratio, ratio, "yes"),
        ("stories", "2.50", "1.5", "1.5", ratio, ratio, "no"),
    )
    assert {len(row) for row in table.rows} == {len(table.columns)}


def test_what_was_not_measured_has_no_table() -> None:
    assert [table.title for table in tables({"tools": FACTS["tools"], "draft": None})] == [
        "Answers of a form"
    ]
    assert tables({}) == []


def test_markdown() -> None:
    (table,) = tables({"tools": FACTS["tools"]})
    assert markdown(table).splitlines() == [
        "**Answers of a form**",
        "",
        "| kind | prompts | valid | right |",
        "| --- | --- | --- | --- |",
        "| JSON | 2 | 100% | 50% |",
    ]


def test_the_picture_shows_every_row() -> None:
    root = ElementTree.fromstring(plot(FACTS))
    space = "{http://www.w3.org/2000/svg}"
    texts = [element.text for element in root.iter(f"{space}text")]
    for word in ("nvfp4, fp32", "+1.00%", "512 tokens", "2 of 3", "JSON", "50%", "<books>", "2.50"):
        assert word in texts
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for box in root.iter(f"{space}rect"):
        left, top = (float(box.attrib.get(name, 0)) for name in ("x", "y"))
        assert left + float(box.attrib["width"]) <= width
        assert top + float(box.attrib["height"]) <= height
    cells = [box for box in root.iter(f"{space}rect") if box.attrib["fill"] == "#dfe5ec"]
    assert len(cells) == 2


@pytest.mark.parametrize("part", ["ppl", "retrieval", "tools", "draft"])
def test_a_picture_of_one_part(part: str) -> None:
    ElementTree.fromstring(plot({part: FACTS[part]}))
