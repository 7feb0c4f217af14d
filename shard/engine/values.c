/* SPDX-License-Identifier: Apache-2.0 */
/* values.c: reads and writes values of the shards in the model's coordinates (tensor, element); the mean over
 * ranks; the barrier. All of these block, and run between steps. They use the control communicator and the
 * plan's staging. */
#include "kernels/alloc.h"
#include "shard/engine/internal.h"
#include "shard/engine/issue.h"
#include "shard/tp_cut.h"

#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

/* Values of a whole tensor, from which this rank's tp part is cut. Element `first` of the whole is at address
 * `at`. */
struct whole {
    const char *at;
    int64_t first;
    struct zr_tp_cut cut;
};

/* A call and its arguments, which are equal on every rank. They go into the tags of all that the call sends.
 * Otherwise a rank could get data that it did not ask for, because another rank makes another call or reads
 * another range. */
struct values_call {
    enum { CALL_BARRIER, CALL_READ, CALL_WRITE, CALL_MEAN, CALL_EXCHANGE, CALL_BROADCAST } call;
    int32_t tensor, kind;
    int64_t first, n;
    /* A write takes its elements from this whole tensor. NULL: its elements are contiguous, as in a read. */
    const struct whole *whole;
};

/* The tag of the collectives of a call. From CALL_MEAN on, calls are of the whole world. */
static struct zr_tag values_tag(const struct zr_engine *e, int32_t unit, const struct values_call *a)
{
    const int64_t words[] = {a->call, a->tensor, a->kind, a->first, a->n};
    bool of_world = a->call >= CALL_MEAN;
    uint64_t calls = of_world ? zr_world_hash(e) : zr_core_hash(e->m.core);
    return (struct zr_tag){.unit = unit,
                           .step = zr_step_number(e),
                           .call_hash = XXH3_64bits_withSeed(words, sizeof words, calls)};
}

/* A range of elements of one tensor, inside one layer and not larger than staging. A piece of a flat is a
 * tensor in it, or one layer of a stacked tensor. */
struct chunk {
    const struct zr_flat *flat;
    const struct zr_piece *piece;
    int64_t first, n; /* first element in the flat, and number of elements */
    int64_t size;     /* bytes of an element as it is read and written: states are fp32 there */
    int64_t at; /* byte offset in staging; a read leaves room for the block of 8-bit codes before first */
    int kind;   /* ZR_VALUE_PARAM, _MASTER or _GRAD, which are negative, or the number of a state */
    const struct values_call *call;
};

/* Returns the chunk that begins at element `at` of the tensor and has at most n elements. */
static struct chunk chunk_at(const struct zr_engine *e, int32_t tensor, int kind, int64_t at, int64_t n)
{
    const struct zr_tensor *t = &e->layout->tensors[tensor];
    int64_t per_layer = t->n_elems / t->n_layers;
    int32_t id = e->layout->piece_of[e->layout->layer_base[tensor] + at / per_layer];
    struct chunk c = {.flat = zr_piece_flat(e->layout, id), .piece = &e->layout->pieces[id], .kind = kind};
    c.size = kind == ZR_VALUE_PARAM ? zr_dtype_bytes(t->dtype) : (int64_t)sizeof(float);
    c.first = c.piece->first + at % per_layer;
    if (kind >= 0 && c.flat->moments == ZERO_MOMENTS_Q8)
        c.at = c.first % ZR_Q8_BLOCK * c.size;
    c.n = zr_min(zr_min(n, per_layer - at % per_layer), (e->plan->values_bytes - c.at) / c.size);
    return c;
}

/* Whether this rank keeps the value in the bytes in which it is read. */
static bool is_kept_as_read(const struct chunk *c)
{
    const int64_t master_size = zr_plan_master_size(c->flat);
    if (c->kind >= 0)
        return c->flat->moments == ZERO_MOMENTS_F32;
    if (c->kind == ZR_VALUE_GRAD)
        return c->flat->sum_dtype == ZERO_F32;
    return c->kind != ZR_VALUE_MASTER ||
           c->size == (master_size ? master_size : zr_dtype_bytes(c->flat->dtype));
}

