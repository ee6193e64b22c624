"""Command line: python -m tools.train_tiny COMMAND. See README.md for the whole course."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch

from ml4core.models.errors import CheckpointError
from tools.train_tiny import commands
from tools.train_tiny.attention import KERNELS
from tools.train_tiny.launch import launch
from tools.train_tiny.optim import MATRIX_DECAY
from tools.train_tiny.phases import FALL

STARTED = time.monotonic()


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m tools.train_tiny", description=__doc__)
    verbs = top.add_subparsers(dest="command", required=True)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        one = verbs.add_parser(name, help=text)
        if name not in ("needles", "documents"):
            one.add_argument("--run", type=Path, required=True, help="folder of this run's state")
            one.add_argument("--shape", default="tiny", help="tiny, dense, or a params.json")
        if name not in ("export", "pack", "unpack", "read"):
            one.add_argument("--corpus", type=Path, required=True, help="folder with bin/*.bin")
        if name not in ("needles", "documents", "export", "pack", "unpack", "read", "diagnose"):
            one.add_argument("--processes", type=int, default=1, help="each with its own device")
        if name not in ("needles", "documents", "export", "pack", "unpack", "read"):
            one.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
            one.add_argument("--no-compile", action="store_true", help="no compiled kernels")
        return one

    defaults = {  # steps or tokens, batch, factor of rates
        "main": (0, 64, 1.0),
        "indexer": (800, 64, 0.5),
        "sparse": (400, 32, 0.15),
        "draft": (2000, 64, 0.5),
    }
    for name, (steps, batch, scale) in defaults.items():
        one = verb(name, f"train: the phase {name!r}")
        if name in ("main", "draft"):
            one.add_argument("--start", type=Path, help="packed weights to begin with")
        if name == "main":
            one.add_argument("--tokens", type=float, required=True, help="to train on")
            one.add_argument("--fall", type=float, default=FALL, help="share with a falling rate")
        else:
            one.add_argument("--steps", type=int, default=steps)
        one.add_argument("--batch", type=int, default=batch, help="windows of a step")
        one.add_argument("--length", type=int, default=2048, help="tokens of a window")
        one.add_argument("--attention", choices=("fastest", *KERNELS), default="fastest")
        one.add_argument("--seed", type=int, default=1)
        one.add_argument("--rate", type=float, default=scale, help="factor of all rates")
        one.add_argument("--weight-decay", type=float, default=MATRIX_DECAY, help="of matrices")
        one.add_argument("--dropout", type=float, default=0.1 if name == "main" else 0.0)
        one.add_argument("--warm-up", type=int, default=100 if name == "main" else 20)
        one.add_argument("--seconds", type=float, default=1e9, help="of this part")
        one.add_argument("--finish", action="store_true", help="fewer steps, to be done in time")
        if name == "draft":
            one.add_argument("--own", type=int, default=12288, help="continuations to learn from")
    one = verb("evaluate", "losses, retrieval and acceptance of a run")
    one.add_argument("--length", type=int, default=2048)
    one.add_argument("--lengths", type=int, nargs="*", default=[2048], help="of retrieval")
    one.add_argument("--parts", nargs="*", help="of the corpus; all, if not given")
    one.add_argument("--windows", type=int, help="at most, of each part")
    one.add_argument("--samples", type=int, default=20, help="documents at each depth")
    one.add_argument("--out", type=Path, help="a JSON file for the figures")
    one = verb("export", "write a checkpoint")
    one.add_argument("--out", type=Path, required=True, help="a new folder")
    one.add_argument("--format", default="bf16", help="fp32, bf16 or fp8_block")
    one.add_argument("--tokenizer", type=Path, help="a tekken.json to go along")
    one = verb("pack", "bf16 weights in small files, to be carried")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--part-bytes", type=int, default=15 << 20)
    one = verb("unpack", "make a run of packed weights")
    one.add_argument("--packed", type=Path, required=True)
    one.add_argument("--phase", default="sparse", help="the last that the model went through")
    one = verb("read", "make a run of a checkpoint's weights")
    one.add_argument("--checkpoint", type=Path, required=True, help="a folder, of any format")
    one.add_argument("--phase", default="sparse", help="the last that the model went through")
    one = verb("needles", "cut the sentences of made documents into tokens")
    one.add_argument("--tokenizer", type=Path, required=True, help="a tekken file")
    one = verb("documents", "make the corpus' part of retrieval")
    one.add_argument("--windows", type=int, default=24_000)
    one.add_argument("--length", type=int, default=2048, help="tokens of a window")
    one.add_argument("--seed", type=int, default=1)
    one = verb("diagnose", "where a run looks when it tells what it read")
    one.add_argument("--length", type=int, default=2048)
    one.add_argument("--samples", type=int, default=20)
    return top


def main() -> None:
    args = parser().parse_args()
    if getattr(args, "processes", 1) > 1 and "RANK" not in os.environ:
        raise SystemExit(launch("tools.train_tiny", sys.argv[1:], args.processes))
    try:
        found = commands.COMMANDS[args.command](args, STARTED)
    except (ValueError, CheckpointError) as error:
        raise SystemExit(f"{args.command}: {error}") from error
    if found:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
