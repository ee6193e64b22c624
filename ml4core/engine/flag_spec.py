"""What a flag is: its names, the values that it takes, and whether its part has landed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from ml4core import __version__
from ml4core.api import Refusal
from ml4core.models import strict_json
from ml4core.models.errors import shown

Check = Callable[[Any], str]
"""Says what would work if a value doesn't; empty if it does."""

_NOT_YET = f"has not landed in ml4core {__version__}"
_INT64 = 2**63 - 1
_INT32 = 2**31 - 1
# As in vLLM: lower case counts by 1,000, upper case by 1,024.
_UNITS = {u: 1000**i for i, u in enumerate("kmgt", 1)} | {
    u: 1024**i for i, u in enumerate("KMGT", 1)
}
_SIZE = re.compile(r"([0-9]+)([kmgtKMGT]?)|([0-9]+\.[0-9]+)([kmgt])")


@dataclass(frozen=True, kw_only=True)
class Flag:
    """One flag.

    Attributes:
        field: the attribute of ``EngineArgs``, and the flag's name in snake case.
        kind: ``int``, ``float``, ``bool``, ``str``, ``dict`` (JSON object), ``list`` (of ``item``).
        optional: whether None, the default then, leaves the choice to the engine.
        short: a short form, e.g. ``-tp``.
        more: the check of a text that is none of ``choices``; None if they are all.
        exclusive: whether ``minimum`` itself is out of range.
        units: whether ``k``, ``K``, ``m``, ... may follow the number.
        part: what has not landed; empty if all of the flag has.
        reason: the reason to give, where it isn't that ``part`` has not landed.
        works: values that are served nevertheless, beside the default.
        off: tells of further values that they ask for nothing.
        keys: of a JSON flag that has landed: its keys, each with the check of its value.
        others: the check of a further key that something else reads; None for a key that nothing
            does.
    """

    field: str
    kind: type
    item: type = str
    default: Any = None
    optional: bool = False
    help: str = ""
    panel: str = ""
    short: str = ""
    metavar: str = ""
    choices: tuple[str, ...] = ()
    more: Check | None = None
    minimum: float | None = None
    maximum: float | None = None
    exclusive: bool = False
    units: bool = False
    part: str = ""
    reason: str = ""
    works: tuple[Any, ...] = ()
    remedy: str = ""
    off: Callable[[Any], bool] | None = None
    keys: Mapping[str, Check] | None = None
    others: Callable[[str], Check | None] | None = None

    @property
    def name(self) -> str:
        return "--" + self.field.replace("_", "-")

    def parse(self, text: str | bool | Sequence[str]) -> Any:
        """The value that a command line gives: a text, several of a list or JSON flag, or a bool.

        The texts of a JSON flag are whole objects, or ``.key.key=value`` for one key.
        Raises ``ValueError`` with a message that names no flag.
        """
        if self.kind is dict:
            return _parse_json([text] if isinstance(text, str) else list(_texts(text)))
        if self.kind is list:
            return tuple(self._parse_one(one, self.item) for one in _texts(text))
        if isinstance(text, str):
            return self._parse_one(text, self.kind)
        return text

    def _parse_one(self, text: str, kind: type) -> Any:
        if kind is int:
            number = re.fullmatch(r"[+-]?[0-9]{1,20}", text)
            if number:
                return int(text)
            size = _SIZE.fullmatch(text) if self.units and len(text) <= 20 else None
            if size is None:
                form = (
                    "a whole number, with k, m, g, t or K, M, G, T"
                    if self.units
                    else "a whole number"
                )
                raise ValueError(f"{shown(text)} is not {form}")
            whole, unit, decimal, decimal_unit = size.groups()
            if whole is not None:
                return int(whole) * _UNITS.get(unit, 1)
            return int(float(decimal) * _UNITS[decimal_unit])
        if kind is float:
            try:
                return float(text)
            except ValueError:
                raise ValueError(f"{shown(text)} is not a number") from None
        return text

    def problem(self, value: Any) -> str:
        """What is wrong with a value, by type, choices and range; empty if nothing."""
        if value is None and self.optional:
            return ""
        if self.kind is list:
            if not isinstance(value, tuple):
                return f"{shown(value)} is not a tuple"
            return next((text for one in value if (text := self._problem_of(one, self.item))), "")
        return self._problem_of(value, self.kind)

    def _problem_of(self, value: Any, kind: type) -> str:
        if kind is dict:
            return self._json_problem(value)
        # A bool is an int to Python, and an int serves where a float does.
        right = isinstance(value, (int, float) if kind is float else kind)
        if not right or (kind is not bool and isinstance(value, bool)):
            return f"{shown(value)} is not of type {kind.__name__}"
        if kind is str:
            if not value:
                return "an empty text" + (
                    f"; works: {', '.join(self.choices)}" if self.choices else ""
                )
            if self.choices and value not in self.choices:
                further = "" if self.more is None else self.more(value)
                if self.more is None or further:
                    listed = ", ".join(self.choices) + (f", or {further}" if further else "")
                    return f"{shown(value)} is none of {listed}"
        if kind in (int, float):
            return self._range_problem(value)
        return ""

    def _range_problem(self, value: float) -> str:
        low, high = self.minimum, self.maximum
        above = low is None or (value > low if self.exclusive else value >= low)
        if above and (high is None or value <= high):  # False for NaN
            return ""
        if self.exclusive:
            works = f"above {low:g}, up to {high:g}"
        elif value < (low or 0) and high in (_INT32, _INT64):  # the upper bound is of no interest
            works = f"{low} or above"
        else:
            works = f"{low} to {high}"
        return f"{shown(value)} is out of range; works: {works}"

    def _json_problem(self, value: Any) -> str:
        if not isinstance(value, Mapping):
            return f"{shown(value)} is not a JSON object"
        problems = [
            f"{key}: {shown(value[key])}; works: {works}"
            for key in value
            if (check := self._check_of(key)) is not None and (works := check(value[key]))
        ]
        return "; ".join(problems)

    def _check_of(self, key: str) -> Check | None:
        """The check of a JSON flag's key; None if nothing reads the key."""
        if self.keys is None:
            return None
        if key in self.keys or self.others is None:
            return self.keys.get(key)
        return self.others(key)

    def refusals(self, value: Any) -> list[Refusal]:
        """Why a value that is well formed can't be served in this version."""
        if value == self.default:
            return []
        if self.keys is not None:
            works = ", ".join(self.keys)
            reason = f"what reads this key {_NOT_YET}"
            return [
                Refusal("core", f"{self.name} {key}", reason, works)
                for key in value
                if self._check_of(key) is None
            ]
        landed = not (self.part or self.reason)
        if landed or value in self.works or (self.off is not None and self.off(value)):
            return []
        subject = f"{self.name} {value}" if self.choices else self.name
        served = ", ".join(self.works) if self.choices else ""
        return [
            Refusal(
                source="core",
                subject=subject,
                reason=self.reason or f"{self.part} {_NOT_YET}",
                remedy=self.remedy or served or "leave it out",
            )
        ]


