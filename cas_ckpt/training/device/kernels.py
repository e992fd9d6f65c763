"""BLAKE3 of many leaves at once, for Triton: a lane hashes one chunk of BLAKE3 (1 KiB), then trees grow by levels.

    1. `chunk_values`: each lane compresses the 16 blocks of its chunk, one after another, and writes the chaining value
       to its slot. The words of a block are loaded by rows, neighbouring threads reading neighbouring words, and
       brought to the lane that needs them by `split` (through shared memory on a GPU).
    2. `parent_values`, once a level: a lane joins two neighbouring values of a leaf and writes the result where the
       left one was; a value without a neighbour waits for the next level. That gives BLAKE3's tree for any number of
       chunks. The last one joined carries the flag of a root.

What is hashed lies in cells. A table has a row of `TABLE_COLUMNS` numbers for each of them:

    word        where its first word is, in words from `base`
    num_bytes   its plain bytes
    leaf_bytes  bytes of its leaves; the last one may be shorter
    row_bytes   bytes that follow one another in memory; all of them if the cell is contiguous
    row_words   words from the beginning of such a row to the next one's
    first_leaf  number of its first leaf among those of this launch

Slot `leaf * chunks_per_leaf + chunk` holds the value of a chunk; the digest of a leaf is what its slot 0 holds at last.

Invariant: reads no byte outside of the aligned words that hold bytes of the cell. Words are little-endian. Importing
this needs Triton; only hasher.py imports it, when a tensor is to be hashed on a device.
"""

# No `from __future__ import annotations`: Triton reads the annotations of kernels.

import triton
import triton.language as tl

TABLE_COLUMNS = 6

_START, _END, _PARENT, _ROOT = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4), tl.constexpr(8)
_IV0, _IV1, _IV2, _IV3 = (tl.constexpr(word) for word in (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A))
_IV4, _IV5, _IV6, _IV7 = (tl.constexpr(word) for word in (0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19))


@triton.jit
def _mix(a, b, c, d, x, y):
    a = a + b + x
    d = d ^ a
    d = (d >> 16) | (d << 16)
    c = c + d
    b = b ^ c
    b = (b >> 12) | (b << 20)
    a = a + b + y
    d = d ^ a
    d = (d >> 8) | (d << 24)
    c = c + d
    b = b ^ c
    b = (b >> 7) | (b << 25)
    return a, b, c, d


@triton.jit
def _round(
    v0, v1, v2, v3, v4, v5, v6, v7,
    v8, v9, va, vb, vc, vd, ve, vf,
    m0, m1, m2, m3, m4, m5, m6, m7,
    m8, m9, ma, mb, mc, md, me, mf,
):  # fmt: skip
    v0, v4, v8, vc = _mix(v0, v4, v8, vc, m0, m1)
    v1, v5, v9, vd = _mix(v1, v5, v9, vd, m2, m3)
    v2, v6, va, ve = _mix(v2, v6, va, ve, m4, m5)
    v3, v7, vb, vf = _mix(v3, v7, vb, vf, m6, m7)
    v0, v5, va, vf = _mix(v0, v5, va, vf, m8, m9)
    v1, v6, vb, vc = _mix(v1, v6, vb, vc, ma, mb)
    v2, v7, v8, vd = _mix(v2, v7, v8, vd, mc, md)
    v3, v4, v9, ve = _mix(v3, v4, v9, ve, me, mf)
    return v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, va, vb, vc, vd, ve, vf


@triton.jit
def _compress(
    h0, h1, h2, h3, h4, h5, h6, h7,
    m0, m1, m2, m3, m4, m5, m6, m7,
    m8, m9, ma, mb, mc, md, me, mf,
    counter, num_bytes, flags,
):  # fmt: skip
    """The chaining value after one block; seven rounds, each with the words of the one before in another order."""
    zero = h0 ^ h0
    v0, v1, v2, v3, v4, v5, v6, v7 = h0, h1, h2, h3, h4, h5, h6, h7
    v8, v9, va, vb = zero + _IV0, zero + _IV1, zero + _IV2, zero + _IV3
    vc, vd, ve, vf = counter, zero, num_bytes, flags
    for _ in tl.static_range(7):
        v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, va, vb, vc, vd, ve, vf = _round(
            v0, v1, v2, v3, v4, v5, v6, v7, v8, v9, va, vb, vc, vd, ve, vf,
            m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, ma, mb, mc, md, me, mf,
        )  # fmt: skip
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, ma, mb, mc, md, me, mf = (
            m2, m6, m3, ma, m7, m0, m4, md, m1, mb, mc, m5, m9, me, mf, m8,
        )  # fmt: skip
    return v0 ^ v8, v1 ^ v9, v2 ^ va, v3 ^ vb, v4 ^ vc, v5 ^ vd, v6 ^ ve, v7 ^ vf


