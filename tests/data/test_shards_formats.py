"""Shards: what is in tar, parquet and text files comes out of them whole, or an error names shard and byte."""

from __future__ import annotations

import io
import json
import random
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shard_sets import numbered, share, stream, write, write_tar

from framework.data import ShardStream
from framework.data.shards.base import Bytes
from framework.data.shards.parquet import ParquetSamples
from framework.errors import ConfigError, DataError

PLAIN: dict[str, Any] = {"decode": None, "buffer": 1, "shuffle_shards": False}
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def samples(folder: Path, **options: Any) -> list[Any]:
    return [sample for _, sample in share(ShardStream(folder, **PLAIN | options))]


@pytest.mark.parametrize("format", FORMATS)
def test_a_tar_of_each_kind_gives_what_tarfile_put_in(format: str, tmp_path: Path) -> None:
    names = ["a", "b/deep/er/c", "b/ü", "d" * 90]
    if format != "ustar":
        names += ["e" * 300, "f/" * 120 + "g"]
    made = [
        {"__key__": name, "jpg": random.Random(name).randbytes(size), "seg.png": b"x", "cls": str(number).encode()}
        for number, (name, size) in enumerate(zip(names, (0, 511, 512, 513, 200_000, 7), strict=False))
    ]
    write_tar(tmp_path / "s.tar", made, FORMATS[format])
    assert samples(tmp_path) == made


