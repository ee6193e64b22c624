"""The suite is worth something: the honest backend passes, and each wrong one dies where it should.

This is ``ml4 conformance selftest`` on the embedded backend, run once.
"""

from __future__ import annotations

import pickle
import re

import pytest

from ml4core_conformance.catalog import all_checks
from ml4core_conformance.mutants import mutants
from ml4core_conformance.selftest import SelfTest, means, selftest, text
from ml4core_conformance.verify import find

MUST_DIE = {
    "last-head-zeroed": "ops.structure",
    "attention-gain": "ops.bias",
    "truncated": "bytes.rounding",
    "few-bits": "ops.elements",
    "attention-few-bits": "ops.elements",
    "row-unwritten": "ops.written",
    "page-off-by-one": "ops.elements layout.cross_read",
    "one-byte-more": "layout.canary",
    "own-byte-order": "layout.golden layout.cross_read",
    "scale-rounded-up": "bytes.quantize",
    "scale-rounded-down": "layout.bytes layout.golden",
    "lse-base-two": "ops.lse ops.merge",
    "lse-of-nothing": "ops.lse ops.merge",
    "topk-duplicate": "ops.topk",
    "topk-beyond": "ops.topk",
    "topk-weakest": "ops.topk",
    "rope-skipped": "model.logits",
    "consumer-writes": "model.kv_bytes",
    "other-owner": "model.index_share",
    "renormalised-otherwise": "ops.router",
    "no-shared-expert": "model.logits",
    "drafts-accepted": "spec.greedy spec.distribution",
    "target-residual": "spec.distribution",
    "shared-noise": "spec.distribution",
    "stale-draft-cache": "stages.draft_block",
    "claims-a-format": "caps.over",
    "hides-a-format": "caps.under",
    "first-reason": "system.refusal",
    "rank-zero": "system.refusal",
    "refuses-late": "system.refusal",
    "fault-dropped": "system.fail_stop",
    "caches-elsewhere": "system.device_honesty",
    "unordered-sum": "ops.repeat",
    "eager-import": "plugin.import_light",
    "host-sync": "perf.steady_state",
}
"""What a suite of this kind has to notice, and the family whose business it is."""


@pytest.fixture(scope="module")
def outcome() -> SelfTest:
    return selftest(find("cpu"), mutants())


def test_what_has_to_be_noticed() -> None:
    checks = all_checks()
    found = {
        mutant.name: {check.family for check in checks for e in mutant.dies_at if means(e, check)}
        for mutant in mutants()
    }
    for name, families in MUST_DIE.items():
        assert set(families.split()) <= found[name], name


def test_mutants_are_data() -> None:
    honest = find("cpu").target.load()
    for mutant in mutants():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", mutant.name)
        assert re.fullmatch(r"[A-Z].*\.", mutant.doc)
        assert mutant.dies_at
        assert pickle.loads(pickle.dumps(mutant.wrap))(honest).name == "cpu"


@pytest.mark.multiprocess
@pytest.mark.timeout(1200)  # four minutes on two cores that have nothing else to do
def test_the_suite_is_sound(outcome: SelfTest) -> None:
    assert outcome.passed, text(outcome)
    assert not any(trial.idle for trial in outcome.trials)


@pytest.mark.multiprocess
@pytest.mark.timeout(1200)
def test_every_mutant_was_tried(outcome: SelfTest) -> None:
    assert [trial.mutant.name for trial in outcome.trials] == [one.name for one in mutants()]
    assert all(trial.killed_by for trial in outcome.trials)
