/* SPDX-License-Identifier: Apache-2.0 */
/* test_tp.c: tensor parallelism, with a model that is cut over the tp axis of a mesh. With equal tp, all
 * stages and divisions of the data give the same bits. With any tp, losses, norms and weights are close to a
 * reference in double that is not cut. */
#include "kernels/state_codes.h"
#include "test/cmocka.h"
#include "test/stand_in/half.h"
#include "test/zero/pipeline_ranks.h"
#include "test/zero/sample.h"
#include "test/zero/toy_net.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LAYERS = 3, C = 10, H = 12, ROWS = 2, TENSORS = 4 * LAYERS, STEPS = 4, MICRO = 4, MAX_WORLD = 8 };

#define REAL        double
#define NAME(x)     whole_##x
#define OWN_FIRST   0
#define OWN_END     (ROWS * C)
#define ENTER(x, p) (void)(x)
#define LEAVE(x, p) (void)(x)
#define BEGIN(l, p) (void)(l)
#define END(l, p)   (void)(l)
#include "test/zero/tp_net.inc"

#define REAL        float
#define NAME(x)     part_##x
#define OWN_FIRST   0
#define OWN_END     (ROWS * C)
#define SUM(x)      zero_all_reduce(arg, ZERO_AXIS_TP, x, x, ROWS *C, ZERO_F32, ZERO_SUM)
#define WHOLE(x)    zero_expect_equal(arg, ZERO_AXIS_TP, x, ROWS *C, ZERO_F32)
#define ENTER(x, p) OR_RETURN((p) == ZERO_FORWARD ? WHOLE(x) : SUM(x))
#define LEAVE(x, p) OR_RETURN((p) == ZERO_FORWARD ? SUM(x) : WHOLE(x))
#define BEGIN(l, p) OR_RETURN(zero_begin(arg, l, p))
#define END(l, p)   OR_RETURN(zero_end(arg, l, p))
#include "test/zero/tp_net.inc"

#include "test/zero/tp_reference.inc"

/* Returns weight i of a tensor of the whole model. Tensors are s, b, w1 and w2 of each layer. */
static double first_value(int tensor, int64_t i)
{
    uint32_t seed = 99u + 40503u * (uint32_t)(tensor * 1009 + i);
    draw(&seed), draw(&seed);
    double x = draw(&seed);
    return (float)(tensor % 4 == 0 ? 1 + 0.2 * x : 0.5 * x);
}

/* ---- one rank ---- */

struct model;

struct setup {
    int stage, tp;
    /* micro: micro-batches per step over all ranks; 0: one per rank. prefetch applies if it is not 0 */
    int micro, prefetch;
    const struct reference *want;
    bool check;
    /* changes what is wrapped; NULL: no change */
    void (*change)(struct zero_config *cfg, struct model *m, int part);
    /* the error of zero_wrap on every rank; NULL: none */
    int code;
    const char *says;
    /* selects one of several ways or rows of the rank's function */
    int way;
};

/* The library sets the net's pointers. */
struct model {
    struct part_net net;
    float own[TENSORS][C * H];
    struct zero_tensor table[TENSORS];
    char name[TENSORS][16];
};

static struct model *make_model(int tp, int part)
{
    static const char *const names[4] = {"s", "b", "w1", "w2"};
    struct model *m = calloc(1, sizeof *m);
    m->net.hidden = H / tp;
    for (int t = 0; t < TENSORS; t++) {
        struct part_layer *l = &m->net.layer[t / 4];
        float **const param[4] = {&l->s, &l->b, &l->w1, &l->w2};
        float **const grad[4] = {&l->ds, &l->db, &l->dw1, &l->dw2};
        *param[t % 4] = m->own[t];
        for (int64_t i = 0; i < n_elems(t, tp); i++)
            m->own[t][i] = (float)first_value(t, element_of(t, tp, part, i));
        snprintf(m->name[t], sizeof m->name[t], "%s%d", names[t % 4], t / 4);
        m->table[t] = (struct zero_tensor){.name = m->name[t],
                                           .param = (void **)param[t % 4],
                                           .grad = (void **)grad[t % 4],
                                           .shape = {n_elems(t, tp)},
                                           .dtype = ZERO_F32,
                                           .unit = t / 4,
                                           .tp_cut = t % 4 < 2 ? 0 : ZERO_TP_CUT(0)};
    }
    return m;
}

/* A rank's work between zero_wrap and zero_unwrap. Returns the first error. */
typedef int rank_fn(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at);

struct job {
    struct setup *s;
    rank_fn *fn;
};

static void run_rank(struct toy_rank *r)
{
    const struct job *j = r->arg;
    const struct setup *s = r->arg = j->s;
    struct zero_config cfg = toy_config(r, s->stage);
    struct place at = {0};
    zero_ctx *z = NULL;
    cfg.debug.log = toy_forget_line;
    cfg.optim.optimizer = ZERO_SGD;
    cfg.optim.weight_decay = 0;
    cfg.debug.check = s->check;
    int err = pipeline_place(&cfg, s->stage, 1, r->world / s->tp, s->tp, &at);
    if (!err && (at.dp * s->tp + at.tp != r->rank || at.n_dp * s->tp != r->world))
        toy_wrong(r, "rank %d of %d is %d of %d in dp and %d in tp", r->rank, r->world, at.dp, at.n_dp,
                  at.tp);
    if (s->micro) {
        cfg.grad_accum_steps = s->micro / at.n_dp;
        cfg.memory.prefetch = s->prefetch;
    }
    struct model *m = make_model(s->tp, at.tp);
    if (s->change)
        s->change(&cfg, m, at.tp);
    void *first = *m->table[0].param;
    err = FIRST_ERROR(err, zero_wrap(&z, m->table, TENSORS, &cfg));
    if (s->says)
        toy_expect(r, err, s->code, s->says);
    else
        toy_note(r, FIRST_ERROR(err, j->fn ? j->fn(r, m, z, &at) : 0));
    if (s->says && (z || *m->table[0].param != first))
        toy_wrong(r, "something is left of a context that did not come about");
    zero_unwrap(&z);
    free(m);
}

/* Wraps on `world` ranks, and calls fn unless it is NULL. Fails the test unless the outcome is that of s. */
static void run(struct setup *s, int world, rank_fn *fn, const char *what, struct toy_rank r[MAX_WORLD])
{
    struct job j = {s, fn};
    toy_run(world, run_rank, &j, r, what);
}

