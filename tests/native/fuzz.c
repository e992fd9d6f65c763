/* Compares core.c with what is plainly right: elements copied one by one, and the official BLAKE3 in plain C.
 *
 * fuzz [SECONDS]: every length up to 4096 bytes and all borders of leaves, then random boxes until SECONDS are over, by
 * each set of instructions that the processor has. The first difference is printed, and the exit code is 1.
 * `make check-native` builds it with AddressSanitizer and UndefinedBehaviorSanitizer. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../../native/blake3/blake3.h"
#include "../../native/core.h"

#ifdef __SANITIZE_ADDRESS__
enum { GUARD = 0 }; /* the sanitizer has its own behind each malloc */
#else
enum { GUARD = 64 };
#endif
enum { MOST_BYTES = 300 * 1024, MOST_TARGETS = 3 };

static uint64_t seed;
static const char *doing = "";

static uint64_t any(uint64_t below) { /* splitmix64 */
    uint64_t word = seed += 0x9E3779B97F4A7C15u;
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
    word = (word ^ word >> 27) * 0x94D049BB133111EBu;
    return (word ^ word >> 31) % below;
}

#define CHECK(what) \
    if (!(what)) fail(#what, __LINE__)

static void fail(const char *what, int line) {
    printf("fuzz.c:%d: %s: not so: %s (seed %llu)\n", line, doing, what, (unsigned long long)seed);
    exit(1);
}

/* --- memory with guards ------------------------------------------------------------------- */

static uint8_t *room(size_t size) {
    uint8_t *base = malloc(size + 2 * GUARD + !GUARD * !size);
    memset(base, 0xA5, size + 2 * GUARD);
    return base + GUARD;
}

static void leave(uint8_t *data, size_t size) {
    for (int at = 0; at < GUARD; at++) CHECK(data[size + (size_t)at] == 0xA5 && data[at - GUARD] == 0xA5);
    free(data - GUARD);
}

static uint8_t *noise(size_t size) {
    uint8_t *data = room(size);
    for (size_t at = 0; at < size; at += 8) {
        uint64_t word = any(UINT64_MAX);
        memcpy(data + at, &word, size - at < 8 ? size - at : 8);
    }
    return data;
}

/* --- the plain way ------------------------------------------------------------------------ */

static size_t elements(const struct part *part) {
    size_t count = 1;
    for (int dim = 0; dim < part->ndim; dim++) count *= part->cell[dim];
    return count;
}

/* Where an element of the cell is, or NULL if the part has not got it. */
static char *place(const struct part *part, size_t element) {
    ptrdiff_t at = 0;
    for (int dim = part->ndim - 1; dim >= 0; dim--) {
        size_t index = element % part->cell[dim];
        element /= part->cell[dim];
        if (index < part->offsets[dim] || index >= part->offsets[dim] + part->sizes[dim]) return NULL;
        at += (ptrdiff_t)(index - part->offsets[dim]) * part->strides[dim];
    }
    return part->data + at;
}

#ifdef __x86_64__
extern _Atomic int g_cpu_features; /* of blake3_dispatch.c, built with BLAKE3_TESTING */
#endif

static void plain_digest(const uint8_t *data, size_t size, uint8_t *out) {
#ifdef __x86_64__
    int features = g_cpu_features;
    g_cpu_features = 0;
#endif
    blake3_hasher hasher;
    blake3_hasher_init(&hasher);
    blake3_hasher_update(&hasher, data, size);
    blake3_hasher_finalize(&hasher, out, DIGEST_BYTES);
#ifdef __x86_64__
    g_cpu_features = features;
#endif
}

static size_t count_leaves(size_t size, size_t leaf_bytes) { return size / leaf_bytes + (size % leaf_bytes != 0); }

static uint8_t *plain_digests(const uint8_t *flat, size_t size, size_t leaf_bytes) {
    uint8_t *digests = room(count_leaves(size, leaf_bytes) * DIGEST_BYTES), *out = digests;
    for (size_t at = 0; at < size; at += leaf_bytes, out += DIGEST_BYTES)
        plain_digest(flat + at, size - at < leaf_bytes ? size - at : leaf_bytes, out);
    return digests;
}

/* --- boxes in memory ----------------------------------------------------------------------- */

struct box {
    struct part part; /* as given: core.c gets copies that are settled */
    uint8_t *memory;
    size_t size;
};

/* Lay the part's elements out in memory of its own: dimensions in any order, either way, with gaps; if `repeated` some
 * have no stride. */
static struct box lay_out(const struct part *wanted, int plain, int repeated) {
    struct box box = {.part = *wanted};
    struct part *part = &box.part;
    int order[MAX_DIMS];
    for (int dim = 0; dim < part->ndim; dim++) order[dim] = part->ndim - 1 - dim;
    for (int dim = part->ndim - 1; dim > 0 && !plain; dim--) {
        int other = any(3) ? dim : (int)any((uint64_t)dim + 1), kept = order[dim];
        order[dim] = order[other];
        order[other] = kept;
    }
    size_t step = part->item_bytes, before = 0, lead = plain ? 0 : any(70), trail = plain ? 0 : any(70);
    for (int at = 0; at < part->ndim; at++) {
        int dim = order[at];
        if (!plain && !any(4)) step += any(3) * (any(2) ? part->item_bytes : 1);
        if (repeated && !any(4)) {
            part->strides[dim] = 0;
            continue;
        }
        int back = !plain && !any(5);
        size_t reach = part->sizes[dim] ? (part->sizes[dim] - 1) * step : 0;
        part->strides[dim] = back ? -(ptrdiff_t)step : (ptrdiff_t)step;
        if (back) before += reach;
        step += reach;
    }
    box.size = lead + step + trail;
    box.memory = noise(box.size);
    part->data = (char *)box.memory + lead + before;
    return box;
}

/* A cell of about `most` bytes, of which the part is all. */
static struct part any_cell(size_t most) {
    static const size_t items[] = {1, 2, 4, 8, 16, 1, 2, 4, 8, 3, 5, 6, 12, 32};
    struct part part = {.ndim = (int)any(7), .item_bytes = any(9) ? items[any(14)] : 1 + any(40)};
    size_t left = most / part.item_bytes + 1;
    for (int dim = 0; dim < part.ndim; dim++) {
        static const size_t common[] = {1, 2, 3, 64, 128, 256, 512, 1024};
        size_t size = any(3) ? 1 + any(1 + any(left < 3000 ? left : 3000)) : common[any(8)];
        if (size > left) size = left ? left : 1;
        left /= size;
        part.cell[dim] = part.sizes[dim] = any(200) ? size : 0;
    }
    if (part.ndim > 1 && part.item_bytes < 1024 && 1024 % part.item_bytes == 0 && !any(3)) { /* chunks of BLAKE3 */
        size_t row = (1 + any(8)) * 1024 / part.item_bytes;
        part.cell[part.ndim - 1] = part.sizes[part.ndim - 1] = row;
        for (int dim = 0; dim < part.ndim - 1; dim++) part.cell[dim] = part.sizes[dim] = 1 + any(4);
    }
    return part;
}

static size_t any_leaf(size_t item, size_t size) {
    static const size_t common[] = {1024, 2048, 3072, 4096, 16384, 128 * 1024, 129 * 1024, 256 * 1024};
    size_t leaf = any(2) ? common[any(8)] : 1 + any(any(2) ? 5000 : size + 2);
    if (size / 64 > leaf) leaf = size / 64 + 1; /* else the plain way takes long */
    if (!any(3)) leaf += 1023 - (leaf + 1023) % 1024;
    return leaf + item - 1 - (leaf + item - 1) % item;
}

/* --- checks -------------------------------------------------------------------------------- */

static void check_sums(const struct box *box, const uint8_t *flat, size_t size, size_t row_words) {
    size_t rows = count_leaves(size, row_words * 8), count = rows + row_words;
    uint64_t *sums = (uint64_t *)room(count * 8), *plain = calloc(count, 8);
    uint8_t *scratch = room(row_words * 8);
    struct part settled = box->part;
    for (size_t at = 0; at < size; at += 8) {
        uint64_t word = 0;
        memcpy(&word, flat + at, size - at < 8 ? size - at : 8);
        plain[at / 8 / row_words] += word;
        plain[rows + at / 8 % row_words] += word;
    }
    part_settle(&settled);
    sum_words(&settled, row_words, sums, scratch);
    CHECK(memcmp(sums, plain, count * 8) == 0);
    leave((uint8_t *)sums, count * 8);
    leave(scratch, row_words * 8);
    free(plain);
}

static void check_hashes(const struct part *cell, size_t leaf_bytes, int plain) {
    struct box box = lay_out(cell, plain, 1 - plain);
    size_t item = cell->item_bytes, count = elements(cell), size = count * item;
    uint8_t *before = room(box.size), *flat = room(size);
    memcpy(before, box.memory, box.size);
    for (size_t at = 0; at < count; at++) memcpy(flat + at * item, place(&box.part, at), item);
    uint8_t *wanted = plain_digests(flat, size, leaf_bytes);
    size_t digest_bytes = count_leaves(size, leaf_bytes) * DIGEST_BYTES, most = leaf_bytes < size ? leaf_bytes : size;
    struct part settled = box.part;
    part_settle(&settled);
    for (int copies = 0; copies < 2; copies++) {
        uint8_t *digests = room(digest_bytes), *scratch = room(most), *copy = copies ? room(size) : NULL;
        doing = copies ? "hash_leaves with a copy" : "hash_leaves";
        hash_leaves(&settled, leaf_bytes, copy, copies ? NULL : scratch, digests);
        CHECK(memcmp(digests, wanted, digest_bytes) == 0);
        if (copies) {
            CHECK(memcmp(copy, flat, size) == 0);
            leave(copy, size);
        }
        leave(digests, digest_bytes);
        leave(scratch, most);
    }
    if (count) {
        doing = "part_gather";
        size_t first = any(count), stop = first + 1 + any(count - first);
        uint8_t *some = room((stop - first) * item);
        part_gather(&settled, first, stop, some);
        CHECK(memcmp(some, flat + first * item, (stop - first) * item) == 0);
        leave(some, (stop - first) * item);
    }
    doing = "sum_words";
    if (8 % item == 0) check_sums(&box, flat, size, 1 + any(any(2) ? 9 : 600));
    CHECK(memcmp(before, box.memory, box.size) == 0);
    leave(wanted, digest_bytes);
    leave(before, box.size);
    leave(flat, size);
    leave(box.memory, box.size);
}

/* Leaves of the bytes first .. first + size of a cell into boxes of it: intact ones, from a source of any kind, until a
 * digest is wrong or the file ends. */
static void check_restore(const struct part *cell, size_t leaf_bytes, int plain, int fd) {
    size_t item = cell->item_bytes, count = elements(cell);
    size_t first = plain ? 0 : any(count + 1), num = plain ? count : any(count - first + 1), size = num * item;
    size_t lead = any(40), length = lead + size, leaves = count_leaves(size, leaf_bytes);
    uint8_t *stored = noise(length), *digests = plain_digests(stored + lead, size, leaf_bytes);
    struct box boxes[MOST_TARGETS];
    struct part parts[MOST_TARGETS];
    uint8_t *shadows[MOST_TARGETS];
    size_t num_parts = plain ? 1 : any(MOST_TARGETS + 1), used = 0;
    for (size_t at = 0; at < num_parts; at++) {
        struct part part = *cell;
        int empty = 0;
        for (int dim = 0; dim < part.ndim; dim++) {
            if (!plain && any(2)) {
                part.offsets[dim] = any(part.cell[dim] + 1);
                part.sizes[dim] = any(part.cell[dim] - part.offsets[dim] + 1);
            }
            empty |= part.sizes[dim] == 0;
        }
        if (empty) continue; /* module.c leaves those out */
        boxes[used] = lay_out(&part, plain || !any(4), 0);
        shadows[used] = room(boxes[used].size);
        memcpy(shadows[used], boxes[used].memory, boxes[used].size);
        parts[used] = boxes[used].part;
        part_settle(&parts[used++]);
    }
    enum { MEMORY, FILE_WHOLE, FILE_CACHED, FILE_CUT, NO_FILE, KINDS } kind = any(KINDS);
    size_t wrong = leaves && !any(3) ? any(leaves) : leaves, cut = kind == FILE_CUT ? any(length + 1) : length;
    int checked = wrong < leaves || any(4);
    if (wrong < leaves) digests[wrong * DIGEST_BYTES + any(DIGEST_BYTES)] ^= 1 << any(8);
    if (kind != MEMORY && (ftruncate(fd, 0) || pwrite(fd, stored, cut, 0) != (ssize_t)cut)) fail("a file", __LINE__);
    struct origin origin = {.memory = kind == MEMORY ? stored + lead : NULL,
                            .fd = kind == NO_FILE ? -1 : fd,
                            .offset = (int64_t)lead,
                            .cached_only = kind == FILE_CACHED};
    size_t most = leaf_bytes < size ? leaf_bytes : size, done = 77;
    uint8_t *scratch = room(most);
    doing = "read_leaves";
    enum outcome outcome = read_leaves(&origin, first * item, size, leaf_bytes, checked ? digests : NULL, parts, used,
                                       scratch, &done);
    size_t there = kind == NO_FILE ? 0 : cut < lead ? 0 : cut >= length ? leaves : (cut - lead) / leaf_bytes;
    size_t good = wrong < there ? wrong : there;
    enum outcome wanted = there == leaves ? ALL_DONE : kind == NO_FILE ? READ_FAILED : FILE_ENDED;
    if (wrong < there) wanted = BAD_LEAF;
    if (outcome == NOT_CACHED) {
        CHECK(kind == FILE_CACHED && done <= good);
        good = done;
    } else {
        CHECK(outcome == wanted);
    }
    CHECK(done == good);
    size_t got = good * leaf_bytes < size ? good * leaf_bytes : size;
    for (size_t at = 0; at < used; at++) {
        for (size_t element = 0; element < got / item; element++) {
            char *to = place(&boxes[at].part, first + element);
            if (to) memcpy(shadows[at] + (to - (char *)boxes[at].memory), stored + lead + element * item, item);
        }
        uint8_t *whole = used == 1 ? (uint8_t *)part_whole(parts) : NULL;
        if (whole && kind != MEMORY && good < leaves) { /* a leaf is read to its place before it is looked at */
            size_t end = got + leaf_bytes < size ? got + leaf_bytes : size, begin = first * item;
            memcpy(shadows[at] + (whole - boxes[at].memory) + begin + got, whole + begin + got, end - got);
        }
        CHECK(memcmp(shadows[at], boxes[at].memory, boxes[at].size) == 0);
        leave(shadows[at], boxes[at].size);
        leave(boxes[at].memory, boxes[at].size);
    }
    leave(scratch, most);
    leave(digests, leaves * DIGEST_BYTES);
    leave(stored, length);
}

/* --- what is tried ------------------------------------------------------------------------- */

static void check_length(size_t size, size_t leaf_bytes, int fd) {
    struct part line = {.ndim = 1, .item_bytes = 1, .cell = {size}, .sizes = {size}};
    check_hashes(&line, leaf_bytes, 1);
    check_hashes(&line, leaf_bytes, 0);
    check_restore(&line, leaf_bytes, 1, fd);
    if (size % 1024 == 0) { /* chunks of BLAKE3 that do not lie together */
        struct part rows = {.ndim = 2, .item_bytes = 4, .cell = {size / 1024, 256}, .sizes = {size / 1024, 256}};
        check_hashes(&rows, leaf_bytes, 0);
    }
}

static void check_borders(int fd) {
    static const size_t leaves[] = {1024, 2048, 3072, 4096, 126 * 1024, 128 * 1024, 129 * 1024};
    for (size_t size = 0; size <= 4096; size++) check_length(size, size % 2 ? 128 * 1024 : 1024, fd);
    for (size_t at = 0; at < sizeof leaves / sizeof *leaves; at++)
        for (size_t num = 1; num <= 2; num++)
            for (int more = -1; more <= 1; more++) check_length(leaves[at] * num + (size_t)more, leaves[at], fd);
}

static double now(void) { /* processor time: as much is tried where others compute, too */
    struct timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

int main(int argc, char **argv) {
    double seconds = argc > 1 ? atof(argv[1]) : 12;
    FILE *file = tmpfile();
    if (!file) return 2;
    int fd = fileno(file);
    struct part big = {.ndim = 2, .item_bytes = 4, .cell = {130, 256}, .sizes = {130, 256}};
    check_hashes(&big, 128 * 1024, 0); /* BLAKE3 finds out what the processor has */
#ifdef __x86_64__
    static const int kinds[] = {0, 0x7, 0x1F, 0xFF}; /* plain C; SSE4.1; AVX2; AVX-512 */
    int features = g_cpu_features, num_kinds = 4, seen = -1;
#else
    int num_kinds = 1;
#endif
    for (int kind = 0; kind < num_kinds; kind++) {
#ifdef __x86_64__
        if ((features & kinds[kind]) == seen) continue;
        g_cpu_features = seen = features & kinds[kind];
#endif
        seed = 29;
        double begin = now();
        check_borders(fd);
        double until = now() + seconds / num_kinds - (now() - begin);
        size_t rounds = 0;
        for (; rounds < 50 || now() < until; rounds++) {
            struct part cell = any_cell(any(8) ? 1 + any(20000) : 1 + any(MOST_BYTES));
            size_t leaf = any_leaf(cell.item_bytes, elements(&cell) * cell.item_bytes);
            check_hashes(&cell, leaf, !any(5));
            check_restore(&cell, leaf, !any(5), fd);
        }
        printf("%s: all lengths and borders, %zu random boxes\n", simd_name(), rounds);
    }
    fclose(file);
    return 0;
}
