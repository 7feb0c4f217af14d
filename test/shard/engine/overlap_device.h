/* SPDX-License-Identifier: Apache-2.0 */
/* overlap_device.h: a device and a communicator that only keep time.
 *
 * Each stream has a clock; an operation advances it by its cost, an event carries the time of its record, and
 * a wait takes the later of the two. No thread runs and no CPU is used for the fake work, so the timeline of
 * a schedule is exact, whatever the machine does meanwhile. Collectives cost m each, of the gather or reduce
 * kind; compute is whatever the test spends; all else is free. Only what the engine has to read back is
 * really done: host calls and the exchange, as if all ranks were alike. */
#ifndef ZR_TEST_OVERLAP_DEVICE_H
#define ZR_TEST_OVERLAP_DEVICE_H

#include "comm/comm.h"

struct zr_device *overlap_device_open(void);
/* The same, of which the model computes on the calling thread: an event has come when the model's stream is
 * past it, so where it has not, a wait of that stream is a wait of the thread. */
struct zr_device *overlap_device_open_on_caller(void);
/* How often the model's stream waited for what was still to come. */
int64_t overlap_device_n_waited(const struct zr_device *dev);

/* The clock of a stream; spend advances it. */
int64_t overlap_now(const struct zr_stream *s);
void overlap_spend(struct zr_stream *s, int64_t ns);

/* A communicator of `world` ranks, of which this is rank 0, on which every gather and every reduce takes
 * cost_ns. */
struct zr_comm *overlap_comm_open(struct zr_device *dev, int world, int64_t cost_ns);
/* How often its status was asked for. */
int64_t overlap_comm_n_asked(const struct zr_comm *c);
/* As if a failure had been found somewhere. */
void overlap_comm_alarm(struct zr_comm *c);

#endif
