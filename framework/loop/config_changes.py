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

ABSENT = object()  # the value of a key that is not there
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
        log.info("config: %s when the run began", words(key, before, now))


def changed(saved: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of now that differ from those of the run's first attempt, `None` for keys that are gone.

    It is empty if the first ones are not known.
    """
    try:
        return {key: None if now is ABSENT else now for key, (_, now) in _compare(saved, config).items()}
    except _UNREADABLE:
        return {}


def _compare(saved: Path, config: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """By dotted key the value of the run's first attempt and that of now, where they differ, or `ABSENT`."""
    content = yaml.safe_load(saved.read_text()) or {}
    if not isinstance(content, Mapping):
        raise ValueError("it holds no mapping")
    before, now = flatten(content), flatten(config)
    keys = dict.fromkeys([*before, *now])
    both = {key: (before.get(key, ABSENT), now.get(key, ABSENT)) for key in keys}
    return {key: (former, present) for key, (former, present) in both.items() if former != present}


def words(key: str, before: Any, now: Any) -> str:
    """What became of a key: `a.b is now 2, was 1`. A value may be `ABSENT`."""
    present = "no longer set" if now is ABSENT else f"now {now!r:.100}"
    former = "not set" if before is ABSENT else f"{before!r:.100}"
    return f"{key} is {present}, was {former}"


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as one mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
