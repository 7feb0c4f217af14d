/* SPDX-License-Identifier: Apache-2.0 */
/* sim_device_inside.h: the inside of the simulated device.
 *
 *   sim_device.c  the world: its ranks, their memory, and the calling host thread
 *   sim_stream.c  streams and events: queued operations, and the order in which they run
 *   sim_ops.c     the device's operations, which are put on a stream
 *   sim_effect.c  what an operation does: the bytes that it touches, their content, and its time */
#ifndef ZR_KERNELS_SIM_DEVICE_INSIDE_H
#define ZR_KERNELS_SIM_DEVICE_INSIDE_H

#include "kernels/sim/sim_device.h"

/* One record of an event (sim_stream.c). */
struct zr_sim_record;

enum zr_sim_op_kind {
    ZR_SIM_OP_WAIT,
    ZR_SIM_OP_RECORD,
    ZR_SIM_OP_CALL,
    ZR_SIM_OP_ZERO,
    ZR_SIM_OP_COPY,
    ZR_SIM_OP_CAST,
    ZR_SIM_OP_ADD,
    ZR_SIM_OP_SQUARES,
    ZR_SIM_OP_SCALE,
    ZR_SIM_OP_UPDATE,
    ZR_SIM_OP_ENCODE,
    ZR_SIM_OP_DECODE,
    ZR_SIM_OP_COMPUTE,
    ZR_SIM_OP_TOGETHER
};

struct zr_sim_op {
    struct zr_sim_op *next;
    enum zr_sim_op_kind kind;
    const char *name, *during;
    int32_t unit;
    uint32_t step;
    struct zr_vclock *issued;
    struct zr_sim_record *record;
    struct zr_access *access;
    struct zr_sim_touch *touch;
    int n;
    int64_t count, ns;
    void *dst;
    const void *src;
    enum zero_dtype dst_type, src_type;
    const struct zr_step_scalars *scalars;
    struct zr_update update;
    struct zr_coded coded;
    struct zr_largest largest;
    /* Its launch takes no time, because it continues the operation before it: the next span of an update, or
     * the next piece of a norm. Some ranks have more pieces of a norm than others. */
    bool goes_on;
    void (*fn)(void *arg);
    bool (*start)(void *arg, struct zr_stream *s);
    void *arg;
    _Alignas(16) char copy[ZR_CALL_BYTES];
};

struct zr_stream {
    struct zr_sim_device *dev;
    struct zr_line *line;
    /* caller: the stream of the calling thread, not a queue. waiting: it is in a record's list. */
    bool caller, waiting;
    /* the current operation has ended elsewhere (zr_sim_resume) */
    bool over;
    struct zr_sim_op *head, *tail;
    /* kind of the operation that was put last */
    enum zr_sim_op_kind last;
    struct zr_stream *next_waiter, *next_ready;
    bool ready;
    struct zr_access *declared;
    int n_declared;
};

struct zr_event {
    struct zr_sim_device *dev;
    struct zr_sim_record *latest;
};

struct zr_sim_device {
    struct zr_device base;
    struct zr_sim *w;
    int rank;
    bool dead;
    int64_t held, peak;
};

struct zr_sim {
    struct zr_sim_options opt;
    struct zr_device_ops ops;
    /* (world), by rank */
    struct zr_sim_device *devices;
    struct zr_recorder rec;
    /* (rec.n_lines) lines that are in use */
    bool *line_used;
    /* line of the host thread that makes the calls */
    struct zr_line *host;
    struct zr_stream *ready;
    bool pumping;
    struct zr_sim_op *spare;
    int64_t n_allocs, activity;
    /* line of the stream whose call is under way; NULL: none is */
    struct zr_line *running;
};

static inline struct zr_sim_device *zr_sim_device_of(struct zr_device *dev)
{
    return (struct zr_sim_device *)dev;
}

/* sim_device.c: memory. zr_sim_refused counts a request, and returns whether it is the one that fails. */
void zr_sim_device_close(struct zr_device *dev);
int zr_sim_alloc(struct zr_device *dev, int64_t bytes, void **out);
void zr_sim_free(struct zr_device *dev, void *p, int64_t bytes);
bool zr_sim_refused(struct zr_sim *w);

/* sim_stream.c: streams and events. */
int zr_sim_stream_open(struct zr_device *dev, enum zr_stream_kind kind, const char *name, void *native,
                       struct zr_stream **out);
void zr_sim_stream_close(struct zr_stream *s);
int zr_sim_stream_sync(struct zr_stream *s);
void *zr_sim_stream_native(struct zr_stream *s);
int zr_sim_event_open(struct zr_device *dev, struct zr_event **out);
void zr_sim_event_close(struct zr_event *e);
int zr_sim_event_record(struct zr_event *e, struct zr_stream *s);
int zr_sim_stream_wait(struct zr_stream *s, struct zr_event *e);
int zr_sim_event_sync(struct zr_event *e);
int zr_sim_event_query(struct zr_event *e);

/* zr_sim_op_new makes an operation that the selected host thread issues to s. It aborts without memory. The
 * caller fills it in. zr_sim_op_put puts it on the stream, which then owns it and runs as far as it can. */
struct zr_sim_op *zr_sim_op_new(struct zr_stream *s, enum zr_sim_op_kind kind, const char *name);
int zr_sim_op_put(struct zr_stream *s, struct zr_sim_op *op);
/* Returns whether a mutant leaves this call out. e and s may be NULL. */
bool zr_sim_dropped(struct zr_sim *w, enum zr_sim_edge edge, int rank, const struct zr_event *e,
                    const struct zr_stream *s);

/* sim_effect.c: runs an operation of one rank on the stream's line l. */
void zr_sim_effect(struct zr_sim *w, struct zr_line *l, struct zr_sim_op *op, int rank);

/* sim_ops.c: the table of functions. zr_sim_open sets compute_on_caller in its copy. */
extern const struct zr_device_ops zr_sim_ops;

#endif
