#define _GNU_SOURCE
#include "core.h"

#include <errno.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "blake3/blake3.h"
#include "blake3/blake3_impl.h"

/* --- where elements are ------------------------------------------------------------------ */

static size_t magnitude(ptrdiff_t stride) { return stride < 0 ? (size_t)-stride : (size_t)stride; }

static void drop_dim(struct part *part, int dim) {
    for (int at = dim + 1; at < part->ndim; at++) {
        part->cell[at - 1] = part->cell[at];
        part->offsets[at - 1] = part->offsets[at];
        part->sizes[at - 1] = part->sizes[at];
        part->strides[at - 1] = part->strides[at];
    }
    part->ndim--;
}

void part_settle(struct part *part) {
    for (int dim = part->ndim - 1; dim >= 0; dim--)
        if (part->cell[dim] == 1) drop_dim(part, dim);
    for (int dim = part->ndim - 2; dim >= 0; dim--) {
        int next = dim + 1;
        ptrdiff_t length = (ptrdiff_t)part->sizes[next] * part->strides[next];
        if (part->sizes[next] == part->cell[next] && (part->strides[dim] == length || part->sizes[dim] == 1)) {
            part->cell[next] *= part->cell[dim];
            part->offsets[next] = part->offsets[dim] * part->sizes[next];
            part->sizes[next] *= part->sizes[dim];
            drop_dim(part, dim);
        }
    }
    size_t row = 1;
    for (int dim = part->ndim - 1; dim >= 0; dim--) {
        part->row[dim] = row;
        row *= part->cell[dim];
    }
}

char *part_whole(const struct part *part) {
    if (part->ndim == 0) return part->data;
    int together = part->ndim == 1 && part->strides[0] == (ptrdiff_t)part->item_bytes;
    return together && part->sizes[0] == part->cell[0] ? part->data : NULL;
}

/* --- copies ------------------------------------------------------------------------------- */

enum direction { SCATTER, GATHER };

#define COPY_ITEMS(type)                                                        \
    for (size_t at = 0; at < count; at++, to += to_step, from += from_step) {   \
        type item;                                                              \
        memcpy(&item, from, sizeof item);                                       \
        memcpy(to, &item, sizeof item);                                         \
    }                                                                           \
    break

static void copy_line(char *to, ptrdiff_t to_step, const char *from, ptrdiff_t from_step, size_t count, size_t size) {
    if (to_step == (ptrdiff_t)size && from_step == (ptrdiff_t)size) {
        memcpy(to, from, count * size);
        return;
    }
    switch (size) {
    case 1: COPY_ITEMS(uint8_t);
    case 2: COPY_ITEMS(uint16_t);
    case 4: COPY_ITEMS(uint32_t);
    case 8: COPY_ITEMS(uint64_t);
    default:
        for (size_t at = 0; at < count; at++, to += to_step, from += from_step) memcpy(to, from, size);
    }
}

/* A box, the dimension with the shortest steps in memory innermost: each cache line is fetched once. */
struct block {
    int ndim;
    size_t item_bytes;
    size_t sizes[MAX_DIMS];
    ptrdiff_t memory[MAX_DIMS], flat[MAX_DIMS];
};

static void copy_block(const struct block *block, int dim, char *memory, char *flat, enum direction way) {
    if (dim >= block->ndim - 1) {
        size_t count = block->ndim ? block->sizes[dim] : 1, size = block->item_bytes;
        ptrdiff_t memory_step = block->ndim ? block->memory[dim] : (ptrdiff_t)size;
        ptrdiff_t flat_step = block->ndim ? block->flat[dim] : (ptrdiff_t)size;
        if (way == GATHER)
            copy_line(flat, flat_step, memory, memory_step, count, size);
        else
            copy_line(memory, memory_step, flat, flat_step, count, size);
        return;
    }
    for (size_t at = 0; at < block->sizes[dim]; at++) {
        copy_block(block, dim + 1, memory, flat, way);
        memory += block->memory[dim];
        flat += block->flat[dim];
    }
}