/* Copies n elements of this rank's slice of a gradient sum to fp32. */
static int load_sum(struct zr_engine *e, const struct zr_flat *f, int64_t first, int64_t n, char *dst)
{
    int64_t before = first - zr_engine_fine(e, f).first;
    const char *from = zr_sum_at(e, f, 0) + before * zr_sum_size(f);
    if (f->sum_dtype == ZERO_F32)
        return e->dev->ops->copy(e->reduce_stream, dst, from, n * zr_sum_size(f));
    return e->dev->ops->cast(e->reduce_stream, dst, ZERO_F32, from, f->sum_dtype, n);
}

static int load_part(struct zr_engine *e, const struct chunk *c, int64_t first, int64_t n, char *dst)
{
    if (c->kind >= 0)
        return zr_state_read(e, c->flat, c->kind, first, n, (float *)dst);
    if (c->kind == ZR_VALUE_MASTER)
        return zr_masters_read(e, c->flat, first, n, (float *)dst);
    if (c->kind == ZR_VALUE_GRAD)
        return load_sum(e, c->flat, first, n, dst);
    return e->dev->ops->copy(e->reduce_stream, dst, zr_engine_param_at(e, c->flat, first), n * c->size);
}

/* Runs fn over elements of a chunk. If the value is in the file of states, it does so part by part. */
static int over_parts(struct zr_engine *e, const struct chunk *c, int64_t first, int64_t n, bool changes,
                      char *at, int (*fn)(struct zr_engine *, const struct chunk *, int64_t, int64_t, char *))
{
    bool has_parts = zr_part_has(e, c->flat, changes && c->kind < 0 ? ZR_VALUE_MASTER : c->kind);
    for (int64_t done = 0, part; done < n; done += part) {
        part = n - done;
        if (has_parts)
            ZR_TRY(zr_part_use(e, c->flat, first + done, changes, &part));
        ZR_TRY(fn(e, c, first + done, part, at + done * c->size));
    }
    return 0;
}

/* Copies n of the chunk's elements from where this rank has them. dst is device memory, or any memory if the
 * value is kept as it is read. */
static int load(struct zr_engine *e, const struct chunk *c, int64_t first, int64_t n, char *dst)
{
    return over_parts(e, c, first, n, false, dst, load_part);
}

/* Whether every rank holds the whole value, so that nothing has to be sent to read it. */
static bool is_everywhere(const struct zr_engine *e, const struct chunk *c)
{
    bool param = c->kind == ZR_VALUE_PARAM || (c->kind == ZR_VALUE_MASTER && !zr_plan_master_size(c->flat));
    bool full = zr_level_of(e->plan->placement.state) == ZR_LEVEL_ALL &&
                c->kind != ZR_VALUE_GRAD; /* sums are sharded at every stage */
    return e->dp == 1 || full || (param && e->plan->resident[c->flat->unit]);
}

/* Returns how many elements of the chunk lie in the span. They begin at *first. */
static int64_t elems_in(const struct chunk *c, struct zr_span s, int64_t *first)
{
    *first = zr_max(s.first, c->first);
    return zr_max(zr_min(s.first + s.n, c->first + c->n) - *first, 0);
}

/* The same for fine slice k, which one rank owns. */
static int64_t elems_owned(const struct chunk *c, int32_t k, int64_t *first)
{
    struct zr_span own;
    own.n = zr_flat_owned(c->flat, k, &own.first);
    return elems_in(c, own, first);
}

/* Reads a chunk to dst: each rank that owns a part of it sends that to the others. */
static int read_chunk(struct zr_engine *e, const struct chunk *c, char *dst)
{
    const struct zr_device_ops *d = e->dev->ops;
    if (c->kind == ZR_VALUE_GRAD && zr_core_leaves_out(e->m.core, c->flat->unit)) {
        if (dst)
            memset(dst, 0, (size_t)(c->n * c->size));
        return 0;
    }
    char *staging = zr_values_staging(e) + c->at;
    if (is_everywhere(e, c)) {
        if (!dst || is_kept_as_read(c))
            return dst ? load(e, c, c->first, c->n, dst) : 0;
        ZR_TRY(load(e, c, c->first, c->n, staging));
        return d->copy(e->reduce_stream, dst, staging, c->n * c->size);
    }
    struct zr_tag tag = values_tag(e, c->flat->unit, c->call);
    for (int32_t k = 0; k < e->dp; k++) {
        int64_t first, n = elems_owned(c, k, &first), at = (first - c->first) * c->size;
        int32_t owner = zr_fine_place(e, k);
        if (n == 0)
            continue;
        int err = zr_roles_make_room(e);
        if (!err && owner == e->dp_rank)
            err = load(e, c, first, n, staging + at);
        if (!err)
            err = zr_role_broadcast(e, ZR_ROLE_CONTROL, e->plan->values_at + c->at + at, n * c->size, owner,
                                    &tag);
        if (err)
            return err;
    }
    return dst ? d->copy(e->reduce_stream, dst, staging, c->n * c->size) : 0;
}

