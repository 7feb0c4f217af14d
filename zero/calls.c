/* SPDX-License-Identifier: Apache-2.0 */
/* calls.c: the calls of a training loop, zero_read and zero_write. They check their arguments, and the engine
 * does the work. */
#include "zero/checkpoint/save.h"
#include "zero/context.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

static int bracket(struct zero_ctx *z, enum zr_core_event_kind kind, int32_t unit, enum zero_phase phase)
{
    enum zr_call_name name = kind == ZR_EV_BEGIN ? ZR_CALL_BEGIN : ZR_CALL_END;
    const char *call = zr_call_function(name);
    ZR_TRY(zr_call_check(z, name));
    bool known_phase = phase >= ZERO_FORWARD && phase <= ZERO_BACKWARD_WEIGHT;
    if (!known_phase || unit < 0 || unit >= z->layout->n_units) {
        ZR_TRY(zr_need_healthy(z, call));
        if (!known_phase)
            return zr_fail(ZERO_ERR_ARG,
                           "%s: phase is %d; allowed: ZERO_FORWARD, ZERO_BACKWARD, ZERO_BACKWARD_INPUT, "
                           "ZERO_BACKWARD_WEIGHT",
                           call, (int)phase);
        return zr_fail(ZERO_ERR_ARG, "%s: unit is %d; allowed: 0..%d", call, unit, z->layout->n_units - 1);
    }
    struct zr_core_event ev = {.kind = kind, .unit = unit, .phase = phase};
    if (kind == ZR_EV_BEGIN && !zr_engine_has_failed(z->engine))
        ZR_TRY(zr_schedule_bracket(z, call, &ev));
    ZR_TRY(zr_engine_call(z->engine, &ev));
    if (kind == ZR_EV_END)
        zr_missing_brackets_count(z, unit, phase);
    return 0;
}

int zero_begin(zero_ctx *z, int32_t unit, enum zero_phase phase)
{
    ZR_IN_CALL(z, ZR_CALL_BEGIN, phase, unit);
    return bracket(z, ZR_EV_BEGIN, unit, phase);
}

int zero_end(zero_ctx *z, int32_t unit, enum zero_phase phase)
{
    ZR_IN_CALL(z, ZR_CALL_END, phase, unit);
    return bracket(z, ZR_EV_END, unit, phase);
}

int zero_micro(zero_ctx *z)
{
    ZR_BEGIN_CALL(z, ZR_CALL_MICRO);
    if (zr_stages(z) > 1)
        return zr_fail(ZERO_ERR_ORDER,
                       "zero_micro: a pipeline's schedule ends the micro-batches; do not call zero_micro");
    struct zr_core_event ev = {.kind = ZR_EV_MICRO};
    return zr_engine_call(z->engine, &ev);
}

int zero_norm(zero_ctx *z, double *norm)
{
    ZR_BEGIN_CALL(z, ZR_CALL_NORM);
    if (!norm)
        return zr_fail(ZERO_ERR_ARG, "zero_norm: norm is NULL");
    return zr_engine_norm(z->engine, norm);
}

int zero_drop(zero_ctx *z)
{
    ZR_BEGIN_CALL(z, ZR_CALL_DROP);
    ZR_TRY(zr_schedule_drop(z));
    ZR_TRY(zr_engine_drop(z->engine));
    zr_schedule_step(z);
    zr_loss_scale_drop(z);
    zr_missing_brackets_drop(z);
    return 0;
}

static void report_progress(struct zero_ctx *z)
{
    struct zr_engine_facts facts;
    zr_engine_facts(z->engine, &facts);
    zr_progress_step(&z->progress, facts.t);
}

static int check_lr(const struct zero_ctx *z, float lr)
{
    const struct zr_tuned *now = zr_engine_tuned(z->engine);
    if (!isfinite(lr))
        return zr_fail(ZERO_ERR_ARG, "zero_step: lr is %g; it must be finite", (double)lr);
    for (int32_t i = 0; i < z->config.options.n_optims; i++)
        if (!isfinite(lr * now->optim[i].lr_scale))
            return zr_fail(ZERO_ERR_ARG, "zero_step: lr %g times lr_scale %g of group %d is not finite",
                           (double)lr, (double)now->optim[i].lr_scale, i);
    return 0;
}

