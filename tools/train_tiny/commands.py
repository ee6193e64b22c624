"""What each command does with a run's folder."""

from __future__ import annotations

import json
import os
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tools.train_tiny import evaluate, loop, own_words, state
from tools.train_tiny.attention import KERNELS, Kernel, fastest_kernel
from tools.train_tiny.config import load_shape
from tools.train_tiny.data import Corpus, write_documents
from tools.train_tiny.diagnose import diagnose
from tools.train_tiny.draft import Drafter
from tools.train_tiny.export import export
from tools.train_tiny.generate import continued
from tools.train_tiny.indexer import index_scores
from tools.train_tiny.model import TinyModel
from tools.train_tiny.phases import DraftPhase, IndexPhase, MainPhase, Phase, Settings, SparsePhase
from tools.train_tiny.ranks import Ranks, join
from tools.train_tiny.read import read_decoder, read_drafter
from tools.train_tiny.retrieval import FILE, Needles, write_needles
from tools.train_tiny.rounding import round_

COURSE = ("sparse", "indexer", "main")
"""Phases that leave a whole model, the latest first."""
DRAFTED_PARTS = ("chat_basics", "chat_tools", "chat_story_chat", "synth_stories", "children")


def train(args: Namespace, started: float) -> dict[str, Any]:
    ranks, device = _join(args)
    torch.manual_seed(args.seed)
    shape = load_shape(args.shape)
    corpus = Corpus.load(args.corpus)
    model = TinyModel(shape.model).to(device)
    steps = args.steps if args.command != "main" else int(args.tokens / args.batch / args.length)
    settings = Settings(
        steps,
        args.batch,
        args.length,
        seed=args.seed,
        warm_up=args.warm_up,
        scale=args.rate,
        weight_decay=args.weight_decay,
        dropout=args.dropout,
        fall=args.fall if args.command == "main" else 1.0,
    )
    _compile(args, model, ranks)
    phase: Phase
    if args.command == "main":
        if args.start is not None:
            model.load_state_dict(state.unpack(args.start, "model"))
        phase = MainPhase(settings, corpus, model, ranks)
    elif args.command == "draft":
        _load_model(args.run, model, COURSE)
        round_(model)
        drafter = Drafter(shape.draft).to(device)
        if args.start is not None:
            drafter.load_state_dict(state.unpack(args.start, "drafter"))
        own = _own_words(args, model, corpus, ranks)
        if device.type == "cuda" and not args.no_compile:
            for layer in drafter.layers:
                layer.compile(dynamic=False)
        phase = DraftPhase(settings, corpus, model, drafter, ranks, own)
    else:
        before = ("main",) if args.command == "indexer" else ("indexer",)
        if not (args.run / f"{args.command}.pt").is_file():
            _load_model(args.run, model, before)
        made = IndexPhase if args.command == "indexer" else SparsePhase
        phase = made(settings, corpus, model, ranks)
    ranks.say(f"{sum(p.numel() for p in model.parameters())} parameters, {ranks.size} processes")
    done = loop.run(phase, args.run, started + args.seconds, finish=args.finish)
    found = {"phase": phase.name, "done": done, "seconds": round(time.monotonic() - started, 1)}
    if device.type == "cuda":
        found["gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    ranks.leave()
    return found if ranks.first else {}


def _own_words(
    args: Namespace, model: TinyModel, corpus: Corpus, ranks: Ranks
) -> own_words.Words | None:
    """This process's share of the target's words: those of an earlier part, or new ones."""
    count = args.own // ranks.size
    if not count:
        return None
    path = args.run / f"own-words-{ranks.rank}-of-{ranks.size}.pt"
    if not path.is_file():
        seed = args.seed * 1009 + ranks.rank
        dtype = torch.bfloat16 if model.embedding.is_cuda else torch.float32
        model.stretch(True)
        begin = time.monotonic()
        length = min(own_words.LENGTH, args.length)
        own_words.keep(path, own_words.own_words(model, corpus, count, length, seed, dtype))
        ranks.say(f"own words: {count} sequences, {time.monotonic() - begin:.1f} s")
    return own_words.kept(path, model.embedding.device)


def measure(args: Namespace, started: float) -> dict[str, Any]:
    ranks, device = _join(args)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape = load_shape(args.shape)
    model = TinyModel(shape.model).to(device).eval().requires_grad_(False)
    name = _load_model(args.run, model, COURSE)
    if name == "sparse":
        round_(model)  # figures are of what is shipped
    model.stretch(True)
    forms = (False, True) if name != "main" and shape.model.index_owners else (False,)
    corpus = Corpus.load(args.corpus, "valid")
    parts = args.parts or list(corpus.parts)
    jobs: list[tuple[str, str, Callable[[], Any]]] = []
    for sparse in forms:
        form = "sparse" if sparse else "dense"
        jobs += [
            (
                form,
                part,
                partial(
                    evaluate.valid_loss, model, corpus, part, args.length, dtype,
                    sparse=sparse, limit=args.windows,
                ),
            )
            for part in parts
        ]  # fmt: skip
    if (args.corpus / FILE).is_file() and args.samples:
        needles = Needles(args.corpus)
        for length, sparse in product(args.lengths, forms):
            form = f"retrieval {length} {'sparse' if sparse else 'dense'}"
            jobs += [
                (
                    form,
                    str(i),
                    partial(
                        evaluate.retrieval, model, corpus, needles, length, i, dtype,
                        sparse=sparse, samples=args.samples,
                    ),
                )
                for i in range(evaluate.DEPTHS)
            ]  # fmt: skip
    if (args.run / "draft.pt").is_file():
        drafter = Drafter(shape.draft).to(device)
        drafter.load_state_dict(state.load(args.run / "draft.pt", device)["modules"]["drafter"])
        round_(drafter)
        jobs += [
            ("acceptance", part, partial(_acceptance, model, drafter, corpus, part, dtype))
            for part in args.parts or DRAFTED_PARTS
        ]
    mine = [(form, key, job()) for form, key, job in jobs[ranks.own]]
    ranks.say(f"{len(mine)} of {len(jobs)} done: {time.monotonic() - started:.1f} s")
    values = {(form, key): value for each in ranks.gather(mine) for form, key, value in each}
    ranks.leave()
    found: dict[str, Any] = {"after": name}
    for form, key, _ in jobs:
        found.setdefault(form, {})[key] = values[form, key]
    for form, entry in found.items():
        if form.startswith("retrieval"):
            found[form] = list(entry.values())
    if not ranks.first:
        return {}
    for form, entry in found.items():
        print(form, json.dumps(entry), flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1))
    return {"seconds": round(time.monotonic() - started, 1)}


