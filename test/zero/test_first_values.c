/* SPDX-License-Identifier: Apache-2.0 */
/* test_first_values.c: cfg.init_from: initial values from rank 0 alone, from cfg.init, or later from
 * zero_load, zero_import and zero_write. *param is NULL then. The weights must end in the bits of a run in
 * which all ranks had the values. Runs on the host, or on the GPU stand-in. */
#include "test/cmocka.h"
#include "test/zero/sample.h"
#include "test/zero/toy_net.h"
#include "test/zero/where.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 3, PIECE = 256 << 10 };

struct plan {
    int stage, from;
    const char *dir;                                               /* folder of a checkpoint or an export */
    int (*values)(struct toy_rank *r, struct toy *m, zero_ctx *z); /* sets values after ZERO_INIT_LATER */
    /* the rank whose cfg.init fails, or skips an element; -1: none */
    int fails_on, forgets;
    /* the tensor whose first element is skipped; 0: the last of tensor 4 */
    int forgets_first_of;
    bool null_on_rank_0;
};

static const struct plan *plan;
/* How often all ranks together asked cfg.init for each element. */
static _Atomic int n_asked[TOY_TENSORS][400];
static _Thread_local struct toy values; /* a whole model, from which values are copied */
static _Thread_local int my_rank;
static _Thread_local const struct zero_config *my_cfg;

static void wait_for_mine(void)
{
    where_wait(my_cfg);
}

static int64_t elem_bytes(int t)
{
    return values.table[t].dtype == ZERO_BF16 ? 2 : 4;
}

static int init(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    if (arg != &n_asked || n < 1 || n * elem_bytes(tensor) > PIECE || first + n > toy_elems(tensor))
        return -77;
    if (my_rank == plan->fails_on && tensor == 4)
        return 42;
    for (int64_t i = first; i < first + n; i++)
        n_asked[tensor][i]++;
    int64_t skipped = 0, bytes = elem_bytes(tensor);
    if (my_rank == plan->forgets && tensor == (plan->forgets_first_of ? plan->forgets_first_of : 4)) {
        skipped = plan->forgets_first_of ? bytes : 0;
        n--;
    }
    memcpy((char *)dst + skipped, (const char *)values.own[tensor] + first * bytes + skipped,
           (size_t)(n * bytes));
    return 0;
}

static int train(struct toy_rank *r, struct toy *m, zero_ctx *z)
{
    int err = 0;
    for (int step = 0; !err && step < STEPS; step++) {
        err = FIRST_ERROR(toy_forward(m, z, true), toy_backward(m, z, true, step, r->rank),
                          zero_step(z, 1e-2f, NULL));
    }
    return err ? err : toy_hash(z, 2, &r->hash);
}

/* Optimizer states start as zero although nothing wrote them; ZERO_POISON fills memory with NaN. */
static int states_are_zero(struct toy_rank *r, zero_ctx *z)
{
    int err = 0;
    for (int t = 0; !err && t < TOY_TENSORS; t++)
        for (int s = 0; !err && t != TOY_FROZEN && s < 2; s++) {
            float got[400];
            err = zero_read(z, t, ZERO_VALUE_STATE + s, 0, toy_elems(t), got);
            for (int64_t i = 0; !err && i < toy_elems(t); i++)
                if (got[i] != 0)
                    toy_wrong(r, "state %d of tensor %d begins with %g at %lld\n", s, t, (double)got[i],
                              (long long)i);
        }
    return err;
}

