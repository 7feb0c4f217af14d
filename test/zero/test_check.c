/* SPDX-License-Identifier: Apache-2.0 */
/* test_check.c: check mode (cfg.debug.check). A model that keeps to its brackets trains as without check
 * mode. One that does not gets an error that names what it touched. A wait that is missing from the schedule
 * is found in a real run. */
#include "shard/engine/internal.h"
#include "test/cmocka.h"
#include "test/zero/toy_net.h"
#include "zero/context.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { STEPS = 3 };

struct lines {
    char text[8192];
    int n;
};

static void keep_line(void *arg, const char *line)
{
    struct lines *l = arg;
    size_t used = strlen(l->text);
    snprintf(l->text + used, sizeof l->text - used, "%s\n", line);
    l->n++;
}

static int train(struct toy *m, zero_ctx *z, const struct toy_rank *r, int accum)
{
    int err = 0;
    for (int step = 0; !err && step < STEPS; step++) {
        for (int a = 0; !err && a < accum; a++) {
            err =
                FIRST_ERROR(toy_forward(m, z, true), toy_backward(m, z, true, step, a * r->world + r->rank));
        }
        if (!err)
            err = zero_step(z, 0.01f, NULL);
    }
    return err;
}

/* ---- correct models ---- */

struct sound {
    int stage, accum;
    bool check, async;
};

static void sound_rank(struct toy_rank *r)
{
    const struct sound *s = r->arg;
    struct toy m;
    toy_make(&m);
    struct zero_config cfg = toy_config(r, s->stage);
    cfg.grad_accum_steps = s->accum;
    cfg.debug.check = s->check;
    cfg.memory.param_budget_bytes = 1;
    cfg.memory.prefetch = 0;
    struct zero_ctx *z = NULL;
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    if (err == ZERO_ERR_BUDGET) {
        cfg.memory.param_budget_bytes = ZERO_AUTO;
        err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    }
    if (!err)
        err = train(&m, z, r, s->accum);
    if (!err)
        err = toy_hash(z, 2, &r->hash);
    toy_note(r, err);
    struct zero_stats stats;
    if (!err && zero_get_stats(z, &stats))
        toy_wrong(r, "zero_stats: %s", zero_last_error());
    else if (!err && memcmp(&stats.allocated, &stats.planned, sizeof stats.planned) != 0)
        toy_wrong(r, "not as planned");
    if (!err && z && (z->check != NULL) != s->check)
        toy_wrong(r, "check is %d", z->check != NULL);
    if (!err && z && s->stage > 1 && (m.param[0] != NULL) != s->check)
        toy_wrong(r, "a pointer outside its bracket is %p", m.param[0]);
    int last = zero_unwrap(&z);
    if (!err && last)
        toy_note(r, last);
    toy_free(&m);
}

static uint64_t run_sound(const struct sound *s, int world)
{
    struct toy_rank ranks[MAX_TOY_RANKS];
    toy_ranks(world, sound_rank, (void *)s, ranks);
    for (int i = 0; i < world; i++)
        if (ranks[i].err || ranks[i].wrong[0])
            fail_msg("stage %d, world %d, rank %d: %s %s", s->stage, world, i, ranks[i].text, ranks[i].wrong);
    return ranks[0].hash;
}

static void test_sound_models(void **state)
{
    for (int world = 1; world <= 4; world++)
        for (int stage = 0; stage < TOY_STAGES; stage++) {
            struct sound s = {.stage = stage, .accum = world == 2 ? 3 : 1};
            if (!toy_has_stage(world, stage))
                continue;
            uint64_t plain = run_sound(&s, world);
            s.check = true;
            assert_int_equal(run_sound(&s, world), plain);
        }
}

/* ---- wrong models ---- */

enum wrong {
    WRITES_GRAD_AFTER_END,
    READS_BEFORE_BEGIN,
    READS_AFTER_END,
    KEEPS_POINTER,
    KEEPS_POINTER_OVER_BACKWARD,
    KEEPS_POINTER_OF_FORWARD,
    KEEPS_POINTER_OF_NO_BRACKET,
    WRITES_GRAD_IN_FORWARD,
    OTHER_LAYER,
    WRITES_PARAM,
    BEYOND_END,
    WRONGS
};

