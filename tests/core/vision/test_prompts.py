"""Images in prompts: their embeddings stand where their tokens do, whatever the chunks, and cached
prefixes know which image they hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ml4core.engine.args import EngineArgs
from ml4core.engine.errors import RequestError
from ml4core.engine.image_inputs import PlacedImage, block_keys, place_images, rows_of
from ml4core.engine.llm import Engine, open_engine
from ml4core.engine.sampling_params import SamplingParams
from ml4core.models.checkpoint import Checkpoint, CheckpointWriter
from ml4core.models.errors import CheckpointError
from ml4core.models.pixtral import vision_spec
from ml4core.models.pixtral_images import patch_images
from ml4core.models.seeded import make_seeded
from ml4core.models.seeded_config import PRESETS
from ml4core.registry import select

from .support import BLOCK, random_images, random_tensors

pytestmark = pytest.mark.usefixtures("probed_once")

IMG, BREAK, END = 10, 12, 13
SIZES: dict[str, Any] = {"layers": 4, "topk": 16, "vocab": 320}
FREE = range(200, 320)
"""Ids that stand for nothing else."""
PARAMS = SamplingParams(
    temperature=0,
    max_tokens=6,
    logprobs=0,
    ignore_eos=True,
    allowed_token_ids=tuple(range(14, FREE.start)),
)

Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder with random weights, and an encoder."""
    folder = tmp_path_factory.mktemp("images")
    target = make_seeded(folder / "target", "micro", **SIZES)
    params = replace(PRESETS["micro"], **SIZES).params() | {"vision_encoder": dict(BLOCK)}
    checkpoint = Checkpoint.open(target)
    spec = vision_spec(params, int(params["dim"]))
    assert spec is not None
    with CheckpointWriter(folder / "model") as writer:
        writer.add_json("params.json", json.loads(json.dumps(params)))
        for name in checkpoint.tensors:
            writer.add(name, checkpoint.read(name))
        for name, tensor in random_tensors(spec).items():
            writer.add(name, tensor)
        writer.add_file("tekken.json", (target / "tekken.json").read_bytes())
    return folder / "model"


@pytest.fixture(scope="module")
def start(model: Path) -> Iterator[Start]:
    choice, opened = select("cpu"), []

    def made(images: int = 2, **flags: Any) -> Engine:
        limits = {"limit_mm_per_prompt": {"image": images}} if images else {}
        settings = {"block_size": 16, "step_timeout_s": 0.0} | limits | flags
        args = EngineArgs(str(model), backend="cpu", **settings)
        opened.append(open_engine(args, choice=choice, sequences=4, tokens_each=160))
        return opened[-1]

    yield made
    for engine in opened:
        engine.close()


def tokens(cells: Sequence[tuple[int, int]]) -> list[int]:
    """Text, then images between texts."""
    found = [1, 100, 101, 102, 103]
    for rows, columns in cells:
        found += ([IMG] * columns + [BREAK]) * rows
        found[-1] = END
        found += [110, 111, 112]
    return found


def placed(engine: Engine, cells: Sequence[tuple[int, int]], seed: int) -> tuple[PlacedImage, ...]:
    spec = engine.deployment.model.vision
    assert spec is not None
    return place_images(tokens(cells), random_images(spec, cells, seed), IMG, spec.cell_size)


def run(
    engine: Engine, ids: Sequence[int], images: Sequence[PlacedImage] = (), **params: Any
) -> Any:
    """Its last output, with all tokens and logprobs."""
    engine.core.add_request("r", ids, replace(PARAMS, **params), images=images)
    made: list[int] = []
    logprobs: list[float] = []
    last = None
    while engine.core.has_work:
        for output in engine.core.step():
            if output.request_id != "r":
                continue
            made += output.token_ids
            entries = zip(output.token_ids, output.logprobs or (), strict=True)
            logprobs += [entry[token].logprob for token, entry in entries]
            if output.prompt_logprobs is not None:
                logprobs = [next(iter(e.values())).logprob for e in output.prompt_logprobs[1:]]
                logprobs += [output.logprobs[0][made[0]].logprob]
            last = output
        if engine.core.cause is not None:
            raise engine.core.cause
    assert last is not None
    return made, logprobs, last.cached_tokens


CELLS = ((3, 5), (1, 2))


def by_tokens(engine: Engine, cells: Sequence[tuple[int, int]], seed: int) -> Any:
    """The same from text alone: ids that are else unused are given the images' embeddings."""
    spec, runner = engine.deployment.model.vision, engine.runner
    assert spec is not None
    assert runner.weights is not None
    images = random_images(spec, cells, seed)
    embeddings = torch.cat([runner.encode_images(patch_images(spec, [one])) for one in images])
    table: Any = runner.weights.top["embedding"]
    table = getattr(table, "data", table)
    held = slice(FREE.start, FREE.start + len(embeddings))
    before = table[held].clone()
    table[held] = embeddings.to(table.dtype)
    given = iter(FREE)
    ids = [next(given) if token == IMG else token for token in tokens(cells)]
    try:
        return run(engine, ids, prompt_logprobs=0)
    finally:
        table[held] = before


def test_embeddings_stand_where_the_image_tokens_do(start: Start) -> None:
    engine = start(enable_prefix_caching=False)
    made, logprobs, _ = run(engine, tokens(CELLS), placed(engine, CELLS, 1), prompt_logprobs=0)
    wanted, others, _ = by_tokens(engine, CELLS, 1)
    assert made == wanted
    # The prompt's own logprobs are of other ids where an image's token is told of.
    told = [i for i, token in enumerate(tokens(CELLS)[1:]) if token != IMG]
    np.testing.assert_allclose(np.array(logprobs)[told], np.array(others)[told], rtol=0, atol=2e-2)
    plain = run(engine, tokens(CELLS), prompt_logprobs=0)
    assert np.abs(np.array(plain[1]) - np.array(logprobs))[-1] > 1e-3, "images change what follows"


