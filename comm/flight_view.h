/* SPDX-License-Identifier: Apache-2.0 */
/* flight_view.h: what a flight recorder (flight.h) had at one time, as whoever reads it sees it: a copy of
 * its memory, or a file. Everything in it was checked: numbers that name something are known ones, texts end.
 */
#ifndef ZR_COMM_FLIGHT_VIEW_H
#define ZR_COMM_FLIGHT_VIEW_H

#include "comm/flight.h"

#define ZR_FLIGHT_MAGIC   UINT64_C(0x7468676c66726f7a) /* "zroflght" */
#define ZR_FLIGHT_VERSION 1

/* A call of the program: call as zr_called_pack has it; left_ns is 0 while it is in it. */
struct zr_flight_call {
    uint64_t number, call;
    int64_t entered_ns, left_ns;
};

/* An operation; times are 0 while that has not been. */
struct zr_flight_op {
    /* among all of its rank, and among those of its role, from 1 on */
    uint64_t serial, seq;
    /* enum zr_role, enum zr_op; unit -1: none */
    int32_t role, op, unit;
    uint32_t step;
    int64_t bytes;
    uint64_t call_hash, call;
    int64_t queued_ns, issued_ns, started_ns, finished_ns;
};

/* The communicator of a role: size 0: there is none. seq of the last operation that was issued, started,
 * finished. */
struct zr_flight_role_view {
    int32_t size, place, first;
    int32_t pad;
    /* ranks with the same are of one group */
    uint64_t group;
    uint64_t issued, started, finished;
};

/* What the loop's thread is at. name "": nothing. */
struct zr_flight_loop {
    char name[ZR_FLIGHT_JOB];
    int32_t unit, pad;
    uint64_t n_queued, n_done;
    int64_t since_ns, queued_ns;
};

enum zr_flight_state { ZR_FLIGHT_OPEN = 1, ZR_FLIGHT_CLOSED = 2 };

/* The file is this struct as it lies, cut behind the last operation. */
struct zr_flight_view {
    uint64_t magic;
    uint32_t version, head_bytes;
    int32_t rank, world, attempt, pid;
    char job[ZR_FLIGHT_NAME], host[ZR_FLIGHT_NAME];
    /* enum zr_flight_state */
    int32_t state;
    /* 0: nothing failed; else text says what */
    int32_t code;
    char text[ZR_FLIGHT_TEXT];
    /* How the process ended, as its launcher saw it; has_ended 0: nobody has. asked: the signals by which the
     * launcher had asked it to end before that, 1 << each. */
    int32_t has_ended, exit_code, signal;
    uint32_t asked;
    /* On the rank's clock (zr_now_ns): when the recorder was opened, and when this was copied. And what is to
     * be added to it for the time of the day; where a launcher saw the end, all ranks of its host have the
     * launcher's. */
    int64_t opened_ns, copied_ns, epoch_ns;
    struct zr_flight_role_view role[ZR_ROLES];
    struct zr_flight_loop loop;
    /* the latest calls and operations, in their order */
    int32_t n_calls, n_ops;
    struct zr_flight_call calls[ZR_FLIGHT_CALLS];
    struct zr_flight_op ops[ZR_FLIGHT_OPS];
};

/* 0, or ZR_ERR_ARG with what is wrong: of memory that others may have written to. */
int zr_flight_check(const struct zr_flight_view *v);
/* Bytes of it as a file. */
size_t zr_flight_bytes(const struct zr_flight_view *v);
/* Any bytes. ZR_ERR_ARG: they are no such file, and the message says what is wrong; *out is then of no use.
 */
int zr_flight_parse(const void *data, size_t n, struct zr_flight_view *out);
/* ZR_ERR_IO or as parse, the path before it. */
int zr_flight_read_file(const char *path, struct zr_flight_view *out);
/* To folder/flight-JOB-attemptA-rankR, whole or not at all; *path is that. */
int zr_flight_write_file(const struct zr_flight_view *v, const char *folder, char path[ZR_FLIGHT_PATH]);
/* Removes the part that its process (v->pid), which is no more, may have left beside path, where it was
 * killed while it wrote. */
void zr_flight_remove_part(const struct zr_flight_view *v, const char *path);

/* Its launcher's signal ended it: a consequence of whatever the launcher had seen before, not a cause. */
bool zr_flight_ended_by_launcher(const struct zr_flight_view *v);
/* The call it is in, or was in last; NULL: it made none that is kept. */
const struct zr_flight_call *zr_flight_last_call(const struct zr_flight_view *v);
/* The latest operation that has begun and not ended; else the latest that was issued and not begun; NULL:
 * there is neither. */
const struct zr_flight_op *zr_flight_last_op(const struct zr_flight_view *v);
/* "zero_end(unit 3, backward) in step 12, which had returned" */
enum { ZR_FLIGHT_CALL_CHARS = ZR_CALLED_CHARS + 24 };
void zr_flight_describe_call(const struct zr_flight_call *c, char text[ZR_FLIGHT_CALL_CHARS]);
/* "all_gather seq 7 unit 2 of gather" */
void zr_flight_describe_op(const struct zr_flight_op *o, char *text, size_t n_text);
/* "; its last call was zero_end(unit 3, backward) in step 12, which had returned; all_gather seq 7 unit 2 of
 * gather had begun": as far as it is known, else "". */
void zr_flight_last_words(const struct zr_flight_view *v, char *text, size_t n_text);

#endif
