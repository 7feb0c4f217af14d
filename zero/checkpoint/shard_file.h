/* SPDX-License-Identifier: Apache-2.0 */
/* shard_file.h: one rank's file of a checkpoint, for reading: nothing of it is believed before its block's
 * checksums agree. */
#ifndef ZR_ZERO_SHARD_FILE_H
#define ZR_ZERO_SHARD_FILE_H

#include "zero/checkpoint/block_file.h"
#include "zero/checkpoint/manifest.h"
#include "zero/checkpoint/safetensors.h"

struct zr_shard {
    const struct zr_files *fs;
    char path[ZR_PATH_BYTES];
    struct zr_block_file file;
    int64_t bytes;
    struct zr_checksum *sums;
    struct zr_st st;
};

/* Bytes of the file that are wanted somewhere. */
struct zr_request {
    int64_t at, n;
    /* NULL: the blocks are checked, and not read to anywhere */
    char *dst;
};

/* Opens what the manifest of folder names and reads its head. On failure no descriptor and no memory is held.
 */
int zr_shard_open(const struct zr_files *fs, const char *folder, const struct zr_manifest_file *file,
                  struct zr_shard *out);
void zr_shard_close(struct zr_shard *s);
/* Gives back its descriptors; each fetch from then on opens the file, and closes it. What was read of the
 * head stays. */
void zr_shard_rest(struct zr_shard *s);
/* Finds the entry of the program's data of this kind. *out is NULL if the manifest says that there is none.
 * ZR_ERR_IO if the file has no entry of as many bytes as the manifest says. */
int zr_shard_find_data(const struct zr_shard *s, const struct zr_manifest_file *file, enum zr_data_kind kind,
                       const struct zr_st_entry **out);
/* Reads each block that a request touches once, checks it, and copies it, several blocks at a time. Sorts the
 * requests, which must not overlap. ZR_ERR_IO names the file, the block and, if the head is known, the
 * tensor. */
int zr_shard_fetch(struct zr_shard *s, struct zr_request *requests, int64_t n);

#endif
