/* SPDX-License-Identifier: Apache-2.0 */
/* device_suite_parts.h: declarations that the files of the device suite share. */
#ifndef ZR_TEST_DEVICE_SUITE_PARTS_H
#define ZR_TEST_DEVICE_SUITE_PARTS_H

#include "test/kernels/device_suite.h"
#include "test/kernels/random.h"

extern struct random_source suite_rng;

/* Opens a stream of the device, which the test has to close. */
struct zr_stream *suite_stream(struct zr_device *dev, enum zr_stream_kind kind);

/* Each function runs a group of tests and returns how many failed. */
int suite_of_streams(struct zr_device *dev);
int suite_of_work(struct zr_device *dev);
int suite_of_agreement(struct zr_device *dev);

#endif
