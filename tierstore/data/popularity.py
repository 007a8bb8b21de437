"""Ids by popularity, as compiled loops: Zipf-Mandelbrot ranks, scattered over a table, drifting.

A draw is a pure function of a 64-bit stream seed and a counter, and takes constant memory for any
table's size. Ranks are sampled exactly (to float64) by rejection-inversion: W. Hörmann, G. Derflinger,
"Rejection-inversion to generate variates from monotone discrete distributions", ACM TOMACS 6 (1996).
"""

from __future__ import annotations

import math

import numpy as np

from cache_policies.disk_cache import compiled

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_UNIT = 2.0**-53
FEISTEL_ROUNDS = 6


@compiled
def mix(value):
    """Apply SplitMix64's finaliser to a uint64."""
    value = (value ^ (value >> np.uint64(30))) * _M1
    value = (value ^ (value >> np.uint64(27))) * _M2
    return value ^ (value >> np.uint64(31))


@compiled
def uniform(stream, counter):
    """Return the ``counter``-th float64 in (0, 1) of ``stream``; counter and stream are uint64."""
    return (np.float64(mix(stream + _GOLDEN * (counter + np.uint64(1))) >> np.uint64(11)) + 0.5) * _UNIT


@compiled
def _integral(x, s, q):
    """Return the integral of (x + q)^-s, up to a constant."""
    if s == 1.0:
        return math.log(x + q)
    return math.expm1((1.0 - s) * math.log(x + q)) / (1.0 - s)


@compiled
def _inverse_integral(y, s, q):
    if s == 1.0:
        return math.exp(y) - q
    return math.exp(math.log1p(max((1.0 - s) * y, -1.0)) / (1.0 - s)) - q


@compiled
def _density(x, s, q):
    return math.exp(-s * math.log(x + q))


@compiled
def scatter(value, size, seed):
    """Map ``value`` by a bijection of [0, size) keyed by ``seed``; all are uint64, ``size`` <= 2^62.

    The bijection is a Feistel network on pairs of digits (a, b) of a mixed radix just above the square root
    of ``size``. The few results outside go through the network again until one is inside (cycle walking).
    """
    radix = np.uint64(math.ceil(math.sqrt(np.float64(size))))
    rows = (size + radix - np.uint64(1)) // radix
    while True:
        high, low = value // radix, value % radix
        for r in range(FEISTEL_ROUNDS):
            key = seed + np.uint64(r) * _GOLDEN
            if r % 2 == 0:
                high = (high + mix(low ^ key) % rows) % rows
            else:
                low = (low + mix(high ^ key) % radix) % radix
        value = high * radix + low
        if value < size:
            return value


@compiled
def drifted(rank, size, in_play, phase, seed):
    """Return the place in [0, size) of ``rank``; as ``phase`` grows by d, a share d of the ranks move.

    Ranks ``in_play`` apart take turns with one another, each group at its own moments, so the places are a
    permutation of the ranks at any time. If size >= 2 in_play, a rank in play gives way to a rank that was
    not.
    """
    turns = size // in_play
    if turns < np.uint64(2) or rank >= turns * in_play:
        return rank
    lane, turn = rank % in_play, rank // in_play
    moments = uniform(seed, lane) + phase
    return lane + in_play * ((turn + np.uint64(moments)) % turns)


@compiled
def draw_ids(out, ranks, s, q, rows, lanes, phase, table_seed, stream):
    """Fill ``out`` int64 (n,) with ids in [0, rows): P(rank k) ~ (k + 1 + q)^-s for k in [0, ranks).

    ranks <= rows. lanes is the ``in_play`` of ``drifted``. phase says how often a row has been replaced on
    average.
    """
    n = np.float64(ranks)
    first = _integral(1.5, s, q) - _density(1.0, s, q)
    last = _integral(n + 0.5, s, q)
    sure = 2.0 - _inverse_integral(_integral(2.5, s, q) - _density(2.0, s, q), s, q)
    place_seed, turn_seed = mix(table_seed), mix(table_seed + _GOLDEN)
    size, lanes_u = np.uint64(rows), np.uint64(lanes)
    counter = np.uint64(0)
    for i in range(out.shape[0]):
        while True:
            y = last + uniform(stream, counter) * (first - last)
            counter += np.uint64(1)
            x = _inverse_integral(y, s, q)
            k = min(max(math.floor(x + 0.5), 1.0), n)
            if k - x <= sure or y >= _integral(k + 0.5, s, q) - _density(k, s, q):
                break
        place = np.uint64(k) - np.uint64(1)
        if phase > 0.0:
            place = drifted(place, size, lanes_u, phase, turn_seed)
        out[i] = np.int64(scatter(place, size, place_seed))


@compiled
def add_effects(logits, ids, lengths, scale, table_seed):
    """Add ``scale`` times the hidden effects, in [-1, 1], of the examples' ids to ``logits`` float64 (B,)."""
    seed = mix(table_seed ^ _M1)
    at = 0
    for example in range(lengths.shape[0]):
        total = 0.0
        for _ in range(lengths[example]):
            total += 2.0 * uniform(seed, np.uint64(ids[at])) - 1.0
            at += 1
        logits[example] += scale * total


@compiled
def draw_lengths(out, mean, stream):
    """Fill ``out`` int64 (B,) with bag sizes of the given mean: uniform over 1 .. 2 mean - 1."""
    spread = 2.0 * (mean - 1.0)
    for i in range(out.shape[0]):
        u = uniform(stream, np.uint64(2 * i))
        # floor(u w) is uniform over [0, ceil(w)) only for whole w: mix the two neighbours to keep the mean
        below = math.floor(spread)
        width = below + (1.0 if uniform(stream, np.uint64(2 * i + 1)) < spread - below else 0.0)
        out[i] = 1 + np.int64(u * (width + 1.0))


@compiled
def draw_normals(out, stream):
    """Fill ``out`` float32 (n,) with standard normal values (Box-Muller)."""
    for i in range(out.shape[0]):
        radius = math.sqrt(-2.0 * math.log(uniform(stream, np.uint64(2 * i))))
        out[i] = radius * math.cos(2.0 * math.pi * uniform(stream, np.uint64(2 * i + 1)))


@compiled
def draw_labels(out, logits, stream):
    """Fill ``out`` float32 (B,) with 1 at the probability of the logit, else 0."""
    for i in range(out.shape[0]):
        out[i] = 1.0 if uniform(stream, np.uint64(i)) * (1.0 + math.exp(-logits[i])) < 1.0 else 0.0


def stream_seed(*parts: int) -> np.uint64:
    """Make a stream seed from integers: any other parts, or order, give an independent stream."""
    mask, state = (1 << 64) - 1, 0
    for part in parts:
        state = _mix_int((state + int(_GOLDEN) + part) & mask)
    return np.uint64(state)


def _mix_int(value: int) -> int:
    mask = (1 << 64) - 1
    value = (value ^ (value >> 30)) * int(_M1) & mask
    value = (value ^ (value >> 27)) * int(_M2) & mask
    return value ^ (value >> 31)
