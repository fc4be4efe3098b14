"""The words of a command line: `key=value`, `+key=value`, `++key=value`, `~key`.

Guarantee: names and folders of a run are taken as typed, never as numbers or booleans; a key that the target accepts
needs no `+`; a key that nothing accepts is refused with the nearest known one.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from framework.config import targets
from framework.config.typed import GROUPS, field_names
from framework.errors import ConfigError, suggest

NODES = ("recipe", "model", "optimizer", "schedule", "data", "callbacks")
SECTIONS = ("seed", *GROUPS, *NODES)
_AS_TYPED = ("run.name", "run.dir", "run.root")
_AS_TYPED_OR_NULL = ("run.init_from", "data.root")
_KEY = re.compile(r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Word:
    """One override.

    Args:
        text: As typed.
        key: The dotted key, or the name of a group.
        literal: The value, where it is taken as typed.
        parsed: Hydra's reading of it, where it is not.
    """

    text: str
    key: str
    literal: str | None = None
    parsed: Override | None = None

    @property
    def value(self) -> Any:
        return self.literal if self.parsed is None else self.parsed.value()

    def is_kind(self, *kinds: OverrideType) -> bool:
        return self.parsed is not None and self.parsed.type in kinds

    def is_group(self, folders: Sequence[Path]) -> bool:
        """Whether it chooses a file of a config group in one of `folders`."""
        if self.parsed is None or isinstance(self.value, dict):
            return False
        return self.key.startswith("hydra/") or any((folder / self.key).is_dir() for folder in folders)


def read(texts: Iterable[str]) -> list[Word]:
    """Reads the overrides of one run.

    Raises:
        ConfigError: One cannot be read, or gives several values.
    """
    words = [_word(text) for text in texts]
    for word in words:
        if word.parsed is not None and word.parsed.is_sweep_override():
            _, _, value = word.text.partition("=")
            raise ConfigError(
                f"{word.text} gives several values. To run one job for each add -m. A list is written "
                f"'{word.key}=[{value}]', text with a comma '{word.key}=\"{value}\"'."
            )
    return words


def jobs(texts: Sequence[str]) -> list[tuple[list[str], list[str]]]:
    """The jobs of a sweep: the cartesian product of all overrides that give several values.

    Returns:
        One pair a job: all its overrides, and those of them that differ between jobs.

    Raises:
        ConfigError: An override cannot be read, or gives no finite list of values.
    """
    choices: list[list[str]] = []
    is_swept: list[bool] = []
    for text in texts:
        match = _KEY.fullmatch(text)
        if match and match[1] == "run.name":
            values = [f"run.name={name}" for name in match[2].split(",")]
        else:
            word = _word(text)
            values = [text]
            if word.parsed is not None and word.parsed.is_sweep_override():
                if not word.parsed.is_discrete_sweep():
                    raise ConfigError(f"{text} is a continuous interval. A sweep needs values: {word.key}=0.1,0.2,0.3")
                key = word.parsed.get_key_element()
                values = [f"{key}={value}" for value in word.parsed.sweep_string_iterator()]
        choices.append(values)
        is_swept.append(len(values) > 1)
    return [
        (list(job), [text for text, swept in zip(job, is_swept, strict=True) if swept])
        for job in itertools.product(*choices)
    ]


def _word(text: str) -> Word:
    match = _KEY.fullmatch(text)
    if match and (match[1] in _AS_TYPED or (match[1] in _AS_TYPED_OR_NULL and _is_one_text(match[2]))):
        return Word(text, match[1], literal=_unquoted(match[2]))
    if match is None and not text.startswith("~") and "=" not in text:
        raise ConfigError(f"{text!r} is no override. Write key=value, +key=value to add, ~key to remove.")
    try:
        parsed = OverridesParser.create().parse_overrides([text])[0]
    except HydraException as error:
        key, _, value = text.partition("=")
        lines = str(error).splitlines()
        reason = lines[1] if lines[0].startswith("Error parsing override") and len(lines) > 1 else lines[0]
        raise ConfigError(
            f"{text!r} cannot be read: {reason}. A value that holds = , ( ) [ ] {{ }} or a colon "
            f"is quoted twice, once for the shell: '{key}=\"{value}\"'"
        ) from error
    return Word(text, parsed.key_or_group, parsed=parsed)


def _is_one_text(value: str) -> bool:
    # Quoted lists and sweeps of paths are left to the parser; a bare comma belongs to a sweep, as everywhere.
    return value != "null" and not (value[:1] in "\"'" and value[-1:] != value[:1]) and "," not in value


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1].replace(f"\\{value[0]}", value[0])
    return value


def check_hydra(words: Iterable[Word], hydra: Any) -> list[str]:
    """Checks `hydra.*` words against Hydra's own config.

    Args:
        words: All words.
        hydra: The composed `hydra` node.

    Returns:
        Notes about those that have no effect here.

    Raises:
        ConfigError: Hydra has no such key.
    """
    from omegaconf import DictConfig, OmegaConf

    notes = []
    for word in words:
        if not word.key.startswith("hydra."):
            continue
        node, parts = hydra, word.key.split(".")[1:]
        for part in parts:
            if not isinstance(node, DictConfig):
                break
            if part not in node:
                if OmegaConf.get_type(node) is not dict:
                    near = suggest(part, [str(key) for key in node])
                    raise ConfigError(f"{word.text}: Hydra has no key '{word.key}'.{near}")
                break
            node = node[part] if not OmegaConf.is_missing(node, part) else None
        if parts[0] != "searchpath":
            notes.append(
                f"{word.text} has no effect: runs live in run.dir, and the working directory is never changed."
            )
    return notes


def check_groups(words: Iterable[Word]) -> None:
    """Checks the words that choose files of config groups.

    Raises:
        ConfigError: One chooses no name, or two choose a recipe.
    """
    recipes = [word.text for word in words if word.key == "recipe"]
    if len(recipes) > 1:
        raise ConfigError(f"{' and '.join(recipes)} choose two recipes. Give one of them.")
    for word in words:
        value = word.value
        names = value if isinstance(value, list) and value else [value]
        if word.is_kind(OverrideType.DEL) or all(isinstance(name, str) for name in names):
            continue
        remove = " To remove one callback write ~callbacks.NAME." if word.key == "callbacks" else ""
        raise ConfigError(
            f"{word.text} must give the name of a file in configs/{word.key}, without .yaml, not {value!r}.{remove}"
        )


def prepared(words: Sequence[Word], base: Mapping[str, Any], notes: list[str]) -> list[str]:
    """The value overrides for Hydra: `++` is put before keys that are accepted but not in the YAML.

    Args:
        words: The words that are neither groups nor taken as typed.
        base: The plain, unresolved config without them.
        notes: Gets one line per word that has no effect.

    Raises:
        ConfigError: A key is in neither the config nor the signature of its target.
    """
    chosen = _targets_of(words)
    texts = []
    for word in words:
        _check_kind(word, base)
        if word.is_kind(OverrideType.DEL) and not _is_there(word, base, words):
            node, _, name = word.key.rpartition(".")
            if node not in chosen:
                raise ConfigError(_nothing_to_remove(word, base))
            notes.append(f"{word.text} has no effect: {node} had no key '{name}' before {chosen[node]} took its place.")
            continue
        if not word.is_kind(OverrideType.CHANGE) or word.key.startswith("hydra."):
            texts.append(word.text)
            continue
        leaves = _leaves(word.key, word.value, base)
        for leaf in leaves:
            if not _is_present(leaf, base):
                _check_accepted(word, leaf, base, chosen, words)
        is_new = not all(_is_present(leaf, base) for leaf in leaves)
        texts.append(f"++{word.text}" if is_new or isinstance(word.value, dict) else word.text)
    return texts


def _targets_of(words: Iterable[Word]) -> dict[str, str]:
    """Targets that the words themselves set, by the path of their node."""
    found: dict[str, str] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key == targets.TARGET:
                    found[path] = str(inner)
                walk(f"{path}.{key}", inner)

    for word in words:
        node, _, last = word.key.rpartition(".")
        if last == targets.TARGET:
            found[node] = str(word.value)
        walk(word.key, word.value)
    return found


def _leaves(key: str, value: Any, base: Mapping[str, Any]) -> list[str]:
    """The keys that an override sets: of a mapping that meets a mapping, each of its own."""
    if isinstance(value, dict) and value and isinstance(_at(key, base), Mapping):
        return [leaf for name, inner in value.items() for leaf in _leaves(f"{key}.{name}", inner, base)]
    return [key]


def _at(key: str, base: Mapping[str, Any]) -> Any:
    node: Any = base
    for part in key.split("."):
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, Mapping):
            node = next((value for name, value in node.items() if str(name) == part), _ABSENT)
        else:
            return _ABSENT
    return node


_ABSENT = object()


def _is_present(key: str, base: Mapping[str, Any]) -> bool:
    return _at(key, base) is not _ABSENT


def _check_accepted(
    word: Word, key: str, base: Mapping[str, Any], chosen: Mapping[str, str], words: Sequence[Word]
) -> None:
    """Raises:
    ConfigError: Nothing accepts `key`."""
    parts = key.split(".")
    if parts[0] in GROUPS:
        if len(parts) == 2 and parts[1] in field_names(parts[0]):
            return
        raise ConfigError(_unknown(word, parts[0], parts[1], field_names(parts[0])))
    if parts[-1] in targets.RESERVED and parts[0] in NODES and len(parts) < 4:
        return
    for size in range(len(parts) - 1, 0, -1):
        path, name = ".".join(parts[:size]), parts[size]
        node = _at(path, base)
        if isinstance(node, str) and "${" in node:
            return  # the key belongs to the node it refers to: Hydra tells
        target = chosen.get(path) or (node.get(targets.TARGET) if isinstance(node, Mapping) else None)
        known = [str(one) for one in node] if isinstance(node, Mapping) else []
        if target is not None:
            function = targets.locate(path, target)
            accepted = _accepted(path, function)
            if name in accepted:
                return
            raise ConfigError(
                _unknown(
                    word, path, name, [*accepted, *known], f" {target}{targets.where(function)} has no such parameter."
                )
            )
        if isinstance(node, Mapping):
            raise ConfigError(_unknown(word, path, name, known))
        if any(other.key == path or other.key.startswith(f"{path}.") for other in words if other is not word):
            return  # added by another word
    if len(parts) == 1 and parts[0] in SECTIONS:
        return
    raise ConfigError(_unknown(word, "", parts[0], [*SECTIONS, *map(str, base)], near=_elsewhere(word.key, base)))


def _elsewhere(name: str, base: Mapping[Any, Any]) -> str:
    """A hint at the sections that hold a key of that name, or the empty string."""
    nodes = ((section, _at(str(section), base)) for section in base)
    found = [f"'{section}.{name}'" for section, node in nodes if isinstance(node, Mapping) and name in node]
    return f" Did you mean {' or '.join(found)}?" if found else ""


def _accepted(path: str, function: Any) -> list[str]:
    if path == "recipe" and isinstance(function, type):
        from framework.recipe import Recipe

        found = targets.cooperative_parameters(function, Recipe)
    else:
        found = targets.parameters(function)
    return list(found.names) if found else []


def _unknown(word: Word, node: str, name: str, known: list[str], reason: str = "", near: str = "") -> str:
    place = f"under '{node}'" if node else "in the config"
    add = "" if reason else f" To add a new key write '+{word.text}'." if node and node not in GROUPS else ""
    return f"{word.text}: there is no key '{name}' {place}.{reason}{suggest(name, known) or near or add}"


def _check_kind(word: Word, base: Mapping[str, Any]) -> None:
    """Raises:
    ConfigError: It adds what is there, or puts a mapping in the place of a list or the other way round."""
    there, value = _at(word.key, base), word.value
    if isinstance(there, list) and isinstance(value, dict):
        raise ConfigError(f"{word.key}={value!r} must be a list, for example '{word.key}=[a,b]', not a mapping.")
    if isinstance(there, Mapping) and isinstance(value, list):
        raise ConfigError(f"{word.key}={value!r} must be a mapping of keys, not a list.")
    if word.is_kind(OverrideType.ADD) and there is not _ABSENT and there is not None and not isinstance(there, Mapping):
        raise ConfigError(
            f"{word.text}: {word.key}={there!r} is there already. Without the plus it is changed: {word.text[1:]}"
        )


def _is_there(word: Word, base: Mapping[str, Any], words: Sequence[Word]) -> bool:
    return _is_present(word.key, base) or any(other.key == word.key for other in words if other is not word)


def _nothing_to_remove(word: Word, base: Mapping[str, Any]) -> str:
    node, _, name = word.key.rpartition(".")
    holder = _at(node, base) if node else base
    known = [str(one) for one in holder] if isinstance(holder, Mapping) else []
    return f"{word.text}: there is no key '{word.key}' to remove.{suggest(name, known)}"
