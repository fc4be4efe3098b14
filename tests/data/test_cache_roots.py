"""Where a cache lies: never in a folder that is used for something else, nor in another user's."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
from cache_support import ALL, ended, fork, keep, read
from support.faultfs import FaultFS

from framework.data.cache import LocalCache, open_cache
from framework.data.cache.layout import default_roots
from framework.data.cache.local import default_root
from framework.errors import ConfigError


def test_a_folder_with_other_things_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years")
    (tmp_path / "data").mkdir()
    with pytest.raises(ConfigError, match=f"{tmp_path} is not empty and no cache: it has 'data'"):
        LocalCache(tmp_path).open("d1")
    assert sorted(os.listdir(tmp_path)) == ["data", "thesis.tex"] and not os.listdir(tmp_path / "data")


@pytest.mark.parametrize("text", ["", "{}", '{"format": "goodput-cache/9"}', "[]", "\x00"])
def test_a_cache_of_another_format_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "cache.json").write_text(text)
    with pytest.raises(ConfigError, match=r"cache\.json names no format that is known here \(goodput-cache/1\)"):
        LocalCache(tmp_path).open("d1")
    assert os.listdir(tmp_path) == ["cache.json"]


def test_an_empty_folder_is_taken_and_a_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert keep(LocalCache(tmp_path / "empty", **ALL).open("d1"), "a", 10)
    assert json.loads((tmp_path / "empty" / "cache.json").read_text()) == {"format": "goodput-cache/1"}
    (tmp_path / "file").write_text("x")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=f"the cache {root} cannot be used: .*cache.root"):
            LocalCache(root).open("d1")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_cache_is_refused(tmp_path: Path) -> None:
    cache = LocalCache(tmp_path / "cache", **ALL)
    cache.open("d1")
    os.chown(cache.root, 12345, 12345)
    with pytest.raises(ConfigError, match=r"belongs to user 12345, and this process runs as user 0.*cache.root"):
        LocalCache(tmp_path / "cache").open("d1")
    os.chown(cache.root, 0, 0)

    def other() -> None:
        os.setuid(12345)
        with pytest.raises(
            ConfigError, match=r"belongs to user 0, and this process runs as user 12345|Permission denied"
        ):
            LocalCache(tmp_path / "cache").open("d1")

    assert ended(fork(other)) == 0


def test_many_processes_may_make_it_at_once(tmp_path: Path) -> None:
    def body() -> None:
        for number in range(10):
            assert keep(LocalCache(tmp_path / str(number), **ALL).open("d1"), str(os.getpid()), 10)

    pids = [fork(body) for _ in range(4)]
    assert [ended(pid) for pid in pids] == [0] * 4
    for number in range(10):
        space = LocalCache(tmp_path / str(number), **ALL).open("d1")
        assert all(read(space, str(pid), 10) for pid in pids)
        assert sorted(os.listdir(space.cache.root)) == ["cache.json", "chores", "data", "usage"]


def test_what_a_process_left_that_died_while_it_made_the_cache_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / ".cache.json.abc").write_text("{")
    assert keep(LocalCache(tmp_path, **ALL).open("d1"), "a", 10)


def test_making_the_object_touches_nothing(tmp_path: Path) -> None:
    LocalCache(tmp_path / "cache")
    assert not os.listdir(tmp_path)


def test_the_default_is_a_folder_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = str(os.geteuid())
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert LocalCache().root == tmp_path / "xdg" / "goodput" / user
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the specification
    assert LocalCache().root == tmp_path / ".cache" / "goodput" / user
    (tmp_path / ".cache").write_text("a file")
    assert LocalCache().root.name == f"goodput-{user}"


def test_tests_keep_their_files_out_of_the_cache_of_the_user() -> None:
    """What a run of a test reads from a URL without saying where to keep it; its process inherits the variable."""
    assert not LocalCache().root.is_relative_to(Path("~/.cache").expanduser())


def test_the_default_is_not_on_a_network_mount(
    faultfs: FaultFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(faultfs.path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert default_root() == tmp_path / f"goodput-{os.geteuid()}"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(faultfs.path))
    assert default_root() == tmp_path / ".cache" / "goodput" / str(os.geteuid())
    faultfs.kill()  # one that is away does not hinder either
    assert len(default_roots()) == 2 and default_root().is_relative_to(tmp_path)


def test_the_option_of_a_dataset_names_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cache = LocalCache(tmp_path / "a")
    assert open_cache(cache) is cache and open_cache(False) is None
    for value in (None, True):
        default = open_cache(value)
        assert default is not None and default.root.is_relative_to(tmp_path / "xdg") and default.root.is_dir()
    for place in (tmp_path / "b", str(tmp_path / "b"), {"root": str(tmp_path / "b"), "limit": "1GB"}):
        found = open_cache(place)
        assert found is not None and found.root == tmp_path / "b"
    with pytest.raises(ConfigError, match=r"cache.limt: there is no such option. Did you mean 'limit'\?"):
        open_cache({"limt": 1})
    with pytest.raises(ConfigError, match="cache=3: give a folder, false, or a mapping"):
        open_cache(3)  # type: ignore[arg-type]


def test_without_a_place_for_the_default_one_there_is_no_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert open_cache(None) is None
    assert "there is no cache" in caplog.text and caplog.records[0].levelno == logging.WARNING
    with pytest.raises(ConfigError, match="cannot be used"):
        open_cache(str(tmp_path / "file" / "x"))
