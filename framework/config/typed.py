"""The typed groups: plain values into the dataclasses of `framework.settings`.

Guarantee: a value is taken as it is or refused by key; nothing is converted silently, except a whole number written
as a float (`1e3`) and a bare number where a duration is expected.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from framework.duration import EPOCHS, SECONDS, STEPS, Duration
from framework.errors import ConfigError, suggest
from framework.settings import LoaderSettings, ParallelSettings, RunSettings, TrainerSettings

T = TypeVar("T")

GROUPS: dict[str, type] = {
    "run": RunSettings,
    "trainer": TrainerSettings,
    "loader": LoaderSettings,
    "parallel": ParallelSettings,
}
CHOICES = {
    "trainer.precision": ("fp32", "bf16", "fp16"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "loader.position": ("auto", "offset", "shards", "stateful", "epoch"),
    "loader.split": ("samples", "own"),
    "loader.on_error": ("raise", "skip", "substitute"),
    "loader.epoch_end": ("carry", "drop"),
    "run.resume": ("auto", "must", "never"),
    "parallel.strategy": ("ddp",),
}
# what `Trainer.allows` is asked about
DIFFERENCES = ("seed", "data", "model", "optimizer", "finished", "local_checkpoints")
DURATIONS: dict[str, tuple[str, ...]] = {
    "trainer.max_time": (SECONDS,),
    "trainer.eval_every": (STEPS, EPOCHS),
    "trainer.timeout": (SECONDS,),
    "loader.timeout": (SECONDS,),
}
# key: (smallest value, whether it is itself allowed, smallest value that is too large)
RANGES: dict[str, tuple[float, bool, float]] = {
    "trainer.max_steps": (1, True, math.inf),
    "trainer.max_epochs": (0, False, math.inf),
    "trainer.global_batch_size": (1, True, math.inf),
    "trainer.micro_batch_size": (1, True, math.inf),
    "trainer.eval_batch_size": (1, True, math.inf),
    "trainer.clip_norm": (0, False, math.inf),
    "trainer.ema_decay": (0, False, 1),
    "trainer.num_threads": (1, True, math.inf),
    "loader.num_workers": (0, True, math.inf),
    "loader.prefetch_factor": (1, True, math.inf),
    "loader.samples_per_epoch": (1, True, math.inf),
    "loader.look_ahead": (0, True, math.inf),
    "loader.worker_restarts": (0, True, math.inf),
}
_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def field_names(group: str) -> list[str]:
    """The keys of a typed group."""
    return [field.name for field in fields(GROUPS[group])]


def read_group(group: str, values: Any, problems: list[str]) -> Any:
    """The dataclass of one group.

    Args:
        group: `run`, `trainer`, `loader` or `parallel`.
        values: The plain mapping of the config, or none for defaults.
        problems: Gets one message per wrong key or value.

    Returns:
        The dataclass, or none if there was a problem.
    """
    before = len(problems)
    if values is not None and not isinstance(values, Mapping):
        problems.append(
            f"{group}={values!r} must be a mapping of keys, for example {group}.{field_names(group)[0]}=..."
        )
        return None
    read: dict[str, Any] = {}
    hints = typing.get_type_hints(GROUPS[group])
    for name, value in (values or {}).items():
        key = f"{group}.{name}"
        if name not in hints:
            near = suggest(str(name), hints) or f" Known: {', '.join(hints)}."
            problems.append(f"{key}: there is no key '{name}' in {group}.{near}")
            continue
        try:
            read[name] = _value(key, value, hints[name])
        except ConfigError as error:
            problems.append(str(error))
    return GROUPS[group](**read) if len(problems) == before else None


def _value(key: str, value: Any, hint: Any) -> Any:
    if value is None and _allows_none(hint):
        return None
    if key in DURATIONS:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str):
            Duration.parse(value, key=key, allow=DURATIONS[key])
    if key in CHOICES and value not in CHOICES[key]:
        allowed = ", ".join(CHOICES[key])
        raise ConfigError(f"{key}={value!r} is not one of {allowed}.{suggest(str(value), CHOICES[key])}")
    value = _typed(key, value, hint)
    if key in RANGES:
        _in_range(key, value)
    for name in value if key == "run.allow" else ():
        if name not in DIFFERENCES:
            raise ConfigError(
                f"{key}=[{name}]: there is no difference of that name.{suggest(name, DIFFERENCES)} "
                f"Known: {', '.join(DIFFERENCES)}."
            )
    return value


def _allows_none(hint: Any) -> bool:
    return hint is Any or type(None) in typing.get_args(hint)


def _typed(key: str, value: Any, hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    if hint is Any or (hint in (bool, str) and isinstance(value, hint)):
        return value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int and is_number and float(value).is_integer():
        return int(value)
    if hint is float and is_number and math.isfinite(value):
        return float(value)
    if typing.get_origin(hint) is list:
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        raise ConfigError(f"{key}={value!r} must be a list of names, for example {key}=[seed].")
    raise ConfigError(f"{key}={value!r} must be {_NAMES[hint]}, not {type(value).__name__}.{_advice(key, value, hint)}")


def _advice(key: str, value: Any, hint: Any) -> str:
    if hint is str and value is not None:
        return f" In a YAML file quote it: '{value}'."
    if isinstance(value, str) and hint in (int, float, bool):
        return f" It is text; a value from the environment is written '{key}=\"${{oc.decode:${{oc.env:NAME}}}}\"'."
    return ""


def _in_range(key: str, value: float) -> None:
    low, included, high = RANGES[key]
    if value < low or (value == low and not included) or value >= high:
        bound = f"at least {low:g}" if included else f"greater than {low:g}"
        bound += f" and smaller than {high:g}" if high < math.inf else ""
        raise ConfigError(f"{key}={value!r} must be {bound}.")
