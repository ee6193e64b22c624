"""``ml4 bench ops``: ops beside their peers, as a table, as data and as a figure."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ml4core.bench import ops
from ml4core.bench.ops_plot import roofline
from ml4core.cli.app import main

pytestmark = pytest.mark.usefixtures("probed_once")

FAST = ["--size", "small", "--repeats", "1"]


def test_chosen_ops_are_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figure, data = tmp_path / "roof.svg", tmp_path / "ops.json"
    words = ["--backend", "cpu", "--op", "topk", "--op", "router", *FAST]
    assert main(["bench", "ops", *words, "--plot", str(figure), "--json", str(data)]) == 0
    told = capsys.readouterr()
    assert "measuring: router 8 experts, 1 rows" in told.err
    facts = json.loads(data.read_text("utf-8"))
    assert {one["op"] for one in facts["ops"]} == {"topk", "router"}
    assert (facts["size"], facts["environment"]["backend"]) == ("small", "cpu")
    for one in facts["ops"]:
        assert one["name"] in told.out
        assert one["low"] <= one["median"] <= one["high"]
        assert one["of_floor"] == pytest.approx(one["floor"] / one["median"])
        assert one["peers"] == {}  # the compositions are this backend's own
    root = ElementTree.fromstring(figure.read_text("utf-8"))
    titles = [each.text or "" for each in root.iter() if each.tag.endswith("title")]
    assert len(titles) == 2
    assert all(title.startswith("router") for title in titles)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--op", "topq"], "no case of op 'topq'; works: gemm"),
        (["--plot", "/none/x.svg"], "--plot /none/x.svg: its folder does not exist"),
        (["--plot", "-"], "--plot -: works: a file"),
        (["--backend", "none"], "none"),
    ],
)
def test_what_is_wrong_is_told(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words if "--backend" in words else [*words, "--backend", "cpu"]
    assert main(["bench", "ops", *given, *FAST]) != 0
    assert told in capsys.readouterr().err


class Session:
    """Its router is one that counts, and its peers are one that works and one that fails."""

    def __init__(self) -> None:
        self.calls = 0
        self.ops = {"router": self.router}
        self.peers = {"router": {"theirs": lambda *args: None, "broken": self.broken}}

    def router(self, *args: object) -> None:
        self.calls += 1

    def broken(self, *args: object) -> None:
        raise RuntimeError("no such kernel")


def test_peers_stand_beside_and_their_failures_too() -> None:
    session = Session()
    case = ops.Case("router", "router", lambda seed: (seed,), 10**8, 10**9)
    times = iter([[2e-3, 4e-3, 3e-3], [6e-3] * 3])

    def clock(calls: object, repeats: int) -> list[float]:
        next(iter(calls))()  # type: ignore[call-overload]
        return next(times)

    rates = {"bytes": 1e11, "flops": 1e15}
    line = ops._one(case, session, clock, 3, rates)  # type: ignore[arg-type]
    assert session.calls == 1
    assert (line["median"], line["floor"]) == (3e-3, 1e-3)
    assert line["peers"]["theirs"]["speed_up"] == pytest.approx(2.0)
    assert line["peers"]["broken"]["failed"] == "RuntimeError: no such kernel"
    assert set(line["peers"]) == {"theirs", "broken", ops.PEER}


def test_a_figure_needs_no_op_with_arithmetic() -> None:
    facts = {
        "rates": {"bytes": 1e12, "flops": 1e14},
        "environment": {"device": "<a device>", "backend": "x"},
        "ops": [],
    }
    assert "&lt;a device&gt;" in roofline(facts)
