"""Which rows and columns get their number written beside them."""

from __future__ import annotations

from collections.abc import Sequence

ROUND = (1, 2, 5, 10, 20, 50, 100, 200, 500)
POWERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def labelled(numbers: Sequence[int], room: float) -> list[int]:
    """Positions of the numbers to write: the first, round ones between, and the last, if there is room for it.

    Round are multiples of a power of two for a multiple of eight that are counted from zero, as experts are.

    Args:
        numbers: Ascending, one for each position.
        room: Positions from one label to the next, at least.
    """
    steps = POWERS if len(numbers) % 8 == 0 and numbers[0] == 0 else ROUND
    step = next((s for s in steps if s >= room), 1 << 31)
    chosen, last = [0], len(numbers) - 1
    for at in range(1, last):
        if numbers[at] % step == 0 and min(at - chosen[-1], last - at) >= room:
            chosen.append(at)
    return [*chosen, last] if last - chosen[-1] >= room else chosen
