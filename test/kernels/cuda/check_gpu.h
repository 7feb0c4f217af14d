/* SPDX-License-Identifier: Apache-2.0 */
/* check_gpu.h: a GPU's kernels behind the host's table, so that the programs check_*.c check them too. */
#ifndef ZR_TEST_KERNELS_CHECK_GPU_H
#define ZR_TEST_KERNELS_CHECK_GPU_H

#include "kernels/device.h"

/* The table of GPU 0, or NULL, with zr_error_text(), where there is no usable one. Each call copies its
 * operands to device memory at the same place within 256 bytes, runs, copies them back, and ends the program
 * with a message if the device fails or a byte beside them has changed. */
const struct zr_host_kernels *zr_check_gpu_open(void);
void zr_check_gpu_close(void);

#endif
