"""Where configs and recipes are found: the user's folder first, then the built-in ones.

Guarantee: a user's `./configs` and `./recipes` join the built-in ones, in a source checkout and from an installed
wheel, whether or not `./recipes` has an `__init__.py`. Nothing here imports Hydra or torch, or changes the working
directory.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import framework

_PACKAGE = Path(framework.__file__).resolve().parent


def built_in_configs() -> Path:
    """The folder of the built-in configs: inside the package in a wheel, beside it in a source checkout."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def built_in_recipes() -> Path:
    """The folder of the built-in recipes, beside the package."""
    return _PACKAGE.parent / "recipes"


def user_configs(folder: Path) -> Path | None:
    """`folder/configs`, if it exists and is not the built-in one."""
    own = folder / "configs"
    return own if own.is_dir() and own.resolve() != built_in_configs().resolve() else None


def recipes_found(folder: Path) -> dict[str, list[str]]:
    """The names that `+recipe=` accepts.

    Args:
        folder: The user's folder.

    Returns:
        Sorted names under `"yours"` and `"built-in"`.
    """
    own = user_configs(folder)
    return {"yours": _names(own) if own else [], "built-in": _names(built_in_configs())}


def recipes_listed(folder: Path) -> str:
    """The recipes found, as lines for a message."""
    found = recipes_found(folder)
    lines = [f"  {title}: {', '.join(names)}" for title, names in found.items() if names]
    return "\n".join(lines) or "  (none)"


def _names(configs: Path) -> list[str]:
    top = configs / "recipe"
    return sorted(path.relative_to(top).with_suffix("").as_posix() for path in top.rglob("*.yaml"))


def make_importable(folder: Path) -> None:
    """Puts the user's folder first on the import path and joins its `recipes` with the built-in ones.

    Raises:
        Exception: Whatever the user's `recipes/__init__.py` raises.
    """
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.insert(0, place)
    importlib.invalidate_caches()
    _join_recipes(folder)


def _join_recipes(folder: Path) -> ModuleType:
    # A regular package of the user hides the built-in namespace portion, and an editable install has its own finder,
    # so the search path of the package is stated rather than left to the import system.
    package = importlib.import_module("recipes")
    wanted = [str(path.resolve()) for path in (folder / "recipes", built_in_recipes()) if path.is_dir()]
    package.__path__ = list(dict.fromkeys([*wanted, *getattr(package, "__path__", [])]))
    return package
