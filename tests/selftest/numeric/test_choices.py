"""Routing, quantisation, sampling and verification: each way to be wrong is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ml4core.api import Weight
from ml4core.formats import e8m0, mxfp4

Op = Callable[..., Any]
Dies = Callable[..., str]


def test_renormalising_against_the_contract_dies(dies: Dies) -> None:
    def wrap(honest: Op) -> Op:
        return lambda x, w, k, renormalize, scale: honest(x, w, k, not renormalize, scale)

    dies("ops.router[router/bf16]", router=wrap)


def test_ties_to_the_highest_id_die(dies: Dies) -> None:
    def wrap(honest: Op) -> Op:
        def call(x: Tensor, w: Tensor, *rest: Any) -> Any:
            weights, ids = honest(x, w.flip(0), *rest)
            return weights, w.shape[0] - 1 - ids

        return call

    assert "router/bf16/ties" in dies("ops.router[router/bf16]", router=wrap)


def test_an_expert_that_does_not_exist_dies(dies: Dies) -> None:
    def wrap(honest: Op) -> Op:
        def call(x: Tensor, w: Tensor, *rest: Any) -> Any:
            weights, ids = honest(x, w, *rest)
            broken = torch.isnan(x).any(-1, keepdim=True)
            return weights, torch.where(broken, w.shape[0], ids)

        return call

    assert "experts" in dies("ops.router[router/fp32]", small=False, router=wrap)


def test_router_logits_in_bf16_die(dies: Dies) -> None:
    def wrap(honest: Op) -> Op:
        return lambda x, w, *rest: honest(x.bfloat16(), w.bfloat16().float(), *rest)

    dies("ops.router[router/fp32]", small=False, router=wrap)


@pytest.mark.parametrize("format", ["fp8_block", "mxfp4", "nvfp4", "fp8_tensor"])
def test_a_code_of_another_rounding_dies(dies: Dies, format: str) -> None:
    """Truncation of what is quantised, to one bit less than bf16 has."""

    def wrap(honest: Op) -> Op:
        def call(x: Tensor, *rest: Any) -> Weight:
            bits = x.float().contiguous().view(torch.int32) & ~0xFFFFF
            return honest(bits.view(torch.float32), *rest)

        return call

    dies(f"bytes.quantize[quantize/{format}+bf16]", quantize=wrap)


def test_an_exponent_rounded_the_other_way_dies(dies: Dies) -> None:
    def wrap(honest: Op) -> Op:
        def call(x: Tensor, format: str, rule: str | None = None) -> Weight:
            other = {None: "ceil", "even": "ceil", "floor": "even"}
            return honest(x, format, other.get(rule, rule) if format == "mxfp4" else rule)

        return call

    assert "weight." in dies("bytes.quantize[quantize/mxfp4+bf16]", quantize=wrap)


def test_swapped_nibbles_die(dies: Dies) -> None:
    def wrap(honest: Op) -> Op:
        def call(x: Tensor, *rest: Any) -> Weight:
            found = honest(x, *rest)
            data = found.data >> 4 | found.data << 4
            return Weight(found.format, found.shape, {**found.parts, "data": data})

        return call

    dies("bytes.quantize[quantize/nvfp4+fp32]", quantize=wrap)


def test_the_suite_s_own_scale_rules_are_those_of_the_table() -> None:
    """Exponents for magnitudes between 1.5 and 7, by rule."""
    from ml4core_conformance.oracle.quantize import mxfp4_exponents

    amax = torch.tensor([1.5, 1.74, 1.75, 3.0, 4.0, 6.0, 6.01, 7.0])
    wanted = {
        "floor": [-2, -2, -2, -1, 0, 0, 0, 0],
        "even": [-2, -2, -1, -1, 0, 0, 0, 1],
        "roundup": [-2, -1, -1, -1, 0, 0, 1, 1],
        "ceil": [-1, -1, -1, 0, 0, 1, 1, 1],
    }
    groups = torch.zeros(8, 32)
    groups[:, 5] = amax
    for rule, exponents in wanted.items():
        assert mxfp4_exponents(groups.numpy(), rule)[:, 0].tolist() == exponents
        assert e8m0.decode(mxfp4.quantize(groups, rule)[1])[:, 0].log2().tolist() == exponents


def _sample(draw: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Op], Op]:
    """A sampler that draws by ``draw`` of scores [T, vocab], seeds and positions."""

    def wrap(honest: Op) -> Op:
        def call(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
            cold = temperature <= 0
            heat = torch.where(cold, 1.0, temperature).unsqueeze(-1)
            drawn = draw(logits.float() / heat, seeds, positions)
            return torch.where(cold, honest(logits, temperature, seeds, positions), drawn)

        return call

    return wrap


def _uniforms(seeds: Tensor, positions: Tensor, count: int) -> Tensor:
    keys = (seeds * 6364136223846793005 + positions * 1442695040888963407).unsqueeze(-1)
    keys = (keys ^ (keys >> 29)) * 0x2545F4914F6CDD1D + torch.arange(count) * 0x9E3779B97F4A7C1
    keys = (keys ^ (keys >> 32)) * 0x2545F4914F6CDD1D
    keys = (keys ^ (keys >> 31)) * 0x5851F42D4C957F2D
    return ((keys >> 33 & 0x3FFFFFFF).float() + 0.5) * 2.0**-30


def _gumbel_max(scores: Tensor, noise: Tensor) -> Tensor:
    return (scores - torch.log(-torch.log(noise))).argmax(-1)


honest_draw = _sample(lambda s, seed, at: _gumbel_max(s, _uniforms(seed, at, s.shape[-1])))


def test_another_honest_sampler_passes(passes: Callable[..., Any]) -> None:
    passes("ops.sample[sample/bf16]", small=False, sample=honest_draw)


@pytest.mark.parametrize(
    "draw",
    [
        lambda s, seed, at: _gumbel_max(1.1 * s, _uniforms(seed, at, s.shape[-1])),
        lambda s, seed, at: _gumbel_max(s, _uniforms(seed, 0 * at, s.shape[-1])),
        lambda s, seed, at: _gumbel_max(s, _uniforms(0 * seed, at, s.shape[-1])),
        lambda s, seed, at: _gumbel_max(s, _uniforms(seed, at // 2, s.shape[-1])),
        lambda s, seed, at: _gumbel_max(s, _uniforms(seed, torch.arange(len(s)), s.shape[-1])),
        lambda s, seed, at: torch.multinomial(torch.softmax(s, -1).nan_to_num(1.0), 1).squeeze(-1),
        lambda s, seed, at: s.argmax(-1),
    ],
    ids=["too cold", "seed only", "position only", "pairs", "by row", "with state", "greedy"],
)
def test_draws_of_another_law_die(dies: Dies, draw: Op) -> None:
    dies("ops.sample[sample/fp32]", small=False, sample=_sample(draw))


def test_the_highest_of_equal_logits_dies(dies: Dies) -> None:
    def wrap(honest: Op) -> Op:
        def call(logits: Tensor, *rest: Tensor) -> Tensor:
            return logits.shape[-1] - 1 - honest(logits.flip(-1), *rest)

        return call

    dies("ops.sample[sample/bf16]", sample=wrap)


def _verify(
    accept: Callable[[Tensor, Tensor], Tensor], residual: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[Op], Op]:
    """Verification of one draft after the other: ``accept`` gives the odds of p(d) and q(d), and
    ``residual`` the law after a rejection, of p and q.
    """

    def wrap(honest: Op) -> Op:
        def call(
            logits: Tensor,
            drafts: Tensor,
            drafted: Tensor | None,
            temperature: Tensor,
            seeds: Tensor,
            positions: Tensor,
            block: bool | None = None,
        ) -> tuple[Tensor, Tensor]:
            rows, depth = drafts.shape
            heat = temperature.view(-1, 1, 1)
            p = torch.softmax(logits.double() / heat, -1)
            certain = torch.zeros(rows, depth, p.shape[-1], dtype=p.dtype)
            certain.scatter_(-1, drafts.clamp(min=0).unsqueeze(-1), 1.0)
            q = certain if drafted is None else torch.softmax(drafted.double() / heat, -1)
            noise = _uniforms(seeds, positions, 2 * depth + 2).double()
            ids = torch.full((rows, depth + 1), -1)
            going, counts = torch.ones(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.int64)
            for i in range(depth + 1):
                law, kept = p[:, i], torch.zeros(rows, dtype=torch.bool)
                if i < depth:
                    d = drafts[:, i]
                    at = d.clamp(min=0).unsqueeze(-1)
                    odds = accept(law.gather(-1, at), q[:, i].gather(-1, at)).squeeze(-1)
                    kept = (d >= 0) & (noise[:, i] < odds)
                    law = torch.where((d >= 0).unsqueeze(-1), residual(law, q[:, i]), law)
                ends = law.cumsum(-1)
                thrown = noise[:, depth + i].unsqueeze(-1) * ends[:, -1:]
                drawn = (ends < thrown).sum(-1).clamp(max=p.shape[-1] - 1)
                token = torch.where(kept, drafts[:, min(i, depth - 1)], drawn)
                ids[:, i] = torch.where(going, token, -1)
                counts += going
                going = going & kept
            return ids, counts

        return call

    return wrap


def _right(p: Tensor, q: Tensor) -> Tensor:
    return p / q


def _rest(p: Tensor, q: Tensor) -> Tensor:
    return (p - q).clamp(min=0)


LAW = "spec.distribution[verify_draft/fp32]"


def test_another_honest_verification_passes(passes: Callable[..., Any]) -> None:
    passes(LAW, small=False, verify_draft=_verify(_right, _rest))


@pytest.mark.parametrize(
    ("accept", "residual"),
    [
        (lambda p, q: torch.ones_like(p), _rest),
        (_right, lambda p, q: p),
        (lambda p, q: 0 * p, lambda p, q: p),
        (lambda p, q: p, _rest),
        (lambda p, q: 0.95 * p / q, _rest),
    ],
    ids=["always", "residual is p", "never", "as if certain", "too rarely"],
)
def test_drafts_that_change_the_law_die(dies: Dies, accept: Op, residual: Op) -> None:
    dies(LAW, small=False, verify_draft=_verify(accept, residual))


def test_drafts_judged_one_by_one_are_too_few_for_a_block(dies: Dies, passes: Op) -> None:
    id = "spec.distribution[verify_draft/block+fp32]"
    passes(id, small=False)
    reason = dies(id, small=False, verify_draft=_verify(_right, _rest))
    assert "counts" in reason


def test_greedy_drafts_that_are_always_accepted_die(dies: Dies) -> None:
    def wrap(honest: Op) -> Op:
        def call(logits: Tensor, drafts: Tensor, *rest: Any) -> Any:
            ids, counts = honest(logits, drafts, *rest)
            ids[:, :-1] = drafts
            return ids, torch.full_like(counts, ids.shape[1])

        return call

    dies("spec.greedy[verify_draft/bf16]", verify_draft=wrap)
