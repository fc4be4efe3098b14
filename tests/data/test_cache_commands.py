"""`python -m framework.data cache`: what the cache holds is seen, and goes only if nobody uses it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from cache_support import ALL, another, assert_counted, keep, make_idle, read

from framework.data.__main__ import main
from framework.data.cache import LocalCache


@pytest.fixture
def cache(tmp_path: Path) -> LocalCache:
    """Two datasets, of which the first was used last; half-written and in transit."""
    cache = LocalCache(tmp_path / "cache", **ALL)
    for name, label, files in (("3f2a01", "s3://bucket/train", 3), ("3f99", "/mnt/[red]photos", 1)):
        space = cache.open(name, label)
        for number in range(files):
            assert keep(space, f"x/{number}", 1000)
        space.close()
        make_idle(space, 3600 * files)
    return cache


@pytest.fixture
def call(cache: LocalCache, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command. Returns its exit code, stdout and stderr."""

    def call(*words: str, root: Path | None = None) -> tuple[int, str, str]:
        code = main(["cache", *words, "--root", str(root or cache.root)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_ls_shows_what_is_there_and_who_uses_it(cache: LocalCache, call: Any) -> None:
    code, out, err = call("ls")
    assert code == 0 and err == ""
    lines = [line.split() for line in out.splitlines() if "3f" in line]
    assert lines[0][:5] == ["3f99", "/mnt/[red]photos", "1", "1.0", "kB"]
    assert lines[1] == ["3f2a01", "s3://bucket/train", "3", "3.0", "kB", "3", "h"]
    assert "4.0 kB in all." in out and "of the disk are free" in out


def test_ls_as_json_names_the_processes(cache: LocalCache, call: Any) -> None:
    space = cache.open("3f99")
    with another(lambda: (read(space, "x/0", 1000), area := space.transit(), area.write("t", 7, [bytes(7)]))) as pid:
        found = json.loads(call("ls", "--json")[1])
    assert found["root"] == str(cache.root) and 0 < found["disk_free"] <= found["disk_bytes"]
    first, second = found["datasets"]
    assert (
        first.pop("last_use") > second.pop("last_use")
        and first.pop("age_seconds") >= 0
        and second.pop("age_seconds") > 1
    )
    assert first == {
        "dataset": "3f99", "source": "/mnt/[red]photos", "folder": str(space.folder), "files": 1, "bytes": 1000,
        "transit_bytes": 7, "in_use": True, "pids": [pid],
    }  # fmt: skip
    assert (second["in_use"], second["pids"], second["bytes"]) == (False, [], 3000)


def test_ls_of_no_cache_says_so(call: Any, tmp_path: Path) -> None:
    assert call("ls", root=tmp_path / "none")[:2] == (0, f"There is no cache in {tmp_path / 'none'}.\n")
    assert not (tmp_path / "none").exists()
    code, out, err = call("ls", root=tmp_path)
    assert code == 1 and out == "" and err.startswith(f"error: {tmp_path} is no cache")
    assert call("clear", root=tmp_path)[0] == 1 and (tmp_path / "cache").exists()


def test_clear_deletes_what_nobody_uses(cache: LocalCache, call: Any) -> None:
    (cache.layout.trash / "half" / "files").mkdir(parents=True)
    (cache.layout.trash / "half" / "files" / "x").write_bytes(bytes(500))
    cache.usage.add(500)
    assert "not deleted yet" in call("ls")[1]
    code, out, err = call("clear")
    assert (code, out, err) == (0, f"4.5 kB were freed: 2 of 2 datasets in {cache.root}.\n", "")
    assert not os.listdir(cache.layout.data) and not os.listdir(cache.layout.trash)
    assert_counted(cache)
    assert call("ls")[1] == f"{cache.root} holds no dataset.\n"
    assert call("clear")[:2] == (0, f"0 bytes were freed: 0 of 0 datasets in {cache.root}.\n")


def test_clear_leaves_what_is_in_use_unless_it_is_forced(cache: LocalCache, call: Any) -> None:
    space = cache.open("3f99")
    with another(lambda: read(space, "x/0", 1000)) as pid:
        code, out, err = call("clear")
        assert code == 1 and "3.0 kB were freed: 1 of 2 datasets" in out
        assert err == f"error: 3f99 /mnt/[red]photos is in use by pid {pid}. Wait for it.\n"
        assert os.listdir(cache.layout.data) == ["3f99"]
        code, out, err = call("clear", "--json")
        found = json.loads(out)
        assert code == 1 and found["bytes"] == 0 and "in use" in found["datasets"][0]["kept"]
        assert call("clear", "--force")[0] == 0
    assert not os.listdir(cache.layout.data)
    assert_counted(cache)


def test_clear_of_one_dataset_goes_by_the_beginning_of_its_name(cache: LocalCache, call: Any) -> None:
    code, _, err = call("clear", "--dataset", "3f")
    assert code == 1 and "has 2 datasets that begin with '3f'. They are: 3f99, 3f2a01." in err
    code, _, err = call("clear", "--dataset", "x")
    assert code == 1 and "has no datasets that begin with 'x'. There are: 3f99, 3f2a01." in err
    assert call("clear", "--dataset", "3f2")[0] == 0
    assert os.listdir(cache.layout.data) == ["3f99"]
    assert_counted(cache)


def test_a_damaged_description_hinders_nothing(cache: LocalCache, call: Any) -> None:
    (cache.layout.data / "3f99" / "about.json").write_text("[1")
    (cache.layout.data / "3f2a01" / "about.json").write_text('{"label": 3, "fingerprint": "\\u001b[31m"}')
    (cache.layout.data / "stray").write_text("x")
    code, out, _ = call("ls")
    assert code == 0 and "3f99" in out and "\x1b" not in out
    assert call("clear", "--dataset", "3f99")[0] == 0
