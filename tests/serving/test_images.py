"""Images through the server: the official client sends them, and answers are of what they show."""

from __future__ import annotations

import base64
import io
import json
import socket
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from PIL import Image

from ml4core.models.checkpoint import Checkpoint, CheckpointWriter
from ml4core.models.pixtral import vision_spec
from ml4core.models.pixtral_weights import expected_vision_tensors
from ml4core.models.seeded import make_seeded
from ml4core.models.seeded_config import PRESETS

TEKKEN = resources.files("ml4core") / "assets" / "ml4-tiny" / "tekken.json"
SIZES: dict[str, Any] = {"layers": 4, "topk": 16, "vocab": 8192}
ENCODER: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "num_channels": 3,
    "image_size": 48,
    "max_image_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "rope_theta": 10000.0,
    "adapter_bias": True,
    "add_pre_mm_projector_layer_norm": True,
    "mm_projector_id": "patch_merge",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder, an encoder of images and the tokenizer of both; weights are random."""
    pytest.importorskip("cv2")
    folder = tmp_path_factory.mktemp("images")
    target = Checkpoint.open(make_seeded(folder / "target", "micro", **SIZES))
    params = replace(PRESETS["micro"], **SIZES).params() | {"vision_encoder": ENCODER}
    spec = vision_spec(params, int(params["dim"]))
    assert spec is not None
    tokenizer = json.loads(TEKKEN.read_text("utf-8"))
    tokenizer["image"] = {"image_patch_size": 4, "max_image_size": 48, "spatial_merge_size": 2}
    generator = torch.Generator().manual_seed(3)
    with CheckpointWriter(folder / "model") as writer:
        writer.add_json("params.json", json.loads(json.dumps(params)))
        for name in target.tensors:
            writer.add(name, target.read(name))
        for name, entry in expected_vision_tensors(spec).items():
            values = torch.randn(entry.shapes[0], generator=generator)
            writer.add(name, values * values[0].numel() ** -0.5)
        writer.add_file("tekken.json", json.dumps(tokenizer).encode())
    return folder / "model"


@pytest.fixture(scope="module")
def client(model: Path, start: Callable[..., Any]) -> openai.OpenAI:
    server = start(
        *(str(model), "--backend", "cpu", "--max-model-len", "256", "--max-num-seqs", "4"),
        *("--enable-prefix-caching", "--limit-mm-per-prompt", '{"image": 2}'),
    )
    opened: openai.OpenAI = server.openai()
    return opened


def picture(width: int, height: int, color: str) -> dict[str, Any]:
    file = io.BytesIO()
    Image.new("RGB", (width, height), color).save(file, "PNG")
    text = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}


def ask(client: openai.OpenAI, *images: dict[str, Any], **options: Any) -> Any:
    return client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": [*images, {"type": "text", "text": "What?"}]}],
        temperature=0,
        max_tokens=12,
        **options,
    )


def test_an_answer_is_of_its_image(client: openai.OpenAI) -> None:
    red, blue = picture(48, 40, "red"), picture(48, 40, "blue")
    first, other, again = (ask(client, image) for image in (red, blue, red))
    texts = [answer.choices[0].message.content for answer in (first, other, again)]
    assert texts[0] == texts[2] != texts[1], "with cached prefixes, too"
    assert first.usage.prompt_tokens == other.usage.prompt_tokens
    cells = 5 * (6 + 1)  # rows, each with its break
    assert first.usage.prompt_tokens > cells


def test_several_images_and_streams(client: openai.OpenAI) -> None:
    images = picture(20, 10, "red"), picture(9, 48, "green")
    whole = ask(client, *images)
    pieces = ask(client, *images, stream=True)
    joined = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert joined == whole.choices[0].message.content
    turned = ask(client, *images[::-1])
    assert turned.choices[0].message.content != joined


@pytest.mark.parametrize(
    ("images", "param"),
    [
        ([picture(1, 1, "red")] * 3, "messages[0].content[2]"),
        (
            [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
            "messages[0].content[0].image_url.url",
        ),
        (
            [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}],
            "messages[0].content[0].image_url.url",
        ),
        ([picture(1, 1, "red") | {"type": "image"}], "messages[0].content[0].type"),
    ],
)
def test_bad_images_are_the_clients_fault(
    client: openai.OpenAI, images: list[dict[str, Any]], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, *images)
    assert caught.value.param == param
    assert ask(client, picture(1, 1, "red")).usage.completion_tokens > 0, "others are served"


SIDES = [(1, 1), (1, 500), (500, 1), (3, 11), (11, 3), (2, 2), (1, 10000)]


def test_sides_of_few_pixels(client: openai.OpenAI) -> None:
    """B096: each is served, or is the client's fault."""
    tokens: dict[tuple[int, int], int] = {}
    for width, height in SIDES:
        try:
            tokens[width, height] = ask(client, picture(width, height, "red")).usage.prompt_tokens
        except openai.BadRequestError as error:
            if error.param != "messages[0].content[0].image_url.url":
                raise
    assert tokens[1, 1] == tokens[2, 2] > 0
    # Two cells beside each other, or one over the other, with a break behind each row.
    assert tokens[3, 11] == tokens[11, 3] + 1 > 0


