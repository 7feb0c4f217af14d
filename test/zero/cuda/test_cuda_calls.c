/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_calls.c: ranks on GPU stand-ins that share no memory and make different calls. Every rank's error
 * names the first calls that differ, whether they are found at a step's exchange, by a collective that never
 * ends, or because a rank has stopped calling. What the thread that watches NCCL finds goes to all ranks at
 * once. No test measures time, except where only the library's timeout can find the fault. */
#include "test/cmocka.h"
#include "test/stand_in/nccl_stand_in.h"
#include "test/stand_in/stand_in.h"
#include "test/zero/toy_net.h"

#include <cuda_runtime_api.h>

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = TOY_HYBRID_WORLD, SHORT_MS = 3000, LONG_MS = 60000, HANG_MS = 120000 };

static struct zero_config config(struct toy_rank *r, int stage, int timeout_ms)
{
    cudaSetDevice(r->rank + 1); /* no rank uses GPU 0 */
    struct zero_config cfg = toy_config(r, stage);
    cfg.device = ZERO_DEVICE_CUDA;
    cfg.launch.timeout_ms = timeout_ms;
    cudaStreamCreateWithFlags((cudaStream_t *)&cfg.stream, cudaStreamNonBlocking);
    return cfg;
}

static void run(int world, void (*fn)(struct toy_rank *r), void *arg, struct toy_rank *r)
{
    struct stand_in_machine *m = stand_in_the_machine(), was = *m;
    m->n_devices = world + 1;
    toy_ranks(world, fn, arg, r);
    nccl_stand_in_end();
    stand_in_end(NULL); /* ignores misuse of NCCL, because the collectives differ on purpose */
    *m = was;
    for (int i = 0; i < world; i++)
        if (r[i].wrong[0])
            fail_msg("rank %d: %s", i, r[i].wrong);
}

/* ---- different calls ---- */

enum difference {
    OTHER_UNIT,
    LEFT_OUT,
    STEP_EARLY,
    READ_FOR_MEAN,
    READ_OTHER_TENSOR,
    READ_OTHER_RANGE,
    READ_FOR_WRITE,
    EARLY_UNWRAP,
    MEAN_ALONE,
    N_DIFFERENCES
};

/* What the differing ranks called, and what the others called instead. */
static const struct {
    const char *odd, *others;
    bool other_args;
} called[N_DIFFERENCES] = {
    [OTHER_UNIT] = {"zero_begin(unit 3, forward) in step 2", "zero_begin(unit 1, forward) in step 2", 0},
    [LEFT_OUT] = {"zero_begin(unit 0, backward) in step 2", "zero_begin(unit 1, backward) in step 2", 0},
    [STEP_EARLY] = {"zero_step in step 2", "zero_begin(unit 1, backward) in step 2", 0},
    [READ_FOR_MEAN] = {"zero_read(tensor 0) in step 2", "zero_mean in step 2", 0},
    [READ_OTHER_TENSOR] = {"zero_read(tensor 1) in step 2", "zero_read(tensor 0) in step 2", 0},
    [READ_OTHER_RANGE] = {"zero_read(tensor 0) in step 2", "zero_read(tensor 0) in step 2", 1},
    [READ_FOR_WRITE] = {"zero_read(tensor 0) in step 2", "zero_write(tensor 0) in step 2", 0},
    [EARLY_UNWRAP] = {"zero_unwrap in step 2", "zero_begin(unit 0, forward) in step 2", 0},
    [MEAN_ALONE] = {"zero_mean in step 2", "zero_begin(unit 0, forward) in step 2", 0},
};

struct differing {
    int stage;
    int n_odd; /* how many of the last ranks differ: one, or all of a group */
    enum difference how;
};

