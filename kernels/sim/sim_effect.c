/* SPDX-License-Identifier: Apache-2.0 */
/* sim_effect.c: what an operation does when it runs: the bytes that it touches, their new content, and its
 * time. */
#include "kernels/exact_sum.h"
#include "kernels/op_check.h"
#include "kernels/sim/sim_device_inside.h"

#include <string.h>

int64_t zr_sim_now(const struct zr_line *line)
{
    return line->clock->now_ns;
}

void zr_sim_begin(struct zr_sim *w, struct zr_line *l, const char *name, int32_t unit, uint32_t step)
{
    zr_line_begin(&w->rec, l, name, l->during, unit, step);
}

void zr_sim_spend(struct zr_sim *w, struct zr_line *l, int64_t ns)
{
    int64_t from = l->clock->now_ns;
    if (ns > 0)
        zr_line_own(&w->rec, l)->now_ns += ns;
    if (w->opt.ran)
        w->opt.ran(w->opt.arg, zr_info_at(&w->rec, l->info), l->name, l->rank, from, from + ns);
}

static int64_t moving(const struct zr_sim *w, int64_t bytes, bool launches)
{
    int64_t launch_ns = launches ? w->opt.launch_ns : 0;
    return w->opt.memory_bytes_per_s > 0
               ? launch_ns + (int64_t)((double)bytes / w->opt.memory_bytes_per_s * 1e9)
               : 0;
}

/* Returns how much longer an update takes if masters and states are not in the device's memory. */
static int64_t reaching_states(const struct zr_sim *w, const struct zr_sim_op *op)
{
    const struct zr_update *u = &op->update;
    if (op->kind != ZR_SIM_OP_UPDATE || w->opt.states_bytes_per_s <= 0)
        return 0;
    const bool apart = u->master && u->param && u->param != (void *)u->master;
    int64_t bytes = u->n * (int64_t)(apart ? sizeof *u->master : u->remainder ? sizeof *u->remainder : 0);
    for (int i = 0; i < ZR_OPTIMIZER_STATES; i++) {
        bytes += u->state[i] ? u->n * zr_moments_bytes(u->moments) : 0;
        bytes += u->scale[i] ? zr_coding_bytes_beside(ZR_CODING_Q8, u->n) : 0;
    }
    return (int64_t)(2.0 * (double)bytes / w->opt.states_bytes_per_s * 1e9); /* read and written */
}

static void touch_all(struct zr_sim *w, struct zr_line *l, const struct zr_sim_touch *t, int n)
{
    for (int i = 0; i < n; i++) {
        bool writes = t[i].how == ZR_SIM_ADD || t[i].how == ZR_SIM_SET || t[i].how == ZR_SIM_PLAIN_WRITE;
        if (t[i].how != ZR_SIM_SET && t[i].how != ZR_SIM_PLAIN_WRITE)
            zr_shadow_read(&w->rec, l, t[i].at, t[i].bytes);
        if (t[i].how == ZR_SIM_READ)
            zr_shadow_expect(&w->rec, l, t[i].at, t[i].bytes, t[i].content);
        if (writes)
            zr_shadow_write(&w->rec, l, t[i].at, t[i].bytes);
        if (t[i].how == ZR_SIM_ADD)
            zr_shadow_add_to(&w->rec, t[i].at, t[i].bytes, t[i].content);
        if (t[i].how == ZR_SIM_SET)
            zr_shadow_set(&w->rec, t[i].at, t[i].bytes, t[i].content);
    }
}

void zr_sim_host_touch(struct zr_sim *w, const char *name, const struct zr_sim_touch *touch, int n)
{
    zr_sim_begin(w, w->host, name, w->host->unit, w->host->step);
    touch_all(w, w->host, touch, n);
}

/* Reads a range that an update keeps beside the weights, and, unless the step is skipped, writes its next
 * version. Returns the bytes moved. */
static int64_t update_state(struct zr_sim *w, struct zr_line *l, void *at, int64_t bytes,
                            struct zr_content state, bool skip)
{
    zr_shadow_read(&w->rec, l, at, bytes);
    zr_shadow_expect(&w->rec, l, at, bytes, state);
    if (skip)
        return bytes;
    state.value++;
    zr_shadow_write(&w->rec, l, at, bytes);
    zr_shadow_set(&w->rec, at, bytes, state);
    return 2 * bytes;
}

static int64_t update_states(struct zr_sim *w, struct zr_line *l, const struct zr_update *u,
                             struct zr_content at, bool skip)
{
    int64_t bytes = 0;
    at.kind = ZR_CONTENT_STATE;
    at.size = sizeof *u->remainder;
    if (u->remainder)
        bytes += update_state(w, l, u->remainder, u->n * at.size, at, skip);
    at.size = (uint8_t)zr_moments_bytes(u->moments);
    for (int i = 0; i < ZR_OPTIMIZER_STATES; i++)
        if (u->state[i])
            bytes += update_state(w, l, u->state[i], u->n * at.size, at, skip);
    at.size = sizeof *u->scale[0];
    at.first /= ZR_Q8_BLOCK;
    for (int i = 0; i < ZR_OPTIMIZER_STATES; i++)
        if (u->scale[i])
            bytes += update_state(w, l, u->scale[i], zr_coding_bytes_beside(ZR_CODING_Q8, u->n), at, skip);
    return bytes;
}

