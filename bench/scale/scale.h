/* SPDX-License-Identifier: Apache-2.0 */
/* scale.h: what zero-bench scale projects: models, machines, a job of both, and what a step of it takes.
 *
 *   models.c    models: their units, parameters and floating-point operations
 *   machines.c  machines: figures of data sheets
 *   run.c       a job on the virtual clock (shard/verify/verify.h)
 *   mesh.c      a job whose layers are in parts (tp), and in stages of a pipeline (pp)
 *   fit.c       measurements: read, fitted and scored
 *   scale_cmd.c       the command */
#ifndef ZERO_BENCH_SCALE_H
#define ZERO_BENCH_SCALE_H

#include "bench/hybrids.h"
#include "bench/schedule/pipeline_stages.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* A decoder of L blocks, with attention over the whole context. */
struct scale_model {
    const char *name;
    int64_t layers, heads, kv_heads, channels;
    /* of the feed-forward part of a block */
    int64_t hidden;
    /* tokens in a row, unless told otherwise */
    int64_t context;
    int64_t vocab;
    /* Llama: RMSNorm, three matrices in the feed-forward part, no bias, rotary positions, a head of its own;
     * else as GPT-2: LayerNorm, biases, learned positions, the head tied to the embedding */
    bool llama;
    /* Of the first kind: queries, keys and values have biases; the head is tied */
    bool qkv_bias, tied;
};

/* One unit of it: what a bracket holds. Operations for one token, forward. */
struct scale_unit {
    int64_t n_params;
    double flop_per_token;
    /* of a second use behind all others: the tied head */
    double again_flop_per_token;
};

/* Names, separated by commas. */
const char *scale_model_names(void);
/* NULL: there is none of that name. */
const struct scale_model *scale_model_of(const char *name);
int32_t scale_n_units(const struct scale_model *m);
/* context: tokens in a row. */
struct scale_unit scale_unit_of(const struct scale_model *m, int64_t context, int32_t unit);
/* Of a unit in tp parts, one of them: matrices are cut, and biases between two; norms, positions and other
 * biases are whole. tp divides heads, those of keys and values, and the feed-forward part. */
struct scale_unit scale_part_of(const struct scale_model *m, int64_t context, int32_t unit, int64_t tp);
/* The last norm's parameters, which are in unit 0 where the head is tied, else in the head's. */
int64_t scale_n_last_norm(const struct scale_model *m);
/* Elements that a layer keeps of a token from forward to backward, in tp parts: two norms and two sums, whole
 * on each; queries, keys, values, what attention gives, and the feed-forward part's, which are cut. */
int64_t scale_kept_elems(const struct scale_model *m, int64_t tp);
int64_t scale_n_params(const struct scale_model *m, int64_t context);
/* Floating-point operations of forward and backward for a token, nothing recomputed (the model's, in MFU). */
double scale_flop_per_token(const struct scale_model *m, int64_t context);

/* A host of several GPUs and its network, of which each GPU has a part. Bandwidths are of one direction. */
struct scale_machine {
    const char *name, *text;
    int per_host;
    /* dense products of bf16 */
    double flop_per_s;
    double memory_bytes, memory_bytes_per_s;
    double near_bytes_per_s, far_bytes_per_s;
    /* of a step of a ring, inside a host and between two */
    int64_t near_ns, far_ns;
};

const char *scale_machine_names(void);
const struct scale_machine *scale_machine_of(const char *name);

/* Of a job, given as an option or in a row of measurements. */
enum {
    SCALE_MOST_RANKS = 16384,
    SCALE_MOST_BATCH = 1000000,
    SCALE_MOST_CONTEXT = 10000000,
    SCALE_MOST_ACCUM = 256
};

struct scale_job {
    const struct scale_model *model;
    const struct scale_machine *machine;
    int64_t world;
    /* rows of a rank's micro-batch, tokens in each, micro-batches of a step */
    int64_t batch, context, accum;
    int stage, prefetch;
    /* enum hybrid; ranks that share one copy of the parameters */
    int hybrid;
    int64_t dp_shard;
    /* weights and gradients, and gradients on the wire, of bf16; else f32 */
    bool bf16, wire_bf16;
    /* for gathered parameters; 0: what prefetch needs */
    int64_t budget_bytes;
    /* backward computes forward again */
    bool recompute;
    /* ranks that have the parts of a layer; ranks of a pipeline, and stages of each; 0 is 1. Data is on the
     * others: world over tp and pp */
    int64_t tp, pp, stages_per_rank;
    /* enum zero_schedule */
    int schedule;
    /* activations are counted without tp and pp, too */
    bool activations;
    /* of the machine's peak that products get, of its links that collectives get */
    double compute_fraction, link_fraction;
};

