"""The search for the best scale of a tile of groups, on the CPU.

For a scale s the error of a group is the sum of ``importance * (w - level * s)^2`` with the nearest level for each
weight, summed in float32 from the first column to the last. Groups lie side by side in SIMD lanes, so that each lane
sums in that order and a GPU thread that does the same gets the same bits (``cuda.py``).

Which scales are tried, in this order, keeping the best:

1. the largest one at which the largest weight is not clipped;
2. smaller ones, while the weights clipped at the last one do not alone cost more than the best so far. Those weights
   stay clipped at every smaller scale and cost more there, so that nothing below can be better;
3. larger ones, while the weights at the last one that lie between the two levels around zero do not alone cost as
   much as the best so far. Those weights stay there at every larger scale and cost no less there;
4. zero.

E2M1 has a shorter third step: every level of twice a scale up to 6 is a level of the scale too, so that a scale is
never better than its half where the half takes all weights to at most 6. The step ends below 2/7 of the largest weight
(7 is midway between 6 and 8), where halves exist.

So the result is that of trying all of them, but for the rounding of float32 sums. Of equally good scales the smallest
wins. ``weight / scale`` is ``fl(weight * fl(1 / scale))``; a level's value is ``fl(level * scale)``.

Everything compiled is in this one file, because numba's cache looks at the time stamp of no other.
"""

from __future__ import annotations

import numpy as np
from numba import float32 as f32
from numba import int32 as i32
from numba import uint64 as u64

from hybrid_pack.jit import inline, kernel, part
from hybrid_pack.quantize.book import E2M1_KIND, SIGNED_KIND

LANES = 64
"""Groups worked on side by side: four AVX-512 registers, and a tile of 32 columns of them stays in the L1 cache."""

SCALE, INVERSE, TOTAL, APART, LOWEST, INDEX, STEP, GOAL, BEST, LAST, SATURATED, START, FIRST, LIMIT, LARGEST, FACTOR = (
    LANES * i for i in range(16)
)
"""Where each number of the lanes is in the state f32 [16 * LANES]; indices of scales are exact in it. One array with
fixed places, so that the compiler sees that they do not overlap and needs no checks before it uses SIMD.

scale and its inverse being tried; the error it gives and the part of it that is summed apart; the least error so far;
index being tried, step to the next one (-1, 1, or 0 for a lane that is done) and where to end; index of the least error
and the largest one it may be; 1 where a larger one would have been better; index of the first scale to try, 0 for a
group that needs no search; smallest index allowed and largest to look at; largest magnitude; what weights were
multiplied with.
"""


@inline
def _signed_level(x, thresholds, levels):  # type: ignore[no-untyped-def]
    """The level nearest to x, of eight with signs."""
    level = levels[0]
    level = levels[1] if x > thresholds[0] else level
    level = levels[2] if x > thresholds[1] else level
    level = levels[3] if x > thresholds[2] else level
    level = levels[4] if x > thresholds[3] else level
    level = levels[5] if x > thresholds[4] else level
    level = levels[6] if x > thresholds[5] else level
    return levels[7] if x > thresholds[6] else level


@inline
def _magnitude_level(x, thresholds, levels):  # type: ignore[no-untyped-def]
    """The level nearest to a magnitude x, of eight that are four and their negatives."""
    level = levels[4]
    level = levels[5] if x > thresholds[4] else level
    level = levels[6] if x > thresholds[5] else level
    return levels[7] if x > thresholds[6] else level


@inline
def _e2m1_level(x):  # type: ignore[no-untyped-def]
    """The level nearest to a magnitude x, of 0 .5 1 1.5 2 3 4 6.

    Steps are .5 up to 2, 1 up to 4, 2 up to 6. Adding 1.5 * 2^22 times twice the step leaves a float32 no bits below
    the step. A tie may go to the other neighbour than a code's does; both are as far away.
    """
    x = min(x, f32(6))
    bias = f32(6291456.0) if x < f32(2) else f32(12582912.0)
    bias = bias if x < f32(4) else f32(25165824.0)
    return (x + bias) - bias


