/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors.h: the safetensors file format (github.com/huggingface/safetensors), which is read strictly.
 *
 *     8 bytes  the length N of the header, little-endian
 *     N bytes  JSON: dtype, shape and data_offsets [begin, end) of each tensor; spaces may follow
 *     data     the rest of the file, from which data_offsets count
 *
 * The tensors fill the data without hole or overlap, as the format requires. */
#ifndef ZR_ZERO_SAFETENSORS_H
#define ZR_ZERO_SAFETENSORS_H

#include "kernels/device.h"
#include "zero/checkpoint/files.h"

#include <jansson.h>

#define ZR_ST_MAX_HEADER 100000000 /* bytes: the format's own limit */
#define ZR_ST_MAX_DIMS   8
#define ZR_SHAPE_CHARS   200

/* Every file of an export carries the export's id: 16 hexadecimal digits under this key of its metadata. */
#define ZR_EXPORT_KEY      "libzero_export"
#define ZR_EXPORT_ID_BYTES 17 /* with the terminating zero */

struct zr_st_entry {
    char *name;
    /* Name of the dtype in the format, such as "F32". Never freed. */
    const char *dtype;
    int32_t n_dims;
    int64_t shape[ZR_ST_MAX_DIMS];
    /* Bytes of the file. */
    int64_t begin, end;
};

struct zr_st {
    /* Sorted by begin. */
    struct zr_st_entry *entries;
    int64_t n_entries;
    /* Id of the export that the file belongs to. "": __metadata__ has none. */
    char export_id[ZR_EXPORT_ID_BYTES];
};

/* Returns the bytes of an element. 0 for a dtype that the format does not have, or that is smaller than a
 * byte. */
int64_t zr_st_dtype_bytes(const char *dtype);
/* Returns the format's name of a dtype. */
const char *zr_st_dtype_of(enum zero_dtype t);
bool zr_is_utf8(const char *text);
/* Writes "[2, 3]". */
void zr_shape_print(const int64_t *shape, int32_t n_dims, char text[ZR_SHAPE_CHARS]);

/* Parses a header. json: the n bytes after the length. file_bytes: the size of the whole file. file: the name
 * for messages. ZERO_ERR_IO says what is wrong, and with which tensor. On success the caller releases *out
 * with zr_st_free. */
int zr_st_parse(const char *file, const char *json, int64_t n, int64_t file_bytes, struct zr_st *out);
/* The same from an open file. */
int zr_st_read(const struct zr_files *fs, int fd, const char *file, int64_t file_bytes, struct zr_st *out);
/* Whether this is the small text that Git keeps in place of a large file that was not fetched. */
bool zr_is_lfs_pointer(const char *text, int64_t n);
#define ZR_LFS_POINTER "%s: this is a Git LFS pointer, not the file itself: fetch the file with git lfs pull"
/* A zeroed struct is allowed. */
void zr_st_free(struct zr_st *st);
/* Writes the export's id in a file's or an index's metadata, or "" if it has none. */
void zr_st_export_id(const json_t *metadata, char id[ZR_EXPORT_ID_BYTES]);

/* Returns the bytes of a text as JSON, its quotes included. */
int64_t zr_json_bytes(const char *text);
/* Returns the bytes of an entry in the header, with the comma after it. begin and end count from the
 * beginning of the data, as in the header. */
int64_t zr_st_entry_bytes(const struct zr_st_entry *e);

/* Makes the head of a file: the length and the header. Entries are in the order of their data, and get their
 * begin and end. export_id: NULL, or an id for __metadata__, which then also has the format "pt". The head is
 * a multiple of 64 bytes. The caller frees *out. ZERO_ERR_ARG for a name that is not UTF-8, or more than
 * ZR_ST_MAX_HEADER bytes; ZERO_ERR_NOMEM. */
int zr_st_head(struct zr_st_entry *entries, int64_t n_entries, const char *export_id, char **out,
               int64_t *n_out);

#endif
