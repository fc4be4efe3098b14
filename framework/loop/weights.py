"""Which checkpoint the weights of a new run come from.

Guarantee: what `run.init_from` names is found before anything is built, or refused with what to give instead; of a run
the newest checkpoint that is whole by its manifest and sizes is taken. Nothing there is changed.
"""

from __future__ import annotations

import logging
from pathlib import Path

from framework.checkpoint import CheckpointStore
from framework.checkpoint.manifest import METADATA
from framework.checkpoint.remote.listing import Listing
from framework.errors import ConfigError
from framework.rundir import RunDirectory
from framework.volume import VolumeError, open_volume

log = logging.getLogger(__name__)


def locate(source: str) -> Path:
    """The folder that `run.init_from` names: of a checkpoint, of a run, or a run's remote place on a mounted path.

    Args:
        source: A path, or a `file://` URL.

    Raises:
        ConfigError: It names none.
    """
    path = _path_of(source)
    if (path / METADATA).exists() or (path / "checkpoints").is_dir() or _is_place(path):
        return path
    if path.is_file():
        raise ConfigError(
            f"run.init_from={source} is a file, and files that torch.save wrote are not read. Convert it once: "
            f"from torch.distributed.checkpoint.format_utils import torch_save_to_dcp; "
            f"torch_save_to_dcp({source!r}, {str(path.with_suffix(''))!r}), and give that folder."
        )
    raise ConfigError(
        f"run.init_from={source} is no checkpoint and no run. Give one, for example runs/a/checkpoints/step_0000000100."
    )


def newest(path: Path) -> Path:
    """The newest good checkpoint of a run or of a run's remote place; a checkpoint itself.

    Raises:
        ConfigError: There is none.
    """
    if (path / METADATA).exists():
        return path
    if (path / "checkpoints").is_dir():
        found = [(one.path, one.damage) for one in CheckpointStore(RunDirectory(path).checkpoints).list()]
    else:
        found = [(path / f"step_{one.step:010d}", one.damage) for one in Listing(open_volume(path)).copies()]
    for folder, damage in found:
        if damage is None:
            return folder
        log.warning("run.init_from=%s: %s is passed over: %s", path, folder.name, damage)
    if found:
        raise ConfigError(f"run.init_from={path}: no checkpoint there is whole; {found[0][0].name}: {found[0][1]}.")
    raise ConfigError(f"run.init_from={path}: there is no checkpoint in that run.")


def _path_of(source: str) -> Path:
    if "://" not in source:
        return Path(source)
    try:
        path = open_volume(source).path
    except VolumeError as error:
        raise ConfigError(f"run.init_from={source}: {error}") from error
    if path is None:
        raise ConfigError(
            f"run.init_from={source} is a URL, which is not read there. Copy the checkpoint first and give the copy: "
            f"python -m framework.checkpoint copy {source} FOLDER"
        )
    return path


def _is_place(path: Path) -> bool:
    return (path / "claim.json").is_file() or any(path.glob(f"step_*/{METADATA}"))
