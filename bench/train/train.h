/* SPDX-License-Identifier: Apache-2.0 */
/* train.h: the options of zero-bench train, and what other commands use of it. */
#ifndef ZERO_BENCH_TRAIN_H
#define ZERO_BENCH_TRAIN_H

#include "bench/model/model_config.h"
#include "bench/states.h"
#include "bench/train/learning_rate.h"
#include "bench/train/profile.h"
#include "zero/zero.h"

#include <stdbool.h>

struct sample_options;

#define TRAIN_MAX_STEP_MS   64 /* as many values as zero_mean takes */
#define TRAIN_DOCUMENTS_END (-1)

/* Files that the command line names. */
struct train_files {
    const char **paths;
    int n;
};

struct train_options {
    struct model_options model;
    enum zero_dtype dtype;

    /* rows of a rank's micro-batch */
    int64_t batch;
    /* micro-batches of a rank in a step */
    int64_t accum;
    /* about so many tokens in each document of a row; 0: a row is one piece of text;
     * TRAIN_DOCUMENTS_END: documents of the files of tokens */
    int64_t documents;
    int64_t steps;
    /* training stops after the step during which this time passes; 0: no limit */
    double seconds;
    uint64_t seed;
    /* text, whose bytes are tokens; or files of tokens (token_data.h) instead */
    struct train_files data, tokens;
    /* data becomes tokens by the tokenizer of the model's folder */
    bool encodes;
    /* for each file of tokens, which of its tokens count in the loss; none: all */
    struct train_files masks;
    /* rows to evaluate, which are not trained on: this share of the data, at their end; or other files of
     * tokens, with masks or without. 0 and none: no evaluation */
    double held_out;
    struct train_files eval_tokens, eval_masks;
    /* steps between two evaluations; 0: one at the end */
    int64_t eval_every;
    /* the checkpoint with the lowest loss of an evaluation is kept */
    bool keep_best;
    /* bytes of an id in tokens; 0: a header says it */
    int64_t token_bytes;
    /* the id that ends a document in tokens; -1: the format's */
    int64_t end_token;
    /* while options are read: the list that further words belong to; NULL: data */
    struct train_files *listing;

    enum zero_optimizer optimizer;
    struct lr_schedule rate;
    double beta1, beta2, weight_decay, clip;
    struct states_options states;

    int64_t stage;
    /* ranks of the pipeline, 0 or 1 without one; and enum zero_schedule */
    int64_t pp;
    int schedule;
    /* a file instead of a schedule's name; NULL: none */
    const char *schedule_file;
    /* pipeline stages of each rank */
    int64_t stages_per_rank;
    /* enum zero_hybrid */
    int hybrid;
    /* ranks, or ZERO_AUTO */
    int64_t dp_replicate, dp_shard;
    /* prefetch, budget (bytes) and deterministic are as in struct zero_config */
    int64_t prefetch;
    /* bytes */
    int64_t budget;
    int deterministic;
    /* enum zero_dtype; 0: the default */
    int wire_dtype;
    /* threads of a rank on the host */
    int64_t threads;
    /* enum zero_device */
    int device;
    /* number of the GPU; GPU_OF_LOCAL_RANK: the rank's number on its host */
    int64_t gpu;
    /* the device's peak, to print what share of it is used; 0: not known */
    double peak_tflops;
    bool plain, json, log;
    /* filled in by the run, which then prints nothing; NULL: no profile */
    struct profile *profile;
    /* files to write: a picture of the losses, a timeline; NULL: none */
    const char *plot, *trace;

    /* folder of checkpoints; NULL: none */
    const char *save;
    /* a checkpoint, a folder of them, or "latest" for the latest one in save; NULL: none */
    const char *load;
    /* steps between two checkpoints (0: one at the end), and how many are kept (0: all) */
    int64_t save_every, keep;
    bool save_async;
    /* folder with the first weights, as zero-bench export writes them; NULL: drawn from seed. Adapters are
     * always drawn */
    const char *import_from;
    /* folder for the weights, written at the end; with only_exports, those of the loaded checkpoint,
     * without training. NULL: none */
    const char *export_to;
    bool only_exports;
    /* what to generate from the weights, without training (bench/sample/sample.h); NULL: nothing */
    const struct sample_options *sample;
    /* with adapters: folder for the model's weights with the adapters added; and the folder of PEFT whose
     * adapters are where training begins. NULL: none */
    const char *export_merged, *adapter;
    /* most bytes of an exported file; 0: the default */
    int64_t export_max;

    /* (steps, at most TRAIN_MAX_STEP_MS) filled with each step's time, the mean over ranks, by a run that
     * then prints nothing. NULL: train */
    double *step_ms;
};

/* Refuses exports of a folder's model that zero_export would refuse after the training, or that would not
 * suit the folder's config.json. */
error_t train_check_exports(struct argp_state *state, const struct train_options *o);

/* The defaults of zero-bench train for a model. */
struct train_options train_defaults(const struct model_options *model);

/* Writes the calls of one micro-batch, for cfg.memory.order, for a model or a pipeline stage's part of it
 * (pipeline.h). Returns their number, at most TRAIN_N_CALLS(layers). */
#define TRAIN_N_CALLS(layers) (4 * (layers) + 8)
int32_t train_call_order(struct zero_call *out, const struct model_config *stage);

/* Whether a wrapped model stores the gradients of matrices (struct model) in every micro-batch. It does if
 * libzero adds them up, or if a step has one micro-batch. */
bool train_stores_every_micro_batch(const struct train_options *o);

/* The position of a run in its data, which a checkpoint contains. */
struct train_position {
    uint64_t seed;
    /* so far; a sample is a row of a micro-batch */
    int64_t step, samples;
    /* bytes of text, or tokens of files */
    int64_t text_bytes;
    /* micro-batches of a step when the run began */
    int64_t per_step;
    /* rows of the files of tokens to train on, 0 for text; -1: an older checkpoint does not say it */
    int64_t rows;
    /* the lowest loss of an evaluation, infinity without any, and the step after which it was made */
    double best_loss;
    int64_t best_step;
    /* the rows that it is of, and the tokens of their files; -1: an older checkpoint does not say it */
    int64_t best_rows, best_tokens;
    /* token_data_hash of the files to train on; 0: text, or an older checkpoint does not say it */
    uint64_t data_hash;
    /* of the adapters; 0: there are none, or an older checkpoint does not say it */
    double lora_alpha;
};
/* Parses the position in a checkpoint. Returns false if zero-bench train has not written it. */
bool train_read_position(const char *text, struct train_position *out);

/* The number of states that an optimizer keeps for each weight. */
int train_n_states(enum zero_optimizer optimizer, double beta1);

/* Trains and reports. Returns the program's exit code. Compiled once per dtype (model_real.h). */
int train_run_f32(const struct train_options *o);
int train_run_bf16(const struct train_options *o);

#endif
