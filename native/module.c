/* The door between Python and core.c: arguments are checked here, and the interpreter's lock is released for the work.
 *
 * Only what the stable ABI of Python 3.11 has, so that one build serves every later Python. */
#define PY_SSIZE_T_CLEAN
#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030B0000
#endif
#include <Python.h>

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "core.h"

static int refuse(const char *text) {
    PyErr_SetString(PyExc_ValueError, text);
    return -1;
}

/* A length, as the arguments of functions have it ("O&"): too many are as wrong as fewer than none. */
static int take_length(PyObject *given, void *out) {
    Py_ssize_t length = PyLong_AsSsize_t(given);
    if (length == -1 && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_OverflowError)) return 0;
    if (length < 0) {
        PyErr_Clear();
        refuse("a length that is negative, or more than memory can have");
        return 0;
    }
    *(Py_ssize_t *)out = length;
    return 1;
}

/* The array as a cell of which it is all. Whoever calls releases `view` unless this fails. */
static int take_array(PyObject *array, int flags, Py_buffer *view, struct part *part) {
    if (PyObject_GetBuffer(array, view, PyBUF_STRIDES | flags) < 0) return -1;
    if (view->ndim > MAX_DIMS || view->itemsize <= 0) {
        PyBuffer_Release(view);
        return refuse("an array of too many dimensions, or of items without a size");
    }
    part->ndim = view->ndim;
    part->item_bytes = (size_t)view->itemsize;
    part->data = view->buf;
    for (int dim = 0; dim < view->ndim; dim++) {
        part->cell[dim] = part->sizes[dim] = (size_t)view->shape[dim];
        part->offsets[dim] = 0;
        part->strides[dim] = view->strides ? view->strides[dim] : 0;
    }
    if (!view->strides && view->ndim == 1) part->strides[0] = view->itemsize;
    return 0;
}

/* Items become as many shorter ones, so that a word is a whole number of them, whatever their length. */
static int split_items(struct part *part) {
    size_t unit = sizeof(uint64_t);
    while (part->item_bytes % unit) unit /= 2;
    if (unit == part->item_bytes) return 0;
    if (part->ndim == MAX_DIMS) return refuse("an array of too many dimensions");
    int dim = part->ndim++;
    part->cell[dim] = part->sizes[dim] = part->item_bytes / unit;
    part->offsets[dim] = 0;
    part->strides[dim] = (ptrdiff_t)unit;
    part->item_bytes = unit;
    return 0;
}

static PyObject *py_leaf_digests(PyObject *module, PyObject *args) {
    PyObject *array, *copy = Py_None, *digests = NULL;
    Py_ssize_t leaf_bytes;
    Py_buffer view, room = {0};
    struct part cell;
    uint8_t *scratch = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO&|O:leaf_digests", &array, take_length, &leaf_bytes, &copy)) return NULL;
    if (take_array(array, 0, &view, &cell) < 0) return NULL;
    if (!leaf_bytes || leaf_bytes % view.itemsize) {
        refuse("leaves must have whole items");
        goto end;
    }
    if (copy != Py_None) {
        if (PyObject_GetBuffer(copy, &room, PyBUF_WRITABLE) < 0) goto end;
        if (room.len < view.len) {
            refuse("less room for the copy than the array has bytes");
            goto end;
        }
    }
    part_settle(&cell);
    Py_ssize_t num_leaves = view.len / leaf_bytes + (view.len % leaf_bytes != 0);
    digests = num_leaves < PY_SSIZE_T_MAX / 64 ? PyBytes_FromStringAndSize(NULL, num_leaves * DIGEST_BYTES)
                                               : PyErr_NoMemory(); /* elements that repeat take no memory */
    if (!digests) goto end;
    if (copy == Py_None && !part_whole(&cell)) {
        scratch = PyMem_Malloc((size_t)(leaf_bytes < view.len ? leaf_bytes : view.len) + 1);
        if (!scratch) {
            Py_CLEAR(digests);
            PyErr_NoMemory();
            goto end;
        }
    }
    if (num_leaves) {
        uint8_t *out = (uint8_t *)PyBytes_AsString(digests);
        Py_BEGIN_ALLOW_THREADS
        hash_leaves(&cell, (size_t)leaf_bytes, room.buf, scratch, out);
        Py_END_ALLOW_THREADS
    }
end:
    PyMem_Free(scratch);
    if (room.obj) PyBuffer_Release(&room);
    PyBuffer_Release(&view);
    return digests;
}

