/* SPDX-License-Identifier: Apache-2.0 */
/* where_cuda_calls.c: lets tests whose models are written for the host run on the GPU stand-in. The linker
 * replaces their calls of the library by the functions here (--wrap). These copy activations to device memory
 * and back. After each call the CPU may access device memory, as after where_wait, until the next call.
 *
 * The environment variable TESTS selects tests by a pattern. Most tests of wrong uses are not for a GPU,
 * where calls return before they fail. */
#include "test/cmocka.h"
#include "test/zero/where.h"

#include <cuda_runtime_api.h>

#include <pthread.h>
#include <stdlib.h>

/* What the calling thread's context works with. */
static _Thread_local struct zero_config current;

#define REAL(name, ...)                                                                                      \
    int __real_##name(__VA_ARGS__);                                                                          \
    int __wrap_##name(__VA_ARGS__);                                                                          \
    int __wrap_##name(__VA_ARGS__)

/* Any call of CUDA closes device memory, so that the library's own host code finds it closed. */
static void close_memory(void)
{
    int device;
    if (current.device == ZERO_DEVICE_CUDA && cudaGetDevice(&device))
        abort();
}

static int then_touch(int err)
{
    if (current.device == ZERO_DEVICE_CUDA)
        where_wait(&current);
    return err;
}

#define CLOSED(call) (close_memory(), then_touch(call))

/* ---- streams, which end with their threads ---- */

static pthread_key_t at_end;

static void end_stream(void *stream)
{
    cudaStreamDestroy(stream);
}

__attribute__((constructor)) static void prepare(void)
{
    if (pthread_key_create(&at_end, end_stream))
        abort();
    if (getenv("TESTS"))
        cmocka_set_test_filter(getenv("TESTS"));
}

void __real_where_open(int rank, struct zero_config *cfg);
void __wrap_where_open(int rank, struct zero_config *cfg);

void __wrap_where_open(int rank, struct zero_config *cfg)
{
    void *own = pthread_getspecific(at_end);
    __real_where_open(rank, cfg);
    cfg->deterministic = ZERO_AUTO; /* set_current decides */
    if (own)
        cudaStreamDestroy((cudaStream_t)own);
    pthread_setspecific(at_end, cfg->stream);
}

/* ---- calls ---- */

/* Sums in a fixed order give the host's bits. A model that sums its micro-batches does not allow it. */
static void set_current(const struct zero_config *cfg)
{
    current = cfg ? *cfg : (struct zero_config)ZERO_CONFIG_INIT;
    if (current.deterministic == ZERO_AUTO && current.memory.grad_in_place != 1)
        current.deterministic = 1;
}

REAL(zero_wrap, zero_ctx **z, const struct zero_tensor *tensors, int32_t n, const struct zero_config *cfg)
{
    set_current(cfg);
    return CLOSED(__real_zero_wrap(z, tensors, n, cfg ? &current : NULL));
}

REAL(zero_plan, const struct zero_tensor *tensors, int32_t n, const struct zero_config *cfg,
     struct zero_plan_info *out)
{
    set_current(cfg);
    return __real_zero_plan(tensors, n, cfg ? &current : NULL, out);
}

REAL(zero_begin, zero_ctx *z, int32_t unit, enum zero_phase phase)
{
    return CLOSED(__real_zero_begin(z, unit, phase));
}

REAL(zero_end, zero_ctx *z, int32_t unit, enum zero_phase phase)
{
    return CLOSED(__real_zero_end(z, unit, phase));
}

REAL(zero_micro, zero_ctx *z)
{
    return CLOSED(__real_zero_micro(z));
}

REAL(zero_next, zero_ctx *z, struct zero_action *action)
{
    return CLOSED(__real_zero_next(z, action));
}

REAL(zero_finish, zero_ctx *z)
{
    return CLOSED(__real_zero_finish(z));
}

REAL(zero_step, zero_ctx *z, float lr, struct zero_step_info *info)
{
    return CLOSED(__real_zero_step(z, lr, info));
}

/* Copies of a call's memory on the device. Arrays that overlap do so in the copy. */
struct copies {
    char *at[2], *dst, *src;
    size_t dst_bytes, src_bytes;
};

static size_t bytes_of(int64_t n, enum zero_dtype dtype)
{
    static const size_t sizes[] = {
        [ZERO_F32] = 4, [ZERO_BF16] = 2, [ZERO_F16] = 2, [ZERO_I32] = 4, [ZERO_I64] = 8};
    bool known = dtype > 0 && dtype < sizeof sizes / sizeof *sizes;
    return n > 0 && known ? (size_t)n * sizes[dtype] : 0;
}

static char *copy_of(const char *from, size_t bytes)
{
    void *at;
    if (cudaMalloc(&at, bytes) || cudaMemcpy(at, from, bytes, cudaMemcpyHostToDevice))
        abort();
    return at;
}

enum { MOST_BYTES = 64 << 20 };

/* Makes the copies. Returns false for arguments that the library refuses. */
static bool copy_in(struct copies *c, const void *dst, const void *src)
{
    const char *d = dst, *s = src, *from = d < s ? d : s;
    if (!d || !s || !c->src_bytes || c->src_bytes > MOST_BYTES || current.device != ZERO_DEVICE_CUDA)
        return false;
    const char *d_end = d + c->dst_bytes, *s_end = s + c->src_bytes;
    if (d < s_end && s < d_end) {
        c->at[0] = copy_of(from, (size_t)((d_end > s_end ? d_end : s_end) - from));
        c->dst = c->at[0] + (d - from);
        c->src = c->at[0] + (s - from);
    } else {
        c->dst = c->at[0] = copy_of(d, c->dst_bytes);
        c->src = c->at[1] = copy_of(s, c->src_bytes);
    }
    return true;
}

