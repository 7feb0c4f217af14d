/* nccl_fixture.h: fixtures with NCCL over the stand-ins, each rank a thread with a device of its own. */
#ifndef ZR_TEST_COMM_NCCL_FIXTURE_H
#define ZR_TEST_COMM_NCCL_FIXTURE_H

#include "test/comm/comm_fixture.h"

/* Room for slices of these sizes: little enough that most take several rounds. */
enum { NCCL_SLICE_BYTES = 4096, NCCL_PACKED_BYTES = 2048, NCCL_SMALL_BYTES = 1024 };

extern const struct fixture_kind fixture_nccl, fixture_nccl_fixed;

/* What both use; tests change a copy. */
struct zr_nccl_options nccl_fixture_options(int world, bool deterministic, int64_t timeout_ms);

#endif