static int64_t run_update(struct zr_sim *w, struct zr_line *l, const struct zr_update *u, uint32_t step)
{
    const bool f32 = u->masters == ZERO_MASTERS_F32, skip = u->scalars->skip;
    void *weights = f32 ? (void *)u->master : u->param;
    const int64_t size = u->param ? zr_dtype_bytes(u->param_dtype) : 0, bytes = u->n * (f32 ? 4 : size),
                  grad_bytes = u->n * zr_dtype_bytes(u->grad_dtype),
                  param_bytes = f32 && u->param && u->param != weights ? u->n * size : 0;
    zr_shadow_read(&w->rec, l, u->scalars, sizeof *u->scalars);
    zr_shadow_read(&w->rec, l, u->grad, grad_bytes);
    struct zr_content at = zr_shadow_at(&w->rec, weights);
    at.kind = ZR_CONTENT_PARAM;
    zr_shadow_expect(&w->rec, l, weights, bytes, at);
    struct zr_content grad = w->opt.whole_grad(w->opt.arg, at.flat, step);
    grad.first = at.first;
    grad.size = (uint8_t)zr_dtype_bytes(u->grad_dtype);
    zr_shadow_expect(&w->rec, l, u->grad, grad_bytes, grad);
    zr_shadow_read(&w->rec, l, weights, bytes);
    const int64_t states = update_states(w, l, u, at, skip);
    if (!skip) {
        at.value++;
        zr_shadow_write(&w->rec, l, weights, bytes);
        zr_shadow_set(&w->rec, weights, bytes, at);
        at.size = (uint8_t)size;
        zr_shadow_write(&w->rec, l, u->param, param_bytes);
        zr_shadow_set(&w->rec, u->param, param_bytes, at);
    }
    return grad_bytes + 2 * bytes + param_bytes + states;
}

void zr_sim_user_update(struct zr_sim *w, const struct zr_update *u)
{
    run_update(w, w->running, u, zr_info_at(&w->rec, w->running->info)->step);
}

/* ---- operations: each returns the bytes that it moves ---- */

static int64_t run_zero(struct zr_sim *w, struct zr_line *l, const struct zr_sim_op *op)
{
    zr_shadow_write(&w->rec, l, op->dst, op->count);
    zr_shadow_set(&w->rec, op->dst, op->count, (struct zr_content){.kind = ZR_CONTENT_ZERO});
    if (op->count <= 1024)
        memset(op->dst, 0, (size_t)op->count);
    return op->count;
}

static int64_t run_copy(struct zr_sim *w, struct zr_line *l, const struct zr_sim_op *op)
{
    zr_shadow_move(&w->rec, l, op->dst, op->src, op->count);
    if (op->count <= 1024)
        memcpy(op->dst, op->src, (size_t)op->count);
    return op->count * 2;
}

static int64_t run_cast(struct zr_sim *w, struct zr_line *l, const struct zr_sim_op *op)
{
    int from = (int)zr_dtype_bytes(op->src_type), to = (int)zr_dtype_bytes(op->dst_type);
    zr_shadow_read(&w->rec, l, op->src, op->count * from);
    if (op->dst == op->src) /* the write would cut the source */
        zr_shadow_copy(&w->rec, op->dst, to, op->src, from, op->count);
    zr_shadow_write(&w->rec, l, op->dst, op->count * to);
    if (op->dst != op->src)
        zr_shadow_copy(&w->rec, op->dst, to, op->src, from, op->count);
    return op->count * (from + to);
}

static int64_t run_add(struct zr_sim *w, struct zr_line *l, const struct zr_sim_op *op)
{
    int from = (int)zr_dtype_bytes(op->src_type), to = (int)zr_dtype_bytes(op->dst_type);
    zr_shadow_read(&w->rec, l, op->src, op->count * from);
    zr_shadow_read(&w->rec, l, op->dst, op->count * to);
    zr_shadow_write(&w->rec, l, op->dst, op->count * to);
    zr_shadow_sum(&w->rec, op->dst, to, op->src, from, op->count);
    return op->count * (from + 2 * to);
}

static int64_t run_encode(struct zr_sim *w, struct zr_line *l, const struct zr_sim_op *op)
{
    const struct zr_coded *to = &op->coded;
    const int64_t size = zr_coding_bytes(to->coding), beside = zr_coding_bytes_beside(to->coding, op->count);
    struct zr_content c = zr_shadow_at(&w->rec, op->src);
    zr_shadow_read(&w->rec, l, op->src, op->count * 4);
    zr_shadow_write(&w->rec, l, to->at, op->count * size);
    zr_shadow_copy(&w->rec, to->at, (int)size, op->src, 4, op->count);
    if (c.size) {
        c.kind = ZR_CONTENT_STATE;
        c.first /= to->coding == ZR_CODING_REMAINDER ? 1 : ZR_Q8_BLOCK;
        c.size = sizeof *to->beside;
    }
    zr_shadow_write(&w->rec, l, to->beside, beside);
    zr_shadow_set(&w->rec, to->beside, beside, c);
    return op->count * (4 + size) + beside;
}

