/* SPDX-License-Identifier: Apache-2.0 */
/* flight_view.h: a snapshot of a flight recorder (flight.h): a copy of its memory, or a file.
 *
 * Readers get a snapshot only after it was checked: its numbers are in range and its texts end. */
#ifndef ZR_COMM_FLIGHT_VIEW_H
#define ZR_COMM_FLIGHT_VIEW_H

#include "comm/flight.h"

#define ZR_FLIGHT_MAGIC   UINT64_C(0x7468676c66726f7a) /* "zroflght" */
#define ZR_FLIGHT_VERSION 2

/* A call of the program. number counts from 1. call is packed (zr_call_log_pack). left_ns is 0 while the
 * program is in it. */
struct zr_flight_call {
    uint64_t number, call;
    int64_t entered_ns, left_ns;
};

/* An operation. A time is 0 if it has not come yet. */
struct zr_flight_op {
    /* Numbers among all operations of its rank, and among those of its role. Both start at 1. */
    uint64_t serial, seq;
    /* enum zr_role, enum zr_op; unit is -1 if there is none. */
    int32_t role, op, unit;
    uint32_t step;
    int64_t bytes;
    uint64_t call_hash, call;
    int64_t queued_ns, issued_ns, started_ns, finished_ns;
};

/* The communicator of a role. size is 0 if there is none. issued, started and finished are the seq of the
 * last such operation. */
struct zr_flight_role_view {
    int32_t size, place, first;
    int32_t pad;
    /* Equal for ranks of one group. */
    uint64_t group;
    uint64_t issued, started, finished;
};

/* The job that is being carried out. name is "" if it runs none. */
struct zr_flight_loop {
    char name[ZR_FLIGHT_JOB];
    int32_t unit, pad;
    uint64_t n_queued, n_done;
    int64_t since_ns, queued_ns;
};

enum zr_flight_state { ZR_FLIGHT_OPEN = 1, ZR_FLIGHT_CLOSED = 2 };

/* A snapshot. The file is this struct byte for byte, cut after the last operation. */
struct zr_flight_view {
    uint64_t magic;
    uint32_t version, head_bytes;
    int32_t rank, world, attempt, pid;
    char job[ZR_FLIGHT_NAME], host[ZR_FLIGHT_NAME];
    /* enum zr_flight_state */
    int32_t state;
    /* 0: nothing failed. Otherwise text has the message. */
    int32_t code;
    char text[ZR_FLIGHT_TEXT];
    /* How the process ended, as its launcher saw it. has_ended is 0 if no launcher saw that. asked has a bit
     * (1 << signal) for each signal that the launcher sent before. */
    int32_t has_ended, exit_code, signal;
    uint32_t asked;
    /* Times on the rank's clock (zr_now_ns): when the recorder was opened, and when it was copied. epoch_ns
     * is added to them to get the time of day. If a launcher saw the end, all ranks of its host have the
     * launcher's. */
    int64_t opened_ns, copied_ns, epoch_ns;
    struct zr_flight_role_view role[ZR_ROLES];
    struct zr_flight_loop loop;
    /* The call that the program is in, or was in last. Its number is 0 if it made none. */
    struct zr_flight_call call;
    /* The latest operations, in order. */
    int32_t n_ops, pad;
    struct zr_flight_op ops[ZR_FLIGHT_OPS];
};

/* Checks a snapshot of memory that others may have written to. Returns 0, or ZERO_ERR_ARG with what is
 * wrong. */
int zr_flight_check(const struct zr_flight_view *v);
/* Bytes of the snapshot as a file. */
size_t zr_flight_bytes(const struct zr_flight_view *v);
/* Reads a file's bytes, which may be anything. Returns ZERO_ERR_ARG with a message if they are no such file;
 * *out is then invalid. */
int zr_flight_parse(const void *data, size_t n, struct zr_flight_view *out);
/* Reads a file. Returns ZERO_ERR_IO, or errors as zr_flight_parse, with the path in the message. */
int zr_flight_read_file(const char *path, struct zr_flight_view *out);
/* Writes folder/flight-JOB-attemptA-rankR, whole or not at all. path is the file's name. */
int zr_flight_write_file(const struct zr_flight_view *v, const char *folder, char path[ZR_FLIGHT_PATH]);
/* Removes the partial file next to path that the process v->pid left if it was killed while it wrote. The
 * process must have ended. */
void zr_flight_remove_part(const struct zr_flight_view *v, const char *path);

/* Whether a signal of the launcher ended the process. That is a consequence of an earlier failure, not a
 * cause. */
bool zr_flight_ended_by_launcher(const struct zr_flight_view *v);
/* The latest operation that has begun and not ended. If there is none, the latest that was issued and has not
 * begun; else NULL. */
const struct zr_flight_op *zr_flight_last_op(const struct zr_flight_view *v);
/* "zero_end(unit 3, backward) in step 12, which had returned" */
enum { ZR_FLIGHT_CALL_CHARS = ZR_CALL_LOG_CHARS + 24 };
void zr_flight_describe_call(const struct zr_flight_call *c, char text[ZR_FLIGHT_CALL_CHARS]);
/* Writes "all_gather seq 7 unit 2 of gather". */
void zr_flight_describe_op(const struct zr_flight_op *o, char *text, size_t n_text);
/* Writes "; its last call was zero_end(unit 3, backward) in step 12, which had returned; all_gather seq 7
 * unit 2 of gather had begun", as far as it is known, or "". */
void zr_flight_last_words(const struct zr_flight_view *v, char *text, size_t n_text);

#endif