int zero_step(zero_ctx *z, float lr, struct zero_step_info *info)
{
    ZR_IN_CALL(z, ZR_CALL_STEP, 0, -1);
    ZR_TRY(zr_need_healthy(z, "zero_step"));
    ZR_TRY(check_lr(z, lr));
    ZR_TRY(zr_call_check(z, ZR_CALL_STEP));
    struct zero_step_info r;
    ZR_TRY(zr_engine_step(z->engine, lr, info ? &r : NULL));
    z->n_micro += (int64_t)zr_engine_tuned(z->engine)->grad_accum_steps * z->config.place.n_data;
    report_progress(z);
    zr_loss_scale_step(z);
    zr_collectives_step(z);
    zr_missing_brackets_step(z);
    zr_schedule_step(z);
    zr_save_notice(z);
    ZR_TRY(zr_engine_tied_step(z->engine));
    ZR_TRY(zr_engine_end_step(z->engine));
    if (info)
        *info = r;
    return 0;
}

int zero_carry(zero_ctx *z, const double *values, int32_t n)
{
    ZR_BEGIN_CALL(z, ZR_CALL_CARRY);
    if (n < 0 || n > ZR_MAX_CARRIED || (n && !values))
        return zr_fail(ZERO_ERR_ARG,
                       "zero_carry: n is %d, values is %s; allowed: n 0..%d and values not NULL", n,
                       values ? "set" : "NULL", ZR_MAX_CARRIED);
    zr_engine_called(z->engine, (uint64_t)n);
    zr_engine_give(z->engine, values, n);
    return 0;
}

int zero_last_step(zero_ctx *z, struct zero_step_info *info)
{
    struct zero_step_info r;
    bool known;
    ZR_TRY(zr_need_healthy(z, "zero_last_step"));
    if (!info)
        return zr_fail(ZERO_ERR_ARG, "zero_last_step: info is NULL");
    struct zr_engine_facts facts;
    zr_engine_facts(z->engine, &facts);
    if (facts.n_steps == 0)
        return zr_fail(ZERO_ERR_ORDER, "zero_last_step: there was no zero_step yet");
    ZR_TRY(zr_engine_last(z->engine, &known, &r));
    if (!known)
        return ZERO_PENDING;
    *info = r;
    return 0;
}

