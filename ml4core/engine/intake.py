"""From what a caller asks for to the sequences that the scheduler knows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from time import monotonic

from ml4core.api import VisionSpec
from ml4core.engine.errors import RequestError
from ml4core.engine.grammars import GrammarCompiler, GrammarState
from ml4core.engine.image_inputs import PlacedImage
from ml4core.engine.image_limits import FLAG
from ml4core.engine.kv_manager import KVManager
from ml4core.engine.request import Request
from ml4core.engine.sampling_params import SamplingParams, child_seed
from ml4core.models.pixtral_sizes import unfit


class Intake:
    """Checks requests against the model and the pools, and makes their sequences."""

    def __init__(
        self,
        kv: KVManager,
        *,
        vocab_size: int,
        max_model_len: int,
        max_num_seqs: int,
        eos_ids: frozenset[int],
        seed: int,
        grammars: GrammarCompiler | None = None,
        max_images: int = 0,
        vision: VisionSpec | None = None,
    ) -> None:
        self._kv = kv
        self._max_images = max_images
        self._vision = vision
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_num_seqs = max_num_seqs
        self._eos_ids = eos_ids
        self._seed = seed
        self._orders = count()

    def check(self, name: str, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raises ``RequestError`` for what can't be served even alone. Messages call the prompt
        ``name``.
        """
        check_prompt(name, prompt_ids, self._vocab_size, self._max_model_len)
        params.check(self._vocab_size, self._max_model_len)
        if params.structured_outputs is not None:
            self._compiler().check(params.structured_outputs)
        most = self._max_num_seqs
        if params.n > most:
            raise RequestError("n", params.n, f"at most {most}: --max-num-seqs")
        limit = params.length_limit(len(prompt_ids), self._max_model_len)
        room = self._kv.room(limit - 1) + 1  # the key of the last token is never needed
        if limit > room:
            raise RequestError(
                f"{name} with its answer",
                f"{limit} tokens",
                f"at most {room} in this pool: a larger --kv-cache-memory-bytes or fewer "
                "--max-tokens",
            )

    def check_images(self, prompt_ids: Sequence[int], images: Sequence[PlacedImage]) -> None:
        """Raises ``RequestError`` for images that the prompt can't have."""
        most = self._max_images
        if len(images) > most:
            works = f"at most {most}: {FLAG}" if most else f"none; {FLAG} allows them"
            raise RequestError("images", len(images), works)
        if images and images[-1].end > len(prompt_ids):
            works = f"within its {len(prompt_ids)} tokens"
            raise RequestError("images", f"up to token {images[-1].end} of the prompt", works)
        if self._vision is None:
            return
        for index, image in enumerate(images):
            # A tokenizer's own limit may be another one, and in a step it is too late.
            found, _, works = unfit(self._vision, image.pixels.shape).partition("; ")
            if found:
                raise RequestError(f"image {index}", found, works)

    def sequences(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        arrival: float | None,
        priority: int,
        cache_salt: str | None,
        images: tuple[PlacedImage, ...] = (),
    ) -> list[Request]:
        """``params.n`` sequences of one prompt, with noise of their own each."""
        prompt = list(prompt_ids)
        orders = [next(self._orders) for _ in range(params.n)]
        seed = child_seed(self._seed, orders[0] + 1) if params.seed is None else params.seed
        stops = frozenset(params.stop_token_ids)
        return [
            Request(
                request_id,
                prompt,
                params,
                params.length_limit(len(prompt), self._max_model_len),
                seed=child_seed(seed, index),
                index=index,
                stop_ids=stops if params.ignore_eos else stops | self._eos_ids,
                arrival=monotonic() if arrival is None else arrival,
                order=order,
                priority=priority,
                cache_salt=cache_salt,
                # The prompt's logits are there only where it is computed.
                read_cache=index > 0 or params.prompt_logprobs is None,
                grammar=self._grammar(params),
                images=images,
            )
            for index, order in enumerate(orders)
        ]

    def _grammar(self, params: SamplingParams) -> GrammarState | None:
        form = params.structured_outputs
        return None if form is None else GrammarState(self._compiler(), form)

    def _compiler(self) -> GrammarCompiler:
        if self._grammars is None:
            works = "none: this engine was opened without a tokenizer"
            raise RequestError("structured_outputs", "given", works)
        return self._grammars


def check_prompt(name: str, ids: Sequence[int], vocab_size: int, max_model_len: int) -> None:
    """Raises ``RequestError`` for a prompt that the model can't be given."""
    if not ids:
        raise RequestError(name, "empty", "at least one token")
    last = vocab_size - 1
    if not 0 <= min(ids) <= max(ids) <= last:
        place = next(i for i, token in enumerate(ids) if not 0 <= token <= last)
        raise RequestError(f"{name}, token {place}", ids[place], f"ids from 0 to {last}")
    longest = max_model_len - 1
    if len(ids) > longest:
        raise RequestError(
            name,
            f"{len(ids)} tokens",
            f"at most {longest}: the context is {max_model_len} tokens and one is needed "
            "for the answer",
        )
