/* SPDX-License-Identifier: Apache-2.0 */
/* attention.cu: the attention of attention.h on a GPU's tensor cores (Dao, arXiv:2307.08691). It
 * handles bf16 heads of 16, 32, 64, 80, 96 or 128 channels. Rows must be 16-byte aligned. nvcc compiles it;
 * the tests' stand-in for CUDA compiles it as C++.
 *
 * A block has a tile of queries, or of keys for the gradients of keys. Each of its warps holds some rows of
 * the tile in registers as the left side of products. The block goes through the rows of the other side in
 * order, and fetches the next rows while it works, so the bits are always the same. For a tile of keys these
 * are the queries of all heads that share it, head by head. Tiles of queries lie on a fixed grid of
 * positions, and rows that the caller lacks are 0. Backward recomputes the matrix twice: once for the
 * gradients of queries, and once for those of keys and values. So neither needs atomic additions. */
#include <cuda_runtime.h>

#include <math.h>

extern "C" {
#include "bench/model/layers.h"
}
#include "bench/model/launch.h"
#include "bench/model/tensor_core.h"

namespace
{

/* Warps and threads of a block. */
const int N_WARPS = 4, N_THREADS = 32 * N_WARPS;

/* Sizes for heads of HS channels. */
template <int HS> struct sizes {
    /* A warp has 16 * M rows. Rows loaded from the other side serve M products, so with M = 1 shared memory
     * is slower than the tensor cores. But for large heads, registers do not have space for more. */
    static const int M = HS > 64 ? 1 : 2, TILE = 16 * M * N_WARPS;
    /* Rows of the other side that are fetched together. Shared memory limits them. */
    static const int KEYS = HS > 64 ? 32 : 64, QUERIES = HS > 64 ? 16 : 32;
    /* Rows of these that are multiplied together. Registers limit them. */
    static const int DQ_KEYS = 32, DKV_QUERIES = 16;
};

/* Their keys and values, at most 32 MiB, stay in the L2 cache of large GPUs. */
const int BLOCKS_AT_ONCE = 1024;
const float LOG2_E = 1.442695041f, LN_2 = 0.6931471806f;

/* Rows are padded, so that rows that are read together lie in different banks. */
template <int HS, int N> struct alignas(16) rows {
    real x[N][HS + 8];
};

/* Starts to fetch rows from `first` on of a matrix whose rows are stride elements apart. Rows from n on
 * become zeros. All threads of the block call it. */
template <int HS, int N>
__device__ __forceinline__ void fetch_rows(rows<HS, N> &to, const real *from, int64_t stride, int first,
                                           int n)
{
    const int PER_ROW = HS / 8, BY = N_THREADS / PER_ROW;
    int row = (int)threadIdx.x / PER_ROW, col = (int)threadIdx.x % PER_ROW * 8;
    from += (first + row) * stride + col;
    for (int i = 0; i < N; i += BY)
        if ((N_THREADS % PER_ROW == 0 || row < BY) && (N % BY == 0 || i + row < N))
            copy_16_bytes(&to.x[i + row][col], from + i * stride, first + i + row < n);
}

/* The calling warp's first row in a tile, and the lane's g and t (tensor_core.h). */
template <int M> struct place_in_tile {
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
    model_rows queries, keys;
    int64_t q_row, kv_row;
    int B, T, C, NH, n_kv, HS, n_queries, n_keys; /* of one batch row */
    int sharing;                                  /* heads of queries for each head of keys */
    int n_heads, n_tiles;                         /* heads of the whole batch; tiles per head */
    int heads_at_once;
    float scale, grad_scale; /* of scores, for powers of two; of their gradients */
};

/* The beginning of a head of queries, or of keys, in an array with `row` elements between its rows. Heads are
 * counted over the whole batch. */
__device__ __forceinline__ int64_t query_head(const attention &a, int head, int64_t row)
{
    return head / a.NH * (a.n_queries * row) + head % a.NH * a.HS;
}

__device__ __forceinline__ int64_t key_head(const attention &a, int head, int64_t row)
{
    return head / a.n_kv * (a.n_keys * row) + head % a.n_kv * a.HS;
}

/* The tile of one head that a block computes: a head of queries, or of keys for their gradients. turn numbers
 * the tiles by their amount of work. Blocks start in the order of their numbers. Among the heads that run
 * together, the longest tiles start first, so that all end at about the same time. */
struct block_work {
    int head, turn;
    int64_t of_documents;
    /* Each batch row has `heads` of these heads. */
    __device__ __forceinline__ block_work(const attention &a, int heads)
    {
        int size = a.heads_at_once * a.n_tiles, before = (int)blockIdx.x / size * a.heads_at_once;
        int rest = (int)blockIdx.x % size, left = a.n_heads - before;
        int n = left < a.heads_at_once ? left : a.heads_at_once;
        head = before + rest % n;
        turn = rest / n;
        of_documents = (int64_t)(head / heads) * a.T;
    }
};

/* Blocks of N rows of the two ranges of rows. A block begins at position from[i] of range i, and at every
 * N-th position after it, as far as to[i]. */
template <int N> struct blocks {
    int from[2], to[2], count[2];
    model_rows rows;
    /* Those that have positions least .. end - 1. A block begins a multiple of N behind its range's first. */
    __device__ __forceinline__ blocks(const model_rows &r, int least, int end) : rows(r)
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
template <int TILE> struct query_tiles {
    int first, n, first_of_second, n_of_second;
    __host__ __device__ __forceinline__ explicit query_tiles(const model_rows &r)
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
            row[m][half] = (int)model_row_at(&a.queries, p);
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
    rows<HS, sizes<HS>::KEYS> k, v;
};

/* Starts to fetch the i-th of them. All threads of the block call it. */
template <int HS>
__device__ __forceinline__ void fetch_keys(of_keys<HS> &to, const attention &a, const block_work &work,
                                           const blocks<sizes<HS>::KEYS> &list, int i)
{
    int64_t head = key_head(a, work.head / a.sharing, a.kv_row);
    fetch_rows(to.k, a.k + head, a.kv_row, list.row(i), list.end(i));
    fetch_rows(to.v, a.v + head, a.kv_row, list.row(i), list.end(i));
}

/* y = softmax(q k^T) v, and logsum. The largest score so far is subtracted before a power is taken. When a
 * larger score comes, the earlier sums are scaled down. */
template <int HS>
__global__ void __launch_bounds__(N_THREADS, 2) attention_forward_kernel(const __grid_constant__ attention a)
{
    const int M = sizes<HS>::M, TILE = sizes<HS>::TILE, KEYS = sizes<HS>::KEYS;
    __shared__ of_keys<HS> keys[2];
    const place_in_tile<M> at;
    const block_work work(a, a.NH);
    int first = query_tiles<TILE>(a.queries).position(a.n_tiles - 1 - work.turn), mine = first + at.warp_row;
    const blocks<KEYS> list(a.keys, first_seen(a, work, first), first + TILE);
    int n = list.n(), row[M][2], start[M][2];
    find_queries<M>(row, start, a, work, mine, at);
    uint32_t left[M][HS / 16][4];
    float sum[M][HS / 8][4] = {}, top[M][2], total[M][2] = {};
    if (n)
        fetch_keys(keys[0], a, work, list, 0);
    load_left<HS>(left, a.q + query_head(a, work.head, a.q_row), a.q_row, row, at);
    for (int m = 0; m < M; m++)
        top[m][0] = top[m][1] = -INFINITY;
    for (int i = 0; i < n; i++) {
        const of_keys<HS> &on = keys[i % 2];
        wait_for_copies();
        __syncthreads(); /* all are loaded, and the previous ones are no longer used */
        if (i + 1 < n)
            fetch_keys(keys[(i + 1) % 2], a, work, list, i + 1);
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
    int64_t of_logsum = (int64_t)work.head * a.n_queries;
    float factor[M][2];
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) {
            float all = row_sum(total[m][half]);
            factor[m][half] = all == 0 ? 0.0f : 1.0f / all;
            if (at.t == 0 && row[m][half] >= 0)
                a.logsum[of_logsum + row[m][half]] = (top[m][half] * a.scale + log2f(all)) * LN_2;
        }
    store_rows<HS>(a.out, query_head(a, work.head, a.out.stride), row, sum, factor, at);
}

/* Gradients of the queries. dots = y . dy of each query, which is the weighted sum of the gradients of
 * its weights. */
template <int HS>
__global__ void __launch_bounds__(N_THREADS, 2) attention_dq_kernel(const __grid_constant__ attention a)
{
    const int M = sizes<HS>::M, TILE = sizes<HS>::TILE, KEYS = sizes<HS>::KEYS, DQ_KEYS = sizes<HS>::DQ_KEYS;
    __shared__ of_keys<HS> keys[2];
    const place_in_tile<M> at;
    const block_work work(a, a.NH);
    int first = query_tiles<TILE>(a.queries).position(a.n_tiles - 1 - work.turn), mine = first + at.warp_row;
    const blocks<KEYS> list(a.keys, first_seen(a, work, first), first + TILE);
    int n = list.n(), row[M][2], start[M][2];
    find_queries<M>(row, start, a, work, mine, at);
    uint32_t left[M][HS / 16][4], dy[M][HS / 16][4], y[M][HS / 16][4];
    float dq[M][HS / 8][4] = {}, logsum[M][2], dot[M][2] = {};
    if (n)
        fetch_keys(keys[0], a, work, list, 0);
    int64_t of_y = query_head(a, work.head, a.C), of_logsum = (int64_t)work.head * a.n_queries;
    load_left<HS>(dy, a.dy + of_y, a.C, row, at);
    load_left<HS>(y, a.y + of_y, a.C, row, at);
    load_left<HS>(left, a.q + query_head(a, work.head, a.q_row), a.q_row, row, at);
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) {
            for (int i = 0; i < HS / 16 * 4; i += 2) {
                uint32_t x = y[m][i / 4][i % 4 + half], d = dy[m][i / 4][i % 4 + half];
                dot[m][half] = __fmaf_rn(to_float((real)x), to_float((real)d), dot[m][half]);
                dot[m][half] = __fmaf_rn(to_float((real)(x >> 16)), to_float((real)(d >> 16)), dot[m][half]);
            }
            dot[m][half] = row_sum(dot[m][half]);
            int r = row[m][half];
            logsum[m][half] = r >= 0 ? a.logsum[of_logsum + r] * LOG2_E : 0.0f;
            if (at.t == 0 && r >= 0)
                a.dots[of_logsum + r] = dot[m][half];
        }
    for (int i = 0; i < n; i++) {
        const of_keys<HS> &on = keys[i % 2];
        wait_for_copies();
        __syncthreads();
        if (i + 1 < n)
            fetch_keys(keys[(i + 1) % 2], a, work, list, i + 1);
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
    store_rows<HS>(a.dq, query_head(a, work.head, a.dq.stride), row, dq, factor, at);
}

/* The rows that the next kernel loads in each iteration. */
template <int HS> struct of_queries {
    static const int N = sizes<HS>::QUERIES;
    rows<HS, N> q, dy;
    alignas(16) float logsum[N], dot[N];
    alignas(16) int start[N];
};

/* Starts to fetch those of a head and a block of the list. All threads of the block call it. Missing rows
 * become zeros; they add nothing, since dy is zero. */
template <int HS>
__device__ __forceinline__ void fetch_queries(of_queries<HS> &to, const attention &a, const block_work &work,
                                              const blocks<sizes<HS>::QUERIES> &list, int head, int block)
{
    const int N = sizes<HS>::QUERIES;
    int at = (int)threadIdx.x % N, row = list.row(block), end = list.end(block);
    int64_t of_logsum = (int64_t)head * a.n_queries + row + at;
    fetch_rows(to.q, a.q + query_head(a, head, a.q_row), a.q_row, row, end);
    fetch_rows(to.dy, a.dy + query_head(a, head, a.C), a.C, row, end);
    if (threadIdx.x < N)
        copy_4_bytes(&to.logsum[at], a.logsum + of_logsum, row + at < end);
    else if (threadIdx.x < 2 * N)
        copy_4_bytes(&to.dot[at], a.dots + of_logsum, row + at < end);
    else if (threadIdx.x < 3 * N && a.document_start) {
        int p = list.position(block) + at;
        copy_4_bytes(&to.start[at], a.document_start + work.of_documents + p, p < a.T);
    }
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

/* The lane's rows of a tile of the caller's keys, or -1. */
template <int M, int TILE>
__device__ __forceinline__ void find_keys(int (&row)[M][2], const blocks<TILE> &tiles, int tile,
                                          const place_in_tile<M> &at)
{
    for (int m = 0; m < M; m++)
        for (int half = 0; half < 2; half++) {
            int r = tiles.row(tile) + at.warp_row + at.row(m, 2 * half);
            row[m][half] = r < tiles.end(tile) ? r : -1;
        }
}

/* Gradients of the keys and values. Here the matrix is transposed: a row is a key. */
template <int HS>
__global__ void __launch_bounds__(N_THREADS, 2) attention_dkv_kernel(const __grid_constant__ attention a)
{
    const int M = sizes<HS>::M, TILE = sizes<HS>::TILE, QUERIES = sizes<HS>::QUERIES,
              DKV_QUERIES = sizes<HS>::DKV_QUERIES;
    __shared__ of_queries<HS> queries[2];
    /* The warp's rows of v, since registers have no space for them. Each lane uses its own elements. */
    __shared__ uint4 values[M][HS / 16][N_THREADS];
    const place_in_tile<M> at;
    const block_work work(a, a.n_kv);
    const blocks<TILE> tiles(a.keys, 0, a.T);
    int first = tiles.position(work.turn), mine = first + at.warp_row, row[M][2];
    find_keys(row, tiles, work.turn, at);
    const blocks<QUERIES> list(a.queries, first, last_seeing(a, work, first + TILE));
    int n = list.n(), n_all = n * a.sharing, head = work.head * a.sharing, block = 0;
    int64_t of_k = key_head(a, work.head, a.kv_row);
    uint32_t left[M][HS / 16][4], v[M][HS / 16][4];
    float dk[M][HS / 8][4] = {}, dv[M][HS / 8][4] = {};
    if (n)
        fetch_queries(queries[0], a, work, list, head, block);
    load_left<HS>(v, a.v + of_k, a.kv_row, row, at);
    for (int m = 0; m < M; m++)
        for (int c = 0; c < HS / 16; c++)
            values[m][c][threadIdx.x] = make_uint4(v[m][c][0], v[m][c][1], v[m][c][2], v[m][c][3]);
    load_left<HS>(left, a.k + of_k, a.kv_row, row, at);
    for (int i = 0; i < n_all; i++) {
        const of_queries<HS> &on = queries[i % 2];
        wait_for_copies();
        __syncthreads();
        int position = list.position(block) - mine; /* of the first query, relative to the first key */
        if (++block == n) {                         /* the next head that shares the keys */
            block = 0;
            head++;
        }
        if (i + 1 < n_all)
            fetch_queries(queries[(i + 1) % 2], a, work, list, head, block);
        for (int from = 0; from < QUERIES; from += DKV_QUERIES) {
            int query = position + from;
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
    int64_t of_dk = key_head(a, work.head, a.dk.stride);
    store_rows<HS>(a.dk, of_dk, row, dk, scale, at);
    store_rows<HS>(a.dv, of_dk, row, dv, one, at);
}

/* The number of blocks that compute n_tiles of each head. A batch row has `heads` of these heads. */
unsigned cut(attention *a, int heads, int64_t n_tiles)
{
    a->n_heads = a->B * heads;
    a->n_tiles = (int)n_tiles;
    a->heads_at_once = (int)ceil_div(a->n_heads, ceil_div(a->n_heads * n_tiles, BLOCKS_AT_ONCE));
    return (unsigned)(a->n_heads * n_tiles);
}

template <int TILE> unsigned cut_queries(attention *a)
{
    const query_tiles<TILE> tiles(a->queries);
    return cut(a, a->NH, tiles.n + tiles.n_of_second);
}

template <int TILE> unsigned cut_keys(attention *a)
{
    return cut(a, a->n_kv, ceil_div(a->keys.n[0], TILE) + ceil_div(a->keys.n[1], TILE));
}

template <int HS> int forward(const struct compute *on, attention a)
{
    unsigned n = cut_queries<sizes<HS>::TILE>(&a);
    return n ? launch(on, "attention", attention_forward_kernel<HS>, n, N_THREADS, a) : 0;
}

template <int HS> int backward(const struct compute *on, attention a)
{
    unsigned n = cut_queries<sizes<HS>::TILE>(&a);
    int err = n ? launch(on, "attention backward", attention_dq_kernel<HS>, n, N_THREADS, a) : 0;
    n = cut_keys<sizes<HS>::TILE>(&a);
    return err || !n ? err : launch(on, "attention backward", attention_dkv_kernel<HS>, n, N_THREADS, a);
}

/* Selects the instance of a function for a head size. */
#define BY_HEAD_SIZE(function, HS, ...)                                                                      \
    ((HS) == 16   ? function<16>(__VA_ARGS__)                                                                \
     : (HS) == 32 ? function<32>(__VA_ARGS__)                                                                \
     : (HS) == 64 ? function<64>(__VA_ARGS__)                                                                \
     : (HS) == 80 ? function<80>(__VA_ARGS__)                                                                \
     : (HS) == 96 ? function<96>(__VA_ARGS__)                                                                \
                  : function<128>(__VA_ARGS__))

attention describe(const model_attention_args *args)
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
    a.B = (int)args->B;
    a.T = (int)args->T;
    a.C = (int)(args->NH * args->HS);
    a.NH = (int)args->NH;
    a.n_kv = (int)args->n_kv;
    a.HS = (int)args->HS;
    a.sharing = a.NH / a.n_kv;
    a.n_queries = (int)model_n_rows(&args->queries);
    a.n_keys = (int)model_n_rows(&args->keys);
    a.grad_scale = 1.0f / sqrtf((float)args->HS);
    a.scale = a.grad_scale * LOG2_E;
    return a;
}

bool fits(int64_t HS)
{
    return HS == 16 || HS == 32 || HS == 64 || HS == 80 || HS == 96 || HS == 128;
}

int attention_forward(const struct compute *on, const model_attention_args *args, real *y, float *y32,
                      float *logsum)
{
    attention a = describe(args);
    a.out = {y, y32, false, a.C};
    a.logsum = logsum;
    return BY_HEAD_SIZE(forward, args->HS, on, a);
}

int attention_backward(const struct compute *on, const model_attention_args *args, const real *dy,
                       const real *y, const float *logsum, float *dots, const model_attention_grads *grads)
{
    attention a = describe(args);
    a.dq = {grads->dq, grads->dq32, true, grads->dq32 ? a.C : grads->dq_row};
    int64_t dkv_row = grads->dk32 ? a.n_kv * a.HS : grads->dkv_row;
    a.dk = {grads->dk, grads->dk32, true, dkv_row};
    a.dv = {grads->dv, grads->dv32, true, dkv_row};
    a.logsum = const_cast<float *>(logsum);
    a.dots = dots;
    a.dy = dy;
    a.y = y;
    return BY_HEAD_SIZE(backward, args->HS, on, a);
}

} // namespace

const struct model_attention model_attention_cuda = {fits, attention_forward, attention_backward};
