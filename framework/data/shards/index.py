"""How many samples each shard has.

Guarantee: every rank has the same counts: those of rank 0, which counts once and keeps the result in the cache of the
machine, for exactly these shards. A shard that is damaged where counting sees it is an error that names it; none is
counted as shorter than it is.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np
import numpy.typing as npt

from framework.data.cache import LocalCache, open_cache
from framework.data.files.listing import SIGN_SECONDS
from framework.data.files.manifest import Manifest
from framework.data.shards.base import Bytes, Damage, Samples
from framework.data.shards.opening import ShardFiles
from framework.errors import ConfigError, DataError, suggest

THREADS = 16  # requests at once, for shards that are not on this machine
SLOW_SECONDS = 5.0  # counting that took longer is kept, also for files on a local disk

_MAGIC = b"goodput samples/1\n"
_DIGEST = 16

log = logging.getLogger(__name__)

Counts = npt.NDArray[np.int64]


def told(samples: int | Sequence[int] | Mapping[str, int], manifest: Manifest) -> Counts:
    """Counts that the user gives.

    Args:
        samples: Of every shard, of each in the order of their names, or by name.
        manifest: The shards.

    Raises:
        ConfigError: They do not fit the shards.
    """
    names = [manifest.name(index) for index in range(len(manifest))]
    values: Iterable[int]
    if isinstance(samples, int):
        values = [samples] * len(names)
    elif isinstance(samples, Mapping):
        missing, unknown = sorted(set(names) - set(samples)), sorted(set(samples) - set(names))
        if missing or unknown:
            one = f"'{missing[0]}' has none" if missing else f"'{unknown[0]}' is no shard"
            raise ConfigError(
                f"samples={{…}} has {len(samples)} names for {len(names)} shards of {manifest.origin}: {one}."
                f"{suggest((missing or unknown)[0], unknown if missing else names)}"
            )
        values = [samples[name] for name in names]
    else:
        values = list(samples)
    counts = np.asarray(values)
    if counts.shape != (len(names),) or counts.dtype.kind not in "iu" or counts.min() < 0:
        raise ConfigError(
            f"samples={str(samples)[:80]} must be a number that is not negative for each of the {len(names)} shards of "
            f"{manifest.origin}."
        )
    return counts.astype(np.int64)


def counted(files: ShardFiles, make: Callable[[Bytes], Samples], kind: str, *, has_default_cache: bool) -> Counts:
    """Counts the samples of all shards, unless that was done before on this machine.

    Args:
        files: The shards.
        make: Makes the reader of one.
        kind: Name of the format.
        has_default_cache: Whether the user's cache may keep what took long, though the shards are not cached.

    Raises:
        DataError: A shard cannot be read, or is damaged.
    """
    manifest, cache = files.manifest, files.cache
    if cache is None and has_default_cache and (usual := LocalCache()).layout.exists():
        cache = usual
    key, size = f"samples-{kind}-{_identity(manifest)}", len(_MAGIC) + 8 * len(manifest) + _DIGEST
    if cache is not None and (kept := _kept(cache, manifest, key, size)) is not None:
        return kept
    began = time.monotonic()
    counts = _count(files, make)
    if cache is None and has_default_cache and time.monotonic() - began > SLOW_SECONDS:
        cache = open_cache(None)
    if cache is not None:
        _keep(cache, manifest, key, counts)
    return counts


def _count(files: ShardFiles, make: Callable[[Bytes], Samples]) -> Counts:
    total = len(files.manifest)
    counts = np.zeros(total, dtype=np.int64)
    next_word = time.monotonic() + SIGN_SECONDS
    stop = threading.Event()

    def count(index: int) -> int:
        return 0 if stop.is_set() else _count_one(files, make, index)

    with ThreadPoolExecutor(min(THREADS, total), "counting") as pool:
        left: dict[Future[int], int] = {pool.submit(count, index): index for index in range(total)}
        try:
            while left:
                done, _ = wait(left, timeout=SIGN_SECONDS, return_when=FIRST_COMPLETED)
                for future in done:
                    counts[left.pop(future)] = future.result()
                if time.monotonic() >= next_word:
                    next_word = time.monotonic() + SIGN_SECONDS
                    log.info(
                        "counting the samples of %s: %s in %d of %d shards so far",
                        files.manifest.origin, f"{counts.sum():,}", total - len(left), total,
                    )  # fmt: skip
        finally:
            stop.set()
    return counts


def _count_one(files: ShardFiles, make: Callable[[Bytes], Samples], index: int) -> int:
    source = files.open_ranged(index)
    try:
        return make(source).count()
    except Damage as damage:
        raise DataError(
            f"{files.shown(index)} is {damage}. Replace the shard, or remove it; its samples cannot be counted."
        ) from damage
    except ConfigError as error:
        raise ConfigError(f"{files.shown(index)}: {error}") from error
    finally:
        source.close()


def _identity(manifest: Manifest) -> str:
    digest = hashlib.blake2b(manifest.fingerprint.encode(), digest_size=12)
    digest.update(manifest.modified.astype("<i8").data)
    digest.update(manifest.tags.astype("<i8").data)
    return digest.hexdigest()


def _kept(cache: LocalCache, manifest: Manifest, key: str, size: int) -> Counts | None:
    with cache.open(manifest.space, manifest.origin) as space:
        path = space.path(key, size)
        if path is None:
            return None
        try:
            data = path.read_bytes()
        except OSError:
            return None
    body = data[:-_DIGEST]
    if not data.startswith(_MAGIC) or _digest(body) != data[-_DIGEST:]:
        return None
    return np.frombuffer(body[len(_MAGIC) :], dtype="<i8").astype(np.int64)


def _keep(cache: LocalCache, manifest: Manifest, key: str, counts: Counts) -> None:
    body = _MAGIC + counts.astype("<i8").tobytes()
    data = body + _digest(body)
    with cache.open(manifest.space, manifest.origin) as space:
        admission = space.admit(key, len(data))
        if admission is not None:
            admission.write([data])


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()
