/* SPDX-License-Identifier: Apache-2.0 */
/* buffers.c: the model's buffers: state that is not trained, but must agree over ranks and be saved.
 *
 * Every rank has them whole, in the model's memory. The model may move a buffer between two calls, so *param
 * is read anew each time. Values go through the plan's staging, a range at a time, over the control
 * communicator. All functions block, and all ranks must call them in the same order. */
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"

#include <string.h>
#include <xxhash.h>

/* A range of a buffer that fits in staging, and the tag of the collective that moves it. */
struct range {
    const struct zr_tensor *t;
    int64_t first, n, size; /* elements of the tensor; bytes of one */
    struct zr_tag tag;
};

/* What is done with a buffer. Ranks compare it, as a part of the tag. */
enum what { READ = 1, WRITE, SPREAD, COMPARE, MEAN };

static struct range range_of(const struct zr_engine *e, enum what what, int32_t tensor, int64_t first)
{
    const int64_t words[] = {-1, what, tensor, first};
    const struct zr_tensor *t = &e->layout->tensors[tensor];
    return (struct range){
        .t = t,
        .first = first,
        .size = zr_dtype_bytes(t->dtype),
        .tag = {.unit = -1,
                .step = zr_step_number(e),
                .call_hash = XXH3_64bits_withSeed(words, sizeof words, zr_core_hash(e->m.core))}};
}

/* Returns the range's address in the model's memory. */
static char *in_model(const struct range *p)
{
    return (char *)*p->t->param + p->first * p->size;
}

/* Returns plan->values_bytes of host memory, behind the results of exchanges. */
static char *host_room(const struct zr_engine *e)
{
    return e->words + (int64_t)e->n_all * ZR_EXCHANGE_BYTES;
}

static int copy(struct zr_engine *e, char *dst, const char *src, int64_t n_bytes)
{
    return dst == src ? 0 : e->dev->ops->copy(e->reduce_stream, dst, src, n_bytes);
}

static int fail_if(struct zr_engine *e, int err)
{
    return err ? zr_engine_fail(e, err, zr_error_text()) : 0;
}

/* Copies the range from src on rank 0 to dst on every rank. dst may be NULL. */
static int broadcast(struct zr_engine *e, const struct range *p, const char *src, char *dst)
{
    int64_t n_bytes = p->n * p->size;
    ZR_TRY(zr_roles_make_room(e));
    if (e->dp_rank == 0)
        ZR_TRY(copy(e, zr_values_staging(e), src, n_bytes));
    ZR_TRY(zr_role_broadcast(e, ZR_ROLE_CONTROL, e->plan->values_at, n_bytes, 0, &p->tag));
    if (dst && !(e->dp_rank == 0 && dst == src))
        ZR_TRY(copy(e, dst, zr_values_staging(e), n_bytes));
    return 0;
}

/* Broadcasts n elements, a range at a time, from data (WRITE) or rank 0's model, to out (READ) or every
 * rank's model. First waits for what the model has put on its stream. */
static int broadcast_all(struct zr_engine *e, enum what what, int32_t tensor, int64_t first, int64_t n,
                         const char *data, char *out)
{
    struct range p = range_of(e, what, tensor, first);
    int64_t most = e->plan->values_bytes / p.size, end = first + n;
    int err = zr_engine_drain(e);
    for (; !err && p.first < end; p.first += p.n) {
        int64_t at = (p.first - first) * p.size;
        p.n = zr_min(most, end - p.first);
        err = fail_if(e, broadcast(e, &p, what == WRITE ? data ? data + at : NULL : in_model(&p),
                                   what != READ ? in_model(&p)
                                   : out        ? out + at
                                                : NULL));
    }
    /* After a failure too, because the stream may still be reading the caller's memory. */
    int drained = zr_engine_drain(e);
    return err ? err : drained;
}

int zr_engine_read_buffer(struct zr_engine *e, int32_t tensor, int64_t first, int64_t n, void *dst)
{
    return broadcast_all(e, READ, tensor, first, n, NULL, dst);
}

int zr_engine_write_buffer(struct zr_engine *e, int32_t tensor, int64_t first, int64_t n, const void *src)
{
    return broadcast_all(e, WRITE, tensor, first, n, src, NULL);
}

int zr_engine_spread_buffer(struct zr_engine *e, int32_t tensor)
{
    return broadcast_all(e, SPREAD, tensor, 0, e->layout->tensors[tensor].n_elems, NULL, NULL);
}

/* ---- comparing ---- */

static void declare_buffers(struct zr_engine *e, const char *at, int64_t n_bytes, bool write)
{
    struct zr_access a = {(void *)(uintptr_t)at, n_bytes, write};
    zr_declare(e->dev, NULL, &a, 1);
}

