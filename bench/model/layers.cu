/* SPDX-License-Identifier: Apache-2.0 */
/* layers.cu: the functions of layers.h on a GPU. It is compiled once per dtype by nvcc; the tests'
 * stand-in for CUDA compiles it as C++.
 *
 * A warp computes a sum along a row: each lane adds its own columns in order, then a fixed tree adds the
 * lanes. Sums over rows are made in N_CHUNKS parts. A block writes each part to scratch, and the parts are
 * added in order. So the bits are always the same, without atomic additions. Arithmetic is fp32, and each
 * result is rounded once. If rows and pointers are aligned, a thread moves 16 bytes at a time. */
#include <cuda_runtime.h>

#include <math.h>

extern "C" {
#include "bench/model/layers.h"
}
#include "bench/model/kernels.h"

namespace
{

const int ROW_THREADS = 1024; /* threads per row of logits */

/* ---- layer norm: a warp per row ---- */

template <int W>
__global__ void __launch_bounds__(32 * ROWS)
    layernorm_forward_kernel(real *out, float *mean, float *rstd, const real *inp, const real *weight,
                             const real *bias, int64_t N, int C)
{
    int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.y;
    if (row >= N)
        return;
    inp += row * C;
    out += row * C;
    float x[W], w[W], b[W], sum = 0, squares = 0;
    for (int i = (int)threadIdx.x * W; i < C; i += 32 * W) {
        load<W>(x, inp + i);
        for (int j = 0; j < W; j++)
            sum += x[j];
    }
    float mu = warp_sum(sum) / (float)C;
    for (int i = (int)threadIdx.x * W; i < C; i += 32 * W) {
        load<W>(x, inp + i);
        for (int j = 0; j < W; j++)
            squares += (x[j] - mu) * (x[j] - mu);
    }
    float scale = 1.0f / sqrtf(warp_sum(squares) / (float)C + MODEL_LAYERNORM_EPS);
    for (int i = (int)threadIdx.x * W; i < C; i += 32 * W) {
        load<W>(x, inp + i);
        load<W>(w, weight + i);
        load<W>(b, bias + i);
        for (int j = 0; j < W; j++)
            x[j] = (x[j] - mu) * scale * w[j] + b[j];
        store<W>(out + i, x);
    }
    if (threadIdx.x == 0) {
        mean[row] = mu;
        rstd[row] = scale;
    }
}

template <int W>
__global__ void __launch_bounds__(32 * ROWS)
    layernorm_backward_kernel(real *dinp, const real *dout, const real *inp, const real *weight,
                              const float *mean, const float *rstd, int64_t N, int C)
{
    int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.y;
    if (row >= N)
        return;
    dinp += row * C;
    dout += row * C;
    inp += row * C;
    float mu = mean[row], scale = rstd[row], x[W], d[W], w[W], sum = 0, sum_norm = 0;
    for (int i = (int)threadIdx.x * W; i < C; i += 32 * W) {
        load<W>(x, inp + i);
        load<W>(d, dout + i);
        load<W>(w, weight + i);
        for (int j = 0; j < W; j++) {
            float dnorm = w[j] * d[j];
            sum += dnorm;
            sum_norm += dnorm * ((x[j] - mu) * scale);
        }
    }
    float m = warp_sum(sum) / (float)C, m_norm = warp_sum(sum_norm) / (float)C, g[W];
    for (int i = (int)threadIdx.x * W; i < C; i += 32 * W) {
        load<W>(x, inp + i);
        load<W>(d, dout + i);
        load<W>(w, weight + i);
        load<W>(g, dinp + i);
        for (int j = 0; j < W; j++)
            g[j] += (w[j] * d[j] - m - (x[j] - mu) * scale * m_norm) * scale;
        store<W>(dinp + i, g);
    }
}

/* ---- sums over rows ---- */

/* parts (N_CHUNKS, C) = sums of dout's rows, in chunks. With inp, norm_parts has the sums of dout * (inp -
 * mean) * rstd. Blocks have (32, ROWS) threads; a thread adds every ROWS-th row of one column. */
__global__ void __launch_bounds__(32 * ROWS)
    column_parts_kernel(float *parts, float *norm_parts, const real *dout, const real *inp, const float *mean,
                        const float *rstd, int64_t N, int C)
{
    int c = (int)(blockIdx.x * 32 + threadIdx.x);
    int64_t length = (N + N_CHUNKS - 1) / N_CHUNKS, first = (int64_t)blockIdx.y * length;
    int64_t end = first + length < N ? first + length : N;
    float sum = 0, sum_norm = 0;
    if (c < C)
        for (int64_t row = first + threadIdx.y; row < end; row += ROWS) {
            float d = to_float(dout[row * C + c]);
            sum += d;
            if (inp)
                sum_norm += d * ((to_float(inp[row * C + c]) - mean[row]) * rstd[row]);
        }
    sum = sum_over_y(sum);
    if (inp)
        sum_norm = sum_over_y(sum_norm);
    if (c < C && threadIdx.y == 0) {
        parts[(int64_t)blockIdx.y * C + c] = sum;
        if (inp)
            norm_parts[(int64_t)blockIdx.y * C + c] = sum_norm;
    }
}

__global__ void add_kernel(real *grad, const real *x, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        grad[i] = from_float(to_float(grad[i]) + to_float(x[i]));
}

/* ---- GELU ---- */

__device__ __forceinline__ float gelu_gate(float x)
{
    return 1.0f / (1.0f + expf(-2.0f * model_gelu_u(x)));
}

template <int W> __global__ void gelu_forward_kernel(real *out, const real *inp, int64_t n)
{
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    float x[W];
    if (i >= n)
        return;
    load<W>(x, inp + i);
    for (int j = 0; j < W; j++)
        x[j] *= gelu_gate(x[j]);
    store<W>(out + i, x);
}

template <int W> __global__ void gelu_backward_kernel(real *dout, const real *inp, int64_t n)
{
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    float x[W], d[W];
    if (i >= n)
        return;
    load<W>(x, inp + i);
    load<W>(d, dout + i);
    for (int j = 0; j < W; j++)
        d[j] *= model_gelu_slope(x[j], gelu_gate(x[j]));
    store<W>(dout + i, d);
}

/* ---- attention: a thread per element, or a warp per row ---- */

/* Element i of an array (heads, n, width): its row's number among the caller's rows, or -1; and its index in
 * the caller's array. */
struct place_of_element {
    int64_t row, at;
    __device__ __forceinline__ place_of_element(int64_t i, const model_heads &heads, const model_rows &rows,
                                                int64_t first, int64_t n)
    {
        int64_t head = heads.first + i / heads.width / n;
        row = model_row_at(&rows, first + i / heads.width % n);
        at = head / heads.NH * heads.batch + head % heads.NH * heads.head + row * heads.row + i % heads.width;
    }
};

__global__ void attention_load_kernel(real *to, const real *from, const model_heads heads,
                                      const model_rows rows, int64_t first, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= heads.n * n * heads.width)
        return;
    const place_of_element place(i, heads, rows, first, n);
    to[i] = place.row < 0 ? from_float(0) : from[place.at];
}

