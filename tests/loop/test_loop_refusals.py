"""What a recipe or a callback gets wrong is refused with its name, and what is odd but right comes back on resume."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from framework.callback import Callback
from framework.distributed import World
from framework.errors import CheckpointError, ConfigError, DataError, FrameworkError
from framework.recipe import StepOutput
from tests.loop.ranks import in_ranks
from tests.loop.runs import (
    Crash,
    Fit,
    Points,
    adam,
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


def refused(path: Path, recipe: Fit, *parts: str, error: type[FrameworkError] = ConfigError, **options: Any) -> None:
    """The run is refused before anything is on disk, and the message has these parts."""
    with pytest.raises(error) as caught:
        make(path, recipe, **options).fit()
    for part in parts:
        assert part in str(caught.value), caught.value
    assert not path.exists()


# -- what is built ---------------------------------------------------------------------------------------------------


def test_a_parameter_outside_the_model_is_refused(tmp_path: Path) -> None:
    class Outside(Fit):
        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            more = nn.Linear(3, 5)
            return torch.optim.SGD([{"params": model.parameters()}, {"params": [more.bias, more.weight]}], lr=0.1)

    refused(tmp_path / "run", Outside(), "optimizer main", "parameter 0 of group 1", "[5]", "part of the model")


def test_a_model_parameter_that_no_optimizer_holds_is_fine(tmp_path: Path) -> None:
    fit(tmp_path, Fit(optimizer=lambda parameters: torch.optim.SGD(list(parameters)[:1], lr=0.1)), max_steps=2)


class Several(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


@pytest.mark.parametrize(
    ("factories", "parts"),
    [
        ({"model": lambda: None}, ("build_model returned None", "torch.nn.Module")),
        ({"model": lambda: nn.Linear}, ("no torch.nn.Module", "call it")),
        ({"optimizer": lambda parameters: None}, ("build_optimizer returned None",)),
        ({"optimizer": lambda parameters: {}}, ("empty mapping",)),
        ({"optimizer": lambda parameters: {"a": 3}}, ("returned 3 under the name 'a'",)),
        ({"optimizer": lambda parameters: torch.optim.LBFGS(parameters)}, ("LBFGS.step() needs closure",)),
        ({"optimizer": lambda parameters: Several(parameters, lr=0.1)}, ("Several.step() needs closure",)),
    ],
)
def test_a_model_or_optimizer_that_is_none(tmp_path: Path, factories: dict[str, Any], parts: tuple[str, ...]) -> None:
    refused(tmp_path / "run", Fit(**factories), *parts)


class Length(Points):
    def __init__(self, length: Callable[[], Any]) -> None:
        super().__init__()
        self._length = length

    def __len__(self) -> int:
        return self._length()  # type: ignore[no-any-return]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (lambda: None, ConfigError, "the factory returned None"),
        (lambda: Length(lambda: -1), DataError, "the length of Length cannot be taken: ValueError"),
        (lambda: Length(lambda: 2.5), DataError, "the length of Length cannot be taken: TypeError"),
        (lambda: Length(lambda: {}["rows"]), DataError, "the length of Length cannot be taken: KeyError: 'rows'"),
    ],
)
def test_a_dataset_without_a_length(tmp_path: Path, data: Any, error: type[FrameworkError], text: str) -> None:
    refused(tmp_path / "run", Fit(train_data=data), f"data.train: {text}", error=error)
    refused(tmp_path / "run", Fit(eval_data=data), f"data.eval: {text}", error=error)
    refused(tmp_path / "run", Fit(eval_data={"far": data}), f"data.eval.far: {text}", error=error)


def test_what_has_no_index_is_no_evaluation_data_and_what_cannot_be_iterated_over_is_no_data(tmp_path: Path) -> None:
    refused(tmp_path / "run", Fit(eval_data=Stream), "data.eval: Stream is iterated over", error=DataError)
    refused(tmp_path / "run", Fit(eval_data=object), "data.eval: object has no length", error=DataError)
    refused(tmp_path / "run", Fit(train_data=object), "data.train: object is no dataset", error=DataError)


@pytest.mark.parametrize("compile_", ["max-autotune", 1, None, [True]])
def test_compile_is_true_false_or_a_mapping(tmp_path: Path, compile_: Any) -> None:
    refused(tmp_path / "run", Fit(), f"trainer.compile={compile_!r}", compile=compile_)


@pytest.mark.parametrize("threads", [0, -2, 1025, 1.5, True])
def test_threads_are_a_sane_number(tmp_path: Path, threads: Any) -> None:
    refused(tmp_path / "run", Fit(), f"trainer.num_threads={threads!r}", num_threads=threads)


# -- what steps compute ----------------------------------------------------------------------------------------------


class Steps(Fit):
    """Its step gives what a function makes of the loss."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__(optimizer=adam)
        self._output = output

    def train_step(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return self._output(super().train_step(model, batch))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("output", "parts"),
    [
        (lambda loss: StepOutput(loss, metrics={"wide": torch.ones(3)}), ("metric 'wide'", "[3]", "scalar")),
        (lambda loss: StepOutput(loss, metrics={"name": "x"}), ("metric 'name'", "'x'")),
        (lambda loss: StepOutput(loss, metrics=[loss]), ("list as metrics",)),
        (lambda loss: StepOutput(loss, -8), ("weight -8", "at least 0")),
        (lambda loss: StepOutput(loss, torch.tensor(-2.0)), ("weight tensor(-2.)",)),
        (lambda loss: StepOutput(loss, torch.ones(2)), ("weight a tensor [2]",)),
        (lambda loss: StepOutput(loss, "8"), ("weight '8'",)),
        (lambda loss: loss * 1j, ("complex loss",)),
        (lambda loss: StepOutput(1.5), ("float as loss",)),
        (lambda loss: loss.detach(), ("without a gradient",)),
    ],
)
def test_what_train_step_must_not_return(tmp_path: Path, output: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, Steps(output)).fit()
    for part in ("Steps.train_step", *parts):
        assert part in str(caught.value)