static void wraps(struct toy_rank *r)
{
    struct toy m;
    zero_ctx *z = NULL;
    my_rank = r->rank;
    toy_make(&values);
    toy_make(&m);
    bool has = plan->from == ZERO_INIT_MODEL || (plan->from == ZERO_INIT_RANK0 && r->rank == 0);
    if (!has || plan->null_on_rank_0)
        for (int t = 0; t < TOY_TENSORS; t++) {
            free(m.own[t]);
            m.own[t] = m.param[t] = NULL;
        }
    struct zero_config cfg = toy_config(r, plan->stage);
    cfg.init_from = plan->from;
    cfg.init = plan->from == ZERO_INIT_CALL ? init : NULL;
    cfg.init_arg = &n_asked;
    where_open(r->rank, &cfg);
    my_cfg = &cfg;
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    for (int t = 0; err && t < TOY_TENSORS; t++)
        if (m.param[t] != m.own[t])
            toy_wrong(r, "a failed zero_wrap left *param of tensor %d at %p\n", t, m.param[t]);
    if (!err && plan->values)
        err = plan->values(r, &m, z);
    if (!err && !plan->values)
        err = states_are_zero(r, z);
    if (!err)
        err = train(r, &m, z);
    toy_note(r, err);
    zero_unwrap(&z);
    where_close(&cfg);
    toy_free(&m);
    toy_free(&values);
}

static uint64_t run(const struct plan *p, int world, int code, const char *says)
{
    struct toy_rank r[MAX_TOY_RANKS];
    plan = p;
    memset((void *)n_asked, 0, sizeof n_asked);
    toy_ranks(world, wraps, NULL, r);
    for (int i = 0; i < world; i++)
        if (r[i].err != code || r[i].wrong[0] || (says && !strstr(r[i].text, says)))
            fail_msg("stage %d, world %d, from %d, rank %d: %d \"%s\" (expected \"%s\") %s", p->stage, world,
                     p->from, i, r[i].err, r[i].text, says ? says : "", r[i].wrong);
    return r[0].hash;
}

static const int worlds[] = {1, 2, 3, TOY_HYBRID_WORLD};

static uint64_t expected(int stage, int world)
{
    return run(&(struct plan){.stage = stage, .fails_on = -1, .forgets = -1}, world, 0, NULL);
}

static void test_by_rank_0_or_a_callback(void **state)
{
    for (int w = 0; w < 4; w++)
        for (int stage = 0; stage < TOY_STAGES; stage++) {
            if (!toy_has_stage(worlds[w], stage) || !sample_has())
                continue;
            uint64_t hash = expected(stage, worlds[w]);
            struct plan p = {.stage = stage, .from = ZERO_INIT_RANK0, .fails_on = -1, .forgets = -1};
            assert_int_equal(run(&p, worlds[w], 0, NULL), hash);
            p.from = ZERO_INIT_CALL;
            assert_int_equal(run(&p, worlds[w], 0, NULL), hash);
            for (int t = 0; t < TOY_TENSORS; t++)
                for (int64_t i = 0; i < 400; i++)
                    if (n_asked[t][i] != (i < toy_elems(t)))
                        fail_msg("stage %d, world %d: element %lld of tensor %d was asked for %d times",
                                 stage, worlds[w], (long long)i, t, n_asked[t][i]);
        }
}

static void test_refused(void **state)
{
    for (int world = 1; world <= 3; world += 2)
        for (int stage = 0; stage <= 3; stage += 3) {
            struct plan p = {.stage = stage, .from = ZERO_INIT_CALL, .fails_on = world / 2, .forgets = -1};
            run(&p, world, ZERO_ERR_FAILED, "cfg.init returned 42 for tensor head, elements");
            p.forgets = world / 2;
            p.fails_on = -1;
            run(&p, world, ZERO_ERR_FAILED, "cfg.init did not write element");
            p.forgets_first_of = 1; /* an f32 tensor; tensor 4 is bf16 */
            run(&p, world, ZERO_ERR_FAILED, "of tensor layers, asked for");
            p.forgets_first_of = 4;
            run(&p, world, ZERO_ERR_FAILED, "of tensor head, asked for");
            p = (struct plan){.stage = stage,
                              .from = ZERO_INIT_RANK0,
                              .fails_on = -1,
                              .forgets = -1,
                              .null_on_rank_0 = true};
            run(&p, world, ZERO_ERR_ARG,
                "tensors[0] (embedding): *param is NULL on rank 0, which must give the values (init_from is "
                "ZERO_INIT_RANK0)");
            p.from = ZERO_INIT_MODEL;
            run(&p, world, ZERO_ERR_ARG, "cfg.init_from must say where their values come from");
        }
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct toy m;
    zero_ctx *z;
    toy_make(&m);
    cfg.init = init;
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), ZERO_ERR_ARG);
    assert_non_null(strstr(zero_last_error(), "init is set but init_from is not ZERO_INIT_CALL"));
    cfg.init = NULL;
    cfg.init_from = ZERO_INIT_CALL;
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), ZERO_ERR_ARG);
    assert_non_null(strstr(zero_last_error(), "init is NULL but init_from is ZERO_INIT_CALL"));
    cfg.init_from = 4;
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), ZERO_ERR_ARG);
    assert_non_null(
        strstr(zero_last_error(), "init_from is 4; allowed: model (0), rank0 (1), later (2), call (3)"));
    toy_free(&m);
}

