"""Images of every kind come out the same, whatever decodes them, or not at all."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from PIL import Image, features
from sklearn.datasets import load_sample_images

from framework.data import decode


@functools.cache
def photo() -> Image.Image:
    return Image.fromarray(load_sample_images().images[0]).resize((160, 120))


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(photo(), "JPEG", exif=exif)


def deep() -> bytes:
    return encoded(Image.fromarray(np.arange(65536, dtype=np.uint16).reshape(256, 256)), "PNG")


KINDS: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: encoded(photo(), "JPEG", quality=90),
    "jpeg 4:4:4": lambda: encoded(photo(), "JPEG", subsampling=0),
    "progressive": lambda: encoded(photo(), "JPEG", progressive=True),
    "grey jpeg": lambda: encoded(photo().convert("L"), "JPEG"),
    "cmyk": lambda: encoded(photo().convert("CMYK"), "JPEG"),
    "turned": turned,
    "png": lambda: encoded(photo(), "PNG"),
    "grey": lambda: encoded(photo().convert("L"), "PNG"),
    "one bit": lambda: encoded(photo().convert("1"), "PNG"),
    "palette": lambda: encoded(photo().convert("P"), "PNG"),
    "grey with alpha": lambda: encoded(photo().convert("LA"), "PNG"),
    "alpha": lambda: encoded(photo().convert("RGBA"), "PNG"),
    "16 bits": deep,
    "one pixel": lambda: encoded(photo().resize((1, 1)), "PNG"),
    "gif": lambda: encoded(photo(), "GIF"),
    "animation": lambda: encoded(
        photo().convert("P"), "GIF", save_all=True, append_images=[Image.new("P", photo().size)]
    ),
    "webp": lambda: encoded(photo(), "WEBP"),
    "bmp": lambda: encoded(photo(), "BMP"),
    "tiff": lambda: encoded(photo(), "TIFF"),
}


@pytest.fixture
def only_pillow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine that has no other decoder."""
    monkeypatch.setattr(decode, "_fast", lambda: ("pillow", decode._with_pillow))
    yield


@pytest.mark.parametrize("kind", KINDS)
def test_every_decoder_gives_the_same_pixels(kind: str, request: pytest.FixtureRequest) -> None:
    if kind == "webp" and not features.check("webp"):
        pytest.skip("this pillow has no webp")
    data = KINDS[kind]()
    fast = decode.decode_image(data)
    assert not decode.decoder().startswith("pillow")
    request.getfixturevalue("only_pillow")
    slow = decode.decode_image(data)
    assert fast.dtype == slow.dtype == torch.uint8
    assert fast.shape[0] == 3
    assert torch.equal(fast, slow)


def test_what_comes_out_is_the_picture() -> None:
    wanted = torch.from_numpy(np.array(photo())).permute(2, 0, 1)
    assert torch.equal(decode.decode_image(KINDS["png"]()), wanted)
    assert torch.equal(decode.decode_image(KINDS["alpha"]()), wanted)
    upright = decode.decode_image(KINDS["turned"]())
    assert tuple(upright.shape) == (3, 160, 120)
    difference = (upright.float() - torch.rot90(wanted, -1, (1, 2)).float()).abs().mean()
    assert difference < 8
    cmyk = decode.decode_image(KINDS["cmyk"]())
    assert (cmyk.float() - wanted.float()).abs().mean() < 8
    assert decode.decode_image(deep())[0].flatten().tolist() == [round(v * 255 / 65535) for v in range(65536)]


@pytest.mark.parametrize("decoders", ["all", "pillow"])
@pytest.mark.parametrize("kind", ["jpeg", "progressive", "png", "cmyk", "16 bits", "webp", "tiff"])
def test_what_is_cut_off_or_damaged_raises(kind: str, decoders: str, request: pytest.FixtureRequest) -> None:
    if decoders == "pillow":
        request.getfixturevalue("only_pillow")
    whole = KINDS[kind]()
    for part in (0, 1, 12, len(whole) // 3, len(whole) * 4 // 5):
        with pytest.raises(ValueError):
            decode.decode_image(whole[:part])


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\nnonsense" * 9, b"text, named .jpg\n" * 99, bytes(1000)])
def test_what_is_no_image_raises(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode.decode_image(data)


def test_a_file_that_would_unpack_to_gigabytes_is_refused_by_its_header() -> None:
    bomb = bytearray(KINDS["png"]())
    bomb[16:24] = (100_000).to_bytes(4, "big") * 2
    with pytest.raises(ValueError, match="100000 x 100000 pixels, more than the 178,956,970"):
        decode.decode_image(bytes(bomb))
    with pytest.raises(ValueError, match="160 x 120 pixels, more than the 1,000"):
        decode.decode_image(KINDS["jpeg"](), max_pixels=1000)


def test_large_photos_are_made_smaller_only_on_demand_and_never_too_small() -> None:
    large = encoded(photo().resize((1600, 1200)), "JPEG")
    assert tuple(decode.decode_image(large).shape) == (3, 1200, 1600)
    assert tuple(decode.decode_image(large, shrink_to=256).shape) == (3, 300, 400)
    assert tuple(decode.decode_image(large, shrink_to=1100).shape) == (3, 1200, 1600)
    assert tuple(decode.decode_image(KINDS["png"](), shrink_to=16).shape) == (3, 120, 160)
