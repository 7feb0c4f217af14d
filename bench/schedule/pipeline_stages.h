/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_stages.h: pipeline stages in numbers: which stage has which layers, and what the library's
 * schedule makes of the times that the stages take. */
#ifndef ZERO_BENCH_PIPE_STAGES_H
#define ZERO_BENCH_PIPE_STAGES_H

#include "bench/arguments.h"

#include <stdbool.h>
#include <stdint.h>

/* Most ranks (or stages, with one on each rank), and most stages on a rank. */
enum { PIPE_MAX_STAGES = 1024, PIPE_MAX_OWN = 16 };

/* Names of enum zero_schedule. */
extern const struct option_word pipe_schedules[];

/* Checks --schedule (-1: not given) and --stages-per-rank against --pp. Returns the message, or NULL. */
const char *pipe_options_fault(int schedule, int64_t pp, int64_t per_rank);

/* Fills in what was not given: 1F1B (-1), and two micro-batches for each rank of the pipeline (0). */
void pipe_options_default(int *schedule, int64_t *micro_batches, int64_t pp);

/* The factor k in the bubble (pp - 1) / (k * micro_batches + pp - 1) of a schedule whose stages all take
 * the same time. A backward pass takes `backward` times as long as a forward pass. */
int64_t pipe_parts(int schedule, int64_t per_rank, int64_t backward);

/* The number of layers in a stage. There are at least pp layers. Layers that are left over go first to the
 * stages in the middle, then to the first stage (which has the embedding), last to the last (the head). */
int64_t pipe_layers_of(int64_t layers, int64_t pp, int64_t stage);

/* Layers in all stages of a rank. The nth stage of rank r is stage n * pp + r of the model. */
int64_t pipe_layers_of_rank(int64_t layers, int64_t pp, int64_t per_rank, int64_t rank);

/* Fills in like (pp): for each rank, the lowest rank with as many layers in each of its stages. Both have the
 * same plan. The first and the last rank share no plan, because of the embedding and the head. Kept
 * activations may differ. */
void pipe_find_alike(int64_t *like, int64_t layers, int64_t pp, int64_t per_rank);

struct pipe_times {
    /* enum zero_schedule */
    int schedule;
    /* ranks of the pipeline, and stages on each */
    int32_t pp, per_rank, micro_batches;
    /* (stages) nanoseconds of a stage's forward pass over one micro-batch, at least 1; any unit will do if
     * only ratios are used */
    const int32_t *forward_ns;
    /* how many forward passes a backward pass takes, at least 1 */
    int32_t backward;
    /* (stages - 1) nanoseconds to move activations to the next stage, or gradients back; NULL: no time */
    const int64_t *moves_ns;
    /* (stages) bytes that a stage keeps of a micro-batch until its backward pass; NULL: not counted */
    const int64_t *kept_bytes;
    /* (stages) bytes that it has besides between the two parts of a backward pass; NULL: not counted */
    const int64_t *between_bytes;
};

struct pipe_result {
    /* duration of all computations of a step */
    int64_t span_ns;
    /* mean share of span_ns in which ranks are idle. It is (pp - 1) / (per_rank * micro_batches + pp - 1)
     * if all stages take the same time and moves take none. */
    double bubble;
    /* message slots of each rank, in both directions, to the stages before and after its own */
    int32_t n_slots;
    /* (pp) the most micro-batches that a rank keeps for a backward pass, over all its stages; and their
     * bytes */
    int32_t kept[PIPE_MAX_STAGES];
    int64_t kept_bytes[PIPE_MAX_STAGES];
};

/* Runs the library's schedule (shard/pipeline/), messages included, on its virtual clock. pp is at most
 * PIPE_MAX_STAGES. Returns 0 or a zero_err, with zr_error_text(). */
int pipe_simulate(const struct pipe_times *t, struct pipe_result *out);

/* The most micro-batches that a stage of the model keeps for its backward pass; all, if there is no such
 * schedule. */
int64_t pipe_kept_of(int schedule, int64_t pp, int64_t per_rank, int64_t micro_batches, int64_t stage);

/* Warns on stderr if there are fewer micro-batches than stages. */
void pipe_warn_of_few(const char *name, int64_t micro_batches, int64_t pp);

#endif
