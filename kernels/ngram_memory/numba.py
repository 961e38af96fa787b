"""Counts of the bytes that followed a context, as evidence on the eight binary decisions that spell a byte.

A table holds, for every context seen, the bytes that followed it and how often (CSR). Positions are looked up in
blocks, a stage at a time over the whole block, so that cache misses overlap.

Legend: N bytes of the corpus, n positions, O contexts of a position (orders and words), C contexts of a table, K = 8
decisions, Q levels of a count, M features.
"""

from __future__ import annotations

import math

import numpy as np

from ..compile import jit

DEPTH = 8
BLOCK = 256
# counts are told apart at these lower ends
LEVELS = np.array([0, 1, 2, 3, 4, 5, 7, 10, 15, 25, 50, 128, 512], np.int64)
NUM_LEVELS = len(LEVELS)
_TOP = 1024


def _level_table() -> np.ndarray:
    return (np.searchsorted(LEVELS, np.arange(_TOP), side="right") - 1).astype(np.uint8)


_LEVEL_OF = _level_table()
# leading bits that two bytes share, by their exclusive or
_SHARED = np.array([8 - int(differing).bit_length() for differing in range(256)], np.int64)


@jit
def mix(key, value):
    """Hash of (key, value), 64 bits; see `router.strategies.hash`."""
    mixed = (key ^ (np.uint64(value) + np.uint64(1))) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    return mixed ^ (mixed >> np.uint64(29))


@jit
def context_hashes(data, positions, order, words, salts, is_word, longest_word, out):
    """out[n]: hash of the `order` bytes before each position, or of the current word and `words` - 1 words before it.

    salts[n] is mixed in last: a document's number for counts of that document alone, or one number for all.
    """
    for i in range(positions.size):
        p = positions[i] - 1
        key = np.uint64(order + 16 * words + 1)
        if words:
            for word in range(words):
                if word:
                    stop = p - 8
                    while p > stop and data[p] != 0 and not is_word[data[p]]:
                        p -= 1
                stop = p - longest_word
                while p > stop and is_word[data[p]]:
                    key = mix(key, data[p])
                    p -= 1
                key = mix(key, 256)
        else:
            for lag in range(order):
                key = mix(key, data[p - lag])
        out[i] = mix(key, salts[i])


@jit
def run_lengths(grams, contexts, checks, offsets, followers):
    """CSR of sorted grams (hash of context with a byte in its low 8 bits): returns (contexts, grams) that differ.

    checks[c] is the low half of the context's 56 bits; followers[offsets[c] : offsets[c + 1]] are count << 8 | byte,
    the count saturating at 2**24 - 1.
    """
    num_contexts = -1
    num_grams = -1
    previous = np.uint64(0)
    for i in range(grams.size):
        gram = grams[i]
        if i == 0 or gram != previous:
            if i == 0 or gram >> np.uint64(8) != previous >> np.uint64(8):
                num_contexts += 1
                contexts[num_contexts] = gram >> np.uint64(8)
                checks[num_contexts] = np.uint32(gram >> np.uint64(8))
                offsets[num_contexts] = num_grams + 1
            num_grams += 1
            followers[num_grams] = np.uint32(gram & np.uint64(255))
            previous = gram
        if followers[num_grams] < np.uint32(0xFFFFFF00):
            followers[num_grams] += np.uint32(256)
    offsets[num_contexts + 1] = num_grams + 1
    return num_contexts + 1, num_grams + 1


@jit
def fill_directory(contexts, count, shift, directory):
    """directory[d]: first context whose hash (56 bits) has the top bits d or more."""
    place = 0
    for d in range(directory.size):
        while place < count and np.int64(contexts[place] >> np.uint64(shift)) < d:
            place += 1
        directory[d] = place


@jit
def find(hashes, count, shift, directory, checks, out):
    """out[i]: the context of each of `count` hashes (64 bits), or -1."""
    for i in range(count):
        out[i] = directory[np.int64((hashes[i] >> np.uint64(8)) >> np.uint64(shift))]
    for i in range(count):
        short = hashes[i] >> np.uint64(8)
        stop = directory[np.int64(short >> np.uint64(shift)) + 1]
        found = -1
        for place in range(out[i], stop):
            if checks[place] == np.uint32(short):
                found = place
                break
        out[i] = found


