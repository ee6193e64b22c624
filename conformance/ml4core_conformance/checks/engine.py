"""The tiny model served by an engine on the subject: what it answers, and what it allocates."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ml4core.api import KVCache
from ml4core.engine.llm import Engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core_conformance import tiny
from ml4core_conformance.check import Check, CheckFailed, is_slow
from ml4core_conformance.distribution import chi_square
from ml4core_conformance.rigs.engines import Log, Watched, checkpoint, engine
from ml4core_conformance.rigs.rig import MIXED
from ml4core_conformance.rigs.served import (
    GREEDY,
    SMOOTH,
    Answer,
    Truth,
    page_bytes,
    page_tokens,
    prompts,
    served,
    smooth,
)
from ml4core_conformance.subject import Subject


def checks() -> list[Check]:
    answers: tuple[tuple[str, Callable[[Subject], None], str, frozenset[str], tuple[str, ...]], ...]
    answers = (
        (
            "chunks",
            chunked,
            "Answers of an engine whose steps hold few rows, so that prompts are cut and decodes "
            "stand beside chunks, are those of the model in fp64.",
            frozenset(),
            ("B007", "B070"),
        ),
        (
            "rounded",
            rounded,
            "Where caches store less than activations hold, answers differ by what that rounding "
            "loses, and no more.",
            MIXED.requires,
            (),
        ),
        (
            "prefix",
            prefix,
            "A prompt whose beginning is in the prefix cache is answered as one that isn't; the "
            "cache is hit, and one with another salt doesn't hit it.",
            frozenset({"feature:prefix_caching"}),
            ("B029", "B056"),
        ),
        (
            "preempted",
            preempted,
            "Where pages run out requests are preempted, and their answers are as if they had "
            "never stopped.",
            frozenset(),
            ("B068",),
        ),
        (
            "overlap",
            overlapped,
            "With a step in flight while the next one is scheduled, answers are the same.",
            frozenset({"feature:async_scheduling"}),
            (),
        ),
    )
    found = [
        Check(
            "model.engine",
            "model",
            run,
            doc,
            variant=variant,
            requires=words,
            unit="engine/smooth",
            bugs=bugs,
        )
        for variant, run, doc, words, bugs in answers
    ]
    found += [
        Check(
            "spec.greedy",
            "model",
            drafted,
            "With a drafter answers at temperature 0 are the target's own, and drafts are judged.",
            variant="engine",
            requires=frozenset({"spec:dspark"}),
            unit="engine/draft",
            bugs=("B060", "B064"),
        ),
        *(
            Check(
                "spec.distribution",
                "model",
                partial(drafted_law, method),
                "With a drafter the first tokens of many requests have the target's law at "
                "temperature 1, whether drafts are the likeliest or drawn.",
                variant=f"engine/{method}",
                requires=words,
                unit="engine/draft",
                bugs=("B058",),
            )
            for method, words in (
                ("greedy", frozenset({"spec:dspark"})),
                ("probabilistic", frozenset({"spec:dspark", "spec:probabilistic_drafts"})),
            )
        ),
        Check(
            "model.kv_bytes",
            "model",
            engine_bytes,
            "An engine allocates a cache for each owner and for no other layer, and what it says "
            "of bytes a token follows from the table of layers.",
            variant="engine",
            unit="engine/smooth",
            bugs=("B027", "B048"),
        ),
    ]
    return found


# What it answers

Ask = Callable[[Engine, list[list[int]]], dict[str, tuple[list[int], Answer]]]


def _answers(
    subject: Subject,
    ask: Ask,
    drafter: bool = False,
    vocab: int = tiny.CONFIG.vocab,
    **flags: Any,
) -> None:
    log = Log()
    with (
        checkpoint(drafter, **smooth(subject), vocab=vocab) as folder,
        engine(subject, folder, partial(Watched, log=log), **flags) as opened,
    ):
        size = opened.deployment.block_size
        found = ask(opened, prompts(opened.deployment.model.vocab_size, size))
        truth = Truth(folder, opened, log)
        for name, (ids, answer) in found.items():
            truth.judge(subject, ids, answer, name)


def _all_at_once(opened: Engine, asked: list[list[int]]) -> dict[str, tuple[list[int], Answer]]:
    answers = served(opened, [(f"prompt {n}", ids, GREEDY) for n, ids in enumerate(asked)])
    return {name: (asked[n], answers[name]) for n, name in enumerate(answers)}


def _asked(subject: Subject) -> Ask:
    """All prompts at once; of interpreted kernels those beyond a page, short, and of one token."""
    chosen = (0, 2, 3) if is_slow(subject.device) else range(5)
    return lambda opened, asked: _all_at_once(opened, [asked[n] for n in chosen])


def chunked(subject: Subject) -> None:
    _answers(subject, _asked(subject), max_num_batched_tokens=24)


def rounded(subject: Subject) -> None:
    _answers(subject, _asked(subject), dtype=MIXED.dtype, kv_cache_dtype="bfloat16")


def overlapped(subject: Subject) -> None:
    _answers(subject, _asked(subject), async_scheduling=True, max_num_batched_tokens=64)


def prefix(subject: Subject) -> None:
    def ask(opened: Engine, asked: list[list[int]]) -> dict[str, tuple[list[int], Answer]]:
        long, size = asked[0], opened.deployment.block_size
        other = [*long[:-3], *asked[2][:5]]
        found = {}
        for name, ids, salt, hit in (
            ("first", long, None, 0),
            ("again", long, None, size),
            ("another end", other, None, size),
            ("another salt", long, "someone else's", 0),
        ):
            answer = served(opened, [(name, ids, GREEDY)], cache_salt=salt)[name]
            if answer.cached != hit:
                raise CheckFailed(f"{name}: {answer.cached} tokens were cached, wanted {hit}")
            found[name] = (ids, answer)
        return found

    _answers(subject, ask, enable_prefix_caching=True)


def preempted(subject: Subject) -> None:
    def ask(opened: Engine, asked: list[list[int]]) -> dict[str, tuple[list[int], Answer]]:
        found = _all_at_once(opened, [asked[4], asked[1], asked[4][:-2], asked[1]])
        if not opened.core.stats().preemptions:
            raise RuntimeError("no request was preempted; the pools of this check are too large")
        return found

    # Room for each prompt's own pages, and for few of those that answers begin; and a step for all
    # prompts, so that they are answered at once.
    with checkpoint(**smooth(subject)) as folder:
        room = 6 * page_bytes(subject, folder)
        size = page_tokens(subject, folder)
    flags: dict[str, Any] = {
        "max_model_len": max(128, 2 * size),
        "max_num_batched_tokens": 4 * size,
    }
    _answers(subject, ask, kv_cache_memory_bytes=room, **flags)


def drafted(subject: Subject) -> None:
    def ask(opened: Engine, asked: list[list[int]]) -> dict[str, tuple[list[int], Answer]]:
        found = _asked(subject)(opened, asked)
        counts = opened.core.stats().drafts
        if counts is None or not counts.draft_tokens:
            raise CheckFailed("no draft was judged, though a drafter was asked for")
        return found

    # Of few tokens, so that some drafts are right.
    _answers(subject, ask, vocab=16, drafter=True, speculative_config={"method": "dspark"})


VOCAB = 3
"""Tokens of the model whose law is judged."""
DRAWN = 3
"""Tokens that each request draws: the first from its prompt, the others through the drafter."""


def drafted_law(method: str, subject: Subject) -> None:
    """The law of the first tokens of many requests, against that of the model in fp64."""
    requests = 128 if subject.small or is_slow(subject.device) else 512
    sizes = {**SMOOTH, "layers": 2, "heads": 2, "nope_every": None, "vocab": VOCAB}
    config = {"method": "dspark", "draft_sample_method": method}
    prompt, log = [2, 0, 1, 1], Log()
    with (
        checkpoint(drafter=True, **sizes) as folder,
        engine(
            subject, folder, partial(Watched, log=log), sequences=64, max_num_seqs=64,
            speculative_config=config,
        ) as opened,
    ):  # fmt: skip
        asked = [
            (f"{n}", prompt, SamplingParams(max_tokens=DRAWN, seed=n, ignore_eos=True))
            for n in range(requests)
        ]
        answers = served(opened, asked)
        truth = Truth(folder, opened, log)
    odds = torch.ones(1, dtype=torch.float64)
    names = [""]
    for place in range(DRAWN):
        rows = []
        for cell in range(VOCAB**place):
            before = [(cell // VOCAB**i) % VOCAB for i in reversed(range(place))]
            rows.append(torch.softmax(truth.exact.run([*prompt, *before]).logits[-1], -1))
        odds = (odds.unsqueeze(-1) * torch.stack(rows)).flatten()
        names = [f"{name} {token}".strip() for name in names for token in range(VOCAB)]
    cells = torch.tensor(
        [
            sum(token * VOCAB**i for i, token in enumerate(reversed(answers[name].ids)))
            for name, _, _ in asked
        ]
    )
    where = f"{method} drafts, temperature 1"
    subject.measure(chi_square("answers", cells, odds, tuple(names), where))


def engine_bytes(subject: Subject) -> None:
    log = Log()
    with (
        checkpoint() as folder,
        engine(subject, folder, partial(Watched, log=log)) as opened,
    ):
        caches = log.caches
        roles = [cache.layout.role for cache in caches]
        found = (roles.count("latent"), roles.count("index"))
        wanted = (len(tiny.KV_OWNERS), len(tiny.INDEX_OWNERS))
        if found != wanted:
            raise CheckFailed(
                f"{found[0]} latent and {found[1]} index caches are held; the layers own "
                f"{wanted[0]} and {wanted[1]}"
            )
        due = 0
        for cache in caches:
            blocks, size = cache.blocks, cache.block_size
            mine = blocks * size * cache.layout.bytes_per_token
            held = _held(cache)
            if cache.nbytes != mine or held > mine + mine // 4:
                raise CheckFailed(
                    f"a {cache.layout.role} cache of {blocks} pages of {size} tokens has "
                    f"{cache.nbytes} bytes in {held}; it takes {mine}"
                )
            due += mine
        each = sum(cache.layout.bytes_per_token for cache in caches)
        told = opened.report()["kv"]
        if (told["bytes_per_token"], told["bytes"]) != (each, due):
            raise CheckFailed(
                f"the engine tells of {told['bytes_per_token']} bytes a token and {told['bytes']} "
                f"in all; the caches have {each} and {due}"
            )


def _held(cache: KVCache) -> int:
    return sum(part.untyped_storage().nbytes() for part in cache.parts)
