"""What differs between the config of this attempt and that of the run's first.

Guarantee: nothing is changed, and nothing else depends on the answer: a `config.yaml` that cannot be read costs the
comparison alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

log = logging.getLogger(__name__)

_UNREADABLE = (OSError, ValueError, RecursionError, yaml.YAMLError)


def announce(saved: Path, config: Mapping[str, Any]) -> None:
    """Says which keys differ from the run's first attempt."""
    try:
        differing = _compare(saved, config)
    except _UNREADABLE as error:
        why = " ".join(str(error).split())
        log.warning("config: what changed since the run began is not known: %s cannot be read: %s", saved, why)
        return
    for key, (before, now) in differing.items():
        log.info("config: %s is now %r, was %r when the run began", key, now, before)


def changed(saved: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of now that differ from those of the run's first attempt; none if that is not known."""
    try:
        return {key: now for key, (_, now) in _compare(saved, config).items()}
    except _UNREADABLE:
        return {}


def _compare(saved: Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By dotted key the value of the run's first attempt and that of now, where they differ."""
    content = yaml.safe_load(saved.read_text()) or {}
    if not isinstance(content, Mapping):
        raise ValueError("it holds no mapping")
    before, now = flatten(content), flatten(config)
    keys = dict.fromkeys([*before, *now])
    return {key: (before.get(key), now.get(key)) for key in keys if before.get(key) != now.get(key)}


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
