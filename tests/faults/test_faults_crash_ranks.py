"""Two ranks, one of them killed at any of its system calls: the other ends with an error, and nothing is lost."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fault_support import assert_all_whole, assert_restores, attempt, ended, fork, join, renewed
from syscalls import Outcome, supervise

from framework.checkpoint import CheckpointStore, TrainState
from framework.distributed import Group, World

pytestmark = pytest.mark.usefixtures("supervised")
BOUND = 60.0  # within which the other rank has to end
LONG, SHORT = 30.0, 1.0  # waits for another rank: where all live, and where one is going to die


def replicas(rank: int) -> Callable[[int], TrainState]:
    """A model that both ranks have, and a value of each rank's own, by step."""

    def state(step: int) -> TrainState:
        generator = torch.Generator().manual_seed(step)
        model = {f"layer{n}": torch.randn(20, 20, generator=generator) for n in range(4)}
        return TrainState({"model": model}, {"step": step}, {"rng": torch.arange(3) + rank + step})

    return state


def as_rank(
    rank: int, rendezvous: Path, body: Callable[[World, Group], object], seconds: float = LONG
) -> Callable[[], object]:
    def run() -> None:
        body(*join(rank, 2, rendezvous, seconds))

    return run


def both(folder: Path, body: Callable[[World, Group], object]) -> None:
    """Runs it on two ranks; both must go through."""
    rendezvous = Path(tempfile.mkdtemp(dir=folder)) / "store"
    pids = [fork(as_rank(rank, rendezvous, body)) for rank in (0, 1)]
    assert [ended(pid, BOUND) for pid in pids] == [0, 0]


def saving(path: Path, number: int, steps: list[int], seconds: float = LONG) -> Callable[[World, Group], object]:
    def run(world: World, group: Group) -> None:
        state = replicas(world.rank)
        attempt(path, number, steps, world=world, group=group, state=state, timeout_seconds=seconds)

    return run


def stopped(folder: Path, path: Path, rank: int, number: int | None) -> tuple[Outcome, int]:
    """Attempt 2 saves 3 and 4; one rank is killed. Returns what became of it, and the other's exit code."""
    seconds = LONG if number is None else SHORT
    rendezvous = Path(tempfile.mkdtemp(dir=folder)) / "store"
    body = saving(path, 2, [3, 4], seconds)
    other = fork(as_rank(1 - rank, rendezvous, body, seconds))
    outcome = supervise(as_rank(rank, rendezvous, body, seconds), path, stop_at=number, timeout=BOUND)
    return outcome, ended(other, BOUND)


def killed_everywhere(folder: Path, rank: int, first: int, every: int) -> int:
    """Kills the rank at each of these calls, and sees that all is well after it. Returns how many calls there are."""
    source = folder / "source"
    both(folder, saving(source, 1, [1, 2]))
    whole, other = stopped(folder, renewed(source, folder / "checkpoints"), rank, None)
    assert (whole.code, other) == (0, 0)
    killed = 0
    numbers = range(first, len(whole.calls) + 1, every)
    for number in numbers:
        path = renewed(source, folder / "checkpoints")
        outcome, other = stopped(folder, path, rank, number)
        where = f"call {number}, {outcome.calls[-1:]}, {outcome.code} and {other}"
        killed += outcome.code == -signal.SIGKILL
        assert outcome.code in (1, -signal.SIGKILL), where  # 1: the machine was too busy for the short wait
        store = CheckpointStore(path)
        newest = assert_all_whole(store)
        assert newest == 4 or (newest in (2, 3) and other == 1), where
        both(folder, restarted(path, newest))
        assert assert_all_whole(store) == newest + 1
        assert {one.name for one in path.iterdir() if one.is_dir()} == {one.path.name for one in store.list()}, where
    assert killed > len(numbers) // 2
    return len(whole.calls)


def restarted(path: Path, newest: int) -> Callable[[World, Group], object]:
    """The next attempt: restores the newest, saves one more, and that can be restored."""

    def run(world: World, group: Group) -> None:
        assert assert_restores(path, world, group, replicas(world.rank)) == newest
        saving(path, 3, [newest + 1])(world, group)
        assert assert_restores(path, world, group, replicas(world.rank)) == newest + 1

    return run


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_ranks_killed_at_any_call_leaves_whole_checkpoints(quick: Path, rank: int) -> None:
    assert killed_everywhere(quick, rank, first=3, every=(11, 7)[rank]) > (50, 20)[rank]


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_two_ranks_killed_at_every_call_leaves_whole_checkpoints(quick: Path, rank: int) -> None:
    assert killed_everywhere(quick, rank, first=1, every=1) > (50, 20)[rank]
