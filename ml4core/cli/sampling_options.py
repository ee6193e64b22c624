"""Sampling parameters as options of a command, with vLLM's names: one table."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from ml4core.engine.errors import RequestError
from ml4core.engine.sampling_params import SamplingParams

PANEL = "Sampling"


@dataclass(frozen=True)
class Option:
    """``kind``: int, float, bool, or list for texts that may be repeated. ``default``: where it
    isn't that of ``SamplingParams``.
    """

    field: str
    kind: type
    help: str
    metavar: str | None = None
    default: Any = None

    @property
    def name(self) -> str:
        return "--" + self.field.replace("_", "-")

    def value(self) -> Any:
        """The default, as the option parser takes it: None for no texts."""
        if self.default is not None:
            return self.default
        return getattr(SamplingParams(), self.field) or (None if self.kind is list else 0)


TABLE = (
    Option("max_tokens", int, "Tokens to make at most, for each answer", default=128),
    Option("min_tokens", int, "No stop, of any kind, before this many tokens"),
    Option("temperature", float, "0 takes the likeliest token", default=0.0),
    Option("top_p", float, "Keep the likeliest tokens up to this probability"),
    Option("top_k", int, "Keep this many tokens; 0 or -1 keeps all"),
    Option("min_p", float, "Keep tokens of this share of the likeliest one's probability"),
    Option("presence_penalty", float, "Taken from the logit of tokens in the answer, -2 to 2"),
    Option("frequency_penalty", float, "The same for each time that one is there, -2 to 2"),
    Option("repetition_penalty", float, "Above 1 makes tokens seen before less likely"),
    Option("stop", list, "Text that ends an answer; may be repeated", "TEXT"),
    Option("stop_token_ids", list, "Ids that end an answer; may be repeated", "ID[,ID...]"),
    Option("ignore_eos", bool, "Go on after the end of the answer"),
    Option("n", int, "Answers to each prompt; more than one needs a temperature"),
    Option("logprobs", int, "Likeliest tokens to report beside each made; needs --json"),
)


def with_sampling_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command's function whose second parameter is ``SamplingParams``; its others stay."""
    first, _, *own = inspect.signature(function, eval_str=True).parameters.values()

    def command(first: Any, **given: Any) -> Any:
        chosen = {option.field: given.pop(option.field) for option in TABLE}
        return function(first, _params(chosen), **given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        first,
        *(parameter.replace(kind=keyword) for parameter in own),
        *(_parameter(option) for option in TABLE),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    command.__annotations__ = {}  # the signature holds them
    return command


def _params(chosen: dict[str, Any]) -> SamplingParams:
    chosen["stop"] = tuple(chosen["stop"] or ())
    chosen["stop_token_ids"] = tuple(_ids(chosen["stop_token_ids"] or []))
    return SamplingParams(**chosen)


def _parameter(option: Option) -> inspect.Parameter:
    names = {int: "INTEGER", float: "NUMBER"}
    optional = option.field == "logprobs"
    default = None if optional else option.value()
    shown = "" if default is None or option.kind is bool else f"; default: {default}"
    annotation: Any = list[str] if option.kind is list else option.kind
    return inspect.Parameter(
        option.field,
        inspect.Parameter.KEYWORD_ONLY,
        default=typer.Option(
            default,
            option.name,
            help=f"{option.help}{shown}.",
            metavar=None if option.kind is bool else option.metavar or names[option.kind],
            show_default=False,
            rich_help_panel=PANEL,
        ),
        annotation=annotation,
    )


def _ids(texts: list[str]) -> list[int]:
    words = [word for text in texts for word in text.split(",")]
    for word in words:
        if not word.strip().isdecimal() or len(word) > 10:
            raise RequestError("--stop-token-ids", word, "token ids, 0 or above")
    return [int(word) for word in words]