__global__ void attention_store_kernel(real *to, float *to32, bool adds, const float *from,
                                       const model_heads heads, const model_rows rows, int64_t first,
                                       int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= heads.n * n * heads.width)
        return;
    const place_of_element place(i, heads, rows, first, n);
    if (place.row < 0)
        return;
    if (!to32)
        to[place.at] = from_float(from[i]);
    else
        to32[place.at] = adds ? to32[place.at] + from[i] : from[i];
}

/* The keys that row `row` of a tile sees, counted over its heads. */
__device__ __forceinline__ model_seen seen_by_row(const model_tile &tile, int64_t row)
{
    return model_seen_keys(&tile, tile.first_head + row / tile.n_queries, row % tile.n_queries);
}

__global__ void __launch_bounds__(32 * ROWS)
    attention_softmax_kernel(real *att, float *logsum, const float *scores, const model_tile tile)
{
    int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.y;
    if (row >= tile.n_heads * tile.n_queries)
        return;
    const model_seen seen = seen_by_row(tile, row);
    int from = (int)seen.from, to = (int)seen.to, n = (int)tile.n_keys;
    scores += row * n;
    att += row * n;
    float top = -INFINITY, sum = 0;
    for (int i = from + (int)threadIdx.x; i < to; i += 32)
        top = fmaxf(top, scores[i]);
    top = warp_max(top);
    for (int i = from + (int)threadIdx.x; i < to; i += 32)
        sum += expf((scores[i] - top) * tile.scale);
    sum = warp_sum(sum);
    float inverse = 1.0f / sum;
    for (int i = (int)threadIdx.x; i < n; i += 32)
        att[i] = from_float(i >= from && i < to ? expf((scores[i] - top) * tile.scale) * inverse : 0.0f);
    if (threadIdx.x == 0)
        logsum[row] = from < to ? top * tile.scale + logf(sum) : -INFINITY;
}

