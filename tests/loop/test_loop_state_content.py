"""Everything that a run needs to go on is collected, and put back under the names it had."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from framework.checkpoint.commit import dump_values, load_values
from framework.checkpoint.plan import describe
from framework.errors import CheckpointError
from framework.loop.ema import EMA
from framework.loop.state import Parts


def flat_of(nested: Any) -> dict[str, Tensor]:
    """All tensors by joined key."""
    return {".".join(path): value for path, value in leaves(nested, ())}


def leaves(nested: Any, path: tuple[str, ...]) -> Iterable[tuple[tuple[str, ...], Tensor]]:
    if isinstance(nested, Tensor):
        yield path, nested
        return
    for key, value in nested.items():
        yield from leaves(value, (*path, key))


def hand_over(saved: Parts, live: Parts, allow: tuple[str, ...] = ()) -> list[str]:
    """What a checkpoint of `saved` makes of `live`, without the files."""
    held = {key: value.detach().clone() for key, value in flat_of(saved.tensors()).items()}
    shared = load_values("shared", dump_values(saved.shared()))
    entries = {key: (value.shape, value.dtype) for key, value in held.items()}
    live.check(shared, allow.__contains__)
    template = live.template(entries, allow.__contains__)
    wanted = flat_of(template)
    assert {key: (value.shape, value.dtype) for key, value in wanted.items()} == entries
    with torch.no_grad():
        for key, value in wanted.items():
            value.copy_(held[key])
    return live.adopt(template, shared)


def assert_alike(one: Parts, other: Parts) -> None:
    first, second = flat_of(one.tensors()), flat_of(other.tensors())
    assert list(first) == list(second)
    for key, value in first.items():
        assert torch.equal(value, second[key]) and value.dtype == second[key].dtype, key
    for name, optimizer in one.optimizers.items():
        theirs = other.optimizers[name].param_groups
        for ours, their in zip(optimizer.param_groups, theirs, strict=True):
            assert {k: v for k, v in ours.items() if k != "params"} == {k: v for k, v in their.items() if k != "params"}


def train(parts: Parts, steps: int = 2, width: int = 4) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        parts.model(torch.randn(5, width, generator=generator)).square().sum().backward()
        for optimizer in parts.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        if parts.ema is not None:
            parts.ema.update()


def net(seed: int = 0, *layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), *layers, nn.Linear(4, 2))


def with_adam(model: nn.Module, **options: Any) -> Parts:
    return Parts(model, {"main": torch.optim.AdamW(model.parameters(), lr=0.1, **options)})


def test_only_what_an_update_changes_is_settled() -> None:
    model = net()
    model[3 - 1].bias.requires_grad_(False)
    model.register_parameter("untrained", nn.Parameter(torch.zeros(3)))
    model.register_buffer("loose", torch.zeros(2), persistent=False)
    optimizer = torch.optim.AdamW([p for name, p in model.named_parameters() if name != "untrained"])
    parts = Parts(model, {"main": optimizer}, ema=EMA(model, 0.9))
    assert parts.tensors_and_settled()[1] >= {"model.0.weight", "ema.0.weight"}
    train(parts)
    tensors, settled = parts.tensors_and_settled()
    others = set(flat_of(tensors)) - settled
    assert others == {
        "model.1.running_mean", "model.1.running_var", "model.1.num_batches_tracked", "model.2.bias",
        "model.untrained", "buffers.loose",
    }  # fmt: skip
    assert {"model.0.weight", "optimizer.main.state.0.weight.exp_avg", "ema.2.weight"} <= settled


def test_the_same_objects_come_again_until_a_tensor_is_replaced() -> None:
    parts = with_adam(net())
    train(parts)
    first = parts.tensors_and_settled()
    train(parts)
    again = parts.tensors_and_settled()
    assert first[0] is again[0] and first[1] is again[1]
    assert "1.running_mean" not in parts.tensors(with_buffers=False)["model"]
    assert parts.tensors() is first[0]

    state = parts.optimizers["main"].state[parts.model[0].weight]  # type: ignore[index]
    state["exp_avg"] = state["exp_avg"].clone()
    assert flat_of(parts.tensors())["optimizer.main.state.0.weight.exp_avg"] is state["exp_avg"]
    parts.model[1].running_mean = torch.ones(4)  # type: ignore[union-attr, index]
    assert torch.equal(flat_of(parts.tensors())["model.1.running_mean"], torch.ones(4))
    parts.model[1].register_buffer("late", torch.ones(1))  # type: ignore[index, operator]
    parts.model.add_module("more", nn.Linear(1, 1))
    assert {"model.1.late", "model.more.weight"} <= set(flat_of(parts.tensors()))
    del parts.model.more
    assert "model.more.weight" not in flat_of(parts.tensors())


class Tied(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Linear(4, 4, bias=False)
        self.outer = nn.Linear(4, 4, bias=False)
        self.outer.weight = self.inner.weight
        self.again = self.inner

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.outer(self.inner(x)))  # type: ignore[no-any-return]


def test_tied_weights_have_each_of_their_names_and_one_set_of_moments() -> None:
    first, second = with_adam(Tied(0)), with_adam(Tied(1))
    train(first)
    flat = describe(first.tensors())
    assert flat.aliases == {"model.outer.weight": "model.inner.weight", "model.again.weight": "model.inner.weight"}
    assert set(first.model.state_dict()) == set(first.tensors()["model"])
    assert [key for key in flat.tensors if key.endswith("exp_avg")] == ["optimizer.main.state.inner.weight.exp_avg"]
    assert hand_over(first, second) == []
    assert second.model.outer.weight is second.model.inner.weight  # type: ignore[union-attr]
    train(first, 1), train(second, 1)
    assert_alike(first, second)


def test_frozen_weights_keep_the_moments_they_have() -> None:
    first, second = with_adam(net(0)), with_adam(net(1))
    train(first)
    for parts in (first, second):
        parts.model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr, operator]
    assert hand_over(first, second) == []
    for parts in (first, second):
        parts.model[0].weight.requires_grad_(True)  # type: ignore[index, union-attr, operator]
    train(first, 1), train(second, 1)
    assert_alike(first, second)


def grouped(seed: int, order: int = 1, rates: tuple[float, float, float] = (0.1, 0.2, 0.3)) -> Parts:
    """Two groups and an empty one, with other rates."""
    model = net(seed)
    groups = [
        {"params": list(model[0].parameters()), "lr": rates[0]},
        {"params": [], "lr": rates[1]},
        {"params": list(model[2].parameters()), "lr": rates[2]},
    ]
    return Parts(model, {"main": torch.optim.AdamW(groups[::order])})


def test_groups_are_matched_by_the_names_of_their_parameters() -> None:
    first = grouped(0)
    train(first)
    for group in first.optimizers["main"].param_groups:
        group["lr"] /= 10
    second = grouped(1, order=-1)
    assert hand_over(first, second) == []
    assert [group["lr"] for group in second.optimizers["main"].param_groups] == [0.03, 0.02, 0.01]
    train(first, 1), train(second, 1)
    assert torch.equal(first.model[0].weight, second.model[0].weight)  # type: ignore[index, arg-type, union-attr]

    third = grouped(1, rates=(0.1, 0.2, 0.5))
    assert hand_over(first, third) == ["optimizer main: lr is now 0.5, was 0.3"]
    assert [group["lr"] for group in third.optimizers["main"].param_groups] == [0.01, 0.02, 0.5]


def test_two_groups_are_not_silently_made_one() -> None:
    first, second = grouped(0), with_adam(net(1))
    train(first)
    second.optimizers["main"].param_groups[0]["params"] = [
        p for name, p in second.model.named_parameters() if not name.startswith("1.")
    ]
    notes = hand_over(first, second)
    assert any("group 0 trains other parameters than before; its options are the config's" in note for note in notes)
    assert sum("is gone" in note for note in notes) == 3
    assert second.optimizers["main"].param_groups[0]["lr"] == 0.1


def test_moments_of_parameters_that_had_none_then_are_dropped() -> None:
    first, second = with_adam(net(0)), with_adam(net(1))
    train(second)
    assert hand_over(first, second) == []
    assert not second.optimizers["main"].state
    train(first), train(second)
    assert_alike(first, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fused", [False, True])
def test_moments_come_back_where_and_as_the_optimizer_keeps_them(dtype: torch.dtype, fused: bool) -> None:
    first, second = (with_adam(net(seed).to(dtype), foreach=not fused, fused=fused) for seed in (0, 1))
    for parts in (first, second):
        for one in parts.model.parameters():
            one.grad = torch.ones_like(one)
    first.optimizers["main"].step()
    state = first.optimizers["main"].state[first.model[0].weight]  # type: ignore[index]
    state["exp_avg"] = state["exp_avg"].double() + 1e-9  # some keep moments wider than weights
    assert hand_over(first, second) == []
    theirs = second.optimizers["main"].state[second.model[0].weight]  # type: ignore[index]
    assert {k: (v.dtype, v.device, v.shape) for k, v in state.items()} == {
        k: (v.dtype, v.device, v.shape) for k, v in theirs.items()
    }
    assert torch.equal(state["exp_avg"], theirs["exp_avg"])


class Odd(torch.optim.SGD):
    """Keeps what belongs to no parameter: in the state under a name, and in its own state dict."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.lookahead = {"steps": 0, "slow": torch.zeros(3)}

    def step(self, closure: Any = None) -> Any:
        self.state["common"]["count"] = self.state["common"].get("count", 0) + 1
        self.state["sum"] = self.state.get("sum", torch.zeros(2)) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["seen"] = state.get("seen", 0) + 1
                state["blocks"] = [torch.full((2,), float(state["seen"])), {"root": torch.tensor(1.5)}]
        self.lookahead = {"steps": self.lookahead["steps"] + 1, "slow": self.lookahead["slow"] + 0.5}
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "lookahead": self.lookahead}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lookahead = state_dict["lookahead"]
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def test_state_that_belongs_to_no_parameter_is_kept() -> None:
    first, second = (Parts(model, {"main": Odd(model.parameters())}) for model in (net(0), net(1)))
    train(first, 3)
    assert hand_over(first, second) == []
    ours, theirs = first.optimizers["main"], second.optimizers["main"]
    assert isinstance(theirs, Odd)
    assert theirs.lookahead["steps"] == 3 and torch.equal(theirs.lookahead["slow"], torch.full((3,), 1.5))
    assert theirs.state["common"] == {"count": 3} and torch.equal(theirs.state["sum"], torch.full((2,), 3.0))
    state = theirs.state[second.model[0].weight]  # type: ignore[index]
    assert state["seen"] == 3 and torch.equal(state["blocks"][0], torch.full((2,), 3.0))
    assert float(state["blocks"][1]["root"]) == 1.5
    assert len(ours.state) == len(theirs.state)
    train(first, 1), train(second, 1)
    assert_alike(first, second)


