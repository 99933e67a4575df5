"""The GPU's search for the best scale; ``kernels`` says what is searched, ``cuda`` how it is called."""

# Triton compiles these functions itself: it knows no starred tuples, and mypy does not know its language.
# ruff: noqa: RUF005
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_pack.quantize import book

SIGNED_KIND = tl.constexpr(book.SIGNED_KIND)
SYMMETRIC_KIND = tl.constexpr(book.SYMMETRIC_KIND)
E2M1_KIND = tl.constexpr(book.E2M1_KIND)
TINY = tl.constexpr(book.TINY)
EXACT_BELOW = tl.constexpr(book.E4M3_EXACT_BELOW)
STATS = tl.constexpr(book.STATS)


@triton.jit
def _level(x, numbers, KIND: tl.constexpr):
    """The level nearest to x: of eight with signs, of four magnitudes, or of E2M1's magnitudes."""
    if KIND == E2M1_KIND:
        x = tl.minimum(x, 6.0)
        bias = tl.where(x < 2.0, 6291456.0, 12582912.0)
        bias = tl.where(x < 4.0, bias, 25165824.0)
        return (x + bias) - bias
    elif KIND == SIGNED_KIND:
        level = tl.where(x > tl.load(numbers + 8), tl.load(numbers + 1), tl.load(numbers))
        for i in tl.static_range(1, 7):
            level = tl.where(x > tl.load(numbers + 8 + i), tl.load(numbers + 1 + i), level)
        return level
    else:
        level = tl.where(x > tl.load(numbers + 12), tl.load(numbers + 5), tl.load(numbers + 4))
        level = tl.where(x > tl.load(numbers + 13), tl.load(numbers + 6), level)
        return tl.where(x > tl.load(numbers + 14), tl.load(numbers + 7), level)


@triton.jit
def _code(weight, inverse, numbers, KIND: tl.constexpr):
    """The code of a weight, i32: the number of the nearest level, or E2M1's sign and magnitude."""
    x = weight * inverse
    if KIND == E2M1_KIND:
        x = tl.abs(x)
    code = (x > tl.load(numbers + 8)).to(tl.int32)
    for i in tl.static_range(1, 7):
        code += (x > tl.load(numbers + 8 + i)).to(tl.int32)
    if KIND == E2M1_KIND:
        code += tl.where((weight < 0.0) & (code > 0), 8, 0)
    return code


@triton.jit
def _floor_index(ratio, offset, limit, MANTISSA_BITS: tl.constexpr):
    """Index of the largest scale not above a ratio, 0 to ``limit``."""
    bits = ratio.to(tl.int32, bitcast=True)
    index = (bits >> (23 - MANTISSA_BITS)) - offset
    index = tl.maximum(tl.minimum(index, limit), 0)
    if MANTISSA_BITS == 3:  # E4M3, with its subnormals
        index = tl.where(ratio < EXACT_BELOW, (tl.minimum(ratio, 1.0) * 512.0).to(tl.int32), index)
    return index


