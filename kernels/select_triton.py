"""Choosing N of M values that one thread holds: building blocks of the pruning kernels.

A tile's groups are a tuple of tensors, one for each place in the group, so that choosing is
element-wise arithmetic on registers, whatever the memory format was.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Triton's interpreter truncates float32 to bfloat16; a GPU rounds to nearest even.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


def sorting_network(m: int) -> tuple[int, ...]:
    """Comparators (i, j), i < j, flattened, that sort m values in ascending order.

    Batcher's merge exchange for any m (Knuth, The Art of Computer Programming 3, 5.2.2 M).
    """
    pairs: list[int] = []
    top = 1 << max(0, (m - 1).bit_length() - 1)
    p = top
    while p > 0:
        q, r, distance = top, 0, p
        while True:
            for i in range(m - distance):
                if i & p == r:
                    pairs += (i, i + distance)
            if q == p:
                break
            distance, q, r = q - p, q // 2, p
        p //= 2
    return tuple(pairs)


@triton.jit
def split(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOG: tl.constexpr):
    """(ROWS, COLUMNS * 2**LOG) -> 2**LOG tensors (ROWS, COLUMNS), neighbours in order."""
    parts = (x,)
    for level in tl.static_range(LOG):
        even = ()
        odd = ()
        for i in tl.static_range(2**level):
            halves = tl.reshape(parts[i], (ROWS, COLUMNS * 2 ** (LOG - level - 1), 2))
            a, b = tl.split(halves)
            even = even + (a,)
            odd = odd + (b,)
        parts = even + odd
    return parts


@triton.jit
def join(parts, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LOG: tl.constexpr):
    """The inverse of `split`."""
    for level in tl.static_range(LOG):
        joined = ()
        for i in tl.static_range(2 ** (LOG - level - 1)):
            both = tl.join(parts[i], parts[i + 2 ** (LOG - level - 1)])
            joined = joined + (tl.reshape(both, (ROWS, COLUMNS * 2 ** (level + 1))),)
        parts = joined
    return parts[0]


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x in ``dtype``, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16 and x.dtype != tl.bfloat16:
        x = x.to(tl.float32)
        bits = x.to(tl.uint32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(x == x, nearest, 0x7FC0).to(tl.uint16)
        return bits.to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def times(x, factor):
    """x * factor, rounded once to the dtype of x. Inf and NaN times 0 stay visible as NaN."""
    return rounded(x.to(tl.float32) * factor.to(tl.float32), x.dtype)


@triton.jit
def magnitude(x):
    """|x| as int32 of the same order; NaN counts as infinity."""
    if x.dtype == tl.float32:
        return tl.minimum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7F800000)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
        return tl.minimum(bits, 0x7C00 if x.dtype == tl.float16 else 0x7F80)


@triton.jit
def _majority(a, b, c):
    return (a & b) | (c & (a | b))


@triton.jit
def _two_of_four(v):
    # Kept is who wins two of its three comparisons; the lower index wins a tie.
    w01 = v[0] >= v[1]
    w02 = v[0] >= v[2]
    w03 = v[0] >= v[3]
    w12 = v[1] >= v[2]
    w13 = v[1] >= v[3]
    w23 = v[2] >= v[3]
    l01 = v[0] < v[1]
    l02 = v[0] < v[2]
    l03 = v[0] < v[3]
    l12 = v[1] < v[2]
    l13 = v[1] < v[3]
    l23 = v[2] < v[3]
    return (
        _majority(w01, w02, w03),
        _majority(l01, w12, w13),
        _majority(l02, l12, w23),
        _majority(l03, l13, l23),
    )


@triton.jit
def _exchange(keys, i: tl.constexpr, j: tl.constexpr, M: tl.constexpr):
    low = tl.minimum(keys[i], keys[j])
    high = tl.maximum(keys[i], keys[j])
    result = ()
    for k in tl.static_range(M):
        result = result + (low if k == i else (high if k == j else keys[k]),)
    return result


@triton.jit
def keep_largest(
    values, wide: tl.constexpr, N: tl.constexpr, M: tl.constexpr, NETWORK: tl.constexpr
):
    """Which N of M values (int32, from `magnitude`, -1 where there is none) are the largest.

    The index is part of the sorted key, so keys are distinct for M <= 8 and ties keep the lower
    index.
    ``wide``: the values need 31 bits, not 15.
    """
    if N == 2 and M == 4:
        return _two_of_four(values)
    else:
        keys = ()
        for j in tl.static_range(M):
            value = values[j].to(tl.int64) if wide else values[j]
            keys = keys + (value * 8 + (7 - j),)
        ranked = keys
        for step in tl.static_range(len(NETWORK) // 2):
            ranked = _exchange(ranked, NETWORK[2 * step], NETWORK[2 * step + 1], M)
        kept = ()
        for j in tl.static_range(M):
            kept = kept + (keys[j] >= ranked[M - N],)
        return kept


@triton.jit
def keep_random(
    seed,
    position,
    call,
    room,
    group: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
):
    """A uniformly random N-subset of the first ``room`` of M, by selection sampling.

    Element i of the r that are left is kept with probability (still to keep) / r (Knuth, The Art
    of Computer Programming 2, 3.4.2 S). Digits of Philox4x32-10 words drive it; the counter is
    (position, call), so a draw depends on the seed and the place alone. ``group``: of those that
    share the four words of a call.
    """
    # A word serves four draws: of up to 8 places, the bias of each stays below 2**-20.
    WORDS: tl.constexpr = (M + 3) // 4
    left = tl.minimum(tl.maximum(room, 0), M)
    wanted = tl.minimum(left, N)
    zero = tl.zeros_like(left)
    kept = ()
    fraction = zero.to(tl.uint32)
    for i in tl.static_range(M):
        if i % 4 == 0:
            fraction = _word(seed, position + zero, call + zero, group * WORDS + i // 4)
        digit = tl.umulhi(fraction, left.to(tl.uint32)).to(tl.int32)
        fraction = fraction * left.to(tl.uint32)
        keep = digit < wanted
        kept = kept + (keep,)
        wanted = wanted - keep.to(tl.int32)
        left = tl.maximum(left - 1, 0)
    return kept


@triton.jit
def _word(seed, position, call, which: tl.constexpr):
    zero = tl.zeros_like(position)
    words = tl.philox(seed, position, call, zero, zero)
    return words[which]