int zr_engine_compare_buffer(struct zr_engine *e, int32_t tensor, int64_t *element)
{
    struct range p = range_of(e, COMPARE, tensor, 0);
    int64_t half = e->plan->values_bytes / 2 / p.size * p.size;
    char *theirs = host_room(e), *mine = theirs + half;
    int err = zr_engine_drain(e);
    *element = -1;
    for (; !err && p.first < p.t->n_elems; p.first += p.n) {
        p.n = zr_min(half / p.size, p.t->n_elems - p.first);
        err = broadcast(e, &p, in_model(&p), theirs);
        if (!err)
            err = copy(e, mine, in_model(&p), p.n * p.size);
        fail_if(e, err);
        int drained = zr_engine_drain(e);
        err = err ? err : drained;
        if (err)
            return err;
        declare_buffers(e, theirs, 2 * half, false);
        for (int64_t i = 0; *element < 0 && i < p.n; i++)
            if (memcmp(theirs + i * p.size, mine + i * p.size, (size_t)p.size) != 0)
                *element = p.first + i;
    }
    return err;
}

/* ---- averaging ---- */

/* Returns an fp32 or bf16 element. */
static double buffer_value_at(const char *at, enum zero_dtype dtype)
{
    uint16_t bf16;
    float x;
    if (dtype == ZERO_F32) {
        memcpy(&x, at, sizeof x);
        return (double)x;
    }
    memcpy(&bf16, at, sizeof bf16);
    return (double)zr_bf16_value(bf16);
}

/* Averages all ranks' values, which lie slot_bytes apart, and writes the means over the first rank's. The sum
 * is exact, so the order of ranks does not matter. */
static void average(const struct zr_engine *e, const struct range *p, char *room, int64_t slot_bytes)
{
    const struct zr_host_kernels *k = zr_host_kernels_best();
    for (int64_t i = 0; i < p->n; i++) {
        struct zr_exact_sum sum;
        zr_exact_reset(&sum);
        for (int r = 0; r < e->dp; r++)
            zr_exact_add(&sum, buffer_value_at(room + r * slot_bytes + i * p->size, p->t->dtype));
        float mean = (float)(zr_exact_value(&sum) / e->dp);
        k->cast(room + i * p->size, p->t->dtype, &mean, ZERO_F32, 1);
    }
}

/* Replaces a range by its mean over ranks. Every rank gets all ranks' values, slot_bytes apart. */
static int mean_of_range(struct zr_engine *e, const struct range *p, int64_t slot_bytes)
{
    char *staging = zr_values_staging(e), *room = host_room(e);
    int err = copy(e, staging + e->dp_rank * slot_bytes, in_model(p), p->n * p->size);
    if (!err)
        err = zr_role_exchange(e, ZR_ROLE_CONTROL, e->plan->values_at, slot_bytes, &p->tag);
    if (!err)
        err = copy(e, room, staging, e->dp * slot_bytes);
    fail_if(e, err);
    int drained = zr_engine_drain(e);
    if (err || drained)
        return err ? err : drained;
    declare_buffers(e, room, e->dp * slot_bytes, false);
    declare_buffers(e, room, p->n * p->size, true);
    average(e, p, room, slot_bytes);
    err = fail_if(e, copy(e, in_model(p), room, p->n * p->size));
    drained = zr_engine_drain(e);
    return err ? err : drained;
}

int zr_engine_mean_buffer(struct zr_engine *e, int32_t tensor)
{
    struct range p = range_of(e, MEAN, tensor, 0);
    int64_t slot_bytes = e->plan->values_bytes / e->dp / ZR_PIECE_ALIGN * ZR_PIECE_ALIGN;
    int err = zr_engine_drain(e);
    for (; !err && p.first < p.t->n_elems; p.first += p.n) {
        p.n = zr_min(slot_bytes / p.size, p.t->n_elems - p.first);
        err = mean_of_range(e, &p, slot_bytes);
    }
    return err;
}

/* ---- copying on one rank ---- */

int zr_engine_copy_buffers(struct zr_engine *e, char *base, bool into_model)
{
    struct zr_stream *s = into_model ? e->reduce_stream : e->compute;
    int err = 0;
    for (int32_t i = 0; !err && i < e->layout->n_tensors; i++) {
        const struct zr_tensor *t = &e->layout->tensors[i];
        if (!t->buffer)
            continue;
        char *model = *t->param;
        err = e->dev->ops->copy(s, into_model ? model : base, into_model ? base : model,
                                t->n_elems * zr_dtype_bytes(t->dtype));
        base += zr_buffer_room(t);
    }
    fail_if(e, err);
    int drained = zr_engine_drain(e);
    return err ? err : drained;
}
