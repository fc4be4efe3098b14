"""What a checkpoint holds, collected from the live objects and put back into them.

Guarantee: keys carry no wrapper prefixes, optimizer state is matched by parameter name, never by position, and the
learning rate and other options of the optimizer come from the config where the config changed, from the checkpoint
where something else changed them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from framework.errors import StateMismatchError
from framework.loop.ema import EMA

log = logging.getLogger(__name__)

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
Entries = Mapping[str, tuple[torch.Size, torch.dtype]]


def canonical(name: str) -> str:
    """A parameter's name without what DDP, torch.compile and activation checkpointing put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


@dataclass
class Parts:
    """The objects whose state makes up a checkpoint.

    Args:
        model: The bare model.
        optimizers: By name; a single one is called `main`.
        scaler: The loss scaler, for fp16.
        ema: The average of the weights, if any.
        schedulers: Schedulers of torch by optimizer name, where the schedule is not a pure function.
        built_groups: Options of each optimizer's groups as the config built them.
        built_schedulers: State of each scheduler as the config built it.
    """

    model: nn.Module
    optimizers: dict[str, Optimizer]
    scaler: GradScaler | None = None
    ema: EMA | None = None
    schedulers: dict[str, Any] = field(default_factory=dict)
    built_groups: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    built_schedulers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.built_groups = {
            name: [_options(group) for group in one.param_groups] for name, one in self.optimizers.items()
        }
        self.built_schedulers = {name: copy.deepcopy(one.state_dict()) for name, one in self.schedulers.items()}
        self._names = {id(parameter): canonical(name) for name, parameter in self.model.named_parameters()}

    def model_tensors(self, with_buffers: bool = True) -> dict[str, Tensor]:
        """Parameters and buffers of the model by canonical name.

        Args:
            with_buffers: Ranks other than 0 leave buffers out of a save: those of replicas are rank 0's.
        """
        state = {canonical(key): value for key, value in self.model.state_dict().items() if isinstance(value, Tensor)}
        if not with_buffers:
            buffers = {canonical(name) for name, _ in self.model.named_buffers()}
            state = {key: value for key, value in state.items() if key not in buffers}
        return state

    def tensors(self, with_buffers: bool = True) -> dict[str, Any]:
        """Everything that is a tensor, nested: `model`, `optimizer`, `ema`, and `buffers` that are not persistent."""
        nested: dict[str, Any] = {"model": self.model_tensors(with_buffers)}
        # under a key of their own: `model` must load into the bare model as it is
        buffers = {name: module._buffers[key] for name, (module, key) in self._loose_buffers().items()}
        buffers = {name: buffer for name, buffer in buffers.items() if buffer is not None}
        if buffers and with_buffers:
            nested["buffers"] = buffers
        optimizer_state: dict[str, Any] = {}
        for name, optimizer in self.optimizers.items():
            states = {
                key: {item: value for item, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
                for key, parameter in self._named_parameters(optimizer)
                if parameter in optimizer.state
            }
            states = {key: items for key, items in states.items() if items}
            if states:
                optimizer_state[name] = {"state": states}
        if optimizer_state:
            nested["optimizer"] = optimizer_state
        if self.ema is not None:
            nested["ema"] = {canonical(name): value for name, value in self.ema.average.items()}
        return nested

    def _loose_buffers(self) -> dict[str, tuple[nn.Module, str]]:
        """Where the buffers are that `state_dict` leaves out; one may be none."""
        return {
            canonical(f"{prefix}.{key}" if prefix else key): (module, key)
            for prefix, module in self.model.named_modules()
            for key in module._buffers
            if key in module._non_persistent_buffers_set
        }

    def shared(self) -> dict[str, Any]:
        """What is no tensor and is the same on all ranks."""
        return {
            "optimizers": {
                name: self._optimizer_options(name, optimizer) for name, optimizer in self.optimizers.items()
            },
            "schedulers": {
                name: {"built": self.built_schedulers[name], "live": scheduler.state_dict()}
                for name, scheduler in self.schedulers.items()
            },
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
        }

    def template(self, entries: Entries) -> dict[str, Any]:
        """The tensors to read a checkpoint into: the live ones, and new ones for optimizer state that does not exist yet.

        The optimizers are not touched; `adopt` hands the new tensors to them once they are filled.

        Args:
            entries: Shape and dtype of every tensor in the checkpoint, by flat key.
        """
        nested = self.tensors()
        optimizer_state: dict[str, Any] = {}
        for name, optimizer in self.optimizers.items():
            on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
            parameters = dict(self._named_parameters(optimizer))
            prefix = f"optimizer.{name}.state."
            states: dict[str, dict[str, Tensor]] = {}
            for flat, (shape, dtype) in entries.items():
                key, _, item = flat.removeprefix(prefix).rpartition(".")
                if flat.startswith(prefix) and key in parameters:
                    states.setdefault(key, {})[item] = _like(parameters[key], item, shape, dtype, on_device)
            if states:
                optimizer_state[name] = {"state": states}
        for part, tensors in (
            ("optimizer", optimizer_state),
            ("ema", self._template_of_ema(entries)),
            ("buffers", self._template_of_buffers(entries)),
        ):
            nested.pop(part, None)
            if tensors:
                nested[part] = tensors
        return nested

    def _template_of_ema(self, entries: Entries) -> dict[str, Tensor]:
        """The average; where it was switched off what it is read into is dropped, where it is new there is none."""
        stored = {key.removeprefix("ema."): value for key, value in entries.items() if key.startswith("ema.")}
        if self.ema is None:
            return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored.items()}
        return {canonical(name): value for name, value in self.ema.average.items()} if stored else {}

    def _template_of_buffers(self, entries: Entries) -> dict[str, Tensor]:
        """Those that the checkpoint has: older ones have none. One that the forward makes anew may have any shape."""
        tensors = {}
        for name, (module, key) in self._loose_buffers().items():
            if f"buffers.{name}" in entries:
                shape, dtype = entries[f"buffers.{name}"]
                live = module._buffers[key]
                if live is not None and (live.shape, live.dtype) == (shape, dtype):
                    tensors[name] = live
                else:
                    device = next((one.device for one in (live, *self.model.parameters()) if one is not None), None)
                    tensors[name] = torch.empty(shape, dtype=dtype, device=device)
        return tensors

    def check(self, shared: Mapping[str, Any], allowed: Callable[[str], bool]) -> None:
        """Refuses a checkpoint of another optimizer, before anything is changed.

        Raises:
            StateMismatchError: The names or classes of the optimizers differ.
        """
        saved = {name: state["class"] for name, state in shared["optimizers"].items()}
        live = {name: _class_name(optimizer) for name, optimizer in self.optimizers.items()}
        if saved != live and not allowed("optimizer"):
            raise StateMismatchError(
                f"The checkpoint was written with the optimizer {saved}, this run has {live}. "
                f"Give the run another run.name, or permit a fresh optimizer state with run.allow=[optimizer]."
            )

    def adopt(self, tensors: Mapping[str, Any], shared: Mapping[str, Any]) -> list[str]:
        """Takes over what a checkpoint held, after its tensors were read into the template.

        Returns:
            Differences between config and checkpoint worth telling.
        """
        notes: list[str] = []
        for name, optimizer in self.optimizers.items():
            saved = shared["optimizers"].get(name)
            if saved is None or saved["class"] != _class_name(optimizer):
                notes.append(f"optimizer {name}: starts with fresh state")
                continue
            states = tensors.get("optimizer", {}).get(name, {}).get("state", {})
            for key, parameter in self._named_parameters(optimizer):
                items = {**states.get(key, {}), **saved["values"].get(key, {})}
                if items:
                    optimizer.state[parameter] = items
            notes += self._adopt_groups(name, optimizer, saved)
        for name, scheduler in self.schedulers.items():
            if stored := shared["schedulers"].get(name):
                scheduler.load_state_dict(_merged(self.built_schedulers[name], stored["built"], stored["live"]))
        if self.scaler is not None and shared["scaler"]:
            self.scaler.load_state_dict(shared["scaler"])
        return notes + self._adopt_buffers(tensors.get("buffers", {})) + self._adopt_ema("ema" in tensors)

    def _adopt_buffers(self, tensors: Mapping[str, Tensor]) -> list[str]:
        notes = []
        for name, (module, key) in self._loose_buffers().items():
            if name in tensors:
                module._buffers[key] = tensors[name]
            elif module._buffers[key] is not None:
                notes.append(f"buffer {name} is not in the checkpoint; it is as the model was built")
        return notes

    def _adopt_ema(self, is_stored: bool) -> list[str]:
        if self.ema is None:
            return ["trainer.ema_decay is off now; the saved average of the weights is dropped"] if is_stored else []
        if is_stored:
            return []
        self.ema.begin()
        return ["trainer.ema_decay is on now; the average starts from the restored weights"]

    def _adopt_groups(self, name: str, optimizer: Optimizer, saved: Mapping[str, Any]) -> list[str]:
        notes = []
        by_names = {tuple(group["parameters"]): group for group in saved["groups"]}
        for index, group in enumerate(optimizer.param_groups):
            names = tuple(self._names[id(parameter)] for parameter in group["params"])
            stored = by_names.get(names)
            if stored is None:
                notes.append(
                    f"optimizer {name}: group {index} trains other parameters than before; its options are the config's"
                )
                continue
            built = self.built_groups[name][index]
            for option, value in stored["live"].items():
                if option in built and built[option] != stored["built"].get(option):
                    notes.append(
                        f"optimizer {name}: {option} is now {built[option]}, was {stored['built'].get(option)}"
                    )
                    if option == "lr" and name in self.schedulers and stored["built"]["lr"]:
                        # a scheduler goes on from the live rate, so that moves by as much as the config's did
                        _set_option(group, option, value * built["lr"] / stored["built"]["lr"])
                else:
                    _set_option(group, option, value)
        return notes

    def _optimizer_options(self, name: str, optimizer: Optimizer) -> dict[str, Any]:
        groups = []
        for index, group in enumerate(optimizer.param_groups):
            names = [self._names[id(parameter)] for parameter in group["params"]]
            groups.append({"parameters": names, "built": self.built_groups[name][index], "live": _options(group)})
        values = {
            key: {item: value for item, value in optimizer.state[parameter].items() if not isinstance(value, Tensor)}
            for key, parameter in self._named_parameters(optimizer)
            if parameter in optimizer.state
        }
        values = {key: items for key, items in values.items() if items}
        return {"class": _class_name(optimizer), "groups": groups, "values": values}

    def _named_parameters(self, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                yield self._names[id(parameter)], parameter


def _class_name(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's options as plain values."""
    plain = {
        key: value.item() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"
    }
    return {key: list(value) if isinstance(value, tuple) else value for key, value in plain.items()}


def _set_option(group: dict[str, Any], option: str, value: Any) -> None:
    if isinstance(group.get(option), Tensor):
        group[option].fill_(value)
    else:
        group[option] = tuple(value) if isinstance(group.get(option), tuple) else value


def _merged(now: Any, then: Any, live: Any) -> Any:
    """What the run itself made of a scheduler's state, but what the config changed since is the config's.

    Args:
        now: As this run's config built it.
        then: As the config built it when the checkpoint was written.
        live: As it was in the checkpoint.
    """
    if type(live) is dict and type(now) is dict and type(then) is dict:
        return {
            key: _merged(now[key], then[key], value) if key in now and key in then else value
            for key, value in live.items()
        }
    if type(live) is list and type(now) is list and type(then) is list and len(live) == len(now) == len(then):
        return [_merged(*items) for items in zip(now, then, live, strict=True)]
    return live if isinstance(live, Tensor) or now == then else now


def _like(parameter: Tensor, item: str, shape: torch.Size, dtype: torch.dtype, on_device: bool) -> Tensor:
    """An empty tensor for one item of optimizer state, where the optimizer itself would have put it."""
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    # torch keeps the step count on the CPU unless the kernel reads it on the device
    device = torch.device("cpu") if item == "step" and not on_device else parameter.device
    return torch.empty(shape, dtype=dtype, device=device)
