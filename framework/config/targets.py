"""Finding what a `_target_` names, what it accepts, and saying where it fails.

Guarantee: an error in a user's module is shown with its own type, message, file and line, never as "error locating
target"; nothing is called here.
"""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from framework.config.places import built_in_recipes
from framework.errors import ConfigError, suggest

TARGET, PARTIAL, ARGS = "_target_", "_partial_", "_args_"
RESERVED = (TARGET, PARTIAL, ARGS)

_FRAMEWORK = str(Path(__file__).resolve().parents[1]) + os.sep
_RECIPES = str(built_in_recipes()) + os.sep
_LIBRARIES = tuple(
    str(Path(sysconfig.get_paths()[kind]).resolve()) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")
)


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a callable accepts by name.

    Args:
        names: Names of its parameters, in order.
        required: Those without a default.
        is_open: Whether it takes any other name too (`**kwargs`).
    """

    names: tuple[str, ...]
    required: tuple[str, ...]
    is_open: bool

    def without(self, *supplied: str) -> Parameters:
        """These parameters without the ones that the framework supplies."""
        return Parameters(
            tuple(name for name in self.names if name not in supplied),
            tuple(name for name in self.required if name not in supplied),
            self.is_open,
        )


def locate(path: str, target: Any) -> Callable[..., Any]:
    """What `target` names.

    Args:
        path: The config key of the node, for the message.
        target: A dotted name, `module.name` or `module.Class.method`.

    Raises:
        ConfigError: There is no such thing, or its module cannot be imported.
    """
    parts = target.split(".") if isinstance(target, str) else []
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{path}._target_={target!r} is not a dotted name such as torch.optim.SGD.")
    found: Any = None
    for index, part in enumerate(parts):
        name = ".".join(parts[: index + 1])
        try:
            found = importlib.import_module(name) if index == 0 else _step(found, name, part)
        except (Exception, SystemExit) as error:
            if isinstance(error, ModuleNotFoundError) and error.name == name:
                raise ConfigError(_not_found(path, target, parts, index, found)) from error
            raise ConfigError(f"{path}: the _target_ {target} cannot be imported.\n{describe(error)}") from error
    if isinstance(found, ModuleType) or not callable(found):
        raise ConfigError(f"{path}._target_={target} is a {type(found).__name__}, not something that can be called.")
    return found  # type: ignore[no-any-return]


def _step(parent: Any, name: str, part: str) -> Any:
    if hasattr(parent, part):
        return getattr(parent, part)
    if isinstance(parent, ModuleType):
        return importlib.import_module(name)
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _not_found(path: str, target: str, parts: list[str], index: int, parent: Any) -> str:
    if parent is None:
        return f"{path}._target_={target}: there is no module '{parts[0]}' here. Run in the folder that holds it, or install it."
    known = {name for name in dir(parent) if not name.startswith("_")}
    known |= set(getattr(parent, "__all__", ()))  # names that are loaded when first used
    known |= {module.name for module in pkgutil.iter_modules(getattr(parent, "__path__", []))}
    near = suggest(parts[index], known)
    return f"{path}._target_={target}: '{'.'.join(parts[:index])}' has no '{parts[index]}'.{near}"


def parameters(function: Callable[..., Any]) -> Parameters | None:
    """What `function` accepts by name; none if Python cannot tell (some functions written in C)."""
    try:
        listed = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return None
    named = [p for p in listed if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return Parameters(
        tuple(p.name for p in named),
        tuple(p.name for p in named if p.default is p.empty),
        any(p.kind == p.VAR_KEYWORD for p in listed),
    )


def first_parameter(function: Callable[..., Any]) -> str | None:
    """The name of the first parameter that can be given by position."""
    try:
        listed = inspect.signature(function).parameters.values()
    except (ValueError, TypeError):
        return None
    return next((p.name for p in listed if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)), None)


def cooperative_parameters(cls: type, base: type) -> Parameters | None:
    """What a subclass of `base` accepts by name, where `**kwargs` of a constructor is handed on to the next one."""
    names: dict[str, bool] = {}
    for one in cls.__mro__:
        if "__init__" not in vars(one):
            continue
        found = parameters(vars(one)["__init__"])
        if found is None:
            return None
        for name in found.names:
            if name != "self":
                names.setdefault(name, name in found.required)
        if not found.is_open or one is base:
            return Parameters(tuple(names), tuple(name for name, needed in names.items() if needed), found.is_open)
    return Parameters(tuple(names), (), True)


def describe(error: BaseException) -> str:
    """Two lines: the type and message of an error, and the file and line of the user's code it came from."""
    if isinstance(error, SyntaxError):
        message, place = error.msg, f"{shown(error.filename)}:{error.lineno}"
    else:
        try:
            message = str(error)
        except Exception:  # a user's own __str__ may be broken; its type and line still help
            message = "(its message cannot be shown)"
        place = _origin(error)
    kind = type(error).__qualname__
    return f"  {kind}: {message}" + (f"\n  at {place}" if place else "")


def _origin(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    rest = [frame for frame in frames if not frame.filename.startswith((_FRAMEWORK, "<"))]
    chosen = own or [frame for frame in rest if "importlib" not in frame.filename]
    return f"{shown(chosen[-1].filename)}:{chosen[-1].lineno}" if chosen else ""


def _is_users(file: str) -> bool:
    if file.startswith("<"):
        return False
    file = os.path.realpath(file)
    return file.startswith(_RECIPES) or not file.startswith((_FRAMEWORK, *_LIBRARIES))


def where(function: Callable[..., Any]) -> str:
    """` (file:line)` of a definition, or the empty string if it has no source."""
    try:
        source = inspect.getsourcefile(function)
        return f" ({shown(source)}:{inspect.getsourcelines(function)[1]})" if source else ""
    except (OSError, TypeError):
        return ""


def shown(file: str | None) -> str:
    """A path as a reader in the current folder would type it."""
    if not file:
        return "?"
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative
