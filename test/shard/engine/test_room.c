/* SPDX-License-Identifier: Apache-2.0 */
/* test_room.c: tests that the loop's thread never waits for a host stream. A rank is late in a step's
 * agreement, and the model has so many tensors that their updates do not fit on a stream. The loop must
 * still serve its sockets. Also, no job puts more on a stream than it asked room for.
 *
 * Each communicator has one rank of four. Its collectives do nothing, except that the agreement waits
 * until the test releases it, as if the other ranks were late. */
#include "kernels/host/host_device.h"
#include "shard/engine/check/observers.h"
#include "shard/engine/internal.h"
#include "test/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { UNITS = 8, MAX_TENSORS = 2400, WORLD = 4, GROUP = 2, N_JOBS = 64, LONG_MS = 60000 };

/* ---- a communicator whose operations do not complete ---- */

struct late_comm {
    struct zr_comm base;
    struct zr_device *dev;
    struct zr_first failure;
    _Atomic uint32_t alarm;
    atomic_bool *late;
};

static void nap(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

static void wait_for_others(void *arg)
{
    while (atomic_load(*(atomic_bool **)arg))
        nap();
}

static void nothing(void *arg)
{
}

static void free_arena(struct zr_arena *a)
{
    free(a->base);
    free(a);
}

static int arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out)
{
    struct zr_arena *a = *out = calloc(1, sizeof *a);
    *a = (struct zr_arena){.free = free_arena, .base = calloc(1, (size_t)bytes), .bytes = bytes, .n_held = 1};
    return 0;
}

/* An operation for each segment, as a communicator of one rank has: the most there are. */
static int put_nothing(struct zr_comm *c, struct zr_stream *s, int n)
{
    struct late_comm *l = (struct late_comm *)c;
    int err = 0;
    for (int i = 0; i < n && !err; i++)
        err = l->dev->ops->call(s, nothing, &l, sizeof l);
    return err;
}

static int run(struct zr_comm *c, struct zr_stream *s, const struct zr_comm_op *op)
{
    struct late_comm *l = (struct late_comm *)c;
    if (op->post.op == ZR_OP_AGREE)
        return l->dev->ops->call(s, wait_for_others, &l->late, sizeof l->late);
    return put_nothing(c, s, op->post.op == ZR_OP_EXCHANGE ? 1 : (int)op->post.n_seg);
}

static void abort_comm(struct zr_comm *c, int code, const char *why)
{
}

static const struct zr_comm_ops comm_ops = {
    .name = "late",
    .deterministic = true,
    .arena = arena,
    .run = run,
    .abort = abort_comm,
};

/* ---- a rank ---- */

struct rank {
    void *param[MAX_TENSORS], *grad[MAX_TENSORS];
    struct zr_options opt;
    struct zr_layout *layout;
    struct zr_plan *plan;
    struct zr_device *dev;
    struct late_comm comm[ZR_ROLES];
    struct zr_loop *loop;
    struct zr_engine e;
    atomic_bool late;
    /* unit 0 is used twice in each backward pass */
    bool is_used_twice;
    /* on the loop's thread; n_looks counts how often it served its sockets */
    uv_timer_t sockets;
    atomic_int n_looks;
};

static int update(void *arg, const struct zero_update *u)
{
    return 0;
}

static void on_sockets(uv_timer_t *t)
{
    atomic_fetch_add(&((struct rank *)t->data)->n_looks, 1);
}

static struct zr_options options(int stage, enum zr_hybrid hybrid)
{
    return (struct zr_options){.stage = stage,
                               .hybrid = hybrid,
                               .dp_shard = hybrid ? GROUP : 0,
                               .grad_scale = 1,
                               .grad_accum_steps = 1,
                               .optim = {{.lr_scale = 1, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f}},
                               .n_optims = 1,
                               .prefetch = 1,
                               .param_budget_bytes = -1,
                               .deterministic = true,
                               .timeout_ms = 1000};
}

/* With the program's own update, an update takes three operations. */
static void by_user(struct zr_options *opt)
{
    opt->update = update;
}

