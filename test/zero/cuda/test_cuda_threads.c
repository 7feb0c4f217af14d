/* SPDX-License-Identifier: Apache-2.0 */
/* test_cuda_threads.c: the library's threads and the GPU stand-in. Each thread works on its rank's device
 * only, and none disturbs a program that captures a stream. A query that fails is never taken for finished
 * work. */
#include "test/cmocka.h"
#include "test/stand_in/nccl_stand_in.h"
#include "test/stand_in/stand_in.h"
#include "test/zero/toy_net.h"

#include <cuda_runtime_api.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { RANKS = 2, MOST = 3 };

static void nothing_wrong(void)
{
    const char *text;
    nccl_stand_in_end();
    if (stand_in_end(&text))
        fail_msg("%s", text);
}

static void run_ranks(int world, void (*fn)(struct toy_rank *r), void *arg, struct toy_rank *r)
{
    struct stand_in_machine *m = stand_in_the_machine(), was = *m;
    m->n_devices = world + 1;
    toy_ranks(world, fn, arg, r);
    for (int i = 0; i < world; i++)
        if (r[i].wrong[0])
            fail_msg("rank %d: %s", i, r[i].wrong);
    *m = was;
}

/* Wraps on GPU rank + 1. No rank uses GPU 0, the default of threads that never chose. */
static int wrap(struct toy_rank *r, int stage, struct toy *m, struct zero_config *cfg, zero_ctx **z)
{
    cudaSetDevice(r->rank + 1);
    *cfg = toy_config(r, stage);
    cfg->device = ZERO_DEVICE_CUDA;
    cudaStreamCreateWithFlags((cudaStream_t *)&cfg->stream, cudaStreamNonBlocking);
    toy_make(m);
    return zero_wrap(z, m->table, TOY_TENSORS, cfg);
}

static void unwrap(struct toy_rank *r, struct toy *m, struct zero_config *cfg, zero_ctx **z)
{
    int err = zero_unwrap(z);
    if (err && !r->err)
        toy_note(r, err);
    cudaStreamDestroy((cudaStream_t)cfg->stream);
    toy_free(m);
}

/* Runs one step whose only kernel sets some elements of one gradient. */
static int bare_step(struct toy *m, cudaStream_t stream, zero_ctx *z, struct zero_step_info *info)
{
    int err = 0;
    for (int u = 0; !err && u < TOY_UNITS; u++) {
        err = zero_begin(z, u, ZERO_FORWARD);
        if (!err)
            err = zero_end(z, u, ZERO_FORWARD);
    }
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        err = zero_begin(z, u, ZERO_BACKWARD);
        if (!err && u == 0 && cudaMemsetAsync(m->grad[0], 0x3c, 32, stream))
            return ZERO_ERR_SYSTEM;
        if (!err)
            err = zero_end(z, u, ZERO_BACKWARD);
    }
    return err ? err : zero_step(z, 1e-2f, info);
}

/* --- devices --- */

static atomic_int n_updates, n_misplaced;

static int update(void *arg, const struct zero_update *u)
{
    int device = -1;
    cudaGetDevice(&device);
    n_updates++;
    n_misplaced += device != *(const int *)arg + 1;
    return 0;
}

struct work {
    int stage, async;
    char dir[64];
};

static void works_on_its_gpu(struct toy_rank *r)
{
    const struct work *w = r->arg;
    struct toy m;
    struct zero_config cfg;
    zero_ctx *z;
    cudaSetDevice(r->rank + 1);
    cfg = toy_config(r, w->stage);
    cfg.device = ZERO_DEVICE_CUDA;
    cfg.optim.update = update;
    cfg.optim.weight_decay = 0;
    cfg.optim.update_arg = &r->rank;
    cfg.checkpoint.save_async = w->async;
    cudaStreamCreateWithFlags((cudaStream_t *)&cfg.stream, cudaStreamNonBlocking);
    int err = toy_open(r, &m, &z, &cfg);
    if (!err)
        err = bare_step(&m, (cudaStream_t)cfg.stream, z, NULL);
    if (!err)
        err = zero_save(z, w->dir, NULL);
    if (!err)
        err = zero_save_wait(z, NULL);
    if (!err)
        err = zero_load(z, w->dir);
    if (err)
        toy_wrong(r, "stage %d: %s", w->stage, zero_last_error());
    unwrap(r, &m, &cfg, &z);
}

