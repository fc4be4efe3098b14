"""What is handed to MLflow is what MLflow takes."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.errors import ConfigError
from framework.goodput.tracking.names import check_uri, default_uri, safe_key, safe_params, without_password

keys = st.one_of(st.text(max_size=400), st.text(alphabet="./ a[0]@+:~", max_size=40))


def is_taken(key: str) -> bool:
    """MLflow's own rules (utils/validation.py of 3.17)."""
    normal = posixpath.normpath(key)
    is_unique = not (normal != key or normal == "." or normal.startswith(("..", "/")))
    return bool(re.match(r"^[/\w.\- :]*$", key)) and is_unique and 0 < len(key) <= 250


@given(keys)
def test_every_key_becomes_one_that_is_taken(key: str) -> None:
    assert is_taken(safe_key(key))
    assert not is_taken(key) or key != key.strip() or " /" in key or "/ " in key or safe_key(key) == key


values = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers()))
trees = st.recursive(
    values, lambda inner: st.one_of(st.dictionaries(keys, inner), st.lists(inner, max_size=3)), max_leaves=12
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(keys, trees, max_size=8))
def test_every_configuration_becomes_parameters_that_are_taken(config: dict[str, Any]) -> None:
    params, note = safe_params(config)
    assert all(is_taken(key) for key in params)
    assert all(len(value) <= 6000 for value in params.values())
    assert len(note) <= 6000
    assert (params, note) == safe_params(config)


def test_keys_that_become_equal_stay_apart() -> None:
    params, note = safe_params({"a[0]": 1, "a(0)": 2, "a_0_": 3})
    assert sorted(params.values()) == ["1", "2", "3"]
    assert "a[0] -> a_0_" in note


def test_values_read_as_in_the_configuration() -> None:
    params, note = safe_params(
        {"a": {"b": None, "c": True, "d": [1, 2], "e": {}, "f": "ü", "g": 1e-3, "h": [{"i": 1}]}}
    )
    assert params == {
        "a.b": "null",
        "a.c": "true",
        "a.d": "[1, 2]",
        "a.e": "{}",
        "a.f": "ü",
        "a.g": "0.001",
        "a.h.0.i": "1",
    }
    assert note == ""


@pytest.mark.parametrize(
    "uri", ["file:./mlruns", "file:///data/mlruns", "./mlruns", "/data/mlruns", "mlruns", "", "FILE:x"]
)
def test_a_file_store_is_refused_with_the_sqlite_alternative(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"callbacks\.mlflow\.tracking_uri=sqlite:////.*/mlflow\.db"):
        check_uri(uri)


@pytest.mark.parametrize("uri", ["ftp://host", "redis://x", "sqlite://", "sqlite:///:memory:"])
def test_an_address_that_mlflow_has_no_store_for_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="tracking_uri"):
        check_uri(uri)


@pytest.mark.parametrize(
    "uri",
    [
        "http://127.0.0.1:5000",
        "https://u:p@host/x",
        "postgresql+psycopg2://u:p@h/db",
        "databricks",
        "databricks://profile",
    ],
)
def test_servers_and_databases_are_taken_as_they_are(uri: str) -> None:
    assert check_uri(uri) == uri


def test_a_relative_sqlite_file_no_longer_depends_on_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_uri("sqlite:///runs/mlflow.db") == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert check_uri(default_uri("my runs")) == f"sqlite:///{tmp_path}/my runs/mlflow.db"


def test_passwords_are_not_written_down() -> None:
    assert without_password("postgresql://me:secret@host/db") == "postgresql://me:***@host/db"
    assert without_password("http://host:5000") == "http://host:5000"
