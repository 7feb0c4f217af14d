/* SPDX-License-Identifier: Apache-2.0 */
/* context.h: attention with context parallelism. Each rank has some tokens of every row, and needs keys
 * and values of all tokens before them. config.cp_form says how it gets them:
 *
 *     MODEL_CP_GATHER    Each rank gathers keys and values of all tokens, for some heads at a time. In
 *                        backward it gathers them again, and a reduce-scatter adds up their gradients in
 *                        fp32.
 *     MODEL_CP_EXCHANGE  Ranks exchange queries, keys and values so that each has all tokens of some heads,
 *                        and exchange the results back (Jacobs et al., arXiv:2309.14509).
 *     MODEL_CP_RING      Keys and values go around a ring of ranks, while each rank attends to those that it
 *                        has (Liu et al., arXiv:2310.01889). Partial results are merged in fp32. In backward
 *                        their gradients go around with them.
 *
 * In the gather form a token's result has the bits that it has without context parallelism, for the same
 * queries, keys and values. */
#ifndef ZERO_BENCH_MODEL_CONTEXT_H
#define ZERO_BENCH_MODEL_CONTEXT_H

#include "bench/model/attention.h"
#include "bench/model/model_config.h"

struct model;

/* The collectives of a context-parallel group. Memory is the device's, on whose stream the
 * functions work. All return 0 or a zero_err. */
struct model_cp {
    /* This rank's number. */
    int32_t part;
    /* (cp) The tokens of a row that each rank has. Borrowed. NULL: there is one rank. */
    const struct model_rows *rows;
    /* Concatenates every rank's n elements of src in dst. src may lie at its position in dst. */
    int (*gather)(void *arg, real *dst, const real *src, int64_t n);
    /* Writes this rank's n elements of the sum of src to dst, which may lie at its position in src. */
    int (*scatter)(void *arg, float *dst, const float *src, int64_t n);
    /* Sends n elements of src to each rank, and receives as many of each in dst, in the order of ranks. */
    int (*exchange)(void *arg, real *dst, const real *src, int64_t n);
    /* Begins to send src (n) to the next rank, and to receive dst (n) from the one before. Until shift_end,
     * src is only read, and dst is not used. */
    int (*shift_begin)(void *arg, float *dst, const float *src, int64_t n);
    int (*shift_end)(void *arg);
    void *arg;
};

/* The tokens of a row that rank c has. */
struct model_rows model_rows_of(const struct model *m, int32_t c);

/* Attention of layer l, between the ranks if there are several: atty (B, T, A) from qkv (B, T, A + 2*K), and
 * backward dqkv from datty. The exchange form leaves in qkv what its backward needs. Return 0 or a
 * zero_err. */
int model_context_forward(struct model *m, int64_t l, real *atty, real *qkv);
int model_context_backward(struct model *m, int64_t l, real *dqkv, const real *datty, const real *atty,
                           const real *qkv);

/* Floats of the buffer stats.attention that these need. */
int64_t model_context_scratch(const struct model *m);

#endif