static int store_state(struct zr_engine *e, const struct chunk *c, int64_t first, int64_t n, char *from)
{
    return zr_state_write(e, c->flat, c->kind, first, n, (const float *)from);
}

static int store_master(struct zr_engine *e, const struct chunk *c, int64_t first, int64_t n, char *from)
{
    return c->kind == ZR_VALUE_MASTER ? zr_masters_write(e, c->flat, first, n, (const float *)from)
                                      : zr_masters_from_params(e, c->flat, first, n);
}

/* Copies elements from staging to this rank's parameters or states. */
static int store(struct zr_engine *e, const struct chunk *c, int64_t first, int64_t n)
{
    char *from = zr_values_staging(e) + c->at + (first - c->first) * c->size;
    if (c->kind >= 0)
        return over_parts(e, c, first, n, true, from, store_state);
    if (c->kind == ZR_VALUE_MASTER)
        return zr_params_from_masters(e, c->flat, first, n, (const float *)from);
    return e->dev->ops->copy(e->reduce_stream, zr_engine_param_at(e, c->flat, first), from, n * c->size);
}

/* Copies the chunk's elements from staging to this rank's masters, if the weights are not the masters. The
 * weights are stored already. */
static int store_masters(struct zr_engine *e, const struct chunk *c)
{
    if (c->kind >= 0 || !zr_plan_master_size(c->flat))
        return 0;
    int64_t first, n = elems_in(c, zr_engine_kept(e, c->flat), &first);
    if (n == 0)
        return 0;
    char *from = zr_values_staging(e) + c->at + (first - c->first) * c->size;
    return over_parts(e, c, first, n, true, from, store_master);
}

/* Returns the elements of the flat that this rank holds, as parameters or as states. */
static struct zr_span span_held(const struct zr_engine *e, const struct chunk *c)
{
    if (c->kind < 0)
        return zr_flat_span(c->flat, e->at, e->plan->resident[c->flat->unit] ? ZR_LEVEL_ALL : ZR_LEVEL_INNER);
    return zr_engine_kept(e, c->flat);
}

/* Rank 0 sends the chunks, which lie in the first n_bytes of its staging, and every rank stores its part. */
static int send_chunks(struct zr_engine *e, const struct chunk *c, int32_t n_chunks, int64_t n_bytes)
{
    struct zr_tag tag = values_tag(e, c->flat->unit, c->call);
    int err = zr_roles_make_room(e);
    if (!err)
        err = zr_role_broadcast(e, ZR_ROLE_CONTROL, e->plan->values_at, n_bytes, 0, &tag);
    for (int32_t i = 0; !err && i < n_chunks; i++) {
        int64_t first, n = elems_in(&c[i], span_held(e, &c[i]), &first);
        err = n ? store(e, &c[i], first, n) : 0;
        if (!err)
            err = store_masters(e, &c[i]);
    }
    return err;
}

/* Copies the chunk's elements to staging, run by run; padding is 0. */
static int stage_runs(struct zr_engine *e, const struct chunk *c, const struct whole *w)
{
    const struct zr_device_ops *d = e->dev->ops;
    int64_t at = c->piece->layer * c->piece->n + (c->first - c->piece->first), n;
    int32_t part = w->cut.parts > 1 ? e->tp_rank : 0;
    int err = 0;
    for (int64_t done = 0; !err && done < c->n; done += n) {
        const struct zr_tp_run run = zr_tp_run_of_part(&w->cut, part, at + done);
        char *dst = zr_values_staging(e) + c->at + done * c->size;
        n = zr_min(run.n, c->n - done);
        err = run.whole < 0
                  ? d->zero(e->reduce_stream, dst, n * c->size)
                  : d->copy(e->reduce_stream, dst, w->at + (run.whole - w->first) * c->size, n * c->size);
    }
    return err;
}

