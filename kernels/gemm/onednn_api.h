/* SPDX-License-Identifier: Apache-2.0 */
/* onednn_api.h: the few calls of oneDNN whose C interface changed between 2.6 and 3.x, under one name each.
 *
 * Version 2.x keeps memory descriptors by value, and makes a primitive descriptor from an operation
 * descriptor. Version 3.x has handles to both, and no operation descriptors. */
#ifndef ZR_KERNELS_ONEDNN_API_H
#define ZR_KERNELS_ONEDNN_API_H

#include <oneapi/dnnl/dnnl.h>
#include <oneapi/dnnl/dnnl_version.h>

#include <stdbool.h>
#include <stddef.h>

#if DNNL_VERSION_MAJOR >= 3
/* NULL: there is none. */
typedef dnnl_memory_desc_t onednn_desc;
typedef const_dnnl_memory_desc_t onednn_desc_ref;
#else
/* ndims 0: there is none. */
typedef dnnl_memory_desc_t onednn_desc;
typedef const dnnl_memory_desc_t *onednn_desc_ref;
#endif

static inline onednn_desc_ref onednn_desc_get(const onednn_desc *d)
{
#if DNNL_VERSION_MAJOR >= 3
    return *d;
#else
    return d;
#endif
}

/* The caller zeroes *d first, and after success frees it with onednn_desc_free. */
static inline dnnl_status_t onednn_desc_make(onednn_desc *d, int n_dims, const dnnl_dims_t dims,
                                             dnnl_data_type_t type, const dnnl_dims_t strides)
{
#if DNNL_VERSION_MAJOR >= 3
    return dnnl_memory_desc_create_with_strides(d, n_dims, dims, type, strides);
#else
    return dnnl_memory_desc_init_by_strides(d, n_dims, dims, type, strides);
#endif
}

static inline void onednn_desc_free(onednn_desc *d)
{
#if DNNL_VERSION_MAJOR >= 3
    if (*d)
        dnnl_memory_desc_destroy(*d);
#else
    (void)d;
#endif
}

static inline dnnl_status_t onednn_append_sum(dnnl_post_ops_t ops, dnnl_data_type_t type)
{
#if DNNL_VERSION_MAJOR >= 3
    return dnnl_post_ops_append_sum(ops, 1.0f, 0, type);
#else
    (void)type;
    return dnnl_post_ops_append_sum(ops, 1.0f);
#endif
}

/* dst = src * weights + bias, followed by attr's post-operations. A zeroed bias means none. */
static inline dnnl_status_t onednn_matmul_desc(dnnl_primitive_desc_t *out, dnnl_engine_t engine,
                                               const onednn_desc *src, const onednn_desc *weights,
                                               const onednn_desc *bias, const onednn_desc *dst,
                                               dnnl_primitive_attr_t attr)
{
#if DNNL_VERSION_MAJOR >= 3
    return dnnl_matmul_primitive_desc_create(out, engine, *src, *weights, *bias, *dst, attr);
#else
    dnnl_matmul_desc_t op;
    dnnl_status_t status = dnnl_matmul_desc_init(&op, src, weights, bias->ndims ? bias : NULL, dst);
    return status == dnnl_success ? dnnl_primitive_desc_create(out, &op, attr, engine, NULL) : status;
#endif
}

#endif