struct scale_result {
    double step_s, tokens_per_s_per_gpu;
    /* by which the step is longer than with links that take no time */
    double exposed_s;
    /* of the machine's peak, by the model's operations: 0 to 1 */
    double mfu;
    /* of a rank: the library's memory, which is all but activations; received in a step, and of that from
     * other groups */
    int64_t memory_bytes, received_bytes, outer_bytes;
    int n_simulated;
    /* Of a job with tp, pp or activations: the activations of the rank that is fullest, whose memory_bytes
     * is then the above; what of received_bytes came by tp, and by pp; how much of the step a pipeline's
     * ranks stand still, their mean, 0 to 1. */
    int64_t activation_bytes, tp_bytes, pp_bytes;
    double bubble;
};

/* Of a job's model, from the first one on. */
struct scale_units {
    int32_t first, n;
};
/* What each of dp data-parallel ranks has of the model, as run.c runs it: forward through all its
 * stages, and back. */
struct scale_part {
    /* (n_own) units of each stage; without stages those of the model */
    struct scale_units own[PIPE_MOST_OWN];
    int32_t n_own;
    int64_t dp, accum;
    /* links take no time */
    bool free_links;
    /* the last unit has the head's products, and of a tied embedding's parameters none */
    bool tied_head;
    /* the first unit's parameters are an embedding of which the last stage has a copy */
    bool tied_embedding;
};
struct scale_part_time {
    double step_s;
    /* (n_own) of all the compute, each stage's share */
    double share[PIPE_MOST_OWN];
    int64_t memory_bytes, wire_bytes, outer_bytes;
    int n_simulated;
};
/* Returns 0 or a zr_err, with zr_error_text(). */
int scale_part_run(const struct scale_job *job, const struct scale_part *part, struct scale_part_time *out);

/* It has tp or pp, or wants activations, and so what scale_mesh_run says beyond the rest. */
bool scale_has_mesh(const struct scale_job *job);
/* scale_run of such a job. Errors too for axes that do not go together, by name. */
int scale_mesh_run(const struct scale_job *job, struct scale_result *out);
/* Seconds of an all-reduce over tp, of bytes, along rings: as the machine's links carry them. */
double scale_all_reduce_s(const struct scale_job *job, int64_t bytes);
/* What one layer gives to the next, of a micro-batch. */
int64_t scale_move_bytes(const struct scale_job *job);

/* Seconds of a step alone. Returns 0, or not, with zr_error_text(). */
int scale_step(const struct scale_job *job, double *step_s);
int scale_run(const struct scale_job *job, struct scale_result *out);

/* A measurement. */
struct scale_row {
    struct scale_job job;
    double tokens_per_s_per_gpu;
    /* scored, but not fitted */
    bool held_out;
    /* what the fit says */
    double predicted;
};
struct scale_rows {
    struct scale_row *row;
    int n;
    /* Numbers that were found. As many rows as these say nothing: they are met whatever the projection. */
    int n_fitted;
};
/* Room for what is wrong with a file: the names of all models, and what is around them. */
enum { SCALE_TEXT_BYTES = 1024 };
/* like: what a row does not say; its context may be 0, for that of the row's model. Returns 0; else says in
 * text, of n bytes (SCALE_TEXT_BYTES), what is wrong, and where. */
int scale_rows_read(const char *path, const struct scale_job *like, struct scale_rows *out, char *text,
                    size_t n);
void scale_rows_free(struct scale_rows *r);
/* Fractions that make the rows' times least wrong: one of links, and one of compute for each model and
 * whether it recomputes; of a pair without a row to fit, the mean of those that have one. They are put into
 * the rows' jobs, predicted too. Returns 0, or not, with zr_error_text(), which names the row. */
int scale_fit(struct scale_rows *r);

#endif