@triton.jit
def _columns(words, lanes: tl.constexpr):
    """The 16 columns of a [lanes, 16] tensor."""
    even, odd = tl.split(tl.reshape(words, (lanes, 8, 2)))
    w0, w2 = tl.split(tl.reshape(even, (lanes, 4, 2)))
    w1, w3 = tl.split(tl.reshape(odd, (lanes, 4, 2)))
    a0, a4 = tl.split(tl.reshape(w0, (lanes, 2, 2)))
    a1, a5 = tl.split(tl.reshape(w1, (lanes, 2, 2)))
    a2, a6 = tl.split(tl.reshape(w2, (lanes, 2, 2)))
    a3, a7 = tl.split(tl.reshape(w3, (lanes, 2, 2)))
    m0, m8 = tl.split(a0)
    m1, m9 = tl.split(a1)
    m2, ma = tl.split(a2)
    m3, mb = tl.split(a3)
    m4, mc = tl.split(a4)
    m5, md = tl.split(a5)
    m6, me = tl.split(a6)
    m7, mf = tl.split(a7)
    return m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, ma, mb, mc, md, me, mf


@triton.jit(do_not_specialize=["num_leaves", "chunks_per_leaf", "num_blocks"])
def chunk_values(
    base, table, cell_of, values, counts, num_leaves, chunks_per_leaf,
    num_blocks, lanes: tl.constexpr, whole: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    """Writes the chaining value of every chunk of `num_leaves` leaves, and of each leaf how many chunks it has.

    Launched with a program for every `lanes` slots of `num_leaves * chunks_per_leaf`.

    Args:
        base: Words; what the table counts from.
        cell_of: The row of the table that each leaf belongs to.
        num_blocks: Blocks of 64 bytes of the longest chunk: 16 unless all leaves are short.
        whole: All chunks have 1,024 bytes, and all addresses are multiples of 16 bytes.
        rows: Cells are rows apart from one another, each of a multiple of 64 bytes or a multiple of a leaf;
            else they are contiguous.
    """
    slot = tl.program_id(0).to(tl.int64) * lanes + tl.arange(0, lanes)
    is_slot = slot < num_leaves.to(tl.int64) * chunks_per_leaf
    leaf = (slot // chunks_per_leaf).to(tl.int32)
    chunk = (slot - leaf.to(tl.int64) * chunks_per_leaf).to(tl.int32)
    row = table + tl.load(cell_of + leaf, mask=is_slot, other=0).to(tl.int64) * 6
    word = tl.load(row)
    cell_bytes = tl.load(row + 1).to(tl.int32)
    leaf_bytes = tl.load(row + 2).to(tl.int32)
    row_bytes = tl.load(row + 3).to(tl.int32)
    row_words = tl.load(row + 4)
    leaf_start = tl.where(is_slot, leaf - tl.load(row + 5).to(tl.int32), 0) * leaf_bytes
    leaf_end = tl.minimum(leaf_start + leaf_bytes, cell_bytes)
    num_chunks = tl.maximum((leaf_end - leaf_start + 1023) // 1024, 1)
    exists = is_slot & (chunk < num_chunks)
    start = tl.where(exists, leaf_start + chunk * 1024, 0)
    length = tl.where(exists, tl.minimum(leaf_end - start, 1024), 0)
    tl.store(counts + leaf, num_chunks, mask=exists & (chunk == 0))

    zero = (slot ^ slot).to(tl.uint32)
    counter = chunk.to(tl.uint32)
    last_flags = _END + tl.where(num_chunks == 1, _ROOT, 0)
    last = tl.maximum((length + 63) // 64, 1) - 1
    h0, h1, h2, h3 = zero + _IV0, zero + _IV1, zero + _IV2, zero + _IV3
    h4, h5, h6, h7 = zero + _IV4, zero + _IV5, zero + _IV6, zero + _IV7
    column = tl.arange(0, 16)
    for block in range(num_blocks):
        at = start + block * 64
        if rows:
            line = at // row_bytes
            first = word + line * row_words + (at - line * row_bytes) // 4
        else:
            first = word + at // 4
        if whole:
            first = tl.multiple_of(first, 4)
            words = tl.load(base + (first[:, None] + column[None, :]))
        else:
            left = (length - block * 64)[:, None] - column[None, :] * 4  # bytes of the chunk from this word on
            words = tl.load(base + (first[:, None] + column[None, :]), mask=left > 0, other=0)
            kept = tl.minimum(tl.maximum(left, 0), 4)
            # Of the last word only the bytes that belong to the chunk; a shift by 32 is none.
            mask = tl.where(kept == 4, 0xFFFFFFFF, (1 << (kept * 8).to(tl.uint32)) - 1).to(tl.uint32)
            words = words & mask
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, ma, mb, mc, md, me, mf = _columns(words, lanes)
        num_bytes = tl.minimum(tl.maximum(length - block * 64, 0), 64).to(tl.uint32)
        flags = (tl.where(last == block, last_flags, 0) + tl.where(block == 0, _START, 0)).to(tl.uint32)
        n0, n1, n2, n3, n4, n5, n6, n7 = _compress(
            h0, h1, h2, h3, h4, h5, h6, h7, m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, ma, mb, mc, md, me, mf,
            counter, num_bytes, flags,
        )  # fmt: skip
        if whole:
            h0, h1, h2, h3, h4, h5, h6, h7 = n0, n1, n2, n3, n4, n5, n6, n7
        else:
            has = block <= last
            h0, h1, h2, h3 = tl.where(has, n0, h0), tl.where(has, n1, h1), tl.where(has, n2, h2), tl.where(has, n3, h3)
            h4, h5, h6, h7 = tl.where(has, n4, h4), tl.where(has, n5, h5), tl.where(has, n6, h6), tl.where(has, n7, h7)
    place = values + slot * 8
    tl.store(place, h0, mask=exists)
    tl.store(place + 1, h1, mask=exists)
    tl.store(place + 2, h2, mask=exists)
    tl.store(place + 3, h3, mask=exists)
    tl.store(place + 4, h4, mask=exists)
    tl.store(place + 5, h5, mask=exists)
    tl.store(place + 6, h6, mask=exists)
    tl.store(place + 7, h7, mask=exists)


@triton.jit(do_not_specialize=["num_leaves", "chunks_per_leaf", "step"])
def parent_values(values, counts, num_leaves, chunks_per_leaf, step, lanes: tl.constexpr):
    """Joins values that are `step` slots apart, of every leaf that has two of them there, into the left slot.

    Args:
        step: 1, then 2, 4 ... as long as it is below `chunks_per_leaf`.
    """
    number = tl.program_id(0).to(tl.int64) * lanes + tl.arange(0, lanes)
    per_leaf = (chunks_per_leaf + 2 * step - 1) // (2 * step)
    leaf = number // per_leaf
    left = (number - leaf * per_leaf) * (2 * step)
    num_chunks = tl.load(counts + leaf, mask=leaf < num_leaves, other=0)
    joins = left + step < num_chunks  # the right one is there
    is_root = (step * 2 >= num_chunks).to(tl.uint32)
    place = values + (leaf * chunks_per_leaf + left) * 8
    other = place + step * 8
    m0 = tl.load(place, mask=joins, other=0)
    m1 = tl.load(place + 1, mask=joins, other=0)
    m2 = tl.load(place + 2, mask=joins, other=0)
    m3 = tl.load(place + 3, mask=joins, other=0)
    m4 = tl.load(place + 4, mask=joins, other=0)
    m5 = tl.load(place + 5, mask=joins, other=0)
    m6 = tl.load(place + 6, mask=joins, other=0)
    m7 = tl.load(place + 7, mask=joins, other=0)
    m8 = tl.load(other, mask=joins, other=0)
    m9 = tl.load(other + 1, mask=joins, other=0)
    ma = tl.load(other + 2, mask=joins, other=0)
    mb = tl.load(other + 3, mask=joins, other=0)
    mc = tl.load(other + 4, mask=joins, other=0)
    md = tl.load(other + 5, mask=joins, other=0)
    me = tl.load(other + 6, mask=joins, other=0)
    mf = tl.load(other + 7, mask=joins, other=0)
    zero = is_root ^ is_root
    h0, h1, h2, h3, h4, h5, h6, h7 = _compress(
        zero + _IV0, zero + _IV1, zero + _IV2, zero + _IV3, zero + _IV4, zero + _IV5, zero + _IV6, zero + _IV7,
        m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, ma, mb, mc, md, me, mf, zero, zero + 64, _PARENT + is_root * _ROOT,
    )  # fmt: skip
    tl.store(place, h0, mask=joins)
    tl.store(place + 1, h1, mask=joins)
    tl.store(place + 2, h2, mask=joins)
    tl.store(place + 3, h3, mask=joins)
    tl.store(place + 4, h4, mask=joins)
    tl.store(place + 5, h5, mask=joins)
    tl.store(place + 6, h6, mask=joins)
    tl.store(place + 7, h7, mask=joins)
