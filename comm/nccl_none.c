/* nccl_none.c: stands where NCCL's headers were not found when this was built. */
#include "comm/comm.h"

int zr_nccl_open(struct zr_rendezvous *rdv, struct zr_device *dev, const struct zr_nccl_options *opt,
                 struct zr_comm **gather, struct zr_comm **reduce)
{
    (void)rdv, (void)dev, (void)opt;
    *gather = *reduce = NULL;
    return zr_fail(ZR_ERR_NOTSUP, "nccl: this libzero was built without NCCL");
}

const char *zr_nccl_path(const struct zr_comm *c)
{
    return c->ops->name;
}
