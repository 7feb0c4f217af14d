/* SPDX-License-Identifier: Apache-2.0 */
/* check_device.h: a device that passes every call on to another one and keeps a record of it (recorder.h): a
 * real run, checked as it goes.
 *
 * The record is made when work is issued, not when it runs: what is ordered follows from streams, events and
 * threads alone. So a missing wait is found whether or not its race happened this time.
 *
 * The other ranks are processes of their own. They follow the same schedule, so what one of them knows of
 * this rank is what this rank knows of it: each line has a twin that stands for that line of all others, and
 * what they read of this rank's memory is read by the twin, with the line's clock seen in the mirror. Where
 * ranks meet, both halves of the clock become the larger of the two.
 *
 * Thread-safety: as the device beneath; the functions below from any thread. */
#ifndef ZR_KERNELS_CHECK_DEVICE_H
#define ZR_KERNELS_CHECK_DEVICE_H

#include "kernels/check/recorder.h"

struct zr_check;

/* The lines of a rank. Every host thread that is not named otherwise is the model's. */
enum { ZR_CHECK_MODEL, ZR_CHECK_LOOP, ZR_CHECK_READER, ZR_CHECK_FIRST_STREAM, ZR_CHECK_LINES = 32 };

/* inner stays the caller's and outlives the check. Without memory for the record later on the check stops and
 * says so; nothing else changes. */
int zr_check_open(struct zr_device *inner, int rank, int world, struct zr_check **out);
/* After everything on its device was closed. NULL is allowed. */
void zr_check_close(struct zr_check *c);

/* The device to use; its close does nothing. */
struct zr_device *zr_check_device(struct zr_check *c);
/* The stream beneath one of its streams. */
struct zr_stream *zr_check_inner(struct zr_stream *s);

/* Memory that is watched besides what the device allocates. name must outlive it. */
int zr_check_add(struct zr_check *c, const char *name, const void *at, int64_t bytes);
void zr_check_remove(struct zr_check *c, const void *at);

/* What the calling thread does from here on, for reports. name must outlive the check. */
void zr_check_doing(struct zr_check *c, const char *name, int32_t unit, uint32_t step);
/* The calling thread hands something over to another: what it knows goes with it. Given back by zr_check_take
 * or zr_check_drop; NULL where the check has stopped. */
struct zr_vclock *zr_check_hand(struct zr_check *c);
/* The calling thread is the loop's (loop: from now on) and was handed something. */
void zr_check_take(struct zr_check *c, struct zr_vclock *known, bool loop);
/* Something that the program itself does on a stream of the device's: no more than a record of it. */
void zr_check_compute(struct zr_check *c, struct zr_stream *s, const char *name, const struct zr_access *a);
/* A thread of the program reads memory once the work on s so far is done; and: the calling thread knows it to
 * be done with that. */
void zr_check_reader(struct zr_check *c, struct zr_stream *s, const void *at, int64_t bytes);
void zr_check_reader_done(struct zr_check *c);

/* A collective on s, about to be put on the stream beneath. starts, ends: nobody begins before all are there,
 * nobody leaves before all are done. */
struct zr_check_part {
    const void *at;
    int64_t bytes;
    enum { ZR_MINE_READ, ZR_MINE_WRITE, ZR_OTHERS_READ } how;
};
void zr_check_collective(struct zr_check *c, struct zr_stream *s, const char *name, int32_t unit,
                         uint32_t step, const struct zr_check_part *parts, int n, bool starts, bool ends);

/* The first fault found, if any: true, with its text. */
bool zr_check_found(struct zr_check *c, char *text, size_t n);
/* It looks at nothing any more: for want of memory. */
void zr_check_stop(struct zr_check *c);
bool zr_check_stopped(struct zr_check *c);
int64_t zr_check_n_ops(struct zr_check *c);

#endif
