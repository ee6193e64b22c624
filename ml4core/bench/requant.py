"""How fast experts in FP8 become MXFP4 on the host, beside the way that writes bfloat16 first."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from ml4core.bench import environment
from ml4core.bench.timing import in_turns, ratio, spread, timed
from ml4core.formats import fp8_block, mxfp4_bf16, mxfp4_fp8

TARGET, GOAL = 60.0, 150.0
"""MB/s of FP8 input on one thread."""

SHAPES = ((4096, 6144), (6144, 2048))
"""Rows and columns: an expert's gate above its up, and its down, of a published model's width."""


def measure(rule: str = "even", threads: int = 1, repeats: int = 5) -> dict[str, Any]:
    """JSON-able figures of seeded matrices. ``RuntimeError`` if the two ways differ in a byte."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = [_matrix(rows, columns, rule, repeats) for rows, columns in SHAPES]
    finally:
        torch.set_num_threads(before)
    return {
        "environment": {
            "processor": environment.processor(),
            "load": environment.load_average(),
            "threads": threads,
            "versions": environment.versions({}),
        },
        "rule": rule,
        "target": TARGET,
        "goal": GOAL,
        "matrices": found,
    }


def _matrix(rows: int, columns: int, rule: str, repeats: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(rows)
    code, scale = fp8_block.quantize_weight(torch.randn(rows, columns, generator=draw) * 0.02)

    def direct() -> object:
        return mxfp4_fp8.requantize(code, scale, rule)

    def by_bfloat16() -> object:
        values = fp8_block.dequantize_weight(code, scale, dtype=torch.bfloat16)
        return mxfp4_bf16.quantize(values, rule)

    _compare(direct(), by_bfloat16())
    ours, theirs = in_turns([lambda: timed(direct), lambda: timed(by_bfloat16)], repeats)
    megabytes = code.numel() / 1e6
    return {
        "rows": rows,
        "columns": columns,
        "mb_per_s": asdict(spread([megabytes / span.cpu for span in ours])),
        "mb_per_s_wall": asdict(spread([megabytes / span.wall for span in ours])),
        "times_faster": asdict(ratio(theirs, ours, "cpu")),
    }


def _compare(one: Any, other: Any) -> None:
    for name, ours, theirs in zip(("codes", "scales"), one, other, strict=True):
        if not torch.equal(ours, theirs):
            raise RuntimeError(f"{name} differ between the two ways to MXFP4")


def text(facts: dict[str, Any]) -> str:
    """The figures as lines."""
    where = facts["environment"]
    lines = [
        f"{where['processor']}, {where['threads']} thread(s), load {where['load']}, "
        f"torch {where['versions']['torch']}, rule {facts['rule']}"
    ]
    for one in facts["matrices"]:
        speed, wall, times = one["mb_per_s"], one["mb_per_s_wall"], one["times_faster"]
        lines.append(
            f"{one['rows']} x {one['columns']}: {speed['median']:.0f} MB/s of FP8 by CPU time "
            f"[{speed['low']:.0f} .. {speed['high']:.0f}], {wall['median']:.0f} by the wall clock; "
            f"{times['median']:.1f} times the way by bfloat16"
        )
    lines.append(f"target {facts['target']:.0f} MB/s, goal {facts['goal']:.0f}")
    return "\n".join(lines) + "\n"