/* ---- values that come later ---- */

static void expect_refused(struct toy_rank *r, struct toy *m, zero_ctx *z, const char *tensor,
                           const char *has)
{
    char text[160];
    double norm;
    for (int i = 0; i < 7; i++) {
        int err = i == 0   ? zero_begin(z, 0, ZERO_FORWARD)
                  : i == 1 ? zero_step(z, 1, NULL)
                  : i == 2 ? zero_save(z, "/tmp/zero-first-values-none", NULL)
                  : i == 3 ? zero_micro(z)
                  : i == 4 ? zero_gather_all(z, 0)
                  : i == 5 ? zero_norm(z, &norm)
                           : zero_export(z, "/tmp/zero-first-values-none", NULL, 0, 0);
        snprintf(text, sizeof text, "tensor %s", tensor);
        if (err != ZERO_ERR_ORDER || !strstr(zero_last_error(), text) || !strstr(zero_last_error(), has))
            toy_wrong(r, "call %d: %d %s\n", i, err, zero_last_error());
    }
    for (int t = 0; t < TOY_TENSORS; t++)
        if (m->param[t] && !getenv("ZERO_CHECK")) /* in check mode *param points to closed memory */
            toy_wrong(r, "*param of tensor %d is %p\n", t, m->param[t]);
}

/* Writes all values, in overlapping pieces and in mixed order. */
static int write_all(struct toy_rank *r, struct toy *m, zero_ctx *z)
{
    int err = 0;
    expect_refused(r, m, z, "embedding", "has values for 0 of its 165 elements");
    for (int t = TOY_TENSORS; !err && t-- > 0;) {
        int64_t n = toy_elems(t), size = elem_bytes(t);
        static const int order[] = {3, 0, 1, 2};
        for (int k = 0; !err && k < 4; k++) {
            int64_t first = order[k] * n / 4, end = order[k] == 3 ? n : (order[k] + 1) * n / 4 + (k > 1);
            if (t == 0 && k == 3) {
                float x;
                char has[80];
                snprintf(has, sizeof has, "of its %lld elements", (long long)n);
                expect_refused(r, m, z, "embedding", has);
                if (zero_read(z, 0, ZERO_VALUE_PARAM, 0, 1, &x) != ZERO_ERR_ORDER)
                    toy_wrong(r, "it can be read\n");
                if (zero_read(z, 3, ZERO_VALUE_PARAM, 0, 1, &x))
                    toy_wrong(r, "tensor 3 is whole: %s\n", zero_last_error());
            }
            err = zero_write(z, t, ZERO_VALUE_PARAM, first, end - first,
                             r->rank ? NULL : (const char *)values.own[t] + first * size);
        }
    }
    return err;
}

