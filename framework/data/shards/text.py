"""Lines of a text file as samples.

Guarantee: a line ends at a line feed and nowhere else; the last one needs none. Carriage returns before it are dropped.
Lines are UTF-8, and one that is not is an error of that line alone. An empty line is a sample.
"""

from __future__ import annotations

from framework.data.shards.base import Bytes, Damage, Samples

_END = b"\n"


class TextSamples(Samples):
    """See the module. A sample is a `str`."""

    def __init__(self, source: Bytes) -> None:
        super().__init__(source)
        self._restart()

    def count(self) -> int:
        if self.source.read(0, 2) == b"\x1f\x8b":
            raise Damage(0, "it is compressed: unpack it")
        count = offset = 0
        last = _END
        while chunk := self.source.chunk(offset):
            count += chunk.count(_END)
            offset += len(chunk)
            last = chunk[-1:]
        return count + (last != _END)

    def take(self, index: int) -> str:
        if index < self._number:
            self._restart()
        self._pass(index - self._number)
        start = self._offset
        line = self._line()
        if line is None:
            raise Damage(start, f"it ends after {self._number} lines, and line {index} was expected (counted from 0)")
        self._number += 1
        try:
            return line.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            raise Damage(start + error.start, f"line {index} is no UTF-8: {error.reason}") from error

    def is_end(self, count: int) -> bool:
        self._pass(count - self._number)
        return self._offset >= self.source.size

    def _restart(self) -> None:
        self._offset = 0
        self._number = 0  # of the line that begins there

    def _pass(self, lines: int) -> None:
        """Passes over lines, as many as there are."""
        while lines > 0 and (chunk := self.source.chunk(self._offset)):
            found = chunk.count(_END)
            if found < lines:
                self._offset += len(chunk)
                self._number += found
                lines -= found
                if self._offset >= self.source.size and not chunk.endswith(_END):
                    self._number += 1
                continue
            place = -1
            for _ in range(lines):
                place = chunk.find(_END, place + 1)
            self._offset += place + 1
            self._number += lines
            return

    def _line(self) -> bytes | None:
        if self._offset >= self.source.size:
            return None
        parts: list[bytes] = []
        is_whole = False
        while not is_whole and self._offset < self.source.size:
            part, is_whole = self.source.until(self._offset, _END)
            parts.append(part)
            self._offset += len(part) + is_whole
        return b"".join(parts)
