/* SPDX-License-Identifier: Apache-2.0 */
/* test_no_gpu.c: tests that the CUDA device, or its stub, gives one line of explanation on a machine
 * without a usable GPU. */
#include "kernels/device.h"
#include "test/cmocka.h"

#include <stdio.h>
#include <string.h>

static void test_refused(void **state)
{
    struct zr_device *dev = (struct zr_device *)&state;
    int err = zr_cuda_device_open(0, &dev);
    if (!err) {
        dev->ops->close(dev);
        skip(); /* a GPU is present */
    }
    printf("%s\n", zr_error_text());
    assert_int_equal(err, ZERO_ERR_NOTSUP);
    assert_null(dev);
    assert_non_null(strstr(zr_error_text(), "no usable GPU"));
    assert_null(strchr(zr_error_text(), '\n'));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
