/* SPDX-License-Identifier: Apache-2.0 */
/* test_misuse_checkpoints.c: ways to use the library wrongly (misuse.h): checkpoints. */
#include "test/zero/misuse.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

static int saves_in_a_step(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    return err ? err : zero_save(p->z, "/tmp");
}

static int keeps_in_a_step(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    return err ? err : zero_save_kept(p->z, "/tmp");
}

static int keeps_on_one_rank(struct program *p)
{
    const char *dir = "/tmp/there-is-no-such-folder/ckpt";
    return p->odd ? zero_save_kept(p->z, dir) : zero_save(p->z, dir);
}

static int gives_bytes_of_nowhere(struct program *p)
{
    return zero_set_rank_data(p->z, NULL, 16);
}

static int gives_fewer_than_no_bytes(struct program *p)
{
    return zero_set_rank_data(p->z, "mine", -1);
}

static int shares_too_much(struct program *p)
{
    static const char much[(64 << 10) + 1];
    return zero_set_user_data(p->z, much, sizeof much);
}

static int reads_rank_data_of_nothing(struct program *p)
{
    char x[8];
    int32_t n_saved = -1;
    int err = zero_find_rank_data(p->z, 0, &n_saved, NULL);
    return err || n_saved ? -1 : zero_read_rank_data(p->z, 0, 0, 8, x);
}

static int asks_nobody_what_was_saved(struct program *p)
{
    return zero_get_saved(p->z, NULL);
}

static int loads_from_nowhere(struct program *p)
{
    return zero_load(p->z, "/tmp/there-is-no-such-checkpoint");
}

static int saves_to_nowhere(struct program *p)
{
    return zero_save(p->z, "/tmp/there-is-no-such-folder/ckpt");
}

static int exports_under_a_name_of_the_files(struct program *p)
{
    const struct zero_weight map = {.name = "__metadata__", .tensor = 0};
    return zero_export(p->z, "/tmp/there-is-no-such-folder/weights", &map, 1, 0);
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
    {"saves one to keep inside a step",
     ALL,
     BOTH,
     NULL,
     keeps_in_a_step,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_save_kept: a step has begun"}},
    {"saves one to keep, on one rank alone",
     ALL,
     W2,
     NULL,
     keeps_on_one_rank,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"zero_save", "rank 1 calls zero_save_kept and rank 0 zero_save; every rank"}},
    {"gives bytes of its own that are nowhere",
     ALL,
     W1,
     NULL,
     gives_bytes_of_nowhere,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_set_rank_data: data is NULL"}},
    {"gives fewer bytes of its own than none",
     ALL,
     W1,
     NULL,
     gives_fewer_than_no_bytes,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_set_rank_data: bytes is -1; allowed: 0 and more"}},
    {"gives more for all than 64 KiB",
     ALL,
     W1,
     NULL,
     shares_too_much,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_set_user_data: bytes is 65537", "zero_set_rank_data takes more"}},
    {"reads what ranks had, and loaded nothing",
     ALL,
     BOTH,
     NULL,
     reads_rank_data_of_nothing,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_read_rank_data: no checkpoint was loaded"}},
    {"asks what was saved, and gives no place for it",
     ALL,
     W1,
     NULL,
     asks_nobody_what_was_saved,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_get_saved: path is NULL"}},
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
