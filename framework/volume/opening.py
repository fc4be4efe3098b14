"""Opens the volume that a path or URL names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from framework.errors import suggest
from framework.volume.base import Volume, VolumeError
from framework.volume.local import LocalVolume
from framework.volume.memory import MemoryVolume

SCHEMES = ("file", "s3", "gs", "az", "http", "https", "memory")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_HALF_URL = re.compile(r"([A-Za-z][\w+.\-]*):/(?!/)(.*)", re.DOTALL)
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://")


def open_volume(place: str | Path, *, retry_seconds: float = 60.0, options: Mapping[str, str] | None = None) -> Volume:
    """The volume at a path or URL. Nothing is touched or connected to: `Volume.probe` does that.

    Args:
        place: A path, or a URL: `file://`, `s3://bucket/prefix`, `gs://bucket/prefix`, `az://container/prefix`,
            `http://` and `https://` (read only), `memory://` (one for each process). Credentials and endpoints come
            from the environment, such as `AWS_ACCESS_KEY_ID` and `AWS_ENDPOINT_URL`.
        retry_seconds: How long an object store may fail (5xx, 429, timeouts, connections) before that is an error.
        options: Settings of the object store beside the environment's, by the names that obstore knows.

    Raises:
        VolumeError: The URL is of no known kind or names no bucket, the package that it needs is missing, or options
            are given for a folder.
    """
    text = os.fspath(place)
    match = _URL.match(text)
    if not text:
        raise VolumeError("an empty path names no volume: give a folder or a URL.")
    if "\0" in text:
        raise VolumeError(f"{text!r} has a NUL: give a folder or a URL.")
    if _URL.match(bare := text.lstrip()) and (bare != text or _CONTROL.search(text)):
        shown = re.sub("//.*@", "//", text, flags=re.DOTALL)  # without a password
        raise VolumeError(f"{shown!r} begins with a blank, or has a line break or control character: no URL has that.")
    if meant := meant_by(text):
        raise VolumeError(f"{text} is no URL. Did you mean {meant}? A folder of that name is ./{text}.")
    if options and (match is None or match[1].lower() == "file"):
        raise VolumeError(
            f"{text} is a folder: options ({', '.join(options)}) are settings of an object store. Leave them out."
        )
    if match is None:
        return LocalVolume(text)
    scheme = match[1].lower()
    if scheme == "file":
        return LocalVolume(_path_of(text), text)
    if scheme == "memory":
        return MemoryVolume(text)
    if scheme in ("s3", "gs", "az", "http", "https"):
        return _remote(scheme, text, retry_seconds, dict(options or {}))
    raise VolumeError(
        f"{text}: there is no volume of kind {match[1]}://.{suggest(scheme, SCHEMES)} "
        f"Use a path, or one of {', '.join(f'{known}://' for known in SCHEMES)}."
    )


def meant_by(text: str) -> str | None:
    """The URL of which a slash was left out, as in `s3:/bucket`; none for every other text."""
    half = _HALF_URL.match(text)
    if half is None:
        return None
    return f"{half[1]}://{'/' if half[1].lower() == 'file' else ''}{half[2]}"


def _remote(scheme: str, url: str, retry_seconds: float, options: dict[str, str]) -> Volume:
    from framework.volume.library import address
    from framework.volume.objects import ObjectVolume
    from framework.volume.web import WebVolume

    rest = url.partition("://")[2]
    host, _, prefix = rest.partition("/")
    if not host:
        raise VolumeError(f"{url} names no {'host' if scheme.startswith('http') else 'bucket'}.")
    if not scheme.startswith("http"):
        return ObjectVolume(address(scheme, host, retry_seconds, options), f"{scheme}://{host}", prefix.strip("/"))
    if "?" in rest or "#" in rest or "@" in host:
        shown = f"{scheme}://{host.rpartition('@')[2]}"
        raise VolumeError(f"{shown}: the URL of a folder has no user, no query (?) and no fragment (#).")
    root = f"{scheme}://{host}"
    return WebVolume(address(scheme, root, retry_seconds, options), root, unquote(prefix.strip("/")))


def _path_of(url: str) -> str:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise VolumeError(f"{url} names the host {parts.netloc!r}: write file:///{parts.netloc}{parts.path}.")
    if not parts.path:
        raise VolumeError(f"{url} has no path: write file:///folder.")
    return url2pathname(parts.path)
