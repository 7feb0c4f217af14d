/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_custom.h: fixtures with NCCL communicators whose options a test chooses, and the set-up and checks
 * around each test over the stand-ins. */
#ifndef ZR_TEST_COMM_NCCL_CUSTOM_H
#define ZR_TEST_COMM_NCCL_CUSTOM_H

#include "test/comm/nccl/nccl_fixture.h"

#include <pthread.h>

enum { LONG_MS = 60000, SHORT_MS = 800, ARENA_BYTES = 1 << 16 };

/* Number of misuses that the running test makes on purpose; -1: any number. */
extern int expected_misuse;

/* Run before and after each test. They set up the devices, and check that everything was released and that
 * misuses are as expected. */
int nccl_test_start(void **state);
int nccl_test_finish(void **state);

extern struct nccl_custom {
    bool deterministic, copy_engine;
    int64_t timeout_ms;
    void (*change)(struct zr_nccl_options *opt, int rank);
    /* the rank that asks for a smaller reduce buffer; -1: none */
    int odd_rank;
    pthread_mutex_t lock;
    /* writes into log */
    struct zr_log *to_log;
    char log[8192];
} custom;

/* The first release in which no known fault forbids symmetric windows and copy engines. */
enum { NCCL_SOUND = 23102 };

/* Sets the options of the next fixtures, and resets change, copy_engine and the log. */
void customize(bool deterministic, int64_t timeout_ms);
/* A value of custom.change: opening may take LONG_MS, however short timeout_ms is. */
void wait_long_to_start(struct zr_nccl_options *opt, int rank);
/* Bytes of communicator i's arena that it keeps for itself. */
int64_t custom_reserve(int world, int i);
extern const struct fixture_kind fixture_custom;

#endif
