/* SPDX-License-Identifier: Apache-2.0 */
/* test_parity.c: random models must train to the same result in every configuration.
 *
 * A seed determines a model: units of odd sizes, f32 and bf16, frozen and trainable, plain and stacked
 * tensors, gradients that are added or overwritten, and how masters and moments are kept. It also determines
 * the calls: nested, recomputing, a unit used twice or left out, an order that changes, evaluations in
 * between. A gradient depends on the weights that the model reads and on the global micro-batch. So a stale
 * or missing gather, a double or missing reduce, or a wrong pointer changes the result.
 *
 * The model runs at stages 0 to 3, in several worlds (ranks are threads), prefetch depths and budgets, on the
 * host and, if the program has one, on a GPU. Weights, masters, moments and norms must agree bit by bit. An
 * AdamW in fp64 that does not shard must be close. */
#include "shard/options.h"
#include "test/cmocka.h"
#include "test/first_error.h"
#include "test/held_port.h"
#include "test/kernels/random.h"
#include "test/stand_in/half.h"
#include "test/zero/where.h"
#include "zero/zero.h"

#include <math.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MAX_TENSORS 32
#define MAX_UNITS   12
#define STEPS       4

/* ---- the model, a function of a seed ---- */

struct model {
    uint64_t seed;
    int n_tensors, n_units;
    struct {
        char name[16];
        int64_t n, slices; /* elements of all slices */
        int unit;
        bool bf16, frozen, overwrite, no_decay, stacked;
    } t[MAX_TENSORS];
    int accum; /* micro-batches per step over all ranks */
    float clip;
    bool nest, recompute, twice, skip, reorder, evaluate;
    bool bf16_wire;
    enum zero_masters masters;
    enum zero_moments moments;
    /* gradient sums of bf16 tensors are bf16 */
    bool bf16_sums;
    /* gradients of later global micro-batches are 0; 0: none are */
    int n_given;
};

static int below(uint64_t *s, int n)
{
    return (int)(random_next(s) % (uint64_t)n);
}

/* Returns a multiple of 2^-20 in [-1, 1). */
static float noise(uint64_t seed, uint64_t a, uint64_t b)
{
    return random_unit(random_mix(seed ^ random_mix(a * 0x9e3779b97f4a7c15u + b)));
}

/* Whether a step without the last unit still has a gradient. */
static bool trains_without_the_last(const struct model *m)
{
    for (int k = 0; k < m->n_tensors; k++)
        if (!m->t[k].frozen && m->t[k].unit < m->n_units - 1)
            return true;
    return false;
}

static void draw_model(struct model *m, uint64_t seed, bool plain_calls)
{
    static const int64_t sizes[] = {1, 2, 15, 32, 33, 64, 257, 1000, 1024, 2049, 8100};
    uint64_t s = seed;
    memset(m, 0, sizeof *m);
    m->seed = random_mix(seed);
    m->n_units = 1 + below(&s, 8);
    bool any_trainable = false;
    if (m->n_units > 2 && below(&s, 3)) { /* stacked tensors over units 1..n-1 */
        int n = 1 + below(&s, 3);
        for (int i = 0; i < n; i++) {
            int k = m->n_tensors++;
            m->t[k].stacked = true;
            m->t[k].unit = 1;
            m->t[k].slices = m->n_units - 1;
            m->t[k].n = m->t[k].slices * sizes[below(&s, 10)];
        }
    }
    for (int u = 0; u < m->n_units; u++) {
        int n = 1 + below(&s, 3);
        for (int i = 0; i < n && m->n_tensors < MAX_TENSORS; i++) {
            int k = m->n_tensors++;
            m->t[k].unit = u;
            m->t[k].slices = 1;
            m->t[k].n = sizes[below(&s, 11)];
        }
    }
    int dtypes = below(&s, 3); /* all f32, all bf16, mixed */
    for (int k = 0; k < m->n_tensors; k++) {
        snprintf(m->t[k].name, sizeof m->t[k].name, "tensor%d", k);
        m->t[k].bf16 = dtypes == 1 || (dtypes == 2 && below(&s, 2));
        m->t[k].frozen = below(&s, 5) == 0;
        m->t[k].overwrite = below(&s, 4) == 0;
        m->t[k].no_decay = below(&s, 2);
        any_trainable |= !m->t[k].frozen;
    }
    if (!any_trainable)
        m->t[0].frozen = false;
    m->accum = 1 << below(&s, 3);
    m->clip = below(&s, 2) ? 0.05f : 0;
    m->masters = (enum zero_masters)below(&s, 3);
    m->moments = (enum zero_moments)below(&s, 3);
    m->bf16_sums = random_mix(m->seed + 2) % 2;
    if (plain_calls)
        return;
    m->nest = below(&s, 3) == 0;
    m->recompute = below(&s, 3) == 0;
    m->twice = below(&s, 3) == 0;
    m->skip = below(&s, 3) == 0 && trains_without_the_last(m);
    m->reorder = below(&s, 3) == 0;
    m->evaluate = below(&s, 3) == 0;
    m->bf16_wire = below(&s, 4) == 0;
}

