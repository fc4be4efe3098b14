"""What a checkpoint holds comes back into the right place, whatever wraps or reorders the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.callback import Callback
from framework.checkpoint import CheckpointStore
from framework.distributed import World
from framework.errors import ConfigError, StateMismatchError
from framework.trainer import Trainer
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
    net,
    saved_steps,
    sgd,
)


def with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


class Images(Points):
    """The points as images `[3, 8, 8]`."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(index))
        return {**super().__getitem__(index), "x": image}


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 1))


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x)))  # type: ignore[no-any-return]


def frozen() -> nn.Module:
    model = with_norm()
    model[0].weight.requires_grad_(False)
    return model


RECIPES: dict[str, tuple[Callable[[], Fit], dict[str, Any]]] = {
    "sgd": (partial(Fit, model=with_norm), {}),
    "adam": (partial(Fit, model=with_norm, optimizer=adam), {}),
    "ema": (partial(Fit, model=with_norm, optimizer=adam, eval_data=Points), {"ema_decay": 0.9, "eval_every": 3}),
    "channels_last": (partial(Fit, model=convolution, train_data=Images, optimizer=adam), {"channels_last": True}),
    "frozen": (partial(Fit, model=frozen, optimizer=adam), {}),
    "two_optimizers": (partial(Fit, model=Pair, optimizer={"body": sgd, "head": adam}), {}),
    "bf16": (partial(Fit, model=with_norm), {"precision": "bf16"}),
    "accumulation": (partial(Fit, model=with_norm), {"micro_batch_size": 2}),
    "drop": (partial(Fit, train_data=lambda: Points(21)), {"epoch_end": "drop"}),
    "carry": (partial(Fit, train_data=lambda: Points(21)), {"epoch_end": "carry"}),
}


@pytest.mark.parametrize("crash_at", [6, 11])
@pytest.mark.parametrize("name", RECIPES)
def test_a_resumed_run_ends_with_the_bits_of_the_unbroken_one(tmp_path: Path, name: str, crash_at: int) -> None:
    recipe, options = RECIPES[name]
    whole = fit(tmp_path / "whole", recipe(), **options)
    cut = crash_then_resume(tmp_path / "cut", crash_at, recipe, **options)
    assert_same(flat(whole), flat(cut))
    assert by_step(tmp_path / "whole") == by_step(tmp_path / "cut")
    assert [event["step"] for event in events(tmp_path / "cut", "restored")] == [crash_at // 4 * 4]
    assert whole.progress == cut.progress


def keys(path: Path) -> set[str]:
    """Names of all tensors in the newest checkpoint, as torch itself reads them."""
    from torch.distributed.checkpoint import FileSystemReader

    newest = CheckpointStore(path / "checkpoints").list()[0]
    return set(FileSystemReader(newest.path).read_metadata().state_dict_metadata)


def test_the_average_has_keys_of_its_own(tmp_path: Path) -> None:
    recipe, options = RECIPES["ema"]
    fit(tmp_path, recipe(), **options)
    assert {"ema.0.weight", "model.0.weight", "optimizer.main.state.0.weight.exp_avg"} <= keys(tmp_path)


def test_convolutions_keep_their_memory_format(tmp_path: Path) -> None:
    recipe, options = RECIPES["channels_last"]
    seen: list[bool] = []

    class Look(Callback):
        def train_start(self, trainer: Trainer, resumed: bool) -> None:
            weight = trainer.built.model[0].weight  # type: ignore[index, union-attr]
            seen.append(weight.is_contiguous(memory_format=torch.channels_last))  # type: ignore[union-attr, operator]
            moments = [state["exp_avg"] for state in trainer.built.optimizers["main"].state.values()]
            seen.extend(m.is_contiguous(memory_format=torch.channels_last) for m in moments if m.dim() == 4)

    crash_then_resume(tmp_path, 6, recipe, lambda **more: core(look=Look(), **more), **options)
    assert seen == [True, True, True]


def test_several_optimizers_step_once_a_step_and_are_named_after_parts(tmp_path: Path) -> None:
    trainer = fit(tmp_path, RECIPES["two_optimizers"][0]())
    assert sorted(trainer.built.optimizers) == ["body", "head"]
    assert {int(state["step"]) for state in trainer.built.optimizers["head"].state.values()} == {12}
    assert "optimizer.head.state.head.weight.exp_avg" in keys(tmp_path)
    assert "optimizer.body.state.body.weight.momentum_buffer" in keys(tmp_path)
    with pytest.raises(ConfigError, match=r"optimizer\.tail: the model has no part of that name \(it has body, head\)"):
        make(tmp_path / "other", Fit(model=Pair, optimizer={"tail": sgd})).fit()


def test_frozen_parameters_are_kept_and_not_trained(tmp_path: Path) -> None:
    recipe, options = RECIPES["frozen"]
    trainer = fit(tmp_path, recipe(), **options)
    start = make(tmp_path / "start", recipe(), {}, max_steps=1)
    start.fit()
    assert torch.equal(flat(trainer)["model.0.weight"], flat(start)["model.0.weight"])
    assert "model.0.weight" in keys(tmp_path) and "optimizer.main.state.0.weight.exp_avg" not in keys(tmp_path)


@pytest.mark.filterwarnings("ignore")  # of torch.compile itself
@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True)])
def test_compiled_or_not_it_is_the_same_checkpoint(tmp_path: Path, before: bool, after: bool) -> None:
    on = {"backend": "eager"}
    whole = fit(tmp_path / "whole", Fit(optimizer=adam))
    with pytest.raises(RuntimeError):
        make(tmp_path / "cut", Fit(optimizer=adam), core(crash=Crash(6)), compile=on if before else False).fit()
    assert not any("_orig_mod" in key for key in keys(tmp_path / "cut"))
    cut = fit(tmp_path / "cut", Fit(optimizer=adam), compile=on if after else False)
    assert_same(flat(whole), flat(cut))


