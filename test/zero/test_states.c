/* SPDX-License-Identifier: Apache-2.0 */
/* test_states.c: masters and moments in fewer bytes: every choice, with every optimizer. Tests that layouts
 * and devices give the same bits, that remainders are masters in fp32, and what reads, writes and skipped
 * steps do. Runs on the host, and on the GPU stand-in. */
#include "test/cmocka.h"
#include "test/stand_in/half.h"
#include "test/zero/sample.h"
#include "test/zero/toy_net.h"
#include "test/zero/where.h"
#include "zero/checkpoint/files.h"
#include "zero/context.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BIAS = 2, HEAD = 4, STATE_0 = ZERO_VALUE_STATE };

/* A run of the toy model in 4 micro-batches per step. */
struct setup {
    int stage, optimizer, masters, moments, n_steps;
    int64_t seed;
    bool gpu;
    /* step whose gradient is not finite; -1: none */
    int bad_step;
    /* step that is not made, from 1; 0: none */
    int left_out;
};

static const int optimizers[] = {ZERO_ADAMW, ZERO_ADAM, ZERO_SGD, ZERO_NESTEROV, ZERO_LION, ZERO_RMSPROP};
static const int n_states_of[] = {2, 2, 1, 1, 1, 1};
enum { N_OPTIMIZERS = sizeof optimizers / sizeof *optimizers };

static int states_of(int optimizer)
{
    int i = 0;
    while (optimizers[i] != optimizer)
        i++;
    return n_states_of[i];
}

static _Thread_local const struct zero_config *my_cfg;

static void wait_for_model(void)
{
    if (my_cfg)
        where_wait(my_cfg);
}

static struct zero_config config_of(struct toy_rank *r, const struct setup *s)
{
    struct zero_config cfg = toy_config(r, s->stage);
    cfg.grad_accum_steps = 4 / r->world;
    cfg.optim.optimizer = s->optimizer;
    cfg.optim.beta1 = 0.9f;
    cfg.optim.masters = s->masters;
    cfg.optim.moments = s->moments;
    cfg.memory.seed = s->seed;
    cfg.debug.log = toy_forget_line;
    return cfg;
}

static int micro_batches(struct toy_rank *r, struct toy *m, zero_ctx *z, int step, bool bad)
{
    for (int a = 0; a < 4 / r->world; a++) {
        OR_RETURN(toy_forward(m, z, true));
        for (int u = TOY_UNITS; u-- > 0;) {
            OR_RETURN(zero_begin(z, u, ZERO_BACKWARD));
            toy_wait();
            toy_add_gradient(m, u, step, a * r->world + r->rank);
            if (bad && u == 3)
                toy_poison_gradient(m, HEAD, INFINITY);
            OR_RETURN(zero_end(z, u, ZERO_BACKWARD));
        }
    }
    return 0;
}

/* Trains, and hashes all that zero_read gives, with the norms of all steps. */
static void train(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct zero_config cfg = config_of(r, s);
    struct zero_step_info info = {.t = 0};
    struct zero_stats stats;
    struct toy m;
    zero_ctx *z = NULL;
    uint64_t before = 0, after = 0, norms = 0;
    int err = 0;
    toy_make(&m);
    if (s->gpu)
        where_open(r->rank, &cfg);
    my_cfg = s->gpu ? &cfg : NULL;
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    for (int step = 0; !err && step < s->n_steps; step++) {
        const bool bad = step == s->bad_step;
        if (step + 1 == s->left_out)
            continue;
        TOY_TRY(micro_batches(r, &m, z, step, bad));
        if (bad)
            TOY_TRY(toy_hash(z, states_of(s->optimizer), &before));
        TOY_TRY(zero_step(z, 1e-2f, &info));
        if (bad)
            TOY_TRY(toy_hash(z, states_of(s->optimizer), &after));
        uint64_t bits;
        memcpy(&bits, &info.grad_norm, sizeof bits);
        if (!bad)
            norms = norms * 31 + bits;
        if (!err && info.skipped != bad)
            toy_wrong(r, "step %d: skipped %d", step, info.skipped);
    }
    if (!err && before != after)
        toy_wrong(r, "the skipped step changed weights, masters or states");
    TOY_TRY(toy_hash(z, states_of(s->optimizer), &r->hash));
    r->hash ^= norms;
    TOY_TRY(zero_get_stats(z, &stats));
    if (!err && (stats.masters != s->masters || stats.moments != s->moments))
        toy_wrong(r, "masters are %d, moments %d", stats.masters, stats.moments);
    if (!err &&
        (stats.allocated.total != stats.planned.total || stats.allocated.master != stats.planned.master ||
         stats.allocated.moments != stats.planned.moments))
        toy_wrong(r, "%lld bytes are allocated, but %lld are planned", (long long)stats.allocated.total,
                  (long long)stats.planned.total);
    zero_unwrap(&z);
    if (s->gpu)
        where_close(&cfg);
    my_cfg = NULL;
    toy_free(&m);
}

