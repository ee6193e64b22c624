"""A plain loop: prefill each prompt in chunks, then decode a group of sequences together."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

import torch

from ml4core.engine.errors import RequestError
from ml4core.engine.runner import ModelRunner
from ml4core.engine.sampling_params import SamplingParams
from ml4core.engine.sequence import Sequence
from ml4core.engine.step_plan import build_plan

OnToken = Callable[[int, int], None]
"""Told (index of the prompt, token id) as each token is made."""


@dataclass(frozen=True)
class Completion:
    """The output of one prompt. ``stop``: a stop id was made (it is the last id); ``length``: a
    limit was reached.
    """

    token_ids: list[int]
    finish_reason: Literal["stop", "length"]


@dataclass
class _Running:
    index: int
    sequence: Sequence
    limit: int  # tokens in all, prompt included
    seed: int


def check_prompt(ids: Seq[int], vocab_size: int, max_model_len: int, index: int = 0) -> None:
    """Raises ``RequestError`` for a prompt that can't be run."""
    name = f"prompt {index}" if index else "prompt"
    if not ids:
        raise RequestError(name, "empty", "at least one token")
    bad = next((i for i, token in enumerate(ids) if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise RequestError(f"{name}, token {bad}", ids[bad], f"ids from 0 to {vocab_size - 1}")
    if len(ids) >= max_model_len:
        raise RequestError(
            name,
            f"{len(ids)} tokens",
            f"at most {max_model_len - 1}: the context is {max_model_len} tokens and one is needed "
            f"for the answer",
        )


class GenerateLoop:
    """Generates for groups of at most ``max_num_seqs`` sequences over a runner's pools."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        eos_ids: frozenset[int],
        seed: int,
    ) -> None:
        self._runner = runner
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._chunk = max_num_batched_tokens
        self._eos_ids = eos_ids
        self._seed = seed

    def generate(
        self, prompts: Seq[Seq[int]], params: SamplingParams, on_token: OnToken | None = None
    ) -> list[Completion]:
        """One completion a prompt, in order. All prompts are checked before the first step."""
        for index, ids in enumerate(prompts):
            check_prompt(ids, self._runner.spec.vocab_size, self._max_model_len, index)
        base = self._seed if params.seed is None else params.seed
        waiting = [
            _Running(
                index,
                Sequence(list(ids), len(ids)),
                min(len(ids) + params.max_tokens, self._max_model_len),
                base + index,
            )
            for index, ids in enumerate(prompts)
        ]
        done: dict[int, Completion] = {}
        while waiting:
            group, waiting = self._admit(waiting)
            try:
                self._run_group(group, params, on_token, done)
            finally:
                for item in group:
                    item.sequence.release(self._runner.pools)
        return [done[index] for index in range(len(prompts))]

    def _admit(self, waiting: list[_Running]) -> tuple[list[_Running], list[_Running]]:
        """The next sequences whose whole length fits the pools, in order, and the rest."""
        group: list[_Running] = []
        for item in waiting[: self._max_num_seqs]:
            try:
                # The key of the last token is never needed.
                item.sequence.grow(self._runner.pools, item.limit - 1, self._runner.block_size)
            except MemoryError:
                break
            group.append(item)
        if not group:
            room = min(pool.free_pages for pool in self._runner.pools.values())
            raise RequestError(
                f"prompt {waiting[0].index} with its answer",
                f"{waiting[0].limit} tokens",
                f"at most {room * self._runner.block_size + 1} in this pool: a larger "
                f"--kv-cache-memory-bytes "
                "or fewer --max-tokens",
            )
        return group, waiting[len(group) :]

    def _run_group(
        self,
        group: list[_Running],
        params: SamplingParams,
        on_token: OnToken | None,
        done: dict[int, Completion],
    ) -> None:
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else self._eos_ids)

        def emit(items: list[_Running], logits: torch.Tensor) -> list[_Running]:
            alive = []
            for item, token in zip(items, self._sample(items, logits, params), strict=True):
                sequence = item.sequence
                sequence.token_ids.append(token)
                if on_token is not None:
                    on_token(item.index, token)
                ended = token in stops
                if ended or len(sequence.token_ids) >= item.limit:
                    ids = sequence.token_ids[sequence.prompt_len :]
                    done[item.index] = Completion(ids, "stop" if ended else "length")
                else:
                    alive.append(item)
            return alive

        running: list[_Running] = []
        for item in group:
            running += emit([item], self._prefill(item.sequence))
        while running:
            logits = self._step([(item.sequence, 1) for item in running])
            running = emit(running, logits)

    def _prefill(self, sequence: Sequence) -> torch.Tensor:
        """Logits [1, vocab] after the prompt."""
        while True:
            rows = min(self._chunk, len(sequence.token_ids) - sequence.computed)
            logits = self._step([(sequence, rows)])
            if sequence.computed == len(sequence.token_ids):
                return logits

    def _step(self, work: list[tuple[Sequence, int]]) -> torch.Tensor:
        runner = self._runner
        plan = build_plan(
            work, tuple(runner.pools), runner.block_size, runner.session.device.torch_device
        )
        logits = runner.step(plan).logits
        for sequence, rows in work:
            sequence.computed += rows
        return logits

    def _sample(
        self, items: list[_Running], logits: torch.Tensor, params: SamplingParams
    ) -> list[int]:
        device = logits.device
        temperature = torch.full((len(items),), params.temperature, device=device)
        seeds = torch.tensor([item.seed for item in items], dtype=torch.int64, device=device)
        positions = torch.tensor([len(item.sequence.token_ids) for item in items], device=device)
        ids: torch.Tensor = self._runner.ops["sample"](logits, temperature, seeds, positions)
        return ids.tolist()
