"""``/v1/completions``: texts or token ids that are gone on with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from ml4core.engine.errors import RequestError
from ml4core.engine.sampling_params import SamplingParams
from ml4core.models.errors import shown
from ml4core.serving.http import logprobs
from ml4core.serving.http.choice import Choice, Piece
from ml4core.serving.http.exchange import Exchange, Job
from ml4core.serving.http.plain_stream import EmptyStream, PlainStream
from ml4core.serving.http.requests import (
    Header,
    check_salt,
    check_streaming,
    common_job,
    logprob_limit,
)
from ml4core.serving.http.service import LONG, Service
from ml4core.serving.protocol import SamplingFields

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2048


class CompletionRequest(SamplingFields):
    """The body of ``/v1/completions``."""

    prompt: Any
    """A text, token ids, or a list of either."""
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Literal[""] | None = None
    add_special_tokens: bool | None = None


class CompletionForm:
    """How completions are written."""

    def __init__(self, header: Header, service: Service, request: CompletionRequest) -> None:
        self.stream = header.stream
        self.usage = header.usage
        self.usage_always = header.usage_always
        self._header = header
        self._tokenizer = service.tokenizer
        self._logprobs = request.logprobs
        self._echo = bool(request.echo)
        self._prompt_logprobs = request.prompt_logprobs is not None
        self._ids = bool(request.return_token_ids)
        self.plain = not (self.usage_always or self._ids or self._logprobs is not None)
        self.prompts: list[Prompt] = []
        self._lengths: dict[int, int] = {}  # choice -> characters told

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        prompt = self.prompts[choice.place]
        told = self._told(choice, piece, first=True)
        if self._prompt_logprobs:
            told["prompt_logprobs"] = logprobs.of_prompt(self._tokenizer, self._entries(choice))
        if self._ids:
            told["prompt_token_ids"] = list(prompt.ids)
        return told

    def part(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        first = choice.index not in self._lengths
        told = self._told(choice, piece, first=first)
        if self._ids and first:
            told["prompt_token_ids"] = list(self.prompts[choice.place].ids)
        return told

    def body(self, choices: list[dict[str, Any]], *, event: bool) -> dict[str, Any]:
        return self._header.body("text_completion", choices)

    def _told(self, choice: Choice, piece: Piece, *, first: bool) -> dict[str, Any]:
        prompt, echo = self.prompts[choice.place], self._echo and first
        text = prompt.text + piece.content if echo else piece.content
        before = self._lengths.get(choice.index, 0)
        self._lengths[choice.index] = before + len(text)
        told: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if self._logprobs is not None:
            entries: list[Any] = list(piece.logprobs)
            ids = list(piece.token_ids)
            if echo:
                entries = self._entries(choice) + entries
                ids = list(prompt.ids) + ids
            told["logprobs"] = logprobs.of_completion(self._tokenizer, entries, ids, before)
        if self._ids:
            told["token_ids"] = piece.token_ids
        return told

    def _entries(self, choice: Choice) -> list[Any]:
        """Of the prompt, which are told with the first answer to it alone."""
        return self._found(choice.place) or []

    def _found(self, place: int) -> list[Any] | None:
        return self.prompts[place].entries()


class Prompt:
    """A prompt of the request, and the answers to it."""

    def __init__(self, text: str, ids: list[int]) -> None:
        self.text = text
        self.ids = ids
        self.choices: list[Choice] = []

    def entries(self) -> list[Any] | None:
        """Log-probabilities of its tokens."""
        return next((c.prompt_logprobs for c in self.choices if c.prompt_logprobs), None)


async def open_completion(
    service: Service, request: CompletionRequest, size: int, header: Header
) -> tuple[Exchange, CompletionForm]:
    """Raises ``RequestError`` or ``ApiError``. ``size``: of the body, in bytes."""
    service.check_model(request.model)
    check_salt(request.cache_salt)
    check_streaming(request)
    best = request.best_of
    if best is not None and best != (request.n or 1):
        raise RequestError("best_of", best, "n, which is all that is made")
    if request.echo and header.stream and request.logprobs is not None:
        raise RequestError("echo", True, "without logprobs, or without stream")
    if request.max_tokens == 0 and (not request.echo or header.stream):
        raise RequestError("max_tokens", 0, "1 or above; 0 with echo and without stream")
    prompts = await service.read(size, lambda: read_prompts(service, request))
    if request.structured_outputs is not None:  # here, since the engine has others to serve
        structured = request.structured_outputs.params()
        await service.read(LONG, lambda: service.template.check_form(structured))
    form = CompletionForm(header, service, request)
    form.prompts = prompts
    kind = EmptyStream if request.max_tokens == 0 else PlainStream
    jobs: list[Job] = []
    choices: list[Choice] = []
    made: dict[int, SamplingParams] = {}  # by the limit: all that prompts may differ in
    for place, prompt in enumerate(prompts):
        name = "prompt" if len(prompts) == 1 else f"prompt[{place}]"
        asked = request.max_tokens or None
        limit = service.limited(name, prompt.ids, asked, DEFAULT_MAX_TOKENS, "max_tokens")
        if limit not in made:
            made[limit] = _params(service, request, limit)
        params = made[limit]
        jobs.append(common_job(service, request, prompt.ids, params))
        for index in range(params.n):
            stream = kind(service.tokenizer, params)
            choice = Choice(place * params.n + index, place, stream)
            prompt.choices.append(choice)
            choices.append(choice)
    return Exchange(service, jobs, choices), form


def _params(service: Service, request: CompletionRequest, limit: int) -> SamplingParams:
    chosen: dict[str, Any] = {"max_tokens": 1 if request.max_tokens == 0 else limit}
    logprob_limit(service, "logprobs", request.logprobs)
    logprob_limit(service, "prompt_logprobs", request.prompt_logprobs)
    chosen["logprobs"] = request.logprobs
    if request.echo and request.logprobs is not None:
        chosen["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    if request.max_tokens == 0:
        chosen["min_tokens"] = 0
    params = request.sampling_params(**chosen)
    service.check_params(params)
    return params


def read_prompts(service: Service, request: CompletionRequest) -> list[Prompt]:
    """The prompts of a request. Raises ``RequestError`` for the first that is none."""
    given = request.prompt
    if isinstance(given, str) or _is_ids(given):
        return [_prompt(service, request, given, "prompt")]
    if not isinstance(given, list) or not given:
        works = "a text, a list of token ids, or a list of either"
        raise RequestError("prompt", "empty" if given == [] else given, works)
    if len(given) > MAX_PROMPTS:
        raise RequestError("prompt", f"a list of {len(given)}", f"at most {MAX_PROMPTS}")
    return [_prompt(service, request, one, f"prompt[{i}]") for i, one in enumerate(given)]


def _is_ids(given: object) -> bool:
    return isinstance(given, list) and bool(given) and isinstance(given[0], int)


def _prompt(service: Service, request: CompletionRequest, given: Any, name: str) -> Prompt:
    tokenizer = service.tokenizer
    if isinstance(given, str):
        if not given:
            raise RequestError(name, "empty", "some text")
        service.check_size(name, len(given))
        ids = tokenizer.encode(given, name)
        return Prompt(given, ids if request.add_special_tokens is not False else ids[1:])
    if not isinstance(given, list) or not given:
        works = "a text, or a list of at least one token id"
        raise RequestError(name, "empty" if given == [] else given, works)
    for token in given:
        if not isinstance(token, int) or isinstance(token, bool):
            raise RequestError(name, shown(token), "token ids, as integers")
    return Prompt(_text(service, given) if request.echo else "", given)


def _text(service: Service, ids: Sequence[int]) -> str:
    return service.tokenizer.decode(ids)
