"""What ranks send each other, and how errors and devices of several are told as one."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from ml4core.api import (
    Device,
    DraftPlan,
    Fault,
    FaultError,
    Refusal,
    Refused,
    Sampling,
    Segment,
    StepPlan,
    StepShape,
)
from ml4core.engine.errors import ArgumentsError, RequestError
from ml4core.engine.ranks.devices import device_of, refusals
from ml4core.engine.ranks.failures import Failure, failure_of, one_error, one_fault
from ml4core.engine.ranks.packing import pack, unpack
from ml4core.engine.ranks.plans import draft_plan, draft_tensors, step_plan
from ml4core.models.errors import CheckpointError

CPU = torch.device("cpu")


def refuse_to_receive(buffer: Any) -> None:
    raise AssertionError("nothing is broadcast")


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(6, 5, generator=generator)
    return [
        torch.arange(7),
        torch.arange(3, dtype=torch.int32),
        torch.tensor(True),
        torch.empty(0, 4, dtype=torch.bfloat16),
        wide.to(torch.bfloat16),
        wide.t(),
        wide[::2],
    ]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(found, wanted, strict=True)
    )


def test_tensors_of_a_host_go_along() -> None:
    packed, buffer = pack(tensors())
    assert buffer is None
    found = unpack(pickle.loads(pickle.dumps(packed)), CPU, refuse_to_receive)
    assert same(found, tensors())
    assert all(one.data_ptr() % 16 == found[0].data_ptr() % 16 for one in found if one.numel())
    assert unpack(pack([])[0], CPU, refuse_to_receive) == []


def test_tensors_of_a_device_are_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, _ = pack(tensors())
    assert packed.data is not None
    sent = torch.frombuffer(bytearray(packed.data), dtype=torch.uint8)
    bare = packed._replace(data=None)
    assert bare.nbytes == len(sent)
    assert same(unpack(bare, CPU, lambda buffer: buffer.copy_(sent)), tensors())
    packed, buffer = pack([torch.empty(3, device="meta"), torch.empty(2, device="meta")])
    assert packed.data is None
    assert buffer is not None
    assert len(buffer) == packed.nbytes == 32


@pytest.mark.parametrize("images", [False, True])
def test_plans_come_back(images: bool) -> None:
    none = Segment(0, 0, 0)
    pages = (("latent", 3), ("index", 3), ("draft", 2))
    shape = StepShape(Segment(2, 2, 1), none, none, pages, 2, 4 * images)
    plan = StepPlan(
        shape,
        token_ids=torch.arange(2),
        positions=torch.arange(2) + 1,
        row_request=torch.arange(2) + 2,
        query_start=torch.arange(3),
        visible=torch.ones(2),
        block_tables={name: torch.full((2, width), width) for name, width in pages},
        slots={name: torch.arange(2) for name, _ in pages},
        logits_indices=torch.arange(2),
        image_index=torch.tensor([0, -1]) if images else None,
        image_embeddings=torch.rand(4, 8) if images else None,
    )
    found = step_plan(shape, plan.tensors())
    assert found.tensors().keys() == plan.tensors().keys()
    assert all(torch.equal(one, plan.tensors()[name]) for name, one in found.tensors().items())
    sampling = Sampling(torch.rand(2), torch.arange(2), torch.arange(2) + 1)
    a, b, c, d, e = (torch.arange(3) + i for i in range(5))
    drafts = DraftPlan(a, b, c, d, e, sampling)
    again = draft_plan(draft_tensors(drafts))
    assert same(list(draft_tensors(again)), list(draft_tensors(drafts)))


def failed(rank: int, at: float, error: BaseException) -> Failure:
    return pickle.loads(pickle.dumps(failure_of(error, rank, at)))  # type: ignore[no-any-return]


def test_the_first_to_fail_is_the_cause() -> None:
    lost = Failure(2, "rank", "its process 7 was ended by SIGKILL")
    full, closed = failed(1, 5.0, MemoryError("full")), failed(3, 6.0, RuntimeError("closed"))
    fault = one_fault([closed, full], 4, 9)
    assert (fault.code, fault.rank, fault.step) == ("memory", 1, 9)
    assert fault.message.startswith("rank 1 of 4: MemoryError: full (works: ")
    assert fault.message.endswith("; then rank 3 of 4 failed, too")
    fault = one_fault([closed, full, lost], 4, 9)
    assert fault.rank == 2
    assert "; then ranks 1 and 3 of 4 failed, too" in fault.message
    hot = failed(1, 1.0, FaultError(Fault("device", "hot", 3)))
    assert one_fault([hot], 2, 4) == Fault("device", "rank 1 of 2: hot", 4, 1)


def test_errors_keep_their_kinds() -> None:
    for kind in (CheckpointError, MemoryError):
        errors = [failed(rank, float(rank), kind("bad")) for rank in (0, 1)]
        with pytest.raises(kind, match=r"^ranks 0 and 1 of 3: bad$"):
            raise one_error([*errors, failed(2, 3.0, kind("worse"))], 3)
    with pytest.raises(RuntimeError, match=r"^rank 1 of 2: KeyError: 'x'"):
        raise one_error([failed(1, 1.0, KeyError("x"))], 2)
    with pytest.raises(RequestError, match="--max-model-len: 5"):
        raise one_error([failed(1, 1.0, RequestError("--max-model-len", 5, "9"))], 2)
    with pytest.raises(ArgumentsError, match="a: b"):
        raise one_error([failed(1, 1.0, ArgumentsError(["a: b"]))], 2)


def test_refusals_of_ranks_are_one() -> None:
    fan, heat = Refusal("x", "fan", "it has none"), Refusal("x", "heat", "it is hot", "ice")
    first = failed(0, 2.0, Refused([fan], "--backend x"))
    second = failed(1, 1.0, Refused([fan, heat], "--backend x"))
    error = one_error([first, second], 2)
    assert isinstance(error, Refused)
    assert error.what == "--backend x"
    assert set(error.refusals) == {fan, replace(heat, reason="it is hot (on rank 1 of 2)")}


def test_devices_of_ranks() -> None:
    cpu = Device("real", "x", "x86_64", "cpu")
    assert refusals(9, [cpu]) == []
    assert device_of([cpu], 5) == cpu
    chips = [Device("real", "a chip", "a1", f"cuda:{i}", i) for i in range(4)]
    assert refusals(4, chips) == []
    assert [device_of(chips, rank) for rank in range(4)] == chips
    (few,) = refusals(8, chips)
    assert str(few) == (
        "[core] --tensor-parallel-size 8: 8 ranks need 8 devices, and there are 4: cuda:0, cuda:1, "
        "cuda:2, cuda:3 (works: --tensor-parallel-size 4 or less)"
    )
    chips[2] = replace(chips[2], name="another", arch="a2")
    (mixed,) = refusals(4, chips)
    assert "rank 2 would have another (a2), and rank 0 has a chip (a1)" in mixed.reason
    assert mixed.remedy.startswith("--tensor-parallel-size 2 or less")
    assert refusals(1, chips) == refusals(2, chips) == []
