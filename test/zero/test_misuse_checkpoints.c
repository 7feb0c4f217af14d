/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_checkpoints.c: ways to use the library wrongly (misuse.h): checkpoints. */
#include "test/zero/misuse.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static int saves_in_a_step(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    return err ? err : zero_save(p->z, "/tmp", NULL);
}

#define NO_FOLDER "/tmp/there-is-no-such-folder/ckpt"

static int keeps_on_one_rank(struct program *p)
{
    const struct zero_save_options kept = {.kept = 1};
    return zero_save(p->z, NO_FOLDER, p->odd ? &kept : NULL);
}

/* The other ranks learn of it, too. */
static int keeps_twice_on_one_rank(struct program *p)
{
    const struct zero_save_options twice = {.kept = 2};
    return zero_save(p->z, NO_FOLDER, p->odd ? &twice : NULL);
}

static int gives_bytes_of_nowhere(struct program *p)
{
    return zero_set_data(p->z, ZERO_DATA_RANK, NULL, 16);
}

static int gives_fewer_than_no_bytes(struct program *p)
{
    return zero_set_data(p->z, ZERO_DATA_JOB, "mine", -1);
}

static int gives_the_data_of_a_rank(struct program *p)
{
    return zero_set_data(p->z, 0, "mine", 4);
}

static int reads_data_of_nothing(struct program *p)
{
    struct zero_data_info info;
    return zero_read_data(p->z, ZERO_DATA_JOB, 0, 0, NULL, &info);
}

static int loads_from_nowhere(struct program *p)
{
    return zero_load(p->z, "/tmp/there-is-no-such-checkpoint");
}

static int saves_to_nowhere(struct program *p)
{
    return zero_save(p->z, NO_FOLDER, NULL);
}

static int exports_under_a_name_of_the_files(struct program *p)
{
    const struct zero_weight map = {.name = "__metadata__", .tensor = 0};
    return zero_export(p->z, "/tmp/there-is-no-such-folder/weights", &map, 1, 0);
}

static const struct zero_weight table_of_names[] = {{.name = "a", .tensor = 0},
                                                    {.name = "b", .tensor = 1, .slice = ZERO_SLICE(1)},
                                                    {.name = "c", .tensor = 2}};

/* Training goes on after the refusal of a map. */
static int exports_or_imports(struct program *p, bool imports, const struct zero_weight *map, int32_t n,
                              int64_t max_file_bytes)
{
    const char *dir = "/tmp/there-is-no-such-folder/weights";
    int err = imports ? zero_import(p->z, dir, map, n) : zero_export(p->z, dir, map, n, max_file_bytes);
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

static int exports_less_on_one_rank(struct program *p)
{
    return exports_or_imports(p, false, table_of_names, p->odd ? 2 : 3, 0);
}

static int exports_smaller_files_on_one_rank(struct program *p)
{
    return exports_or_imports(p, false, table_of_names, 3, p->odd ? 100 : 0);
}

/* ---- the rows ---- */

static const struct misuse rows[] = {
    {"saves inside a step",
     ALL,
     BOTH,
     NULL,
     saves_in_a_step,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_save: a step has begun"}},
    {"saves into a folder of a folder that is not there",
     ALL,
     BOTH,
     NULL,
     saves_to_nowhere,
     ERROR,
     ZERO_ERR_IO,
     {"zero_save", "there-is-no-such-folder"}},
    {"exports under a name that the files use themselves",
     ALL,
     BOTH,
     NULL,
     exports_under_a_name_of_the_files,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_export: ", "map[0]: name is __metadata__"}},
    WRONG("exports a weight under another name on one rank", ALL, W2, NULL, exports_another_name, MISMATCH,
          "zero_export: ",
          "map[1] is \"B\" (slice 1 of tensor layers) on rank 1 and \"b\" (slice 1 of tensor "
          "layers) on rank 0"),
    WRONG("imports a weight transposed on one rank", ALL, W2, NULL, imports_transposed_on_one_rank, MISMATCH,
          "zero_import: ", "map[1] is \"b\" (slice 1 of tensor layers, transposed) on rank 1"),
    WRONG("exports fewer weights on one rank", ALL, W2, NULL, exports_less_on_one_rank, MISMATCH,
          "map[2] is nothing on rank 1 and \"c\" (tensor bias) on rank 0; all ranks must give the same"),
    WRONG("exports smaller files on one rank", ALL, W2, NULL, exports_smaller_files_on_one_rank, MISMATCH,
          "max_file_bytes is 100 on rank 1 and 5000000000 on rank 0"),
    {"saves one to keep, on one rank alone",
     ALL,
     W2,
     NULL,
     keeps_on_one_rank,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"zero_save: ", "options->kept is 1 on rank 1 and 0 on rank 0"}},
    {"saves one to keep twice, on one rank alone",
     ALL,
     W2,
     NULL,
     keeps_twice_on_one_rank,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_save: ", "options->kept is 2; allowed: 0 and 1"}},
    {"gives bytes of its own that are nowhere",
     ALL,
     W1,
     NULL,
     gives_bytes_of_nowhere,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_set_data: data is NULL"}},
    {"gives fewer bytes of its own than none",
     ALL,
     W1,
     NULL,
     gives_fewer_than_no_bytes,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_set_data: bytes is -1; allowed: 0 and more"}},
    {"gives data as a saved rank's",
     ALL,
     W1,
     NULL,
     gives_the_data_of_a_rank,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_set_data: whose is 0; allowed: ZERO_DATA_JOB (-1) and ZERO_DATA_RANK (-2)"}},
    {"reads data, and loaded nothing",
     ALL,
     BOTH,
     NULL,
     reads_data_of_nothing,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_read_data: no checkpoint was loaded"}},
    {"loads what is not there",
     ALL,
     BOTH,
     NULL,
     loads_from_nowhere,
     ERROR,
     ZERO_ERR_IO,
     {"zero_load", "there-is-no-such-checkpoint"}},
};

static void test_misuse(void **state)
{
    (void)state;
    misuse_try(rows, (int)(sizeof rows / sizeof *rows));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_misuse)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
