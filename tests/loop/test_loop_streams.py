"""Runs over streams: which strategy is chosen, what is refused and why, and what survives a rollback or a crash."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler

from framework.callback import Callback
from framework.callbacks import AsyncCheckpointCallback
from framework.data.receipt import Receipt
from framework.errors import ConfigError, DataError, StateMismatchError
from framework.schedules import cosine
from framework.trainer import Trainer
from tests.loop.runs import (
    Ask,
    Crash,
    Fit,
    Points,
    assert_same,
    by_step,
    core,
    crash_then_resume,
    events,
    fit,
    flat,
    make,
    saved_steps,
)


class Stream(IterableDataset[dict[str, Any]]):
    """The points in order, without a state."""

    def __init__(self, samples: int = 64, length: int | None = 64) -> None:
        self.samples, self.length = samples, length

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError("no length")
        return self.length

    def __iter__(self) -> Iterator[dict[str, Any]]:
        points = Points(self.samples)
        for index in range(self.samples):
            yield {**points[index], "x": points[index]["x"] + 0.1 * torch.randn(4)}


class Stateful(Stream):
    """Counts what it gave."""

    def __init__(self, samples: int = 64) -> None:
        super().__init__(samples, samples)
        self.given = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for sample in list(super().__iter__())[self.given :]:
            self.given += 1
            yield sample

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class Slow(Stateful):
    """Made anew for each sample, so that its noise is that of the sample."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        points = Points(self.samples)
        while self.given < self.samples:
            self.given += 1
            point = points[self.given - 1]
            yield {**point, "x": point["x"] + 0.1 * torch.randn(4)}


def over(data: Any, **factories: Any) -> Fit:
    return Fit(train_data=data, **factories)


def seen_of(trainer: Trainer) -> list[int]:
    return [number for batch in trainer.recipe.seen for number in batch]  # type: ignore[attr-defined]


@pytest.mark.parametrize("data", [Stream, Slow])
def test_a_crash_changes_no_bit(tmp_path: Path, data: Any) -> None:
    unbroken = fit(tmp_path / "u", over(data), max_steps=20)
    resumed = crash_then_resume(tmp_path / "r", 14, lambda: over(data), max_steps=20)
    assert_same(flat(unbroken), flat(resumed))
    assert by_step(tmp_path / "u") == by_step(tmp_path / "r")
    assert seen_of(resumed)[0] == 12 * 8 % 64


@pytest.mark.parametrize("data", [Stream, Slow])
def test_a_rollback_goes_back_in_the_stream(tmp_path: Path, data: Any) -> None:
    once: list[int] = []

    class BackOnce(Callback):
        def step_end(self, trainer: Trainer, output: object) -> None:
            if trainer.progress.step == 10 and not once:
                once.append(10)
                trainer.request_rollback("to see it")

    unbroken = fit(tmp_path / "u", over(data), max_steps=20)
    rolled = fit(tmp_path / "r", over(data), core(back=BackOnce()), max_steps=20)
    assert events(tmp_path / "r", "rollback")[0]["to"] == 8
    assert_same(flat(unbroken), flat(rolled))
    assert seen_of(rolled) == seen_of(unbroken)[:80] + seen_of(unbroken)[64:]


def test_without_the_callback_of_the_position_the_epoch_starts_over(tmp_path: Path) -> None:
    def callbacks(**more: Callback) -> dict[str, Callback]:
        every = core(**more)
        del every["data_position"]
        return every

    again = crash_then_resume(tmp_path, 10, lambda: over(Slow), callbacks, max_steps=20)
    assert seen_of(again)[:8] == list(range(8))


