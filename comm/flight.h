/* SPDX-License-Identifier: Apache-2.0 */
/* flight.h: the flight recorder, which records what a rank is doing in memory that others can read after the
 * rank was killed.
 *
 * It holds the program's current call, the job that is being carried out, the first failure, and the latest
 * operations of the communicators. For each operation it has the times at which it was queued, issued,
 * started and finished. It also holds the latest calls that other ranks must make too (meet/call_log.h), so
 * that ranks can find the first one that differs.
 *
 * It is always on. Its memory is a memfd. zero-run makes one for each of its ranks and passes it on
 * (ZERO_FLIGHT_FD), so that it can read it whatever happens to the rank. Without zero-run a rank makes its
 * own.
 *
 * Nothing here takes a lock or waits. The model's thread writes calls, the issuing thread writes operations,
 * and the thread of a stream writes when an operation started and finished. Every entry has a number, which
 * is 0 while it is written, so that a reader (flight_view.h) knows which entries are complete.
 *
 * Functions accept NULL for a recorder, and then record nothing. */
#ifndef ZR_COMM_FLIGHT_H
#define ZR_COMM_FLIGHT_H

#include "comm/comm.h"
#include "comm/shared_memory.h"

enum {
    ZR_FLIGHT_OPS = 4096,
    ZR_FLIGHT_TEXT = 1024,
    ZR_FLIGHT_NAME = 128,
    /* Bytes of a job's name. */
    ZR_FLIGHT_JOB = 16,
    ZR_FLIGHT_PATH = 1024
};

struct zr_flight;

/* The rank that a recorder belongs to. */
struct zr_flight_owner {
    int32_t rank, world, attempt;
    /* Name of the launcher's job, or "". */
    const char *job;
};

/* Takes the recorder that zero-run passed to this process if it is unused; otherwise makes one. If no file
 * can be made, it uses memory that only this process sees, and why says the reason; otherwise why is "".
 * Local. Returns ZERO_ERR_NOMEM. */
int zr_flight_open(const struct zr_flight_owner *owner, struct zr_flight **out, char why[ZR_FLIGHT_TEXT]);
/* Marks that the context was closed normally. No thread may write to the recorder any more. Others can read
 * it until its memory is used again. */
void zr_flight_close(struct zr_flight *f);

/* ---- the model's thread ---- */

/* Record that the program enters a call (without its arguments), and leaves it. Calls inside a call are
 * ignored. */
void zr_flight_enter(struct zr_flight *f, const struct zr_logged_call *call);
void zr_flight_leave(struct zr_flight *f);
/* Returns the call that the program is in. Its args are 0. */
struct zr_logged_call zr_flight_entered(const struct zr_flight *f);
/* Records a call that every rank of a role's communicator must make, so that ranks can compare their
 * programs. role: ZR_ROLE_CONTROL, ZR_ROLE_TP, ZR_ROLE_CP or ZR_ROLE_WORLD. */
void zr_flight_called(struct zr_flight *f, enum zr_role role, const struct zr_logged_call *call);
/* Records that a job is queued. Returns the time and the call. */
struct zr_flight_from zr_flight_queue(struct zr_flight *f);

/* ---- the thread that carries out jobs ---- */

/* Record that the thread begins a job (name: up to 15 characters), and ends it. */
void zr_flight_job(struct zr_flight *f, const char *name, int32_t unit);
void zr_flight_job_done(struct zr_flight *f);

/* ---- the thread that issues operations: one at a time ---- */

/* Records the group of a role, before its first operation. */
void zr_flight_role(struct zr_flight *f, enum zr_role role, const struct zr_group *group);
/* Records an operation that is about to be put on a communicator, with the unit, step, call hash and origin
 * of tag. Sets tag->mark. */
void zr_flight_issue(struct zr_flight *f, enum zr_role role, enum zr_op op, int64_t bytes,
                     struct zr_tag *tag);

/* ---- communicators ---- */

/* Record that the stream has come to an operation, and that the operation has ended without a failure. Any
 * thread. */
void zr_flight_start(const struct zr_flight_mark *m);
void zr_flight_finish(const struct zr_flight_mark *m);

/* ---- failures ---- */

/* Records the first failure of the rank; later ones are ignored. Any thread. */
void zr_flight_fail(struct zr_flight *f, int code, const char *text);
/* Writes the file that ZERO_FLIGHT_DIR asks for, once for each recorder. path is the file, or "" if none was
 * written. Blocks. Any thread. */
int zr_flight_save(struct zr_flight *f, char path[ZR_FLIGHT_PATH]);

/* ---- other ranks on this host (flight_peers.h) ---- */

/* Writes where other ranks find the recorder's memory, while this rank lives. Returns false if no other
 * process can map it; out->fd is then -1. */
bool zr_flight_where(const struct zr_flight *f, struct zr_shared_at *out);

/* The memory of a recorder, for reading. It stays as it was when its rank was killed. */
struct zr_flight_record;
/* Map another rank's record, and unmap it. Mapping returns ZERO_ERR_SYSTEM or ZERO_ERR_NOMEM. NULL may be
 * unmapped. */
int zr_flight_map(const struct zr_shared_at *where, const struct zr_flight_record **out);
void zr_flight_unmap(const struct zr_flight_record *rec);
/* Returns this rank's record. Valid until the recorder is closed. */
const struct zr_flight_record *zr_flight_record_of(const struct zr_flight *f);
struct zr_flight_call;
/* Reads the call that the rank's program is in, or was in last. Returns false, with zeros, if it made none,
 * or makes calls faster than they can be read. Any thread. */
bool zr_flight_read_call(const struct zr_flight_record *rec, struct zr_flight_call *out);
/* Gives the calls that two ranks must both make, as each of them made them. Returns false if they share no
 * communicator for which calls are recorded. Any thread. */
bool zr_flight_common_calls(const struct zr_flight_record *mine, const struct zr_flight_record *theirs,
                            const struct zr_call_log **my_log, const struct zr_call_log **their_log);
/* Gives the rank's calls of each communicator for which calls are recorded. The world's is the last. Any
 * thread. */
void zr_flight_shared_calls(const struct zr_flight_record *rec, struct zr_shared_calls out[ZR_SHARED_CALLS]);

/* Returns the failure that the rank recorded, with its message and time (zr_now_ns), or 0. Any thread. */
int zr_flight_read_failure(const struct zr_flight_record *rec, int64_t *failed_ns, char text[ZR_FLIGHT_TEXT]);
/* The process id of the record's rank. */
int32_t zr_flight_process_of(const struct zr_flight_record *rec);

/* ---- zero-run ---- */

/* Difference between the time of day and zr_now_ns. It may differ between processes of one host, as a
 * process may be interrupted between reading the two clocks. */
int64_t zr_flight_epoch_ns(void);
/* Makes the memory of an unused recorder. Returns a descriptor or a negative errno. The caller closes the
 * descriptor; child processes do not inherit it. */
int zr_flight_make(void);
struct zr_flight_view;
/* Copies a recorder. Returns false if it is unused, or is no recorder. */
bool zr_flight_look(int fd, struct zr_flight_view *out);
/* Copies a recorder of this process. */
void zr_flight_copy(struct zr_flight *f, struct zr_flight_view *out);

#endif
