"""Streams over ranks, kills of workers and changes of shape; what is refused; what a place is made of."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import random
import signal
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stream_sets as sets
import torch

from framework.data.loader import DataLoader
from framework.data.streams.answering import Task
from framework.data.streams.loader import StreamLoader
from framework.data.streams.plain import decoded, encoded
from framework.data.streams.reader import Place
from framework.data.streams.sequential import SequentialSource
from framework.duration import ENDLESS
from framework.errors import ConfigError, DataError, StateMismatchError


class Ranks:
    """Values of all ranks, which are threads here."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._values: list[Any] = [None] * ranks

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def gathered(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
            return found

        return gathered


def on_ranks(ranks: int, work: Callable[[int, Callable[[Any], list[Any]]], Any]) -> list[Any]:
    """What `work(rank, gather)` gives on each rank."""
    together = Ranks(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: work(rank, together.gather(rank)), range(ranks)))


def loader(dataset: Any, batch: int = 4, workers: int = 0, **options: Any) -> StreamLoader:
    options.setdefault("strategy", "shards" if isinstance(dataset, sets.Cut) else "fast-forward")
    options.setdefault("samples", len(dataset) if hasattr(dataset, "__len__") else ENDLESS)
    return StreamLoader(dataset, batch, num_workers=workers, prefetch_factor=2, timeout=60, **options)


def ids(one: StreamLoader, batches: int) -> list[int]:
    """Ids of so many batches, each committed."""
    found = []
    for batch in itertools.islice(one, batches):
        one.commit(1)
        found += batch[0].tolist()
    return found


