/* SPDX-License-Identifier: Apache-2.0 */
/* device_suite_parts.h: what the files of the devices' suite share. */
#ifndef ZR_TEST_DEVICE_SUITE_PARTS_H
#define ZR_TEST_DEVICE_SUITE_PARTS_H

#include "test/kernels/device_suite.h"
#include "test/kernels/random.h"

extern struct random_source suite_rng;

/* A stream of the device, for the test to close. */
struct zr_stream *suite_stream(struct zr_device *dev, enum zr_stream_kind kind);

/* Each runs a group of tests and returns how many failed. */
int suite_of_streams(struct zr_device *dev);
int suite_of_work(struct zr_device *dev);
int suite_of_agreement(struct zr_device *dev);

#endif