/* Sizes of the same number of dimensions as the part. */
static int take_sizes(PyObject *sizes, int ndim, size_t *out) {
    if (PySequence_Size(sizes) != ndim) return PyErr_Occurred() ? -1 : refuse("another number of dimensions");
    for (int dim = 0; dim < ndim; dim++) {
        PyObject *item = PySequence_GetItem(sizes, dim);
        if (!item) return -1;
        Py_ssize_t length;
        int taken = take_length(item, &length);
        Py_DECREF(item);
        if (!taken) return -1;
        out[dim] = (size_t)length;
    }
    return 0;
}

/* (array, sizes of the cell, offsets of the array in it), or the array alone: it is the cell. */
static int take_part(PyObject *given, Py_buffer *view, struct part *part) {
    PyObject *array = given, *cell = NULL, *offsets = NULL;
    if (PyTuple_Check(given) && !PyArg_ParseTuple(given, "OOO:part", &array, &cell, &offsets)) return -1;
    if (take_array(array, PyBUF_WRITABLE, view, part) < 0) return -1;
    if (!cell) return 0;
    if (take_sizes(cell, part->ndim, part->cell) < 0 || take_sizes(offsets, part->ndim, part->offsets) < 0) goto bad;
    for (int dim = 0; dim < part->ndim; dim++) {
        size_t size = part->cell[dim], first = part->offsets[dim];
        if (first > size || part->sizes[dim] > size - first) {
            refuse("a part that reaches beyond its cell");
            goto bad;
        }
    }
    return 0;
bad:
    PyBuffer_Release(view);
    return -1;
}

/* Bytes of the part's cell, or -1 if they are more than can be counted. */
static Py_ssize_t cell_bytes(const struct part *part) {
    size_t size = part->item_bytes;
    for (int dim = 0; dim < part->ndim; dim++)
        if (!part->cell[dim]) return 0;
    for (int dim = 0; dim < part->ndim; dim++) {
        if (size > (size_t)PY_SSIZE_T_MAX / part->cell[dim]) return -1;
        size *= part->cell[dim];
    }
    return (Py_ssize_t)size;
}

static PyObject *raise_failed(enum outcome outcome) {
    if (outcome == READ_FAILED) return PyErr_SetFromErrno(PyExc_OSError);
    PyErr_SetString(PyExc_EOFError, "the file ends before what is wanted of it");
    return NULL;
}

static PyObject *py_read_leaves(PyObject *module, PyObject *args, PyObject *named) {
    static char *names[] = {"source", "offset", "first", "size", "leaf_bytes", "digests", "parts", "cached_only", NULL};
    PyObject *source, *digests, *given, *parts = NULL, *result = NULL;
    Py_ssize_t offset, first, size, leaf_bytes, num_parts, taken = 0;
    int cached_only = 0;
    Py_buffer memory = {0}, wanted = {0};
    struct origin origin = {.fd = -1};
    struct { Py_buffer view; struct part part; } *held = NULL;
    struct part *places = NULL;
    uint8_t *scratch = NULL;
    (void)module;
    if (!PyArg_ParseTupleAndKeywords(args, named, "OO&O&O&O&OO|p:read_leaves", names, &source, take_length, &offset,
                                     take_length, &first, take_length, &size, take_length, &leaf_bytes, &digests,
                                     &given, &cached_only))
        return NULL;
    if (!leaf_bytes || offset > PY_SSIZE_T_MAX - size) {
        refuse("leaves without bytes, or more of them than a file can have");
        return NULL;
    }
    if (PyLong_Check(source)) {
        long fd = PyLong_AsLong(source);
        if (PyErr_Occurred()) return NULL;
        origin.fd = fd < 0 || fd > INT_MAX ? -1 : (int)fd;
        origin.offset = offset;
    } else {
        if (PyObject_GetBuffer(source, &memory, PyBUF_SIMPLE) < 0) return NULL;
        if (offset > memory.len || size > memory.len - offset) {
            refuse("more bytes than the memory has");
            goto end;
        }
        origin.memory = (const uint8_t *)memory.buf + offset;
    }
    origin.cached_only = cached_only;
    if (digests != Py_None) {
        if (PyObject_GetBuffer(digests, &wanted, PyBUF_SIMPLE) < 0) goto end;
        if (wanted.len / DIGEST_BYTES < size / leaf_bytes + (size % leaf_bytes != 0)) {
            refuse("fewer digests than leaves");
            goto end;
        }
    }
    parts = PySequence_Tuple(given);
    num_parts = parts ? PyTuple_Size(parts) : -1;
    if (num_parts < 0) goto end;
    held = PyMem_Calloc((size_t)num_parts + 1, sizeof *held);
    places = PyMem_Malloc(((size_t)num_parts + 1) * sizeof *places);
    if (!held || !places) {
        PyErr_NoMemory();
        goto end;
    }
    for (; taken < num_parts; taken++) {
        struct part *part = &held[taken].part;
        if (take_part(PyTuple_GetItem(parts, taken), &held[taken].view, part) < 0) goto end;
        Py_ssize_t all = cell_bytes(part), item = (Py_ssize_t)part->item_bytes;
        if (all < 0 || first > all || size > all - first || first % item || leaf_bytes % item || size % item) {
            taken++;
            refuse("leaves that are not whole items of the cell");
            goto end;
        }
        if (held[taken].view.len == 0) { /* nothing goes there */
            part->data = NULL;
        } else {
            part_settle(part);
        }
    }
    scratch = PyMem_Malloc((size_t)(leaf_bytes < size ? leaf_bytes : size) + 1);
    if (!scratch) {
        PyErr_NoMemory();
        goto end;
    }
    size_t used = 0, done = 0;
    for (Py_ssize_t at = 0; at < num_parts; at++)
        if (held[at].part.data) places[used++] = held[at].part;
    enum outcome outcome;
    int number;
    Py_BEGIN_ALLOW_THREADS
    outcome = read_leaves(&origin, (size_t)first, (size_t)size, (size_t)leaf_bytes, wanted.buf, places, used, scratch,
                          &done);
    number = errno;
    Py_END_ALLOW_THREADS
    if (outcome == READ_FAILED || outcome == FILE_ENDED) {
        errno = number;
        raise_failed(outcome);
    } else {
        result = PyLong_FromSize_t(done);
    }
end:
    for (Py_ssize_t at = 0; at < taken; at++)
        if (held[at].view.obj) PyBuffer_Release(&held[at].view);
    PyMem_Free(scratch);
    PyMem_Free(places);
    PyMem_Free(held);
    Py_XDECREF(parts);
    if (wanted.obj) PyBuffer_Release(&wanted);
    if (memory.obj) PyBuffer_Release(&memory);
    return result;
}

