"""Keeps obstore, the client of object stores, usable in every process.

Guarantee: what a process gets from here was made in that process. A child that was forked after its parent used
obstore has the parent's objects without the threads that serve them: a call would wait for ever, and so might dropping
one. So a child loads the extension a second time, from a copy that the system takes for another library, with stores
of its own; what it inherited is never touched and never freed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from types import ModuleType
from typing import Any

from framework.volume.base import VolumeError

_EXTENSION = "obstore._obstore"
_NAMES = (_EXTENSION, "obstore._store", "obstore.exceptions")  # what the extension enters into sys.modules
_CLASSES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore", "http": "HTTPStore", "https": "HTTPStore"}
_VARIABLES = ("AWS_", "GOOGLE_", "AZURE_")
_OF_CLIENT = {
    "allow_http", "allow_invalid_certificates", "connect_timeout", "http1_only", "http2_only", "pool_idle_timeout",
    "pool_max_idle_per_host", "proxy_url", "proxy_ca_certificate", "proxy_excludes", "read_timeout", "root_certificate",
    "timeout", "user_agent",
}  # fmt: skip


@dataclass(frozen=True)
class Address:
    """Which store: equal ones share their connections.

    Args:
        scheme: s3, gs, az, http or https.
        bucket: The bucket or container; of a web server the whole URL.
        retry_seconds: How long a request is tried again.
        options: Settings by the names that obstore knows, sorted.
        environment: Variables that matter to the store when it was asked for, sorted.
    """

    scheme: str
    bucket: str
    retry_seconds: float
    options: tuple[tuple[str, str], ...] = ()
    environment: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def address(scheme: str, bucket: str, retry_seconds: float, options: dict[str, str]) -> Address:
    """The address of a store with this process's environment."""
    variables = sorted(one for one in os.environ.items() if one[0].upper().startswith(_VARIABLES))
    return Address(scheme, bucket, retry_seconds, tuple(sorted(options.items())), tuple(variables))


class Library:
    """The extension as this process may use it.

    Args:
        module: obstore's compiled module.
    """

    def __init__(self, module: ModuleType) -> None:
        self.module: Any = module
        self.streams: set[Any] = set()  # in use: one that a child inherits must not be freed there
        self._stores: dict[Address, Any] = {}

    def store(self, address: Address) -> Any:
        """The store of an address, made when first asked for.

        Raises:
            ValueError: An option has a value that it cannot have.
        """
        if address not in self._stores:
            self._stores[address] = self._made(address)
        return self._stores[address]

    def _made(self, address: Address) -> Any:
        kind = getattr(self.module._store, _CLASSES[address.scheme])
        options = {key: value for key, value in address.options if key not in _OF_CLIENT}
        client = {key: _client_value(key, value) for key, value in address.options if key in _OF_CLIENT}
        client.setdefault("timeout", timedelta(seconds=min(60.0, max(10.0, address.retry_seconds / 2))))
        endpoints = [value for key, value in (*address.environment, *address.options) if "ENDPOINT" in key.upper()]
        if any(one.startswith("http://") for one in (*endpoints, address.bucket)):
            client.setdefault("allow_http", True)
        cap = min(10.0, max(0.2, address.retry_seconds / 4))
        backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=cap), "base": 2}
        seconds = timedelta(seconds=address.retry_seconds)
        retry = {
            "max_retries": 10_000 if address.retry_seconds > 0 else 0,
            "retry_timeout": seconds,
            "backoff": backoff,
        }
        if kind.__name__ == "HTTPStore":
            return kind(address.bucket, client_options=client, retry_config=retry)
        return kind(address.bucket, **options, client_options=client, retry_config=retry)

    @contextlib.contextmanager
    def holding(self, stream: Any) -> Iterator[Any]:
        """Keeps a stream for whoever is forked meanwhile."""
        self.streams.add(stream)
        try:
            yield stream
        finally:
            self.streams.discard(stream)

    def never_free(self) -> None:
        """Makes all objects that the parent left here immortal: freeing one may wait for a thread that is not there."""
        for one in (self, self.module, *self._stores.values(), *self.streams):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


_lock = threading.Lock()
_library: Library | None = None


def library(shown: str) -> Library:
    """The library of this process, loaded when first asked for.

    Args:
        shown: What needs it, for the message.

    Raises:
        VolumeError: obstore is not installed.
    """
    global _library
    with _lock:
        if _library is None:
            try:
                _library = Library(_copy() if _EXTENSION in sys.modules else importlib.import_module(_EXTENSION))
            except ImportError as error:
                raise VolumeError(
                    f"{shown} needs obstore: pip install 'goodput-framework[remote]' ({error})"
                ) from error
        return _library


def _after_fork() -> None:
    global _library, _lock
    _lock = threading.Lock()  # a thread of the parent may have held it
    if _library is not None:
        _library.never_free()
        _library = None


os.register_at_fork(after_in_child=_after_fork)


def _copy() -> ModuleType:
    """The extension once more, with state of its own: the loader of the system goes by file, so it gets another file."""
    original = sys.modules[_EXTENSION].__file__
    assert original is not None
    with open(original, "rb") as source:
        content = source.read()
    try:
        fd = os.memfd_create("obstore", os.MFD_CLOEXEC)
        path = f"/proc/{os.readlink('/proc/self')}/fd/{fd}"  # by number: the loader knows paths it has seen
    except OSError:
        fd, path = tempfile.mkstemp(prefix="obstore-", suffix=".so")
    try:
        with open(fd, "wb", closefd=False) as target:
            target.write(content)
        return _loaded(path)
    finally:
        os.close(fd)
        if not path.startswith("/proc/"):
            os.unlink(path)


def _loaded(path: str) -> ModuleType:
    name = _EXTENSION.rpartition(".")[2]
    kept = {one: sys.modules[one] for one in _NAMES if one in sys.modules}
    try:
        loader = importlib.machinery.ExtensionFileLoader(name, path)
        spec = importlib.util.spec_from_file_location(name, path, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    finally:
        sys.modules.update(kept)
    return module


def _client_value(key: str, value: str) -> object:
    if key.startswith(("allow_", "http1_", "http2_")):
        return value.strip().lower() in ("1", "true", "yes", "on")
    return value
