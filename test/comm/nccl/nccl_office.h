/* nccl_office.h: offices with NCCL over the stand-ins, each rank a thread with a device of its own. */
#ifndef ZR_TEST_COMM_NCCL_OFFICE_H
#define ZR_TEST_COMM_NCCL_OFFICE_H

#include "test/comm/office.h"

/* Room for slices of these sizes: little enough that most take several rounds. */
enum { NCCL_SLICE_BYTES = 4096, NCCL_PACKED_BYTES = 2048, NCCL_SMALL_BYTES = 1024 };

extern const struct office_kind office_nccl, office_nccl_fixed;

/* What both use; tests change a copy. */
struct zr_nccl_options nccl_office_options(int world, bool deterministic, int64_t timeout_ms);

#endif
