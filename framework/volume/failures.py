"""What an object store's failure means, and trying again.

Guarantee: what may pass (5xx, 429, timeouts, connections, answers that are cut short) is tried again, with full jitter,
until the time is over; what will not (refused, missing, there already) is an error at once. Each error names the URL,
the cause and the number of attempts, and has no secret in it.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from framework.volume.base import VolumeDenied, VolumeError, VolumeExists, VolumeMissing, VolumeUnsupported
from framework.volume.library import Library

T = TypeVar("T")

MAX_LIES = 3  # attempts to write what a store says it has and has not
_FIRST_SECONDS, _LONGEST_SECONDS = 0.1, 10.0
_jitter = random.SystemRandom()  # the default generator belongs to the run, whose numbers must not change
_EXPIRED = "ExpiredToken|TokenRefreshRequired|RequestExpired|ExpiredTokenException|invalid_grant"
_REFUSED = f"{_EXPIRED}|InvalidToken|InvalidAccessKeyId|SignatureDoesNotMatch|AccessDenied|AuthenticationFailed"
_NO_CREDENTIALS = r"169\.254\.169\.254|metadata\.google\.internal|MissingCredentials|Missing \w*(key|credential)"
_NONE_FOUND = "No credentials were found: set those of the store in the environment, such as AWS_ACCESS_KEY_ID."
_PLAIN = {"TimedOut": "no answer in time", "IncompleteMessage": "cut off", "UnexpectedEof": "cut off"}
_SECRET = re.compile(r"\b((?:X-Amz-)?(?:Signature|Credential|Security-Token)|sig)=[^&\s\"',)]+", re.IGNORECASE)


class Doubtful(Exception):
    """An answer that cannot be right: less came than was asked for, or less is there than was written."""


@dataclass(frozen=True)
class Failure:
    """A failure, understood.

    Args:
        kind: denied, missing, exists, unsupported, range, transient or other.
        cause: What the store or the connection said, in one line.
        tries: How many requests it took.
        is_busy: Whether the store asked for fewer requests.
    """

    kind: str
    cause: str
    tries: int = 1
    is_busy: bool = False

    def error(self, shown: str, tries: int) -> VolumeError:
        """The error to raise."""
        match self.kind:
            case "missing":
                return VolumeMissing(f"{shown} is not there: {self.cause}")
            case "exists":
                return VolumeExists(f"{shown} is there already.")
            case "unsupported":
                return VolumeUnsupported(f"{shown}: the store cannot do this: {self.cause}.")
            case "denied" if re.search(_NO_CREDENTIALS, self.cause) and not re.search(_EXPIRED, self.cause):
                return VolumeDenied(f"{shown}: {_NONE_FOUND} The last place that was asked: {self.cause}.")
            case "denied":
                return VolumeDenied(f"{shown}: access is refused: {self.cause}. {_remedy(self.cause)}")
        attempts = f" after {tries} attempts" if tries > 1 else ""
        error = VolumeError(f"{shown} failed{attempts}: {self.cause}")
        error.may_pass, error.is_busy = self.kind == "transient", self.is_busy
        return error


def _remedy(cause: str) -> str:
    if re.search(_EXPIRED, cause):
        return "The credentials have expired: renew them in the environment of the run, and start it again."
    return "Check the credentials in the environment, which may have expired, and that they may list, read, write and delete there."


def understood(error: BaseException, library: Library) -> Failure:
    """What an exception of obstore means."""
    text = str(error)
    found = re.search(r"\bretries: (\d+)", text)
    tries = int(found[1]) + 1 if found else 1
    found = re.search(r"status(?: code)?: (\d{3})", text)
    status = int(found[1]) if found else 0
    cause = _cause(text)
    known = library.module.exceptions
    if isinstance(error, FileNotFoundError) or status == 404:
        return Failure("missing", cause, tries)
    if isinstance(error, known.AlreadyExistsError | known.PreconditionError):
        return Failure("exists", cause, tries)
    if isinstance(error, known.NotSupportedError | NotImplementedError) or status == 501:
        return Failure("unsupported", cause, tries)
    is_bare = status == 400 and "Error performing HEAD" in text  # no body says why, and expired credentials do this
    if isinstance(error, known.PermissionDeniedError | known.UnauthenticatedError) or status in (401, 403) or is_bare:
        return Failure("denied", cause, tries)
    if re.search(rf"\b(?:{_REFUSED})\b", text) or re.search(_NO_CREDENTIALS, text):
        return Failure("denied", cause, tries)
    if status == 416:
        return Failure("range", cause, tries)
    if isinstance(error, known.GenericError) and (status in (0, 408, 409, 425, 429) or status >= 500):
        return Failure("transient", cause, tries, is_busy=status in (429, 503))
    return Failure("other", cause, tries)


def _cause(text: str) -> str:
    """One line without secrets: the code and message of an S3 answer where there is one."""
    head, _, debug = text.partition("\n\nDebug source")
    said = re.search(r"<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", head, re.DOTALL)
    head = re.sub(r"\s*<(\?xml|!doctype|html|Error).*", "", head, flags=re.DOTALL | re.IGNORECASE)
    head = re.sub(r"^Generic \w+ error: |, max_retries: \d+, retry_timeout: \S+", "", head)
    line = " ".join(head.split()).rstrip(" :.")
    if said:
        line += f" ({said[1]}: {' '.join(said[2].split())})"
    elif reason := re.search(r'(?:message|error): "(.*?)"|(TimedOut|IncompleteMessage|UnexpectedEof)', debug):
        line += f" ({reason[1] or _PLAIN[reason[2]]})"
    return _SECRET.sub(r"\1=***", line)[:600]


def insist(shown: str, library: Library, seconds: float, work: Callable[[int], T], *, repeatable: bool = True) -> T:
    """Does the work, again and again if it fails in a way that may pass.

    Args:
        shown: The URL, for messages.
        library: Whose exceptions are understood.
        seconds: For how long it is tried again.
        work: Gets the number of requests before it.
        repeatable: Whether it can be done more than once.

    Raises:
        VolumeError: It failed, and would again.
    """
    known: Any = library.module.exceptions.BaseError
    deadline = time.monotonic() + seconds
    tries = lies = rounds = 0
    while True:
        try:
            return work(tries)
        except Doubtful as error:
            lies += 1
            tries += 1
            last = VolumeError(f"{shown}: {error} ({tries} attempts)" if tries > 1 else f"{shown}: {error}")
            may_pass = lies < MAX_LIES
        except (known, OSError, ValueError, NotImplementedError) as error:
            failure = understood(error, library)
            tries += failure.tries
            last = failure.error(shown, tries)
            may_pass = failure.kind == "transient"
        left = deadline - time.monotonic()
        if not (may_pass and repeatable) or left <= 0:
            raise last from None  # the original has a page of debugging output, signatures among it
        longest = min(_LONGEST_SECONDS, _FIRST_SECONDS * 2**rounds, left)
        time.sleep(_jitter.uniform(0, longest))
        rounds = min(rounds + 1, 10)