@part
def _try_scales(tile, importance, kind, thresholds, levels, low, high, inside, state):  # type: ignore[no-untyped-def]
    """Errors of a tile of groups, each at its own scale.

    Args:
        tile: f32 [columns, LANES], the weights, or their magnitudes unless the kind is signed.
        importance: f32 [columns, LANES].
        kind: Of ``CodeBook``.
        thresholds: Seven.
        levels: Eight.
        low: With ``high``: a zone of weight / scale.
        high: See there.
        inside: Which weights' errors are summed apart as well: those inside the zone or those outside.
        state: SCALE, INVERSE in; TOTAL, APART out.
    """
    for lane in range(LANES):
        state[TOTAL + lane], state[APART + lane] = f32(0), f32(0)
    for column in range(tile.shape[0]):
        if kind == E2M1_KIND:
            for lane in range(LANES):
                weight = tile[column, lane]
                x = weight * state[INVERSE + lane]
                error = weight - _e2m1_level(x) * state[SCALE + lane]
                cost = error * error * importance[column, lane]
                state[TOTAL + lane] += cost
                state[APART + lane] += cost if (x > high) != inside else f32(0)
        elif kind == SIGNED_KIND:
            for lane in range(LANES):
                weight = tile[column, lane]
                x = weight * state[INVERSE + lane]
                error = weight - _signed_level(x, thresholds, levels) * state[SCALE + lane]
                cost = error * error * importance[column, lane]
                state[TOTAL + lane] += cost
                state[APART + lane] += cost if ((x < low) | (x > high)) != inside else f32(0)
        else:
            for lane in range(LANES):
                weight = tile[column, lane]
                x = weight * state[INVERSE + lane]
                error = weight - _magnitude_level(x, thresholds, levels) * state[SCALE + lane]
                cost = error * error * importance[column, lane]
                state[TOTAL + lane] += cost
                state[APART + lane] += cost if (x > high) != inside else f32(0)


@part
def _keep_and_step(state):  # type: ignore[no-untyped-def]
    """Keep the scales just tried where they are the best so far, and go on where a better one may follow.

    Returns:
        Whether a lane goes on.
    """
    going = f32(0)
    for lane in range(LANES):
        total, lowest, index = state[TOTAL + lane], state[LOWEST + lane], state[INDEX + lane]
        better = (total < lowest) | ((total == lowest) & (index < state[BEST + lane]))
        better = better & (state[STEP + lane] != f32(0))
        legal = index <= state[LAST + lane]
        taken, refused = better & legal, better & (not legal)
        state[SATURATED + lane] = f32(1) if refused else state[SATURATED + lane]
        state[BEST + lane] = index if taken else state[BEST + lane]
        lowest = total if taken else lowest
        state[LOWEST + lane] = lowest
        more = (state[APART + lane] < lowest) & (index != state[GOAL + lane]) & (not refused)
        step = state[STEP + lane] if more else f32(0)
        state[STEP + lane] = step
        state[INDEX + lane] = index + step
        going = max(going, abs(step))
    return going != f32(0)


@part
def _search(tile, importance, book, thresholds, levels, state):  # type: ignore[no-untyped-def]
    """Find the best scale of a tile of groups.

    Args:
        tile: f32 [columns, LANES].
        importance: f32 [columns, LANES].
        book: ``CodeBook``.
        thresholds: Its seven.
        levels: Its eight.
        state: START, FIRST, LAST, LIMIT in; BEST, SATURATED out.
    """
    values, inverses, kind, zones = book.values, book.inverses, book.kind, book.zones
    for lane in range(LANES):
        start = state[START + lane]
        state[INDEX + lane], state[BEST + lane], state[SATURATED + lane] = start, start, f32(0)
        state[STEP + lane] = f32(-1) if start > f32(0) else f32(0)
        state[GOAL + lane] = state[FIRST + lane]
        state[LOWEST + lane] = f32(np.inf)
    upwards = False
    low, high = zones[0], zones[3]
    while True:
        for lane in range(LANES):
            index = i32(state[INDEX + lane])
            state[SCALE + lane], state[INVERSE + lane] = values[index], inverses[index]
        _try_scales(tile, importance, kind, thresholds, levels, low, high, upwards, state)
        if not _keep_and_step(state):
            if upwards:
                break
            upwards = True
            low, high = zones[1], zones[2]
            going = f32(0)
            for lane in range(LANES):
                start, limit = state[START + lane], state[LIMIT + lane]
                step = f32(1) if (start > f32(0)) & (start < limit) else f32(0)
                state[STEP + lane], state[INDEX + lane], state[GOAL + lane] = step, start + step, limit
                going = max(going, step)
            if going == f32(0):
                break
    for lane in range(LANES):
        state[TOTAL + lane] = f32(0)
    for column in range(tile.shape[0]):
        for lane in range(LANES):
            state[TOTAL + lane] += tile[column, lane] * tile[column, lane] * importance[column, lane]
    for lane in range(LANES):
        zero = state[TOTAL + lane] <= state[LOWEST + lane]
        state[BEST + lane] = f32(0) if zero else state[BEST + lane]
        state[SATURATED + lane] = f32(0) if zero else state[SATURATED + lane]


