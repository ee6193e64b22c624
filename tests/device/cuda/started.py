"""Opens ``ml4-tiny`` on the GPU in several ways, and tells of each what its start took, how far its
memory is from the plan, and how many tokens a second it makes.

    python tests/device/cuda/started.py --out DIR

Writes ``start.json`` as it goes; exits with 1 if a plan is more than 1% off.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import Engine, open_engine
from ml4core.engine.sampling_params import SamplingParams

DRAFTS = {"method": "dspark", "num_speculative_tokens": 3}
CASES: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "graphs, drafts": {"speculative_config": DRAFTS},
    "eager, drafts": {"speculative_config": DRAFTS, "enforce_eager": True},
    "half of the device": {"gpu_memory_utilization": 0.5, "cudagraph_capture_sizes": (1, 8, 64)},
}
BATCHES = (1, 8, 64)
PROMPT, TOKENS, REPEATS = 32, 128, 3


def speeds(engine: Engine) -> dict[int, float]:
    """Tokens a second by the count of requests: the best of a few runs."""
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    draw = torch.Generator().manual_seed(0)
    found = {}
    for batch in BATCHES:
        prompts = torch.randint(64, 8192, (batch, PROMPT), generator=draw).tolist()
        seconds = []
        for _ in range(REPEATS):
            torch.cuda.synchronize()
            started = perf_counter()
            engine.generate(prompts, params)
            seconds.append(perf_counter() - started)
        found[batch] = round(batch * TOKENS / min(seconds), 1)
    return found


def told(name: str, flags: dict[str, Any]) -> dict[str, Any]:
    args = EngineArgs("ml4-tiny", backend="cuda", max_model_len=2048, max_num_seqs=64, **flags)
    started = perf_counter()
    engine = open_engine(args, fill=True)
    seconds = perf_counter() - started
    try:
        report = engine.report()
        facts = {key: report[key] for key in ("memory", "start_up", "kv")}
        before = len(getattr(engine.runner.session.executor, "captures", ()))
        facts |= {"case": name, "open_s": round(seconds, 2), "tokens_per_s": speeds(engine)}
        facts["late_captures"] = (
            len(getattr(engine.runner.session.executor, "captures", ())) - before
        )
    finally:
        engine.close()
    return facts


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", choices=sorted(CASES), action="append")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    agrees = True
    for name in options.case or CASES:
        facts = told(name, CASES[name])
        found.append(facts)
        (options.out / "start.json").write_text(json.dumps(found, indent=2), "utf-8")
        memory, timings = facts["memory"], facts["start_up"]
        agrees &= memory["agrees"]
        print(f"-- {name}: open {facts['open_s']} s, {json.dumps(timings)}")
        for key in ("weights", "activations", "runtime", "graphs", "pools", "in_all"):
            print(f"   {key}: {json.dumps(memory[key])}")
        print(f"   steps: {json.dumps(memory['steps'])}")
        print(f"   tokens/s: {facts['tokens_per_s']}, captured late: {facts['late_captures']}")
        gc.collect()
    by_name = {facts["case"]: facts["tokens_per_s"] for facts in found}
    for kind in ("", ", drafts"):
        if {f"graphs{kind}", f"eager{kind}"} <= by_name.keys():
            fast, slow = by_name[f"graphs{kind}"], by_name[f"eager{kind}"]
            ratios = {batch: round(fast[batch] / slow[batch], 2) for batch in BATCHES}
            print(f"== graphs against eager{kind}, by requests: {ratios}")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
