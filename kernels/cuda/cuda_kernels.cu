/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_kernels.cu: the element-wise kernels of a sharded optimizer on a GPU. cuda_norm.cu has the kernels
 * whose threads need each other.
 *
 * nvcc compiles this file, and in tests the host's compiler does so for the CPU (test/stand_in).
 * Multiplications and additions must not be contracted (-fmad=false), so that the bits are those of the host.
 * bf16 is two bytes, the upper half of a float. */
#include "kernels/cuda/cuda_kernels.h"

#include "kernels/host/vec_portable.h"
#include "kernels/raw_bits.h"

#include "kernels/host/update_element.h"

#include <cuda_runtime.h>

#include "kernels/cuda/cuda_elements.h"

namespace
{

template <class To, class From> struct cast_op {
    To *dst;
    const From *src;
    template <int W> __device__ __forceinline__ void run(int64_t i) const
    {
        floats<W> x;
        x.load(src + i);
        x.store(dst + i);
    }
};

template <class From> struct add_op {
    float *dst;
    const From *src;
    template <int W> __device__ __forceinline__ void run(int64_t i) const
    {
        floats<W> a, b;
        a.load(dst + i);
        b.load(src + i);
        for (int j = 0; j < W; j++)
            a.v[j] = vec_add(a.v[j], b.v[j]);
        a.store(dst + i);
    }
};

struct scale_op {
    float *x;
    const struct zr_step_scalars *scalars;
    template <int W> __device__ __forceinline__ void run(int64_t i) const
    {
        floats<W> a;
        a.load(x + i);
        const float factor = scalars->grad_scale;
        if (scalars->skip || factor == 1) /* factor 1 keeps the bits of a NaN, too */
            return;
        for (int j = 0; j < W; j++)
            a.v[j] = vec_mul(a.v[j], factor);
        a.store(x + i);
    }
};

/* Up to N sources, where N is a power of two. The tree over [at, at + n) splits at the largest power of two
 * below n. */
template <class From, int N> struct tree_sources {
    int n_src;
    const From *src[N];

    template <int W, int AT, int SIZE> __device__ __forceinline__ floats<W> sum(int64_t i, int n) const
    {
        if constexpr (SIZE == 1) {
            (void)n;
            floats<W> x;
            x.load(src[AT] + i);
            return x;
        } else {
            constexpr int HALF = SIZE / 2;
            floats<W> a = sum<W, AT, HALF>(i, n < HALF ? n : HALF);
            if (n > HALF) {
                floats<W> b = sum<W, AT + HALF, HALF>(i, n - HALF);
                for (int j = 0; j < W; j++)
                    a.v[j] = vec_add(a.v[j], b.v[j]);
            }
            return a;
        }
    }

    /* Writes or, with accumulate, adds W elements from i to dst. */
    template <int W> __device__ __forceinline__ void keep(float *dst, int64_t i, bool accumulate) const
    {
        floats<W> total = sum<W, 0, N>(i, n_src);
        if (accumulate) {
            floats<W> was;
            was.load(dst);
            for (int j = 0; j < W; j++)
                total.v[j] = vec_add(was.v[j], total.v[j]);
        }
        total.store(dst);
    }
};

template <class From, int N> struct tree_op {
    float *dst;
    bool accumulate;
    struct tree_sources<From, N> from;
    template <int W> __device__ __forceinline__ void run(int64_t i) const
    {
        from.template keep<W>(dst + i, i, accumulate);
    }
};

__device__ __forceinline__ float bits_as_float(uint32_t bits)
{
    return __uint_as_float(bits);
}

__device__ __forceinline__ float bits_as_float(uint16_t bits)
{
    return __uint_as_float((uint32_t)bits << 16);
}

/* Bits is the unsigned type of the element's size. */
template <class Bits> struct maximum_op {
    Bits *dst;
    int n_src;
    const Bits *src[ZR_MAX_SOURCES];
    template <int W> __device__ __forceinline__ void run(int64_t i) const
    {
        for (int64_t end = i + W; i < end; i++) {
            Bits greatest = src[0][i];
            for (int k = 1; k < n_src; k++) {
                const Bits x = src[k][i];
                if (zr_is_greater(bits_as_float(x), bits_as_float(greatest)))
                    greatest = x;
            }
            dst[i] = greatest;
        }
    }
};

template <class Bits>
cudaError_t maximum(cudaStream_t s, void *dst, const void *const *src, int n_src, int64_t n)
{
    struct maximum_op<Bits> op = {
        static_cast<Bits *>(dst), n_src,
        {
        }
    };
    for (int k = 0; k < n_src; k++)
        op.src[k] = static_cast<const Bits *>(src[k]);
    const struct operand any = {NULL, 1}; /* elements are read one by one, so alignment does not matter */
    return run_each(s, op, n, &any, 1);
}

/* An entry of a table of sums. A block of threads works on one entry. */
struct sum_range {
    struct zr_sum_range r;
    int32_t first_block;
    int32_t width; /* elements per access: WIDTH if all operands are aligned for it, else 1 */
};

template <class From, int N> struct sum_table {
    struct sum_range sum[ZR_MAX_SUMS];
    int n;
    struct tree_sources<From, N> from;
};

template <class From, int N>
__global__ void __launch_bounds__(THREADS) sum_ranges(const __grid_constant__ struct sum_table<From, N> t)
{
    int k = 0;
    while (k + 1 < t.n && (int)blockIdx.x >= t.sum[k + 1].first_block)
        k++;
    const struct zr_sum_range &r = t.sum[k].r;
    const int width = t.sum[k].width;
    int64_t i = (((int64_t)blockIdx.x - t.sum[k].first_block) * THREADS + threadIdx.x) * width;
    if (width == WIDTH && i + WIDTH <= r.n)
        t.from.template keep<WIDTH>(r.dst + i, r.at + i, r.accumulate);
    else
        for (int64_t end = i + width; i < end && i < r.n; i++)
            t.from.template keep<1>(r.dst + i, r.at + i, r.accumulate);
}

/* One span of an update. Blocks of threads are assigned as for sums. */
struct update_span {
    struct zr_update_span at;
    int32_t first_block;
    int32_t width;
};

struct update_table {
    struct zr_update u;
    int n;
    struct update_span span[ZR_MAX_SPANS];
};
static_assert(sizeof(struct update_table) <= 4096, "all that a kernel takes as arguments");

/* Updates W elements from i. */
template <zero_optimizer KIND, update_variant VARIANT, update_param OUT, int W>
__device__ __forceinline__ void update_elements(const struct zr_update &u, float lr, float decay, int64_t i)
{
    const int n_read = update_n_read(KIND, VARIANT), n_written = update_n_written(KIND, VARIANT);
    floats<W> w, g, s0 = {}, s1 = {};
    w.load(u.master + i);
    g.load(u.grad + i);
    if (n_read > 0)
        s0.load(u.state[0] + i);
    if (n_read > 1)
        s1.load(u.state[1] + i);
    if (u.scalars->skip) /* read last, so that all loads are under way at once */
        return;
    struct zr_update own = u;
    own.lr = lr;
    own.decay = decay;
    const struct update_constants k = update_constants_of(&own, u.scalars->grad_scale);
    for (int j = 0; j < W; j++)
        w.v[j] = update_element(&k, KIND, VARIANT, w.v[j], g.v[j], &s0.v[j], &s1.v[j]);
    if (n_written > 0)
        s0.store(u.state[0] + i);
    if (n_written > 1)
        s1.store(u.state[1] + i);
    w.store(u.master + i);
    if (OUT == PARAM_F32)
        w.store(static_cast<float *>(u.param) + i);
    else if (OUT == PARAM_BF16)
        w.store(static_cast<uint16_t *>(u.param) + i);
}

template <zero_optimizer KIND, update_variant VARIANT, update_param OUT>
__global__ void __launch_bounds__(THREADS) update_spans(const __grid_constant__ struct update_table t)
{
    int k = 0;
    while (k + 1 < t.n && (int)blockIdx.x >= t.span[k + 1].first_block)
        k++;
    const struct zr_update_span &at = t.span[k].at;
    const int width = t.span[k].width;
    int64_t i = (((int64_t)blockIdx.x - t.span[k].first_block) * THREADS + threadIdx.x) * width;
    if (width == WIDTH && i + WIDTH <= at.n)
        update_elements<KIND, VARIANT, OUT, WIDTH>(t.u, at.lr, at.decay, at.first + i);
    else
        for (int64_t end = i + width; i < end && i < at.n; i++)
            update_elements<KIND, VARIANT, OUT, 1>(t.u, at.lr, at.decay, at.first + i);
}

/* Returns whether WIDTH elements from element first on are one access of every array. */
bool update_is_aligned(const struct zr_update *u, int n_written, enum update_param out, int64_t first)
{
    const int param_bytes = out == PARAM_BF16 ? 2 : 4;
    bool aligned = (uintptr_t)(u->master + first) % (WIDTH * 4) == 0 &&
                   (uintptr_t)(u->grad + first) % (WIDTH * 4) == 0 &&
                   (out == PARAM_NOT_WRITTEN ||
                    ((uintptr_t)u->param + (uintptr_t)(first * param_bytes)) % (WIDTH * param_bytes) == 0);
    for (int i = 0; i < n_written; i++)
        aligned &= (uintptr_t)(u->state[i] + first) % (WIDTH * 4) == 0;
    return aligned;
}

template <zero_optimizer KIND, update_variant VARIANT>
cudaError_t update_with(cudaStream_t s, const struct zr_update *u, const struct zr_update_span *spans,
                        int n_spans)
{
    const enum update_param out = update_param_of(u);
    struct update_table t = {};
    int64_t n_blocks = 0;
    t.u = *u;
    for (int i = 0; i < n_spans; i++) {
        if (spans[i].n <= 0)
            continue;
        const int width =
            update_is_aligned(u, update_n_written(KIND, VARIANT), out, spans[i].first) ? WIDTH : 1;
        t.span[t.n++] = {spans[i], (int32_t)n_blocks, width};
        n_blocks += ceil_div(spans[i].n, THREADS * width);
        if (n_blocks > INT32_MAX)
            return cudaErrorInvalidValue;
    }
    if (n_blocks == 0)
        return cudaSuccess;
    switch (out) {
    case PARAM_F32:
        return launch(update_spans<KIND, VARIANT, PARAM_F32>, n_blocks, s, t);
    case PARAM_BF16:
        return launch(update_spans<KIND, VARIANT, PARAM_BF16>, n_blocks, s, t);
    default:
        return launch(update_spans<KIND, VARIANT, PARAM_NOT_WRITTEN>, n_blocks, s, t);
    }
}

/* Compiles only the variants that the kind has. */
template <zero_optimizer KIND, bool MOMENTUM_ONLY, bool FIRST_STEP>
cudaError_t update_kind(cudaStream_t s, const struct zr_update *u, const struct zr_update_span *spans,
                        int n_spans)
{
    if constexpr (MOMENTUM_ONLY) {
        if (!u->state[0])
            return update_with<KIND, UPDATE_STATELESS>(s, u, spans, n_spans);
    }
    if constexpr (FIRST_STEP) {
        if (u->t == 1)
            return update_with<KIND, UPDATE_FIRST>(s, u, spans, n_spans);
    }
    return update_with<KIND, UPDATE_USUAL>(s, u, spans, n_spans);
}

/* --- narrowing in place ---
 *
 * Element i goes where element i / 2 was. One block handles the first IN_PLACE_BLOCK elements, and reads each
 * piece before it writes it. After them, elements [m, 2m) go where elements [m / 2, m) were, which are done.
 * So one launch for each doubling is enough, because launches on a stream run in order. */

constexpr int64_t IN_PLACE_BLOCK = 8192;

__global__ void __launch_bounds__(THREADS) narrow_first(uint16_t *dst, const float *src, int n)
{
    for (int base = 0; base < n; base += THREADS) {
        int i = base + (int)threadIdx.x;
        float x = i < n ? vec_load_f32_bytes(src + i) : 0;
        __syncthreads();
        if (i < n)
            vec_store_bf16(dst + i, x);
        __syncthreads();
    }
}

cudaError_t narrow(cudaStream_t s, uint16_t *dst, const float *src, int64_t n)
{
    const struct operand both[] = {{dst, 2}, {src, 4}};
    return run_each(s, cast_op<uint16_t, float>{dst, src}, n, both, 2);
}

/* --- small values --- */

struct words {
    uint64_t v[ZR_PUT_BYTES / 8];
};

__global__ void __launch_bounds__(THREADS) put_words(uint64_t *dst, struct words value, int n)
{
    if ((int)threadIdx.x < n)
        dst[threadIdx.x] = value.v[threadIdx.x];
}

__device__ __forceinline__ int64_t device_clock()
{
#ifdef __CUDACC__
    int64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
#else
    return zr_now_ns();
#endif
}

__global__ void __launch_bounds__(THREADS) stamp(int64_t *out_ns, int64_t offset_ns)
{
    if (threadIdx.x == 0)
        *out_ns = device_clock() + offset_ns;
}

template <class From, int N> struct tree_sources<From, N> sources_of(const void *const *src, int n_src) {
    struct tree_sources<From, N> from = {
    };
    from.n_src = n_src;
    for (int k = 0; k < n_src; k++)
        from.src[k] = static_cast<const From *>(src[k]);
    return from;
}

template <class From, int N>
cudaError_t tree_of(cudaStream_t s, float *dst, const void *const *src, int n_src, int64_t n, bool accumulate)
{
    struct operand all[N + 1] = {{dst, sizeof(float)}};
    for (int k = 0; k < n_src; k++)
        all[k + 1] = operand{src[k], sizeof(From)};
    return run_each(s, tree_op<From, N>{dst, accumulate, sources_of<From, N>(src, n_src)}, n, all, n_src + 1);
}

template <class From>
cudaError_t tree(cudaStream_t s, float *dst, const void *const *src, int n_src, int64_t n, bool accumulate)
{
    if (n_src <= 2)
        return tree_of<From, 2>(s, dst, src, n_src, n, accumulate);
    if (n_src <= 4)
        return tree_of<From, 4>(s, dst, src, n_src, n, accumulate);
    if (n_src <= 8)
        return tree_of<From, 8>(s, dst, src, n_src, n, accumulate);
    return tree_of<From, ZR_MAX_SOURCES>(s, dst, src, n_src, n, accumulate);
}

template <class From, int N>
cudaError_t ranges_of(cudaStream_t s, const struct zr_sum_range *table, int n_sums, const void *const *src,
                      int n_src)
{
    static_assert(sizeof(struct sum_table<From, N>) <= 4096, "all that a kernel takes as arguments");
    struct sum_table<From, N> t = {
    };
    int64_t n_blocks = 0;
    t.from = sources_of<From, N>(src, n_src);
    for (int i = 0; i < n_sums; i++) {
        const struct zr_sum_range &r = table[i];
        if (r.n <= 0)
            continue;
        bool aligned = (uintptr_t)r.dst % (WIDTH * sizeof(float)) == 0;
        for (int k = 0; k < n_src; k++)
            aligned &= (uintptr_t)(t.from.src[k] + r.at) % (WIDTH * sizeof(From)) == 0;
        const int width = aligned ? WIDTH : 1;
        t.sum[t.n++] = {r, (int32_t)n_blocks, width};
        n_blocks += ceil_div(r.n, THREADS * width);
        if (n_blocks > INT32_MAX)
            return cudaErrorInvalidValue;
    }
    return n_blocks ? launch(sum_ranges<From, N>, n_blocks, s, t) : cudaSuccess;
}

template <class From>
cudaError_t ranges(cudaStream_t s, const struct zr_sum_range *table, int n_sums, const void *const *src,
                   int n_src)
{
    if (n_src <= 2)
        return ranges_of<From, 2>(s, table, n_sums, src, n_src);
    if (n_src <= 8)
        return ranges_of<From, 8>(s, table, n_sums, src, n_src);
    return ranges_of<From, ZR_MAX_SOURCES>(s, table, n_sums, src, n_src);
}

} // namespace

