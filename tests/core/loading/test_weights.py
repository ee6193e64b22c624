"""Weights come out of a checkpoint with the values and the orientation that were put in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ml4core.api import GLOBAL_WEIGHTS, LAYER_WEIGHTS, LayerSpec, ModelSpec, Weight
from ml4core.models.checkpoint import Checkpoint
from ml4core.models.errors import CheckpointError
from ml4core.models.rope_freqs import inv_freq
from ml4core.models.seeded import make_seeded
from ml4core.models.tensors import load_model_spec, validate
from ml4core.models.weights import load_layers

Loaded = dict[int | None, dict[str, Tensor | Weight]]
EditedCopy = Callable[[Path, Callable[[dict[str, Tensor]], None]], Path]


def load(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Loaded:
    checkpoint = Checkpoint.open(folder)
    spec = load_model_spec(checkpoint)
    return {
        layer and layer.index: weights for layer, weights in load_layers(checkpoint, spec, dtype)
    }


def raw(folder: Path) -> dict[str, Tensor]:
    """The tensors as the format's own library reads them."""
    from safetensors.torch import load_file

    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def decoded(tensors: dict[str, Tensor], stem: str) -> Tensor:
    """fp32 values of an FP8 block matrix, block by block."""
    code, scale = tensors[f"{stem}.weight"].float(), tensors[f"{stem}.weight_scale"]
    out = torch.empty_like(code)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = (slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1)))
            out[block] = code[block] * scale[i, j]
    return out


def data(value: Tensor | Weight) -> Tensor:
    assert isinstance(value, Weight)
    return value.data


def names(layer: LayerSpec) -> set[str]:
    """What a layer without q-LoRA of the seeded model has, by its traits."""
    wanted = {"attention_norm", "ffn_norm", "wq", "w_uk", "w_uv", "wo"}
    wanted |= {"ssmax_scale", "ssmax_bias"}
    if layer.owns_kv:
        wanted |= {"wkv_a", "kv_a_norm"}
    if layer.rope is not None:
        wanted |= {"inv_freq"}
    if layer.owns_index:
        wanted |= {"index_wq", "index_wk", "index_weights_proj", "index_ssmax_scale"}
        wanted |= {f"index_{q}_norm_{part}" for q in "qk" for part in ("weight", "bias")}
    if layer.moe is None:
        return wanted | {"dense_w13", "dense_w2"}
    return wanted | {"gate", "experts_w13", "experts_w2", "shared_w13", "shared_w2"}


def test_each_layer_has_its_weights(bf16_folder: Path, spec: ModelSpec) -> None:
    loaded = load(bf16_folder)
    assert list(loaded) == [None, *range(8)]
    assert loaded[None].keys() == GLOBAL_WEIGHTS.keys()
    for layer in spec.layers:
        assert loaded[layer.index].keys() == names(layer)
        assert loaded[layer.index].keys() <= LAYER_WEIGHTS.keys()


def test_plain_matrices(bf16_folder: Path, spec: ModelSpec) -> None:
    loaded, tensors = load(bf16_folder), raw(bf16_folder)
    top = loaded[None]
    assert torch.equal(top["embedding"], tensors["tok_embeddings.weight"])
    assert torch.equal(top["final_norm"], tensors["norm.weight"])
    assert torch.equal(data(top["output"]), tensors["output.weight"])
    for layer in spec.layers:
        weights, prefix = loaded[layer.index], f"layers.{layer.index}."
        same = {"wq": "wq", "wo": "wo"}
        if layer.owns_kv:
            same["wkv_a"] = "wkv_a_with_mqa"
        if layer.owns_index:
            same |= {"index_wq": "indexer.wq", "index_wk": "indexer.wk"}
        for ours, theirs in same.items():
            weight = weights[ours]
            assert isinstance(weight, Weight)
            assert weight.format == "bf16"
            assert weight.shape == tuple(weight.data.shape)
            assert torch.equal(weight.data, tensors[f"{prefix}attention.{theirs}.weight"])
        for norm in ("attention_norm", "ffn_norm"):
            assert weights[norm].dtype == torch.bfloat16
            assert torch.equal(weights[norm], tensors[f"{prefix}{norm}.weight"])


