"""A loss that is not finite never goes into the weights, whatever the policy."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.storage import S3
from torch import nn

from framework.callback import Callback
from framework.callbacks import AsyncCheckpointCallback, NonFiniteCallback
from framework.data import order
from framework.distributed import World
from framework.errors import CheckpointError, ConfigError, NonFiniteError
from framework.trainer import Trainer
from tests.loop.ranks import in_ranks
from tests.loop.runs import (
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
    skipped,
)

SAMPLES = 4000  # one epoch is longer than any run here: a sample is seen once
IDS = order.Order(SAMPLES, 0, 0).ids(0, SAMPLES).tolist()  # what is seen with seed 0


def bad_at(*steps: int, times: int | None = None, **factories: Any) -> Fit:
    """A recipe whose loss is not a number in these steps."""
    ids = [IDS[8 * (step - 1) + 3] for step in steps]
    return Fit(bad_ids=ids, times=times, train_data=lambda: Points(SAMPLES), **factories)


class Watch(Callback):
    """Notes the weights after each step."""

    def __init__(self) -> None:
        self.after: dict[int, Any] = {}

    def train_start(self, trainer: Trainer, resumed: bool) -> None:
        self.after[trainer.progress.step] = flat(trainer)

    def step_end(self, trainer: Trainer, output: object) -> None:
        self.after[trainer.progress.step] = flat(trainer)


def test_stop_names_the_step_and_its_samples_and_leaves_the_weights(tmp_path: Path) -> None:
    watch = Watch()
    trainer = make(tmp_path, bad_at(6), core(watch=watch))
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit()
    text = str(caught.value)
    assert "step 6" in text and "The update was not made" in text and "callbacks.non_finite.policy" in text
    assert f"samples {', '.join(map(str, IDS[40:48]))}." in text
    now = flat(trainer)
    assert all((now[key] == value).all() for key, value in watch.after[5].items())
    (failure,) = events(tmp_path, "failure")
    assert failure["type"] == "NonFiniteError" and events(tmp_path, "end")[0]["exit_code"] == 1
    assert saved_steps(tmp_path) == [4]


def test_skip_goes_on_without_the_update_and_counts_the_step(tmp_path: Path) -> None:
    watch = Watch()
    trainer = fit(tmp_path, bad_at(6), core(policy="skip", watch=watch))
    assert_same(watch.after[5], watch.after[6])
    assert trainer.progress.step == 12 and trainer.progress.skipped == 1 and skipped(tmp_path) == {6}
    losses = by_step(tmp_path)
    assert math.isnan(losses.pop(6)) and all(math.isfinite(loss) for loss in losses.values())
    assert trainer.progress.position == 96


def test_skip_has_a_limit_over_the_whole_run(tmp_path: Path) -> None:
    fit(tmp_path / "enough", bad_at(2, 6), core(policy="skip", limit=2))
    with pytest.raises(NonFiniteError, match=r"step 6: .* This is number 2, callbacks\.non_finite\.limit=1"):
        make(tmp_path / "run", bad_at(2, 6), core(policy="skip", limit=1)).fit()
    cut = partial(core, policy="skip", limit=1)
    with pytest.raises(NonFiniteError, match=r"step 6: .* This is number 2"):
        crash_then_resume(tmp_path / "cut", 5, partial(bad_at, 2, 6), cut)


def test_skipped_steps_are_the_same_after_a_resume(tmp_path: Path) -> None:
    recipe, callbacks = partial(bad_at, 2, 7), partial(core, policy="skip")
    whole = fit(tmp_path / "whole", recipe(), callbacks())
    cut = crash_then_resume(tmp_path / "cut", 6, recipe, callbacks)
    assert_same(flat(whole), flat(cut))
    assert whole.progress == cut.progress and cut.progress.skipped == 2


@pytest.mark.parametrize("times", [1, None])
def test_a_rollback_ends_with_the_bits_of_the_run_that_skips_the_step(tmp_path: Path, times: int | None) -> None:
    """Also with random numbers in the model, and where the fault does not come back the second time."""
    skips = fit(tmp_path / "skip", bad_at(6, times=times), core(policy="skip"))
    rolls = fit(tmp_path / "roll", bad_at(6, times=times), core(policy="rollback"))
    assert_same(flat(skips), flat(rolls))
    (rollback,) = events(tmp_path / "roll", "rollback")
    assert (rollback["step"], rollback["to"]) == (6, 4)
    left, right = by_step(tmp_path / "skip"), by_step(tmp_path / "roll")
    assert math.isnan(left.pop(6)) and math.isnan(right.pop(6)) is (times is None)
    assert left == right
    assert rolls.progress == skips.progress and skipped(tmp_path / "roll") == {6}


def test_a_step_that_was_left_out_stays_out_after_a_resume(tmp_path: Path) -> None:
    recipe, callbacks = partial(bad_at, 6), partial(core, policy="rollback")
    whole = fit(tmp_path / "whole", recipe(), callbacks())
    cut = crash_then_resume(tmp_path / "cut", 10, recipe, callbacks)
    assert_same(flat(whole), flat(cut))


class SecondTime(Callback):
    """The second time: asks for a save of step 5, and fails after step 6."""

    def __init__(self) -> None:
        self._passes = 0

    def step_end(self, trainer: Trainer, output: object) -> None:
        self._passes += trainer.progress.step == 5
        if self._passes == 2 and trainer.progress.step == 5:
            trainer.request_save("the second time")
        if self._passes == 2 and trainer.progress.step == 6:
            raise RuntimeError("crashed")


def test_a_crash_between_a_rollback_and_the_step_that_is_left_out_does_not_bring_it_back(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", bad_at(6), core(policy="rollback"))
    with pytest.raises(RuntimeError, match="crashed"):
        make(tmp_path / "cut", bad_at(6), core(policy="rollback", second=SecondTime())).fit()
    cut = fit(tmp_path / "cut", bad_at(), core(policy="rollback"))  # the fault does not come back by itself
    assert events(tmp_path / "cut", "restored")[-1]["step"] == 5
    assert_same(flat(whole), flat(cut))
    assert cut.progress == whole.progress


def test_a_second_rollback_goes_back_too_and_there_is_a_limit(tmp_path: Path) -> None:
    skips = fit(tmp_path / "skip", bad_at(6, 7), core(policy="skip"))
    rolls = fit(tmp_path / "roll", bad_at(6, 7), core(policy="rollback"))
    assert_same(flat(skips), flat(rolls))
    assert [event["step"] for event in events(tmp_path / "roll", "rollback")] == [6, 7]
    with pytest.raises(NonFiniteError, match="This is number 2"):
        make(tmp_path / "limit", bad_at(6, 7), core(policy="rollback", limit=1)).fit()


def test_a_rollback_without_a_checkpoint_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step 2: cannot go back, there is no checkpoint yet"):
        make(tmp_path, bad_at(2), core(policy="rollback")).fit()


def on_two(world: World, folder: str, policy: str) -> tuple[Any, ...]:
    trainer = make(Path(folder), bad_at(60), core(every=50, policy=policy), max_steps=600)
    assert trainer.fit() == 0
    return flat(trainer), trainer.progress.state_dict()


def test_all_ranks_roll_back_together(tmp_path: Path) -> None:
    skips = in_ranks(2, on_two, str(tmp_path / "skip"), "skip")
    rolls = in_ranks(2, on_two, str(tmp_path / "roll"), "rollback")
    for (left, before), (right, after) in zip(skips, rolls, strict=True):
        assert_same(left, right)
        assert before == after
    (rollback,) = events(tmp_path / "roll", "rollback")
    assert rollback["step"] >= 60 and rollback["to"] >= 50


def test_without_the_callback_nothing_is_gated(tmp_path: Path) -> None:
    open_gate = core()
    del open_gate["non_finite"]
    trainer = fit(tmp_path, bad_at(6), open_gate)
    assert flat(trainer)["model.0.weight"].isnan().all() and trainer.progress.skipped == 0


def test_settings_that_have_no_meaning_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.non_finite\.policy='ignore' must be stop, skip or rollback"):
        NonFiniteCallback("ignore")
    with pytest.raises(ConfigError, match=r"callbacks\.non_finite\.limit=0 must be at least 1"):
        NonFiniteCallback("skip", 0)


class Poisoned(Points):
    """One sample's input is not a number."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"] * math.nan} if index == IDS[43] else sample


