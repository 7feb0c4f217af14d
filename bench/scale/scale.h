/* SPDX-License-Identifier: Apache-2.0 */
/* scale.h: what zero-bench scale projects: models, machines, a job that has one of each, and its step.
 *
 *   models.c    models: their units, parameters and floating-point operations
 *   machines.c  machines: figures of data sheets
 *   run.c       a data-parallel job on the virtual clock (shard/verify/verify.h)
 *   mesh.c      a job on the mesh of dp, cp, tp and pp
 *   scale_cmd.c the command */
#ifndef ZERO_BENCH_SCALE_H
#define ZERO_BENCH_SCALE_H

#include "bench/hybrids.h"
#include "bench/schedule/pipeline_stages.h"
#include "bench/states.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* A decoder with attention over the whole context. */
struct scale_model {
    const char *name;
    int64_t layers, heads, kv_heads, channels;
    /* hidden channels of a block's feed-forward part */
    int64_t hidden;
    /* default number of tokens in a row */
    int64_t context;
    int64_t vocab;
    /* Llama, with RMSNorm, three matrices in the feed-forward part, no bias, rotary positions and a separate
     * head. Otherwise GPT-2, with LayerNorm, biases, learned positions and a head tied to the embedding. */
    bool llama;
    /* variants of Llama: biases for queries, keys and values; a head tied to the embedding */
    bool qkv_bias, tied;
};

/* One unit of a model, which a bracket gathers. Operations are those of one token's forward pass. */
struct scale_unit {
    int64_t n_params;
    double flop_per_token;
    /* operations of the tied head, which uses the embedding's unit a second time */
    double head_flop_per_token;
};

/* All names, separated by commas. */
const char *scale_model_names(void);
/* The model of that name, or NULL. */
const struct scale_model *scale_model_of(const char *name);
int32_t scale_n_units(const struct scale_model *m);
/* `context` is the number of tokens in a row. */
struct scale_unit scale_unit_of(const struct scale_model *m, int64_t context, int32_t unit);
/* One of tp parts of a unit. Matrices are cut, and so are the biases between two of them. Norms, positions
 * and other biases are whole. tp must divide heads, kv_heads and hidden. */
struct scale_unit scale_part_of(const struct scale_model *m, int64_t context, int32_t unit, int64_t tp);
/* Parameters of the last norm. They belong to the head's unit, or to unit 0 if the head is tied. */
int64_t scale_n_last_norm(const struct scale_model *m);
/* Elements of a token's keys and values in one of tp parts of a layer. */
int64_t scale_kv_elems(const struct scale_model *m, int64_t tp);
/* Elements that one of tp parts of a layer keeps for each token until the backward pass. Two norms and two
 * sums are whole; q, k, v, the attention's output and the feed-forward part are cut. */
int64_t scale_kept_elems(const struct scale_model *m, int64_t tp);
int64_t scale_n_params(const struct scale_model *m, int64_t context);
/* Operations of a token's forward and backward pass, without recomputation, as MFU counts them. */
double scale_flop_per_token(const struct scale_model *m, int64_t context);

/* A host of several GPUs, and its network. Figures are per GPU, and bandwidths are one-directional. */
struct scale_machine {
    const char *name, *text;
    int per_host;
    /* peak of dense bf16 products */
    double flop_per_s;
    double memory_bytes, memory_bytes_per_s;
    double near_bytes_per_s, far_bytes_per_s;
    /* between a GPU and its host's memory, both directions together */
    double host_bytes_per_s;
    /* latency of one step of a ring, inside a host and between two hosts */
    int64_t near_ns, far_ns;
};

const char *scale_machine_names(void);
const struct scale_machine *scale_machine_of(const char *name);

/* Limits for the options of a job. */
enum {
    SCALE_MAX_RANKS = 16384,
    SCALE_MAX_BATCH = 1000000,
    SCALE_MAX_CONTEXT = 10000000,
    SCALE_MAX_ACCUM = 256
};