def held(raw: bytes, kind: str = "image/png") -> dict[str, Any]:
    text = base64.b64encode(raw).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{text}"}}


def test_what_is_no_image(client: openai.OpenAI) -> None:
    """B100, B096: a 400 that names the part, never a fault of the server."""
    whole = io.BytesIO()
    Image.effect_noise((64, 64), 50).convert("RGB").save(whole, "JPEG")
    url = picture(8, 8, "red")["image_url"]["url"]
    broken = [
        held(b""),
        held(whole.getvalue()[:-400], "image/jpeg"),
        held(b"This is a text.", "text/plain"),
        {"type": "image_url", "image_url": {"url": url[:-7] + "\u00e9!!"}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64"}},
        {"type": "image_url", "image_url": {}},
    ]
    for part in broken:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, picture(8, 8, "red"), part)
        assert str(caught.value.param).startswith("messages[0].content[1].image_url"), part
    system = {"role": "system", "content": [picture(8, 8, "red")]}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=client.models.list().data[0].id,
            messages=[system, {"role": "user", "content": "What?"}],  # type: ignore[list-item]
            max_tokens=1,
        )
    assert str(caught.value.param).startswith("messages[0].content[0]")
    assert ask(client, picture(1, 1, "red")).usage.completion_tokens > 0


def test_nothing_is_fetched_unless_it_is_allowed(client: openai.OpenAI) -> None:
    """B098: a listener that is named has no visitor."""
    with socket.create_server(("127.0.0.1", 0)) as witness:
        port = witness.getsockname()[1]
        for host in ("127.0.0.1", "localhost", "[::ffff:127.0.0.1]", "0", "2130706433"):
            part = {"type": "image_url", "image_url": {"url": f"http://{host}:{port}/a.png"}}
            with pytest.raises(openai.BadRequestError):
                ask(client, part)
        for url in ("file:///etc/hostname", "ftp://127.0.0.1/a.png", "/etc/hostname"):
            with pytest.raises(openai.BadRequestError):
                ask(client, {"type": "image_url", "image_url": {"url": url}})
        witness.setblocking(False)
        with pytest.raises(BlockingIOError):
            witness.accept()


def turned(orientation: int) -> dict[str, Any]:
    """A picture that a camera held otherwise has stored: upright it is always the same."""
    image = Image.new("RGB", (24, 16), "white")
    image.paste("red", (0, 0, 8, 8))
    image.paste("blue", (16, 8, 24, 16))
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = image.transpose(undo[orientation]) if orientation in undo else image
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    stored.save(file, "PNG", exif=exif)
    return held(file.getvalue())


def test_images_are_seen_upright_and_on_white(client: openai.OpenAI) -> None:
    """B094: the orientation that a file states, and what shines through."""
    answers = [ask(client, turned(orientation)) for orientation in range(1, 9)]
    assert len({answer.usage.prompt_tokens for answer in answers}) == 1
    assert len({answer.choices[0].message.content for answer in answers}) == 1
    file = io.BytesIO()
    Image.new("RGBA", (24, 16), (255, 0, 0, 0)).save(file, "PNG")
    clear, white, red = (
        ask(client, part).choices[0].message.content
        for part in (
            held(file.getvalue()),
            picture(24, 16, "white"),
            picture(24, 16, "red"),
        )
    )
    assert clear == white != red


def test_a_model_of_text_says_so(null: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="takes no images"):
        ask(null.openai(), picture(1, 1, "red"))