static float initial(const struct model *m, int t, int64_t i)
{
    float x = noise(m->seed, (uint64_t)t + 1000, (uint64_t)i);
    return m->t[t].bf16 ? bf16_to_float(bf16_from_float(x)) : x;
}

/* Returns the gradient of element i of tensor t, with weight w, in global micro-batch g of a step. */
static float gradient(const struct model *m, int t, int64_t i, float w, int step, int g)
{
    return 0.25f * w + 0.125f * noise(m->seed + (uint64_t)step, (uint64_t)(t * 64 + g), (uint64_t)i);
}

/* ---- one rank ---- */

struct run {
    const struct model *m;
    int stage, rank, world, port;
    int prefetch;              /* 0: the default; negative: none */
    int64_t budget;            /* 0: the default */
    int hybrid, group;         /* 0, 0: none */
    bool granules;             /* every tensor has a granule */
    bool brackets, gpu, loose; /* loose: deterministic is off */
    bool any_states;           /* masters and states may be in any memory */
    struct zero_config cfg;
    /* results of rank 0 */
    int err;
    char text[512];
    double norm[STEPS];
    float *values[MAX_TENSORS][4]; /* parameter (widened), master, two moments */
    struct zero_stats stats;
};

struct place {
    void *param, *grad;
};

static float load(const struct model *m, int t, const void *p, int64_t i)
{
    return m->t[t].bf16 ? bf16_to_float(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

/* Returns a size from one element to all of a slice. */
static int64_t granule_of(const struct model *m, int t)
{
    uint64_t x = random_mix(m->seed + 77 + (uint64_t)t);
    int64_t n = m->t[t].n / m->t[t].slices;
    return x % 4 == 0 ? n : 1 + (int64_t)(x / 4 % (uint64_t)n);
}

/* Computes the gradients of a unit, weighted by weight. */
static void backward_unit(const struct model *m, struct place *p, int unit, int step, int g, float weight)
{
    for (int t = 0; t < m->n_tensors; t++) {
        int64_t n = m->t[t].n / m->t[t].slices, slice = unit - m->t[t].unit;
        if (slice < 0 || slice >= m->t[t].slices || m->t[t].frozen)
            continue;
        for (int64_t i = slice * n; i < (slice + 1) * n; i++) {
            bool given = !m->n_given || g < m->n_given;
            float x = given ? weight * gradient(m, t, i, load(m, t, p[t].param, i), step, g) : 0;
            float old = m->t[t].overwrite ? 0 : load(m, t, p[t].grad, i);
            if (m->t[t].bf16)
                ((uint16_t *)p[t].grad)[i] = bf16_from_float(old + x);
            else
                ((float *)p[t].grad)[i] = old + x;
        }
    }
}

/* Sums the unit's weights. Returns NaN if a frozen tensor has a wrong one. */
static double forward_unit(const struct model *m, struct place *p, int unit)
{
    double sum = 0;
    for (int t = 0; t < m->n_tensors; t++) {
        int64_t n = m->t[t].n / m->t[t].slices, slice = unit - m->t[t].unit;
        if (slice < 0 || slice >= m->t[t].slices)
            continue;
        for (int64_t i = slice * n; i < (slice + 1) * n; i++) {
            float w = load(m, t, p[t].param, i);
            if (m->t[t].frozen && w != initial(m, t, i))
                return NAN;
            sum += w;
        }
    }
    return sum;
}

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        if ((r->err = (call))) {                                                                             \
            snprintf(r->text, sizeof r->text, "%s: %s", #call, zero_last_error());                           \
            goto out;                                                                                        \
        }                                                                                                    \
    } while (0)

static int begin(struct run *r, zero_ctx *z, int unit, enum zero_phase phase)
{
    int err = r->brackets ? zero_begin(z, unit, phase) : 0;
    where_wait(&r->cfg);
    return err;
}

static int end(struct run *r, zero_ctx *z, int unit, enum zero_phase phase)
{
    return r->brackets ? zero_end(z, unit, phase) : 0;
}

static int left_out(const struct model *m, int step)
{
    return m->skip && m->n_units > 2 && step == 1 ? m->n_units - 1 : -1;
}

/* Returns the unit at position k in the order of a step. */
static int visit(const struct model *m, int step, int k)
{
    return m->reorder && step >= 2 ? m->n_units - 1 - k : k;
}

/* Returns zero_tensor.uses. In some models the middle unit has two backward brackets; its unstacked tensors
 * declare them. */
static int32_t uses_of(const struct model *m, int t)
{
    int middle = m->n_units / 2;
    bool is_middle = m->t[t].unit == visit(m, 0, middle) || m->t[t].unit == visit(m, STEPS - 1, middle);
    return m->twice && is_middle && !m->t[t].stacked ? 2 : 0;
}

static int micro_batch(struct run *r, zero_ctx *z, struct place *p, int step, int g, double *seen)
{
    const struct model *m = r->m;
    int err = 0, held = m->nest ? visit(m, step, 0) : -1, out = left_out(m, step);
    if (held >= 0)
        err = begin(r, z, held, ZERO_FORWARD);
    for (int k = 0; !err && k < m->n_units; k++) {
        int u = visit(m, step, k);
        if (u == out)
            continue;
        if (u != held)
            err = begin(r, z, u, ZERO_FORWARD);
        where_wait(&r->cfg);
        if (!err)
            *seen += forward_unit(m, p, u);
        if (!err && u != held)
            err = end(r, z, u, ZERO_FORWARD);
    }
    if (!err && held >= 0)
        err = end(r, z, held, ZERO_FORWARD);
    if (!err && held >= 0)
        err = begin(r, z, held, ZERO_BACKWARD);
    for (int k = m->n_units; !err && k-- > 0;) {
        int u = visit(m, step, k);
        if (u == out)
            continue;
        if (m->recompute) {
            err = begin(r, z, u, ZERO_FORWARD);
            if (!err)
                *seen += forward_unit(m, p, u);
        }
        bool twice = m->twice && u == visit(m, step, m->n_units / 2) && u != held;
        if (!err && u != held)
            err = begin(r, z, u, ZERO_BACKWARD);
        if (!err) {
            where_wait(&r->cfg);
            backward_unit(m, p, u, step, g, twice ? 0.5f : 1);
        }
        if (!err && twice && r->brackets) {
            err = FIRST_ERROR(zero_end(z, u, ZERO_BACKWARD), begin(r, z, u, ZERO_BACKWARD));
        }
        if (!err && twice)
            backward_unit(m, p, u, step, g, 0.5f);
        if (!err && u != held)
            err = end(r, z, u, ZERO_BACKWARD);
        if (!err && m->recompute)
            err = end(r, z, u, ZERO_FORWARD);
    }
    return !err && held >= 0 ? end(r, z, held, ZERO_BACKWARD) : err;
}

static int evaluate(struct run *r, zero_ctx *z, struct place *p, double *seen)
{
    int err = 0;
    for (int u = 0; !err && u < r->m->n_units; u++) {
        err = begin(r, z, u, ZERO_FORWARD);
        if (!err)
            *seen += forward_unit(r->m, p, u);
        if (!err)
            err = end(r, z, u, ZERO_FORWARD);
    }
    return err;
}

static int read_all(struct run *r, zero_ctx *z)
{
    for (int t = 0; t < r->m->n_tensors; t++) {
        int64_t n = r->m->t[t].n;
        for (int k = 0; k < (r->m->t[t].frozen ? 1 : 4); k++) {
            float *out = r->values[t][k] = malloc((size_t)n * sizeof *out);
            memset(out, 0xff, (size_t)n * sizeof *out);
            int err = zero_read(z, t, k, 0, n, out);
            if (err)
                return err;
            if (k == 0 && r->m->t[t].bf16)
                for (int64_t i = n; i-- > 0;)
                    out[i] = bf16_to_float(((uint16_t *)out)[i]);
        }
    }
    return 0;
}

/* Draws where masters and states are, equally on all ranks. */
static int32_t draw_states(const struct run *r)
{
    uint64_t x = r->m->seed + 7 * (uint64_t)r->stage + 31 * (uint64_t)r->world + 100 * (uint64_t)r->prefetch;
    return (int32_t)(random_mix(x) % 3);
}

static void *run_rank(void *arg)
{
    struct run *r = arg;
    const struct model *m = r->m;
    struct place p[MAX_TENSORS] = {{0}};
    struct zero_tensor t[MAX_TENSORS] = {{0}};
    zero_ctx *z = NULL;
    char url[64];
    double seen = 0;
    for (int k = 0; k < m->n_tensors; k++) {
        p[k].param = malloc((size_t)m->t[k].n * 4);
        for (int64_t i = 0; i < m->t[k].n; i++) {
            /* Only rank 0's weights count. */
            float w = r->rank == 0 ? initial(m, k, i) : NAN;
            if (m->t[k].bf16)
                ((uint16_t *)p[k].param)[i] = bf16_from_float(w);
            else
                ((float *)p[k].param)[i] = w;
        }
        t[k] = (struct zero_tensor){.name = m->t[k].name,
                                    .param = &p[k].param,
                                    .grad = m->t[k].frozen ? NULL : &p[k].grad,
                                    .shape = {m->t[k].slices, m->t[k].n / m->t[k].slices},
                                    .dtype = m->t[k].bf16 ? ZERO_BF16 : ZERO_F32,
                                    .unit = m->t[k].unit,
                                    .granule = r->granules ? granule_of(m, k) : 0,
                                    .uses = uses_of(m, k),
                                    .flags = (m->t[k].stacked ? ZERO_STACKED : 0) |
                                             (m->nest && m->reorder ? ZERO_POINTER_PER_BEGIN : 0) |
                                             (m->t[k].no_decay ? ZERO_NO_DECAY : 0) |
                                             (m->t[k].overwrite ? ZERO_GRAD_OVERWRITE : 0)};
    }
    struct zero_config cfg = ZERO_CONFIG_INIT;
    if (r->gpu)
        where_open(r->rank, &cfg);
    cfg.stage = r->stage;
    cfg.hybrid = r->hybrid == ZR_HFSDP ? ZERO_HFSDP : ZERO_HSDP;
    if (r->hybrid)
        cfg.mesh.dp_replicate = r->world / r->group;
    cfg.launch.rank = r->rank;
    cfg.launch.world = r->world;
    snprintf(url, sizeof url, "tcp://127.0.0.1:%d", r->port);
    cfg.launch.rendezvous = r->world > 1 ? url : NULL;
    if (r->prefetch)
        cfg.memory.prefetch = r->prefetch > 0 ? r->prefetch : 0;
    if (r->budget)
        cfg.memory.param_budget_bytes = r->budget;
    cfg.grad_accum_steps = m->accum / r->world > 0 ? m->accum / r->world : 1;
    cfg.clip = m->clip;
    cfg.optim.weight_decay = 0.1f;
    cfg.optim.masters = m->masters;
    cfg.optim.moments = m->moments;
    cfg.memory.seed = (int64_t)(m->seed % 1000);
    cfg.launch.timeout_ms = 20000;
    if (m->bf16_wire)
        cfg.memory.wire_dtype = ZERO_BF16;
    if (m->bf16_sums)
        cfg.memory.grad_sum_dtype = ZERO_BF16;
    cfg.grad_sum = m->n_given > 0;
    if (r->any_states)
        cfg.memory.states = draw_states(r);
    cfg.memory.states_dir = cfg.memory.states == ZERO_STATES_FILE ? "/tmp" : NULL;
    void *old[MAX_TENSORS];
    for (int k = 0; k < m->n_tensors; k++)
        old[k] = p[k].param;
    if (r->loose)
        cfg.deterministic = 0;
    r->cfg = cfg;
    CHECK(zero_wrap(&z, t, m->n_tensors, &cfg));
    for (int k = 0; k < m->n_tensors; k++)
        free(old[k]);
    for (int s = 0; s < STEPS; s++) {
        for (int a = 0; a < cfg.grad_accum_steps; a++) {
            CHECK(micro_batch(r, z, p, s, a * r->world + r->rank, &seen));
            if (!r->brackets && a + 1 < cfg.grad_accum_steps)
                CHECK(zero_micro(z));
        }
        struct zero_step_info info;
        CHECK(zero_step(z, 1e-2f, &info));
        r->norm[s] = info.grad_norm;
        if (info.skipped || info.t != s + 1) {
            r->err = -1;
            snprintf(r->text, sizeof r->text, "step %d: skipped %d, t %d", s, info.skipped, (int)info.t);
            goto out;
        }
        if (m->evaluate && s == 2)
            CHECK(evaluate(r, z, p, &seen));
    }
    if (isnan(seen)) {
        r->err = -1;
        snprintf(r->text, sizeof r->text, "a forward saw a NaN or a changed frozen weight");
        goto out;
    }
    CHECK(read_all(r, z));
    CHECK(zero_get_stats(z, &r->stats));
    CHECK(zero_unwrap(&z));
out:
    zero_unwrap(&z);
    where_close(&r->cfg);
    return NULL;
}

/* ---- all ranks ---- */

static void free_values(struct run *r)
{
    for (int t = 0; t < MAX_TENSORS; t++)
        for (int k = 0; k < 4; k++)
            free(r->values[t][k]);
}

static void run_world(const struct model *m, const struct run *like, struct run *rank0)
{
    struct run r[8];
    pthread_t thread[8];
    int port = like->world > 1 ? held_port() : 0;
    for (int i = 0; i < like->world; i++) {
        r[i] = *like;
        r[i].m = m;
        r[i].rank = i;
        r[i].port = port;
        pthread_create(&thread[i], NULL, run_rank, &r[i]);
    }
    for (int i = 0; i < like->world; i++)
        pthread_join(thread[i], NULL);
    for (int i = 0; i < like->world; i++) {
        if (r[i].err)
            fail_msg("seed 0x%llx stage %d world %d prefetch %d budget %lld hybrid %d group %d: rank %d: %s",
                     (unsigned long long)m->seed, like->stage, like->world, like->prefetch,
                     (long long)like->budget, like->hybrid, like->group, i, r[i].text);
#define SAME_BYTES(name, text) assert_int_equal(r[i].stats.allocated.name, r[i].stats.planned.name);
        ZERO_MEM_MAP(SAME_BYTES)
        assert_int_equal(r[i].stats.allocated.total, r[i].stats.planned.total);
    }
    for (int i = 1; i < like->world; i++) {
        for (int s = 0; s < STEPS; s++)
            assert_true(r[i].norm[s] == r[0].norm[s]);
        for (int t = 0; t < m->n_tensors; t++)
            for (int k = 0; k < 4 && r[i].values[t][k]; k++)
                assert_memory_equal(r[i].values[t][k], r[0].values[t][k], (size_t)m->t[t].n * 4);
        free_values(&r[i]);
    }
    *rank0 = r[0];
}

static void assert_same(const struct model *m, const struct run *a, const struct run *b)
{
    for (int t = 0; t < m->n_tensors; t++)
        for (int k = 0; k < 4 && a->values[t][k]; k++)
            for (int64_t i = 0; i < m->t[t].n; i++)
                if (memcmp(&a->values[t][k][i], &b->values[t][k][i], 4))
                    fail_msg("seed 0x%llx: tensor %d element %lld value %d: %.9g at stage %d world %d "
                             "prefetch %d budget %lld brackets "
                             "%d, %.9g at stage %d world %d prefetch %d budget %lld brackets %d",
                             (unsigned long long)m->seed, t, (long long)i, k, (double)a->values[t][k][i],
                             a->stage, a->world, a->prefetch, (long long)a->budget, a->brackets,
                             (double)b->values[t][k][i], b->stage, b->world, b->prefetch,
                             (long long)b->budget, b->brackets);
    for (int s = 0; s < STEPS; s++)
        assert_true(a->norm[s] == b->norm[s]);
}

/* Whether masters or moments are rounded at random, so that a run is only roughly like one in fp32. */
static bool rounds_at_random(const struct model *m)
{
    return m->masters == ZERO_MASTERS_NONE || m->moments != ZERO_MOMENTS_F32;
}

/* Bounds the rounding error of an element's gradient, from the mean size of its micro-batches and the
 * possible error of its weight. Each contribution to a bf16 sum is rounded up or down. */
static double gradient_error(const struct model *m, int t, double size, double w, double w_error)
{
    bool rounded = m->t[t].bf16 || m->bf16_wire;
    double of_sums = m->t[t].bf16 && m->bf16_sums ? 2 * m->accum * 0x1p-7 : 0;
    return size * ((rounded ? 0x1p-6 : 0x1p-20) + of_sums) +
           0.25 * (w_error + (m->t[t].bf16 ? fabs(w) * 0x1p-8 : 0));
}

/* Compares with AdamW in fp64 over the whole model, as in an unsharded program. It rounds weights as the
 * model does. It also tracks how far a weight may be off: if micro-batches nearly cancel, only rounding
 * errors remain, and AdamW makes a full step of them. */
static void assert_near_reference(const struct model *m, const struct run *a)
{
    double *w[MAX_TENSORS], *mo[MAX_TENSORS], *ve[MAX_TENSORS], *g[MAX_TENSORS], *w_error[MAX_TENSORS];
    for (int t = 0; t < m->n_tensors; t++) {
        size_t n = (size_t)m->t[t].n;
        w[t] = calloc(n, 8);
        mo[t] = calloc(n, 8);
        ve[t] = calloc(n, 8);
        g[t] = calloc(n, 8);
        w_error[t] = calloc(n, 8);
        for (int64_t i = 0; i < m->t[t].n; i++)
            w[t][i] = (double)initial(m, t, i);
    }
    for (int s = 0; s < STEPS; s++) {
        double sum = 0, sum_errors = 0;
        for (int t = 0; t < m->n_tensors; t++) {
            int64_t per_slice = m->t[t].n / m->t[t].slices;
            for (int64_t i = 0; i < m->t[t].n; i++) {
                g[t][i] = 0;
                if (m->t[t].frozen || m->t[t].unit + i / per_slice == left_out(m, s))
                    continue;
                float shown = (float)w[t][i];
                if (m->t[t].bf16)
                    shown = bf16_to_float(bf16_ties_away(shown));
                double size = 0;
                for (int k = 0; k < m->accum; k++) {
                    double x = (double)gradient(m, t, i, shown, s, k) / m->accum;
                    g[t][i] += x, size += fabs(x);
                }
                double error = gradient_error(m, t, size, w[t][i], w_error[t][i]);
                sum += g[t][i] * g[t][i];
                sum_errors += error * error;
                w_error[t][i] += 1e-2 * fmin(2, 4 * error / fabs(g[t][i]));
            }
        }
        double norm = sqrt(sum), scale = m->clip > 0 && norm > (double)m->clip ? (double)m->clip / norm : 1;
        double most = fmax((rounds_at_random(m) ? 0.3 : 2e-2) * norm, sqrt(sum_errors));
        assert_true(fabs(a->norm[s] - norm) <= most);
        for (int t = 0; t < m->n_tensors; t++) {
            int64_t per_slice = m->t[t].n / m->t[t].slices;
            for (int64_t i = 0; i < m->t[t].n && !m->t[t].frozen; i++) {
                int unit = m->t[t].unit + (int)(i / per_slice), count = s + 1;
                if (unit == left_out(m, s)) /* the step does not update it */
                    continue;
                for (int before = 0; before < s; before++)
                    count -= unit == left_out(m, before);
                double x = g[t][i] * scale;
                mo[t][i] = 0.9 * mo[t][i] + 0.1 * x;
                ve[t][i] = 0.999 * ve[t][i] + 0.001 * x * x;
                double decay = m->t[t].no_decay ? 0 : (double)0.1f;
                w[t][i] -= (double)1e-2f * (mo[t][i] / (1 - pow(0.9, count)) /
                                                (sqrt(ve[t][i] / (1 - pow(0.999, count))) + 1e-8) +
                                            decay * w[t][i]);
            }
        }
    }
    for (int t = 0; t < m->n_tensors; t++) {
        /* A gradient in bf16 is off by up to 2^-9. Near zero AdamW turns that into a part of the learning
         * rate. */
        bool rounded = m->t[t].bf16 || m->bf16_wire;
        double tolerance = rounds_at_random(m) ? 4e-2 : rounded ? 1.2e-2 : 5e-5, off = 0, may_be_off = 0;
        double most_off = rounds_at_random(m) ? STEPS * 4e-2 : STEPS * 1e-2 + 1e-3;
        for (int64_t i = 0; i < m->t[t].n; i++) {
            double got = (double)a->values[t][m->t[t].frozen ? 0 : 1][i];
            assert_true(fabs(got - w[t][i]) <= (m->t[t].frozen ? 0 : most_off));
            off += fabs(got - w[t][i]);
            may_be_off += w_error[t][i];
        }
        /* The mean is off far less, because few gradients are near zero. */
        if (off > fmax(tolerance * (double)m->t[t].n, may_be_off))
            fail_msg("seed 0x%llx: tensor %d is off by %g in the mean", (unsigned long long)m->seed, t,
                     off / (double)m->t[t].n);
        free(w[t]);
        free(mo[t]);
        free(ve[t]);
        free(g[t]);
        free(w_error[t]);
    }
}

static uint64_t first_seed;
static int n_models = 12, max_world = 5;

/* Returns a counter of models that starts anywhere, so that short runs reach each kind over time. */
static int turn(int i)
{
    return (int)(random_mix(first_seed) % 60) + i;
}

/* In one world, every stage, prefetch and budget gives the same bits. */
static void stages_agree(void **state)
{
    for (int i = 0; i < n_models; i++) {
        struct model m;
        draw_model(&m, first_seed + (uint64_t)i, false);
        int world = 1 + (int)(random_mix(m.seed) % (uint64_t)max_world);
        m.accum = world * (1 + (int)(random_mix(m.seed + 1) % 4));
        struct run first;
        run_world(&m, &(struct run){.stage = 3, .world = world, .brackets = true}, &first);
        assert_near_reference(&m, &first);
        static const struct {
            int stage, prefetch;
            int64_t budget;
        } ways[] = {{0, 0, 0}, {1, 0, 0},       {2, 0, 0},       {3, 1, 0},
                    {3, 6, 0}, {3, 2, 1 << 17}, {3, 3, 1 << 20}, {3, -1, 0}};
        for (size_t k = 0; k < sizeof ways / sizeof ways[0]; k++) {
            /* Nesting that is not declared needs a second slot. Without prefetch, or with a small budget,
             * there is none. */
            if (m.nest && (ways[k].prefetch < 0 || ways[k].budget))
                continue;
            struct run other;
            run_world(&m,
                      &(struct run){.gpu = where_has_gpu,
                                    .any_states = true,
                                    .stage = ways[k].stage,
                                    .world = world,
                                    .prefetch = ways[k].prefetch,
                                    .budget = ways[k].budget,
                                    .brackets = true},
                      &other);
            assert_same(&m, &first, &other);
            free_values(&other);
        }
        free_values(&first);
    }
}

/* The same micro-batches on 1, 2 and 4 ranks, with brackets and without, give the same bits. */
static void worlds_agree(void **state)
{
    for (int i = 0; i < n_models; i++) {
        struct model m;
        draw_model(&m, first_seed + 1000 + (uint64_t)i, true);
        m.accum = 4;
        m.bf16_sums = false; /* with fewer ranks, a sum has more contributions, and is rounded more often */
        struct run first;
        run_world(&m, &(struct run){.stage = 0, .world = 1, .brackets = false}, &first);
        assert_near_reference(&m, &first);
        for (int world = 1; world <= max_world; world *= 2)
            for (int stage = (int)(random_mix(m.seed + (uint64_t)world) % 2); stage <= 3; stage += 2)
                for (int brackets = stage > 1; brackets < 2; brackets++) {
                    struct run other;
                    run_world(&m,
                              &(struct run){.stage = stage,
                                            .world = world,
                                            .brackets = brackets,
                                            .gpu = where_has_gpu,
                                            .any_states = true},
                              &other);
                    assert_same(&m, &first, &other);
                    free_values(&other);
                }
        free_values(&first);
    }
}

/* With one contribution per step, sums are rounded once, so also with bf16 sums worlds give the same bits. */
static void worlds_of_one_contribution_agree(void **state)
{
    for (int i = 0; i < n_models; i++) {
        struct model m;
        draw_model(&m, first_seed + 5000 + (uint64_t)i, true);
        m.accum = m.n_given = 2;
        m.bf16_sums = true;
        struct run first;
        run_world(&m, &(struct run){.stage = 3, .world = 2, .brackets = true}, &first);
        for (int world = 2; world <= max_world; world *= 2)
            for (int stage = 0; stage <= 3; stage++) {
                struct run other;
                run_world(
                    &m, &(struct run){.stage = stage, .world = world, .brackets = true, .gpu = where_has_gpu},
                    &other);
                assert_same(&m, &first, &other);
                free_values(&other);
            }
        free_values(&first);
    }
}

/* If the group size is a power of two, hybrids have the bits of a run without groups. Otherwise HSDP and
 * HFSDP agree. All are close to AdamW, also if sums are not deterministic. */
static void hybrids_agree(void **state)
{
    static const struct {
        int world, group;
    } ways[] = {{4, 2}, {6, 2}, {6, 3}, {8, 4}, {8, 2}};
    for (int i = 0; i < n_models; i++) {
        struct model m;
        draw_model(&m, first_seed + 3000 + (uint64_t)i, false);
        int world = ways[turn(i) % 5].world, group = ways[turn(i) % 5].group;
        bool same = group != 3, loose = turn(i) % 4 == 3;
        m.accum = world * (1 + (int)(random_mix(m.seed + 1) % 4));
        struct run first;
        run_world(&m,
                  &(struct run){.stage = 3,
                                .world = world,
                                .brackets = true,
                                .loose = loose,
                                .hybrid = same ? ZR_HYBRID_NONE : ZR_HSDP,
                                .group = group},
                  &first);
        assert_near_reference(&m, &first);
        for (int hybrid = ZR_HSDP; hybrid <= ZR_HFSDP; hybrid++) {
            struct run other;
            run_world(&m,
                      &(struct run){.gpu = where_has_gpu,
                                    .any_states = true,
                                    .stage = 3,
                                    .world = world,
                                    .prefetch = m.nest ? 0 : -1,
                                    .brackets = true,
                                    .loose = loose,
                                    .hybrid = hybrid,
                                    .group = group},
                      &other);
            if (loose)
                assert_near_reference(&m, &other);
            else
                assert_same(&m, &first, &other);
            free_values(&other);
        }
        free_values(&first);
    }
}

/* Granules change where tensors are cut, but not the bits. Each element is updated once with the same sum,
 * and the blocks of the norm stay whole. */
static void granules_change_no_bits(void **state)
{
    static const struct {
        int stage, hybrid, group;
    } ways[] = {{0, 0, 0}, {1, 0, 0}, {2, 0, 0}, {3, 0, 0}, {3, ZR_HSDP, 2}, {3, ZR_HFSDP, 2}};
    for (int i = 0; i < (n_models + 1) / 2; i++) {
        struct model m;
        draw_model(&m, first_seed + 4000 + (uint64_t)i, false);
        int world = turn(i) % 2 ? 4 : 2 + (int)(random_mix(m.seed) % (uint64_t)(max_world - 1));
        m.accum = world * (1 + (int)(random_mix(m.seed + 1) % 4));
        struct run first;
        run_world(&m, &(struct run){.stage = 3, .world = world, .brackets = true}, &first);
        for (size_t k = 0; k < sizeof ways / sizeof ways[0]; k++) {
            struct run other;
            if (ways[k].hybrid && world != 4)
                continue;
            run_world(&m,
                      &(struct run){.gpu = where_has_gpu,
                                    .any_states = true,
                                    .stage = ways[k].stage,
                                    .world = world,
                                    .brackets = true,
                                    .hybrid = ways[k].hybrid,
                                    .group = ways[k].group,
                                    .granules = true},
                      &other);
            assert_same(&m, &first, &other);
            free_values(&other);
        }
        free_values(&first);
    }
}

/* Without deterministic sums, every stage and world is still close to AdamW. */
static void not_deterministic(void **state)
{
    for (int i = 0; i < n_models; i++) {
        struct model m;
        draw_model(&m, first_seed + 2000 + (uint64_t)i, false);
        int world = 1 + (int)(random_mix(m.seed) % (uint64_t)max_world);
        m.accum = world * (1 + (int)(random_mix(m.seed + 1) % 4));
        struct run r;
        run_world(&m,
                  &(struct run){.stage = turn(i) % 4,
                                .world = world,
                                .brackets = true,
                                .loose = true,
                                .gpu = where_has_gpu,
                                .any_states = true},
                  &r);
        assert_near_reference(&m, &r);
        free_values(&r);
    }
}

int main(void)
{
    const char *seed = getenv("SEED"), *n = getenv("N_MODELS");
    first_seed = seed ? strtoull(seed, NULL, 0) : (uint64_t)time(NULL) * 1000;
    if (n)
        n_models = atoi(n);
    if (getenv("MAX_WORLD"))
        max_world = atoi(getenv("MAX_WORLD"));
    printf("SEED=%llu\n", (unsigned long long)first_seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stages_agree),
        cmocka_unit_test(worlds_agree),
        cmocka_unit_test(worlds_of_one_contribution_agree),
        cmocka_unit_test(not_deterministic),
        cmocka_unit_test(hybrids_agree),
        cmocka_unit_test(granules_change_no_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
