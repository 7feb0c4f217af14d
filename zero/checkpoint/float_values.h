/* SPDX-License-Identifier: Apache-2.0 */
/* float_values.h: floating-point values in files of other programs: conversion to the model's dtypes, and
 * the search for NaN and infinity. */
#ifndef ZR_ZERO_FLOAT_VALUES_H
#define ZR_ZERO_FLOAT_VALUES_H

#include "kernels/device.h"

/* Whether values of the safetensors dtype `from` can become values of `to`: F32, BF16 and F16 become F32 or
 * BF16. */
bool zr_floats_convert(const char *from, enum zr_dtype to);
/* dst[i] = src[i]. To F32 this is exact; to BF16 it rounds once, to nearest even. A NaN stays one. dst and
 * src may overlap if dst begins at src and its elements are not larger, or ends where src ends and its
 * elements are not smaller. */
void zr_floats_copy(void *dst, enum zr_dtype to, const void *src, const char *from, int64_t n);
/* Rounds n values of F32 or BF16 to `held`, one of the same, and returns the index of the first that is then
 * NaN or infinite, or -1. value: NULL, or set to the rounded one. */
int64_t zr_find_non_finite(const void *values, enum zr_dtype dtype, enum zr_dtype held, int64_t n,
                           float *value);

#endif