static void test_threads_choose_their_gpu(void **state)
{
    for (int k = 0; k < 4; k++) {
        struct work w = {.stage = k, .async = k % 2, .dir = "/tmp/zero-cuda-threads-XXXXXX"};
        struct toy_rank r[RANKS];
        char remove[96];
        assert_non_null(mkdtemp(w.dir));
        n_updates = n_misplaced = 0;
        run_ranks(RANKS, works_on_its_gpu, &w, r);
        snprintf(remove, sizeof remove, "rm -r %s", w.dir);
        assert_int_equal(system(remove), 0);
        assert_true(n_updates > 0);
        assert_int_equal(n_misplaced, 0);
        for (int i = 1; i <= RANKS; i++)
            assert_true(stand_in_has_context(i));
        if (stand_in_has_context(0))
            fail_msg("stage %d: a context was made on GPU 0, which no rank works on", k);
        nothing_wrong();
    }
}

/* --- capture --- */

enum { MOST_MS = 20000 };

/* Trains while the program captures another stream in the strictest mode. */
static void captures(struct toy_rank *r)
{
    struct toy m;
    struct zero_config cfg;
    struct zero_step_info info;
    zero_ctx *z = NULL;
    cudaStream_t own;
    cudaGraph_t graph = NULL;
    int err = wrap(r, 3, &m, &cfg, &z);
    cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking);
    cudaError_t began = cudaStreamBeginCapture(own, cudaStreamCaptureModeGlobal);
    int64_t from = toy_now_ms();
    for (int s = 0;
         !err && (s < 3 || (stand_in_calls("cudaEventQuery") < 20 && toy_now_ms() - from < MOST_MS)); s++)
        err = bare_step(&m, (cudaStream_t)cfg.stream, z, s % 2 ? &info : NULL);
    float values[8];
    if (!err)
        err = zero_read(z, 0, ZERO_VALUE_PARAM, 0, 8, values);
    cudaError_t ended = cudaStreamEndCapture(own, &graph);
    if (err)
        toy_wrong(r, "%s", zero_last_error());
    if (began || ended || !graph)
        toy_wrong(r, "the capture: %s, %s", cudaGetErrorName(began), cudaGetErrorName(ended));
    cudaGraphDestroy(graph);
    unwrap(r, &m, &cfg, &z);
    cudaStreamDestroy(own);
}

static void test_captures_are_not_disturbed(void **state)
{
    struct toy_rank r[RANKS];
    stand_in_fail(NULL, 0, cudaSuccess, false); /* resets the count */
    run_ranks(RANKS, captures, NULL, r);
    for (int i = 0; i < RANKS; i++)
        if (r[i].err)
            fail_msg("rank %d: %s", i, r[i].text);
    nothing_wrong();
}

/* --- queries that fail --- */

static pthread_barrier_t all_wrapped;

static void asks_in_vain(struct toy_rank *r)
{
    struct toy m;
    struct zero_config cfg;
    struct zero_step_info info;
    zero_ctx *z = NULL;
    int err = wrap(r, 2, &m, &cfg, &z);
    if (err)
        toy_wrong(r, "zero_wrap: %s", zero_last_error());
    pthread_barrier_wait(&all_wrapped);
    if (r->rank == 0)
        stand_in_fail("cudaEventQuery", *(const int *)r->arg, cudaErrorLaunchFailure, false);
    for (int s = 0; !err && s < 4; s++)
        err = bare_step(&m, (cudaStream_t)cfg.stream, z, s % 2 ? &info : NULL);
    toy_note(r, err);
    unwrap(r, &m, &cfg, &z);
}

/* The failing query is made by the model's thread of a single rank, or by whichever of two ranks' threads
 * asks first. */
static void test_a_query_that_fails_is_no_completion(void **state)
{
    for (int k = 1; k <= 5; k++) {
        int world = k <= 3 ? 1 : RANKS, nth = k <= 3 ? k : 1 + 4 * (k - 4), n_named = 0;
        struct toy_rank r[RANKS] = {0};
        pthread_barrier_init(&all_wrapped, NULL, (unsigned)world);
        run_ranks(world, asks_in_vain, &nth, r);
        pthread_barrier_destroy(&all_wrapped);
        for (int i = 0; i < world; i++)
            n_named += r[i].err && strstr(r[i].text, "cudaEventQuery: cudaErrorLaunchFailure");
        if (!n_named)
            fail_msg("world %d, query %d: %d \"%s\", %d \"%s\"", world, nth, r[0].err, r[0].text, r[1].err,
                     r[1].text);
        nccl_stand_in_end();
        stand_in_end(NULL); /* ignores what a failed rank left behind */
    }
}

