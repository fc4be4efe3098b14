"""Options of the AsyncCheckpointCallback that need more than one look.

Guarantee: a value is taken as it was meant or refused by its key, before anything runs.
"""

from __future__ import annotations

from framework.errors import ConfigError, suggest

OVERLAPS = ("auto", "on", "off")


def overlap(value: str | bool, *, key: str) -> str:
    """`on` and `off` without quotes are booleans in YAML."""
    text = {True: "on", False: "off"}[value] if isinstance(value, bool) else value
    if text not in OVERLAPS:
        raise ConfigError(f"{key}={value!r} must be {', '.join(OVERLAPS)}.{suggest(str(value), OVERLAPS)}")
    return text


def keep_local(value: int | None, remote: str | None, *, key: str) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key}.keep_local={value!r} must be a whole number of at least 1, or null.")
    if remote is None:
        raise ConfigError(f"{key}.keep_local={value} means nothing without {key}.remote. Give both, or use {key}.keep.")
    return value