static int differ(zero_ctx **z, enum difference how, bool odd)
{
    float x[8] = {0};
    double mean[2] = {1, 2};
    switch (how) {
    case READ_FOR_MEAN:
        return odd ? zero_read(*z, 0, 0, 0, 8, x) : zero_mean(*z, mean, 1);
    case READ_OTHER_TENSOR:
        return zero_read(*z, odd ? 1 : 0, 0, 0, 8, x);
    case READ_OTHER_RANGE:
        return zero_read(*z, 0, 0, odd ? 8 : 0, 8, x);
    case READ_FOR_WRITE:
        return odd ? zero_read(*z, 0, 0, 0, 8, x) : zero_write(*z, 0, 0, 0, 8, x);
    case EARLY_UNWRAP:
        return odd ? zero_unwrap(z) : 0;
    case MEAN_ALONE:
        return odd ? zero_mean(*z, mean, 1) : 0;
    default:
        return 0;
    }
}

/* A backward whose only kernel sets some elements of one gradient. */
static int backward(struct toy *m, zero_ctx *z, int unit, cudaStream_t stream)
{
    int err = zero_begin(z, unit, ZERO_BACKWARD);
    if (!err && unit == 0 && cudaMemsetAsync(m->grad[0], 0x3c, 32, stream))
        return ZERO_ERR_SYSTEM;
    return err ? err : zero_end(z, unit, ZERO_BACKWARD);
}

static int forward(zero_ctx *z, int unit)
{
    int err = zero_begin(z, unit, ZERO_FORWARD);
    return err ? err : zero_end(z, unit, ZERO_FORWARD);
}

/* Calls until one fails. If units are resident, these calls wait for no other rank and only check for known
 * failures, so they may be the last to fail. */
static int call_until_reported(zero_ctx *z)
{
    int64_t from = toy_now_ms();
    int err = 0;
    for (; !err && toy_now_ms() - from < HANG_MS; usleep(1000))
        err = forward(z, 0);
    return err;
}

static int micro_batch(struct toy *m, zero_ctx *z, cudaStream_t stream)
{
    int err = 0;
    for (int u = 0; !err && u < TOY_UNITS; u++)
        err = forward(z, u);
    for (int u = TOY_UNITS; !err && u-- > 0;)
        err = backward(m, z, u, stream);
    return err;
}

static void train_differently(struct toy_rank *r)
{
    const struct differing *c = r->arg;
    struct zero_config cfg = config(r, c->stage, SHORT_MS);
    struct toy m;
    zero_ctx *z;
    cfg.memory.prefetch = 0; /* gathers units at stage 3 */
    int err = toy_open(r, &m, &z, &cfg);
    if (err)
        toy_wrong(r, "zero_wrap: %s", zero_last_error());
    for (int step = 0; !err && step < 4; step++) {
        bool odd = step == 1 && r->rank >= r->world - c->n_odd;
        if (step == 1)
            err = differ(&z, c->how, odd);
        if (!z)
            break;
        for (int u = 0; !err && u < TOY_UNITS; u++)
            err = forward(z, odd && c->how == OTHER_UNIT && u == 1 ? 3 : u);
        for (int u = TOY_UNITS; !err && u-- > 0;) {
            if (odd && c->how == LEFT_OUT && u == 1)
                continue;
            err = backward(&m, z, u, (cudaStream_t)cfg.stream);
            if (!err && odd && c->how == STEP_EARLY && u == 2)
                err = zero_step(z, 1e-2f, NULL);
        }
        if (!err)
            err = zero_step(z, 1e-2f, NULL);
    }
    toy_note(r, err);
    zero_unwrap(&z);
    cudaStreamDestroy((cudaStream_t)cfg.stream);
    toy_free(&m);
}

/* Whether both messages report the same failure. Compares what follows "rank 2: " in rank 2's message,
 * without the rank that found it. A rank names the finder if it read the failure in the record of a rank that
 * has ended. */
