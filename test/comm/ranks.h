/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.h: runs a function as N ranks, as threads of this process or as forked processes, and collects
 * each rank's result.
 *
 * cmocka's asserts work on the test's own thread only, because they jump. A rank therefore reports errors
 * with RANK_CHECK, which returns from its function. The test then asserts that no rank reported any. */
#ifndef ZR_TEST_COMM_RANKS_H
#define ZR_TEST_COMM_RANKS_H

#include "comm/meet/rendezvous.h"

#include <stdatomic.h>
#include <stdint.h>

/* Ranks in most tests; ranks in tests of large worlds. */
enum { MAX_RANKS = 18, MANY_RANKS = 1024 };

struct rank {
    struct zr_world w;
    bool forked;
    void *arg;
    /* error of this rank; "" if all is well */
    char wrong[1024];
    /* text for the test to read */
    char note[1024];
    /* code for the test to read */
    int code;
    /* how far this rank is; shared with the test and the other ranks */
    atomic_int stage;
    /* the rank ends by a signal, on purpose */
    bool dies;
    /* (world) all ranks */
    struct rank *all;
};

/* The address at which ranks meet: "127.0.0.1", or "::1" with MEETING=ipv6 in the environment. */
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

/* Runs fn as n ranks. Fails the test if a rank reports an error or ends in another way than it should.
 * before may change each rank first; it may be NULL. Forked ranks require that this process has no other
 * threads. The array is valid until the next call. */
struct rank *run_ranks(bool forked, int n, void (*fn)(struct rank *r), void *arg,
                       void (*before)(struct rank *r));

/* Waits until r's stage is at least stage; the wait is bounded. */
bool wait_stage(struct rank *r, int stage);
/* Sets this rank's stage, and waits until all ranks have reached it. */
bool all_at(struct rank *me, int stage);

void sleep_ms(int ms);

/* Keeps a call's code, and its message in note ("" for 0), for the test to read. */
void note_error(struct rank *me, int code);
/* Fails the test unless r kept this code and a note that contains text. */
void expect_rank(const struct rank *r, int code, const char *text);

/* Random number in [lo, hi]. state is that of random_next. */
int64_t random_in(uint64_t *state, int64_t lo, int64_t hi);
/* Takes the seed from ZERO_TEST_SEED or the clock, and prints it so that a failure can be repeated. */
uint64_t fresh_seed(const char *what);

#endif
