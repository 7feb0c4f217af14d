/* SPDX-License-Identifier: Apache-2.0 */
/* run.h: a run of zero-bench train, for the files that make it up (train.c). */
#ifndef ZERO_BENCH_TRAIN_RUN_H
#define ZERO_BENCH_TRAIN_RUN_H

#include "bench/gpt2/gpt2.h"
#include "bench/report/report.h"
#include "bench/schedule/pipeline_stages.h"
#include "bench/train/bytes_data.h"
#include "bench/train/pipeline.h"
#include "bench/train/plain.h"
#include "bench/train/tensor_parallel.h"
#include "bench/train/train.h"

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        int err_ = (call);                                                                                   \
        if (err_)                                                                                            \
            return err_;                                                                                     \
    } while (0)

struct run {
    const struct train_options *o;
    struct place place;
    /* (n_own) of the pipeline's stages, those of this rank; without stages one that is all of the model */
    struct gpt2 model[PIPE_MOST_OWN];
    struct train_stage stage[PIPE_MOST_OWN];
    int32_t n_own;
    struct bytes_data data;
    struct report report;
    /* of all of them, and which of the whole model's they are */
    struct zero_tensor tensors[PIPE_MOST_OWN * TRAIN_N_TENSORS];
    int32_t number[PIPE_MOST_OWN * TRAIN_N_TENSORS], n_tensors;
    /* wrapped; NULL with --plain */
    zero_ctx *z;
    /* only with --plain */
    struct plain plain;
    int32_t rank, world;
    /* on the mesh of --tp and --pp; else the world is of data-parallel ranks */
    struct train_place at;
    /* this rank does: the first one of the last stage */
    bool reports;
    /* of this rank, in a step; ZERO_GRAD_ACCUM_STEPS may have changed it */
    int64_t accum;
    /* micro-batches of all ranks: so far; in a step, when the run began */
    int64_t n_micro, per_step;
    int64_t peak_resident, peak_device, start_ns;
    /* in every micro-batch, as in struct gpt2 */
    bool stores_each;
    /* what failed is for the caller to put right */
    bool bad_input;
    /* which has been told */
    bool not_drawn;
};

/* Says what runs, and how. */
void train_introduce(const struct run *r);
/* What the run came to: profile, times, or the report and what is drawn. */
int train_end(struct run *r, double loss);
/* Opens the text that --data says. */
int train_load_text(struct run *r);
/* Saves a checkpoint after so many steps, if one is due then; stop: these were the last. */
int train_save(struct run *r, int64_t steps_done, bool stop);
/* Goes on from --load's checkpoint, which was saved after *step steps. */
int train_load(struct run *r, int64_t *step);
/* Weights alone, from and to the folders that were asked for, if any. */
int train_import(struct run *r);
int train_export(struct run *r);

#endif