__global__ void __launch_bounds__(32 * ROWS)
    attention_softmax_backward_kernel(real *att, real *dscores, const float *scores, const float *datt,
                                      const float *logsum, const float *dots, const model_tile tile)
{
    int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.y;
    if (row >= tile.n_heads * tile.n_queries)
        return;
    const model_seen seen = seen_by_row(tile, row);
    int64_t given = (tile.first_head + row / tile.n_queries) * model_n_rows(&tile.queries) +
                    model_row_at(&tile.queries, tile.query + row % tile.n_queries);
    int from = (int)seen.from, to = (int)seen.to, n = (int)tile.n_keys;
    float less = from < to ? logsum[given] : 0.0f, dot = from < to ? dots[given] : 0.0f;
    for (int i = (int)threadIdx.x; i < n; i += 32) {
        int64_t at = row * n + i;
        float p = i >= from && i < to ? expf(scores[at] * tile.scale - less) : 0.0f;
        att[at] = from_float(p);
        dscores[at] = from_float(i >= from && i < to ? p * (datt[at] - dot) * tile.scale : 0.0f);
    }
}

/* dots (B, NH, n): a warp per row (B, n, NH) */
__global__ void __launch_bounds__(32 * ROWS) attention_dots_kernel(float *dots, const real *dy, const real *y,
                                                                   int64_t n_rows, int64_t n, int NH, int HS)
{
    int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.y;
    if (row >= n_rows)
        return;
    float sum = 0;
    for (int64_t i = row * HS + threadIdx.x; i < (row + 1) * HS; i += 32)
        sum += to_float(dy[i]) * to_float(y[i]);
    sum = warp_sum(sum);
    if (threadIdx.x == 0)
        dots[(row / NH / n * NH + row % NH) * n + row / NH % n] = sum;
}

/* A warp per row. */
__global__ void __launch_bounds__(32 * ROWS)
    attention_merge_kernel(float *y, float *logsum, const float *y_part, const float *logsum_part,
                           const model_heads heads, int64_t n)
{
    int64_t row = (int64_t)blockIdx.x * ROWS + threadIdx.y;
    if (row >= heads.n * n)
        return;
    float whole = logsum[row], part = logsum_part[row];
    if (part == -INFINITY)
        return;
    int64_t head = heads.first + row / n;
    int64_t at = head / heads.NH * heads.batch + head % heads.NH * heads.head + row % n * heads.row;
    float top = whole > part ? whole : part;
    float less = expf(whole > part ? part - whole : whole - part);
    float share = (whole > part ? less : 1.0f) / (1.0f + less);
    for (int i = (int)threadIdx.x; i < heads.width; i += 32)
        y[at + i] -= share * (y[at + i] - y_part[at + i]);
    __syncwarp(); /* all lanes have read logsum */
    if (threadIdx.x == 0)
        logsum[row] = top + log1pf(less);
}

/* ---- the loss: a block per row ---- */

/* top: the largest element so far; sum: the sum of e^(x - top) (Milakov and Gimelshein, arXiv:1805.02867);
 * plain: the sum of x. */
