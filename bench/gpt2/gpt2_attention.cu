/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_attention.cu: fused causal attention on a GPU's tensor cores (Dao, arXiv:2307.08691). It keeps one
 * number per query instead of a (T, T) matrix. It handles bf16 heads of 16, 32 or 64 channels. nvcc compiles
 * it; the tests' stand-in for CUDA compiles it as C++.
 *
 * A block has a tile of queries, or of keys for the gradients of keys. Each of its warps holds some rows of
 * the tile in registers as the left side of products. The block goes through the rows of the other side in
 * order, and fetches the next rows while it works, so the bits are always the same. Backward recomputes the
 * matrix twice: once for the gradients of queries, and once for those of keys and values. So neither needs
 * atomic additions. */
#include <cuda_runtime.h>

#include <math.h>

extern "C" {
#include "bench/gpt2/gpt2_layers.h"
}
#include "bench/gpt2/gpt2_launch.h"
#include "bench/gpt2/tensor_core.h"

namespace
{

/* Rows per block and per warp (16 * M). Rows loaded from the other side serve M products. With M = 1, shared
 * memory would be slower than the tensor cores. */
const int TILE = 128, FORWARD_M = 2, DQ_M = 2, DKV_M = 2;
/* Rows of the other side that are fetched together, and that are multiplied together. Registers limit
 * them. */
const int KEYS = 64, DQ_KEYS = 32, QUERIES = 32, DKV_QUERIES = 16;
/* Their keys and values, at most 32 MiB, stay in the L2 cache of large GPUs. */
const int BLOCKS_AT_ONCE = 1024;
const float LOG2_E = 1.442695041f;

/* Rows are padded, so that rows that are read together lie in different banks. */
template <int HS, int N> struct alignas(16) rows {
    real x[N][HS + 8];
};

/* Starts to fetch rows from `first` on of a matrix whose rows are stride elements apart. Rows from n on
 * become zeros. All N_THREADS threads of the block call it. */
template <int N_THREADS, int HS, int N>
__device__ __forceinline__ void fetch_rows(rows<HS, N> &to, const real *from, int64_t stride, int first,
                                           int n)
{
    const int PER_ROW = HS / 8, BY = N_THREADS / PER_ROW;
    int row = (int)threadIdx.x / PER_ROW, col = (int)threadIdx.x % PER_ROW * 8;
    from += (first + row) * stride + col;
    for (int i = 0; i < N; i += BY)
        if (N % BY == 0 || i + row < N)
            copy_16_bytes(&to.x[i + row][col], from + i * stride, first + i + row < n);
}

/* The calling warp's first row in a tile, and the lane's g and t (tensor_core.h). */
template <int M> struct place_in_tile {
    static const int N_THREADS = TILE / (16 * M) * 32;
    int warp_row, lane, g, t;
    __device__ __forceinline__ place_in_tile()
        : warp_row((int)threadIdx.x / 32 * 16 * M), lane((int)threadIdx.x % 32), g(lane / 4), t(lane % 4)
    {
    }
    /* The row of element j of the m-th product's result. */
    __device__ __forceinline__ int row(int m, int j) const
    {
        return 16 * m + j / 2 * 8 + g;
    }
    __device__ __forceinline__ int col(int n, int j) const
    {
        return 8 * n + t * 2 + j % 2;
    }
};

/* Loads the warp's rows of a matrix, from row `first` on, as the left side of products. Rows from n on become
 * zeros. */
template <int HS, int M>
__device__ __forceinline__ void load_left(uint32_t (&to)[M][HS / 16][4], const real *from, int64_t stride,
                                          int first, int n, const place_in_tile<M> &at)
{
    for (int m = 0; m < M; m++)
        for (int j = 0; j < 4; j++) {
            int row = first + at.row(m, j % 2 * 2);
            const uint32_t *two = reinterpret_cast<const uint32_t *>(from + row * stride) + at.t + j / 2 * 4;
            for (int k = 0; k < HS / 16; k++)
                to[m][k][j] = row < n ? two[k * 8] : 0;
        }
}

/* matrix (16*M, 8*N) += left * transposed rows of b from `first` on */
template <int HS, int M, int N, int N_ROWS>
__device__ __forceinline__ void multiply_rows(float (&matrix)[M][N][4], const uint32_t (&left)[M][HS / 16][4],
                                              const rows<HS, N_ROWS> &b, int first,
                                              const place_in_tile<M> &at)
{
    for (int k = 0; k < HS / 16; k++)
        for (int n = 0; n < N; n += 2) {
            uint32_t right[4];
            load_matrices(right,
                          &b.x[first + n * 8 + at.lane / 16 * 8 + at.lane % 8][k * 16 + at.lane / 8 % 2 * 8]);
            for (int m = 0; m < M; m++) {
                mma_bf16(matrix[m][n], left[m][k], right);
                mma_bf16(matrix[m][n + 1], left[m][k], right + 2);
            }
        }
}

/* sum (16*M, HS) += rounded matrix (16*M, 8*N) * rows of b from `first` on */
template <int HS, int M, int N, int N_ROWS>
__device__ __forceinline__ void add_product(float (&sum)[M][HS / 8][4], const float (&matrix)[M][N][4],
                                            const rows<HS, N_ROWS> &b, int first, const place_in_tile<M> &at)
{
    for (int n = 0; n < N; n += 2) {
        uint32_t left[M][4];
        for (int m = 0; m < M; m++)
            for (int j = 0; j < 4; j++)
                left[m][j] = two_bf16(matrix[m][n + j / 2][j % 2 * 2], matrix[m][n + j / 2][j % 2 * 2 + 1]);
        for (int i = 0; i < HS / 8; i += 2) {
            uint32_t right[4];
            load_transposed(right, &b.x[first + n * 8 + at.lane % 16][i * 8 + at.lane / 16 * 8]);
            for (int m = 0; m < M; m++) {
                mma_bf16(sum[m][i], left[m], right);
                mma_bf16(sum[m][i + 1], left[m], right + 2);
            }
        }
    }
}

/* Writes the warp's rows, from row `first` on, each multiplied by its factor. */
template <int HS, int M>
__device__ __forceinline__ void store_rows(real *to, int64_t stride, int first, int n,
                                           const float (&sum)[M][HS / 8][4], const float (&factor)[M][2],
                                           const place_in_tile<M> &at)
{
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) {
            int row = first + at.row(m, 2 * half);
            uint32_t *two = reinterpret_cast<uint32_t *>(to + row * stride) + at.t;
            for (int i = 0; i < HS / 8 && row < n; i++)
                two[i * 4] = two_bf16(sum[m][i][2 * half] * factor[m][half],
                                      sum[m][i][2 * half + 1] * factor[m][half]);
        }
}

