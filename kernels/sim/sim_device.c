/* SPDX-License-Identifier: Apache-2.0 */
/* sim_device.c: a simulated world: its ranks, their memory, and the host thread that makes the calls. */
#include "kernels/alloc.h"
#include "kernels/sim/sim_device_inside.h"

#include <stdlib.h>
#include <sys/mman.h>

/* ---- queries ---- */

struct zr_recorder *zr_sim_recorder(struct zr_sim *w)
{
    return &w->rec;
}

const struct zr_sim_options *zr_sim_config(const struct zr_sim *w)
{
    return &w->opt;
}

struct zr_device *zr_sim_device(struct zr_sim *w, int rank)
{
    return &w->devices[rank].base;
}

int64_t zr_sim_held(const struct zr_sim *w, int rank, int64_t *peak)
{
    *peak = w->devices[rank].peak;
    return w->devices[rank].held;
}

int64_t zr_sim_activity(const struct zr_sim *w)
{
    return w->activity;
}

/* ---- the host thread that makes the calls ---- */

static int lines_of_rank(const struct zr_sim *w)
{
    return ZR_SIM_FIRST_STREAM + w->opt.n_streams;
}

struct zr_line *zr_sim_line_at(struct zr_sim *w, int rank, int number)
{
    return &w->rec.lines[rank * lines_of_rank(w) + number];
}

int zr_sim_line_number(const struct zr_sim *w, int32_t line)
{
    return line % lines_of_rank(w);
}

struct zr_line *zr_sim_host(struct zr_sim *w, int rank, int thread)
{
    return w->host = zr_sim_line_at(w, rank, thread);
}

struct zr_line *zr_sim_speaker(const struct zr_sim *w)
{
    return w->host;
}

void zr_sim_speak(struct zr_sim *w, struct zr_line *host)
{
    w->host = host;
}

/* ---- memory ---- */

void zr_sim_device_close(struct zr_device *dev)
{
    (void)dev; /* closed with the world */
}

bool zr_sim_refused(struct zr_sim *w)
{
    return ++w->n_allocs == w->opt.fail_alloc;
}

/* Large blocks only reserve addresses, possibly more than the machine has memory. Little of them is ever
 * touched. */
enum { LARGE_BYTES = 64 << 20 };

static void *take(int64_t bytes)
{
    if (bytes < LARGE_BYTES)
        return calloc(1, (size_t)bytes);
    void *p =
        mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? NULL : p;
}

static void give_back(void *p, int64_t bytes)
{
    if (bytes < LARGE_BYTES)
        free(p);
    else
        munmap(p, (size_t)bytes);
}

int zr_sim_alloc(struct zr_device *dev, int64_t bytes, void **out)
{
    struct zr_sim_device *d = zr_sim_device_of(dev);
    if (bytes <= 0)
        return zr_fail(ZERO_ERR_ARG, "sim: bytes is %lld: more than 0 are allowed", (long long)bytes);
    if (zr_sim_refused(d->w))
        return zr_fail(ZERO_ERR_NOMEM, "sim: no memory for %lld bytes", (long long)bytes);
    void *p = take(bytes);
    if (!p)
        return zr_fail(ZERO_ERR_NOMEM, "sim: no memory for %lld bytes", (long long)bytes);
    d->held += bytes;
    d->peak = d->held > d->peak ? d->held : d->peak;
    d->w->activity++;
    *out = p;
    return zr_shadow_add(&d->w->rec, d->rank, "device memory", p, bytes);
}

void zr_sim_free(struct zr_device *dev, void *p, int64_t bytes)
{
    struct zr_sim_device *d = zr_sim_device_of(dev);
    zr_shadow_remove(&d->w->rec, p);
    d->held -= bytes;
    give_back(p, bytes);
}

int zr_sim_register(struct zr_sim *w, int rank, const char *name, const void *at, int64_t bytes)
{
    return zr_shadow_add(&w->rec, rank, name, at, bytes);
}

void zr_sim_mark(struct zr_sim *w, const void *at, int64_t bytes, struct zr_content content)
{
    zr_shadow_set(&w->rec, at, bytes, content);
}

/* ---- the world ---- */

int zr_sim_open(const struct zr_sim_options *opt, struct zr_sim **out)
{
    static const char *const thread[] = {
        [ZR_SIM_MODEL] = "model thread", [ZR_SIM_LOOP] = "loop", [ZR_SIM_READER] = "snapshot's reader"};
    struct zr_sim *w;
    ZR_TRY(ZR_ZALLOC(w, 1, "a simulation"));
    w->opt = *opt;
    w->opt.n_streams = opt->n_streams ? opt->n_streams : 5;
    int32_t n_lines = opt->world * lines_of_rank(w);
    w->devices = calloc((size_t)opt->world, sizeof *w->devices);
    w->line_used = calloc((size_t)n_lines, sizeof *w->line_used);
    if (!w->devices || !w->line_used || zr_recorder_open(&w->rec, n_lines)) {
        free(w->devices);
        free(w->line_used);
        free(w);
        return zr_fail(ZERO_ERR_NOMEM, "sim: no memory for %d ranks", opt->world);
    }
    w->rec.every_byte_known = true;
    w->rec.contents_unknown = opt->contents_unknown;
    w->ops = zr_sim_ops;
    w->ops.compute_on_caller = opt->compute_on_caller;
    for (int r = 0; r < opt->world; r++)
        w->devices[r] = (struct zr_sim_device){.base.ops = &w->ops, .w = w, .rank = r};
    for (int32_t i = 0; i < n_lines; i++) {
        int kind = zr_sim_line_number(w, i);
        w->rec.lines[i].rank = i / lines_of_rank(w);
        w->rec.lines[i].name = kind < ZR_SIM_FIRST_STREAM ? thread[kind] : "stream";
    }
    w->host = &w->rec.lines[0];
    *out = w;
    return 0;
}

void zr_sim_close(struct zr_sim *w)
{
    if (!w)
        return;
    zr_recorder_close(&w->rec);
    while (w->spare) {
        struct zr_sim_op *op = w->spare;
        w->spare = op->next;
        free(op);
    }
    free(w->devices);
    free(w->line_used);
    free(w);
}

void zr_sim_kill(struct zr_sim *w, int rank)
{
    w->devices[rank].dead = true;
}