static bool say_the_same(const struct toy_rank *a, const struct toy_rank *b)
{
    char text[2][sizeof a->text];
    for (int i = 0; i < 2; i++) {
        const struct toy_rank *r = i ? b : a;
        char own[16];
        snprintf(own, sizeof own, "rank %d: ", r->rank);
        const char *at = strstr(r->text, own);
        snprintf(text[i], sizeof text[i], "%s", at ? at + strlen(own) : r->text);
        char *found = strstr(text[i], " (found by rank ");
        if (found)
            *found = 0;
    }
    return strcmp(text[0], text[1]) == 0;
}

/* Whether text names the call of a differing rank, and that of another rank. */
static bool names_both(const char *text, enum difference how, int world, int n_odd)
{
    char one[128], two[160];
    for (int odd = world - n_odd; odd < world; odd++)
        for (int other = 0; other < world - n_odd; other++) {
            snprintf(one, sizeof one, "rank %d called %s", odd, called[how].odd);
            snprintf(two, sizeof two, "rank %d called %s", other, called[how].others);
            if (strstr(text, one) && strstr(text, two))
                return true;
        }
    return false;
}

static void make_other_calls(const struct differing *c, int world)
{
    struct toy_rank r[MOST] = {0};
    run(world, train_differently, (void *)c, r);
    for (int i = 0; i < world; i++) {
        bool args = strstr(r[i].text, " with other arguments;") != NULL;
        if (r[i].err != ZERO_ERR_MISMATCH || !names_both(r[i].text, c->how, world, c->n_odd) ||
            args != called[c->how].other_args)
            fail_msg("difference %d, stage %d, rank %d of %d: %d \"%s\"", c->how, c->stage, i, world,
                     r[i].err, r[i].text);
        /* All ranks report the same failure, and none calls another rank "this rank". */
        if (!say_the_same(&r[i], &r[0]) || strstr(r[i].text, "this rank"))
            fail_msg("difference %d, stage %d, rank 0: \"%s\"; rank %d: \"%s\"", c->how, c->stage, r[0].text,
                     i, r[i].text);
    }
    printf("difference %d, stage %d: %s\n", c->how, c->stage, r[0].text);
}

static void test_other_calls(void **state)
{
    for (int how = 0; how < N_DIFFERENCES; how++) {
        struct differing c = {.how = (enum difference)how, .stage = how % 3, .n_odd = 1};
        make_other_calls(&c, 2 + how % 2);
        c.stage = 3;
        make_other_calls(&c, 3 - how % 2);
        c.stage = TOY_HSDP + how / 2 % 2;
        c.n_odd = 1 + how % 2;
        make_other_calls(&c, TOY_HYBRID_WORLD);
    }
}

/* ---- a rank that stops calling ---- */

struct stopping {
    int stage;
    bool far; /* by then the others have enqueued more operations than are watched at a time */
    atomic_int n_reported;
};

static void stop_calling(struct toy_rank *r)
{
    struct stopping *s = r->arg;
    struct zero_config cfg = config(r, s->stage, SHORT_MS);
    struct toy m;
    zero_ctx *z;
    cfg.grad_accum_steps = s->far ? 200 : 4;
    int err = toy_open(r, &m, &z, &cfg);
    if (err)
        toy_wrong(r, "zero_wrap: %s", zero_last_error());
    bool stops = r->rank == 1;
    for (int i = 0; !err && i < (stops ? 2 : cfg.grad_accum_steps); i++)
        err = micro_batch(&m, z, (cudaStream_t)cfg.stream);
    int64_t from = toy_now_ms();
    while (!err && stops && s->n_reported + 1 < r->world && toy_now_ms() - from < HANG_MS)
        usleep(1000);
    struct zero_step_info info;
    if (!err && !stops)
        err = zero_step(z, 1e-2f, &info);
    if (!err && stops)
        err = call_until_reported(z);
    toy_note(r, err);
    s->n_reported++;
    zero_unwrap(&z);
    cudaStreamDestroy((cudaStream_t)cfg.stream);
    toy_free(&m);
}

