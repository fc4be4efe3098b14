"""From the words of a command line to one plain, resolved config.

Guarantee: nothing is written to disk and the working directory is not changed; `run.name` and `run.dir` depend on the
words alone, so that the same command names the same run; every error is a `ConfigError`.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.override_parser.types import OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework.config import overrides, targets
from framework.config.places import built_in_configs, make_importable, recipes_found, recipes_listed, user_configs
from framework.errors import ConfigError, suggest

log = logging.getLogger(__name__)

_NAME_BYTES = 200  # file systems allow 255 for one name; temporary names add to it
_user_folder: ContextVar[Path | None] = ContextVar("user_folder", default=None)


def _given(value: Any, then: Any, otherwise: Any) -> Any:
    """`${given:${data.root},A,B}` in a config: A where the key is set, B where it is null."""
    return otherwise if value is None else then


OmegaConf.register_new_resolver("given", _given, replace=True)


@dataclass(frozen=True)
class Config:
    """One composed config.

    Args:
        values: The resolved config as plain Python containers; `run.name` and `run.dir` are always set.
        recipe_name: The name that `+recipe=` chose.
        replaced: Nodes whose `_target_` the command line replaced: path -> (old target, keys it came with).
        notes: What the user should know before the run.
    """

    values: dict[str, Any]
    recipe_name: str
    replaced: Mapping[str, tuple[str, frozenset[str]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def run_dir(self) -> Path:
        return Path(self.values["run"]["dir"])


class _UserFirst(SearchPathPlugin):
    """Puts the user's configs before the built-in ones, in compositions made by this module only."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        folder = _user_folder.get()
        if folder is not None:
            search_path.prepend("user", f"file://{folder}", anchor="main")


def compose(words: Sequence[str] = ()) -> Config:
    """Composes the config that these overrides describe, relative to the current folder.

    Args:
        words: Overrides in Hydra's syntax, for example `["+recipe=toy", "optimizer.lr=0.1"]`.

    Raises:
        ConfigError: The words, the files or their combination are wrong.
    """
    folder = Path.cwd()
    _prepare_imports(folder)
    read = overrides.read(words)
    folders = [path for path in (user_configs(folder), built_in_configs()) if path]
    groups = [word for word in read if word.is_group(folders)]
    overrides.check_groups(groups)
    search = [word.text for word in read if word.key == "hydra.searchpath"]
    values = [word for word in read if word.parsed is not None and word not in groups]
    base = _hydra(folder, [*search, *(word.text for word in groups)], groups, words)
    notes = overrides.check_hydra(read, base.hydra)
    name = _recipe_name(base, read, folder)
    before = _plain(base, resolve=False)
    prepared = overrides.prepared([word for word in values if word.text not in search], before, notes)
    config = base
    if prepared:
        config = _hydra(folder, [*search, *(word.text for word in groups), *prepared], groups, words)
    for word in read:
        if word.literal is not None:
            OmegaConf.update(config, word.key, word.literal, force_add=True)
    notes += _timed_names(config)
    after = _plain(config, resolve=True)
    name = name or str(after["recipe"]["_target_"]).split(".")[-2]
    _name_run(after, name)
    after = {key: after[key] for key in sorted(after, key=_place)}
    added = [word.key for word in values if word.is_kind(OverrideType.ADD, OverrideType.FORCE_ADD)]
    _refuse_unused(after, before, _plain(config, resolve=False), added)
    return Config(after, name, _replaced(before, after), tuple(notes))


def load(run: Path | str) -> Config:
    """The config that a run was started with.

    Args:
        run: A run directory, or a `config.yaml`.

    Raises:
        ConfigError: There is none, or it cannot be read.
    """
    file = Path(run)
    file = file / "config.yaml" if file.is_dir() else file
    try:
        values = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read as the config of a run: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file} is not the config of a run: it holds no mapping.")
    _prepare_imports(Path.cwd())
    name = str((values.get("run") or {}).get("name") or file.resolve().parent.name)
    return Config({str(key): value for key, value in values.items()}, name)


