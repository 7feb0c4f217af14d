/* SPDX-License-Identifier: Apache-2.0 */
/* merge.h: compares the flight recorders of a job's ranks: which rank is dead, made another operation than
 * the others, or is late, and in which call. */
#ifndef ZERO_BENCH_FLIGHT_MERGE_H
#define ZERO_BENCH_FLIGHT_MERGE_H

#include "comm/flight_view.h"

/* The files of one attempt of one job, at most one per rank. */
struct flight {
    int32_t world, n;
    /* (n) sorted by rank */
    struct flight_rank {
        const char *path;
        struct zr_flight_view *view;
    } * rank;
};

/* Reads n files. Returns 0, or EXIT_USAGE or EXIT_FAILURE after one line on stderr that names the file.
 * paths are borrowed until flight_close. */
int flight_open(struct flight *f, const char *name, char *const paths[], int n);
void flight_close(struct flight *f);

enum flight_kind { FLIGHT_DEAD, FLIGHT_DIFFERENT, FLIGHT_LATE, FLIGHT_MISSING };
/* "dead", "different", "late" or "missing". */
const char *flight_kind_name(enum flight_kind k);

struct flight_finding {
    enum flight_kind kind;
    int32_t rank;
    /* without the rank, such as "was killed by signal 9 (Killed)" */
    char text[768];
    /* the call that the rank is in, was in last, or that made the operation; "": not known */
    char call[ZR_CALL_LOG_CHARS];
};

/* Calls found() for each rank that stands out, causes before consequences. First come dead ranks, in the
 * order in which they ended; those that exited after their launcher had asked them to come last. Ranks
 * that the launcher killed are not dead. Then come the first differing operation of each communicator,
 * late ranks, and ranks without a file. */
void flight_judge(const struct flight *f, void (*found)(void *arg, const struct flight_finding *finding),
                  void *arg);

/* The last call, such as "zero_end(unit 3, backward) in step 12", or "". *inside: it has not returned.
 * *for_ns: how long the rank had been inside it, or outside of any call, when the recorder was copied. */
void flight_last_call(const struct zr_flight_view *v, char call[ZR_CALL_LOG_CHARS], bool *inside,
                      int64_t *for_ns);

#endif
