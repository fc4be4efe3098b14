"""The order of an epoch: frozen, a permutation, random enough, and reachable anywhere at once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from framework.data import order
from framework.data.order import SPEC, Order

# (samples, seed, epoch, first offset, ids): never to be changed. Another order needs another SPEC.
GOLDEN = [
    (1, 0, 0, 0, [0]),
    (5, 0, 0, 0, [2, 3, 0, 4, 1]),
    (10, 0, 0, 0, [6, 2, 9, 3, 7, 0, 8, 4]),
    (10, 2026, 3, 5, [7, 8, 1, 5]),
    (65_536, 0, 0, 0, [1948, 62405, 50133, 30756, 37059, 44231, 21524, 2523]),
    (65_536, 2026, 3, 32_768, [35010, 39924, 49046, 2163]),
    (65_537, 0, 0, 0, [31396, 63526, 21358, 1966, 34539, 20180, 1251, 49541]),
    (65_537, 2026, 3, 32_768, [60875, 28253, 48853, 53800]),
    (1_000_003, 0, 0, 0, [739161, 385829, 960393, 843371, 809669, 164484, 987112, 246713]),
    (1_000_003, 2026, 3, 500_001, [67028, 879741, 135130, 263843]),
    (10**12, 0, 0, 0, [528117081128, 383346975809, 481984186340, 372915361499]),
    (10**12, 2026, 3, 5 * 10**11, [938790448478, 794749263921, 98290479066, 631176793408]),
]


@pytest.mark.parametrize(("samples", "seed", "epoch", "start", "ids"), GOLDEN)
def test_the_order_is_the_one_of_the_frozen_spec(
    samples: int, seed: int, epoch: int, start: int, ids: list[int]
) -> None:
    assert SPEC == "feistel8/1"
    computed = Order(samples, seed, epoch).ids(start, start + len(ids))
    assert computed.dtype == np.int64
    assert computed.tolist() == ids


SIZES = [*range(1, 130), 999, 4_096, 65_535, 65_536, 65_537, 65_538, 66_049, 70_001, 131_072, 262_145, 1_000_003]


@pytest.mark.parametrize("samples", SIZES)
def test_every_epoch_visits_every_sample_once(samples: int) -> None:
    for epoch in (0, 1):
        assert np.array_equal(np.sort(Order(samples, 5, epoch).ids(0, samples)), np.arange(samples))


@given(samples=st.integers(1, 200_000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_every_seed_and_epoch_gives_a_permutation(samples: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(Order(samples, seed, epoch).ids(0, samples)), np.arange(samples))


@given(samples=st.integers(1, 300_000), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_slice_equals_that_of_the_whole_epoch(samples: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, samples))
    stop = data.draw(st.one_of(st.integers(start, samples), st.integers(start, min(samples, start + 600))))
    stride = data.draw(st.integers(1, 300))
    whole = Order(samples, 1, 2).ids(0, samples)
    sliced = Order(samples, 1, 2)
    assert np.array_equal(sliced.ids(start, stop, stride), whole[start:stop:stride])
    assert np.array_equal(sliced.ids(0, min(100, samples)), whole[:100])


def test_seed_and_epoch_do_not_stand_in_for_each_other() -> None:
    for samples in (1_000, 100_000):
        orders = [Order(samples, seed, epoch).ids(0, 200).tolist() for seed in range(6) for epoch in range(6)]
        assert len({tuple(each) for each in orders}) == len(orders)


def test_offsets_outside_of_the_epoch_are_refused() -> None:
    with pytest.raises(ValueError, match="within an epoch of 10 samples"):
        Order(10, 0, 0).ids(5, 11)
    with pytest.raises(ValueError, match="within an epoch"):
        Order(10, 0, 0).ids(-1, 3)
    with pytest.raises(ValueError, match="at least 1"):
        Order(0, 0, 0)


def test_all_permutations_of_few_samples_are_equally_likely() -> None:
    counts = dict.fromkeys(itertools.permutations(range(5)), 0)
    for epoch in range(12_000):
        counts[tuple(Order(5, 3, epoch).ids(0, 5).tolist())] += 1
    assert chisquare(list(counts.values())).pvalue > 1e-3


def structure(samples: int, distance: int, epochs: int) -> float:
    """How likely the differences of ids at a distance of offsets are if the order is random."""
    counts = np.zeros(64)
    for epoch in range(epochs):
        ids = Order(samples, 7, epoch).ids(0, samples)
        counts += np.bincount((ids[distance:] - ids[:-distance]) % samples * 64 // samples, minlength=64)
    return float(chisquare(counts).pvalue)


def test_neighbours_and_rows_of_a_large_order_look_random(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, row = 70_001, 265  # offsets one row of the Feistel square apart show weak rounds most
    assert structure(samples, 1, 20) > 1e-3
    assert structure(samples, row, 20) > 1e-3
    monkeypatch.setattr(order, "ROUNDS", 4)
    assert structure(samples, row, 20) < 1e-50  # the test does see what it looks for


def test_places_of_samples_are_spread_evenly() -> None:
    samples = 100_003
    counts = np.zeros(256)
    for epoch in range(10):
        ids = Order(samples, 11, epoch).ids(0, samples)
        counts += np.bincount(np.arange(samples) * 16 // samples * 16 + ids * 16 // samples, minlength=256)
    assert chisquare(counts, np.full(256, counts.mean())).pvalue > 1e-3
