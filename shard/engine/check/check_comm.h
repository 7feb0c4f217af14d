/* SPDX-License-Identifier: Apache-2.0 */
/* check_comm.h: reports to a check (kernels/check/check_device.h) what each collective of a communicator
 * reads and writes in this rank's arena, by this rank and by the others. */
#ifndef ZR_SHARD_CHECK_COMM_H
#define ZR_SHARD_CHECK_COMM_H

#include "comm/comm.h"
#include "kernels/check/check_device.h"

/* Watches c, which was opened on the device beneath the check's. From then on c takes streams of the check.
 * Reports name the arena after the role. The watch ends when c is closed. Returns 0 or ZERO_ERR_NOMEM. */
int zr_check_comm_watch(struct zr_check *check, struct zr_comm *c);

#endif