def test_what_is_no_sample_is_left_out_of_a_tar(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        for name in ("a/", "a/._x.jpg", "a/x.JPG", "a/noending", "__meta__", "a/y.jpg"):
            info = tarfile.TarInfo(name.rstrip("/"))
            info.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            info.size = 0 if name.endswith("/") else 3
            tar.addfile(info, io.BytesIO(b"abc"))
        link = tarfile.TarInfo("a/z.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "y.jpg"
        tar.addfile(link)
    assert samples(tmp_path) == [{"__key__": "a/x", "jpg": b"abc"}, {"__key__": "a/y", "jpg": b"abc"}]


def test_lines_end_at_line_feeds_alone(tmp_path: Path) -> None:
    lines = ["one", "", "two\u2028still\x0btwo", "drei\r", "x" * 300_000, "ü"]
    (tmp_path / "a.txt").write_bytes("\n".join(lines).encode())  # none after the last
    (tmp_path / "b.txt").write_bytes(b"first\r\nsecond\n")
    made = ShardStream(tmp_path, **PLAIN)
    assert made.counts.tolist() == [6, 2]
    given = [sample for _, sample in share(made)]
    assert given == [line.removesuffix("\r") for line in lines] + ["first", "second"]
    for at in range(len(given)):  # beginning anywhere is the same
        assert [sample for _, sample in share(made, taken=at)] == given[at:]


@pytest.mark.parametrize("kind", ["tar", "parquet", "text", "jsonl"])
@pytest.mark.parametrize("buffer", [1, 4, 1000])
def test_from_any_sample_on_the_same_follow(kind: str, buffer: int, tmp_path: Path) -> None:
    made = stream(write(tmp_path, kind, [5, 1, 9, 3]), kind, buffer=buffer)
    whole = share(made, 2, seed=9)
    assert all(number == sample for number, sample in whole)
    assert sorted(number for number, _ in whole) == list(range(18))
    for at in range(18):
        assert share(made, 2, seed=9, taken=at) == whole[at:]
    assert share(made, 3, seed=9) != whole and share(made, 2, seed=8) != whole


def test_no_sample_is_moved_farther_than_its_window(tmp_path: Path) -> None:
    made = stream(write(tmp_path, "text", [40, 40]), "text", buffer=10, shuffle_shards=False)
    order = [number for number, _ in share(made)]
    assert order != list(range(80))
    assert [sorted(order[at : at + 10]) for at in range(0, 80, 10)] == [
        [*range(at, at + 10)] for at in range(0, 80, 10)
    ]


def test_parquet_reads_the_columns_that_are_wanted(tmp_path: Path) -> None:
    write(tmp_path, "parquet", [200], rows=70)
    assert samples(tmp_path)[199] == {"cls": 199, "name": "n199"}
    assert samples(tmp_path, fields=["name", "cls"])[71] == ("n71", 71)
    data = (tmp_path / "s000.parquet").read_bytes()
    source = Bytes(len(data), lambda offset, length: data[offset : offset + length], 1000)
    assert ParquetSamples(source, ["name"]).take(199) == {"name": "n199"}  # the other column is not read
    with pytest.raises(ConfigError, match=r"s000\.parquet: fields=\['label'\].*There are: cls, name"):
        ShardStream(tmp_path, fields=["label"])


def test_parts_are_decoded_by_their_endings_and_pickles_stay_bytes(tmp_path: Path) -> None:
    array, picture = io.BytesIO(), io.BytesIO()
    np.save(array, np.arange(3))
    np.save(objects := io.BytesIO(), np.array([object]), allow_pickle=True)
    from PIL import Image

    Image.new("RGB", (4, 2), (10, 20, 30)).save(picture, "png")
    sample = {
        "__key__": "k", "png": picture.getvalue(), "cls": b"7", "json": b'{"a": [1]}', "txt": "ü".encode(),
        "mask.npy": array.getvalue(), "pkl": b"cos\nsystem\n",
    }  # fmt: skip
    write_tar(tmp_path / "s.tar", [sample])
    ((_, made),) = share(ShardStream(tmp_path))
    assert made["png"].shape == (3, 2, 4) and made["png"][:, 0, 0].tolist() == [10, 20, 30]
    assert (made["cls"], made["json"], made["txt"], made["pkl"]) == (7, {"a": [1]}, "ü", b"cos\nsystem\n")
    assert made["mask.npy"].tolist() == [0, 1, 2]
    assert share(ShardStream(tmp_path, fields=["jpg;cls", "__key__"])) == [(0, (7, "k"))]
    write_tar(tmp_path / "s.tar", [{"__key__": "k", "npy": objects.getvalue()}])
    ((_, error),) = share(ShardStream(tmp_path))
    assert "s.tar, sample 0 of 1 ('k'): ValueError: 'npy'" in str(error) and "allow_pickle=False" in str(error)


def test_a_line_that_is_no_json_is_an_error_of_that_line_alone(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text('{"a": 1}\n{"a": \n\n{"a": 3}\n')
    given = [sample for _, sample in share(ShardStream(tmp_path, buffer=1))]
    assert given[0] == {"a": 1} and given[3] == {"a": 3}
    assert "s.jsonl, sample 1 of 4: JSONDecodeError" in str(given[1]) and isinstance(given[2], DataError)
    (tmp_path / "s.jsonl").unlink()
    (tmp_path / "s.txt").write_bytes(b"good\nb\xffd\ngood\n")
    given = [sample for _, sample in share(ShardStream(tmp_path, buffer=1))]
    assert given[::2] == ["good", "good"]
    assert "s.txt, sample 1 of 3: damaged at byte 6: line 1 is no UTF-8" in str(given[1])


def test_a_tar_that_is_cut_off_is_refused_by_name_and_byte(tmp_path: Path) -> None:
    whole = tmp_path / "whole.tar"
    write_tar(whole, numbered(0, 4, 2000))
    data = whole.read_bytes()
    whole.unlink()
    (tmp_path / "s.tar").write_bytes(data[: 512 * 9])  # between two files
    with pytest.raises(DataError, match=r"s\.tar is damaged at byte 4,608: it ends without the mark of its end"):
        ShardStream(tmp_path)
    (tmp_path / "s.tar").write_bytes(data[: 512 * 12])
    with pytest.raises(
        DataError, match=r"s\.tar is damaged at byte 4,608: it ends at byte 6,144, within a file of 2,000"
    ):
        ShardStream(tmp_path)
    (tmp_path / "s.tar").write_bytes(data[: 512 * 9 + 100])
    with pytest.raises(DataError, match=r"s\.tar is damaged at byte 4,608: it ends within a header \(100 of 512"):
        ShardStream(tmp_path)
    (tmp_path / "s.tar").write_bytes(data[:4608] + b"\0" * 100 + b"junk" + data[4712:])
    with pytest.raises(DataError, match=r"s\.tar is damaged at byte 4,608: no tar header"):
        ShardStream(tmp_path)


def test_every_damaged_byte_of_a_header_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "s.tar"
    write_tar(path, numbered(0, 2, 100), tarfile.USTAR_FORMAT)
    data = path.read_bytes()
    chance = random.Random(1)
    for _ in range(60):
        place = chance.randrange(0, 512)
        if 148 <= place < 156:
            continue  # its checksum: blanks and zeros mean the same there
        path.write_bytes(data[:place] + bytes([data[place] ^ 1 << chance.randrange(8)]) + data[place + 1 :])
        with pytest.raises(DataError, match="damaged at byte 0"):
            ShardStream(tmp_path)


def test_what_follows_a_damaged_place_is_an_error_and_other_shards_go_on(tmp_path: Path) -> None:
    write(tmp_path, "tar", [4, 3], size=600)
    path = tmp_path / "s000.tar"
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        offsets = [member.offset for member in tar]
    data[offsets[4] : offsets[4] + 20] = b"#" * 20  # the third sample begins there
    path.write_bytes(data)
    made = stream(tmp_path, "tar", buffer=1, shuffle_shards=False, samples=[4, 3])
    given = dict(share(made))
    assert [given[number] for number in (0, 4, 5, 6)] == [0, 4, 5, 6]
    for number in (1, 2, 3):  # of the second nobody knows whether it is whole
        text = f"s000.tar, sample {number} of 4: damaged at byte {offsets[4]:,}: no tar header"
        assert text in str(given[number])


def test_a_damaged_row_group_leaves_the_others(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    write(tmp_path, "parquet", [9], rows=3)
    path = tmp_path / "s000.parquet"
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    data = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = b"\xff" * column.total_compressed_size
    path.write_bytes(data)
    given = [sample for _, sample in share(stream(tmp_path, "parquet", buffer=1))]
    assert given[:3] + given[6:] == [0, 1, 2, 6, 7, 8]
    for number, sample in enumerate(given[3:6], 3):
        assert f"sample {number} of 9: damaged at byte {start:,}: row group 1 cannot be read" in str(sample)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"s000\.parquet is damaged at byte [\d,]+: its footer cannot be read"):
        stream(tmp_path, "parquet")


def test_compressed_and_mixed_shards_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(b"\x1f\x8b...")
    with pytest.raises(ConfigError, match=r"1 of 1 shards of .* are compressed \('a\.tar\.gz'\).*Unpack"):
        ShardStream(tmp_path)
    (tmp_path / "a.tar.gz").rename(tmp_path / "a.tar")
    with pytest.raises(DataError, match=r"a\.tar is damaged at byte 0: it is compressed: unpack it"):
        ShardStream(tmp_path)
    write_tar(tmp_path / "a.tar", numbered(0, 3))
    write(tmp_path, "jsonl", [2])
    with pytest.raises(ConfigError, match=r"is not clear: 'a\.tar' \(tar\), 's000\.jsonl' \(text\)\. Give format"):
        ShardStream(tmp_path)
    assert len(ShardStream(tmp_path, format="tar")) == 3
    assert len(ShardStream(tmp_path, pattern="s*.jsonl")) == 2
    with pytest.raises(DataError, match=r"None of the 2 files of .* fits pattern='train-\*'"):
        ShardStream(tmp_path, pattern="train-*")
    with pytest.raises(ConfigError, match=r"format='tra' is none of auto, tar.*Did you mean 'tar'"):
        ShardStream(tmp_path, format="tra")


def test_a_bug_of_the_transform_is_passed_on_and_a_bad_sample_is_named(tmp_path: Path) -> None:
    write(tmp_path, "text", [3])

    def missing(sample: str) -> Any:
        return undefined_name  # noqa: F821

    with pytest.raises(NameError):
        share(ShardStream(tmp_path, transform=missing))
    ((_, bad), *_) = share(ShardStream(tmp_path, transform=json.loads, decode=lambda line: line + "]", buffer=1))
    assert "s000.txt, sample 0 of 3: JSONDecodeError" in str(bad)
