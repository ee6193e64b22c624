"""What a load asks for: random tokens, prompts of a file, conversations of a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ml4core.models.errors import os_reason, shown

Kind = Literal["random", "custom", "sharegpt", "conversation"]
KINDS = ("random", "custom", "sharegpt", "conversation")

_WORDS = (
    *("and", "the", "a", "to", "of", "in", "it", "was", "he", "she", "that", "with", "for"),
    *("on", "they", "said", "little", "day", "big", "you", "very", "but", "had", "then"),
)
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
_ROLES |= {"system": "system"}


@dataclass(frozen=True)
class Sample:
    """A request.

    Attributes:
        prompt: a text, token ids or messages.
        output_len: tokens of the answer at most.
        think_s: to wait after the one before it, in a conversation.
    """

    prompt: str | list[int] | list[dict[str, Any]]
    output_len: int
    think_s: float = 0.0


@dataclass(frozen=True)
class Conversation:
    """Requests of which each comes after the answer to the one before. Most have one."""

    turns: list[Sample] = field(default_factory=list)


def random_tokens(
    count: int,
    *,
    input_len: int,
    output_len: int,
    vocab_size: int,
    seed: int,
    prefix_len: int = 0,
    first_id: int = 256,
) -> list[Conversation]:
    """Prompts of ``input_len`` random ids from ``first_id`` on, behind ``prefix_len`` ids that all
    have.
    """
    draw = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [draw.randrange(min(first_id, vocab_size - 1), vocab_size) for _ in range(length)]

    prefix = ids(prefix_len)
    return [Conversation([Sample(prefix + ids(input_len), output_len)]) for _ in range(count)]


def random_words(count: int, *, input_len: int, output_len: int, seed: int) -> list[Conversation]:
    """Chats of about ``input_len`` tokens: a common word each, as chats can't be given as ids."""
    draw = random.Random(seed)
    return [
        Conversation(
            [
                Sample(
                    [{"role": "user", "content": " ".join(draw.choices(_WORDS, k=input_len))}],
                    output_len,
                )
            ]
        )
        for _ in range(count)
    ]


def custom(path: Path, count: int, output_len: int | None, *, chat: bool) -> list[Conversation]:
    """A JSON object a line: ``prompt``, and ``output_tokens`` or ``max_tokens`` if it has them.

    Raises ``ValueError`` that names file and line.
    """
    found = []
    for number, entry in _lines(path):
        prompt = entry.get("prompt")
        if not isinstance(prompt, str) or not prompt:
            raise ValueError(f'{path}:{number}: no prompt; works: {{"prompt": text}}')
        length = output_len or entry.get("output_tokens") or entry.get("max_tokens") or 256
        asked: Any = [{"role": "user", "content": prompt}] if chat else prompt
        found.append(Conversation([Sample(asked, int(length))]))
    return _repeated(found, count, path)


def sharegpt(path: Path, count: int, output_len: int | None, *, chat: bool) -> list[Conversation]:
    """The first question of each conversation; its answer's length, at four characters a token, is
    that of the answer asked for.
    """
    found = []
    for messages in _conversations(path):
        asked = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
        if asked is None or asked + 1 >= len(messages):
            continue
        length = output_len or max(1, len(messages[asked + 1]["content"]) // 4)
        text = messages[asked]["content"]
        prompt: Any = [{"role": "user", "content": text}] if chat else text
        found.append(Conversation([Sample(prompt, length)]))
    return _repeated(found, count, path)


def conversations(
    path: Path, count: int, output_len: int | None, think_s: float
) -> list[Conversation]:
    """Each conversation, turn by turn, with its own answers as the history: prompts grow, and a
    prefix cache meets what it would in use.
    """
    found = []
    for messages in _conversations(path):
        turns: list[Sample] = []
        for i, message in enumerate(messages):
            if message["role"] != "user":
                continue
            answer = messages[i + 1]["content"] if i + 1 < len(messages) else ""
            length = output_len or max(1, len(answer) // 4)
            wait = think_s if turns else 0.0
            turns.append(Sample([dict(m) for m in messages[: i + 1]], length, wait))
        if turns:
            found.append(Conversation(turns))
    return _repeated(found, count, path)


def _conversations(path: Path) -> Iterator[list[dict[str, str]]]:
    """Of a JSON list, or of an object a line: ``messages``, or ``conversations`` of ShareGPT."""
    for number, entry in _entries(path):
        given = entry.get("messages", entry.get("conversations"))
        if not isinstance(given, list):
            raise ValueError(f"{path}:{number}: has neither messages nor conversations")
        messages = []
        for message in given:
            role = message.get("role", message.get("from"))
            content = message.get("content", message.get("value"))
            if role not in _ROLES or not isinstance(content, str):
                works = "a role of " + ", ".join(_ROLES) + " and a text"
                raise ValueError(f"{path}:{number}: a message is {shown(message)}; works: {works}")
            messages.append({"role": _ROLES[role], "content": content})
        yield messages


def _entries(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    if path.suffix == ".jsonl":
        yield from _lines(path)
        return
    try:
        found = json.loads(_text(path))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
        raise ValueError(f"{path}: not a list of objects")
    yield from enumerate(found, 1)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise ValueError(f"{path}:{number}: {shown(entry)} is not an object")
        yield number, entry


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise ValueError(f"{path}: {os_reason(error)}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8") from error


def _repeated(found: list[Conversation], count: int, path: Path) -> list[Conversation]:
    """As many as are asked for, from the beginning again if there are fewer."""
    if not found:
        raise ValueError(f"{path}: holds no prompt")
    return [found[i % len(found)] for i in range(count)]
