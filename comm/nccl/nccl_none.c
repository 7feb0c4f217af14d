/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_none.c: replaces the NCCL backend in builds without NCCL's headers. Every call returns
 * ZERO_ERR_NOTSUP. */
#include "comm/nccl/nccl_options.h"

#include <string.h>

int zr_nccl_open(struct zr_rendezvous *rdv, struct zr_device *dev, const struct zr_nccl_options *opt,
                 const struct zr_role_ask ask[ZR_ROLES], struct zr_comm *comm[ZR_ROLES])
{
    (void)rdv, (void)dev, (void)opt, (void)ask;
    memset(comm, 0, ZR_ROLES * sizeof *comm);
    return zr_fail(ZERO_ERR_NOTSUP, "nccl: this libzero was built without NCCL: %s", ZR_NO_NCCL);
}

int zr_nccl_user_comm_world(void *user_comm, int64_t timeout_ms, int *rank, int *world)
{
    (void)user_comm, (void)timeout_ms, (void)rank, (void)world;
    return zr_fail(ZERO_ERR_NOTSUP, "nccl_comm is set, but this libzero was built without NCCL: %s",
                   ZR_NO_NCCL);
}

int zr_nccl_exchange(struct zr_user_comm *c, const void *mine, void *all, size_t bytes)
{
    (void)c, (void)mine, (void)all, (void)bytes;
    return zr_nccl_user_comm_world(NULL, 0, NULL, NULL);
}

const char *zr_nccl_path(const struct zr_comm *c)
{
    return c->ops->name;
}
