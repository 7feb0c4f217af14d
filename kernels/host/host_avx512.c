/* SPDX-License-Identifier: Apache-2.0 */
/* host_avx512.c: the CPU kernels for AVX-512. */
#include "kernels/host/host_kernels.h"
#include "kernels/host/vec_avx512.h"

#include "kernels/host/body_codes.h"
#include "kernels/host/body_elements.h"
#include "kernels/host/body_update.h"

const struct zr_host_kernels zr_host_avx512 = {.name = "avx512", ZR_HOST_KERNEL_MEMBERS};
