/* SPDX-License-Identifier: Apache-2.0 */
/* flight.h: what a rank is doing, kept where others can read it after the rank was killed.
 *
 * A flight recorder has the call that the program is in, the latest operations of the communicators with the
 * times at which each was queued, issued, started and finished, what the loop's thread is at, and the first
 * failure. It is always on. Its memory is a file without a name (a memfd): zero-run makes one for each of its
 * ranks and gives it along (ZERO_FLIGHT_FD), so that it can read it whatever became of the rank; without
 * zero-run a rank makes its own.
 *
 * Nothing here takes a lock or waits. The model's thread writes calls, whoever issues operations writes
 * those, and the thread of a stream adds when one has started and finished. Every entry has its number, which
 * is 0 while it is written; so whoever reads (flight_view.h) sees which are whole.
 *
 * Of functions that take a recorder, NULL is allowed: nothing is recorded. */
#ifndef ZR_COMM_FLIGHT_H
#define ZR_COMM_FLIGHT_H

#include "comm/comm.h"
#include "comm/shared_memory.h"

enum {
    ZR_FLIGHT_OPS = 4096,
    ZR_FLIGHT_CALLS = 64,
    ZR_FLIGHT_TEXT = 1024,
    ZR_FLIGHT_NAME = 128,
    /* of a job of the loop's thread */
    ZR_FLIGHT_JOB = 16,
    ZR_FLIGHT_PATH = 1024
};

struct zr_flight;

/* Whose it is. */
struct zr_flight_owner {
    int32_t rank, world, attempt;
    /* the job's name; "" where it has none */
    const char *job;
};

/* Takes the one that zero-run has given to this process, if it is nobody's; else makes one. ZR_ERR_NOMEM:
 * there is no memory for one; where no file can be had, memory that only this process sees is taken, and
 * *why, else "", says why. Local. */
int zr_flight_open(const struct zr_flight_owner *owner, struct zr_flight **out, char why[ZR_FLIGHT_TEXT]);
/* The context is closed in good order: what is recorded stays as it is, for others to read, until the memory
 * is used again. No thread writes to it any more. */
void zr_flight_close(struct zr_flight *f);

/* ---- the model's thread ---- */

/* The program enters a call (args are left out), and leaves it. A call inside a call is a part of it. */
void zr_flight_enter(struct zr_flight *f, const struct zr_called *call);
void zr_flight_leave(struct zr_flight *f);
/* A job is given to the loop's thread: what it carries of when, and in which call. */
struct zr_flight_from zr_flight_queue(struct zr_flight *f);

/* ---- the thread that carries out jobs ---- */

/* It begins one (name: up to 15 characters), and is done with it. */
void zr_flight_job(struct zr_flight *f, const char *name, int32_t unit);
void zr_flight_job_done(struct zr_flight *f);

/* ---- whoever issues operations: one thread for a role ---- */

/* The communicator of a role, before its first operation. */
void zr_flight_role(struct zr_flight *f, enum zr_role role, const struct zr_group *group);
/* An operation is about to be put on a communicator. tag: whose unit, step, calls and origin (from.queued_ns
 * 0: the program's thread issues it itself) count; its mark is set for the communicator. */
void zr_flight_issue(struct zr_flight *f, enum zr_role role, enum zr_op op, int64_t bytes,
                     struct zr_tag *tag);

/* ---- communicators ---- */

/* Its stream has come to an operation; it has ended without a failure; both at once. Any thread. */
void zr_flight_start(const struct zr_flight_mark *m);
void zr_flight_finish(const struct zr_flight_mark *m);
void zr_flight_at_once(const struct zr_flight_mark *m);

/* ---- failures ---- */

/* The first failure of the rank: once. Any thread. */
void zr_flight_fail(struct zr_flight *f, int code, const char *text);
/* Writes the file that ZERO_FLIGHT_DIR asks for, once for a recorder; without that variable nothing. Blocks.
 * *path, else "", is what was written. Any thread. */
int zr_flight_save(struct zr_flight *f, char path[ZR_FLIGHT_PATH]);

/* ---- other ranks of its host (flight_peers.h) ---- */

/* Where they find its memory while its rank lives. false: no other process sees it, and out->fd is -1. */
bool zr_flight_where(const struct zr_flight *f, struct zr_shared_at *out);

/* The memory of a recorder, to be read: it stays what it was when its rank was killed. */
struct zr_flight_record;
/* Another rank's. ZR_ERR_SYSTEM, ZR_ERR_NOMEM. NULL may be unmapped. */
int zr_flight_map(const struct zr_shared_at *where, const struct zr_flight_record **out);
void zr_flight_unmap(const struct zr_flight_record *rec);
/* This one's, until it is closed. */
const struct zr_flight_record *zr_flight_record_of(const struct zr_flight *f);
struct zr_flight_call;
/* The call that its program is in, or was in last; false: it made none. Any thread. */
bool zr_flight_read_call(const struct zr_flight_record *rec, struct zr_flight_call *out);

/* The failure that its rank recorded, with its message and when (zr_now_ns); 0: none. Any thread. */
int zr_flight_read_failure(const struct zr_flight_record *rec, int64_t *failed_ns, char text[ZR_FLIGHT_TEXT]);
/* Its rank's process. */
int32_t zr_flight_process_of(const struct zr_flight_record *rec);

/* ---- zero-run ---- */

/* What is to be added to zr_now_ns for the time of the day. Off by as long as the process did not run between
 * its two clocks: on one host, too, each process has another. */
int64_t zr_flight_epoch_ns(void);
/* The memory of a recorder that is nobody's yet, as a descriptor that is closed by the caller and not
 * inherited; a negative errno else. */
int zr_flight_make(void);
struct zr_flight_view;
/* What is in it. false: it is nobody's yet, or no recorder. */
bool zr_flight_look(int fd, struct zr_flight_view *out);
/* Of a recorder of this process. */
void zr_flight_copy(struct zr_flight *f, struct zr_flight_view *out);

#endif
