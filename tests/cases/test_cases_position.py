"""Position in the data: DP-01, DP-04, DP-08."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from case_tools import part
from support import assert_same, endure, events, every_step, kept, kill_at, killed, start

from framework.checkpoint import CheckpointStore
from framework.data.position import advance, steps_between


def positions(run: Path) -> dict[int, int]:
    """Position by step, of all checkpoints of a run."""
    return {found.step: found.manifest.position for found in CheckpointStore(run / "checkpoints").list()}


def test_dp_01_the_position_counts_what_was_trained(tmp_path: Path) -> None:
    """The position counts what workers prefetched; or is incomplete when asked right after a resume."""
    words = ("+recipe=job", "trainer.max_steps=24", "loader.num_workers=2", "loader.prefetch_factor=4", "run.name=r")
    words = (*words, "callbacks.async_checkpoint={every: 1, keep: null}", part("Synchronous"))
    endure(*words, kill_at(5, "forward"), kill_at(6, "forward", name="again"), cwd=tmp_path)
    run = tmp_path / "runs/r"
    assert [event["step"] for event in events(run, "restored")] == [4, 5]
    assert positions(run) == {step: 8 * step for step in range(1, 25)}
    seen = Counter((line.epoch, number) for line in kept(run).values() for number in line.ids)
    assert len(seen) == 2 * 96 and set(seen.values()) == {1}


def test_dp_04_another_number_of_loader_workers_keeps_order_and_weights(
    tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    """Resuming with another number of loader workers crashes or changes the order."""
    words = ("+recipe=job", "trainer.max_steps=30", part("Synchronous"))
    kills = (kill_at(9, "forward"), kill_at(20, "forward", name="again"))
    for workers in (2, 0):
        killed(start(*words, *kills, "run.name=r", f"loader.num_workers={workers}", cwd=tmp_path))
    start(*words, *kills, "run.name=r", "loader.num_workers=3", cwd=tmp_path).ends(0)
    assert [event["step"] for event in events(tmp_path / "runs/r", "restored")] == [5, 15]
    assert_same(unbroken(*words), tmp_path / "runs/r")


@pytest.mark.parametrize(("size", "batches"), [(4, 12), (16, 3)])
def test_dp_08_another_batch_size_goes_on_at_the_same_sample(
    size: int, batches: int, tmp_path: Path, unbroken: Callable[..., Path]
) -> None:
    """Batch size changed on resume: position is kept in batches, so samples are skipped or repeated."""
    words = ("+recipe=job", "~trainer.max_steps", "trainer.max_epochs=1", "callbacks.async_checkpoint.every=6")
    words = (*words, "run.name=r", part("Synchronous"))
    start(*words, kill_at(7, "forward"), cwd=tmp_path).crashed()
    run = tmp_path / "runs/r"
    again = start(*words, f"trainer.global_batch_size={size}", cwd=tmp_path).ends(0)
    assert f"global batch is now {size}, was 8" in again.output()
    order = [number for line in kept(unbroken("+recipe=job", "trainer.max_steps=12")).values() for number in line.ids]
    rest = [line for line in every_step(run) if line.attempt == 2]
    assert [number for line in rest for number in line.ids] == order[48:96]
    assert [line.step for line in rest] == list(range(7, 7 + batches))
    seen = [number for line in kept(run).values() for number in line.ids]
    assert sorted(seen) == list(range(96))
    assert positions(run)[6 + batches] == 96


@pytest.mark.parametrize("epoch_end", ["carry", "drop"])
@pytest.mark.parametrize(("samples", "size"), [(96, 8), (91, 8), (10, 3), (17, 16)])
def test_dp_08_the_steps_that_are_left_are_those_that_come(epoch_end: str, samples: int, size: int) -> None:
    """Batch size changed on resume: the epochs that are left are cut short or are too many."""
    for first in (0, samples // size // 2 * size):
        for end in range(0, 3 * samples + 1, 7):
            position, steps = first, 0
            while position < end:
                position, steps = advance(position, size, samples, epoch_end), steps + 1
            assert steps_between(first, end, size, samples, epoch_end) == steps


def test_dp_08_a_run_of_two_epochs_sees_two_epochs_where_the_rest_is_dropped(tmp_path: Path) -> None:
    """The length of a run in epochs ignores what is dropped at their ends: it goes on into one more."""
    words = ("+recipe=job", "~trainer.max_steps", "trainer.max_epochs=2", "data.train.samples=91", "run.name=r")
    start(*words, "loader.epoch_end=drop", cwd=tmp_path).ends(0)
    assert Counter(line.epoch for line in kept(tmp_path / "runs/r").values()) == {0: 11, 1: 11}
