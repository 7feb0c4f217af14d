/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_linked.c: replaces comm/nccl/nccl_library.c where the stand-in is linked. It fills the same table
 * with what a library of the chosen version has. */
#include "comm/nccl/nccl_comm.h"
#include "test/stand_in/nccl_stand_in.h"

#include <string.h>

int zr_nccl_load(const char *library, bool user_comm, struct zr_nccl_api *api)
{
    (void)user_comm;
    *api = (struct zr_nccl_api){0};
    if (library)
        return zr_fail(ZERO_ERR_NOTSUP, "there is no NCCL: %s", library);
    int version = nccl_stand_in_the_machine()->version;
#define X(name) api->name = nccl##name;
    ZR_NCCL_NEEDED(X)
    ZR_NCCL_OPTIONAL(X)
    ZR_NCCL_BY_NAME(X)
#undef X
    if (version < 21800)
        api->CommSplit = NULL;
    if (version < 22907)
        api->CommMemStats = NULL;
    if (version < 22807)
        api->CommRevoke = NULL;
    if (version < 22300)
        api->CommInitRankScalable = NULL;
    if (version < 21900)
        api->MemAlloc = NULL, api->MemFree = NULL;
#if ZR_NCCL_WINDOWS
    if (version < 22700)
        api->CommWindowRegister = NULL, api->CommWindowDeregister = NULL;
#endif
    api->GetVersion(&api->version);
    strcpy(api->path, "the stand-in");
    return 0;
}