struct scale_job {
    const struct scale_model *model;
    const struct scale_machine *machine;
    int64_t world;
    /* rows in a rank's micro-batch, tokens in a row, micro-batches in a step */
    int64_t batch, context, accum;
    int64_t stage, prefetch;
    /* enum hybrid; and the number of ranks that share one copy of the parameters */
    int hybrid;
    int64_t dp_shard;
    /* enum zero_dtype of weights and gradients, and of gradients on the wire; 0: the same */
    int dtype, wire_dtype;
    /* precision of masters, moments and gradient sums; states in memory of the device or the host */
    struct states_options states;
    /* for gathered parameters; 0: what prefetch needs */
    int64_t budget_bytes;
    /* The backward pass computes the forward pass again. */
    bool recompute;
    /* ranks that share a layer, that share each row (in the gather form), ranks of a pipeline, and stages on
     * each; 0 is 1. World / (tp * pp) ranks shard parameters, and world / (tp * cp * pp) have different
     * data. */
    int64_t tp, cp, pp, stages_per_rank;
    /* enum zero_schedule */
    int schedule;
    /* whether activations are counted even without tp, cp and pp */
    bool activations;
    /* fractions of the machine's peak and of its links that the job reaches */
    double compute_fraction, link_fraction;
};

struct scale_result {
    double step_s, tokens_per_s_per_gpu;
    /* the step is this much longer than with links that take no time */
    double exposed_s;
    /* model FLOPs utilization, 0 to 1 */
    double mfu;
    /* of one rank: the library's memory on the GPU, without activations, and in the host's memory; bytes
     * received in a step, and those of them from other groups */
    int64_t memory_bytes, host_bytes, received_bytes, outer_bytes;
    /* ranks of the job that were simulated one by one; the others have the same times */
    int n_simulated;
    /* Only with tp, cp, pp or activations: bytes of activations of the fullest rank, whose memory_bytes is
     * above, and bytes received over tp, cp and pp. The bubble is the mean share of the step in which ranks
     * of the pipeline are idle, 0 to 1. */
    int64_t activation_bytes, tp_bytes, cp_bytes, pp_bytes;
    double bubble;
};

/* Consecutive units of the model. */
struct scale_units {
    int32_t first, n;
};
/* The part of a model that dp data-parallel ranks have. run.c runs its stages forward and then backward. */
struct scale_part {
    /* (n_own) the units of each stage; without pp there is one stage */
    struct scale_units own[PIPE_MAX_OWN];
    int32_t n_own;
    int64_t dp, accum;
    /* Communication takes no time. */
    bool free_links;
    /* The last unit is the head of a tied model: it has the products, and only the last norm's parameters. */
    bool tied_head;
    /* The first unit is a tied embedding, and the last stage has a copy of it. */
    bool tied_embedding;
};
struct scale_part_time {
    double step_s;
    /* (n_own) each stage's share of the compute */
    double share[PIPE_MAX_OWN];
    int64_t memory_bytes, host_bytes, wire_bytes, outer_bytes;
    int n_simulated;
};
/* Returns 0 or a zero_err, with zr_error_text(). */
int scale_part_run(const struct scale_job *job, const struct scale_part *part, struct scale_part_time *out);

/* Whether the job has tp, cp or pp, or counts activations: then the fields for these are printed. */
bool scale_has_mesh(const struct scale_job *job);
/* Seconds of an all-reduce of `bytes` over tp, along rings. */
double scale_all_reduce_s(const struct scale_job *job, int64_t bytes);
/* Seconds of gathering a layer's keys and values over cp, with so many bytes for each element, or of reducing
 * their gradients. */
double scale_gather_s(const struct scale_job *job, int64_t element_bytes);
/* Bytes of an element of the model. */
int64_t scale_element_bytes(const struct scale_job *job);
/* Tokens of a micro-batch that a rank has. */
int64_t scale_own_tokens(const struct scale_job *job);
/* Bytes of a micro-batch's activations between two layers. */
int64_t scale_move_bytes(const struct scale_job *job);

/* Projects a step. Returns 0 or a zero_err, with zr_error_text(), which names axes that do not fit. */
int scale_run(const struct scale_job *job, struct scale_result *out);

#endif