class Own(nn.Module):
    """A module with state of its own kind."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("value", [{"scale": 2.5, "names": ["a"]}, torch.arange(5), 7])
def test_extra_state_of_modules_is_kept(value: Any) -> None:
    first, second = with_adam(net(0, Own(value))), with_adam(net(1, Own(None)))
    if isinstance(value, Tensor):
        second.model[2].value = torch.zeros(3)  # type: ignore[index, union-attr]
        assert set(first.tensors()["model"]) == set(first.model.state_dict())
    assert hand_over(first, second) == []
    restored = second.model[2].value  # type: ignore[index, union-attr]
    assert torch.equal(restored, value) if isinstance(value, Tensor) else restored == value
    assert with_adam(net(0, Own(1))).tensors(with_buffers=False)["model"].keys() <= first.model.state_dict().keys()


class Packed(nn.Module):
    """A module that saves its weight in another form."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = net(seed)
        self.register_state_dict_post_hook(self._pack)
        self.register_load_state_dict_pre_hook(self._unpack)

    @staticmethod
    def _pack(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}packed"] = state.pop(f"{prefix}inner.0.weight") * 2

    @staticmethod
    def _unpack(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}packed" in state:
            state[f"{prefix}inner.0.weight"] = state.pop(f"{prefix}packed") / 2

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def test_a_model_with_a_state_dict_of_its_own_is_asked_and_given_it() -> None:
    first, second = with_adam(Packed(0)), with_adam(Packed(1))
    train(first)
    tensors, settled = first.tensors_and_settled()
    assert "packed" in tensors["model"] and "model.packed" not in settled and "model.inner.0.bias" in settled
    assert hand_over(first, second) == []
    assert torch.equal(second.model.inner[0].weight, first.model.inner[0].weight)  # type: ignore[index, union-attr]