@jit
def add_evidence(contexts, sign, offsets, followers, targets, evidence, distinct):
    """Add sign * counts to evidence[i, l]: followers that share exactly the first l bits with the target (l = 8: the
    target itself). distinct[i] counts them (for sign > 0). Returns a number without meaning: the first reads are
    there to be under way before they are needed."""
    touched = np.uint32(0)
    for i in range(contexts.size):
        if contexts[i] >= 0:
            touched ^= followers[offsets[contexts[i]]]
    for i in range(contexts.size):
        if contexts[i] < 0:
            continue
        target = np.uint32(targets[i])
        begin, end = np.int64(offsets[contexts[i]]), np.int64(offsets[contexts[i] + 1])
        for place in range(begin, end):
            entry = followers[place]
            shared = _SHARED[(entry ^ target) & np.uint32(255)]
            evidence[i, shared] += sign * np.int32(entry >> np.uint32(8))
        if sign > 0:
            distinct[i] = end - begin
    return touched


@jit
def level(count):
    """Level of a count."""
    return _LEVEL_OF[count] if count < _TOP else NUM_LEVELS - 1


@jit
def tally(evidence, count, outcomes):
    """outcomes[k, q(taken), q(not taken)] += 1 for the decision taken at every depth k, given the counts of both
    branches; evidence [n, 9] as `add_evidence` leaves it, without the position itself."""
    for i in range(count):
        taken = np.int64(evidence[i, 8])
        for back in range(DEPTH):
            k = DEPTH - 1 - back
            other = np.int64(evidence[i, k])
            outcomes[k, level(max(taken, 0)), level(max(other, 0))] += 1
            taken += other


@jit
def _clipped(value, unit):
    return np.int8(min(max(round(value / unit), -127), 127))


@jit
def write_features(evidence, distinct, count, targets, odds, chained, bins, unit, rows):
    """rows int8 [n, 8, M] in units of log-odds: the features of every decision on the path, towards bit 1.

    Feature o is the calibrated log-odds odds[o, k, q, q'] of context o, 0 where it has not been seen. Then come
    `bins` slots, of which one holds the interpolated log-odds of the chained contexts: the slot says how long the
    longest context is that has been seen at this decision, and 0 stands in the others. Interpolation from short to
    long: p = (t + d p') / (t + u + d) with t the counts of the branch, u of the other, d how many different bytes
    followed (Witten and Bell 1991, method C).

    Args:
        evidence: int32 [O, n, 9].
        distinct: int32 [O, n].
        count: n.
        targets: uint8 [n].
        odds: int8 [O, 8, Q, Q] in units, towards the branch of its first count.
        chained: contexts that are interpolated, shortest first.
        bins: slots.
        unit: of the result.
        rows: int8 [n, 8, M], M at least O + bins.
    """
    contexts = evidence.shape[0]
    totals = np.empty((contexts, 2), np.int64)
    taken = np.empty(contexts, np.int64)
    for i in range(count):
        target = np.int64(targets[i])
        for o in range(contexts):
            taken[o] = max(evidence[o, i, 8], 0)
        for back in range(DEPTH):
            k = DEPTH - 1 - back
            sign = 1.0 if (target >> (DEPTH - 1 - k)) & 1 else -1.0
            for o in range(contexts):
                other = np.int64(max(evidence[o, i, k], 0))
                totals[o, 0] = taken[o]
                totals[o, 1] = other
                rows[i, k, o] = 0
                if taken[o] + other > 0:
                    known = odds[o, k, level(taken[o]), level(other)]
                    rows[i, k, o] = known if sign > 0 else -known
                taken[o] += other
            p = 0.5
            longest = 0
            for place in range(chained.size):
                o = chained[place]
                held = totals[o, 0] + totals[o, 1]
                if held > 0:
                    escape = np.float64(max(distinct[o, i], 1))
                    p = (totals[o, 0] + escape * p) / (held + escape)
                    longest = place
            for slot in range(bins):
                rows[i, k, contexts + slot] = 0
            p = min(max(p, 1e-4), 1 - 1e-4)
            slot = max(longest - (chained.size - bins), 0)
            rows[i, k, contexts + slot] = _clipped(sign * math.log(p / (1 - p)), unit)
