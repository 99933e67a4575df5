"""What the Hub's errors mean to a user, and which of them are worth another try."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import urlsplit

from hybrid_pack.errors import DataError, EnvironmentFailure, HybridPackError, UsageError, hide_tokens
from hybrid_pack.hub.logs import announce, hide_in_logs

T = TypeVar("T")

WAITS = (1, 2, 4, 8, 16, 30, 60, 60, 60, 60)
"""Seconds between tries, five minutes in all; the Hub's own ``Retry-After`` goes before."""

MOST_WAIT = 300
"""Rate limits of the Hub count five minutes."""

_TRANSIENT = frozenset(("TransportError", "ConnectionError", "Timeout", "ChunkedEncodingError", "ContentDecodingError"))
"""Names of what the HTTP libraries (httpx, requests) raise when a connection fails; only one of them is installed."""


class Stopped(Exception):
    """Raised in a download's thread when the whole is being stopped."""


def _chain(error: BaseException) -> Iterator[BaseException]:
    """An error and those it came of."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or at.__context__


def status_of(error: BaseException) -> int | None:
    """The HTTP status an error came of, if any."""
    for one in _chain(error):
        status = getattr(getattr(one, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return None


def _is_of_connection(error: BaseException) -> bool:
    """Whether a connection failed, or was never made."""
    for one in _chain(error):
        if {kind.__name__ for kind in type(one).__mro__} & _TRANSIENT or isinstance(one, TimeoutError):
            return True
    return False


def _is_offline(error: BaseException) -> bool:
    """Whether the user forbade connections (``HF_HUB_OFFLINE``)."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    return any(isinstance(one, OfflineModeIsEnabled) for one in _chain(error))


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed in a moment: 408, 429, 5xx, a connection that failed or was cut short."""
    if isinstance(error, HybridPackError | Stopped) or _is_offline(error):
        return False
    status = status_of(error)
    if status is not None:
        return status in (408, 429) or status >= 500
    if _is_of_connection(error):
        return True
    for one in _chain(error):
        if type(one) is OSError and one.errno is None:  # fewer bytes came than were announced
            return True
        if isinstance(one, RuntimeError) and type(one).__module__ == "builtins" and "xet" in str(one).lower():
            return True
    return False


def _pause(error: BaseException, wait: int) -> float:
    for one in _chain(error):
        headers = getattr(getattr(one, "response", None), "headers", None) or {}
        asked = str(headers.get("Retry-After", ""))
        if asked.isdecimal():
            return float(min(max(int(asked), wait), MOST_WAIT))
    return float(wait)


def sleep(seconds: float, stop: threading.Event | None) -> None:
    """Wait, but no longer than until ``stop``.

    Raises:
        Stopped: It was set.
    """
    if (stop or threading.Event()).wait(seconds):
        raise Stopped


def retrying(
    call: Callable[[], T], *, tell: Callable[[str], None] = announce, stop: threading.Event | None = None
) -> T:
    """Call, and call again after a while if what failed may pass.

    Args:
        call: May be carried out any number of times.
        tell: Told of every wait.
        stop: Ends a wait.

    Raises:
        Exception: What the call raised last.
    """
    for wait in WAITS:
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
            seconds = _pause(error, wait)
            tell(f"{brief(error)}; trying again in {seconds:.0f} s")
        sleep(seconds, stop)
    return call()


def brief(error: BaseException) -> str:
    """First line of an error's message, without anything that gives access."""
    text = str(error).strip()
    line = text.splitlines()[0] if text else type(error).__name__
    return hide_tokens(line)


@contextmanager
def errors(where: str, doing: str = "fetch", *, nor_folder: bool = False) -> Iterator[None]:
    """What the Hub's errors mean to a user.

    Args:
        where: Repository and revision.
        doing: What could not be done, for errors that say little.
        nor_folder: The name might have been meant to be a local folder.
    """
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hide_in_logs()
    try:
        yield
    except (HybridPackError, Stopped):
        raise
    except GatedRepoError:
        raise EnvironmentFailure(
            "access to this repository must be granted",
            where=where,
            hint="accept its terms and log in with `hf auth login`",
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise UsageError(
            "no such repository on the Hub" + (", nor a local folder" if nor_folder else ""),
            where=where,
            hint="a private one needs `hf auth login`",
        ) from None
    except RevisionNotFoundError:
        raise UsageError("no such revision", where=where) from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled):
        raise EnvironmentFailure(
            "neither a local folder nor reachable on the Hub, and not whole in the local cache"
            if nor_folder
            else "not reachable on the Hub",
            where=where,
            hint=("check the path; if it is a Hub id, " if nor_folder else "check ")
            + f"the network to {_endpoint()}, HF_ENDPOINT and HF_HUB_OFFLINE",
        ) from None
    except EntryNotFoundError as error:
        raise DataError("the repository does not have a file it should have", where=where, found=brief(error)) from None
    except Exception as error:  # the HTTP library's own errors differ from version to version
        raise _other(error, where, doing) from error


def _other(error: Exception, where: str, doing: str) -> HybridPackError:
    status = status_of(error)
    if status == 401:
        return EnvironmentFailure(
            "not logged in, or the token is not valid", where=where, hint="log in with `hf auth login`"
        )
    if status == 403:
        host = _other_host(error)
        if host is not None:
            return EnvironmentFailure(
                "the server that holds the files does not allow it", where=where, found=f"HTTP 403 from {host}",
                hint=f"its links last for a time only: run the same command again; if that does not help, does a proxy "
                f"or firewall let you to {host}? Then the login: `hf auth login`",
            )  # fmt: skip
        verb = "push" if doing == "send" else doing.split()[0]
        return EnvironmentFailure(
            "the Hub does not allow it", where=where, found=brief(error),
            hint=f"log in with `hf auth login`, as somebody who may {verb} there",
        )  # fmt: skip
    if status == 429:
        return EnvironmentFailure(
            "the Hub asks for fewer requests (HTTP 429)", where=where, hint="run the same command again later"
        )
    full = next((e for e in _chain(error) if isinstance(e, OSError) and e.errno in (errno.ENOSPC, errno.EDQUOT)), None)
    if full is not None:
        return EnvironmentFailure(
            "the disk is full", where=full.filename or where, found=full.strerror,
            hint="make room and run the same command again: finished files are kept",
        )  # fmt: skip
    if status is None and _is_of_connection(error):
        return EnvironmentFailure(
            f"cannot {doing}", where=where, expected=f"an answer of {_endpoint()}", found=brief(error),
            hint="check the network, proxies and HF_ENDPOINT, and run the same command again",
        )  # fmt: skip
    return EnvironmentFailure(f"cannot {doing}", where=where, found=brief(error))


def _endpoint() -> str:
    """The Hub that is asked: ``HF_ENDPOINT``, or huggingface.co."""
    from huggingface_hub import constants

    return hide_tokens(str(constants.ENDPOINT))


def _other_host(error: BaseException) -> str | None:
    """The host an answer came from, where that is not the Hub itself but holds its large files."""
    for one in _chain(error):
        url = getattr(getattr(one, "response", None), "url", None)
        if url is not None:
            host = urlsplit(str(url)).hostname
            return host if host != urlsplit(_endpoint()).hostname else None
    return None


def at(repo_id: str, revision: str | None) -> str:
    """``org/name`` or ``org/name@revision``, for messages."""
    return repo_id if revision is None else f"{repo_id}@{revision}"