@inline
def _code(x, thresholds):  # type: ignore[no-untyped-def]
    """Number of the level nearest to x."""
    code = i32(1) if x > thresholds[0] else i32(0)
    code += i32(1) if x > thresholds[1] else i32(0)
    code += i32(1) if x > thresholds[2] else i32(0)
    code += i32(1) if x > thresholds[3] else i32(0)
    code += i32(1) if x > thresholds[4] else i32(0)
    code += i32(1) if x > thresholds[5] else i32(0)
    code += i32(1) if x > thresholds[6] else i32(0)
    return code


@inline
def _floor_index(ratio, book, cell):  # type: ignore[no-untyped-def]
    """Index of the largest scale not above a ratio f32, 0 to ``book.limit``. Cell is scratch, f32 [1]."""
    if ratio < f32(book.exact_below):
        return i32(ratio * f32(512))
    cell[0] = ratio
    index = i32(cell.view(np.int32)[0] >> i32(23 - book.mantissa_bits)) - i32(book.offset)
    return max(i32(0), min(i32(book.limit), index))


@inline
def _nearest_index(ratio, book, cell):  # type: ignore[no-untyped-def]
    """Index of the scale nearest to a ratio f32, ties to even; the one below it for a book that is not ``nearest``."""
    index = _floor_index(ratio, book, cell)
    if book.nearest and index < book.limit:
        middle = (book.values[index] + book.values[index + 1]) / f32(2)
        index += i32(1) if ratio > middle or (ratio == middle and index % 2 == 1) else i32(0)
    return index


@inline
def _binary_exponent(largest, cell):  # type: ignore[no-untyped-def]
    """The power of two that moves a weight f32 to 1 .. 2, -126 to 126. Cell is scratch, f32 [1]."""
    cell[0] = largest
    return max(i32(-126), min(i32(126), i32(127) - i32(cell.view(np.int32)[0] >> i32(23))))


@inline
def _power(exponent, cell):  # type: ignore[no-untyped-def]
    """2^exponent as f32, -126 to 127. Cell is scratch, f32 [1]."""
    cell.view(np.int32)[0] = i32(i32(exponent + i32(127)) << i32(23))
    return cell[0]


@part
def _load(weights, begin, count, book, factor, tile, moved, state, cell):  # type: ignore[no-untyped-def]
    """Bring groups into lanes, moved to where they are searched.

    Args:
        weights: f32 [groups, columns].
        begin: First group.
        count: Groups, at most LANES.
        book: ``CodeBook``.
        factor: f32, what all weights are multiplied with; 1 for a ``book.binary``.
        tile: f32 [columns, LANES] out, clamped; magnitudes unless the book is signed.
        moved: i32 [LANES] out, the exponent of what each group was multiplied with, for a ``book.binary``.
        state: LARGEST and FACTOR out.
        cell: f32 [1], scratch.

    Returns:
        Whether all weights are finite.
    """
    columns = tile.shape[0]
    clamp, binary, signed = f32(book.clamp), book.binary, book.kind == SIGNED_KIND
    for lane in range(count):
        for column in range(columns):
            tile[column, lane] = weights[begin + lane, column]
    for lane in range(LANES):
        state[LARGEST + lane], state[FACTOR + lane] = f32(0), f32(0)
    for column in range(columns):
        for lane in range(LANES):
            weight = tile[column, lane]
            state[LARGEST + lane] = max(state[LARGEST + lane], abs(weight))
            state[FACTOR + lane] += weight - weight  # NaN from a weight that is not finite
    finite = True
    for lane in range(count):
        finite &= state[FACTOR + lane] == f32(0)
    for lane in range(LANES):
        state[FACTOR + lane] = factor
    if binary:
        for lane in range(count):
            moved[lane] = _binary_exponent(state[LARGEST + lane], cell)
            state[FACTOR + lane] = _power(moved[lane], cell)
    for lane in range(LANES):
        state[LARGEST + lane] = min(state[LARGEST + lane] * state[FACTOR + lane], clamp)
    for column in range(columns):
        if signed:
            for lane in range(LANES):
                tile[column, lane] = max(-clamp, min(clamp, tile[column, lane] * state[FACTOR + lane]))
        else:
            for lane in range(LANES):
                tile[column, lane] = min(clamp, abs(tile[column, lane] * state[FACTOR + lane]))
    return finite


