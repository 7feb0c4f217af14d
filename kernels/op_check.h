/* SPDX-License-Identifier: Apache-2.0 */
/* op_check.h: checks the arguments of a device's operations before anything is put on a stream. */
#ifndef ZR_KERNELS_OP_CHECK_H
#define ZR_KERNELS_OP_CHECK_H

#include "kernels/device.h"

/* Each check returns 0, ZERO_ERR_ARG or ZERO_ERR_NOTSUP. The message names the operation, the value and what
 * is allowed. */
int zr_check_dtype(const char *op, enum zero_dtype t);
int zr_check_count(const char *op, const char *what, int64_t n);
int zr_check_call(size_t arg_bytes);
int zr_check_put(int64_t bytes);
int zr_check_copy_rows(const struct zr_copy_rows *table, int n);
int zr_check_cast(enum zero_dtype dst, enum zero_dtype src, int64_t n);
/* For operations on several sources. */
int zr_check_sources(const char *op, int n_src, enum zero_dtype src, int64_t n);
int zr_check_sum_ranges(const struct zr_sum_range *table, int n_sums, int n_src, enum zero_dtype src);
int zr_check_update(const struct zr_update *u);
int zr_check_update_spans(const struct zr_update *u, const struct zr_update_span *spans, int n_spans);
int zr_check_coded(const char *op, const struct zr_coded *c, int64_t n);
/* Returns the bytes of one element in zr_coded.at. */
int64_t zr_coding_bytes(enum zr_coding coding);
/* Returns the bytes in zr_coded.beside for n elements. */
int64_t zr_coding_bytes_beside(enum zr_coding coding, int64_t n);
/* Returns the bytes of one element of a state, without scales. */
static inline int64_t zr_moments_bytes(enum zero_moments moments)
{
    return moments == ZERO_MOMENTS_F32 ? 4 : moments == ZERO_MOMENTS_BF16 ? 2 : 1;
}
/* Moves the pointers of an update forward by some elements, a multiple of ZR_Q8_BLOCK if there are scales. */
void zr_update_advance(struct zr_update *u, int64_t by);
/* Returns the span as a separate update. */
struct zr_update zr_update_of_span(const struct zr_update *u, const struct zr_update_span *span);
int zr_check_agree_begin(const struct zr_agree_begin *b);
int zr_check_agree_end(const struct zr_agree_end *e);

#endif
