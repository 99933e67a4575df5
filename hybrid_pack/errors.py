"""Every error a user can meet, with the exit code it means."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager

_TOKEN = re.compile(
    r"(?<![A-Za-z])(?:hf_oauth_[\w.-]{16,}|(?:hf|api_org)_[A-Za-z0-9]{16,})|(?:hf|api_org)_[A-Za-z0-9]{30,}"
)
_QUERY = re.compile(r"(https?://[^\s?#'\"<>]*)\?[^\s'\"<>)]*")
_CUT_URL = re.compile(r"\(…\)[^\s'\"<>)]*")
"""The end of a URL, as huggingface_hub shortens it: that of a signed one may be the signature."""
_SIGNED = re.compile(r"\b(X-Amz-[\w-]+|Signature|Policy|Key-Pair-Id)=[^&\s'\"<>)]+", re.IGNORECASE)
LONGEST_PART = 600
"""Characters of each part of a message: a hostile header can make one of a megabyte."""


def hide_tokens(text: str) -> str:
    """The text without what gives access: tokens of the Hugging Face Hub, and the query of every URL.

    Servers and libraries quote both; who has a signed URL can read or write what it is for.
    """
    return _SIGNED.sub(r"\1=***", _CUT_URL.sub("(…)", _QUERY.sub(r"\1?***", _TOKEN.sub("hf_***", text))))


def plain(text: str) -> str:
    """Text that does to a terminal what it says: control and direction characters are written as escapes."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def _short(part: object) -> str:
    text = str(part)
    return text if len(text) <= LONGEST_PART else f"{text[:LONGEST_PART]}... ({len(text)} characters)"


class HybridPackError(Exception):
    """Base of all errors raised on purpose.

    The message is one line: where, what is wrong, expected, found, what to do.

    Args:
        problem: What is wrong, in one clause.
        where: File, tensor, layer or expert it was found in.
        expected: What would have been right.
        found: What was there instead.
        hint: What to do about it.
    """

    exit_code = 1

    def __init__(
        self,
        problem: str,
        *,
        where: object = None,
        expected: object = None,
        found: object = None,
        hint: str | None = None,
    ) -> None:
        self.problem = problem
        self.where = None if where is None else str(where)
        self.expected = expected
        self.found = found
        self.hint = hint
        super().__init__(self._message())

    def _message(self) -> str:
        text = _short(self.problem)
        text = text if self.where is None else f"{_short(self.where)}: {text}"
        found = (("expected", self.expected), ("found", self.found))
        details = [f"{key} {_short(value)}" for key, value in found if value is not None]
        if details:
            text += f" ({', '.join(details)})"
        if self.hint:
            text += f"; {self.hint}"
        return plain(" ".join(text.split()))


class DataError(HybridPackError):
    """The data is wrong: a refused source, a pack that does not verify. Exit code 1."""

    exit_code = 1


class UsageError(HybridPackError):
    """The call is wrong: an option, a size that cannot be, an output that is in the way. Exit code 2."""

    exit_code = 2


class EnvironmentFailure(HybridPackError):
    """The machine failed: disk full, permission, a missing dependency, no GPU. Exit code 3."""

    exit_code = 3


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_PERMISSION = "change its permissions, or choose another place"
_REMEDIES = {
    **dict.fromkeys(DISK_FULL, "make room and run again"),
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.EROFS: "the file system is read-only: choose another place",
    errno.EIO: "the disk may be failing: see the system's log, or choose another place",
}


def system_failure(error: OSError, where: object = None, *, problem: str = "the system failed") -> EnvironmentFailure:
    """A system error as a message that says what to do about it.

    Args:
        error: The system's.
        where: What was read or written; by default the path that the error names, if it names one.
        problem: What did not work, unless the disk is full.
    """
    return EnvironmentFailure(
        "the disk is full" if error.errno in DISK_FULL else problem,
        where=error.filename if where is None else where,
        found=error.strerror or error,
        hint=_REMEDIES.get(error.errno or 0, "put that right and run again"),
    )


@contextmanager
def writing(path: object) -> Iterator[None]:
    """Name the file that could not be written, whatever temporary one the system's error names.

    Raises:
        EnvironmentFailure: An ``OSError`` was raised inside.
    """
    try:
        yield
    except OSError as error:
        raise system_failure(error, path, problem="cannot write") from error
