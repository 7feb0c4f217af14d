/* SPDX-License-Identifier: Apache-2.0 */
/* init.c: sets the parameters' first values by a callback, for models that no rank holds whole.
 *
 * Each rank asks for the elements that it owns, which are a part of every unit. So no element is asked for
 * twice, with or without groups. The other elements that a rank holds are gathered, and masters are made from
 * the parameters. Ranks agree after each unit. So nobody waits longer than a unit takes, and a
 * failure on one rank is an error on all. */
#include "comm/first_error.h"
#include "kernels/check/guard.h"
#include "shard/engine/internal.h"
#include "shard/tp_cut.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int (*init_fn)(void *arg, int32_t tensor, int64_t first, int64_t n, void *dst);

struct asking {
    struct zr_engine *e;
    init_fn init;
    void *arg;
    char *room; /* ZR_VALUE_BYTES */
};

/* Every byte of an element that was not written. It makes a NaN that no arithmetic makes. */
enum { UNWRITTEN = 0xff };

/* Checks in one pass without a branch, because nearly always all elements were written. The result is as wide
 * as an element, so vector code needs no packing. */
static bool all_written(const char *room, int64_t n, int64_t size)
{
    uint32_t word, missed_words = 0;
    uint16_t half, missed_halves = 0;
    for (int64_t i = 0; size == sizeof word && i < n; i++) {
        memcpy(&word, room + i * (int64_t)sizeof word, sizeof word);
        missed_words |= word == UINT32_MAX ? UINT32_MAX : 0;
    }
    for (int64_t i = 0; size == sizeof half && i < n; i++) {
        memcpy(&half, room + i * (int64_t)sizeof half, sizeof half);
        missed_halves |= half == UINT16_MAX ? UINT16_MAX : 0;
    }
    return !missed_words && !missed_halves && (size == sizeof word || size == sizeof half);
}

/* Returns the first of n elements that was not written, or n. */
static int64_t find_unwritten(const char *room, int64_t n, int64_t size)
{
    static const char unwritten[4] = {(char)UNWRITTEN, (char)UNWRITTEN, (char)UNWRITTEN, (char)UNWRITTEN};
    int64_t i = all_written(room, n, size) ? n : 0;
    while (i < n && memcmp(room + i * size, unwritten, (size_t)size))
        i++;
    return i;
}

/* Copies the room to the shard. On the host this thread does so, because it has the values in its caches; the
 * streams only declare the memory. */
static int put(struct asking *a, char *dst, int64_t n_bytes)
{
    struct zr_engine *e = a->e;
    if (e->dev->ops->host_memory) {
        zr_declare(e->dev, NULL, &(struct zr_access){dst, n_bytes, true}, 1);
        memcpy(dst, a->room, (size_t)n_bytes);
        return 0;
    }
    int err = e->dev->ops->copy(e->reduce_stream, dst, a->room, n_bytes);
    int drained = zr_engine_drain(e); /* before the room is written again */
    return err ? err : drained;
}

/* Writes elements [at, at + n) of the tensor to the room. The callback numbers elements within the whole
 * tensor, and is called for each run there. Padding is 0. */
static int ask_runs(struct asking *a, int32_t tensor, int64_t at, int64_t n, int64_t size)
{
    const struct zr_tensor *t = &a->e->layout->tensors[tensor];
    const struct zr_tp_cut cut = zr_tp_of_tensor(t, a->e->tp);
    memset(a->room, UNWRITTEN, (size_t)(n * size));
    for (int64_t done = 0, k; done < n; done += k) {
        const struct zr_tp_run run = zr_tp_run_of_part(&cut, cut.parts > 1 ? a->e->tp_rank : 0, at + done);
        char *dst = a->room + done * size;
        k = zr_min(run.n, n - done);
        if (run.whole < 0) {
            memset(dst, 0, (size_t)(k * size));
            continue;
        }
        long long first = run.whole, last = first + k - 1;
        zr_guard_callback("cfg.init");
        int code = a->init(a->arg, tensor, run.whole, k, dst);
        zr_guard_callback(NULL);
        if (code)
            return zr_fail(ZERO_ERR_FAILED, "cfg.init returned %d for tensor %s, elements %lld..%lld", code,
                           t->name, first, last);
        int64_t missed = find_unwritten(dst, k, size);
        if (missed < k)
            return zr_fail(ZERO_ERR_FAILED,
                           "cfg.init did not write element %lld of tensor %s, asked for %lld..%lld",
                           first + missed, t->name, first, last);
    }
    return 0;
}