/* Maximum over the four lanes that share a row. */
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

struct attention {
    const real *qkv, *atty, *datty; /* (B, T, 3*C), (B, T, C), (B, T, C) */
    real *out, *dqkv;               /* the output of forward; (B, T, 3*C) */
    float *logsum, *dots;           /* (B, NH, T) each */
    int T, C, NH, n_heads, n_tiles; /* heads of the whole batch; tiles per head */
    int heads_at_once;
    float scale, grad_scale; /* of scores, for powers of two; of their gradients */
};

/* The tile of one head that a block computes. turn numbers the tiles by their amount of work. Blocks start in
 * the order of their numbers. Among the heads that run together, the longest tiles start first, so that all
 * end at about the same time. */
struct block_work {
    int head, turn;
    int64_t of_qkv, of_atty, of_logsum; /* beginning of the head */
    __device__ __forceinline__ explicit block_work(const attention &a)
    {
        int size = a.heads_at_once * a.n_tiles, before = (int)blockIdx.x / size * a.heads_at_once;
        int rest = (int)blockIdx.x % size, left = a.n_heads - before;
        int n = left < a.heads_at_once ? left : a.heads_at_once;
        head = before + rest % n;
        turn = rest / n;
        of_atty = (int64_t)(head / a.NH) * a.T * a.C + (int64_t)(head % a.NH) * (a.C / a.NH);
        of_qkv = (int64_t)(head / a.NH) * a.T * 3 * a.C + (int64_t)(head % a.NH) * (a.C / a.NH);
        of_logsum = (int64_t)head * a.T;
    }
};

