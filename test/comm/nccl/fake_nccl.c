/* SPDX-License-Identifier: Apache-2.0 */
/* fake_nccl.c: a library that looks like NCCL to code that searches for it and asks for a communicator's
 * ranks. It is written without NCCL's header: only names count. */
#ifndef FAKE_VERSION
#define FAKE_VERSION 22809
#endif

#define FUNCTION(name, ...)                                                                                  \
    __attribute__((visibility("default"))) int nccl##name(__VA_ARGS__);                                      \
    int nccl##name(__VA_ARGS__)

FUNCTION(GetVersion, int *version)
{
    *version = FAKE_VERSION;
    return 0;
}

FUNCTION(CommGetAsyncError, void *comm, int *error)
{
    (void)comm;
    *error = 0;
    return 0;
}

FUNCTION(CommCount, void *comm, int *count)
{
    (void)comm;
    *count = 5;
    return 0;
}

FUNCTION(CommUserRank, void *comm, int *rank)
{
    (void)comm;
    *rank = 3;
    return 0;
}

/* A function that must exist and is never called. It returns an internal error. */
#define UNUSED(name)                                                                                         \
    FUNCTION(name, void)                                                                                     \
    {                                                                                                        \
        return 3;                                                                                            \
    }
UNUSED(GetUniqueId)
UNUSED(GetErrorString)
UNUSED(GetLastError)
#if FAKE_VERSION >= 21400 /* the first version that has it */
UNUSED(CommInitRankConfig)
#endif
UNUSED(CommDestroy)
UNUSED(CommAbort)
UNUSED(GroupStart)
UNUSED(GroupEnd)
UNUSED(AllGather)
UNUSED(ReduceScatter)
UNUSED(Reduce)
UNUSED(Broadcast)
UNUSED(AllReduce)
UNUSED(Send)
UNUSED(Recv)
