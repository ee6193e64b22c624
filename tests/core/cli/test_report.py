"""The start-up report as text: who serves each part, who chose it, who was passed over and why."""

from __future__ import annotations

from typing import Any

from ml4core.cli import report


def stage(part: str, step: str, layers: tuple[int, ...], **more: Any) -> dict[str, Any]:
    facts = {"part": part, "layer_kind": "k", "step_kind": step, "layers": layers}
    return (
        facts | {"provider": "compose", "chosen_by": "core", "version": "", "rejected": ()} | more
    )


def op(part: str, provider: str) -> dict[str, Any]:
    return stage(part, "*", (), layer_kind="*", provider=provider, chosen_by="backend")


NO = {"provider": "fast", "refusals": [{"subject": "topk", "reason": "2048 only"}]}


def rows(text: str, head: str) -> list[list[str]]:
    lines = text.split(f"\n{head} ")[1].split("\n\n")[0].splitlines()[1:]
    return [line.split() for line in lines]


def test_alike_parts_share_a_row() -> None:
    parts = [
        stage("ffn", "decode", (0, 2)),
        stage("ffn", "decode", (1,)),
        stage("ffn", "prefill", (0, 1, 2)),
        stage("select", "decode", (0,), provider="lib", version="1.2", chosen_by="backend"),
        stage("select", "prefill", (0,), rejected=[NO]),
        op("topk", "chip"),
        op("gemm", "chip"),
        op("rope", "compose"),
    ]
    text = report.text({"model": "m", "parts": parts})
    assert text.startswith("model: m\n")
    assert rows(text, "STAGE") == [
        ["ffn", "decode,", "prefill", "0-2", "compose", "core"],
        ["select", "decode", "0", "lib", "1.2", "backend"],
        ["select", "prefill", "0", "compose", "core", "fast:", "topk:", "2048", "only"],
    ]
    assert rows("\n" + text, "SERVED BY") == [
        ["chip", "backend", "topk,", "gemm"],
        ["compose", "backend", "rope"],
    ]


def test_steps_that_differ_have_rows_of_their_own() -> None:
    parts = [stage("ffn", "decode", (0, 1)), stage("ffn", "prefill", (0,))]
    assert [row[1:3] for row in rows(report.text({"parts": parts}), "STAGE")] == [
        ["decode", "0-1"],
        ["prefill", "0"],
    ]


def test_facts_without_parts() -> None:
    facts = {
        "kv": {"layouts": {"latent": "bf16"}, "bytes": 5, "notes": []},
        "passed_over": [{"name": "x", "reasons": ["a", "b" * 200]}],
        "assumptions": {},
        "revision": None,
    }
    assert report.text(facts).splitlines() == [
        "kv:",
        "  layouts: latent bf16",
        "  bytes: 5",
        "  notes: none",
        "passed_over:",
        "  -",
        "    name: x",
        "    reasons:",
        "      - a",
        "      - " + "b" * 200,
        "assumptions: none",
        "revision: none",
    ]