static int load(struct toy_rank *r, struct toy *m, zero_ctx *z)
{
    expect_refused(r, m, z, "embedding", "has values for 0 of its 165 elements");
    if (zero_load(z, "/tmp/zero-first-values-none") != ZERO_ERR_IO)
        toy_wrong(r, "nothing is loaded: %s\n", zero_last_error());
    expect_refused(r, m, z, "embedding", "has values for 0 of its 165 elements");
    return zero_load(z, plan->dir);
}

static int import(struct toy_rank *r, struct toy *m, zero_ctx *z)
{
    expect_refused(r, m, z, "embedding", "has values for 0 of its 165 elements");
    return zero_import(z, plan->dir, NULL, 0);
}

static int save_and_export(struct toy_rank *r, struct toy *m, zero_ctx *z)
{
    return FIRST_ERROR(zero_save(z, plan->dir, NULL), zero_export(z, plan->dir, NULL, 0, 0));
}

static void test_later(void **state)
{
    char folder[] = "/tmp/zero-first-values-XXXXXX", command[64], path[64];
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/saved", folder);
    run(&(struct plan){.stage = 1, .dir = path, .values = save_and_export, .fails_on = -1, .forgets = -1}, 2,
        0, NULL);
    for (int w = 0; w < 3; w += 2)
        for (int stage = 0; stage < 4; stage++) {
            if (!sample_has())
                continue;
            uint64_t hash = expected(stage, worlds[w]);
            struct plan p = {
                .stage = stage, .from = ZERO_INIT_LATER, .dir = path, .fails_on = -1, .forgets = -1};
            p.values = write_all;
            assert_int_equal(run(&p, worlds[w], 0, NULL), hash);
            p.values = load;
            assert_int_equal(run(&p, worlds[w], 0, NULL), hash);
            p.values = import;
            assert_int_equal(run(&p, worlds[w], 0, NULL), hash);
        }
    snprintf(command, sizeof command, "rm -rf %s", folder);
    assert_int_equal(system(command), 0);
}

static void flip_last_byte(const char *path)
{
    FILE *f = fopen(path, "r+b");
    assert_non_null(f);
    assert_int_equal(fseek(f, -1, SEEK_END), 0);
    int c = fgetc(f);
    assert_int_equal(fseek(f, -1, SEEK_END), 0);
    fputc(c ^ 1, f);
    assert_int_equal(fclose(f), 0);
}

/* Loads a checkpoint whose last block is damaged. The earlier blocks are intact, but they must not be used
 * either. */
static void test_damaged_load_changes_nothing(void **state)
{
    enum { N = 300000 };
    char folder[] = "/tmp/zero-first-values-XXXXXX", path[128];
    assert_non_null(mkdtemp(folder));
    static float weights[N], got[N];
    void *param = weights, *grad = NULL;
    const struct zero_tensor table = {
        .name = "w", .param = &param, .grad = &grad, .shape = {N}, .dtype = ZERO_F32};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    zero_ctx *z;
    where_open(0, &cfg);
    for (int i = 0; i < N; i++)
        weights[i] = (float)i + 1;
    assert_int_equal(zero_wrap(&z, &table, 1, &cfg), 0);
    for (int s = 0; s < 2; s++)
        assert_int_equal(zero_write(z, 0, ZERO_VALUE_STATE + s, 0, N, weights), 0);
    assert_int_equal(zero_save(z, folder, NULL), 0);
    assert_int_equal(zero_unwrap(&z), 0);
    snprintf(path, sizeof path, "%s/save-00000001-step-00000000/shard-00001-of-00001.safetensors", folder);
    flip_last_byte(path);
    for (int i = 0; i < N; i++)
        weights[i] = -1 - (float)i;
    for (int written = 0; written < 2; written++) {
        cfg.init_from = ZERO_INIT_LATER;
        param = NULL;
        assert_int_equal(zero_wrap(&z, &table, 1, &cfg), 0);
        if (written)
            assert_int_equal(zero_write(z, 0, ZERO_VALUE_PARAM, 0, N - 1, weights), 0);
        assert_int_equal(zero_load(z, folder), ZERO_ERR_IO);
        assert_non_null(strstr(zero_last_error(), "damaged"));
        assert_int_equal(zero_begin(z, 0, ZERO_FORWARD), ZERO_ERR_ORDER);
        int first = written ? N - 1 : 0;
        assert_int_equal(zero_write(z, 0, ZERO_VALUE_PARAM, first, N - first, weights + first), 0);
        for (int value = ZERO_VALUE_PARAM; value <= ZERO_VALUE_STATE + 1; value++) {
            assert_int_equal(zero_read(z, 0, value, 0, N, got), 0);
            for (int i = 0; i < N; i++)
                if (got[i] != (value < ZERO_VALUE_STATE ? weights[i] : 0.0f))
                    fail_msg("written %d, value %d: element %d is %g", written, value, i, (double)got[i]);
        }
        assert_int_equal(zero_unwrap(&z), 0);
    }
    where_close(&cfg);
    snprintf(path, sizeof path, "rm -rf %s", folder);
    assert_int_equal(system(path), 0);
}

