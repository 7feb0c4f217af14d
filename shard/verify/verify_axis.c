/* SPDX-License-Identifier: Apache-2.0 */
/* verify_axis.c: the model's collectives and shifts over tp and cp. Partial sums are added up; activations
 * are gathered, scattered and shifted. A partial activation contains one rank's contribution, a sum those of
 * all. Each rank has its own elements of a split activation. */
#include "shard/verify/verify_world.h"

/* One operation over n elements. The number of the script's operation that began it identifies its
 * contents. */
struct axis_operation {
    struct zr_verify_rank *r;
    const struct zr_script_op *op;
    enum zero_axis axis;
    /* Ranks along the axis, this rank's number among them, and the distance of their numbers in the world. */
    int32_t size, rank, step;
    int32_t flat;
    int64_t elem_bytes, n, each;
};

/* ---- memory ---- */

/* Arrays of activations of a rank. Each axis has its own for shifts. */
enum { WHOLE, OWN, SHIFT_SRC, SHIFT_DST = SHIFT_SRC + 2, ARRAYS = SHIFT_DST + 2 };
enum { ARRAY_BYTES = ZR_VERIFY_AXIS_ELEMS * (int)sizeof(float) };

int64_t zr_verify_axis_bytes(void)
{
    return (int64_t)ARRAYS * ARRAY_BYTES;
}

static char *array_at(const struct axis_operation *m, int array)
{
    bool shifts = array == SHIFT_SRC || array == SHIFT_DST;
    return m->r->activations + (array + (shifts && m->axis == ZERO_AXIS_CP)) * (int64_t)ARRAY_BYTES;
}

/* Part p of an array that has a part for each rank. */
static char *part_at(const struct axis_operation *m, int array, int32_t p)
{
    return array_at(m, array) + p * m->each * m->elem_bytes;
}

static char *own_part(const struct axis_operation *m)
{
    return m->op->in_place ? part_at(m, WHOLE, m->rank) : array_at(m, OWN);
}

/* ---- contents ---- */

static struct zr_content contribution_of(const struct axis_operation *m, int32_t p, enum zr_content_kind kind)
{
    int32_t rank = m->r->id + (p - m->rank) * m->step;
    return (struct zr_content){.kind = (uint8_t)kind,
                               .size = (uint8_t)m->elem_bytes,
                               .flat = m->flat,
                               .value = zr_sim_contribution(rank, (uint32_t)m->op->step, m->flat, 0),
                               .n = kind == ZR_CONTENT_GRAD};
}

static struct zr_content whole_sum(const struct axis_operation *m)
{
    struct zr_content sum = contribution_of(m, 0, ZR_CONTENT_GRAD);
    for (int32_t p = 1; p < m->size; p++) {
        sum.value += contribution_of(m, p, ZR_CONTENT_GRAD).value;
        sum.n++;
    }
    return sum;
}

static struct zr_sim_touch touching(const struct axis_operation *m, char *at, int64_t first, int64_t n,
                                    enum zr_sim_how how, struct zr_content content)
{
    content.first = first;
    return (struct zr_sim_touch){at, n * m->elem_bytes, how, content};
}

static int touch(const struct axis_operation *m, const char *name, char *at, int64_t first, int64_t n,
                 enum zr_sim_how how, struct zr_content content)
{
    const struct zr_sim_touch t = touching(m, at, first, n, how, content);
    return zr_sim_compute(m->r->engine.compute, name, &t, 1, 0);
}

/* ---- collectives ---- */

static struct zr_arrays arrays_of(const struct axis_operation *m, void *dst, const void *src, int64_t n)
{
    return (struct zr_arrays){
        .dst = dst, .src = src, .n = n, .dtype = m->op->bf16 ? ZERO_BF16 : ZERO_F32, .stride = n};
}

static int combine(const struct axis_operation *m, enum zr_call_name call, enum zr_op op, void *dst,
                   const void *src, int64_t n)
{
    const struct zr_arrays x = arrays_of(m, dst, src, n);
    return zr_engine_combine(&m->r->engine, m->axis, call, op, &x);
}

static int add_up(const struct axis_operation *m)
{
    char *from = array_at(m, WHOLE), *to = m->op->in_place ? from : array_at(m, OWN);
    ZR_TRY(touch(m, "a partial activation", from, 0, m->n, ZR_SIM_SET,
                 contribution_of(m, m->rank, ZR_CONTENT_GRAD)));
    ZR_TRY(combine(m, ZR_CALL_ALL_REDUCE_SUM, ZR_OP_ALL_REDUCE, to, from, m->n));
    return touch(m, "an activation added up", to, 0, m->n, ZR_SIM_READ, whole_sum(m));
}

