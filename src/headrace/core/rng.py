"""Randomness as a function of position: no generator, no state, nothing to save.

    key(seed, *names) -> int              who asks: xxh3 over an unambiguous encoding
    bits(key, positions) -> uint64        64 random bits for each position
    below(key, positions, n) -> int64     a random integer in [0, n) for each position
    permute(key, n, positions) -> int64   where a keyed permutation of [0, n) sends each position; `unpermute` goes back
    shuffled(key, n) -> int64             a whole permutation of [0, n), for small n

The values are part of the format: a stream resumed by another version or on another platform must be the same, so the
known-answer tests may never change. None of this is cryptography.

`permute` is a Feistel network over the smallest power of two that holds `n`, with cycle walking (Black and Rogaway 2002): a
result outside `[0, n)` is put through again until it falls inside, fewer than twice on average. It needs no memory, so
a dataset of 10^12 samples is shuffled as cheaply as one of a thousand. Up to 16 positions are sorted by random bits instead.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Words = NDArray[np.uint64]

_U: Final = np.uint64
_GOLDEN: Final = _U(0x9E3779B97F4A7C15)
_M1: Final = _U(0xBF58476D1CE4E5B9)
_M2: Final = _U(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = _U(27), _U(30), _U(31), _U(32)
_LOW32: Final = _U(0xFFFFFFFF)
_ROUNDS: Final = 6
_SMALL: Final = 16  # on fewer than five bits a Feistel network reaches too few permutations
_LAST: Final = _U(0xFFFFFFFFFFFFFFFF)


def key(seed: int, *names: str | int | bytes) -> int:
    """A 64-bit key for one use of randomness, e.g. `key(seed, "shards", dataset.name)`.

    Each part is tagged with its type and length, so no two lists of names can be confused.
    """
    digest = xxhash.xxh3_64()
    for part in (seed, *names):
        match part:
            case int():
                tag, data = b"i", str(int(part)).encode()
            case str():
                tag, data = b"s", part.encode("utf-8", "surrogatepass")
            case bytes():
                tag, data = b"b", part
        digest.update(b"%s%d:%s" % (tag, len(data), data))
    return digest.intdigest()


def bits(key: int | Words, positions: Any) -> Words:
    """64 random bits per position: two SplitMix64 finalisers (Steele, Lea and Flood 2014) around the key.

    `key` is one key or an array of keys that broadcasts against `positions` (integers, taken modulo 2^64).
    """
    keys, at = np.asarray(key, _U), np.asarray(positions)
    shape = np.broadcast_shapes(keys.shape, at.shape)
    keys, at = np.atleast_1d(keys), np.atleast_1d(at)  # numpy warns of the wrap-around that is meant, on scalars only
    z = at.astype(_U) * _GOLDEN + keys
    return _mix(_mix(z) ^ ((keys << _S32) | (keys >> _S32))).reshape(shape)


def _mix(z: Words) -> Words:
    """SplitMix64's output function, in place."""
    z ^= z >> _S30
    z *= _M1
    z ^= z >> _S27
    z *= _M2
    z ^= z >> _S31
    return z


def below(key: int | Words, positions: Any, n: int | Ints) -> Ints:
    """A random integer in `[0, n)` per position, by multiply-high (Lemire 2019); the bias is at most n / 2^64."""
    z = bits(key, positions)
    bound = np.asarray(n, _U)
    high, low = z >> _S32, z & _LOW32
    bound_high, bound_low = bound >> _S32, bound & _LOW32
    middle = high * bound_low + ((low * bound_low) >> _S32)
    cross = low * bound_high + (middle & _LOW32)
    return (high * bound_high + (middle >> _S32) + (cross >> _S32)).astype(np.int64)


def shuffled(key: int, n: int) -> Ints:
    """A permutation of `[0, n)` as an array: positions sorted by their random bits."""
    return np.argsort(bits(key, np.arange(n)), kind="stable")


def permute(key: int | Words, n: int | Ints, positions: Any) -> Ints:
    """Where each position goes under the permutation of `[0, n)` that belongs to `key`.

    `key` and `n` may be arrays that broadcast against `positions`: many permutations in one call. Positions must lie in
    `[0, n)`; int64 in, int64 out, same shape.
    """
    return _walk(key, n, positions, range(_ROUNDS))


