/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_fixture.h: fixtures with NCCL over the stand-ins. Each rank is a thread with its own device. */
#ifndef ZR_TEST_COMM_NCCL_FIXTURE_H
#define ZR_TEST_COMM_NCCL_FIXTURE_H

#include "comm/nccl/nccl_options.h"
#include "test/comm/comm_fixture.h"

/* Sizes of buffers for slices: small enough that most operations take several rounds. */
enum { NCCL_SLICE_BYTES = 4096, NCCL_PACKED_BYTES = 2048, NCCL_SMALL_BYTES = 1024 };

extern const struct fixture_kind fixture_nccl, fixture_nccl_fixed;

/* Options of both fixtures. A test changes a copy. */
struct zr_nccl_options nccl_fixture_options(bool deterministic, int64_t timeout_ms);
void nccl_fixture_ask(const struct fixture *o, struct zr_role_ask ask[ZR_ROLES]);
/* Opens a gather and a reduce communicator of the fixture's group. */
int nccl_fixture_open(struct fixture *o, const struct zr_nccl_options *opt,
                      const struct zr_role_ask ask[ZR_ROLES]);

#endif
