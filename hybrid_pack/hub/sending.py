"""Bytes of large files while huggingface_hub sends them, which it tells nobody but its own bars."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


class Sent:
    """Counts what goes out.

    Attributes:
        nbytes: Of large files, so far; a part that is sent again counts again.
        known: Whether this huggingface_hub has the places where it is counted.
    """

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.nbytes, self.known, self._advance = 0, False, advance

    def add(self, nbytes: int) -> None:
        """Bytes that went out, from any thread."""
        if nbytes > 0:
            self.nbytes += nbytes
            self._advance(nbytes)


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def counting(advance: Callable[[int], None]) -> Iterator[Sent]:
    """Count the bytes of large files that uploads send, by LFS and, since huggingface_hub 2, by Xet.

    Args:
        advance: Told of them.
    """
    sent = Sent(advance)
    with ExitStack() as stack:
        utils: Any = importlib.import_module("huggingface_hub.utils")
        if hasattr(utils, "tqdm_stream_file"):
            stack.enter_context(_replaced(utils, "tqdm_stream_file", _streamed(utils.tqdm_stream_file, sent)))
            sent.known = True
        try:
            display: Any = importlib.import_module("huggingface_hub._upload_pipeline")._LiveDisplay
            stack.enter_context(_replaced(display, "new_xet_callback", _reported(display.new_xet_callback, sent)))
        except (ImportError, AttributeError):  # another version: what goes by Xet is not seen
            sent.known = False
        yield sent


def _streamed(original: Any, sent: Sent) -> Any:
    @contextmanager
    def stream(path: Any) -> Iterator[Any]:
        with original(path) as file:
            read = file.read

            def counted(size: int = -1) -> bytes:
                data: bytes = read(size)
                sent.add(len(data))
                return data

            file.read = counted
            yield file

    return stream


def _reported(original: Any, sent: Sent) -> Any:
    def new_callback(display: Any) -> Any:
        inner, before = original(display), 0

        def callback(group: Any, items: Any) -> None:
            nonlocal before
            if inner is not None:
                inner(group, items)
            done = int(group.total_transfer_bytes_completed)
            sent.add(done - before)
            before = max(before, done)

        return callback

    return new_callback