/* After a failure, every call returns its cause instead of an error about missing values. */
static int differ(struct toy_rank *r, struct toy *m, zero_ctx *z)
{
    int err = zero_write(z, 0, ZERO_VALUE_PARAM, 0, r->rank + 1, values.own[0]);
    for (int i = 0; err && i < 3; i++) {
        int again = i == 0   ? zero_begin(z, 0, ZERO_FORWARD)
                    : i == 1 ? zero_end(z, 0, ZERO_FORWARD)
                             : zero_micro(z);
        if (again != err || strstr(zero_last_error(), "has values for"))
            toy_wrong(r, "call %d: %d %s\n", i, again, zero_last_error());
    }
    return err;
}

static void test_failed_while_awaited(void **state)
{
    if (where_has_gpu)
        skip(); /* NCCL accepts differing calls and reports them later */
    struct plan p = {.stage = 3, .from = ZERO_INIT_LATER, .values = differ, .fails_on = -1, .forgets = -1};
    run(&p, 2, ZERO_ERR_MISMATCH, NULL);
}

static int ones(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    for (int64_t i = 0; i < n; i++)
        ((float *)dst)[i] = 1;
    return 0;
}

/* If values come from elsewhere, *param may point to a placeholder, also to one that is shared and too small.
 * It is not read, and check mode does not fill it. */
static void test_placeholder(void **state)
{
    enum { N = 512 };
    static float place[4 * N];
    for (int from = ZERO_INIT_LATER; from <= ZERO_INIT_CALL; from++) {
        void *a = place + N, *b = place + N, *da = NULL, *db = NULL;
        const struct zero_tensor table[] = {
            {.name = "a", .param = &a, .grad = &da, .shape = {N}, .dtype = ZERO_F32},
            {.name = "b", .param = &b, .grad = &db, .shape = {N}, .dtype = ZERO_F32}};
        struct zero_config cfg = ZERO_CONFIG_INIT;
        zero_ctx *z;
        where_open(0, &cfg);
        cfg.stage = 3;
        cfg.debug.check = 1;
        cfg.init_from = from;
        cfg.init = from == ZERO_INIT_CALL ? ones : NULL;
        for (int i = 0; i < 4 * N; i++)
            place[i] = (float)i;
        int err = zero_wrap(&z, table, 2, &cfg);
        if (err)
            fail_msg("%s", zero_last_error());
        for (int i = 0; i < 4 * N; i++)
            assert_true(place[i] == (float)i);
        assert_int_equal(zero_unwrap(&z), 0);
        where_close(&cfg);
    }
}

int main(void)
{
    toy_wait = wait_for_mine;
    setenv("ZERO_POISON", "1", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_by_rank_0_or_a_callback),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_later),
        cmocka_unit_test(test_damaged_load_changes_nothing),
        cmocka_unit_test(test_failed_while_awaited),
        cmocka_unit_test(test_placeholder),
    };
    return cmocka_run_group_tests_name("first values", tests, NULL, NULL);
}
