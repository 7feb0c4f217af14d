/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_backend.c: the row for NCCL in the table of backends. It is compiled with or without NCCL. */
#include "comm/nccl/nccl_options.h"

static int nccl_open_roles(struct zr_rendezvous *rdv, struct zr_device *dev,
                           const struct zr_backend_config *config, const struct zr_role_ask ask[ZR_ROLES],
                           struct zr_comm *comm[ZR_ROLES])
{
    const struct zr_nccl_options opt = {.timeout_ms = config->timeout_ms,
                                        .start_timeout_ms = config->start_timeout_ms,
                                        .deterministic = config->deterministic,
                                        .small_bytes = ZR_NCCL_SMALL_BYTES,
                                        .ragged = config->ragged,
                                        .copy_engine = config->copy_engine,
                                        .user_comm = config->user_comm,
                                        .log = config->log};
    return zr_nccl_open(rdv, dev, &opt, ask, comm);
}

/* Estimate of NCCL's memory. NCCL connects in the first collective that needs it (since 2.22). For each
 * channel and direction it then allocates buffers of three protocols: NCCL_BUFFSIZE (4 MiB), and 512 KiB and
 * 4.7 MiB by the constants of its init.cc. On one NVLink switch it uses at most 32 channels. */
enum { CHANNEL_BYTES = (4 << 20) + (512 << 10) + 4915200, CHANNELS = 32 };

/* costly_tree: with the fixed tree every rank must send each slice to its owner. */
const struct zr_backend zr_backend_nccl = {
    .name = "nccl",
    .device = "cuda",
    .costly_tree = true,
    .small_bytes = ZR_NCCL_SMALL_BYTES,
    .reserve = zr_nccl_role_bytes,
    .open = nccl_open_roles,
    .path = zr_nccl_path,
    .library = "NCCL",
    .library_bytes = (int64_t)CHANNEL_BYTES * CHANNELS,
    .user_comm_name = "nccl_comm",
    .user_comm_world = zr_nccl_user_comm_world,
    .exchange = zr_nccl_exchange,
    .exchanges_in_turn = true,
};
