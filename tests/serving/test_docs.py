"""The page about serving is true: endpoints, flags and metrics are those of the server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ml4core.serving.http.flags import SERVER_FLAGS
from ml4core.serving.http.metrics import HISTOGRAMS

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text("utf-8")


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_it_has_every_endpoint(null: Any) -> None:
    told = set(re.findall(r"`(?:GET|POST) (/[^`]*)`", section("Endpoints")))
    paths = null.get("/openapi.json").json()["paths"]
    assert told - {"/openapi.json"} == set(paths)


def test_it_has_every_flag_with_its_default() -> None:
    text = section("Flags")
    for flag in SERVER_FLAGS.values():
        assert f"`{flag.name}`" in text, flag.name
    rows = dict(re.findall(r"^\| `(--[a-z0-9-]+)` \| ([^|]+) \|", text, re.MULTILINE))
    for name, default in rows.items():
        flag = SERVER_FLAGS.get(name[2:].replace("-", "_"))
        if flag is None:
            continue
        shown = {None: "none", (): "none", False: "off", 32 * 2**20: "32M", 65536: "64K"}.get(
            flag.default, f"{flag.default:g}" if isinstance(flag.default, float) else None
        )
        assert default == (shown or str(flag.default)), name


def test_its_unit_has_no_comment_behind_a_value() -> None:
    """systemd takes such a comment for a part of the value."""
    unit = section("As a service of systemd").split("```")[1]
    settings = [line for line in unit.splitlines() if "=" in line and not line.startswith("#")]
    assert len(settings) > 10
    assert not [line for line in settings if "#" in line]


def test_it_has_every_metric(tiny: Any) -> None:
    tiny.post("/v1/completions", {"prompt": "Once upon a", "max_tokens": 8})
    text = tiny.get("/metrics").text
    ours = {name.removeprefix("ml4_") for name in re.findall(r"^# TYPE (ml4_\S+)", text, re.M)}
    ours = {name.removesuffix("_total").removesuffix("_created") for name in ours}
    told = set(re.findall(r"`([a-z_0-9]+)(?:\{[a-z_,]+\})?`", section("Metrics")))
    assert {name for name in ours if not name.startswith("engine_process_")} <= told
    assert set(HISTOGRAMS) <= told