/* Does the same at stages 0 and 3, with two tensor-parallel ranks. */
static void run_at_both_ends(struct setup s, int world, rank_fn *fn, const char *what)
{
    struct toy_rank r[MAX_WORLD];
    s.tp = 2;
    for (s.stage = 0; s.stage <= 3; s.stage += 3)
        run(&s, world, fn, what, r);
}

static int one_step(struct toy_rank *r, struct model *m, zero_ctx *z, int step, int dp, int n_dp)
{
    const struct setup *s = r->arg;
    double x[ROWS * C], target[ROWS * C], loss = 0;
    struct zero_step_info info;
    for (int k = 0; k < MICRO / n_dp; k++) {
        draw_batch(step * MICRO + k * n_dp + dp, x, target);
        OR_RETURN(part_forward(&m->net, z, x, target));
        OR_RETURN(part_backward(&m->net, z, target));
        loss += m->net.loss / (MICRO / n_dp);
    }
    OR_RETURN(zero_carry(z, &loss, 1));
    OR_RETURN(zero_step(z, (float)LR, &info));
    OR_RETURN(zero_mean(z, &loss, 1));
    if (!near(loss, s->want->loss[step], 1e-5) || !near(info.carried[0], loss, 1e-12))
        toy_wrong(r, "step %d: loss %.9g, carried %.9g, instead of %.9g", step, loss, info.carried[0],
                  s->want->loss[step]);
    if (!near(info.grad_norm, s->want->norm[step], 1e-5))
        toy_wrong(r, "step %d: norm %.9g instead of %.9g", step, info.grad_norm, s->want->norm[step]);
    return 0;
}

/* Hashes this rank's weights, which must be close to the reference. */
static int look_at_weights(struct toy_rank *r, zero_ctx *z, int part)
{
    const struct setup *s = r->arg;
    uint64_t hash = 1469598103934665603u;
    for (int t = 0; t < TENSORS; t++) {
        float w[C * H];
        memset(w, 0xff, sizeof w);
        OR_RETURN(zero_read(z, t, ZERO_VALUE_PARAM, 0, n_elems(t, s->tp), w));
        for (int64_t i = 0; i < n_elems(t, s->tp); i++) {
            double want = s->want->w[t][element_of(t, s->tp, part, i)];
            hash = (hash ^ zr_float_bits(w[i])) * 1099511628211u;
            if (!near((double)w[i], want, 1e-5))
                toy_wrong(r, "element %d of tensor %d of part %d is %.9g instead of %.9g", (int)i, t, part,
                          (double)w[i], want);
        }
    }
    r->hash = hash;
    return 0;
}

static int train(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    struct zero_stats stats;
    for (int step = 0; step < STEPS; step++)
        OR_RETURN(one_step(r, m, z, step, at->dp, at->n_dp));
    OR_RETURN(look_at_weights(r, z, at->tp));
    OR_RETURN(zero_get_stats(z, &stats));
    pipeline_check_memory(r, &stats, NULL);
    return 0;
}

/* ---- tests ---- */

static void the_same_bits_however_data_is_cut(void **state)
{
    struct setup s = {.want = *state, .micro = MICRO};
    for (s.tp = 1; s.tp <= 4; s.tp++) {
        uint64_t hash[4] = {0};
        int n = 0;
        for (int world = s.tp; world <= MAX_WORLD; world += s.tp)
            for (s.stage = 0; s.stage < TOY_STAGES; s.stage++) {
                int n_dp = world / s.tp;
                if (MICRO % n_dp || (s.stage > 3 && n_dp != 4))
                    continue;
                struct toy_rank r[MAX_WORLD];
                char what[96];
                s.prefetch = n % 3;
                s.check = n % 4 == 3;
                snprintf(what, sizeof what, "tp %d, world %d, stage %d, prefetch %d, check %d", s.tp, world,
                         s.stage, s.prefetch, s.check);
                n++;
                if (!sample_has())
                    continue;
                run(&s, world, train, what, r);
                for (int k = 0; k < world; k++) {
                    uint64_t *of_part = &hash[k % s.tp];
                    *of_part = *of_part ? *of_part : r[k].hash;
                    if (*of_part != r[k].hash)
                        fail_msg("%s: part %d of rank %d has other bits", what, k % s.tp, k);
                }
            }
        assert_true(n >= 8);
    }
}

/* ---- sums, maxima and broadcasts ---- */

enum { MAX_ELEMS = 600001 };

/* Returns an element on a tensor-parallel rank. Some are large and of both signs. */
static float element(int part, int64_t i, bool bf16)
{
    uint32_t seed = 31u * (uint32_t)part + 2246822519u * (uint32_t)i;
    draw(&seed);
    double x = draw(&seed) * (i % 7 ? 1 : 4096);
    return bf16 ? (float)(int)(x * 64) : (float)x; /* most have at most 8 bits, so sums of few are exact */
}

static double get(const void *x, int64_t i, bool bf16)
{
    return (double)(bf16 ? bf16_to_float(((const uint16_t *)x)[i]) : ((const float *)x)[i]);
}

static void put(void *x, int64_t i, bool bf16, float value)
{
    if (bf16)
        ((uint16_t *)x)[i] = bf16_from_float(value);
    else
        ((float *)x)[i] = value;
}

static int check_sum(struct toy_rank *r, zero_ctx *z, int64_t n, bool bf16, bool in_place, void *src,
                     void *dst)
{
    const size_t size = bf16 ? 2 : 4;
    uint64_t bad = 0;
    memset(dst, 0xff, MAX_ELEMS * size);
    for (int64_t i = 0; i < n; i++)
        put(src, i, bf16, element(r->rank, i, bf16));
    void *to = in_place ? src : dst;
    OR_RETURN(zero_all_reduce(z, ZERO_AXIS_TP, to, src, n, bf16 ? ZERO_BF16 : ZERO_F32, ZERO_SUM));
    for (int64_t i = 0; i < n; i++) {
        double sum = 0, size_of = 1e-30;
        for (int p = 0; p < r->world; p++) {
            double x =
                (double)(bf16 ? bf16_to_float(bf16_from_float(element(p, i, true))) : element(p, i, false));
            sum += x;
            size_of += fabs(x);
        }
        double got = get(to, i, bf16);
        bad += !(fabs(got - sum) <= size_of * (bf16 ? 0x1p-8 : 0x1p-22));
        r->hash = (r->hash ^ (uint64_t)(got * 1024)) * 1099511628211u;
    }
    const unsigned char *behind = (const unsigned char *)dst + (in_place ? 0 : (size_t)n * size);
    for (int k = 0; k < 64; k++)
        bad += behind[k] != 0xff;
    if (bad)
        toy_wrong(r, "sum of %lld, bf16 %d, in place %d: %llu elements are wrong", (long long)n, bf16,
                  in_place, (unsigned long long)bad);
    return 0;
}

