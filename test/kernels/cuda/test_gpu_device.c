/* SPDX-License-Identifier: Apache-2.0 */
/* test_gpu_device.c: runs the device suite on GPU 0. Skipped without a GPU. */
#include "test/kernels/device_suite.h"

#include <stdio.h>

int main(void)
{
    struct zr_device *dev;
    if (zr_cuda_device_open(0, &dev)) {
        printf("%s\n", zr_error_text());
        return 77;
    }
    int failed = zr_device_suite(dev);
    dev->ops->close(dev);
    return failed;
}
