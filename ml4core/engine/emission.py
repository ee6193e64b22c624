"""What a request makes of the tokens of a step: where it ends, and what is told of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ml4core.engine.outputs import FinishReason, SequenceOutput
from ml4core.engine.request import Request, Status
from ml4core.engine.sampler_io import SampledToken

ENDS: Mapping[FinishReason, Status] = MappingProxyType(
    {
        "stop": Status.FINISHED_STOP,
        "length": Status.FINISHED_LENGTH,
        "error": Status.FINISHED_ERROR,
    }
)


def take(
    request: Request, tokens: Sequence[SampledToken]
) -> tuple[Sequence[SampledToken], FinishReason | None]:
    """Appends tokens up to the one that ends the request; they, and the end's reason."""
    least, grammar = request.params.min_tokens, request.grammar
    for count, token in enumerate(tokens, 1):
        request.append(token.token_id)
        if grammar is not None and token.token_id == grammar.compiler.eos_id:
            return tokens[:count], "error" if grammar.error else "stop"
        if token.token_id in request.stop_ids and len(request.output_ids) >= least:
            return tokens[:count], "stop"
        if request.num_tokens >= request.limit:
            return tokens[:count], "length"
    return tokens, None


def sequence_output(
    request: Request, tokens: Sequence[SampledToken], reason: FinishReason | None
) -> SequenceOutput:
    params, made = request.params, len(request.output_ids)
    prompt = None
    if made == len(tokens) > 0 and request.index == 0 and params.prompt_logprobs is not None:
        prompt = [None, *request.prompt_logprobs]
    return SequenceOutput(
        request.id,
        request.index,
        [token.token_id for token in tokens],
        reason,
        len(request.prompt_ids),
        request.num_cached_tokens or 0,
        made,
        [token.logprobs for token in tokens] if tokens and params.logprobs is not None else None,
        prompt,
        request.draft_counts,
    )
