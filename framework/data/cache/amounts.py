"""Amounts of disk: `200GB`, `1.5TiB`, `80%` of a disk, or a number of bytes.

Guarantee: one spelling everywhere; what is no amount is refused by key before any disk is touched.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from framework.errors import ConfigError

_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*|%)\s*")
_UNITS = {"": 1, "b": 1} | {
    name: base**power
    for power, letter in enumerate("kmgtp", start=1)
    for base, names in ((1000, (letter, f"{letter}b")), (1024, (f"{letter}i", f"{letter}ib")))
    for name in names
}


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of bytes, or a part of a disk.

    Args:
        bytes: The number; 0 where it is a part.
        fraction: The part, from 0 to 1; none where it is a number.
    """

    bytes: int
    fraction: float | None = None

    @classmethod
    def parse(cls, value: float | str, *, key: str) -> Amount:
        """Reads an amount.

        Args:
            value: Bytes, or a text such as `200GB`, `64MiB`, `80%`.
            key: Where it comes from, for the message.

        Raises:
            ConfigError: It is none.
        """
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
            return cls(int(value))
        match = _PATTERN.fullmatch(value) if isinstance(value, str) else None
        if match is not None and match[2] == "%" and float(match[1]) <= 100:
            return cls(0, float(match[1]) / 100)
        if match is not None and match[2].lower() in _UNITS:
            return cls(round(float(match[1]) * _UNITS[match[2].lower()]))
        raise ConfigError(f"{key}={value!r} is no amount of disk: write bytes, or for example 200GB, 64MiB, 80%.")

    def of(self, total: int) -> int:
        """The bytes, on a disk of `total` bytes."""
        return self.bytes if self.fraction is None else int(self.fraction * total)
