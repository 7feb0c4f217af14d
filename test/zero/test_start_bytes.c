/* SPDX-License-Identifier: Apache-2.0 */
/* test_start_bytes.c: how many bytes rank 0 sends to the other ranks in zero_wrap. It sends every record to
 * every rank, so what one rank adds to an exchange is sent world times. */
#include "comm/meet/link.h"
#include "test/cmocka.h"
#include "test/zero/pp_model.h"
#include "test/zero/where.h"

#include <stdatomic.h>
#include <string.h>

static _Atomic int64_t n_sent;

int __real_zr_link_send_shared(struct zr_link *l, struct zr_frame f, struct zr_shared_bytes *payload);
int __wrap_zr_link_send_shared(struct zr_link *l, struct zr_frame f, struct zr_shared_bytes *payload);

int __wrap_zr_link_send_shared(struct zr_link *l, struct zr_frame f, struct zr_shared_bytes *payload)
{
    if (f.rank == 0)
        n_sent += (int64_t)payload->n;
    return __real_zr_link_send_shared(l, f, payload);
}

static void start(struct toy_rank *r)
{
    struct zero_config cfg = toy_config(r, 3);
    struct toy m;
    zero_ctx *z = NULL;
    where_open(r->rank, &cfg);
    toy_open(r, &m, &z, &cfg);
    toy_close(&m, &z);
    where_close(&cfg);
}

static void check_bytes(int world, int64_t most, const char *what)
{
    int64_t each = n_sent / world / world;
    print_message("%s: rank 0 sends %lld bytes for each rank to each rank\n", what, (long long)each);
    assert_in_range(each, 1, most);
}

static void test_data_parallel(void **state)
{
    struct toy_rank r[8];
    (void)state;
    n_sent = 0;
    toy_run(8, start, NULL, r, "8 ranks");
    check_bytes(8, 1600, "8 ranks");
}

static int do_nothing(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    (void)r, (void)m, (void)z, (void)at;
    return 0;
}

/* The ranks of a pipeline stage share in sending its table of tensors. */
static void test_pipeline(void **state)
{
    static const struct mesh mesh = {.pp = 2, .dp = 4, .tp = 2, .stage = 1};
    const struct setup s = {.mesh = &mesh};
    (void)state;
    if (where_has_gpu)
        skip(); /* the stand-in has fewer devices */
    n_sent = 0;
    pp_run(&s, do_nothing, "2 pipeline stages of 8 ranks");
    check_bytes(16, 3000, "2 pipeline stages of 8 ranks");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_data_parallel),
        cmocka_unit_test(test_pipeline),
    };
    return cmocka_run_group_tests_name("start_bytes", tests, NULL, NULL);
}
