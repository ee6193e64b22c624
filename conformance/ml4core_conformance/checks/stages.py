"""Every stage of a decoder layer, bound as core binds it and each accepted candidate on its own,
against the composition in fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ml4core.api import Selection
from ml4core_conformance.check import Check, CheckFailed
from ml4core_conformance.oracle.stages import Inputs, index_scores
from ml4core_conformance.rigs import errors
from ml4core_conformance.rigs.judging import ROUTER_MARGIN, Judge, rig_of
from ml4core_conformance.rigs.rig import BF16, FP8, MIXED, REFERENCE, Precision, Rig
from ml4core_conformance.rigs.scenes import KINDS, Scene
from ml4core_conformance.rigs.selections import check_selection
from ml4core_conformance.subject import Subject

LAYERS = (0, 1, 2, 3, 7, 8)
"""One of each kind: dense, owner, index sharer, NoPE owner, KV consumer, and one without an index,
which is not part of the tiny model.
"""

FEW_LAYERS = (1, 2, 7)
"""For the self-test: an owner of all, a sharer, and a NoPE consumer."""


def checks() -> list[Check]:
    found = []
    for precision in (REFERENCE, BF16, FP8, MIXED):
        for kind in KINDS:
            for stage, (run, doc) in _STAGES.items():
                found.append(
                    Check(
                        f"stages.{stage}",
                        "model",
                        partial(_each_layer, run, precision, kind),
                        doc,
                        variant=f"{kind}/{precision.name}",
                        requires=precision.requires,
                        unit=f"stages/{precision.name}",
                        bugs=_BUGS.get(stage, ()),
                    )
                )
    found.append(
        Check(
            "stages.nan",
            "model",
            nan_reported,
            "A NaN index key is never selected, and the rows that see it, and no others, report it "
            "in has_nan.",
            requires=REFERENCE.requires,
            unit="stages/reference",
            bugs=("B001",),
        )
    )
    return found


def _each_layer(
    run: Callable[[Judge], None], precision: Precision, kind: str, subject: Subject
) -> None:
    for seed in subject.seeds:
        rig = rig_of(subject, precision, seed)
        scene = Scene(rig, kind, seed)
        for index in FEW_LAYERS if subject.small else LAYERS:
            with torch.inference_mode():
                run(Judge(subject, rig, scene, rig.spec.layers[index]))


def attn_inputs(judge: Judge) -> None:
    rig, scene = judge.rig, judge.scene
    residual, hidden = judge.floats(judge.spec.hidden_size), judge.hidden()
    wide = (residual.double(), None if hidden is None else hidden.double())
    made, twin = (one.inputs(*wide, scene.cpu.positions) for one in (judge.exact, judge.twin))
    for where, call in judge.calls("attn_inputs"):
        before = rig.snapshot()
        got = call(judge.weights, scene.plan, judge.kv, judge.to(residual), judge.to(hidden))
        judge.compare("q", got.q, made.q, twin.q, where, axes=("row", "head"))
        for what, one, number in (
            ("index_q", got.index_q, 0),
            ("index_weights", got.index_weights, 1),
        ):
            pair = [None if x.indexed is None else x.indexed[number] for x in (made, twin)]
            axes = ("row", "head")[: 2 - number]
            judge.compare(what, one, pair[0], pair[1], where, axes=axes)
        judge.check_rows(made, twin, where)
        rig.untouched(before, judge.written(made), f"attn_inputs; {where}")


def select(judge: Judge) -> None:
    spec, scene = judge.spec.indexer, judge.scene
    if spec is None or judge.kv.index_keys is None:
        return
    query = scene.draw.normal(scene.rows, spec.heads, spec.head_dim)
    weights = scene.draw.normal(scene.rows, spec.heads)
    fp8 = judge.kv.index_keys.layout.fp8 is not None
    keys = judge.rig.rows(judge.kv.index_keys)
    scores = index_scores(query.double(), weights.double(), spec.scale, keys, fp8)
    size = index_scores(query.double().abs(), weights.double().abs(), spec.scale, keys.abs(), fp8)
    for where, call in judge.calls("select"):
        before = judge.rig.snapshot()
        got = call(scene.plan, judge.kv, query.to(judge.rig.device), weights.to(judge.rig.device))
        margin = size * 2.0**-17
        check_selection(judge.subject, scene, got, scores, margin, spec.topk, where)
        judge.rig.untouched(before, {}, f"select; {where}")


def sparse_mla(judge: Judge) -> None:
    rig, scene, spec = judge.rig, judge.scene, judge.spec
    q = judge.floats(spec.heads, spec.absorbed_dim)
    selection = judge.given()
    if spec.indexer is not None:
        selection = scene.selection(spec.indexer.topk)
    rows, mask = rig.rows(judge.kv.latent), scene.mask(selection)
    exact, twin = (one.attention(q.double(), rows, mask) for one in (judge.exact, judge.twin))
    for where, call in judge.calls("sparse_mla"):
        before = rig.snapshot()
        out, lse = call(scene.plan, judge.kv, judge.to(q), scene.moved(selection))
        judge.compare("out", out, exact[0], twin[0], where, axes=("row", "head"))
        real = scene.real
        gap = (lse.cpu()[real].double() - exact[1][real]).abs()
        size = 1 + exact[1][real].abs()
        judge.subject.measure(
            _lse_measure(float((gap / size).max()), f"{where}, row and head of the worst lse")
        )
        rig.untouched(before, {}, f"sparse_mla; {where}")


def _lse_measure(error: float, where: str) -> errors.Measure:
    return errors.Measure("lse, of 1 + |lse|", error, 2.0**-13, where)


def attn_output(judge: Judge) -> None:
    spec = judge.spec
    out, residual = judge.floats(spec.heads, spec.kv_lora_rank), judge.floats(spec.hidden_size)
    wide = (out.double(), residual.double())
    exact, twin = judge.exact.output(*wide), judge.twin.output(*wide)
    for where, call in judge.calls("attn_output"):
        got = call(judge.weights, judge.to(out), judge.to(residual))
        for what, one, right, lossy in zip(("residual", "hidden"), got, exact, twin, strict=True):
            judge.compare(what, one, right, lossy, where)


def ffn(judge: Judge) -> None:
    spec = judge.spec
    residual, hidden = judge.floats(spec.hidden_size), judge.floats(spec.hidden_size)
    norm = judge.rig.weights.layers[1]["attention_norm"]
    assert isinstance(norm, Tensor)
    for next_norm in (norm, None):
        exact, twin = (
            one.ffn(residual.double(), hidden.double(), next_norm)
            for one in (judge.exact, judge.twin)
        )
        rows = judge.real & (exact[2] > ROUTER_MARGIN[torch.float32])
        for where, call in judge.calls("ffn"):
            moved = None if next_norm is None else next_norm.to(judge.rig.device)
            got = call(judge.weights, judge.to(residual), judge.to(hidden), moved)
            judge.compare("residual", got[0], exact[0], twin[0], where, rows)
            judge.compare("hidden", got[1], exact[1], twin[1], where, rows)


def attention(judge: Judge) -> None:
    _block(judge, "attention")


def decoder_layer(judge: Judge) -> None:
    _block(judge, "decoder_layer")


def _block(judge: Judge, stage: str) -> None:
    """A stage that writes caches, selects, attends and projects. What it selected is judged against
    the oracle's scores, what follows is judged on what it selected and stored.
    """
    rig, scene, spec = judge.rig, judge.scene, judge.spec
    residual, hidden = judge.floats(spec.hidden_size), judge.hidden()
    wide = (residual.double(), None if hidden is None else hidden.double())
    made, twin = (one.inputs(*wide, scene.cpu.positions) for one in (judge.exact, judge.twin))
    given = judge.given()
    norm = rig.weights.layers[0]["attention_norm"]
    assert isinstance(norm, Tensor)
    extra = (norm.to(rig.device),) if stage == "decoder_layer" else ()
    ways = list(judge.calls(stage))
    if stage == "decoder_layer":
        bound = rig.bound(scene.plan)[0].layers[spec.index]
        ways.append((f"{judge.where}, as bound by core", bound))
    for where, call in ways:
        before = rig.snapshot()
        got = call(
            judge.weights, scene.plan, judge.kv, judge.to(residual), judge.to(hidden),
            scene.moved(given), *extra,
        )  # fmt: skip
        judge.check_rows(made, twin, where)
        rig.untouched(before, judge.written(made), f"{stage}; {where}")
        selection = given
        if spec.owns_index:
            selection = got[2]
            _judge_selection(judge, selection, made, twin, where)
        mask, rows = scene.mask(selection), rig.rows(judge.kv.latent)
        results = []
        for one, inputs in ((judge.exact, made), (judge.twin, twin)):
            out, _ = one.attention(inputs.q, rows, mask)
            state = one.output(out, residual.double())
            results.append(one.ffn(*state, norm) if extra else (*state, None))
        margin = results[0][2]
        compared = judge.real
        if margin is not None:
            compared = judge.real & (margin > ROUTER_MARGIN[rig.dtype])
            if not bool(compared.any()):
                raise RuntimeError(f"no row has a router margin to be compared by; {where}")
        for number, what in enumerate(("residual", "hidden")):
            pair = (results[0][number], results[1][number])
            judge.compare(what, got[number], *pair, where, compared)


def _judge_selection(
    judge: Judge, found: Selection | None, made: Inputs, twin: Inputs, where: str
) -> None:
    spec, cache = judge.spec.indexer, judge.kv.index_keys
    if found is None:
        raise CheckFailed(f"selection: missing, and the layer owns an index; {where}")
    if spec is None or cache is None or made.indexed is None or twin.indexed is None:
        raise TypeError(f"layer {judge.spec.index} owns no index")
    keys, fp8 = judge.rig.rows(cache), cache.layout.fp8 is not None
    exact, lossy = (one.scores(spec, keys, fp8) for one in (made.indexed, twin.indexed))
    # Queries are rounded on the way here, and a code more or less of them moves a score.
    plain = made.indexed.scores(spec, keys, False)
    size = torch.where(judge.scene.visible, exact.abs(), 0.0).amax(-1, keepdim=True)
    loss = torch.maximum((exact - lossy).abs(), (exact - plain).abs() * fp8)
    loss = torch.where(judge.scene.visible, loss, 0.0).amax(-1, keepdim=True)
    margin = (2 * loss + 1e-5 * size).expand_as(exact)
    check_selection(judge.subject, judge.scene, found, exact, margin, spec.topk, where)


def nan_reported(subject: Subject) -> None:
    """Plants a NaN key in one request's page."""
    for seed in subject.seeds:
        rig = rig_of(subject, REFERENCE, seed)
        scene = Scene(rig, "prefill", seed)
        judge = Judge(subject, rig, scene, rig.spec.layers[1])
        spec, cache = judge.spec.indexer, judge.kv.index_keys
        if spec is None or cache is None:
            raise TypeError("layer 1 of the tiny model owns no index")
        position = int(scene.cpu.visible.max()) - 4  # some rows of that chunk see it, some don't
        row = int(scene.cpu.visible.argmax())
        wanted = torch.full((scene.rows, 1), position, dtype=torch.int32)
        slot = int(scene.positions_to_slots(wanted, "index")[row, 0])
        sees = scene.cpu.visible > position
        sees &= scene.cpu.row_request == scene.cpu.row_request[row]
        held = rig.rows(cache).float()
        rows = held.clone()
        rows[slot] = torch.nan
        _write(rig, cache, rows)
        try:
            query = scene.draw.normal(scene.rows, spec.heads, spec.head_dim).to(rig.device)
            weights = scene.draw.normal(scene.rows, spec.heads).to(rig.device)
            for where, call in judge.calls("select"):
                with torch.inference_mode():
                    got = call(scene.plan, judge.kv, query, weights)
                errors.equal("has_nan", got.has_nan.cpu()[scene.real], sees[scene.real], where)
                hit = (got.positions.cpu() == position)[sees].any()
                if hit:
                    raise CheckFailed(f"a key that is NaN was selected; {where}")
        finally:
            _write(rig, cache, held)