static void make_layout(struct rank *k, int n)
{
    struct zr_tensor *t = calloc((size_t)n, sizeof *t);
    for (int i = 0; i < n; i++) {
        char name[16];
        enum zero_optimizer kind = k->opt.update
                                       ? ZR_OPTIMIZER_NONE
                                       : (enum zero_optimizer)(1 + i / UNITS % (ZR_OPTIMIZER_COUNT - 1));
        snprintf(name, sizeof name, "t%d", i);
        t[i] = (struct zr_tensor){.name = strdup(name),
                                  .param = &k->param[i],
                                  .grad = &k->grad[i],
                                  .dtype = i % 3 ? ZERO_F32 : ZERO_BF16,
                                  .sum_dtype = i % 3 ? ZERO_F32 : k->opt.grad_sum_dtype,
                                  .optimizer = kind,
                                  .n_states = kind ? zr_optimizer_states(kind, 0.9f) : ZR_MAX_STATES,
                                  .n_elems = 64,
                                  .n_layers = 1,
                                  .unit = i % UNITS,
                                  .uses = k->is_used_twice && i == 0 ? 2 : 0};
    }
    int outer = k->opt.hybrid ? WORLD / GROUP : 1;
    bool in_place = zr_placement_asked(&k->opt).model_holds;
    assert_int_equal(zr_layout_make(t, n, WORLD / outer, outer, in_place, false, &k->layout), 0);
}

static struct rank *open_rank(int n_tensors, struct zr_options opt, bool is_used_twice)
{
    struct rank *k = calloc(1, sizeof *k);
    k->opt = opt;
    k->is_used_twice = is_used_twice;
    make_layout(k, n_tensors);
    assert_int_equal(zr_plan_make(k->layout, &k->opt, &k->plan), 0);
    assert_int_equal(zr_host_device_open(&k->dev), 0);
    return k;
}

static void open_comm(struct rank *k, enum zr_role role, int size, struct zr_engine_parts *parts)
{
    struct late_comm *c = &k->comm[role];
    *c = (struct late_comm){.dev = k->dev, .late = &k->late};
    c->base = (struct zr_comm){
        .ops = &comm_ops, .group = zr_group_of_all(0, size), .alarm = &c->alarm, .failure = &c->failure};
    parts->comm[role] = &c->base;
}

static void open_engine(struct rank *k)
{
    struct zr_engine_parts parts = {.dev = k->dev,
                                    .plan = k->plan,
                                    .opt = &k->opt,
                                    .loop = k->loop,
                                    .open_observers = zr_check_open_observers};
    bool groups = k->opt.hybrid;
    open_comm(k, ZR_ROLE_GATHER, groups ? GROUP : WORLD, &parts);
    open_comm(k, ZR_ROLE_REDUCE, groups ? GROUP : WORLD, &parts);
    parts.comm[ZR_ROLE_CONTROL] = parts.comm[ZR_ROLE_REDUCE];
    if (groups) {
        open_comm(k, ZR_ROLE_GATHER_OUTER, WORLD / GROUP, &parts);
        open_comm(k, ZR_ROLE_REDUCE_OUTER, WORLD / GROUP, &parts);
        open_comm(k, ZR_ROLE_CONTROL, WORLD, &parts);
    }
    assert_int_equal(zr_engine_open(&k->e, &parts), 0);
    assert_int_equal(zr_engine_allocate(&k->e), 0);
}

static void stop_sockets(void *arg)
{
    struct rank *k = arg;
    uv_close((uv_handle_t *)&k->sockets, NULL);
}

static void close_rank(struct rank *k, void (*on_stop)(void *arg))
{
    zr_loop_close(k->loop, on_stop, k);
    zr_engine_close(&k->e);
    for (int r = 0; r < ZR_ROLES; r++)
        zr_arena_drop(k->comm[r].base.held);
    zr_plan_free(k->plan);
    zr_layout_free(k->layout);
    k->dev->ops->close(k->dev);
    free(k);
}

static void call(struct rank *k, enum zr_core_event_kind kind, int unit, int backward)
{
    struct zr_core_event ev = {.kind = kind, .unit = unit, .phase = backward ? ZERO_BACKWARD : ZERO_FORWARD};
    if (zr_engine_call(&k->e, &ev))
        fail_msg("%s", zr_error_text());
}