static uint64_t hash_of(struct setup s, int world)
{
    struct toy_rank r[MAX_TOY_RANKS];
    char what[96];
    snprintf(what, sizeof what, "world %d, stage %d, optimizer %d, masters %d, moments %d, gpu %d", world,
             s.stage, s.optimizer, s.masters, s.moments, s.gpu);
    toy_run(world, train, &s, r, what);
    for (int k = 1; k < world; k++)
        if (r[k].hash != r[0].hash)
            fail_msg("%s: ranks 0 and %d read different values", what, k);
    return r[0].hash;
}

/* Stages, worlds and groups of every choice agree, with a skipped step among them. */
static void layouts_and_devices_agree(void **state)
{
    for (int i = 0; i < N_OPTIMIZERS * 9; i++) {
        struct setup s = {.optimizer = optimizers[i / 9],
                          .masters = i / 3 % 3,
                          .moments = i % 3,
                          .n_steps = 4,
                          .bad_step = 1,
                          .seed = i};
        if (!sample_has() || (where_has_gpu && i % 4 > 1))
            continue;
        const uint64_t wanted = hash_of(s, 1);
        for (int world = 1; world <= TOY_HYBRID_WORLD; world *= 2)
            for (s.stage = 0; s.stage < TOY_STAGES; s.stage++) {
                if (!toy_has_stage(world, s.stage) || (s.stage + world + i) % (where_has_gpu ? 6 : 3))
                    continue;
                s.gpu = where_has_gpu;
                if (hash_of(s, world) != wanted)
                    fail_msg("optimizer %d, masters %d, moments %d: world %d at stage %d has other bits than "
                             "one rank of the host",
                             s.optimizer, s.masters, s.moments, world, s.stage);
            }
    }
}

/* Masters as remainders give the bits of fp32 masters, also after many steps, whatever moments are. */
static void remainders_are_masters(void **state)
{
    for (int i = 0; i < 6; i++) {
        struct setup s = {.stage = i % 4,
                          .optimizer = optimizers[i],
                          .moments = i % 3,
                          .n_steps = where_has_gpu ? 20 : 500,
                          .bad_step = 7,
                          .gpu = where_has_gpu};
        const uint64_t wanted = hash_of(s, 2);
        s.masters = ZERO_MASTERS_REMAINDER;
        if (hash_of(s, 2) != wanted)
            fail_msg("optimizer %d, moments %d: remainders differ from masters", s.optimizer, s.moments);
    }
}

/* The seed changes what is rounded at random, and nothing else. */
static void seeds(void **state)
{
    for (int masters = 0; masters < 3; masters++)
        for (int moments = 0; moments < 3; moments++) {
            struct setup s = {.optimizer = ZERO_ADAMW,
                              .masters = masters,
                              .moments = moments,
                              .n_steps = 3,
                              .bad_step = -1};
            const bool random = masters == ZERO_MASTERS_NONE || moments != ZERO_MOMENTS_F32;
            const uint64_t first = hash_of(s, 1);
            assert_true(hash_of(s, 1) == first);
            s.seed = (INT64_C(1) << 53) - 1;
            if ((hash_of(s, 1) != first) != random)
                fail_msg("masters %d, moments %d: the seed %s", masters, moments,
                         random ? "changes nothing" : "changes values");
        }
}

/* ---- noise of steps ---- */

/* A skipped step changes what later steps round at random, as a step that was made does, and nothing else. */
static void skipped_steps_count(void **state)
{
    for (int masters = 0; masters < 3; masters++)
        for (int moments = 0; moments < 3; moments++) {
            struct setup s = {
                .optimizer = ZERO_ADAMW, .masters = masters, .moments = moments, .n_steps = 4, .bad_step = 1};
            const bool random = masters == ZERO_MASTERS_NONE || moments != ZERO_MOMENTS_F32;
            const uint64_t skipped = hash_of(s, 1);
            s.bad_step = -1;
            s.left_out = 2;
            if ((hash_of(s, 1) != skipped) != random)
                fail_msg("masters %d, moments %d: a skipped step %s", masters, moments,
                         random ? "does not count" : "changes values");
        }
}