static const char *const reported[WRONGS] = {
    [WRITES_GRAD_AFTER_END] =
        "after zero_end of unit 0 in backward, step 2, it writes the gradient of tensor "
        "embedding (unit 0, element 7) outside its bracket",
    [READS_BEFORE_BEGIN] =
        "after zero_step, step 1, it reads tensor bias (unit 1, element 0) outside its bracket",
    [READS_AFTER_END] =
        "after zero_end of unit 1 in forward, step 2, it reads tensor layers (unit 1, element "
        "119) outside its bracket",
    [KEEPS_POINTER] =
        "it reads tensor head (unit 3, element 5) outside its bracket, by a pointer that it kept",
    [KEEPS_POINTER_OVER_BACKWARD] = "tensor embedding (unit 0, element 0) inside its bracket, by a pointer "
                                    "that it kept from an earlier one",
    [KEEPS_POINTER_OF_FORWARD] = "tensor embedding (unit 0, element 0) inside its bracket, by a pointer that "
                                 "it kept from an earlier one",
    [KEEPS_POINTER_OF_NO_BRACKET] = "tensor embedding (unit 0, element 2) inside its bracket, by a pointer "
                                    "that it took before zero_begin",
    [WRITES_GRAD_IN_FORWARD] = "after zero_begin of unit 0 in forward, step 2, it writes the gradient of "
                               "tensor embedding (unit 0, element 1) outside its backward bracket",
    [OTHER_LAYER] = "after zero_begin of unit 1 in backward, step 2, it writes the gradient of tensor layers "
                    "(unit 2, element 120) outside its bracket",
    [WRITES_PARAM] =
        "after zero_begin of unit 3 in forward, step 2, it writes tensor head (unit 3, element 1) "
        "which may only be read",
    [BEYOND_END] = "it writes the gradient of tensor embedding (44 bytes beyond its end) where no tensor is",
};

struct faulty {
    int stage;
    enum wrong wrong;
    struct lines lines;
};

static volatile float seen;

/* Runs the second step, with one mistake in it. */
static int wrong_step(struct toy *m, zero_ctx *z, const struct toy_rank *r, enum wrong wrong)
{
    int err = 0;
    volatile float *kept = NULL;
    volatile uint16_t *kept_half = NULL;
    if (wrong == READS_BEFORE_BEGIN)
        seen = ((volatile uint16_t *)m->param[2])[0];
    if (wrong == KEEPS_POINTER_OF_NO_BRACKET)
        kept = m->param[0];
    for (int u = 0; !err && u < TOY_UNITS; u++) {
        err = zero_begin(z, u, ZERO_FORWARD);
        if (u == 0 && wrong == KEEPS_POINTER_OF_NO_BRACKET)
            seen = kept[2];
        if (u == 0 && wrong == WRITES_GRAD_IN_FORWARD)
            ((volatile float *)m->grad[0])[1] = 1;
        if (u == 0)
            kept = m->param[0];
        if (u == 3)
            kept_half = m->param[4];
        if (u == 3 && wrong == WRITES_PARAM)
            ((volatile uint16_t *)m->param[4])[1] = 1;
        if (!err)
            err = zero_end(z, u, ZERO_FORWARD);
        if (u == 1 && wrong == READS_AFTER_END)
            seen = ((volatile float *)m->param[TOY_STACKED])[119];
        if (u == 3 && wrong == KEEPS_POINTER)
            seen = kept_half[5];
    }
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        err = zero_begin(z, u, ZERO_BACKWARD);
        if (u == 0 && wrong == KEEPS_POINTER_OVER_BACKWARD)
            seen = kept[0];
        if (u == 1 && wrong == OTHER_LAYER)
            ((volatile float *)m->grad[TOY_STACKED])[120] = 1;
        if (u == 0 && wrong == BEYOND_END)
            ((volatile float *)m->grad[0])[toy_elems(0) + 11] = 1; /* past the next multiple of 64 bytes */
        if (!err)
            toy_add_gradient(m, u, 1, r->rank);
        if (!err)
            err = zero_end(z, u, ZERO_BACKWARD);
        if (u == 0 && wrong == WRITES_GRAD_AFTER_END)
            ((volatile float *)m->grad[0])[7] = 1;
    }
    for (int k = 0; !err && wrong == KEEPS_POINTER_OF_FORWARD && k < 2; k++) {
        /* The mistake is in forward, one step later. */
        err = zero_step(z, 0.01f, NULL);
        for (int u = 0; !err && u < TOY_UNITS; u++) {
            err = zero_begin(z, u, ZERO_FORWARD);
            if (u == 0)
                seen = kept[0];
            if (!err)
                err = zero_end(z, u, ZERO_FORWARD);
        }
        if (!err)
            err = toy_backward(m, z, true, 2 + k, r->rank);
    }
    return err ? err : zero_step(z, 0.01f, NULL);
}

