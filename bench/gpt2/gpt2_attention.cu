/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_attention.cu: the attention of gpt2_attention.h on a GPU's tensor cores (Dao, arXiv:2307.08691). It
 * handles bf16 heads of 16, 32 or 64 channels. Rows must be 16-byte aligned. nvcc compiles it; the tests'
 * stand-in for CUDA compiles it as C++.
 *
 * A block has a tile of queries, or of keys for the gradients of keys. Each of its warps holds some rows of
 * the tile in registers as the left side of products. The block goes through the rows of the other side in
 * order, and fetches the next rows while it works, so the bits are always the same. Tiles of queries lie on a
 * fixed grid of positions, and rows that the caller lacks are 0. Backward recomputes the
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
const float LOG2_E = 1.442695041f, LN_2 = 0.6931471806f;

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

/* Loads the lane's rows of a matrix as the left side of products. Missing rows (-1) become zeros. */
template <int HS, int M>
__device__ __forceinline__ void load_left(uint32_t (&to)[M][HS / 16][4], const real *from, int64_t stride,
                                          const int (&rows)[M][2], const place_in_tile<M> &at)
{
    for (int m = 0; m < M; m++)
        for (int j = 0; j < 4; j++) {
            int row = rows[m][j % 2];
            const uint32_t *two = reinterpret_cast<const uint32_t *>(from + row * stride) + at.t + j / 2 * 4;
            for (int k = 0; k < HS / 16; k++)
                to[m][k][j] = row >= 0 ? two[k * 8] : 0;
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

/* Where a result goes: to rows of bf16, or if to32 is not NULL, to rows of fp32, to which it may be added. */
struct output {
    real *to;
    float *to32;
    bool adds;
    int64_t stride;
};

/* Writes two neighbouring elements. */
__device__ __forceinline__ void write_two(const output &out, int64_t at, float x, float y)
{
    if (!out.to32) {
        *reinterpret_cast<uint32_t *>(out.to + at) = two_bf16(x, y);
        return;
    }
    out.to32[at] = out.adds ? out.to32[at] + x : x;
    out.to32[at + 1] = out.adds ? out.to32[at + 1] + y : y;
}

/* Writes the lane's rows of a head, which begins at `head`. Each is multiplied by its factor. */
template <int HS, int M>
__device__ __forceinline__ void store_rows(const output &out, int64_t head, const int (&rows)[M][2],
                                           const float (&sum)[M][HS / 8][4], const float (&factor)[M][2],
                                           const place_in_tile<M> &at)
{
    UNROLL
    for (int k = 0; k < M * 2 * (HS / 8); k++) {
        int m = k / (HS / 8) / 2, half = k / (HS / 8) % 2, i = k % (HS / 8);
        float x = sum[m][i][2 * half] * factor[m][half], y = sum[m][i][2 * half + 1] * factor[m][half];
        if (rows[m][half] >= 0)
            write_two(out, head + rows[m][half] * out.stride + i * 8 + at.t * 2, x, y);
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
    const real *q, *k, *v, *y, *dy;
    output out, dq, dk, dv; /* out: y of forward */
    float *logsum, *dots;   /* (B, NH, queries) each */
    const int32_t *document_start;
    gpt2_rows queries, keys;
    int64_t q_row, kv_row;
    int T, C, NH, n_queries, n_keys; /* of one batch row */
    int n_heads, n_tiles;            /* heads of the whole batch; tiles per head */
    int heads_at_once;
    float scale, grad_scale; /* of scores, for powers of two; of their gradients */
};

/* The tile of one head that a block computes. turn numbers the tiles by their amount of work. Blocks start in
 * the order of their numbers. Among the heads that run together, the longest tiles start first, so that all
 * end at about the same time. */
struct block_work {
    int head, turn;
    int64_t of_logsum, of_documents;
    __device__ __forceinline__ explicit block_work(const attention &a)
    {
        int size = a.heads_at_once * a.n_tiles, before = (int)blockIdx.x / size * a.heads_at_once;
        int rest = (int)blockIdx.x % size, left = a.n_heads - before;
        int n = left < a.heads_at_once ? left : a.heads_at_once;
        head = before + rest % n;
        turn = rest / n;
        of_logsum = (int64_t)head * a.n_queries;
        of_documents = (int64_t)(head / a.NH) * a.T;
    }
    /* The beginning of the head in an array with n rows of `row` elements for each batch row. */
    __device__ __forceinline__ int64_t in(const attention &a, int n, int64_t row) const
    {
        return head / a.NH * (n * row) + head % a.NH * (a.C / a.NH);
    }
};

/* Blocks of N rows of the two ranges of rows. A block begins at position from[i] of range i, and at every
 * N-th position after it, as far as to[i]. */
template <int N> struct blocks {
    int from[2], to[2], count[2];
    gpt2_rows rows;
    /* Those that have positions least .. end - 1. A block begins a multiple of N behind its range's first. */
    __device__ __forceinline__ blocks(const gpt2_rows &r, int least, int end) : rows(r)
    {
        for (int i = 0; i < 2; i++) {
            int first = (int)r.first[i], last = first + (int)r.n[i];
            from[i] = first + (least > first ? (least - first) / N * N : 0);
            to[i] = last < end ? last : end;
            count[i] = to[i] > from[i] ? (to[i] - from[i] + N - 1) / N : 0;
        }
    }
    __device__ __forceinline__ int n(void) const
    {
        return count[0] + count[1];
    }
    /* The first position of a block; the position behind its last; the row of its first position; the row
     * behind the last of its range. */
    __device__ __forceinline__ int position(int block) const
    {
        return block < count[0] ? from[0] + block * N : from[1] + (block - count[0]) * N;
    }
    __device__ __forceinline__ int behind(int block) const
    {
        int whole = position(block) + N, last = block < count[0] ? to[0] : to[1];
        return whole < last ? whole : last;
    }
    __device__ __forceinline__ int row(int block) const
    {
        return position(block) - (int)(block < count[0] ? rows.first[0] : rows.first[1] - rows.n[0]);
    }
    __device__ __forceinline__ int end(int block) const
    {
        return (int)(block < count[0] ? rows.n[0] : rows.n[0] + rows.n[1]);
    }
};

/* The tiles of the grid that have queries: those of the first range, then those of the second that the first
 * lacks. */
struct query_tiles {
    int first, n, first_of_second, n_of_second;
    __host__ __device__ __forceinline__ explicit query_tiles(const gpt2_rows &r)
    {
        int end[2], begin[2];
        for (int i = 0; i < 2; i++) {
            begin[i] = (int)(r.first[i] / TILE);
            end[i] = r.n[i] ? (int)((r.first[i] + r.n[i] - 1) / TILE) + 1 : begin[i];
        }
        if (end[0] > begin[0] && begin[1] < end[0] && end[1] > begin[1])
            begin[1] = end[0];
        first = begin[0];
        n = end[0] - begin[0];
        first_of_second = begin[1];
        n_of_second = end[1] - begin[1];
    }
    /* The first position of a tile. */
    __device__ __forceinline__ int position(int tile) const
    {
        return TILE * (tile < n ? first + tile : first_of_second + tile - n);
    }
};

/* The lane's rows of the caller's queries, or -1, and the first keys that they see, counted from position
 * `mine`. */
template <int M>
__device__ __forceinline__ void find_queries(int (&row)[M][2], int (&start)[M][2], const attention &a,
                                             const block_work &work, int mine, const place_in_tile<M> &at)
{
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) {
            int p = mine + at.row(m, 2 * half);
            row[m][half] = (int)gpt2_row_at(&a.queries, p);
            start[m][half] =
                a.document_start && p < a.T ? a.document_start[work.of_documents + p] - mine : -mine;
        }
}

/* Whether a query sees a key. Keys from `behind` on are not there. */
__device__ __forceinline__ bool is_seen(int key, int query, int start, int behind)
{
    return key <= query && key >= start && key < behind;
}

/* The first key that a tile of queries from `first` on sees. */
__device__ __forceinline__ int first_seen(const attention &a, const block_work &work, int first)
{
    return a.document_start ? a.document_start[work.of_documents + first] : 0;
}

/* The rows of keys and values that the next two kernels load in each iteration. */
template <int HS> struct of_keys {
    rows<HS, KEYS> k, v;
};

/* Starts to fetch the i-th of them. All threads of the block call it. */
template <int HS, int N_THREADS>
__device__ __forceinline__ void fetch_keys(of_keys<HS> &to, const attention &a, const block_work &work,
                                           const blocks<KEYS> &list, int i)
{
    int64_t head = work.in(a, a.n_keys, a.kv_row);
    fetch_rows<N_THREADS>(to.k, a.k + head, a.kv_row, list.row(i), list.end(i));
    fetch_rows<N_THREADS>(to.v, a.v + head, a.kv_row, list.row(i), list.end(i));
}

/* y = softmax(q k^T) v, and logsum. The largest score so far is subtracted before a power is taken. When a
 * larger score comes, the earlier sums are scaled down. */
template <int HS, int M>
__global__ void __launch_bounds__(place_in_tile<M>::N_THREADS, 2)
    attention_forward_kernel(const __grid_constant__ attention a)
{
    __shared__ of_keys<HS> keys[2];
    const place_in_tile<M> at;
    const block_work work(a);
    int first = query_tiles(a.queries).position(a.n_tiles - 1 - work.turn), mine = first + at.warp_row;
    const blocks<KEYS> list(a.keys, first_seen(a, work, first), first + TILE);
    int n = list.n(), row[M][2], start[M][2];
    find_queries<M>(row, start, a, work, mine, at);
    uint32_t left[M][HS / 16][4];
    float sum[M][HS / 8][4] = {}, top[M][2], total[M][2] = {};
    if (n)
        fetch_keys<HS, at.N_THREADS>(keys[0], a, work, list, 0);
    load_left<HS>(left, a.q + work.in(a, a.n_queries, a.q_row), a.q_row, row, at);
    for (int m = 0; m < M; m++)
        top[m][0] = top[m][1] = -INFINITY;
    for (int i = 0; i < n; i++) {
        const of_keys<HS> &on = keys[i % 2];
        wait_for_copies();
        __syncthreads(); /* all are loaded, and the previous ones are no longer used */
        if (i + 1 < n)
            fetch_keys<HS, at.N_THREADS>(keys[(i + 1) % 2], a, work, list, i + 1);
        int key = list.position(i) - mine; /* first key, relative to the warp's first query */
        if (key >= 16 * M || mine >= a.T)
            continue;
        float s[M][KEYS / 8][4] = {};
        multiply_rows<HS>(s, left, on.k, 0, at);
        int behind = list.behind(i) - mine;
        if (key + KEYS > 1 || behind < key + KEYS || a.document_start)
            for (int m = 0; m < M; m++)
                for (int c = 0; c < KEYS / 8; c++)
                    for (int j = 0; j < 4; j++)
                        if (!is_seen(key + at.col(c, j), at.row(m, j), start[m][j / 2], behind))
                            s[m][c][j] = -INFINITY;
        for (int m = 0; m < M; m++)
            for (int half = 0; half < 2; half++) {
                float most = top[m][half];
                for (int c = 0; c < KEYS / 8; c++)
                    most = fmaxf(most, fmaxf(s[m][c][2 * half], s[m][c][2 * half + 1]));
                most = row_max(most);
                float used = most == -INFINITY ? 0.0f : most; /* -INFINITY: it has seen no key yet */
                float shrink = power_of_two((top[m][half] - used) * a.scale), less = -used * a.scale;
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
            float all = row_sum(total[m][half]);
            factor[m][half] = all == 0 ? 0.0f : 1.0f / all;
            if (at.t == 0 && row[m][half] >= 0)
                a.logsum[work.of_logsum + row[m][half]] = (top[m][half] * a.scale + log2f(all)) * LN_2;
        }
    store_rows<HS>(a.out, work.in(a, a.n_queries, a.out.stride), row, sum, factor, at);
}

/* Gradients of the queries. dots = y . dy of each query, which is the weighted sum of the gradients of
 * its weights. */
template <int HS, int M>
__global__ void __launch_bounds__(place_in_tile<M>::N_THREADS, 2)
    attention_dq_kernel(const __grid_constant__ attention a)
{
    __shared__ of_keys<HS> keys[2];
    const place_in_tile<M> at;
    const block_work work(a);
    int first = query_tiles(a.queries).position(a.n_tiles - 1 - work.turn), mine = first + at.warp_row;
    const blocks<KEYS> list(a.keys, first_seen(a, work, first), first + TILE);
    int n = list.n(), row[M][2], start[M][2];
    find_queries<M>(row, start, a, work, mine, at);
    uint32_t left[M][HS / 16][4], dy[M][HS / 16][4], y[M][HS / 16][4];
    float dq[M][HS / 8][4] = {}, logsum[M][2], dot[M][2] = {};
    if (n)
        fetch_keys<HS, at.N_THREADS>(keys[0], a, work, list, 0);
    int64_t of_y = work.in(a, a.n_queries, a.C);
    load_left<HS>(dy, a.dy + of_y, a.C, row, at);
    load_left<HS>(y, a.y + of_y, a.C, row, at);
    load_left<HS>(left, a.q + work.in(a, a.n_queries, a.q_row), a.q_row, row, at);
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < HS / 16 * 4; i += 2) {
                uint32_t x = y[m][i / 4][i % 4 + half], d = dy[m][i / 4][i % 4 + half];
                dot[m][half] = __fmaf_rn(to_float((real)x), to_float((real)d), dot[m][half]);
                dot[m][half] = __fmaf_rn(to_float((real)(x >> 16)), to_float((real)(d >> 16)), dot[m][half]);
            }
            dot[m][half] = row_sum(dot[m][half]);
            int r = row[m][half];
            logsum[m][half] = r >= 0 ? a.logsum[work.of_logsum + r] * LOG2_E : 0.0f;
            if (at.t == 0 && r >= 0)
                a.dots[work.of_logsum + r] = dot[m][half];
        }
    for (int i = 0; i < n; i++) {
        const of_keys<HS> &on = keys[i % 2];
        wait_for_copies();
        __syncthreads();
        if (i + 1 < n)
            fetch_keys<HS, at.N_THREADS>(keys[(i + 1) % 2], a, work, list, i + 1);
        for (int from = 0; from < KEYS; from += DQ_KEYS) {
            int key = list.position(i) + from - mine;
            if (key >= 16 * M || mine >= a.T)
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
            int behind = list.behind(i) - mine;
            if (key + DQ_KEYS > 1 || behind < key + DQ_KEYS || a.document_start)
                for (int m = 0; m < M; m++)
                    for (int c = 0; c < DQ_KEYS / 8; c++)
                        for (int j = 0; j < 4; j++)
                            if (!is_seen(key + at.col(c, j), at.row(m, j), start[m][j / 2], behind))
                                d[m][c][j] = 0;
            add_product<HS>(dq, d, on.k, from, at);
        }
    }
    float factor[M][2];
    for (int m = 0; m < M; m++)
        factor[m][0] = factor[m][1] = a.grad_scale;
    find_queries<M>(row, start, a, work, mine, at); /* again, since registers have no space for them */
    store_rows<HS>(a.dq, work.in(a, a.n_queries, a.dq.stride), row, dq, factor, at);
}

/* The rows that the next kernel loads in each iteration. */
template <int HS> struct of_queries {
    rows<HS, QUERIES> q, dy;
    alignas(16) float logsum[QUERIES], dot[QUERIES];
    alignas(16) int start[QUERIES];
};

/* Starts to fetch the i-th of them. All threads of the block call it. Missing rows become zeros; they add
 * nothing, since dy is zero. */
template <int HS, int N_THREADS>
__device__ __forceinline__ void fetch_queries(of_queries<HS> &to, const attention &a, const block_work &work,
                                              const blocks<QUERIES> &list, int i)
{
    int at = (int)threadIdx.x % QUERIES, row = list.row(i), end = list.end(i), p = list.position(i) + at;
    fetch_rows<N_THREADS>(to.q, a.q + work.in(a, a.n_queries, a.q_row), a.q_row, row, end);
    fetch_rows<N_THREADS>(to.dy, a.dy + work.in(a, a.n_queries, a.C), a.C, row, end);
    if (threadIdx.x < QUERIES)
        copy_4_bytes(&to.logsum[at], a.logsum + work.of_logsum + row + at, row + at < end);
    else if (threadIdx.x < 2 * QUERIES)
        copy_4_bytes(&to.dot[at], a.dots + work.of_logsum + row + at, row + at < end);
    else if (threadIdx.x < 3 * QUERIES && a.document_start)
        copy_4_bytes(&to.start[at], a.document_start + work.of_documents + p, p < a.T);
}

/* The position behind the last query that may see a key at a position before `end`. */
__device__ __forceinline__ int last_seeing(const attention &a, const block_work &work, int end)
{
    int from = 0, to = a.T;
    while (a.document_start && from < to) {
        int middle = (from + to) / 2;
        if (a.document_start[work.of_documents + middle] < end)
            from = middle + 1;
        else
            to = middle;
    }
    return to;
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
    const blocks<TILE> tiles(a.keys, 0, a.T);
    int first = tiles.position(work.turn), mine = first + at.warp_row, row[M][2];
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) {
            int r = tiles.row(work.turn) + at.warp_row + at.row(m, 2 * half);
            row[m][half] = r < tiles.end(work.turn) ? r : -1;
        }
    const blocks<QUERIES> list(a.queries, first, last_seeing(a, work, first + TILE));
    int n = list.n();
    int64_t of_k = work.in(a, a.n_keys, a.kv_row);
    uint32_t left[M][HS / 16][4], v[M][HS / 16][4];
    float dk[M][HS / 8][4] = {}, dv[M][HS / 8][4] = {};
    if (n)
        fetch_queries<HS, at.N_THREADS>(queries[0], a, work, list, 0);
    load_left<HS>(v, a.v + of_k, a.kv_row, row, at);
    for (int m = 0; m < M; m++)
        for (int c = 0; c < HS / 16; c++)
            values[m][c][threadIdx.x] = make_uint4(v[m][c][0], v[m][c][1], v[m][c][2], v[m][c][3]);
    load_left<HS>(left, a.k + of_k, a.kv_row, row, at);
    for (int i = 0; i < n; i++) {
        const of_queries<HS> &on = queries[i % 2];
        wait_for_copies();
        __syncthreads();
        if (i + 1 < n)
            fetch_queries<HS, at.N_THREADS>(queries[(i + 1) % 2], a, work, list, i + 1);
        for (int from = 0; from < QUERIES; from += DKV_QUERIES) {
            int query = list.position(i) + from - mine; /* first query, relative to the warp's first key */
            if (query + DKV_QUERIES <= 0 || mine >= a.T)
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
                        s[m][c][j] = power_of_two(
                            __fmaf_rn(s[m][c][j], a.scale, -on.logsum[from + at.col(c, j)] * LOG2_E));
                        d[m][c][j] *= s[m][c][j];
                    }
            if (query < 16 * M - 1 || a.document_start)
                for (int m = 0; m < M; m++)
                    for (int c = 0; c < DKV_QUERIES / 8; c++)
                        for (int j = 0; j < 4; j++)
                            if (at.row(m, j) > query + at.col(c, j) ||
                                (a.document_start && mine + at.row(m, j) < on.start[from + at.col(c, j)]))
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
    int64_t of_dk = work.in(a, a.n_keys, a.dk.stride);
    store_rows<HS>(a.dk, of_dk, row, dk, scale, at);
    store_rows<HS>(a.dv, of_dk, row, dv, one, at);
}

/* The number of blocks that compute n_tiles of each head. */
unsigned cut(attention *a, int64_t n_tiles)
{
    a->n_tiles = (int)n_tiles;
    a->heads_at_once = (int)ceil_div(a->n_heads, ceil_div(a->n_heads * n_tiles, BLOCKS_AT_ONCE));
    return (unsigned)(a->n_heads * n_tiles);
}

unsigned cut_queries(attention *a)
{
    const query_tiles tiles(a->queries);
    return cut(a, tiles.n + tiles.n_of_second);
}

unsigned cut_keys(attention *a)
{
    return cut(a, ceil_div(a->keys.n[0], TILE) + ceil_div(a->keys.n[1], TILE));
}

template <int HS> int forward(const struct compute *on, attention a)
{
    unsigned n = cut_queries(&a);
    return n ? launch(on, "attention", attention_forward_kernel<HS, FORWARD_M>, n,
                      place_in_tile<FORWARD_M>::N_THREADS, a)
             : 0;
}

template <int HS> int backward(const struct compute *on, attention a)
{
    unsigned n = cut_queries(&a);
    int err = n ? launch(on, "attention backward", attention_dq_kernel<HS, DQ_M>, n,
                         place_in_tile<DQ_M>::N_THREADS, a)
                : 0;
    n = cut_keys(&a);
    return err || !n ? err
                     : launch(on, "attention backward", attention_dkv_kernel<HS, DKV_M>, n,
                              place_in_tile<DKV_M>::N_THREADS, a);
}

attention describe(const gpt2_attention_args *args)
{
    attention a = {};
    a.q = args->q;
    a.k = args->k;
    a.v = args->v;
    a.q_row = args->q_row;
    a.kv_row = args->kv_row;
    a.document_start = args->document_start;
    a.queries = args->queries;
    a.keys = args->keys;
    a.T = (int)args->T;
    a.C = (int)(args->NH * args->HS);
    a.NH = (int)args->NH;
    a.n_queries = (int)gpt2_n_rows(&args->queries);
    a.n_keys = (int)gpt2_n_rows(&args->keys);
    a.n_heads = (int)(args->B * args->NH);
    a.grad_scale = 1.0f / sqrtf((float)args->HS);
    a.scale = a.grad_scale * LOG2_E;
    return a;
}

bool fits(int64_t HS)
{
    return HS == 16 || HS == 32 || HS == 64;
}

int attention_forward(const struct compute *on, const gpt2_attention_args *args, real *y, float *y32,
                      float *logsum)
{
    attention a = describe(args);
    a.out = {y, y32, false, a.C};
    a.logsum = logsum;
    int64_t HS = args->HS;
    return HS == 64 ? forward<64>(on, a) : HS == 32 ? forward<32>(on, a) : forward<16>(on, a);
}

int attention_backward(const struct compute *on, const gpt2_attention_args *args, const real *dy,
                       const real *y, const float *logsum, float *dots, const gpt2_attention_grads *grads)
{
    attention a = describe(args);
    a.dq = {grads->dq, grads->dq32, true, grads->dq32 ? a.C : grads->dq_row};
    a.dk = {grads->dk, grads->dk32, true, grads->dk32 ? a.C : grads->dkv_row};
    a.dv = {grads->dv, grads->dv32, true, grads->dv32 ? a.C : grads->dkv_row};
    a.logsum = const_cast<float *>(logsum);
    a.dots = dots;
    a.dy = dy;
    a.y = y;
    int64_t HS = args->HS;
    return HS == 64 ? backward<64>(on, a) : HS == 32 ? backward<32>(on, a) : backward<16>(on, a);
}

} // namespace

const struct gpt2_attention gpt2_attention_cuda = {fits, attention_forward, attention_backward};