def test_a_stream_of_shards_goes_on_with_any_ranks_and_workers_and_batches() -> None:
    """A chain of runs of random shape: at each position a sample of its epoch, each sample once in each."""
    for seed in range(10):
        chance = random.Random(seed)
        samples = chance.choice([5, 23, 40, 61])
        states: list[dict[str, Any]] = []
        position, placed = 0, dict[int, int]()
        while position < 3 * samples:
            ranks, steps, batch = chance.choice([1, 2, 3, 4]), chance.randint(1, 4), chance.choice([12, 24])
            workers = 2 if ranks == 2 and seed % 3 == 0 else 0
            run = Leg(samples, batch // ranks, workers, ranks, steps, states, position)
            made = on_ranks(ranks, run)
            states = [state for _, state in made]
            for rank, (given, _) in enumerate(made):
                placed |= {position + rank + k * ranks: number for k, number in enumerate(given)}
            position += steps * batch
        for epoch in range(3):
            assert sorted(placed[epoch * samples + k] for k in range(samples)) == list(range(samples)), (seed, epoch)


class Leg:
    """One run in a chain of runs over a stream of shards."""

    def __init__(
        self, samples: int, batch: int, workers: int, ranks: int, steps: int, states: list[Any], position: int
    ) -> None:
        self.samples, self.batch, self.workers, self.ranks = samples, batch, workers, ranks
        self.steps, self.states, self.position = steps, states, position

    def __call__(self, rank: int, gather: Any) -> Any:
        shape = {"rank": rank, "world_size": self.ranks, "gather": gather}
        one = loader(sets.Cut(self.samples), self.batch, self.workers, **shape)
        try:
            if self.states:
                one.load_state(self.states, self.position)
                one.seek(self.position)
            return ids(one, self.steps), one.state()
        finally:
            one.close()


def test_other_readers_are_refused_with_both_numbers_except_at_the_beginning_of_an_epoch() -> None:
    made = loader(sets.Shards(), 4, strategy="stateful")
    ids(made, 5)
    middle = made.state()
    ids(made, 1)
    end = made.state()
    more = loader(sets.Shards(), 4, 2, strategy="stateful")
    try:
        with pytest.raises(StateMismatchError, match="made by 1 rank x 1 reader, this run has 1 rank x 2 readers"):
            more.load_state([middle], 20)
        more.load_state([end], 24)
        more.seek(24)
        assert sorted(ids(more, 6)) == list(range(24))
    finally:
        more.close()


def test_streams_that_split_themselves_over_ranks_are_read_once() -> None:
    def run(rank: int, gather: Any) -> list[int]:
        dataset = sets.Numbers(24, rank=rank, ranks=2)
        return ids(loader(dataset, 4, rank=rank, world_size=2, gather=gather), 6)

    given = on_ranks(2, run)
    for epoch in range(2):
        assert sorted(one for each in given for one in each[12 * epoch : 12 * epoch + 12]) == list(range(24))


def test_streams_that_do_not_split_themselves_are_refused_on_all_ranks() -> None:
    def run(rank: int, gather: Any) -> str:
        with pytest.raises(DataError) as caught:
            next(iter(loader(sets.Whole(24), rank=rank, world_size=2, gather=gather)))
        return str(caught.value)

    for text in on_ranks(2, run):
        assert text.startswith("Whole gives the same samples to rank 0 worker 0 and rank 1 worker 0")
        assert "trained 2 times per epoch" in text


def test_noise_without_end_is_refused_until_it_is_said_to_be_meant() -> None:
    class Pairs(sets.Noise):
        def __iter__(self) -> Any:
            return ((number, noise) for number, noise in enumerate(super().__iter__()))

    def run(rank: int, gather: Any) -> list[float]:
        shape = {"rank": rank, "world_size": 2, "gather": gather}
        with pytest.raises(DataError, match=r"loader\.split=own"):
            next(iter(loader(Pairs(), **shape)))
        made = iter(loader(Pairs(), is_checked=False, **shape))
        return next(made)[1].flatten().tolist()  # type: ignore[no-any-return]

    first, second = on_ranks(2, run)
    assert not set(first) & set(second)


@pytest.mark.parametrize("at", [0, 10, 23])
def test_a_worker_that_dies_is_replaced_at_the_exact_sample(at: int, tmp_path: Path, caplog: Any) -> None:
    trap = tmp_path / "trap"
    whole = loader(sets.Numbers(24), 4, 2)
    trap.touch()
    with caplog.at_level(logging.WARNING):
        deadly = loader(sets.Deadly(24, at, trap), 4, 2, is_checked=False)
        try:
            expected = [[each.tolist() for each in batch] for batch in itertools.islice(whole, 12)]
            given = [[each.tolist() for each in batch] for batch in itertools.islice(deadly, 12)]
            stats = deadly.take_stats()
        finally:
            whole.close()
            deadly.close()
    assert given == expected and not trap.exists() and stats.worker_restarts == 1
    assert f"loader worker {at % 2} of 2" in caplog.text and "SIGKILL" in caplog.text


def test_a_worker_that_always_dies_is_an_error(tmp_path: Path) -> None:
    class Always(sets.Numbers):
        def __iter__(self) -> Any:
            yield from itertools.islice(super().__iter__(), 5)
            os.kill(os.getpid(), signal.SIGKILL)

    one = loader(Always(24), 4, 1, strategy="fast-forward", is_checked=False)
    with pytest.raises(DataError, match=r"It is worker 3 in a row to die over them"):
        ids(one, 3)


def test_what_is_not_committed_is_in_no_place() -> None:
    one = loader(sets.Shards(), 4, strategy="stateful")
    iterator = iter(one)
    start = one.state()
    next(iterator), next(iterator)
    assert one.state() == start and start["taken"] == [0]
    one.commit(1)
    assert one.state()["taken"] == [4]
    with pytest.raises(ValueError, match="2 batches cannot be committed"):
        one.commit(2)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_place_goes_on_after_what_was_committed_not_after_what_was_handed_out(workers: int) -> None:
    one = loader(sets.Shards(), 4, workers, strategy="stateful")
    again = loader(sets.Shards(), 4, workers, strategy="stateful")
    try:
        iterator = iter(one)
        given = [next(iterator)[0].tolist() for _ in range(5)]
        one.commit(2)
        again.load_state([one.state()], 8)
        assert [next(again)[0].tolist() for _ in range(3)] == given[2:]
    finally:
        one.close()
        again.close()


def test_the_first_batch_leaves_no_trace() -> None:
    one = loader(sets.Shards(), 4, strategy="stateful")
    assert one.first_batch()[0].tolist() == [0, 1, 2, 3]
    assert one.state()["taken"] == [0]
    assert sorted(ids(one, 6)) == list(range(24))


def test_receipts_say_what_was_loaded() -> None:
    one = loader(sets.Cut(10), 4)
    one.wants_receipts = True
    iterator = iter(one)
    given = [next(iterator)[0].tolist() for _ in range(5)]
    receipts = one.commit(5)
    assert [receipt.ids.tolist() for receipt in receipts] == given
    assert [receipt.epochs.tolist() for receipt in receipts][2] == [0, 0, 1, 1]
    assert one.take_stats().samples == 20


class Damaged(sets.Cut):
    """Two of its samples cannot be made."""

    def begin(self, epoch: int, **options: Any) -> Any:
        for number, sample in super().begin(epoch, **options):
            yield number, (OSError("gone") if number in (2, 7) else sample)


def test_a_sample_that_cannot_be_made_is_an_error_or_passed_over_by_name(caplog: Any) -> None:
    with pytest.raises(DataError, match=r"Damaged could not give sample 2 of epoch 0: OSError: gone"):
        ids(loader(Damaged(12), strategy="shards"), 3)
    one = loader(Damaged(12), strategy="shards", on_error="skip")
    with caplog.at_level(logging.WARNING):
        assert ids(one, 3) == [0, 1, 3, 3, 4, 5, 6, 4, 8, 9, 10, 11]
    assert "Damaged could not give sample 7 of epoch 0: OSError: gone" in caplog.text
    assert one.take_stats().skipped == 2


def test_the_rest_of_an_epoch_can_be_left_out() -> None:
    for workers in (0, 2):
        one = loader(sets.Numbers(23), 4, workers, epoch_end="drop")
        try:
            given = ids(one, 15)
        finally:
            one.close()
        for epoch in range(3):
            assert len(set(given[20 * epoch : 20 * epoch + 20])) == 20


def test_a_length_that_is_not_true_is_told_once(caplog: Any) -> None:
    one = loader(sets.Numbers(20), 4, samples=24)
    with caplog.at_level(logging.WARNING):
        assert Counter(ids(one, 15)) == dict.fromkeys(range(20), 3)
    assert caplog.text.count("Numbers gave 20 samples of epoch 0 to rank 0; its length says 24.") == 1


def test_states_that_lead_nowhere_are_told_and_not_used(caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        one = loader(sets.Coarse(), 4, strategy="stateful")
        ids(one, 2)
    assert "Coarse.state_dict() does not lead back to the next sample" in caplog.text
    assert one.state()["states"] == [None]


class Odd(sets.Shards):
    """A state of things that no checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        return {"where": [1, object()]}


def test_states_of_things_that_no_checkpoint_holds_are_refused_by_path() -> None:
    with pytest.raises(DataError, match=r"Odd\.state_dict\(\)\['where'\]\[1\] is of type builtins\.object"):
        ids(loader(Odd(), strategy="stateful"), 1)


class Own(sets.Shards):
    """Draws from generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.array, self.list, self.tensor = np.random.default_rng(3), random.Random(3), torch.Generator()

    def __iter__(self) -> Any:
        for number, _ in super().__iter__():
            yield number, self.array.random() + self.list.random() + torch.rand(2, generator=self.tensor)


@pytest.mark.parametrize("strategy", ["stateful", "fast-forward"])
def test_generators_of_its_own_go_on_where_they_were_and_differ_from_epoch_to_epoch(strategy: str) -> None:
    one = loader(Own(), 4, strategy=strategy)
    whole, states = [], []
    for batch in itertools.islice(one, 12):
        one.commit(1)
        whole.append(batch[1].tolist())
        states.append(one.state())
    assert whole[:6] != whole[6:]
    assert (states[1]["states"] != [None]) is (strategy == "stateful")
    for at in (1, 7):
        again = loader(Own(), 4, strategy=strategy)
        again.load_state([states[at]], 4 * at + 4)
        assert [batch[1].tolist() for batch in itertools.islice(again, 11 - at)] == whole[at + 1 :]


STATE = {
    "n": 3, "f": 0.5, "none": None, "text": "ä", "bytes": b"x", "list": [1, [2]], "tuple": (1, (2,)), "set": {1, 2},
    "deque": deque([1, 2], maxlen=3), "ordered": OrderedDict(a=1), 7: "key", ("a", 1): "pair",
    "random": random.Random(1).getstate(),
}  # fmt: skip


def test_states_come_back_as_they_were() -> None:
    back = decoded(encoded(STATE, "state"))
    assert back == STATE
    assert [type(back[key]) for key in STATE] == [type(STATE[key]) for key in STATE]
    array = np.arange(6, dtype=np.uint32).reshape(2, 3)
    back = decoded(
        encoded({"array": array, "number": np.float32(2), "tensor": torch.ones(2), "empty": np.empty(0)}, "")
    )
    assert np.array_equal(back["array"], array) and back["array"].dtype == array.dtype
    assert type(back["number"]) is float and torch.equal(back["tensor"], torch.ones(2)) and back["empty"].size == 0
    bits = np.random.Generator(np.random.MT19937(2))
    other = np.random.Generator(np.random.MT19937(3))
    other.bit_generator.state = decoded(encoded(bits.bit_generator.state, ""))
    assert other.random() == bits.random()


def split_by_samples(ranks: int, workers: int, batch: int, position: int = 0, steps: int = 12) -> dict[int, Any]:
    """Samples by position, of a stream that does not split itself."""
    placed = {}
    for rank in range(ranks):
        one = DataLoader(
            SequentialSource(sets.Whole(22), 22, 5), batch // ranks, False, seed=5, global_batch_size=batch, rank=rank,
            world_size=ranks, endless=True, position=position, num_workers=workers,
        )  # fmt: skip
        try:
            given = [
                row
                for batch in itertools.islice(one, steps)
                for row in zip(*map(torch.Tensor.tolist, batch), strict=True)
            ]
        finally:
            one.close()
        placed |= {position + rank + k * ranks: row for k, row in enumerate(given)}
    return placed


def test_split_by_samples_the_place_is_one_integer_whatever_the_shape() -> None:
    expected = split_by_samples(1, 0, 4)
    assert [number for _, (number, _) in sorted(expected.items())][:44] == [*range(22), *range(22)]
    assert expected[0][1] != expected[22][1]  # another epoch has other noise
    for ranks, workers, batch, position in ((1, 2, 4, 0), (2, 0, 4, 0), (2, 2, 4, 12), (1, 0, 6, 18)):
        other = split_by_samples(ranks, workers, batch, position, 4)
        assert other and all(expected[place] == row for place, row in other.items() if place in expected)


def test_split_by_samples_goes_back_as_well() -> None:
    one = DataLoader(SequentialSource(sets.Whole(22), 22, 0), 4, False, endless=True, num_workers=0)
    iterator = iter(one)
    given = [next(iterator)[0].tolist() for _ in range(4)]
    one.seek(4)
    assert next(iterator)[0].tolist() == given[1]


def test_a_stream_that_ends_before_it_should_is_named() -> None:
    one = DataLoader(SequentialSource(sets.Whole(10), 12, 0), 4, False, endless=True, num_workers=0)
    with pytest.raises(DataError, match=r"Whole ended after 10 samples of epoch 0, and should have 12"):
        list(itertools.islice(one, 3))


def test_numbers_that_make_no_sense_are_refused() -> None:
    for options, text in (
        ({"workers": -1}, "num_workers=-1"),
        ({"worker_restarts": -1}, "worker_restarts=-1"),
    ):
        with pytest.raises(ConfigError, match=text):
            loader(sets.Numbers(), **options)  # type: ignore[arg-type]


def test_a_worker_that_hangs_is_an_error_that_names_it() -> None:
    class Hanging(sets.Numbers):
        def __iter__(self) -> Any:
            yield from itertools.islice(super().__iter__(), 6)
            time.sleep(600)

    one = StreamLoader(Hanging(), 4, strategy="fast-forward", samples=24, num_workers=1, timeout=1, is_checked=False)
    with pytest.raises(
        DataError, match=r"no batch for 1 s \(loader\.timeout=1s\)\. loader worker 0 of 1, pid \d+ has not"
    ):
        ids(one, 3)


def test_a_loader_that_was_closed_goes_on_where_training_was() -> None:
    one = loader(sets.Shards(), 4, 2, strategy="stateful")
    try:
        first = ids(one, 3)
        one.close()
        assert sorted([*first, *ids(one, 3)]) == list(range(24))
    finally:
        one.close()


def test_what_a_reader_is_can_be_sent_to_a_fresh_process() -> None:
    """With CUDA in use workers are not forked."""
    fetch = pickle.loads(pickle.dumps(loader(sets.Shards(), strategy="stateful")._fetch))
    given, answer = fetch.serve(1, Task(0, 4, Place(0)), (), 0)
    assert given[0].tolist() == [0, 1, 2, 3] and answer.is_whole and not answer.has_ended
