/* test_misuse.c: ways to use the library wrongly, one row each, and what has to come out: the right weights
 * all the same, an error that names what was done, or a line. Nothing else counts as handled: a row whose
 * outcome is silent fails.
 *
 * Ranks are threads, each with a toy model. Every row runs at the stages and worlds that it names. */
#include "test/zero/toy_net.h"

#include <math.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

enum { STEPS = 3, MOST_LINES = 8192 };

/* One rank of one row. */
struct program {
    struct toy_rank *rank;
    struct toy model;
    struct zero_config cfg;
    zero_ctx *z;
    int32_t n_tensors;
    struct zero_tensor *table;                 /* the model's, unless a row gives a wider one */
    struct zero_tensor wider[TOY_TENSORS + 1]; /* the model's, and a counter that is a buffer */
    int64_t counter;
    void *counter_at;
    bool odd; /* the last rank: where ranks have to differ, it does */
    pthread_mutex_t lock;
    char lines[MOST_LINES];
    void *spare[TOY_TENSORS]; /* memory of the model's own, for pointers that go wrong */
};

enum { S0 = 1, S1 = 2, S2 = 4, S3 = 8, IN_PLACE = S0 | S1, SHARDED = S2 | S3, ALL = 15 };
enum { W1 = 1, W2 = 2, BOTH = 3 };

enum outcome { RIGHT = 1, ERROR, LINE };

struct misuse {
    const char *name;
    int stages, worlds;
    void (*configure)(struct program *p); /* before zero_wrap; NULL: nothing */
    int (*run)(struct program *p);        /* after it; the first error; NULL: trains as it should */
    enum outcome outcome;
    int code;                     /* ERROR */
    const char *says[3];          /* parts of the error or the line */
    const char *variable, *value; /* of the environment; NULL: none */
    bool only_rank_0;             /* the line is of what all ranks have alike, and told once */
};

static void keep_line(void *arg, const char *line)
{
    struct program *p = arg;
    pthread_mutex_lock(&p->lock);
    size_t n = strlen(p->lines);
    snprintf(p->lines + n, sizeof p->lines - n, "%s\n", line);
    pthread_mutex_unlock(&p->lock);
}

/* ---- how a model trains ---- */

static int micro_batch(struct program *p, int step, int k)
{
    int err = toy_forward(&p->model, p->z, true);
    return err ? err : toy_backward(&p->model, p->z, true, step, p->rank->rank + k * p->rank->world);
}

/* between: what the model does at the start of a micro-batch; NULL: nothing. */
static int train_with(struct program *p, void (*between)(struct program *p))
{
    int err = 0;
    for (int step = 0; !err && step < STEPS; step++) {
        for (int k = 0; !err && k < p->cfg.grad_accum_steps; k++) {
            if (between)
                between(p);
            err = micro_batch(p, step, k);
        }
        if (!err)
            err = zero_step(p->z, 1e-2f, NULL);
    }
    return err;
}

static int train(struct program *p)
{
    return train_with(p, NULL);
}

static int train_unbracketed(struct program *p, void (*between)(struct program *p))
{
    int err = 0;
    for (int step = 0; !err && step < STEPS; step++) {
        for (int k = 0; !err && k < p->cfg.grad_accum_steps; k++) {
            if (k)
                err = zero_micro(p->z);
            if (between)
                between(p);
            if (!err)
                err = toy_forward(&p->model, p->z, false);
            if (!err)
                err = toy_backward(&p->model, p->z, false, step, p->rank->rank + k * p->rank->world);
        }
        if (!err)
            err = zero_step(p->z, 1e-2f, NULL);
    }
    return err;
}

static int64_t bytes_of(int tensor)
{
    return toy_elems(tensor) * 4; /* or half of it, for bf16: room enough */
}

/* ---- brackets ---- */

static int begin_twice(struct program *p)
{
    int err = zero_begin(p->z, 1, ZERO_FORWARD);
    return err ? err : zero_begin(p->z, 1, ZERO_FORWARD);
}

static int end_without_begin(struct program *p)
{
    return zero_end(p->z, 1, ZERO_BACKWARD);
}

static int end_in_other_phase(struct program *p)
{
    int err = zero_begin(p->z, 1, ZERO_FORWARD);
    return err ? err : zero_end(p->z, 1, ZERO_BACKWARD);
}