@pytest.mark.parametrize("micro", [8, 4])
def test_metrics_may_be_plain_numbers(tmp_path: Path, micro: int) -> None:
    def output(loss: Tensor) -> StepOutput:
        return StepOutput(loss, metrics={"half": 0.1, "one": 3, "count": torch.tensor(7), "loss": loss})  # type: ignore[dict-item]

    fit(tmp_path, Steps(output), max_steps=2, micro_batch_size=micro)
    logged = events(tmp_path, "steps")[0]["metrics"]
    assert (logged["half"], logged["one"], logged["count"]) == ([0.1, 0.1], [3.0, 3.0], [7.0, 7.0])


def test_metrics_have_the_same_names_in_all_micro_batches(tmp_path: Path) -> None:
    names = iter(["a", "b"])
    recipe = Steps(lambda loss: StepOutput(loss, metrics={next(names): loss}))
    with pytest.raises(ConfigError, match=r"metrics \['a'\] for one micro-batch and \['b'\] for another"):
        make(tmp_path, recipe, micro_batch_size=4).fit()


@pytest.mark.parametrize("factor", [None, float("nan"), float("inf"), -0.5, "fast"])
def test_a_schedule_gives_a_sane_number(tmp_path: Path, factor: Any) -> None:
    recipe = Fit(schedule=lambda horizon: lambda step: factor if step == 3 else 1.0)
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, recipe).fit()
    assert f"Fit.lr_factor gave {factor!r} for step 3" in str(caught.value)


# -- evaluation ------------------------------------------------------------------------------------------------------


class Evaluated(Fit):
    """Its evaluation gives what a function makes of the values per sample and the number of the batch."""

    def __init__(self, values: Callable[[Tensor, int], Any], eval_data: Any = lambda: Points(19)) -> None:
        super().__init__(eval_data=eval_data)
        self._values = values
        self._batch = 0

    def eval_step(self, model: nn.Module, batch: dict[str, Tensor]) -> Any:
        self._batch += 1
        return self._values(super().eval_step(model, batch)["loss"], self._batch)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (lambda loss, batch: {"loss": loss, "mean": loss.mean()}, ("'mean'", "a tensor []", "[8]")),
        (lambda loss, batch: {"mean": loss.mean(0, keepdim=True)}, ("'mean'", "a tensor [1]", "[8]")),
        (lambda loss, batch: {"loss": loss, "wide": loss[:, None]}, ("'wide'", "[8, 1]")),
        (lambda loss, batch: {"loss": loss, "short": loss[1:]}, ("'short'", "[7]", "[8]")),
        (lambda loss, batch: {"loss": loss, "list": loss.tolist()}, ("'list'", "list")),
        (lambda loss, batch: None, ("NoneType",)),
        (lambda loss, batch: loss, ("Tensor",)),
        (lambda loss, batch: {}, ("an empty dict",)),
        (lambda loss, batch: {"loss" if batch < 3 else "last": loss}, ("['loss']", "['last']")),
    ],
)
def test_evaluation_gives_a_value_for_each_sample(tmp_path: Path, values: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        make(tmp_path, Evaluated(values), max_steps=1).fit()
    for part in ("Evaluated.eval_step", *parts):
        assert part in str(caught.value)


def test_the_evaluation_set_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"eval_step on data\.eval\.far returned NoneType"):
        make(tmp_path, Evaluated(lambda loss, batch: None, {"far": Points}), max_steps=1).fit()