/* Copies the chunk to rank 0's staging. whole NULL: src has the chunk's elements. */
static int stage_chunk(struct zr_engine *e, const struct chunk *c, const char *src, const struct whole *whole)
{
    if (e->dp_rank != 0)
        return 0;
    if (whole)
        return stage_runs(e, c, whole);
    return e->dev->ops->copy(e->reduce_stream, zr_values_staging(e) + c->at, src, c->n * c->size);
}

static int write_chunk(struct zr_engine *e, const struct chunk *c, const char *src)
{
    int err = stage_chunk(e, c, src, c->call->whole);
    return err ? err : send_chunks(e, c, 1, c->n * c->size);
}

/* Waits for this rank's work on the device, and for the other ranks. */
static int wait_for_all(struct zr_engine *e, const struct values_call *a)
{
    struct zr_tag tag = values_tag(e, -1, a);
    ZR_TRY(zr_engine_drain(e));
    ZR_TRY(zr_role_barrier(e, ZR_ROLE_CONTROL, &tag));
    return zr_engine_drain(e);
}

/* Runs fn over the chunks of a call. data may be NULL. Begins with a barrier, because a peer may still be
 * gathering a shard that is about to be written. */
static int for_chunks(struct zr_engine *e, const struct values_call *a, char *data,
                      int (*fn)(struct zr_engine *, const struct chunk *, char *))
{
    int err = wait_for_all(e, a);
    for (int64_t at = 0; !err && at < a->n;) {
        struct chunk c = chunk_at(e, a->tensor, a->kind, a->first + at, a->n - at);
        c.call = a;
        err = fn(e, &c, data);
        if (data)
            data += c.n * c.size;
        at += c.n;
    }
    if (err)
        return zr_engine_fail(e, err, zr_error_text());
    return zr_engine_drain(e);
}

/* Scales a gradient that was read, because sums are not scaled before the update. The device's scaling would
 * leave a step alone that will be skipped, but the program wants to know which gradient is not finite. */
static int scale_grad(struct zr_engine *e, float *dst, int64_t n)
{
    float factor;
    int err = e->dev->ops->copy(e->reduce_stream, e->words, &zr_engine_scalars(e)->grad_scale, sizeof factor);
    if (err)
        return zr_engine_fail(e, err, zr_error_text());
    err = zr_engine_drain(e);
    struct zr_access seen = {e->words, sizeof factor, false};
    if (err)
        return err;
    zr_declare(e->dev, NULL, &seen, 1);
    memcpy(&factor, e->words, sizeof factor);
    for (int64_t i = 0; dst && i < n; i++)
        dst[i] *= factor;
    return 0;
}

int zr_engine_read(struct zr_engine *e, int32_t tensor, int kind, int64_t first, int64_t n, void *dst)
{
    struct values_call a = {CALL_READ, tensor, kind, first, n, NULL};
    int err = for_chunks(e, &a, dst, read_chunk);
    return err || kind != ZR_VALUE_GRAD ? err : scale_grad(e, dst, n);
}

static int write_any_chunk(struct zr_engine *e, const struct chunk *c, char *src)
{
    return write_chunk(e, c, src);
}

/* Writes, and tells the core that parameters have changed. */
static int write_values(struct zr_engine *e, const struct values_call *a, const void *src)
{
    int err = for_chunks(e, a, (char *)(uintptr_t)src, write_any_chunk);
    const struct zr_tensor *t = &e->layout->tensors[a->tensor];
    int32_t n_actions;
    if (!err && a->kind >= 0 && (a->n || a->whole))
        zr_engine_change_tuned(e)->has_states = true;
    for (int32_t s = 0; !err && a->kind < 0 && s < t->n_layers; s++) {
        struct zr_core_event ev = {.kind = ZR_EV_REWRITE, .unit = t->unit + s};
        err = zr_core_take(e->m.core, &ev, e->m.actions, &n_actions);
    }
    return err;
}