static void faulty_rank(struct toy_rank *r)
{
    struct faulty *f = r->arg;
    struct toy m;
    toy_make(&m);
    struct zero_config cfg = toy_config(r, f->stage);
    cfg.debug.check = 1;
    bool mine = r->rank == r->world - 1; /* whether this rank's model is wrong */
    if (mine) {
        cfg.debug.log = keep_line;
        cfg.debug.log_arg = &f->lines;
    }
    struct zero_ctx *z = NULL;
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    for (int step = 0; !err && step < 4; step++) {
        if (step == 1 && mine) {
            err = wrong_step(&m, z, r, f->wrong);
            continue;
        }
        err = FIRST_ERROR(toy_forward(&m, z, true), toy_backward(&m, z, true, step, r->rank),
                          zero_step(z, 0.01f, NULL));
    }
    toy_note(r, err);
    if (zero_begin(z, 0, ZERO_FORWARD) != err)
        toy_wrong(r, "the context goes on: %s", zero_last_error());
    if (zero_unwrap(&z) != err)
        toy_wrong(r, "unwrap says %s", zero_last_error());
    for (int t = 0; t < TOY_TENSORS; t++)
        if (m.param[t] || m.grad[t])
            toy_wrong(r, "a pointer is left");
    toy_free(&m);
}

static void test_faults_of_the_model(void **state)
{
    for (int wrong = 0; wrong < WRONGS; wrong++)
        for (int stage = 2; stage < 4; stage++)
            for (int world = 1; world < 4; world += 2) {
                struct faulty f = {.stage = stage, .wrong = (enum wrong)wrong};
                struct toy_rank ranks[MAX_TOY_RANKS];
                toy_ranks(world, faulty_rank, &f, ranks);
                for (int i = 0; i < world; i++)
                    if (ranks[i].err != ZERO_ERR_ORDER || !strstr(ranks[i].text, "the model's fault") ||
                        !strstr(ranks[i].text, reported[wrong]) || ranks[i].wrong[0])
                        fail_msg("fault %d, stage %d, world %d, rank %d: %d \"%s\" %s; wanted \"%s\"", wrong,
                                 stage, world, i, ranks[i].err, ranks[i].text, ranks[i].wrong,
                                 reported[wrong]);
                assert_non_null(strstr(f.lines.text, reported[wrong]));
                assert_ptr_equal(strstr(strstr(f.lines.text, reported[wrong]) + 1, reported[wrong]),
                                 NULL); /* reported once only */
            }
}

/* ---- step numbers ---- */

struct numbered {
    bool loads; /* whether the number comes from zero_load; else from zero_set_step */
    char folder[64];
};

static int make_step(struct toy *m, zero_ctx *z, const struct toy_rank *r)
{
    return FIRST_ERROR(toy_forward(m, z, true), toy_backward(m, z, true, 0, r->rank),
                       zero_step(z, 0.01f, NULL));
}

/* Takes the step number 5 from a checkpoint or zero_set_step, and makes a mistake in step 7. */
static void numbering_rank(struct toy_rank *r)
{
    const struct numbered *n = r->arg;
    struct toy m;
    struct zero_ctx *z = NULL;
    int err = 0;
    struct zero_config cfg = toy_config(r, 3);
    cfg.debug.check = 1;
    cfg.debug.log = toy_forget_line;
    toy_make(&m);
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    for (int i = 0; i < 5 && n->loads; i++)
        TOY_TRY(make_step(&m, z, r));
    if (n->loads) {
        TOY_TRY(zero_save(z, n->folder, NULL));
        TOY_TRY(zero_unwrap(&z));
        toy_free(&m);
        toy_make(&m);
        TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
        TOY_TRY(zero_load(z, n->folder));
    } else {
        TOY_TRY(zero_set_step(z, 5));
    }
    TOY_TRY(make_step(&m, z, r));
    TOY_TRY(zero_begin(z, 0, ZERO_FORWARD));
    TOY_TRY(zero_end(z, 0, ZERO_FORWARD));
    if (!err)
        (void)((volatile float *)m.param[0])[0];
    if (!err)
        toy_note(r, err = zero_begin(z, 1, ZERO_FORWARD));
    zero_unwrap(&z);
    toy_free(&m);
}

