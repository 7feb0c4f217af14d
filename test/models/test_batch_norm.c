/* SPDX-License-Identifier: Apache-2.0 */
/* test_batch_norm.c: tests a net with running statistics, which are buffers. It trains at stages 0 to 3
 * and worlds 1 to 3 as it does plain. What one of these saves is resumed at every other, evaluates to the
 * same bits there, and continues training in the same way. */
#include "test/cmocka.h"
#include "test/models/batch_norm_net.h"
#include "test/models/model_ranks.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MICROS = 6, STEPS = 8, WORLDS = 3, MAX_TENSORS = 7 * BN_LAYERS };
#define SEED 23
#define LR   0.02f

struct options {
    int steps;
    const char *save, *load; /* folders; NULL: none */
    bool rank0;              /* buffers by ZERO_SYNC_RANK0 */
};

struct data {
    float input[BN_ROWS * BN_INPUTS];
    int truth[BN_ROWS];
};

/* Copies weights, running statistics and counters, as far as this rank has them. */
static int64_t keep(float *at, const float *from, int64_t n)
{
    memcpy(at, from, (size_t)n * sizeof *at);
    return n;
}

static int64_t n_kept(const struct bn_net *net)
{
    int64_t n = 0;
    for (int i = 0; i < BN_LAYERS; i++) {
        const struct bn_layer *l = &net->layers[i];
        n += l->outputs * (l->inputs + 1) + (l->n_batches ? 4 * l->outputs + 1 : 0);
    }
    return n;
}

static bool open_log(struct run_log *log, const struct bn_net *net, int steps)
{
    log->n_steps = steps;
    log->n_weights = n_kept(net);
    log->weights = calloc((size_t)log->n_weights, sizeof *log->weights);
    log->err = log->weights ? 0 : ZERO_ERR_NOMEM;
    return log->weights;
}

/* --- plain --- */

/* SGD without momentum by the definition in kernels/device.h. */
static void update(int64_t n, float *w, float *g)
{
    for (int64_t i = 0; i < n; i++) {
        w[i] = w[i] - LR * (g[i] * (1.0f / MICROS));
        g[i] = 0.0f;
    }
}

static double evaluate_plain(struct bn_net *net, struct data *d)
{
    bn_data(SEED + 1, 0, 0, d->input, d->truth);
    const float *x = d->input;
    for (int i = 0; i < BN_LAYERS; i++, x = net->layers[i - 1].y)
        bn_forward(&net->layers[i], x, 0);
    return bn_loss(net, d->truth);
}

static void train_plain(const void *options, struct run_log *log)
{
    const struct options *o = options;
    static struct bn_net net;
    static struct data d;
    if (bn_open(&net, SEED) || !open_log(log, &net, o->steps)) {
        log->err = ZERO_ERR_NOMEM;
        return;
    }
    for (int step = 0; step < o->steps; step++) {
        for (int m = 0; m < MICROS; m++) {
            bn_data(SEED, step, m, d.input, d.truth);
            const float *x = d.input;
            for (int i = 0; i < BN_LAYERS; i++, x = net.layers[i - 1].y)
                bn_forward(&net.layers[i], x, 1);
            log->loss[step] += bn_loss(&net, d.truth) / MICROS;
            for (int i = BN_LAYERS; i-- > 0;)
                bn_backward(&net, i);
        }
        for (int i = 0; i < BN_LAYERS; i++) {
            struct bn_layer *l = &net.layers[i];
            update((int64_t)l->inputs * l->outputs, l->w, l->dw);
            update(l->outputs, l->b, l->db);
            update(l->gamma ? l->outputs : 0, l->gamma, l->dgamma);
            update(l->gamma ? l->outputs : 0, l->beta, l->dbeta);
            bn_run(l, MICROS, MICROS);
        }
        log->eval[step] = evaluate_plain(&net, &d);
    }
    float *at = log->weights;
    for (int i = 0; i < BN_LAYERS; i++) {
        struct bn_layer *l = &net.layers[i];
        at += keep(at, l->w, (int64_t)l->inputs * l->outputs);
        at += keep(at, l->b, l->outputs);
        if (!l->gamma)
            continue;
        at += keep(at, l->gamma, l->outputs);
        at += keep(at, l->beta, l->outputs);
        at += keep(at, l->running_mean, l->outputs);
        at += keep(at, l->running_variance, l->outputs);
        *at++ = (float)*l->n_batches;
    }
    bn_close(&net);
}

/* --- wrapped --- */

struct wrapped {
    zero_ctx *z;
    struct bn_net net;
    struct zero_tensor tensors[MAX_TENSORS];
    char names[MAX_TENSORS][24];
    int n;
};

static void add(struct wrapped *w, int unit, const char *name, void *param, void *grad, int64_t rows,
                int64_t columns)
{
    snprintf(w->names[w->n], sizeof w->names[0], "%d.%s", unit, name);
    w->tensors[w->n] = (struct zero_tensor){.name = w->names[w->n],
                                            .param = param,
                                            .grad = grad,
                                            .shape = {rows, columns},
                                            .dtype = ZERO_F32,
                                            .unit = unit,
                                            .flags = grad ? 0 : ZERO_BUFFER};
    w->n++;
}

