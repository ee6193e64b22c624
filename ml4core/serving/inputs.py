"""From what a caller gives as prompts, parameters and priorities to a list of jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.engine.sampling_params import SamplingParams
from ml4core.serving.tokenizer import Tokenizer

PromptInput: TypeAlias = str | Mapping[str, Any]
"""A text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``; beside either, ``cache_salt``."""
Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A chat, as in the OpenAI API."""

FORMS = 'a text, {"prompt": text} or {"prompt_token_ids": [id, ...]}'
_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


@dataclass(frozen=True)
class Prompt:
    """``text``: None if there was none. Prompts share cached prefixes within one ``cache_salt``."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


@dataclass(frozen=True)
class Job:
    """``name``: what messages call the prompt. ``priority``: lower is sooner."""

    name: str
    prompt: Prompt
    params: SamplingParams
    priority: int = 0


def make_jobs(
    prompts: Sequence[tuple[str, Prompt]],
    params: SamplingParams | Sequence[SamplingParams] | None,
    priority: int | Sequence[int] | None,
    args: EngineArgs,
) -> list[Job]:
    """A job for each (name, prompt). ``params`` and ``priority``: one for all, or one for each."""
    count = len(prompts)
    if params is None or isinstance(params, SamplingParams):
        chosen = [params or SamplingParams()] * count
    else:
        chosen = list(_each("sampling_params", params, count))
    if priority is None or isinstance(priority, int):
        order = [priority or 0] * count
    else:
        order = list(_each("priority", priority, count))
    for one in chosen:
        check_params(one)
    for number in order:
        check_priority(number, args)
    return [
        Job(name, prompt, own, number)
        for (name, prompt), own, number in zip(prompts, chosen, order, strict=True)
    ]


def list_prompts(
    prompts: PromptInput | Sequence[PromptInput], tokenizer: Tokenizer
) -> list[tuple[str, Prompt]]:
    """(name, prompt) of a prompt, or of each of a list. Raises ``RequestError`` for the first that
    is none.
    """
    if isinstance(prompts, str | Mapping):
        return [("prompt", read_prompt(prompts, tokenizer, "prompt"))]
    if isinstance(prompts, bytes) or not isinstance(prompts, Sequence):
        raise RequestError("prompts", prompts, f"{FORMS}, or a list of those")
    named = [(f"prompt {index}", one) for index, one in enumerate(prompts)]
    return [(name, read_prompt(one, tokenizer, name)) for name, one in named]


def list_chats(
    messages: Messages | Sequence[Messages], tokenizer: Tokenizer
) -> list[tuple[str, Prompt]]:
    """The same of a chat, or of a list of chats."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise RequestError("messages", messages, "a list of messages, or a list of such lists")
    several = not isinstance(messages[0], Mapping)
    chats: Sequence[Any] = messages if several else [messages]
    named = [(f"messages {index}" if several else "messages", c) for index, c in enumerate(chats)]
    return [(name, read_chat(chat, tokenizer, name)) for name, chat in named]


def read_prompt(given: object, tokenizer: Tokenizer, name: str) -> Prompt:
    """Raises ``RequestError``, which calls the prompt ``name``."""
    if isinstance(given, str):
        if not given:
            raise RequestError(name, "empty", "some text")
        return Prompt(given, tokenizer.encode(given, name))
    if not isinstance(given, Mapping):
        raise RequestError(name, given, FORMS)
    if unknown := sorted(str(key) for key in given.keys() - _KEYS):
        raise RequestError(f"{name}, key", unknown[0], ", ".join(sorted(_KEYS)))
    text, ids, salt = (given.get(key) for key in ("prompt", "prompt_token_ids", "cache_salt"))
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(f"{name}, cache_salt", salt, "a text of at least one character, or None")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"{name}, key prompt", text, "a text")
    if ids is None:
        if text is None:
            raise RequestError(name, given, FORMS)
        return Prompt(text, read_prompt(text, tokenizer, name).token_ids, salt)
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise RequestError(f"{name}, prompt_token_ids", ids, "a list of token ids")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            raise RequestError(f"{name}, prompt_token_ids", token, "token ids, as integers")
    return Prompt(text, list(ids), salt)


def read_chat(given: object, tokenizer: Tokenizer, name: str) -> Prompt:
    """A prompt up to where the answer begins. Raises ``RequestError``."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise RequestError(name, given, "a list of messages")
    for message in given:
        if not isinstance(message, Mapping):
            raise RequestError(name, message, 'messages: {"role": ..., "content": ...}')
    return Prompt(None, tokenizer.encode_chat(given, name))


def check_params(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise RequestError("sampling_params", params, "SamplingParams(...)")


def check_priority(priority: object, args: EngineArgs) -> None:
    """A priority that would do nothing is refused."""
    if not isinstance(priority, int) or isinstance(priority, bool):
        raise RequestError("priority", priority, "an integer")
    if priority and args.scheduling_policy != "priority":
        raise RequestError("priority", priority, "0, or an engine of scheduling_policy='priority'")


def _each(field: str, values: Sequence[Any], count: int) -> Sequence[Any]:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise RequestError(field, values, "one for all prompts, or a list of one for each")
    if len(values) != count:
        raise RequestError(field, f"a list of {len(values)}", f"one, or a list of {count}")
    return values