/* Each step takes 2^-10 from weights of 1, below which bf16 numbers are 2^-8 apart. So a step moves a weight
 * with probability 1/4, and 64 steps move it 16 times in the mean, with a deviation of 3.5. With the noise of
 * one step in all others, a weight would move in all steps or in none. */
static void steps_have_different_noise(void **state)
{
    enum { N = 512, N_STEPS = 64 };
    struct zero_config cfg = ZERO_CONFIG_INIT;
    uint16_t own[N], *weights = own, *grad = NULL, now[N];
    const struct zero_tensor t = {.name = "weights",
                                  .param = (void **)&weights,
                                  .grad = (void **)&grad,
                                  .shape = {N},
                                  .dtype = ZERO_BF16};
    zero_ctx *z = NULL;
    double sum = 0;
    for (int i = 0; i < N; i++)
        own[i] = bf16_from_float(1);
    cfg.optim.optimizer = ZERO_SGD;
    cfg.optim.beta1 = 0;
    cfg.optim.masters = ZERO_MASTERS_NONE;
    cfg.launch.world = 1;
    cfg.debug.log = toy_forget_line;
    assert_int_equal(zero_wrap(&z, &t, 1, &cfg), 0);
    for (int step = 0; step < N_STEPS; step++) {
        assert_int_equal(zero_begin(z, 0, ZERO_BACKWARD), 0);
        for (int i = 0; i < N; i++)
            grad[i] = bf16_from_float(1);
        assert_int_equal(zero_end(z, 0, ZERO_BACKWARD), 0);
        assert_int_equal(zero_step(z, 0x1p-10f, NULL), 0);
    }
    assert_int_equal(zero_read(z, 0, ZERO_VALUE_PARAM, 0, N, now), 0);
    for (int i = 0; i < N; i++) {
        const double moves = (1 - (double)bf16_to_float(now[i])) * 256;
        assert_true(moves >= 1 && moves <= 40);
        sum += moves;
    }
    assert_true(fabs(sum / N - 16) < 1);
    zero_unwrap(&z);
}

/* ---- reads and writes ---- */

/* Returns a number below 4. A state of squares has no negative ones. */
static float value(int kind, int64_t i)
{
    float x = i % 7 == 0 ? 0 : ldexpf(1 + (float)(i % 61) / 61, (int)(i % 5) - 3);
    return i % 2 && kind != STATE_0 + 1 ? -x : x;
}

/* Writes a value, reads it back, whole and from an odd element on, and checks that both agree. */
static int write_and_read(struct toy_rank *r, zero_ctx *z, int tensor, int kind, float *got)
{
    const int64_t n = toy_elems(tensor);
    float x[512], part[512];
    for (int64_t i = 0; i < n; i++)
        x[i] = value(kind, i);
    OR_RETURN(zero_write(z, tensor, kind, 0, n, x));
    OR_RETURN(zero_read(z, tensor, kind, 0, n, got));
    OR_RETURN(zero_read(z, tensor, kind, 37, n - 37, part));
    if (memcmp(part, got + 37, (size_t)(n - 37) * sizeof *part))
        toy_wrong(r, "tensor %d, value %d: a part of it reads differently", tensor, kind);
    return 0;
}

/* Whether y is x in this precision, rounded to nearest. Codes of squares are twice as fine as others. */
static bool is_near(int moments, int kind, float x, float y)
{
    if (moments == ZERO_MOMENTS_F32)
        return x == y;
    if (moments == ZERO_MOMENTS_BF16)
        return bf16_to_float(bf16_from_float(x)) == y;
    return (x == 0) == (y == 0) && fabsf(x - y) <= (kind == STATE_0 ? 0.035f : 0.0175f);
}

