"""The list of files: packed, sorted by bytes, fingerprinted, and refused where it is damaged."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.data.files.manifest import Difference, Manifest, bytes_of, nanoseconds, tag_of, text_of
from framework.errors import DataError

NAMES = st.binary(min_size=1, max_size=12).filter(lambda name: b"\0" not in name)
FILES = st.dictionaries(
    NAMES, st.tuples(st.integers(0, 2**62), st.integers(0, 2**62), st.integers(-(2**63), 2**63 - 1))
)


def made(files: dict[bytes, tuple[int, int, int]], origin: str = "/data") -> Manifest:
    values = list(files.values())
    return Manifest.of(origin, list(files), *([value[number] for value in values] for number in range(3)))


def small(**sizes: int) -> Manifest:
    return made({name.encode(): (size, 7, 0) for name, size in sizes.items()})


@settings(max_examples=60, deadline=None)
@given(FILES, st.randoms(use_true_random=False))
def test_the_list_is_sorted_by_bytes_whatever_the_order_of_the_volume(files, random) -> None:  # type: ignore[no-untyped-def]
    shuffled = list(files)
    random.shuffle(shuffled)
    one, other = made(files), made({name: files[name] for name in shuffled})
    assert [one.raw(index) for index in range(len(one))] == sorted(files) == one.raws()
    assert one.fingerprint == other.fingerprint
    for index, name in enumerate(sorted(files)):
        size, modified, tag = files[name]
        assert (one.size(index), int(one.modified[index]), int(one.tags[index])) == (size, modified, tag)
        assert one.stamp(index) == (tag or modified)
        assert bytes_of(one.name(index)) == name


@settings(max_examples=60, deadline=None)
@given(FILES, st.booleans())
def test_packing_keeps_everything(files, is_portable) -> None:  # type: ignore[no-untyped-def]
    before = made(files, "s3://bücket/\udcff")
    data = before.pack(is_portable=is_portable)
    after = Manifest.unpack(data)
    assert (after.names, after.fingerprint) == (before.names, before.fingerprint)
    for name in ("ends", "sizes", *(() if is_portable else ("modified", "tags"))):
        assert np.array_equal(getattr(after, name), getattr(before, name)), name
        assert getattr(after, name).dtype == np.int64
    assert after.origin == ("" if is_portable else before.origin)
    if is_portable:
        assert not after.modified.any() and not after.tags.any()
        assert data == made({name: (size, 1, 2) for name, (size, _, _) in files.items()}, "/copy").pack(
            is_portable=True
        )


def test_the_fingerprint_tells_names_and_sizes_apart_and_nothing_else() -> None:
    base = small(a=1, b=2)
    others = [small(a=1, b=3), small(a=1, c=2), small(a=1), small(ab=1, c=2), made({b"a": (1, 0, 0), b"bb": (2, 0, 0)})]
    assert len({base.fingerprint, *(one.fingerprint for one in others)}) == 1 + len(others)
    assert made({b"b": (2, 99, 5), b"a": (1, 98, 6)}, "/elsewhere").fingerprint == base.fingerprint
    assert base.fingerprint == "99f0ce24d00d3f75989e81fdead0108c"  # as in checkpoints of earlier versions


def test_the_place_in_a_cache_hangs_on_where_the_files_are_and_not_on_which() -> None:
    assert small(a=1).space == small(b=2).space
    assert small(a=1).space != made({b"a": (1, 7, 0)}, "/other").space


@pytest.mark.parametrize("place", [0, 5, 20, 40, 60, -1, -20])
def test_a_damaged_list_is_refused(place: int) -> None:
    data = bytearray(small(first=10, second=20).pack())
    data[place] ^= 1
    with pytest.raises(DataError, match=r"damaged: its checksum differs|are no list of files that this version reads"):
        Manifest.unpack(bytes(data))


@pytest.mark.parametrize("kept", [0, 10, 16, 30, 41, 60])
def test_a_list_that_was_cut_off_is_refused(kept: int) -> None:
    with pytest.raises(DataError, match=r"damaged|no list of files"):
        Manifest.unpack(small(first=10, second=20).pack()[:kept])


def test_a_list_takes_little_memory_and_travels_as_a_pickle() -> None:
    count = 20_000
    large = Manifest.of("/x", [b"class/image_%08d.jpg" % number for number in range(count)], range(count), range(count))
    data = pickle.dumps(large)
    assert len(data) < 64 * count
    assert pickle.loads(data).fingerprint == large.fingerprint


def test_what_changed_is_counted_and_named() -> None:
    now, before = small(a=1, b=2, d=4, e=5), small(a=1, b=3, c=3)
    difference = Difference.between(now, before)
    assert (difference.added, difference.removed, difference.resized) == ([b"d", b"e"], [b"c"], [b"b"])
    assert str(difference) == "2 added ('d', 'e'), 1 removed ('c'), 1 changed in size ('b')"
    assert str(Difference.between(now, now)) == "nothing"
    many = made({b"%d" % number: (1, 0, 0) for number in range(1234)})
    assert str(Difference.between(many, small(x=1))).startswith("1,234 added ('0', '1', '10', …), 1 removed")


def test_an_older_list_takes_the_stamps_of_files_that_are_still_the_same() -> None:
    now = made({b"same": (5, 11, 1), b"resized": (6, 12, 2), b"new": (7, 13, 3)})
    old = Manifest.unpack(made({b"same": (5, 0, 0), b"resized": (9, 0, 0), b"gone": (1, 0, 0)}).pack(is_portable=True))
    stamped = old.stamped_like(now)
    assert stamped.fingerprint == old.fingerprint
    assert {stamped.name(index): stamped.stamp(index) for index in range(3)} == {"same": 1, "resized": 0, "gone": 0}


def test_names_times_and_tags_are_the_same_everywhere() -> None:
    assert bytes_of(text_of(b"\xff\xc3\xa9")) == b"\xff\xc3\xa9"
    assert nanoseconds(1_700_000_000.123456) == 1_700_000_000_123_000_000
    assert tag_of(None) == tag_of("") == 0
    assert tag_of('"abc"') == tag_of("abc") != tag_of("abd")
    assert tag_of("abc") == 6455300059550759896