static int step_with_open_bracket(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    if (!err)
        err = zero_begin(p->z, 2, ZERO_FORWARD);
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static int micro_with_open_bracket(struct program *p)
{
    int err = zero_begin(p->z, 2, ZERO_FORWARD);
    return err ? err : zero_micro(p->z);
}

static int no_such_unit(struct program *p)
{
    return zero_begin(p->z, TOY_UNITS, ZERO_FORWARD);
}

static int no_such_phase(struct program *p)
{
    return zero_begin(p->z, 0, (enum zero_phase)3);
}

static int forward_only(struct program *p)
{
    int err = toy_forward(&p->model, p->z, true);
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static int evaluates_between(struct program *p)
{
    int err = toy_forward(&p->model, p->z, true);
    for (int step = 0; !err && step < STEPS; step++) {
        err = micro_batch(p, step, 0);
        if (!err)
            err = zero_step(p->z, 1e-2f, NULL);
        if (!err)
            err = toy_forward(&p->model, p->z, true);
    }
    return err;
}

static int no_brackets_at_all(struct program *p)
{
    return zero_step(p->z, 1e-2f, NULL);
}

/* ---- steps and micro-batches ---- */

static void accumulate_four(struct program *p)
{
    p->cfg.grad_accum_steps = 4;
}

static int three_of_four(struct program *p)
{
    int err = 0;
    for (int k = 0; !err && k < 3; k++)
        err = micro_batch(p, 0, k);
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static int micro_too_often(struct program *p)
{
    int err = 0;
    for (int k = 0; !err && k < 4; k++)
        err = zero_micro(p->z);
    return err;
}

static int forgets_micro(struct program *p)
{
    int err = 0;
    for (int k = 0; !err && k < 4; k++) {
        err = toy_forward(&p->model, p->z, false);
        if (!err)
            err = toy_backward(&p->model, p->z, false, 0, p->rank->rank + k * p->rank->world);
    }
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static int not_a_number(struct program *p)
{
    return zero_step(p->z, NAN, NULL);
}

/* ---- gradients that the model zeroes itself ---- */

/* As autodiff frameworks do: whatever the pointers reach. */
static void zeroes_gradients(struct program *p)
{
    for (int t = 0; t < p->n_tensors; t++)
        if (p->model.grad[t])
            memset(p->model.grad[t], 0, (size_t)toy_elems(t) * (p->model.table[t].dtype == ZERO_F32 ? 4 : 2));
}

static int zeroes_bracketed(struct program *p)
{
    return train_with(p, zeroes_gradients);
}

static int zeroes_unbracketed(struct program *p)
{
    return train_unbracketed(p, zeroes_gradients);
}

static void accumulate_without_order(struct program *p)
{
    p->cfg.grad_accum_steps = 4;
    p->cfg.deterministic = 0;
}

static void in_place_and_deterministic(struct program *p)
{
    p->cfg.grad_accum_steps = 4;
    p->cfg.deterministic = 1;
    p->cfg.grad_in_place = 1;
}

/* ---- values ---- */

static int reads_past_the_end(struct program *p)
{
    float x[8];
    return zero_read(p->z, 0, ZERO_VALUE_PARAM, toy_elems(0) - 4, 8, x);
}

static int reads_no_tensor(struct program *p)
{
    float x[8];
    return zero_read(p->z, TOY_TENSORS, ZERO_VALUE_PARAM, 0, 8, x);
}

static int reads_state_of_frozen(struct program *p)
{
    float x[8];
    return zero_read(p->z, TOY_FROZEN, ZERO_VALUE_STATE, 0, 8, x);
}

static int reads_in_bracket(struct program *p)
{
    float x[8];
    int err = zero_begin(p->z, 0, ZERO_FORWARD);
    return err ? err : zero_read(p->z, 0, ZERO_VALUE_PARAM, 0, 8, x);
}

static int writes_nothing(struct program *p)
{
    return zero_write(p->z, 0, ZERO_VALUE_PARAM, 0, 8, NULL);
}

static int means_too_many(struct program *p)
{
    double x[65] = {0};
    return zero_mean(p->z, x, 65);
}

/* ---- checkpoints ---- */

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

/* ---- ranks that differ ---- */

static int other_lr(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    if (!err)
        err = zero_step(p->z, p->odd ? 2e-2f : 1e-2f, NULL);
    return err ? err : train(p);
}

static int other_unit(struct program *p)
{
    int err = zero_begin(p->z, p->odd ? 2 : 1, ZERO_FORWARD);
    if (!err)
        err = zero_end(p->z, p->odd ? 2 : 1, ZERO_FORWARD);
    return err ? err : train(p);
}

static int odd_one_reads(struct program *p)
{
    float x[8];
    int err = p->odd ? zero_read(p->z, 0, ZERO_VALUE_PARAM, 0, 8, x) : 0;
    return err ? err : train(p);
}

static void other_stage(struct program *p)
{
    p->cfg.stage = p->odd ? (p->cfg.stage + 1) % 4 : p->cfg.stage;
}

static void other_clip(struct program *p)
{
    p->cfg.clip = p->odd ? 1.0f : 2.0f;
}

static void other_shape(struct program *p)
{
    if (p->odd)
        p->model.table[TOY_FROZEN].shape[0] = 10;
}

/* ---- what only the library can say ---- */

static void lends_on_the_host(struct program *p)
{
    p->cfg.nccl_comm = &p->cfg;
}

static int poisoned(struct program *p)
{
    int err = toy_forward(&p->model, p->z, true);
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        err = zero_begin(p->z, u, ZERO_BACKWARD);
        if (!err)
            toy_add_gradient(&p->model, u, 0, p->rank->rank);
        if (!err && u == 0)
            toy_poison_gradient(&p->model, 0, NAN);
        if (!err)
            err = zero_end(p->z, u, ZERO_BACKWARD);
    }
    if (!err)
        err = zero_step(p->z, 1e-2f, NULL);
    return err ? err : train(p);
}

static int four_of_one(struct program *p)
{
    int err = 0;
    for (int k = 0; !err && k < 4; k++)
        err = micro_batch(p, 0, k);
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static int steps_twice(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    if (!err)
        err = zero_step(p->z, 1e-2f, NULL);
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

/* ---- the step's numbers ---- */

static int carries_nine(struct program *p)
{
    double x[9] = {0};
    return zero_carry(p->z, x, 9);
}

static int odd_one_carries(struct program *p)
{
    double x = 1;
    int err = p->odd ? zero_carry(p->z, &x, 1) : 0;
    return err ? err : train(p);
}

static int looks_back_at_nothing(struct program *p)
{
    struct zero_step_info info;
    return zero_last_step(p->z, &info);
}

static int tunes_the_learning_rate(struct program *p)
{
    return zero_tune(p->z, 0, "lr", 1e-3);
}

static int tunes_to_no_number(struct program *p)
{
    return zero_tune(p->z, 0, "weight_decay", NAN);
}

static int tunes_in_a_step(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    return err ? err : zero_tune(p->z, 0, "clip", 1);
}

static void plain_sgd(struct program *p)
{
    p->cfg.optimizer = ZERO_SGD;
}

static int begins_a_momentum(struct program *p)
{
    return zero_tune(p->z, 0, "beta1", 0.9);
}

static int odd_one_tunes(struct program *p)
{
    int err = zero_tune(p->z, 0, "clip", p->odd ? 2 : 1);
    return err ? err : train(p);
}

static int reads_a_gradient_early(struct program *p)
{
    float x[8];
    int err = train(p);
    return err ? err : zero_read(p->z, 0, ZERO_VALUE_GRAD, 0, 8, x);
}

static int reads_a_gradient_of_frozen(struct program *p)
{
    float x[8];
    int err = micro_batch(p, 0, 0);
    return err ? err : zero_read(p->z, TOY_FROZEN, ZERO_VALUE_GRAD, 0, 8, x);
}

static int writes_a_gradient(struct program *p)
{
    float x[8] = {0};
    int err = micro_batch(p, 0, 0);
    return err ? err : zero_write(p->z, 0, ZERO_VALUE_GRAD, 0, 8, x);
}

static int accumulates_after_reading(struct program *p)
{
    float x[8];
    int err = micro_batch(p, 0, 0);
    if (!err)
        err = zero_read(p->z, 0, ZERO_VALUE_GRAD, 0, 8, x);
    return err ? err : micro_batch(p, 0, 1);
}

static int goes_below_the_first_step(struct program *p)
{
    return zero_set_step(p->z, -1);
}

static int odd_one_sets_the_step(struct program *p)
{
    int err = p->odd ? zero_set_step(p->z, 7) : 0;
    return err ? err : train(p);
}

static void budget_for_all(struct program *p)
{
    p->cfg.param_budget_bytes = 1 << 20;
}

/* ---- configurations ---- */

static void forgets_init(struct program *p)
{
    int32_t stage = p->cfg.stage;
    memset(&p->cfg, 0, sizeof p->cfg);
    p->cfg.stage = stage;
}

static void never_begins(struct program *p)
{
    memset(&p->cfg, 0xcd, sizeof p->cfg);
}

/* A struct of the time when it began with its size and the stage. */
static void of_an_old_header(struct program *p)
{
    p->cfg.size = 208;
    p->cfg.version = (uint32_t)p->cfg.stage;
}

static void of_a_later_header(struct program *p)
{
    p->cfg.size += 1024;
}

static void tensors_of_a_later_header(struct program *p)
{
    p->cfg.tensor_size += 1024;
}

static void without_tensor_size(struct program *p)
{
    struct zero_config begun;
    zero_config_init(&begun, sizeof begun);
    p->cfg.tensor_size = begun.tensor_size;
}

static void without_stats_size(struct program *p)
{
    p->cfg.stats_size = 0;
}

static int asks_for_stats(struct program *p)
{
    struct zero_stats stats;
    return zero_get_stats(p->z, &stats);
}

static void without_step_info_size(struct program *p)
{
    p->cfg.step_info_size = 0;
}

static int asks_for_step_info(struct program *p)
{
    struct zero_step_info info;
    int err = micro_batch(p, 0, 0);
    return err ? err : zero_step(p->z, 1e-2f, &info);
}

static void without_weight_size(struct program *p)
{
    p->cfg.weight_size = 0;
}

static int exports_a_map(struct program *p)
{
    const struct zero_weight map = {.name = "w"};
    return zero_export(p->z, "/tmp/there-is-no-such-folder/weights", &map, 1, 0);
}

static void without_call_size(struct program *p)
{
    static const struct zero_call order[] = {{0, ZERO_FORWARD, 0}, {0, ZERO_FORWARD, 1}};
    p->cfg.call_size = 0;
    p->cfg.order = order;
    p->cfg.n_order = 2;
}

#define SETS(field, value)                                                                                   \
    static void sets_##field(struct program *p)                                                              \
    {                                                                                                        \
        p->cfg.field = value;                                                                                \
    }
SETS(timeout_ms, 0)
SETS(grad_accum_steps, 0)
SETS(grad_scale, 0)
SETS(prefetch, -1)
SETS(beta1, NAN)
SETS(beta2, 1)
SETS(eps, -1e-8f)
SETS(weight_decay, INFINITY)
SETS(clip, -1)
SETS(param_budget_bytes, 0)
#undef SETS

static void no_eps(struct program *p)
{
    p->cfg.optimizer = ZERO_RMSPROP;
    p->cfg.eps = 0;
}

/* ---- first values ---- */

static void has_no_values(struct program *p)
{
    for (int t = 0; t < p->n_tensors; t++)
        p->model.param[t] = NULL;
}

static void nobodys_values(struct program *p)
{
    p->cfg.init_from = ZERO_INIT_RANK0;
    has_no_values(p);
}

static void values_later(struct program *p)
{
    p->cfg.init_from = ZERO_INIT_LATER;
    has_no_values(p);
}

static void no_such_source(struct program *p)
{
    p->cfg.init_from = 4;
}

static void other_source(struct program *p)
{
    p->cfg.init_from = p->odd ? ZERO_INIT_LATER : ZERO_INIT_MODEL;
}

static int refuses_to_init(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    struct program *p = arg;
    memset(dst, 0, (size_t)(n * (p->model.table[tensor].dtype == ZERO_F32 ? 4 : 2)));
    (void)first;
    return p->odd && tensor == 4 ? -3 : 0;
}

static int inits_nothing(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    (void)arg, (void)tensor, (void)first, (void)n, (void)dst;
    return 0;
}

static void calls_nobody(struct program *p)
{
    p->cfg.init_from = ZERO_INIT_CALL;
}

static void callback_nobody_asks(struct program *p)
{
    p->cfg.init = inits_nothing;
}

static void callback_that_fails(struct program *p)
{
    p->cfg.init_from = ZERO_INIT_CALL;
    p->cfg.init = refuses_to_init;
    p->cfg.init_arg = p;
    has_no_values(p);
}

static void callback_that_writes_nothing(struct program *p)
{
    p->cfg.init_from = ZERO_INIT_CALL;
    p->cfg.init = inits_nothing;
    has_no_values(p);
}

static int computes_too_early(struct program *p)
{
    return zero_begin(p->z, 0, ZERO_FORWARD);
}

static int accumulates_too_early(struct program *p)
{
    return zero_micro(p->z);
}

static int norms_too_early(struct program *p)
{
    double norm;
    return zero_norm(p->z, &norm);
}

static int saves_too_early(struct program *p)
{
    return zero_save(p->z, "/tmp/there-is-no-such-folder/ckpt");
}

static int exports_too_early(struct program *p)
{
    return zero_export(p->z, "/tmp/there-is-no-such-folder", NULL, 0, 0);
}

static int gathers_too_early(struct program *p)
{
    return zero_gather_all(p->z, 0);
}

static int reads_too_early(struct program *p)
{
    float x[8];
    return zero_read(p->z, 0, ZERO_VALUE_PARAM, 0, 8, x);
}

static int write_values(struct program *p, int tensor, int64_t first, int64_t n)
{
    int64_t size = p->model.table[tensor].dtype == ZERO_F32 ? 4 : 2;
    return zero_write(p->z, tensor, ZERO_VALUE_PARAM, first, n,
                      (const char *)p->model.own[tensor] + first * size);
}

static int forgets_an_element(struct program *p)
{
    int err = 0;
    for (int t = 0; !err && t < p->n_tensors; t++)
        err = write_values(p, t, 0, toy_elems(t) - (t == 2));
    return err ? err : zero_begin(p->z, 0, ZERO_FORWARD);
}

static int writes_states_alone(struct program *p)
{
    int err = zero_write(p->z, 0, ZERO_VALUE_STATE, 0, toy_elems(0), p->spare[0]);
    return err ? err : zero_begin(p->z, 0, ZERO_FORWARD);
}

static int writes_other_ranges(struct program *p)
{
    int err = write_values(p, 0, p->odd ? 8 : 0, 8);
    return err ? err : zero_begin(p->z, 0, ZERO_FORWARD);
}

/* Backward computes in memory that the library does not know. */
static int writes_elsewhere(struct program *p)
{
    int err = 0;
    for (int step = 0; !err && step < STEPS; step++) {
        err = toy_forward(&p->model, p->z, true);
        for (int u = TOY_UNITS; !err && u-- > 0;) {
            err = zero_begin(p->z, u, ZERO_BACKWARD);
            if (!err)
                err = zero_end(p->z, u, ZERO_BACKWARD);
        }
        if (!err)
            err = zero_step(p->z, 1e-2f, NULL);
    }
    return err;
}

static int writes_elsewhere_unbracketed(struct program *p)
{
    struct zero_step_info info;
    return zero_step(p->z, 1e-2f, &info);
}

static int forgets_a_unit(struct program *p)
{
    int err = toy_forward(&p->model, p->z, true);
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        err = zero_begin(p->z, u, ZERO_BACKWARD);
        if (!err && u != 2)
            toy_add_gradient(&p->model, u, 0, p->rank->rank);
        if (!err)
            err = zero_end(p->z, u, ZERO_BACKWARD);
    }
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static int steps_twice_unbracketed(struct program *p)
{
    struct zero_step_info info;
    int err = toy_backward(&p->model, p->z, false, 0, p->rank->rank);
    if (!err)
        err = zero_step(p->z, 1e-2f, NULL);
    return err ? err : zero_step(p->z, 1e-2f, &info);
}

static void assigns_gradient(struct program *p)
{
    p->model.grad[0] = p->spare[0];
}

static int allocates_gradients_late(struct program *p)
{
    assigns_gradient(p);
    return train(p);
}

static int allocates_late_unbracketed(struct program *p)
{
    assigns_gradient(p);
    return train_unbracketed(p, NULL);
}

static int assigns_a_parameter(struct program *p)
{
    p->model.param[2] = p->spare[2];
    return train(p);
}

static int opens_two_layers(struct program *p)
{
    int err = zero_begin(p->z, 1, ZERO_FORWARD);
    return err ? err : zero_begin(p->z, 2, ZERO_FORWARD);
}

static int opens_and_closes_two_layers(struct program *p)
{
    int err = opens_two_layers(p);
    if (!err)
        err = zero_end(p->z, 2, ZERO_FORWARD);
    if (!err)
        err = zero_end(p->z, 1, ZERO_FORWARD);
    return err ? err : train(p);
}

static int never_steps(struct program *p)
{
    return micro_batch(p, 0, 0);
}

/* ---- touches that check mode finds ---- */

static int writes_after_end(struct program *p)
{
    int err = toy_forward(&p->model, p->z, true);
    float *kept = NULL;
    if (!err)
        err = zero_begin(p->z, 0, ZERO_BACKWARD);
    if (!err) {
        kept = p->model.grad[0];
        toy_add_gradient(&p->model, 0, 0, 0);
        err = zero_end(p->z, 0, ZERO_BACKWARD);
    }
    if (!err)
        kept[3] = 1;
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static int reads_before_begin(struct program *p)
{
    volatile float seen = ((const float *)p->model.param[0])[7];
    (void)seen;
    return train(p);
}

static int writes_a_parameter(struct program *p)
{
    int err = zero_begin(p->z, 0, ZERO_FORWARD);
    if (!err)
        ((float *)p->model.param[0])[7] = 1;
    return err ? err : zero_end(p->z, 0, ZERO_FORWARD);
}

/* A copy of the model's structs, made before zero_wrap, is what computes. */
static int computes_with_a_copy(struct program *p)
{
    struct toy copy = p->model;
    int err = toy_forward(&p->model, p->z, true);
    memcpy(copy.param, copy.own, sizeof copy.param);
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        err = zero_begin(p->z, u, ZERO_BACKWARD);
        memcpy(copy.grad, p->model.grad, sizeof copy.grad);
        if (!err)
            toy_add_gradient(&copy, u, 0, p->rank->rank);
        if (!err)
            err = zero_end(p->z, u, ZERO_BACKWARD);
    }
    return err ? err : zero_step(p->z, 1e-2f, NULL);
}

static void overwrites_f32(struct program *p)
{
    p->model.table[0].flags |= ZERO_GRAD_OVERWRITE;
}

static void overwrites_bf16(struct program *p)
{
    p->model.table[2].flags |= ZERO_GRAD_OVERWRITE;
}

static void overwrites_layers(struct program *p)
{
    p->model.table[TOY_STACKED].flags |= ZERO_GRAD_OVERWRITE;
    p->cfg.grad_accum_steps = 4;
}

/* The last element of what it overwrites is left as it was. */
static int leaves_one_unwritten(struct program *p)
{
    int err = toy_forward(&p->model, p->z, true);
    if (!err)
        err = zero_begin(p->z, 3, ZERO_BACKWARD);
    for (int64_t i = 0; !err && i + 1 < toy_elems(4); i++)
        ((uint16_t *)p->model.grad[4])[i] = 0x3f80;
    return err ? err : zero_end(p->z, 3, ZERO_BACKWARD);
}

static void one_row_less(struct program *p)
{
    p->model.table[0].shape[0]--;
}

static void a_little_less_of_each_layer(struct program *p)
{
    p->model.table[TOY_STACKED].shape[1]--;
}

static void much_less(struct program *p)
{
    p->model.table[4].shape[0] = 128; /* as many bytes as a gradient is aligned to */
}

static int train_plainly(struct program *p)
{
    return train_unbracketed(p, NULL);
}

static void one_rank_checks(struct program *p)
{
    p->cfg.check = p->odd;
}

/* ---- the table and the configuration ---- */

static void size_of_nothing(struct program *p)
{
    p->cfg.size = 0;
}

static void two_of_a_name(struct program *p)
{
    p->model.table[2].name = p->model.table[0].name;
}

static void gap_in_units(struct program *p)
{
    p->model.table[4].unit = 5;
}

static void pointer_of_nothing(struct program *p)
{
    p->model.table[2].param = NULL;
}

static void values_of_nothing(struct program *p)
{
    p->model.param[2] = NULL;
}

static int refuses(void *arg, const struct zero_update *u)
{
    (void)arg;
    (void)u;
    return 3;
}

static void update_that_refuses(struct program *p)
{
    p->cfg.update = refuses;
}

static void unknown_optimizer(struct program *p)
{
    p->model.table[1].optimizer = 99;
}

static void negative_rate(struct program *p)
{
    p->model.table[2].lr_scale = -0.5f;
}

static void rate_that_is_no_number(struct program *p)
{
    p->model.table[TOY_FROZEN].lr_scale = NAN;
}

static void infinite_decay(struct program *p)
{
    p->model.table[0].decay_scale = INFINITY;
}

static void decay_and_none(struct program *p)
{
    p->model.table[2].decay_scale = 0.5f;
}

static void own_update_beside_optimizer(struct program *p)
{
    p->cfg.update = refuses;
    p->model.table[1].optimizer = ZERO_SGD;
}

static void own_update_beside_decay(struct program *p)
{
    p->cfg.update = refuses;
    p->model.table[1].decay_scale = 2;
}

static void other_optimizer(struct program *p)
{
    if (p->odd)
        p->model.table[1].optimizer = ZERO_SGD;
}

static void other_rate(struct program *p)
{
    if (p->odd)
        p->model.table[4].lr_scale = 0.5f;
}

static void large_rate(struct program *p)
{
    p->model.table[4].lr_scale = 1e30f;
}

static int large_lr(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    return err ? err : zero_step(p->z, 1e30f, NULL);
}

static int reads_a_state_too_many(struct program *p)
{
    float x;
    return zero_read(p->z, 1, ZERO_VALUE_STATE + 1, 0, 1, &x);
}

/* That of one kind named and of the same by default is one. */
static void names_what_it_has(struct program *p)
{
    p->model.table[0].optimizer = p->odd ? ZERO_ADAMW : 0;
    p->model.table[0].lr_scale = p->odd ? 1.0f : 0;
}

static void one_by_nesterov(struct program *p)
{
    p->model.table[1].optimizer = ZERO_NESTEROV;
}

static int trains_and_settles(struct program *p)
{
    struct zero_step_info info;
    int err = micro_batch(p, 0, 0);
    if (!err)
        err = zero_step(p->z, 1e-2f, &info);
    return err ? err : train(p);
}

/* ---- norms, and steps that are given up ---- */

/* A call that goes wrong after others that go well. */
#define AFTER(name, before, then)                                                                            \
    static int name(struct program *p)                                                                       \
    {                                                                                                        \
        (void)p;                                                                                             \
        int err = (before);                                                                                  \
        return err ? err : (then);                                                                           \
    }

static int norm(struct program *p)
{
    double x;
    return zero_norm(p->z, &x);
}

static int three_of_four_and_norm(struct program *p)
{
    int err = 0;
    for (int k = 0; !err && k < 3; k++)
        err = micro_batch(p, 0, k);
    return err ? err : norm(p);
}

static int norms_every_step(struct program *p)
{
    int err = 0;
    for (int step = 0; !err && step < STEPS; step++) {
        err = micro_batch(p, step, 0);
        for (int k = 0; !err && k < 2; k++) {
            err = norm(p);
            if (!err)
                err = toy_forward(&p->model, p->z, true);
        }
        if (!err)
            err = zero_step(p->z, 1e-2f, NULL);
    }
    return err;
}

static int drops_a_step(struct program *p)
{
    int err = micro_batch(p, 7, 0);
    if (!err)
        err = norm(p);
    if (!err)
        err = zero_drop(p->z);
    return err ? err : train(p);
}

static int fails(struct program *p)
{
    return trains_and_settles(p) ? 0 : ZERO_ERR_ARG;
}

AFTER(norm_of_nothing, 0, zero_norm(NULL, &(double){0}))
AFTER(norm_to_nothing, micro_batch(p, 0, 0), zero_norm(p->z, NULL))
AFTER(norm_in_bracket, zero_begin(p->z, 1, ZERO_FORWARD), norm(p))
AFTER(norm_before_backward, train(p) || toy_forward(&p->model, p->z, true), norm(p))
AFTER(norm_and_on, micro_batch(p, 0, 0) || norm(p), zero_begin(p->z, 2, ZERO_BACKWARD))
AFTER(norm_and_micro, micro_batch(p, 0, 0) || norm(p), zero_micro(p->z))
AFTER(norm_and_save, micro_batch(p, 0, 0) || norm(p), zero_save(p->z, "/tmp"))
AFTER(norm_after_failure, fails(p), norm(p))
AFTER(drop_of_nothing, 0, zero_drop(NULL))
AFTER(drop_in_bracket, micro_batch(p, 0, 0) || zero_begin(p->z, 1, ZERO_FORWARD), zero_drop(p->z))
AFTER(drop_before_backward, train(p) || toy_forward(&p->model, p->z, true), zero_drop(p->z))
AFTER(drop_twice, micro_batch(p, 0, 0) || zero_drop(p->z), zero_drop(p->z))
AFTER(drop_and_step, micro_batch(p, 0, 0) || zero_drop(p->z), zero_step(p->z, 1e-2f, NULL))
AFTER(drop_after_failure, fails(p), zero_drop(p->z))

static int odd_one_norms(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    if (!err && p->odd)
        err = norm(p);
    if (!err)
        err = zero_step(p->z, 1e-2f, NULL);
    return err ? err : train(p);
}

static int odd_one_drops(struct program *p)
{
    int err = micro_batch(p, 0, 0);
    if (!err)
        err = p->odd ? zero_drop(p->z) : zero_step(p->z, 1e-2f, NULL);
    return err ? err : train(p);
}

/* ---- all parameters at once ---- */

static int evaluates_all(struct program *p)
{
    int err = zero_gather_all(p->z, 0);
    if (!err)
        err = toy_forward(&p->model, p->z, false);
    return err ? err : zero_release_all(p->z);
}

/* Between micro-batches, after the norm, and after the step. */
static int gathers_all_the_time(struct program *p)
{
    int err = 0;
    for (int step = 0; !err && step < STEPS; step++) {
        for (int k = 0; !err && k < p->cfg.grad_accum_steps; k++) {
            err = micro_batch(p, step, k);
            if (!err)
                err = evaluates_all(p);
        }
        if (!err)
            err = norm(p);
        if (!err)
            err = evaluates_all(p);
        if (!err)
            err = zero_step(p->z, 1e-2f, NULL);
        if (!err)
            err = evaluates_all(p);
    }
    return err;
}

static int gather(struct program *p)
{
    return zero_gather_all(p->z, 0);
}

AFTER(gathers_of_nothing, 0, zero_gather_all(NULL, 0))
AFTER(releases_of_nothing, 0, zero_release_all(NULL))
AFTER(gathers_nowhere, 0, zero_gather_all(p->z, 7))
AFTER(gathers_on_no_gpu, 0, zero_gather_all(p->z, ZERO_DEVICE_CUDA))
AFTER(gathers_in_bracket, zero_begin(p->z, 1, ZERO_FORWARD), gather(p))
AFTER(gathers_twice, gather(p), gather(p))
AFTER(releases_first, 0, zero_release_all(p->z))
AFTER(releases_twice, gather(p) || zero_release_all(p->z), zero_release_all(p->z))
AFTER(releases_in_bracket, gather(p) || zero_begin(p->z, 1, ZERO_FORWARD), zero_release_all(p->z))
AFTER(steps_while_held, micro_batch(p, 0, 0) || gather(p), zero_step(p->z, 1e-2f, NULL))
AFTER(norms_while_held, micro_batch(p, 0, 0) || gather(p), norm(p))
AFTER(drops_while_held, micro_batch(p, 0, 0) || gather(p), zero_drop(p->z))
AFTER(backward_while_held, gather(p), zero_begin(p->z, 1, ZERO_BACKWARD))
AFTER(micro_while_held, gather(p), zero_micro(p->z))
AFTER(writes_while_held, gather(p), zero_write(p->z, 0, ZERO_VALUE_PARAM, 0, 8, (float[8]){0}))
AFTER(loads_while_held, gather(p), zero_load(p->z, "/tmp"))
AFTER(imports_while_held, gather(p), zero_import(p->z, "/tmp", NULL, 0))
AFTER(gathers_after_failure, fails(p), gather(p))
AFTER(releases_after_failure, fails(p), zero_release_all(p->z))

static int never_releases(struct program *p)
{
    int err = train(p);
    return err ? err : gather(p);
}

static int assigns_while_held(struct program *p)
{
    int err = gather(p);
    p->model.param[0] = p->spare[0];
    return err ? err : zero_release_all(p->z);
}

static int odd_one_gathers(struct program *p)
{
    int err = p->odd ? gather(p) : 0;
    return err ? err : train(p);
}

static int odd_one_gathers_elsewhere(struct program *p)
{
    int err = zero_gather_all(p->z, p->odd ? ZERO_DEVICE_HOST : 0);
    if (!err)
        err = zero_release_all(p->z);
    return err ? err : train(p);
}

/* ---- buffers ---- */

static void with_counter(struct program *p)
{
    memcpy(p->wider, p->model.table, sizeof p->model.table);
    p->counter_at = &p->counter;
    p->wider[TOY_TENSORS] = (struct zero_tensor){
        .name = "seen", .param = &p->counter_at, .shape = {1}, .dtype = ZERO_I64, .flags = ZERO_BUFFER};
    p->table = p->wider;
    p->n_tensors = TOY_TENSORS + 1;
}

static int sync_mean(struct program *p)
{
    return zero_sync_buffers(p->z, ZERO_SYNC_MEAN);
}

static int syncs_all_the_time(struct program *p)
{
    int err = 0;
    for (int step = 0; !err && step < STEPS; step++) {
        for (int k = 0; !err && k < p->cfg.grad_accum_steps; k++) {
            p->counter++;
            err = micro_batch(p, step, k);
            if (!err)
                err = sync_mean(p);
        }
        if (!err)
            err = zero_step(p->z, 1e-2f, NULL);
        if (!err)
            err = gather(p);
        if (!err)
            err = sync_mean(p);
        if (!err)
            err = zero_release_all(p->z);
    }
    return err;
}

static int counts_alone(struct program *p)
{
    p->counter += p->odd;
    return sync_mean(p);
}

static int loses_its_buffer(struct program *p)
{
    p->counter_at = NULL;
    return zero_sync_buffers(p->z, ZERO_SYNC_RANK0);
}

static int odd_one_syncs(struct program *p)
{
    int err = p->odd ? sync_mean(p) : 0;
    return err ? err : train(p);
}

static int syncs_otherwise(struct program *p)
{
    int err = zero_sync_buffers(p->z, p->odd ? ZERO_SYNC_RANK0 : ZERO_SYNC_MEAN);
    return err ? err : train(p);
}

AFTER(syncs_of_nothing, 0, zero_sync_buffers(NULL, ZERO_SYNC_MEAN))
AFTER(syncs_somehow, 0, zero_sync_buffers(p->z, 0))
AFTER(syncs_in_bracket, zero_begin(p->z, 1, ZERO_FORWARD), sync_mean(p))
AFTER(syncs_after_failure, fails(p), sync_mean(p))
AFTER(syncs_without_buffers, sync_mean(p), train(p))

/* ---- ranks, before the wrap ---- */

static int finds(struct zero_config cfg)
{
    int32_t rank, world, local_rank;
    return zero_find_rank(&cfg, &rank, &world, &local_rank);
}

AFTER(finds_nothing, zero_find_rank(&p->cfg, NULL, NULL, NULL), train(p))
AFTER(finds_without_init, 0, finds((struct zero_config){.stage = 3}))

static int finds_half(struct program *p)
{
    struct zero_config cfg = p->cfg;
    cfg.rank = 1;
    cfg.world = 0;
    return finds(cfg);
}

static int finds_beyond(struct program *p)
{
    struct zero_config cfg = p->cfg;
    cfg.rank = cfg.world;
    return finds(cfg);
}

static int finds_by_a_communicator(struct program *p)
{
    struct zero_config cfg = p->cfg;
    cfg.nccl_comm = p;
    return finds(cfg);
}

/* ---- weights under other names ---- */

/* All layers under one name, out and back in over zeros: nothing may stay zero. */
static int leaves_slice_out(struct program *p)
{
    const struct zero_weight map = {.name = "h", .tensor = TOY_STACKED};
    const int64_t n = toy_elems(TOY_STACKED);
    char dir[64], file[128];
    void *nothing = calloc((size_t)n, 4);
    snprintf(dir, sizeof dir, "/tmp/zero-misuse-%ld", (long)getpid());
    int err = zero_export(p->z, dir, &map, 1, 0);
    if (!err)
        err = zero_write(p->z, TOY_STACKED, ZERO_VALUE_PARAM, 0, n, nothing);
    if (!err)
        err = zero_import(p->z, dir, &map, 1);
    free(nothing);
    if (p->rank->rank == 0) {
        snprintf(file, sizeof file, "%s/model-00001-of-00001.safetensors", dir);
        remove(file);
        snprintf(file, sizeof file, "%s/model.safetensors.index.json", dir);
        remove(file);
        remove(dir);
    }
    return err ? err : train(p);
}

static int exports(struct program *p, int32_t tensor, int32_t slice)
{
    const struct zero_weight map = {.name = "h", .tensor = tensor, .slice = slice};
    return zero_export(p->z, "/tmp/there-is-no-such-folder/weights", &map, 1, 0);
}

AFTER(exports_slice_1, 0, exports(p, TOY_STACKED, 1))
AFTER(exports_slice_minus_1, 0, exports(p, TOY_STACKED, -1))
AFTER(exports_a_slice_too_many, 0, exports(p, TOY_STACKED, ZERO_SLICE(2)))
AFTER(exports_a_slice_of_a_vector, 0, exports(p, 2, ZERO_SLICE(0)))
AFTER(imports_slice_1, 0,
      zero_import(p->z, "/tmp/there-is-no-such-folder/weights",
                  &(struct zero_weight){.name = "h", .slice = 1}, 1))

/* ---- the rows ---- */

static const struct misuse rows[] = {
    {"begins a unit twice",
     ALL,
     BOTH,
     NULL,
     begin_twice,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_begin: unit 1 is already open in forward"}},
    {"ends what is not open",
     ALL,
     BOTH,
     NULL,
     end_without_begin,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_end: unit 1 is not open in backward"}},
    {"ends in the other phase",
     ALL,
     BOTH,
     NULL,
     end_in_other_phase,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_end: unit 1 is not open in backward"}},
    {"steps with an open bracket",
     ALL,
     BOTH,
     NULL,
     step_with_open_bracket,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_step: unit 2 has an open bracket"}},
    {"ends a micro-batch with an open bracket",
     ALL,
     BOTH,
     accumulate_four,
     micro_with_open_bracket,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_micro: unit 2 has an open bracket"}},
    {"begins a unit that is not there",
     ALL,
     BOTH,
     NULL,
     no_such_unit,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_begin: unit is 4; allowed: 0..3"}},
    {"begins in no phase", ALL, BOTH, NULL, no_such_phase, ERROR, ZERO_ERR_ARG, {"zero_begin: phase is 3"}},
    {"steps after forward alone",
     SHARDED,
     BOTH,
     NULL,
     forward_only,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_step: no backward bracket has ended"}},
    {"has no brackets where they are needed",
     SHARDED,
     BOTH,
     NULL,
     no_brackets_at_all,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_step: no backward bracket has ended"}},
    {"evaluates between steps", ALL, BOTH, NULL, evaluates_between, RIGHT},
    {"steps after three micro-batches of four",
     ALL,
     BOTH,
     accumulate_four,
     three_of_four,
     ERROR,
     ZERO_ERR_ORDER,
     {"3 backward passes", "grad_accum_steps is 4"}},
    {"ends too many micro-batches",
     ALL,
     BOTH,
     accumulate_four,
     micro_too_often,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_micro: grad_accum_steps is 4"}},
    {"does not end micro-batches without brackets",
     IN_PLACE,
     BOTH,
     accumulate_four,
     forgets_micro,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_step: 0 micro-batches were ended by zero_micro", "grad_in_place"}},
    {"the same, not deterministic",
     IN_PLACE,
     BOTH,
     accumulate_without_order,
     forgets_micro,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_step: 0 micro-batches were ended by zero_micro", "grad_in_place"}},
    {"gives no number for lr", ALL, BOTH, NULL, not_a_number, ERROR, ZERO_ERR_ARG, {"zero_step: lr is nan"}},
    {"zeroes its gradients each micro-batch", ALL, BOTH, accumulate_four, zeroes_bracketed, RIGHT},
    {"the same, not deterministic", IN_PLACE, BOTH, accumulate_without_order, zeroes_bracketed, RIGHT},
    {"the same, without brackets", IN_PLACE, BOTH, accumulate_four, zeroes_unbracketed, RIGHT},
    {"the same, neither", IN_PLACE, BOTH, accumulate_without_order, zeroes_unbracketed, RIGHT},
    {"zeroes its gradients each step", ALL, BOTH, NULL, zeroes_bracketed, RIGHT},
    {"zeroes its gradients each step, without brackets", IN_PLACE, BOTH, NULL, zeroes_unbracketed, RIGHT},
    {"keeps sums in place and wants one order",
     IN_PLACE,
     BOTH,
     in_place_and_deterministic,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"grad_in_place", "deterministic"}},
    {"reads past a tensor's end",
     ALL,
     BOTH,
     NULL,
     reads_past_the_end,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_read: first is", "tensor embedding"}},
    {"reads a tensor that is not there",
     ALL,
     BOTH,
     NULL,
     reads_no_tensor,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_read: tensor is 5; allowed: 0..4"}},
    {"reads the state of a frozen tensor",
     ALL,
     BOTH,
     NULL,
     reads_state_of_frozen,
     ERROR,
     ZERO_ERR_ARG,
     {"tensor frozen is frozen"}},
    {"reads inside a bracket",
     ALL,
     BOTH,
     NULL,
     reads_in_bracket,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_read: unit 0 has an open bracket"}},
    {"writes from NULL", ALL, W1, NULL, writes_nothing, ERROR, ZERO_ERR_ARG, {"zero_write: src is NULL"}},
    {"means more than fits", ALL, BOTH, NULL, means_too_many, ERROR, ZERO_ERR_ARG, {"zero_mean: n is 65"}},
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
    {"gives another lr on one rank", ALL, W2, NULL, other_lr, ERROR, ZERO_ERR_MISMATCH, {"lr is"}},
    {"begins another unit on one rank",
     ALL,
     W2,
     NULL,
     other_unit,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"rank 1 called zero_begin(unit 2, forward) in step 1",
      "rank 0 called zero_begin(unit 1, forward) in step 1"}},
    {"reads on one rank alone",
     ALL,
     W2,
     NULL,
     odd_one_reads,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"rank 1 called zero_read(tensor 0) in step 1", "rank 0 called zero_begin(unit 0, forward) in step 1"}},
    {"names an optimizer that there is not",
     ALL,
     BOTH,
     unknown_optimizer,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[1] (layers): optimizer is 99", "allowed: adamw", "or 0 for cfg.optimizer"}},
    {"scales a learning rate by a negative number",
     ALL,
     W1,
     negative_rate,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[2] (bias): lr_scale is -0.5", "or 0 for 1"}},
    {"scales the learning rate of a frozen tensor by NaN",
     ALL,
     W1,
     rate_that_is_no_number,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[3] (frozen): lr_scale is nan", "or 0 for 1"}},
    {"scales the decay by infinity",
     ALL,
     W1,
     infinite_decay,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[0] (embedding): decay_scale is inf", "or 0 for 1"}},
    {"scales the decay of a tensor that has none",
     ALL,
     W1,
     decay_and_none,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[2] (bias): decay_scale is 0.5 with ZERO_NO_DECAY"}},
    {"names an optimizer beside its own update",
     ALL,
     W1,
     own_update_beside_optimizer,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[1] (layers): optimizer is sgd but cfg.update is set"}},
    {"scales the decay beside its own update",
     ALL,
     W1,
     own_update_beside_decay,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[1] (layers): decay_scale is 2 but cfg.update is set"}},
    {"names another optimizer on one rank",
     ALL,
     W2,
     other_optimizer,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"tensors[1] (layers", "rank 1 and rank 0 differ", "optimizer"}},
    {"scales the learning rate otherwise on one rank",
     ALL,
     W2,
     other_rate,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"tensors[4] (head", "rank 1 and rank 0 differ", "lr_scale"}},
    {"names the optimizer that it has, on one rank", ALL, W2, names_what_it_has, NULL, RIGHT},
    {"steps by a rate that its scale makes infinite",
     ALL,
     BOTH,
     large_rate,
     large_lr,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_step: lr is 1e+30", "lr_scale 1e+30"}},
    {"reads a state that the tensor's optimizer has not",
     ALL,
     BOTH,
     one_by_nesterov,
     reads_a_state_too_many,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_read: value is 3; allowed: 0..2",
      "tensor layers has those of nesterov, 1 state per weight: momentum"}},
    {"wraps at another stage on one rank",
     ALL,
     W2,
     other_stage,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"stage is", "on rank 1"}},
    {"clips otherwise on one rank",
     ALL,
     W2,
     other_clip,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"clip is 1 on rank 1 and 2 on rank 0"}},
    {"has another shape on one rank",
     ALL,
     W2,
     other_shape,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"tensors[3] (frozen", "rank 1 and rank 0 differ"}},
    {"does not begin with ZERO_CONFIG_INIT",
     ALL,
     W1,
     size_of_nothing,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"ZERO_CONFIG_INIT"}},
    {"gives two tensors one name", ALL, BOTH, two_of_a_name, NULL, ERROR, ZERO_ERR_ARG, {"embedding"}},
    {"leaves a unit out", ALL, BOTH, gap_in_units, NULL, ERROR, ZERO_ERR_ARG, {"unit"}},
    {"gives no address of a pointer",
     ALL,
     BOTH,
     pointer_of_nothing,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[2]", "param is NULL"}},
    {"gives a pointer to nothing",
     ALL,
     BOTH,
     values_of_nothing,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[2]", "NULL"}},
    {"has an update that refuses",
     ALL,
     BOTH,
     update_that_refuses,
     trains_and_settles,
     ERROR,
     ZERO_ERR_FAILED,
     {"the update callback returned 3", "for tensor"}},
    {"misspells a variable",
     ALL,
     W1,
     NULL,
     NULL,
     LINE,
     0,
     {"ZERO_STGE is not known", "did you mean ZERO_STAGE"},
     "ZERO_STGE",
     "3"},
    {"names a variable that nobody has",
     ALL,
     W1,
     NULL,
     NULL,
     LINE,
     0,
     {"ZERO_ALL_THE_MEMORY is not known", "the nearest is"},
     "ZERO_ALL_THE_MEMORY",
     "1"},
    {"gives a variable no number",
     ALL,
     W1,
     NULL,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"ZERO_STAGE is \"three\"", "allowed"},
     "ZERO_STAGE",
     "three"},
    {"logs to a file that cannot be",
     ALL,
     W1,
     NULL,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"ZERO_LOG is", "allowed"},
     "ZERO_LOG",
     "/no such folder/log"},
    {"writes a gradient after its bracket",
     SHARDED,
     BOTH,
     NULL,
     writes_after_end,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "writes the gradient of tensor embedding", "element 3"},
     "ZERO_CHECK",
     "1"},
    {"reads a parameter before its bracket",
     SHARDED,
     BOTH,
     NULL,
     reads_before_begin,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "reads tensor embedding", "element 7"},
     "ZERO_CHECK",
     "1"},
    {"writes a parameter",
     SHARDED,
     BOTH,
     NULL,
     writes_a_parameter,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "writes tensor embedding", "which may only be read"},
     "ZERO_CHECK",
     "1"},
    {"computes with a copy made before zero_wrap",
     ALL,
     BOTH,
     NULL,
     computes_with_a_copy,
     LINE,
     0,
     {"step 1 was skipped"},
     "ZERO_CHECK",
     "1"},
    {"adds to a gradient that it says it overwrites",
     ALL,
     BOTH,
     overwrites_f32,
     NULL,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "tensor embedding has ZERO_GRAD_OVERWRITE", "unit 0"},
     "ZERO_CHECK",
     "1"},
    {"the same in bf16",
     ALL,
     BOTH,
     overwrites_bf16,
     NULL,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "tensor bias has ZERO_GRAD_OVERWRITE", "unit 1"},
     "ZERO_CHECK",
     "1"},
    {"the same in layers, with four micro-batches",
     ALL,
     BOTH,
     overwrites_layers,
     NULL,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "tensor layers has ZERO_GRAD_OVERWRITE", "unit 2"},
     "ZERO_CHECK",
     "1"},
    {"leaves an element of such a gradient unwritten",
     ALL,
     BOTH,
     NULL,
     leaves_one_unwritten,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "tensor head has ZERO_GRAD_OVERWRITE", "element 256 unwritten"},
     "ZERO_CHECK",
     "1"},
    {"has a shape that is too small",
     IN_PLACE,
     BOTH,
     one_row_less,
     NULL,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "beyond the end of the gradient of tensor embedding (unit 0)"},
     "ZERO_CHECK",
     "1"},
    {"has a shape that is too small, without brackets",
     IN_PLACE,
     BOTH,
     one_row_less,
     train_plainly,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "beyond the end of the gradient of tensor embedding (unit 0)"},
     "ZERO_CHECK",
     "1"},
    {"the same of layers",
     IN_PLACE,
     BOTH,
     a_little_less_of_each_layer,
     NULL,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "beyond the end of the gradient of tensor layers (unit 2)"},
     "ZERO_CHECK",
     "1"},
    {"the same of layers, without brackets",
     IN_PLACE,
     BOTH,
     a_little_less_of_each_layer,
     train_plainly,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "beyond the end of the gradient of tensor layers (unit 2)"},
     "ZERO_CHECK",
     "1"},
    {"the same of bf16",
     IN_PLACE,
     BOTH,
     much_less,
     NULL,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "beyond the end of the gradient of tensor head (unit 3)"},
     "ZERO_CHECK",
     "1"},
    {"the same of bf16, without brackets",
     IN_PLACE,
     BOTH,
     much_less,
     train_plainly,
     ERROR,
     ZERO_ERR_ORDER,
     {"the model's fault", "beyond the end of the gradient of tensor head (unit 3)"},
     "ZERO_CHECK",
     "1"},
    {"checks on one rank alone",
     IN_PLACE,
     W2,
     one_rank_checks,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"check is 1 on rank 1 and 0 on rank 0"}},
    {"steps on a gradient that is no number", ALL, BOTH, NULL, poisoned, LINE, 0, {"step 1", "skipped"}},
    {"has four micro-batches and says one",
     ALL,
     BOTH,
     NULL,
     four_of_one,
     ERROR,
     ZERO_ERR_ORDER,
     {"grad_accum_steps"}},
    {"lends a communicator on the host",
     ALL,
     BOTH,
     lends_on_the_host,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"nccl_comm"}},

    {"carries nine values", ALL, BOTH, NULL, carries_nine, ERROR, ZERO_ERR_ARG, {"zero_carry: n is 9"}},
    {"carries a value on one rank",
     ALL,
     W2,
     NULL,
     odd_one_carries,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"zero_carry", "rank 1 called"}},
    {"looks back at nothing",
     ALL,
     BOTH,
     NULL,
     looks_back_at_nothing,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_last_step: there was no zero_step yet"}},
    {"tunes the learning rate",
     ALL,
     BOTH,
     NULL,
     tunes_the_learning_rate,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_tune: key is \"lr\"", "allowed: clip"}},
    {"tunes to no number",
     ALL,
     BOTH,
     NULL,
     tunes_to_no_number,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_tune: weight_decay is nan"}},
    {"tunes in a step",
     ALL,
     BOTH,
     NULL,
     tunes_in_a_step,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_tune: a step has begun"}},
    {"begins a momentum",
     ALL,
     BOTH,
     plain_sgd,
     begins_a_momentum,
     ERROR,
     ZERO_ERR_ARG,
     {"beta1 of sgd is", "was 0 at zero_wrap"}},
    {"tunes on one rank",
     ALL,
     W2,
     NULL,
     odd_one_tunes,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"zero_tune(clip)", "rank 1 called"}},
    {"reads a gradient before backward",
     ALL,
     BOTH,
     NULL,
     reads_a_gradient_early,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_read: no backward bracket has ended"}},
    {"reads a gradient of a frozen tensor",
     ALL,
     BOTH,
     NULL,
     reads_a_gradient_of_frozen,
     ERROR,
     ZERO_ERR_ARG,
     {"is frozen", "gradient"}},
    {"writes a gradient",
     ALL,
     BOTH,
     NULL,
     writes_a_gradient,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_write: value is ZERO_VALUE_GRAD"}},
    {"goes on with backward after reading a gradient",
     ALL,
     BOTH,
     NULL,
     accumulates_after_reading,
     ERROR,
     ZERO_ERR_ORDER,
     {"after zero_norm"}},
    {"goes below the first step",
     ALL,
     BOTH,
     NULL,
     goes_below_the_first_step,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_set_step: t is -1"}},
    {"sets the step on one rank",
     ALL,
     W2,
     NULL,
     odd_one_sets_the_step,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"zero_set_step", "rank 1 called"}},
    {"steps twice", ALL, BOTH, NULL, steps_twice, ERROR, ZERO_ERR_ORDER, {"zero_step: "}},
    {"never steps", ALL, BOTH, NULL, never_steps, LINE, 0, {"zero_step"}},
    {"leaves a step unfinished",
     ALL,
     BOTH,
     accumulate_four,
     never_steps,
     LINE,
     0,
     {"zero_unwrap: zero_step was never called"}},
    {"shards alone", S3, W1, NULL, NULL, LINE, 0, {"stage 3 shards nothing", "world 1, found in: config"}},
    {"shards nothing",
     S3,
     W2,
     budget_for_all,
     NULL,
     LINE,
     0,
     {"stage 3 shards nothing: all 4 units are resident", "param_budget_bytes holds them all"},
     .only_rank_0 = true},
    {"writes its gradients elsewhere",
     ALL,
     BOTH,
     NULL,
     writes_elsewhere,
     ERROR,
     ZERO_ERR_ORDER,
     {"step 1: every gradient is zero, on every rank"}},
    {"the same, without brackets",
     IN_PLACE,
     BOTH,
     NULL,
     writes_elsewhere_unbracketed,
     ERROR,
     ZERO_ERR_ORDER,
     {"step 1: every gradient is zero, on every rank"}},
    {"forgets a layer's gradient",
     ALL,
     BOTH,
     NULL,
     forgets_a_unit,
     LINE,
     0,
     {"in the first step no gradient was written to layers[1]: all its elements are zero"}},
    {"steps twice, without brackets",
     IN_PLACE,
     BOTH,
     NULL,
     steps_twice_unbracketed,
     LINE,
     0,
     {"every gradient of a step was zero, on every rank: zero_step was called twice"}},
    {"allocates gradients after the wrap",
     ALL,
     BOTH,
     NULL,
     allocates_gradients_late,
     ERROR,
     ZERO_ERR_ORDER,
     {"*grad of tensor embedding (unit 0)", "after zero_wrap"}},
    {"the same, without brackets",
     IN_PLACE,
     BOTH,
     NULL,
     allocates_late_unbracketed,
     ERROR,
     ZERO_ERR_ORDER,
     {"*grad of tensor embedding (unit 0)", "after zero_wrap"}},
    {"assigns a parameter",
     ALL,
     BOTH,
     NULL,
     assigns_a_parameter,
     ERROR,
     ZERO_ERR_ORDER,
     {"*param of tensor bias (unit 1)", "after zero_wrap"}},
    {"opens two layers of one buffer",
     SHARDED,
     BOTH,
     NULL,
     opens_two_layers,
     ERROR,
     ZERO_ERR_ORDER,
     {"zero_begin: unit 2 of stacked tensor layers", "while unit 1 is"}},
    {"the same, where they lie side by side", IN_PLACE, BOTH, NULL, opens_and_closes_two_layers, RIGHT},

#define REFUSED(name, worlds, configure, ...)                                                                \
    {                                                                                                        \
        name, ALL, worlds, configure, NULL, ERROR, ZERO_ERR_ARG,                                             \
        {                                                                                                    \
            __VA_ARGS__                                                                                      \
        }                                                                                                    \
    }
    REFUSED("forgets ZERO_CONFIG_INIT", W1, forgets_init, "was not begun", "ZERO_CONFIG_INIT"),
    REFUSED("never begins its configuration", W1, never_begins, "was not begun", "ZERO_CONFIG_INIT"),
    REFUSED("was built with an old zero.h", W1, of_an_old_header, "built with a zero.h that is older",
            "build it anew"),
    REFUSED("was built with a later zero.h", W1, of_a_later_header, "size is", "built with a later zero.h"),
    REFUSED("the same, where only a table grew", W1, tensors_of_a_later_header, "tensor_size is",
            "built with a later zero.h"),
    REFUSED("begins without sizes", BOTH, without_tensor_size, "tensor_size is 0; set it to the bytes of"),
    REFUSED("the same, of calls", BOTH, without_call_size, "call_size is 0; set it to the bytes of"),
    REFUSED("timeout_ms 0", BOTH, sets_timeout_ms, "timeout_ms is 0"),
    REFUSED("grad_accum_steps 0", BOTH, sets_grad_accum_steps, "grad_accum_steps is 0"),
    REFUSED("grad_scale 0", BOTH, sets_grad_scale, "grad_scale is 0"),
    REFUSED("prefetch negative", BOTH, sets_prefetch, "prefetch is -1", "0 for none"),
    REFUSED("beta1 NaN", BOTH, sets_beta1, "beta1 is nan"),
    REFUSED("beta2 1", BOTH, sets_beta2, "beta2 is 1"),
    REFUSED("eps negative", BOTH, sets_eps, "eps is -9.99999994e-09"),
    REFUSED("weight_decay infinite", BOTH, sets_weight_decay, "weight_decay is inf"),
    REFUSED("clip negative", BOTH, sets_clip, "clip is -1"),
#undef REFUSED
    {"asks for stats of no size",
     ALL,
     BOTH,
     without_stats_size,
     asks_for_stats,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_get_stats: stats_size is 0"}},
    {"the same, of a step",
     ALL,
     BOTH,
     without_step_info_size,
     asks_for_step_info,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_step: step_info_size is 0"}},
    {"the same, of weights",
     ALL,
     BOTH,
     without_weight_size,
     exports_a_map,
     ERROR,
     ZERO_ERR_ARG,
     {"zero_export: ", "weight_size is 0"}},
    {"a budget of nothing",
     S3,
     W2,
     sets_param_budget_bytes,
     NULL,
     ERROR,
     ZERO_ERR_BUDGET,
     {"param_budget_bytes is 0", "alone needs"}},
    {"a budget of nothing, needed by nobody", S0 | S1 | S2, BOTH, sets_param_budget_bytes, NULL, RIGHT},
    {"eps 0", ALL, BOTH, no_eps, NULL, LINE, 0, {"eps is 0"}},

    {"has no values, and does not say so",
     ALL,
     BOTH,
     has_no_values,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[0] (embedding): *param is NULL", "cfg.init_from must say where their values come from"}},
    {"has no values on rank 0, whose count",
     ALL,
     BOTH,
     nobodys_values,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"tensors[0] (embedding): *param is NULL on rank 0", "ZERO_INIT_RANK0"}},
    {"has values of a source that is none",
     ALL,
     BOTH,
     no_such_source,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"init_from is 4; allowed: model (0), rank0 (1), later (2), call (3)"}},
    {"has values of different sources",
     ALL,
     W2,
     other_source,
     NULL,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"init_from is 2 on rank 1 and 0 on rank 0"}},
    {"asks a callback that it does not have",
     ALL,
     BOTH,
     calls_nobody,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"init is NULL but init_from is ZERO_INIT_CALL"}},
    {"has a callback that nobody asks",
     ALL,
     BOTH,
     callback_nobody_asks,
     NULL,
     ERROR,
     ZERO_ERR_ARG,
     {"init is set but init_from is not ZERO_INIT_CALL"}},
    {"has a callback that fails, on one rank",
     ALL,
     BOTH,
     callback_that_fails,
     NULL,
     ERROR,
     ZERO_ERR_FAILED,
     {"cfg.init returned -3 for tensor head, elements"}},
    {"has a callback that writes nothing",
     ALL,
     BOTH,
     callback_that_writes_nothing,
     NULL,
     ERROR,
     ZERO_ERR_FAILED,
     {"cfg.init did not write element", "of tensor embedding, asked for"}},
#define TOO_EARLY(name, run, ...)                                                                            \
    {                                                                                                        \
        name, ALL, BOTH, values_later, run, ERROR, ZERO_ERR_ORDER,                                           \
        {                                                                                                    \
            __VA_ARGS__                                                                                      \
        }                                                                                                    \
    }
    TOO_EARLY("computes before there are values", computes_too_early,
              "zero_begin: tensor embedding (unit 0) has values for 0 of its 165 elements",
              "init_from is ZERO_INIT_LATER", "zero_load, or zero_import and zero_write of all tensors"),
    TOO_EARLY("begins a micro-batch before that", accumulates_too_early, "zero_micro: tensor embedding"),
    TOO_EARLY("steps before that", no_brackets_at_all, "zero_step: tensor embedding"),
    TOO_EARLY("asks for the norm before that", norms_too_early, "zero_norm: tensor embedding"),
    TOO_EARLY("saves before that", saves_too_early, "zero_save: tensor embedding"),
    TOO_EARLY("exports before that", exports_too_early, "zero_export: tensor embedding"),
    TOO_EARLY("gathers all before that", gathers_too_early, "zero_gather_all: tensor embedding"),
    TOO_EARLY("reads before that", reads_too_early, "zero_read: tensor embedding"),
    TOO_EARLY("forgets one element", forgets_an_element, "zero_begin: tensor bias (unit 1) has values for",
              "ZERO_INIT_LATER"),
    TOO_EARLY("writes states and no weights", writes_states_alone,
              "zero_begin: tensor embedding (unit 0) has values for 0 of its 165 elements"),
#undef TOO_EARLY
    {"writes other values on other ranks",
     ALL,
     W2,
     values_later,
     writes_other_ranges,
     ERROR,
     ZERO_ERR_MISMATCH,
     {"zero_write"}},

#define WRONG(name, stages, worlds, configure, run, code, ...)                                               \
    {                                                                                                        \
        name, stages, worlds, configure, run, ERROR, ZERO_ERR_##code,                                        \
        {                                                                                                    \
            __VA_ARGS__                                                                                      \
        }                                                                                                    \
    }
#define GOOD(name, stages, worlds, configure, run)                                                           \
    {                                                                                                        \
        name, stages, worlds, configure, run, RIGHT                                                          \
    }
    WRONG("asks no context for the norm", S0, W1, NULL, norm_of_nothing, ARG, "zero_norm: z is NULL"),
    WRONG("has no place for the norm", ALL, BOTH, NULL, norm_to_nothing, ARG, "zero_norm: norm is NULL"),
    WRONG("asks for the norm in a bracket", ALL, BOTH, NULL, norm_in_bracket, ORDER,
          "zero_norm: unit 1 has an open bracket"),
    WRONG("asks for the norm before backward", ALL, BOTH, NULL, norm_before_backward, ORDER,
          "zero_norm: no backward bracket has ended"),
    WRONG("asks for the norm after three of four", ALL, BOTH, accumulate_four, three_of_four_and_norm, ORDER,
          "zero_norm: ", "3", "grad_accum_steps"),
    WRONG("goes on with backward after the norm", ALL, BOTH, NULL, norm_and_on, ORDER,
          "zero_begin: ", "after zero_norm"),
    WRONG("ends a micro-batch after the norm", ALL, BOTH, NULL, norm_and_micro, ORDER,
          "zero_micro: zero_norm has ended"),
    WRONG("saves after the norm", ALL, BOTH, NULL, norm_and_save, ORDER, "zero_save: ", "a step has begun"),
    WRONG("asks for the norm after a failure", ALL, BOTH, update_that_refuses, norm_after_failure, FAILED,
          "the update callback returned 3"),
    WRONG("asks for the norm on one rank alone", ALL, W2, NULL, odd_one_norms, MISMATCH, "zero_norm"),
    GOOD("asks for the norm twice, and evaluates", ALL, BOTH, NULL, norms_every_step),
    WRONG("drops of no context", S0, W1, NULL, drop_of_nothing, ARG, "zero_drop: z is NULL"),
    WRONG("drops in a bracket", ALL, BOTH, NULL, drop_in_bracket, ORDER,
          "zero_drop: unit 1 has an open bracket"),
    WRONG("drops before backward", ALL, BOTH, NULL, drop_before_backward, ORDER,
          "zero_drop: ", "there is nothing to drop"),
    WRONG("drops twice", ALL, BOTH, NULL, drop_twice, ORDER, "zero_drop: ", "there is nothing to drop"),
    WRONG("steps after the drop", ALL, BOTH, NULL, drop_and_step, ORDER,
          "zero_step: no backward bracket has ended"),
    WRONG("drops after a failure", ALL, BOTH, update_that_refuses, drop_after_failure, FAILED,
          "the update callback returned 3"),
    WRONG("drops on one rank alone", ALL, W2, NULL, odd_one_drops, MISMATCH, "zero_drop"),
    GOOD("drops a step", ALL, BOTH, NULL, drops_a_step),

    WRONG("gathers all of no context", S0, W1, NULL, gathers_of_nothing, ARG, "zero_gather_all: z is NULL"),
    WRONG("releases all of no context", S0, W1, NULL, releases_of_nothing, ARG,
          "zero_release_all: z is NULL"),
    WRONG("gathers all nowhere", ALL, BOTH, NULL, gathers_nowhere, ARG, "zero_gather_all: where is 7",
          "allowed: 0, ZERO_DEVICE_HOST"),
    WRONG("gathers all on a GPU that is not there", ALL, BOTH, NULL, gathers_on_no_gpu, ARG,
          "zero_gather_all: where is 2", "where cfg.device is"),
    WRONG("gathers all in a bracket", ALL, BOTH, NULL, gathers_in_bracket, ORDER,
          "zero_gather_all: unit 1 has an open bracket"),
    WRONG("gathers all twice", ALL, BOTH, NULL, gathers_twice, ORDER,
          "zero_gather_all: all parameters are there already"),
    WRONG("releases what was not gathered", ALL, BOTH, NULL, releases_first, ORDER,
          "zero_release_all: ", "there was no zero_gather_all"),
    WRONG("releases twice", ALL, BOTH, NULL, releases_twice, ORDER,
          "zero_release_all: ", "there was no zero_gather_all"),
    WRONG("releases in a bracket", ALL, BOTH, NULL, releases_in_bracket, ORDER,
          "zero_release_all: unit 1 has an open bracket"),
    WRONG("steps with all parameters", ALL, BOTH, NULL, steps_while_held, ORDER,
          "zero_step: ", "call zero_release_all first"),
    WRONG("asks for the norm with all parameters", ALL, BOTH, NULL, norms_while_held, ORDER,
          "zero_norm: ", "call zero_release_all first"),
    WRONG("drops with all parameters", ALL, BOTH, NULL, drops_while_held, ORDER,
          "zero_drop: ", "call zero_release_all first"),
    WRONG("goes backward with all parameters", ALL, BOTH, NULL, backward_while_held, ORDER,
          "zero_begin: ", "call zero_release_all first"),
    WRONG("ends a micro-batch with all parameters", ALL, BOTH, NULL, micro_while_held, ORDER,
          "zero_micro: ", "call zero_release_all first"),
    WRONG("writes with all parameters", ALL, BOTH, NULL, writes_while_held, ORDER,
          "zero_write: ", "call zero_release_all first"),
    WRONG("loads with all parameters", ALL, BOTH, NULL, loads_while_held, ORDER,
          "zero_load: ", "call zero_release_all first"),
    WRONG("imports with all parameters", ALL, BOTH, NULL, imports_while_held, ORDER,
          "zero_import: ", "call zero_release_all first"),
    WRONG("gathers all after a failure", ALL, BOTH, update_that_refuses, gathers_after_failure, FAILED,
          "the update callback returned 3"),
    WRONG("releases all after a failure", ALL, BOTH, update_that_refuses, releases_after_failure, FAILED,
          "the update callback returned 3"),
    WRONG("assigns a parameter while all are there", ALL, BOTH, NULL, assigns_while_held, ORDER,
          "zero_release_all: *param of tensor embedding"),
    WRONG("gathers all on one rank alone", ALL, W2, NULL, odd_one_gathers, MISMATCH, "zero_gather_all"),
    WRONG("gathers all elsewhere on one rank", ALL, W2, NULL, odd_one_gathers_elsewhere, MISMATCH,
          "zero_gather_all"),
    GOOD("gathers all the time", ALL, BOTH, accumulate_four, gathers_all_the_time),
    GOOD("never releases", ALL, BOTH, NULL, never_releases),

    WRONG("makes no context's buffers equal", S0, W1, NULL, syncs_of_nothing, ARG,
          "zero_sync_buffers: z is NULL"),
    WRONG("makes buffers equal somehow", ALL, BOTH, with_counter, syncs_somehow, ARG,
          "zero_sync_buffers: how is 0; allowed: ZERO_SYNC_MEAN"),
    WRONG("makes buffers equal in a bracket", ALL, BOTH, with_counter, syncs_in_bracket, ORDER,
          "zero_sync_buffers: unit 1 has an open bracket"),
    WRONG("counts on one rank alone", ALL, W2, with_counter, counts_alone, MISMATCH,
          "zero_sync_buffers: ", "buffer seen", "integers have no mean"),
    WRONG("loses a buffer", ALL, BOTH, with_counter, loses_its_buffer, ORDER,
          "zero_sync_buffers: ", "*param of buffer seen is NULL"),
    WRONG("makes buffers equal on one rank alone", ALL, W2, with_counter, odd_one_syncs, MISMATCH,
          "zero_sync_buffers"),
    WRONG("makes buffers equal otherwise on one rank", ALL, W2, with_counter, syncs_otherwise, MISMATCH,
          "zero_sync_buffers: how is 2 on rank 1 and 1 on rank 0"),
    WRONG("makes buffers equal after a failure", ALL, BOTH, update_that_refuses, syncs_after_failure, FAILED,
          "the update callback returned 3"),
    GOOD("makes buffers equal all the time", ALL, BOTH, with_counter, syncs_all_the_time),
    GOOD("makes buffers equal that it does not have", ALL, BOTH, NULL, syncs_without_buffers),

    WRONG("asks for its rank without ZERO_CONFIG_INIT", S0, W1, NULL, finds_without_init, ARG,
          "zero_find_rank: ", "ZERO_CONFIG_INIT"),
    WRONG("asks for its rank with half of a pair", S0, W1, NULL, finds_half, ARG,
          "zero_find_rank: rank is 1 but world is 0"),
    WRONG("asks for a rank beyond the world", S0, BOTH, NULL, finds_beyond, ARG, "zero_find_rank: rank is"),
    WRONG("asks a communicator on the host for its rank", S0, BOTH, NULL, finds_by_a_communicator, ARG,
          "zero_find_rank: ", "nccl_comm"),
    GOOD("asks for its rank, and looks at nothing", ALL, BOTH, NULL, finds_nothing),

    GOOD("leaves slice out of a map", ALL, BOTH, NULL, leaves_slice_out),
    WRONG("gives a slice by its number", ALL, BOTH, NULL, exports_slice_1, ARG,
          "zero_export: map[0] (h): slice is 1", "allowed: 0 (all of it), ZERO_SLICE(0) to ZERO_SLICE(1)"),
    WRONG("gives a negative slice", ALL, BOTH, NULL, exports_slice_minus_1, ARG,
          "slice is -1 of tensor layers"),
    WRONG("gives a slice that there is not", ALL, BOTH, NULL, exports_a_slice_too_many, ARG,
          "slice is ZERO_SLICE(2) of tensor layers"),
    WRONG("gives a slice of a vector", ALL, BOTH, NULL, exports_a_slice_of_a_vector, ARG,
          "slice is ZERO_SLICE(0), but tensor bias has one dimension"),
    WRONG("imports a slice by its number", ALL, BOTH, NULL, imports_slice_1, ARG,
          "zero_import: map[0] (h): slice is 1"),
#undef WRONG
#undef GOOD
};

/* ---- running them ---- */

struct trial {
    const struct misuse *row;
    int stage;
    struct program *programs;
};

static void run_rank(struct toy_rank *r)
{
    const struct trial *t = r->arg;
    struct program *p = &t->programs[r->rank];
    *p = (struct program){.rank = r, .n_tensors = TOY_TENSORS, .odd = r->rank == r->world - 1};
    pthread_mutex_init(&p->lock, NULL);
    toy_make(&p->model);
    for (int i = 0; i < TOY_TENSORS; i++)
        p->spare[i] = calloc(1, (size_t)bytes_of(i));
    p->table = p->model.table;
    p->cfg = toy_config(r, t->stage);
    p->cfg.log = keep_line;
    p->cfg.log_arg = p;
    if (t->row->configure)
        t->row->configure(p);
    int err = zero_wrap(&p->z, p->table, p->n_tensors, &p->cfg);
    if (!err)
        err = t->row->run ? t->row->run(p) : train(p);
    if (!err && t->row->outcome == RIGHT)
        err = toy_hash(p->z, 2, &r->hash);
    toy_note(r, err);
    int unwrap_err = zero_unwrap(&p->z);
    if (!err && unwrap_err)
        toy_note(r, unwrap_err);
    for (int i = 0; i < TOY_TENSORS; i++)
        free(p->spare[i]);
    toy_free(&p->model);
}

/* The weights of the same configuration, used as it should be. */
static uint64_t right_hash(const struct misuse *row, int stage, int world)
{
    struct program programs[2];
    const struct misuse plain = {.name = row->name, .configure = row->configure, .outcome = RIGHT};
    struct trial t = {&plain, stage, programs};
    struct toy_rank r[2];
    toy_ranks(world, run_rank, &t, r);
    for (int k = 0; k < world; k++)
        if (r[k].err)
            fail_msg("%s: stage %d world %d, as it should be: %s", row->name, stage, world, r[k].text);
    return r[0].hash;
}

static const char *missing(const struct misuse *row, const char *text)
{
    for (int i = 0; i < 3; i++)
        if (row->says[i] && !strstr(text, row->says[i]))
            return row->says[i];
    return NULL;
}

/* Whether the row came out as it should; else why is printed. */
static bool try_row(const struct misuse *row, int stage, int world)
{
    struct program programs[2];
    struct trial t = {row, stage, programs};
    struct toy_rank r[2];
    uint64_t want = row->outcome == RIGHT ? right_hash(row, stage, world) : 0;
    if (row->variable)
        setenv(row->variable, row->value, 1);
    toy_ranks(world, run_rank, &t, r);
    if (row->variable)
        unsetenv(row->variable);
    bool good = true;
    for (int k = 0; k < world; k++) {
        const char *lacks = row->outcome == ERROR  ? missing(row, r[k].text)
                            : row->outcome == LINE ? missing(row, programs[k].lines)
                                                   : NULL;
        bool fits = row->outcome == ERROR ? r[k].err == row->code && !lacks
                                          : r[k].err == 0 && !lacks && (!want || r[k].hash == want);
        if (row->only_rank_0 && k > 0)
            fits = r[k].err == 0;
        if (fits && !r[k].wrong[0])
            continue;
        good = false;
        print_error("%s: stage %d, rank %d of %d: code %d \"%s\", lines \"%s\"%s%s%s%s\n", row->name, stage,
                    k, world, r[k].err, r[k].text, programs[k].lines, lacks ? "; not said: " : "",
                    lacks ? lacks : "", want && r[k].hash != want ? "; other weights" : "", r[k].wrong);
    }
    return good;
}

static void test_misuse(void **state)
{
    (void)state;
    int n_tried = 0, n_bad = 0, n_rows = (int)(sizeof rows / sizeof *rows);
    for (int i = 0; i < n_rows; i++)
        for (int stage = 0; stage <= 3; stage++)
            for (int world = 1; world <= 2; world++)
                if (rows[i].stages >> stage & 1 && rows[i].worlds >> (world - 1) & 1) {
                    n_tried++;
                    n_bad += !try_row(&rows[i], stage, world);
                }
    print_message("%d ways of misuse, %d trials, %d silent or wrong\n", n_rows, n_tried, n_bad);
    assert_int_equal(n_bad, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_misuse)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
