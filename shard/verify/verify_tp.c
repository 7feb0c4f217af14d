/* SPDX-License-Identifier: Apache-2.0 */
/* verify_tp.c: the model's tensor-parallel collectives: partial sums are reduced, activations are gathered
 * and scattered. A partial activation contains one rank's contribution, a reduced one the sum of all. Each
 * rank has its own elements of a split activation. */
#include "shard/verify/verify_world.h"

/* One collective over n elements. The number of the operation in the script identifies its contents. */
struct tp_operation {
    struct zr_verify_rank *r;
    const struct zr_script_op *op;
    int32_t flat, tp, tp_rank;
    int64_t size, n, each;
    char *whole, *own;
};

static struct zr_content contribution_of(const struct tp_operation *m, int32_t tp_rank,
                                         enum zr_content_kind kind)
{
    int32_t rank = m->r->id - m->tp_rank + tp_rank;
    return (struct zr_content){.kind = (uint8_t)kind,
                               .size = (uint8_t)m->size,
                               .flat = m->flat,
                               .value = zr_sim_contribution(rank, (uint32_t)m->op->step, m->flat, 0),
                               .n = kind == ZR_CONTENT_GRAD};
}

static struct zr_content whole_sum(const struct tp_operation *m)
{
    struct zr_content sum = contribution_of(m, 0, ZR_CONTENT_GRAD);
    for (int32_t p = 1; p < m->tp; p++) {
        sum.value += contribution_of(m, p, ZR_CONTENT_GRAD).value;
        sum.n++;
    }
    return sum;
}

static int touch(const struct tp_operation *m, const char *name, char *at, int64_t first, int64_t n,
                 enum zr_sim_how how, struct zr_content content)
{
    content.first = first;
    const struct zr_sim_touch t = {at, n * m->size, how, content};
    return zr_sim_compute(m->r->engine.compute, name, &t, 1, 0);
}

static enum zero_dtype dtype_of(const struct tp_operation *m)
{
    return m->op->bf16 ? ZERO_BF16 : ZERO_F32;
}

static int combine(const struct tp_operation *m, enum zr_call_name call, enum zr_op op, void *dst,
                   const void *src, int64_t n)
{
    const struct zr_arrays x = {.dst = dst, .src = src, .n = n, .dtype = dtype_of(m)};
    return zr_engine_combine(&m->r->engine, ZERO_AXIS_TP, call, op, &x);
}

static int add_up(const struct tp_operation *m)
{
    char *to = m->op->in_place ? m->whole : m->own;
    int err = touch(m, "a partial activation", m->whole, 0, m->n, ZR_SIM_SET,
                    contribution_of(m, m->tp_rank, ZR_CONTENT_GRAD));
    if (!err)
        err = combine(m, ZR_CALL_ALL_REDUCE_SUM, ZR_OP_ALL_REDUCE, to, m->whole, m->n);
    return err ? err : touch(m, "an activation added up", to, 0, m->n, ZR_SIM_READ, whole_sum(m));
}

static char *own_of(const struct tp_operation *m)
{
    return m->op->in_place ? m->whole + m->tp_rank * m->each * m->size : m->own;
}

static int scatter(const struct tp_operation *m)
{
    int err = touch(m, "a partial activation", m->whole, 0, m->n, ZR_SIM_SET,
                    contribution_of(m, m->tp_rank, ZR_CONTENT_GRAD));
    if (!err)
        err = combine(m, ZR_CALL_REDUCE_SCATTER, ZR_OP_REDUCE_SCATTER, own_of(m), m->whole, m->each);
    return err ? err
               : touch(m, "a part of an activation added up", own_of(m), m->tp_rank * m->each, m->each,
                       ZR_SIM_READ, whole_sum(m));
}

static int gather(const struct tp_operation *m)
{
    int err = touch(m, "a part of an activation", own_of(m), m->tp_rank * m->each, m->each, ZR_SIM_SET,
                    contribution_of(m, m->tp_rank, ZR_CONTENT_ACTIVATION));
    if (!err)
        err = combine(m, ZR_CALL_ALL_GATHER, ZR_OP_ALL_GATHER, m->whole, own_of(m), m->each);
    for (int32_t p = 0; !err && p < m->tp; p++)
        err = touch(m, "an activation gathered", m->whole + p * m->each * m->size, p * m->each, m->each,
                    ZR_SIM_READ, contribution_of(m, p, ZR_CONTENT_ACTIVATION));
    return err;
}

/* Real numbers, which the host compares after the collective. */
static float number_of(int32_t tp_rank, int64_t i)
{
    return (float)((tp_rank * 7 + i * 3) % 11);
}

static int take_max(const struct tp_operation *m)
{
    float *x = (float *)m->whole;
    const struct zr_sim_touch t = {x, m->n * m->size, ZR_SIM_PLAIN_WRITE, {0}};
    zr_sim_host_touch(m->r->v->sim, "numbers of each part", &t, 1);
    for (int64_t i = 0; i < m->n; i++)
        x[i] = number_of(m->tp_rank, i);
    const struct zr_arrays in_place = {.dst = x, .src = x, .n = m->n, .dtype = ZERO_F32};
    int err = zr_engine_axis_max(&m->r->engine, ZERO_AXIS_TP, ZR_CALL_ALL_REDUCE_MAX, &in_place);
    for (int64_t i = 0; !err && i < m->n; i++) {
        float max = 0;
        for (int32_t p = 0; p < m->tp; p++)
            max = number_of(p, i) > max ? number_of(p, i) : max;
        if (x[i] != max) {
            zr_report(zr_sim_recorder(m->r->v->sim),
                      "rank %d: the maximum of element %lld came out as %g, not %g", m->r->id, (long long)i,
                      (double)x[i], (double)max);
            return 0;
        }
    }
    return err;
}

int64_t zr_verify_tp_bytes(void)
{
    return 2 * ZR_VERIFY_TP_ELEMS * (int64_t)sizeof(float);
}

int zr_verify_tp_do(struct zr_verify_rank *r, const struct zr_script_op *op)
{
    int64_t number = op - r->of_stage->script.ops;
    const struct tp_operation m = {.r = r,
                                   .op = op,
                                   .flat = -(int32_t)(2 + number),
                                   .tp = r->v->c->tp,
                                   .tp_rank = r->tp_rank,
                                   .size = op->bf16 ? 2 : 4,
                                   .n = op->n,
                                   .each = op->n / r->v->c->tp,
                                   .whole = r->activations,
                                   .own = r->activations + zr_verify_tp_bytes() / 2};
    zr_engine_axis_called(&r->engine, ZERO_AXIS_TP, (uint64_t)number);
    switch ((enum zr_tp_collective)op->how) {
    case ZR_TP_SUM:
        return add_up(&m);
    case ZR_TP_SCATTER:
        return scatter(&m);
    case ZR_TP_GATHER:
        return gather(&m);
    case ZR_TP_MAX:
        return take_max(&m);
    case ZR_TP_COLLECTIVES:
        break;
    }
    return 0;
}
