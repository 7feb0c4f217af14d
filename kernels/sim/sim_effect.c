/* SPDX-License-Identifier: Apache-2.0 */
/* sim_effect.c: what an operation does when it runs: the bytes that it touches, their new content, and its
 * time. */
#include "kernels/exact_sum.h"
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

/* Returns the further time of an update whose masters and states are in other memory. */
static int64_t reaching_states(const struct zr_sim *w, const struct zr_sim_op *op)
{
    const struct zr_update *u = &op->update;
    if (op->kind != ZR_SIM_OP_UPDATE || w->opt.states_bytes_per_s <= 0)
        return 0;
    int n_kept = u->param && u->param != (void *)u->master;
    for (int i = 0; i < ZR_OPTIMIZER_STATES; i++)
        n_kept += u->state[i] != NULL;
    double bytes = 2.0 * n_kept * (double)(u->n * (int64_t)sizeof(float)); /* read and written */
    return (int64_t)(bytes / w->opt.states_bytes_per_s * 1e9);
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

static int64_t run_update(struct zr_sim *w, struct zr_line *l, const struct zr_update *u, uint32_t step)
{
    int64_t bytes = u->n * (int64_t)sizeof(float), size = u->param ? zr_dtype_bytes(u->param_dtype) : 0;
    bool apart = u->param && u->param != (void *)u->master;
    zr_shadow_read(&w->rec, l, u->scalars, sizeof *u->scalars);
    zr_shadow_read(&w->rec, l, u->grad, bytes);
    struct zr_content at = zr_shadow_at(&w->rec, u->master);
    at.kind = ZR_CONTENT_PARAM;
    zr_shadow_expect(&w->rec, l, u->master, bytes, at);
    struct zr_content grad = w->opt.whole_grad(w->opt.arg, at.flat, step);
    grad.first = at.first;
    zr_shadow_expect(&w->rec, l, u->grad, bytes, grad);
    struct zr_content state = at;
    state.kind = ZR_CONTENT_STATE;
    bool skip = u->scalars->skip;
    zr_shadow_read(&w->rec, l, u->master, bytes);
    if (!skip) {
        at.value++;
        zr_shadow_write(&w->rec, l, u->master, bytes);
        zr_shadow_set(&w->rec, u->master, bytes, at);
        struct zr_content param = at;
        param.size = (uint8_t)size;
        if (apart) {
            zr_shadow_write(&w->rec, l, u->param, u->n * size);
            zr_shadow_set(&w->rec, u->param, u->n * size, param);
        }
    }
    for (int i = 0; i < ZR_OPTIMIZER_STATES; i++) {
        if (!u->state[i])
            continue;
        zr_shadow_read(&w->rec, l, u->state[i], bytes);
        zr_shadow_expect(&w->rec, l, u->state[i], bytes, state);
        if (skip)
            continue;
        zr_shadow_write(&w->rec, l, u->state[i], bytes);
        zr_shadow_set(
            &w->rec, u->state[i], bytes,
            (struct zr_content){
                .kind = ZR_CONTENT_STATE, .size = 4, .flat = at.flat, .first = at.first, .value = at.value});
    }
    return bytes * 7;
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
    zr_shadow_sum(&w->rec, op->dst, op->src, from, op->count);
    return op->count * 12;
}

static int64_t run_squares(struct zr_sim *w, struct zr_line *l, const struct zr_sim_op *op, int rank)
{
    zr_shadow_read(&w->rec, l, op->src, op->count * 4);
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
    return op->count * 4;
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
