"""`ml4 bench serve`: its arithmetic, its datasets, and runs against a server."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ml4core.bench.serving import datasets
from ml4core.bench.serving.client import Address
from ml4core.bench.serving.outcome import Outcome, percentile, summary
from ml4core.bench.serving.plots import charts
from ml4core.cli import main


def outcome(sent: float, times: list[float], tokens: int) -> Outcome:
    return Outcome(sent, times, prompt_tokens=10, output_tokens=tokens)


def test_figures_by_hand() -> None:
    """An event may hold several tokens, so that TPOT is not the mean gap."""
    found = summary(
        [
            outcome(0.0, [0.1, 0.2, 0.5], 5),
            outcome(1.0, [1.3], 1),
            Outcome(1.0, error="503: gone"),
        ],
        2.0,
        percentiles=[50, 99],
        goodput={"ttft": 250.0, "tpot": 150.0},
    )
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, ["503: gone"])
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (20, 6)
    assert found["request_throughput"] == 1.0
    assert found["output_throughput"] == 3.0
    assert found["total_token_throughput"] == 13.0
    assert found["mean_ttft_ms"] == pytest.approx(200)
    assert found["mean_tpot_ms"] == pytest.approx(100), "of the one with tokens behind its first"
    assert found["mean_itl_ms"] == pytest.approx(200)
    assert found["mean_e2el_ms"] == pytest.approx(400)
    assert found["p99_e2el_ms"] == pytest.approx(300 + 0.99 * 200)
    assert found["std_ttft_ms"] == pytest.approx(100)
    assert found["request_goodput"] == 0.5, "the other's first token came after 300 ms"


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (50, 2.5), (75, 3.25), (100, 4)])
def test_percentiles(percent: float, value: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], percent) == value


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://a:81/x/", Address("a", 81, False, "/x")),
        ("https://a", Address("a", 443, True)),
        ("http://[::1]:8", Address("::1", 8)),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert Address.parse(url) == address


def test_random_prompts_share_a_prefix_and_come_again() -> None:
    options: dict[str, Any] = {"input_len": 5, "output_len": 3, "vocab_size": 999, "prefix_len": 4}
    one, two = (datasets.random_tokens(3, seed=1, **options) for _ in range(2))
    prompts = [c.turns[0].prompt for c in one]
    assert one == two != datasets.random_tokens(3, seed=2, **options)
    assert [len(p) for p in prompts] == [9] * 3
    assert len({tuple(p[:4]) for p in prompts}) == 1
    assert len({tuple(p) for p in prompts}) == 3
    assert all(256 <= token < 999 for p in prompts for token in p)


CHAT = [
    {"role": "system", "content": "Be kind"},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "x" * 40},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "y" * 8},
]


def test_conversations_are_replayed_turn_by_turn(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n", "utf-8")
    (one, again) = datasets.conversations(path, 2, None, 0.5)
    assert one == again, "from the beginning again where there are fewer"
    first, second = one.turns
    assert (first.prompt, first.output_len, first.think_s) == (CHAT[:2], 10, 0.0)
    assert (second.prompt, second.output_len, second.think_s) == (CHAT[:4], 2, 0.5)
    shared = tmp_path / "sharegpt.json"
    old = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "z" * 12}]
    shared.write_text(json.dumps([{"conversations": old}]), "utf-8")
    (sample,) = datasets.sharegpt(shared, 1, None, chat=False)[0].turns
    assert (sample.prompt, sample.output_len) == ("Hi", 3)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds no prompt"),
        ("{", ":1: not JSON"),
        ("[1]", ":1: [1] is not an object"),
        ('{"text": "a"}', ":1: no prompt"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=r"prompts\.jsonl") as caught:
        datasets.custom(path, 1, None, chat=False)
    assert told in str(caught.value)


def test_charts_are_whole() -> None:
    runs = [
        {
            "max_concurrency": n,
            "median_tpot_ms": 5.0 + n,
            "p99_tpot_ms": 6.0 + n,
            "median_ttft_ms": 20.0 * n,
            "p99_ttft_ms": 30.0 * n,
            "output_throughput": 100.0 * n,
        }
        for n in (1, 4, 16)
    ]
    drawn = ElementTree.fromstring(charts(runs, devices=2))
    lines = drawn.findall(".//{*}polyline")
    assert len(lines) == 1 + 4
    texts = {one.text for one in drawn.findall(".//{*}text")}
    assert {"tokens/s of a user", "TTFT p99", "TPOT p50", "16"} <= texts
    assert charts([], 1).startswith("<svg")


@pytest.fixture
def bench(null: Any, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*words: str, url: str | None = None) -> tuple[int, str]:
        code = main(["bench", "serve", "--base-url", url or null.url, *words])
        told = capsys.readouterr()
        return code, told.out + told.err

    return run


def test_a_run_counts_what_the_server_counts(
    bench: Callable[..., tuple[int, str]], null: Any, tmp_path: Path
) -> None:
    before = null.metric("ml4_request_generation_tokens_count")
    code, text = bench(
        *("--num-prompts", "12", "--random-input-len", "20", "--random-output-len", "9"),
        *("--max-concurrency", "2", "--max-concurrency", "4", "--ignore-eos", "--num-warmups", "1"),
        *("--metric-percentiles", "50,95", "--goodput", "e2el:600000", "--json", "--save-result"),
        *("--result-dir", str(tmp_path), "--plot", str(tmp_path / "plot.svg")),
    )
    assert code == 0, text
    two, four = json.loads(text)
    assert null.metric("ml4_request_generation_tokens_count") - before == 25
    for found, concurrency in ((two, 2), (four, 4)):
        assert (found["completed"], found["failed"]) == (12, 0)
        assert found["total_input_tokens"] == 240
        assert found["total_output_tokens"] == 108
        assert found["max_concurrency"] == concurrency
        assert found["max_concurrent_requests"] <= concurrency
        assert found["p50_ttft_ms"] == found["median_ttft_ms"] <= found["p95_ttft_ms"]
        assert found["request_goodput"] == found["request_throughput"]
        assert found["model"] == "ml4-tiny"
        assert found["client_cpu"] > 0
        assert "server_cpu" in found
    assert len(list(tmp_path.glob("openai-*.json"))) == 2
    assert "polyline" in (tmp_path / "plot.svg").read_text("utf-8")


def test_chats_of_a_file(bench: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": CHAT}) + "\n", "utf-8")
    code, text = bench(
        *("--backend", "openai-chat", "--dataset-name", "conversation"),
        *("--dataset-path", str(path), "--num-prompts", "2", "--request-rate", "50", "--json"),
    )
    assert code == 0, text
    (found,) = json.loads(text)
    assert found["completed"] == 4
    code, text = bench("--backend", "openai-chat", "--num-prompts", "2", "--random-output-len", "2")
    assert code == 0
    assert "TTFT, ms:" in text


def test_failed_requests_are_told(bench: Callable[..., tuple[int, str]]) -> None:
    code, text = bench("--num-prompts", "1", "--model", "gpt-5")
    assert code == 1
    assert "404" in text


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--request-rate", "0"), "--request-rate: 0 is out of range"),
        (("--goodput", "itl:1"), "--goodput: 'itl:1'"),
        (("--percentile-metrics", "x"), "--percentile-metrics: 'x'"),
        (("--metric-percentiles", "101"), "--metric-percentiles"),
        (("--dataset-name", "custom"), "--dataset-path"),
        (("--dataset-name", "conversation", "--dataset-path", "x"), "openai-chat"),
        (("--burstiness", "0"), "--burstiness"),
    ],
)
def test_flags_are_checked(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    assert main(["bench", "serve", *words]) == 2
    assert told in capsys.readouterr().err


def test_no_server_is_told(bench: Callable[..., tuple[int, str]]) -> None:
    code, text = bench("--num-prompts", "1", url="http://127.0.0.1:9")
    assert code == 1
    assert "no server at 127.0.0.1:9" in text
    code, text = bench(url="ftp://x")
    assert code == 2
    assert "http://host:port" in text