@pytest.mark.parametrize("overlap", [False, True])
def test_chunks_and_neighbours_change_nothing(start: Start, overlap: bool) -> None:
    whole = start(enable_prefix_caching=False)
    cut = start(enable_prefix_caching=False, max_num_batched_tokens=7, max_num_seqs=2)
    cut.core.overlap = overlap
    images = placed(whole, CELLS, 1)
    wanted = run(whole, tokens(CELLS), images)
    cut.core.add_request("text", [1, 2, 3, 4], replace(PARAMS, max_tokens=20))
    made = run(cut, tokens(CELLS), images)
    assert made[0] == wanted[0]
    np.testing.assert_allclose(made[1], wanted[1], rtol=0, atol=2e-3)


def test_a_cached_prefix_is_of_one_image(start: Start) -> None:
    engine, fresh = start(enable_prefix_caching=True), start(enable_prefix_caching=False)
    one, other = (placed(engine, CELLS, seed) for seed in (1, 2))
    ids = tokens(CELLS)
    first = run(engine, ids, one)
    second = run(engine, ids, other)
    assert first[2] == second[2] == 0, "equal tokens, another image: nothing is shared"
    third = run(engine, ids, one)
    assert third[2] >= 16
    assert third[0] == first[0]
    assert second[0] == run(fresh, ids, other)[0]
    np.testing.assert_allclose(third[1], first[1], rtol=0, atol=2e-3)


def test_an_image_is_encoded_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, calls = start(enable_prefix_caching=False, max_num_batched_tokens=7), []
    encode = engine.runner.encode_images
    monkeypatch.setattr(
        engine.runner, "encode_images", lambda batch: calls.append(1) or encode(batch)
    )
    images = placed(engine, CELLS, 1)
    run(engine, tokens(CELLS), images)
    run(engine, tokens(CELLS), images)
    assert len(calls) == len(CELLS)


def test_what_is_asked_for_is_allowed(start: Start) -> None:
    engine, without = start(images=1), start(images=0)
    images = placed(engine, CELLS, 1)
    with pytest.raises(RequestError, match=r"images: 2 \(works: at most 1: --limit-mm"):
        engine.core.add_request("r", tokens(CELLS), PARAMS, images=images)
    with pytest.raises(RequestError, match=r"images: 1 \(works: none; --limit-mm"):
        without.core.add_request("r", tokens(CELLS), PARAMS, images=images[:1])
    with pytest.raises(RequestError, match="up to token"):
        engine.core.add_request("r", tokens(CELLS)[:8], PARAMS, images=images[:1])
    (large,) = place_images([IMG] * 7, [np.zeros((3, 8, 56), np.float32)], IMG, 8)
    with pytest.raises(RequestError, match=r"image 0: 8 x 56 pixels \(works: both .* 8 to 48"):
        engine.core.add_request("r", [IMG] * 7, PARAMS, images=[large])
    assert not engine.core.has_work
    assert without.runner.vision_weights is None


def test_an_encoder_must_be_there(tmp_path: Path) -> None:
    plain = make_seeded(tmp_path / "plain", "micro", layers=4)
    args = EngineArgs(str(plain), backend="cpu", limit_mm_per_prompt={"image": 1})
    with pytest.raises(CheckpointError, match=r"--limit-mm-per-prompt: .* has no encoder"):
        open_engine(args)


def test_places_must_fit_the_images() -> None:
    image = np.zeros((3, 16, 24), np.float32)
    (one,) = place_images([5, IMG, IMG, IMG, BREAK, IMG, IMG, IMG, END], [image], IMG, 8)
    assert one.rows.tolist() == [1, 2, 3, 5, 6, 7]
    assert (one.start, one.end) == (1, 8)
    with pytest.raises(RequestError, match=r"image tokens of the prompt: 3 \(works: 6"):
        place_images([IMG] * 3, [image], IMG, 8)


def test_rows_of_a_chunk() -> None:
    image = np.zeros((3, 16, 24), np.float32)
    images = place_images([5, IMG, IMG, IMG, BREAK, IMG, IMG, IMG, END], [image], IMG, 8)
    (part,) = rows_of(images, 3, 7, 40)
    assert part.rows.tolist() == [40, 42, 43]
    assert part.first == 2
    assert rows_of(images, 0, 1, 0) == []
    assert rows_of(images, 8, 9, 0) == []


def test_a_block_is_named_by_image_and_place() -> None:
    one, other = np.zeros((3, 8, 16), np.float32), np.ones((3, 8, 16), np.float32)
    ids = [5, IMG, IMG, END, 5, IMG, IMG, END]
    images = place_images(ids, [one, other], IMG, 8)
    assert images[0].key != images[1].key
    assert len(block_keys(images, 0, 4)) == 1
    assert len(block_keys(images, 0, 8)) == 2
    assert block_keys(images, 3, 5) == ()
    moved = place_images([5, *ids], [one, other], IMG, 8)
    assert block_keys(moved, 0, 4) != block_keys(images, 0, 4)
    (named,) = block_keys([replace(images[0], key=b"k" * 16)], 0, 4)
    with pytest.raises(UnicodeDecodeError):  # it can be no salt
        named.decode("utf-8", "surrogatepass")
    turned = place_images([5, IMG, IMG, END], [one.transpose(0, 2, 1)], IMG, 8)
    assert turned[0].key != images[0].key
