"""Whether a nested state still consists of the same tensors.

Guarantee: a tensor that was replaced, resized, or given other data (`.data`), a key that came, went or moved: all are
noticed. The values are not looked at. It costs a few passes over lists that run in C, since it is asked at each save.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from framework.checkpoint import compat


class Structure:
    """What a nested state looked like.

    Args:
        tensors: Nested mappings whose leaves are tensors.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._containers = _containers(tensors)
        self._values = _all_values(self._containers)
        self._keys = list(chain.from_iterable(self._containers))
        self._lengths = list(map(len, self._containers))
        self._leaves = [value for value in self._values if isinstance(value, Tensor)]
        # a DTensor is a handle: what can be exchanged behind it is its part
        self._parts = list(map(_part, self._leaves))
        self._is_plain = all(map(operator.is_, self._parts, self._leaves))
        self._pointers = list(map(_POINTER, self._parts))
        self._shapes = list(map(_SHAPE, self._parts))
        self._dtypes = list(map(_DTYPE, self._parts))
        self._wide = [part for part in self._parts if part.dim() > 0]
        self._strides = list(map(_STRIDE, self._wide))

    def holds(self, tensors: Mapping[str, Any]) -> bool:
        """Whether the state is made of the same tensors, with the same memory, shapes and dtypes."""
        if tensors is self._containers[0]:
            containers = self._containers
            if not _same(_all_values(containers), self._values):
                return False
        else:
            containers = _containers(tensors)
            if not _same(list(map(_leaf, _all_values(containers))), list(map(_leaf, self._values))):
                return False
        return (
            list(map(len, containers)) == self._lengths
            and list(chain.from_iterable(containers)) == self._keys
            and self._has_same_memory()
        )

    def _has_same_memory(self) -> bool:
        parts = self._parts
        return (
            (self._is_plain or _same(list(map(_part, self._leaves)), parts))
            and all(map(operator.eq, map(_POINTER, parts), self._pointers))
            and all(map(operator.eq, map(_SHAPE, parts), self._shapes))
            and all(map(operator.is_, map(_DTYPE, parts), self._dtypes))
            and all(map(operator.eq, map(_STRIDE, self._wide), self._strides))
        )


_PLAIN = (Tensor, torch.nn.Parameter)
_POINTER: Any = Tensor.data_ptr
_SHAPE: Any = Tensor.size
_DTYPE: Any = operator.attrgetter("dtype")
_STRIDE: Any = Tensor.stride


def _containers(tensors: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All mappings, the outer ones first."""
    found = [tensors]
    for container in found:  # which grows meanwhile
        found += [value for value in container.values() if _is_container(value)]
    return found


def _all_values(containers: list[Mapping[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(container.values() for container in containers))


def _is_container(value: Any) -> bool:
    kind = type(value)  # asking whether it is a mapping takes long
    return kind is dict or (kind not in _PLAIN and isinstance(value, Mapping))


def _leaf(value: Any) -> Any:
    return None if _is_container(value) else value


def _part(tensor: Tensor) -> Tensor:
    return tensor if type(tensor) in _PLAIN else compat.raw_part(tensor)


def _same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))
