/* SPDX-License-Identifier: Apache-2.0 */
/* timeline.c: records spans of the model's thread and of streams, and writes them as a Chrome trace. */
#include "shard/engine/timeline.h"
#include "kernels/alloc.h"
#include "kernels/limits.h"
#include "kernels/profiler.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct span {
    int32_t unit;
    uint32_t step;
    uint8_t kind;
    bool ended;     /* or it ends when its stream gets there */
    uint64_t range; /* the profiler's range, on the model's track */
};

enum { OPEN_SPANS = 1024 }; /* spans kept if only a profiler needs them */

/* When a span begins and ends. 0: not yet. */
struct times {
    int64_t from_ns, to_ns;
};

struct track {
    uint64_t n; /* spans begun */
    struct span *ring;
    struct times *times;
};

static const char *const kind_name[ZR_SPAN_COUNT] = {[ZR_SPAN_FORWARD] = "forward",
                                                     [ZR_SPAN_BACKWARD] = "backward",
                                                     [ZR_SPAN_WAIT] = "wait",
                                                     [ZR_SPAN_STEP] = "step",
                                                     [ZR_SPAN_GATHER] = "all_gather",
                                                     [ZR_SPAN_REDUCE] = "reduce_scatter",
                                                     [ZR_SPAN_NORM] = "norm",
                                                     [ZR_SPAN_UPDATE] = "update",
                                                     [ZR_SPAN_REDUCE_OUTER] = "reduce_scatter outer",
                                                     [ZR_SPAN_GATHER_OUTER] = "all_gather outer"};

struct zr_timeline {
    struct zr_device *dev;
    struct zr_profiler *profiler; /* NULL: no profiler is attached */
    bool written;                 /* times are recorded, for zero_trace_write */
    int64_t start_ns;
    int32_t n_spans;
    struct times *times; /* (ZR_TRACK_COUNT, n_spans), where dev's streams can write */
    struct track track[ZR_TRACK_COUNT];
};

static int64_t times_bytes(const struct zr_timeline *t)
{
    return (int64_t)ZR_TRACK_COUNT * t->n_spans * (int64_t)sizeof(struct times);
}

int zr_timeline_open(struct zr_device *dev, int32_t n_spans, struct zr_timeline **out)
{
    *out = NULL;
    struct zr_profiler *profiler = zr_profiler_open();
    if (n_spans == 0 && !profiler)
        return 0;
    struct zr_timeline *t;
    int err = ZR_ZALLOC(t, 1, "a timeline of %d spans", n_spans);
    if (err) {
        zr_profiler_close(profiler);
        return err;
    }
    t->dev = dev;
    t->profiler = profiler;
    t->written = n_spans > 0;
    n_spans = n_spans ? n_spans : OPEN_SPANS;
    t->start_ns = zr_now_ns();
    t->n_spans = n_spans;
    void *times = NULL;
    err = dev->ops->host_alloc(dev, times_bytes(t), &times);
    t->times = times;
    for (int i = 0; !err && i < ZR_TRACK_COUNT; i++) {
        t->track[i].times = t->times + (int64_t)i * n_spans;
        err = ZR_ZALLOC(t->track[i].ring, n_spans, "a timeline of %d spans", n_spans);
    }
    if (err) {
        zr_timeline_close(t);
        return err;
    }
    *out = t;
    return 0;
}

void zr_timeline_close(struct zr_timeline *t)
{
    if (!t)
        return;
    for (int i = 0; i < ZR_TRACK_COUNT; i++)
        free(t->track[i].ring);
    if (t->times)
        t->dev->ops->host_free(t->dev, t->times, times_bytes(t));
    zr_profiler_close(t->profiler);
    free(t);
}

static int32_t begin(struct zr_timeline *t, enum zr_track track, enum zr_span_kind kind, int32_t unit,
                     uint32_t step)
{
    struct track *k = &t->track[track];
    int32_t i = (int32_t)(k->n++ % (uint64_t)t->n_spans);
    k->ring[i] = (struct span){.unit = unit, .step = step, .kind = (uint8_t)kind};
    k->times[i] = (struct times){0};
    return i;
}

/* Ends the latest open span of that kind and unit, and returns its index. -1: there is none. Nesting is
 * shallow, so the span is near the end. */
static int32_t end(struct zr_timeline *t, enum zr_track track, enum zr_span_kind kind, int32_t unit)
{
    struct track *k = &t->track[track];
    uint64_t oldest = k->n > (uint64_t)t->n_spans ? k->n - (uint64_t)t->n_spans : 0;
    for (uint64_t i = k->n; i-- > oldest;) {
        struct span *s = &k->ring[i % (uint64_t)t->n_spans];
        if (!s->ended && s->kind == kind && s->unit == unit) {
            s->ended = true;
            return (int32_t)(i % (uint64_t)t->n_spans);
        }
    }
    return -1;
}

