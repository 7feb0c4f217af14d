/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_fixture.c: opens the fixtures of nccl_fixture.h. */
#include "test/comm/nccl/nccl_fixture.h"

#include <string.h>

static int open_device(const struct zr_world *w, struct zr_device **out)
{
    return zr_cuda_device_open(w->local_rank, out);
}

static int64_t reserve(int world, int i, bool deterministic)
{
    return i == 1 ? zr_nccl_reserve_bytes(world, deterministic, NCCL_SLICE_BYTES, NCCL_PACKED_BYTES)
                  : zr_nccl_room_bytes(world, NCCL_PACKED_BYTES);
}

static int64_t reserve_fast(int world, int i)
{
    return reserve(world, i, false);
}

static int64_t reserve_fixed(int world, int i)
{
    return reserve(world, i, true);
}

struct zr_nccl_options nccl_fixture_options(bool deterministic, int64_t timeout_ms)
{
    return (struct zr_nccl_options){
        .timeout_ms = timeout_ms, .deterministic = deterministic, .small_bytes = NCCL_SMALL_BYTES};
}

void nccl_fixture_ask(const struct fixture *o, struct zr_role_ask ask[ZR_ROLES])
{
    memset(ask, 0, ZR_ROLES * sizeof *ask);
    for (int r = ZR_ROLE_GATHER; r <= ZR_ROLE_REDUCE; r++)
        ask[r] = (struct zr_role_ask){&o->group, NCCL_SLICE_BYTES, NCCL_PACKED_BYTES};
}

int nccl_fixture_open(struct fixture *o, const struct zr_nccl_options *opt,
                      const struct zr_role_ask ask[ZR_ROLES])
{
    struct zr_comm *comm[ZR_ROLES];
    int err = zr_nccl_open(o->rdv, o->dev, opt, ask, comm);
    memcpy(o->comm, comm, sizeof o->comm);
    return err;
}

static int open_comms(struct fixture *o, int64_t timeout_ms, bool deterministic)
{
    struct zr_nccl_options opt = nccl_fixture_options(deterministic, timeout_ms);
    struct zr_role_ask ask[ZR_ROLES];
    nccl_fixture_ask(o, ask);
    return nccl_fixture_open(o, &opt, ask);
}

static int open_fast(struct fixture *o, int n, int64_t timeout_ms)
{
    (void)n; /* always a pair */
    return open_comms(o, timeout_ms, false);
}

static int open_fixed(struct fixture *o, int n, int64_t timeout_ms)
{
    (void)n;
    return open_comms(o, timeout_ms, true);
}

const struct fixture_kind fixture_nccl = {.open_device = open_device,
                                          .open_comms = open_fast,
                                          .reserve_bytes = reserve_fast,
                                          .same_order = true,
                                          .gather_packs = NCCL_SMALL_BYTES,
                                          .reduce_packs = NCCL_SMALL_BYTES,
                                          .one_reduces = true};
const struct fixture_kind fixture_nccl_fixed = {.open_device = open_device,
                                                .open_comms = open_fixed,
                                                .reserve_bytes = reserve_fixed,
                                                .exact = true,
                                                .same_order = true,
                                                .gather_packs = NCCL_SMALL_BYTES,
                                                .one_reduces = true};
