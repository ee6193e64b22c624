"""`ml4 plan`: what it prints, and what it says of bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ml4core import registry
from ml4core.api import Refusal, Refused
from ml4core.cli import main
from ml4core.cli.exits import REFUSED
from ml4core.models.seeded import make_seeded
from ml4core.planning.devices import known_devices

pytestmark = pytest.mark.usefixtures("probed_once")

DRAFTS = '{"method": "dspark", "num_speculative_tokens": 3}'


@pytest.fixture
def ml4(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main(["plan", *words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_published_shape_needs_no_model(ml4: Any) -> None:
    code, out, err = ml4("-tp", "8", "--speculative-config", DRAFTS, "--memory", "280")
    assert (code, err) == (0, "")
    for text in ("routed experts", "47,136", "42,096", "78,384", "by vocabulary over TP", "tokens"):
        assert text in out
    assert "4 x 8,192 rows x 6,144 x 2 B" in out, "the reserve's formula is shown"


def test_one_object(ml4: Any) -> None:
    code, out, _ = ml4("-tp", "8", "-dcp", "8", "--memory", "280", "--context", "5000", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["fits"] is True
    assert facts["kv"]["bytes_per_token"] == {"fp8_ds_mla": 47136, "e4m3": 42096, "bf16": 78384}
    assert facts["ranks"]["decode_context_parallel_size"] == 8
    assert sum(one["rank"] for one in facts["weights"]["parts"]) == facts["weights"]["rank"]
    assert 5000 in [one["context"] for one in facts["capacity"]["requests"]]
    total = sum(group["bytes"] for group in facts["kv"]["groups"])
    assert total == facts["capacity"]["pool_bytes"]


@pytest.mark.parametrize(("form", "published"), [("fp8", 128), ("nvfp4", 76)])
def test_a_rank_of_eight_holds_the_published_weights_by_part(
    ml4: Any, form: str, published: int
) -> None:
    flags = ("-tp", "8", "--weights", form, "--limit-mm-per-prompt", '{"image": 1}')
    code, out, _ = ml4(*flags, "--json")
    weights = json.loads(out)["weights"]
    assert code == 0
    assert weights["rank"] / 2**30 == pytest.approx(published, rel=0.04)
    ranks = {one["part"]: one["rank"] for one in weights["parts"] if one["loaded"]}
    assert sum(ranks.values()) == weights["rank"]
    assert max(ranks, key=lambda part: ranks[part]) == "routed experts"
    _, table, _ = ml4(*flags)
    for part, size in ranks.items():
        (line,) = [line for line in table.splitlines() if line.startswith(part)]
        assert f" {size / 2**30:,.3f} " in line


def test_eight_context_ranks_print_eight_times_the_tokens(ml4: Any) -> None:
    """Of the memory behind the draft pool, which is as large on every rank."""

    def plan(*words: str) -> Any:
        flags = ("-tp", "8", "--memory", "280", "--reserve", "7", "--speculative-config", DRAFTS)
        code, out, _ = ml4(*flags, *words, "--json")
        assert code == 0
        return json.loads(out)

    one, eight = plan(), plan("-dcp", "8")
    assert eight["capacity"]["tokens"] == 8 * one["capacity"]["tokens"]
    sizes = [
        {group["group"]: group["bytes"] for group in facts["kv"]["groups"]}
        for facts in (one, eight)
    ]
    assert sizes[0] == sizes[1], "a rank's pools are as large, the draft's too"
    shared = {group["group"]: group["shared"] for group in eight["kv"]["groups"]}
    assert shared == {"latent": "over DCP", "index": "over DCP", "draft": "on every rank"}
    # Without drafts, what they took is shared out as well.
    code, out, _ = ml4("-tp", "8", "-dcp", "8", "--memory", "280", "--reserve", "7", "--json")
    assert code == 0
    assert json.loads(out)["capacity"]["tokens"] > eight["capacity"]["tokens"]


def test_a_plan_that_does_not_fit_ends_so_and_its_advice_works(ml4: Any) -> None:
    base = ("-tp", "8", "--memory", "139.8", "--weights", "fp8")
    code, out, err = ml4(*base, "--json")
    assert code == 1
    assert "does not fit: weights of 123" in err
    works = json.loads(out)["works"]
    assert {one["flag"] for one in works} >= {"--tensor-parallel-size", "--memory", "--weights"}
    for one in works:
        words = [one["flag"], *one["value"].split()]
        rest = [*base]
        for flag, short in (("--tensor-parallel-size", "-tp"), *((f, f) for f in words[::2])):
            if flag in words and short in rest:
                del rest[rest.index(short) : rest.index(short) + 2]
        assert ml4(*rest, *words)[0] == 0, one


@pytest.mark.parametrize("device", [(), ("--memory", "280")])
def test_caches_that_hold_no_request_do_not_fit(ml4: Any, device: tuple[str, ...]) -> None:
    """B106: whether or not the device is known."""
    code, out, err = ml4("-tp", "8", "--kv-cache-memory-bytes", "100", *device, "--json")
    assert code == 1
    assert "one request of 1,048,576 tokens need caches of 46.03 GiB" in err
    (works,) = [one for one in json.loads(out)["works"] if one["flag"].startswith("--kv-cache-mem")]
    assert ml4("-tp", "8", works["flag"], works["value"], *device)[0] == 0


def test_a_checkpoint_is_read_by_its_headers(ml4: Any, tmp_path: Path) -> None:
    folder = make_seeded(tmp_path / "micro", "micro", format="fp8_block")
    code, out, _ = ml4(str(folder), "--held", "decoded", "--dtype", "float32", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["variant"] is None
    assert set(facts["weights"]["checkpoint_formats"]) == {"bf16", "fp32", "fp8_block"}
    assert facts["weights"]["rank"] > 1.5 * facts["weights"]["checkpoint"]
    code, _, err = ml4(str(folder), "--weights", "nvfp4")
    assert code == 2
    assert "--weights: nvfp4, but the tensors of" in err


def test_a_params_file_alone_is_planned_in_a_form(ml4: Any, tmp_path: Path) -> None:
    folder = make_seeded(tmp_path / "micro", "micro")
    facts = [
        json.loads(ml4(str(folder / "params.json"), "--weights", form, "--json")[1])
        for form in ("bf16", "fp8")
    ]
    assert facts[0]["weights"]["rank"] > facts[1]["weights"]["rank"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-tp", "3"), "--tensor-parallel-size: 3 does not divide the 64 attention heads"),
        (("-tp", "8", "-dcp", "3"), "3 does not divide --tensor-parallel-size 8"),
        (("--memory", "80", "--device", "h200"), "--memory: 80 contradicts --device h200"),
        (("--device", "abacus"), "--device: 'abacus' is not known; works: b200"),
        (("--memory", "0"), "--memory: 0 is out of range; works: GiB, above 0"),
        (("--memory", "1e-12"), "--memory: 1e-12 is out of range; works: GiB, above 0"),
        (("--max-model-len", "4096", "--context", "5000"), "--context: 5000 is above the longest"),
        (("--memory", "nan"), "--memory: nan is out of range"),
        (("--reserve", "-1"), "--reserve: -1 is out of range; works: GiB, 0 or above"),
        (("--weights", "int8"), "--weights"),
        (("--max-model-len", "2M"), "--max-model-len: 2097152 is above"),
        (("--max-num-seqs", "10", "--max-num-batched-tokens", "5"), "5 is less than"),
        (("--block-size", "0"), "--block-size"),
    ],
)
def test_bad_input_is_named_with_what_works(ml4: Any, words: tuple[str, ...], message: str) -> None:
    code, out, err = ml4(*words)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("name", [device.name for device in known_devices()])
def test_each_known_device_can_be_named(ml4: Any, name: str) -> None:
    code, out, _ = ml4("-tp", "8", "--device", name, "--json")
    facts = json.loads(out)
    assert facts["device"] == name
    assert facts["fits"] is (code == 0)
    assert facts["memory"]["device"] > 2**36


@pytest.mark.parametrize(
    "launch",
    [
        "-tp 8 --tool-call-parser mistral --enable-auto-tool-choice --reasoning-parser mistral",
        "-tp 8 --nnodes 2 --node-rank 1 --headless --distributed-executor-backend mp",
        "-tp 8 -dcp 8 --dcp-comm-backend a2a --weights nvfp4",
        "-tp 8 -pcp 2 -dcp 16 --cp-kv-cache-interleave-size 64 --block-size 64",
        "-tp 4 --max-num-seqs 64 --weights mxfp4 --kv-cache-dtype bfloat16",
        "-tp 8 -dp 4 -ep --enable-ep-weight-filter --kv-cache-dtype fp8_e4m3 --max-model-len 256K",
    ],
)
def test_launches_can_be_planned(ml4: Any, launch: str) -> None:
    code, _, err = ml4(*launch.split(), "--memory", "280")
    assert (code, err) == (0, "")


def rows(out: str) -> dict[str, tuple[str, int]]:
    """By group: the layout, and bytes of a row."""
    return {one["group"]: (one["layout"], one["row"]) for one in json.loads(out)["kv"]["groups"]}


def test_a_named_backend_tells_its_caches(ml4: Any) -> None:
    """As ``ml4 serve --dry-run`` plans them; a flag still says otherwise."""
    code, out, err = ml4("--backend", "cpu", "--json")
    assert (code, err) == (0, "")
    assert rows(out) == {"latent": ("fp32", 4 * 576), "index": ("fp32", 4 * 128)}
    _, out, _ = ml4("--backend", "cpu", "--kv-cache-dtype", "bfloat16", "--json")
    assert rows(out)["latent"] == ("bf16", 2 * 576)


def test_a_named_backend_without_its_device_is_planned_without_it(
    ml4: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def select(name: str, **more: Any) -> Any:
        raise Refused([Refusal(name, "device", "it is not there")], what=f"--backend {name}")

    _, want, _ = ml4("--json")
    monkeypatch.setattr(registry, "select", select)
    code, out, err = ml4("--backend", "cpu", "--json")
    assert (code, out) == (0, want)
    assert "note: --backend cpu has no device here" in err


def test_an_unknown_backend_is_refused(ml4: Any) -> None:
    code, out, err = ml4("--backend", "nope")
    assert (code, out) == (REFUSED, "")
    assert "no installed plugin offers this backend" in err