/* --- ranks that fail alone --- */

enum { TOO_LONG_MS = 20000 };

enum cause { BY_UPDATE, BY_QUERY, BY_CHECK, N_CAUSES };

static const struct {
    const char *says;
    int code;
} causes[N_CAUSES] = {
    [BY_UPDATE] = {"the update callback returned 7 for tensor", ZERO_ERR_FAILED},
    [BY_QUERY] = {"cudaEventQuery: cudaErrorLaunchFailure", ZERO_ERR_SYSTEM},
    [BY_CHECK] = {"it wrote tensor embedding (element 7) outside its bracket", ZERO_ERR_ORDER},
};

struct failing {
    enum cause cause;
    int bad_rank; /* with BY_QUERY, any rank that asks first fails instead */
    bool leaves;  /* the failing rank closes its context at once; else after all ranks have the error */
    atomic_int n_reported;
};

struct optimizer {
    bool fails;
    int n;
};

static int updates(void *arg, const struct zero_update *u)
{
    struct optimizer *o = arg;
    return o->fails && ++o->n == TOY_TENSORS ? 7 : 0;
}

/* Trains until a call fails, which must be long before the timeout. */
static void trains_with_one_that_fails(struct toy_rank *r)
{
    struct failing *f = r->arg;
    struct toy m;
    struct zero_config cfg;
    struct zero_step_info info;
    struct optimizer o = {.fails = f->cause == BY_UPDATE && r->rank == f->bad_rank};
    zero_ctx *z;
    cudaSetDevice(r->rank + 1);
    cfg = toy_config(r, 3);
    cfg.device = ZERO_DEVICE_CUDA;
    cfg.launch.timeout_ms = TOO_LONG_MS;
    cfg.memory.prefetch = 1;
    cfg.debug.check = f->cause == BY_CHECK;
    cfg.optim.update = f->cause == BY_UPDATE ? updates : NULL;
    cfg.optim.weight_decay = 0;
    cfg.optim.update_arg = &o;
    cudaStreamCreateWithFlags((cudaStream_t *)&cfg.stream, cudaStreamNonBlocking);
    int err = toy_open(r, &m, &z, &cfg);
    if (err)
        toy_wrong(r, "zero_wrap: %s", zero_last_error());
    pthread_barrier_wait(&all_wrapped);
    if (f->cause == BY_QUERY && r->rank == f->bad_rank)
        stand_in_fail("cudaEventQuery", 5, cudaErrorLaunchFailure, false);
    int64_t from = toy_now_ms();
    for (int s = 0; !err && toy_now_ms() - from < TOO_LONG_MS; s++) {
        err = zero_begin(z, 0, ZERO_FORWARD);
        float *kept = m.param[0];
        if (!err)
            err = zero_end(z, 0, ZERO_FORWARD);
        cudaStreamSynchronize((cudaStream_t)cfg.stream);
        stand_in_touch();
        if (!err && f->cause == BY_CHECK && r->rank == f->bad_rank && s == 2)
            kept[7] = 1;
        if (!err)
            err = bare_step(&m, (cudaStream_t)cfg.stream, z, s % 2 ? &info : NULL);
    }
    r->ms = toy_now_ms() - from;
    toy_note(r, err);
    f->n_reported++;
    while (!f->leaves && f->n_reported < r->world && toy_now_ms() - from < TOO_LONG_MS)
        usleep(1000);
    unwrap(r, &m, &cfg, &z);
}

/* The other ranks get the failing rank's code and message long before their timeout, whether it stays or
 * leaves. */
