/* SPDX-License-Identifier: Apache-2.0 */
/* overlap_device.h: a device and a communicator that only keep time.
 *
 * Each stream has a clock. An operation advances it by its cost, an event carries the time of its record,
 * and a wait takes the later of the two times. The fake work uses no thread and no CPU, so the timeline of
 * a schedule is exact on a busy machine too.
 *
 * A collective costs m if it is a gather or a reduce, compute costs what the test spends, and everything
 * else is free. Only results that the engine reads are really computed: host calls, and exchanges in which
 * all ranks contribute the same. */
#ifndef ZR_TEST_OVERLAP_DEVICE_H
#define ZR_TEST_OVERLAP_DEVICE_H

#include "comm/comm.h"

struct zr_device *overlap_device_open(void);
/* Opens the same device with the model's compute on the calling thread. An event is done when the model's
 * stream has passed its time. A wait of that stream for a later event blocks the thread. */
struct zr_device *overlap_device_open_on_caller(void);
/* Returns how often the model's stream waited for an event that was not done. */
int64_t overlap_device_n_waited(const struct zr_device *dev);

/* overlap_now returns the clock of a stream; overlap_spend advances it. */
int64_t overlap_now(const struct zr_stream *s);
void overlap_spend(struct zr_stream *s, int64_t ns);

/* Opens rank 0 of a communicator of `world` ranks, on which each gather and each reduce takes cost_ns. */
struct zr_comm *overlap_comm_open(struct zr_device *dev, int world, int64_t cost_ns);
/* Returns how often its status was requested. */
int64_t overlap_comm_n_asked(const struct zr_comm *c);
/* Raises the alarm, as a failure on any rank does. */
void overlap_comm_alarm(struct zr_comm *c);

#endif
