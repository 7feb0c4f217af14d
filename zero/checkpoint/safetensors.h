/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors.h: the safetensors file format, read strictly and written plainly.
 *
 * A file is 8 bytes, the length N of the header, little-endian; N bytes of JSON, which spaces may follow up
 * to N: for each tensor its dtype, shape and data_offsets [begin, end) in what comes next; and the data,
 * which the tensors fill without hole or overlap (the format's own rule, github.com/huggingface/safetensors).
 */
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
    /* "F32" and so on: a name of the format, never freed */
    const char *dtype;
    int32_t n_dims;
    int64_t shape[ZR_ST_MAX_DIMS];
    /* bytes of the file */
    int64_t begin, end;
};

struct zr_st {
    /* in order of begin */
    struct zr_st_entry *entries;
    int64_t n_entries;
    /* "" if __metadata__ has none */
    char export_id[ZR_EXPORT_ID_BYTES];
};

/* Bytes of an element, 0 for a dtype that the format does not have or that is smaller than a byte. */
int64_t zr_st_dtype_bytes(const char *dtype);
/* The format's name of it. */
const char *zr_st_dtype_of(enum zr_dtype t);
bool zr_is_utf8(const char *text);
/* "[2, 3]" */
void zr_shape_print(const int64_t *shape, int32_t n_dims, char text[ZR_SHAPE_CHARS]);

/* Reads a header: `json` is what follows the length, n bytes of it; file_bytes the whole file's. file is for
 * messages. ZR_ERR_IO says what is wrong and of which tensor. On success release with zr_st_free. */
int zr_st_parse(const char *file, const char *json, int64_t n, int64_t file_bytes, struct zr_st *out);
/* The same from an open file. */
int zr_st_read(const struct zr_files *fs, int fd, const char *file, int64_t file_bytes, struct zr_st *out);
/* Whether this is the small text that Git keeps in place of a large file that was not fetched. */
bool zr_is_lfs_pointer(const char *text, int64_t n);
#define ZR_LFS_POINTER "%s: this is a Git LFS pointer, not the file itself: fetch the file with git lfs pull"
/* A zeroed one is allowed. */
void zr_st_free(struct zr_st *st);
/* The export's id in a file's or an index's metadata, or "" if it has none. */
void zr_st_export_id(const json_t *metadata, char id[ZR_EXPORT_ID_BYTES]);

/* Bytes of a text as JSON, its quotes included. */
int64_t zr_json_bytes(const char *text);
/* Bytes that an entry takes in the header, the comma after it included; begin and end as in the header: from
 * where the data begins. */
int64_t zr_st_entry_bytes(const struct zr_st_entry *e);

/* Makes the head of a file, length and header, for entries in the order of their data; begin and end are
 * filled in here. export_id: NULL, or what __metadata__ then says besides the format "pt". The head is a
 * multiple of 64 bytes. *out is freed by the caller. ZR_ERR_ARG for a name that is not UTF-8, or more than
 * ZR_ST_MAX_HEADER bytes; ZR_ERR_NOMEM. */
int zr_st_head(struct zr_st_entry *entries, int64_t n_entries, const char *export_id, char **out,
               int64_t *n_out);

#endif
