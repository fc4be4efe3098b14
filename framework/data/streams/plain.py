"""States of datasets as plain values, which a checkpoint can hold and read back without running code.

Guarantee: `decoded(encoded(state))` equals `state`, with the types of its arrays, or `encoded` raises and names the
part that cannot be kept.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import numpy as np
import torch

from framework.errors import DataError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, bytearray)
_ARRAY, _DEQUE, _PAIRS = "~array", "~deque", "~pairs"  # names that stand for what is no plain value


def encoded(value: Any, path: str) -> Any:
    """A state of plain values and tensors only.

    Args:
        value: What `state_dict` gave.
        path: Where it comes from, for the error.

    Raises:
        DataError: A part of it can be no part of a checkpoint.
    """
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        return {_ARRAY: [str(value.dtype), list(value.shape), value.tobytes()]}
    if kind in (list, tuple, set):
        return kind(encoded(one, f"{path}[{index}]") for index, one in enumerate(value))
    if kind is deque:
        return {_DEQUE: [[encoded(one, f"{path}[{index}]") for index, one in enumerate(value)], value.maxlen]}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and not {_ARRAY, _DEQUE, _PAIRS} & value.keys():
            made = {key: encoded(one, f"{path}[{key!r}]") for key, one in value.items()}
            return OrderedDict(made) if kind is OrderedDict else made
        return {_PAIRS: [[encoded(key, path), encoded(one, f"{path}[{key!r:.40}]")] for key, one in value.items()]}
    raise DataError(
        f"{path} is of type {kind.__module__}.{kind.__qualname__}, which cannot be part of a checkpoint. Let the state be "
        "of numbers, strings, bytes, lists, tuples, dicts, arrays and tensors."
    )


def decoded(value: Any) -> Any:
    """What `encoded` was given."""
    kind = type(value)
    if kind in (list, tuple, set):
        return kind(decoded(one) for one in value)
    if not isinstance(value, dict):
        return value
    if value.keys() == {_ARRAY}:
        dtype, shape, content = value[_ARRAY]
        return np.frombuffer(content, dtype=np.dtype(dtype)).reshape(shape).copy()
    if value.keys() == {_DEQUE}:
        return deque((decoded(one) for one in value[_DEQUE][0]), value[_DEQUE][1])
    if value.keys() == {_PAIRS}:
        return {decoded(key): decoded(one) for key, one in value[_PAIRS]}
    return kind((key, decoded(one)) for key, one in value.items())
