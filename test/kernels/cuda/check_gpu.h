/* SPDX-License-Identifier: Apache-2.0 */
/* check_gpu.h: a GPU's kernels with the signatures of the host's table, so that the programs check_*.c
 * check them too. */
#ifndef ZR_TEST_KERNELS_CHECK_GPU_H
#define ZR_TEST_KERNELS_CHECK_GPU_H

#include "kernels/device.h"

/* Returns the table of GPU 0, or NULL with zr_error_text() if there is no usable GPU. Each call copies its
 * operands to device memory with the same alignment within 256 bytes, runs, and copies them back. It ends
 * the program with a message if the device fails or a byte around the operands has changed. */
const struct zr_host_kernels *zr_check_gpu_open(void);
void zr_check_gpu_close(void);

#endif
