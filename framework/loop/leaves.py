"""Which live tensors a run has, and under which names.

Guarantee: names carry no wrapper prefixes, and a weight that several modules share is there under each of its names.
Asking again costs little: what is remembered is the names, never whether the tensors are still the same ones, which is
looked up each time.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from framework.errors import CheckpointError
from framework.loop.ema import EMA

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
EXTRA_STATE = "_extra_state"  # torch's name for what `get_extra_state` returns


def canonical(name: str) -> str:
    """A parameter's name without what DDP, torch.compile and activation checkpointing put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


class Skeleton:
    """The modules of a model and the names of what they hold.

    Args:
        model: The bare model.

    Attributes:
        modules: Every module under each of its canonical names.
        names: The first name of each parameter, by its id.
        loose: Where the buffers are that `state_dict` leaves out, by name; one may be none.
        extra: The modules that have state of their own kind, by name.
        is_plain: Whether `state_dict` gives just the parameters and buffers; else it is asked each time.
    """

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_modules(remove_duplicate=False))
        self.model = model
        self.modules = [(canonical(name), module) for name, module in named]
        self.names = {id(parameter): canonical(name) for name, parameter in model.named_parameters()}
        self._children = [module._modules for _, module in named]
        self._known = self._all_children()
        self.extra = {name: module for name, module in self.modules if _has_extra_state(module)}
        self.is_plain = all(_is_plain(module) for _, module in named)
        self.loose: dict[str, tuple[nn.Module, str]] = {}
        self._holders: list[dict[str, Any]] = []
        self._keys: list[str] = []
        self._is_buffer: list[bool] = []
        self._count()
        self._parameters = self._all_parameters()  # an id is a name as long as its object lives

    def is_current(self) -> bool:
        """Whether the model still has the same modules, and these the same parameters under the same names."""
        return (
            _same(self._all_children(), self._known)
            and list(chain.from_iterable(self._holders)) == self._raw_keys
            and _same(self._all_parameters(), self._parameters)
        )

    def name_of(self, parameter: nn.Parameter) -> str:
        """The first name of a parameter.

        Raises:
            CheckpointError: It is not in the model.
        """
        try:
            return self.names[id(parameter)]
        except KeyError:
            raise CheckpointError(
                f"An optimizer trains a parameter {list(parameter.shape)} that is not in the model, so its state has no "
                f"name. Put the parameter into the model, or take it out of the optimizer."
            ) from None

    def values(self) -> list[Tensor | None]:
        """Parameters and buffers, in a fixed order, with what is none."""
        return list(chain.from_iterable(holder.values() for holder in self._holders))

    def named(self, values: list[Tensor | None], with_buffers: bool) -> dict[str, Tensor]:
        """What `state_dict` holds, by canonical name.

        Args:
            values: From `values`.
            with_buffers: Whether buffers are wanted.
        """
        if not self.is_plain:
            return self._asked(with_buffers)
        return {
            key: value
            for key, value, is_buffer in zip(self._keys, values, self._is_buffer, strict=True)
            if value is not None and key and (with_buffers or not is_buffer)
        }

    def put(self, tensors: Mapping[str, Tensor]) -> None:
        """Gives the model tensors that are not its own: those that its `state_dict` made, or that replace a buffer."""
        if not self.is_plain:
            raw = {canonical(key): key for key in self.model.state_dict()}
            self.model.load_state_dict({raw[key]: value for key, value in tensors.items() if key in raw}, strict=False)
            return
        holders = chain.from_iterable([holder] * len(holder) for holder in self._holders)
        for holder, raw_key, key in zip(holders, self._raw_keys, self._keys, strict=True):
            if key in tensors and isinstance(holder[raw_key], nn.Parameter):
                holder[raw_key].detach().copy_(tensors[key])
            elif key in tensors:
                holder[raw_key] = tensors[key]

    def _count(self) -> None:
        """Names everything that the modules hold; of a buffer that is not persistent the name is empty."""
        self._raw_keys: list[str] = []
        for prefix, module in self.modules:
            for holder, is_buffer in ((module._parameters, False), (module._buffers, True)):
                self._holders.append(holder)  # also an empty one, which may be filled later
                self._raw_keys += holder
                for key in holder:
                    name = f"{prefix}.{key}" if prefix else key
                    is_loose = is_buffer and key in module._non_persistent_buffers_set
                    if is_loose:
                        self.loose.setdefault(name, (module, key))
                    self._keys.append("" if is_loose else name)
                    self._is_buffer.append(is_buffer)

    def _asked(self, with_buffers: bool) -> dict[str, Tensor]:
        left_out = {extra_key(name) for name in self.extra}
        if not with_buffers:
            left_out |= {canonical(name) for name, _ in self.model.named_buffers()}
        state = {canonical(key): value for key, value in self.model.state_dict(keep_vars=True).items()}
        return {key: value for key, value in state.items() if isinstance(value, Tensor) and key not in left_out}

    def _all_parameters(self) -> list[Any]:
        return list(chain.from_iterable(holder.values() for holder in self._holders[::2]))

    def _all_children(self) -> list[Any]:
        return list(chain.from_iterable(children.values() for children in self._children))


