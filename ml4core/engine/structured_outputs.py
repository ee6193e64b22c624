"""What form an answer is to have. Names are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ml4core.engine.errors import RequestError

FIELDS = ("json", "regex", "choice", "grammar", "json_object")

Kind = Literal["json", "regex", "choice", "grammar"]

MAX_TEXT = 512 * 1024
"""Characters of a form. Compiling takes time with its length, and nobody else is to wait for it."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """One of these; the answer ends when it is complete.

    Attributes:
        json: a JSON schema, as an object or its text.
        regex: a regular expression that the whole answer matches.
        choice: texts, one of which is the answer.
        grammar: a grammar in llguidance's form of Lark.
        json_object: any JSON object.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in FIELDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "nothing"
            raise RequestError("structured_outputs", found, f"one of {', '.join(FIELDS)}")
        if self.json_object not in (None, False, True):
            raise RequestError("structured_outputs.json_object", self.json_object, "true")
        for field in ("regex", "grammar"):
            text = getattr(self, field)
            if text is not None and not isinstance(text, str):
                raise RequestError(f"structured_outputs.{field}", text, "a text")
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if len(self.text) > MAX_TEXT:
            works = f"at most {MAX_TEXT:,} characters"
            raise RequestError(self.field, f"{len(self.text):,} characters", works)

    @property
    def kind(self) -> Kind:
        if self.json is not None or self.json_object:
            return "json"
        if self.regex is not None:
            return "regex"
        return "choice" if self.choice is not None else "grammar"

    @property
    def field(self) -> str:
        """What messages call it."""
        return f"structured_outputs.{'json_object' if self.json_object else self.kind}"

    @property
    def text(self) -> str:
        """The form as a text; a schema and choices are JSON."""
        if self.json_object:
            return '{"type":"object"}'
        if self.choice is not None:
            return json.dumps(self.choice, ensure_ascii=False)
        found = self.json or self.regex or self.grammar or ""
        assert isinstance(found, str), "a schema is kept as its text"
        return found


def _choices(given: Any) -> tuple[str, ...]:
    choices = tuple(given) if isinstance(given, list | tuple) else ()
    if not choices or not all(isinstance(one, str) and one for one in choices):
        raise RequestError(
            "structured_outputs.choice", given, "a list of texts, none of them empty"
        )
    return choices


def _schema(given: Any) -> str:
    """The text of a schema; an object is never changed by who gave it, once it is a text."""
    field, works = "structured_outputs.json", "a JSON schema: an object, or its text"
    if isinstance(given, str):
        if len(given) > MAX_TEXT:
            raise RequestError(field, f"{len(given):,} characters", f"at most {MAX_TEXT:,}")
        try:
            decoded = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise RequestError(field, str(error), works) from error
    else:
        decoded = given
    if not isinstance(decoded, Mapping):
        raise RequestError(field, given, works)
    try:
        return json.dumps(dict(decoded), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(field, str(error), works) from error
