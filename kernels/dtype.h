/* SPDX-License-Identifier: Apache-2.0 */
/* dtype.h: names and sizes of the element types (enum zero_dtype). */
#ifndef ZR_KERNELS_DTYPE_H
#define ZR_KERNELS_DTYPE_H

#include "kernels/asserts.h"
#include "zero/types.h"

/* X(NAME, bytes, name). NAME is also the type's name in the safetensors format. Integers are moved, never
 * computed with. */
#define ZR_DTYPES(X)                                                                                         \
    X(F32, 4, "f32")                                                                                         \
    X(BF16, 2, "bf16")                                                                                       \
    X(F16, 2, "f16")                                                                                         \
    X(I32, 4, "i32")                                                                                         \
    X(I64, 8, "i64")

/* Returns the bytes of an element, or 0 if t is no dtype. */
static inline int64_t zr_dtype_bytes(enum zero_dtype t)
{
    switch (t) {
#define X(NAME, bytes, name)                                                                                 \
    case ZERO_##NAME:                                                                                        \
        return bytes;
        ZR_DTYPES(X)
#undef X
    }
    ZR_ASSERT(!"a dtype");
    return 0;
}

/* Returns a name such as "f32", or "unknown" if t is no dtype. */
static inline const char *zr_dtype_name(enum zero_dtype t)
{
    switch (t) {
#define X(NAME, bytes, name)                                                                                 \
    case ZERO_##NAME:                                                                                        \
        return name;
        ZR_DTYPES(X)
#undef X
    }
    return "unknown";
}

#endif