struct exponentials {
    float top, sum, plain;
};

__device__ __forceinline__ exponentials together(exponentials a, exponentials b)
{
    exponentials both = {fmaxf(a.top, b.top), 0, a.plain + b.plain};
    if (both.top > -INFINITY) /* else there are no elements yet */
        both.sum = a.sum * expf(a.top - both.top) + b.sum * expf(b.top - both.top);
    return both;
}

/* Combines the values of all threads of the block. Every thread gets the result. */
__device__ __forceinline__ exponentials block_exponentials(exponentials e)
{
    __shared__ float tops[32], sums[32], plains[32];
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, n_warps = (int)blockDim.x / 32;
    for (int step = 16; step > 0; step /= 2) {
        exponentials other = {__shfl_xor_sync(0xffffffffu, e.top, step),
                              __shfl_xor_sync(0xffffffffu, e.sum, step),
                              __shfl_xor_sync(0xffffffffu, e.plain, step)};
        e = (lane & step) ? together(other, e) : together(e, other);
    }
    if (lane == 0) {
        tops[warp] = e.top;
        sums[warp] = e.sum;
        plains[warp] = e.plain;
    }
    __syncthreads();
    exponentials all = {tops[0], sums[0], plains[0]};
    for (int w = 1; w < n_warps; w++)
        all = together(all, exponentials{tops[w], sums[w], plains[w]});
    return all;
}

/* Writes the loss and the gradient of a block's row whose target does not count. */
template <int W> __device__ __forceinline__ void leave_out(real *dlogits, double *loss, int n)
{
    const float zeros[W] = {};
    for (int i = (int)threadIdx.x * W; i < n; i += (int)blockDim.x * W)
        store<W>(dlogits + i, zeros);
    if (threadIdx.x == 0)
        loss[blockIdx.x] = 0.0;
}

template <int W>
__global__ void __launch_bounds__(ROW_THREADS)
    cross_entropy_kernel(real *dlogits, double *loss, const float *logits, const int32_t *targets, int V,
                         int64_t ld, model_label label, float scale)
{
    int target = targets[blockIdx.x], step = (int)blockDim.x * W;
    logits += (int64_t)blockIdx.x * ld;
    dlogits += (int64_t)blockIdx.x * ld;
    if (target == MODEL_LEFT_OUT) {
        leave_out<W>(dlogits, loss, V);
        return;
    }
    exponentials e = {-INFINITY, 0, 0};
    float x[W];
    for (int i = (int)threadIdx.x * W; i < V; i += step) {
        load_floats<W>(x, logits + i);
        exponentials here = {-INFINITY, 0, 0};
        for (int j = 0; j < W; j++)
            here.top = i + j < V ? fmaxf(here.top, x[j]) : here.top;
        for (int j = 0; j < W; j++) {
            here.sum += i + j < V ? expf(x[j] - here.top) : 0.0f;
            here.plain += i + j < V ? x[j] : 0.0f;
        }
        e = together(e, here);
    }
    e = block_exponentials(e);
    float factor = scale / e.sum;
    for (int i = (int)threadIdx.x * W; i < V; i += step) {
        load_floats<W>(x, logits + i);
        for (int j = 0; j < W; j++) {
            x[j] = i + j < V ? expf(x[j] - e.top) * factor - scale * label.each : 0.0f;
            x[j] -= i + j == target ? scale * label.target : 0.0f;
        }
        store<W>(dlogits + i, x);
    }
    if (threadIdx.x)
        return;
    double wanted = (double)label.target * (double)(logits[target] - e.top);
    if (label.each > 0)
        wanted += (double)label.each * ((double)e.plain - (double)V * (double)e.top);
    loss[blockIdx.x] = log((double)e.sum) - wanted;
}

/* ---- the loss if the token ids are split over ranks: a block per row ---- */

struct larger {
    /* A NaN counts as the largest number, so that it reaches the loss. */
    __device__ __forceinline__ float operator()(float a, float b) const
    {
        return b > a || b != b ? b : a;
    }
};