static void run_step(struct rank *k)
{
    for (int i = 0; i < k->opt.grad_accum_steps; i++) {
        for (int u = 0; u < UNITS; u++) {
            call(k, ZR_EV_BEGIN, u, 0);
            call(k, ZR_EV_END, u, 0);
        }
        for (int u = UNITS - (k->is_used_twice ? 0 : 1); u >= 0; u--) {
            call(k, ZR_EV_BEGIN, u % UNITS, 1);
            call(k, ZR_EV_END, u % UNITS, 1);
        }
    }
    if (zr_engine_step(&k->e, 1e-3f, NULL))
        fail_msg("%s", zr_error_text());
}

/* Waits until is_so; the wait is bounded. */
static bool comes(bool (*is_so)(struct rank *k), struct rank *k)
{
    for (int i = 0; i < LONG_MS && !is_so(k); i++)
        nap();
    return is_so(k);
}

/* ---- a late rank ---- */

static bool all_issued(struct rank *k)
{
    return zr_loop_issued(k->loop, zr_last_job(&k->e));
}

/* Returns whether the loop has issued everything, or the reduce stream is nearly full. */
static bool is_far(struct rank *k)
{
    const struct zr_stream *s = k->e.reduce_stream;
    return all_issued(k) || atomic_load(&s->put.value) - atomic_load(&s->done.value) >= ZR_HOST_RING - 64;
}

static bool looks(struct rank *k)
{
    return atomic_load(&k->n_looks) > 3;
}

static bool looks_again(struct rank *k)
{
    atomic_store(&k->n_looks, 0);
    return comes(looks, k);
}

static void open_loop(struct rank *k)
{
    assert_int_equal(zr_loop_open(N_JOBS, zr_engine_issue, &k->e, &k->loop), 0);
    zr_loop_ask(k->loop, zr_engine_is_ready);
    uv_timer_init(zr_loop_uv(k->loop), &k->sockets);
    k->sockets.data = k;
    uv_timer_start(&k->sockets, on_sockets, 1, 1);
    open_engine(k);
    atomic_store(&k->late, true);
}

/* A step ends while other ranks are late. Its norm is at the front of the reduce stream, and the updates
 * of all tensors are queued behind it. */
static void sockets_are_served_behind_a_late_rank(void **state)
{
    static const int n_tensors[] = {10, 300, MAX_TENSORS};
    for (size_t i = 0; i < sizeof n_tensors / sizeof *n_tensors; i++)
        for (int more = 0; more < 4; more++) {
            struct zr_options opt = options(more & 1 ? 3 : 2, ZR_HYBRID_NONE);
            if (more & 2)
                by_user(&opt);
            struct rank *k = open_rank(n_tensors[i], opt, false);
            open_loop(k);
            assert_int_equal(zr_loop_start(k->loop, 0, NULL, NULL), 0);
            run_step(k);
            bool far = comes(is_far, k), served = far && looks_again(k);
            atomic_store(&k->late, false);
            bool issued = comes(all_issued, k);
            close_rank(k, stop_sockets);
            if (!far || !served || !issued)
                fail_msg("stage %d, %d tensors%s: %s", opt.stage, n_tensors[i],
                         more & 2 ? ", optim.update" : "",
                         !far || !issued ? "a job is not issued" : "the loop waits for the reduce stream");
        }
}

/* A job without room waits, and the loop does not. */
static void a_full_stream_holds_the_job_alone(void **state)
{
    struct rank *k = open_rank(10, options(3, ZR_HYBRID_NONE), false);
    const struct zr_action job = {.kind = ZR_ACT_LEAVE_OUT, .unit = 0};
    atomic_bool *late = &k->late;
    open_loop(k);
    assert_int_equal(k->dev->ops->call(k->e.reduce_stream, wait_for_others, &late, sizeof late), 0);
    for (uint64_t n = 1; n < k->e.reduce_stream->n_ring && zr_room_for(&k->e, &job); n++)
        assert_int_equal(k->dev->ops->call(k->e.reduce_stream, nothing, &late, sizeof late), 0);
    assert_int_equal(zr_loop_start(k->loop, 0, NULL, NULL), 0);
    zr_jobs_push(&k->e, &job);
    zr_loop_kick(k->loop);
    bool served = looks_again(k), held = !all_issued(k);
    atomic_store(&k->late, false);
    bool issued = comes(all_issued, k);
    close_rank(k, stop_sockets);
    assert_true(served && held && issued);
}

