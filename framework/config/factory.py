"""From a checked config to objects: factories, the recipe, the callbacks.

Guarantee: a factory calls its target with plain Python containers, built anew for each call; an error inside it names
the config path, the target, the original type and message, and the line of the user's file, with the original error
as its cause.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from framework.callback import Callback
from framework.config import targets
from framework.config.checks import FACTORIES, named_nodes
from framework.config.composition import Config
from framework.config.targets import ARGS, PARTIAL, TARGET
from framework.errors import BuildError, ConfigError, FrameworkError
from framework.recipe import Recipe


@dataclass(frozen=True)
class Factory:
    """Something that the config describes and that is built later.

    Args:
        path: Its key in the config, for example `data.train`.
        target: What is called.
        kwargs: Plain keyword arguments; nested mappings with a `_target_` are built when the factory is called.
        text: The dotted name of the target as the config has it, for messages; default its qualified name.
    """

    path: str
    target: Callable[..., Any]
    kwargs: dict[str, Any]
    text: str = ""

    def __call__(self, *args: Any, **more: Any) -> Any:
        """Builds it.

        Args:
            args: What the framework supplies, for example the parameters of an optimizer.
            more: Keyword arguments that replace those of the config.

        Raises:
            ConfigError: The arguments are wrong: any error of an optimizer, a schedule, a callback or the recipe's
                constructor, TypeError or ValueError of a model, and arguments that a dataset does not take.
            BuildError: A model failed otherwise, or a dataset failed.
        """
        given = {key: _built(f"{self.path}.{key}", value) for key, value in self.kwargs.items()}
        positional = [*args, *given.pop(ARGS, [])]
        is_partial = given.pop(PARTIAL, False)
        given |= more
        if is_partial:
            return functools.partial(self.target, *positional, **given)
        try:
            return self.target(*positional, **given)
        except FrameworkError:
            raise
        except Exception as error:
            raise _error_kind(self.path, error)(self._failed(error)) from error

    def _failed(self, error: Exception) -> str:
        name = self.text or f"{self.target.__module__}.{self.target.__qualname__}"
        text = f"{self.path}: {name} failed.\n{targets.describe(error)}"
        if _is_outside(error):
            text += f"\n  {name} is defined{targets.where(self.target)}"
        return text


def _built(path: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        if TARGET in value:
            return _one(path, value)()
        return {key: _built(f"{path}.{key}", inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_built(f"{path}.{index}", inner) for index, inner in enumerate(value)]
    return value


def _error_kind(path: str, error: Exception) -> type[FrameworkError]:
    if isinstance(error, TypeError) and _is_outside(error):
        return ConfigError
    section = path.partition(".")[0]
    if section == "data" or (section == "model" and not isinstance(error, (TypeError, ValueError))):
        return BuildError
    return ConfigError


def _is_outside(error: Exception) -> bool:
    """Whether the call never got inside the target, as far as Python can tell."""
    return error.__traceback__ is None or error.__traceback__.tb_next is None


def _factory(config: Config, key: str) -> Any:
    """The factory of a key, a mapping of factories, or none."""
    value: Any = config.values
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    named = named_nodes(key, value) if key in ("optimizer", "data.eval") else None
    if named is not None:
        return {path[len(key) + 1 :]: _one(path, node) for path, node in named.items()}
    return None if value is None else _one(key, value)


def _one(path: str, node: Mapping[str, Any]) -> Factory:
    kwargs = {str(key): value for key, value in node.items() if key != TARGET}
    return Factory(path, targets.locate(path, node[TARGET]), copy.deepcopy(kwargs), node[TARGET])


def build_recipe(config: Config) -> Recipe:
    """The recipe, with its factories handed in. Models and data are not built yet.

    Args:
        config: A config that `check` accepted.

    Raises:
        ConfigError: Its constructor failed, or it made something else.
    """
    node = config.values["recipe"]
    recipe = _one("recipe", node)(**{name: _factory(config, key) for name, key in FACTORIES.items()})
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"recipe._target_={node[TARGET]} made a {type(recipe).__name__}, not a framework.Recipe.")
    return recipe


def build_callbacks(config: Config) -> dict[str, Callback]:
    """The callbacks under their config names, in the order of the config; `callbacks.x: null` means removed.

    Args:
        config: A config that `check` accepted.

    Raises:
        ConfigError: A constructor failed, or made something else.
    """
    callbacks: dict[str, Callback] = {}
    for name, node in (config.values.get("callbacks") or {}).items():
        if node is None:
            continue
        callback = _one(f"callbacks.{name}", node)()
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks.{name}._target_={node[TARGET]} made a {type(callback).__name__}, not a Callback."
            )
        callbacks[str(name)] = callback
    return callbacks
