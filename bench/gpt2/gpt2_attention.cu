/* gpt2_attention.cu: causal attention on a GPU's tensor cores in one pass over the keys, which keeps one
 * number per query instead of a (T, T) matrix (Dao, arXiv:2307.08691). bf16 heads of 16, 32 or 64 channels.
 * Compiled by nvcc, and as C++ by the tests' stand-in.
 *
 * A block has a tile of 64 queries (or keys, for their gradients), a warp 16 rows of it, and goes through the
 * tiles on the other side in order: the same bits every time. Backward makes the matrix again, once for the
 * queries' gradients and once for the keys' and values', so that neither needs an atomic addition. */
#include <cuda_runtime.h>

#include <math.h>

extern "C" {
#include "bench/gpt2/gpt2_layers.h"
}
#include "bench/gpt2/gpt2_launch.h"
#include "bench/gpt2/tensor_core.h"

namespace
{

const int TILE = 64, N_WARPS = 4, N_THREADS = 32 * N_WARPS;
const int N_COLS = TILE / 8; /* products of 8 columns that a tile's row of the matrix takes */
const float LOG2_E = 1.442695041f;

/* Rows of a tile, with space after each: the rows that are read together then lie in different banks. */
template <int HS> struct alignas(16) rows {
    real x[TILE][HS + 8];
};

struct alignas(16) chunk {
    real x[8];
};

/* Rows first.. of a matrix whose rows are stride elements apart; those from n on are zeros. All of the block.
 */
template <int HS>
__device__ __forceinline__ void load_rows(rows<HS> &to, const real *from, int64_t stride, int first, int n)
{
    for (int i = (int)threadIdx.x; i < TILE * HS / 8; i += N_THREADS) {
        int row = i / (HS / 8), col = i % (HS / 8) * 8;
        chunk c = {};
        if (first + row < n)
            c = *reinterpret_cast<const chunk *>(from + (first + row) * stride + col);
        *reinterpret_cast<chunk *>(&to.x[row][col]) = c;
    }
}

/* The calling warp's place in a tile, and the lane's in what tensor_core.h hands out. */
struct place_in_tile {
    int warp_row, lane, g, t;
    __device__ __forceinline__ place_in_tile()
        : warp_row((int)threadIdx.x / 32 * 16), lane((int)threadIdx.x % 32), g(lane / 4), t(lane % 4)
    {
    }
};

/* matrix (16, TILE) = the warp's rows of a times b's rows, transposed */
template <int HS>
__device__ __forceinline__ void multiply_rows(float matrix[N_COLS][4], const rows<HS> &a, const rows<HS> &b,
                                              const place_in_tile &at)
{
    for (int col = 0; col < N_COLS; col++)
        for (int j = 0; j < 4; j++)
            matrix[col][j] = 0;
    for (int k = 0; k < HS; k += 16) {
        uint32_t fa[4], fb[4];
        load_matrices(fa, &a.x[at.warp_row + at.lane % 16][k + at.lane / 16 * 8]);
        for (int col = 0; col < N_COLS; col += 2) {
            load_matrices(fb, &b.x[col * 8 + at.lane / 16 * 8 + at.lane % 8][k + at.lane / 8 % 2 * 8]);
            mma_bf16(matrix[col], fa, fb);
            mma_bf16(matrix[col + 1], fa, fb + 2);
        }
    }
}

/* sum (16, HS) += matrix (16, TILE), rounded, times b (TILE, HS) */
template <int HS>
__device__ __forceinline__ void add_product(float sum[HS / 8][4], const float matrix[N_COLS][4],
                                            const rows<HS> &b, const place_in_tile &at)
{
    for (int col = 0; col < N_COLS; col += 2) {
        const float *left = matrix[col], *right = matrix[col + 1];
        const uint32_t fa[4] = {two_bf16(left[0], left[1]), two_bf16(left[2], left[3]),
                                two_bf16(right[0], right[1]), two_bf16(right[2], right[3])};
        for (int i = 0; i < HS / 8; i += 2) {
            uint32_t fb[4];
            load_transposed(fb, &b.x[col * 8 + at.lane % 16][i * 8 + at.lane / 16 * 8]);
            mma_bf16(sum[i], fa, fb);
            mma_bf16(sum[i + 1], fa, fb + 2);
        }
    }
}

/* Writes the warp's rows, each times its factor: factor[0] for row g, [1] for row g + 8. */
template <int HS>
__device__ __forceinline__ void store_rows(real *to, int64_t stride, int first, int n,
                                           const float sum[HS / 8][4], const float factor[2],
                                           const place_in_tile &at)
{
    for (int half = 0; half < 2; half++) {
        int row = first + at.warp_row + at.g + 8 * half;
        if (row >= n)
            continue;
        for (int i = 0; i < HS / 8; i++)
            *reinterpret_cast<uint32_t *>(to + row * stride + i * 8 + at.t * 2) =
                two_bf16(sum[i][2 * half] * factor[half], sum[i][2 * half + 1] * factor[half]);
    }
}

/* Over the four lanes that share a row. */
__device__ __forceinline__ float row_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float row_sum(float x)
{
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

/* What a block works on: one head of one row of the batch. */
struct attention {
    const real *qkv, *atty, *datty; /* (B, T, 3*C), (B, T, C), (B, T, C) */
    real *out, *dqkv;               /* forward's atty; (B, T, 3*C) */
    float *logsum, *dots;           /* (B, NH, T) each */
    int T, C;
    float scale; /* of the scores, for powers of two */
};

/* atty = softmax(q k^T) v; logsum: of each query, log2 of the sum of its weights. The largest score so far is
 * taken off before a power is taken, and what was summed with a smaller one is scaled down. */
template <int HS> __global__ void __launch_bounds__(N_THREADS) attention_forward_kernel(attention a)
{
    __shared__ rows<HS> q, k, v;
    const place_in_tile at;
    int T = a.T, C = a.C, tile = (int)(gridDim.x - 1 - blockIdx.x), first = tile * TILE; /* long ones first */
    int64_t head = (int64_t)blockIdx.z * gridDim.y + blockIdx.y;
    const real *from = a.qkv + (int64_t)blockIdx.z * T * 3 * C + (int)blockIdx.y * HS;
    float sum[HS / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, total[2] = {0, 0};
    load_rows(q, from, 3 * C, first, T);
    for (int other = 0; other <= tile; other++) {
        float s[N_COLS][4];
        __syncthreads(); /* the tiles before have been read */
        load_rows(k, from + C, 3 * C, other * TILE, T);
        load_rows(v, from + 2 * C, 3 * C, other * TILE, T);
        __syncthreads();
        multiply_rows(s, q, k, at);
        for (int half = 0; half < 2; half++) {
            int row = at.warp_row + at.g + 8 * half;
            float most = top[half];
            for (int col = 0; col < N_COLS; col++)
                for (int j = 2 * half; j < 2 * half + 2; j++) {
                    if (other == tile && col * 8 + at.t * 2 + j % 2 > row)
                        s[col][j] = -INFINITY;
                    most = fmaxf(most, s[col][j]);
                }
            most = row_max(most);
            float shrink = exp2f((top[half] - most) * a.scale);
            top[half] = most;
            total[half] *= shrink;
            for (int col = 0; col < N_COLS; col++)
                for (int j = 2 * half; j < 2 * half + 2; j++) {
                    s[col][j] = exp2f((s[col][j] - most) * a.scale);
                    total[half] += s[col][j];
                }
            for (int i = 0; i < HS / 8; i++)
                for (int j = 2 * half; j < 2 * half + 2; j++)
                    sum[i][j] *= shrink;
        }
        add_product(sum, s, v, at);
    }
    float factor[2];
    for (int half = 0; half < 2; half++) {
        int row = first + at.warp_row + at.g + 8 * half;
        float all = row_sum(total[half]);
        factor[half] = 1.0f / all;
        if (at.t == 0 && row < T)
            a.logsum[head * T + row] = top[half] * a.scale + log2f(all);
    }
    store_rows<HS>(a.out + (int64_t)blockIdx.z * T * C + (int)blockIdx.y * HS, C, first, T, sum, factor, at);
}

/* dots = atty . datty of each query and head: what each query's weights' gradients, weighted, add up to. */
template <int HS> __global__ void attention_dots_kernel(attention a, int64_t n, int NH)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, from = i / NH * a.C + i % NH * HS;
    if (i >= n)
        return;
    float sum = 0;
    for (int c = 0; c < HS; c += 8) {
        chunk x = *reinterpret_cast<const chunk *>(a.atty + from + c),
              y = *reinterpret_cast<const chunk *>(a.datty + from + c);
        for (int j = 0; j < 8; j++)
            sum += to_float(x.x[j]) * to_float(y.x[j]);
    }
    int64_t row = i / NH; /* b * T + t */
    a.dots[(row / a.T * NH + i % NH) * a.T + row % a.T] = sum;
}

/* The gradients of the queries. */
template <int HS> __global__ void __launch_bounds__(N_THREADS) attention_dq_kernel(attention a)
{
    __shared__ rows<HS> q, dy, k, v;
    const place_in_tile at;
    int T = a.T, C = a.C, tile = (int)(gridDim.x - 1 - blockIdx.x), first = tile * TILE;
    int64_t head = (int64_t)blockIdx.z * gridDim.y + blockIdx.y;
    const real *from = a.qkv + (int64_t)blockIdx.z * T * 3 * C + (int)blockIdx.y * HS;
    float dq[HS / 8][4] = {}, logsum[2] = {0, 0}, dot[2] = {0, 0};
    load_rows(q, from, 3 * C, first, T);
    load_rows(dy, a.datty + (int64_t)blockIdx.z * T * C + (int)blockIdx.y * HS, C, first, T);
    for (int half = 0; half < 2; half++) {
        int row = first + at.warp_row + at.g + 8 * half;
        if (row < T) {
            logsum[half] = a.logsum[head * T + row];
            dot[half] = a.dots[head * T + row];
        }
    }
    for (int other = 0; other <= tile; other++) {
        float s[N_COLS][4], d[N_COLS][4];
        __syncthreads();
        load_rows(k, from + C, 3 * C, other * TILE, T);
        load_rows(v, from + 2 * C, 3 * C, other * TILE, T);
        __syncthreads();
        multiply_rows(s, q, k, at);
        multiply_rows(d, dy, v, at);
        for (int col = 0; col < N_COLS; col++)
            for (int j = 0; j < 4; j++) {
                bool seen = other < tile || col * 8 + at.t * 2 + j % 2 <= at.warp_row + at.g + j / 2 * 8;
                float weight = exp2f(s[col][j] * a.scale - logsum[j / 2]);
                d[col][j] = seen ? weight * (d[col][j] - dot[j / 2]) : 0.0f;
            }
        add_product(dq, d, k, at);
    }
    const float factor[2] = {a.scale / LOG2_E, a.scale / LOG2_E};
    store_rows<HS>(a.dqkv + (int64_t)blockIdx.z * T * 3 * C + (int)blockIdx.y * HS, 3 * C, first, T, dq,
                   factor, at);
}

/* The gradients of the keys and values: here the matrix stands transposed, a row a key. */
template <int HS> __global__ void __launch_bounds__(N_THREADS) attention_dkv_kernel(attention a)
{
    __shared__ rows<HS> k, v, q, dy;
    __shared__ float logsum[TILE], dot[TILE];
    const place_in_tile at;
    int T = a.T, C = a.C, tile = (int)blockIdx.x, first = tile * TILE;
    int64_t head = (int64_t)blockIdx.z * gridDim.y + blockIdx.y;
    const real *from = a.qkv + (int64_t)blockIdx.z * T * 3 * C + (int)blockIdx.y * HS;
    const real *dy_from = a.datty + (int64_t)blockIdx.z * T * C + (int)blockIdx.y * HS;
    float dk[HS / 8][4] = {}, dv[HS / 8][4] = {};
    load_rows(k, from + C, 3 * C, first, T);
    load_rows(v, from + 2 * C, 3 * C, first, T);
    for (int other = tile; other < (int)gridDim.x; other++) {
        float s[N_COLS][4], d[N_COLS][4];
        int query = other * TILE + (int)threadIdx.x;
        __syncthreads();
        load_rows(q, from, 3 * C, other * TILE, T);
        load_rows(dy, dy_from, C, other * TILE, T);
        if (threadIdx.x < TILE) {
            logsum[threadIdx.x] = query < T ? a.logsum[head * T + query] : 0.0f; /* and dy is 0 */
            dot[threadIdx.x] = query < T ? a.dots[head * T + query] : 0.0f;
        }
        __syncthreads();
        multiply_rows(s, k, q, at);
        multiply_rows(d, v, dy, at);
        for (int col = 0; col < N_COLS; col++)
            for (int j = 0; j < 4; j++) {
                int to = col * 8 + at.t * 2 + j % 2;
                bool seen = other > tile || at.warp_row + at.g + j / 2 * 8 <= to;
                s[col][j] = seen ? exp2f(s[col][j] * a.scale - logsum[to]) : 0.0f;
                d[col][j] = s[col][j] * (d[col][j] - dot[to]);
            }
        add_product(dv, s, dy, at);
        add_product(dk, d, q, at);
    }
    real *to = a.dqkv + (int64_t)blockIdx.z * T * 3 * C + (int)blockIdx.y * HS;
    const float scale[2] = {a.scale / LOG2_E, a.scale / LOG2_E}, one[2] = {1, 1};
    store_rows<HS>(to + C, 3 * C, first, T, dk, scale, at);
    store_rows<HS>(to + 2 * C, 3 * C, first, T, dv, one, at);
}

dim3 tiles(const attention &a, int64_t B, int64_t NH)
{
    return dim3(ceil_div(a.T, TILE), (unsigned)NH, (unsigned)B);
}

template <int HS> int forward(const struct place *on, attention a, int64_t B, int64_t NH)
{
    return launch(on, "attention", attention_forward_kernel<HS>, tiles(a, B, NH), N_THREADS, a);
}

template <int HS> int backward(const struct place *on, attention a, int64_t B, int64_t NH)
{
    int64_t n = B * a.T * NH;
    int err =
        launch(on, "attention backward", attention_dots_kernel<HS>, ceil_div(n, 256), 256, a, n, (int)NH);
    if (!err)
        err = launch(on, "attention backward", attention_dq_kernel<HS>, tiles(a, B, NH), N_THREADS, a);
    if (!err)
        err = launch(on, "attention backward", attention_dkv_kernel<HS>, tiles(a, B, NH), N_THREADS, a);
    return err;
}

attention describe(const real *qkv, float *logsum, int64_t T, int64_t NH, int64_t HS)
{
    attention a = {};
    a.qkv = qkv;
    a.logsum = logsum;
    a.T = (int)T;
    a.C = (int)(NH * HS);
    a.scale = LOG2_E / sqrtf((float)HS);
    return a;
}

bool fits(int64_t HS)
{
    return HS == 16 || HS == 32 || HS == 64;
}

int attention_forward(const struct place *on, real *atty, float *logsum, const real *qkv, int64_t B,
                      int64_t T, int64_t NH, int64_t HS)
{
    attention a = describe(qkv, logsum, T, NH, HS);
    a.out = atty;
    return HS == 64   ? forward<64>(on, a, B, NH)
           : HS == 32 ? forward<32>(on, a, B, NH)
                      : forward<16>(on, a, B, NH);
}

int attention_backward(const struct place *on, real *dqkv, float *dots, const real *datty, const real *atty,
                       float *logsum, const real *qkv, int64_t B, int64_t T, int64_t NH, int64_t HS)
{
    attention a = describe(qkv, logsum, T, NH, HS);
    a.dqkv = dqkv;
    a.dots = dots;
    a.datty = datty;
    a.atty = atty;
    return HS == 64   ? backward<64>(on, a, B, NH)
           : HS == 32 ? backward<32>(on, a, B, NH)
                      : backward<16>(on, a, B, NH);
}

} // namespace

const struct gpt2_attention gpt2_attention_cuda = {fits, attention_forward, attention_backward};
