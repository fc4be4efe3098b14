"""Checks of a whole config before any data or GPU is touched.

Guarantee: a misspelt key, a wrong type, a value out of range, a `_target_` that cannot be imported or does not accept
its keys, and batch sizes that do not divide are refused here, all of them in one message. Nothing is called or
created.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from framework.callback import Callback
from framework.config import targets
from framework.config.composition import Config
from framework.config.targets import ARGS, PARTIAL, RESERVED, TARGET, Parameters
from framework.config.typed import GROUPS, read_group
from framework.distributed import world_size
from framework.errors import ConfigError, suggest
from framework.recipe import Recipe
from framework.settings import LoaderSettings, ParallelSettings, RunSettings, TrainerSettings

# what the framework hands to the constructor of a recipe: keyword -> the key that describes it
FACTORIES = {
    "model": "model",
    "optimizer": "optimizer",
    "schedule": "schedule",
    "train_data": "data.train",
    "eval_data": "data.eval",
}
_BUILDERS = {"model": "build_model", "optimizer": "build_optimizer", "data.train": "build_train_data"}
_LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class Settings:
    """The typed part of a config, checked."""

    run: RunSettings
    trainer: TrainerSettings
    loader: LoaderSettings
    parallel: ParallelSettings
    seed: int


def check(config: Config) -> Settings:
    """Checks a composed config.

    Args:
        config: What `compose` gave.

    Returns:
        The typed groups.

    Raises:
        ConfigError: Something is wrong; the message lists everything that is.
    """
    values, problems = config.values, list[str]()
    groups = {group: read_group(group, values.get(group), problems) for group in GROUPS}
    seed = _seed(values.get("seed", 0), problems)
    _check_budget(groups["trainer"], problems)
    _check_batches(groups["trainer"], problems)
    _check_recipe(config, problems)
    _check_sections(config, problems)
    _check_rates(values.get("optimizer"), problems)
    if problems:
        raise ConfigError("\n".join(_merged(problems)))
    return Settings(**groups, seed=seed)


def nodes(path: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All mappings with a `_target_` in `value`, outermost first, with their paths."""
    if isinstance(value, Mapping):
        if TARGET in value:
            yield path, value
        for key, inner in value.items():
            yield from nodes(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from nodes(f"{path}.{index}", inner)


def named_nodes(path: str, value: Any) -> dict[str, Any] | None:
    """The entries of a mapping of names to nodes; none if `value` is a node itself or no mapping."""
    is_mapping = isinstance(value, Mapping) and bool(value) and TARGET not in value
    return {f"{path}.{name}": node for name, node in value.items()} if is_mapping else None


def _merged(problems: list[str]) -> list[str]:
    """The problems, where those with the same cause (a module that several targets need) show it once."""
    heads: dict[str, list[str]] = {}
    for problem in dict.fromkeys(problems):
        head, _, cause = problem.partition("\n")
        heads.setdefault(cause or head, []).append(head)
    return ["\n".join([*lines, cause] if cause not in lines else lines) for cause, lines in heads.items()]


def _seed(value: Any, problems: list[str]) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST_SEED:
        problems.append(f"seed={value!r} must be a whole number from 0 to 2**63 - 1.")
        return 0
    return value


def _check_budget(trainer: TrainerSettings | None, problems: list[str]) -> None:
    if trainer and trainer.max_steps is None and trainer.max_epochs is None and trainer.max_time is None:
        problems.append(
            "Nothing says how long to train. Set trainer.max_steps, trainer.max_epochs or trainer.max_time."
        )


def _check_batches(trainer: TrainerSettings | None, problems: list[str]) -> None:
    if trainer is None:
        return
    total, world = trainer.global_batch_size, world_size()
    micro = trainer.micro_batch_size
    unit = world * (micro or 1)
    if total % unit:
        micro_text = f" × trainer.micro_batch_size={micro}" if micro else ""
        near = [str(size) for size in (total // unit * unit, (total // unit + 1) * unit) if size]
        problems.append(
            f"trainer.global_batch_size={total} cannot be divided by {unit} (world size {world}{micro_text}). "
            f"Use {' or '.join(near)}, or another micro-batch size or world size."
        )


def _check_recipe(config: Config, problems: list[str]) -> None:
    node = config.values.get("recipe")
    if not isinstance(node, Mapping) or TARGET not in node:
        problems.append("recipe: the section needs a _target_, the class of the recipe.")
        return
    function = _located("recipe", node, problems)
    if function is None:
        return
    if isinstance(function, type) and not issubclass(function, Recipe):
        problems.append(f"recipe._target_={node[TARGET]} is no subclass of framework.Recipe{targets.where(function)}.")
        return
    found = (
        targets.cooperative_parameters(function, Recipe) if isinstance(function, type) else targets.parameters(function)
    )
    _check_keys(config, "recipe", node, function, found, tuple(FACTORIES), problems)
    _check_nested(config, "recipe", node, problems)
    for key, method in _BUILDERS.items():
        is_own = getattr(function, method, None) is not getattr(Recipe, method)
        if _section(config, key) is None and not is_own:
            problems.append(f"{key} is missing: set {key}._target_, or override {method}() in the recipe.")


def _section(config: Config, key: str) -> Any:
    value: Any = config.values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _check_sections(config: Config, problems: list[str]) -> None:
    for key in ("model", "optimizer", "schedule", "data.train", "data.eval"):
        value = _section(config, key)
        if value is None:
            continue
        named = named_nodes(key, value) if key in ("optimizer", "data.eval") else None
        for path, node in (named or {key: value}).items():
            _check_node(config, path, node, problems, is_given_first=key in ("optimizer", "schedule"))
    data = config.values.get("data")
    if data is not None and not isinstance(data, Mapping):
        problems.append(f"data={data!r} must be a mapping with the keys train and eval.")
    for name, value in (data or {}).items() if isinstance(data, Mapping) else ():
        if name not in ("train", "eval"):
            _check_nested(config, f"data.{name}", value, problems, is_own=True)
    _check_callbacks(config, problems)


def _check_callbacks(config: Config, problems: list[str]) -> None:
    callbacks = config.values.get("callbacks")
    if callbacks is not None and not isinstance(callbacks, Mapping):
        problems.append(f"callbacks={callbacks!r} must be a mapping of names to callbacks.")
        return
    named = {str(name): node for name, node in (callbacks or {}).items() if node is not None}
    for name, node in named.items():
        path = f"callbacks.{name}"
        if not isinstance(node, Mapping) or TARGET not in node:
            near = suggest(name, [other for other in named if other != name])
            problems.append(f"{path}={node!r} has no _target_, the class of the callback.{near}")
            continue
        uri = node.get("tracking_uri")
        if uri is not None and not isinstance(uri, str):
            problems.append(
                f"{path}.tracking_uri={uri!r} must be text, an address such as sqlite:////data/runs/mlflow.db."
            )
        function = _check_node(config, path, node, problems)
        if isinstance(function, type) and not issubclass(function, Callback):
            problems.append(
                f"{path}._target_={node[TARGET]} is no subclass of framework.Callback{targets.where(function)}."
            )


def _check_node(config: Config, path: str, node: Any, problems: list[str], *, is_given_first: bool = False) -> Any:
    """Checks one node and those inside it; returns what its target names, if it can be found."""
    if not isinstance(node, Mapping) or TARGET not in node:
        problems.append(f"{path}={node!r} must be a mapping with a _target_, for example {path}._target_=module.name.")
        return None
    function = _located(path, node, problems)
    if function is not None:
        first = targets.first_parameter(function) if is_given_first else None
        _check_keys(config, path, node, function, targets.parameters(function), (first,) if first else (), problems)
    _check_nested(config, path, node, problems)
    return function


def _check_nested(config: Config, path: str, value: Any, problems: list[str], *, is_own: bool = False) -> None:
    for inner, node in nodes(path, value):
        if inner == path and not is_own:
            continue
        function = _located(inner, node, problems)
        if function is not None:
            _check_keys(config, inner, node, function, targets.parameters(function), (), problems)


def _located(path: str, node: Mapping[str, Any], problems: list[str]) -> Any:
    try:
        return targets.locate(path, node[TARGET])
    except ConfigError as error:
        problems.append(str(error))
        return None


def _check_keys(
    config: Config,
    path: str,
    node: Mapping[str, Any],
    function: Any,
    found: Parameters | None,
    supplied: tuple[str, ...],
    problems: list[str],
) -> None:
    """Compares the keys of a node with the signature of its target."""
    if found is None:
        return
    target, accepted = node[TARGET], found.without(*supplied)
    keys = [str(key) for key in node if key not in RESERVED]
    taken = [key for key in keys if key in supplied]
    if taken:
        problems.append(
            f"{path}: the framework itself supplies {', '.join(taken)} of {target}. Remove it from the config."
        )
    unknown = [key for key in keys if key not in accepted.names and key not in supplied] if not accepted.is_open else []
    old, old_keys = config.replaced.get(path, ("", frozenset[str]()))
    left_over = [key for key in unknown if key in old_keys]
    if left_over:
        removals = " ".join(f"~{path}.{key}" for key in left_over)
        problems.append(
            f"{path}: {', '.join(left_over)} of {old} {'is' if len(left_over) == 1 else 'are'} no parameter of {target}. Add {removals}"
        )
    for key in unknown:
        if key not in left_over:
            near = suggest(key, accepted.names) or f" It accepts: {', '.join(accepted.names) or 'no keys'}."
            problems.append(f"{path}.{key}: {target} has no parameter '{key}'{targets.where(function)}.{near}")
    if not node.get(PARTIAL) and ARGS not in node:
        missing = [name for name in accepted.required if name not in keys]
        if missing:
            problems.append(
                f"{path}: {target} needs {', '.join(missing)}{targets.where(function)}. Set {path}.{missing[0]}=..."
            )


def _check_rates(optimizer: Any, problems: list[str]) -> None:
    for path, node in (named_nodes("optimizer", optimizer) or {"optimizer": optimizer}).items():
        rate = node.get("lr", 0.0) if isinstance(node, Mapping) else 0.0
        is_number = isinstance(rate, (int, float)) and not isinstance(rate, bool)
        if not is_number or not math.isfinite(rate) or rate < 0:
            problems.append(f"{path}.lr={rate!r} must be a finite number, 0 or greater.")