def test_absorbed_projections_by_their_meaning(bf16_folder: Path, spec: ModelSpec) -> None:
    # Scores and values with the keys and values written out, against those of the latent.
    loaded, tensors = load(bf16_folder), raw(bf16_folder)
    generator = torch.Generator().manual_seed(1)
    for index in (1, 3, 7):
        layer = spec.layers[index]
        up_k, up_v = data(loaded[index]["w_uk"]).double(), data(loaded[index]["w_uv"]).double()
        assert up_k.shape == (4, 512, layer.nope_dim)
        assert up_v.shape == (4, 48, 512)
        wkv_b = tensors[f"layers.{index}.attention.wkv_b.weight"].double()
        c = torch.randn(5, 512, generator=generator, dtype=torch.double)  # latents of 5 keys
        q = torch.randn(4, layer.nope_dim, generator=generator, dtype=torch.double)
        keys_values = (c @ wkv_b.T).view(5, 4, layer.nope_dim + 48)
        keys, values = keys_values[..., : layer.nope_dim], keys_values[..., layer.nope_dim :]
        scores = torch.einsum("np,snp->ns", q, keys)
        absorbed = torch.einsum("np,nlp->nl", q, up_k)
        torch.testing.assert_close(absorbed @ c.T, scores)
        probs = scores.softmax(-1)
        out = torch.einsum("ns,snv->nv", probs, values)
        torch.testing.assert_close(torch.einsum("nl,nvl->nv", probs @ c, up_v), out)


def test_gate_comes_before_up(bf16_folder: Path) -> None:
    loaded, tensors = load(bf16_folder), raw(bf16_folder)
    x = torch.randn(3, 128, dtype=torch.double, generator=torch.Generator().manual_seed(2))

    def swiglu(stem: str) -> Tensor:
        w1, w2, w3 = (tensors[f"{stem}.{part}.weight"].double() for part in ("w1", "w2", "w3"))
        return (torch.nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T

    def stacked(w13: Tensor, w2: Tensor) -> Tensor:
        gate, up = (x @ w13.double().T).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up) @ w2.double().T

    for name, stem in (("dense", "layers.0.feed_forward"), ("shared", "layers.5.shared_experts")):
        weights = loaded[int(stem.split(".")[1])]
        ours = stacked(data(weights[f"{name}_w13"]), data(weights[f"{name}_w2"]))
        torch.testing.assert_close(ours, swiglu(stem))
    w13, w2 = data(loaded[5]["experts_w13"]), data(loaded[5]["experts_w2"])
    assert (w13.shape, w2.shape) == ((3, 512, 128), (3, 128, 256))
    for expert in range(3):
        ours = stacked(w13[expert], w2[expert])
        torch.testing.assert_close(ours, swiglu(f"layers.5.experts.{expert}"))


def test_what_must_be_fp32(bf16_folder: Path) -> None:
    loaded, tensors = load(bf16_folder), raw(bf16_folder)
    weights, prefix = loaded[4], "layers.4."
    wanted = {
        "gate": "gate.weight",
        "ssmax_scale": "attention.ssmax_scale",
        "ssmax_bias": "attention.ssmax_bias",
        "index_ssmax_scale": "attention.indexer.ssmax_scale",
        "index_q_norm_weight": "attention.indexer.q_norm.weight",
        "index_q_norm_bias": "attention.indexer.q_norm.bias",
        "index_k_norm_weight": "attention.indexer.k_norm.weight",
        "index_k_norm_bias": "attention.indexer.k_norm.bias",
    }
    for ours, theirs in wanted.items():
        assert weights[ours].dtype == torch.float32
        assert torch.equal(weights[ours], tensors[prefix + theirs].float())
    proj = weights["index_weights_proj"]
    assert isinstance(proj, Weight)
    assert (proj.format, proj.shape, proj.data.dtype) == ("fp32", (4, 128), torch.float32)
    assert torch.equal(proj.data, tensors[prefix + "attention.indexer.weights_proj.weight"].float())


def test_learned_frequencies(bf16_folder: Path, spec: ModelSpec) -> None:
    loaded, tensors = load(bf16_folder), raw(bf16_folder)
    rope = spec.layers[0].rope
    assert rope is not None
    wanted = inv_freq(rope, tensors["rope_freqs"])
    assert torch.equal(loaded[0]["inv_freq"], wanted)
    assert torch.equal(loaded[6]["inv_freq"], wanted)
    assert "inv_freq" not in loaded[3]
    without = inv_freq(type(rope)(**{**vars(rope), "lerope": "none"}))
    assert not torch.equal(wanted, without)


