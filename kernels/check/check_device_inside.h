/* SPDX-License-Identifier: Apache-2.0 */
/* check_device_inside.h: the inside of the checking device.
 *
 *   check_device.c    the device: memory and operations, and the faults found
 *   check_stream.c    streams and events, and the order that they make
 *   check_reported.c  what no call of the device shows, so that it must be reported
 *
 * Each call is recorded under one lock, and then passed on without it, because the inner device may block. */
#ifndef ZR_KERNELS_CHECK_DEVICE_INSIDE_H
#define ZR_KERNELS_CHECK_DEVICE_INSIDE_H

#include "kernels/check/check_device.h"

#include <pthread.h>

struct zr_check {
    /* The device that callers see. It must be the first member. */
    struct zr_device base;
    struct zr_device_ops ops;
    struct zr_device *inner;
    int rank, world;
    /* protects all fields below */
    pthread_mutex_t lock;
    struct zr_recorder rec;
    bool used[ZR_CHECK_LINES];
    /* a job is being carried out, by this thread */
    bool in_job;
    pthread_t job_thread;
};

struct zr_stream {
    struct zr_check *check;
    struct zr_stream *inner;
    struct zr_line *line;
    /* ranges that the next call touches */
    struct zr_access *declared;
    int n_declared;
};

struct zr_event {
    struct zr_check *check;
    struct zr_event *inner;
    /* clock of the latest record; NULL: there is none */
    struct zr_vclock *clock;
};

static inline struct zr_check *zr_check_of(struct zr_device *dev)
{
    return (struct zr_check *)dev;
}

/* check_stream.c: streams and events. */
int zr_check_stream_open(struct zr_device *dev, enum zr_stream_kind kind, const char *name, void *native,
                         struct zr_stream **out);
void zr_check_stream_close(struct zr_stream *s);
void zr_check_stream_leave(struct zr_stream *s);
int zr_check_stream_reserve(struct zr_stream *s, int64_t n_ops);
bool zr_check_stream_has_room(struct zr_stream *s, int64_t n_ops);
int zr_check_stream_sync(struct zr_stream *s);
void *zr_check_stream_native(struct zr_stream *s);
int zr_check_event_open(struct zr_device *dev, struct zr_event **out);
void zr_check_event_close(struct zr_event *e);
int zr_check_event_record(struct zr_event *e, struct zr_stream *s);
int zr_check_stream_wait(struct zr_stream *s, struct zr_event *e);
int zr_check_event_sync(struct zr_event *e);
int zr_check_event_query(struct zr_event *e);

/* Returns the calling thread's line. The lock is held. */
struct zr_line *zr_check_host_line(struct zr_check *c);
/* Begins a new operation of the stream. The lock is held until zr_check_issued(). */
struct zr_line *zr_check_issue(struct zr_stream *s, const char *name);
void zr_check_issued(struct zr_stream *s);

#endif