def _acceptance(
    model: TinyModel, drafter: Drafter, corpus: Corpus, part: str, dtype: torch.dtype
) -> list[float]:
    ids, begins = evaluate.prompts(corpus, part, 32, 512)
    ids, begins = ids.to(model.embedding.device), begins.to(model.embedding.device)
    words = own_words.Words(continued(model, ids, begins, dtype), begins)
    length, by_position = evaluate.acceptance(model, drafter, words, dtype)
    return [round(value, 3) for value in (length, *by_position)]


def look(args: Namespace, started: float) -> dict[str, Any]:
    """Where attention and indexers look when an answer of a made document is told."""
    _, device = _join(args)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = TinyModel(load_shape(args.shape).model).to(device).eval().requires_grad_(False)
    found = {"after": _load_model(args.run, model, COURSE)}
    model.stretch(True)
    corpus, needles = Corpus.load(args.corpus, "valid"), Needles(args.corpus)
    found |= diagnose(model, needles, corpus, args.length, args.samples, dtype)
    for name, entry in found.items():
        print(name, entry, flush=True)
    return {}


def write(args: Namespace, started: float) -> dict[str, Any]:
    shape = load_shape(args.shape)
    model = TinyModel(shape.model)
    name = _load_model(args.run, model, COURSE)
    drafter = None
    if (args.run / "draft.pt").is_file():
        drafter = Drafter(shape.draft)
        drafter.load_state_dict(state.load(args.run / "draft.pt")["modules"]["drafter"])
    export(model, drafter, shape, args.out, args.format, args.tokenizer)
    size = sum(file.stat().st_size for file in args.out.glob("*.safetensors"))
    return {"after": name, "drafter": drafter is not None, "bytes": size}


