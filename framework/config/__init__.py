"""Configuration: composition, checks, factories. Names are loaded when first used, so that help needs no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from framework.config.checks import Settings as Settings
    from framework.config.checks import check as check
    from framework.config.composition import Config as Config
    from framework.config.composition import compose as compose
    from framework.config.composition import load as load
    from framework.config.composition import resolved as resolved
    from framework.config.diff import differences as differences
    from framework.config.factory import Factory as Factory
    from framework.config.factory import build_callbacks as build_callbacks
    from framework.config.factory import build_recipe as build_recipe

_HOMES = {
    "Config": "composition",
    "Factory": "factory",
    "Settings": "checks",
    "build_callbacks": "factory",
    "build_recipe": "factory",
    "check": "checks",
    "compose": "composition",
    "differences": "diff",
    "load": "composition",
    "resolved": "composition",
}

__all__ = [
    "Config",
    "Factory",
    "Settings",
    "build_callbacks",
    "build_recipe",
    "check",
    "compose",
    "differences",
    "load",
    "resolved",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'framework.config' has no attribute {name!r}")
    return getattr(importlib.import_module(f"framework.config.{_HOMES[name]}"), name)