static void test_steps_go_on(void **state)
{
    for (int loads = 0; loads < 2; loads++)
        for (int world = 1; world < 3; world++) {
            struct numbered n = {.loads = loads, .folder = "/tmp/zero-check-XXXXXX"};
            struct toy_rank ranks[MAX_TOY_RANKS];
            toy_make_folder(n.folder);
            toy_ranks(world, numbering_rank, &n, ranks);
            toy_remove_folder(n.folder);
            for (int i = 0; i < world; i++)
                if (!strstr(ranks[i].text, "after zero_end of unit 0 in forward, step 7, it reads"))
                    fail_msg("%s, world %d, rank %d: %d \"%s\"", loads ? "load" : "set", world, i,
                             ranks[i].err, ranks[i].text);
        }
}

/* ---- NaN gradients that are not caused by a wrong flag ---- */

/* Whether a sum with NaN keeps the NaN's bits depends on the conversion to 16 bits. */
enum nans { OVERFLOW, USUAL_NAN, NANS };

struct overwritten {
    int stage;
    enum nans nans;
    struct lines lines;
};

static void overwriting_rank(struct toy_rank *r)
{
    struct overwritten *o = r->arg;
    struct toy m;
    toy_make(&m);
    struct zero_config cfg = toy_config(r, o->stage);
    cfg.debug.check = 1;
    if (r->rank == 0) {
        cfg.debug.log = keep_line;
        cfg.debug.log_arg = &o->lines;
    }
    m.table[0].flags |= ZERO_GRAD_OVERWRITE;
    volatile float most = 3e38f;
    struct zero_ctx *z = NULL;
    struct zero_step_info info = {0};
    int err = FIRST_ERROR(zero_wrap(&z, m.table, TOY_TENSORS, &cfg), toy_forward(&m, z, true));
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        err = zero_begin(z, u, ZERO_BACKWARD);
        if (!err && u > 0 && u < 3)
            toy_add_gradient(&m, u, 0, r->rank);
        for (int64_t i = 0; !err && u == 0 && i < toy_elems(0); i++) /* infinity - infinity */
            ((float *)m.grad[0])[i] = i % 2 || o->nans != OVERFLOW ? 1 : most * most - most * most;
        for (int64_t i = 0; !err && u == 3 && i < toy_elems(4); i++)
            ((uint16_t *)m.grad[4])[i] = o->nans == USUAL_NAN ? 0x7fc0 : i % 2 ? 0x7f80 : 0xffc0;
        if (!err)
            err = zero_end(z, u, ZERO_BACKWARD);
    }
    if (!err)
        err = zero_step(z, 0.01f, &info);
    if (!err && !info.skipped)
        toy_wrong(r, "the step was not skipped");
    toy_note(r, err);
    zero_unwrap(&z);
    toy_free(&m);
}

static void test_other_nans(void **state)
{
    for (int nans = 0; nans < NANS; nans++)
        for (int stage = 0; stage < 4; stage++) {
            struct overwritten o = {.stage = stage, .nans = (enum nans)nans};
            struct toy_rank ranks[2];
            toy_ranks(2, overwriting_rank, &o, ranks);
            for (int i = 0; i < 2; i++)
                if (ranks[i].err || ranks[i].wrong[0])
                    fail_msg("stage %d, %d, rank %d: %s %s", stage, nans, i, ranks[i].text, ranks[i].wrong);
            bool said = strstr(o.lines.text, "every element of the gradient of tensor head (unit 3) is NaN");
            assert_int_equal(said, nans == USUAL_NAN);
        }
}

/* ---- an update that touches closed memory ---- */

/* Runs on a thread of the library. */
static int update_that_reads(void *arg, const struct zero_update *u)
{
    float *const *closed = arg;
    for (int64_t i = 0; i < u->n; i++)
        u->master[i] -= u->lr * u->grad[i] * ((volatile float *)*closed)[3];
    return 0;
}