/* Copy what the part has of `rows` whole rows of the cell along `dim`, the first of which has the number `at`. */
static void copy_rows(const struct part *part, int dim, size_t at, size_t rows, char *memory, char *flat,
                      enum direction way) {
    size_t low = at > part->offsets[dim] ? at : part->offsets[dim];
    size_t end = part->offsets[dim] + part->sizes[dim], high = at + rows < end ? at + rows : end;
    if (low >= high) return;
    struct block block = {.ndim = 0, .item_bytes = part->item_bytes};
    memory += (ptrdiff_t)(low - part->offsets[dim]) * part->strides[dim];
    flat += (low - at) * part->row[dim] * part->item_bytes;
    for (int own = dim; own < part->ndim; own++) {
        size_t size = own == dim ? high - low : part->sizes[own];
        if (own > dim) flat += part->offsets[own] * part->row[own] * part->item_bytes;
        if (size == 1) continue;
        int place = block.ndim++;
        for (; place > 0 && magnitude(block.memory[place - 1]) < magnitude(part->strides[own]); place--) {
            block.sizes[place] = block.sizes[place - 1];
            block.memory[place] = block.memory[place - 1];
            block.flat[place] = block.flat[place - 1];
        }
        block.sizes[place] = size;
        block.memory[place] = part->strides[own];
        block.flat[place] = (ptrdiff_t)(part->row[own] * part->item_bytes);
    }
    copy_block(&block, 0, memory, flat, way);
}

/* Elements first .. stop of what lies behind `dim`; `flat` has the first of them. */
static void copy_run(const struct part *part, int dim, size_t first, size_t stop, char *memory, char *flat,
                     enum direction way) {
    if (dim == part->ndim) {
        if (way == GATHER)
            memcpy(flat, memory, part->item_bytes);
        else
            memcpy(memory, flat, part->item_bytes);
        return;
    }
    size_t row = part->row[dim];
    while (first < stop) {
        size_t at = first / row, begin = first % row, rows = (stop - first) / row, count;
        if (begin || !rows) {
            size_t end = row - begin < stop - first ? row : begin + stop - first;
            count = end - begin;
            if (at >= part->offsets[dim] && at < part->offsets[dim] + part->sizes[dim]) {
                char *there = memory + (ptrdiff_t)(at - part->offsets[dim]) * part->strides[dim];
                copy_run(part, dim + 1, begin, end, there, flat, way);
            }
        } else {
            count = rows * row;
            copy_rows(part, dim, at, rows, memory, flat, way);
        }
        flat += count * part->item_bytes;
        first += count;
    }
}

void part_scatter(const struct part *part, size_t first, size_t stop, const uint8_t *flat) {
    copy_run(part, 0, first, stop, part->data, (char *)flat, SCATTER);
}

void part_gather(const struct part *part, size_t first, size_t stop, uint8_t *flat) {
    copy_run(part, 0, first, stop, part->data, (char *)flat, GATHER);
}

/* --- BLAKE3 of leaves --------------------------------------------------------------------- */

#define MOST_CHUNKS 128 /* of BLAKE3, 1 KiB each, in a leaf: those of longer ones go through its own interface */

/* BLAKE3 of whole chunks, two at least, which need not lie together: the tree of its paper, level by level. */
static void digest_chunks(const uint8_t *const *chunks, size_t count, uint8_t out[DIGEST_BYTES]) {
    uint8_t values[2][MOST_CHUNKS * BLAKE3_OUT_LEN];
    const uint8_t *pairs[MOST_CHUNKS / 2];
    int side = 0;
    blake3_hash_many(chunks, count, BLAKE3_CHUNK_LEN / BLAKE3_BLOCK_LEN, IV, 0, true, 0, CHUNK_START, CHUNK_END,
                     values[0]);
    for (; count > 2; side = 1 - side) {
        for (size_t at = 0; at < count / 2; at++) pairs[at] = values[side] + at * BLAKE3_BLOCK_LEN;
        blake3_hash_many(pairs, count / 2, 1, IV, 0, false, PARENT, 0, 0, values[1 - side]);
        if (count % 2)
            memcpy(values[1 - side] + count / 2 * BLAKE3_OUT_LEN, values[side] + (count - 1) * BLAKE3_OUT_LEN,
                   BLAKE3_OUT_LEN);
        count = (count + 1) / 2;
    }
    uint32_t root[8];
    memcpy(root, IV, sizeof root);
    blake3_compress_in_place(root, values[side], BLAKE3_BLOCK_LEN, 0, PARENT | ROOT);
    store_cv_words(out, root);
}