/* --- C functions --- */

cudaError_t zr_cuda_put(cudaStream_t s, void *dst, const void *src, int64_t bytes)
{
    struct words value = {};
    if (bytes <= 0)
        return cudaSuccess;
    memcpy(&value, src, (size_t)bytes);
    return launch(put_words, 1, s, static_cast<uint64_t *>(dst), value, (int)(bytes / 8));
}

cudaError_t zr_cuda_stamp(cudaStream_t s, int64_t *out_ns, int64_t offset_ns)
{
    return launch(stamp, 1, s, out_ns, offset_ns);
}

cudaError_t zr_cuda_cast(cudaStream_t s, void *dst, enum zero_dtype dt, const void *src, int64_t n)
{
    if (dt == ZERO_F32) {
        const struct operand both[] = {{dst, 4}, {src, 2}};
        return run_each(
            s, cast_op<float, uint16_t>{static_cast<float *>(dst), static_cast<const uint16_t *>(src)}, n,
            both, 2);
    }
    uint16_t *half = static_cast<uint16_t *>(dst);
    const float *from = static_cast<const float *>(src);
    if (dst != src || n <= 0)
        return narrow(s, half, from, n);
    int64_t done = n < IN_PLACE_BLOCK ? n : IN_PLACE_BLOCK;
    cudaError_t err = launch(narrow_first, 1, s, half, from, (int)done);
    for (; !err && done < n; done *= 2)
        err = narrow(s, half + done, from + done, done < n - done ? done : n - done);
    return err;
}