def flag(default: Any, help: str, **settings: Any) -> Any:
    """A field of a dataclass that holds flags. ``settings`` are attributes of ``Flag``."""
    metadata = {"flag": settings | {"help": help}}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), hash=False, metadata=metadata)
    return field(default=default, metadata=metadata)


def flags_of(cls: type) -> dict[str, Flag]:
    """The flags of a dataclass by field, in order; fields made without ``flag`` are left out.

    The panel of a flag is the name of the class that declares it.
    """
    hints = get_type_hints(cls)
    table: dict[str, Flag] = {}
    for name, entry in cls.__dataclass_fields__.items():  # type: ignore[attr-defined]
        settings = entry.metadata.get("flag")
        if settings is None:
            continue
        hint = hints[name]
        optional = type(None) in get_args(hint)
        bare = get_args(hint)[0] if optional else hint
        kind, item = {
            tuple[int, ...]: (list, int),
            tuple[str, ...]: (list, str),
            Mapping[str, Any]: (dict, str),
        }.get(bare, (bare, bare))
        limits = {"minimum": 1, "maximum": _INT32} if item is int else {}
        table[name] = Flag(
            field=name,
            panel=_declaring(cls, name).__name__,
            kind=kind,
            item=item,
            optional=optional,
            default={} if kind is dict else entry.default,
            **(limits | settings),
        )
    return table


def _declaring(cls: type, name: str) -> type:
    bases = reversed(cls.__mro__)
    return next(base for base in bases if name in getattr(base, "__dataclass_fields__", ()))


def one_of(*names: str) -> Check:
    return lambda value: "" if value in names else " or ".join(names)


def _texts(given: str | bool | Sequence[str]) -> Sequence[str]:
    if isinstance(given, bool):
        raise ValueError("needs a value")
    return [given] if isinstance(given, str) else given


def _parse_json(texts: Sequence[str]) -> dict[str, Any]:
    """One object out of whole objects and ``.key.key=value`` parts; no key may come twice."""
    result: dict[str, Any] = {}
    for text in texts:
        if text.startswith("."):
            path, equals, value = text[1:].partition("=")
            keys = path.split(".")
            if not equals or not all(keys):
                raise ValueError(f"{shown(text)} is not of the form .key=value")
            part: Any = _json_or_text(value)
            for key in reversed(keys):
                part = {key: part}
        else:
            try:
                part = strict_json.decode(text)
            except ValueError as error:
                raise ValueError(f"{shown(text)}: {error}") from None
            if not isinstance(part, dict):
                raise ValueError(f"{shown(text)} is not a JSON object")
        _merge(result, part, "")
    return result


def _json_or_text(text: str) -> Any:
    try:
        return strict_json.decode(text)
    except ValueError as error:
        if text.startswith(("{", "[", '"')):  # meant as JSON
            raise ValueError(f"{shown(text)}: {error}") from None
        return text


def _merge(into: dict[str, Any], part: Mapping[str, Any], where: str) -> None:
    for key, value in part.items():
        if key not in into:
            into[key] = value
        elif isinstance(into[key], dict) and isinstance(value, dict):
            _merge(into[key], value, f"{where}{key}.")
        else:
            raise ValueError(f"key {shown(where + key)} is given twice")