static int check_most(struct toy_rank *r, zero_ctx *z, int64_t n, bool bf16, bool in_place, void *src,
                      void *dst)
{
    int64_t bad = 0, nan_at = n / 2;
    for (int64_t i = 0; i < n; i++)
        put(src, i, bf16, i == nan_at && r->rank == r->world - 1 ? NAN : element(r->rank, i, bf16));
    void *to = in_place ? src : dst;
    OR_RETURN(zero_all_reduce(z, ZERO_AXIS_TP, to, src, n, bf16 ? ZERO_BF16 : ZERO_F32, ZERO_MAX));
    for (int64_t i = 0; i < n; i++) {
        double got = get(to, i, bf16), most = -INFINITY;
        for (int p = 0; p < r->world; p++) {
            float x = element(p, i, bf16);
            most = fmax(most, (double)(bf16 ? bf16_to_float(bf16_from_float(x)) : x));
        }
        bad += i == nan_at ? got == got : got != most;
    }
    if (bad)
        toy_wrong(r, "maximum of %lld, bf16 %d, in place %d: %lld elements are wrong", (long long)n, bf16,
                  in_place, (long long)bad);
    return 0;
}

static int check_broadcast(struct toy_rank *r, zero_ctx *z, int64_t bytes, int root, unsigned char *x)
{
    int64_t bad = 0;
    for (int64_t i = 0; i < bytes + 8; i++)
        x[i] = (unsigned char)(i * 7 + r->rank * 31);
    OR_RETURN(zero_broadcast(z, ZERO_AXIS_TP, root, x, bytes));
    for (int64_t i = 0; i < bytes + 8; i++)
        bad += x[i] != (unsigned char)(i * 7 + (i < bytes ? root : r->rank) * 31);
    if (bad)
        toy_wrong(r, "broadcast of %lld bytes of rank %d: %lld are wrong", (long long)bytes, root,
                  (long long)bad);
    return 0;
}

/* Checks calls on an axis of one rank, which copy. */
static int check_copies(struct toy_rank *r, zero_ctx *z, void *src, void *dst)
{
    for (int way = 0; way < 4; way++) {
        memset(src, 0x3c + way, 1024);
        memset(dst, 0xff, 1032);
        if (way < 2)
            OR_RETURN(zero_all_reduce(z, ZERO_AXIS_CP, dst, src, 512, ZERO_BF16, way ? ZERO_MAX : ZERO_SUM));
        else if (way == 2)
            OR_RETURN(zero_all_gather(z, ZERO_AXIS_CP, dst, src, 128, ZERO_I64));
        else
            OR_RETURN(zero_reduce_scatter(z, ZERO_AXIS_CP, dst, src, 256, ZERO_F32));
        OR_RETURN(zero_expect_equal(z, ZERO_AXIS_CP, src, 256 + r->rank, ZERO_I32));
        OR_RETURN(zero_broadcast(z, ZERO_AXIS_CP, 0, dst, 1024 + r->rank));
        OR_RETURN(zero_broadcast(z, ZERO_AXIS_PP, 0, dst, 1024 + r->rank));
        if (memcmp(src, dst, 1024) || ((unsigned char *)dst)[1024] != 0xff)
            toy_wrong(r, "axis of one rank, way %d: not copied", way);
    }
    return 0;
}

static int add_up(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    static const int64_t sizes[] = {0, 1, 2, 31, 32, 33, 128, 1000, 262143, 262144, 262145, MAX_ELEMS - 64};
    static char memory[4][2][MAX_ELEMS * 4];
    void *src = memory[r->rank][0], *dst = memory[r->rank][1];
    struct zero_stats stats;
    int64_t n_summed = 0;
    OR_RETURN(zero_get_stats(z, &stats));
    if (stats.tp_bytes || stats.traffic.wire_bytes) /* traffic of zero_wrap's comparisons does not count */
        toy_wrong(r, "%lld and %lld bytes were received before anything was called",
                  (long long)stats.tp_bytes, (long long)stats.traffic.wire_bytes);
    r->hash = 1;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int way = 0; way < 4; way++) {
            bool bf16 = way & 1, in_place = way & 2;
            OR_RETURN(check_sum(r, z, sizes[i], bf16, in_place, src, dst));
            if (way == 0 || way == 3 || sizes[i] < 2000)
                OR_RETURN(check_most(r, z, sizes[i], bf16, in_place, src, dst));
            if (way == 0)
                OR_RETURN(check_broadcast(r, z, sizes[i] * 3, (int)i % r->world, src));
            n_summed += sizes[i];
        }
    /* 0 and -0 are equal in comparisons but have different bits. */
    float zeros[2] = {r->rank ? -0.0f : 0.0f, r->rank ? 0.0f : -0.0f};
    uint32_t bits[2];
    OR_RETURN(zero_all_reduce(z, ZERO_AXIS_TP, zeros, zeros, 2, ZERO_F32, ZERO_MAX));
    memcpy(bits, zeros, sizeof bits);
    r->hash = (r->hash ^ bits[0] ^ bits[1] >> 1) * 1099511628211u;
    OR_RETURN(check_copies(r, z, src, dst));
    OR_RETURN(zero_get_stats(z, &stats));
    /* A rank receives at least its part of each piece from the others. */
    if (stats.place.n_tp != r->world || (r->world > 1 ? stats.tp_bytes < n_summed : stats.tp_bytes != 0))
        toy_wrong(r, "tp is %lld, of which %lld bytes were received", (long long)stats.place.n_tp,
                  (long long)stats.tp_bytes);
    return 0;
}

static void sums_and_maxima(void **state)
{
    for (int world = 1; world <= 4; world++) {
        struct setup s = {.stage = 2, .tp = world};
        struct toy_rank r[MAX_WORLD];
        run(&s, world, add_up, "sums", r);
        for (int k = 1; k < world; k++)
            assert_true(r[k].hash == r[0].hash); /* every rank has the same bits */
    }
}

/* ---- log lines ---- */

static _Atomic int n_reported;