/* ---- room that a job needs ---- */

static struct zr_stream *stream_of(const struct rank *k, int i)
{
    struct zr_stream *const all[] = {k->e.reduce_stream, k->e.gather_stream, k->e.gather_outer_stream,
                                     k->e.reduce_outer_stream};
    return i < 4 ? all[i] : NULL;
}

static int64_t n_put(const struct zr_stream *s)
{
    return s ? (int64_t)atomic_load(&s->put.value) : 0;
}

/* Carries out a job, and counts what it puts on each stream. */
static void issue_counted(void *arg, const struct zr_job *job)
{
    struct rank *k = arg;
    enum zr_action_kind kind = (enum zr_action_kind)job->action.kind;
    int64_t before[4];
    for (int i = 0; i < 4; i++)
        before[i] = n_put(stream_of(k, i));
    zr_engine_issue(&k->e, job);
    for (int i = 0; i < 4; i++) {
        struct zr_stream *s = stream_of(k, i);
        int64_t put = n_put(s) - before[i];
        int64_t room = zr_room_of(&k->e, i == 0 ? kind : ZR_ACT_REDUCE, job->action.unit);
        if (put > room || (s && room + ZR_HOST_RING > (int64_t)s->n_ring))
            fail_msg(
                "stage %d, hybrid %d, %d tensors: %s puts %lld operations on stream %d of %lld, %lld are "
                "counted on",
                k->opt.stage, (int)k->opt.hybrid, k->layout->n_tensors, zr_action_name(kind), (long long)put,
                i, s ? (long long)s->n_ring : 0, (long long)room);
    }
}

static void pushed(void *arg)
{
}

static void awaited(void *arg, uint64_t number)
{
    struct rank *k = arg;
    while (!zr_loop_issued(k->loop, number))
        assert_true(zr_loop_issue_next(k->loop) > 0);
}

static void count_jobs(int n_tensors, struct zr_options opt, bool is_used_twice)
{
    struct rank *k = open_rank(n_tensors, opt, is_used_twice);
    const struct zr_loop_driver driver = {.pushed = pushed, .awaited = awaited, .arg = k};
    assert_int_equal(zr_loop_open_driven(N_JOBS, issue_counted, k, &driver, &k->loop), 0);
    open_engine(k);
    run_step(k);
    zr_jobs_push(&k->e, &(struct zr_action){.kind = ZR_ACT_SNAPSHOT, .unit = -1});
    awaited(k, zr_last_job(&k->e));
    close_rank(k, NULL);
}

/* Every placement, with each option that puts more operations on a stream than usual. */
static void no_job_takes_more_than_it_asks_for(void **state)
{
    static const struct {
        int stage;
        enum zr_hybrid hybrid;
    } all[] = {{0, ZR_HYBRID_NONE}, {1, ZR_HYBRID_NONE}, {2, ZR_HYBRID_NONE},
               {3, ZR_HYBRID_NONE}, {3, ZR_HSDP},        {3, ZR_HFSDP}};
    for (int n = UNITS; n <= 800; n *= 10)
        for (size_t i = 0; i < sizeof all / sizeof *all; i++)
            for (int more = 0; more < 32; more++) {
                struct zr_options opt = options(all[i].stage, all[i].hybrid);
                opt.save_async = opt.trace = true;
                opt.grad_accum_steps = more & 1 ? 5 : 1;
                if (more & 2)
                    opt.wire_dtype = ZERO_BF16;
                if (more & 4)
                    by_user(&opt);
                else if (more & 16)
                    opt.grad_sum_dtype = ZERO_BF16;
                count_jobs(n, opt, more & 8);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sockets_are_served_behind_a_late_rank),
        cmocka_unit_test(a_full_stream_holds_the_job_alone),
        cmocka_unit_test(no_job_takes_more_than_it_asks_for),
    };
    return cmocka_run_group_tests_name("room", tests, NULL, NULL);
}