static void test_a_failure_is_reported_to_all(void **state)
{
    for (int k = 0; k < N_CAUSES * MOST * 2; k++) {
        struct failing f = {
            .cause = k % N_CAUSES, .bad_rank = k / N_CAUSES % MOST, .leaves = k < N_CAUSES * MOST};
        int world = f.bad_rank < 2 && k % 2 ? 2 : MOST, n_found = 0;
        struct toy_rank r[MOST] = {0};
        pthread_barrier_init(&all_wrapped, NULL, (unsigned)world);
        run_ranks(world, trains_with_one_that_fails, &f, r);
        pthread_barrier_destroy(&all_wrapped);
        int finder = f.bad_rank;
        for (int i = 0; i < world; i++) {
            const char *found_by = strstr(r[i].text, " (found by rank ");
            if (r[i].err != causes[f.cause].code || !strstr(r[i].text, causes[f.cause].says))
                fail_msg("world %d, cause %d of rank %d: rank %d has %d \"%s\"", world, f.cause, f.bad_rank,
                         i, r[i].err, r[i].text);
            n_found += !found_by;
            if (!found_by && f.cause == BY_QUERY)
                finder = i;
        }
        assert_int_equal(n_found, 1);
        for (int i = 0; i < world; i++) {
            char text[32];
            snprintf(text, sizeof text, "(found by rank %d)", finder);
            if (strstr(r[i].text, text) ? i == finder : i != finder)
                fail_msg("world %d, rank %d failed, rank %d says \"%s\"", world, finder, i, r[i].text);
            printf("cause %d of rank %d, world %d: rank %d knew it after %lld ms\n", f.cause, finder, world,
                   i, (long long)r[i].ms);
        }
        nccl_stand_in_end();
        stand_in_end(NULL); /* ignores what a failed rank left behind */
    }
}

/* --- memory --- */

static void finds_no_room(struct toy_rank *r)
{
    struct toy m;
    struct zero_config cfg;
    zero_ctx *z = NULL;
    toy_note(r, wrap(r, 3, &m, &cfg, &z));
    unwrap(r, &m, &cfg, &z);
}

/* Memory for the plan's bytes is not enough. Allocations are in pieces of 2 MiB, and NCCL's communicators
 * take some before the plan does. The error comes before anything is allocated, with the plan's table. */
static void test_what_a_gpu_takes_is_counted(void **state)
{
    static const struct {
        int64_t device, comm;
        const char *says[3];
    } machine[] = {
        {64 << 20, 0, {NULL}},
        {64 << 20, 8 << 20, {NULL}},
        {3 << 20, 0, {"which has 3145728 free (", "as it is allocated, in pieces of 2097152)", "moments"}},
        {64 << 20,
         31 << 20,
         {"which has 2097152 free (", "after NCCL's communicators took 65011712", "moments"}},
    };
    struct stand_in_machine was = *stand_in_the_machine();
    for (size_t k = 0; k < sizeof machine / sizeof *machine; k++) {
        struct toy_rank r[RANKS];
        stand_in_the_machine()->device_bytes = machine[k].device;
        nccl_stand_in_the_machine()->comm_bytes = machine[k].comm;
        run_ranks(RANKS, finds_no_room, NULL, r);
        for (int i = 0; i < RANKS; i++) {
            if (r[i].err != (machine[k].says[0] ? ZERO_ERR_NOMEM : 0))
                fail_msg("machine %zu: code %d \"%s\"", k, r[i].err, r[i].text);
            for (int j = 0; j < 3 && machine[k].says[j]; j++)
                if (!strstr(r[i].text, machine[k].says[j]))
                    fail_msg("machine %zu: \"%s\" lacks \"%s\"", k, r[i].text, machine[k].says[j]);
        }
        nothing_wrong();
        *stand_in_the_machine() = was;
    }
}

/* --- the first operations of NCCL --- */

enum { LARGE = 1 << 20 };

static void gathers_much(struct toy_rank *r)
{
    static const struct zero_tensor shape = {.name = "w", .dtype = ZERO_F32, .shape = {LARGE}, .unit = 0};
    struct nccl_stand_in_counts opened, counts;
    struct zero_config cfg;
    zero_ctx *z = NULL;
    void *own = calloc(LARGE, sizeof(float)), *param = own, *grad = NULL;
    struct zero_tensor t = shape;
    t.param = &param;
    t.grad = &grad;
    cudaSetDevice(r->rank + 1);
    cfg = toy_config(r, 3);
    cfg.device = ZERO_DEVICE_CUDA;
    toy_note(r, zero_wrap(&z, &t, 1, &cfg));
    nccl_stand_in_counts(&opened);
    if (!r->err)
        toy_note(r, zero_begin(z, 0, ZERO_FORWARD));
    if (!r->err)
        toy_note(r, zero_end(z, 0, ZERO_FORWARD));
    nccl_stand_in_counts(&counts);
    if (r->err || counts.most_gathered != LARGE / RANKS * (int64_t)sizeof(float) ||
        opened.most_gathered != counts.most_gathered)
        toy_wrong(r, "%d \"%s\", %lld bytes gathered at most, %lld of them in zero_wrap", r->err, r->text,
                  (long long)counts.most_gathered, (long long)opened.most_gathered);
    zero_unwrap(&z);
    free(own);
}