static int has_whole_chunks(size_t size) {
    return size % BLAKE3_CHUNK_LEN == 0 && size >= 2 * BLAKE3_CHUNK_LEN && size <= MOST_CHUNKS * BLAKE3_CHUNK_LEN;
}

void digest_bytes(const uint8_t *data, size_t size, uint8_t out[DIGEST_BYTES]) {
    if (has_whole_chunks(size)) {
        const uint8_t *chunks[MOST_CHUNKS];
        size_t count = size / BLAKE3_CHUNK_LEN;
        for (size_t at = 0; at < count; at++) chunks[at] = data + at * BLAKE3_CHUNK_LEN;
        digest_chunks(chunks, count, out);
        return;
    }
    blake3_hasher hasher;
    blake3_hasher_init(&hasher);
    blake3_hasher_update(&hasher, data, size);
    blake3_hasher_finalize(&hasher, out, DIGEST_BYTES);
}

static const uint8_t *address(const struct part *cell, size_t element) {
    const char *at = cell->data;
    for (int dim = 0; dim < cell->ndim; dim++) {
        at += (ptrdiff_t)(element / cell->row[dim]) * cell->strides[dim];
        element %= cell->row[dim];
    }
    return (const uint8_t *)at;
}

/* The bytes of a whole cell that lie together, again and again, if they are whole chunks; else 0. */
static size_t run_of_chunks(const struct part *cell) {
    if (cell->ndim == 0 || cell->strides[cell->ndim - 1] != (ptrdiff_t)cell->item_bytes) return 0;
    size_t bytes = cell->sizes[cell->ndim - 1] * cell->item_bytes;
    return bytes % BLAKE3_CHUNK_LEN ? 0 : bytes;
}

/* A leaf whose chunks lie in runs: each is hashed where it is. */
static void digest_runs(const struct part *cell, size_t run, size_t begin, size_t size, uint8_t out[DIGEST_BYTES]) {
    const uint8_t *chunks[MOST_CHUNKS];
    size_t count = 0;
    for (size_t at = begin; at < begin + size;) {
        const uint8_t *there = address(cell, at / cell->item_bytes);
        size_t left = run - at % run, end = left < begin + size - at ? at + left : begin + size;
        for (; at < end; at += BLAKE3_CHUNK_LEN, there += BLAKE3_CHUNK_LEN) chunks[count++] = there;
    }
    digest_chunks(chunks, count, out);
}

void hash_leaves(const struct part *cell, size_t leaf_bytes, uint8_t *copy, uint8_t *scratch, uint8_t *digests) {
    size_t size = cell->item_bytes, item = cell->item_bytes;
    for (int dim = 0; dim < cell->ndim; dim++) size *= cell->cell[dim];
    const uint8_t *whole = (const uint8_t *)part_whole(cell);
    size_t run = whole ? 0 : run_of_chunks(cell);
    for (size_t begin = 0; begin < size; begin += leaf_bytes, digests += DIGEST_BYTES) {
        size_t length = size - begin < leaf_bytes ? size - begin : leaf_bytes;
        uint8_t *space = copy ? copy + begin : scratch;
        if (whole && !copy) {
            digest_bytes(whole + begin, length, digests);
        } else if (run && !copy && begin % BLAKE3_CHUNK_LEN == 0 && has_whole_chunks(length)) {
            digest_runs(cell, run, begin, length, digests);
        } else {
            if (whole)
                memcpy(space, whole + begin, length);
            else
                part_gather(cell, begin / item, (begin + length) / item, space);
            digest_bytes(space, length, digests);
        }
    }
}

/* --- restores ------------------------------------------------------------------------------ */