static void count_line(void *arg, const char *line)
{
    n_reported += strstr(line, "tp is 2, but no tensor has tp_cut") != NULL;
}

static void cut_nothing(struct zero_config *cfg, struct model *m, int part)
{
    cfg->debug.log = count_line;
    for (int t = 0; t < TENSORS; t++) {
        m->table[t].tp_cut = 0;
        for (int64_t i = 0; i < n_elems(t, 2); i++) /* so they are equal on both ranks */
            m->own[t][i] = (float)first_value(t, i);
    }
}

static void a_table_without_parts(void **state)
{
    struct setup s = {.stage = 3, .tp = 2, .change = cut_nothing};
    struct toy_rank r[MAX_WORLD];
    run(&s, 2, NULL, "no parts", r);
    assert_int_equal(n_reported, 1);
}

/* ---- what is refused ---- */

#define SAYS(call, code, text)                                                                               \
    do {                                                                                                     \
        assert_int_equal(call, code);                                                                        \
        if (!strstr(zero_last_error(), text))                                                                \
            fail_msg("%s: \"%s\" is not in \"%s\"", #call, text, zero_last_error());                         \
    } while (0)

/* Tables that are wrong about how a tensor is cut. */
static void cuts_that_are_refused(void **state)
{
    static float w[24], *param = w, *grad;
    static const struct {
        int64_t shape[3];
        int32_t cut, blocks;
        int64_t size;
        uint32_t flags;
        const char *says;
    } rows[] = {
        {{4, 6}, -1, 0, 0, 0, "tp_cut is -1; allowed: 0, or ZERO_TP_CUT(0) to ZERO_TP_CUT(1)"},
        {{4, 6},
         3,
         0,
         0,
         0,
         "tp_cut is 3; allowed: 0, or ZERO_TP_CUT(0) to ZERO_TP_CUT(1), a dimension of the tensor"},
        {{4, 6},
         ZERO_TP_CUT(0),
         0,
         0,
         ZERO_STACKED,
         "tp_cut is 1; allowed: 0, or ZERO_TP_CUT(1) to ZERO_TP_CUT(1), a dimension of a layer"},
        {{4, 6},
         ZERO_TP_CUT(1),
         4,
         0,
         0,
         "tp_blocks is 4; allowed: 0, or a number that divides the 6 of dimension 1"},
        {{4, 6}, ZERO_TP_CUT(1), -1, 0, 0, "tp_blocks is -1"},
        {{4, 6}, 0, 2, 0, 0, "tp_blocks or tp_size is set, but tp_cut is 0"},
        {{4, 6}, 0, 0, 4, 0, "tp_blocks or tp_size is set, but tp_cut is 0"},
        {{4, 6}, ZERO_TP_CUT(1), 0, 6, 0, "tp_size is 6; allowed: 0, or shape[0] of the whole tensor"},
        {{4, 6}, ZERO_TP_CUT(0), 2, 4, 0, "tp_size is 4; allowed: 0, or shape[0] of the whole tensor"},
        {{4, 6}, ZERO_TP_CUT(0), 0, -4, 0, "tp_size is -4; allowed"},
        {{4, 6}, ZERO_TP_CUT(0), 0, 3, 0, "tp_size is 3, but shape[0] is 4 on 1 ranks of tp; allowed: 4"},
        {{4, 6}, ZERO_TP_CUT(0), 0, 5, 0, "tp_size is 5, but shape[0] is 4 on 1 ranks of tp; allowed: 4"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct zero_config cfg = ZERO_CONFIG_INIT;
        struct zero_plan_info plan;
        struct zero_tensor t = {
            .name = "w", .param = (void **)&param, .grad = (void **)&grad, .dtype = ZERO_F32};
        memcpy(t.shape, rows[i].shape, sizeof rows[i].shape);
        t.tp_cut = rows[i].cut;
        t.tp_blocks = rows[i].blocks;
        t.tp_size = rows[i].size;
        t.flags = rows[i].flags;
        SAYS(zero_plan(&t, 1, &cfg, &plan), ZERO_ERR_ARG, rows[i].says);
    }
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_plan_info plan;
    struct zero_tensor t = {.name = "w",
                            .param = (void **)&param,
                            .shape = {4},
                            .dtype = ZERO_F32,
                            .flags = ZERO_BUFFER,
                            .tp_cut = ZERO_TP_CUT(0)};
    SAYS(zero_plan(&t, 1, &cfg, &plan), ZERO_ERR_ARG, "tp_cut is set, but a ZERO_BUFFER is not cut");
    t.tp_cut = 0;
    t.flags |= ZERO_WHOLE;
    SAYS(zero_plan(&t, 1, &cfg, &plan), ZERO_ERR_ARG,
         "tensors[0] (w): flags is 0x120; allowed with ZERO_BUFFER: no other flag");
}

static void axes_that_are_refused(void **state)
{
    static const struct {
        struct zero_mesh mesh;
        int code;
        const char *says;
    } rows[] = {
        {{1, 1, 0, 1, 0}, ZERO_ERR_ARG, "tp is 0; allowed: 1 to 64"},
        {{0, 1, 0, 1, 1}, ZERO_ERR_ARG, "pp is 0; allowed: 1 and more"},
        {{1, 1, 0, 0, 1}, ZERO_ERR_ARG, "cp is 0; allowed: 1 to 64"},
        {{1, 0, 0, 1, 1}, ZERO_ERR_ARG, "dp_replicate is 0; allowed: 1 and more; auto (-1)"},
        {{1, 1, -1, 1, 1}, ZERO_ERR_ARG, "dp_shard is -1; allowed: 1 and more, or 0"},
        {{1, 1, 4, 1, 3}, ZERO_ERR_ARG, "do not multiply to the world of 8 ranks"},
        {{1, 1, 0, 1, 3},
         ZERO_ERR_ARG,
         "the axes of mesh (pp 1, dp_replicate 1, dp_shard 0, cp 1, tp 3) do not divide the world of 8 "
         "ranks"},
        {{1, 1, 4, 1, 1}, ZERO_ERR_ARG, "do not multiply to the world of 8 ranks"},
        {{1, 1, 2147483647, 1, 64}, ZERO_ERR_ARG, "do not multiply"},
        {{1, 1, 0, 1, 65}, ZERO_ERR_ARG, "tp is 65; allowed: 1 to 64"},
        {{2147483647, 2147483647, 0, 1, 1}, ZERO_ERR_ARG, "do not divide"},
        {{1, ZERO_AUTO, 0, 1, 3}, ZERO_ERR_ARG, "dp_replicate auto, dp_shard 0, cp 1, tp 3) do not divide"},
        {{1, ZERO_AUTO, 4, 1, 1}, ZERO_ERR_ARG, "dp_shard is 4, but dp_replicate auto"},
        {{1, 1, 0, 3, 1}, ZERO_ERR_ARG, "dp_shard 0, cp 3, tp 1) do not divide the world of 8 ranks"},
        {{1, 1, 2, 2, 1}, ZERO_ERR_ARG, "do not multiply to the world of 8 ranks"},
    };
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_place p = {.rank = -7};
    struct model *model = make_model(2, 1);
    struct zero_plan_info plan, whole;
    cfg.launch.world = 8;
    cfg.launch.rank = 5;
    cfg.launch.rendezvous = "tcp://127.0.0.1:1";
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        cfg.mesh = rows[i].mesh;
        SAYS(zero_find_place(&cfg, &p), rows[i].code, rows[i].says);
        assert_non_null(strstr(zero_last_error(), "zero_find_place"));
        assert_int_equal(p.rank, -7);
        SAYS(zero_plan(model->table, TENSORS, &cfg, &plan), rows[i].code, rows[i].says);
    }
    SAYS(zero_find_place(&cfg, NULL), ZERO_ERR_ARG, "out is NULL");

    cfg.mesh = (struct zero_mesh){1, 2, 0, 1, 2};
    cfg.stage = 3;
    assert_int_equal(zero_plan(model->table, TENSORS, &cfg, &plan), 0);
    assert_true(plan.world == 4 && plan.dp_shard == 2 && plan.hybrid == ZERO_HSDP);
    cfg.mesh.tp = 1;
    cfg.launch.world = 4;
    cfg.launch.rank = 0;
    assert_int_equal(zero_plan(model->table, TENSORS, &cfg, &whole), 0);
    assert_true(plan.bytes.comm == whole.bytes.comm + (3192 << 10)); /* buffers for activations */
    assert_true(plan.bytes.total - plan.bytes.comm - plan.bytes.exchange ==
                whole.bytes.total - whole.bytes.comm - whole.bytes.exchange);
    cfg.mesh.tp = 2;
    cfg.device = ZERO_DEVICE_CUDA;
    assert_int_equal(zero_plan(model->table, TENSORS, &cfg, &plan), 0);
    assert_true(plan.bytes.comm > whole.bytes.comm + (3192 << 10)); /* NCCL's packing, too */
    cfg.device = ZERO_DEVICE_HOST;
    cfg.launch.backend = ZERO_BACKEND_MPI; /* also needs 2 MiB for chunks of sums */
    assert_int_equal(zero_plan(model->table, TENSORS, &cfg, &plan), 0);
    assert_true(plan.bytes.comm >= whole.bytes.comm + (3192 << 10) + (2 << 20));
    free(model);
}

static int sum_over(zero_ctx *z, enum zero_axis axis, float *dst, const float *src, int64_t n)
{
    return zero_all_reduce(z, axis, dst, src, n, ZERO_F32, ZERO_SUM);
}

static int sum(zero_ctx *z, float *dst, const float *src, int64_t n)
{
    return sum_over(z, ZERO_AXIS_TP, dst, src, n);
}

static int refuse(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    float x[4] = {0};
    toy_expect(r, sum_over(NULL, ZERO_AXIS_TP, x, x, 4), ZERO_ERR_ARG, "zero_all_reduce: z is NULL");
    toy_expect(r, sum_over(z, ZERO_AXIS_PP, x, x, 4), ZERO_ERR_ARG,
               "zero_all_reduce: axis is 3; allowed: ZERO_AXIS_TP, ZERO_AXIS_CP");
    toy_expect(r, sum_over(z, (enum zero_axis)0, x, x, 4), ZERO_ERR_ARG, "axis is 0");
    toy_expect(r, sum(z, x, NULL, 4), ZERO_ERR_ARG, "zero_all_reduce: src is NULL");
    toy_expect(r, sum(z, NULL, x, 4), ZERO_ERR_ARG, "zero_all_reduce: dst is NULL");
    toy_expect(r, sum(z, x, x, -1), ZERO_ERR_ARG, "zero_all_reduce: n is -1");
    toy_expect(r, sum(z, x, x, INT64_MAX / 16 + 1), ZERO_ERR_ARG, "n is ");
    toy_expect(r, sum(z, x, x + 1, 3), ZERO_ERR_ARG,
               "overlap in part; allowed: equal pointers, or no overlap");
    toy_expect(r, sum(z, x + 2, x, 3), ZERO_ERR_ARG, "overlap");
    OR_RETURN(sum(z, x + 2, x, 2)); /* side by side is allowed */
    toy_expect(r, zero_all_reduce(z, ZERO_AXIS_TP, x, x, 4, ZERO_I32, ZERO_MAX), ZERO_ERR_ARG,
               "dtype is 4; allowed: ZERO_F32, ZERO_BF16");
    toy_expect(r, zero_all_reduce(z, ZERO_AXIS_TP, x, x, 4, ZERO_F32, (enum zero_reduce)3), ZERO_ERR_ARG,
               "zero_all_reduce: op is 3; allowed: ZERO_SUM, ZERO_MAX");
    toy_expect(r, zero_expect_equal(NULL, ZERO_AXIS_TP, x, 4, ZERO_F32), ZERO_ERR_ARG, "z is NULL");
    toy_expect(r, zero_expect_equal(z, ZERO_AXIS_PP, x, 4, ZERO_F32), ZERO_ERR_ARG, "axis is 3");
    toy_expect(r, zero_expect_equal(z, ZERO_AXIS_TP, NULL, 4, ZERO_F32), ZERO_ERR_ARG,
               "zero_expect_equal: src is NULL");
    toy_expect(r, zero_expect_equal(z, ZERO_AXIS_TP, x, 4, (enum zero_dtype)6), ZERO_ERR_ARG, "dtype is 6");
    toy_expect(r, zero_broadcast(NULL, ZERO_AXIS_TP, 0, x, 4), ZERO_ERR_ARG, "zero_broadcast: z is NULL");
    toy_expect(r, zero_broadcast(z, (enum zero_axis)4, 0, x, 4), ZERO_ERR_ARG, "zero_broadcast: axis is 4");
    toy_expect(r, zero_broadcast(z, ZERO_AXIS_TP, 2, x, 4), ZERO_ERR_ARG, "root is 2; allowed: 0..1");
    toy_expect(r, zero_broadcast(z, ZERO_AXIS_PP, 1, x, 4), ZERO_ERR_ARG, "root is 1; allowed: 0..0");
    toy_expect(r, zero_broadcast(z, ZERO_AXIS_TP, 0, x, -4), ZERO_ERR_ARG, "bytes is -4");
    toy_expect(r, zero_broadcast(z, ZERO_AXIS_TP, 0, NULL, 4), ZERO_ERR_ARG, "buf is NULL");
    double scale = 0;
    toy_expect(r, zero_loss_scale(z, r->rank ? 3 : 4, &scale), ZERO_ERR_ARG,
               "count is 4 on rank 0 and 3 on rank 1; the ranks of tp");
    OR_RETURN(zero_loss_scale(z, 4, &scale));
    if (scale != 0.25) /* 1 / count of one data-parallel rank */
        toy_wrong(r, "scale is %g", scale);
    OR_RETURN(sum(z, x, x, 4)); /* the refused calls changed nothing */
    /* Different numbers of elements fail the context on every rank. */
    toy_expect(r, sum(z, x, x, r->rank ? 3 : 4), ZERO_ERR_MISMATCH, "zero_all_reduce(sum)");
    toy_expect(r, zero_begin(z, 0, ZERO_FORWARD), ZERO_ERR_MISMATCH, "zero_all_reduce(sum)");
    return 0;
}

/* One rank's sum meets another call of the other rank. Neither moves data, and both fail. */
static int swap_calls(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    float x[4] = {1, 2, 3, 4}, y[4] = {5, 6, 7, 8};
    int err = FIRST_ERROR(r->rank ? zero_expect_equal(z, ZERO_AXIS_TP, x, 4, ZERO_F32) : sum(z, x, x, 4),
                          r->rank ? sum(z, y, y, 4) : zero_expect_equal(z, ZERO_AXIS_TP, y, 4, ZERO_F32));
    toy_expect(r, err, ZERO_ERR_MISMATCH, "rank 1 called zero_expect_equal in step 1");
    return 0;
}

/* Rank 1 uses another operation, dtype or root. The error names the call and its arguments. */
static int differ_in(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    static const char *const says[] = {"rank 1 called zero_all_reduce(max) in step 1",
                                       "called zero_all_reduce(max) in step 1 with other arguments",
                                       "called zero_broadcast(tp) in step 1 with other arguments"};
    const struct setup *s = r->arg;
    float x[4] = {1, 2, 3, 4};
    bool other = r->rank == 1;
    int err = s->way == 0 ? zero_all_reduce(z, ZERO_AXIS_TP, x, x, 4, ZERO_F32, other ? ZERO_MAX : ZERO_SUM)
              : s->way == 1
                  ? zero_all_reduce(z, ZERO_AXIS_TP, x, x, 4, other ? ZERO_BF16 : ZERO_F32, ZERO_MAX)
                  : zero_broadcast(z, ZERO_AXIS_TP, other, x, 4);
    toy_expect(r, err, ZERO_ERR_MISMATCH, says[s->way]);
    return 0;
}

/* Each layer sums twice, the second time with fewer elements. Rank 1 leaves out the second sum of layer
 * `way`. */
static int leave_out(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    float x[4] = {1, 2, 3, 4};
    int err = 0;
    for (int l = 0; l < LAYERS && !err; l++)
        err = FIRST_ERROR(sum(z, x, x, 4), r->rank == 0 || l != s->way ? sum(z, x, x, 3) : 0);
    toy_expect(r, err, ZERO_ERR_MISMATCH,
               s->way ? "; rank 1 seems to have left out the call of rank 0"
                      : "with other arguments, or one of them left out the call before;");
    return 0;
}

static void calls_that_are_refused(void **state)
{
    run_at_both_ends((struct setup){.way = 0}, 2, refuse, "refused");
    run_at_both_ends((struct setup){.way = 0}, 2, swap_calls, "other calls");
    for (int way = 0; way < 3; way++)
        run_at_both_ends((struct setup){.way = way}, 2, differ_in, "another op, dtype or root");
    for (int layer = 0; layer < 2; layer++)
        run_at_both_ends((struct setup){.way = layer}, 2, leave_out, "left out in a layer");
}

/* Data-parallel ranks may sum activations of different sizes, or none, depending on their data. No rank may
 * report that while it waits for a late one. */
static int give_other_sizes(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct timespec late = {.tv_nsec = 300000000};
    float x[8] = {0};
    for (int step = 0; step < 2; step++) {
        for (int phase = ZERO_FORWARD; phase <= ZERO_BACKWARD; phase++)
            for (int k = 0; k < 2; k++) {
                int unit = phase == ZERO_FORWARD ? k : 1 - k;
                OR_RETURN(zero_begin(z, unit, (enum zero_phase)phase));
                for (int t = 0; t < TENSORS && phase == ZERO_BACKWARD; t++)
                    if (m->table[t].unit == unit)
                        *(float *)*m->table[t].grad = 1;
                if (at->dp == 0 || step == 0)
                    OR_RETURN(sum(z, x, x, 3 + 4 * at->dp));
                if (r->rank == 0 && unit == 0)
                    nanosleep(&late, NULL);
                OR_RETURN(zero_end(z, unit, (enum zero_phase)phase));
            }
        OR_RETURN(zero_step(z, 1e-3f, NULL));
    }
    return 0;
}

static void sizes_of_data_parallel_ranks_may_differ(void **state)
{
    run_at_both_ends((struct setup){.way = 0}, 4, give_other_sizes, "other sizes");
}

/* ---- tables that differ ---- */

/* Gives tensor-parallel ranks different initial values of a tensor that is not cut. */
static void begin_apart(struct zero_config *cfg, struct model *m, int part)
{
    if (part)
        m->net.layer[1].b[3] += 1;
}

static void freeze_apart(struct zero_config *cfg, struct model *m, int part)
{
    begin_apart(cfg, m, part);
    m->table[5].grad = NULL;
}

/* Makes tensor-parallel ranks cut a tensor in another dimension, in other blocks, to another size, or from a
 * whole tensor. */
static void cut_apart(struct zero_tensor *t, bool dimension, bool blocks, bool size, bool whole)
{
    *t = (struct zero_tensor){.name = "w1.0",
                              .param = t->param,
                              .grad = t->grad,
                              .shape = {2, n_elems(0, 2) / 2},
                              .dtype = ZERO_F32,
                              .flags = whole ? ZERO_WHOLE : 0,
                              .tp_cut = ZERO_TP_CUT(dimension),
                              .tp_blocks = blocks ? 2 : 0,
                              .tp_size = size ? 3 : 0};
}

#define CUT_APART(what, ...)                                                                                 \
    static void what(struct zero_config *cfg, struct model *m, int part)                                     \
    {                                                                                                        \
        (void)cfg;                                                                                           \
        cut_apart(&m->table[0], __VA_ARGS__);                                                                \
    }
CUT_APART(another_dimension, part, false, false, false)
CUT_APART(other_blocks, false, part, false, false)
CUT_APART(another_size, false, false, part, false)
CUT_APART(from_the_whole, false, false, false, part)

/* The next tensor begins where this rank's part ends, but inside the whole tensor. */
static void share_memory(struct zero_config *cfg, struct model *m, int part)
{
    struct zero_tensor *t = m->table;
    *t[3].param = (float *)*t[2].param + n_elems(2, 2);
    t[2].flags |= ZERO_WHOLE;
}

static void tables_that_cut_otherwise(void **state)
{
    static const char differ[] = "tensors[0] (w1.0 on rank 1): rank 1 and rank 0 differ in its name, shape, "
                                 "dtype, tp_cut, tp_blocks, tp_size, unit,";
    static const struct setup rows[] = {
        {.change = another_dimension, .code = ZERO_ERR_MISMATCH, .says = differ},
        {.change = other_blocks, .code = ZERO_ERR_MISMATCH, .says = differ},
        {.change = another_size, .code = ZERO_ERR_MISMATCH, .says = differ},
        {.change = from_the_whole, .code = ZERO_ERR_MISMATCH, .says = differ},
        {.change = share_memory, .code = ZERO_ERR_ARG, .says = "*param of tensors w10 and w20 share memory"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        run_at_both_ends(rows[i], 4, NULL, rows[i].says);
}

static void values_later(struct zero_config *cfg, struct model *m, int part)
{
    cfg->init_from = ZERO_INIT_LATER;
}

/* zero_write compares values once the last one is written. */
static int write_apart(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    m->own[5][3] += (float)at->tp;
    for (int t = 0; t < TENSORS - 1; t++)
        OR_RETURN(zero_write(z, t, ZERO_VALUE_PARAM, 0, n_elems(t, 2), m->own[t]));
    toy_expect(r, zero_write(z, TENSORS - 1, ZERO_VALUE_PARAM, 0, n_elems(3, 2), m->own[TENSORS - 1]),
               ZERO_ERR_MISMATCH, "tensor b1 has no tp_cut");
    return 0;
}

static void values_that_differ(void **state)
{
    static const char says[] = "tensor b1 has no tp_cut";
    struct setup begun = {.tp = 2, .change = begin_apart, .code = ZERO_ERR_MISMATCH, .says = says},
                 frozen = {.tp = 2, .change = freeze_apart, .code = ZERO_ERR_MISMATCH, .says = says},
                 written = {.tp = 2, .change = values_later};
    struct toy_rank r[MAX_WORLD];
    for (int stage = 0; stage <= 3; stage++) {
        begun.stage = frozen.stage = written.stage = stage;
        run(&begun, 4, NULL, "apart", r);
        run(&frozen, 4, NULL, "frozen apart", r);
        run(&written, 4, write_apart, "written apart", r);
    }
}

/* A call whose activation should be equal on all ranks (whole), or a partial sum. */
struct transition {
    const char *name;
    int (*call)(zero_ctx *z, float *dst, const float *src);
    bool whole;
};

static int expects(zero_ctx *z, float *dst, const float *src)
{
    return zero_expect_equal(z, ZERO_AXIS_TP, src, 8, ZERO_F32);
}

static int sums(zero_ctx *z, float *dst, const float *src)
{
    return sum(z, dst, src, 8);
}

static int scatters(zero_ctx *z, float *dst, const float *src)
{
    return zero_reduce_scatter(z, ZERO_AXIS_TP, dst, src, 4, ZERO_F32);
}

static const struct transition transitions[] = {
    {"zero_expect_equal in step 1, inside unit 1", expects, true},
    {"zero_all_reduce(sum) in step 1, inside unit 1", sums, false},
    {"zero_reduce_scatter in step 1, inside unit 1", scatters, false},
};

/* Lines about sums, counted over all ranks, which are threads. */
static _Atomic int n_said_sum;
static char said_sum[256];

static void note_sum(void *arg, const char *line)
{
    if (strstr(line, "is added up") && !n_said_sum++)
        snprintf(said_sum, sizeof said_sum, "%s", line);
}

static void log_sums(struct zero_config *cfg, struct model *m, int part)
{
    cfg->debug.log = note_sum;
}

/* Added to setup.way for a wrong activation; the rest is the number of the transition. */
enum { CROSS_WRONGLY = 16 };

/* Calls with right and wrong activations. In check mode, one that should be equal on all ranks but is not is
 * an error. One that is summed although it is equal is logged. */
static int cross(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    const struct transition *t = &transitions[s->way % CROSS_WRONGLY];
    float src[8], dst[8], zeros[8] = {0};
    bool wrong = s->way >= CROSS_WRONGLY, same = t->whole != wrong;
    for (int i = 0; i < 8; i++)
        src[i] = (float)(1 + i + (same ? 0 : r->rank));
    OR_RETURN(zero_begin(z, 1, ZERO_FORWARD));
    OR_RETURN(t->call(z, dst, zeros)); /* zeros do not show what the activation is */
    /* a maximum of equal values, or a gather of equal parts, is no mistake */
    OR_RETURN(zero_all_reduce(z, ZERO_AXIS_TP, dst, src, 8, ZERO_F32, ZERO_MAX));
    OR_RETURN(zero_all_gather(z, ZERO_AXIS_TP, dst, src, 4, ZERO_F32));
    if (s->check && wrong && t->whole) {
        char says[256];
        snprintf(says, sizeof says,
                 "%s: check: src is not the same on all ranks of tp: rank 0 and rank 1 differ", t->name);
        toy_expect(r, t->call(z, dst, src), ZERO_ERR_MISMATCH, says);
        return 0;
    }
    OR_RETURN(t->call(z, dst, src));
    OR_RETURN(t->call(z, dst, src)); /* logged once */
    return zero_end(z, 1, ZERO_FORWARD);
}

static void activations_that_are_not_what_they_should_be(void **state)
{
    for (size_t i = 0; i < sizeof transitions / sizeof *transitions; i++)
        for (int k = 0; k < 8; k++) {
            const struct transition *x = &transitions[i];
            bool wrong = k & 2;
            struct setup s = {.stage = k / 4 * 3,
                              .tp = 2,
                              .check = k & 1,
                              .change = log_sums,
                              .way = (int)i + wrong * CROSS_WRONGLY};
            struct toy_rank r[MAX_WORLD];
            n_said_sum = 0;
            run(&s, 2, cross, x->name, r);
            assert_int_equal(n_said_sum, s.check && wrong && !x->whole ? 2 : 0);
            assert_true(!n_said_sum || (strstr(said_sum, x->name) && strstr(said_sum, "counts 2 times")));
        }
}

/* Backward leaves out the sum over tp, so weights that are not cut drift apart. Check mode finds it. */
static int forget_the_sum(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    for (int unit = LAYERS; unit-- > 0;) {
        OR_RETURN(zero_begin(z, unit, ZERO_BACKWARD));
        m->net.layer[unit].ds[0] += (float)(1 + at->tp);
        OR_RETURN(zero_end(z, unit, ZERO_BACKWARD));
    }
    toy_expect(r, zero_step(z, 0.1f, NULL), ZERO_ERR_MISMATCH, "tensor s0 has no tp_cut");
    return 0;
}

static void gradients_that_differ(void **state)
{
    struct setup s = {.tp = 2, .check = true};
    struct toy_rank r[MAX_WORLD];
    for (s.stage = 0; s.stage <= 3; s.stage++)
        run(&s, 4, forget_the_sum, "a sum is forgotten", r);
}

/* Gradients of a tensor that is not cut, which differ between both tensor-parallel ranks, without check
 * mode. */
struct gradients {
    /* the step in which they differ, counted from 1 */
    int step;
    /* the first element on one tensor-parallel rank; it is 3 on the other */
    float other;
    /* an element of a tensor that is cut */
    float large;
    /* what zero_step returns */
    int code;
    /* says: a line says that they differ by rounding; drifts: zero_save logs that weights differ */
    bool says, drifts;
};

struct lines_seen {
    pthread_mutex_t lock;
    int n_rounding, n_saved;
};
static struct lines_seen seen_lines = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void count_warning(void *arg, const char *line)
{
    pthread_mutex_lock(&seen_lines.lock);
    seen_lines.n_rounding +=
        strstr(line, "the gradients of tensor s1, which has no tp_cut, differ by rounding") != NULL;
    seen_lines.n_saved +=
        strstr(line, "zero_save saves the weights of one rank of tp, but tensor s1 has no tp_cut") != NULL;
    pthread_mutex_unlock(&seen_lines.lock);
}

static void log_warnings(struct zero_config *cfg, struct model *m, int part)
{
    cfg->debug.log = count_warning;
}

static const struct gradients cases[] = {
    {.step = 1, .other = 3},
    {.step = 1, .other = 6, .code = ZERO_ERR_MISMATCH},
    {.step = 4, .other = 0, .code = ZERO_ERR_MISMATCH},
    {.step = 16, .other = 3.01f, .code = ZERO_ERR_MISMATCH},
    {.step = 2, .other = 3.0001f, .says = true, .drifts = true},
    {.step = 2, .other = 6, .large = 1e6f, .says = true, .drifts = true}, /* small next to the norm */
    {.step = 3, .other = 6, .drifts = true},                              /* not compared in step 3 */
};

static int train_apart(struct toy_rank *r, struct model *m, zero_ctx *z, const struct place *at)
{
    const struct setup *s = r->arg;
    const struct gradients *g = &cases[s->way];
    const char *dir = "zero-test-tp-apart";
    for (int step = 1; step <= g->step; step++) {
        for (int unit = LAYERS; unit-- > 0;) {
            OR_RETURN(zero_begin(z, unit, ZERO_BACKWARD));
            if (unit == 1) {
                m->net.layer[unit].ds[0] += at->tp && step == g->step ? g->other : 3;
                m->net.layer[unit].dw1[0] += g->large;
            }
            OR_RETURN(zero_end(z, unit, ZERO_BACKWARD));
        }
        if (step == g->step && g->code)
            toy_expect(r, zero_step(z, 0.1f, NULL), g->code,
                       "tensor s1 has no tp_cut, so all ranks of tp must have the same gradient, but those "
                       "of rank ");
        else
            OR_RETURN(zero_step(z, 0.1f, NULL));
    }
    if (g->code)
        return 0;
    OR_RETURN(zero_save(z, dir, NULL));
    OR_RETURN(zero_save(z, dir, NULL)); /* logged once */
    return zero_save_wait(z, NULL);
}

static void gradients_that_differ_unchecked(void **state)
{
    struct setup s = {.tp = 2, .change = log_warnings};
    for (s.way = 0; s.way < (int)(sizeof cases / sizeof *cases); s.way++)
        for (s.stage = 0; s.stage <= 3; s.stage++) {
            struct toy_rank r[MAX_WORLD];
            seen_lines.n_rounding = seen_lines.n_saved = 0;
            run(&s, 4, train_apart, "gradients differ", r);
            assert_int_equal(seen_lines.n_rounding, cases[s.way].says);
            assert_int_equal(seen_lines.n_saved, cases[s.way].drifts);
        }
    assert_int_equal(system("rm -rf zero-test-tp-apart"), 0);
}

static int set_up(void **state)
{
    *state = make_reference(MICRO);
    return 0;
}

static int tear_down(void **state)
{
    free(*state);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_bits_however_data_is_cut),
        cmocka_unit_test(sums_and_maxima),
        cmocka_unit_test(a_table_without_parts),
        cmocka_unit_test(cuts_that_are_refused),
        cmocka_unit_test(axes_that_are_refused),
        cmocka_unit_test(calls_that_are_refused),
        cmocka_unit_test(sizes_of_data_parallel_ranks_may_differ),
        cmocka_unit_test(tables_that_cut_otherwise),
        cmocka_unit_test(values_that_differ),
        cmocka_unit_test(gradients_that_differ),
        cmocka_unit_test(gradients_that_differ_unchecked),
        cmocka_unit_test(activations_that_are_not_what_they_should_be),
    };
    return cmocka_run_group_tests_name("tp", tests, set_up, tear_down);
}
