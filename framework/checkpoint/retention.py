"""Which checkpoints may go: a pure decision from what is on disk.

Guarantee: a checkpoint stays when any rule keeps it. The newest good one always stays, and so does the one that was
written last; damaged ones are neither counted nor given up. What was kept for ever stays for ever, whatever arrives
later. A configuration that would delete everything is refused when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from framework.duration import STEPS, Duration
from framework.errors import ConfigError, suggest

if TYPE_CHECKING:
    from framework.checkpoint.manifest import Manifest
    from framework.checkpoint.store import Found

MODES = ("max", "min")
EVALUATION = "eval/"  # what the trainer puts before the names of an evaluation's results
_LOW_IS_GOOD = ("loss", "error", "perplexity")  # a mode that is left out would keep the worst


@dataclass(frozen=True, slots=True)
class Keep:
    """What to keep; the rules add up.

    Args:
        last: The newest ones, at least 1; none keeps all.
        every: For ever: of each multiple of this many steps, the first checkpoint that was saved at or after it.
            Saves that fall due by time rarely hit a multiple.
        best: How many of the best by `metric`. Checkpoints with the results of one and the same evaluation count once,
            the first of them, as long as there are others.
        metric: A name in the manifest's metrics, with or without `eval/`. Values that are no finite numbers, and
            checkpoints without the metric, are never the best.
        mode: Whether the largest (`max`) or the smallest value is the best.

    Raises:
        ValueError: It would delete everything, or means nothing.
    """

    last: int | None = 3
    every: int | None = None
    best: int = 0
    metric: str | None = None
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        for name, lowest in (("last", 1), ("every", 1), ("best", 0)):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise ValueError(f"{name}={value} keeps nothing; it must be at least {lowest}")
        if self.best and self.metric is None:
            raise ValueError(f"best={self.best} needs a metric")
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r} is neither max nor min")

    @classmethod
    def parse(cls, value: Keep | int | Mapping[Any, Any] | None, *, key: str) -> Keep:
        """Reads what users write: a number, nothing, or `{last: 3, every: 1000, best: 3, metric: top1, mode: max}`.

        Args:
            value: None keeps all; a number is `last`. In a mapping `last` is 3 if left out.
            key: The config key it stands under, for error messages.

        Raises:
            ConfigError: It would delete everything, or means nothing; the message names key and value.
        """
        if isinstance(value, Keep):
            return value
        if value is None:
            return cls(last=None)
        if not isinstance(value, Mapping):
            return cls(last=_count(value, key))
        return _parse_rules(value, key)


def _parse_rules(rules: Mapping[Any, Any], key: str) -> Keep:
    known = [field.name for field in fields(Keep)]
    if not rules:
        raise ConfigError(f"{key}={{}} names nothing to keep. Give a number, null to keep all, or {', '.join(known)}.")
    for name in rules:
        if name not in known:
            raise ConfigError(
                f"{key}.{name} is no rule of what to keep: {', '.join(known)}.{suggest(str(name), known)}"
            )
    given: dict[str, Any] = dict(rules)
    others = [name for name in ("every", "best") if given.get(name)]
    if "last" in given:
        if given["last"] is None and others:
            raise ConfigError(
                f"{key}.last=null keeps all, so that {key}.{others[0]}={given[others[0]]!r} means nothing. "
                f"Leave last out (it is {Keep().last}), or give a number."
            )
        given["last"] = None if given["last"] is None else _count(given["last"], f"{key}.last")
    if given.get("every") is not None:
        duration = Duration.parse(given["every"], key=f"{key}.every", allow=(STEPS,))
        given["every"] = int(duration.value)
    if given.get("best") is not None and (given["best"] is False or given["best"] != 0):  # 0 turns the rule off
        given["best"] = _count(given["best"], f"{key}.best")
    _check_metric(given, key)
    return Keep(**{name: value for name, value in given.items() if value is not None or name == "last"})


def _check_metric(given: dict[str, Any], key: str) -> None:
    """The best of what, and in which direction."""
    metric = given.get("metric")
    if metric is not None and (not isinstance(metric, str) or not metric.removeprefix(EVALUATION)):
        raise ConfigError(f"{key}.metric={metric!r} is no name of a metric. Write for example top1.")
    if "mode" in given and given["mode"] not in MODES:
        raise ConfigError(f"{key}.mode={given['mode']!r} must be max or min.{suggest(str(given['mode']), MODES)}")
    if "best" not in given:
        for name in ("metric", "mode"):
            if given.get(name) is not None:
                raise ConfigError(f"{key}.{name}={given[name]!r} means nothing without {key}.best. Give both.")
    if not given.get("best"):
        return
    if metric is None:
        raise ConfigError(
            f"{key}.best={given['best']} does not say by which metric. Give {key}.metric too, for example top1."
        )
    if "mode" not in given and any(part in metric.lower() for part in _LOW_IS_GOOD):
        raise ConfigError(f"{key}.metric={metric!r} is good when it is low. Say so: {key}.mode=min.")


def _count(value: Any, key: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key}={value!r} is no whole number. Give 1 or more, or null to keep all.")
    if value < 1:
        raise ConfigError(f"{key}={value!r} would delete every checkpoint. Give 1 or more, or null to keep all.")
    return value


def expendable(found: Sequence[Found], keep: Keep, *, protected: Collection[int] = ()) -> list[Found]:
    """The checkpoints that no rule keeps. Pure: looks at nothing but its arguments.

    Args:
        found: All published checkpoints, in any order, damaged ones among them.
        keep: The rules.
        protected: Steps that stay whatever the rules say; they count for the rules like any other.

    Returns:
        What may be deleted, newest first; never the newest good one.
    """
    good = sorted((one for one in found if is_good(one)), key=lambda one: one.step, reverse=True)
    if keep.last is None or not good:
        return []
    kept = {one.step for one in good[: keep.last]} | set(protected)
    kept |= {one.step for one in good if one.manifest.pinned}
    kept.add(max(good, key=_arrival).step)
    if keep.every is not None:
        kept |= permanent(good, keep.every)
    kept |= {one.step for one in _best(good, keep)}
    return [one for one in good if one.step not in kept]


def is_good(found: Found) -> bool:
    """Whether nothing is known to be wrong with a checkpoint."""
    return found.header is not None and found.damage is None


def permanent(good: Iterable[Found], every: int) -> set[int]:
    """The steps that `every` keeps: of each span between multiples, the checkpoint that was written first.

    Later ones are written later, so that none of them takes its place: not even after the run went back to an older
    step and came by once more.
    """
    first: dict[int, Found] = {}
    for one in sorted(good, key=_arrival):
        if one.step >= every:
            first.setdefault(one.step // every, one)
    return {one.step for one in first.values()}


def value_of(metrics: Mapping[str, Any], metric: str) -> float | None:
    """A metric as a finite number, or none. `top1` finds `eval/top1` too, and the other way round."""
    for name in (metric, EVALUATION + metric, metric.removeprefix(EVALUATION)):
        if name in metrics:
            value = metrics[name]
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            return float(value) if is_number and math.isfinite(value) else None
    return None


def unknown_metric(found: Iterable[Found], keep: Keep) -> str | None:
    """What to tell the user if checkpoints have metrics, but none has the one that says which is best."""
    if not keep.best or keep.metric is None:
        return None
    names = {name for one in found if one.header is not None for name in one.header.metrics}
    if not names or {keep.metric, EVALUATION + keep.metric, keep.metric.removeprefix(EVALUATION)} & names:
        return None
    return (
        f"No checkpoint has the metric {keep.metric!r}, so none is kept as one of the best {keep.best}. "
        f"There are: {', '.join(sorted(names))}.{suggest(keep.metric, names)}"
    )


def _best(good: Sequence[Found], keep: Keep) -> list[Found]:
    """The best by the metric; the first of an evaluation before any copy of it, then the oldest of equals."""
    if not keep.best or keep.metric is None:
        return []
    seen: set[str] = set()
    ranked = []
    for one in sorted(good, key=lambda one: one.step):
        value = value_of(one.manifest.metrics, keep.metric)
        if value is not None:
            evaluation = repr(sorted(one.manifest.metrics.items()))
            ranked.append((evaluation in seen, -value if keep.mode == "max" else value, one.step, one))
            seen.add(evaluation)
    return [one for *_, one in sorted(ranked, key=lambda entry: entry[:3])[: keep.best]]


def _arrival(found: Found) -> tuple[int, float, int]:
    """Sorts by when a checkpoint was written. Clocks of different hosts are compared only within an attempt."""
    header: Manifest = found.manifest
    return header.attempt, header.created, found.step