static enum outcome read_all(const struct origin *origin, int64_t offset, uint8_t *to, size_t size) {
    while (size) {
        struct iovec place = {to, size};
        ssize_t got;
#ifdef RWF_NOWAIT
        got = origin->cached_only ? preadv2(origin->fd, &place, 1, offset, RWF_NOWAIT)
                                  : preadv(origin->fd, &place, 1, offset);
#else
        if (origin->cached_only) return NOT_CACHED;
        got = preadv(origin->fd, &place, 1, offset);
#endif
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && origin->cached_only) return NOT_CACHED; /* not there, or this file system cannot tell */
        if (got < 0) return READ_FAILED;
        if (got == 0) return FILE_ENDED;
        to += got;
        offset += got;
        size -= (size_t)got;
    }
    return ALL_DONE;
}

enum outcome read_leaves(const struct origin *origin, size_t first, size_t size, size_t leaf_bytes,
                         const uint8_t *digests, const struct part *parts, size_t num_parts, uint8_t *scratch,
                         size_t *done) {
    uint8_t *whole = num_parts == 1 ? (uint8_t *)part_whole(parts) : NULL;
    uint8_t found[DIGEST_BYTES];
    *done = 0;
    for (size_t begin = 0; begin < size; begin += leaf_bytes, ++*done) {
        size_t length = size - begin < leaf_bytes ? size - begin : leaf_bytes;
        const uint8_t *leaf = origin->memory + begin;
        if (!origin->memory) {
            uint8_t *space = whole ? whole + first + begin : scratch;
            enum outcome outcome = read_all(origin, origin->offset + (int64_t)begin, space, length);
            if (outcome != ALL_DONE) return outcome;
            leaf = space;
        }
        if (digests) {
            digest_bytes(leaf, length, found);
            if (memcmp(found, digests + *done * DIGEST_BYTES, DIGEST_BYTES) != 0) return BAD_LEAF;
        }
        if (whole && origin->memory) memcpy(whole + first + begin, leaf, length);
        for (size_t at = 0; at < num_parts && !whole; at++) {
            size_t item = parts[at].item_bytes, start = (first + begin) / item;
            part_scatter(&parts[at], start, start + length / item, leaf);
        }
    }
    return ALL_DONE;
}

/* --- checksums ------------------------------------------------------------------------------ */

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define WIDEST __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST
#endif

WIDEST static uint64_t add_row(const uint8_t *row, uint64_t *columns, size_t words) {
    uint64_t sum = 0;
    for (size_t at = 0; at < words; at++) {
        uint64_t word;
        memcpy(&word, row + at * sizeof word, sizeof word);
        sum += word;
        columns[at] += word;
    }
    return sum;
}

void sum_words(const struct part *cell, size_t row_words, uint64_t *sums, uint8_t *scratch) {
    size_t size = cell->item_bytes, row_bytes = row_words * sizeof *sums, item = cell->item_bytes;
    for (int dim = 0; dim < cell->ndim; dim++) size *= cell->cell[dim];
    const uint8_t *whole = (const uint8_t *)part_whole(cell);
    uint64_t *columns = sums + (size + row_bytes - 1) / row_bytes;
    memset(columns, 0, row_bytes);
    for (size_t begin = 0; begin < size; begin += row_bytes) {
        size_t length = size - begin < row_bytes ? size - begin : row_bytes;
        const uint8_t *row = whole ? whole + begin : scratch;
        if (!whole) part_gather(cell, begin / item, (begin + length) / item, scratch);
        if (length < row_bytes) {
            if (whole) memcpy(scratch, row, length);
            memset(scratch + length, 0, row_bytes - length);
            row = scratch;
        }
        *sums++ = add_row(row, columns, row_words);
    }
}

const char *simd_name(void) {
    switch (blake3_simd_degree()) {
    case 16: return "AVX-512";
    case 8: return "AVX2";
#if BLAKE3_USE_NEON == 1
    case 4: return "NEON";
#else
    case 4: return "SSE4.1";
#endif
    default: return "plain C";
    }
}