void zr_timeline_begin(struct zr_timeline *t, enum zr_track track, enum zr_span_kind kind, int32_t unit,
                       uint32_t step)
{
    if (!t)
        return;
    int32_t i = begin(t, track, kind, unit, step);
    t->track[track].times[i].from_ns = zr_now_ns();
    if (t->profiler)
        t->track[track].ring[i].range = zr_profiler_begin(t->profiler, kind_name[kind], unit);
}

void zr_timeline_end(struct zr_timeline *t, enum zr_track track, enum zr_span_kind kind, int32_t unit)
{
    int32_t i = t ? end(t, track, kind, unit) : -1;
    if (i < 0)
        return;
    t->track[track].times[i].to_ns = zr_now_ns();
    if (t->profiler)
        zr_profiler_end(t->profiler, t->track[track].ring[i].range);
}

int zr_timeline_mark(struct zr_timeline *t, struct zr_stream *s, enum zr_track track, enum zr_span_kind kind,
                     int32_t unit, uint32_t step, bool is_end)
{
    if (!t)
        return 0;
    int32_t i = is_end ? end(t, track, kind, unit) : begin(t, track, kind, unit, step);
    if (t->profiler && is_end)
        zr_profiler_pop(t->profiler);
    else if (t->profiler)
        zr_profiler_push(t->profiler, kind_name[kind], unit);
    if (!t->written || i < 0)
        return 0;
    struct times *at = &t->track[track].times[i];
    return t->dev->ops->stamp(s, is_end ? &at->to_ns : &at->from_ns);
}

/* Writes microseconds with three decimals. Uses integers, because %f prints a comma in some locales. */
static void put_us(FILE *f, int64_t ns)
{
    fprintf(f, "%lld.%03d", (long long)(ns / 1000), (int)(ns % 1000));
}

int zr_timeline_write(const struct zr_timeline *t, int rank, const char *path)
{
    static const char *const track_name[ZR_TRACK_COUNT] = {[ZR_TRACK_MODEL] = "model",
                                                           [ZR_TRACK_GATHER] = "gather",
                                                           [ZR_TRACK_REDUCE] = "reduce",
                                                           [ZR_TRACK_GATHER_OUTER] = "gather outer",
                                                           [ZR_TRACK_REDUCE_OUTER] = "reduce outer"};
    char why[ZR_SYSTEM_WORDS];
    struct zr_large_write guard;
    FILE *f = fopen(path, "w");
    if (!f)
        return zr_fail(ZERO_ERR_IO, "%s: %s", path, zr_system_words(errno, why));
    zr_large_write_begin(&guard);
    errno = 0;
    fprintf(f, "{\"traceEvents\":[\n");
    for (int i = 0; i < ZR_TRACK_COUNT; i++) {
        const struct track *k = &t->track[i];
        if (i >= ZR_TRACK_GATHER_OUTER && k->n == 0) /* there are no groups */
            continue;
        fprintf(f,
                "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}},\n",
                rank, i, track_name[i]);
        uint64_t oldest = k->n > (uint64_t)t->n_spans ? k->n - (uint64_t)t->n_spans : 0;
        for (uint64_t j = oldest; j < k->n; j++) {
            const struct span *s = &k->ring[j % (uint64_t)t->n_spans];
            const struct times *at = &k->times[j % (uint64_t)t->n_spans];
            if (at->to_ns == 0)
                continue;
            fprintf(f, "{\"ph\":\"X\",\"name\":\"%s", kind_name[s->kind]);
            if (s->unit >= 0)
                fprintf(f, " %d", s->unit);
            fprintf(f, "\",\"cat\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":", kind_name[s->kind], rank, i);
            put_us(f, at->from_ns - t->start_ns);
            fprintf(f, ",\"dur\":");
            put_us(f, at->to_ns - at->from_ns);
            fprintf(f, ",\"args\":{\"unit\":%d,\"step\":%u}},\n", s->unit, s->step);
        }
    }
    fprintf(f, "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}}\n]}\n",
            rank, rank);
    int error = ferror(f) ? errno : 0;
    if (fclose(f) && !error)
        error = errno;
    zr_large_write_end(&guard);
    return error ? zr_fail(ZERO_ERR_IO, "%s: %s", path, zr_system_words(error, why)) : 0;
}