/* zero_wrap has gathered as many bytes as any later gather, so NCCL has connected for it. */
static void test_the_first_gather_is_large(void **state)
{
    struct toy_rank r[RANKS];
    run_ranks(RANKS, gathers_much, NULL, r);
    nothing_wrong();
}

/* --- a call that does not return --- */

static atomic_bool let_go;
static atomic_int n_calls, n_left;

static int update_that_stands(void *arg, const struct zero_update *u)
{
    const struct toy_rank *r = arg;
    n_calls++;
    while (r->rank == 0 && !let_go)
        usleep(1000);
    return 0;
}

static void count_left(void *arg, const char *line)
{
    n_left += strstr(line, "the library's own thread has not returned") != NULL;
}

static void trains_with_one_that_stands(struct toy_rank *r)
{
    struct toy m;
    struct zero_config cfg;
    zero_ctx *z;
    cudaSetDevice(r->rank + 1);
    cfg = toy_config(r, 3);
    cfg.device = ZERO_DEVICE_CUDA;
    cfg.launch.timeout_ms = r->rank ? TOO_LONG_MS : 1000;
    cfg.optim.update = update_that_stands;
    cfg.optim.weight_decay = 0;
    cfg.optim.update_arg = r;
    cfg.debug.log = count_left;
    cudaStreamCreateWithFlags((cudaStream_t *)&cfg.stream, cudaStreamNonBlocking);
    int err = toy_open(r, &m, &z, &cfg);
    for (int s = 0; !err && s < 100; s++)
        err = bare_step(&m, (cudaStream_t)cfg.stream, z, NULL);
    toy_note(r, err);
    int again = zero_unwrap(&z);
    if (again != err || z)
        toy_wrong(r, "zero_unwrap returned %d after %d", again, err);
    cudaStreamDestroy((cudaStream_t)cfg.stream);
    toy_free(&m);
}

static int count_threads(const char *name)
{
    char command[128], line[32] = "";
    snprintf(command, sizeof command, "cat /proc/%d/task/*/comm 2>/dev/null | grep -cx %s", (int)getpid(),
             name);
    FILE *f = popen(command, "r");
    if (!f || !fgets(line, sizeof line, f))
        line[0] = 0;
    if (f)
        pclose(f);
    return atoi(line);
}

/* optim.update hangs on the library's thread. Every call returns an error that names it, zero_unwrap does not
 * wait for it, and the library calls nothing of the program afterwards. */
static void test_an_update_that_does_not_come_back(void **state)
{
    struct toy_rank r[RANKS] = {0};
    run_ranks(RANKS, trains_with_one_that_stands, NULL, r);
    if (r[0].err != ZERO_ERR_TIMEOUT ||
        !strstr(r[0].text, "the library's own thread has made no progress for ") ||
        !strstr(r[0].text, " ms: it is in update of unit ") ||
        !strstr(r[0].text, ", and has called optim.update"))
        fail_msg("rank 0: %d \"%s\"", r[0].err, r[0].text);
    if (!r[1].err)
        fail_msg("rank 1 trained on");
    assert_int_equal(n_left, 1);
    int n = n_calls;
    let_go = true;
    while (count_threads("zero-loop"))
        usleep(10000);
    assert_int_equal(n_calls, n);
    nccl_stand_in_end();
    stand_in_end(NULL); /* ignores the context that was left behind */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads_choose_their_gpu),
        cmocka_unit_test(test_captures_are_not_disturbed),
        cmocka_unit_test(test_what_a_gpu_takes_is_counted),
        cmocka_unit_test(test_the_first_gather_is_large),
        cmocka_unit_test(test_a_query_that_fails_is_no_completion),
        cmocka_unit_test(test_a_failure_is_reported_to_all),
        cmocka_unit_test(test_an_update_that_does_not_come_back),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