def resolved(config: Config) -> dict[str, Any]:
    """The resolved config as plain containers, a copy."""
    return copy.deepcopy(config.values)


def _prepare_imports(folder: Path) -> None:
    try:
        make_importable(folder)
    except (Exception, SystemExit) as error:
        raise ConfigError(f"The package 'recipes' cannot be imported.\n{targets.describe(error)}") from error


def _hydra(folder: Path, texts: list[str], groups: list[overrides.Word], words: Sequence[str]) -> DictConfig:
    """Hydra's composition, with its errors turned into ours."""
    if _UserFirst not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(_UserFirst)
    token = _user_folder.set(user_configs(folder))
    try:
        with _as_config_errors(), hydra.initialize_config_dir(str(built_in_configs()), version_base="1.3"):
            return hydra.compose("train", overrides=texts, return_hydra_config=True)
    except ConfigError as error:
        _explain_recipe(error, groups, words, folder)
        raise
    finally:
        _user_folder.reset(token)


def _explain_recipe(error: ConfigError, groups: list[overrides.Word], words: Sequence[str], folder: Path) -> None:
    """Raises:
    ConfigError: The error is about the choice of the recipe, said better."""
    recipe = next((word for word in groups if word.key == "recipe"), None)
    if recipe is None:
        return
    cause = error.__cause__
    if isinstance(cause, MissingConfigException) and str(cause.missing_cfg_file).startswith("recipe/"):
        missing = str(cause.missing_cfg_file).removeprefix("recipe/")
        raise ConfigError(f"There is no recipe '{missing}'. Recipes found:\n{recipes_listed(folder)}") from cause
    if recipe.is_kind(OverrideType.CHANGE) and "Could not override 'recipe'" in str(error):
        command = shlex.join(f"+{word}" if word == recipe.text else word for word in words)
        text = f"A recipe is chosen with a plus: python -m framework.train {command}"
        if recipe.value not in itertools.chain(*recipes_found(folder).values()):
            text += f"\nThere is no recipe '{recipe.value}' either. Recipes found:\n{recipes_listed(folder)}"
        raise ConfigError(text) from cause


@contextlib.contextmanager
def _as_config_errors() -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        lines = [str(error).strip()]
        cause = error.__cause__
        if isinstance(cause, OmegaConfBaseException):
            lines.append(str(cause).splitlines()[0])
        raise ConfigError("\n".join(dict.fromkeys(lines))) from error


def _plain(config: DictConfig, *, resolve: bool) -> dict[str, Any]:
    with _as_config_errors():
        bare = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        plain = OmegaConf.to_container(bare, resolve=resolve, throw_on_missing=resolve)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _recipe_name(base: DictConfig, read: list[overrides.Word], folder: Path) -> str:
    """The name of the chosen recipe; empty if the words set `recipe._target_` themselves."""
    chosen = base.hydra.runtime.choices.get("recipe")
    node = OmegaConf.to_container(base, resolve=False).get("recipe")  # type: ignore[union-attr]
    if isinstance(node, dict) and "_target_" not in node and isinstance(node.get("recipe"), dict):
        raise ConfigError(
            f"configs/recipe/{chosen}.yaml must begin with the line '# @package _global_', so that its keys are those of the run."
        )
    if chosen:
        return str(chosen if isinstance(chosen, str) else "-".join(chosen)).replace("/", "-")
    if not node and not any(word.key in ("recipe", "recipe._target_") for word in read):
        raise ConfigError(f"No recipe was chosen. Add +recipe=NAME. Recipes found:\n{recipes_listed(folder)}")
    return ""


def _place(section: str) -> int:
    """Where a section stands in a printed config."""
    order = overrides.SECTIONS
    return order.index(section) if section in order else len(order)