struct added {
    __device__ __forceinline__ float operator()(float a, float b) const
    {
        return a + b;
    }
};

/* Combines the values of all threads of the block: the lanes of a warp in a fixed tree, and then the warps in
 * order. Every thread gets the result. */
template <class F> __device__ __forceinline__ float over_block(F combine, float x)
{
    __shared__ float parts[32];
    for (int step = 16; step > 0; step /= 2)
        x = combine(x, __shfl_xor_sync(0xffffffffu, x, step));
    if (threadIdx.x % 32 == 0)
        parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = parts[0];
    for (int w = 1; w < (int)blockDim.x / 32; w++)
        x = combine(x, parts[w]);
    __syncthreads(); /* then parts may be written again */
    return x;
}

template <int W>
__global__ void __launch_bounds__(ROW_THREADS)
    vocab_top_kernel(float *top, const float *logits, int V, int64_t ld)
{
    float x[W], most = -INFINITY;
    logits += (int64_t)blockIdx.x * ld;
    for (int i = (int)threadIdx.x * W; i < V; i += (int)blockDim.x * W) {
        load_floats<W>(x, logits + i);
        for (int j = 0; j < W; j++)
            most = i + j < V ? larger()(most, x[j]) : most;
    }
    most = over_block(larger(), most);
    if (threadIdx.x == 0)
        top[blockIdx.x] = most;
}

template <int W>
__global__ void __launch_bounds__(ROW_THREADS)
    vocab_exponentials_kernel(float *logits, float *total, float *wanted, const float *top,
                              const int32_t *targets, int V, int64_t ld, model_label label)
{
    int target = targets[blockIdx.x];
    float x[W], most = top[blockIdx.x], sum = 0, below = 0, at_target = 0;
    logits += (int64_t)blockIdx.x * ld;
    for (int i = (int)threadIdx.x * W; i < V; i += (int)blockDim.x * W) {
        load_floats<W>(x, logits + i);
        for (int j = 0; j < W && i + j < V; j++) {
            x[j] -= most;
            below += x[j];
            at_target += i + j == target ? x[j] : 0.0f;
            x[j] = expf(x[j]);
            sum += x[j];
        }
        store_floats<W>(logits + i, x);
    }
    sum = over_block(added(), sum);
    at_target = over_block(added(), at_target);
    below = over_block(added(), below);
    if (threadIdx.x)
        return;
    total[blockIdx.x] = sum;
    /* Without label smoothing `below` may be infinite. */
    wanted[blockIdx.x] = label.target * at_target + (label.each > 0 ? label.each * below : 0.0f);
}

template <int W>
__global__ void __launch_bounds__(ROW_THREADS)
    vocab_loss_kernel(real *dlogits, double *loss, const float *logits, const float *total,
                      const float *wanted, const int32_t *targets, int V, int width, int64_t ld,
                      model_label label, float scale)
{
    int target = targets[blockIdx.x];
    float x[W], factor = scale / total[blockIdx.x];
    logits += (int64_t)blockIdx.x * ld;
    dlogits += (int64_t)blockIdx.x * ld;
    if (target == MODEL_LEFT_OUT) {
        leave_out<W>(dlogits, loss, width);
        return;
    }
    for (int i = (int)threadIdx.x * W; i < width; i += (int)blockDim.x * W) {
        load_floats<W>(x, logits + i);
        for (int j = 0; j < W; j++) {
            x[j] = i + j < V ? x[j] * factor - scale * label.each : 0.0f;
            x[j] -= i + j < V && i + j == target ? scale * label.target : 0.0f;
        }
        store<W>(dlogits + i, x);
    }
    if (threadIdx.x == 0)
        loss[blockIdx.x] = log((double)total[blockIdx.x]) - (double)wanted[blockIdx.x];
}

__global__ void add_loss_kernel(double *total, const double *loss, int64_t N)
{
    __shared__ double sums[256];
    double sum = 0;
    for (int64_t row = threadIdx.x; row < N; row += 256)
        sum += loss[row];
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (int half = 128; half > 0; half /= 2) {
        if ((int)threadIdx.x < half)
            sums[threadIdx.x] += sums[threadIdx.x + half];
        __syncthreads();
    }
    if (threadIdx.x == 0)
        *total += ldexp(rint(ldexp(sums[0] / (double)N, 36)), -36);
}

