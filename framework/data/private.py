"""Random generators that a dataset or a transform keeps for itself, so that they too belong to the sample.

Guarantee: generators that can be found are seeded per sample, like the default ones; those that are found and cannot be
seeded are named. Looking for them calls no code of the dataset, and is bounded.

They are looked for in attributes, slots, lists, mappings, partials, closures, defaults of functions, class attributes,
and in what functions outside of libraries take from their module.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import random
import sysconfig
import types
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from framework.data.seeding import derive

MOST_OBJECTS = 10_000
MOST_ITEMS = 100  # of one list or mapping: a million paths hold no generator
MOST_DEPTH = 12

_NUMPY = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_LEAVES = (
    str, bytes, bytearray, int, float, complex, type(None), type, types.ModuleType, torch.Tensor, np.ndarray, np.generic,
    torch.dtype, torch.device, PurePath, range, types.CodeType, types.BuiltinFunctionType, types.FrameType,
)  # fmt: skip
_LIBRARIES = tuple(
    os.path.join(os.path.realpath(path), "")
    for path in (
        *(sysconfig.get_path(key) for key in ("stdlib", "purelib", "platlib")),
        str(PurePath(__file__).parents[1]),
    )
)
_IN_A_SET = "{…}"
_MASK = 0xFFFFFFFFFFFFFFFF


class Generators:
    """The private generators of some objects.

    Args:
        roots: Datasets, transforms, functions, by the names that they have in messages.

    Attributes:
        unseeded: Those that cannot be seeded, in words.
    """

    def __init__(self, **roots: Any) -> None:
        self._roots = roots
        self._found: dict[int, tuple[Any, int]] = {}  # with a number of its own, by id
        self._names: set[str] = set()
        self.unseeded: list[str] = []
        self.look()

    def __bool__(self) -> bool:
        return bool(self._found)

    def look(self) -> bool:
        """Looks again; returns whether there are more than before. One may be made when it is first used."""
        before = len(self._found)
        default = {id(random._inst), id(np.random.mtrand._rand), id(torch.default_generator)}  # type: ignore[attr-defined]
        self.unseeded = []
        for name, generator in _walk(self._roots):
            if id(generator) in default:
                continue
            if problem := _problem(generator, name):
                self.unseeded.append(f"{name} ({problem})")
            elif id(generator) not in self._found:
                while name in self._names:
                    name += "'"
                self._names.add(name)
                # By its place, not by the order in which they were found: that may differ from process to process.
                self._found[id(generator)] = generator, derive(0, "generator", name)
        return len(self._found) > before

    def seed(self, key: int) -> None:
        """Seeds all of them for one sample, each differently.

        Args:
            key: From `seeding.sample_key`.
        """
        for generator, number in self._found.values():
            _seed(generator, _next_key(key ^ number))

    def state(self) -> list[Any]:
        """Where they are now, for `restore`."""
        return [_state(generator) for generator, _ in self._found.values()]

    def restore(self, state: list[Any]) -> None:
        """Puts them back to where they were. Those that were found later are left alone."""
        for (generator, _), one in zip(self._found.values(), state, strict=False):
            _set_state(generator, one)


def unseeded(dataset: Any) -> list[str]:
    """The random generators of a dataset that cannot be seeded, by where they are and why."""
    return Generators(dataset=dataset).unseeded


def _next_key(key: int) -> int:
    """The next output of splitmix64."""
    key = (key + 0x9E3779B97F4A7C15) & _MASK
    mixed = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


# -- one generator ---------------------------------------------------------------------------------------------------


def _problem(generator: Any, name: str) -> str:
    """Why it cannot be seeded, or nothing."""
    if _IN_A_SET in name:
        return "a set has another order in each process: keep it in a list"
    if isinstance(generator, random.SystemRandom):
        return "random.SystemRandom takes its numbers from the operating system"
    bits = _bits(generator)
    if bits is None or isinstance(bits, _NUMPY):
        return ""
    kind = f"{type(bits).__module__}.{type(bits).__qualname__}"
    return f"a numpy {type(generator).__name__} over {kind}, which is none of numpy's own"


def _bits(generator: Any) -> Any:
    """The bit generator below one of numpy's."""
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator
    return generator._bit_generator if isinstance(generator, np.random.RandomState) else None