@part
def _load_importance(importance, begin, count, kind, tile, lines):  # type: ignore[no-untyped-def]
    """Bring importance f32 [groups of a row, columns] into lanes; ones for a group where no scale would cost anything.

    That is one without importance, and with E2M1, whose zero is a level, one whose weights all lack it. NF3 has no such
    level: zeros of importance cost something at every scale but zero.
    """
    columns = tile.shape[0]
    place = begin % importance.shape[0]
    for lane in range(count):
        met = f32(0)
        for column in range(columns):
            lines[column, lane] = importance[place, column]
            matters = (kind != E2M1_KIND) | (tile[column, lane] != f32(0))
            met = max(met, importance[place, column] if matters else f32(0))
        if met == f32(0):
            for column in range(columns):
                lines[column, lane] = f32(1)
        place = place + 1 if place + 1 < importance.shape[0] else 0


@part
def _choose_start(count, book, moved, searching, state, cell):  # type: ignore[no-untyped-def]
    """Where each group's search starts and ends, or its scale where there is no search.

    Args:
        count: Groups in the tile.
        book: ``CodeBook``.
        moved: i32 [LANES], of ``_load``.
        searching: Whether there is a search.
        state: LARGEST in; FIRST, LAST, LIMIT, START, BEST, SATURATED out.
        cell: f32 [1], scratch.
    """
    reach, useful, binary = f32(book.reach), f32(book.useful), book.binary
    for lane in range(LANES):
        first, last, limit, start, best, saturated = 1, book.legal, book.limit, 0, 0, False
        largest = state[LARGEST + lane]
        if lane < count and largest > f32(0):
            if binary:
                zero_byte = moved[lane] + book.byte_offset  # the index that byte 0 has in this group
                first, last = max(1, zero_byte), min(last, zero_byte + 254)
                limit = last
            if searching:
                start = max(first, min(last, _floor_index(largest / reach, book, cell)))
                if book.kind == E2M1_KIND:
                    end = max(book.halves_from, _floor_index(largest * useful, book, cell))
                    limit = min(limit, max(start, end))
            else:
                index = max(first if binary else 0, _nearest_index(largest / reach, book, cell))
                best, saturated = min(index, last), index > last
        state[FIRST + lane], state[LAST + lane], state[LIMIT + lane] = first, last, limit
        state[START + lane], state[BEST + lane] = start, best
        state[SATURATED + lane] = f32(1) if saturated else f32(0)


@part
def _encode(weights, group, multiplier, inverse, magnitude, thresholds, codes):  # type: ignore[no-untyped-def]
    """Codes u8 [columns] out of a group of weights; returns whether a code of a magnitude is not zero."""
    used = i32(0)
    if magnitude:
        for column in range(weights.shape[1]):
            weight = weights[group, column] * multiplier
            code = _code(abs(weight) * inverse, thresholds)
            used |= code
            codes[column] = np.uint8(code + (i32(8) if (weight < f32(0)) & (code > i32(0)) else i32(0)))
    else:
        for column in range(weights.shape[1]):
            codes[column] = np.uint8(_code(weights[group, column] * multiplier * inverse, thresholds))
    return used != i32(0)


@part
def _add_cost(weights, group, codes, scale, meanings, partial):  # type: ignore[no-untyped-def]
    """Add a group's w^2 to the first eight and (w - q)^2 to the last eight of partial sums f64 [16], in float64.

    One of eight sums for each column modulo 8, so that they go side by side.
    """
    for eight in range(0, weights.shape[1], 8):
        for i in range(8):
            weight = np.float64(weights[group, eight + i])
            error = weight - meanings[codes[eight + i]] * scale
            partial[i] += weight * weight
            partial[8 + i] += error * error


@part
def _weighted_cost(weights, group, codes, scale, meanings, importance, place):  # type: ignore[no-untyped-def]
    """Sum of importance * (w - q)^2 over a group, in float64."""
    cost = 0.0
    for column in range(weights.shape[1]):
        error = np.float64(weights[group, column]) - meanings[codes[column]] * scale
        cost += error * error * np.float64(importance[place, column])
    return cost


@part
def _store(words, bits, out, begin):  # type: ignore[no-untyped-def]
    """Codes of a group, one a byte, as u64 [columns / 8], to bytes: eight codes to three bytes, or to four."""
    for eight in range(words.shape[0]):
        word = words[eight]
        at = begin + eight * bits
        if bits == 3:
            word = u64(word | u64(word >> u64(5))) & u64(0x003F003F003F003F)
            word = u64(word | u64(word >> u64(10))) & u64(0x00000FFF00000FFF)
            word = u64(word | u64(word >> u64(20)))
        else:
            word = u64(word | u64(word >> u64(4))) & u64(0x00FF00FF00FF00FF)
            word = u64(word | u64(word >> u64(8))) & u64(0x0000FFFF0000FFFF)
            word = u64(word | u64(word >> u64(16)))
            out[at + 3] = np.uint8(u64(word >> u64(24)) & u64(0xFF))
        out[at] = np.uint8(word & u64(0xFF))
        out[at + 1] = np.uint8(u64(word >> u64(8)) & u64(0xFF))
        out[at + 2] = np.uint8(u64(word >> u64(16)) & u64(0xFF))


