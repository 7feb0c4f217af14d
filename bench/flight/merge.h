/* SPDX-License-Identifier: Apache-2.0 */
/* merge.h: flight recorders of a job's ranks, side by side: which rank is dead, which made another
 * operation than the others, which is late, and in which call. */
#ifndef ZERO_BENCH_FLIGHT_MERGE_H
#define ZERO_BENCH_FLIGHT_MERGE_H

#include "comm/flight_view.h"

/* The files of one attempt of one job, at most one of a rank. */
struct flight {
    int32_t world, n;
    /* (n) by rank */
    struct flight_rank {
        const char *path;
        struct zr_flight_view *view;
    } * rank;
};

/* Reads n files. 0, or after one line on stderr, which names the file, EXIT_USAGE or EXIT_FAILURE. paths stay
 * the caller's. */
int flight_open(struct flight *f, const char *name, char *const paths[], int n);
void flight_close(struct flight *f);

enum flight_kind { FLIGHT_DEAD, FLIGHT_DIFFERENT, FLIGHT_LATE, FLIGHT_MISSING };
/* "dead", "different", "late", "missing" */
const char *flight_kind_name(enum flight_kind k);

struct flight_finding {
    enum flight_kind kind;
    int32_t rank;
    /* without the rank: "was killed by signal 9 (Killed)" */
    char text[768];
    /* the call that it is in, was in last, or that the operation comes from; "": not known */
    char call[ZR_CALLED_CHARS];
};

/* What stands out, causes before consequences: the dead, in the order in which they ended, those last that
 * exited when their launcher had asked them to; one that the launcher killed is not dead. Then the first
 * operation of each communicator that differs, then the late; last ranks without a file. Calls found for
 * each, in that order. */
void flight_judge(const struct flight *f, void (*found)(void *arg, const struct flight_finding *finding),
                  void *arg);

/* "zero_end(unit 3, backward) in step 12" or "". *inside: it has not returned; *for_ns: how long it was in
 * it, or outside of any, when it was copied. */
void flight_last_call(const struct zr_flight_view *v, char call[ZR_CALLED_CHARS], bool *inside,
                      int64_t *for_ns);

#endif
