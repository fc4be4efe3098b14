"""ShardStream: each sample once in each epoch, whatever is killed and whoever goes on."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from shard_sets import GLOBAL_BATCH, Life, live, share, stream, write

from framework.data.shards.sequence import EpochSequence
from framework.data.streams.protocol import MergeableStream

GOLDEN = [
    [7, 5, 8, 6, 4, 11, 1, 0, 9, 10, 3, 2],
    [0, 1, 3, 2, 4, 6, 9, 5, 7, 8, 10, 11],
]  # a checkpoint in the middle of an epoch means this order


@pytest.mark.parametrize("seed", range(24))
def test_each_sample_comes_once_through_kills_and_changes_of_shape(seed: int, tmp_path: Path) -> None:
    live(tmp_path, seed, [0]).check()


@pytest.mark.parametrize("seed", range(1))
def test_each_sample_comes_once_with_workers_too(seed: int, tmp_path: Path) -> None:
    live(tmp_path, 1000 + seed, [0, 2]).check()


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_each_sample_comes_once_in_a_thousand_schedules(tmp_path: Path) -> None:
    for seed in range(2000, 3000):
        life = live(tmp_path / str(seed), seed, [0] if seed % 20 else [0, 2, 3])
        life.check()


def test_worlds_1_2_4_1_in_one_epoch_with_0_2_and_3_workers(tmp_path: Path) -> None:
    made = stream(write(tmp_path, "tar", [40, 7, 90, 63]), "tar", buffer=20)
    life = Life(made, random.Random(0))
    for world, workers, steps in ((1, 0, 7), (2, 2, 6), (4, 0, 5), (1, 3, 30)):
        life.attempt(world, workers, steps, every=2)
    life.check()
    assert life.shapes == [(1, 0, 0), (2, 2, 6), (4, 0, 12), (1, 3, 16)]
    assert life.steps * GLOBAL_BATCH > len(made)


def test_what_is_done_stays_small_and_is_told_by_intervals(tmp_path: Path) -> None:
    made = stream(write(tmp_path, "text", [50, 70, 30]), "text", buffer=8)
    assert isinstance(made, MergeableStream)
    done = made.merge(0, seed=1, done=None, shares=[50, 50, 50], taken=[10, 0, 50])
    assert done["intervals"] == [[0, 10], [100, 150]]
    done = made.merge(0, seed=1, done=done, shares=[90], taken=[45])
    assert done["intervals"] == [[0, 55], [100, 150]]
    rest = [number for number, _ in share(made, seed=1, done=done, shares=[0, 20, 25], consumer=1)]
    rest += [number for number, _ in share(made, seed=1, done=done, shares=[0, 20, 25], consumer=2)]
    assert rest == [number for number, _ in share(made, seed=1)][55:100]
    assert share(made, seed=1, done=done, shares=[0, 20, 25], consumer=0) == []


def test_the_order_is_frozen(tmp_path: Path) -> None:
    made = stream(write(tmp_path, "text", [4, 3, 5]), "text", buffer=5)
    assert [number for number, _ in share(made, 0, seed=7)] == GOLDEN[0]
    assert [number for number, _ in share(made, 1, seed=7)] == GOLDEN[1]


def test_windows_are_shuffled_anew_in_each_epoch(tmp_path: Path) -> None:
    made = stream(write(tmp_path, "text", [30]), "text", buffer=30, shuffle_shards=False)
    assert share(made, 0) != share(made, 1)


def test_the_shard_that_follows_is_one_that_is_still_to_be_read() -> None:
    sequence = EpochSequence(np.array([6, 0, 6, 6, 6]), 0, 0, shuffle_shards=False, buffer=4)
    following = [sequence.following(shard, [(2, 5), (19, 20)]) for shard in (0, 2, 3, 4)]
    assert following == [2, 3, 4, None]  # the window from 4 to 8 reaches into shard 2, that from 16 to 20 begins in 3
    assert sequence.following(0, [(0, 3)]) is None
    assert sequence.following(0, [(0, 3), (20, 21)]) == 4
