/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_stub.c: the CUDA device of a library that is built without the CUDA toolkit. Opening it fails.
 * kernels/meson.build defines ZR_NO_CUDA, a string with the reason. */
#include "kernels/device.h"

int zr_cuda_device_open(int ordinal, struct zr_device **out)
{
    (void)ordinal;
    *out = NULL;
    return zr_fail(ZERO_ERR_NOTSUP,
                   "no usable GPU: this library was built without CUDA: %s; "
                   "-Dcuda=enabled builds it in",
                   ZR_NO_CUDA);
}