static void check_states(struct toy_rank *r, const struct setup *s, zero_ctx *z)
{
    const char *const blocks = "blocks of 32 elements";
    const bool q8 = s->moments == ZERO_MOMENTS_Q8;
    float got[512], x[64] = {0};
    int err = 0;
    for (int t = 0; !err && t < TOY_TENSORS; t++)
        for (int k = 0; !err && k < 2 && t != TOY_FROZEN; k++) {
            TOY_TRY(write_and_read(r, z, t, STATE_0 + k, got));
            for (int64_t i = 0; !err && i < toy_elems(t); i++)
                if (!is_near(s->moments, STATE_0 + k, value(STATE_0 + k, i), got[i]))
                    toy_wrong(r, "tensor %d, state %d: element %lld is %g, not %g", t, k, (long long)i,
                              (double)got[i], (double)value(STATE_0 + k, i));
        }
    /* A layer of the stacked tensor has 120 elements, and its last block 24. */
    TOY_TRY(zero_write(z, TOY_STACKED, STATE_0, 96, 24, x));
    TOY_TRY(zero_write(z, TOY_STACKED, STATE_0, 96, 24 + 32, x));
    const struct {
        int64_t first, n;
    } cut[] = {{0, 31}, {1, 31}, {96, 25}, {119, 1}, {128, 32}};
    for (size_t i = 0; !err && i < sizeof cut / sizeof *cut; i++) {
        const int code = zero_write(z, TOY_STACKED, STATE_0 + 1, cut[i].first, cut[i].n, x);
        if (q8)
            toy_expect(r, code, ZERO_ERR_ARG, blocks);
        else
            TOY_TRY(code);
    }
}

/* Weights are rounded from masters with ties away from zero. Masters beside weights are kept as they are. */
static void check_masters(struct toy_rank *r, const struct setup *s, zero_ctx *z)
{
    const float tie = 1 + 0x1p-8f;
    float x[257], got[257];
    uint16_t weights[257];
    int err = 0;
    for (int i = 0; i < 257; i++)
        x[i] = i == 3 ? tie : i == 4 ? -tie : i == 5 ? 0x1.fffffep0f : value(ZERO_VALUE_MASTER, i) * 1.7f;
    TOY_TRY(zero_write(z, HEAD, ZERO_VALUE_MASTER, 0, 257, x));
    TOY_TRY(zero_read(z, HEAD, ZERO_VALUE_MASTER, 0, 257, got));
    TOY_TRY(zero_read(z, HEAD, ZERO_VALUE_PARAM, 0, 257, weights));
    if (!err && (bf16_to_float(weights[3]) != 1 + 0x1p-7f || bf16_to_float(weights[4]) != -1 - 0x1p-7f ||
                 bf16_to_float(weights[5]) != 2))
        toy_wrong(r, "a tie was not rounded away from zero");
    for (int i = 0; !err && i < 257; i++)
        if (got[i] != (s->masters == ZERO_MASTERS_NONE ? bf16_to_float(weights[i]) : x[i]))
            toy_wrong(r, "master %d is %g, not %g", i, (double)got[i], (double)x[i]);
    /* A write of weights gives masters the same value. */
    TOY_TRY(zero_write(z, HEAD, ZERO_VALUE_PARAM, 0, 257, weights));
    TOY_TRY(zero_read(z, HEAD, ZERO_VALUE_MASTER, 0, 257, got));
    for (int i = 0; !err && i < 257; i++)
        if (got[i] != bf16_to_float(weights[i]))
            toy_wrong(r, "after a write of weights master %d is %g", i, (double)got[i]);
}

static void read_and_write(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct zero_config cfg = config_of(r, s);
    struct toy m;
    zero_ctx *z = NULL;
    int err = 0;
    toy_make(&m);
    where_open(r->rank, &cfg);
    my_cfg = &cfg;
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    if (!err)
        check_states(r, s, z);
    if (!err && s->masters + s->moments)
        check_masters(r, s, z);
    zero_unwrap(&z);
    where_close(&cfg);
    my_cfg = NULL;
    toy_free(&m);
}

static void reads_and_writes_convert(void **state)
{
    for (int i = 0; i < 9; i++)
        for (int world = 1; world <= TOY_HYBRID_WORLD; world++)
            for (int stage = 0; stage < TOY_STAGES; stage++) {
                struct setup s = {
                    .stage = stage, .optimizer = ZERO_ADAMW, .masters = i / 3, .moments = i % 3};
                struct toy_rank r[MAX_TOY_RANKS];
                if (!toy_has_stage(world, stage) || world == 3 || (where_has_gpu && (stage + i) % 3) ||
                    !sample_has())
                    continue;
                toy_run(world, read_and_write, &s, r, "reads and writes");
            }
}

/* ---- a full disk ---- */

static struct zr_files full_disk;

