/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline.h: a pipeline schedule as data. For each rank it says in which order the rank computes its stages
 * over the micro-batches of a step. It may also say when the rank sends, receives, gathers and reduces.
 *
 * In this folder "stage" means a pipeline stage, not a ZeRO stage. A model is a sequence of stages. A stage
 * takes the output of the previous stage and returns its gradient. A stage belongs to one rank; a rank has
 * one or more. Actions are written as in PyTorch's torch.distributed.pipelining: stage, kind, micro-batch,
 * as in 2F0.
 *
 *   zr_pipeline_build, zr_pipeline_read   the computations and their order
 *     -> zr_pipeline_lower                adds the messages between them
 *     -> zr_pipeline_check                checks and times the schedule on a virtual clock
 *     -> zr_pipeline_slots                computes the memory for messages
 *
 * Threads: not thread-safe. */
#ifndef ZR_SHARD_PIPELINE_H
#define ZR_SHARD_PIPELINE_H

#include "kernels/phase.h"

/* X(name, text, whether it has a micro-batch). The first four are in the order of enum zero_phase. */
#define ZR_PIPE_MAP(X)                                                                                       \
    X(FORWARD, "F", true)                                                                                    \
    X(BACKWARD, "B", true)                                                                                   \
    X(BACKWARD_INPUT, "I", true)  /* only the gradient of the stage's input */                               \
    X(BACKWARD_WEIGHT, "W", true) /* later, the gradients of its weights */                                  \
    X(SEND_F, "SEND_F", true)     /* sends the stage's output to the next stage */                           \
    X(RECV_F, "RECV_F", true)     /* receives the stage's input */                                           \
    X(SEND_B, "SEND_B", true)     /* sends the gradient of its input to the previous stage */                \
    X(RECV_B, "RECV_B", true)                                                                                \
    X(UNSHARD, "UNSHARD", false)                                                                             \
    X(RESHARD, "RESHARD", false)                                                                             \
    X(REDUCE_GRAD, "REDUCE_GRAD", false)

enum zr_pipe_kind {
#define X(name, text, has_micro_batch) ZR_PIPE_##name,
    ZR_PIPE_MAP(X)
#undef X
        ZR_PIPE_N_KINDS,
    /* Gradients of tied tensors move from the last stage to the first (zr_pipeline_place_ties). It is put in
     * after a schedule was checked, so no schedule is written, read, lowered or checked with it, and tables
     * by kind leave it out. */
    ZR_PIPE_TIE = ZR_PIPE_N_KINDS
};

static inline bool zr_pipe_computes(enum zr_pipe_kind kind)
{
    return kind <= ZR_PIPE_BACKWARD_WEIGHT;
}

/* The phase of an action that computes. 0: it does not. */
static inline enum zero_phase zr_pipe_phase(enum zr_pipe_kind kind)
{
    return zr_pipe_computes(kind) ? (enum zero_phase)(kind - ZR_PIPE_FORWARD + ZERO_FORWARD) : 0;
}

/* Whether the action computes gradients of weights. It ends the backward of its micro-batch. */
static inline bool zr_pipe_gives_weights(enum zr_pipe_kind kind)
{
    return zr_phase_has_grads(zr_pipe_phase(kind));
}

static inline bool zr_pipe_sends(enum zr_pipe_kind kind)
{
    return kind == ZR_PIPE_SEND_F || kind == ZR_PIPE_SEND_B;
}

static inline bool zr_pipe_receives(enum zr_pipe_kind kind)
{
    return kind == ZR_PIPE_RECV_F || kind == ZR_PIPE_RECV_B;
}

struct zr_pipe_action {
    enum zr_pipe_kind kind;
    int32_t stage;
    /* From 0; -1: the action has none. */
    int32_t micro_batch;
    /* This computation and the next one run at the same time: "(3F1;0B2)OVERLAP_F_B". */
    bool with_next;
};

struct zr_pipe_row {
    struct zr_pipe_action *at;
    int64_t n, capacity;
};

