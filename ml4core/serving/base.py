"""What the Python APIs have in common: how a model is opened, and what it tells of itself."""

from __future__ import annotations

from typing import Any, Self

from ml4core.engine.args import EngineArgs
from ml4core.models.embedded import EMBEDDED
from ml4core.serving.opening import Opened, make_args, open_for_any
from ml4core.serving.tokenizer import Tokenizer


class OpenedModel:
    """A model with its tokenizer, opened by its flags.

    Attributes:
        args: with the model as a local folder.
    """

    _serves = False
    """Whether the engine steps without being asked, as replicas need it."""

    def __init__(self, model: str = EMBEDDED, backend: str = "cpu", **flags: Any) -> None:
        """Opens a model.

        Args:
            model: a folder, a hub id ``org/name``, or the shipped model.
            backend: what runs it; ``auto`` for the best that opens.
            flags: fields of ``EngineArgs``, which are the flags of the command line.

        Raises:
            TypeError: a flag that isn't one.
            ArgumentsError: flags with bad values, every fault at once.
            Refused: with all reasons, before anything is allocated.
            CheckpointError: the checkpoint or the tokenizer can't be used.
            RequestError: a flag's value can't be, with this model.
        """
        self._start(open_for_any(make_args(model, backend, flags), serves=self._serves))

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> Self:
        """Raises as the constructor does."""
        made = cls.__new__(cls)
        made._start(open_for_any(args, serves=cls._serves))
        return made

    def _start(self, opened: Opened) -> None:
        self.args = opened.args
        self.engine = opened.engine
        self._tokenizer = opened.tokenizer
        self._grammars = opened.grammars

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def report(self) -> dict[str, Any]:
        """What runs where, and why not elsewhere, as JSON-able data."""
        return self.engine.report()
