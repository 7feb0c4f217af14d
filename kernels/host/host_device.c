/* SPDX-License-Identifier: Apache-2.0 */
/* host_device.c: the host as a device: opening, closing and memory. Streams are in host_stream.c, kernels in
 * host_ops.c. */
#include "kernels/host/host_device.h"
#include "kernels/host/host_kernels.h"
#include "kernels/huge_pages.h"
#include "kernels/thread.h"

#include <stdlib.h>
#include <string.h>

enum { PAGE_BYTES = 4096, SPIN_NS = 20000 };

bool zr_host_refuses(struct zr_host_device *dev, int64_t bytes)
{
    if (atomic_load(&dev->fail_in) > 0 && atomic_fetch_sub(&dev->fail_in, 1) == 1)
        return true;
    return dev->options.refuse && dev->options.refuse(dev->options.refuse_arg, bytes);
}

void *zr_host_take(struct zr_host_device *dev, size_t bytes)
{
    return zr_host_refuses(dev, (int64_t)bytes) ? NULL : calloc(1, bytes);
}

static int device_alloc(struct zr_device *base, int64_t bytes, void **out)
{
    struct zr_host_device *dev = (struct zr_host_device *)base;
    *out = NULL;
    if (bytes <= 0)
        return zr_fail(ZERO_ERR_ARG, "device alloc: bytes is %lld, must be above 0", (long long)bytes);
    void *p = NULL;
    if (zr_host_refuses(dev, bytes) || (uint64_t)bytes > SIZE_MAX ||
        posix_memalign(&p, PAGE_BYTES, (size_t)bytes) != 0)
        return zr_fail(ZERO_ERR_NOMEM, "device alloc: the host cannot allocate %lld bytes", (long long)bytes);
    zr_ask_for_huge_pages(p, bytes);
    if (dev->poison)
        memset(p, 0xff, (size_t)bytes);
    *out = p;
    return 0;
}

static void device_free(struct zr_device *dev, void *p, int64_t bytes)
{
    (void)dev, (void)bytes;
    free(p);
}

static int host_alloc(struct zr_device *dev, int64_t bytes, void **out)
{
    ZR_TRY(device_alloc(dev, bytes, out));
    memset(*out, 0, (size_t)bytes);
    return 0;
}

static void *stream_native(struct zr_stream *s)
{
    (void)s;
    return NULL;
}

static void device_close(struct zr_device *base)
{
    struct zr_host_device *dev = (struct zr_host_device *)base;
    for (uint32_t i = 0; i < dev->n_streams; i++)
        zr_host_stream_free(dev->streams[i]);
    pthread_mutex_destroy(&dev->lock);
    free(dev);
}

static const struct zr_device_ops host_ops = {
    .name = "host",
    .compute_on_caller = true,
    .host_memory = true,
    .close = device_close,
    .alloc = device_alloc,
    .free = device_free,
    .host_alloc = host_alloc,
    .host_free = device_free,
    .stream_open = zr_host_stream_open,
    .stream_close = zr_host_stream_close,
    .stream_leave = zr_host_stream_leave,
    .stream_reserve = zr_host_stream_reserve,
    .stream_has_room = zr_host_stream_has_room,
    .stream_sync = zr_host_stream_sync,
    .ask_while_waiting = zr_host_ask_while_waiting,
    .stream_native = stream_native,
    .event_open = zr_host_event_open,
    .event_close = zr_host_event_close,
    .event_record = zr_host_event_record,
    .stream_wait = zr_host_stream_wait,
    .event_sync = zr_host_event_sync,
    .event_query = zr_host_event_query,
    .call = zr_host_call,
    .stamp = zr_host_stamp,
    .zero = zr_host_zero,
    .copy = zr_host_copy,
    .copy_rows = zr_host_copy_rows,
    .put = zr_host_put_value,
    .cast = zr_host_cast,
    .add = zr_host_add,
    .sum_tree = zr_host_sum_tree,
    .sum_ranges = zr_host_sum_ranges,
    .sum_squares = zr_host_sum_squares,
    .maximum = zr_host_maximum,
    .digest = zr_host_digest,
    .scale = zr_host_scale,
    .update = zr_host_update,
    .update_spans = zr_host_update_spans,
    .add_rounded = zr_host_add_rounded,
    .encode = zr_host_encode,
    .decode = zr_host_decode,
    .agree_begin = zr_host_agree_begin,
    .agree_end = zr_host_agree_end,
};

int zr_host_device_open_with(const struct zr_host_options *options, struct zr_device **out)
{
    *out = NULL;
    const char *isa = getenv("ZERO_ISA"), *poison = getenv("ZERO_POISON"), *fail = getenv("ZERO_FAIL_ALLOC");
    if (isa && !zr_host_kernels_named(isa)) {
        return zr_fail(ZERO_ERR_ARG, "ZERO_ISA is \"%s\"; this CPU and build have portable%s%s", isa,
                       zr_host_kernels(ZR_ISA_AVX2) ? ", avx2" : "",
                       zr_host_kernels(ZR_ISA_AVX512) ? ", avx512" : "");
    }
    int64_t fail_in = 0;
    if (fail) {
        char *end;
        fail_in = strtoll(fail, &end, 10);
        if (*end || end == fail || fail_in < 1)
            return zr_fail(ZERO_ERR_ARG, "ZERO_FAIL_ALLOC is \"%s\", must be a number above 0", fail);
    }
    bool refused = fail_in == 1 || (options && options->refuse &&
                                    options->refuse(options->refuse_arg, sizeof(struct zr_host_device)));
    struct zr_host_device *dev = refused ? NULL : calloc(1, sizeof *dev);
    if (!dev)
        return zr_fail(ZERO_ERR_NOMEM, "host device: no memory for a device of %zu bytes", sizeof *dev);
    dev->base.ops = &host_ops;
    dev->kernels = zr_host_kernels_best();
    if (options)
        dev->options = *options;
    dev->poison = poison && strcmp(poison, "1") == 0;
    dev->spin_ns = dev->options.spin_ns ? dev->options.spin_ns : zr_thread_cores() > 2 ? SPIN_NS : 0;
    atomic_init(&dev->fail_in, fail_in ? fail_in - 1 : 0);
    pthread_mutex_init(&dev->lock, NULL);
    *out = &dev->base;
    return 0;
}

int zr_host_device_open(struct zr_device **out)
{
    return zr_host_device_open_with(NULL, out);
}