static int scatter(const struct axis_operation *m)
{
    char *from = array_at(m, WHOLE), *to = own_part(m);
    ZR_TRY(touch(m, "a partial activation", from, 0, m->n, ZR_SIM_SET,
                 contribution_of(m, m->rank, ZR_CONTENT_GRAD)));
    ZR_TRY(combine(m, ZR_CALL_REDUCE_SCATTER, ZR_OP_REDUCE_SCATTER, to, from, m->each));
    return touch(m, "a part of an activation added up", to, m->rank * m->each, m->each, ZR_SIM_READ,
                 whole_sum(m));
}

static int gather(const struct axis_operation *m)
{
    ZR_TRY(touch(m, "a part of an activation", own_part(m), m->rank * m->each, m->each, ZR_SIM_SET,
                 contribution_of(m, m->rank, ZR_CONTENT_ACTIVATION)));
    ZR_TRY(combine(m, ZR_CALL_ALL_GATHER, ZR_OP_ALL_GATHER, array_at(m, WHOLE), own_part(m), m->each));
    for (int32_t p = 0; p < m->size; p++)
        ZR_TRY(touch(m, "an activation gathered", part_at(m, WHOLE, p), p * m->each, m->each, ZR_SIM_READ,
                     contribution_of(m, p, ZR_CONTENT_ACTIVATION)));
    return 0;
}

/* Each rank receives the part of every rank's array that has its number. */
static int exchange_parts(const struct axis_operation *m)
{
    ZR_TRY(touch(m, "an activation for all ranks", array_at(m, WHOLE), 0, m->n, ZR_SIM_SET,
                 contribution_of(m, m->rank, ZR_CONTENT_ACTIVATION)));
    ZR_TRY(combine(m, ZR_CALL_ALL_TO_ALL, ZR_OP_ALL_TO_ALL, array_at(m, OWN), array_at(m, WHOLE), m->each));
    for (int32_t p = 0; p < m->size; p++)
        ZR_TRY(touch(m, "a part of each rank's activation", part_at(m, OWN, p), m->rank * m->each, m->each,
                     ZR_SIM_READ, contribution_of(m, p, ZR_CONTENT_ACTIVATION)));
    return 0;
}

static int broadcast(const struct axis_operation *m)
{
    char *at = array_at(m, WHOLE);
    const struct zr_content content = contribution_of(m, m->op->by, ZR_CONTENT_ACTIVATION);
    enum zr_call_name call = m->axis == ZERO_AXIS_CP ? ZR_CALL_BROADCAST_CP : ZR_CALL_BROADCAST_TP;
    if (m->rank == m->op->by)
        ZR_TRY(touch(m, "an activation for all ranks", at, 0, m->n, ZR_SIM_SET, content));
    ZR_TRY(zr_engine_axis_broadcast(&m->r->engine, m->axis, call, m->op->by, at, m->n * m->elem_bytes));
    return touch(m, "an activation of one rank", at, 0, m->n, ZR_SIM_READ, content);
}

/* Real numbers, which the host compares after the collective. */
static float number_of(int32_t rank, int64_t i)
{
    return (float)((rank * 7 + i * 3) % 11);
}

