/* SPDX-License-Identifier: Apache-2.0 */
/* run.h: one run of zero-bench train, shared by the files of this folder that are compiled once per dtype. */
#ifndef ZERO_BENCH_TRAIN_RUN_H
#define ZERO_BENCH_TRAIN_RUN_H

#include "bench/libzero_error.h"
#include "bench/model/model.h"
#include "bench/report/report.h"
#include "bench/schedule/pipeline_stages.h"
#include "bench/tokenizer/tokenizer.h"
#include "bench/train/bytes_data.h"
#include "bench/train/pipeline.h"
#include "bench/train/plain_optimizer.h"
#include "bench/train/tensor_parallel.h"
#include "bench/train/train.h"

/* Returns the error of a call, if there is one. */
#define TRY(call) ZR_TRY(call)
/* The same for a call of libzero, whose message becomes this program's. */
#define TRY_ZERO(call) TRY(take_libzero_error(call))

struct run {
    const struct train_options *o;
    struct compute compute;
    /* (n_own) this rank's pipeline stages, and its part of the model for each. Without --pp: one stage, which
     * is the whole model. */
    struct model model[PIPE_MAX_OWN];
    struct train_stage stage[PIPE_MAX_OWN];
    int32_t n_own;
    /* what it trains on: the files of tokens, or text if there are none */
    struct bytes_data data;
    struct token_data tokens;
    /* the ids of text that a tokenizer has encoded */
    struct token_ids ids;
    /* rows of tokens to train on, the first ones */
    int64_t n_rows;
    /* what it evaluates, if n_eval is not 0: rows [eval_first, eval_first + n_eval) of *eval, which is tokens
     * or held_out */
    struct token_data held_out;
    const struct token_data *eval;
    int64_t eval_first, n_eval;
    /* a micro-batch's whole rows; and (cp) the tokens that each rank takes of them */
    struct token_rows whole;
    struct model_rows *cp_rows;
    struct report report;
    /* (n_tensors) the tensors of all these stages, and the number of each in the whole model's table */
    struct zero_tensor tensors[PIPE_MAX_OWN * MODEL_MAX_TENSORS];
    int32_t number[PIPE_MAX_OWN * MODEL_MAX_TENSORS], n_tensors;
    /* cfg.memory.order, needed until zero_wrap has returned */
    struct zero_call *order;
    /* NULL with --plain */
    zero_ctx *z;
    /* used with --plain only */
    struct plain plain;
    int32_t rank, world;
    /* where this rank is on the mesh */
    struct train_place at;
    /* This rank prints: the first data-parallel rank of the last pipeline stage. */
    bool reports;
    /* micro-batches of this rank in a step; ZERO_GRAD_ACCUM_STEPS may have changed the option */
    int64_t accum;
    /* what libzero uses, which variables may have changed, too; the defaults with --plain */
    struct states_options states;
    /* rows of all ranks so far; micro-batches of all ranks in a step when the run began */
    int64_t n_samples, per_step;
    /* with masks: tokens of this rank's micro-batches that count in the loss of this step */
    double counted;
    /* the same in an evaluation */
    double eval_counted;
    /* of the last evaluation, and of the best one and its step */
    double eval_loss, best_loss;
    int64_t best_step;
    /* what the best one is of: rows, and the tokens of their files */
    int64_t best_rows, best_tokens;
    int64_t peak_resident, peak_device, start_ns;
    /* as train_stores_every_micro_batch says */
    bool stores_each;
    /* If the run fails now, an option or the data is wrong. */
    bool bad_input;
    /* The picture could not be drawn, and a message has said so. */
    bool not_drawn;
};

/* One optimizer step. */
struct train_step {
    /* steps made before it; after it, the same with it */
    int64_t step;
    float lr;
    int64_t start_ns;
    /* mean over ranks, micro-batches and tokens */
    double loss;
    struct zero_step_info info;
    /* No token of its rows counts in the loss. It is numbered, but the weights stay as they are. */
    bool empty;
    /* This step is the last. The value is the same on every rank. */
    bool stop;
};

/* ---- setup.c ---- */

/* Opens the data, the device and the model, and describes the model's tensors. */
int train_open(struct run *r);
/* Fills in cfg from the options, except for the weights' first values. */
int train_configure(struct run *r, struct zero_config *cfg);
/* Takes over what ZERO_* variables have changed in the configuration, and opens what depends on it. */
int train_after_wrap(struct run *r);
/* Whether it trains. If not, it only reads weights, and exports or samples. */
bool train_trains(const struct train_options *o);
/* Whether the weights come from files instead of from the seed. */
bool train_reads_weights(const struct train_options *o);
/* The number of a tensor's first element in the whole model's tensor; above 0 for a later pipeline stage. */
int64_t train_first_element(const struct run *r, int32_t tensor);
/* Frees everything but the context. Returns the exit code of a run that returned err. */
int train_close(struct run *r, int err);

