/* SPDX-License-Identifier: Apache-2.0 */
/* check_comm.h: tells a check (kernels/check/check_device.h) what each collective of a communicator reads and
 * writes of this rank's arena, by this rank and by the others. */
#ifndef ZR_SHARD_CHECK_COMM_H
#define ZR_SHARD_CHECK_COMM_H

#include "comm/comm.h"
#include "kernels/check/check_device.h"

/* c was opened on the device beneath the check's. From then on it takes streams of the check's. Reports name
 * the arena as the role. Ends when c is closed. ZR_ERR_NOMEM. */
int zr_check_comm_watch(struct zr_check *check, struct zr_comm *c);

#endif