def _timed_names(config: DictConfig) -> list[str]:
    run = OmegaConf.to_container(config, resolve=False).get("run")  # type: ignore[union-attr]
    if not isinstance(run, dict):
        return []
    return [
        f"run.{key} holds the time, so every start makes a new run and none is ever resumed. Leave it out, or give a fixed name."
        for key in ("name", "root", "dir")
        if "${now:" in str(run.get(key))
    ]


def _name_run(values: dict[str, Any], recipe: str) -> None:
    """Fills in `run.name` and `run.dir`.

    Raises:
        ConfigError: The name cannot be one part of a path, or the types are wrong.
    """
    run = values["run"] = values.get("run") if values.get("run") is not None else {}
    if not isinstance(run, dict):
        raise ConfigError(f"run={run!r} must be a mapping of keys, for example run.name=...")
    for key in ("name", "root", "dir"):
        if run.get(key) is not None and not isinstance(run[key], str):
            raise ConfigError(f"run.{key}={run[key]!r} must be text. In a YAML file quote it: '{run[key]}'.")
    name = run.setdefault("name", recipe) if run.get("name") is not None else recipe
    run["name"] = name
    problem = _problem_with_name(name)
    if problem:
        raise ConfigError(
            f"run.name={name!r} cannot be the name of a folder: {problem}. Use letters, digits, '.', '_' and '-'."
        )
    root = os.path.expanduser(run.get("root") or "runs")
    run["root"] = root
    run["dir"] = os.path.expanduser(run.get("dir") or os.path.join(root, name))
    for key in ("root", "dir"):
        if "\0" in run[key]:
            raise ConfigError(f"run.{key}={run[key]!r} holds a zero character.")


def _problem_with_name(name: str) -> str:
    if not name.strip() or name != name.strip():
        return "it is empty, or begins or ends with a space"
    if name in (".", ".."):
        return "it means a folder that exists"
    if "/" in name:
        return "it holds '/' (set run.root or run.dir for a folder elsewhere)"
    if any(ord(letter) < 32 or ord(letter) == 127 for letter in name):
        return "it holds a control character"
    if len(name.encode()) > _NAME_BYTES:
        return f"it is longer than {_NAME_BYTES} bytes"
    return ""


def _refuse_unused(
    values: dict[str, Any], before: dict[str, Any], unresolved: dict[str, Any], added: list[str]
) -> None:
    """Raises:
    ConfigError: A key that no part of the framework reads, and to which nothing in the config refers."""
    text = repr(unresolved)

    def is_referred(name: str) -> bool:
        return any(f"{{{start}{name}{end}" in text for start in ("", ".", "..") for end in "}.[")

    for name in values:
        if name not in overrides.SECTIONS and not is_referred(name):
            raise ConfigError(f"{name}: there is no section of that name.{suggest(name, overrides.SECTIONS)}")
    for key in added:
        section, _, name = key.partition(".")
        if (
            section == "data"
            and name
            and "." not in name
            and name not in ("train", "eval")
            and name not in (before.get("data") or {})
        ):
            node = (values.get("data") or {}).get(name)
            is_used = is_referred(f"data.{name}") or is_referred(name)
            if not is_used and not (isinstance(node, dict) and targets.TARGET in node):
                near = suggest(name, [str(one) for one in values["data"] if one != name])
                raise ConfigError(f"+{key}: nothing in the config refers to {key}, so it would be ignored.{near}")


def _replaced(before: Any, after: Any, path: str = "") -> dict[str, tuple[str, frozenset[str]]]:
    found: dict[str, tuple[str, frozenset[str]]] = {}
    if isinstance(before, dict) and isinstance(after, dict):
        old, new = before.get(targets.TARGET), after.get(targets.TARGET)
        if isinstance(old, str) and "${" not in old and new is not None and old != new:
            found[path] = (old, frozenset(str(key) for key in before))
        for key in before.keys() & after.keys():
            found |= _replaced(before[key], after[key], f"{path}.{key}" if path else str(key))
    return found