def test_frequencies_of_each_layer(tmp_path: Path, bf16_folder: Path) -> None:
    source = Checkpoint.open(bf16_folder)
    assert source.params is not None
    params = source.params | {"lerope": {"storage": "log", "scope": "layer"}}
    from ml4core.models.checkpoint import CheckpointWriter

    learned = {n: torch.linspace(-0.1, 0.1, 32) * n for n in (0, 1, 2, 4, 5, 6)}
    with CheckpointWriter(tmp_path / "m") as writer:
        writer.add_json("params.json", params)
        for name in source.tensors:
            if name != "rope_freqs":
                writer.add(name, source.read(name))
        for n, tensor in learned.items():
            writer.add(f"layers.{n}.attention.rope_freqs", tensor)
    loaded = load(tmp_path / "m")
    rope = load_model_spec(Checkpoint.open(tmp_path / "m")).layers[0].rope
    assert rope is not None
    for n, tensor in learned.items():
        assert torch.equal(loaded[n]["inv_freq"], inv_freq(rope, tensor))


def test_fp8_stays_as_it_is(fp8_folder: Path, spec: ModelSpec) -> None:
    loaded, tensors = load(fp8_folder), raw(fp8_folder)
    for ours, theirs in (("wq", "wq"), ("wo", "wo"), ("wkv_a", "wkv_a_with_mqa")):
        weight = loaded[1][ours]
        assert isinstance(weight, Weight)
        assert (weight.format, weight.data.dtype) == ("fp8_block", torch.uint8)
        stem = f"layers.1.attention.{theirs}"
        assert torch.equal(weight.data, tensors[f"{stem}.weight"].view(torch.uint8))
        assert torch.equal(weight.parts["scale"], tensors[f"{stem}.weight_scale"])
    assert loaded[1]["wkv_a"].parts["scale"].shape == (5, 1)


def test_fp8_stacks(fp8_folder: Path) -> None:
    loaded, tensors = load(fp8_folder), raw(fp8_folder)
    w13, w2 = loaded[2]["experts_w13"], loaded[2]["experts_w2"]
    assert isinstance(w13, Weight)
    assert isinstance(w2, Weight)
    assert (w13.format, w13.shape) == ("fp8_block", (3, 512, 128))
    assert w13.parts["scale"].shape == (3, 4, 1)
    assert w2.parts["scale"].shape == (3, 1, 2)
    for expert in range(3):
        stem = f"layers.2.experts.{expert}"
        for part, rows, blocks in (
            ("w1", slice(0, 256), slice(0, 2)),
            ("w3", slice(256, 512), slice(2, 4)),
        ):
            code = tensors[f"{stem}.{part}.weight"].view(torch.uint8)
            assert torch.equal(w13.data[expert, rows], code)
            scale = tensors[f"{stem}.{part}.weight_scale"]
            assert torch.equal(w13.parts["scale"][expert, blocks], scale)
        assert torch.equal(w2.data[expert], tensors[f"{stem}.w2.weight"].view(torch.uint8))
        assert torch.equal(w2.parts["scale"][expert], tensors[f"{stem}.w2.weight_scale"])


