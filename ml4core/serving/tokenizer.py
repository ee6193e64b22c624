"""Text to token ids and back, by mistral-common's Tekken tokenizers."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml4core.engine.errors import RequestError
from ml4core.models.errors import CheckpointError, listed, os_reason
from ml4core.models.strict_json import open_regular

if TYPE_CHECKING:
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

TEKKEN = "tekken.json"
OTHER_KINDS = ("tokenizer.model*", "tokenizer.json")
"""Files of tokenizers that are not read: SentencePiece, Hugging Face."""

REPLACEMENT = "\ufffd".encode()


def find_tokenizer(folder: Path, tokenizer: str | None = None) -> Path:
    """The Tekken file: that of the flag, a file or a folder, else the one in the model's folder.

    Raises CheckpointError that names what was looked for.
    """
    place = Path(tokenizer).expanduser() if tokenizer is not None else folder
    if not place.exists():
        flag = "" if tokenizer is None else "--tokenizer "
        raise CheckpointError(f"{flag}{place}: no such file or folder")
    if place.is_file():
        if place.suffix != ".json" or "tekken" not in place.name:
            raise CheckpointError(
                f"{place}: not a Tekken file: its name must hold 'tekken' and end in .json, as in "
                f"{TEKKEN}"
            )
        return place
    if (place / TEKKEN).is_file():
        return place / TEKKEN
    try:
        found = sorted(path for path in place.glob("*tekken*.json") if path.is_file())
    except OSError as error:
        raise CheckpointError(f"{place}: can't be listed: {os_reason(error)}") from error
    if len(found) == 1:
        return found[0]
    if found:
        raise CheckpointError(
            f"{place}: which tokenizer is meant can't be known: {listed([p.name for p in found])}; "
            "name one by --tokenizer"
        )
    others = sorted(path.name for kind in OTHER_KINDS for path in place.glob(kind))
    unread = f"; {listed(others)} is of a kind that is not read" if others else ""
    raise CheckpointError(
        f"{place}: no tokenizer: looked for {TEKKEN} and *tekken*.json{unread}. "
        "Name a Tekken file by --tokenizer"
    )


class Tokenizer:
    """A Tekken tokenizer. Ids are 0 to ``vocab_size`` - 1, the special ones first.

    Attributes:
        mistral: mistral-common's, which knows the template of chats.
    """

    def __init__(self, path: Path, loaded: MistralTokenizer) -> None:
        self.path = path
        self.mistral = loaded
        self._tekken: Any = loaded.instruct_tokenizer.tokenizer
        self.vocab_size = int(self._tekken.n_words)
        self.bos_id = int(self._tekken.bos_id)
        self.eos_id = int(self._tekken.eos_id)
        self.version = str(self._tekken.version.value)
        self._special = {
            str(self._tekken.id_to_piece(i)): i for i in range(self._tekken.num_special_tokens)
        }
        self._texts: dict[int, bytes] = {}  # of ids that are text, as they were asked for

    @classmethod
    def load(cls, path: Path) -> Tokenizer:
        """Read a Tekken file. Raises CheckpointError that names the file and the reason."""
        open_regular(path).close()  # names what is wrong with the path
        try:
            from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
        except ImportError as error:
            raise CheckpointError(
                f"{path}: can't be read without mistral-common ({error}); "
                "pip install mistral-common"
            ) from error
        try:
            return cls(path, MistralTokenizer.from_file(str(path)))
        except Exception as error:  # from_file asserts, indexes and validates as it goes
            raise CheckpointError(
                f"{path}: not a Tekken file that mistral-common reads: {_first_line(error)}"
            ) from error

    def check_vocab(self, model_vocab_size: int) -> None:
        """Raises CheckpointError if the tokenizer has ids that the model has no row for."""
        if self.vocab_size > model_vocab_size:
            raise CheckpointError(
                f"{self.path}: has {self.vocab_size} ids, the model's vocab_size is "
                f"{model_vocab_size}: they are not of one model. Name the model's own by "
                "--tokenizer"
            )

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Ids of the special tokens by name; they are the first ids."""
        return self._special

    def special_id(self, name: str) -> int | None:
        """The id of a special token, such as ``[TOOL_CALLS]``; None if there is none."""
        return self._special.get(name)

    @property
    def image_cell(self) -> int | None:
        """Side in pixels of what one image token stands for; None for a tokenizer of text alone."""
        encoder = getattr(self.mistral.instruct_tokenizer, "image_encoder", None)
        if encoder is None or self.special_id("[IMG]") is None:
            return None
        config = encoder.image_config
        return int(config.image_patch_size * config.spatial_merge_size)

    @property
    def reasoning_efforts(self) -> tuple[str, ...]:
        """What a chat may ask for as ``reasoning_effort``; empty where the template has no such."""
        return tuple(str(value) for value in getattr(self._efforts, "values", None) or ())

    @property
    def default_reasoning_effort(self) -> str | None:
        """What a chat that asks for none gets."""
        default = getattr(self._efforts, "default", None)
        return None if default is None else str(default)

    @property
    def _efforts(self) -> Any:
        builder = getattr(self._tekken, "model_settings_builder", None)
        return getattr(builder, "reasoning_effort", None)

    def encode(self, text: str, field: str = "prompt") -> list[int]:
        """Ids of a plain text after the id of the beginning. Special tokens' names are text here.

        Raises RequestError, naming ``field``, for text that has no UTF-8 form or can't be divided.
        """
        check_text(text, field)
        try:
            ids: list[int] = self._tekken.encode(text, bos=True, eos=False)
        except ValueError as error:  # the pattern gives up on very long runs of blanks
            raise RequestError(field, _first_line(error), "text without such long runs") from error
        return ids

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], field: str = "messages"
    ) -> list[int]:
        """Ids of a chat in the tokenizer's own template, up to where the answer begins.

        ``messages`` are those of the OpenAI API, their content text. Raises RequestError for a chat
        that the template does not allow.
        """
        from mistral_common.exceptions import MistralCommonException
        from mistral_common.protocol.instruct.request import ChatCompletionRequest

        for message in messages:
            _check_content(message, field)
        try:
            request = ChatCompletionRequest.from_openai([dict(message) for message in messages])
            ids: list[int] = self.mistral.encode_chat_completion(request).tokens
        except (MistralCommonException, ValueError, TypeError, KeyError) as error:
            works = f"a chat that the {self.version} template allows, without very long runs"
            raise RequestError(field, _first_line(error), works) from error
        return ids

    def piece(self, token_id: int, skip_special_tokens: bool = True) -> bytes:
        """The bytes of one id: none for a special id, or its name; U+FFFD for one that only the
        model has.
        """
        text = self._texts.get(token_id)
        if text is not None:
            return text
        if not 0 <= token_id < self.vocab_size:
            return REPLACEMENT
        if not skip_special_tokens and self._tekken.is_special(token_id):
            name: str = self._tekken.id_to_piece(token_id)
            return name.encode()
        piece: bytes = self._tekken.id_to_byte_piece(token_id)
        if not self._tekken.is_special(token_id):
            self._texts[token_id] = piece
        return piece

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids' ``piece``s joined. Bytes that are not UTF-8 become U+FFFD."""
        pieces = (self.piece(token, skip_special_tokens) for token in ids)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def stream(self, skip_special_tokens: bool = True) -> StreamDecoder:
        return StreamDecoder(self, skip_special_tokens)


