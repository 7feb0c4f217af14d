/* SPDX-License-Identifier: Apache-2.0 */
/* host_kernels.h: the tables of host kernels, one per instruction set. host_kernels.c selects among them.
 *
 * A kernel is written once, in body_*.h, with the few vector functions of a vec_*.h. host_portable.c,
 * host_avx2.c and host_avx512.c compile these bodies, each with different compiler flags. */
#ifndef ZR_KERNELS_HOST_KERNELS_H
#define ZR_KERNELS_HOST_KERNELS_H

#include "kernels/device.h"
#include "kernels/exact_sum.h"
#include "kernels/host_device_code.h"
#include "kernels/raw_bits.h"

extern const struct zr_host_kernels zr_host_portable;
extern const struct zr_host_kernels zr_host_avx2;
extern const struct zr_host_kernels zr_host_avx512;

/* Returns the table of that name ("portable", "avx2", "avx512"), or NULL if there is none here. */
const struct zr_host_kernels *zr_host_kernels_named(const char *name);

/* The members of a struct zr_host_kernels: the functions of body_elements.h and body_update.h. */
#define ZR_HOST_KERNEL_MEMBERS                                                                               \
    .zero = host_zero, .copy = host_copy, .cast = host_cast, .sum_tree = host_sum_tree, .add = host_add,     \
    .sum_squares = host_sum_squares, .maximum = host_maximum, .digest = host_digest, .scale = host_scale,    \
    .update = host_update, .add_rounded = host_add_rounded, .encode = host_encode, .decode = host_decode

#endif
