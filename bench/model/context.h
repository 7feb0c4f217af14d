/* SPDX-License-Identifier: Apache-2.0 */
/* context.h: attention with context parallelism. Each rank has some tokens of every row, and needs the keys
 * and values of all tokens before them. config.cp_form says how the rank gets them:
 *
 *     MODEL_CP_GATHER    Each rank gathers keys and values of all tokens, for some heads at a time. In
 *                        backward it gathers them again, and a reduce-scatter adds up their gradients in
 *                        fp32.
 *     MODEL_CP_EXCHANGE  Ranks exchange queries, keys and values so that each has all tokens of some heads.
 *                        Afterwards they exchange the results back (Jacobs et al., arXiv:2309.14509).
 *     MODEL_CP_RING      Keys and values are passed around a ring of ranks. Meanwhile each rank attends to
 *                        those that it has (Liu et al., arXiv:2310.01889). Partial results are merged in
 *                        fp32. In backward the gradients of keys and values are passed around with them.
 *
 * With MODEL_CP_GATHER, a token's result has the same bits as without context parallelism, for the same
 * queries, keys and values. */
#ifndef ZERO_BENCH_MODEL_CONTEXT_H
#define ZERO_BENCH_MODEL_CONTEXT_H

#include "bench/model/attention.h"
#include "bench/model/model_config.h"

struct model;

/* The collectives of a context-parallel group. They work on memory of the device, on its stream. All return 0
 * or a zero_err. */
struct model_cp {
    /* This rank's number in the group. */
    int32_t part;
    /* (cp) The tokens of a row that each rank has. Borrowed. NULL: there is one rank. */
    const struct model_rows *rows;
    /* All-gather: concatenates every rank's n elements of src in dst. src may lie at its position in dst. */
    int (*gather)(void *arg, real *dst, const real *src, int64_t n);
    /* Reduce-scatter: writes this rank's n elements of the sum of src to dst. dst may lie at its position in
     * src. */
    int (*scatter)(void *arg, float *dst, const float *src, int64_t n);
    /* All-to-all: sends n elements of src to each rank, and receives n elements from each in dst, in the
     * order of ranks. */
    int (*exchange)(void *arg, real *dst, const real *src, int64_t n);
    /* Begins to send src (n) to the next rank and to receive dst (n) from the previous one. Until shift_end,
     * the caller must not write to src, and must not use dst. */
    int (*shift_begin)(void *arg, float *dst, const float *src, int64_t n);
    int (*shift_end)(void *arg);
    void *arg;
};

/* The tokens of a row that rank c has. */
struct model_rows model_rows_of(const struct model *m, int32_t c);

/* Compute the attention of layer l, over all ranks of the group. Forward computes atty (B, T, A) from qkv (B,
 * T, A + 2*K), and backward computes dqkv from datty. With MODEL_CP_EXCHANGE, forward overwrites qkv with the
 * values that backward needs. Both return 0 or a zero_err. */
int model_context_forward(struct model *m, int64_t l, real *atty, real *qkv);
int model_context_backward(struct model *m, int64_t l, real *dqkv, const real *datty, const real *atty,
                           const real *qkv);

/* The size of the buffer stats.attention, in floats. */
int64_t model_context_scratch(const struct model *m);

#endif