def _seed(generator: Any, key: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(key & 0xFFFFFFFF)
    elif isinstance(generator, random.Random):
        generator.seed(key)
    elif isinstance(generator, np.random.RandomState) and isinstance(generator._bit_generator, np.random.MT19937):
        generator.seed(key & 0xFFFFFFFF)  # forgets a second normal number that was kept, too
    else:
        bits = _bits(generator)
        if isinstance(bits, np.random.PCG64 | np.random.PCG64DXSM):  # the usual ones; a new one takes ten times as long
            place: Any = {"state": key << 64 | _next_key(key), "inc": _next_key(key ^ 1) << 1 | 1}
            bits.state = {"bit_generator": type(bits).__name__, "state": place, "has_uint32": 0, "uinteger": 0}
        else:
            bits.state = type(bits)(key).state
        if isinstance(generator, np.random.RandomState):
            generator.set_state({**generator.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0})


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator | np.random.RandomState):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


# -- where they may be -----------------------------------------------------------------------------------------------


def _walk(roots: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every generator that can be reached, with its place; the near ones first."""
    waiting = deque((name, value, 0) for name, value in roots.items())
    seen: dict[int, Any] = {}  # keeps what it has seen, so that no id comes twice
    while waiting and len(seen) < MOST_OBJECTS:
        name, value, depth = waiting.popleft()
        if id(value) in seen or isinstance(value, _LEAVES):
            continue
        seen[id(value)] = value
        if isinstance(value, _KINDS):
            yield name, value
        elif depth < MOST_DEPTH:
            with contextlib.suppress(RuntimeError):  # another thread changes it, so it is no place for generators
                waiting.extend([(f"{name}{label}", child, depth + 1) for label, child in _children(value)])


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{key!r:.40}]", child) for key, child in itertools.islice(value.items(), MOST_ITEMS))
    elif isinstance(value, set | frozenset):
        yield from ((_IN_A_SET, child) for child in itertools.islice(value, MOST_ITEMS))
    elif isinstance(value, list | tuple | deque):
        yield from ((f"[{index}]", child) for index, child in enumerate(itertools.islice(value, MOST_ITEMS)))
    elif isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), ("", value.keywords))
    elif isinstance(value, types.MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, types.FunctionType):
        yield from _of_function(value)
    if not isinstance(value, types.FunctionType | types.MethodType):
        yield from _of_object(value)


def _of_object(value: Any) -> Iterator[tuple[str, Any]]:
    """Attributes, slots, class attributes, and what its methods use; properties are not asked."""
    with contextlib.suppress(AttributeError):  # it may have slots alone
        yield from ((f".{name}", child) for name, child in list(object.__getattribute__(value, "__dict__").items()))
    for kind in type(value).__mro__:
        if kind.__module__ == "builtins":
            continue
        for name, member in list(vars(kind).items()):
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield f".{name}", member.__get__(value)
                except AttributeError:
                    continue
            elif isinstance(member, types.FunctionType):
                yield from _of_function(member)
            elif isinstance(member, staticmethod | classmethod) and isinstance(member.__func__, types.FunctionType):
                yield from _of_function(member.__func__)
            elif isinstance(member, _KINDS):
                yield f".{name}", member


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield f".<{name}>", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield ".<defaults>", function.__defaults__
    yield ".<defaults>", function.__kwdefaults__
    if _is_of_a_library(function.__code__.co_filename):
        return  # what it keeps for itself is no part of the dataset
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield f".<{name}>", function.__globals__[name]


@functools.lru_cache(maxsize=4096)
def _is_of_a_library(file: str) -> bool:
    return os.path.realpath(file).startswith(_LIBRARIES)


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that code may take from its module, in functions inside it too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