static void test_a_rank_stops_calling(void **state)
{
    for (int k = 0; k < 4; k++) {
        struct stopping s = {.stage = k < 2 ? 2 : TOY_HSDP + k % 2, .far = k % 2};
        int world = k < 2 ? 3 : TOY_HYBRID_WORLD;
        struct toy_rank r[MOST] = {0};
        run(world, stop_calling, &s, r);
        for (int i = 0; i < world; i++)
            if (r[i].err != ZERO_ERR_TIMEOUT ||
                !strstr(r[i].text, "waited 3000 ms (timeout_ms) for the other ranks") ||
                !strstr(r[i].text, "; rank 1 did not come: its program has made 32 calls, the last "
                                   "zero_end(unit 0, backward) in step 1; that of rank"))
                fail_msg("rank %d: %d \"%s\"", i, r[i].err, r[i].text);
        printf("%s\n", r[0].text);
    }
}

/* ---- failures that are found while the model computes ---- */

enum finding { BY_NCCL, BY_QUERY, BY_WAITING, N_FINDINGS };

static const struct {
    int code;
    const char *says[3];
} findings[N_FINDINGS] = {
    [BY_NCCL] = {ZERO_ERR_SYSTEM, {"NCCL's reduce communicator: unhandled system error", "", ""}},
    [BY_QUERY] = {ZERO_ERR_SYSTEM, {"cudaEventQuery: cudaErrorLaunchFailure", "", ""}},
    [BY_WAITING] = {ZERO_ERR_MISMATCH,
                    {"waited 3000 ms (timeout_ms) for the other ranks",
                     "rank 1 called zero_begin(unit 0, forward) in step 1",
                     "rank 0 called zero_mean in step 1"}},
};

struct watching {
    enum finding by;
    /* is_there: rank 0 is ready, so rank 1 may fail; knows: rank 0 has the error */
    atomic_bool is_there, knows;
    atomic_int n_asked; /* calls of rank 1 after rank 0 has the error */
};

static void wait_for(atomic_bool *what)
{
    int64_t from = toy_now_ms();
    while (!*what && toy_now_ms() - from < HANG_MS)
        usleep(1000);
}

static void held_up(void *arg)
{
    struct watching *w = arg;
    wait_for(&w->knows);
}

/* Waits for the failure on rank 0. It has enqueued nothing, or operations behind a slow model, and its
 * timeout is far longer than rank 1's. */
static int rank_0_hears(struct watching *w, struct toy *m, zero_ctx *z, cudaStream_t stream)
{
    struct zero_step_info info;
    double mean = 1;
    int err = 0;
    if (w->by == BY_NCCL) {
        cudaLaunchHostFunc(stream, held_up, w);
        err = micro_batch(m, z, stream);
    }
    w->is_there = true;
    if (err || w->by == BY_QUERY)
        return err ? err : call_until_reported(z);
    return w->by == BY_WAITING ? zero_mean(z, &mean, 1) : zero_step(z, 1e-2f, &info);
}

/* Rank 1 has enqueued collectives, and its model computes until rank 0 has the error. */
static void computes_for_long(struct toy_rank *r)
{
    struct watching *w = r->arg;
    struct zero_config cfg = config(r, 1, r->rank == 1 && w->by == BY_WAITING ? SHORT_MS : LONG_MS);
    struct toy m;
    zero_ctx *z;
    int err = toy_open(r, &m, &z, &cfg);
    if (err)
        toy_wrong(r, "zero_wrap: %s", zero_last_error());
    if (!err && r->rank == 0) {
        toy_note(r, rank_0_hears(w, &m, z, (cudaStream_t)cfg.stream));
        if (w->n_asked)
            toy_wrong(r, "rank 1 called first");
    } else if (!err) {
        err = micro_batch(&m, z, (cudaStream_t)cfg.stream);
        if (err)
            toy_wrong(r, "%s", zero_last_error());
        wait_for(&w->is_there);
        if (w->by == BY_NCCL)
            nccl_stand_in_async(r->rank + 1, ncclSystemError);
        if (w->by == BY_QUERY)
            stand_in_fail("cudaEventQuery", 1, cudaErrorLaunchFailure, false);
        wait_for(&w->knows);
        w->n_asked++;
        toy_note(r, call_until_reported(z));
    }
    w->knows = true;
    zero_unwrap(&z);
    cudaStreamDestroy((cudaStream_t)cfg.stream);
    toy_free(&m);
}

