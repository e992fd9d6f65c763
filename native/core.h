/* What the native core does, without Python: leaves of strided arrays are hashed, copied, read and put into place.
 *
 * Nothing here allocates, and nothing knows formats: callers bring memory, lengths and digests. */
#ifndef CAS_CKPT_CORE_H
#define CAS_CKPT_CORE_H

#include <stddef.h>
#include <stdint.h>

#define MAX_DIMS 64
#define DIGEST_BYTES 32

/* A box of a cell, in memory that may be strided. The cell's elements are numbered in C order.
 *
 * sizes, strides (bytes): of the memory; offsets: where the box begins in the cell. */
struct part {
    int ndim;
    size_t item_bytes;
    size_t cell[MAX_DIMS], offsets[MAX_DIMS], sizes[MAX_DIMS];
    size_t row[MAX_DIMS]; /* elements of the cell behind one step along each dimension */
    ptrdiff_t strides[MAX_DIMS];
    char *data;
};

/* Where bytes of leaves come from: memory, or a file that is read from `offset` on. */
struct origin {
    const uint8_t *memory; /* NULL: the file */
    int fd;
    int64_t offset;
    int cached_only; /* stop at what the page cache does not hold */
};

enum outcome { ALL_DONE, BAD_LEAF, NOT_CACHED, FILE_ENDED, READ_FAILED };

/* Fill in `row`, and join dimensions that lie together. */
void part_settle(struct part *part);

/* The address of all of the cell in C order, or NULL if the part is not that. */
char *part_whole(const struct part *part);

/* Copy elements first .. stop of the cell, packed in `flat`, to their places, or from there; others stay. */
void part_scatter(const struct part *part, size_t first, size_t stop, const uint8_t *flat);
void part_gather(const struct part *part, size_t first, size_t stop, uint8_t *flat);

/* BLAKE3 of `size` consecutive bytes. */
void digest_bytes(const uint8_t *data, size_t size, uint8_t out[DIGEST_BYTES]);

/* Digests of the leaves of a whole cell.
 *
 * copy: NULL, or room for the cell: each leaf is copied there, and the copy is hashed.
 * scratch: room for a leaf; used where neither the cell nor a copy of it is in one piece. */
void hash_leaves(const struct part *cell, size_t leaf_bytes, uint8_t *copy, uint8_t *scratch, uint8_t *digests);

/* Read `size` bytes of the cell from byte `first` on, leaf by leaf; check each, and put it into all parts.
 *
 * digests: of these leaves; NULL: they are not checked.
 * done: leaves that are in place.
 * READ_FAILED leaves errno. */
enum outcome read_leaves(const struct origin *origin, size_t first, size_t size, size_t leaf_bytes,
                         const uint8_t *digests, const struct part *parts, size_t num_parts, uint8_t *scratch,
                         size_t *done);

/* Sums modulo 2^64 of rows of `row_words` 64-bit words, the last filled up with zeros: of each row, then of columns. */
void sum_words(const struct part *cell, size_t row_words, uint64_t *sums, uint8_t *scratch);

/* The instructions that hashes use on this processor. */
const char *simd_name(void);

#endif
