"""Result buffers that a call takes without allocating, and that no one else holds."""

from __future__ import annotations

import torch


class OutputPool:
    """A few buffers, each handed out again only when nothing refers to its storage any more.

    A result may be kept as long as one likes, also as a view of a view: its buffer is then left alone, and when all are
    held, ``take`` allocates a new tensor as any torch function would. Reuse is ordered by the stream, as with torch's
    own allocator: a result used on another stream must be waited for there before it is dropped.

    While a CUDA graph is captured, ``take`` allocates from the graph's own memory pool. A buffer of this pool would be
    written by every replay, whoever had it by then.
    """

    def __init__(self, buffers: int, tokens: int, hidden: int, device: torch.device) -> None:
        with torch.inference_mode(False):  # or they could not be written to outside of inference mode
            self._buffers = [torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device) for _ in range(buffers)]
        self._storages = [buffer.untyped_storage() for buffer in self._buffers]
        self._unused = [self._users(i) for i in range(buffers)]

    def _users(self, i: int) -> int:
        """References to a buffer's storage: two of ours, and one for each tensor made from it."""
        return int(torch._C._storage_Use_Count(self._storages[i]._cdata))

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor shaped like bf16 [M, H], M at most the pool's."""
        if not (like.is_cuda and torch.cuda.is_current_stream_capturing()):
            for i, buffer in enumerate(self._buffers):
                if self._users(i) == self._unused[i]:
                    return buffer[: like.shape[0]]
        return torch.empty_like(like, requires_grad=False)