int zr_engine_write(struct zr_engine *e, int32_t tensor, int kind, int64_t first, int64_t n, const void *src)
{
    struct values_call a = {CALL_WRITE, tensor, kind, first, n, NULL};
    return write_values(e, &a, src);
}

int zr_engine_write_whole(struct zr_engine *e, int32_t tensor, int kind, int64_t first, int64_t n,
                          const void *src)
{
    const struct whole w = {src, first, zr_tp_of_tensor(&e->layout->tensors[tensor], e->tp)};
    const int32_t part = w.cut.parts > 1 ? e->tp_rank : 0;
    int64_t begin = zr_tp_from(&w.cut, part, first), end = zr_tp_from(&w.cut, part, first + n);
    struct values_call a = {CALL_WRITE, tensor, kind, begin, end - begin, &w};
    return write_values(e, &a, NULL);
}

/* Chunks that are sent together, side by side in staging. */
struct batch {
    struct chunk *chunks;
    int32_t n;
    int64_t bytes;
};

static int send_batch(struct zr_engine *e, struct batch *b)
{
    int err = b->n ? send_chunks(e, b->chunks, b->n, b->bytes) : 0;
    b->n = 0;
    b->bytes = 0;
    return err;
}

/* Adds a tensor's parameters to the batch, which is sent whenever it is full. */
static int add_tensor(struct zr_engine *e, struct batch *b, int32_t tensor, const struct values_call *a)
{
    const struct zr_tensor *t = &e->layout->tensors[tensor];
    const char *src = *t->param;
    const struct whole w = {src, 0, zr_tp_of_tensor(t, e->tp)};
    int err = 0;
    for (int64_t at = 0; !err && at < t->n_elems;) {
        struct chunk c = chunk_at(e, tensor, ZR_VALUE_PARAM, at, t->n_elems - at);
        int64_t n_bytes = c.n * c.size;
        if (b->bytes + n_bytes > e->plan->values_bytes)
            err = send_batch(e, b);
        c.call = a;
        c.at = b->bytes;
        if (!err)
            err = stage_chunk(e, &c, src, t->given_whole ? &w : NULL);
        b->chunks[b->n++] = c;
        b->bytes = zr_round_up(b->bytes + n_bytes, ZR_PIECE_ALIGN);
        src = src ? src + n_bytes : NULL;
        at += c.n;
    }
    return err;
}

/* Sends rank 0's parameters, many tensors at a time. Models may have thousands of small ones, and all ranks
 * wait for each message. */
static int adopt_params(struct zr_engine *e)
{
    struct values_call a = {CALL_WRITE, -1, ZR_VALUE_PARAM, 0, e->layout->n_params, NULL};
    struct batch b = {0};
    int err = ZR_ALLOC(b.chunks, e->plan->values_bytes / ZR_PIECE_ALIGN + 1, "parameters to send");
    if (!err)
        err = wait_for_all(e, &a);
    for (int32_t t = 0; !err && t < e->layout->n_tensors; t++)
        if (!e->layout->tensors[t].buffer)
            err = add_tensor(e, &b, t, &a);
    if (!err)
        err = send_batch(e, &b);
    free(b.chunks);
    if (err)
        return zr_engine_fail(e, err, zr_error_text());
    return zr_engine_drain(e);
}

int zr_engine_adopt(struct zr_engine *e, bool params)
{
    int err = params ? adopt_params(e) : 0;
    for (int32_t t = 0; !err && t < e->layout->n_tensors; t++)
        if (e->layout->tensors[t].buffer)
            err = zr_engine_spread_buffer(e, t);
    e->m.not_counted.wire = zr_roles_wire_bytes(e);
    e->m.not_counted.outer = zr_roles_outer_bytes(e);
    return err;
}

/* Copies n_bytes at mine from every rank to e->words of every rank. Slots are in the order of the
 * communicator's ranks, words in the order of the job's. */
