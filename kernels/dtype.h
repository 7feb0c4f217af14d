/* SPDX-License-Identifier: Apache-2.0 */
/* dtype.h: the element types, in the only table of their names and sizes. */
#ifndef ZR_KERNELS_DTYPE_H
#define ZR_KERNELS_DTYPE_H

#include "kernels/asserts.h"

#include <stdint.h>

/* X(NAME, value, bytes, name). NAME is also the type's name in the safetensors format, and the values are
 * those of zero.h. Integers are moved, never computed with. */
#define ZR_DTYPES(X)                                                                                         \
    X(F32, 1, 4, "f32")                                                                                      \
    X(BF16, 2, 2, "bf16")                                                                                    \
    X(F16, 3, 2, "f16")                                                                                      \
    X(I32, 4, 4, "i32")                                                                                      \
    X(I64, 5, 8, "i64")

enum zr_dtype {
#define X(NAME, value, bytes, name) ZR_##NAME = value,
    ZR_DTYPES(X)
#undef X
};

/* Returns the bytes of an element, or 0 if t is no dtype. */
static inline int64_t zr_dtype_bytes(enum zr_dtype t)
{
    switch (t) {
#define X(NAME, value, bytes, name)                                                                          \
    case ZR_##NAME:                                                                                          \
        return bytes;
        ZR_DTYPES(X)
#undef X
    }
    ZR_ASSERT(!"a dtype");
    return 0;
}

/* Returns a name such as "f32", or "unknown" if t is no dtype. */
static inline const char *zr_dtype_name(enum zr_dtype t)
{
    switch (t) {
#define X(NAME, value, bytes, name)                                                                          \
    case ZR_##NAME:                                                                                          \
        return name;
        ZR_DTYPES(X)
#undef X
    }
    return "unknown";
}

#endif