/* ---- the embedding ---- */

template <int W>
__global__ void embedding_forward_kernel(real *out, const int32_t *tokens, const int32_t *positions,
                                         const real *wte, const real *wpe, int64_t n, int C)
{
    int64_t i = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) * W;
    float x[W], y[W];
    if (i >= n)
        return;
    int64_t row = i / C, c = i % C;
    for (int j = 0; j < W; j++)
        x[j] = y[j] = 0;
    if (tokens[row] >= 0)
        load<W>(x, wte + (int64_t)tokens[row] * C + c);
    if (wpe)
        load<W>(y, wpe + (int64_t)positions[row] * C + c);
    for (int j = 0; j < W; j++)
        x[j] += y[j];
    store<W>(out + i, x);
}

/* A block of (32, ROWS) threads computes 32 columns of each token. */
__global__ void __launch_bounds__(32 * ROWS)
    tokens_backward_kernel(real *dwte, const real *dout, const int32_t *order, const int32_t *distinct,
                           const int32_t *first, int C)
{
    int c = (int)(blockIdx.y * 32 + threadIdx.x);
    int end = first[blockIdx.x + 1];
    float sum = 0;
    if (c < C)
        for (int i = first[blockIdx.x] + (int)threadIdx.y; i < end; i += ROWS)
            sum += to_float(dout[(int64_t)order[i] * C + c]);
    sum = sum_over_y(sum);
    if (c < C && threadIdx.y == 0) {
        real *grad = dwte + (int64_t)distinct[blockIdx.x] * C + c;
        *grad = from_float(to_float(*grad) + sum);
    }
}

/* A position has few rows, which one thread adds. */
__global__ void positions_backward_kernel(real *dwpe, const real *dout, const int32_t *order,
                                          const int32_t *distinct, const int32_t *first, int64_t n, int C)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n)
        return;
    int64_t d = i / C, c = i % C;
    float sum = 0;
    for (int at = first[d]; at < first[d + 1]; at++)
        sum += to_float(dout[(int64_t)order[at] * C + c]);
    real *grad = dwpe + (int64_t)distinct[d] * C + c;
    *grad = from_float(to_float(*grad) + sum);
}

/* --- the table of functions --- */

int64_t n_scratch(const struct compute *, int64_t, int64_t C)
{
    return N_CHUNKS * 4 * C; /* for the widest bias; the two sums of a norm take half */
}

int layernorm_forward(const struct compute *on, real *out, float *mean, float *rstd, const real *inp,
                      const real *weight, const real *bias, float *, int64_t N, int64_t C)
{
    return launch(on, "layer norm", BY_WIDTH(wide(C, out, inp, weight, bias), layernorm_forward_kernel),
                  ceil_div(N, ROWS), warps, out, mean, rstd, inp, weight, bias, N, (int)C);
}

/* dbias (C) += sums of dout's columns. With inp, dweight (C) += sums of dout * (inp - mean) * rstd. */
int sum_columns(const struct compute *on, real *dbias, real *dweight, const real *dout, const real *inp,
                const float *mean, const float *rstd, float *scratch, int64_t N, int64_t C)
{
    float *norm_parts = scratch + N_CHUNKS * C;
    unsigned blocks = ceil_div(C, THREADS);
    int err = launch(on, "sums of columns", column_parts_kernel, dim3(ceil_div(C, 32), N_CHUNKS), warps,
                     scratch, norm_parts, dout, inp, mean, rstd, N, (int)C);
    if (!err)
        err = launch(on, "sums of columns", add_parts_kernel, blocks, THREADS, dbias, scratch, (int)C);
    if (!err && inp)
        err = launch(on, "sums of columns", add_parts_kernel, blocks, THREADS, dweight, norm_parts, (int)C);
    return err;
}

