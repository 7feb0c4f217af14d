/* SPDX-License-Identifier: Apache-2.0 */
/* train.h: zero-bench train, after its options are read. */
#ifndef ZERO_BENCH_TRAIN_H
#define ZERO_BENCH_TRAIN_H

#include "bench/gpt2/gpt2_config.h"
#include "bench/train/profile.h"
#include "zero/zero.h"

#include <stdbool.h>

#define TRAIN_MOST_STEP_MS 64 /* what zero_mean takes */

struct train_options {
    struct model_options model;
    enum zero_dtype dtype;

    /* rows of one micro-batch of one rank */
    int64_t batch;
    /* micro-batches per step and rank */
    int64_t accum;
    int64_t steps;
    /* training stops after the step that ends past this; 0: by steps alone */
    double seconds;
    uint64_t seed;
    const char **paths;
    int n_paths;

    enum zero_optimizer optimizer;
    double lr, beta1, beta2, weight_decay, clip;

    int64_t stage;
    /* ranks of a pipeline; 0 and 1: one. enum zero_schedule */
    int64_t pp;
    int schedule;
    /* in place of schedule; NULL: none */
    const char *schedule_file;
    /* of the pipeline, that each rank has */
    int64_t stages_per_rank;
    /* enum zero_hybrid */
    int hybrid;
    /* ranks, or ZERO_AUTO */
    int64_t dp_replicate, dp_shard;
    /* this, budget and deterministic are as in struct zero_config */
    int64_t prefetch;
    /* bytes */
    int64_t budget;
    int deterministic;
    /* enum zero_dtype; 0: the default */
    int wire_dtype;
    /* of matrix products on the host */
    int64_t threads;
    /* enum zero_device */
    int device;
    /* number of the GPU; PLACE_GPU_OF_RANK: this rank's */
    int64_t gpu;
    /* what the device can do, to print the share that is used; 0: not known */
    double peak_tflops;
    bool plain, json, log;
    /* filled in, and the run reports nothing; NULL: nobody asks where the time goes */
    struct profile *profile;
    /* pictures and files of rank 0: the losses, and a timeline; NULL: none */
    const char *plot, *trace;

    /* folder of checkpoints; NULL: none */
    const char *save;
    /* a checkpoint or such a folder, or "latest": the latest in save, if any; NULL: none */
    const char *load;
    /* steps from one checkpoint to the next, 0: only at the end; how many of them stay, 0: all */
    int64_t save_every, keep;
    bool save_async;
    /* weights to begin with, as zero-bench export writes them; NULL: drawn from seed */
    const char *import_from;
    /* folder to write them to at the end, or, with only_exports, of the checkpoint that is loaded, without
     * training; NULL: none */
    const char *export_to;
    bool only_exports;
    /* the most bytes of an exported file; 0: the default */
    int64_t export_max;

    /* (steps, at most TRAIN_MOST_STEP_MS) room for each step's time, the mean over ranks, which is all that
     * is wanted: nothing is printed; NULL: train */
    double *step_ms;
};

/* A training of this model as zero-bench train does it unless told otherwise: AdamW at stage 0. */
struct train_options train_defaults(const struct model_options *model);

/* Describes the tensors of a GPT-2 of these sizes to libzero; the pointers are those of *model. With model
 * NULL only the sizes count, as for zero_plan. stores: as in struct gpt2. */
struct gpt2;
#define TRAIN_N_TENSORS 16
void train_describe_f32(struct zero_tensor out[TRAIN_N_TENSORS], const struct gpt2_config *config,
                        struct gpt2 *model, bool stores);
void train_describe_bf16(struct zero_tensor out[TRAIN_N_TENSORS], const struct gpt2_config *config,
                         struct gpt2 *model, bool stores);

/* The calls of one micro-batch, for cfg.memory.order, of a model or of a pipeline stage's part of it
 * (pipeline.h); returns how many: at most TRAIN_N_CALLS(layers), and so many of a whole model. */
#define TRAIN_N_CALLS(layers) (4 * (layers) + 6)
int32_t train_call_order(struct zero_call *out, const struct gpt2_config *own);

/* Whether a wrapped model stores matrices' gradients (struct gpt2) in every micro-batch: where libzero adds
 * these up, or there is one. */
bool train_stores_each(const struct train_options *o);

/* Where a run was when it saved: what libzero does not know of it, the choice of text, is a function of
 * these. */
struct train_position {
    uint64_t seed;
    /* so far; a sample is one row of a micro-batch */
    int64_t step, samples;
    int64_t text_bytes;
    /* micro-batches, when the run began */
    int64_t per_step;
};
/* Reads the text that a checkpoint has. Returns false if it is none of zero-bench train. */
bool train_read_position(const char *text, struct train_position *out);

/* States that an optimizer keeps per weight. */
int train_n_states(enum zero_optimizer optimizer, double beta1);

/* Trains and reports. Returns the exit code of the program. Compiled once per dtype (gpt2_real.h). */
int train_run_f32(const struct train_options *o);
int train_run_bf16(const struct train_options *o);

#endif
