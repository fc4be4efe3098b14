"""An evaluation counts every sample once and changes nothing that training reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.callback import Callback
from framework.distributed import World
from framework.errors import EXIT_SIGTERM
from framework.loop.ema import EMA
from framework.trainer import Trainer
from tests.loop.ranks import in_ranks
from tests.loop.runs import (
    Ask,
    Fit,
    Points,
    assert_same,
    by_step,
    core,
    events,
    fit,
    flat,
    make,
)


class Noisy(Fit):
    """Evaluates with random numbers, and looks at what it is evaluated with."""

    def __init__(self, look: Callable[[nn.Module], Any] = lambda model: None, **factories: Any) -> None:
        super().__init__(**{"eval_data": lambda: Points(19), **factories})
        self._look = look

    def eval_step(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self._look(model)
        return {**super().eval_step(model, batch), "noise": torch.rand(len(batch["id"]))}


def batch_norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))


def metrics(path: Path) -> dict[int, dict[str, float]]:
    return {event["step"]: event["values"] for event in events(path, "metrics")}


@pytest.mark.parametrize("ema", [None, 0.9])
def test_training_is_bit_for_bit_the_same_with_and_without_evaluation(tmp_path: Path, ema: float | None) -> None:
    options: dict[str, Any] = {"ema_decay": ema}
    on = fit(tmp_path / "on", Noisy(model=batch_norm_net), eval_every=1, **options)
    off = fit(tmp_path / "off", Noisy(model=batch_norm_net), eval_every=None, eval_at_end=False, **options)
    assert_same(flat(on), flat(off))
    assert by_step(tmp_path / "on") == by_step(tmp_path / "off")
    assert len(metrics(tmp_path / "on")) == 12 and metrics(tmp_path / "off") == {}


def test_random_numbers_of_an_evaluation_depend_on_seed_and_step_alone(tmp_path: Path) -> None:
    fit(tmp_path / "every", Noisy(), eval_every=1)
    fit(tmp_path / "some", Noisy(), eval_every=5)
    fit(tmp_path / "other", Noisy(), eval_every=5, seed=1)
    every, some, other = (metrics(tmp_path / name) for name in ("every", "some", "other"))
    assert sorted(some) == [5, 10, 12] and all(some[step] == every[step] for step in some)
    assert len({values["eval/noise"] for values in every.values()}) == 12
    assert some[5]["eval/noise"] != other[5]["eval/noise"]


def test_each_submodule_gets_its_own_mode_back(tmp_path: Path) -> None:
    def partly_frozen() -> nn.Module:
        model = batch_norm_net()
        model[1].eval()
        return model

    seen: list[list[bool]] = []
    recipe = Noisy(lambda model: seen.append([m.training for m in model.modules()]), model=partly_frozen)
    trainer = fit(tmp_path, recipe, eval_every=4)
    assert seen and all(modes == [False] * 5 for modes in seen)
    assert [module.training for module in trainer.built.model.modules()] == [True, True, False, True, True]


def test_flags_weights_and_generators_come_back_when_an_evaluation_fails(tmp_path: Path) -> None:
    trainer = make(tmp_path, Noisy(model=batch_norm_net), ema_decay=0.5, eval_every=None, eval_at_end=False)
    trainer.fit()
    evaluation = trainer.built.evaluation
    assert evaluation is not None

    def fail(model: nn.Module) -> None:
        torch.rand(1)
        raise ZeroDivisionError

    before = flat(trainer)
    trainer.recipe._look = fail  # type: ignore[attr-defined]
    state = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        evaluation.run(7, lambda: False)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in trainer.built.model.modules())
    assert_same(flat(trainer), before)


def test_statistics_of_batch_norm_are_untouched(tmp_path: Path) -> None:
    seen: list[tuple[Tensor, int]] = []

    def look(model: nn.Module) -> None:
        seen.append((model[1].running_mean.clone(), int(model[1].num_batches_tracked)))  # type: ignore[index, union-attr, operator]

    fit(tmp_path, Noisy(look, model=batch_norm_net), eval_every=4, eval_batch_size=4)
    for start in range(0, len(seen), 5):  # 19 samples are 5 batches of 4
        group = seen[start : start + 5]
        assert {count for _, count in group} == {4 * (start // 5 + 1)}
        assert all(torch.equal(mean, group[0][0]) for mean, _ in group)


@pytest.mark.parametrize("batch_size", [1, 4, 7, 19, 64])
def test_every_sample_counts_once_whatever_the_batches(tmp_path: Path, batch_size: int) -> None:
    trainer = fit(tmp_path, Noisy(), eval_batch_size=batch_size, eval_at_end=True)
    assert metrics(tmp_path)[12]["eval/loss"] == pytest.approx(plain_loss(trainer, 19), rel=1e-6)


def plain_loss(trainer: Trainer, samples: int) -> float:
    model = trainer.built.model.eval()
    x = torch.stack([Points()[i]["x"] for i in range(samples)])
    y = torch.stack([Points()[i]["y"] for i in range(samples)])
    with torch.no_grad():
        return float(((model(x) - y) ** 2).mean())


def on_two(world: World, folder: str) -> tuple[dict[str, float], float]:
    """Ranks have uneven numbers of evaluation samples and of batches."""
    trainer = make(Path(folder), Fit(eval_data=lambda: Points(9), model=batch_norm_net), eval_batch_size=2)
    trainer.fit()
    return trainer.last_metrics, plain_loss(trainer, 9)


def test_every_sample_counts_once_over_ranks(tmp_path: Path) -> None:
    (zero, plain), (one, _) = in_ranks(2, on_two, str(tmp_path))
    assert zero == one and zero["eval/loss"] == pytest.approx(plain, rel=1e-6)


def test_several_sets_are_told_apart(tmp_path: Path) -> None:
    trainer = fit(tmp_path, Fit(eval_data={"near": lambda: Points(5), "far": lambda: Points(20)}))
    values = metrics(tmp_path)[12]
    assert sorted(values) == ["eval/far/loss", "eval/near/loss"]
    assert values["eval/near/loss"] == pytest.approx(plain_loss(trainer, 5))
    assert values["eval/far/loss"] == pytest.approx(plain_loss(trainer, 20))


class Largest(Fit):
    """A metric that is no mean over samples."""

    def build_metrics(self) -> dict[str, Any]:
        from torchmetrics import MaxMetric

        return {"largest": MaxMetric()}

    def eval_step(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.metrics["largest"].update(batch["y"])
        return {}


def test_a_metric_that_is_no_mean_is_computed_per_evaluation_and_set(tmp_path: Path) -> None:
    fit(tmp_path, Largest(eval_data={"b": lambda: Points(40), "a": lambda: Points(3)}), eval_every=6)
    expected = {
        f"eval/{name}/largest": pytest.approx(max(float(Points()[i]["y"]) for i in range(count)))
        for name, count in (("a", 3), ("b", 40))
    }
    assert metrics(tmp_path) == {6: expected, 12: expected}


def metric_on_two(world: World, folder: str) -> dict[str, float]:
    trainer = make(Path(folder), Largest(eval_data=lambda: Points(40)))
    trainer.fit()
    return trainer.last_metrics


def test_a_metric_that_is_no_mean_is_computed_over_all_ranks(tmp_path: Path) -> None:
    expected = {"eval/largest": pytest.approx(max(float(Points()[i]["y"]) for i in range(40)))}
    assert in_ranks(2, metric_on_two, str(tmp_path)) == [expected, expected]


def test_the_average_of_the_weights_is_evaluated_and_swapped_out_again(tmp_path: Path) -> None:
    seen: list[Tensor] = []
    recipe = Noisy(lambda model: seen.append(model[0].weight.clone()))  # type: ignore[index, union-attr, operator]
    trainer = make(tmp_path, recipe, ema_decay=0.5, eval_batch_size=32)
    live: list[Tensor] = []

    class Look(Callback):
        def step_end(self, trainer: Trainer, output: object) -> None:
            live.append(trainer.built.model[0].weight.detach().clone())  # type: ignore[index, union-attr, operator]

    trainer.callbacks["look"] = Look()
    trainer.fit()
    assert trainer.built.parts.ema is not None
    assert torch.equal(seen[-1], trainer.built.parts.ema.average["0.weight"])
    assert torch.equal(trainer.built.model[0].weight, live[-1])  # type: ignore[index, arg-type]
    assert not torch.equal(seen[-1], live[-1])


def test_the_average_is_what_the_formula_says() -> None:
    model = nn.Linear(2, 1)
    ema = EMA(model, 0.9)
    average = model.weight.detach().clone()
    for _ in range(5):
        with torch.no_grad():
            model.weight.add_(1.0)
        ema.update()
        average = 0.9 * average + 0.1 * model.weight.detach()
    torch.testing.assert_close(ema.average["weight"], average)


class Interrupt(Callback):
    """Asks to stop, as a signal does, in the middle of an evaluation or just before it."""

    def __init__(self, step: int, during: bool) -> None:
        self._step, self._during = step, during

    def eval_start(self, trainer: Trainer) -> None:
        if self._during and trainer.progress.step == self._step:
            trainer.request_stop("received SIGTERM", EXIT_SIGTERM)

    def step_end(self, trainer: Trainer, output: object) -> None:
        if not self._during and trainer.progress.step == self._step:
            trainer.request_stop("received SIGTERM", EXIT_SIGTERM)


@pytest.mark.parametrize("step", [8, 12])
@pytest.mark.parametrize("during", [True, False])
def test_an_evaluation_that_a_signal_cut_off_is_made_up_for(tmp_path: Path, during: bool, step: int) -> None:
    fit(tmp_path / "whole", Noisy(), eval_every=4)
    stopped = make(tmp_path / "cut", Noisy(), core(cut=Interrupt(step, during)), eval_every=4)
    assert stopped.fit() == EXIT_SIGTERM and stopped.progress.step == step
    assert sorted(metrics(tmp_path / "cut")) == list(range(4, step, 4))
    resumed = fit(tmp_path / "cut", Noisy(), eval_every=4)
    assert not resumed.pending_evaluation
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert by_step(tmp_path / "cut") == by_step(tmp_path / "whole")


def test_an_evaluation_that_was_missing_at_the_end_is_made_up_for_once(tmp_path: Path) -> None:
    assert make(tmp_path, Noisy(), core(cut=Interrupt(12, True))).fit() == EXIT_SIGTERM
    for attempts in (2, 2):  # the second time there is nothing left to do
        fit(tmp_path, Noisy())
        assert sorted(metrics(tmp_path)) == [12] and len(events(tmp_path, "attempt_start")) == attempts
    whole, longer = (fit(tmp_path / "whole", Noisy(), max_steps=16), fit(tmp_path, Noisy(), max_steps=16))
    assert_same(flat(whole), flat(longer))


def test_a_stop_that_is_in_no_hurry_lets_an_evaluation_end(tmp_path: Path) -> None:
    class Enough(Callback):
        def eval_start(self, trainer: Trainer) -> None:
            trainer.request_stop("enough")

    trainer = fit(tmp_path, Noisy(), core(enough=Enough()), eval_every=8)
    assert sorted(metrics(tmp_path)) == [8] and trainer.progress.step == 9 and not trainer.pending_evaluation


def interrupted_on_rank_1(world: World, folder: str) -> tuple[int, int, bool]:
    cut = {"cut": Interrupt(8, True)} if world.rank else {"cut": Ask(0, "stop")}
    trainer = make(Path(folder), Noisy(), core(every=None, **cut), eval_every=8, max_steps=1000)
    return trainer.fit(), trainer.progress.step, trainer.pending_evaluation


def test_an_evaluation_that_one_rank_cuts_off_ends_the_run_on_all_at_that_step(tmp_path: Path) -> None:
    assert in_ranks(2, interrupted_on_rank_1, str(tmp_path)) == [(EXIT_SIGTERM, 8, True)] * 2
    assert metrics(tmp_path) == {} and [event["step"] for event in events(tmp_path, "save_committed")] == [8]


def test_callbacks_get_the_results(tmp_path: Path) -> None:
    got: list[Mapping[str, float]] = []

    class Take(Callback):
        def eval_end(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
            got.append(metrics)

    fit(tmp_path, Noisy(), core(take=Take()), eval_every=6)
    assert got == list(metrics(tmp_path).values())


def test_evaluation_data_without_a_sample_is_refused(tmp_path: Path) -> None:
    from framework.errors import DataError

    with pytest.raises(DataError, match=r"data\.eval\.empty: the dataset is empty"):
        make(tmp_path / "run", Fit(eval_data={"empty": lambda: Points(0)})).fit()
    assert not (tmp_path / "run").exists()


def test_evaluation_goes_by_epochs_too(tmp_path: Path) -> None:
    fit(tmp_path, Fit(eval_data=lambda: Points(4), train_data=lambda: Points(20)), eval_every="1epochs")
    assert sorted(metrics(tmp_path)) == [3, 5, 8, 10, 12]