/* Sends the rows of micro-batch number i of a forward pass to m. */
typedef int train_rows(struct run *r, struct model *m, int64_t i);
/* Makes forward passes of this rank's first n micro-batches of these rows. */
typedef int train_forward(struct run *r, int64_t n, train_rows *rows);

/* ---- other ways to make a step ---- */

/* --plain, the same program without libzero: takes memory for gradients and the optimizer's state. */
int plain_train_open(struct run *r);
int plain_train_step(struct run *r, struct train_step *s);
/* --pp: runs the actions that zero_next returns. */
int pipeline_train_step(struct run *r, struct train_step *s);
train_forward plain_forward, pipeline_forward;
/* Whether a backward pass may come in two parts. */
bool pipeline_has_two_parts(const struct run *r);
/* Opens the memory for the micro-batches that each pipeline stage keeps. */
int pipeline_keep(struct run *r);

/* ---- data.c ---- */

int train_load_data(struct run *r);
/* Allocates r->whole. */
int train_open_rows(struct run *r);
/* Before a step with masks: counts the tokens of this rank's micro-batches that count in the loss, and tells
 * the models their weight. *none: no rank has any, so there is nothing to learn from. */
int train_count_tokens(struct run *r, bool *none);
/* Chooses the rows of this rank's micro-batch number `micro_batch` of the next step, and sends it to m. */
int train_next_rows(struct run *r, struct model *m, int64_t micro_batch);
/* The same for the rows to evaluate. What is beyond them is left out of the loss. */
train_rows train_next_held_out;
/* Sends r->whole as it is, whatever the micro-batch. */
train_rows train_next_whole;
/* Bytes of text, or tokens of files. A checkpoint contains it. */
int64_t train_data_size(const struct run *r);

/* ---- files.c ---- */

/* Saves a checkpoint that is the only one to be kept, because its held-out loss is the lowest. */
int train_save_best(struct run *r);
/* Saves a checkpoint after so many steps, if one is due then; stop: these were the last. */
int train_save(struct run *r, int64_t steps_done, bool stop);
/* Loads --load's checkpoint without going on from it. */
int train_load_weights(struct run *r);
/* Goes on from --load's checkpoint, which was saved after *step steps. */
int train_load(struct run *r, int64_t *step);
/* Read and write weights alone, if options name folders. */
int train_import(struct run *r);
int train_export(struct run *r);
/* Returns err or, if rank 0 has an error, an error on all ranks. Rank 0 alone writes the files beside
 * weights. */
int train_agree(struct run *r, int err);
/* Exports or imports weights under Hugging Face's names: the adapters, or all others. dir is as in
 * zero_export and zero_import. */
int train_move_weights(struct run *r, const char *dir, bool export, bool adapters);

/* ---- adapters.c ---- */

/* Reads the adapters' weights from a folder of PEFT, and writes such a folder. */
int train_import_adapters(struct run *r, const char *dir);
int train_export_adapters(struct run *r, const char *dir);
/* Adds the adapters to the matrices, one layer's matrix at a time, and exports these. The adapters stay, so
 * the model must not be used any more. */
int train_export_merged(struct run *r, const char *dir);

/* ---- evaluate.c ---- */

/* After a step: evaluates by forward passes, if it is due, and prints the loss. */
int train_evaluate(struct run *r, const struct train_step *s, train_forward *forward);

/* ---- bench/sample/generate.c ---- */

/* Generates and prints text, as o->sample says. */
int sample_generate(struct run *r, train_forward *forward);

/* ---- summary.c ---- */

/* Prints what runs, and how. */
void train_introduce(const struct run *r);
/* A mean loss: of the sum of losses and the number of tokens that zero_mean or zero_carry return. The sum is
 * of the mean of each micro-batch. */
double train_mean_loss(const struct run *r, double sum, double counted);
/* After the optimizer: s->loss becomes the mean over the ranks, and s->stop what rank 0's clock says. */
int train_take_loss(struct run *r, struct train_step *s);
bool train_time_is_up(const struct run *r);
/* Counts the step that was made, and prints it. */
int train_report_step(struct run *r, const struct train_step *s);
/* After the last step: prints and draws the result of the run, or stores its profile or its times. */
int train_end(struct run *r, double loss);

#endif
