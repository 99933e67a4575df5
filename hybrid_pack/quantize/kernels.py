"""The search for the best scale of every group, on the CPU.

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

So the result is that of trying all of them, but for the rounding of float32 sums. Of equally good scales the smallest
wins. ``weight / scale`` is ``fl(weight * fl(1 / scale))``; a level's value is ``fl(level * scale)``.
"""

from __future__ import annotations

import numpy as np
from numba import float32 as f32
from numba import int32 as i32

from hybrid_pack.layouts.jit import inline, kernel

LANES = 64
"""Groups worked on side by side: four AVX-512 registers, and a tile of 32 columns of them stays in the L1 cache."""


@inline
def _level(x, thresholds, levels):  # type: ignore[no-untyped-def]
    """The level nearest to x, without a branch."""
    level = levels[0]
    level = levels[1] if x > thresholds[0] else level
    level = levels[2] if x > thresholds[1] else level
    level = levels[3] if x > thresholds[2] else level
    level = levels[4] if x > thresholds[3] else level
    level = levels[5] if x > thresholds[4] else level
    level = levels[6] if x > thresholds[5] else level
    return levels[7] if x > thresholds[6] else level


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
def _try(tile, importance, scale, inverse, thresholds, levels, low, high, inside, total, part):  # type: ignore[no-untyped-def]
    """Errors of a tile of groups, each at its own scale.

    Args:
        tile: f32 [columns, LANES], the weights.
        importance: f32 [columns, LANES].
        scale: f32 [LANES].
        inverse: f32 [LANES].
        thresholds: Seven.
        levels: Eight.
        low: With ``high``: a zone of weight / scale.
        high: See there.
        inside: Which weights' errors are summed once more by themselves: those inside the zone or those outside.
        total: f32 [LANES] out, errors.
        part: f32 [LANES] out, the errors that are summed by themselves.
    """
    for lane in range(LANES):
        total[lane] = f32(0)
        part[lane] = f32(0)
    for column in range(tile.shape[0]):
        weights, weight_importance = tile[column], importance[column]
        for lane in range(LANES):
            x = weights[lane] * inverse[lane]
            error = weights[lane] - _level(x, thresholds, levels) * scale[lane]
            cost = error * error * weight_importance[lane]
            total[lane] += cost
            part[lane] += cost if ((x < low) | (x > high)) != inside else f32(0)


@inline
def _search(tile, importance, start, first, last, limit, book, thresholds, levels, floats, best, saturated):  # type: ignore[no-untyped-def]
    """Find the best scale of a tile of groups.

    Args:
        tile: f32 [columns, LANES].
        importance: f32 [columns, LANES].
        start: i32 [LANES], index of the first scale to try; 0 for a group that needs no search.
        first: i32 [LANES], smallest index allowed.
        last: i32 [LANES], largest index allowed.
        limit: i32 [LANES], largest index to look at.
        book: ``CodeBook``.
        thresholds: Its seven.
        levels: Its eight.
        floats: f32 [5, LANES], scratch; the last row is the error at the best scale when done.
        best: i32 [LANES] out, index of the best scale.
        saturated: u8 [LANES] out, 1 where an index above ``last`` would have been better.
    """
    scale, inverse, total, part, lowest = floats[0], floats[1], floats[2], floats[3], floats[4]
    index = np.empty(LANES, np.int32)
    active = np.empty(LANES, np.bool_)
    for lane in range(LANES):
        index[lane], best[lane], saturated[lane] = start[lane], start[lane], 0
        active[lane] = start[lane] > 0
        lowest[lane] = f32(np.inf)
    upwards = False
    low, high = book.zones[0], book.zones[3]
    while True:
        for lane in range(LANES):
            scale[lane], inverse[lane] = book.values[index[lane]], book.inverses[index[lane]]
        _try(tile, importance, scale, inverse, thresholds, levels, low, high, upwards, total, part)
        going = 0
        for lane in range(LANES):
            if active[lane]:
                better = total[lane] < lowest[lane] or (total[lane] == lowest[lane] and not upwards)
                if better and index[lane] > last[lane]:
                    saturated[lane] = 1
                elif better:
                    lowest[lane], best[lane] = total[lane], index[lane]
                if upwards:
                    active[lane] = part[lane] < lowest[lane] and index[lane] < limit[lane] and saturated[lane] == 0
                    index[lane] += i32(active[lane])
                else:
                    active[lane] = part[lane] <= lowest[lane] and index[lane] > first[lane]
                    index[lane] -= i32(active[lane])
                going += i32(active[lane])
        if going == 0 and not upwards:
            upwards = True
            low, high = book.zones[1], book.zones[2]
            for lane in range(LANES):
                active[lane] = 0 < start[lane] < limit[lane]
                index[lane] = start[lane] + i32(active[lane])
                going += i32(active[lane])
        if going == 0:
            break