def test_a_buffer_without_memory_of_its_own_can_be_restored() -> None:
    def parts(seed: int) -> Parts:
        model = net(seed)
        model.register_buffer("mask", torch.full((1, 3), float(seed)).expand(4, 3))
        model.register_buffer("loose", torch.full((1,), float(seed)).expand(5), persistent=False)
        return with_adam(model)

    first, second = parts(0), parts(1)
    assert hand_over(first, second) == []
    assert not second.model.mask.any() and not second.model.loose.any()  # type: ignore[union-attr, operator]


def test_a_model_that_may_differ_takes_what_fits_and_says_what_does_not() -> None:
    model = net(0, nn.Linear(4, 6))
    model[3] = nn.Linear(6, 2)
    first = with_adam(model)
    train(first)

    torch.manual_seed(5)
    other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(2, 2))
    built = {key: value.clone() for key, value in other.state_dict().items()}
    second = with_adam(other)
    notes = hand_over(first, second, allow=("model",))
    assert torch.equal(other[0].weight, first.model[0].weight)  # type: ignore[index, union-attr, arg-type]
    for key in ("2.weight", "3.weight", "4.bias"):
        assert torch.equal(other.state_dict()[key], built[key])
        assert any(note.startswith(f"{key} is not in the checkpoint as it is here") for note in notes)
    moments = second.optimizers["main"].state
    assert other[0].weight in moments and other[2].weight not in moments and other[4].weight not in moments
    train(second)
    assert moments[other[2].weight]["exp_avg"].shape == (8, 4)


def test_a_model_with_fewer_parts_drops_the_rest_only_if_that_is_permitted() -> None:
    first, second = with_adam(net(0, nn.Linear(4, 4))), with_adam(net(0, nn.Identity()))
    train(first)
    with pytest.raises(AssertionError):  # the template does not ask for what is gone; reading would refuse
        hand_over(first, second)
    assert "2.weight of the checkpoint is dropped" in hand_over(first, second, allow=("model",))


def test_parameters_that_change_places_keep_their_own_moments() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = torch.optim.Adam(model.parameters())
    parts = Parts(model, {"main": optimizer})
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    parts.tensors()
    model[0].weight, model[1].weight = model[1].weight, model[0].weight
    tensors = parts.tensors()
    for name in ("0.weight", "1.weight"):
        moment = tensors["optimizer"]["main"]["state"][name]["exp_avg"]
        assert moment is optimizer.state[dict(model.named_parameters())[name]]["exp_avg"]


def test_a_parameter_that_is_not_in_the_model_is_told() -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = Parts(model, {"main": optimizer})
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(CheckpointError, match=r"parameter \[2, 2\] that is not in the model"):
        parts.shared()
