"""The engine's flags as options of a command, made from the one table of flags."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from ml4core.cli import streams
from ml4core.cli.exits import UsageError
from ml4core.engine.args import FLAGS, EngineArgs
from ml4core.engine.flag_spec import Flag

MODEL_HELP = "A checkpoint's folder, a Hugging Face id org/name, or ml4-tiny, the shipped model."
PANELS = ("Model", "Memory", "Parallel", "Features")
_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT", dict: "JSON"}
_BY_NAME = {flag.name: flag for flag in FLAGS.values()}
_INTEGERS = re.compile(r"-?[0-9]+(,-?[0-9]+)*")


class EngineCommand(TyperCommand):
    """A command with the engine's flags, in each form that vLLM takes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        valued: set[str] = set()
        known: set[str] = set()
        for option in self.params:
            if option.param_type_name == "option":
                known.update(option.opts, option.secondary_opts)
                if not getattr(option, "is_flag", False):
                    valued.update(option.opts)
        return super().parse_args(ctx, list(expand(args, valued, known)))

    def invoke(self, ctx: Any) -> Any:
        with streams.results_apart():  # plugins are loaded in this process
            return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Plain sections: names of this length would be cut in a panel's columns."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                title = (
                    getattr(param, "rich_help_panel", None) or f"{param.param_type_name}s".title()
                )
                sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def expand(args: Sequence[str], valued: set[str], known: set[str]) -> Iterator[str]:
    """The forms that the option parser does not know, in forms that it does.

    ``--a_b`` becomes ``--a-b``; ``--json.key VALUE`` becomes ``--json .key=VALUE``; ``--list 1 2``
    becomes ``--list 1 --list 2``. ``valued``: options with a value, which is never looked into;
    ``known``: all options.
    """
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if word == "--":
            yield from (word, *rest)
            return
        if not word.startswith("-") or word == "-":
            yield word
            continue
        name, equals, value = word.partition("=")
        stem, dot, path = name.partition(".")
        dashed = stem.replace("_", "-")
        if stem.startswith("--") and dashed in known:
            stem = dashed
        flag = _BY_NAME.get(stem)
        if dot and stem in known and flag is not None and flag.kind is dict:
            if not equals and not rest:
                raise UsageError(f"{name} needs a value")
            yield from (stem, f".{path}={value if equals else rest.pop(0)}")
        elif flag is not None and flag.kind is list and stem in known:
            values = [value] if equals else _values(flag, rest)
            if not values:  # the parser says what is missing
                yield stem
            for one in values:
                yield from (stem, one)
        else:
            yield stem + dot + path + equals + value
            if stem + dot + path in valued and not equals and rest:
                yield rest.pop(0)


def _values(flag: Flag, rest: list[str]) -> list[str]:
    """Takes the values of a list flag from the front of ``rest``."""
    taken: list[str] = []
    while rest and (_INTEGERS.fullmatch(rest[0]) if flag.item is int else rest[0][:1] != "-"):
        taken += rest.pop(0).split(",") if flag.item is int else [rest.pop(0)]
    return taken


def with_engine_flags(
    function: Callable[..., Any], default_model: str | None = None, *, plans: bool | None = None
) -> Callable[..., Any]:
    """A command's function whose first parameter is ``EngineArgs``; its other ones are options.

    ``default_model``: the model where none is given. ``plans``: the command only plans, so that its
    flags work whether or not an engine can be started with them; default: if there is such a model.
    """
    if plans is None:
        plans = default_model is not None
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

    def command(*, model: str | None, **given: Any) -> Any:
        flags = {name: given.pop(name) for name in FLAGS}
        stated = {name: value for name, value in flags.items() if value not in (None, [])}
        return function(
            EngineArgs.parse(default_model or "" if model is None else model, stated), **given
        )

    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter(
            "model",
            keyword,
            default=typer.Argument(
                ... if default_model is None else None, help=MODEL_HELP, metavar="MODEL"
            ),
            annotation=str,
        ),
        *(parameter.replace(kind=keyword) for parameter in own),
        *(
            option(FLAGS[name], plans)
            for panel in PANELS
            for name in FLAGS
            if FLAGS[name].panel == panel
        ),
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__name__ = function.__name__
    command.__doc__ = function.__doc__
    command.__annotations__ = {}  # the signature holds them
    return command


def option(flag: Flag, plans: bool) -> inspect.Parameter:
    """A flag as an option of a command; see ``with_engine_flags``."""
    names = [flag.short] if flag.short else []
    names.append(f"{flag.name}/--no-{flag.name[2:]}" if flag.kind is bool else flag.name)
    made = typer.Option(
        None,
        *names,
        help=_help(flag, plans),
        metavar=None if flag.kind is bool else _metavar(flag),
        show_default=False,
        rich_help_panel=flag.panel,
    )
    annotation: Any = str
    if flag.kind is bool:
        annotation = bool
    elif flag.kind in (list, dict):
        annotation = list[str]
    return inspect.Parameter(
        flag.field, inspect.Parameter.KEYWORD_ONLY, default=made, annotation=annotation
    )


def _metavar(flag: Flag) -> str:
    if flag.metavar:
        return flag.metavar
    if flag.choices:
        return "|".join(flag.choices)
    kind = flag.item if flag.kind is list else flag.kind
    return _METAVARS[kind] + ("..." if flag.kind is list else "")


def _help(flag: Flag, plans: bool) -> str:
    text = flag.help[0].upper() + flag.help[1:]
    if flag.kind is not bool and flag.default not in (None, (), {}):
        text += f"; default: {flag.default}"
    if flag.part and not flag.works and not plans:
        text += "; has not landed"
    return text + "."