def extra_key(name: str) -> str:
    """The key of a module's own kind of state in `state_dict`."""
    return f"{name}.{EXTRA_STATE}" if name else EXTRA_STATE


def _is_plain(module: nn.Module) -> bool:
    kind = type(module)
    return (
        kind.state_dict is nn.Module.state_dict
        and kind._save_to_state_dict is nn.Module._save_to_state_dict
        and not module._state_dict_hooks
        and not module._state_dict_pre_hooks
    )


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(operator.is_, one, other))


def _same_tensors(one: list[Any], other: list[Any]) -> bool:
    """Whether all tensors are the same ones; a count that is a number may have moved on."""
    if len(one) != len(other):
        return False
    changed = [pair for pair in zip(one, other, strict=True) if pair[0] is not pair[1]]
    return not any(isinstance(value, Tensor) for pair in changed for value in pair)


@dataclass(slots=True)
class _Known:
    """The last answer, and the very objects it was made of."""

    values: list[Any]
    nested: dict[str, Any]
    settled: frozenset[str]


class Leaves:
    """The tensors of model, optimizers and average.

    Args:
        model: The bare model.
        optimizers: By name.
        ema: The average of the weights, if any.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[str, Optimizer], ema: EMA | None) -> None:
        self._model = model
        self._optimizers = optimizers
        self._ema = ema
        self._ema_keys = {name: canonical(name) for name in ema.average} if ema is not None else {}
        self._skeleton = Skeleton(model)
        self._known: dict[bool, _Known] = {}

    @property
    def skeleton(self) -> Skeleton:
        """The model's modules as they are now."""
        if not self._skeleton.is_current():
            self._skeleton = Skeleton(self._model)
            self._known = {}
        return self._skeleton

    def model_tensors(self, with_buffers: bool = True) -> dict[str, Tensor]:
        """Parameters and buffers of the model by canonical name."""
        skeleton = self.skeleton
        return skeleton.named(skeleton.values(), with_buffers)

    def nested(self, with_buffers: bool = True) -> tuple[dict[str, Any], frozenset[str]]:
        """Everything that is a tensor, and what of it is settled. The same objects as long as nothing was replaced.

        Args:
            with_buffers: Whether buffers of the model are wanted.

        Returns:
            `model`, `optimizer`, `ema` and `buffers` (which are not persistent), nested; and the joined keys of
            tensors that nothing but an update changes: trained parameters, their moments, their averages.
        """
        skeleton = self.skeleton
        values: list[Any] = skeleton.values()
        num_held = len(values)
        for optimizer in self._optimizers.values():
            values += optimizer.state
            values += chain.from_iterable(map(_values, optimizer.state.values()))
            values += chain.from_iterable(group["params"] for group in optimizer.param_groups)
        if self._ema is not None:
            values += self._ema.average.values()
        asked = None if skeleton.is_plain else skeleton.named([], with_buffers)
        if asked is not None:
            values += asked.values()
        known = self._known.get(with_buffers)
        if known is None or not _same_tensors(values, known.values):
            held = skeleton.named(values[:num_held], with_buffers) if asked is None else asked
            known = _Known(values, self._build(skeleton, held, with_buffers), frozenset())
            known.settled = self._settled(skeleton, known.nested)
            self._known[with_buffers] = known
        return known.nested, known.settled

    def _build(self, skeleton: Skeleton, held: dict[str, Tensor], with_buffers: bool) -> dict[str, Any]:
        nested: dict[str, Any] = {"model": held}
        # under a key of their own: `model` must load into the bare model as it is
        buffers = {name: module._buffers[key] for name, (module, key) in skeleton.loose.items()}
        buffers = {name: buffer for name, buffer in buffers.items() if buffer is not None}
        if buffers and with_buffers:
            nested["buffers"] = buffers
        optimizer_state: dict[str, Any] = {}
        for name, optimizer in self._optimizers.items():
            states = {
                key: {item: value for item, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
                for key, parameter in named_parameters(optimizer, skeleton)
                if parameter in optimizer.state
            }
            if states := {key: items for key, items in states.items() if items}:
                optimizer_state[name] = {"state": states}
        if optimizer_state:
            nested["optimizer"] = optimizer_state
        if self._ema is not None:
            nested["ema"] = {self._ema_keys[name]: value for name, value in self._ema.average.items()}
        return nested

    def _settled(self, skeleton: Skeleton, nested: dict[str, Any]) -> frozenset[str]:
        trained = {
            id(parameter)
            for optimizer in self._optimizers.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        }
        keys = [f"model.{key}" for key, value in nested["model"].items() if id(value) in trained]
        for name, optimizer in self._optimizers.items():
            states = nested.get("optimizer", {}).get(name, {"state": {}})["state"]
            for key, parameter in named_parameters(optimizer, skeleton):
                if id(parameter) in trained:
                    keys += [f"optimizer.{name}.state.{key}.{item}" for item in states.get(key, ())]
        keys += [f"ema.{key}" for key in nested.get("ema", ())]
        return frozenset(keys)


def named_parameters(optimizer: Optimizer, skeleton: Skeleton) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of an optimizer by their names in the model, in its order."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield skeleton.name_of(parameter), parameter


def _values(state: Any) -> Any:
    return state.values() if isinstance(state, Mapping) else ()
