/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.h: runs one function as N ranks, as threads of this process or as forked ones, and collects what each
 * has to say.
 *
 * cmocka's asserts jump, which works on the test's own thread only. So a rank says what is wrong with
 * RANK_CHECK, which returns from it, and the test asserts afterwards that no rank said anything. */
#ifndef ZR_TEST_COMM_RANKS_H
#define ZR_TEST_COMM_RANKS_H

#include "comm/meet/rendezvous.h"

#include <stdatomic.h>
#include <stdint.h>

/* Of most tests; and of those whose ranks are many. */
enum { MOST_RANKS = 18, MANY_RANKS = 1024 };

struct rank {
    struct zr_world w;
    bool forked;
    void *arg;
    /* "" when all is well */
    char wrong[1024];
    /* for the test to read */
    char note[1024];
    /* for the test to read, too */
    int code;
    /* how far it is; shared with the test and the other ranks */
    atomic_int stage;
    /* it ends by a signal, on purpose */
    bool dies;
    /* (world) all ranks */
    struct rank *all;
};

/* Where the ranks of this run meet: "127.0.0.1", or, with MEETING=ipv6 in the environment, "::1". */
const char *meeting_host(void);

#define RANK_CHECK(r, cond, ...)                                                                             \
    do {                                                                                                     \
        if (!(cond)) {                                                                                       \
            rank_says(r, __FILE__, __LINE__, #cond, __VA_ARGS__);                                            \
            return;                                                                                          \
        }                                                                                                    \
    } while (0)

void rank_says(struct rank *r, const char *file, int line, const char *cond, const char *fmt, ...)
    __attribute__((format(printf, 5, 6)));

/* Runs fn as n ranks and fails the test if a rank said something or ended otherwise than it should. before
 * (or NULL) may change each rank first. Processes: fork() with no thread of ours running. The array returned
 * is valid until the next call. */
struct rank *run_ranks(bool forked, int n, void (*fn)(struct rank *r), void *arg,
                       void (*before)(struct rank *r));

/* Waits (bounded) until stage of r is at least stage. */
bool wait_stage(struct rank *r, int stage);
/* This rank has come to stage; waits until all have. */
bool all_at(struct rank *me, int stage);

void sleep_ms(int ms);

/* Keeps the result of a call in code, and its message in note ("" for 0), for the test. */
void note_error(struct rank *me, int code);
/* Fails the test unless r kept this code and a note with that text in it. */
void expect_rank(const struct rank *r, int code, const char *text);

/* In [lo, hi]; the state is of random_next. */
int64_t random_in(uint64_t *state, int64_t lo, int64_t hi);
/* From ZERO_TEST_SEED or the clock; printed, so that a failure can be repeated. */
uint64_t fresh_seed(const char *what);

#endif