static int ask_range(void *arg, const struct zr_flat *f, const struct zr_piece *p, int64_t first, int64_t n)
{
    struct asking *a = arg;
    int64_t size = zr_dtype_bytes(f->dtype), most = ZR_VALUE_BYTES / size;
    for (int64_t k = 0; k < n; k += most) {
        int64_t part = zr_min(most, n - k), at = p->layer * p->n + (first - p->first) + k;
        int err = ask_runs(a, p->tensor, at, part, size);
        if (!err)
            err = put(a, zr_engine_param_at(a->e, f, first + k), part * size);
        if (err)
            return err;
    }
    return 0;
}

static int ask_unit(struct asking *a, int32_t unit)
{
    const struct zr_layout *l = a->e->layout;
    int err = 0;
    for (int32_t i = 0; !err && i < l->units[unit].n_flats; i++) {
        const struct zr_flat *f = &l->flats[l->units[unit].first_flat + i];
        struct zr_span own = zr_engine_fine(a->e, f);
        err = zr_flat_ranges(l, f, own.first, own.first + own.n, ask_range, a);
    }
    return err;
}

struct success {
    ZR_FIRST_ERROR(ZR_EXCHANGE_BYTES - sizeof(int32_t));
};

/* Makes a failure of any rank an error on all. all: memory for the ranks' results. */
static int agree(struct zr_engine *e, int err, struct success *all)
{
    struct success mine;
    if (e->n_all == 1)
        return err;
    zr_first_error_put(&mine, err);
    int met = zr_engine_exchange(e, &mine, sizeof mine, all);
    return zr_first_error(met, &mine, all, e->n_all, e->rank);
}

/* Returns the most units of any pipeline stage, because ranks of all stages agree equally often. After a
 * failure, which the next agreement finds, returns this rank's. */
static int32_t most_units(struct zr_engine *e)
{
    int32_t most = e->layout->n_units;
    int32_t *all = e->pp > 1 ? malloc((size_t)e->n_all * sizeof *all) : NULL;
    if (e->pp > 1 && !all)
        zr_engine_fail(e, zr_fail(ZERO_ERR_NOMEM, "no memory for values by cfg.init"), zr_error_text());
    if (all && !zr_engine_exchange(e, &e->layout->n_units, sizeof *all, all))
        for (int32_t r = 0; r < e->n_all; r++)
            most = zr_max(most, all[r]);
    free(all);
    return most;
}

static int fill_masters(struct zr_engine *e)
{
    int err = 0;
    for (int32_t i = 0; !err && i < e->layout->n_flats; i++) {
        const struct zr_flat *f = &e->layout->flats[i];
        struct zr_span kept = zr_engine_kept(e, f);
        for (int64_t at = kept.first, n, end = at + kept.n; !err && at < end; at += n) {
            n = end - at;
            err = zr_part_use(e, f, at, true, &n);
            if (!err)
                err = zr_masters_from_params(e, f, at, n);
        }
    }
    return err ? zr_engine_fail(e, err, zr_error_text()) : zr_engine_drain(e);
}

int zr_engine_init(struct zr_engine *e, init_fn init, void *arg)
{
    struct asking a = {.e = e, .init = init, .arg = arg, .room = malloc(ZR_VALUE_BYTES)};
    struct success *all = malloc((size_t)e->n_all * sizeof *all);
    int err = a.room && all ? 0 : zr_fail(ZERO_ERR_NOMEM, "no memory for values by cfg.init");
    if (!all) /* without it, this rank cannot even report the failure */
        err = zr_engine_fail(e, err, zr_error_text());
    else
        err = agree(e, err, all);
    int32_t n_units = err ? 0 : most_units(e);
    for (int32_t u = 0; !err && u < n_units; u++)
        err = agree(e, u < e->layout->n_units ? ask_unit(&a, u) : 0, all);
    free(a.room);
    free(all);
    if (!err)
        err = zr_engine_gather_inner(e);
    if (!err)
        err = zr_engine_gather_residents(e);
    return err ? err : fill_masters(e);
}
