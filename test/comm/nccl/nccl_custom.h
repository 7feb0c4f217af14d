/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_custom.h: fixtures with NCCL's communicators and options of the test's, and what surrounds each test
 * over the stand-ins. */
#ifndef ZR_TEST_COMM_NCCL_CUSTOM_H
#define ZR_TEST_COMM_NCCL_CUSTOM_H

#include "test/comm/nccl/nccl_fixture.h"

#include <pthread.h>

enum { LONG_MS = 60000, SHORT_MS = 800, ARENA_BYTES = 1 << 16 };

/* Misuses that the test that runs makes on purpose; -1: any number. */
extern int expected_misuse;

/* Before and after each test: the machine's devices; all is let go, and what was misused is as expected. */
int nccl_test_start(void **state);
int nccl_test_finish(void **state);

extern struct nccl_custom {
    bool deterministic, copy_engine;
    int64_t timeout_ms;
    void (*change)(struct zr_nccl_options *opt, int rank);
    /* the rank that asks for less to reduce with; -1: none does */
    int odd_rank;
    pthread_mutex_t lock;
    /* what log receives */
    struct zr_log *to_log;
    char log[8192];
} custom;

/* The release from which on nothing that is known forbids windows and copy engines. */
enum { NCCL_SOUND = 23102 };

/* The next fixtures' options; change, copy_engine and the log begin anew. */
void customize(bool deterministic, int64_t timeout_ms);
/* Of communicator i's arena. */
int64_t custom_reserve(int world, int i);
extern const struct fixture_kind fixture_custom;

#endif
