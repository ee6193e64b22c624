"""Images through the server: the official client sends them, and answers are of what they show."""

from __future__ import annotations

import base64
import io
import json
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


def test_a_model_of_text_says_so(null: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="takes no images"):
        ask(null.openai(), picture(1, 1, "red"))
