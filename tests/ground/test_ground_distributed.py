"""Agreement between real ranks: bounded, and naming who did not come."""

from __future__ import annotations

import time

import pytest
import torch

from framework import distributed
from framework.distributed import Group, World
from framework.errors import DistributedError
from tests.loop.ranks import in_ranks

SOLO = World(0, 1, 0, 1, torch.device("cpu"))


def test_one_process_agrees_with_itself_without_a_group() -> None:
    group = Group(SOLO, timeout_seconds=1, name="alone")
    assert group.handle is None
    assert (group.all_gather("x"), group.broadcast("y")) == (["x"], "y")
    group.barrier(1)
    assert not torch.distributed.is_initialized()


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DistributedError, match=r"trainer\.device=cuda.*Use trainer\.device=auto or cpu"):
        distributed.join("cuda")


def agree(world: World) -> tuple[object, object, bool]:
    joined = distributed.join("cpu", timeout_seconds=30)
    group = Group(joined, timeout_seconds=30, name="test")
    group.barrier(30)
    answer = group.all_gather({"rank": world.rank}), group.broadcast(f"from {world.rank}"), joined.is_main
    distributed.leave()
    distributed.leave()
    return answer


def test_ranks_gather_in_rank_order_and_take_rank_0s_word() -> None:
    everyone = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert in_ranks(3, agree) == [(everyone, "from 0", rank == 0) for rank in range(3)]


def stay_away(world: World) -> str:
    """Only rank 0 comes to the barrier."""
    group = Group(world, timeout_seconds=30, name="saving")
    if world.rank:
        time.sleep(3)
        return ""
    try:
        group.barrier(1)
    except DistributedError as error:
        return str(error)
    return "nobody was missed"


def test_ranks_that_do_not_come_are_named_within_the_bound() -> None:
    message, _, _ = in_ranks(3, stay_away)
    assert "Rank 0: the ranks did not agree (saving)" in message and "Ranks 1, 2 failed" in message


def wait_for_one_that_is_late(world: World) -> str:
    group = Group(world, timeout_seconds=1, name="choosing")
    if world.rank == 1:
        time.sleep(4)
        return ""
    try:
        group.all_gather(1)
    except DistributedError as error:
        return str(error)
    return "nobody was missed"


def test_an_agreement_is_bounded_too() -> None:
    message, _ = in_ranks(2, wait_for_one_that_is_late)
    assert "the ranks did not agree (choosing)" in message