static void list_tensors(struct wrapped *w)
{
    for (int i = 0; i < BN_LAYERS; i++) {
        struct bn_layer *l = &w->net.layers[i];
        add(w, i, "w", &l->w, &l->dw, l->outputs, l->inputs);
        add(w, i, "b", &l->b, &l->db, l->outputs, 0);
        if (!l->gamma)
            continue;
        add(w, i, "gamma", &l->gamma, &l->dgamma, l->outputs, 0);
        add(w, i, "beta", &l->beta, &l->dbeta, l->outputs, 0);
        add(w, i, "running_mean", &l->running_mean, NULL, l->outputs, 0);
        add(w, i, "running_variance", &l->running_variance, NULL, l->outputs, 0);
        add(w, i, "n_batches", &l->n_batches, NULL, 1, 0);
        w->tensors[w->n - 1].dtype = ZERO_I64;
    }
}

static int forward(struct wrapped *w, const float *x, int training)
{
    int err = 0;
    for (int i = 0; !err && i < BN_LAYERS; i++) {
        err = zero_begin(w->z, i, ZERO_FORWARD);
        if (!err)
            bn_forward(&w->net.layers[i], x, training);
        x = w->net.layers[i].y;
        if (!err)
            err = zero_end(w->z, i, ZERO_FORWARD);
    }
    return err;
}

static int backward(struct wrapped *w)
{
    int err = 0;
    for (int i = BN_LAYERS; !err && i-- > 0;) {
        err = zero_begin(w->z, i, ZERO_BACKWARD);
        if (!err)
            bn_backward(&w->net, i);
        if (!err)
            err = zero_end(w->z, i, ZERO_BACKWARD);
    }
    return err;
}

/* Every rank evaluates the same rows. With the same state it must give the same bits. */
static int evaluate(struct wrapped *w, struct data *d, double *loss)
{
    bn_data(SEED + 1, 0, 0, d->input, d->truth);
    int err = forward(w, d->input, 0);
    *loss = err ? 0 : bn_loss(&w->net, d->truth);
    return err;
}

static int one_step(struct wrapped *w, const struct options *o, const struct run_setup *setup, int rank,
                    int step, struct data *d, struct run_log *log)
{
    int A = MICROS / setup->world, err = 0;
    double loss = 0.0;
    for (int a = 0; !err && a < A; a++) {
        bn_data(SEED, step, run_micro(setup, rank, a), d->input, d->truth);
        err = forward(w, d->input, 1);
        if (!err) {
            loss += bn_loss(&w->net, d->truth) / A;
            err = backward(w);
        }
    }
    struct zero_step_info info = {0};
    if (!err)
        err = zero_step(w->z, LR, &info);
    for (int i = 0; !err && i < BN_LAYERS; i++)
        bn_run(&w->net.layers[i], A, MICROS);
    if (!err)
        err = zero_sync_buffers(w->z, o->rank0 ? ZERO_SYNC_RANK0 : ZERO_SYNC_MEAN);
    if (!err)
        err = zero_mean(w->z, &loss, 1);
    log->loss[step] = loss;
    log->norm[step] = info.grad_norm;
    return err ? err : evaluate(w, d, &log->eval[step]);
}

static void train_rank(const void *options, const struct run_setup *setup, int rank, const char *url,
                       struct run_log *log)
{
    const struct options *o = options;
    struct wrapped *w = calloc(1, sizeof *w);
    struct data *d = calloc(1, sizeof *d);
    /* Other ranks' weights and statistics must not count. */
    if (!w || !d || bn_open(&w->net, SEED + (uint64_t)rank) || !open_log(log, &w->net, o->steps)) {
        log->err = ZERO_ERR_NOMEM;
        return;
    }
    if (rank)
        w->net.layers[0].running_mean[0] = 1e6f * (float)rank;
    struct zero_config cfg = run_config(setup, rank, url);
    cfg.optim.optimizer = ZERO_SGD;
    cfg.grad_accum_steps = MICROS / setup->world;
    list_tensors(w);
    void *old[2 * MAX_TENSORS] = {0};
    for (int i = 0; i < w->n; i++) {
        old[2 * i] = w->tensors[i].grad ? *w->tensors[i].param : NULL;
        old[2 * i + 1] = w->tensors[i].grad ? *w->tensors[i].grad : NULL;
    }
    RUN_TRY(log, zero_wrap(&w->z, w->tensors, w->n, &cfg));
    for (int i = 0; i < 2 * MAX_TENSORS; i++)
        free(old[i]);
    int from = 0;
    if (o->load) {
        RUN_TRY(log, zero_load(w->z, o->load));
        from = STEPS;
        RUN_TRY(log, evaluate(w, d, &log->eval[from - 1]));
    }
    for (int step = from; step < o->steps; step++)
        RUN_TRY(log, one_step(w, o, setup, rank, step, d, log));
    if (o->save)
        RUN_TRY(log, zero_save(w->z, o->save, NULL));
    float *at = log->weights;
    for (int i = 0; i < w->n; i++) {
        const struct zero_tensor *t = &w->tensors[i];
        int64_t n = t->shape[0] * (t->shape[1] ? t->shape[1] : 1), count = 0;
        if (t->dtype == ZERO_I64)
            RUN_TRY(log, zero_read(w->z, i, ZERO_VALUE_PARAM, 0, n, &count));
        else
            RUN_TRY(log, zero_read(w->z, i, ZERO_VALUE_PARAM, 0, n, at));
        if (t->dtype == ZERO_I64)
            *at = (float)count;
        at += n;
    }
out:
    if (!w->z && log->err)
        for (int i = 0; i < 2 * MAX_TENSORS; i++)
            old[i] = NULL;
    run_unwrap(log, &w->z);
    bn_close(&w->net);
    free(w);
    free(d);
}

