"""Stops a process at its n-th call that changes files, or lets that call fail.

    outcome = supervise(body, folder, stop_at=17)             # SIGKILL instead of the 17th call
    outcome = supervise(body, folder, stop_at=17, error=5)    # the 17th call gives EIO and is not made
    outcome.code, outcome.calls                               # exit code; what was called, (name, path)

The kernel itself asks us before each call (a seccomp filter with user notification), so that nothing that the process
does can slip past: neither libraries nor threads. Counted are calls that change files below `folder`; between two of
them the files do not change, so that a kill at every one of them meets every state in which a kill can leave them.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import platform
import select
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

WAIT_SECONDS = 60.0

# by machine: the number of `seccomp`, the architecture as the filter sees it, calls on an open file, calls on names
_X86 = (
    317, 0xC000003E,
    {1: "write", 18: "pwrite64", 20: "writev", 74: "fsync", 75: "fdatasync", 77: "ftruncate", 285: "fallocate",
     296: "pwritev", 328: "pwritev2"},
    {2: "open", 76: "truncate", 82: "rename", 83: "mkdir", 84: "rmdir", 85: "creat", 86: "link", 87: "unlink",
     88: "symlink", 257: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat", 265: "linkat", 266: "symlinkat",
     316: "renameat2"},
)  # fmt: skip
_ARM = (
    277, 0xC00000B7,
    {64: "write", 68: "pwrite64", 66: "writev", 82: "fsync", 83: "fdatasync", 46: "ftruncate", 47: "fallocate",
     70: "pwritev", 287: "pwritev2"},
    {45: "truncate", 56: "openat", 34: "mkdirat", 35: "unlinkat", 38: "renameat", 37: "linkat", 36: "symlinkat",
     276: "renameat2"},
)  # fmt: skip
MACHINES = {"x86_64": _X86, "aarch64": _ARM}

_SET_MODE_FILTER, _NEW_LISTENER, _NO_NEW_PRIVS, _DEATH_SIGNAL = 1, 8, 38, 1
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF: load a word, jump if equal, return
_RECEIVE, _SEND, _CONTINUE = 0xC0502100, 0xC0182101, 1
_HERE = 0xFFFFFF9C  # AT_FDCWD
_NOTICE = struct.Struct("=QIIiIQ6Q")  # id, thread, flags, call, architecture, instruction, arguments
_ANSWER = struct.Struct("=QqiI")  # id, value, error, flags
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a supervised process went.

    Args:
        code: Its exit code; negative for a signal.
        calls: The counted calls, name (without `at`) and path; of two paths the second.
    """

    code: int
    calls: list[tuple[str, str]] = field(default_factory=list)


def supervise(
    body: Callable[[], object],
    folder: Path,
    *,
    stop_at: int | None = None,
    error: int | None = None,
    timeout: float = WAIT_SECONDS,
) -> Outcome:
    """Runs a function in a forked child; stops the child at a call, or lets the call fail.

    Args:
        body: What it does; an exception is exit code 1.
        folder: Calls on what lies below it are counted.
        stop_at: At which call, from 1; none: at none.
        error: The errno of that call; none: the child is killed before it.
        timeout: Longest time without such a call, in seconds.
    """
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _be_child(body, theirs)
    theirs.close()
    with ours:
        ours.settimeout(timeout)
        _, listeners, _, _ = socket.recv_fds(ours, 1, 1)
    calls: list[tuple[str, str]] = []
    try:
        if listeners:
            _answer(listeners[0], pid, os.path.realpath(folder), calls, stop_at, error, timeout)
    finally:
        for listener in listeners:
            os.close(listener)
    return Outcome(_collect(pid, timeout), calls)


@functools.cache
def why_not() -> str | None:
    """Why no process can be supervised here; none if it can. Found out by trying."""
    if platform.machine() not in MACHINES:
        return f"system calls of {platform.machine()} are not known"
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        reason = "it works"
        try:
            os.close(_install())
        except OSError as error:
            reason = str(error)
        theirs.send(reason.encode())
        os._exit(0)
    theirs.close()
    with ours:
        reason = ours.recv(1000).decode()
    os.waitpid(pid, 0)
    return None if reason == "it works" else f"the kernel notifies nobody of system calls here: {reason}"