static int64_t run_decode(struct zr_sim *w, struct zr_line *l, const struct zr_sim_op *op)
{
    const struct zr_coded *from = &op->coded;
    const int64_t size = zr_coding_bytes(from->coding),
                  beside = zr_coding_bytes_beside(from->coding, op->count);
    zr_shadow_read(&w->rec, l, from->at, op->count * size);
    zr_shadow_read(&w->rec, l, from->beside, beside);
    zr_shadow_write(&w->rec, l, op->dst, op->count * 4);
    zr_shadow_copy(&w->rec, op->dst, 4, from->at, (int)size, op->count);
    return op->count * (4 + size) + beside;
}

static int64_t run_squares(struct zr_sim *w, struct zr_line *l, const struct zr_sim_op *op, int rank)
{
    const int64_t bytes = op->count * zr_dtype_bytes(op->src_type);
    zr_shadow_read(&w->rec, l, op->src, bytes);
    zr_shadow_read(&w->rec, l, op->dst, sizeof(struct zr_exact_sum));
    zr_shadow_write(&w->rec, l, op->dst, sizeof(struct zr_exact_sum));
    if (op->largest.word) {
        zr_shadow_read(&w->rec, l, op->largest.word, sizeof *op->largest.word);
        zr_shadow_write(&w->rec, l, op->largest.word, sizeof *op->largest.word);
    }
    if (w->opt.poisoned && w->opt.poisoned(w->opt.arg, rank, op->step)) {
        uint64_t word = zr_largest_of(NAN, op->largest.at);
        ((struct zr_exact_sum *)op->dst)->nonfinite = 1;
        if (op->largest.word && word > *op->largest.word)
            *op->largest.word = word;
    }
    if (w->opt.squared)
        w->opt.squared(w->opt.arg, rank, op->count);
    return bytes;
}

static int64_t run_scale(struct zr_sim *w, struct zr_line *l, const struct zr_sim_op *op)
{
    zr_shadow_read(&w->rec, l, op->scalars, sizeof *op->scalars);
    zr_shadow_read(&w->rec, l, op->dst, op->count * 4);
    zr_shadow_write(&w->rec, l, op->dst, op->count * 4);
    return op->count * 8;
}

static void run_call(struct zr_sim *w, struct zr_line *l, struct zr_sim_op *op)
{
    zr_shadow_touch(&w->rec, l, op->access, op->n);
    w->running = l;
    op->fn(op->copy);
    w->running = NULL;
}

bool zr_sim_move(struct zr_sim *w, void *dst, const void *src, int64_t bytes)
{
    if (!w->running)
        zr_sim_begin(w, w->host, "transfer", w->host->unit, w->host->step);
    zr_shadow_move(&w->rec, w->running ? w->running : w->host, dst, src, bytes);
    return w->running != NULL;
}

static int64_t run_moving(struct zr_sim *w, struct zr_line *l, const struct zr_sim_op *op, int rank)
{
    switch (op->kind) {
    case ZR_SIM_OP_ZERO:
        return run_zero(w, l, op);
    case ZR_SIM_OP_COPY:
        return run_copy(w, l, op);
    case ZR_SIM_OP_CAST:
        return run_cast(w, l, op);
    case ZR_SIM_OP_ADD:
        return run_add(w, l, op);
    case ZR_SIM_OP_SQUARES:
        return run_squares(w, l, op, rank);
    case ZR_SIM_OP_SCALE:
        return run_scale(w, l, op);
    case ZR_SIM_OP_UPDATE:
        return run_update(w, l, &op->update, op->step);
    case ZR_SIM_OP_ENCODE:
        return run_encode(w, l, op);
    case ZR_SIM_OP_DECODE:
        return run_decode(w, l, op);
    case ZR_SIM_OP_CALL:
    case ZR_SIM_OP_COMPUTE:
    case ZR_SIM_OP_WAIT:
    case ZR_SIM_OP_RECORD:
    case ZR_SIM_OP_TOGETHER:
        break;
    }
    return 0;
}

void zr_sim_effect(struct zr_sim *w, struct zr_line *l, struct zr_sim_op *op, int rank)
{
    zr_sim_begin(w, l, op->name, op->unit, op->step);
    w->rec.infos[l->info % w->rec.cap_infos].during = op->during;
    if (op->kind == ZR_SIM_OP_CALL) {
        run_call(w, l, op);
        zr_sim_spend(w, l, 0);
    } else if (op->kind == ZR_SIM_OP_COMPUTE) {
        touch_all(w, l, op->touch, op->n);
        zr_sim_spend(w, l, op->ns);
    } else {
        int64_t bytes = run_moving(w, l, op, rank);
        zr_sim_spend(w, l, moving(w, bytes, !op->goes_on) + reaching_states(w, op));
    }
}