def _write(rig: Rig, cache: Any, rows: Tensor) -> None:
    scale = None if cache.scale is None else cache.scale.cpu()
    packed = cache.layout.pack(rows.unflatten(0, (rig.blocks, -1)), scale)
    for part, values in zip(cache.parts, packed, strict=True):
        part.copy_(values)


_STAGES: dict[str, tuple[Callable[[Judge], None], str]] = {
    "attn_inputs": (
        attn_inputs,
        "Queries, index queries and the rows written are those of the composition in fp64, on "
        "layers of each kind; no other slot changes, and padding leaves no trace.",
    ),
    "select": (
        select,
        "The selection is reachable, unique, ascending, packed in front, and holds the largest "
        "scores; its slots go through the latent group's table.",
    ),
    "sparse_mla": (
        sparse_mla,
        "Attention over a given selection, or over all visible keys on layers without an index.",
    ),
    "attn_output": (attn_output, "W_UV, wo, residual and norm of each row."),
    "ffn": (ffn, "Router, experts, shared expert or the dense block, residual, and the next norm."),
    "attention": (
        attention,
        "From a layer's input to the norm before its feed-forward, judged on what it selected and "
        "stored; sharers use the selection that they are given.",
    ),
    "decoder_layer": (
        decoder_layer,
        "A whole layer, as composed, as each candidate serves it, and as core binds it.",
    ),
}
_BUGS: dict[str, tuple[str, ...]] = {
    "attn_inputs": ("B005", "B044", "B046"),
    "select": ("B001", "B007", "B009", "B072"),
    "sparse_mla": ("B018", "B020", "B070"),
    "decoder_layer": ("B013", "B072"),
}
