/* SPDX-License-Identifier: Apache-2.0 */
/* misuse.c: runs the rows of misuse.h, and defines the training loops that several rows share. */
#include "test/zero/misuse.h"
#include "test/cmocka.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- training loops that several tables share ---- */

int begin(struct program *p, int unit, enum zero_phase phase)
{
    return zero_begin(p->z, unit, phase);
}

int end(struct program *p, int unit, enum zero_phase phase)
{
    return zero_end(p->z, unit, phase);
}

int step(struct program *p)
{
    return zero_step(p->z, 1e-2f, NULL);
}

int forward(struct program *p)
{
    return toy_forward(&p->model, p->z, true);
}

int backward_with(struct program *p, void (*write)(struct program *p, int unit))
{
    int err = 0;
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        err = begin(p, u, ZERO_BACKWARD);
        if (!err && write)
            write(p, u);
        if (!err)
            err = end(p, u, ZERO_BACKWARD);
    }
    return err;
}

void add_gradient(struct program *p, int unit)
{
    toy_add_gradient(&p->model, unit, 0, p->rank->rank);
}

int micro_batch(struct program *p, int step, int k)
{
    return FIRST_ERROR(forward(p),
                       toy_backward(&p->model, p->z, true, step, p->rank->rank + k * p->rank->world));
}

int micro_batches(struct program *p, int n)
{
    int err = 0;
    for (int k = 0; !err && k < n; k++)
        err = micro_batch(p, 0, k);
    return err;
}

int train_with_two_brackets(struct program *p)
{
    int err = 0;
    for (int k = 0; !err && k < STEPS; k++)
        err =
            FIRST_ERROR(micro_batch(p, k, 0), begin(p, 1, ZERO_BACKWARD), end(p, 1, ZERO_BACKWARD), step(p));
    return err;
}

int train_with(struct program *p, void (*between)(struct program *p))
{
    int err = 0;
    for (int i = 0; !err && i < STEPS; i++) {
        for (int k = 0; !err && k < p->cfg.grad_accum_steps; k++) {
            if (between)
                between(p);
            err = micro_batch(p, i, k);
        }
        err = FIRST_ERROR(err, step(p));
    }
    return err;
}

int train(struct program *p)
{
    return train_with(p, NULL);
}

int train_unbracketed(struct program *p, void (*between)(struct program *p))
{
    int err = 0;
    for (int i = 0; !err && i < STEPS; i++) {
        for (int k = 0; !err && k < p->cfg.grad_accum_steps; k++) {
            err = k ? zero_micro(p->z) : 0;
            if (between)
                between(p);
            err = FIRST_ERROR(err, toy_forward(&p->model, p->z, false),
                              toy_backward(&p->model, p->z, false, i, p->rank->rank + k * p->rank->world));
        }
        err = FIRST_ERROR(err, step(p));
    }
    return err;
}

int64_t bytes_of(int tensor)
{
    return toy_elems(tensor) * 4; /* bf16 tensors need half of this */
}

int refuses(void *arg, const struct zero_update *u)
{
    return 3;
}

void update_that_refuses(struct program *p)
{
    p->cfg.optim.update = refuses;
    p->cfg.optim.weight_decay = 0;
}

int trains_and_settles(struct program *p)
{
    struct zero_step_info info;
    return FIRST_ERROR(micro_batch(p, 0, 0), zero_step(p->z, 1e-2f, &info), train(p));
}

int norm(struct program *p)
{
    double x;
    return zero_norm(p->z, &x);
}

int fails(struct program *p)
{
    return trains_and_settles(p) ? 0 : ZERO_ERR_ARG;
}

/* ---- running rows ---- */

enum { MAX_ROWS = 128 };

static const struct misuse *rows[MAX_ROWS];
static int n_rows;

void misuse_add(const struct misuse *row)
{
    if (n_rows == MAX_ROWS)
        abort();
    rows[n_rows++] = row;
}

static void keep_line(void *arg, const char *line)
{
    struct program *p = arg;
    pthread_mutex_lock(&p->lock);
    size_t n = strlen(p->lines);
    snprintf(p->lines + n, sizeof p->lines - n, "%s\n", line);
    pthread_mutex_unlock(&p->lock);
}

struct trial {
    const struct misuse *row;
    int stage;
    struct program *programs;
};

static void run_rank(struct toy_rank *r)
{
    const struct trial *t = r->arg;
    struct program *p = &t->programs[r->rank];
    *p = (struct program){.rank = r,
                          .n_tensors = TOY_TENSORS,
                          .odd = r->rank == r->world - 1,
                          .odd_group = r->rank >= r->world - 2};
    pthread_mutex_init(&p->lock, NULL);
    toy_make(&p->model);
    for (int i = 0; i < TOY_TENSORS; i++)
        p->spare[i] = calloc(1, (size_t)bytes_of(i));
    p->table = p->model.table;
    p->cfg = toy_config(r, t->stage);
    p->cfg.debug.log = keep_line;
    p->cfg.debug.log_arg = p;
    t->row->configure(p);
    int err = FIRST_ERROR(zero_wrap(&p->z, p->table, p->n_tensors, &p->cfg), t->row->run(p));
    if (!err && t->row->outcome == TRAINS)
        err = toy_hash(p->z, 2, &r->hash);
    toy_note(r, err);
    int unwrap_err = zero_unwrap(&p->z);
    if (!err && unwrap_err)
        toy_note(r, unwrap_err);
    for (int i = 0; i < TOY_TENSORS; i++)
        free(p->spare[i]);
    toy_free(&p->model);
}

/* Trains the row's configuration correctly and returns the hash of the weights. */
static uint64_t right_hash(const struct misuse *row, int stage, int world)
{
    struct program programs[MAX_WORLD];
    const struct misuse plain = {
        .name = row->name, .configure = row->configure, .run = train, .outcome = TRAINS};
    struct trial t = {&plain, stage, programs};
    struct toy_rank r[MAX_WORLD];
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

/* Runs the row once. If the outcome is not the row's, prints it and returns false. */
static bool try_row(const struct misuse *row, int stage, int world)
{
    struct program programs[MAX_WORLD];
    struct trial t = {row, stage, programs};
    struct toy_rank r[MAX_WORLD];
    uint64_t want = row->outcome == TRAINS ? right_hash(row, stage, world) : 0;
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
    int n_tried = 0, n_bad = 0;
    for (int i = 0; i < n_rows; i++)
        for (int stage = 0; stage < TOY_STAGES; stage++)
            for (int world = 1; world <= MAX_WORLD; world++)
                if (rows[i]->stages >> stage & 1 && rows[i]->worlds >> (world - 1) & 1) {
                    n_tried++;
                    n_bad += !try_row(rows[i], stage, world);
                }
    print_message("%d ways of misuse, %d trials, %d silent or wrong\n", n_rows, n_tried, n_bad);
    assert_int_equal(n_bad, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_misuse)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