int layernorm_backward(const struct compute *on, real *dinp, real *dweight, real *dbias, const real *dout,
                       const real *inp, const real *weight, const float *mean, const float *rstd,
                       float *scratch, int64_t N, int64_t C)
{
    int err = dweight ? sum_columns(on, dbias, dweight, dout, inp, mean, rstd, scratch, N, C) : 0;
    return err || !dinp ? err
                        : launch(on, "layer norm backward",
                                 BY_WIDTH(wide(C, dinp, dout, inp, weight), layernorm_backward_kernel),
                                 ceil_div(N, ROWS), warps, dinp, dout, inp, weight, mean, rstd, N, (int)C);
}

int gelu_forward(const struct compute *on, real *out, const real *inp, int64_t n)
{
    bool w = wide(n, out, inp);
    return launch(on, "gelu", BY_WIDTH(w, gelu_forward_kernel), ceil_div(n, THREADS * (w ? WIDE : 1)),
                  THREADS, out, inp, n);
}

int gelu_backward(const struct compute *on, real *dout, const real *inp, int64_t n)
{
    bool w = wide(n, dout, inp);
    return launch(on, "gelu backward", BY_WIDTH(w, gelu_backward_kernel),
                  ceil_div(n, THREADS * (w ? WIDE : 1)), THREADS, dout, inp, n);
}

int attention_load(const struct compute *on, real *to, const real *from, model_heads heads, model_rows rows,
                   int64_t first, int64_t n)
{
    return launch(on, "attention", attention_load_kernel, ceil_div(heads.n * n * heads.width, THREADS),
                  THREADS, to, from, heads, rows, first, n);
}

int attention_store(const struct compute *on, real *to, float *to32, bool adds, const float *from,
                    model_heads heads, model_rows rows, int64_t first, int64_t n)
{
    return launch(on, "attention", attention_store_kernel, ceil_div(heads.n * n * heads.width, THREADS),
                  THREADS, to, to32, adds, from, heads, rows, first, n);
}

int attention_softmax(const struct compute *on, real *att, float *logsum, float *scores, model_tile tile)
{
    return launch(on, "softmax", attention_softmax_kernel, ceil_div(tile.n_heads * tile.n_queries, ROWS),
                  warps, att, logsum, scores, tile);
}

int attention_merge(const struct compute *on, float *y, float *logsum, const float *y_part,
                    const float *logsum_part, model_heads heads, int64_t n)
{
    return launch(on, "attention", attention_merge_kernel, ceil_div(heads.n * n, ROWS), warps, y, logsum,
                  y_part, logsum_part, heads, n);
}

int attention_dots(const struct compute *on, float *dots, const real *dy, const real *y, int64_t B, int64_t n,
                   int64_t NH, int64_t HS)
{
    return launch(on, "attention backward", attention_dots_kernel, ceil_div(B * n * NH, ROWS), warps, dots,
                  dy, y, B * n * NH, n, (int)NH, (int)HS);
}

int attention_softmax_backward(const struct compute *on, real *att, real *dscores, float *scores, float *datt,
                               const float *logsum, const float *dots, model_tile tile)
{
    return launch(on, "softmax backward", attention_softmax_backward_kernel,
                  ceil_div(tile.n_heads * tile.n_queries, ROWS), warps, att, dscores, scores, datt, logsum,
                  dots, tile);
}

/* The threads for a row of n logits: no more than it has work for, in whole warps, and at least one warp. */
unsigned row_threads(bool is_wide, int64_t n)
{
    int64_t each = is_wide ? WIDE : 1, threads = (n + 32 * each - 1) / (32 * each) * 32;
    return (unsigned)(threads < 32 ? 32 : threads < ROW_THREADS ? threads : ROW_THREADS);
}

int cross_entropy(const struct compute *on, real *dlogits, double *loss, float *logits,
                  const int32_t *targets, int64_t N, int64_t V, int64_t ld, model_label label, float scale)
{
    bool w = wide(ld, dlogits, logits);
    return launch(on, "cross-entropy", BY_WIDTH(w, cross_entropy_kernel), (unsigned)N, row_threads(w, V),
                  dlogits, loss, logits, targets, (int)V, ld, label, scale);
}