static void reading_rank(struct toy_rank *r)
{
    const struct faulty *f = r->arg;
    struct toy m;
    toy_make(&m);
    struct zero_config cfg = toy_config(r, f->stage);
    cfg.debug.check = 1;
    cfg.optim.update = update_that_reads;
    cfg.optim.weight_decay = 0;
    float *closed = NULL;
    cfg.optim.update_arg = &closed;
    struct zero_ctx *z = NULL;
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    closed = m.param[0];
    if (!err)
        err = train(&m, z, r, 1);
    toy_note(r, err);
    zero_unwrap(&z);
    toy_free(&m);
}

static void test_update_that_reads(void **state)
{
    const char *text = "the model's fault: in optim.update, it reads tensor embedding (unit 0, element 3) "
                       "which it was not given";
    for (int stage = 2; stage < 4; stage++)
        for (int world = 1; world < 3; world++) {
            struct faulty f = {.stage = stage};
            struct toy_rank ranks[MAX_TOY_RANKS];
            toy_ranks(world, reading_rank, &f, ranks);
            for (int i = 0; i < world; i++)
                if (ranks[i].err != ZERO_ERR_ORDER || !strstr(ranks[i].text, text))
                    fail_msg("stage %d, world %d, rank %d: %d \"%s\"", stage, world, i, ranks[i].err,
                             ranks[i].text);
        }
}

/* ---- copies of groups that drift apart ---- */

enum { DRIFT_STEPS = 6 };

struct drift {
    int stage;
    bool check, checks_alone; /* checks_alone: only rank 1 is in check mode */
    int tensor;               /* the tensor whose update is random; -1: none */
    int from_step;
};

struct drifting {
    const struct drift *d;
    uint64_t random;
};

/* Plain gradient descent, with noise that does not come from its arguments. */
static int noisy_update(void *arg, const struct zero_update *u)
{
    struct drifting *a = arg;
    for (int64_t i = 0; i < u->n; i++) {
        bool noisy = u->tensor_index == a->d->tensor && u->t >= a->d->from_step;
        a->random = a->random * 6364136223846793005u + 1442695040888963407u;
        u->master[i] -= u->lr * u->grad[i] + (noisy ? (float)(a->random >> 40) * 1e-9f : 0);
    }
    return 0;
}

static void drifting_rank(struct toy_rank *r)
{
    const struct drift *d = r->arg;
    struct drifting a = {d, (uint64_t)r->rank * 977 + 5};
    struct toy m;
    toy_make(&m);
    struct zero_config cfg = toy_config(r, d->stage);
    cfg.debug.check = d->check || (d->checks_alone && r->rank == 1);
    cfg.optim.update = noisy_update;
    cfg.optim.weight_decay = 0;
    cfg.optim.update_arg = &a;
    struct zero_ctx *z = NULL;
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    for (int i = 0; !err && i < DRIFT_STEPS / STEPS; i++)
        err = train(&m, z, r, 1);
    toy_note(r, err);
    zero_unwrap(&z);
    toy_free(&m);
}

/* Runs all ranks, which must end with this code and text. NULL: no text. */
static void expect_drift(const struct drift *d, int code, const char *text)
{
    struct toy_rank ranks[TOY_HYBRID_WORLD];
    toy_ranks(TOY_HYBRID_WORLD, drifting_rank, (void *)d, ranks);
    for (int i = 0; i < TOY_HYBRID_WORLD; i++)
        if (ranks[i].err != code || ranks[i].wrong[0] || (text && !strstr(ranks[i].text, text)))
            fail_msg("stage %d, tensor %d, rank %d: %d \"%s\" %s", d->stage, d->tensor, i, ranks[i].err,
                     ranks[i].text, ranks[i].wrong);
}