/* The rows of keys and values that the next two kernels load in each iteration. */
template <int HS> struct of_keys {
    rows<HS, KEYS> k, v;
};

/* Starts to fetch the i-th of them. All threads of the block call it. */
template <int HS, int N_THREADS>
__device__ __forceinline__ void fetch_keys(of_keys<HS> &to, const attention &a, const block_work &work, int i)
{
    const real *k = a.qkv + work.of_qkv + a.C;
    fetch_rows<N_THREADS>(to.k, k, 3 * a.C, i * KEYS, a.T);
    fetch_rows<N_THREADS>(to.v, k + a.C, 3 * a.C, i * KEYS, a.T);
}

/* The number of them that a tile of queries from `first` on sees. */
__device__ __forceinline__ int n_seen(const attention &a, int first)
{
    int end = first + TILE < a.T ? first + TILE : a.T;
    return (end + KEYS - 1) / KEYS;
}

/* atty = softmax(q k^T) v. logsum: log2 of the sum of each query's weights. The largest score so far is
 * subtracted before a power is taken. When a larger score comes, the earlier sums are scaled down. */
template <int HS, int M>
__global__ void __launch_bounds__(place_in_tile<M>::N_THREADS, 2)
    attention_forward_kernel(const __grid_constant__ attention a)
{
    __shared__ of_keys<HS> keys[2];
    const place_in_tile<M> at;
    const block_work work(a);
    int T = a.T, first = (a.n_tiles - 1 - work.turn) * TILE, mine = first + at.warp_row;
    int n = n_seen(a, first);
    uint32_t left[M][HS / 16][4];
    float sum[M][HS / 8][4] = {}, top[M][2], total[M][2] = {};
    fetch_keys<HS, at.N_THREADS>(keys[0], a, work, 0);
    load_left<HS>(left, a.qkv + work.of_qkv, 3 * a.C, mine, T, at);
    for (int m = 0; m < M; m++)
        top[m][0] = top[m][1] = -INFINITY;
    for (int i = 0; i < n; i++) {
        const of_keys<HS> &on = keys[i % 2];
        wait_for_copies();
        __syncthreads(); /* all are loaded, and the previous ones are no longer used */
        if (i + 1 < n)
            fetch_keys<HS, at.N_THREADS>(keys[(i + 1) % 2], a, work, i + 1);
        int key = i * KEYS - mine; /* first key, relative to the warp's first query */
        if (key >= 16 * M || mine >= T)
            continue;
        float s[M][KEYS / 8][4] = {};
        multiply_rows<HS>(s, left, on.k, 0, at);
        if (key + KEYS > 1)
            for (int m = 0; m < M; m++)
                for (int c = 0; c < KEYS / 8; c++)
                    for (int j = 0; j < 4; j++)
                        if (key + at.col(c, j) > at.row(m, j))
                            s[m][c][j] = -INFINITY;
        for (int m = 0; m < M; m++)
            for (int half = 0; half < 2; half++) {
                float most = top[m][half];
                for (int c = 0; c < KEYS / 8; c++)
                    most = fmaxf(most, fmaxf(s[m][c][2 * half], s[m][c][2 * half + 1]));
                most = row_max(most);
                float shrink = power_of_two((top[m][half] - most) * a.scale), less = -most * a.scale;
                top[m][half] = most;
                total[m][half] *= shrink;
                for (int c = 0; c < KEYS / 8; c++)
                    for (int j = 2 * half; j < 2 * half + 2; j++) {
                        s[m][c][j] = power_of_two(__fmaf_rn(s[m][c][j], a.scale, less));
                        total[m][half] += s[m][c][j];
                    }
                for (int c = 0; c < HS / 8; c++)
                    for (int j = 2 * half; j < 2 * half + 2; j++)
                        sum[m][c][j] *= shrink;
            }
        add_product<HS>(sum, s, on.v, 0, at);
    }
    float factor[M][2];
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) {
            int row = mine + at.row(m, 2 * half);
            float all = row_sum(total[m][half]);
            factor[m][half] = 1.0f / all;
            if (at.t == 0 && row < T)
                a.logsum[work.of_logsum + row] = top[m][half] * a.scale + log2f(all);
        }
    store_rows<HS>(a.out + work.of_atty, a.C, mine, T, sum, factor, at);
}