@triton.jit
def _power(exponent):
    """2^exponent as f32, -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quantize_groups(
    weights,
    importance,
    values,
    inverses,
    numbers,
    codes,
    scales,
    stats,
    groups,
    groups_of_row,
    legal,
    limit_of_all,
    offset,
    byte_offset,
    halves_from,
    subnormal_below,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    NEAREST: tl.constexpr,
    BINARY: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SEARCHING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantise BLOCK groups.

    Args:
        weights: f32 or bf16 [groups, COLUMNS].
        importance: f32 [groups_of_row, COLUMNS]; read where WEIGHTED.
        values: f32, scale of each index.
        inverses: f32, 1 / scale.
        numbers: f32 [24]: eight levels, seven thresholds, four zones, clamp, reach, useful of the ``CodeBook``; what
            weights are multiplied with; the second-level scale.
        codes: i32 [groups, COLUMNS * BITS / 32] out.
        scales: u8 [groups] out.
        stats: f64 [programs, 8] out.
        groups: Groups there are.
        groups_of_row: Of one row.
        legal: And the rest: of the ``CodeBook``.
        limit_of_all: See there.
        offset: See there.
        byte_offset: See there.
        halves_from: See there.
        subnormal_below: See there.
        COLUMNS: Of a group.
        BITS: Of a code.
        KIND: See there.
        MANTISSA_BITS: See there.
        NEAREST: See there.
        BINARY: See there.
        WEIGHTED: Whether errors are weighted.
        SEARCHING: Whether to search, or else to take the scale for the largest weight.
        BLOCK: Threads of a program.
    """
    program = tl.program_id(0)
    group = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = group < groups
    line = (group % groups_of_row) * COLUMNS
    clamp, reach, useful = tl.load(numbers + 19), tl.load(numbers + 20), tl.load(numbers + 21)
    factor, second = tl.load(numbers + 22), tl.load(numbers + 23)

    largest = tl.zeros([BLOCK], tl.float32)
    wrong = tl.zeros([BLOCK], tl.float32)
    for c in tl.static_range(COLUMNS):
        weight = tl.load(weights + group * COLUMNS + c, mask=there, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(weight))
        wrong += weight - weight

    moved = tl.zeros([BLOCK], tl.int32)
    multiplier = tl.zeros([BLOCK], tl.float32) + factor
    first = tl.zeros([BLOCK], tl.int32) + 1
    last = tl.zeros([BLOCK], tl.int32) + legal
    limit = tl.zeros([BLOCK], tl.int32) + limit_of_all
    if BINARY:
        moved = tl.maximum(tl.minimum(127 - (largest.to(tl.int32, bitcast=True) >> 23), 126), -126)
        multiplier = _power(moved)
        first = tl.maximum(first, moved + byte_offset)
        last = tl.minimum(last, moved + byte_offset + 254)
        limit = last
    largest = tl.minimum(largest * multiplier, clamp)
    tile = ()  # every column is a tensor of its own, so that a thread has its group's weights in registers
    for c in tl.static_range(COLUMNS):
        weight = tl.load(weights + group * COLUMNS + c, mask=there, other=0.0).to(tl.float32) * multiplier
        if KIND == SIGNED_KIND:
            tile = tile + (tl.maximum(tl.minimum(weight, clamp), -clamp),)
        else:
            tile = tile + (tl.minimum(tl.abs(weight), clamp),)

    lines = ()
    if WEIGHTED:
        met = tl.zeros([BLOCK], tl.int32)
        for c in tl.static_range(COLUMNS):
            of_column = tl.load(importance + line + c, mask=there, other=0.0)
            if KIND == E2M1_KIND:  # ``kernels._load_importance`` says why
                met = tl.where((of_column > 0.0) & (tile[c] != 0.0), 1, met)
            else:
                met = tl.where(of_column > 0.0, 1, met)
        for c in tl.static_range(COLUMNS):
            of_column = tl.load(importance + line + c, mask=there, other=0.0)
            lines = lines + (tl.where(met > 0, of_column, 1.0),)

    ratio = tl.div_rn(largest, tl.zeros([BLOCK], tl.float32) + reach)
    index = _floor_index(ratio, offset, limit_of_all, MANTISSA_BITS)
    best = tl.zeros([BLOCK], tl.int32)
    saturated = tl.zeros([BLOCK], tl.int32)
    if SEARCHING:
        start = tl.where(largest > 0.0, tl.maximum(first, tl.minimum(last, index)), 0)
        if KIND == E2M1_KIND:
            end = tl.maximum(halves_from, _floor_index(largest * useful, offset, limit_of_all, MANTISSA_BITS))
            limit = tl.minimum(limit, tl.maximum(start, end))
        index = start
        best = start
        lowest = tl.full([BLOCK], float("inf"), tl.float32)
        upwards = tl.zeros([BLOCK], tl.int32)
        active = (start > 0).to(tl.int32)
        outer_low, inner_low = tl.load(numbers + 15), tl.load(numbers + 16)
        inner_high, outer_high = tl.load(numbers + 17), tl.load(numbers + 18)
        while tl.max(active, axis=0) > 0:
            scale, inverse = tl.load(values + index), tl.load(inverses + index)
            inside = upwards > 0
            low, high = tl.where(inside, inner_low, outer_low), tl.where(inside, inner_high, outer_high)
            total = tl.zeros([BLOCK], tl.float32)
            apart = tl.zeros([BLOCK], tl.float32)
            for c in tl.static_range(COLUMNS):
                x = tile[c] * inverse
                error = tile[c] - _level(x, numbers, KIND) * scale
                cost = error * error
                if WEIGHTED:
                    cost = cost * lines[c]
                total += cost
                outside = x > high
                if KIND == SIGNED_KIND:
                    outside = outside | (x < low)
                apart += tl.where(outside != inside, cost, 0.0)
            better = (active > 0) & ((total < lowest) | ((total == lowest) & (index < best)))
            legal_one = index <= last
            taken = better & legal_one
            refused = better & (index > last)
            saturated = tl.where(refused, 1, saturated)
            best = tl.where(taken, index, best)
            lowest = tl.where(taken, total, lowest)
            goal = tl.where(inside, limit, first)
            more = (apart < lowest) & (index != goal) & (refused == 0)
            turning = (upwards == 0) & (start < limit)
            following = tl.where(more, index + tl.where(inside, 1, -1), start + 1)
            active = tl.where(more | turning, active, 0)
            upwards = tl.where(more, upwards, 1)
            index = tl.where(active > 0, following, index)
        total = tl.zeros([BLOCK], tl.float32)
        for c in tl.static_range(COLUMNS):
            cost = tile[c] * tile[c]
            if WEIGHTED:
                cost = cost * lines[c]
            total += cost
        zero = total <= lowest
        best = tl.where(zero, 0, best)
        saturated = tl.where(zero, 0, saturated)
    else:
        if NEAREST:
            above = tl.minimum(index + 1, limit_of_all)
            middle = (tl.load(values + index) + tl.load(values + above)) * 0.5
            up = (ratio > middle) | ((ratio == middle) & (index % 2 == 1))
            index = tl.where(up & (index < limit_of_all), index + 1, index)
        if BINARY:
            index = tl.maximum(index, first)
        saturated = tl.where((index > last) & (largest > 0.0), 1, 0)
        best = tl.where(largest > 0.0, tl.minimum(index, last), 0)

    inverse = tl.load(inverses + best)
    scale = tl.load(values + best).to(tl.float64)
    if BINARY:
        scale = scale * _power(-moved).to(tl.float64)
    else:
        scale = scale * second.to(tl.float64)
    used = tl.zeros([BLOCK], tl.int32)
    signal = tl.zeros([BLOCK], tl.float64)
    lost = tl.zeros([BLOCK], tl.float64)
    weighted_lost = tl.zeros([BLOCK], tl.float64)
    word = tl.zeros([BLOCK], tl.int32)
    for c in tl.static_range(COLUMNS):
        weight = tl.load(weights + group * COLUMNS + c, mask=there, other=0.0).to(tl.float32)
        code = _code(weight * multiplier, inverse, numbers, KIND)
        used = used | code
        weight = weight.to(tl.float64)
        if KIND == E2M1_KIND:
            meaning = tl.load(numbers + (code & 7), mask=there, other=0.0).to(tl.float64)
            error = tl.abs(weight) - meaning * scale
        else:
            meaning = tl.load(numbers + code, mask=there, other=0.0).to(tl.float64)
            error = weight - meaning * scale
        signal += weight * weight
        lost += error * error
        if WEIGHTED:
            of_column = tl.load(importance + line + c, mask=there, other=0.0).to(tl.float64)
            weighted_lost += error * error * of_column
        # Bits BITS * c and on of the group's words; a code may lie across two of them.
        word = word | (code << (BITS * c % 32))
        if BITS * c % 32 + BITS >= 32:
            tl.store(codes + group * (COLUMNS * BITS // 32) + BITS * c // 32, word, mask=there)
            word = code >> (32 - BITS * c % 32)  # 0 where the code ended with the word

    nothing = best == 0
    if KIND == E2M1_KIND:
        nothing = nothing | (used == 0)
    byte = best
    if BINARY:
        byte = best - moved - byte_offset
    tl.store(scales + group, tl.where(nothing, 0, byte).to(tl.uint8), mask=there)
    mine = stats + program.to(tl.int64) * STATS
    subnormal = (best > 0) & (best < subnormal_below) & there
    tl.store(mine, tl.sum(tl.where(there, signal, 0.0), axis=0))
    tl.store(mine + 1, tl.sum(tl.where(there, lost, 0.0), axis=0))
    tl.store(mine + 2, tl.sum(tl.where(there, weighted_lost, 0.0), axis=0))
    tl.store(mine + 3, tl.sum((nothing & there).to(tl.int32), axis=0).to(tl.float64))
    tl.store(mine + 4, tl.sum(subnormal.to(tl.int32), axis=0).to(tl.float64))
    tl.store(mine + 5, tl.sum(tl.where(there, saturated, 0), axis=0).to(tl.float64))
    tl.store(mine + 6, tl.sum((wrong != 0.0).to(tl.int32), axis=0).to(tl.float64))
    tl.store(mine + 7, tl.zeros([], tl.float64))
