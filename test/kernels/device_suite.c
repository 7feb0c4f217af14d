/* SPDX-License-Identifier: Apache-2.0 */
/* device_suite.c: the conformance suite of a device: the order that its streams promise, and each kind of
 * work. */
#include "test/cmocka.h"
#include "test/kernels/device_suite_parts.h"

/* Sanitizers end the program at an impossible allocation unless told to return NULL, which the suite asks
 * for. */
const char *__asan_default_options(void);
const char *__tsan_default_options(void);

const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1";
}

const char *__tsan_default_options(void)
{
    return "allocator_may_return_null=1";
}

struct random_source suite_rng;

struct zr_stream *suite_stream(struct zr_device *dev, enum zr_stream_kind kind)
{
    struct zr_stream *s;
    assert_int_equal(dev->ops->stream_open(dev, kind, "suite", NULL, &s), 0);
    assert_non_null(s);
    return s;
}

int zr_device_suite(struct zr_device *dev)
{
    suite_rng = random_open();
    return suite_of_streams(dev) + suite_of_work(dev) + suite_of_agreement(dev);
}