static void test_the_watcher_tells_all(void **state)
{
    for (int by = 0; by < N_FINDINGS; by++) {
        struct watching w = {.by = (enum finding)by};
        struct toy_rank r[2] = {0};
        run(2, computes_for_long, &w, r);
        for (int i = 0; i < 2; i++)
            for (int k = 0; k < 3; k++)
                if (r[i].err != findings[by].code || !strstr(r[i].text, findings[by].says[k]))
                    fail_msg("rank %d: %d \"%s\"", i, r[i].err, r[i].text);
        if (by == BY_NCCL)
            assert_non_null(strstr(r[0].text, " (found by rank 1)"));
        if (by == BY_WAITING)
            assert_non_null(strstr(r[0].text, "(rank 1: "));
        printf("%s\n", r[0].text);
    }
}

/* ---- more operations than are kept ---- */

enum { N_LAYERS = 300, LAYER = 8 };

/* Reads the tensor; each layer is a separate operation. */
static void read_layers(struct toy_rank *r, zero_ctx *z)
{
    float x[N_LAYERS * LAYER];
    int err = 0;
    TOY_TRY(zero_read(z, 0, ZERO_VALUE_PARAM, 0, N_LAYERS * LAYER, x));
    for (int i = 0; !err && i < N_LAYERS * LAYER; i++)
        if (x[i] != (float)i)
            toy_wrong(r, "element %d is %g. ", i, (double)x[i]);
}

static void has_many_layers(struct toy_rank *r)
{
    const char *folder = r->arg;
    float own[N_LAYERS * LAYER];
    void *param = own, *grad = NULL;
    struct zero_tensor t = {.name = "w",
                            .param = &param,
                            .grad = &grad,
                            .shape = {N_LAYERS, LAYER},
                            .dtype = ZERO_F32,
                            .flags = ZERO_STACKED};
    for (int stage = 1; stage <= 3; stage += 2) {
        struct zero_config cfg = config(r, stage, LONG_MS);
        zero_ctx *z = NULL;
        int err = 0;
        for (int i = 0; i < N_LAYERS * LAYER; i++)
            own[i] = (float)i;
        param = own;
        grad = NULL;
        TOY_TRY(zero_wrap(&z, &t, 1, &cfg));
        if (!err)
            read_layers(r, z);
        TOY_TRY(zero_save(z, folder, NULL));
        TOY_TRY(zero_load(z, folder));
        if (!err)
            read_layers(r, z);
        TOY_TRY(zero_unwrap(&z));
        if (err)
            toy_wrong(r, "stage %d: %d %s. ", stage, err, r->text);
        cudaStreamDestroy((cudaStream_t)cfg.stream);
    }
}

/* NCCL's communicators keep 256 operations in progress, and a call that needs more waits. Here each operation
 * is slow, so that the limit is reached. */
static void test_many_operations(void **state)
{
    char folder[] = "/tmp/zero-layers-XXXXXX", command[128];
    struct toy_rank r[2] = {0};
    assert_non_null(mkdtemp(folder));
    nccl_stand_in_the_machine()->slow_us = 1000;
    run(2, has_many_layers, folder, r);
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_other_calls),
        cmocka_unit_test(test_a_rank_stops_calling),
        cmocka_unit_test(test_the_watcher_tells_all),
        cmocka_unit_test(test_many_operations),
    };
    return cmocka_run_group_tests_name("calls of ranks on GPUs", tests, NULL, NULL);
}
