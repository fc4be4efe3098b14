"""From what a shard holds to what is trained on.

Guarantee: decoding runs no code that is in the data: pickles stay bytes.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from framework.data.decode import decode_image

AUTO, JSON = "auto", "json"
TAR, PARQUET, TEXT = "tar", "parquet", "text"

_IMAGES = {"jpg", "jpeg", "png", "webp", "gif", "bmp", "ppm", "pgm", "tif", "tiff"}
_NUMBERS = {"cls", "cls2", "class", "count", "index", "inx", "id"}
_TEXTS = {"txt", "text", "transcript"}
_JSON = {"json", "jsn"}
_LINES = (".jsonl", ".ndjson")


def decoded(raw: Any, decode: str | Callable[[Any], Any] | None, kind: str, shard: str) -> Any:
    """A sample.

    Args:
        raw: As the shard holds it.
        decode: How; see `ShardStream`.
        kind: Format of the shard.
        shard: Name of the shard.

    Raises:
        ValueError: It cannot be decoded.
    """
    if callable(decode):
        return decode(raw)
    if decode == JSON or (decode == AUTO and kind == TEXT and shard.lower().endswith(_LINES)):
        return json.loads(raw)
    if decode == AUTO and kind == TAR:
        return {part: _decoded_part(part, content) for part, content in raw.items()}
    return raw


def picked(sample: Any, fields: Sequence[str]) -> tuple[Any, ...]:
    """Some fields of a sample, in this order; `jpg;png` is the first of these that there is.

    Raises:
        ValueError: There is no such field.
    """
    return tuple(_field(sample, names) for names in fields)


def _field(sample: Any, names: str) -> Any:
    for name in names.split(";"):
        if name in sample:
            return sample[name]
    raise ValueError(f"there is no field '{names}' in it, but {', '.join(map(str, sample))}")


def _decoded_part(part: str, content: Any) -> Any:
    kind = part.rpartition(".")[2]
    if part == "__key__":
        return content
    try:
        if kind in _IMAGES:
            return decode_image(content)
        if kind in _NUMBERS:
            return int(content)
        if kind in _TEXTS:
            return content.decode()
        if kind in _JSON:
            return json.loads(content)
        if kind == "npy":
            return np.load(io.BytesIO(content), allow_pickle=False)
    except Exception as error:
        raise ValueError(f"'{part}' ({len(content)} bytes) cannot be decoded: {error}") from error
    return content
