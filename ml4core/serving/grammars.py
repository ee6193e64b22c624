"""Forms of answers by llguidance, for one tokenizer. The library is imported once one is wanted."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from ml4core.engine.errors import RequestError
from ml4core.engine.structured_outputs import StructuredOutputsParams
from ml4core.serving.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ml4core.engine.grammars import Masks, Matcher

KEPT = 64
"""Compiled forms that are kept: those used last."""
MAX_SYMBOLS = 20_000
MAX_FUEL = 200_000
"""Limits of llguidance: symbols of a grammar, and work on its expressions. The time to compile
grows with the square of a schema's properties: these allow some 2,000, which take about a second.
"""

_PLACE = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_NUMBERED = re.compile(r"\d+ \|")
_SLASH = re.compile(r"\\.|/", re.DOTALL)
"""A slash, or an escaped character, which may be one and stays as it is."""

WHITESPACE = r"( |\n[ \t]{0,40})"
"""Between the parts of JSON: none, a blank, or a new line with its indentation. Without a limit a
weak model may go on with blanks for ever.
"""


class LLGrammars:
    """Compiles forms. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.words = -(-tokenizer.vocab_size // 32)
        self.eos_id = tokenizer.eos_id
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._library: Any = None
        self._table: Any = None
        self._executor: Any = None
        self._limits: Any = None
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def prepare(self) -> None:
        """Reads the vocabulary now, so that the first request for a form need not wait for it. Does
        nothing without llguidance.
        """
        with self._lock, contextlib.suppress(RequestError):
            self._open("structured_outputs")

    def check(self, form: StructuredOutputsParams) -> None:
        self._compile(form)

    def matcher(self, form: StructuredOutputsParams) -> Matcher:
        return _LLMatcher(self._compile(form).deep_copy(), self._tokenizer.vocab_size)

    def fill(self, work: Sequence[tuple[Matcher, int, Sequence[int]]], masks: Masks) -> None:
        where, size, rows = masks.ctypes.data, masks.itemsize * self.words, len(masks)
        alone: list[tuple[Any, int]] = []
        drafted: list[tuple[Any, int, list[int]]] = []
        for matcher, row, drafts in work:
            assert isinstance(matcher, _LLMatcher)
            # A model may have ids that the tokenizer lacks; asked of one, a matcher fails for good.
            known = list(takewhile(lambda token: 0 <= token < self._tokenizer.vocab_size, drafts))
            if known:
                drafted.append((matcher.inner, row, known))
            else:
                alone.append((matcher.inner, row))
        # Both run in parallel and without Python's lock.
        if alone:
            self._executor.unsafe_compute_mask_ptr(alone, where, size, rows)
        if drafted:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(drafted, where, size, rows)

    def _compile(self, form: StructuredOutputsParams) -> Any:
        """A matcher at the beginning, to be copied."""
        key = form.kind, form.text
        with self._lock:
            self._open(form.field)
            found = self._compiled.get(key)
            if found is None:
                found = self._library.LLMatcher(
                    self._table, _grammar(form), log_level=0, limits=self._limits
                )
                if found.is_error():
                    reason = _first_lines(found.get_error())
                    works = "a form that can be compiled"
                    raise RequestError(form.field, reason, works)
                self._compiled[key] = found
                if len(self._compiled) > KEPT:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
            return found

    def _open(self, field: str) -> None:
        if self._table is not None:
            return
        try:
            import llguidance
        except ImportError as error:
            works = "with llguidance: pip install 'ml4core[serve]'"
            raise RequestError(field, f"can't be served: {error}", works) from error
        self._library = llguidance
        self._executor = llguidance.LLExecutor()
        self._limits = llguidance.LLParserLimits(
            max_grammar_size=MAX_SYMBOLS, initial_lexer_fuel=MAX_FUEL
        )
        self._table = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Table(self._tokenizer)))


class _LLMatcher:
    """``inner``: llguidance's."""

    def __init__(self, inner: Any, vocab_size: int) -> None:
        self.inner = inner
        self._vocab_size = vocab_size

    @property
    def error(self) -> str:
        return _first_lines(self.inner.get_error()) if self.inner.is_error() else ""

    def accept(self, token_ids: Sequence[int]) -> None:
        self.inner.consume_tokens(list(token_ids))  # what fails is in ``error``

    def mended(self, drafts: Sequence[int]) -> list[int]:
        known = list(takewhile(lambda token: 0 <= token < self._vocab_size, drafts))
        good = self.inner.validate_tokens(known)
        if good == len(drafts):
            return known
        behind = self.inner.deep_copy()
        behind.consume_tokens(known[:good])
        found = [*known[:good], *behind.compute_ff_tokens()][: len(drafts)]
        return found + list(drafts[len(found) :])


class _Table:
    """The tokenizer's ids as llguidance asks for them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        names = {i: name for name, i in tokenizer.special_tokens.items()}
        self.eos_token_id = tokenizer.eos_id
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(names)
        # A special token's name never stands for it in a text; grammars have it by its id.
        self.tokens = [
            f"<{names[i].strip('[]<>')}_{i}>".encode() if i in names else tokenizer.piece(i)
            for i in range(tokenizer.vocab_size)
        ]
        self._encode = tokenizer.encode

    def __call__(self, text: bytes | str) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._encode(text)[1:]


def schema_lark(schema_text: str) -> str:
    """A schema, the text of an object, as a part of a grammar."""
    schema = json.loads(schema_text)
    options = {"whitespace_pattern": WHITESPACE}
    return "%json " + json.dumps(schema | {"x-guidance": options}, ensure_ascii=False)


def _grammar(form: StructuredOutputsParams) -> str:
    match form.kind:
        case "json":
            return f"start: {schema_lark(form.text)}"
        case "regex":
            return json.dumps({"grammars": [{"lark_grammar": f"start: {_regex(form.text)}"}]})
        case "choice":
            texts = (json.dumps(text, ensure_ascii=False) for text in json.loads(form.text))
            return f"start: {' | '.join(texts)}"
        case "grammar":
            return form.text


def _regex(text: str) -> str:
    """As Lark has it between slashes."""
    return "/" + _SLASH.sub(lambda found: found[0] if len(found[0]) > 1 else r"\/", text) + "/"


def _first_lines(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    # Behind what is wrong stand the grammar's own lines, numbered, or the parser's state.
    told = takewhile(lambda line: line != "<state>" and not _NUMBERED.match(line), lines)
    return _PLACE.sub("", "; ".join(told))[:300]
