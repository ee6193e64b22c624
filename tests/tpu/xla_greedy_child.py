"""Run in the side environment, with names of cases: the shipped model, greedy, on torch-xla and on
the cpu backend, as JSON.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

from ml4core.engine.args import EngineArgs
from ml4core.engine.llm import Engine, open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.registry import Choice, select

PROMPT = list(range(300, 324))
ROWS = 32
"""Of a step at most, and of the one size that chunks are padded to."""
TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
DRAFTS = {"speculative_config": {"method": "dspark"}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"kv_cache_dtype": "float32"}, {"kv_cache_dtype": "float32"}),
    "plain, op by op": (
        {"kv_cache_dtype": "float32", "enforce_eager": True},
        {"kv_cache_dtype": "float32"},
    ),
    "tiles": ({}, {"kv_cache_dtype": "fp8_e4m3"}),
    "tiles and drafts": ({**DRAFTS}, {"kv_cache_dtype": "fp8_e4m3", **DRAFTS}),
    "drafts": ({"kv_cache_dtype": "float32", **DRAFTS}, {"kv_cache_dtype": "float32", **DRAFTS}),
}
"""Flags of the tpu backend, and of the cpu backend that stores the same."""


def lazy(**flags: Any) -> Engine:
    config = {"device": "interpreted", "tpu": {"runtime": "torch_xla"}}
    choice = select("tpu", device_kind="interpreted")
    return start(choice, additional_config=config, **flags)


def cpu(**flags: Any) -> Engine:
    """FP8 caches in rows of ``e4m3``, which hold the codes of tiles."""
    choice = select("cpu")
    found = choice.devices[0]
    defaults = {**found.capabilities.defaults, "fp8": "e4m3"}
    rows = replace(found, capabilities=replace(found.capabilities, defaults=defaults))
    return start(replace(choice, devices=(rows,)), **flags)


def start(choice: Choice, **flags: Any) -> Engine:
    args = EngineArgs(
        "ml4-tiny",
        backend=choice.backend.name,
        dtype="float32",
        max_num_batched_tokens=ROWS,
        max_num_seqs=1,
        max_model_len=128,
        **flags,
    )
    return open_engine(args, choice=choice)


def answer(engine: Engine) -> dict[str, Any]:
    """Tokens and their log probabilities; drafts that were judged, and those that were right."""
    ids: list[int] = []
    logprobs: list[float] = []
    try:
        engine.core.add_request("one", PROMPT, GREEDY)
        while len(ids) < TOKENS:
            for output in engine.core.step():
                ids += output.token_ids
                for token, entry in zip(output.token_ids, output.logprobs or (), strict=True):
                    logprobs.append(entry[token].logprob)
        counts = engine.core.stats().drafts
        judged = [0, 0] if counts is None else [counts.draft_tokens, counts.accepted_tokens]
        report = engine.report()
        parts = report["parts"]
        return {
            "ids": ids,
            "logprobs": logprobs,
            "judged": judged,
            "switches": dict(report["switches"]),
            "layout": engine.deployment.kv_layout,
            "layers": sorted({one["provider"] for one in parts if one["part"] == "decoder_layer"}),
        }
    finally:
        engine.close()


def main() -> None:
    import torch_xla.debug.metrics as metrics  # this is the environment for it

    for name in sys.argv[1:]:
        mine, theirs = CASES[name]
        found, wanted = answer(lazy(**mine)), answer(cpu(**theirs))
        compiled = metrics.metric_data("CompileTime")
        error = max(abs(a - b) for a, b in zip(found["logprobs"], wanted["logprobs"], strict=True))
        told = {"case": name, "found": found, "wanted": wanted, "error": error}
        print(json.dumps(told | {"graphs": compiled[0] if compiled else 0}), flush=True)


if __name__ == "__main__":
    main()
