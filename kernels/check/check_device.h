/* SPDX-License-Identifier: Apache-2.0 */
/* check_device.h: a device that passes every call on to another one and records it (recorder.h). So a real
 * run is checked as it goes.
 *
 * The record is made when work is issued, not when it runs. The order follows from streams, events and
 * threads alone. So a missing wait is found even if its race did not happen this time.
 *
 * The other ranks are separate processes. They follow the same schedule, so each of them knows of this rank
 * what this rank knows of it. Each line has a mirror, which stands for that line on all other ranks. What
 * they read of this rank's memory is recorded as a read by the mirror. Where ranks meet, the entries of a
 * line and its mirror become the larger of the two.
 *
 * Thread-safety: as the inner device. The functions below may be called from any thread. */
#ifndef ZR_KERNELS_CHECK_DEVICE_H
#define ZR_KERNELS_CHECK_DEVICE_H

#include "kernels/check/recorder.h"

struct zr_check;

/* Lines of a rank. A host thread without a named line counts as the model's. */
enum { ZR_CHECK_MODEL, ZR_CHECK_LOOP, ZR_CHECK_READER, ZR_CHECK_FIRST_STREAM, ZR_CHECK_LINES = 32 };

/* inner stays the caller's, and outlives the check. If there is no memory for the record later on, the check
 * stops (zr_check_stopped), and nothing else changes. */
int zr_check_open(struct zr_device *inner, int rank, int world, struct zr_check **out);
/* Call it after everything on its device was closed. c may be NULL. */
void zr_check_close(struct zr_check *c);

/* Returns the device to use. Its close does nothing. */
struct zr_device *zr_check_device(struct zr_check *c);
/* Returns the inner device's stream for one of its streams. */
struct zr_stream *zr_check_inner(struct zr_stream *s);

/* Watches memory that the device did not allocate. name must outlive it. */
int zr_check_add(struct zr_check *c, const char *name, const void *at, int64_t bytes);
void zr_check_remove(struct zr_check *c, const void *at);

/* Says what the calling thread does from here on, for reports. name must outlive the check. */
void zr_check_doing(struct zr_check *c, const char *name, int32_t unit, uint32_t step);
/* The calling thread queues a job, for which zr_check_job is called later. Returns what the thread knows, or
 * NULL if the check has stopped. */
struct zr_vclock *zr_check_hand(struct zr_check *c);
/* The calling thread carries out a job until zr_check_job_done. Until then its calls count as those of the
 * loop's thread, which usually carries out jobs. So a check finds the same whichever thread does. */
void zr_check_job(struct zr_check *c, struct zr_vclock *known);
void zr_check_job_done(struct zr_check *c);
/* Records something that the program itself does on a stream of the device. Nothing is run. */
void zr_check_compute(struct zr_check *c, struct zr_stream *s, const char *name, const struct zr_access *a);
/* With zr_check_reader, a thread of the program reads memory once the work on s so far is done. With
 * zr_check_reader_done, the calling thread knows that this read is over. */
void zr_check_reader(struct zr_check *c, struct zr_stream *s, const void *at, int64_t bytes);
void zr_check_reader_done(struct zr_check *c);

/* A range that a collective touches, read or written by this rank or read by others. */
struct zr_check_part {
    const void *at;
    int64_t bytes;
    enum { ZR_MINE_READ, ZR_MINE_WRITE, ZR_OTHERS_READ } how;
};
/* Records a collective on s, which is about to be put on the inner stream. starts: nobody begins before all
 * are there. ends: nobody leaves before all are done. */
void zr_check_collective(struct zr_check *c, struct zr_stream *s, const char *name, int32_t unit,
                         uint32_t step, const struct zr_check_part *parts, int n, bool starts, bool ends);

/* Returns whether a fault was found, with the text of the first one. */
bool zr_check_found(struct zr_check *c, char *text, size_t n);
/* Stops all checking, for lack of memory. */
void zr_check_stop(struct zr_check *c);
bool zr_check_stopped(struct zr_check *c);
int64_t zr_check_n_ops(struct zr_check *c);

#endif
