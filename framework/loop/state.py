"""What a checkpoint holds, collected from the live objects and put back into them.

Guarantee: keys carry no wrapper prefixes, optimizer state is matched by parameter name, never by position, and the
learning rate and other options of the optimizer come from the config where the config changed, from the checkpoint
where something else changed them. What is not restored is said.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from framework.errors import StateMismatchError
from framework.loop import options
from framework.loop.ema import EMA
from framework.loop.leaves import Leaves, Skeleton, canonical, extra_key, named_parameters

log = logging.getLogger(__name__)

Entries = Mapping[str, tuple[torch.Size, torch.dtype]]
Allows = Callable[[str], bool]
MODEL, OPTIMIZER = "model", "optimizer"  # of `run.allow`


def _nothing(difference: str) -> bool:
    return False


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
            name: [options.of_group(group) for group in one.param_groups] for name, one in self.optimizers.items()
        }
        self.built_schedulers = {name: copy.deepcopy(one.state_dict()) for name, one in self.schedulers.items()}
        self._leaves = Leaves(self.model, self.optimizers, self.ema)
        self._fresh: set[str] = set()  # names of what a permitted difference leaves as it was built

    @property
    def _skeleton(self) -> Skeleton:
        return self._leaves.skeleton

    def model_tensors(self, with_buffers: bool = True) -> dict[str, Tensor]:
        """Parameters and buffers of the model by canonical name.

        Args:
            with_buffers: Ranks other than 0 leave buffers out of a save: those of replicas are rank 0's.
        """
        return self._leaves.model_tensors(with_buffers)

    def tensors(self, with_buffers: bool = True) -> Mapping[str, Any]:
        """Everything that is a tensor, nested: `model`, `optimizer`, `ema`, and `buffers` that are not persistent."""
        return self.tensors_and_settled(with_buffers)[0]

    def tensors_and_settled(self, with_buffers: bool = True) -> tuple[Mapping[str, Any], frozenset[str]]:
        """`tensors`, and the joined keys of those that nothing but an update changes. The same objects as long as no
        tensor was replaced.
        """
        nested, settled = self._leaves.nested(with_buffers)
        if with_buffers and (extra := {k: v for k, v in self._extra_state().items() if isinstance(v, Tensor)}):
            nested = {**nested, "model": {**nested["model"], **{extra_key(name): one for name, one in extra.items()}}}
        return nested, settled

    def _extra_state(self) -> dict[str, Any]:
        """What modules return as their own kind of state, by name."""
        return {name: module.get_extra_state() for name, module in self._skeleton.extra.items()}

    def shared(self) -> dict[str, Any]:
        """What is no tensor and is the same on all ranks."""
        skeleton = self._skeleton
        return {
            "optimizers": {
                name: options.collect(optimizer, skeleton, self.built_groups[name])
                for name, optimizer in self.optimizers.items()
            },
            "schedulers": {
                name: {"built": self.built_schedulers[name], "live": scheduler.state_dict()}
                for name, scheduler in self.schedulers.items()
            },
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "extra_state": {k: v for k, v in self._extra_state().items() if not isinstance(v, Tensor)},
        }

    # -- from a checkpoint ---------------------------------------------------------------------------------------------

    def check(self, shared: Mapping[str, Any], allows: Allows) -> None:
        """Refuses a checkpoint of another optimizer, before anything is changed.

        Raises:
            StateMismatchError: The names or classes of the optimizers differ.
        """
        saved = {name: state["class"] for name, state in shared["optimizers"].items()}
        live = {name: options.class_name(optimizer) for name, optimizer in self.optimizers.items()}
        if saved != live and not allows(OPTIMIZER):
            raise StateMismatchError(
                f"The checkpoint was written with the optimizer {saved}, this run has {live}. "
                f"Give the run another run.name, or permit a fresh optimizer state with run.allow=[optimizer]."
            )

    def template(self, entries: Entries, allows: Allows = _nothing) -> dict[str, Any]:
        """The tensors to read a checkpoint into: the live ones, and new ones for what does not exist yet.

        Nothing live is touched; `adopt` hands new tensors over once they are filled. What `run.allow` permits to
        differ is read into tensors that are dropped then.

        Args:
            entries: Shape and dtype of every tensor in the checkpoint, by flat key.
            allows: Whether a difference is permitted.
        """
        self._fresh = set()
        nested: dict[str, Any] = {"model": self._template_of_model(entries, allows)}
        optimizer_state: dict[str, Any] = {}
        for name, optimizer in self.optimizers.items():
            if states := self._template_of_optimizer(name, optimizer, entries, allows):
                optimizer_state[name] = {"state": states}
        if allows(OPTIMIZER):
            _add_dropped(optimizer_state, "optimizer.", entries, set(self.optimizers))
        parts = {
            "optimizer": optimizer_state,
            "ema": self._template_of_ema(entries, allows),
            "buffers": self._template_of_buffers(entries),
        }
        return nested | {name: tensors for name, tensors in parts.items() if tensors}

    def _template_of_model(self, entries: Entries, allows: Allows) -> dict[str, Tensor]:
        live = self._leaves.model_tensors()
        tensors = {key: value if _can_be_filled(value) else _new(value) for key, value in live.items()}
        stored = {key.removeprefix("model."): value for key, value in entries.items() if key.startswith("model.")}
        for name in self._skeleton.extra:
            if (key := extra_key(name)) in stored:
                tensors[key] = torch.empty(stored[key][0], dtype=stored[key][1])
        if allows(MODEL):
            self._fresh = {key for key in live if stored.get(key) != (live[key].shape, live[key].dtype)}
            for key in self._fresh:
                del tensors[key]
            dropped = {key: value for key, value in stored.items() if key not in tensors}
            tensors |= {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in dropped.items()}
        return tensors

    def _template_of_optimizer(
        self, name: str, optimizer: Optimizer, entries: Entries, allows: Allows
    ) -> dict[str, dict[str, Tensor]]:
        """New tensors for the moments, by parameter."""
        on_device = {
            id(parameter): bool(group.get("fused") or group.get("capturable"))
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        parameters = dict(named_parameters(optimizer, self._skeleton))
        prefix = f"optimizer.{name}.state."
        states: dict[str, dict[str, Tensor]] = {}
        for flat, (shape, dtype) in entries.items():
            if not flat.startswith(prefix):
                continue
            key, _, item = flat.removeprefix(prefix).rpartition(".")
            if key in parameters and key not in self._fresh:
                parameter = parameters[key]
                state = options.like(parameter, item, shape, dtype, on_device[id(parameter)])
            elif key in self._fresh or allows(MODEL) or allows(OPTIMIZER):
                state = torch.empty(shape, dtype=dtype)
            else:
                continue  # the comparison of keys says that nobody asks for it
            states.setdefault(key, {})[item] = state
        return states

    def _template_of_ema(self, entries: Entries, allows: Allows) -> dict[str, Tensor]:
        """The average; where it was switched off what it is read into is dropped, where it is new there is none."""
        stored = {key.removeprefix("ema."): value for key, value in entries.items() if key.startswith("ema.")}
        live = {canonical(name): value for name, value in self.ema.average.items()} if self.ema is not None else {}
        if self.ema is None or allows(MODEL):
            fitting = {key for key, value in live.items() if stored.get(key) == (value.shape, value.dtype)}
            return {
                key: live[key] if key in fitting else torch.empty(shape, dtype=dtype)
                for key, (shape, dtype) in stored.items()
            }
        return live if stored else {}

    def _template_of_buffers(self, entries: Entries) -> dict[str, Tensor]:
        """Those that the checkpoint has: older ones have none. One that the forward makes anew may have any shape."""
        tensors = {}
        for name, (module, key) in self._skeleton.loose.items():
            if f"buffers.{name}" in entries:
                shape, dtype = entries[f"buffers.{name}"]
                live = module._buffers[key]
                if live is not None and (live.shape, live.dtype) == (shape, dtype) and _can_be_filled(live):
                    tensors[name] = live
                else:
                    device = next((one.device for one in (live, *self.model.parameters()) if one is not None), None)
                    tensors[name] = torch.empty(shape, dtype=dtype, device=device)
        return tensors

    def adopt(self, tensors: Mapping[str, Any], shared: Mapping[str, Any]) -> list[str]:
        """Takes over what a checkpoint held, after its tensors were read into the template.

        Returns:
            Differences between config and checkpoint worth telling.
        """
        notes = self._adopt_model(tensors["model"], shared.get("extra_state", {}))
        gone = [name for name in shared["optimizers"] if name not in self.optimizers]
        notes += [f"optimizer {name} of the checkpoint is dropped" for name in gone]
        for name, optimizer in self.optimizers.items():
            saved = shared["optimizers"].get(name)
            if saved is None or saved["class"] != options.class_name(optimizer):
                notes.append(f"optimizer {name}: starts with fresh state")
                continue
            options.adopt_other(optimizer, saved)
            states = tensors.get("optimizer", {}).get(name, {}).get("state", {})
            for key, parameter in named_parameters(optimizer, self._skeleton):
                items = {**states.get(key, {}), **options.onto(saved["values"].get(key, {}), parameter.device)}
                if items and key not in self._fresh:
                    optimizer.state[parameter] = items
                else:
                    optimizer.state.pop(parameter, None)
            notes += options.adopt_groups(
                name, optimizer, self._skeleton, self.built_groups[name], saved, name in self.schedulers
            )
        for name, scheduler in self.schedulers.items():
            if stored := shared["schedulers"].get(name):
                scheduler.load_state_dict(options.merged(self.built_schedulers[name], stored["built"], stored["live"]))
        notes += self._adopt_scaler(shared["scaler"])
        return notes + self._adopt_buffers(tensors.get("buffers", {})) + self._adopt_ema(tensors.get("ema"))

    def _adopt_model(self, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> list[str]:
        live = self._leaves.model_tensors()
        notes = [f"{key} is not in the checkpoint as it is here; it is as built" for key in sorted(self._fresh)]
        gone = set(tensors) - set(live) - {extra_key(name) for name in self._skeleton.extra}
        notes += [f"{key} of the checkpoint is dropped" for key in sorted(gone)]
        other = {key: value for key, value in tensors.items() if value is not live.get(key) and key not in self._fresh}
        self._skeleton.put(other)
        for name, module in self._skeleton.extra.items():
            if (key := extra_key(name)) in tensors:
                module.set_extra_state(tensors[key])
            elif name in extra:
                module.set_extra_state(extra[name])
            else:
                notes.append(f"{key} is not in the checkpoint; it is as the model was built")
        return notes

    def _adopt_scaler(self, saved: Mapping[str, Any] | None) -> list[str]:
        if self.scaler is not None and saved:
            self.scaler.load_state_dict(dict(saved))
        elif self.scaler is not None:
            return ["the loss scaler is new; it starts from its first scale"]
        elif saved:
            return ["the loss scaler is off now; its saved scale is dropped"]
        return []

    def _adopt_buffers(self, tensors: Mapping[str, Tensor]) -> list[str]:
        notes = []
        for name, (module, key) in self._skeleton.loose.items():
            if name in tensors:
                module._buffers[key] = tensors[name]
            elif module._buffers[key] is not None:
                notes.append(f"buffer {name} is not in the checkpoint; it is as the model was built")
        return notes

    def _adopt_ema(self, stored: Mapping[str, Tensor] | None) -> list[str]:
        if self.ema is None:
            return ["trainer.ema_decay is off now; the saved average of the weights is dropped"] if stored else []
        if not stored:
            self.ema.begin()
            return ["trainer.ema_decay is on now; the average starts from the restored weights"]
        for name, value in self.ema.average.items():
            if stored.get(canonical(name)) is not value:
                value.copy_(dict(self.model.named_parameters())[name].detach())
        return []


def _can_be_filled(tensor: Tensor) -> bool:
    """Whether each of its values has memory of its own, which holds the value as it is."""
    has_own_memory = all(step or size < 2 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return has_own_memory and not tensor.is_conj() and not tensor.is_neg()


def _new(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _add_dropped(nested: dict[str, Any], prefix: str, entries: Entries, known: set[str]) -> None:
    """Adds tensors to read what belongs to optimizers that are not there any more."""
    for flat, (shape, dtype) in entries.items():
        name, _, rest = flat.removeprefix(prefix).partition(".state.")
        if flat.startswith(prefix) and name not in known:
            key, _, item = rest.rpartition(".")
            states = nested.setdefault(name, {"state": {}})["state"]
            states.setdefault(key, {})[item] = torch.empty(shape, dtype=dtype)