/* Gradients of the queries. dots = atty . datty of each query, which is the weighted sum of the gradients of
 * its weights. */
template <int HS, int M>
__global__ void __launch_bounds__(place_in_tile<M>::N_THREADS, 2)
    attention_dq_kernel(const __grid_constant__ attention a)
{
    __shared__ of_keys<HS> keys[2];
    const place_in_tile<M> at;
    const block_work work(a);
    int T = a.T, first = (a.n_tiles - 1 - work.turn) * TILE, mine = first + at.warp_row;
    int n = n_seen(a, first);
    uint32_t left[M][HS / 16][4], dy[M][HS / 16][4], y[M][HS / 16][4];
    float dq[M][HS / 8][4] = {}, logsum[M][2], dot[M][2] = {};
    fetch_keys<HS, at.N_THREADS>(keys[0], a, work, 0);
    load_left<HS>(dy, a.datty + work.of_atty, a.C, mine, T, at);
    load_left<HS>(y, a.atty + work.of_atty, a.C, mine, T, at);
    load_left<HS>(left, a.qkv + work.of_qkv, 3 * a.C, mine, T, at);
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < HS / 16 * 4; i += 2) {
                uint32_t x = y[m][i / 4][i % 4 + half], d = dy[m][i / 4][i % 4 + half];
                dot[m][half] = __fmaf_rn(to_float((real)x), to_float((real)d), dot[m][half]);
                dot[m][half] = __fmaf_rn(to_float((real)(x >> 16)), to_float((real)(d >> 16)), dot[m][half]);
            }
            dot[m][half] = row_sum(dot[m][half]);
            int row = mine + at.row(m, 2 * half);
            logsum[m][half] = row < T ? a.logsum[work.of_logsum + row] : 0.0f;
            if (at.t == 0 && row < T)
                a.dots[work.of_logsum + row] = dot[m][half];
        }
    for (int i = 0; i < n; i++) {
        const of_keys<HS> &on = keys[i % 2];
        wait_for_copies();
        __syncthreads();
        if (i + 1 < n)
            fetch_keys<HS, at.N_THREADS>(keys[(i + 1) % 2], a, work, i + 1);
        for (int from = 0; from < KEYS; from += DQ_KEYS) {
            int key = i * KEYS + from - mine;
            if (key >= 16 * M || mine >= T)
                break;
            float s[M][DQ_KEYS / 8][4] = {}, d[M][DQ_KEYS / 8][4];
            for (int m = 0; m < M; m++)
                for (int c = 0; c < DQ_KEYS / 8; c++)
                    for (int j = 0; j < 4; j++)
                        d[m][c][j] = -dot[m][j / 2];
            multiply_rows<HS>(s, left, on.k, from, at);
            multiply_rows<HS>(d, dy, on.v, from, at);
            for (int m = 0; m < M; m++)
                for (int c = 0; c < DQ_KEYS / 8; c++)
                    for (int j = 0; j < 4; j++)
                        d[m][c][j] *= power_of_two(__fmaf_rn(s[m][c][j], a.scale, -logsum[m][j / 2]));
            if (key + DQ_KEYS > 1)
                for (int m = 0; m < M; m++)
                    for (int c = 0; c < DQ_KEYS / 8; c++)
                        for (int j = 0; j < 4; j++)
                            if (key + at.col(c, j) > at.row(m, j))
                                d[m][c][j] = 0;
            add_product<HS>(dq, d, on.k, from, at);
        }
    }
    float factor[M][2];
    for (int m = 0; m < M; m++)
        factor[m][0] = factor[m][1] = a.grad_scale;
    store_rows<HS>(a.dqkv + work.of_qkv, 3 * a.C, mine, T, dq, factor, at);
}

