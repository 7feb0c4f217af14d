/* SPDX-License-Identifier: Apache-2.0 */
/* timeline.h: what happened when: spans on a few tracks, in a ring that keeps the latest, for
 * zero_trace_write; and told to a profiler as they begin and end. */
#ifndef ZR_SHARD_TIMELINE_H
#define ZR_SHARD_TIMELINE_H

#include "kernels/device.h"

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

/* Keeps the latest n_spans spans of each track; dev: of whose streams, outlives the timeline. With n_spans 0
 * spans are only told to a profiler, and without one *out is NULL. */
int zr_timeline_open(struct zr_device *dev, int32_t n_spans, struct zr_timeline **out);
/* NULL is allowed. */
void zr_timeline_close(struct zr_timeline *t);

/* Begins and ends a span; spans of one track are begun and ended by one thread at a time. They may nest on
 * the model's track, where unit and kind tell which one ends. t may be NULL: nothing happens. */
void zr_timeline_begin(struct zr_timeline *t, enum zr_track track, enum zr_span_kind kind, int32_t unit,
                       uint32_t step);
void zr_timeline_end(struct zr_timeline *t, enum zr_track track, enum zr_span_kind kind, int32_t unit);

/* The same in the order of a stream of dev: the time is when the stream gets there; to a profiler it is the
 * calling thread's. By one thread for all marks of a track; marks nest. */
int zr_timeline_mark(struct zr_timeline *t, struct zr_stream *s, enum zr_track track, enum zr_span_kind kind,
                     int32_t unit, uint32_t step, bool is_end);

/* Writes Chrome trace JSON (the Trace Event Format; Perfetto reads it). The streams must be idle. */
int zr_timeline_write(const struct zr_timeline *t, int rank, const char *path);

#endif
