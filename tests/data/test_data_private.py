"""Random generators that a dataset keeps for itself belong to the sample, or are named."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import Numbers, as_list
from private_sets import PLACES, Late, Noise, Private, shared

from framework.data import DataLoader, private
from framework.data.private import Generators


def drawn(place: str, workers: int, position: int, steps: int) -> dict[int, float]:
    """What was drawn for each sample; the positions are within one epoch of 24 samples."""
    loader = DataLoader(
        Private(24, place), 4, seed=3, endless=True, position=position, num_workers=workers, collate_fn=as_list
    )
    taken = dict(itertools.chain.from_iterable(itertools.islice(loader, steps)))
    loader.close()
    return taken


@pytest.mark.parametrize("place", PLACES)
def test_what_a_private_generator_gives_belongs_to_the_sample(place: str) -> None:
    whole = drawn(place, 0, 0, 6)
    assert len(whole) == len(set(whole.values())) == 24
    assert drawn(place, 0, 8, 4).items() <= whole.items()  # a resume
    assert set(whole.values()).isdisjoint(drawn(place, 0, 24, 6).values())  # the next epoch


@pytest.mark.parametrize("place", ["torch", "closure", "module", "late"])
def test_workers_draw_from_private_generators_as_one_process_does(place: str) -> None:
    assert drawn(place, 2, 0, 6) == drawn(place, 0, 0, 6)


def test_several_generators_of_a_kind_give_different_numbers() -> None:
    generators = [random.Random(0), random.Random(0), np.random.default_rng(0), np.random.default_rng(0)]
    for _ in range(2):
        Generators(dataset=generators).seed(7)
        first = [generator.random() for generator in generators]
        assert len(set(first)) == 4
        Generators(dataset=generators).seed(7)
        assert [generator.random() for generator in generators] == first


def test_seeding_forgets_what_a_generator_had_kept_for_the_next_draw() -> None:
    for generator in (np.random.RandomState(1), np.random.RandomState(np.random.PCG64(1))):
        found = Generators(dataset=generator)
        found.seed(5)
        first = generator.randn(3).tolist()
        generator.randn()
        found.seed(5)
        assert generator.randn(3).tolist() == first


def test_without_workers_private_generators_stay_where_they_were() -> None:
    """One of them may be used by the training loop as well."""
    generators: list[Any] = [
        random.Random(1), np.random.default_rng(2), np.random.RandomState(3), torch.Generator().manual_seed(4), shared,
    ]  # fmt: skip
    dataset = Private(24, "module")
    dataset.transforms["more"] = generators
    state = Generators(dataset=dataset).state()
    list(DataLoader(dataset, 4, num_workers=0))
    for before, after in zip(state, Generators(dataset=dataset).state(), strict=True):
        assert torch.equal(before, after) if isinstance(before, torch.Tensor) else repr(before) == repr(after)


class Foreign(np.random.bit_generator.BitGenerator):
    """One that numpy knows nothing of."""


def test_generators_that_cannot_be_seeded_are_named_with_their_place() -> None:
    dataset = Private(4, "numpy")
    assert private.unseeded(dataset) == []
    dataset.transforms["noise"] += [random.SystemRandom(), np.random.Generator(Foreign(1))]
    first, second = private.unseeded(dataset)
    assert first.startswith("dataset.transforms['noise'][1] (random.SystemRandom takes")
    assert second.startswith("dataset.transforms['noise'][2] (a numpy Generator over test_data_private.Foreign")


def test_a_generator_gives_the_same_wherever_and_in_whatever_order_others_were_found() -> None:
    """In one process one was made before the others were looked for, in another one after."""

    def drawn(is_late: bool) -> list[float]:
        first, second = Late(), Noise(np.random.default_rng())
        found = Generators(dataset=[first, second]) if is_late else None
        first()
        found = found or Generators(dataset=[first, second])
        found.look()
        found.seed(9)
        return [first(), second()]

    assert drawn(True) == drawn(False)


def test_generators_in_a_set_have_no_order_and_are_named() -> None:
    (told,) = private.unseeded([{random.Random(), 3}])
    assert told == "dataset[0]{…} (a set has another order in each process: keep it in a list)"


def test_the_default_generators_are_nobodys_own() -> None:
    dataset = Numbers(4)
    dataset.special = {0: random._inst, 1: np.random.mtrand._rand, 2: torch.default_generator}  # type: ignore[attr-defined, dict-item]
    assert not Generators(dataset=dataset)


def test_looking_for_generators_is_bounded_and_asks_no_property() -> None:
    class Chain:
        def __init__(self, behind: Any) -> None:
            self.behind = behind

        @property
        def costly(self) -> None:
            raise AssertionError("a property was asked")

    endless: Any = Chain(None)
    endless.behind = [endless, {"x": endless}, [(f"{number}.jpg", number) for number in range(300_000)]]
    deep: Any = random.Random()
    for _ in range(200):
        deep = Chain(deep)
    assert not Generators(dataset=[endless, deep])
    assert Generators(dataset=[endless, Chain(random.Random())])
