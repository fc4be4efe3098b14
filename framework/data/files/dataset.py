"""Files of a mounted path or a URL as samples: decoded by index, or as a stream of local paths.

Guarantee: all ranks have the same files in the same order, whatever the volume lists; the list is stored with the
checkpoint, and a resume over other files is refused with what was added and removed. A sample is the whole file as it
was listed, or an error that names it. Nothing of a process (threads, connections) is taken into a forked one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from framework.data.cache import LocalCache, open_cache
from framework.data.decode import decode_image
from framework.data.files.listing import listed
from framework.data.files.local_paths import LocalPaths
from framework.data.files.manifest import Difference, Manifest, bytes_of
from framework.data.files.scan import Choice
from framework.data.files.source import FileSource, is_on_disk
from framework.data.files.stream import PathStream
from framework.data.images import EXTENSIONS, checked_shrink
from framework.data.stats import DataStats
from framework.duration import SECONDS, Duration
from framework.errors import ConfigError, DataError, StateMismatchError, suggest
from framework.volume import Volume, open_volume

log = logging.getLogger(__name__)

IMAGE, PATH, FOLDER = "image", "path", "folder"
CHECKED, FROZEN = "checked", "frozen"
MOST_STATE = 64 << 20  # bytes of a list that a checkpoint takes


class VolumeDataset(Dataset[Any]):
    """Files below a path or URL: `dataset[i]` is a decoded sample, `for path in dataset` gives local paths.

    The files are listed when this object is made, by rank 0 for all ranks that have joined. Hidden files and folders
    and files without a byte are left out; links are followed on mounts. A sample is known by its relative name.

    Args:
        source: A path, or a URL: `s3://bucket/prefix`, `gs://`, `az://`, `http(s)://`, `file://`.
        transform: Called with each decoded sample, default none.
        decode: `image`: uint8 `[3, height, width]`, RGB, upright; `path`: the path of a local copy; a function of the
            file's bytes; none: the bytes.
        label: `folder`: the number of the first folder of the name, among all in byte order; a function of the name;
            none: samples come without a label.
        extensions: Endings of the files, whatever their case; default those of images where images are decoded, else
            all files.
        recursive: Whether folders within the folders are entered.
        manifest: `checked`: a resume over other files is refused; `frozen`: it takes the list of the checkpoint.
        list_timeout: How long to wait for the first file, which may show late.
        cache: Where files are kept: a folder, a mapping of the arguments of `LocalCache`, or one; false: nowhere;
            default that of the user, except for files on a local disk, which are read where they are.
        options: Settings of the object store, by the names that obstore knows.
        classes: Names of the class folders, for a set that may lack some: the label is the place in this list.
        shrink_to: As in `decode_image`: JPEGs that are much larger are decoded at a part of their size, default never.

    Attributes:
        manifest: The files.
        classes: Names of the class folders; empty unless labels are those of folders.

    Raises:
        ConfigError: An argument makes no sense.
        DataError: There are no files, a folder cannot be read, or `classes` lacks one.
        VolumeError: There is no such kind of URL, or the store cannot be listed.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        transform: Callable[[Any], Any] | None = None,
        decode: str | Callable[[bytes], Any] | None = IMAGE,
        label: str | Callable[[str], Any] | None = FOLDER,
        extensions: str | Sequence[str] | None = None,
        recursive: bool = True,
        manifest: str = CHECKED,
        list_timeout: str = "60s",
        cache: LocalCache | Mapping[str, Any] | str | Path | bool | None = None,
        options: Mapping[str, str] | None = None,
        classes: Sequence[str] | None = None,
        shrink_to: int | None = None,
    ) -> None:
        _check_choice("decode", decode, (IMAGE, PATH))
        _check_choice("label", label, (FOLDER,))
        if manifest not in (CHECKED, FROZEN):
            raise ConfigError(f"manifest={manifest!r} is neither {CHECKED!r} nor {FROZEN!r}. Choose one of them.")
        if classes is not None and label != FOLDER:
            raise ConfigError(
                "classes=… names class folders, and the labels are not those of folders (label='folder')."
            )
        if shrink_to is not None and decode != IMAGE:
            raise ConfigError(f"shrink_to={shrink_to} is for images, and decode={decode!r} makes none. Leave it out.")
        seconds = Duration.parse(list_timeout, key="list_timeout", allow=(SECONDS,)).value
        choice = Choice(_endings(extensions, decode), recursive, label == FOLDER)
        volume = open_volume(source, retry_seconds=seconds, options=options)
        self.place = str(volume.path) if volume.path is not None else volume.place
        self.transform = transform
        self.decode = decode
        self.label = label
        self.shrink_to = checked_shrink(shrink_to)
        self.is_frozen = manifest == FROZEN
        self.options = dict(options or {})
        self.cache = _opened(cache, volume)
        listing = listed(volume, choice, seconds)
        self._adopt(listing.manifest, listing.classes if classes is None else _checked(classes, listing.classes, self))

    def _adopt(self, manifest: Manifest, classes: Sequence[str]) -> None:
        self.manifest = manifest
        self.classes = list(classes)
        self._numbers = {name: number for number, name in enumerate(self.classes)}
        self._state: dict[str, Any] | None = None
        self._files = FileSource(self.place, self.options, manifest, self.cache)
        self.local_paths = LocalPaths(FileSource(self.place, self.options, manifest, self.cache, as_paths=True))
        self._stream = PathStream(self)

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, index: int) -> Any:
        """The sample, as `decode` and `transform` make it; with its label, if there is one: `(sample, label)`.

        Raises:
            DataError: The file cannot be read, is not as it was listed, or is no image; the message names it.
            ConfigError: It lies in no class folder, and its label is asked for.
        """
        index = self._place(index)
        sample = self._decoded(index)
        if self.transform is not None:
            sample = self.transform(sample)
        return sample if self.label is None else (sample, self._label(index))

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples, as torch's own loader asks for them: their files are fetched at the same time."""
        self.prefetch([self._place(index) for index in indices])
        return [self[index] for index in indices]

    def __iter__(self) -> Iterator[str]:
        """Local paths: this rank's and worker's share of an epoch, or what the loader asks for. See `PathStream`."""
        return iter(self._stream)

    def paths(self, *, shuffle: bool = True, seed: int = 0, batch_size: int = 1) -> PathStream:
        """The files as an iterable dataset of local paths, for a loader; the arguments are those of `PathStream`."""
        return PathStream(self, shuffle=shuffle, seed=seed, batch_size=batch_size)

    def path_stream(self) -> PathStream:
        """The stream behind `iter(dataset)`."""
        return self._stream

    def set_epoch(self, epoch: int) -> None:
        """The next `iter(dataset)` is that epoch from its beginning. Not needed in a loader of this package."""
        self._stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where `iter(dataset)` is, outside of a loader of this package. See `PathStream.state_dict`."""
        return self._stream.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a place, outside of a loader of this package. See `PathStream.load_state_dict`."""
        self._stream.load_state_dict(state)

    @property
    def fingerprint(self) -> str:
        """Of names, sizes and classes: stored with the checkpoint, and compared on resume."""
        if not self.classes:
            return self.manifest.fingerprint
        text = "\0".join([self.manifest.fingerprint, *self.classes])
        return hashlib.blake2b(bytes_of(text), digest_size=16).hexdigest()

    def sample_key(self, index: int) -> str:
        """The name of the file relative to the source: what its random numbers hang on."""
        return self.manifest.name(self._place(index))

    def prefetch(self, indices: Sequence[int]) -> None:
        """These samples will be asked for later, in this order."""
        (self.local_paths if self.decode == PATH else self._files).prefetch(indices)

    def cancel_prefetch(self) -> None:
        """What was announced and not asked for yet will not be."""
        (self.local_paths if self.decode == PATH else self._files).cancel_prefetch()

    def retire(self, count: int) -> None:
        """The first `count` samples given out and not yet retired are in use no more."""
        if self.decode == PATH:
            self.local_paths.retire(count)

    def take_stats(self) -> DataStats:
        """What was counted in this process since the last call."""
        stats = self._files.take_stats()
        stats.add(self.local_paths.take_stats())
        return stats

    def data_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the data: plain values, the list of files compressed, the mapping of classes."""
        if self._state is None:
            packed = zlib.compress(self.manifest.pack(is_portable=True), 1)
            self._state = {
                "fingerprint": self.fingerprint,
                "files": len(self),
                "classes": list(self.classes),
                "manifest": packed if len(packed) < MOST_STATE else None,
            }
        return self._state

    def check_data_state(self, saved: dict[str, Any]) -> None:
        """Compares with what a checkpoint keeps; under `manifest="frozen"` takes that list over, and its length.

        Args:
            saved: From `data_state`.

        Raises:
            StateMismatchError: The files or classes differ; the message says how many were added and removed.
        """
        if saved.get("fingerprint") == self.fingerprint:
            return
        if not {"files", "classes", "manifest"} <= saved.keys():
            raise StateMismatchError(
                f"The checkpoint was made over other data than the files of {self.place}: it keeps "
                f"{', '.join(map(str, saved)) or 'nothing'} of it. Use the same kind of dataset, or another run.name."
            )
        before = None if saved["manifest"] is None else _unpacked(saved["manifest"])
        if self.is_frozen and before is not None:
            difference = Difference.between(self.manifest, before)
            log.warning(
                "%s: the list of the checkpoint is used, of %s files; since then: %s (manifest=frozen).",
                self.place,
                f"{len(before):,}",
                difference,
            )
            self._adopt(before.stamped_like(self.manifest), saved["classes"])
            return
        way = (
            "the list was too long to be kept in it" if before is None else "go on with the old list by manifest=frozen"
        )
        raise StateMismatchError(
            f"The files of {self.place} changed since the checkpoint: {self._changes(saved, before)}. "
            f"Samples would be repeated or left out. Bring the files back ({way}), use another run.name, or permit it "
            f"with run.allow=[data]."
        )

    def _changes(self, saved: dict[str, Any], before: Manifest | None) -> str:
        parts = [f"{len(self):,} files now, {saved['files']:,} then"]
        if before is not None and before.fingerprint != self.manifest.fingerprint:
            parts.append(str(Difference.between(self.manifest, before)))
        if saved["classes"] != self.classes:
            parts.append(f"classes {_some(self.classes)} now, {_some(saved['classes'])} then")
        return "; ".join(parts)

    def _decoded(self, index: int) -> Any:
        if self.decode == PATH:
            return self.local_paths.path_of(index)
        data = self._files.bytes_of(index)
        if self.decode is None:
            return data
        if callable(self.decode):
            return self.decode(data)
        try:
            return decode_image(data, shrink_to=self.shrink_to)
        except ValueError as error:
            raise DataError(
                f"{self._shown(index)} ({len(data)} bytes) is damaged or no image: {error}. Replace it or remove it."
            ) from error

    def _label(self, index: int) -> Any:
        name = self.manifest.name(index)
        if callable(self.label):
            return self.label(name)
        folder, slash, _ = name.partition("/")
        if not slash:
            raise ConfigError(
                f"{self._shown(index)} lies in no class folder, so it has no label. Use label=None for files without "
                f"labels, or label=… with a function of the name."
            )
        return self._numbers[folder]

    def _place(self, index: int) -> int:
        if not -len(self) <= index < len(self):
            raise IndexError(f"There is no file {index} among the {len(self)} of {self.place}.")
        return int(index) % len(self)

    def _shown(self, index: int) -> str:
        name = os.fsencode(self.manifest.name(index)).decode(errors="backslashreplace")
        return f"{self.place.rstrip('/')}/{name}"


def _opened(cache: LocalCache | Mapping[str, Any] | str | Path | bool | None, volume: Volume) -> LocalCache | None:
    """The cache that is meant; none for files on a local disk, unless one is asked for."""
    if cache is None and is_on_disk(volume.path):
        return None
    root = cache.root if isinstance(cache, LocalCache) else cache.get("root") if isinstance(cache, Mapping) else cache
    if volume.path is not None and isinstance(root, str | Path) and Path(root).absolute().is_relative_to(volume.path):
        raise ConfigError(
            f"the cache {root} lies inside the data at {volume.path}, so that its files would be listed as data. Give it "
            f"another folder (cache=/path/to/folder)."
        )
    return open_cache(cache)


def _check_choice(key: str, value: Any, known: tuple[str, ...]) -> None:
    if value is None or callable(value) or value in known:
        return
    raise ConfigError(
        f"{key}={value!r} is none of {', '.join(map(repr, known))}, no function, and not null.{suggest(str(value), known)}"
    )


def _endings(extensions: str | Sequence[str] | None, decode: Any) -> tuple[str, ...] | None:
    if extensions is None:
        return EXTENSIONS if decode == IMAGE else None
    names = [extensions] if isinstance(extensions, str) else list(extensions)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"extensions={extensions!r} must be endings such as ['.jpg', '.png'].")
    return tuple(f".{name}".lower() if name[0].isalnum() else name.lower() for name in names)


def _checked(classes: Sequence[str], found: Sequence[str], dataset: VolumeDataset) -> list[str]:
    unknown = sorted(set(found) - set(classes))
    if unknown:
        raise DataError(
            f"{dataset.place} has folders that are none of the {len(classes)} classes given: {_some(unknown)}."
            f"{suggest(unknown[0], classes)} Add them to classes=…, or move them elsewhere."
        )
    return list(classes)


def _unpacked(packed: bytes) -> Manifest:
    try:
        return Manifest.unpack(zlib.decompress(packed))
    except zlib.error as error:
        raise DataError(f"The list of files in the checkpoint is damaged: {error}. Use an older checkpoint.") from error


def _some(names: Sequence[str]) -> str:
    return f"[{', '.join(map(repr, names[:5]))}{', …' * (len(names) > 5)}] ({len(names)})"