def pack(args: Namespace, started: float) -> dict[str, Any]:
    """The latest model and the drafter, without optimizers."""
    found = {}
    for stem, names, module in (("model", COURSE, "model"), ("drafter", ("draft",), "drafter")):
        name = next((n for n in names if (args.run / f"{n}.pt").is_file()), None)
        if name is not None:
            weights = state.load(args.run / f"{name}.pt")["modules"][module]
            found[stem] = [p.name for p in state.pack(weights, args.out, args.part_bytes, stem)]
    return found


def unpack(args: Namespace, started: float) -> dict[str, Any]:
    """A run whose last phase of the decoder is the one named, done, and whose drafter is done."""
    for stem, phase, module in (("model", args.phase, "model"), ("drafter", "draft", "drafter")):
        if any(args.packed.glob(f"{stem}-*.pt")):
            weights = state.unpack(args.packed, stem)
            state.save(args.run / f"{phase}.pt", {"step": 0, "modules": {module: weights}})
    return {}


def read(args: Namespace, started: float) -> dict[str, Any]:
    """A run of a checkpoint's weights; otherwise as `unpack`."""
    shape = load_shape(args.shape)
    model, drafter = TinyModel(shape.model), Drafter(shape.draft)
    read_decoder(args.checkpoint, model)
    read_drafter(args.checkpoint, drafter)
    for phase, name, module in ((args.phase, "model", model), ("draft", "drafter", drafter)):
        weights = module.state_dict()
        state.save(args.run / f"{phase}.pt", {"step": 0, "modules": {name: weights}})
    return {}


def needles(args: Namespace, started: float) -> dict[str, Any]:
    write_needles(args.tokenizer, args.corpus / FILE)
    return {"bytes": (args.corpus / FILE).stat().st_size}


def documents(args: Namespace, started: float) -> dict[str, Any]:
    workers = os.cpu_count() or 1
    path = write_documents(args.corpus, args.windows, args.length, args.seed, workers)
    return {"bytes": path.stat().st_size, "seconds": round(time.monotonic() - started, 1)}


def _load_model(run: Path, model: TinyModel, names: tuple[str, ...]) -> str:
    """The weights that the first of these phases that is there left; its name."""
    name = next((name for name in names if (run / f"{name}.pt").is_file()), None)
    if name is None:
        raise ValueError(f"{run}: none of {', '.join(f'{n}.pt' for n in names)}")
    content = state.load(run / f"{name}.pt", model.embedding.device)
    if content["step"] < content.get("steps", 0):
        print(f"note: {name} stopped at step {content['step']} of {content['steps']}", flush=True)
    model.load_state_dict(content["modules"]["model"])
    return name


def _join(args: Namespace) -> tuple[Ranks, torch.device]:
    torch.set_float32_matmul_precision("high")
    return join(args.device)


def _compile(args: Namespace, model: TinyModel, ranks: Ranks) -> None:
    """The fastest attention; and one compiled form for each kind of layer, shared by its layers."""
    device = model.embedding.device
    if device.type != "cuda":
        return
    kernels: dict[int, Kernel] = {}
    for layer in model.spec.layers:
        width = layer.q_dim
        if args.attention != "fastest":
            kernels[width] = args.attention
        if width not in kernels:
            sizes = (args.batch // ranks.size, args.length, layer.heads, width, layer.v_dim)
            fastest = fastest_kernel(*sizes, device)
            kernels[width] = KERNELS[ranks.agree(KERNELS.index(fastest))]
        model.block(layer.index).attention.kernel = kernels[width]
    if args.no_compile:
        return
    torch._dynamo.config.cache_size_limit = 64
    for block in model.blocks:
        block.compile(dynamic=False)
    scored = torch.compile(index_scores, dynamic=False)
    for owner in model.spec.index_owners:
        model.indexer(owner).scored = scored


COMMANDS: Mapping[str, Callable[[Namespace, float], dict[str, Any]]] = MappingProxyType(
    {
        "main": train,
        "indexer": train,
        "sparse": train,
        "draft": train,
        "evaluate": measure,
        "export": write,
        "pack": pack,
        "unpack": unpack,
        "read": read,
        "needles": needles,
        "documents": documents,
        "diagnose": look,
    }
)
