"""Kernels compiled for gfx950 and gfx942 with no GPU: what they take, and by which instructions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ml4core.planning.model import published_model
from ml4core.planning.ranks import Ranks
from ml4core.planning.weights import kept
from ml4core_rocm import aot_floor, aot_model, aot_processes, aot_verdict
from ml4core_rocm.aot import Compiled, figures
from ml4core_rocm.aot_floor import Shape, Work
from ml4core_rocm.commands import app
from ml4core_triton.aot import Case

HOT = (
    "^(sparse_mla e4m3.* 16 heads 1 rows|window_mla e4m3.* 7 rows|indexer_logits 32 heads 4 rows"
    "|index_key_write rope|moe_experts a[48]w4 1536 wide 1 rows|gemm fp8_block fp8_block 64 rows"
    "|sparse_mla e4m3.* 8 heads 1 rows|moe_experts a8w4 768 wide 1 rows|topk of 65536"
    "|sparse_mla bf16 16 heads 1 rows|ragged_mla|gemm bf16 64 rows|head_gemm 16 heads 64 rows)"
)
"""A rank of TP 4 in a decode step; then what TP 8, top-k, streams of slots and bf16 launch beside
that. ``ml4 rocm aot`` judges every case.
"""

ONE = Compiled("case", "kernel", "gfx950", 1, 4, 2, 64, 0, 1024, 0, 0, 0, (), (), True, "")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Compiled]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        return {arch: list(aot_processes.compiled(arch, HOT)) for arch in ("gfx942", "gfx950")}


def test_hot_kernels_keep_their_registers(compiled: dict[str, list[Compiled]]) -> None:
    for launches in compiled.values():
        assert launches
        assert [fault for one in launches if (fault := aot_verdict.spilling(one))] == []
        for one in launches:
            # One wave of each SIMD at least, and the LDS of a compute unit.
            assert one.vgprs <= 512, one
            assert one.lds_bytes <= (65536 if one.arch == "gfx942" else 163840), one
            assert not (one.hot and one.vgpr_spills), one


def test_products_are_what_they_are_meant_to_be(compiled: dict[str, list[Compiled]]) -> None:
    for launches in compiled.values():
        assert list(aot_verdict.missing(launches)) == []
        assert [fault for one in launches if (fault := aot_verdict.foreign(one))] == []


def test_fp8_goes_by_the_architecture(compiled: dict[str, list[Compiled]]) -> None:
    found = {
        (one.arch, one.fp8, name)
        for launches in compiled.values()
        for one in launches
        if one.case.endswith("16 heads 1 rows fp8")
        for name in one.matrix
    }
    gfx950, gfx942 = ("f8E4M3FN",), ("f8E4M3FNUZ",)
    assert ("gfx950", gfx950, "v_mfma_f32_16x16x128_f8f6f4") in found
    assert ("gfx942", gfx942, "v_mfma_f32_16x16x32_fp8_fp8") in found
    assert {(arch, fp8) for arch, fp8, _ in found} == {("gfx950", gfx950), ("gfx942", gfx942)}


def test_fp4_meets_its_scales_in_the_matrix_units(compiled: dict[str, list[Compiled]]) -> None:
    for act in ("a4w4", "a8w4"):
        for kernel in ("gated_kernel", "outer_kernel"):
            found = {
                arch: name
                for arch, launches in compiled.items()
                for one in launches
                if one.kernel == kernel and act in one.case
                for name in one.matrix
            }
            assert found["gfx950"].startswith("v_mfma_scale_f32_16x16x128"), (act, kernel)
            assert found["gfx942"].endswith("_bf16"), (act, kernel)


def test_spills_are_told_of_hot_kernels_only() -> None:
    spilt = replace(ONE, vgpr_spills=3, scratch_bytes=12)
    assert aot_verdict.spilling(spilt) == "is hot, and keeps 3 registers in 12 bytes of memory"
    assert aot_verdict.spilling(replace(spilt, hot=False)) == ""
    # In vector registers, or in those of the matrix units: not in memory.
    assert aot_verdict.spilling(replace(ONE, sgpr_spills=9)) == ""
    assert aot_verdict.spilling(replace(ONE, vgpr_spills=2)) == ""


@pytest.mark.parametrize(
    ("arch", "fp8", "matrix", "wrong"),
    [
        ("gfx950", "f8E4M3FN", "v_mfma_f32_16x16x128_f8f6f4", False),
        ("gfx950", "f8E4M3FNUZ", "v_mfma_f32_16x16x16_f16", True),
        ("gfx942", "f8E4M3FNUZ", "v_mfma_f32_16x16x32_fp8_fp8", False),
        ("gfx942", "f8E4M3FN", "v_mfma_f32_16x16x32_fp8_fp8", True),
        ("gfx942", "f8E4M3FN", "v_mfma_f32_32x32x8_f16", False),
    ],
)
def test_the_other_flavour_is_told(arch: str, fp8: str, matrix: str, wrong: bool) -> None:
    assert bool(aot_verdict.foreign(replace(ONE, arch=arch, fp8=(fp8,), matrix=(matrix,)))) is wrong


def test_a_missing_instruction_is_told() -> None:
    other = replace(ONE, kernel="other", matrix=("v_mfma_f32_16x16x32_bf16",), wants="f8f6f4")
    assert list(aot_verdict.missing([other])) == [
        "case: no matrix instruction matches f8f6f4; there: v_mfma_f32_16x16x32_bf16"
    ]
    right = replace(ONE, matrix=("v_mfma_f32_16x16x128_f8f6f4",), wants="f8f6f4")
    assert list(aot_verdict.missing([other, right])) == []  # some kernel of the case has it


def test_an_assembly_without_metadata() -> None:
    with pytest.raises(RuntimeError, match=r"\.vgpr_count"):
        figures("s_endpgm\n")
    text = "\n".join(
        ("  - .agpr_count:     1", "    .vgpr_count:     2", "    .vgpr_spill_count: 3",
         "    .sgpr_spill_count: 4", "    .private_segment_fixed_size: 5")
    )  # fmt: skip
    assert list(figures(text).values()) == [2, 1, 3, 4, 5]


def test_the_command_shows_both_kinds_of_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    one = replace(ONE, vgpr_spills=31, sgpr_spills=170, scratch_bytes=7)
    monkeypatch.setattr(aot_processes, "compiled", lambda *_: [replace(one, hot=False)])
    head, line, _ = CliRunner().invoke(app, ["aot", "--arch", "gfx950"]).output.splitlines()
    for name, value in (("VGPR-spills", "31"), ("SGPR-spills", "170"), ("scratch", "7")):
        end = head.index(name) + len(name)
        assert line[:end].split()[-1] == value


def test_figures_of_steps_are_of_one_architecture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot_processes, "model", lambda arch, *_: [f"a line of {arch}"])
    for words in (["gfx942"], ["gfx942", "--arch", "gfx950"]):
        done = CliRunner().invoke(app, ["aot", "--model", "--arch", *words])
        assert done.exit_code == 2
        assert "gfx942" in done.output
    for given in ([], ["--arch", "gfx950"]):
        done = CliRunner().invoke(app, ["aot", "--model", *given])
        assert (done.exit_code, "a line of gfx950" in done.output) == (0, True)


def test_the_command_tells_faults_and_wrong_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    spilt = replace(ONE, vgpr_spills=3, scratch_bytes=12)
    monkeypatch.setattr(aot_processes, "compiled", lambda arch, *rest: [replace(spilt, arch=arch)])
    done = CliRunner().invoke(app, ["aot", "--arch", "gfx950"])
    assert done.exit_code == 1
    assert "FAULT  case, kernel, gfx950: is hot" in done.output
    monkeypatch.setattr(aot_processes, "compiled", lambda *_: [ONE])
    assert CliRunner().invoke(app, ["aot", "--arch", "gfx950"]).exit_code == 0
    monkeypatch.setattr(aot_processes, "compiled", lambda *_: [])
    assert CliRunner().invoke(app, ["aot", "-k", "none"]).exit_code == 2
    assert CliRunner().invoke(app, ["aot", "--arch", "gfx90a"]).exit_code == 2


def test_a_folder_without_triton_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["aot", "--triton", str(tmp_path)])
    assert done.exit_code == 2
    assert "holds no" in done.output


def test_what_the_compiler_says_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise ImportError('half a triton')\n")
    with pytest.raises(RuntimeError, match="half a triton"):
        list(aot_processes.compiled("gfx950", "to_slots", tmp_path))


WORK = Work(
    Case("case", lambda: None), "kernel", 3, 8e6, 2.3e9, "bf16", lambda tile: 1024.0 * tile["BN"]
)


def test_the_floor_is_the_greater_of_bytes_and_operations() -> None:
    one = replace(ONE, programs=4096, tile={"BN": 64})
    assert aot_floor.reach(WORK, one).floor == pytest.approx(1e-6)  # 8 MB at 8 TB/s
    busy = replace(WORK, operations=6.9e9)
    assert aot_floor.reach(busy, one).floor == pytest.approx(3e-6)  # at 2.3 PFLOP/s
    assert aot_floor.reach(replace(busy, unit="fp8"), one).floor == pytest.approx(1.5e-6)


def test_few_programs_keep_few_bytes_on_their_way() -> None:
    one = replace(ONE, programs=16, tile={"BN": 64})
    found = aot_floor.reach(WORK, one)
    # 16 programs x 64 KB on their way: 8 MB take eight latencies of 0.8 us.
    assert found.reach == pytest.approx(8e6 / 2**20 * 0.8e-6)
    assert found.ratio > 2
    assert "beyond 2x" in aot_floor.line(WORK, one)
    deeper = replace(one, stages=4)
    assert aot_floor.reach(WORK, deeper).reach == pytest.approx(found.reach / 3)
    assert "beyond 2x" not in aot_floor.line(WORK, replace(one, programs=4096))


def test_registers_and_lds_bound_what_is_resident() -> None:
    assert aot_floor.resident(ONE) == 8  # 64 registers, 1 KB of LDS: 8 waves of a SIMD
    assert aot_floor.resident(replace(ONE, vgprs=257)) == 1
    assert aot_floor.resident(replace(ONE, vgprs=128)) == 4
    assert aot_floor.resident(replace(ONE, lds_bytes=65536)) == 2
    assert aot_floor.resident(replace(ONE, lds_bytes=0, warps=8)) == 4


def test_a_step_adds_its_launches_up() -> None:
    one = replace(ONE, programs=4096, tile={"BN": 64})
    both = [replace(WORK, weights=6e6), replace(WORK, times=1)]
    step = aot_floor.step(both, lambda _: one)
    assert len(step.lines) == 2
    assert step.floor == pytest.approx(4e-6)
    assert step.reach == pytest.approx(4e-6)
    assert step.weights == 18e6


def test_a_short_launch_is_told_as_such_beside_its_true_floor() -> None:
    one = replace(ONE, programs=4096, tile={"BN": 64})
    short = replace(WORK, bytes=1.2e6, operations=0.0)
    found = aot_floor.reach(short, one)
    assert found.floor == pytest.approx(0.15e-6)
    assert found.reach == aot_floor.LATENCY
    assert found.ratio == pytest.approx(0.8 / 0.15)
    assert "   5.3  launch-bound" in aot_floor.line(short, one)
    # What it has in flight, and not the launch, keeps it from its floor.
    assert "beyond 2x" in aot_floor.line(short, replace(one, programs=4))


@pytest.mark.parametrize("shape", aot_model.SHAPES, ids=str)
@pytest.mark.parametrize("ranks", [4, 8])
def test_a_step_reads_the_planners_weights(ranks: int, shape: Shape) -> None:
    """All matrices of a rank but the embedding, and of routed experts those that are touched."""
    table = published_model("mxfp4").table
    parts = table.by_part(Ranks(tp=ranks), kept("bf16"))
    experts = parts["routed experts"].rank * aot_model.touched(shape.rows) / 128
    wanted = experts + sum(
        parts[part].rank
        for part in ("output", "attention", "indexer", "router", "shared experts", "dense")
    )
    found = sum(work.times * work.weights for work in aot_model.works(ranks, shape))
    assert found == pytest.approx(wanted, rel=1e-4)  # vectors are left out


def test_steps_are_decodes_windows_and_a_chunk_of_a_prompt() -> None:
    rows = {(shape.requests, shape.each): shape.judged for shape in aot_model.SHAPES}
    assert rows == {(1, 1): 1, (64, 1): 64, (1, 4): 4, (64, 4): 256, (1, 8192): 1}


def test_the_model_is_told_beside_its_floors() -> None:
    lines = list(aot_processes.model("gfx950", "(top-k|output).*TP 8, 64 x 4"))
    names = ["top-k", "output projection 6144 x 1024", "TP 8"]
    assert [line.split(",")[0] for line in lines[1:]] == names
    assert "ms at the floors of these kernels in a step" in lines[-1]