@pytest.mark.parametrize(("dtype", "format"), [(torch.bfloat16, "bf16"), (torch.float32, "fp32")])
def test_absorbed_fp8_is_decoded(fp8_folder: Path, dtype: torch.dtype, format: str) -> None:
    loaded, tensors = load(fp8_folder, dtype), raw(fp8_folder)
    values = decoded(tensors, "layers.1.attention.wkv_b").view(4, 80, 512)
    up_k, up_v = loaded[1]["w_uk"], loaded[1]["w_uv"]
    assert isinstance(up_k, Weight)
    assert isinstance(up_v, Weight)
    assert (up_k.format, up_v.format) == (format, format)
    assert torch.equal(up_k.data, values[:, :32].transpose(1, 2).to(dtype))
    assert torch.equal(up_v.data, values[:, 32:].to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_that_end_within_a_block_are_decoded(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_seeded(
        tmp_path / "m", "micro", format="fp8_block", layers=2, expert_width=192, dense_width=192
    )
    loaded, tensors = load(folder, dtype), raw(folder)
    for ours, stem in (
        ("dense_w13", "layers.0.feed_forward"),
        ("shared_w13", "layers.1.shared_experts"),
    ):
        weight = loaded[int(stem.split(".")[1])][ours]
        assert isinstance(weight, Weight)
        assert weight.format == ("bf16" if dtype == torch.bfloat16 else "fp32")
        values = torch.cat([decoded(tensors, f"{stem}.{part}") for part in ("w1", "w3")])
        assert torch.equal(weight.data, values.to(dtype))
    w13, w2 = loaded[1]["experts_w13"], loaded[1]["experts_w2"]
    assert isinstance(w13, Weight)
    assert isinstance(w2, Weight)
    assert w13.data.dtype == dtype
    assert torch.equal(w13.data[2, 192:], decoded(tensors, "layers.1.experts.2.w3").to(dtype))
    assert w2.format == "fp8_block"  # alone in its matrix, so no part ends early


def test_mixed_formats_of_a_stack(
    bf16_folder: Path, fp8_folder: Path, edited_copy: EditedCopy
) -> None:
    plain = raw(bf16_folder)

    def edit(tensors: dict[str, Tensor]) -> None:
        for part in ("w1", "w2", "w3"):
            name = f"layers.1.experts.0.{part}.weight"
            tensors[name] = plain[name]
            del tensors[f"{name}_scale"]

    folder = edited_copy(fp8_folder, edit)
    tensors, w13 = raw(folder), load(folder)[1]["experts_w13"]
    assert isinstance(w13, Weight)
    assert w13.format == "bf16"
    assert torch.equal(w13.data[0, :256], plain["layers.1.experts.0.w1.weight"])
    assert torch.equal(w13.data[1, 256:], decoded(tensors, "layers.1.experts.1.w3").bfloat16())


def test_half_precision_becomes_fp32(bf16_folder: Path, edited_copy: EditedCopy) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.half()

    folder = edited_copy(bf16_folder, edit)
    tensors, loaded = raw(folder), load(folder)
    assert loaded[None]["embedding"].dtype == torch.float32
    for name in ("wq", "experts_w13", "w_uk"):
        weight = loaded[1][name]
        assert isinstance(weight, Weight)
        assert (weight.format, weight.data.dtype) == ("fp32", torch.float32)
    assert torch.equal(data(loaded[1]["wq"]), tensors["layers.1.attention.wq.weight"].float())
    assert loaded[1]["attention_norm"].dtype == torch.float16  # norms keep their own


def test_tied_output_is_the_embedding(tmp_path: Path, bf16_folder: Path) -> None:
    from ml4core.models.checkpoint import CheckpointWriter

    source = Checkpoint.open(bf16_folder)
    assert source.params is not None
    with CheckpointWriter(tmp_path / "m") as writer:
        writer.add_json("params.json", source.params | {"tied_embeddings": True})
        for name in source.tensors:
            if name != "output.weight":
                writer.add(name, source.read(name))
    top = load(tmp_path / "m")[None]
    assert data(top["output"]).data_ptr() == top["embedding"].data_ptr()


@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
def test_rope_rows_of_nope_layers_are_dropped(tmp_path: Path, format: str) -> None:
    from ml4core.models.checkpoint import CheckpointWriter

    folder = make_seeded(tmp_path / "a", "micro", layers=4, format=format)
    source = Checkpoint.open(folder)
    assert source.params is not None
    stem = "layers.3.attention.wkv_a_with_mqa"
    with CheckpointWriter(tmp_path / "b") as writer:
        writer.add_json("params.json", source.params | {"nope_wkv_a_rope_rows": True})
        for name in source.tensors:
            tensor = source.read(name)
            if name == f"{stem}.weight":  # 64 rows, and their row of scales, that nothing may read
                rows = torch.full((64, 128), float("nan")).to(tensor.dtype)
                tensor = torch.cat([tensor.view(torch.uint8), rows.view(torch.uint8)]).view(
                    tensor.dtype
                )
            if name == f"{stem}.weight_scale":
                tensor = torch.cat([tensor, torch.full((1, 1), float("nan"))])
            writer.add(name, tensor)
    ours, theirs = load(tmp_path / "b")[3]["wkv_a"], load(folder)[3]["wkv_a"]
    assert isinstance(ours, Weight)
    assert isinstance(theirs, Weight)
    assert ours.shape == theirs.shape == (512, 128)
    for name, part in theirs.parts.items():
        assert torch.equal(ours.parts[name], part)


@pytest.mark.parametrize("format", ["bf16", "fp8_block"])
@pytest.mark.parametrize("preset", ["dense_mla", "lora_indexer"])
def test_relatives(tmp_path: Path, preset: str, format: str) -> None:
    folder = make_seeded(tmp_path / "m", preset, format=format, layers=2, experts=4, vocab=320)
    loaded, tensors = load(folder), raw(folder)
    weights = loaded[1]
    assert {"wq_a", "q_a_norm", "wq_b"} <= weights.keys()
    assert "wq" not in weights
    assert torch.equal(weights["q_a_norm"], tensors["layers.1.attention.q_a_norm.weight"])
    wq_b = weights["wq_b"]
    assert isinstance(wq_b, Weight)
    assert wq_b.shape == (8 * 96, 128)
    if preset == "dense_mla":
        assert not any(name.startswith("index_") for name in weights)
    else:
        index_wq = weights["index_wq"]
        assert isinstance(index_wq, Weight)
        assert index_wq.shape == (4 * 128, 128)  # fed by the query's LoRA of 128
        assert "index_q_norm_weight" not in weights


def test_hugging_face_names(tmp_path: Path, bf16_folder: Path) -> None:
    from ml4core.models.checkpoint import CheckpointWriter

    renames = {
        "tok_embeddings": "model.embed_tokens",
        "norm.weight": "model.norm.weight",
        "output": "lm_head",
    }
    inner = {
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention.wq.": "self_attn.q_proj.",
        "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_a_norm": "self_attn.kv_a_layernorm",
        "attention.wkv_b": "self_attn.kv_b_proj",
        "attention.wo": "self_attn.o_proj",
        "attention.indexer": "self_attn.indexer",
        "gate.": "mlp.gate.",
        "experts.": "mlp.experts.",
        "shared_mlp.experts.": "mlp.shared_experts.",
        "feed_forward": "mlp",
        ".w1.": ".gate_proj.",
        ".w2.": ".down_proj.",
        ".w3.": ".up_proj.",
    }
    source = Checkpoint.open(bf16_folder)
    with CheckpointWriter(tmp_path / "m") as writer:
        assert source.params is not None
        writer.add_json("params.json", source.params)
        for name in source.tensors:
            new = name
            if name.startswith("layers."):
                for ours, theirs in inner.items():
                    new = new.replace(ours, theirs)
                new = f"model.{new}"
            else:
                new = next(
                    (new.replace(a, b) for a, b in renames.items() if new.startswith(a)), new
                )
            writer.add(new, source.read(name))
    renamed, original = load(tmp_path / "m"), load(bf16_folder)
    for layer, weights in original.items():
        for name, value in weights.items():
            other = renamed[layer][name]
            if isinstance(value, Weight):
                assert isinstance(other, Weight)
                assert torch.equal(value.data, other.data)
            else:
                assert torch.equal(value, other)


def test_query_norm_by_head(bf16_folder: Path, edited_copy: EditedCopy) -> None:
    values = torch.arange(512.0)

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["layers.1.attention.indexer.q_norm.weight"] = values
        tensors["layers.1.attention.indexer.q_norm.bias"] = values.view(4, 128)

    weights = load(edited_copy(bf16_folder, edit))[1]
    assert torch.equal(weights["index_q_norm_weight"], values.view(4, 128))
    assert torch.equal(weights["index_q_norm_bias"], values.view(4, 128))


@pytest.mark.parametrize(
    ("stem", "row", "value"),
    [
        ("layers.1.experts.2.w3", 1, float("nan")),
        ("layers.1.attention.wkv_b", 0, float("inf")),
        ("layers.1.attention.wkv_a_with_mqa", 4, -1.0),
    ],
)
def test_scales_that_are_no_scales(
    fp8_folder: Path, edited_copy: EditedCopy, stem: str, row: int, value: float
) -> None:
    # B032 for block scales: named by tensor, row and block before anything can be served.
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors[f"{stem}.weight_scale"][row, 0] = value

    folder = edited_copy(fp8_folder, edit)
    with pytest.raises(CheckpointError, match=rf"{stem}\.weight_scale: .* row {row}, block 0 is"):
        load(folder)


def test_zero_scale_is_an_empty_block(fp8_folder: Path, edited_copy: EditedCopy) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["layers.1.attention.wkv_b.weight_scale"].zero_()

    assert not data(load(edited_copy(fp8_folder, edit))[1]["w_uk"]).any()


def test_learned_frequency_that_is_none(bf16_folder: Path, edited_copy: EditedCopy) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["rope_freqs"][3] = 1000.0

    folder = edited_copy(bf16_folder, edit)
    params = folder / "params.json"
    params.write_text(params.read_text().replace('"multiplier"', '"log"'))
    with pytest.raises(
        CheckpointError, match=r"safetensors: rope_freqs: learned frequency 3 of 32 gives inf"
    ):
        load(folder)


NOT_FINITE = [
    ("bf16", "output.weight", (7, 3), float("inf"), "1 infinite values, the first in row 7"),
    ("bf16", "tok_embeddings.weight", (5, 0), float("nan"), "1 NaN values, the first in row 5"),
    ("bf16", "norm.weight", (3,), float("-inf"), "1 infinite values, the first in row 3"),
    ("bf16", "layers.0.attention.wo.weight", (9, 9), float("nan"), "1 NaN values, .* row 9"),
    ("bf16", "layers.1.gate.weight", (2, 1), float("nan"), "1 NaN values, .* row 2"),
    ("bf16", "layers.3.attention.ssmax_scale", (1,), float("inf"), "1 infinite values, .* row 1"),
    ("bf16", "layers.2.experts.1.w3.weight", (4,), float("inf"), r"\d+ infinite values, .* row 4"),
    ("fp8", "layers.1.attention.wq.weight", (100, 1), float("nan"), "1 NaN values, .* row 100"),
    ("fp8", "layers.2.experts.2.w2.weight", (6, 2), float("nan"), "1 NaN values, .* row 6"),
    ("fp8", "layers.1.attention.wkv_b.weight", (8, 2), float("nan"), "1 NaN values, .* row 8"),
]


@pytest.mark.parametrize(
    ("kind", "name", "place", "value", "says"), NOT_FINITE, ids=[one[1] for one in NOT_FINITE]
)
def test_a_value_that_is_not_finite_is_refused_with_its_tensor(
    bf16_folder: Path,
    fp8_folder: Path,
    edited_copy: EditedCopy,
    kind: str,
    name: str,
    place: tuple[int, ...],
    value: float,
    says: str,
) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        if kind == "fp8":  # NaN is its one value that isn't finite
            tensors[name].view(torch.uint8)[place] = 0x7F
        else:
            tensors[name][place] = value

    folder = edited_copy(bf16_folder if kind == "bf16" else fp8_folder, edit)
    with pytest.raises(CheckpointError, match=rf"safetensors: {name}: {says}.*all must be finite"):
        load(folder)


def test_large_values_are_values(bf16_folder: Path, edited_copy: EditedCopy) -> None:
    """Though their sum is none."""

    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["norm.weight"].fill_(torch.finfo(tensors["norm.weight"].dtype).max)
        tensors["output.weight"].fill_(torch.finfo(tensors["output.weight"].dtype).max)

    assert load(edited_copy(bf16_folder, edit))


def test_a_missing_scale_is_missed_before_anything_is_read(
    fp8_folder: Path, edited_copy: EditedCopy
) -> None:
    # B080
    name = "layers.4.experts.1.w2.weight_scale"
    folder = edited_copy(fp8_folder, lambda tensors: tensors.__delitem__(name))
    checkpoint = Checkpoint.open(folder)
    spec = load_model_spec(checkpoint)
    with pytest.raises(CheckpointError, match=name):
        load_layers(checkpoint, spec)
    assert checkpoint.bytes_read == 0


def test_progress_counts_every_byte(fp8_folder: Path) -> None:
    checkpoint = Checkpoint.open(fp8_folder)
    spec = load_model_spec(checkpoint)
    calls: list[tuple[int, int]] = []
    report = validate(checkpoint, spec)
    for _ in load_layers(
        checkpoint, spec, report=report, progress=lambda done, total: calls.append((done, total))
    ):
        pass
    assert calls[-1] == (report.nbytes, report.nbytes) == (checkpoint.nbytes, checkpoint.bytes_read)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert len(calls) == len(checkpoint.tensors)


def test_decoded_dtypes(bf16_folder: Path) -> None:
    checkpoint = Checkpoint.open(bf16_folder)
    with pytest.raises(ValueError, match=r"torch\.float16; .*torch\.float32 or torch\.bfloat16"):
        load_layers(checkpoint, load_model_spec(checkpoint), torch.float16)


def test_a_bf16_checkpoint_stays_bf16(bf16_folder: Path) -> None:
    loaded = load(bf16_folder, torch.float32)
    weights = [w for weights in loaded.values() for w in weights.values() if isinstance(w, Weight)]
    assert {w.format for w in weights if w.shape != (4, 128)} == {"bf16"}