static PyObject *py_word_sums(PyObject *module, PyObject *args) {
    PyObject *array, *sums = NULL;
    Py_ssize_t row_words;
    Py_buffer view;
    struct part cell;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO&:word_sums", &array, take_length, &row_words)) return NULL;
    if (take_array(array, 0, &view, &cell) < 0) return NULL;
    if (!row_words || row_words > PY_SSIZE_T_MAX / 64) {
        PyBuffer_Release(&view);
        refuse("a row without words, or of more than memory can have");
        return NULL;
    }
    if (split_items(&cell) < 0) {
        PyBuffer_Release(&view);
        return NULL;
    }
    Py_ssize_t row_bytes = row_words * (Py_ssize_t)sizeof(uint64_t);
    Py_ssize_t rows = view.len / row_bytes + (view.len % row_bytes != 0);
    sums = rows > PY_SSIZE_T_MAX / 64 ? PyErr_NoMemory()
                                      : PyBytes_FromStringAndSize(NULL, (rows + row_words) * (Py_ssize_t)sizeof(uint64_t));
    uint8_t *scratch = PyMem_Malloc((size_t)row_bytes);
    uint64_t *found = sums ? PyMem_Malloc((size_t)PyBytes_Size(sums)) : NULL; /* bytes need not be aligned */
    if (sums && scratch && found) {
        part_settle(&cell);
        Py_BEGIN_ALLOW_THREADS
        sum_words(&cell, (size_t)row_words, found, scratch);
        Py_END_ALLOW_THREADS
        memcpy(PyBytes_AsString(sums), found, (size_t)PyBytes_Size(sums));
    } else {
        Py_CLEAR(sums);
        PyErr_NoMemory();
    }
    PyMem_Free(found);
    PyMem_Free(scratch);
    PyBuffer_Release(&view);
    return sums;
}

static PyMethodDef methods[] = {
    {"leaf_digests", py_leaf_digests, METH_VARARGS,
     "leaf_digests(array, leaf_bytes, copy=None) -> bytes\n\nThe digests of the leaves of an array in C order, joined."},
    {"read_leaves", (PyCFunction)(void (*)(void))py_read_leaves, METH_VARARGS | METH_KEYWORDS,
     "read_leaves(source, offset, first, size, leaf_bytes, digests, parts, cached_only=False) -> int\n\n"
     "Leaves that were read, were what their digests say, and are in place; fewer than all: the next one was not."},
    {"word_sums", py_word_sums, METH_VARARGS,
     "word_sums(array, row_words) -> bytes\n\nSums of the rows, then of the columns, of the words of an array."},
    {NULL, NULL, 0, NULL},
};

static int set_up(PyObject *module) { return PyModule_AddStringConstant(module, "SIMD", simd_name()); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, set_up},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Hashes, copies and reads leaves without the interpreter's lock.", 0, methods,
    slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
