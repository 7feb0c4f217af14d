/* backend.h: what communicators are opened with, whatever moves their bytes. */
#ifndef ZR_COMM_BACKEND_H
#define ZR_COMM_BACKEND_H

#include "comm/comm.h"

/* What the communicator of a role is opened for: all ranks of the world have the same numbers. */
struct zr_role_ask {
    /* whose ranks it joins; NULL: nobody has the role */
    const struct zr_group *group;
    /* of the largest slice that it reduces; less than there are makes reducing take more rounds */
    int64_t largest_bytes;
    /* The most that one call has to pack, one rank's slices, each rounded up to 128: small slices, and those
     * of segments whose last ones are short. Less than there are makes it take more rounds. */
    int64_t packed_bytes;
};

static inline bool zr_role_reduces(enum zr_role r)
{
    return r == ZR_ROLE_REDUCE || r == ZR_ROLE_REDUCE_OUTER;
}

#endif