static int take_max(const struct axis_operation *m)
{
    float *x = (float *)array_at(m, WHOLE);
    const struct zr_sim_touch t = {x, m->n * m->elem_bytes, ZR_SIM_PLAIN_WRITE, {0}};
    zr_sim_host_touch(m->r->v->sim, "numbers of each part", &t, 1);
    for (int64_t i = 0; i < m->n; i++)
        x[i] = number_of(m->rank, i);
    const struct zr_arrays in_place = arrays_of(m, x, x, m->n);
    int err = zr_engine_axis_max(&m->r->engine, m->axis, ZR_CALL_ALL_REDUCE_MAX, &in_place);
    for (int64_t i = 0; !err && i < m->n; i++) {
        float max = 0;
        for (int32_t p = 0; p < m->size; p++)
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

/* ---- shifts ---- */

/* The number of the rank from which a shift takes. */
static int32_t shifted_from(const struct axis_operation *m)
{
    return ((m->rank - m->op->by) % m->size + m->size) % m->size;
}

static const struct zr_script_op **open_shift(struct zr_verify_rank *r, enum zero_axis axis)
{
    return &r->open_shift[axis == ZERO_AXIS_CP];
}

static int begin_shift(const struct axis_operation *m)
{
    struct zr_arrays x = arrays_of(m, array_at(m, SHIFT_DST), array_at(m, SHIFT_SRC), m->n);
    x.by = zr_mutant_shifts_back(m->r, m->axis) ? -m->op->by : m->op->by;
    ZR_TRY(touch(m, "an activation to shift", array_at(m, SHIFT_SRC), 0, m->n, ZR_SIM_SET,
                 contribution_of(m, m->rank, ZR_CONTENT_ACTIVATION)));
    *open_shift(m->r, m->axis) = m->op;
    return zr_engine_shift_begin(&m->r->engine, m->axis, &x);
}

/* Both arrays of a shift that has ended: what has come, and what was sent, unchanged. */
static void shifted_arrays(const struct axis_operation *m, struct zr_sim_touch touch[2])
{
    touch[0] = touching(m, array_at(m, SHIFT_DST), 0, m->n, ZR_SIM_READ,
                        contribution_of(m, shifted_from(m), ZR_CONTENT_ACTIVATION));
    touch[1] = touching(m, array_at(m, SHIFT_SRC), 0, m->n, ZR_SIM_READ,
                        contribution_of(m, m->rank, ZR_CONTENT_ACTIVATION));
}

static int end_shift(const struct axis_operation *m)
{
    struct zr_sim_touch touch[2];
    shifted_arrays(m, touch);
    *open_shift(m->r, m->axis) = NULL;
    if (!zr_mutant_leaves_shift_open(m->r, m->axis))
        ZR_TRY(zr_engine_shift_end(&m->r->engine, m->axis));
    return zr_sim_compute(m->r->engine.compute, "an activation shifted", touch, 2, 0);
}

/* ---- calls ---- */

static struct axis_operation operation_of(struct zr_verify_rank *r, const struct zr_script_op *op)
{
    const struct zr_verify_case *c = r->v->c;
    const bool over_cp = op->axis == ZERO_AXIS_CP;
    const int32_t n_tp = c->tp > 1 ? c->tp : 1, size = over_cp ? c->cp : n_tp;
    return (struct axis_operation){.r = r,
                                   .op = op,
                                   .axis = (enum zero_axis)op->axis,
                                   .size = size,
                                   .rank = over_cp ? r->id / n_tp % size : r->tp_rank,
                                   .step = over_cp ? n_tp : 1,
                                   .flat = -(int32_t)(2 + (op - r->of_stage->script.ops)),
                                   .elem_bytes = op->bf16 ? 2 : 4,
                                   .n = op->n,
                                   .each = op->n / size};
}

int zr_verify_combine(struct zr_verify_rank *r, const struct zr_script_op *op)
{
    const struct axis_operation m = operation_of(r, op);
    zr_engine_axis_called(&r->engine, m.axis, (uint64_t)-m.flat);
    zr_mutant_keep_out(r, m.axis);
    switch ((enum zr_combination)op->how) {
    case ZR_COMBINE_SUM:
        return add_up(&m);
    case ZR_COMBINE_SCATTER:
        return scatter(&m);
    case ZR_COMBINE_GATHER:
        return gather(&m);
    case ZR_COMBINE_PARTS:
        return exchange_parts(&m);
    case ZR_COMBINE_BROADCAST:
        return broadcast(&m);
    case ZR_COMBINE_MAX:
        return take_max(&m);
    case ZR_COMBINATIONS:
        break;
    }
    return 0;
}

int zr_verify_shift(struct zr_verify_rank *r, const struct zr_script_op *op)
{
    const bool begins = op->kind == ZR_DO_SHIFT_BEGIN;
    const struct axis_operation m = operation_of(r, begins ? op : *open_shift(r, (enum zero_axis)op->axis));
    zr_engine_axis_called(&r->engine, m.axis, (uint64_t)(op - r->of_stage->script.ops));
    zr_mutant_keep_out(r, m.axis);
    return (begins ? begin_shift : end_shift)(&m);
}

void zr_verify_left_shifts(struct zr_verify_rank *r)
{
    for (int axis = 0; axis < 2; axis++) {
        struct zr_sim_touch touch[2];
        if (!r->open_shift[axis])
            continue;
        const struct axis_operation m = operation_of(r, r->open_shift[axis]);
        shifted_arrays(&m, touch);
        zr_sim_host_touch(r->v->sim, "a shift that is not ended", touch, 2);
    }
}
