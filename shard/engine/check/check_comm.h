/* SPDX-License-Identifier: Apache-2.0 */
/* check_comm.h: a communicator that tells a check (kernels/check/check_device.h) what each collective reads
 * and writes of this rank's arena, by this rank and by the others, and passes it on to another communicator.
 */
#ifndef ZR_SHARD_CHECK_COMM_H
#define ZR_SHARD_CHECK_COMM_H

#include "comm/comm.h"
#include "kernels/check/check_device.h"

/* inner was opened on the device beneath the check's; it is taken over, and closed with *out, or by this call
 * when it fails. Its streams are the check's. Reports name the arena as the role. */
int zr_check_comm_open(struct zr_check *check, struct zr_comm *inner, struct zr_comm **out);

#endif
