/* SPDX-License-Identifier: Apache-2.0 */
/* host_portable.c: the CPU kernels in plain C, for every CPU. The other tables must give the same bits. */
#include "kernels/host/host_kernels.h"
#include "kernels/host/vec_portable.h"

#include "kernels/host/body_codes.h"
#include "kernels/host/body_elements.h"
#include "kernels/host/body_update.h"

const struct zr_host_kernels zr_host_portable = {.name = "portable", ZR_HOST_KERNEL_MEMBERS};