static int64_t has_no_space(void *arg, int fd, const void *buf, size_t n, int64_t at)
{
    return -ENOSPC;
}

/* The last rank cannot write its states in a step. All ranks get its error. */
static void fill_disk(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct zero_config cfg = config_of(r, s);
    const bool is_last = r->rank == r->world - 1;
    struct toy m;
    zero_ctx *z = NULL;
    int err = 0;
    cfg.memory.states = ZERO_STATES_FILE;
    cfg.memory.states_dir = "/tmp";
    toy_make(&m);
    where_open(r->rank, &cfg);
    my_cfg = &cfg;
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    if (!err && is_last)
        z->states->file.fs = &full_disk;
    for (int step = 0; !err && step < s->n_steps; step++) {
        err = micro_batches(r, &m, z, step, false);
        err = err ? err : zero_step(z, 1e-2f, NULL);
    }
    toy_expect(r, err, ZERO_ERR_IO, ": write: no space left on device");
    toy_expect(r, err, ZERO_ERR_IO, is_last ? "/tmp/" : "(found by rank ");
    zero_unwrap(&z);
    where_close(&cfg);
    my_cfg = NULL;
    toy_free(&m);
}

static void full_disks_are_reported(void **state)
{
    full_disk = zr_files_posix;
    full_disk.pwrite = has_no_space;
    for (int stage = 0; stage < 4; stage++)
        for (int world = 1; world <= 2; world++) {
            struct setup s = {.stage = stage, .optimizer = ZERO_ADAMW, .n_steps = 3};
            struct toy_rank r[MAX_TOY_RANKS];
            toy_run(world, fill_disk, &s, r, "a full disk");
        }
}

/* ---- refusals ---- */

static int no_update(void *arg, const struct zero_update *u)
{
    return 0;
}

/* A rank of tp has rows of 20 elements of "rows", and rows of 32 of "blocks". */
static void wrap_cut(struct toy_rank *r)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    float rows[5 * 20] = {0}, blocks[5 * 32] = {0};
    void *at[] = {rows, blocks}, *grad[2];
    struct zero_tensor t[] = {{.name = "blocks",
                               .param = &at[1],
                               .grad = &grad[1],
                               .shape = {5, 32},
                               .dtype = ZERO_F32,
                               .tp_cut = ZERO_TP_CUT(1)},
                              {.name = "rows",
                               .param = &at[0],
                               .grad = &grad[0],
                               .shape = {5, 20},
                               .dtype = ZERO_F32,
                               .tp_cut = ZERO_TP_CUT(1)}};
    zero_ctx *z = NULL;
    cfg.mesh.tp = 2;
    cfg.launch.rank = r->rank;
    cfg.launch.world = 2;
    cfg.launch.rendezvous = r->url;
    cfg.launch.timeout_ms = cfg.launch.start_timeout_ms = 30000;
    cfg.debug.log = toy_forget_line;
    cfg.optim.moments = ZERO_MOMENTS_Q8;
    int err = 0;
    toy_expect(r, zero_wrap(&z, t, 2, &cfg), ZERO_ERR_ARG, "(rows): moments is q8");
    cfg.optim.moments = ZERO_MOMENTS_BF16;
    TOY_TRY(zero_wrap(&z, t, 2, &cfg));
    zero_unwrap(&z);
}

static void impossible_choices_are_refused(void **state)
{
    struct toy_rank r[MAX_TOY_RANKS];
    toy_run(2, wrap_cut, NULL, r, "q8 with tp");
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct toy m;
    zero_ctx *z = NULL;
    struct zero_optim group = ZERO_OPTIM_INIT;
    cfg.optim_groups = &group;
    cfg.n_optim_groups = 1;
    group.update = no_update;
    group.masters = ZERO_MASTERS_NONE;
    toy_make(&m);
    assert_int_equal(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), ZERO_ERR_ARG);
    assert_non_null(strstr(zero_last_error(), "masters is none"));
    assert_non_null(strstr(zero_last_error(), "optim_groups[0]"));
    toy_free(&m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layouts_and_devices_agree),
        cmocka_unit_test(remainders_are_masters),
        cmocka_unit_test(seeds),
        cmocka_unit_test(skipped_steps_count),
        cmocka_unit_test(steps_have_different_noise),
        cmocka_unit_test(reads_and_writes_convert),
        cmocka_unit_test(full_disks_are_reported),
        cmocka_unit_test(impossible_choices_are_refused),
    };
    toy_wait = wait_for_model;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
