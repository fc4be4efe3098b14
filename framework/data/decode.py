"""Encoded images to tensors: one function, whatever decoder is installed.

Guarantee: the same bytes give the same pixels with every decoder (torchcodec, torchvision, pillow: they agree bit for
bit on JPEG, PNG, WebP and GIF, which a test holds them to). An image comes out as RGB, upright according to its EXIF
data, 8 bits a channel, or not at all: what is damaged, cut off or absurdly large raises, and is never half a picture.

How kinds are turned into RGB: grey is repeated, alpha is dropped, palettes are looked up, CMYK is converted as
libjpeg users expect (Adobe's inverted), 16 bits become `round(value · 255 / 65535)`, of an animation the first picture is taken.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_PIXELS = 178_956_970  # a quarter of a gigapixel in RGB is half a gigabyte; pillow draws the line here too
_PIXELS_PER_BYTE = 512  # a JPEG cannot hold more; smaller files need no look at their header
_PNG = b"\x89PNG\r\n\x1a\n"
_JPEG = b"\xff\xd8\xff"
_ORIENTATION = 0x0112


def decode_image(data: bytes, *, shrink_to: int | None = None, max_pixels: int = MAX_PIXELS) -> Tensor:
    """Decodes an image file of any usual kind.

    Args:
        data: The bytes of the file.
        shrink_to: If given, a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, as long as both sides keep at least
            this many pixels. For photos that are much larger than what is cut out of them; the pixels are not those
            of the whole image made smaller, so a run must use it always or never.
        max_pixels: Images with more are refused before they are decoded.

    Returns:
        uint8 `[3, height, width]`, RGB.

    Raises:
        ValueError: The data is empty, no image, damaged, cut off, or has too many pixels.
    """
    if not data:
        raise ValueError("the file is empty")
    _check_size(data, max_pixels)
    if shrink_to is not None and data.startswith(_JPEG):
        return _with_pillow(data, shrink_to)
    try:
        image = _fast()[1](data)
    except (RuntimeError, ValueError):  # a kind that it does not know, or a damaged one: pillow says which
        return _with_pillow(data)
    if image.dim() == 4:
        image = image[0]
    if image.dtype == torch.uint16:
        image = ((image.to(torch.int32) * 255 + 32767) // 65535).to(torch.uint8)
    return image


def decoder() -> str:
    """What decodes, with its version: `torchvision 0.29.1`."""
    package = _fast()[0]
    return f"{package} {metadata.version(package)}"


def _check_size(data: bytes, max_pixels: int) -> None:
    if data.startswith(_PNG) and len(data) >= 24:
        width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    elif data.startswith(_JPEG) and len(data) * _PIXELS_PER_BYTE <= max_pixels:
        return
    else:
        from PIL import Image

        try:
            with Image.open(io.BytesIO(data)) as opened:
                width, height = opened.size
        except Image.DecompressionBombError as error:
            raise ValueError(str(error)) from error
        except Exception:  # no image for pillow: whoever decodes says what is wrong
            return
    if width * height > max_pixels:
        raise ValueError(f"it has {width} x {height} pixels, more than the {max_pixels:,} that are allowed")


@functools.cache
def _fast() -> tuple[str, Callable[[bytes], Tensor]]:
    """The best decoder there is, after its package."""
    try:
        from torchcodec.decoders import decode_image as decode

        return "torchcodec", functools.partial(decode, mode="RGB")
    except Exception:  # not installed, too old, or its libraries do not load
        pass
    try:
        import torchvision.io  # registers torch.ops.image

        mode = torchvision.io.ImageReadMode.RGB.value
        # The operator itself: torchvision.io's functions around it warn at each call that they will move elsewhere.
        operator = torch.ops.image.decode_image
    except (ImportError, AttributeError, RuntimeError):
        return "pillow", _with_pillow
    return "torchvision", lambda data: operator(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode, True)


def _with_pillow(data: bytes, shrink_to: int | None = None) -> Tensor:
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as opened:
            if shrink_to is not None:
                opened.draft("RGB", (shrink_to, shrink_to))
            array = _rgb(ImageOps.exif_transpose(opened))
    except UnidentifiedImageError as error:
        raise ValueError(f"it is no image of a known kind (it begins with {data[:8]!r})") from error
    except ValueError:
        raise
    except Exception as error:  # pillow's plugins raise what their parsing meets: OSError, SyntaxError, struct.error
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return torch.from_numpy(array).permute(2, 0, 1).contiguous()


def _rgb(image: Any) -> Any:
    """uint8 `[height, width, 3]`."""
    if image.mode.startswith("I"):  # 16 bits: pillow itself would cut everything above 255 off
        grey = (np.asarray(image).astype(np.int64) * 255 + 32767) // 65535
        return np.repeat(grey.clip(0, 255).astype(np.uint8)[:, :, None], 3, axis=2)
    return np.array(image.convert("RGB"))
