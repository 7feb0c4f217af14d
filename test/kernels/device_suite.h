/* SPDX-License-Identifier: Apache-2.0 */
/* device_suite.h: the tests that every device must pass. They need only a struct zr_device.
 *
 * A test program opens its device and runs the suite on it. test_host_device.c does so for the host. */
#ifndef ZR_TEST_KERNELS_DEVICE_SUITE_H
#define ZR_TEST_KERNELS_DEVICE_SUITE_H

#include "kernels/device.h"

/* Runs the suite and returns the number of failed tests. Prints the seed of its random delays and inputs. */
int zr_device_suite(struct zr_device *dev);

#endif
