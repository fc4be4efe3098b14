"""Lengths of training: `100`, `100steps`, `2epochs`, `90s`, `10min`, `1h`.

Guarantee: one spelling everywhere, and whether something is due after a step is a pure function of the progress
before and after it, unless the duration is a time, which only a clock can answer.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from framework.errors import ConfigError
from framework.progress import Progress

STEPS, EPOCHS, SECONDS = "steps", "epochs", "seconds"
ENDLESS = 1 << 62  # samples of an epoch whose length nobody knows: it never ends

_UNITS = {
    "": (STEPS, 1.0), "step": (STEPS, 1.0), "steps": (STEPS, 1.0),
    "epoch": (EPOCHS, 1.0), "epochs": (EPOCHS, 1.0),
    "s": (SECONDS, 1.0), "sec": (SECONDS, 1.0), "seconds": (SECONDS, 1.0),
    "min": (SECONDS, 60.0), "h": (SECONDS, 3600.0), "d": (SECONDS, 86400.0),
}  # fmt: skip
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z]*)\s*")


@dataclass(frozen=True, slots=True)
class Duration:
    """A positive length in steps, epochs or seconds.

    Args:
        value: The length, greater than 0.
        unit: One of `steps`, `epochs`, `seconds`.
    """

    value: float
    unit: str

    @classmethod
    def parse(
        cls, text: str | int | float | Duration, *, key: str, allow: tuple[str, ...] = (STEPS, EPOCHS, SECONDS)
    ) -> Duration:
        """Reads a duration as users write it; a bare number is a number of steps.

        Args:
            text: For example `100`, `"2epochs"`, `"10min"`.
            key: The config key it stands under, for the error message.
            allow: Units that make sense there.

        Raises:
            ConfigError: Not a duration, not positive, or in a unit that is not allowed here.
        """
        if isinstance(text, Duration):
            parsed = text
        else:
            match = _PATTERN.fullmatch(str(text))
            unit, scale = _UNITS.get(match[2].lower(), ("", 0.0)) if match else ("", 0.0)
            if match is None or not unit or isinstance(text, bool):
                raise ConfigError(
                    f"{key}={text!r} is not a duration. Write for example 100, 100steps, 2epochs, 90s, 10min or 1h."
                )
            parsed = cls(float(match[1]) * scale, unit)
        if parsed.unit not in allow:
            raise ConfigError(
                f"{key}={text!r} is given in {parsed.unit}, which has no meaning there. Use {' or '.join(allow)}."
            )
        if not parsed.value > 0 or math.isinf(parsed.value):
            raise ConfigError(f"{key}={text!r} must be greater than 0.")
        if parsed.unit == STEPS and parsed.value != int(parsed.value):
            raise ConfigError(f"{key}={text!r} must be a whole number of steps.")
        return parsed

    @classmethod
    def optional(cls, text: str | int | None, *, key: str, allow: tuple[str, ...]) -> Duration | None:
        """`parse`, or none for none."""
        return None if text is None else cls.parse(text, key=key, allow=allow)

    @classmethod
    def seconds_of(cls, text: str | None, *, key: str) -> float | None:
        """A time in seconds, or none for none.

        Raises:
            ConfigError: Not a time.
        """
        return None if text is None else cls.parse(text, key=key, allow=(SECONDS,)).value

    @property
    def is_time(self) -> bool:
        return self.unit == SECONDS

    def check_length(self, num_samples: int, *, key: str) -> None:
        """Checks that the length of an epoch is known where it is needed.

        Args:
            num_samples: Samples per epoch, or `ENDLESS`.
            key: The config key of this duration.

        Raises:
            ConfigError: It is not.
        """
        if self.unit == EPOCHS and num_samples >= ENDLESS:
            raise ConfigError(
                f"{key}={self} is in epochs, and nobody knows how long an epoch of this stream is. Give the dataset a "
                f"__len__ (samples over all ranks), set loader.samples_per_epoch, or use steps or a time."
            )

    def steps(self, num_samples: int, global_batch_size: int) -> int:
        """The number of whole steps, rounded up.

        Raises:
            ValueError: The duration is a time.
        """
        if self.unit == STEPS:
            return int(self.value)
        if self.unit == EPOCHS:
            return math.ceil(self.value * num_samples / global_batch_size)
        raise ValueError(f"{self} is a time, not a number of steps")

    def is_due(self, before: Progress, after: Progress, num_samples: int) -> bool:
        """Whether this much has been completed by the step that led from `before` to `after`.

        "Every k epochs" is due at the first step whose position reaches a multiple of k epochs.
        """
        if self.unit == STEPS:
            return after.step % int(self.value) == 0
        if self.unit == EPOCHS:
            length = self.value * num_samples
            return math.floor(after.position / length) > math.floor(before.position / length)
        return False

    def __str__(self) -> str:
        return f"{self.value:g}{'s' if self.is_time else self.unit}"
