"""The life of a run: how long it is, when it goes on, and what may change in between."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from framework.callback import Callback
from framework.errors import ConfigError, DataError, RunOwnedError, StateMismatchError
from framework.rundir import RunDirectory
from framework.settings import TrainerSettings
from framework.trainer import Trainer
from tests.loop.runs import (
    Ask,
    Crash,
    Fit,
    Points,
    assert_same,
    by_step,
    core,
    events,
    fit,
    flat,
    make,
    saved_steps,
)


def tree(path: Path) -> dict[str, int]:
    """Every file below a folder, and when it was written."""
    return {str(file.relative_to(path)): file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("budget", "samples", "steps"),
    [
        ({"max_steps": 7}, 64, 7),
        ({"max_steps": None, "max_epochs": 2}, 20, 5),
        ({"max_steps": None, "max_epochs": 1}, 17, 3),
        ({"max_steps": None, "max_epochs": 0.5}, 64, 4),
        ({"max_steps": 2, "max_epochs": 2}, 64, 2),
        ({"max_steps": 100, "max_epochs": 1}, 64, 8),
        ({"max_steps": None, "max_epochs": 0.1}, 960, 12),  # 0.1 * 960 is a little more than 96 in floating point
        ({"max_steps": None, "max_epochs": 2, "epoch_end": "drop"}, 21, 4),
    ],
)
def test_a_run_is_as_long_as_its_smallest_budget(tmp_path: Path, budget: Any, samples: int, steps: int) -> None:
    trainer = fit(tmp_path, Fit(train_data=lambda: Points(samples)), **budget)
    assert trainer.progress.step == trainer.total_steps == steps == max(saved_steps(tmp_path))


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"max_steps": None}, r"The run has no end\. Set trainer\.max_steps, trainer\.max_epochs or trainer\.max_time"),
        ({"max_steps": 0}, r"trainer\.max_steps=0.*greater than 0"),
        ({"global_batch_size": 9, "micro_batch_size": 4}, r"global_batch_size=9.*micro_batch_size=4.*9 samples"),
        ({"precision": "fp8"}, r"trainer\.precision='fp8' is unknown\. Use one of fp32, bf16, fp16"),
        ({"eval_every": "5min"}, r"trainer\.eval_every='5min' is given in seconds"),
        ({"max_time": "5"}, r"trainer\.max_time='5' is given in steps"),
        ({"ema_decay": 1.0}, r"trainer\.ema_decay=1\.0 must lie between 0 and 1"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_on_disk(tmp_path: Path, budget: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path / "run", **budget).fit()
    assert list(tmp_path.iterdir()) == []


def test_data_that_cannot_be_used_is_refused_before_anything_is_on_disk(tmp_path: Path) -> None:
    for data, message in ((lambda: Points(0), "empty"), (object, "object is no dataset")):
        with pytest.raises(DataError, match=message):
            make(tmp_path / "run", Fit(train_data=data)).fit()
    with pytest.raises(DataError, match=r"5.*8|8.*5"):
        make(tmp_path / "run", Fit(train_data=lambda: Points(5)), epoch_end="drop").fit()
    assert list(tmp_path.iterdir()) == []


class Age(Callback):
    """Makes each step count as a hundred seconds more than it took."""

    def step_end(self, trainer: Trainer, output: object) -> None:
        trainer.elapsed_before += 100


def test_the_time_budget_counts_over_attempts(tmp_path: Path) -> None:
    def budget(seconds: int) -> dict[str, Any]:
        return {"max_steps": None, "max_time": f"{seconds}s"}

    with pytest.raises(RuntimeError):
        make(tmp_path, Fit(), core(age=Age(), crash=Crash(6)), **budget(1000)).fit()
    trainer = fit(tmp_path, Fit(), core(age=Age()), **budget(1000))
    assert trainer.progress.step == 10  # 4 steps of the first attempt and 6 of the second
    end = events(tmp_path, "end")[1]
    assert (end["status"], end["exit_code"], end["reason"]) == ("finished", 0, "time budget used up")
    before = tree(tmp_path)
    assert fit(tmp_path, Fit(), **budget(1000)).attempt == 0 and tree(tmp_path) == before
    assert fit(tmp_path, Fit(), core(age=Age()), **budget(1150)).progress.step == 12


def test_a_finished_run_is_left_alone_and_a_larger_budget_extends_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = fit(tmp_path / "whole", max_steps=20)
    trained = fit(tmp_path / "run")
    before = tree(tmp_path / "run")
    with caplog.at_level(logging.INFO):
        again = fit(tmp_path / "run")
    assert again.attempt == 0 and tree(tmp_path / "run") == before
    assert "is finished at step 12. Nothing to do; a larger budget extends it, another" in caplog.text
    assert again.progress == fit(tmp_path / "run").progress and again.progress.step == 12
    assert_same(again.built.parts.model_tensors(), trained.built.parts.model_tensors())
    longer = fit(tmp_path / "run", max_steps=20)
    assert_same(flat(whole), flat(longer))
    assert by_step(tmp_path / "run") == by_step(tmp_path / "whole")


def test_a_run_that_a_callback_stopped_is_finished_too(tmp_path: Path) -> None:
    fit(tmp_path, Fit(), core(stop=Ask(7, "stop", "no more progress")))
    assert events(tmp_path, "end")[0]["status"] == "finished"
    before = tree(tmp_path)
    assert fit(tmp_path).attempt == 0 and tree(tmp_path) == before
    assert fit(tmp_path, run={"allow": ["finished"]}).progress.step == 12


def test_resume_must_and_never_mean_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.resume=must, but there is no checkpoint in"):
        make(tmp_path / "run", run={"resume": "must"}).fit()
    assert list(tmp_path.iterdir()) == []
    fit(tmp_path / "run", max_steps=4, run={"resume": "never"})
    with pytest.raises(
        ConfigError, match=r"run\.resume=never, but .* holds checkpoints\. Give the run another run\.name"
    ):
        make(tmp_path / "run", run={"resume": "never"}).fit()
    assert fit(tmp_path / "run", run={"resume": "must"}).progress.step == 12
    assert len(events(tmp_path / "run", "restored")) == 1


def test_without_auto_resume_a_directory_with_checkpoints_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=4)
    without = core()
    del without["auto_resume"]
    with pytest.raises(ConfigError, match=r"without callbacks\.auto_resume nothing is resumed"):
        make(tmp_path, Fit(), without).fit()


def test_another_seed_is_refused_and_can_be_permitted(tmp_path: Path) -> None:
    fit(tmp_path, seed=3, max_steps=4)
    with pytest.raises(StateMismatchError, match=r"seed=4, but .* was written with seed=3.*run\.allow=\[seed\]"):
        make(tmp_path, seed=4).fit()
    assert fit(tmp_path, seed=4, run={"allow": ["seed"]}).progress.step == 12


def test_another_length_of_the_data_is_refused_and_can_be_permitted(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=4)
    with pytest.raises(StateMismatchError, match=r"samples is now 65, was 64.*run\.allow=\[data\]"):
        make(tmp_path, Fit(train_data=lambda: Points(65))).fit()
    assert fit(tmp_path, Fit(train_data=lambda: Points(65)), run={"allow": ["data"]}).progress.step == 12


def test_another_global_batch_goes_on_at_the_same_sample_and_says_so(tmp_path: Path) -> None:
    fit(tmp_path / "whole", recipe := Fit())
    fit(tmp_path / "cut", Fit(), max_steps=4)
    other = Fit()
    trainer = fit(tmp_path / "cut", other, global_batch_size=16, max_steps=8)
    assert trainer.progress.position == 4 * 8 + 4 * 16
    seen = [number for batch in recipe.seen[4:] for number in batch]
    assert [number for batch in other.seen for number in batch] == seen
    assert "global batch is now 16, was 8" in events(tmp_path / "cut", "restored")[0]["notes"]


def test_epochs_are_counted_in_samples_when_the_global_batch_changes(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=4, max_epochs=2)
    trainer = fit(tmp_path, max_steps=None, max_epochs=2, global_batch_size=16)
    assert (trainer.progress.step, trainer.progress.position) == (4 + 96 // 16, 128)
    assert fit(tmp_path, max_steps=None, max_epochs=2, global_batch_size=16).attempt == 0


@pytest.mark.parametrize("is_resumed", [True, False])
def test_what_changed_in_the_config_is_announced_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_resumed: bool
) -> None:
    fit(tmp_path, max_steps=4, config={"trainer": {"max_steps": 4}, "a": 1, "gone": 2})
    if not is_resumed:
        shutil.rmtree(tmp_path / "checkpoints")
    with caplog.at_level(logging.INFO):
        fit(tmp_path, config={"trainer": {"max_steps": 12}, "a": 1, "b": {"c": "x"}})
    how, since = ("resume", "") if is_resumed else ("config", " when the run began")
    assert caplog.text.count("trainer.max_steps is now") == caplog.text.count("b.c is now") == 1
    assert f"{how}: trainer.max_steps is now 12, was 4{since}\n" in caplog.text
    assert f"{how}: b.c is now 'x', was not set{since}\n" in caplog.text
    assert f"{how}: gone is no longer set, was 2{since}\n" in caplog.text
    assert "a is now" not in caplog.text


def test_weights_of_another_run_begin_a_new_one(tmp_path: Path) -> None:
    source = fit(tmp_path / "source")
    start = tmp_path / "source" / "checkpoints" / "step_0000000012"
    seen: list[torch.Tensor] = []

    class Look(Callback):
        def train_start(self, trainer: Trainer, resumed: bool) -> None:
            seen.append(trainer.built.model[0].weight.detach().clone())  # type: ignore[index, union-attr, operator]

    begun = fit(tmp_path / "run", Fit(), core(look=Look()), max_steps=4, run={"init_from": str(start)})
    assert torch.equal(seen[0], flat(source)["model.0.weight"])
    assert begun.progress.step == 4 and len(begun.built.optimizers["main"].state) == 4
    # a checkpoint of the run itself wins
    fit(tmp_path / "run", Fit(), core(look=Look()), run={"init_from": str(start)})
    assert torch.equal(seen[1], flat(begun)["model.0.weight"])
    with pytest.raises(ConfigError, match=r"run\.init_from=.*nowhere is no checkpoint and no run"):
        make(tmp_path / "new", run={"init_from": str(tmp_path / "nowhere")}).fit()


def test_the_average_begins_at_the_weights_of_the_other_run(tmp_path: Path) -> None:
    source = fit(tmp_path / "source")
    averages: list[torch.Tensor] = []

    class Look(Callback):
        def train_start(self, trainer: Trainer, resumed: bool) -> None:
            assert trainer.built.parts.ema is not None
            averages.append(trainer.built.parts.ema.average["0.weight"].clone())

    start = str(tmp_path / "source" / "checkpoints" / "step_0000000012")
    fit(tmp_path / "run", Fit(), core(look=Look()), run={"init_from": start}, ema_decay=0.99, max_steps=1)
    assert torch.equal(averages[0], flat(source)["model.0.weight"])


def test_a_live_run_is_not_joined_and_its_directory_not_touched(tmp_path: Path) -> None:
    lease = RunDirectory(tmp_path).acquire()
    before = tree(tmp_path)
    with pytest.raises(RunOwnedError, match=f"pid {os.getpid()}"):
        make(tmp_path).fit()
    assert tree(tmp_path) == before
    lease.release()
    fit(tmp_path)


def test_the_directory_is_given_back_whatever_happened(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        make(tmp_path, Fit(), core(crash=Crash(3))).fit()
    owner = RunDirectory(tmp_path).owner()
    assert owner is not None and not owner.is_live
    assert events(tmp_path)[-1]["ev"] == "end" and events(tmp_path)[-1]["status"] == "failed"
    (failure,) = events(tmp_path, "failure")
    assert (failure["type"], failure["message"], failure["step"]) == ("RuntimeError", "crashed at 3", 3)


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    fit(tmp_path / "run", max_steps=8)
    (shard,) = (tmp_path / "run" / "checkpoints" / "step_0000000008").glob("__0_*.distcp")
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    cut = fit(tmp_path / "run")
    assert events(tmp_path / "run", "restored")[0]["step"] == 4
    assert_same(flat(whole), flat(cut))


def test_a_step_that_takes_the_samples_over_an_epoch_is_one_step(tmp_path: Path) -> None:
    crossed: list[tuple[str, int, int]] = []

    class Epochs(Callback):
        def epoch_start(self, trainer: Trainer, epoch: int) -> None:
            crossed.append(("start", epoch, trainer.progress.step))

        def epoch_end(self, trainer: Trainer, epoch: int) -> None:
            crossed.append(("end", epoch, trainer.progress.step))

    trainer = fit(tmp_path, Fit(train_data=lambda: Points(20)), core(epochs=Epochs()), max_steps=None, max_epochs=2)
    assert trainer.progress.position == 40 and trainer.progress.epoch == 2
    assert crossed == [("start", 0, 0), ("end", 0, 3), ("start", 1, 3), ("end", 1, 5)]


def test_every_sample_is_seen_once_an_epoch_also_over_a_crash(tmp_path: Path) -> None:
    first, second = Fit(train_data=lambda: Points(20)), Fit(train_data=lambda: Points(20))
    with pytest.raises(RuntimeError):
        make(tmp_path, first, core(every=1, crash=Crash(4)), max_steps=5).fit()
    fit(tmp_path, second, core(every=1), max_steps=5)
    restored = events(tmp_path, "restored")[0]["step"]
    ids = [number for batch in [*first.seen[:restored], *second.seen] for number in batch]
    assert sorted(ids[:20]) == sorted(ids[20:]) == list(range(20)) and ids[:20] != ids[20:]


def test_validate_and_explain_build_everything_and_create_nothing(tmp_path: Path) -> None:
    trainer = make(tmp_path / "run", config={"a": 1})
    assert trainer.validate() == []
    text = trainer.explain()
    for part in (
        "12 steps = 1.50 epochs",
        "8 samples = 1 rank x 8 x 1 micro-batches",
        "starts at step 0",
        "async_checkpoint",
    ):
        assert part in text
    assert make(tmp_path / "run", deterministic=False).validate() == [
        "not bitwise: kernels are not deterministic here; set trainer.deterministic=true"
    ]
    assert list(tmp_path.iterdir()) == []


def test_deterministic_kernels_are_the_default_on_the_cpu(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=1)
    assert torch.are_deterministic_algorithms_enabled()
    make(tmp_path / "b", deterministic=False, num_threads=1).validate()
    assert not torch.are_deterministic_algorithms_enabled() and torch.get_num_threads() == 1


def test_a_recipe_needs_no_more_than_a_train_step(tmp_path: Path) -> None:
    class Own(Fit):
        def build_model(self) -> nn.Module:
            return nn.Linear(4, 1)

    trainer = Trainer(Own(), trainer=TrainerSettings(max_steps=2, device="cpu"), recipe_name="own")
    assert trainer.name == "own" and trainer.run.shown == Path("runs/own")
    assert fit(tmp_path, Own(), {}, max_steps=2).progress.step == 2
    assert saved_steps(tmp_path) == []
