/* SPDX-License-Identifier: Apache-2.0 */
/* manifest.h: the file that makes a folder a checkpoint. It says what was saved, and has the sizes and
 * checksums of all other files in the folder. Its format is 2 if steps round masters, moments or sums at
 * random, and 1 otherwise, so that older libraries read what they can.
 *
 * It is a line of JSON whose last member is the checksum of all bytes before it. A second file (name +
 * ZR_BLOCKS_SUFFIX) of each data file holds the checksums of its blocks. The manifest holds the checksum of
 * that table. */
#ifndef ZR_ZERO_MANIFEST_H
#define ZR_ZERO_MANIFEST_H

#include "zero/checkpoint/checksums.h"
#include "zero/checkpoint/files.h"
#include "zero/types.h"

#define ZR_MANIFEST_NAME "manifest.json"
#define ZR_MANIFEST_MAX  (1 << 30) /* bytes */
#define ZR_BLOCK_BYTES   (1 << 20) /* bytes of a data file with one checksum */
#define ZR_BLOCKS_SUFFIX ".blocks"

/* Kinds of the program's own data: the job's, which only rank 0's file has, and the rank's. */
enum zr_data_kind { ZR_DATA_JOB, ZR_DATA_RANK, ZR_N_DATA };
/* Names of the entries in a rank's file, and of their sizes in the manifest. No tensor's entry has such a
 * name, because those contain two slashes. */
extern const char *const zr_data_names[ZR_N_DATA];

struct zr_manifest_tensor {
    char *name;
    /* Name of the dtype in safetensors: "F32", "BF16", "F16", ... */
    char dtype[8];
    int32_t n_dims;
    int64_t shape[8];
    bool trainable, buffer;
    /* Optimizer that trains it. "": it is frozen. */
    char optimizer[16];
    /* States per weight. */
    int32_t n_states;
    /* How masters and states are saved. masters is NONE or F32, because a remainder is saved as a master. */
    enum zero_masters masters;
    enum zero_moments moments;
    /* With Q8: each layer begins a block. Otherwise false. */
    bool stacked;
    /* How the tensor is cut over tp: number of parts, dimension, blocks, and rows of a part along the
     * dimension. shape is that of the whole tensor. All 0: the tensor is not cut. */
    int32_t parts, dim, blocks;
    int64_t rows;
    /* (n_updates) How many steps updated the tensor, if it is trainable: one number, or one for each layer if
     * layers differ. */
    int64_t *updates;
    int32_t n_updates;
};

struct zr_manifest_file {
    char name[64];
    int64_t bytes;
    /* Checksum of the table of its blocks. */
    struct zr_checksum blocks;
    /* Bytes of the program's own data among them, by enum zr_data_kind. */
    int64_t data[ZR_N_DATA];
};

struct zr_manifest {
    /* Version of the library that saved it. */
    char version[32];
    /* Steps taken, without skipped ones. */
    int64_t t;

    int64_t n_skipped;
    /* Micro-batches of all ranks, in all steps. */
    int64_t n_micro;
    /* Seed of rounding at random. */
    int64_t seed;
    /* Steps round at random, so the manifest has a seed. */
    bool seeded;

    int32_t world, stage;

    uint64_t config_hash, layout_hash;
    int32_t n_tensors, n_files;
    struct zr_manifest_tensor *tensors;
    struct zr_manifest_file *files;
    /* Checksum of the text that the manifest was parsed from. Zero: it was not parsed. */
    struct zr_checksum sum;
};

/* A zeroed struct is allowed. */
void zr_manifest_free(struct zr_manifest *m);
/* Checks that the manifest can be printed and parsed again. The sizes and checksums of files need not be
 * known yet. ZERO_ERR_ARG for a name that is not UTF-8, or more than ZR_MANIFEST_MAX bytes. */
int zr_manifest_check(const struct zr_manifest *m);
/* Returns an upper bound of the printed bytes, which is close to them. */
int64_t zr_manifest_bytes(const struct zr_manifest *m);
/* Prints the manifest. The caller frees *out. ZERO_ERR_ARG for a name that is not UTF-8; ZERO_ERR_NOMEM. */
int zr_manifest_print(const struct zr_manifest *m, char **out, int64_t *n);
/* Whether the checksum at the end matches what comes before it. If not, the text is no manifest, or was cut
 * or changed. */
bool zr_manifest_is_sound(const char *text, int64_t n);
/* Whether libzero made the text, as its beginning or its end shows. It may be damaged. */
bool zr_manifest_is_ours(const char *text, int64_t n);
/* Parses a manifest. It must be byte for byte what zr_manifest_print makes of *out. file: the name for
 * messages. */
int zr_manifest_parse(const char *file, const char *text, int64_t n, struct zr_manifest *out);

/* Prints the table of checksums of a file of `bytes` bytes. The caller frees *out. */
int zr_blocks_print(const struct zr_checksum *sums, int64_t bytes, unsigned char **out, int64_t *n);
/* Parses the table. The caller frees *sums, which has zr_blocks_count(bytes) elements. */
int zr_blocks_parse(const char *file, const unsigned char *data, int64_t n, int64_t bytes,
                    struct zr_checksum **sums);
static inline int64_t zr_blocks_count(int64_t bytes)
{
    return (bytes + ZR_BLOCK_BYTES - 1) / ZR_BLOCK_BYTES;
}

#endif