def train(world: World, folder: str, crash_at: int | None, dropout: float, micro: int | None) -> dict[str, Tensor]:
    """One attempt at a run on as many ranks as there are."""
    crash = {"crash": Crash(crash_at)} if crash_at is not None else {}
    recipe = Fit(model=partial(net, dropout), optimizer=adam)
    trainer = make(Path(folder), recipe, core(**crash), micro_batch_size=micro)
    try:
        trainer.fit()
    except RuntimeError:
        assert crash_at is not None
    return flat(trainer)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_resume_bit_for_bit(tmp_path: Path, ranks: int) -> None:
    """With four, sums over ranks depend on how DDP has laid out its buckets."""
    whole = in_ranks(ranks, train, str(tmp_path / "whole"), None, 0.2, None)
    in_ranks(ranks, train, str(tmp_path / "cut"), 6, 0.2, None)
    cut = in_ranks(ranks, train, str(tmp_path / "cut"), None, 0.2, None)
    assert_same(whole[0], whole[1])
    for before, after in zip(whole, cut, strict=True):
        assert_same(before, after)
    assert by_step(tmp_path / "whole") == by_step(tmp_path / "cut")
    assert len(events(tmp_path / "cut", "restored")) == 1
    assert not any(key.startswith("model.module") for key in keys(tmp_path / "cut"))


@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_a_checkpoint_of_one_layout_loads_into_the_other(tmp_path: Path, first: int, then: int) -> None:
    """Without random numbers in the model the numbers are the same up to rounding."""
    whole = in_ranks(1, train, str(tmp_path / "whole"), None, 0.0, None)[0]
    in_ranks(first, train, str(tmp_path / "cut"), 6, 0.0, None)
    cut = in_ranks(then, train, str(tmp_path / "cut"), None, 0.0, 2)[0]
    assert_same(whole, cut, close=1e-5)
    (restored,) = events(tmp_path / "cut", "restored")
    assert restored["step"] == 4 and f"world size is now {then}, was {first}" in restored["notes"]


def test_another_class_of_optimizer_is_refused_and_can_be_permitted(tmp_path: Path) -> None:
    fit(tmp_path, Fit(optimizer=sgd), max_steps=4)
    with pytest.raises(StateMismatchError) as caught:
        make(tmp_path, Fit(optimizer=adam)).fit()
    for part in ("torch.optim.sgd.SGD", "torch.optim.adamw.AdamW", "run.allow=[optimizer]"):
        assert part in str(caught.value)
    trainer = fit(tmp_path, Fit(optimizer=adam), run={"allow": ["optimizer"]})
    assert {int(state["step"]) for state in trainer.built.optimizers["main"].state.values()} == {8}
    assert "optimizer main: starts with fresh state" in events(tmp_path, "restored")[-1]["notes"]


def test_optimizer_state_is_matched_by_name_when_the_order_of_parameters_changes(tmp_path: Path) -> None:
    def backwards(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return adam(list(parameters)[::-1])

    whole = fit(tmp_path / "whole", Fit(optimizer=adam))
    with pytest.raises(RuntimeError):
        make(tmp_path / "cut", Fit(optimizer=adam), core(crash=Crash(6))).fit()
    cut = fit(tmp_path / "cut", Fit(optimizer=backwards))
    assert_same(flat(whole), flat(cut))
    assert events(tmp_path / "cut", "restored")[0]["notes"] == []


def test_another_shape_of_the_model_is_refused_with_both_shapes(tmp_path: Path) -> None:
    fit(tmp_path, max_steps=4)
    before = saved_steps(tmp_path)
    with pytest.raises(StateMismatchError) as caught:
        make(
            tmp_path, Fit(model=lambda: nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Dropout(), nn.Linear(9, 1)))
        ).fit()
    text = str(caught.value)
    assert "model.0.weight" in text and "[8, 4]" in text and "[9, 4]" in text
    assert saved_steps(tmp_path) == before


class Counts(Callback):
    """Counts steps; what it counted is in the checkpoint, once for all ranks and once for this one."""

    def __init__(self) -> None:
        self.count = 0
        self.mine = 0

    def step_end(self, trainer: Trainer, output: object) -> None:
        self.count += 1
        self.mine += 2

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def rank_state_dict(self) -> dict[str, Any]:
        return {"mine": torch.tensor(self.mine)}

    def load_rank_state_dict(self, state: dict[str, Any]) -> None:
        self.mine = int(state["mine"])


def test_two_callbacks_of_one_class_keep_separate_state(tmp_path: Path) -> None:
    a, b = Counts(), Counts()
    b.count = 100
    with pytest.raises(RuntimeError):
        make(tmp_path, Fit(), core(a=a, b=b, crash=Crash(6))).fit()
    a, b = Counts(), Counts()
    fit(tmp_path, Fit(), core(a=a, b=b))
    assert (a.count, b.count, a.mine, b.mine) == (12, 112, 24, 24)


def test_a_callback_may_come_and_go_between_attempts(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole")
    config: dict[str, Any] = {"callbacks": {"old": {}}}
    with pytest.raises(RuntimeError):
        make(tmp_path / "cut", Fit(), core(old=Counts(), crash=Crash(6)), config=config).fit()
    new = Counts()
    cut = fit(tmp_path / "cut", Fit(), core(new=new), config={"callbacks": {"new": {}}})
    assert_same(flat(whole), flat(cut))
    assert new.count == 8
    notes = events(tmp_path / "cut", "restored")[0]["notes"]
    assert "callbacks.old is no longer there; its saved state is dropped" in notes