@inline
def _floor_index(ratio, book, cell):  # type: ignore[no-untyped-def]
    """Index of the largest scale not above a ratio f32, 0 to ``book.limit``. Cell is scratch, f32 [1]."""
    if ratio < f32(book.exact_below):
        return i32(ratio * f32(512))
    cell[0] = ratio
    index = i32(cell.view(np.int32)[0] >> i32(23 - book.mantissa_bits)) - i32(book.offset)
    return max(i32(0), min(i32(book.limit), index))


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


@inline
def _store(group_codes, book, out, begin):  # type: ignore[no-untyped-def]
    """Codes of a group, u8 [columns], to bytes: three a byte-triple of eight, or two nibbles a byte."""
    if book.bits == 3:
        for eight in range(group_codes.shape[0] // 8):
            word = i32(0)
            for i in range(8):
                word |= i32(i32(group_codes[8 * eight + i]) << i32(3 * i))
            out[begin + 3 * eight] = word & 0xFF
            out[begin + 3 * eight + 1] = (word >> 8) & 0xFF
            out[begin + 3 * eight + 2] = word >> 16
    else:
        for pair in range(group_codes.shape[0] // 2):
            out[begin + pair] = group_codes[2 * pair] | (group_codes[2 * pair + 1] << 4)


@kernel
def quantize_groups(book, weights, importance, weighted, searching, second, codes, scales, sums, counts):  # type: ignore[no-untyped-def]
    """Quantise groups one after the other; see the module's text for the search.

    Args:
        book: ``CodeBook``.
        weights: f32 [groups, columns].
        importance: f32 [groups of a row, columns], finite, not negative, at most about 1; used where ``weighted``.
        weighted: Whether errors are weighted.
        searching: Whether to search, or else to take the scale for the largest weight (``absmax``).
        second: f32, the second-level scale; 1 where there is none.
        codes: u8 [groups * columns * bits / 8] out.
        scales: u8 [groups] out.
        sums: f64 [3], added to: w^2, (w - q)^2, importance * (w - q)^2.
        counts: i64 [3], added to: zero groups, subnormal scales, saturated groups.

    Returns:
        -1, or the place in ``weights`` of one that is not finite; outputs are then not all written.
    """
    groups, columns = weights.shape
    levels = (
        book.levels[0],
        book.levels[1],
        book.levels[2],
        book.levels[3],
        book.levels[4],
        book.levels[5],
        book.levels[6],
        book.levels[7],
    )
    thresholds = (
        book.thresholds[0],
        book.thresholds[1],
        book.thresholds[2],
        book.thresholds[3],
        book.thresholds[4],
        book.thresholds[5],
        book.thresholds[6],
    )
    reach, clamp, factor = f32(book.reach), f32(book.clamp), f32(1) / f32(second)
    tile = np.zeros((columns, LANES), np.float32)
    tile_importance = np.ones((columns, LANES), np.float32)
    floats = np.empty((5, LANES), np.float32)
    start, first = np.zeros(LANES, np.int32), np.ones(LANES, np.int32)
    last, limit = np.empty(LANES, np.int32), np.empty(LANES, np.int32)
    best, saturated = np.empty(LANES, np.int32), np.empty(LANES, np.uint8)
    shift = np.zeros(LANES, np.int32)
    group_codes = np.empty(columns, np.uint8)
    partial = np.zeros((3, 16), np.float64)
    values_of_codes = np.empty(16, np.float64)
    for i in range(8):
        values_of_codes[i] = book.levels[i]
        values_of_codes[8 + i] = -values_of_codes[i]
    cell = np.empty(1, np.float32)
    for begin in range(0, groups, LANES):
        count = min(LANES, groups - begin)
        for lane in range(count):
            row = weights[begin + lane]
            wrong = 0
            largest = f32(0)
            for column in range(columns):
                wrong += i32(1) if row[column] - row[column] != f32(0) else i32(0)
            if wrong:
                for column in range(columns):
                    if not np.isfinite(row[column]):
                        return (begin + lane) * columns + column
            for column in range(columns):
                largest = max(largest, abs(row[column]))
            moved = factor
            if book.binary:
                shift[lane] = _binary_exponent(largest, cell)
                moved = _power(shift[lane], cell)
                zero_byte = shift[lane] - (127 + book.lowest_exponent - 1)  # index that byte 0 has in this group
                first[lane], last[lane] = max(1, zero_byte), min(book.legal, zero_byte + 254)
                limit[lane] = last[lane]
            else:
                last[lane], limit[lane] = book.legal, book.limit
            largest = min(largest * moved, clamp)
            for column in range(columns):
                weight = row[column] * moved
                weight = abs(weight) if book.magnitude else weight
                tile[column, lane] = max(-clamp, min(clamp, weight))
            ratio = largest / reach
            index = _floor_index(ratio, book, cell)
            if searching:
                start[lane] = max(first[lane], min(last[lane], index)) if largest > f32(0) else i32(0)
            else:
                if book.nearest and index < book.limit:
                    middle = (book.values[index] + book.values[index + 1]) / f32(2)
                    index += i32(ratio > middle or (ratio == middle and index % 2 == 1))
                if book.binary and largest > f32(0):
                    index = max(index, first[lane])
                saturated[lane] = index > last[lane]
                best[lane] = min(index, last[lane]) if largest > f32(0) else i32(0)
            if weighted:
                group_importance = importance[(begin + lane) % importance.shape[0]]
                energy = f32(0)
                for column in range(columns):
                    tile_importance[column, lane] = group_importance[column]
                    energy += group_importance[column] * abs(tile[column, lane])
                if energy == f32(0):
                    for column in range(columns):
                        tile_importance[column, lane] = f32(1)
        if searching:
            for lane in range(count, LANES):
                start[lane] = 0
            _search(tile, tile_importance, start, first, last, limit, book, thresholds, levels, floats, best, saturated)
            total = floats[2]
            for lane in range(LANES):
                total[lane] = f32(0)
            for column in range(columns):
                for lane in range(LANES):
                    total[lane] += tile[column, lane] * tile[column, lane] * tile_importance[column, lane]
            for lane in range(count):
                if total[lane] <= floats[4, lane]:
                    best[lane], saturated[lane] = 0, 0
        for lane in range(count):
            row, index = weights[begin + lane], best[lane]
            moved, unit = factor, np.float64(second)
            if book.binary:
                moved = _power(shift[lane], cell)
                unit = 1.0 / np.float64(moved)
            inverse, scale = book.inverses[index], np.float64(book.values[index]) * unit
            used = 0
            for column in range(columns):
                weight = row[column] * moved
                code = _code((abs(weight) if book.magnitude else weight) * inverse, thresholds)
                used += code
                if book.magnitude:
                    code += i32(8) if code > 0 and weight < f32(0) else i32(0)
                group_codes[column] = code
            group_importance = importance[(begin + lane) % importance.shape[0]]
            for half in range(columns // 16):
                for i in range(16):
                    column = 16 * half + i
                    weight = np.float64(row[column])
                    error = weight - values_of_codes[group_codes[column]] * scale
                    partial[0, i] += weight * weight
                    partial[1, i] += error * error
                    partial[2, i] += error * error * np.float64(group_importance[column])
            if book.magnitude and used == 0:
                index = 0
            elif book.binary:
                index -= shift[lane] - (127 + book.lowest_exponent - 1)
            scales[begin + lane] = index
            _store(group_codes, book, codes, (begin + lane) * columns * book.bits // 8)
            counts[0] += best[lane] == 0 or (book.magnitude and used == 0)
            counts[1] += 0 < best[lane] < book.subnormal_below
            counts[2] += saturated[lane]
    for i in range(16):
        sums[0] += partial[0, i]
        sums[1] += partial[1, i]
        sums[2] += partial[2, i]
    return -1