/* Checks the arguments of zero_read and zero_write, and translates the value into the engine's kind. */
static int check_range(struct zero_ctx *z, bool writes, int32_t tensor, int32_t value, int64_t first,
                       int64_t n, int *kind)
{
    const enum zr_call_name name = writes ? ZR_CALL_WRITE : ZR_CALL_READ;
    const char *call = zr_call_function(name);
    ZR_TRY(zr_need_healthy(z, call));
    if (tensor < 0 || tensor >= z->layout->n_tensors)
        return zr_fail(ZERO_ERR_ARG, "%s: tensor is %d; allowed: 0..%d", call, tensor,
                       z->layout->n_tensors - 1);
    const struct zr_tensor *t = &z->layout->tensors[tensor];
    int n_states = t->grad ? t->n_states : 0;
    bool grad = value == ZERO_VALUE_GRAD;
    if (value < ZERO_VALUE_PARAM || (t->grad && value >= ZERO_VALUE_STATE + n_states && !grad)) {
        char states[128];
        snprintf(states, sizeof states, "%d states per weight", n_states);
        if (t->optimizer)
            zr_optimizer_list_states(t->optimizer, n_states, states, sizeof states);
        return zr_fail(ZERO_ERR_ARG,
                       "%s: value is %d; allowed: 0..%d (optimizer of tensor %s: %s, %s), and "
                       "ZERO_VALUE_GRAD (64) to read",
                       call, value, ZERO_VALUE_STATE + n_states - 1, t->name, zr_optimizer_name(t->optimizer),
                       states);
    }
    if (value != ZERO_VALUE_PARAM && t->buffer)
        return zr_fail(ZERO_ERR_ARG,
                       "%s: tensor %s is a buffer: it has no master weights, no states and no gradient", call,
                       t->name);
    /* The values of the first pipeline stage go to both. */
    bool given = writes && value == ZERO_VALUE_MASTER && t->tied_grad;
    if (value != ZERO_VALUE_PARAM && t->tie == ZR_TIE_COPY && !given)
        return zr_fail(ZERO_ERR_ARG,
                       "%s: tensor %s is ZERO_TIED: the first pipeline stage has its master weights, states "
                       "and gradient",
                       call, t->name);
    if (value != ZERO_VALUE_PARAM && !t->grad && !given)
        return zr_fail(ZERO_ERR_ARG,
                       "%s: tensor %s is frozen: it has no master weights, no states and no gradient", call,
                       t->name);
    const struct zr_tp_cut cut = zr_tp_of_tensor(t, z->mesh.tp);
    int64_t n_elems = writes && t->given_whole ? zr_tp_whole_elems(&cut) : t->n_elems;
    if (first < 0 || n < 0 || first > n_elems - n)
        return zr_fail(ZERO_ERR_ARG,
                       "%s: first is %lld, n is %lld; allowed: a range within the %lld elements of tensor %s",
                       call, (long long)first, (long long)n, (long long)n_elems, t->name);
    ZR_TRY(zr_call_check(z, name));
    *kind = value == ZERO_VALUE_PARAM    ? ZR_VALUE_PARAM
            : value == ZERO_VALUE_MASTER ? ZR_VALUE_MASTER
            : grad                       ? ZR_VALUE_GRAD
                                         : value - ZERO_VALUE_STATE;
    return 0;
}

/* Checks that a write of 8-bit states covers whole blocks, which have one scale. */
static int check_blocks(const struct zero_ctx *z, const struct zr_tensor *t, int kind, int64_t first,
                        int64_t n)
{
    const struct zr_tp_cut cut = zr_tp_of_tensor(t, t->given_whole ? z->mesh.tp : 1);
    if (kind < 0 || t->moments != ZERO_MOMENTS_Q8 || n == 0)
        return 0;
    const int64_t layer = zr_tp_whole_elems(&cut) / t->n_layers, end = (first + n) % layer;
    if (first % layer % ZR_Q8_BLOCK == 0 && end % ZR_Q8_BLOCK == 0)
        return 0;
    return zr_fail(
        ZERO_ERR_ARG,
        "zero_write: first is %lld, n is %lld; allowed for states of tensor %s, whose moments are q8: whole "
        "blocks of %d elements, counted from the first of a layer, whose last block may be shorter",
        (long long)first, (long long)n, t->name, ZR_Q8_BLOCK);
}

/* Hashes the arguments that must be equal on all ranks, except the tensor. */
static uint64_t hash_range(int32_t value, int64_t first, int64_t n)
{
    const int64_t words[] = {value, first, n};
    return XXH3_64bits(words, sizeof words);
}

int zr_values_read(struct zero_ctx *z, int32_t tensor, int kind, int64_t first, int64_t n, void *dst)
{
    if (!z->layout->tensors[tensor].buffer)
        return zr_engine_read(z->engine, tensor, kind, first, n, dst);
    ZR_TRY(zr_agree_in_stage(z, zr_buffers_check(z)));
    return zr_engine_read_buffer(z->engine, tensor, first, n, dst);
}

/* Writes a range. given: the program wrote these values, and counts elements as ZERO_WHOLE says. Both
 * pipeline stages of a tied tensor make this call, and then have equal values. */
