"""What the words on a command line mean: a run, a step of it, the folder or URL of a checkpoint.

Guarantee: looking changes nothing and needs no torch. What a word does not name is an error with the word in it. Of a
run that says where else its checkpoints are, that place is known.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.errors import CheckpointError

if TYPE_CHECKING:
    from framework.checkpoint.retention import Keep
    from framework.checkpoint.store import CheckpointStore
    from framework.rundir import RunDirectory
    from framework.volume import Volume

CHECKPOINT = "a run (the newest), RUN@STEP, or the folder or URL of a checkpoint"
KEY = "callbacks.async_checkpoint"
RETRY_SECONDS = 5.0  # a person waits
_AT = re.compile(r"(.+)@(\d+)")
_STEP = re.compile(r"step_(\d{10,})")
_TRACES = ("checkpoints", "config.yaml", "owner.json", "events")


def is_url(text: str) -> bool:
    """Whether it names a place that is no path."""
    return "://" in text


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory.

    Args:
        shown: As it was given.
        directory: Its paths.
        store: Its checkpoints.
    """

    shown: str
    directory: RunDirectory
    store: CheckpointStore

    def options(self) -> Mapping[str, Any]:
        """Options of `callbacks.async_checkpoint` in the stored config; empty without any.

        Raises:
            CheckpointError: The config cannot be read.
        """
        callbacks = self._config().get("callbacks")
        found = callbacks.get("async_checkpoint") if isinstance(callbacks, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def remote(self) -> Volume | None:
        """Where else its checkpoints are, `<remote>/<run.name>`; none if nowhere. Nothing is connected to.

        Raises:
            CheckpointError: The config cannot be read.
            VolumeError: It names no place.
        """
        place = self.options().get("remote")
        if not isinstance(place, str):
            return None
        from framework.volume import open_volume

        return open_volume(place, retry_seconds=RETRY_SECONDS).at(self._name())

    def keep(self) -> Keep:
        """The rules of retention in the stored config; all are kept without any.

        Raises:
            CheckpointError: The config cannot be read.
            ConfigError: They mean nothing.
        """
        from framework.checkpoint.retention import Keep

        options = self.options()
        return Keep.parse(options["keep"], key=f"{KEY}.keep") if "keep" in options else Keep(last=None)

    def _name(self) -> str:
        run = self._config().get("run")
        name = run.get("name") if isinstance(run, Mapping) else None
        return name if isinstance(name, str) else self.directory.path.name

    def _config(self) -> Mapping[str, Any]:
        import yaml

        file = self.directory.config_file
        try:
            config = yaml.safe_load(file.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        return config if isinstance(config, Mapping) else {}


def open_run(text: str) -> Run:
    """The run in a directory.

    Raises:
        CheckpointError: There is none.
    """
    from framework.checkpoint.store import CheckpointStore
    from framework.rundir import RunDirectory

    path = Path(text)
    if path.name == "checkpoints" and not is_run(path):
        path = path.parent
    if not is_run(path):
        what = "is no run" if os.path.lexists(path) else "does not exist"
        raise CheckpointError(f"{path} {what}: it has no folder 'checkpoints'. Give the directory of a run, runs/NAME.")
    directory = RunDirectory(path)
    return Run(text, directory, CheckpointStore(directory.checkpoints))


def choose_step(text: str, step: int | None) -> tuple[Run, int]:
    """A run and a step of it, which must be named.

    Args:
        text: A run directory, or `RUN@STEP`.
        step: Which step.

    Raises:
        CheckpointError: It is no run, or no step is named, or two are.
    """
    text, step = _parted(text, step)
    found = open_run(text)
    if step is None:
        raise CheckpointError(f"Which checkpoint of {text}? Give --step N. There are: {_steps(found.store)}.")
    return found, step


def is_run(path: Path) -> bool:
    """Whether a run has left traces in a directory."""
    return any(os.path.lexists(path / name) for name in _TRACES)


@dataclass(frozen=True, slots=True)
class Chosen:
    """One checkpoint.

    Args:
        place: Its own folder or URL.
        store: The run's checkpoints, if it is among them.
        step: Its step there.
    """

    place: str
    store: CheckpointStore | None = None
    step: int | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """While it lasts, the retention of a live run leaves the checkpoint alone.

        Raises:
            CheckpointError: It is gone.
        """
        if self.store is None or self.step is None:
            yield
            return
        with self.store.lease(self.step):
            yield


def choose(text: str, step: int | None = None) -> Chosen:
    """The checkpoint that a word names.

    Args:
        text: A run, `RUN@STEP`, or the folder or URL of a checkpoint, or of several.
        step: Which step; none: the newest.

    Raises:
        CheckpointError: There is none, or the newest is damaged and no step was given.
        VolumeError: The URL cannot be read.
    """
    text, step = _parted(text, step)
    return _in_volume(text, step) if is_url(text) else _in_folder(Path(text), step)


def choose_all(text: str, step: int | None) -> list[Chosen]:
    """All checkpoints of a run, newest first; or the one that is named.

    Raises:
        CheckpointError: As `choose`, but a damaged one can be chosen.
        VolumeError: The URL cannot be read.
    """
    text, step = _parted(text, step)
    path = Path(text)
    if step is not None or is_url(text) or not (is_run(path) or path.name == "checkpoints"):
        return [choose(text, step)]
    store = open_run(text).store
    return [Chosen(str(found.path), store, found.step) for found in store.list()]


def _parted(text: str, step: int | None) -> tuple[str, int | None]:
    """`RUN@STEP` in its parts; a path that is there is taken as it is."""
    match = _AT.fullmatch(text)
    if match is None or (not is_url(text) and os.path.lexists(text)):
        return text, step
    if step is not None and step != int(match[2]):
        raise CheckpointError(f"{text} and --step {step} name two steps. Give one.")
    return match[1], int(match[2])


def _in_folder(path: Path, step: int | None) -> Chosen:
    from framework.checkpoint.manifest import METADATA
    from framework.checkpoint.store import CheckpointStore

    if os.path.lexists(path / METADATA):
        return _folder(path, step)
    store = CheckpointStore(path) if not is_run(path) and _has_steps(path) else open_run(str(path)).store
    if step is not None:
        if not os.path.lexists(store.folder(step) / METADATA):
            raise CheckpointError(f"{store.path} has no checkpoint of step {step}. There are: {_steps(store)}.")
        return Chosen(str(store.folder(step)), store, step)
    newest = store.newest()
    if newest is None:
        raise CheckpointError(f"{store.path} has no published checkpoint.")
    if newest.header is None:
        whole = next((found.step for found in store.list() if found.header is not None), None)
        advice = "No other one is whole." if whole is None else f"The newest whole one: --step {whole}."
        raise CheckpointError(f"{newest.path} is damaged: {newest.damage}. {advice}")
    return Chosen(str(newest.path), store, newest.step)


def _folder(path: Path, step: int | None) -> Chosen:
    """The folder of one checkpoint, which may lie in a run."""
    from framework.checkpoint.store import CheckpointStore

    match = _STEP.fullmatch(path.name)
    if step is not None and (match is None or int(match[1]) != step):
        raise CheckpointError(f"{path} is one checkpoint, and --step {step} is not it. Leave --step out.")
    is_of_run = match is not None and path.parent.name == "checkpoints" and is_run(path.parent.parent)
    if match is None or not is_of_run:
        return Chosen(str(path))
    return Chosen(str(path), CheckpointStore(path.parent), int(match[1]))


def _in_volume(url: str, step: int | None) -> Chosen:
    from framework.checkpoint.manifest import METADATA
    from framework.checkpoint.remote.listing import Listing
    from framework.volume import open_volume

    volume = open_volume(url, retry_seconds=RETRY_SECONDS)
    if step is not None:
        name = f"step_{step:010d}"
        if volume.size(f"{name}/{METADATA}") is None:
            raise CheckpointError(f"{volume.shown(name)} holds no published checkpoint.")
        return Chosen(volume.shown(name))
    if volume.size(METADATA) is not None:
        return Chosen(url)
    newest = next((folder for folder in Listing(volume).folders() if folder.is_published), None)
    if newest is None:
        raise CheckpointError(f"{url} has no published checkpoint.")
    return Chosen(volume.shown(newest.name))


def _has_steps(path: Path) -> bool:
    try:
        return any(_STEP.fullmatch(name) for name in os.listdir(path))
    except OSError:
        return False


def has_checkpoints(text: str) -> bool:
    """Whether a place is no run directory but holds folders of steps: `<remote>/<run.name>`."""
    return is_url(text) or (not is_run(Path(text)) and Path(text).name != "checkpoints" and _has_steps(Path(text)))


def _steps(store: CheckpointStore) -> str:
    return ", ".join(str(found.step) for found in store.list()) or "none"