static int copy_out(const struct copies *c, void *dst, int err)
{
    cudaStreamSynchronize((cudaStream_t)current.stream);
    if (!err && dst && cudaMemcpy(dst, c->dst, c->dst_bytes, cudaMemcpyDeviceToHost))
        abort();
    cudaFree(c->at[0]);
    cudaFree(c->at[1]);
    return then_touch(err);
}

REAL(zero_all_reduce, zero_ctx *z, enum zero_axis axis, void *dst, const void *src, int64_t n,
     enum zero_dtype dtype, enum zero_reduce op)
{
    struct copies c = {.dst_bytes = bytes_of(n, dtype), .src_bytes = bytes_of(n, dtype)};
    if (!copy_in(&c, dst, src))
        return CLOSED(__real_zero_all_reduce(z, axis, dst, src, n, dtype, op));
    return copy_out(&c, dst, __real_zero_all_reduce(z, axis, c.dst, c.src, n, dtype, op));
}

static size_t ranks_of(enum zero_axis axis)
{
    return (size_t)(axis == ZERO_AXIS_TP ? current.mesh.tp : axis == ZERO_AXIS_CP ? current.mesh.cp : 1);
}

REAL(zero_all_gather, zero_ctx *z, enum zero_axis axis, void *dst, const void *src, int64_t n,
     enum zero_dtype dtype)
{
    const size_t part = bytes_of(n, dtype), ranks = ranks_of(axis);
    struct copies c = {.dst_bytes = part * ranks, .src_bytes = part};
    if (!copy_in(&c, dst, src))
        return CLOSED(__real_zero_all_gather(z, axis, dst, src, n, dtype));
    return copy_out(&c, dst, __real_zero_all_gather(z, axis, c.dst, c.src, n, dtype));
}

REAL(zero_reduce_scatter, zero_ctx *z, enum zero_axis axis, void *dst, const void *src, int64_t n,
     enum zero_dtype dtype)
{
    const size_t part = bytes_of(n, dtype), ranks = ranks_of(axis);
    struct copies c = {.dst_bytes = part, .src_bytes = part * ranks};
    if (!copy_in(&c, dst, src))
        return CLOSED(__real_zero_reduce_scatter(z, axis, dst, src, n, dtype));
    return copy_out(&c, dst, __real_zero_reduce_scatter(z, axis, c.dst, c.src, n, dtype));
}

REAL(zero_all_to_all, zero_ctx *z, enum zero_axis axis, void *dst, const void *src, int64_t n,
     enum zero_dtype dtype)
{
    const size_t bytes = bytes_of(n, dtype) * ranks_of(axis);
    struct copies c = {.dst_bytes = bytes, .src_bytes = bytes};
    if (!copy_in(&c, dst, src))
        return CLOSED(__real_zero_all_to_all(z, axis, dst, src, n, dtype));
    return copy_out(&c, dst, __real_zero_all_to_all(z, axis, c.dst, c.src, n, dtype));
}

/* The memory of the shift that is open on tp, and on cp. */
static _Thread_local struct copies shifted[2];
static _Thread_local void *shifted_to[2];

REAL(zero_shift_begin, zero_ctx *z, enum zero_axis axis, int32_t by, void *dst, const void *src, int64_t n,
     enum zero_dtype dtype)
{
    struct copies c = {.dst_bytes = bytes_of(n, dtype), .src_bytes = bytes_of(n, dtype)};
    if (!copy_in(&c, dst, src))
        return CLOSED(__real_zero_shift_begin(z, axis, by, dst, src, n, dtype));
    int err = __real_zero_shift_begin(z, axis, by, c.dst, c.src, n, dtype);
    if (err)
        return copy_out(&c, NULL, err);
    shifted[axis == ZERO_AXIS_CP] = c;
    shifted_to[axis == ZERO_AXIS_CP] = dst;
    return then_touch(0);
}

REAL(zero_shift_end, zero_ctx *z, enum zero_axis axis)
{
    const int i = axis == ZERO_AXIS_CP;
    int err = CLOSED(__real_zero_shift_end(z, axis));
    if (!shifted_to[i])
        return err;
    void *dst = shifted_to[i];
    shifted_to[i] = NULL;
    return copy_out(&shifted[i], dst, err);
}

REAL(zero_expect_equal, zero_ctx *z, enum zero_axis axis, const void *src, int64_t n, enum zero_dtype dtype)
{
    struct copies c = {.dst_bytes = bytes_of(n, dtype), .src_bytes = bytes_of(n, dtype)};
    if (!copy_in(&c, src, src))
        return CLOSED(__real_zero_expect_equal(z, axis, src, n, dtype));
    return copy_out(&c, NULL, __real_zero_expect_equal(z, axis, c.src, n, dtype));
}

REAL(zero_broadcast, zero_ctx *z, enum zero_axis axis, int32_t root, void *buf, int64_t bytes)
{
    struct copies c = {.dst_bytes = bytes > 0 ? (size_t)bytes : 0,
                       .src_bytes = bytes > 0 ? (size_t)bytes : 0};
    if (!copy_in(&c, buf, buf))
        return CLOSED(__real_zero_broadcast(z, axis, root, buf, bytes));
    return copy_out(&c, buf, __real_zero_broadcast(z, axis, root, c.src, bytes));
}