int vocab_top(const struct compute *on, float *top, const float *logits, int64_t N, int64_t V, int64_t ld)
{
    bool w = wide(ld, logits);
    return launch(on, "largest logits", BY_WIDTH(w, vocab_top_kernel), (unsigned)N, row_threads(w, V), top,
                  logits, (int)V, ld);
}

int vocab_exponentials(const struct compute *on, float *logits, float *total, float *wanted, const float *top,
                       const int32_t *targets, int64_t N, int64_t V, int64_t ld, model_label label)
{
    bool w = wide(ld, logits);
    return launch(on, "exponentials", BY_WIDTH(w, vocab_exponentials_kernel), (unsigned)N, row_threads(w, V),
                  logits, total, wanted, top, targets, (int)V, ld, label);
}

int vocab_loss(const struct compute *on, real *dlogits, double *loss, const float *logits, const float *total,
               const float *wanted, const int32_t *targets, int64_t N, int64_t V, int64_t width, int64_t ld,
               model_label label, float scale)
{
    bool w = wide(ld, dlogits, logits);
    return launch(on, "loss of parts", BY_WIDTH(w, vocab_loss_kernel), (unsigned)N, row_threads(w, width),
                  dlogits, loss, logits, total, wanted, targets, (int)V, (int)width, ld, label, scale);
}

int add_loss(const struct compute *on, double *total, const double *loss, int64_t N)
{
    return launch(on, "loss", add_loss_kernel, 1, 256, total, loss, N);
}

int bias_backward(const struct compute *on, real *dbias, const real *dout, float *scratch, int64_t N,
                  int64_t C)
{
    return sum_columns(on, dbias, nullptr, dout, nullptr, nullptr, nullptr, scratch, N, C);
}

int add(const struct compute *on, real *grad, const real *x, int64_t n)
{
    return launch(on, "add", add_kernel, ceil_div(n, THREADS), THREADS, grad, x, n);
}

int embedding_forward(const struct compute *on, real *out, const int32_t *tokens, const int32_t *positions,
                      const real *wte, const real *wpe, int64_t N, int64_t C)
{
    bool w = wide(C, out, wte, wpe);
    return launch(on, "embedding", BY_WIDTH(w, embedding_forward_kernel),
                  ceil_div(N * C, THREADS * (w ? WIDE : 1)), THREADS, out, tokens, positions, wte, wpe, N * C,
                  (int)C);
}

/* CUDA refuses an empty grid, which a rank would have whose tokens all belong to others. */
int tokens_backward(const struct compute *on, real *grad, const real *dout, const struct model_groups *to,
                    float *, int64_t C)
{
    if (!to->n_distinct)
        return 0;
    return launch(on, "tokens backward", tokens_backward_kernel,
                  dim3((unsigned)to->n_distinct, ceil_div(C, 32)), warps, grad, dout, to->order, to->distinct,
                  to->first, (int)C);
}

int positions_backward(const struct compute *on, real *grad, const real *dout, const struct model_groups *to,
                       float *, int64_t C)
{
    int64_t n = to->n_distinct * C;
    return launch(on, "positions backward", positions_backward_kernel, ceil_div(n, THREADS), THREADS, grad,
                  dout, to->order, to->distinct, to->first, n, (int)C);
}
} // namespace

#ifdef MODEL_BF16
#define ATTENTION &model_attention_cuda
#else
#define ATTENTION nullptr
#endif

const struct model_layers model_layers_cuda = {
    ATTENTION,
    64, /* row_align: suits 16-byte accesses and tensor cores */
    n_scratch,
    layernorm_forward,
    layernorm_backward,
    gelu_forward,
    gelu_backward,
    attention_load,
    attention_store,
    attention_softmax,
    attention_merge,
    attention_dots,
    attention_softmax_backward,
    cross_entropy,
    vocab_top,
    vocab_exponentials,
    vocab_loss,
    add_loss,
    bias_backward,
    add,
    embedding_forward,
    tokens_backward,
    positions_backward,
};
