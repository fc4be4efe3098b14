"""Which keys differ between the configs of two runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ABSENT = "(absent)"


def flat(values: Any, path: str = "") -> dict[str, Any]:
    """A nested config as `dotted.key -> value`; lists are values."""
    if isinstance(values, Mapping) and values:
        merged: dict[str, Any] = {}
        for key, value in values.items():
            merged |= flat(value, f"{path}.{key}" if path else str(key))
        return merged
    return {path: values}


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys whose values differ, sorted.

    Args:
        first: A plain config.
        second: Another.

    Returns:
        Pairs of values; `"(absent)"` stands for a key that one of them lacks.
    """
    left, right = flat(first), flat(second)
    found = {}
    for key in sorted(left.keys() | right.keys()):
        pair = (left.get(key, _ABSENT), right.get(key, _ABSENT))
        if pair[0] != pair[1] or type(pair[0]) is not type(pair[1]):
            found[key] = pair
    return found
