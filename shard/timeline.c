/* timeline.c: see timeline.h. */
#include "shard/timeline.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct span {
    int64_t from_ns, to_ns; /* to_ns 0: still open */
    int32_t unit;
    uint32_t step;
    uint8_t kind;
};

struct track {
    uint64_t n; /* spans begun */
    struct span *ring;
};

struct zr_timeline {
    int64_t start_ns;
    int32_t n_spans;
    struct track track[ZR_TRACK_COUNT];
};

int zr_timeline_open(int32_t n_spans, struct zr_timeline **out)
{
    struct zr_timeline *t = calloc(1, sizeof *t);
    for (int i = 0; t && i < ZR_TRACK_COUNT; i++) {
        t->track[i].ring = calloc((size_t)n_spans, sizeof(struct span));
        if (!t->track[i].ring) {
            zr_timeline_close(t);
            t = NULL;
        }
    }
    if (!t)
        return zr_fail(ZR_ERR_NOMEM, "no memory for a timeline of %d spans", n_spans);
    t->start_ns = zr_now_ns();
    t->n_spans = n_spans;
    *out = t;
    return 0;
}

void zr_timeline_close(struct zr_timeline *t)
{
    for (int i = 0; t && i < ZR_TRACK_COUNT; i++)
        free(t->track[i].ring);
    free(t);
}

void zr_timeline_begin(struct zr_timeline *t, enum zr_track track, enum zr_span_kind kind, int32_t unit,
                       uint32_t step)
{
    if (!t)
        return;
    struct track *k = &t->track[track];
    k->ring[k->n++ % (uint64_t)t->n_spans] =
        (struct span){.from_ns = zr_now_ns(), .unit = unit, .step = step, .kind = (uint8_t)kind};
}

void zr_timeline_end(struct zr_timeline *t, enum zr_track track, enum zr_span_kind kind, int32_t unit)
{
    if (!t)
        return;
    /* The latest open span of that name; nesting is shallow, so it is near the end. */
    struct track *k = &t->track[track];
    uint64_t oldest = k->n > (uint64_t)t->n_spans ? k->n - (uint64_t)t->n_spans : 0;
    for (uint64_t i = k->n; i-- > oldest;) {
        struct span *s = &k->ring[i % (uint64_t)t->n_spans];
        if (s->to_ns == 0 && s->kind == kind && s->unit == unit) {
            s->to_ns = zr_now_ns();
            return;
        }
    }
}

struct mark {
    struct zr_timeline *t;
    enum zr_track track;
    enum zr_span_kind kind;
    int32_t unit;
    uint32_t step;
    bool is_end;
};

static void on_mark(void *arg)
{
    const struct mark *m = arg;
    if (m->is_end)
        zr_timeline_end(m->t, m->track, m->kind, m->unit);
    else
        zr_timeline_begin(m->t, m->track, m->kind, m->unit, m->step);
}

int zr_timeline_mark(struct zr_timeline *t, struct zr_device *dev, struct zr_stream *s, enum zr_track track,
                     enum zr_span_kind kind, int32_t unit, uint32_t step, bool is_end)
{
    if (!t)
        return 0;
    struct mark m = {t, track, kind, unit, step, is_end};
    return dev->ops->call(s, on_mark, &m, sizeof m);
}

/* In microseconds to three places; as integers, as %f has a comma in some locales. */
static void put_us(FILE *f, int64_t ns)
{
    fprintf(f, "%lld.%03d", (long long)(ns / 1000), (int)(ns % 1000));
}

int zr_timeline_write(const struct zr_timeline *t, int rank, const char *path)
{
    static const char *const track_name[ZR_TRACK_COUNT] = {
        [ZR_TRACK_MODEL] = "model", [ZR_TRACK_GATHER] = "gather", [ZR_TRACK_REDUCE] = "reduce"};
    static const char *const kind_name[ZR_SPAN_COUNT] = {
        [ZR_SPAN_FORWARD] = "forward", [ZR_SPAN_BACKWARD] = "backward", [ZR_SPAN_WAIT] = "wait",
        [ZR_SPAN_STEP] = "step",       [ZR_SPAN_GATHER] = "all_gather", [ZR_SPAN_REDUCE] = "reduce_scatter",
        [ZR_SPAN_NORM] = "norm",       [ZR_SPAN_UPDATE] = "update"};
    FILE *f = fopen(path, "w");
    if (!f)
        return zr_fail(ZR_ERR_IO, "%s: %s", path, strerror(errno));
    fprintf(f, "{\"traceEvents\":[\n");
    for (int i = 0; i < ZR_TRACK_COUNT; i++) {
        const struct track *k = &t->track[i];
        fprintf(f,
                "{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}},\n",
                rank, i, track_name[i]);
        uint64_t oldest = k->n > (uint64_t)t->n_spans ? k->n - (uint64_t)t->n_spans : 0;
        for (uint64_t j = oldest; j < k->n; j++) {
            const struct span *s = &k->ring[j % (uint64_t)t->n_spans];
            if (s->to_ns == 0)
                continue;
            fprintf(f, "{\"ph\":\"X\",\"name\":\"%s", kind_name[s->kind]);
            if (s->unit >= 0)
                fprintf(f, " %d", s->unit);
            fprintf(f, "\",\"cat\":\"%s\",\"pid\":%d,\"tid\":%d,\"ts\":", kind_name[s->kind], rank, i);
            put_us(f, s->from_ns - t->start_ns);
            fprintf(f, ",\"dur\":");
            put_us(f, s->to_ns - s->from_ns);
            fprintf(f, ",\"args\":{\"unit\":%d,\"step\":%u}},\n", s->unit, s->step);
        }
    }
    fprintf(f, "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":\"rank %d\"}}\n]}\n",
            rank, rank);
    bool bad = ferror(f);
    if (fclose(f) || bad)
        return zr_fail(ZR_ERR_IO, "%s: %s", path, strerror(errno));
    return 0;
}