@pytest.fixture
def supervised() -> None:
    """For tests that need it; skips where no process can be supervised."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


def die_with_parent() -> None:
    """No child of a test that was ended from outside goes on."""
    _libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _be_child(body: Callable[[], object], channel: socket.socket) -> None:
    code = 1
    try:
        die_with_parent()
        with channel:
            listener = _install()
            socket.send_fds(channel, [b"x"], [listener])
        os.close(listener)
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _install() -> int:
    """Makes the kernel ask before each call that may change a file; returns where it asks."""
    number, architecture, on_files, on_names = MACHINES[platform.machine()]
    watched = [*on_files, *on_names]
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _ALLOW), (_LOAD, 0, 0, 0)]
    program += [(_EQUAL, len(watched) - index, 0, call) for index, call in enumerate(watched)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _NOTIFY)]
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_ = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(buffer)))
    if _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    listener: int = _libc.syscall(number, _SET_MODE_FILTER, _NEW_LISTENER, filter_)
    if listener < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return listener


def _answer(
    listener: int,
    pid: int,
    folder: str,
    calls: list[tuple[str, str]],
    stop_at: int | None,
    error: int | None,
    timeout: float,
) -> None:
    """Answers the kernel until the child is gone."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        ready = poll.poll(timeout * 1000)
        if not ready:
            os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"no call for {timeout} s after {calls[-3:]}")
        if not ready[0][1] & select.POLLIN:
            return
        notice = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(listener, _RECEIVE, notice)
        except FileNotFoundError:  # it died meanwhile
            continue
        number, thread, _, call, _, _, *arguments = _NOTICE.unpack(notice)
        answer = (number, 0, 0, _CONTINUE)
        found = _counted(thread, call, arguments, folder)
        if found is not None:
            calls.append(found)
            if len(calls) == stop_at:
                if error is None:
                    os.kill(pid, signal.SIGKILL)
                    return
                answer = (number, 0, -error, 0)
        with contextlib.suppress(FileNotFoundError):
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(*answer))


def _counted(thread: int, call: int, arguments: list[int], folder: str) -> tuple[str, str] | None:
    _, _, on_files, on_names = MACHINES[platform.machine()]
    if call in on_files:
        try:
            path = os.readlink(f"/proc/{thread}/fd/{arguments[0]}")
        except OSError:
            return None
        return (on_files[call], path) if _is_below(path, folder) else None
    name = on_names[call]
    is_at = name.endswith(("at", "at2"))
    if name.startswith(("open", "creat")):
        flags = os.O_CREAT if name == "creat" else arguments[2 if is_at else 1]
        if not flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            return None
    place = 1 if is_at else 0  # of the path among the arguments; of two paths the second
    place = {"symlinkat": 2, "renameat": 3, "renameat2": 3, "linkat": 3, "rename": 1, "link": 1, "symlink": 1}.get(
        name, place
    )
    path = _text(thread, arguments[place])
    if not path.startswith("/"):
        start = arguments[place - 1] & 0xFFFFFFFF
        path = os.path.join(
            os.readlink(f"/proc/{thread}/{'cwd' if not is_at or start == _HERE else f'fd/{start}'}"), path
        )
    return (name.removesuffix("2").removesuffix("at"), path) if _is_below(path, folder) else None


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}/")


def _text(thread: int, address: int) -> str:
    """A string in the memory of the child, which waits for our answer."""
    text = b""
    with open(f"/proc/{thread}/mem", "rb", buffering=0) as memory:
        while b"\0" not in text:  # page by page: what follows the last one may not be there
            memory.seek(address + len(text))
            text += memory.read(4096 - (address + len(text)) % 4096)
    return os.fsdecode(text.partition(b"\0")[0])


def _collect(pid: int, timeout: float) -> int:
    deadline = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise AssertionError(f"the process did not end within {timeout} s")
        time.sleep(0.002)