def unpermute(key: int | Words, n: int | Ints, positions: Any) -> Ints:
    """The inverse of `permute`."""
    return _walk(key, n, positions, range(_ROUNDS - 1, -1, -1))


def _walk(key: int | Words, n: int | Ints, positions: Any, rounds: range) -> Ints:
    """Small sizes by sorting, the others by a Feistel network with cycle walking."""
    x = np.array(positions, np.int64)
    shape = x.shape
    x = x.reshape(-1)
    sizes, keys = _spread(np.asarray(n, np.int64), shape), _spread(np.asarray(key, _U), shape)
    small = sizes <= _SMALL
    if not x.size or (sizes.size == 1 and not small[0]):
        return _cycle(keys, sizes, x, rounds).reshape(shape)
    if small.all():
        return _sorted(keys, sizes, x, rounds).reshape(shape)
    for part, function in ((np.flatnonzero(small), _sorted), (np.flatnonzero(~small), _cycle)):
        if part.size:
            x[part] = function(_pick(keys, part), sizes[part], x[part], rounds)
    return x.reshape(shape)


def _sorted(keys: Words, sizes: Ints, x: Ints, rounds: range) -> Ints:
    """At most `_SMALL` positions: each goes to the rank of its random bits (or comes back from there)."""
    places = np.arange(int(sizes.max()))[None, :]
    table = np.where(places < sizes[:, None], bits(keys[:, None], places), _LAST)
    if rounds.step < 0:
        order = np.argsort(table, axis=1, kind="stable")
        return order[0, x] if len(order) == 1 else np.take_along_axis(order, x[:, None], axis=1)[:, 0]
    own = table[0, x][:, None] if len(table) == 1 else np.take_along_axis(table, x[:, None], axis=1)
    return (table < own).sum(axis=1)


def _cycle(keys: Words, sizes: Ints, positions: Ints, rounds: range) -> Ints:
    """Feistel network with cycle walking; every element walks until it is back inside its `[0, n)`."""
    x, bound = positions.astype(_U), sizes.astype(_U)
    width = _bit_length(bound - _U(1)).astype(_U)
    high = width // _U(2)
    low = width - high
    words = bits(keys[None, :], np.arange(_ROUNDS)[:, None])
    out = _feistel(words, x, high, low, rounds)
    todo = np.flatnonzero(out >= bound)
    while todo.size:
        again = _feistel(_pick(words.T, todo).T, out[todo], _pick(high, todo), _pick(low, todo), rounds)
        out[todo] = again
        todo = todo[again >= _pick(bound, todo)]
    return out.astype(np.int64)


def _spread(values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """One value for all, as `[1]`, or one for each position, flat."""
    return values.reshape(1) if values.size == 1 else np.broadcast_to(values, shape).reshape(-1)


def _pick(values: NDArray[Any], index: Ints) -> NDArray[Any]:
    """Values of these positions; one value for all stays as it is."""
    return values if len(values) == 1 else values[index]


def _feistel(words: Words, x: Words, high: Words, low: Words, rounds: range) -> Words:
    """One pass over `high + low` bits; even rounds change the upper part, odd rounds the lower part."""
    left, right = x >> low, x & ((_U(1) << low) - _U(1))
    for number in rounds:
        if number % 2 == 0:
            left ^= _round(right, words[number]) >> (_U(64) - high)
        else:
            right ^= _round(left, words[number]) >> (_U(64) - low)
    return (left << low) | right


def _round(half: Words, word: Words) -> Words:
    """The round function: its upper bits are used."""
    z = (half + word) * _M1
    z ^= z >> _S32
    z *= _M2
    return z


def _bit_length(values: Words) -> Ints:
    """Bits needed for each value (0 needs none), exact over all of uint64."""
    out = np.zeros(values.shape, np.int64)
    rest = values.copy()
    for step in (32, 16, 8, 4, 2, 1):
        above = rest >= (_U(1) << _U(step))
        out += np.where(above, step, 0)
        rest = np.where(above, rest >> _U(step), rest)
    return out + (rest > 0)
