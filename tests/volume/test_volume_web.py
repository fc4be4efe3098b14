"""Web servers as volumes: files are read, whether or not the server gives ranges, and nothing is ever changed."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.s3proxy import S3Proxy

from framework.volume import Volume, VolumeDenied, VolumeError, VolumeMissing, open_volume

DATA = os.urandom((16 << 20) + 77)


class Plain(SimpleHTTPRequestHandler):
    """Python's own web server: it knows neither ranges nor WebDAV."""

    def log_message(self, format: str, *words: Any) -> None:
        """Nothing is printed."""

    def copyfile(self, source: Any, outputfile: Any) -> None:
        with contextlib.suppress(OSError):  # a client that has what it wants hangs up
            super().copyfile(source, outputfile)


class Ranged(Plain):
    """Gives ranges, as all big servers do."""

    def do_GET(self) -> None:
        data = Path(self.translate_path(self.path))
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not match or not data.is_file():
            return super().do_GET()
        content = data.read_bytes()
        first, last = int(match[1]), min(int(match[2]), len(content) - 1)
        self.send_response(206 if first <= last else 416)
        if first <= last:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        self.send_header("Content-Length", str(max(0, last + 1 - first)))
        self.end_headers()
        self.wfile.write(content[first : last + 1])


@pytest.fixture(params=[Plain, Ranged])
def proxy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[S3Proxy]:
    """A web server with some files, behind a proxy with faults."""
    folder = tmp_path / "files" / "with space"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "big").write_bytes(DATA)
    (folder / "small").write_bytes(b"0123456789")
    (folder / "empty").touch()
    handler = functools.partial(request.param, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        proxy = S3Proxy(server.server_address[1])
        try:
            yield proxy
        finally:
            proxy.close()
            server.shutdown()
            thread.join(60)


@pytest.fixture
def volume(proxy: S3Proxy) -> Volume:
    return open_volume(f"{proxy.url}/files/with%20space", retry_seconds=20)


def test_files_of_a_web_server_are_read(volume: Volume) -> None:
    assert (volume.size("small"), volume.size("empty"), volume.size("gone")) == (10, 0, None)
    assert volume.read("empty") == b"" and volume.read("small", 3, 4) == b"3456"
    assert volume.read("small") == b"0123456789" and volume.at("sub").read("big") == DATA
    buffer = bytearray(9 << 20)
    volume.read_into("sub/big", 100, memoryview(buffer))
    assert buffer == DATA[100 : 100 + (9 << 20)]
    piece, entry = volume.piece("sub/big", 100, 1000)
    assert piece == DATA[100:1100] and entry is not None and (entry.name, entry.size) == ("sub/big", len(DATA))
    with pytest.raises(VolumeMissing, match="http://127"):
        volume.read("gone")
    with pytest.raises(VolumeMissing, match="http://127"):
        volume.piece("gone", 0, 10)
    with pytest.raises(VolumeError, match="early"):
        volume.read("small", 8, 3)
    with pytest.raises(VolumeError, match="early"):
        volume.read("empty", 0, 1)
    with pytest.raises(VolumeError, match="no name of a file"):
        volume.read("../secret")


def test_what_cannot_be_listed_is_not_empty(volume: Volume) -> None:
    for call in (lambda: list(volume.list()), volume.folders):
        with pytest.raises(VolumeError, match=r"with space cannot be listed.*WebDAV"):
            call()


def test_a_web_server_is_never_changed(volume: Volume, proxy: S3Proxy) -> None:
    calls: list[Callable[[], None]] = [
        lambda: volume.put("a", b"1"),
        lambda: volume.upload("a", [b"1"], 1),
        lambda: volume.delete("small"),
        lambda: volume.delete_folder("sub"),
        volume.probe,
    ]
    for call in calls:
        with pytest.raises(VolumeError, match="read only"):
            call()
    assert proxy.log == []


def test_a_web_server_that_fails_is_waited_out_or_named(volume: Volume, proxy: S3Proxy) -> None:
    proxy.fail(503, count=2)
    proxy.cut(100, count=2, method="GET")
    assert volume.read("sub/big") == DATA
    proxy.truncate(100, count=1)
    assert volume.read("sub/big") == DATA
    assert proxy.met == 5
    proxy.deny()
    with pytest.raises(VolumeDenied, match=r"http://127.*sub/big"):
        volume.read("sub/big")
