/* SPDX-License-Identifier: Apache-2.0 */
/* shard_file.h: reads one rank's file of a checkpoint. Nothing in it is used before the checksums of its
 * block match. */
#ifndef ZR_ZERO_SHARD_FILE_H
#define ZR_ZERO_SHARD_FILE_H

#include "zero/checkpoint/block_file.h"
#include "zero/checkpoint/manifest.h"
#include "zero/checkpoint/safetensors.h"

/* One rank's file. */
struct zr_shard {
    const struct zr_files *fs;
    char path[ZR_PATH_BYTES];
    struct zr_block_file file;
    int64_t bytes;
    /* (zr_blocks_count(bytes)) what the blocks' checksums should be */
    struct zr_checksum *sums;
    /* the safetensors header: the entries, and where each lies in the file */
    struct zr_st st;
};

/* Bytes of the file to read. */
struct zr_request {
    int64_t at, n;
    /* Memory to copy them to. NULL: their blocks are only checked. */
    char *dst;
};

/* Opens a file that the manifest of folder lists, and reads its head. After a failure nothing is held. */
int zr_shard_open(const struct zr_files *fs, const char *folder, const struct zr_manifest_file *file,
                  struct zr_shard *out);
void zr_shard_close(struct zr_shard *s);
/* Closes the descriptors, but keeps the head. Each later fetch opens the file and closes it again. */
void zr_shard_close_file(struct zr_shard *s);
/* Finds the entry of this kind of program data. *out is NULL if the manifest lists none. ZERO_ERR_IO if the
 * file has no entry of the size that the manifest lists. */
int zr_shard_find_data(const struct zr_shard *s, const struct zr_manifest_file *file, enum zr_data_kind kind,
                       const struct zr_st_entry **out);
/* Reads, checks and copies each block that a request touches once, several blocks at a time. Sorts the
 * requests, which may overlap. ZERO_ERR_IO names the file, the block and, if the head is known, the
 * tensor. */
int zr_shard_fetch(struct zr_shard *s, struct zr_request *requests, int64_t n);

#endif