struct zr_pipeline {
    int32_t n_ranks;
    /* One more than the largest number in an action. */
    int32_t n_stages, n_micro_batches;
    /* (n_ranks) The actions of each rank, in order. */
    struct zr_pipe_row *rows;
    /* The schedule has sends and receives, not only computations. */
    bool has_messages;
};

enum zr_pipeline_kind {
    ZR_GPIPE,       /* all forwards, then all backwards; several stages of a rank one after another */
    ZR_1F1B,        /* a backward goes first as soon as it is possible */
    ZR_INTERLEAVED, /* the same with several stages per rank; stage s is on rank s % n_ranks */
    ZR_ZERO_BUBBLE, /* like 1F1B; separate weight gradients fill idle time (ZB-H1) */
};

/* Limits of ranks, of stages and of micro-batches, and of stages times micro-batches. */
#define ZR_PIPE_MAX_RANKS   65536
#define ZR_PIPE_MAX_NUMBERS (1 << 20)
#define ZR_PIPE_MAX_ALL     (INT64_C(1) << 24)

/* Builds a named schedule of computations. forward_only is for evaluation.
 * Errors: ZERO_ERR_ARG if the kind does not allow a number (the message names it); ZERO_ERR_NOMEM. */
int zr_pipeline_build(struct zr_pipeline **out, enum zr_pipeline_kind kind, int32_t n_ranks,
                      int32_t stages_per_rank, int32_t n_micro_batches, bool forward_only);

/* Reads PyTorch's CSV, with computations only or with all actions. A line is a rank. Empty cells, which show
 * idle time, are skipped. The schedule is not checked yet, except for numbers out of range.
 * Errors: ZERO_ERR_IO; ZERO_ERR_ARG (with line and cell); ZERO_ERR_NOMEM. */
int zr_pipeline_read(struct zr_pipeline **out, const char *path);
/* Writes the CSV. A regular file is replaced after everything is written; a link, pipe or device is written
 * directly. Errors: ZERO_ERR_IO. */
int zr_pipeline_write(const struct zr_pipeline *p, const char *path);

/* Cost of the actions of a stage with one unit. */
struct zr_pipe_cost {
    int64_t forward_ns, backward_ns;
    /* The share of backward_ns for weight gradients, if backward is split. */
    int64_t weight_ns;
    /* Time from the end of a computation until another rank has its result. */
    int64_t move_ns;
    /* (n_stages - 1) The same between a stage and the next one, in both directions. NULL: move_ns. */
    const int64_t *moves_ns;
    /* Bytes kept from forward to backward, per unit and micro-batch. */
    int64_t activation_bytes;
    /* (n_stages) Units of each stage, at least 1. NULL: one each. */
    const int32_t *units;
};

/* The cost that orders messages if nothing was measured. Backward takes twice as long as forward. */
const struct zr_pipe_cost *zr_pipe_assumed_cost(void);

/* Adds messages, gathers and reductions to a schedule of computations.
 *
 * Sends and receives stand in the order in which the messages are ready by cost. This order is the same on
 * both sides, so blocking transports cannot deadlock. A stage is gathered before its first use and freed
 * after its last. If more than most_unsharded stages (0: no limit) would be gathered, the one needed last is
 * freed earlier. Gradients are reduced after a stage's last backward.
 *
 * Errors: those of zr_pipeline_check, which runs first; ZERO_ERR_ARG if the schedule has other actions than
 * computations, or overlaps two stages where only one may be gathered. */
int zr_pipeline_lower(struct zr_pipeline **out, const struct zr_pipeline *p, const struct zr_pipe_cost *cost,
                      int32_t most_unsharded);

/* Counts the message slots that every rank needs in each direction. Micro-batch m uses slot m % slots on both
 * sides. A received message stays in its slot until the stage's backward is done, including weight gradients;
 * without backward, until its forward is done. A computed message stays until it was sent. Between two stages
 * of one rank, the slot is in use from the computation on. p must have messages, or only one rank.
 * Errors: ZERO_ERR_NOMEM. */