def normalised() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_after_a_rollback_buffers_have_not_seen_the_bad_batch(tmp_path: Path, policy: str) -> None:
    recipe = Fit(model=normalised, train_data=lambda: Poisoned(SAMPLES))
    state = flat(fit(tmp_path, recipe, core(policy=policy)))
    assert skipped(tmp_path) == {6}
    assert bool(state["model.0.running_mean"].isfinite().all()) is (policy == "rollback")
    assert bool(state["model.1.weight"].isfinite().all())


class Away(Callback):
    """Lets the remote place be away from the end of step 5 until the run has gone back."""

    def __init__(self, s3: S3) -> None:
        self.s3 = s3

    def step_end(self, trainer: Trainer, output: object) -> None:
        if trainer.progress.step == 5:
            self.s3.proxy.fail(503)

    def state_loaded(self, trainer: Trainer, found: object) -> None:
        self.s3.proxy.heal()


def test_a_rollback_needs_only_the_local_copy_while_the_remote_place_is_away(tmp_path: Path, s3: S3) -> None:
    skips = fit(tmp_path / "skip", bad_at(6), core(policy="skip"))
    remote = {"async_checkpoint": AsyncCheckpointCallback(every=4, keep=None, remote=s3.url, timeout="4s")}
    rolls = fit(tmp_path / "roll", bad_at(6), core(policy="rollback", away=Away(s3), **remote))
    assert_same(flat(skips), flat(rolls))
    (rollback,) = events(tmp_path / "roll", "rollback")
    assert rollback["step"] == 6 and rollback["to"] in (4, 5)  # of a save whose upload failed another one is made soon
    assert s3.proxy.met > 0
