/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_checkpoints.c: wrong uses (misuse.h) of checkpoints and exported weights. */
#include "test/zero/misuse.h"

#define NO_FOLDER "/tmp/there-is-no-such-folder/ckpt"

static const struct zero_save_options keep = {.kept = 1}, keep_twice = {.kept = 2};

static const struct zero_weight table_of_names[] = {{.name = "a", .tensor = 0},
                                                    {.name = "b", .tensor = 1, .slice = ZERO_SLICE(1)},
                                                    {.name = "c", .tensor = 2}};

/* Exports or imports. Training must go on after the refusal. */
static int exports_or_imports(struct program *p, bool imports, const struct zero_weight *map, int32_t n,
                              int64_t max_file_bytes)
{
    int err =
        imports ? zero_import(p->z, NO_FOLDER, map, n) : zero_export(p->z, NO_FOLDER, map, n, max_file_bytes);
    return train(p) ? -1 : err;
}

static int exports_another_name(struct program *p)
{
    struct zero_weight map[3];
    memcpy(map, table_of_names, sizeof map);
    map[1].name = p->odd ? "B" : "b";
    return exports_or_imports(p, false, map, 3, 0);
}

static int imports_transposed_on_one_rank(struct program *p)
{
    struct zero_weight map[3];
    memcpy(map, table_of_names, sizeof map);
    map[1].transposed = p->odd;
    return exports_or_imports(p, true, map, 3, 0);
}

/* ---- rows ---- */

MISUSE("saves inside a step", ALL, BOTH, NOTHING,
       FIRST_ERROR(micro_batch(p, 0, 0), zero_save(p->z, "/tmp", NULL)),
       FAILS(ORDER, "zero_save: a step has begun"))
MISUSE("saves into a folder of a folder that is not there", ALL, BOTH, NOTHING,
       zero_save(p->z, NO_FOLDER, NULL), FAILS(IO, "zero_save", "there-is-no-such-folder"))
MISUSE("exports under a name that the files use themselves", ALL, BOTH, NOTHING,
       zero_export(p->z, NO_FOLDER, &(struct zero_weight){.name = "__metadata__", .tensor = 0}, 1, 0),
       FAILS(ARG, "zero_export: ", "map[0]: name is __metadata__"))
MISUSE("exports a weight under another name on one rank", ALL, W2, NOTHING, exports_another_name(p),
       FAILS(MISMATCH, "zero_export: ",
             "map[1] is \"B\" (slice 1 of tensor layers) on rank 1 and \"b\" (slice 1 of tensor "
             "layers) on rank 0"))
MISUSE("imports a weight transposed on one rank", ALL, W2, NOTHING, imports_transposed_on_one_rank(p),
       FAILS(MISMATCH, "zero_import: ", "map[1] is \"b\" (slice 1 of tensor layers, transposed) on rank 1"))
MISUSE("exports fewer weights on one rank", ALL, W2, NOTHING,
       exports_or_imports(p, false, table_of_names, p->odd ? 2 : 3, 0),
       FAILS(MISMATCH,
             "map[2] is nothing on rank 1 and \"c\" (tensor bias) on rank 0; all ranks must give the same"))
MISUSE("exports smaller files on one rank", ALL, W2, NOTHING,
       exports_or_imports(p, false, table_of_names, 3, p->odd ? 100 : 0),
       FAILS(MISMATCH, "max_file_bytes is 100 on rank 1 and 5000000000 on rank 0"))
MISUSE("saves one to keep, on one rank alone", ALL, W2, NOTHING,
       zero_save(p->z, NO_FOLDER, p->odd ? &keep : NULL),
       FAILS(MISMATCH, "zero_save: ", "options->kept is 1 on rank 1 and 0 on rank 0"))
MISUSE("saves one to keep twice, on one rank alone", ALL, W2, NOTHING,
       zero_save(p->z, NO_FOLDER, p->odd ? &keep_twice : NULL),
       FAILS(ARG, "zero_save: ", "options->kept is 2; allowed: 0 and 1"))
MISUSE("gives bytes of its own that are nowhere", ALL, W1, NOTHING,
       zero_set_data(p->z, ZERO_DATA_RANK, NULL, 16), FAILS(ARG, "zero_set_data: data is NULL"))
MISUSE("gives fewer bytes of its own than none", ALL, W1, NOTHING,
       zero_set_data(p->z, ZERO_DATA_JOB, "mine", -1),
       FAILS(ARG, "zero_set_data: bytes is -1; allowed: 0 and more"))
MISUSE("gives data as a saved rank's", ALL, W1, NOTHING, zero_set_data(p->z, 0, "mine", 4),
       FAILS(ARG, "zero_set_data: whose is 0; allowed: ZERO_DATA_JOB (-1) and ZERO_DATA_RANK (-2)"))
MISUSE("reads data, and loaded nothing", ALL, BOTH, NOTHING,
       zero_read_data(p->z, ZERO_DATA_JOB, 0, 0, NULL, &(struct zero_data_info){0}),
       FAILS(ORDER, "zero_read_data: no checkpoint was loaded"))
MISUSE("loads what is not there", ALL, BOTH, NOTHING, zero_load(p->z, "/tmp/there-is-no-such-checkpoint"),
       FAILS(IO, "zero_load", "there-is-no-such-checkpoint"))
