"""What an optimizer has beside tensors: the options of its groups, counts, and state that belongs to no parameter.

Guarantee: groups are matched by the names of their parameters, whatever their order. An option is the config's where
the config changed since the checkpoint, and the checkpoint's where something else changed it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from framework.loop.leaves import Skeleton, named_parameters

_OWN = ("state", "param_groups")  # what every optimizer's state_dict has


def class_name(optimizer: Optimizer) -> str:
    """Where the class of an optimizer is, for messages and for comparing."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options as plain values."""
    plain = {
        key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
    }
    return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}


def collect(optimizer: Optimizer, skeleton: Skeleton, built: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An optimizer without its tensors by parameter.

    Args:
        optimizer: The live one.
        skeleton: Of the model, for the names.
        built: Options of its groups as the config built them.
    """
    groups = [
        {
            "parameters": [skeleton.name_of(parameter) for parameter in group["params"]],
            "built": options,
            "live": of_group(group),
        }
        for group, options in zip(optimizer.param_groups, built, strict=True)
    ]
    saved = {"class": class_name(optimizer), "groups": groups, "values": {}}
    states: list[Mapping[str, Any]] = [state for state in optimizer.state.values() if isinstance(state, Mapping)]
    if not all(isinstance(value, Tensor) for value in chain.from_iterable(state.values() for state in states)):
        values = {
            key: {item: value for item, value in optimizer.state[parameter].items() if not isinstance(value, Tensor)}
            for key, parameter in named_parameters(optimizer, skeleton)
            if parameter in optimizer.state
        }
        saved["values"] = {key: items for key, items in values.items() if items}
    if other := {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}:
        saved["other"] = other
    if type(optimizer).state_dict is not Optimizer.state_dict:
        saved["more"] = {key: value for key, value in optimizer.state_dict().items() if key not in _OWN}
    return saved


def adopt_other(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Takes over what belongs to no parameter. Call it before the state of the parameters is put in."""
    device = next((parameter.device for group in optimizer.param_groups for parameter in group["params"]), None)
    if more := saved.get("more"):
        optimizer.load_state_dict({**optimizer.state_dict(), **onto(more, device)})
    for key, value in saved.get("other", {}).items():
        optimizer.state[key] = onto(value, device)


def onto(value: Any, device: torch.device | None) -> Any:
    """Values read from a file, with tensors where the optimizer computes; counts stay on the CPU."""
    if isinstance(value, Tensor):
        return value.to(device) if value.dim() else value
    if type(value) in (dict, defaultdict):
        return {key: onto(one, device) for key, one in value.items()}
    return type(value)(onto(one, device) for one in value) if type(value) in (list, tuple) else value


def adopt_groups(
    name: str, optimizer: Optimizer, skeleton: Skeleton, built: Sequence[Mapping[str, Any]], saved: Mapping[str, Any],
    is_scheduled: bool,
) -> list[str]:  # fmt: skip
    """Takes over the options of the groups.

    Args:
        name: Of the optimizer, for messages.
        optimizer: The live one.
        skeleton: Of the model, for the names.
        built: Options of its groups as the config built them.
        saved: From `collect`.
        is_scheduled: Whether a scheduler of torch moves its learning rate.

    Returns:
        Differences between config and checkpoint worth telling.
    """
    notes = []
    waiting: dict[frozenset[str], deque[Mapping[str, Any]]] = defaultdict(deque)
    for group in saved["groups"]:
        waiting[frozenset(group["parameters"])].append(group)
    for index, group in enumerate(optimizer.param_groups):
        alike = waiting[frozenset(skeleton.names[id(parameter)] for parameter in group["params"])]
        if not alike:
            notes.append(
                f"optimizer {name}: group {index} trains other parameters than before; its options are the config's"
            )
            continue
        notes += _adopt_group(name, group, built[index], alike.popleft(), is_scheduled)
    for group in chain.from_iterable(waiting.values()):
        first = ", ".join(group["parameters"][:3])
        notes.append(f"optimizer {name}: the group of {len(group['parameters'])} parameters ({first}, …) is gone")
    return notes


def _adopt_group(
    name: str, group: dict[str, Any], built: Mapping[str, Any], stored: Mapping[str, Any], is_scheduled: bool
) -> list[str]:
    notes = []
    for option, value in stored["live"].items():
        before = stored["built"].get(option)
        if option not in built or built[option] == before:
            _set_option(group, option, value)
            continue
        notes.append(f"optimizer {name}: {option} is now {built[option]}, was {before}")
        if option == "lr" and is_scheduled and before:
            # a scheduler goes on from the live rate, so that moves by as much as the config's did
            _set_option(group, option, value * built["lr"] / before)
    return notes


def _set_option(group: dict[str, Any], option: str, value: Any) -> None:
    if isinstance(group.get(option), Tensor):
        group[option].fill_(value)
    else:
        group[option] = tuple(value) if isinstance(group.get(option), tuple) else value


def merged(now: Any, then: Any, live: Any) -> Any:
    """What the run itself made of a scheduler's state, but what the config changed since is the config's.

    Args:
        now: As this run's config built it.
        then: As the config built it when the checkpoint was written.
        live: As it was in the checkpoint.
    """
    if type(live) is dict and type(now) is dict and type(then) is dict:
        return {
            key: merged(now[key], then[key], value) if key in now and key in then else value
            for key, value in live.items()
        }
    if type(live) is list and type(now) is list and type(then) is list and len(live) == len(now) == len(then):
        return [merged(*items) for items in zip(now, then, live, strict=True)]
    return live if isinstance(live, Tensor) or now == then else now


def like(parameter: Tensor, item: str, shape: torch.Size, dtype: torch.dtype, on_device: bool) -> Tensor:
    """An empty tensor for one item of optimizer state, where the optimizer itself would have put it."""
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # torch keeps the step count on the CPU unless the kernel reads it on the device
    device = torch.device("cpu") if item == "step" and not on_device else parameter.device
    return torch.empty(shape, dtype=dtype, device=device)
