"""Mixing datasets: shares, epochs of each, and what a position means."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from framework.data.mix import BLOCK, Mix
from framework.data.stats import DataStats
from framework.errors import ConfigError, DataError, StateMismatchError


class Words:
    """A dataset that says what it is asked."""

    def __init__(self, name: str, samples: int) -> None:
        self.name, self.samples = name, samples
        self.fingerprint = f"{name}{samples}"
        self.asked: list[int] = []
        self.retired = 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> str:
        return f"{self.name}{index}"

    def sample_key(self, index: int) -> str:
        return f"file {index}"

    def prefetch(self, indices: list[int]) -> None:
        self.asked += indices

    def retire(self, count: int) -> None:
        self.retired += count

    def take_stats(self) -> DataStats:
        return DataStats(cache_hits=1)

    def data_state(self) -> dict[str, Any]:
        return {"files": self.samples}

    def check_data_state(self, saved: dict[str, Any]) -> None:
        if saved != self.data_state():
            raise StateMismatchError(f"{self.name} changed")


def mix(**weights: float) -> Mix:
    return Mix({"a": Words("a", 1000), "b": Words("b", 37), "c": Words("c", 5)}, weights or None)


def stream(of: Mix, start: int, count: int, stride: int = 1, seed: int = 7) -> list[tuple[int, int]]:
    epochs, ids = of.stream_ids(seed, start, stride, count)
    return list(zip(epochs.tolist(), ids.tolist(), strict=True))


def test_every_block_holds_the_weights_exactly_and_spreads_them() -> None:
    each = mix(a=1, b=2, c=1)
    _, ids = each.stream_ids(0, 3 * BLOCK, 1, BLOCK)
    which = np.digitize(ids, [1000, 1037])
    assert np.bincount(which).tolist() == [BLOCK // 4, BLOCK // 2, BLOCK // 4]
    for begin in range(0, BLOCK, 64):
        share = np.bincount(which[begin : begin + 64], minlength=3)
        assert np.abs(share - [16, 32, 16]).max() <= 3


def test_each_dataset_gives_every_sample_once_in_each_of_its_epochs() -> None:
    each = mix(a=1, b=2, c=1)
    seen = stream(each, 0, 2 * BLOCK)
    assert len(set(seen)) == len(seen)
    for first, length in ((0, 1000), (1000, 37), (1037, 5)):
        mine = [(epoch, number - first) for epoch, number in seen if first <= number < first + length]
        whole = len(mine) // length
        assert {one for one in mine if one[0] < whole} == {(e, i) for e in range(whole) for i in range(length)}
        orders = [tuple(i for e, i in mine if e == epoch) for epoch in range(2)]
        assert orders[0] != orders[1]


def test_a_position_means_the_same_whatever_came_before_and_whoever_asks() -> None:
    whole = stream(mix(), BLOCK - 500, 1000)
    assert stream(mix(), BLOCK - 100, 50) == whole[400:450]
    for world in (2, 3, 7):
        parts = [stream(mix(), BLOCK - 500 + rank, len(whole[rank::world]), world) for rank in range(world)]
        assert parts == [whole[rank::world] for rank in range(world)]
    assert stream(mix(), 10**12, 3) == stream(mix(), 10**12 - 5, 8)[5:]
    assert stream(mix(), 0, 50, seed=8) != stream(mix(), 0, 50)


def test_the_order_never_changes() -> None:
    """A golden vector: a run that began with another version must go on with the same samples."""
    digest = hashlib.blake2b(repr(stream(mix(a=1, b=2, c=1), 12345, 500)).encode(), digest_size=8).hexdigest()
    assert digest == "b4560ac0f610ac45"


def test_no_rank_gets_one_dataset_alone() -> None:
    each = Mix({"a": Words("a", 500), "b": Words("b", 500)})
    ids = np.array([number for _, number in stream(each, 0, 4000)])
    for world in (2, 4, 8):
        shares = [(ids[rank::world] < 500).mean() for rank in range(world)]
        assert max(abs(share - 0.5) for share in shares) < 0.1


def test_ids_lead_to_the_samples_and_their_keys() -> None:
    each = mix()
    assert (len(each), each[0], each[999], each[1000], each[1041]) == (1042, "a0", "a999", "b0", "c4")
    assert each.sample_key(1036) == "b/file 36"
    with pytest.raises(IndexError, match="1042 among the 1042"):
        each[1042]


def test_what_the_datasets_can_do_the_mix_can() -> None:
    each = mix()
    each.prefetch([1, 1001, 3, 1040])
    assert [source.asked for source in each.sources] == [[1, 3], [1], [3]]
    for index in (0, 1000, 1, 1041):
        each[index]
    each.retire(3)
    assert [source.retired for source in each.sources] == [2, 1, 0]
    assert each.take_stats().cache_hits == 3
    saved = each.data_state()
    each.check_data_state(saved)
    each.sources[1].samples = 38
    with pytest.raises(StateMismatchError, match="b changed"):
        each.check_data_state(saved)
    with pytest.raises(StateMismatchError, match="no dataset 'd'"):
        each.check_data_state({"d": {}})


def test_another_mix_has_another_fingerprint() -> None:
    assert mix().fingerprint == mix().fingerprint
    assert len({mix().fingerprint, mix(a=1, b=1, c=1).fingerprint, Mix({"a": Words("a", 9)}).fingerprint}) == 3


@pytest.mark.parametrize(
    "weights, words",
    [
        ({"a": 1, "b": 1}, "datasets a, b, c and weights for a, b"),
        ({"a": 1, "b": 1, "c": 0}, "weight of 'c' in the mix is 0"),
        ({"a": 1, "b": 1, "c": float("nan")}, "must be a number above 0"),
        ({"a": 1, "b": 1, "c": 1e-9}, "less than 1/65536 cannot be kept"),
    ],
)
def test_weights_that_cannot_be_kept_are_refused(weights: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        mix(**weights)


def test_an_empty_dataset_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="'b' of the mix is empty"):
        Mix({"a": Words("a", 3), "b": Words("b", 0)})
    with pytest.raises(ConfigError, match="no datasets"):
        Mix({})
