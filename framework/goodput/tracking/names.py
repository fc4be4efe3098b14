"""What MLflow accepts: addresses, names, values. Imports no MLflow.

Guarantee: every key and value that comes out of here is one that MLflow takes, the same input always gives the same
output, and different keys stay different.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from framework.errors import ConfigError

DEFAULT_EXPERIMENT = "framework"
MAX_KEY = 250
MAX_VALUE = 6000
_SERVERS = ("http", "https", "databricks", "uc", "databricks-uc")
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_KEY = "callbacks.mlflow.tracking_uri"


def default_uri(root: Path | str) -> str:
    """The store of all runs under `root` (the folder `run.root`): `sqlite:///<root>/mlflow.db`."""
    return f"sqlite:///{(Path(root).absolute() / 'mlflow.db').as_posix()}"


def check_uri(uri: str) -> str:
    """Refuses an address that MLflow cannot use.

    Returns:
        The same address; the path of an sqlite file is made absolute, so that it does not depend on the folder that
        the exporter or a later command is started in.

    Raises:
        ConfigError: A file store (`file:` or a bare path), which MLflow refuses since 3.17, or an unknown scheme.
    """
    scheme = urlsplit(uri).scheme.lower().split("+")[0]
    if scheme == "sqlite":
        path = re.sub(r"^sqlite(\+\w+)?:(///?)?", "", uri, flags=re.IGNORECASE)
        if not path or path.startswith(("/:", ":memory:")):
            raise ConfigError(f"{_KEY}={uri!r} names no file. Write for example sqlite:////data/runs/mlflow.db.")
        return f"sqlite:///{Path(path).absolute().as_posix()}"
    if uri.lower() == "databricks" or scheme in _SERVERS + _DATABASES:
        return uri
    if scheme in ("", "file") or (len(scheme) == 1 and scheme.isalpha()):
        path = re.sub(r"^file:(//)?", "", uri, flags=re.IGNORECASE) or "mlruns"
        instead = f"sqlite:///{(Path(path).absolute() / 'mlflow.db').as_posix()}"
        raise ConfigError(
            f"{_KEY}={uri!r} is a file store, which MLflow no longer writes. "
            f"Use a database file instead ({_KEY}={instead}) or a server (http://host:5000)."
        )
    raise ConfigError(
        f"{_KEY}={uri!r}: MLflow has no store for {scheme}:. Use sqlite:///<file>, http(s)://<server> or a database."
    )


def sqlite_file(uri: str) -> Path | None:
    """The file of an sqlite store, none for any other address."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def without_password(uri: str) -> str:
    """The address as it may be written to a file or a message."""
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", uri)


def safe_key(key: str) -> str:
    """A parameter or metric key that MLflow takes: letters, digits, `_-. :/`, at most 250 characters.

    Other characters become `_`; of a longer key the middle is replaced by a hash of the whole.
    """
    safe = re.sub(r"[^\w\-. :/]", "_", key)
    parts = [part.strip() for part in safe.split("/")]
    safe = "/".join(part for part in parts if part not in ("", ".")) or "_"
    safe = re.sub(r"^\.\.|(?<=/)\.\.(?=/|$)", "__", safe)
    if len(safe) > MAX_KEY:
        digest = hashlib.sha256(key.encode()).hexdigest()[:10]
        safe = f"{safe[:110]}~{digest}~{safe[-120:]}".replace("~", "_")
    return safe


def safe_value(value: str) -> str:
    """A parameter value of at most 6000 characters; a cut is noted in it."""
    if len(value) <= MAX_VALUE:
        return value
    note = f"... [cut: {len(value)} characters, the whole value is in config.yaml]"
    return value[: MAX_VALUE - len(note)] + note


def safe_params(config: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """A nested configuration as MLflow parameters.

    Returns:
        The parameters, and a note that says what had to be renamed or cut (empty if nothing was).
    """
    params: dict[str, str] = {}
    renamed: list[str] = []
    cut: list[str] = []
    for key, value in _flatten(config):
        name = safe_key(key)
        number = 2
        while name in params:
            ending = f"_{number}"
            name, number = safe_key(key)[: MAX_KEY - len(ending)] + ending, number + 1
        params[name] = safe_value(value)
        if name != key:
            renamed.append(f"{key} -> {name}")
        if params[name] != value:
            cut.append(name)
    notes = [f"renamed: {'; '.join(renamed)}"] if renamed else []
    notes += [f"cut: {', '.join(cut)}"] if cut else []
    note = ". ".join([*notes, "The whole configuration is the artifact config.yaml"]) if notes else ""
    return params, note if len(note) <= MAX_VALUE else note[: MAX_VALUE - 3] + "..."


def _flatten(node: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Dotted keys and readable values; a list of plain values stays one value, one of mappings is numbered."""
    if isinstance(node, Mapping) and node:
        for key, value in node.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(node, list) and any(isinstance(item, Mapping) for item in node):
        for index, item in enumerate(node):
            yield from _flatten(item, f"{prefix}.{index}")
    else:
        yield prefix, node if isinstance(node, str) else json.dumps(node, ensure_ascii=False, default=str)