int zr_pipeline_slots(const struct zr_pipeline *p, int32_t *n_onward, int32_t *n_back);

struct zr_pipe_report;
/* Counts the slots for gradients of tensors that the first and the last stage share. Twice as many gradients
 * may be in flight. Returns 0 if the ranks cannot finish with any number of slots. report belongs
 * to p. */
int32_t zr_pipeline_tied_slots(const struct zr_pipeline *p, const struct zr_pipe_report *report);
/* Adds the messages with these gradients, one for each micro-batch, to the rows of the first and the last
 * stage. All messages of all ranks then have one order, as NCCL requires: nothing waits for ever even if both
 * ranks wait for every message. For that the last stage may compute weight gradients earlier. If it needs
 * more slots, *slots grows. It becomes 0, and no message is added, if no number is enough. p must have been
 * checked, with stage s on rank s % n_ranks. Errors: ZERO_ERR_NOMEM. */
int zr_pipeline_place_ties(struct zr_pipeline *p, int32_t *slots);

struct zr_pipe_rank {
    /* Computing time; idle time from the first action of any rank to the last of any rank. */
    int64_t busy_ns, idle_ns;
    /* Largest number of activations kept, one per stage and micro-batch, and their bytes. */
    int64_t peak_activations, peak_bytes;
    /* Largest number of gathered stages. 0: the schedule does not gather. */
    int64_t peak_unsharded;
    int64_t n_sends;
};

/* Relative to the start of the first action. */
struct zr_pipe_time {
    int64_t start_ns, end_ns;
};

struct zr_pipe_report {
    /* (n_ranks) */
    struct zr_pipe_rank *ranks;
    /* From the start of the first action to the end of the last. Only the sender delays a message. */
    int64_t span_ns;
    /* Every stage adds its gradients in the order of micro-batches. */
    bool in_order;
    /* (n_ranks) Times of the computations of each row, in order. For pictures. */
    struct zr_pipe_time **times;
};

/* Checks and times a schedule before it runs. It checks that:
 *   - each stage is on one rank, and takes each micro-batch once in each direction
 *   - no action comes before what it needs, on its rank or through other ranks
 *   - each message is sent and received once, in the same order on both sides
 *   - all ranks finish even if each send waits for its receiver
 *   - a stage is gathered while it is computed
 * On success it fills *report, which the caller closes.
 * Errors: ZERO_ERR_ARG (with the first fault, its rank and action); ZERO_ERR_NOMEM. */
int zr_pipeline_check(const struct zr_pipeline *p, const struct zr_pipe_cost *cost,
                      struct zr_pipe_report *report);
void zr_pipe_report_close(struct zr_pipe_report *report, const struct zr_pipeline *p);

/* p may be NULL. */
void zr_pipeline_close(struct zr_pipeline *p);

/* ---- internal; also for tests ---- */

struct zr_pipeline *zr_pipeline_new(int32_t n_ranks);
/* Appends an action to a rank's row. Errors: ZERO_ERR_NOMEM. */
int zr_pipeline_add(struct zr_pipeline *p, int32_t rank, struct zr_pipe_action action);
/* Writes the action as "2SEND_F0". Returns text. */
#define ZR_PIPE_TEXT 48
const char *zr_pipe_text(struct zr_pipe_action action, char text[ZR_PIPE_TEXT]);
/* Duration of a computation. */
int64_t zr_pipe_ns(const struct zr_pipe_cost *cost, struct zr_pipe_action action);
/* Duration of a message between stage edge and the next, on different ranks. */
int64_t zr_pipe_move_ns(const struct zr_pipe_cost *cost, int32_t edge);

/* Checks that the sum of all costs does not overflow. Errors: ZERO_ERR_ARG. */
int zr_pipe_check_costs(const struct zr_pipeline *p, const struct zr_pipe_cost *cost);

/* Allocates (n_stages) the rank of each stage, or -1 if no rank has it. NULL: no memory. */
int32_t *zr_pipe_places(const struct zr_pipeline *p);

#endif
