"""Folders of images, one folder a class.

Guarantee: the same files give the same list on every machine (byte order, hidden ones left out), a sample is known by
its relative path, and a file that cannot be decoded is an error that names it, never a wrong picture.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from framework.data.decode import decode_image
from framework.errors import ConfigError, DataError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")


class ImageFolder(Dataset[tuple[Any, int]]):
    """Images below `root/<class>/`, in subfolders too, with the number of their class.

    Hidden files and folders are left out (`.DS_Store`, `.ipynb_checkpoints`), links are followed. A class without
    images keeps its number.

    Args:
        root: Folder of the class folders.
        transform: Called with each image, uint8 `[3, height, width]`, RGB; default none.
        extensions: Endings of image files, in lower case; the case of the files' own does not matter.
        shrink_to: As in `decode_image`: JPEGs that are much larger are decoded at a part of their size, default never.

    Attributes:
        classes: Names of the class folders in byte order; a label is an index into it.

    Raises:
        DataError: There is no such folder, or there are no images in it.
    """

    def __init__(
        self,
        root: str | Path,
        transform: Callable[[torch.Tensor], Any] | None = None,
        extensions: tuple[str, ...] = EXTENSIONS,
        shrink_to: int | None = None,
    ) -> None:
        self.root = Path(root)
        self.transform = transform
        self.shrink_to = checked_shrink(shrink_to)
        if not self.root.is_dir():
            raise DataError(
                f"{self.root.absolute()} is no folder. data.root must be the folder that holds the images' class folders."
            )
        folders = sorted(
            os.fsencode(each.name) for each in os.scandir(self.root) if each.is_dir() and not _is_hidden(each.name)
        )
        self.classes = [os.fsdecode(name) for name in folders]
        paths: list[bytes] = []
        counts = []
        for name in self.classes:
            found = sorted(os.fsencode(path) for path in _walk(self.root, name, extensions))
            paths += found
            counts.append(len(found))
        if not paths:
            raise DataError(
                f"{self.root.absolute()} holds {len(self.classes)} class folders and no image in them "
                f"(endings looked for: {', '.join(extensions)}). Expected {self.root}/<class>/<image>.jpg."
            )
        # One block of bytes: a list of a million strings would be copied by and by into every worker.
        self._names = b"".join(paths)
        self._ends = np.cumsum([len(path) for path in paths], dtype=np.int64)
        self._labels = np.repeat(np.arange(len(counts), dtype=np.int32), counts)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """The image, uint8 `[3, height, width]`, RGB, or what the transform makes of it; and its class.

        Raises:
            DataError: The file is damaged or cannot be read; the message holds its full path.
        """
        image = read_image(self.root / self.sample_key(index), self.shrink_to)
        return image if self.transform is None else self.transform(image), int(self._labels[index])

    def sample_key(self, index: int) -> str:
        """The path of the image relative to the root: what its random numbers hang on, wherever the root is."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"There is no image {index} among the {len(self)} of {self.root}.")
        index %= len(self)
        start = int(self._ends[index - 1]) if index else 0
        return os.fsdecode(self._names[start : int(self._ends[index])])


def checked_shrink(shrink_to: int | None) -> int | None:
    """The value, if it is a number of pixels or none.

    Raises:
        ConfigError: It is neither.
    """
    if shrink_to is not None and (not isinstance(shrink_to, int) or isinstance(shrink_to, bool) or shrink_to < 1):
        raise ConfigError(
            f"shrink_to={shrink_to!r} must be a number of pixels, at least 1, that both sides of an image keep, or null."
        )
    return shrink_to


def read_image(path: Path, shrink_to: int | None = None) -> torch.Tensor:
    """Decodes an image file, upright according to its EXIF data.

    Args:
        path: The file.
        shrink_to: As in `decode_image`.

    Returns:
        uint8 `[3, height, width]`, RGB.

    Raises:
        DataError: It is damaged or cannot be read; the message holds its full path.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path.absolute()} cannot be read: {error.strerror}.") from error
    try:
        return decode_image(data, shrink_to=shrink_to)
    except ValueError as error:
        raise DataError(
            f"{path.absolute()} ({len(data)} bytes) is damaged or no image: {error}. Replace it or remove it."
        ) from error


def _walk(root: Path, folder: str, extensions: tuple[str, ...]) -> Iterator[str]:
    """Paths of images below `root/folder`, relative to root; links are followed, but in no circle."""
    above = {str(root): frozenset([_identity(str(root))])}  # by folder: those that it lies in, and itself
    for parent, folders, files in os.walk(os.path.join(root, folder), followlinks=True):
        around, own = above[os.path.dirname(parent)], _identity(parent)
        if own in around:
            folders.clear()
            continue
        above[parent] = around | {own}
        folders[:] = sorted(name for name in folders if not _is_hidden(name))
        for name in files:
            if not _is_hidden(name) and name.lower().endswith(extensions):
                yield os.path.relpath(os.path.join(parent, name), root)


def _identity(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


def _is_hidden(name: str) -> bool:
    return name.startswith(".")
