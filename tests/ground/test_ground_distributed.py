"""Agreement between real ranks: bounded, and naming who did not come."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from framework import distributed
from framework.distributed import Group, World
from framework.errors import DistributedError
from framework.identity import Identity
from tests.loop.ranks import in_ranks

SOLO = World(0, 1, 0, 1, torch.device("cpu"))


def test_one_process_agrees_with_itself_without_a_group() -> None:
    group = Group(SOLO, timeout_seconds=1, name="alone")
    assert group.handle is None
    assert (group.all_gather("x"), group.broadcast("y")) == (["x"], "y")
    group.together("resting", 0.01)
    assert not torch.distributed.is_initialized()


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DistributedError, match=r"trainer\.device=cuda.*Use trainer\.device=auto or cpu"):
        distributed.join("cuda")


def agree(world: World) -> tuple[object, object, bool]:
    joined = distributed.join("cpu", timeout_seconds=30)
    group = Group(joined, timeout_seconds=30, name="test")
    group.together("starting", 30)
    answer = group.all_gather({"rank": world.rank}), group.broadcast(f"from {world.rank}"), joined.is_main
    distributed.leave()
    distributed.leave()
    return answer


def test_ranks_gather_in_rank_order_and_take_rank_0s_word() -> None:
    everyone = [{"rank": 0}, {"rank": 1}, {"rank": 2}]
    assert in_ranks(3, agree) == [(everyone, "from 0", rank == 0) for rank in range(3)]


def miss_one(world: World) -> list[str]:
    """Rank 2 comes to the first call too late, and in time to the second."""
    group = Group(world, timeout_seconds=30, name="saving")
    messages = [miss(group, "saving step 30", 1.0)]
    for _ in range(50):
        group.together("saving again", 30)
    return messages


def miss(group: Group, what: str, seconds: float) -> str:
    if group.world.rank == 2:
        time.sleep(3)
    try:
        group.together(what, seconds)
    except DistributedError as error:
        return str(error)
    return "nobody was missed"


def test_a_rank_that_does_not_come_is_named_on_all_ranks_and_may_come_again() -> None:
    named = [messages[0] for messages in in_ranks(3, miss_one)]
    expected = "rank 2 did not come within 1 s while saving step 30. Such"
    assert [message[: len(expected)] for message in named[:2]] == [expected] * 2
    assert named[2].startswith("rank 2, this one, came later than 1 s after the first while saving step 30; the others")


def stop_one(world: World, stopped: int, folder: Path) -> str:
    """One rank is frozen; the others then come together. Rank 0 holds the store."""
    addresses: list[Any] = [None] * world.size
    torch.distributed.all_gather_object(addresses, (os.getpid(), free_port()))
    torch.distributed.destroy_process_group()
    address = f"tcp://127.0.0.1:{addresses[0][1]}"
    torch.distributed.init_process_group("gloo", init_method=address, rank=world.rank, world_size=world.size)
    distributed.STORE_SECONDS = 3.0
    group = Group(world, timeout_seconds=60, name="saving")
    group.together("starting", 60)
    group.all_gather("nobody needs the store any more")
    if world.rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
        return "woken"
    pid = addresses[stopped][0]
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    try:
        group.together("saving step 30", 6)
    except DistributedError as error:
        message = str(error)
    (folder / str(world.rank)).touch()
    while not all((folder / str(rank)).exists() for rank in range(3) if rank != stopped):
        time.sleep(0.01)  # whoever ends, or is woken, may hold the store that the other one still asks
    if world.rank == 2:
        os.kill(pid, signal.SIGCONT)
    return message


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_frozen_rank_is_named_even_if_it_holds_the_store(stopped: int, tmp_path: Path) -> None:
    messages = in_ranks(3, stop_one, stopped, tmp_path)
    for rank, message in enumerate(messages):
        assert message.startswith(f"rank {stopped} did not come within 6 s while saving step 30") or rank == stopped
    assert ("the store of rank 0 does not answer" in messages[2]) == (stopped == 0)


def lose_one(world: World, folder: Path) -> None:
    group = Group(world, timeout_seconds=60, name="saving")
    group.together("starting", 60)
    group.all_gather("nobody needs rank 1 any more")
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.together("saving step 30", 1000)
    except DistributedError as error:
        (folder / str(world.rank)).write_text(str(error))


def test_a_rank_of_this_host_that_died_is_named_without_waiting_for_it(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="rank 1 died"):
        in_ranks(3, lose_one, tmp_path)
    for rank in (0, 2):
        expected = "rank 1 did not come while saving step 30: the process has ended."
        assert (tmp_path / str(rank)).read_text().startswith(expected)


def test_whether_a_process_has_ended_is_told_of_this_host_alone() -> None:
    own = Identity.own()
    boot, space, pid, started = own.text.split()
    assert not own.has_ended
    assert Identity(f"{boot} {space} {pid} {int(started) + 1}").has_ended  # its id was given anew
    assert not Identity(f"another {space} {pid} {int(started) + 1}").has_ended
    assert not Identity("").has_ended


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


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


def test_an_agreement_is_bounded_too_and_names_who_did_not_come() -> None:
    message, _ = in_ranks(2, wait_for_one_that_is_late)
    assert message.startswith("Rank 0: the ranks did not agree (choosing): rank 1 did not come: ")


def leave_while_a_thread_waits(world: World, folder: Path) -> list[object]:
    """Rank 0 leaves while a thread of it waits for rank 1, which lives and does not come."""
    group = Group(world, timeout_seconds=60, name="saving")
    group.together("starting", 60)
    if world.rank == 1:
        while not (folder / "left").exists():
            time.sleep(0.01)
        return []
    told: list[object] = []
    has_begun = threading.Event()
    meet = group._roll.meet

    def watched(seconds: float) -> tuple[str, list[int]]:
        has_begun.set()
        answer = meet(seconds)
        told.append(torch.distributed.is_initialized())
        return answer

    group._roll.meet = watched  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: told.append(miss(group, "saving step 30", 2.0)), daemon=True)
    thread.start()
    assert has_begun.wait(30)
    distributed.leave()
    thread.join(30)
    told += [torch.distributed.is_initialized(), miss(group, "saving step 60", 2.0)]
    (folder / "left").touch()
    return told


def test_a_rank_leaves_once_the_calls_of_its_threads_have_ended_and_lets_none_begin(tmp_path: Path) -> None:
    was_joined, message, is_joined, refusal = in_ranks(2, leave_while_a_thread_waits, tmp_path)[0]
    assert was_joined and not is_joined
    assert message.startswith("rank 1 did not come within 2 s while saving step 30. Such")
    assert refusal.startswith("Rank 0 is leaving the others")