def test_an_empty_dict_is_enough_where_there_are_metrics(tmp_path: Path) -> None:
    class Counted:
        def to(self, device: Any) -> Counted:
            return self

        def reset(self) -> None: ...

        def compute(self) -> float:
            return 4.0

    class OnlyMetrics(Evaluated):
        def build_metrics(self) -> dict[str, Any]:
            return {"four": Counted()}

    assert fit(tmp_path, OnlyMetrics(lambda loss, batch: {}), max_steps=1).last_metrics == {"eval/four": 4.0}


# -- what comes back -------------------------------------------------------------------------------------------------


class Counts(nn.Module):
    """Multiplies by what buffers outside the state dict count; one of them is made by the forward, and grows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("history", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        new = x.detach().mean()[None]
        self.history = new if self.history is None else torch.cat([self.history, new])
        return self.layer(x) * (1 + self.calls / 10) + self.history.sum()  # type: ignore[no-any-return]


def test_buffers_outside_the_state_dict_come_back(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", Fit(model=Counts))
    cut = crash_then_resume(tmp_path / "cut", 6, lambda: Fit(model=Counts))
    assert_same(flat(cut), flat(whole))
    assert by_step(tmp_path / "cut") == by_step(tmp_path / "whole")
    assert flat(cut)["buffers.calls"] == 12 and flat(cut)["buffers.history"].shape == (12,)
    Counts().load_state_dict(cut.built.parts.model_tensors(), strict=True)


class Plain(Counts):
    """The same model as before there was anything beside its state dict."""

    def __init__(self) -> None:
        super().__init__()
        del self.calls, self.history
        self.calls, self.history = torch.zeros(()), None


def test_a_checkpoint_without_such_buffers_still_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(RuntimeError):
        make(tmp_path, Fit(model=Plain), core(crash=Crash(6))).fit()
    assert not [key for key in flat(fit(tmp_path / "other", Fit(model=Plain), max_steps=1)) if "buffers" in key]
    fit(tmp_path, Fit(model=Counts))
    assert "buffer calls is not in the checkpoint" in caplog.text


def in_two_ranks(world: World, path: str, crash: int | None) -> dict[str, Tensor]:
    trainer = make(Path(path), Fit(model=Counts), core(**({} if crash is None else {"crash": Crash(crash)})))
    try:
        trainer.fit()
    except RuntimeError as error:
        assert "crashed at" in str(error)
    return flat(trainer)


def test_buffers_outside_the_state_dict_come_back_on_every_rank(tmp_path: Path) -> None:
    whole = in_ranks(2, in_two_ranks, str(tmp_path / "whole"), None)
    in_ranks(2, in_two_ranks, str(tmp_path / "cut"), 6)
    cut = in_ranks(2, in_two_ranks, str(tmp_path / "cut"), None)
    for before, after in zip(whole, cut, strict=True):
        assert_same(after, before)


class Differs(Fit):
    def eval_step(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        loss = super().eval_step(model, batch)["loss"]
        return {"odd" if 1 in batch["id"] else "even": loss}


def evaluated_in_two_ranks(world: World, path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        make(Path(path), Differs(eval_data=lambda: Points(8)), max_steps=1).fit()
    return str(caught.value)


def test_ranks_must_name_the_same_values(tmp_path: Path) -> None:
    for text in in_ranks(2, evaluated_in_two_ranks, str(tmp_path)):
        assert "['even']" in text and "['odd']" in text


@pytest.mark.parametrize(
    ("before", "after", "note"), [(0.9, None, "is dropped"), (None, 0.9, "starts from the restored")]
)
def test_the_average_may_be_switched_on_and_off(
    tmp_path: Path, before: float | None, after: float | None, note: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RuntimeError):
        make(tmp_path, Fit(), core(crash=Crash(6)), ema_decay=before).fit()
    averages: list[dict[str, Tensor]] = []

    class Look(Callback):
        def train_start(self, trainer: Any, resumed: bool) -> None:
            averages.append({**flat(trainer)})

    resumed = fit(tmp_path, Fit(), core(look=Look()), ema_decay=after)
    assert any("trainer.ema_decay" in text and note in text for text in events(tmp_path, "restored")[-1]["notes"])
    if after is not None:
        assert torch.equal(averages[0]["ema.0.weight"], averages[0]["model.0.weight"])
    plain = crash_then_resume(tmp_path / "plain", 6, Fit)
    same = {key: value for key, value in flat(resumed).items() if not key.startswith("ema.")}
    assert_same(same, flat(plain))


# -- callbacks' state ------------------------------------------------------------------------------------------------


class Keeper(Callback):
    """Keeps a value, per rank or for all, and may fail at either end."""

    def __init__(self, value: Any, method: str = "state_dict", fails: str = "", critical: bool = True) -> None:
        self._value = value
        self._method = method
        self._fails = fails
        self.critical = critical
        self.loaded: list[Any] = []

    def _call(self, method: str) -> dict[str, Any]:
        if self._fails == method:
            raise KeyError("no such thing")
        return {"value": self._value} if self._method == method else {}

    def state_dict(self) -> dict[str, Any]:
        return self._call("state_dict")

    def rank_state_dict(self) -> dict[str, Any]:
        return self._call("rank_state_dict")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._call("load_state_dict")
        self.loaded.append(state["value"])

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self._call("load_rank_state_dict")
        self.loaded.append(state["value"])


BAD = [
    (lambda: {"f": [1, lambda: 0]}, r"callbacks\.keeper\.value\.f\[1\] is of type builtins\.function"),
    (threading.Lock, r"callbacks\.keeper\.value is of type _thread\.lock"),
    (object, r"callbacks\.keeper\.value is of type builtins\.object"),
    (lambda: torch.ones(2).numpy(), r"callbacks\.keeper\.value is of type numpy\.ndarray"),
    (lambda: (Path("x"),), r"callbacks\.keeper\.value\[0\] is of type pathlib"),
    (lambda: {(1, 2): 3}, r"callbacks\.keeper\.value has the key \(1, 2\) of type tuple"),
]


@pytest.mark.parametrize("method", ["state_dict", "rank_state_dict"])
@pytest.mark.parametrize(("value", "message"), BAD)
def test_state_that_cannot_be_saved_is_named(tmp_path: Path, value: Any, message: str, method: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        make(tmp_path, Fit(), core(keeper=Keeper(value(), method))).fit()
    assert f"raised by {method}() of the callback 'keeper'" in caught.value.__notes__


GOOD = [None, True, 3, 0.5, 1j, "text", b"bytes", [1, [2, (3,)]], {"a": {1: None}}, torch.arange(3), {1, 2}]


@pytest.mark.parametrize("method", ["state_dict", "rank_state_dict"])
def test_what_may_be_saved_comes_back(tmp_path: Path, method: str) -> None:
    with pytest.raises(RuntimeError):
        make(tmp_path, Fit(), core(keeper=Keeper(GOOD, method), crash=Crash(6))).fit()
    keeper = Keeper(GOOD, method)
    fit(tmp_path, Fit(), core(keeper=keeper))
    assert repr(keeper.loaded) == repr([GOOD])


METHODS = ["state_dict", "rank_state_dict", "load_state_dict", "load_rank_state_dict"]


@pytest.mark.parametrize("fails", METHODS)
def test_an_error_in_a_callbacks_state_names_it(tmp_path: Path, fails: str, caplog: pytest.LogCaptureFixture) -> None:
    kept = fails.removeprefix("load_")
    if fails.startswith("load"):
        with pytest.raises(RuntimeError):
            make(tmp_path, Fit(), core(keeper=Keeper(1, kept), crash=Crash(6))).fit()
    with pytest.raises(KeyError) as caught:
        make(tmp_path, Fit(), core(keeper=Keeper(1, kept, fails))).fit()
    assert f"raised by {fails}() of the callback 'keeper'" in caught.value.__notes__
    with caplog.at_level(logging.WARNING):
        fit(tmp_path, Fit(), core(keeper=Keeper(1, kept, fails, critical=False)))
    assert f"callback 'keeper' failed in {fails}(): KeyError" in caplog.text
    assert saved_steps(tmp_path)[-1] == 12