static const struct run_model model = {.plain = train_plain, .rank = train_rank, .tolerance = 5e-6};

/* --- tests --- */

static void plain_net_learns(void **state)
{
    struct options o = {.steps = 30};
    struct run_log log = run_plain(&model, &o);
    run_assert_learned(&log, 0.8);
    /* The running statistics are close to those of training: an evaluation is not much worse. */
    assert_true(log.eval[29] < 1.2 * log.loss[29]);
    run_log_free(&log);
}

/* All worlds see the same micro-batches, so all of them end near the plain run, including their buffers. */
static void every_stage_and_world(void **state)
{
    struct options o = {.steps = STEPS};
    run_compare(&model, &o, &(struct run_setup){.brackets = true, .prefetch = -1}, WORLDS, false);
}

static char folder[] = "/tmp/zero-batch-norm-XXXXXX";

static void remove_folder(const char *path)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", path);
    assert_int_equal(system(command), 0);
}

static void resumes_elsewhere(void **state)
{
    assert_non_null(mkdtemp(folder));
    struct options whole = {.steps = 2 * STEPS};
    struct run_log plain = run_plain(&model, &whole);
    for (int way = 0; way < 4 * WORLDS; way++) {
        char dir[sizeof folder + 16];
        struct run_setup from = {.brackets = true, .prefetch = -1, .stage = way % 4, .world = 1 + way / 4};
        struct options first = {.steps = STEPS, .save = dir};
        snprintf(dir, sizeof dir, "%s/%d", folder, way);
        struct run_log saved = run_ranks(&model, &first, &from);
        for (int k = 1; k < 4 * WORLDS; k++) {
            int other = (way + k) % (4 * WORLDS);
            struct run_setup to = {
                .brackets = true, .prefetch = -1, .stage = other % 4, .world = 1 + other / 4};
            struct options second = {.steps = k % 3 ? STEPS : 2 * STEPS, .load = dir};
            struct run_log log = run_ranks(&model, &second, &to);
            char what[512];
            snprintf(what, sizeof what, "saved at stage %d, world %d; %s", from.stage, from.world,
                     run_setup_text(&to));
            if (memcmp(&log.eval[STEPS - 1], &saved.eval[STEPS - 1], sizeof(double)) != 0)
                fail_msg("%s: evaluates to %.17g, expected %.17g", what, log.eval[STEPS - 1],
                         saved.eval[STEPS - 1]);
            if (second.steps == STEPS) {
                assert_memory_equal(log.weights, saved.weights, (size_t)log.n_weights * sizeof(float));
            } else {
                memcpy(log.loss, plain.loss, STEPS * sizeof *log.loss);
                memcpy(log.eval, plain.eval, STEPS * sizeof *log.eval);
                memcpy(log.norm, plain.norm, STEPS * sizeof *log.norm);
                run_assert_near(&model, &plain, &log, what);
            }
            run_log_free(&log);
        }
        run_log_free(&saved);
    }
    run_log_free(&plain);
    remove_folder(folder);
}

/* Rank 0's statistics come from fewer micro-batches. They are near the plain net's and equal on all ranks
 * (run_ranks checks that), but not the plain net's. */
static void rank_0s_statistics(void **state)
{
    struct options mean = {.steps = STEPS}, rank0 = {.steps = STEPS, .rank0 = true};
    struct run_setup setup = {.brackets = true, .stage = 2, .world = 3};
    struct run_log a = run_ranks(&model, &mean, &setup), b = run_ranks(&model, &rank0, &setup);
    assert_memory_equal(a.loss, b.loss, sizeof a.loss);
    assert_true(memcmp(a.eval, b.eval, sizeof a.eval) != 0);
    run_log_free(&a);
    run_log_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_net_learns),
        cmocka_unit_test(every_stage_and_world),
        cmocka_unit_test(resumes_elsewhere),
        cmocka_unit_test(rank_0s_statistics),
    };
    return cmocka_run_group_tests_name("batch_norm", tests, NULL, NULL);
}