/* All four ranks have a part of the embedding, so ranks 0 and 2 are the first that differ. */
static void test_copies_that_drift_apart(void **state)
{
    const char *at_once = "check: after step 1 rank 0 and rank 2 hold different copies of the same part of "
                          "tensor embedding: with hybrid hsdp every group updates its own copy, so "
                          "optim.update must give the same weights for the same arguments";
    struct drift d = {.stage = TOY_HSDP, .check = true, .tensor = 0, .from_step = 1};
    expect_drift(&d, ZERO_ERR_MISMATCH, at_once);
    d.from_step = 3; /* copies are compared after steps 1, 2 and 4 */
    expect_drift(&d, ZERO_ERR_MISMATCH, "check: after step 4 rank 0 and rank 2 hold different copies");
    d.from_step = 1;
    d.check = false; /* nothing is compared */
    expect_drift(&d, 0, NULL);
    d.check = true;
    d.stage = TOY_HFSDP; /* one group updates the copy and sends it to the others */
    expect_drift(&d, 0, NULL);
    struct drift sound = {.stage = TOY_HSDP, .check = true, .tensor = -1};
    expect_drift(&sound, 0, NULL);
    struct drift alone = {.stage = TOY_HSDP, .checks_alone = true, .tensor = -1};
    expect_drift(&alone, ZERO_ERR_MISMATCH, "check is 1 on rank 1 and 0 on rank 0");
}

/* ---- a schedule with a wait missing ---- */

/* Waits that are left out. On the host the model's thread computes, so the loop knows from the next job what
 * compute has done. Only events of the loop's streams are really waited for. test/sim has the other waits. */
enum missing { NOTHING, UPDATED, READY, GRAD_FREE, MISSINGS };

struct gap {
    enum missing what;
    int stage;
};

/* The rank whose device functions skip a wait. Device functions do not get their rank as an argument, so the
 * state is global. */
static struct zr_device_ops torn_ops;
static const struct zr_device_ops *whole_ops;
static struct zr_engine *torn;
static enum missing torn_what;

static bool is_torn(const struct zr_event *e)
{
    int32_t places = torn->layout->n_units + torn->plan->n_grad_slots;
    const struct {
        struct zr_event **at;
        int32_t n;
    } of[MISSINGS] = {[UPDATED] = {torn->ev.updated, torn->layout->n_units},
                      [READY] = {torn->ev.ready, torn->layout->n_units},
                      [GRAD_FREE] = {torn->ev.grad_free, places}};
    for (int32_t i = 0; i < of[torn_what].n; i++)
        if (of[torn_what].at[i] == e)
            return true;
    return false;
}

static int torn_wait(struct zr_stream *s, struct zr_event *e)
{
    return is_torn(e) ? 0 : whole_ops->stream_wait(s, e);
}

static int torn_query(struct zr_event *e)
{
    return is_torn(e) ? 0 : whole_ops->event_query(e);
}

static void torn_rank(struct toy_rank *r)
{
    const struct gap *g = r->arg;
    struct toy m;
    toy_make(&m);
    struct zero_config cfg = toy_config(r, g->stage);
    cfg.debug.check = 1;
    cfg.memory.prefetch = 1;
    struct zero_ctx *z = NULL;
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    if (!err && r->rank == 1 && g->what) {
        torn = z->engine;
        torn_what = g->what;
        whole_ops = zr_engine_device(z->engine)->ops;
        torn_ops = *whole_ops;
        torn_ops.stream_wait = torn_wait;
        torn_ops.event_query = torn_query;
        zr_engine_device(z->engine)->ops = &torn_ops;
    }
    if (!err)
        err = train(&m, z, r, 1);
    toy_note(r, err);
    int last = zero_unwrap(&z);
    if (!err && last)
        toy_note(r, last);
    toy_free(&m);
}

static void test_missing_waits(void **state)
{
    for (int what = 0; what < MISSINGS; what++) {
#ifdef __SANITIZE_THREAD__
        if (what != NOTHING) /* ThreadSanitizer would report the same races */
            continue;
#endif
        struct gap g = {.what = (enum missing)what, .stage = 3};
        struct toy_rank ranks[2];
        toy_ranks(2, torn_rank, &g, ranks);
        if (what == NOTHING ? ranks[1].err != 0
                            : ranks[1].err != ZERO_ERR_FAILED || !strstr(ranks[1].text, "check: race on"))
            fail_msg("without wait %d: %d %s", what, ranks[1].err, ranks[1].text);
        printf("%d: %s\n", what, ranks[1].text);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sound_models),
        cmocka_unit_test(test_faults_of_the_model),
        cmocka_unit_test(test_steps_go_on),
        cmocka_unit_test(test_other_nans),
        cmocka_unit_test(test_update_that_reads),
        cmocka_unit_test(test_missing_waits),
        cmocka_unit_test(test_copies_that_drift_apart),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