cudaError_t zr_cuda_add(cudaStream_t s, float *dst, const void *src, enum zero_dtype st, int64_t n)
{
    const struct operand both[] = {{dst, 4}, {src, (int)zr_dtype_bytes(st)}};
    return st == ZERO_F32
               ? run_each(s, add_op<float>{dst, static_cast<const float *>(src)}, n, both, 2)
               : run_each(s, add_op<uint16_t>{dst, static_cast<const uint16_t *>(src)}, n, both, 2);
}

cudaError_t zr_cuda_sum_tree(cudaStream_t s, float *dst, const void *const *src, int n_src,
                             enum zero_dtype st, int64_t n, bool accumulate)
{
    return st == ZERO_F32 ? tree<float>(s, dst, src, n_src, n, accumulate)
                          : tree<uint16_t>(s, dst, src, n_src, n, accumulate);
}

cudaError_t zr_cuda_sum_ranges(cudaStream_t s, const struct zr_sum_range *table, int n_sums,
                               const void *const *src, int n_src, enum zero_dtype st)
{
    return st == ZERO_F32 ? ranges<float>(s, table, n_sums, src, n_src)
                          : ranges<uint16_t>(s, table, n_sums, src, n_src);
}

cudaError_t zr_cuda_maximum(cudaStream_t s, void *dst, const void *const *src, int n_src,
                            enum zero_dtype dtype, int64_t n)
{
    return dtype == ZERO_F32 ? maximum<uint32_t>(s, dst, src, n_src, n)
                             : maximum<uint16_t>(s, dst, src, n_src, n);
}

cudaError_t zr_cuda_scale(cudaStream_t s, float *x, int64_t n, const struct zr_step_scalars *scalars)
{
    const struct operand one[] = {{x, 4}};
    return run_each(s, scale_op{x, scalars}, n, one, 1);
}

cudaError_t zr_cuda_update_spans(cudaStream_t s, const struct zr_update *u,
                                 const struct zr_update_span *spans, int n_spans)
{
    switch (u->kind) {
#define KIND(NAME, number, name, source)                                                                     \
    case ZERO_##NAME:                                                                                        \
        return update_kind<ZERO_##NAME, NAME##_MOMENTUM_ONLY, NAME##_FIRST_STEP>(s, u, spans, n_spans);
        ZERO_OPTIMIZER_MAP(KIND)
#undef KIND
    default:
        return cudaErrorInvalidValue;
    }
}