@pytest.mark.parametrize(
    ("data", "strategy", "words"),
    [
        (Points, "offset", "64 samples, position by 'offset': one integer"),
        (Stateful, "stateful", "64 samples, position by 'stateful': the dataset's own state"),
        (Stream, "fast-forward", "64 samples, position by 'fast-forward': a resume reads the epoch again"),
        (lambda: Stream(length=None), "fast-forward", "samples without a known number, position by 'fast-forward'"),
    ],
)
def test_the_strategy_is_told(tmp_path: Path, data: Any, strategy: str, words: str) -> None:
    trainer = make(tmp_path / "run", over(data))
    assert words in trainer.explain()
    assert trainer.built.strategy == trainer.built.loader.strategy == strategy
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("data", "loader", "text"),
    [
        (Points, {"position": "stateful"}, "loader.position=stateful: Points gives samples by their index"),
        (Points, {"split": "samples"}, "loader.split=samples is for iterable datasets"),
        (Points, {"samples_per_epoch": 9}, "loader.samples_per_epoch=9 is for iterable datasets"),
        (Stream, {"position": "offset"}, "loader.position=offset: the samples of Stream have no index"),
        (Stream, {"position": "shards"}, "loader.position=shards: Stream is no stream of shards"),
        (Stream, {"position": "stateful"}, "loader.position=stateful: Stream has no state_dict and load_state_dict"),
        (Stream, {"split": "sample"}, "loader.split='sample' is unknown.*Did you mean 'samples'"),
        (Stream, {"split": "samples", "position": "stateful"}, "does not go with loader.split=samples"),
        (lambda: Stream(length=None), {"split": "samples"}, "loader.split=samples: Stream has no __len__"),
        (Stream, {"on_error": "skip"}, "loader.on_error=skip: Stream is iterated over"),
    ],
)
def test_what_a_dataset_cannot_do_is_refused_with_the_reason(
    tmp_path: Path, data: Any, loader: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        make(tmp_path / "run", over(data), loader=loader).fit()
    assert list(tmp_path.iterdir()) == []


def test_a_sampler_orders_what_has_an_index_and_nothing_else(tmp_path: Path) -> None:
    factories = {"sampler": lambda data: RandomSampler(data, num_samples=24, replacement=True)}
    trainer = fit(tmp_path / "a", over(Points, **factories), max_steps=None, max_epochs=2)
    assert trainer.progress.step == 6 and trainer.built.num_samples == 24
    with pytest.raises(ConfigError, match=r"RandomSampler: a sampler gives the order of samples that have an index"):
        make(tmp_path / "b", over(Stream, **factories)).fit()
    with pytest.raises(StateMismatchError, match="order is now 'feistel8/1', was 'sampler RandomSampler'"):
        make(tmp_path / "a", over(lambda: Points(24)), max_steps=9).fit()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_epochs": 2}, "trainer.max_epochs=2epochs is in epochs"),
        ({"eval_every": "1epochs", "eval_data": Points}, "trainer.eval_every=1epochs is in epochs"),
        ({"every": "2epochs"}, "callbacks.async_checkpoint.every=2epochs is in epochs"),
        ({"schedule": lambda horizon: cosine(horizon, warmup="1epochs")}, "schedule.warmup=1epochs is in epochs"),
    ],
)
def test_lengths_in_epochs_need_the_length_of_an_epoch(tmp_path: Path, settings: dict[str, Any], text: str) -> None:
    factories = {key: settings.pop(key) for key in ("eval_data", "schedule") if key in settings}
    callbacks = core(settings.pop("every", 4))
    with pytest.raises(ConfigError, match=text):
        make(tmp_path / "run", over(lambda: Stream(length=None), **factories), callbacks, **settings).fit()
    assert list(tmp_path.iterdir()) == []


def test_other_data_are_refused_and_may_be_permitted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError, match="crashed"):
        make(tmp_path, over(Points), core(crash=Crash(6))).fit()
    with pytest.raises(StateMismatchError, match=r"strategy is now 'stateful', was 'offset'"):
        make(tmp_path, over(Slow)).fit()
    with caplog.at_level(logging.WARNING):
        trainer = fit(tmp_path, over(Slow), run={"allow": ["data"]})
    assert "the checkpoint knows no readers: epoch 0 of Slow starts over" in caplog.text
    assert seen_of(trainer)[:8] == list(range(8))


def test_who_listens_hears_of_each_step_what_it_was_made_of(tmp_path: Path) -> None:
    heard: dict[int, list[Receipt]] = {}

    class Listen(Callback):
        def setup(self, trainer: Trainer) -> None:
            trainer.built.loader.wants_receipts = True
            trainer.batch_listeners.append(heard.__setitem__)

    trainer = fit(tmp_path, over(Slow), core(listen=Listen()), max_steps=5, micro_batch_size=4)
    assert [len(receipts) for receipts in heard.values()] == [2] * 5
    ids = [number for receipts in heard.values() for receipt in receipts for number in receipt.ids.tolist()]
    assert ids == seen_of(trainer)


def test_with_position_by_epoch_a_save_waits_for_the_end_of_the_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = core("1epochs", ask=Ask(3, "save", "somebody wants it"), stop=Ask(19, "stop", "enough"))
    with caplog.at_level(logging.WARNING):
        make(tmp_path, over(Slow), callbacks, loader={"position": "epoch"}, max_steps=24).fit()
    assert saved_steps(tmp_path) == [8, 16]
    assert "step 3: nothing is saved in the middle of epoch 0" in caplog.text
    assert "step 19: nothing is saved in the middle of epoch 2" in caplog.text
    again = fit(tmp_path, over(Slow), core("1epochs"), loader={"position": "epoch"}, max_steps=24)
    assert seen_of(again) == list(range(64))
    with pytest.raises(ConfigError, match=r"callbacks\.async_checkpoint\.every=4steps asks for checkpoints within"):
        make(tmp_path / "b", over(Slow), core(4), loader={"position": "epoch"}).fit()
    assert AsyncCheckpointCallback(every="90s").interval is not None


def test_an_epoch_that_ends_within_a_step_is_gone_on_with_at_the_sample(tmp_path: Path) -> None:
    """60 samples, steps of 8: with `position=epoch` the checkpoint lies four samples into the next epoch."""
    unbroken = fit(tmp_path / "u", over(lambda: Slow(60)), core("1epochs"), loader={"position": "epoch"}, max_steps=20)
    every = lambda **more: core("1epochs", **more)  # noqa: E731
    options: dict[str, Any] = {"loader": {"position": "epoch"}, "max_steps": 20}
    resumed = crash_then_resume(tmp_path / "r", 12, lambda: over(lambda: Slow(60)), every, **options)
    assert_same(flat(unbroken), flat(resumed))
    assert seen_of(resumed)[0] == 4


def test_a_stream_that_fails_is_named_with_its_sample(tmp_path: Path) -> None:
    class Broken(Stream):
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for number, sample in enumerate(super().__iter__()):
                if number == 20:
                    raise KeyError("label")
                yield sample

    with pytest.raises(
        DataError, match=r"Broken could not give sample 20 of epoch 0 \(reader 0 of 1\): KeyError: 'label'"
    ):
        make(tmp_path, over(Broken)).fit()
