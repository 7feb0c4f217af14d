/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_stages.h: a model in pipeline stages, on paper: which stage has which layers, and what the
 * library's schedule makes of the times that stages take. */
#ifndef ZERO_BENCH_PIPE_STAGES_H
#define ZERO_BENCH_PIPE_STAGES_H

#include "bench/arguments.h"

#include <stdbool.h>
#include <stdint.h>

/* At most: stages, or ranks with several each; and stages of a rank. */
enum { PIPE_MOST_STAGES = 1024, PIPE_MOST_OWN = 16 };

/* By name, enum zero_schedule: all; and those that take backwards whole, as bench/gpt2 has them. */
extern const struct option_word pipe_schedules[], pipe_whole_schedules[];

/* The schedule can have several stages on a rank. */
bool pipe_has_several(int schedule);

/* In how many parts of a step ranks stand still, where all stages take as long: in (pp - 1) of so many times
 * the micro-batches, and pp - 1. */
int64_t pipe_parts(int schedule, int64_t per_rank, int64_t backward);

/* Layers of a stage of pp, of which there are at least as many layers. What does not divide goes to the
 * stages between the first, which has the embedding, and the last, which has the head, then to the first. */
int64_t pipe_layers_of(int64_t layers, int64_t pp, int64_t stage);

/* Of all stages of a rank: the nth of rank r is n * pp + r of the model. */
int64_t pipe_layers_of_rank(int64_t layers, int64_t pp, int64_t per_rank, int64_t rank);

/* like (pp): of each rank the lowest that is alike, but for what it keeps of activations: with as many layers
 * in each of its stages. The first rank, which has the embedding, and the last one are like no other. */
void pipe_find_alike(int64_t *like, int64_t layers, int64_t pp, int64_t per_rank);

struct pipe_times {
    /* enum zero_schedule */
    int schedule;
    /* ranks, and stages of each */
    int32_t pp, per_rank, micro_batches;
    /* (stages) nanoseconds of a stage's forward of a micro-batch, 1 or more; or of anything else, where
     * ratios alone count */
    const int32_t *forward_ns;
    /* a backward takes so many times as long as the forward, 1 or more */
    int32_t backward;
    /* (stages - 1) from the end of a stage's forward to when the next stage has what it gave, and back; NULL:
     * no time */
    const int64_t *moves_ns;
    /* (stages) bytes that a stage keeps of a micro-batch from forward to backward; NULL: not counted */
    const int64_t *kept_bytes;
};

struct pipe_result {
    /* of all computations of a step */
    int64_t span_ns;
    /* of span_ns, the mean over ranks of what they stand still: (pp - 1) / (per_rank * micro_batches + pp -
     * 1) where all stages take as long and moves take no time */
    double bubble;
    /* slots of messages that each rank has, all of them, between its stages and the next ones and the ones
     * before, each way */
    int32_t n_slots;
    /* (pp) micro-batches that each rank keeps from forward to backward, at most, of all its stages together;
     * and their bytes, at most */
    int32_t kept[PIPE_MOST_STAGES];
    int64_t kept_bytes[PIPE_MOST_STAGES];
};

/* The library's schedule (shard/pipeline/) on its virtual clock, messages included. pp is at
 * most PIPE_MOST_STAGES. Returns 0 or a zr_err, with zr_error_text(). */
int pipe_simulate(const struct pipe_times *t, struct pipe_result *out);

/* Micro-batches that a stage of all keeps from forward to backward, at most; all of them where there is no
 * such schedule. */
int64_t pipe_kept_of(int schedule, int64_t pp, int64_t per_rank, int64_t micro_batches, int64_t stage);

/* One line on the standard error where there are fewer micro-batches than stages. */
void pipe_warn_of_few(const char *name, int64_t micro_batches, int64_t pp);

#endif
