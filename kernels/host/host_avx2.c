/* SPDX-License-Identifier: Apache-2.0 */
/* host_avx2.c: the CPU kernels for AVX2. */
#include "kernels/host/host_kernels.h"
#include "kernels/host/vec_avx2.h"

#include "kernels/host/body_codes.h"
#include "kernels/host/body_elements.h"
#include "kernels/host/body_update.h"

const struct zr_host_kernels zr_host_avx2 = {.name = "avx2", ZR_HOST_KERNEL_MEMBERS};
