/* SPDX-License-Identifier: Apache-2.0 */
/* timeline.h: records spans of time on a few tracks, for zero_trace_write. A ring keeps the latest ones. A
 * profiler sees them as they begin and end. */
#ifndef ZR_SHARD_TIMELINE_H
#define ZR_SHARD_TIMELINE_H

#include "kernels/device.h"

/* The model's thread, and the engine's streams. OUTER: between shard groups. */
enum zr_track {
    ZR_TRACK_MODEL,
    ZR_TRACK_GATHER,
    ZR_TRACK_REDUCE,
    ZR_TRACK_GATHER_OUTER,
    ZR_TRACK_REDUCE_OUTER,
    ZR_TRACK_COUNT
};

enum zr_span_kind {
    ZR_SPAN_FORWARD,
    ZR_SPAN_BACKWARD,
    ZR_SPAN_WAIT,
    ZR_SPAN_STEP,
    ZR_SPAN_GATHER,
    ZR_SPAN_REDUCE,
    ZR_SPAN_NORM,
    ZR_SPAN_UPDATE,
    ZR_SPAN_REDUCE_OUTER,
    ZR_SPAN_GATHER_OUTER,
    ZR_SPAN_COUNT
};

struct zr_timeline;

/* Opens a timeline that keeps the latest n_spans spans of each track. dev: the device of the streams, which
 * outlives the timeline. With n_spans 0 only a profiler sees spans, and without a profiler *out is NULL. */
int zr_timeline_open(struct zr_device *dev, int32_t n_spans, struct zr_timeline **out);
/* t may be NULL. */
void zr_timeline_close(struct zr_timeline *t);

/* Begin and end a span. One thread at a time does so for a track. On the model's track spans may nest, and
 * unit and kind say which one ends. Nothing happens if t is NULL. */
void zr_timeline_begin(struct zr_timeline *t, enum zr_track track, enum zr_span_kind kind, int32_t unit,
                       uint32_t step);
void zr_timeline_end(struct zr_timeline *t, enum zr_track track, enum zr_span_kind kind, int32_t unit);

/* The same in the order of a stream of dev. The time is when the stream gets there; a profiler sees the
 * calling thread's time. One thread makes all marks of a track. Marks nest. */
int zr_timeline_mark(struct zr_timeline *t, struct zr_stream *s, enum zr_track track, enum zr_span_kind kind,
                     int32_t unit, uint32_t step, bool is_end);

/* Writes Chrome trace JSON (Trace Event Format, which Perfetto reads). The streams must be idle. */
int zr_timeline_write(const struct zr_timeline *t, int rank, const char *path);

#endif