class StreamDecoder:
    """Text of ids as they come. A character is given once it is whole.

    What ``push`` and ``flush`` return, joined, is ``Tokenizer.decode`` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The characters that this id completes; empty while one is cut."""
        return self._utf8.decode(self._tokenizer.piece(token_id, self._skip))

    def flush(self) -> str:
        """At the end: one U+FFFD if a character stayed cut, else empty."""
        return self._utf8.decode(b"", final=True)


def check_text(text: str, field: str) -> None:
    """Raises RequestError for text that has no UTF-8 form, as the bytes of an argument may give."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            field, f"no UTF-8 text: character {error.start} is {text[error.start]!a}", "UTF-8 text"
        ) from error


def _check_content(message: Mapping[str, Any], field: str) -> None:
    """Raises RequestError for content that is not text. An image would be fetched from the address
    that its part gives, a file of this machine too.
    """
    role, content = message.get("role"), message.get("content")
    works = 'a text, or a list of {"type": "text", "text": ...}'
    if isinstance(content, str):
        check_text(content, field)
        return
    if content is None and role == "assistant":
        return
    if not isinstance(content, list | tuple):
        raise RequestError(f"{field}, content of a message of {role!r}", content, works)
    for part in content:
        kind, text = (
            (part.get("type"), part.get("text")) if isinstance(part, Mapping) else (part, None)
        )
        if kind != "text" or not isinstance(text, str):
            why = "images and other media have not landed"
            raise RequestError(f"{field}, content of type", kind, f"{works}; {why}")
        check_text(text, field)


def _first_line(error: Exception) -> str:
    text = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
