"""Errors of what a user asks for: a request, or the flags of an engine."""

from __future__ import annotations

from collections.abc import Iterable

from ml4core.models.errors import shown


class RequestError(ValueError):
    """A request that can't be served as it stands; nothing of it was run.

    Attributes:
        field: what is at fault, e.g. ``max_tokens`` or ``prompt 2``.
        value: what was found; a string is shown as it is, other values by their ``repr``.
        remedy: what would work.
    """

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        found = value if isinstance(value, str) and value.isprintable() else shown(value)
        super().__init__(f"{field}: {found} (works: {remedy})")


class ArgumentsError(ValueError):
    """Flags that can't be taken, with every fault at once."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems: tuple[str, ...] = tuple(dict.fromkeys(problems))
        if not self.problems:
            raise ValueError("ArgumentsError needs at least one problem")
        super().__init__("\n".join(self.problems))