@part
def _finish(  # type: ignore[no-untyped-def]
    weights, begin, count, book, thresholds, second, importance, weighted, moved, state,
    codes, scales, sums, counts, group_codes, meanings, partial,
):  # fmt: skip
    """Write codes and scale bytes of a tile, and add up what they cost; arguments as elsewhere in this module."""
    columns, bits, magnitude, binary = weights.shape[1], book.bits, book.kind == E2M1_KIND, book.binary
    values, inverses = book.values, book.inverses
    words = group_codes.view(np.uint64)
    place = begin % importance.shape[0]
    for lane in range(count):
        group, index, multiplier = begin + lane, i32(state[BEST + lane]), state[FACTOR + lane]
        used = _encode(weights, group, multiplier, inverses[index], magnitude, thresholds, group_codes)
        unit = 1.0 / np.float64(multiplier) if binary else np.float64(second)
        scale = np.float64(values[index]) * unit
        _add_cost(weights, group, group_codes, scale, meanings, partial)
        if weighted:
            sums[2] += _weighted_cost(weights, group, group_codes, scale, meanings, importance, place)
            place = place + 1 if place + 1 < importance.shape[0] else 0
        _store(words, bits, codes, group * columns * bits // 8)
        nothing = index == 0 or (magnitude and not used)
        counts[0] += 1 if nothing else 0
        counts[1] += 1 if 0 < index < book.subnormal_below else 0
        counts[2] += 1 if state[SATURATED + lane] > f32(0) else 0
        if binary:
            index -= moved[lane] + book.byte_offset
        scales[group] = 0 if nothing else index


@kernel
def quantize_groups(book, weights, importance, weighted, searching, second, codes, scales, sums, counts):  # type: ignore[no-untyped-def]
    """Quantise groups one after the other; see the module's text for what is searched.

    Args:
        book: ``CodeBook``.
        weights: f32 [groups, columns].
        importance: f32 [groups of a row, columns], finite, not negative, below 2; used where ``weighted``.
        weighted: Whether errors are weighted.
        searching: Whether to search, or else to take the scale for the largest weight (``absmax``).
        second: f32, the second-level scale; 1 where there is none.
        codes: u8 [groups * columns * bits / 8] out.
        scales: u8 [groups] out.
        sums: f64 [3] out: sums of w^2, of (w - q)^2 and of importance * (w - q)^2, the last only where ``weighted``.
        counts: i64 [3] out: zero groups, subnormal scales, saturated groups.

    Returns:
        -1, or a group with a weight that is not finite in it or in the LANES - 1 groups behind it; outputs are then
        not all written.
    """
    groups, columns = weights.shape
    level, edge = book.levels, book.thresholds
    levels = (level[0], level[1], level[2], level[3], level[4], level[5], level[6], level[7])
    thresholds = (edge[0], edge[1], edge[2], edge[3], edge[4], edge[5], edge[6])
    factor = f32(1) / second
    tile, lines = np.zeros((columns, LANES), np.float32), np.ones((columns, LANES), np.float32)
    state, moved = np.zeros(16 * LANES, np.float32), np.zeros(LANES, np.int32)
    group_codes, partial, cell = np.empty(columns, np.uint8), np.zeros(16, np.float64), np.empty(1, np.float32)
    meanings = np.empty(16, np.float64)
    for i in range(8):
        meanings[i], meanings[8 + i] = level[i], -level[i]
    for begin in range(0, groups, LANES):
        count = min(LANES, groups - begin)
        if not _load(weights, begin, count, book, factor, tile, moved, state, cell):
            return begin
        if weighted:
            _load_importance(importance, begin, count, book.kind, tile, lines)
        _choose_start(count, book, moved, searching, state, cell)
        if searching:
            _search(tile, lines, book, thresholds, levels, state)
        _finish(
            weights, begin, count, book, thresholds, second, importance, weighted, moved, state,
            codes, scales, sums, counts, group_codes, meanings, partial,
        )  # fmt: skip
    for i in range(8):
        sums[0] += partial[i]
        sums[1] += partial[8 + i]
    return -1