/* The rows that the next kernel loads in each iteration. */
template <int HS> struct of_queries {
    rows<HS, QUERIES> q, dy;
    alignas(16) float logsum[QUERIES], dot[QUERIES];
};

/* Starts to fetch the i-th of them. All threads of the block call it. Missing rows become zeros; they add
 * nothing, since dy is zero. */
template <int HS, int N_THREADS>
__device__ __forceinline__ void fetch_queries(of_queries<HS> &to, const attention &a, const block_work &work,
                                              int i)
{
    int row = (int)threadIdx.x % QUERIES, query = i * QUERIES + row;
    fetch_rows<N_THREADS>(to.q, a.qkv + work.of_qkv, 3 * a.C, i * QUERIES, a.T);
    fetch_rows<N_THREADS>(to.dy, a.datty + work.of_atty, a.C, i * QUERIES, a.T);
    if (threadIdx.x < QUERIES)
        copy_4_bytes(&to.logsum[row], a.logsum + work.of_logsum + query, query < a.T);
    else if (threadIdx.x < 2 * QUERIES)
        copy_4_bytes(&to.dot[row], a.dots + work.of_logsum + query, query < a.T);
}

/* Gradients of the keys and values. Here the matrix is transposed: a row is a key. */
template <int HS, int M>
__global__ void __launch_bounds__(place_in_tile<M>::N_THREADS, 2)
    attention_dkv_kernel(const __grid_constant__ attention a)
{
    __shared__ of_queries<HS> queries[2];
    /* The warp's rows of v, since registers have no space for them. Each lane uses its own elements. */
    __shared__ uint4 values[M][HS / 16][place_in_tile<M>::N_THREADS];
    const place_in_tile<M> at;
    const block_work work(a);
    int T = a.T, first = work.turn * TILE, mine = first + at.warp_row;
    const real *k = a.qkv + work.of_qkv + a.C;
    int n = (T + QUERIES - 1) / QUERIES;
    uint32_t left[M][HS / 16][4], v[M][HS / 16][4];
    float dk[M][HS / 8][4] = {}, dv[M][HS / 8][4] = {};
    fetch_queries<HS, at.N_THREADS>(queries[first / QUERIES % 2], a, work, first / QUERIES);
    load_left<HS>(v, k + a.C, 3 * a.C, mine, T, at);
    for (int m = 0; m < M; m++)
        for (int c = 0; c < HS / 16; c++)
            values[m][c][threadIdx.x] = make_uint4(v[m][c][0], v[m][c][1], v[m][c][2], v[m][c][3]);
    load_left<HS>(left, k, 3 * a.C, mine, T, at);
    for (int i = first / QUERIES; i < n; i++) {
        const of_queries<HS> &on = queries[i % 2];
        wait_for_copies();
        __syncthreads();
        if (i + 1 < n)
            fetch_queries<HS, at.N_THREADS>(queries[(i + 1) % 2], a, work, i + 1);
        for (int from = 0; from < QUERIES; from += DKV_QUERIES) {
            int query = i * QUERIES + from - mine; /* first query, relative to the warp's first key */
            if (query + DKV_QUERIES <= 0 || mine >= T)
                continue;
            float s[M][DKV_QUERIES / 8][4] = {}, d[M][DKV_QUERIES / 8][4];
            multiply_rows<HS>(s, left, on.q, from, at);
            for (int m = 0; m < M; m++)
                for (int c = 0; c < DKV_QUERIES / 8; c++)
                    for (int j = 0; j < 4; j++)
                        d[m][c][j] = -on.dot[from + at.col(c, j)];
            for (int m = 0; m < M; m++)
                for (int c = 0; c < HS / 16; c++) {
                    uint4 own = values[m][c][threadIdx.x];
                    v[m][c][0] = own.x, v[m][c][1] = own.y, v[m][c][2] = own.z, v[m][c][3] = own.w;
                }
            multiply_rows<HS>(d, v, on.dy, from, at);
            for (int m = 0; m < M; m++)
                for (int c = 0; c < DKV_QUERIES / 8; c++)
                    for (int j = 0; j < 4; j++) {
                        s[m][c][j] =
                            power_of_two(__fmaf_rn(s[m][c][j], a.scale, -on.logsum[from + at.col(c, j)]));
                        d[m][c][j] *= s[m][c][j];
                    }
            if (query < 16 * M - 1)
                for (int m = 0; m < M; m++)
                    for (int c = 0; c < DKV_QUERIES / 8; c++)
                        for (int j = 0; j < 4; j++)
                            if (at.row(m, j) > query + at.col(c, j))
                                s[m][c][j] = d[m][c][j] = 0;
            add_product<HS>(dv, s, on.dy, from, at);
            add_product<HS>(dk, d, on.q, from, at);
        }
    }
    float scale[M][2], one[M][2];
    for (int m = 0; m < M; m++) {
        scale[m][0] = scale[m][1] = a.grad_scale;
        one[m][0] = one[m][1] = 1;
    }
    store_rows<HS>(a.dqkv + work.of_qkv + a.C, 3 * a.C, mine, T, dk, scale, at);
    store_rows<HS>(a.dqkv + work.of_qkv + 2 * a.C, 3 * a.C, mine, T, dv, one, at);
}

