"""Samples that cannot be loaded: `on_error`, the size of the batches, the names in the log, and the receipts."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from augmented_sets import Augmented
from data_sets import Numbers, as_list
from test_data_loader import fingerprints
from torch.utils.data import Dataset

from framework.data import DataLoader, EvalLoader
from framework.errors import ConfigError, DataError

DAMAGED = (3, 4, 11, 20)


class Damaged(Augmented):
    """Some samples raise; which is in their name."""

    def __init__(self, samples: int, damaged: Sequence[int] = DAMAGED, error: type[BaseException] = OSError) -> None:
        super().__init__(samples)
        self.damaged = damaged
        self.error = error

    def sample_key(self, index: int) -> str:
        return f"{index}.jpg"

    def __getitem__(self, index: int) -> Any:
        if index in self.damaged:
            raise self.error("truncated.")
        return super().__getitem__(index)


class Many(Dataset[Any]):
    """The same samples, one after another, from a generator that is over once it raised."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def sample_key(self, index: int) -> str:
        return f"{index}.jpg"

    def fetch_many(self, epoch: int, ids: Sequence[int]) -> Iterator[Any]:
        for index in ids:
            yield self.inner[index]


def steps(loader: DataLoader, count: int) -> list[list[tuple[int, str]]]:
    batches = iter(loader)
    taken = [fingerprints(batch) for batch in itertools.islice(batches, count)]
    loader.close()
    return taken


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
@pytest.mark.parametrize("how", ["one", "many"])
def test_the_other_samples_and_the_sizes_of_batches_stay_as_they_are(on_error: str, how: str) -> None:
    def load(workers: int, on_error: str, damaged: Sequence[int]) -> list[list[tuple[int, str]]]:
        dataset = Damaged(24, damaged) if how == "one" else Many(Damaged(24, damaged))
        return steps(DataLoader(dataset, 6, endless=True, num_workers=workers, on_error=on_error), 12)

    whole, found = load(0, "raise", ()), load(0, on_error, DAMAGED)
    assert found == load(2, on_error, DAMAGED)
    replaced = 0
    for good, batch in zip(whole, found, strict=True):
        assert len(batch) == len(good) == 6
        for place, (expected, got) in enumerate(zip(good, batch, strict=True)):
            if expected[0] not in DAMAGED:
                assert got == expected  # bit for bit
                continue
            replaced += 1
            if on_error == "skip":  # the next good one of its batch
                after = [each for each in [*good[place:], *good[:place]] if each[0] not in DAMAGED]
                assert got == after[0]
            else:
                assert got[0] not in DAMAGED
    assert replaced == 3 * len(DAMAGED)  # epochs
    if on_error == "substitute":  # other ones each time, spread over the dataset
        taken = [got[0] for good, batch in zip(whole, found, strict=True) for expected, got in zip(good, batch, strict=True)
                 if expected[0] in DAMAGED]  # fmt: skip
        assert len(set(taken)) > 4


