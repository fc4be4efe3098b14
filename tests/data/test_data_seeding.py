"""Random numbers that belong to the sample, and generators that are put back."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from framework.data import seeding
from framework.data.seeding import sample_key, seed_sample


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()).item()]


@pytest.fixture(autouse=True)
def _clean() -> Any:
    with seeding.forked():
        yield


def test_keys_are_frozen_and_tell_seed_epoch_and_sample_apart() -> None:
    assert sample_key(0, 0, 0) == 5317599760294983820
    assert sample_key(7, 2, "cat/1.jpg") == 16225331728306224023
    keys = {sample_key(seed, epoch, key) for seed in range(9) for epoch in range(9) for key in (*range(9), "1", "a")}
    assert len(keys) == 9 * 9 * 11


def test_a_seeded_sample_draws_the_same_numbers_and_another_draws_others() -> None:
    seed_sample(sample_key(1, 0, 5))
    first = draw()
    draw()
    seed_sample(sample_key(1, 0, 5))
    assert draw() == first
    seed_sample(sample_key(1, 1, 5))
    assert not set(draw()) & set(first)


def test_numpy_and_torch_do_not_share_a_stream() -> None:
    seed_sample(sample_key(1, 0, 5))
    # A fresh Mersenne twister holds its seed in its first word.
    assert int(np.random.get_state(legacy=False)["state"]["key"][0]) != torch.initial_seed()


def test_captured_generators_come_back_bit_by_bit_through_a_safe_file(tmp_path: Path) -> None:
    random.gauss(0, 1)  # leaves a second value behind, as does numpy's
    np.random.randn()
    torch.save(seeding.capture(), tmp_path / "state")
    expected = [draw() for _ in range(700)]
    seeding.restore(torch.load(tmp_path / "state", weights_only=True))
    assert [draw() for _ in range(700)] == expected


@pytest.mark.parametrize("scope", [seeding.kept, seeding.forked, lambda: seeding.forked(3)])
def test_what_happens_inside_leaves_no_trace(scope: Any) -> None:
    random.gauss(0, 1)
    np.random.randn()
    state = seeding.capture()
    expected = draw()
    seeding.restore(state)
    with pytest.raises(ZeroDivisionError), scope():
        seed_sample(99)
        draw()
        raise ZeroDivisionError
    assert draw() == expected


def test_a_fork_with_a_seed_starts_from_it() -> None:
    drawn = []
    for _ in range(2):
        with seeding.forked(5):
            drawn.append(draw())
        draw()
    assert drawn[0] == drawn[1]


def test_derived_seeds_differ_by_purpose_and_are_frozen() -> None:
    assert seeding.derive(1, "eval", 3) == seeding.derive(1, "eval", 3)
    derived = {seeding.derive(seed, *labels) for seed in (1, 2) for labels in [("a",), ("a", 1), ("b", 1), ("b", "1")]}
    assert len(derived) == 8
    assert all(0 <= each < 2**63 for each in derived)