template <int HS> int forward(const struct compute *on, attention a)
{
    return launch(on, "attention", attention_forward_kernel<HS, FORWARD_M>, a.n_heads * a.n_tiles,
                  place_in_tile<FORWARD_M>::N_THREADS, a);
}

template <int HS> int backward(const struct compute *on, attention a)
{
    int err = launch(on, "attention backward", attention_dq_kernel<HS, DQ_M>, a.n_heads * a.n_tiles,
                     place_in_tile<DQ_M>::N_THREADS, a);
    if (!err)
        err = launch(on, "attention backward", attention_dkv_kernel<HS, DKV_M>, a.n_heads * a.n_tiles,
                     place_in_tile<DKV_M>::N_THREADS, a);
    return err;
}

attention describe(const real *qkv, float *logsum, int64_t B, int64_t T, int64_t NH, int64_t HS)
{
    attention a = {};
    a.qkv = qkv;
    a.logsum = logsum;
    a.T = (int)T;
    a.C = (int)(NH * HS);
    a.NH = (int)NH;
    a.n_heads = (int)(B * NH);
    a.n_tiles = (int)ceil_div(T, TILE);
    a.heads_at_once = (int)ceil_div(a.n_heads, ceil_div((int64_t)a.n_heads * a.n_tiles, BLOCKS_AT_ONCE));
    a.grad_scale = 1.0f / sqrtf((float)HS);
    a.scale = a.grad_scale * LOG2_E;
    return a;
}

bool fits(int64_t HS)
{
    return HS == 16 || HS == 32 || HS == 64;
}

int attention_forward(const struct compute *on, real *atty, float *logsum, const real *qkv, int64_t B,
                      int64_t T, int64_t NH, int64_t HS)
{
    attention a = describe(qkv, logsum, B, T, NH, HS);
    a.out = atty;
    return HS == 64 ? forward<64>(on, a) : HS == 32 ? forward<32>(on, a) : forward<16>(on, a);
}

int attention_backward(const struct compute *on, real *dqkv, float *dots, const real *datty, const real *atty,
                       float *logsum, const real *qkv, int64_t B, int64_t T, int64_t NH, int64_t HS)
{
    attention a = describe(qkv, logsum, B, T, NH, HS);
    a.dqkv = dqkv;
    a.dots = dots;
    a.datty = datty;
    a.atty = atty;
    return HS == 64 ? backward<64>(on, a) : HS == 32 ? backward<32>(on, a) : backward<16>(on, a);
}

} // namespace

const struct gpt2_attention gpt2_attention_cuda = {fits, attention_forward, attention_backward};