@pytest.mark.parametrize("workers", [0, 2])
def test_each_damaged_sample_is_named_once_and_counted_each_time(
    workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = DataLoader(Damaged(24), 6, endless=True, num_workers=workers, on_error="skip")
    with caplog.at_level(logging.WARNING):
        steps(loader, 8)
    assert loader.take_stats().skipped == 2 * len(DAMAGED)
    assert loader.take_stats().skipped == 0
    assert sorted(caplog.messages) == sorted(
        f"Damaged: Damaged could not give sample {index} ({index}.jpg) of epoch 0: OSError: truncated: "
        "another sample takes its place (loader.on_error)"
        for index in DAMAGED
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_receipts_say_what_was_loaded_and_in_whose_place(workers: int) -> None:
    loader = DataLoader(Damaged(24), 6, endless=True, num_workers=workers, on_error="skip", collate_fn=as_list)
    loader.wants_receipts = True
    batches = [[each["index"] for each in batch] for batch in itertools.islice(iter(loader), 8)]
    receipts = loader.commit(5) + loader.commit(3)
    assert [receipt.ids.tolist() for receipt in receipts] == batches
    assert [set(receipt.epochs.tolist()) for receipt in receipts] == [{0}] * 4 + [{1}] * 4
    asked = [loader.ids(position).tolist() for position in range(0, 48, 6)]
    for ids, receipt in zip(asked, receipts, strict=True):
        damaged = {place: index for place, index in enumerate(ids) if index in DAMAGED}
        assert {place: index for place, (index, _) in receipt.replaced.items()} == damaged
        assert all("OSError: truncated" in what for _, what in receipt.replaced.values())
        assert (receipt.stats.samples, receipt.stats.skipped) == (6, len(damaged))
    loader.close()


def test_without_anybody_who_wants_them_there_are_no_receipts() -> None:
    loader = DataLoader(Damaged(24), 6, endless=True, num_workers=0, on_error="skip", collate_fn=as_list)
    list(itertools.islice(iter(loader), 4))
    assert loader.commit(4) == []
    with pytest.raises(ValueError, match="1 batches cannot be committed: 0 were handed out"):
        loader.commit(1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_evaluation_leaves_damaged_samples_out(workers: int, on_error: str, caplog: pytest.LogCaptureFixture) -> None:
    loader = EvalLoader(Damaged(24), 4, num_workers=workers, on_error=on_error)
    with caplog.at_level(logging.WARNING):
        taken = [batch["index"].tolist() for batch in loader]
    assert [len(batch) for batch in taken] == [3, 3, 3, 4, 4, 3]
    assert list(itertools.chain(*taken)) == [index for index in range(24) if index not in DAMAGED]
    assert len(caplog.messages) == 4 and all(each.endswith("left out (loader.on_error)") for each in caplog.messages)
    stats = loader.take_stats()
    assert (stats.samples, stats.skipped) == (20, 4)
    loader.close()
    with pytest.raises(
        DataError, match=r"None of the 4 samples.*on_error=.*The first: .*sample 4 \(4.jpg\).*truncated"
    ):
        list(EvalLoader(Damaged(8, range(4, 8)), 4, num_workers=workers, on_error=on_error))


def test_where_nothing_can_take_a_place_that_is_an_error() -> None:
    with pytest.raises(DataError, match=r"None of the 4 samples.*loader.on_error=skip has nothing"):
        steps(DataLoader(Damaged(8, range(8)), 4, num_workers=0, on_error="skip"), 1)
    with pytest.raises(DataError, match=r"sample \d \(\d.jpg\).*None of 8 other samples.*substitute") as info:
        steps(DataLoader(Damaged(8, range(8)), 4, num_workers=0, on_error="substitute"), 1)
    assert isinstance(info.value.__cause__, OSError)


class Defect(ConfigError):
    """Says that the code is wrong, not the sample."""


@pytest.mark.parametrize("on_error", ["raise", "skip", "substitute"])
@pytest.mark.parametrize("error", [MemoryError, NameError, ImportError, Defect, KeyboardInterrupt])
def test_what_is_no_fault_of_the_sample_is_never_passed_over(on_error: str, error: type[BaseException]) -> None:
    raised = KeyboardInterrupt if error is KeyboardInterrupt else DataError
    with pytest.raises(raised) as info:
        steps(DataLoader(Damaged(24, (3,), error), 6, num_workers=0, on_error=on_error), 4)
    if raised is DataError:
        assert isinstance(info.value.__cause__, error)


def test_a_worker_that_is_interrupted_says_so() -> None:
    with pytest.raises(DataError, match=r"broken off by KeyboardInterrupt\('truncated.'\)"):
        steps(DataLoader(Damaged(24, (3,), KeyboardInterrupt), 6, num_workers=1, on_error="skip"), 4)


@pytest.mark.parametrize(
    ("given", "message"), [(-1, "ended before it gave sample"), (1, "gave more samples than the 4")]
)
def test_a_stream_of_samples_that_is_not_one_to_one_is_refused(given: int, message: str) -> None:
    class Uneven(Many):
        def fetch_many(self, epoch: int, ids: Sequence[int]) -> Iterator[Any]:
            yield from ([torch.tensor(index) for index in ids] + [torch.tensor(0)])[: len(ids) + given]

    for on_error in ("raise", "skip"):
        with pytest.raises(DataError, match=message):
            list(DataLoader(Uneven(Numbers(8)), 4, num_workers=0, on_error=on_error))


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"on_error='skipp' is none of raise, skip, substitute. Did you mean 'skip'"):
        DataLoader(Numbers(8), 4, on_error="skipp")
