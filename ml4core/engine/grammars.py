"""Answers held to a form: what the engine asks of whoever knows grammars, and what it keeps of one.

A grammar's state is on the host. A step's masks are made when its draws are queued: by then all
tokens before them are known, with a step in flight too, and while the host works the device runs
the forward. Of a verify window each row has the mask behind the drafts before it; whatever becomes
of the drafts, the state itself moves by tokens that were emitted only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ml4core.engine.structured_outputs import StructuredOutputsParams

Masks = NDArray[np.int32]
"""[rows, words]: bit ``i % 32`` of word ``i // 32`` is set where token ``i`` may come."""


class Matcher(Protocol):
    """Where one answer stands in its grammar.

    Attributes:
        error: why it can't be told any more what may come; empty while it can.
    """

    @property
    def error(self) -> str: ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Moves on by tokens of the answer. A token that may not come is an ``error``."""
        ...

    def mended(self, drafts: Sequence[int]) -> list[int]:
        """As many drafts: in place of the first that may not come, and behind it, those that must
        come there, where the grammar leaves no other. The matcher stays as it is.
        """
        ...


class GrammarCompiler(Protocol):
    """Compiles forms for one tokenizer.

    Attributes:
        words: of a row of masks.
        eos_id: the token that ends an answer, which may come when its form is complete.
    """

    words: int
    eos_id: int

    def check(self, form: StructuredOutputsParams) -> None:
        """Raises ``RequestError`` for a form that can't be compiled. In any thread."""
        ...

    def matcher(self, form: StructuredOutputsParams) -> Matcher:
        """One at the beginning of an answer. Raises as ``check``."""
        ...

    def fill(self, work: Sequence[tuple[Matcher, int, Sequence[int]]], masks: Masks) -> None:
        """Of each (matcher, row, drafts): the mask of what may come next into its row, and behind
        each of the drafts into the rows after it, up to a draft that may not come; what is beyond
        stays. Matchers stay as they are, but for an ``error``.
        """
        ...


class GrammarState:
    """The grammar of one sequence."""

    def __init__(self, compiler: GrammarCompiler, form: StructuredOutputsParams) -> None:
        self.compiler = compiler
        self.matcher = compiler.matcher(form)
        self._taken = 0

    @property
    def error(self) -> str:
        return self.matcher.error

    def mended(self, output_ids: Sequence[int], drafts: Sequence[int]) -> list[int]:
        """The drafts behind ``output_ids``, in the grammar's sight."""
        self.follow(output_ids)
        return list(drafts) if self.error else self.matcher.mended(drafts)

    def follow(self, output_ids: Sequence[int]) -> None:
        """Takes over the output's tokens that came since the last time."""
        if len(output_ids) > self._taken:
            self.matcher.accept(output_ids[self._taken :])
            self._taken = len(output_ids)
