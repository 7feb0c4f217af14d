/* SPDX-License-Identifier: Apache-2.0 */
/* manifest.h: the one file that makes a folder a checkpoint: what was saved, and the sizes and checksums of
 * everything else in it.
 *
 * It is a line of JSON whose last member is the checksum of all bytes before it. Each data file has a table
 * of its blocks' checksums beside it (name + ZR_BLOCKS_SUFFIX); the manifest holds the checksum of that
 * table. */
#ifndef ZR_ZERO_MANIFEST_H
#define ZR_ZERO_MANIFEST_H

#include "zero/checkpoint/checksums.h"
#include "zero/checkpoint/files.h"

#define ZR_MANIFEST_NAME "manifest.json"
#define ZR_MANIFEST_MAX  (1 << 30) /* bytes */
#define ZR_BLOCK_BYTES   (1 << 20) /* of a data file under one checksum */
#define ZR_BLOCKS_SUFFIX ".blocks"

/* The program's own data in a rank's file: the job's, which rank 0's file alone has, and the rank's. */
enum zr_data_kind { ZR_DATA_JOB, ZR_DATA_RANK, ZR_N_DATA };
/* The name of the entry, and of its bytes in the manifest. No tensor's entry has such a name: those have two
 * slashes. */
extern const char *const zr_data_names[ZR_N_DATA];

struct zr_manifest_tensor {
    char *name;
    /* as safetensors names it: "F32", "BF16", "F16" */
    char dtype[8];
    int32_t n_dims;
    int64_t shape[8];
    bool trainable, buffer;
    /* the optimizer that trains it; "" of a frozen one */
    char optimizer[16];
    /* fp32 arrays that it keeps per weight */
    int32_t n_states;
    /* How the tensor is cut over tp: the number of parts, the dimension, rows of a part along it, and blocks.
     * shape is the one of the whole tensor. All 0 if it is not cut. */
    int32_t parts, dim, blocks;
    int64_t rows;
    /* (n_updates) The steps that updated the tensor, if it is trainable: one number, or one for each layer
     * if layers differ. */
    int64_t *updates;
    int32_t n_updates;
};

struct zr_manifest_file {
    char name[64];
    int64_t bytes;
    /* checksum of the table of its blocks */
    struct zr_checksum blocks;
    /* of these bytes, those of the program's own data */
    int64_t data[ZR_N_DATA];
};

struct zr_manifest {
    /* of the library that saved it */
    char version[32];
    /* steps taken, skipped ones not counted */
    int64_t t;

    int64_t n_skipped;
    /* micro-batches of all ranks, in all steps */
    int64_t n_micro;

    int32_t world, stage;

    uint64_t config_hash, layout_hash;
    int32_t n_tensors, n_files;
    struct zr_manifest_tensor *tensors;
    struct zr_manifest_file *files;
    /* of the text that it was read from; zero of one that was not */
    struct zr_checksum sum;
};

/* A zeroed one is allowed. */
void zr_manifest_free(struct zr_manifest *m);
/* Can it be printed, and read again? The sizes and checksums of files need not be known yet. ZR_ERR_ARG for a
 * name that is not UTF-8, or more than ZR_MANIFEST_MAX bytes. */
int zr_manifest_check(const struct zr_manifest *m);
/* At least the bytes that it is printed to; little more. */
int64_t zr_manifest_bytes(const struct zr_manifest *m);
/* *out is freed by the caller. ZR_ERR_ARG for a name that is not UTF-8, ZR_ERR_NOMEM. */
int zr_manifest_print(const struct zr_manifest *m, char **out, int64_t *n);
/* Does the checksum at its end fit what comes before it? Else it is no manifest, or was cut or changed. */
bool zr_manifest_is_sound(const char *text, int64_t n);
/* Did this library make it, as its beginning or its end shows? It may be damaged. */
bool zr_manifest_is_ours(const char *text, int64_t n);
/* file: for messages. Strict: byte for byte what zr_manifest_print would make of *out. */
int zr_manifest_parse(const char *file, const char *text, int64_t n, struct zr_manifest *out);

/* The table of blocks of a file of `bytes` bytes, as bytes: *out is freed by the caller. */
int zr_blocks_print(const struct zr_checksum *sums, int64_t bytes, unsigned char **out, int64_t *n);
/* *sums (zr_blocks_count(bytes) of them) is freed by the caller. */
int zr_blocks_parse(const char *file, const unsigned char *data, int64_t n, int64_t bytes,
                    struct zr_checksum **sums);
static inline int64_t zr_blocks_count(int64_t bytes)
{
    return (bytes + ZR_BLOCK_BYTES - 1) / ZR_BLOCK_BYTES;
}

#endif
