"""A real HTTP proxy in front of the S3 server that does to requests what a test says.

    proxy.fail(503, count=3)                    the next three requests are answered 503
    proxy.fail(500, seconds=2, method="PUT")    all PUTs of the next two seconds
    proxy.fail(503, every=3)                    a third of all requests
    proxy.deny("ExpiredToken", after=4)         four requests pass, then 403 until `heal`
    proxy.cut(1000, count=1, method="GET")      the connection ends after 1000 bytes of the body
    proxy.lose(count=1)                         a PUT is answered 200 and dropped
    proxy.truncate(10, method="GET", count=1)   10 bytes of the body, as if they were all of it
    proxy.delay(0.2); proxy.limit(1_000_000)    each request waits; bytes per second of all together
    proxy.stop(); proxy.start()                 nobody listens on its port; it listens again
    proxy.heal(); proxy.log                     [("PUT", "/bucket/prefix/name"), ...]

Guarantee: faults are met in the order in which they were set, the first that fits; all are over after `heal`. `path` is
a pattern of the path with its query, in which `*` matches all. Threads and sockets end with `close`.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import http.client
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PIECE = 64 << 10
_OWN = {"connection", "transfer-encoding", "content-length", "keep-alive", "server", "date"}


@dataclass
class Fault:
    """What happens to the requests that fit.

    Args:
        kind: fail, cut, lose or truncate.
        method: The method it is for; none: all.
        path: Pattern of the path with its query.
        after: Number of requests that fit and pass before the first that does not.
        count: How many it is for; none: all.
        every: It is for each n-th of them.
        until: Until when, on the monotonic clock; none: for ever.
        status: Of the answer, for fail.
        code: Of the S3 error, for fail.
        size: Bytes, for cut and truncate.
    """

    kind: str
    method: str | None
    path: str
    after: int
    count: int | None
    until: float | None
    every: int = 1
    met: int = 0
    status: int = 0
    code: str = ""
    size: int = 0

    def takes(self, method: str, path: str) -> bool:
        """Whether it is for this request, which then counts."""
        fits = self.method in (None, method) and fnmatch.fnmatchcase(path, self.path)
        if not fits or self.count == 0 or (self.until is not None and time.monotonic() > self.until):
            return False
        if self.after > 0:
            self.after -= 1
            return False
        self.met += 1
        if self.met % self.every:
            return False
        if self.count is not None:
            self.count -= 1
        return True


class S3Proxy:
    """Listens on a free port of this machine and passes requests on to another one.

    Args:
        port: Where the server listens.

    Attributes:
        port: Where the proxy does.
        url: `http://127.0.0.1:port`.
        log: All requests so far, (method, path with query), those that met a fault among them.
        met: How many met a fault.
        most: How many were under way at once, at most.
        brought: Bytes of the bodies that requests brought so far.
    """

    def __init__(self, port: int) -> None:
        self.upstream = port
        self.log: list[tuple[str, str]] = []
        self.met = self.most = self.now = self.brought = 0
        self._lock = threading.Lock()
        self.heal()
        self.port = 0
        self.start()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listens, after `stop` on the same port again."""
        self._server = _Server(("127.0.0.1", self.port), _Handler)
        self._server.proxy = self
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="s3proxy", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends all connections; whoever connects is refused."""
        self._server.shutdown()
        self._server.socket.shutdown(socket.SHUT_RDWR)  # also for children that were forked meanwhile
        self._server.server_close()
        self._thread.join(10)
        self._server.hang_up()

    def fail(self, status: int = 503, **when: Any) -> None:
        """Answers with an error. `when` of all faults: count, seconds, method, path, after, every."""
        codes = {429: "SlowDown", 500: "InternalError", 503: "SlowDown", 403: "AccessDenied", 404: "NoSuchKey"}
        self._add("fail", when, status=status, code=codes.get(status, "Failed"))

    def deny(self, code: str = "AccessDenied", status: int = 403, **when: Any) -> None:
        """Refuses access; real stores say ExpiredToken with 400 or 403."""
        self._add("fail", when, status=status, code=code)

    def cut(self, size: int, **when: Any) -> None:
        """Ends the connection after so many bytes of the body: of the request if it has one, else of the answer."""
        self._add("cut", when, size=size)

    def lose(self, **when: Any) -> None:
        """Answers a PUT like a store that took it, and drops it."""
        self._add("lose", {"method": "PUT"} | when)

    def truncate(self, size: int, **when: Any) -> None:
        """Passes on so many bytes of a body as if they were all: what a GET gets (the default), or what a PUT brings."""
        self._add("truncate", {"method": "GET"} | when, size=size)

    def delay(self, seconds: float) -> None:
        """Each request waits so long before it is passed on."""
        self.seconds = seconds

    def limit(self, bytes_per_second: float) -> None:
        """Bytes of bodies that all requests together may bring and get."""
        self.rate = bytes_per_second

    def heal(self) -> None:
        with self._lock:
            self.faults: list[Fault] = []
        self.seconds, self.rate, self._free = 0.0, 0.0, 0.0

    def requests(self, method: str, pattern: str = "*") -> int:
        """How many requests of a method and path pattern came so far."""
        return sum(one == method and fnmatch.fnmatchcase(path, pattern) for one, path in list(self.log))

    def close(self) -> None:
        self.heal()
        self.stop()

    def _add(self, kind: str, when: dict[str, Any], **what: Any) -> None:
        known = {"count", "seconds", "method", "path", "after", "every"}
        assert set(when) <= known, f"{sorted(set(when) - known)}: known are {sorted(known)}"
        until = time.monotonic() + when["seconds"] if "seconds" in when else None
        scope = (when.get("method"), when.get("path", "*"), when.get("after", 0), when.get("count"), until)
        with self._lock:
            self.faults.append(Fault(kind, *scope, every=when.get("every", 1), **what))

    def next(self, method: str, path: str) -> Fault | None:
        """Logs a request and says what is to happen to it."""
        with self._lock:
            self.log.append((method, path))
            fault = next((one for one in self.faults if one.takes(method, path)), None)
            self.met += fault is not None
        return fault

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        try:
            yield
        finally:
            with self._lock:
                self.now -= 1

    def count(self, size: int) -> None:
        with self._lock:
            self.brought += size

    def pace(self, size: int) -> None:
        """Waits until so many bytes may pass."""
        with self._lock:
            if not self.rate:
                return
            self._free = max(self._free, time.monotonic()) + size / self.rate
            wait = self._free - time.monotonic()
        time.sleep(min(max(wait, 0.0), 60.0))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    proxy: S3Proxy

    def __init__(self, *words: Any) -> None:
        self._open: set[socket.socket] = set()
        super().__init__(*words)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        for one in list(self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nobody's error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = PIECE
    timeout = 60
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.onward = http.client.HTTPConnection("127.0.0.1", self.server.proxy.upstream, timeout=60)

    def finish(self) -> None:
        self.onward.close()
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, format: str, *words: Any) -> None:
        """Nothing is printed: the proxy has its own log."""

    def serve(self) -> None:
        with self.server.proxy.counted():
            self.meet()

    def meet(self) -> None:
        proxy = self.server.proxy
        fault = proxy.next(self.command, self.path)
        length = int(self.headers.get("Content-Length", 0))
        kind = fault.kind if fault else ""
        if fault and kind == "cut" and length:
            self.take(min(fault.size, length))
            self.close_connection = True
            return
        body = self.take(length)
        if proxy.seconds:
            time.sleep(proxy.seconds)
        if fault and kind == "fail":
            self.refuse(fault)
        elif kind == "lose":
            self.answer(200, [("ETag", f'"{hashlib.md5(body).hexdigest()}"')], b"", 0)
        else:
            if fault and kind == "truncate" and length:
                body = body[: fault.size]
            self.pass_on(body, fault if not length else None)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PROPFIND = serve

    def take(self, length: int) -> bytes:
        pieces = []
        while length > 0:
            piece = self.rfile.read(min(length, PIECE))
            if not piece:
                raise ConnectionResetError
            self.server.proxy.count(len(piece))
            self.server.proxy.pace(len(piece))
            pieces.append(piece)
            length -= len(piece)
        return b"".join(pieces)

    def refuse(self, fault: Fault) -> None:
        text = f"<Error><Code>{fault.code}</Code><Message>told to by a test</Message></Error>".encode()
        self.answer(fault.status, [("Content-Type", "application/xml")], text, len(text))

    def pass_on(self, body: bytes, fault: Fault | None) -> None:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _OWN}
        headers["Content-Length"] = str(len(body))
        self.onward.request(self.command, self.path, body=body, headers=headers)
        back = self.onward.getresponse()
        content = back.read()
        length = int(back.headers.get("Content-Length", len(content)))
        if fault and fault.kind == "truncate":
            content, length = content[: fault.size], min(length, fault.size)
        elif fault and fault.kind == "cut":
            content = content[: fault.size]
            self.close_connection = True
        kept = [(name, value) for name, value in back.headers.items() if name.lower() not in _OWN]
        self.answer(back.status, kept, content, length)

    def answer(self, status: int, headers: list[tuple[str, str]], content: bytes, length: int) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            for start in range(0, len(content), PIECE):
                piece = content[start : start + PIECE]
                self.server.proxy.pace(len(piece))
                self.wfile.write(piece)
        self.wfile.flush()