static int exchange(struct zr_engine *e, const struct values_call *a, const void *mine, int64_t n_bytes)
{
    int err = zr_engine_drain(e);
    if (err)
        return err;
    struct zr_tag tag = values_tag(e, -1, a);
    const struct zr_comm *all = zr_widest_comm(e);
    char *slots = e->control_base + e->plan->exchange_at;
    err = e->dev->ops->copy(e->reduce_stream, slots + all->group.rank * (int64_t)ZR_EXCHANGE_BYTES, mine,
                            n_bytes);
    if (!err)
        err = zr_role_exchange(e, zr_widest_role(e), e->plan->exchange_at, ZR_EXCHANGE_BYTES, &tag);
    for (int p = 0; !err && p < all->group.size; p++)
        err = e->dev->ops->copy(e->reduce_stream, e->words + zr_comm_rank(all, p) * n_bytes,
                                slots + p * (int64_t)ZR_EXCHANGE_BYTES, n_bytes);
    if (err)
        zr_engine_fail(e, err, zr_error_text());
    /* After a failure too, because the stream may still be reading mine. */
    int drained = zr_engine_drain(e);
    return err ? err : drained;
}

int zr_engine_exchange(struct zr_engine *e, const void *mine, int64_t n_bytes, void *all)
{
    struct values_call a = {.call = CALL_EXCHANGE, .n = n_bytes};
    int err = exchange(e, &a, mine, n_bytes);
    if (!err)
        memcpy(all, e->words, (size_t)((int64_t)e->n_all * n_bytes));
    return err;
}

/* Returns the rank in another pipeline stage that has this rank's tp and data-parallel numbers. */
static int32_t rank_in_stage(const struct zr_engine *e, int32_t stage)
{
    int32_t of_stage = e->n_all / e->pp;
    return stage * of_stage + e->rank % of_stage;
}

/* Returns the mean of the i-th double that the ranks of the last pipeline stage with this rank's tp number
 * have left in e->words. n_bytes: bytes of each rank there. */
static double mean_of(const struct zr_engine *e, int64_t n_bytes, int32_t i)
{
    const int32_t first = e->n_all - e->n_all / e->pp + e->tp_rank;
    struct zr_exact_sum sum;
    zr_exact_reset(&sum);
    for (int32_t r = first; r < e->n_all; r += e->tp) {
        double x;
        memcpy(&x, e->words + r * n_bytes + i * (int64_t)sizeof x, sizeof x);
        zr_exact_add(&sum, x);
    }
    return zr_exact_value(&sum) / e->dp;
}

int zr_engine_mean(struct zr_engine *e, double *values, int32_t n)
{
    struct values_call a = {.call = CALL_MEAN, .n = n};
    int64_t n_bytes = n * (int64_t)sizeof *values;
    int err = exchange(e, &a, values, n_bytes);
    struct zr_access seen = {e->words, (int64_t)e->n_all * n_bytes, false};
    if (!err)
        zr_declare(e->dev, NULL, &seen, 1);
    for (int32_t i = 0; !err && i < n; i++)
        values[i] = mean_of(e, n_bytes, i);
    return err;
}

int zr_engine_broadcast_stages(struct zr_engine *e, int32_t root, void *buf, int64_t bytes)
{
    struct values_call a = {.call = CALL_BROADCAST, .kind = root, .n = bytes};
    char *at = buf;
    int err = 0;
    while (!err && a.first < bytes) {
        int64_t k = zr_min(bytes - a.first, ZR_EXCHANGE_BYTES);
        err = exchange(e, &a, at + a.first, k);
        if (!err)
            err = e->dev->ops->copy(e->reduce_stream, at + a.first, e->words + rank_in_stage(e, root) * k, k);
        if (!err) /* before the next exchange writes to e->words */
            err = zr_engine_drain(e);
        a.first += k;
    }
    return err;
}

int zr_engine_barrier(struct zr_engine *e)
{
    struct values_call a = {.call = CALL_BARRIER};
    return wait_for_all(e, &a);
}

bool zr_all_zero(const char *x, int64_t n, enum zero_dtype dtype)
{
    int64_t size = zr_dtype_bytes(dtype);
    if (n == 0 || (!x[0] && !memcmp(x, x + 1, (size_t)(n * size - 1))))
        return true;
    for (int64_t i = 0; i < n * size; i++)
        if (x[i] && !((i + 1) % size == 0 && x[i] == (char)0x80))
            return false;
    return true;
}
