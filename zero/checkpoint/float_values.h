/* SPDX-License-Identifier: Apache-2.0 */
/* float_values.h: floating-point values in files of other programs. Converts them to the model's dtypes, and
 * searches them for NaN and infinity. */
#ifndef ZR_ZERO_FLOAT_VALUES_H
#define ZR_ZERO_FLOAT_VALUES_H

#include "kernels/device.h"

/* Whether values of the safetensors dtype `from` can become values of `to`: F32, BF16 and F16 become F32 or
 * BF16. */
bool zr_floats_convert(const char *from, enum zero_dtype to);
/* Sets dst[i] to src[i]. To F32 this is exact; to BF16 it rounds once, to nearest even. A NaN stays a NaN.
 * dst and src may overlap in two cases. Either dst begins at src and its elements are not larger, or both end
 * together and its elements are not smaller. */
void zr_floats_copy(void *dst, enum zero_dtype to, const void *src, const char *from, int64_t n);
/* Rounds n values of F32 or BF16 to `held`, which is F32 or BF16 too. Returns the index of the first that is
 * then NaN or infinite, or -1. value: NULL, or set to the rounded value. */
int64_t zr_find_non_finite(const void *values, enum zero_dtype dtype, enum zero_dtype held, int64_t n,
                           float *value);

#endif