static int write_values(struct zero_ctx *z, int32_t tensor, int kind, int64_t first, int64_t n,
                        const void *src, bool given)
{
    enum zr_tie tie = z->layout->tensors[tensor].tie;
    bool whole = given && z->layout->tensors[tensor].given_whole;
    if (z->layout->tensors[tensor].buffer) {
        ZR_TRY(zr_agree_in_stage(z, zr_buffers_check(z)));
        return zr_engine_write_buffer(z->engine, tensor, first, n, src);
    }
    bool lacks_values = z->init_later != NULL;
    if (lacks_values)
        ZR_TRY(zr_agree_in_stage(z, zr_init_later_reserve(z, tensor)));
    if (tie != ZR_TIE_COPY)
        ZR_TRY(whole ? zr_engine_write_whole(z->engine, tensor, kind, first, n, src)
                     : zr_engine_write(z->engine, tensor, kind, first, n, src));
    if (given && tie != ZR_TIE_NONE && kind < 0)
        ZR_TRY(zr_engine_tied_values(z->engine));
    if (kind < 0)
        zr_init_later_note(z, tensor, whole, first, n);
    bool all_have_values = lacks_values && !z->init_later;
    return all_have_values && z->mesh.pp == 1 ? zr_engine_tp_compare(z->engine) : 0;
}

int zr_values_write(struct zero_ctx *z, int32_t tensor, int kind, int64_t first, int64_t n, const void *src)
{
    return write_values(z, tensor, kind, first, n, src, false);
}

/* Completes the step's gradients. */
static int complete_gradients(struct zero_ctx *z)
{
    double norm;
    if (zr_engine_is_complete(z->engine))
        return 0;
    if (z->mesh.pp > 1)
        return zr_fail(ZERO_ERR_ORDER,
                       "zero_read: the gradients of this step are not complete; with pp %d, call zero_norm "
                       "on the ranks of all pipeline stages first",
                       z->mesh.pp);
    ZR_TRY(zr_need_gradients(z, "zero_read"));
    int err = zr_engine_norm(z->engine, &norm);
    return err ? zr_fail_more(err, "zero_read of a gradient") : 0;
}

int zero_read(zero_ctx *z, int32_t tensor, int32_t value, int64_t first, int64_t n, void *dst)
{
    ZR_IN_CALL(z, ZR_CALL_READ, 0, tensor);
    int kind = 0, err = check_range(z, false, tensor, value, first, n, &kind);
    if (err)
        return err;
    ZR_TRY(zr_init_later_require(z, "zero_read", tensor));
    if (kind == ZR_VALUE_GRAD)
        ZR_TRY(complete_gradients(z));
    zr_engine_called(z->engine, hash_range(value, first, n));
    return zr_values_read(z, tensor, kind, first, n, dst);
}

int zero_write(zero_ctx *z, int32_t tensor, int32_t value, int64_t first, int64_t n, const void *src)
{
    ZR_IN_CALL(z, ZR_CALL_WRITE, 0, tensor);
    int kind = 0, err = check_range(z, true, tensor, value, first, n, &kind);
    if (err)
        return err;
    if (value == ZERO_VALUE_GRAD)
        return zr_fail(ZERO_ERR_ARG, "zero_write: value is ZERO_VALUE_GRAD, which can only be read");
    bool counts = zr_dp_rank(z) == 0 && z->layout->tensors[tensor].tie != ZR_TIE_COPY;
    if (!src && counts && n)
        return zr_fail(ZERO_ERR_ARG, "zero_write: src is NULL on rank %d, which must give the values",
                       z->world.rank);
    ZR_TRY(check_blocks(z, &z->layout->tensors[tensor], kind, first, n));
    zr_engine_called(z->engine, hash_range(value, first, n));
    return write_values(z, tensor, kind, first, n, src, true);
}

int zero_mean(zero_ctx *z, double *values, int32_t n)
{
    ZR_BEGIN_CALL(z, ZR_CALL_MEAN);
    if (!values || n < 0 || n > 64)
        return zr_fail(ZERO_ERR_ARG, "zero_mean: n is %d, values is %s; allowed: n 0..64 and values not NULL",
                       n, values ? "set" : "NULL");
    zr_engine_called(z->engine, (uint64_t)n);
    return zr_engine_mean(z->engine, values, n);
}
