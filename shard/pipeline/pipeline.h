/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline.h: a pipeline schedule as data: for each rank, in which order it runs its stages over the
 * micro-batches of a step, and, where it says so, when it sends, receives, gathers and reduces.
 *
 * A model is cut into stages (not those of ZeRO), one after another: stage s + 1 takes what stage s gives,
 * and stage s takes the gradient of that from stage s + 1. A stage belongs to one rank; a rank has one or
 * several. Actions are written as PyTorch's torch.distributed.pipelining writes them: stage, kind,
 * micro-batch, as in 2F0.
 *
 *     zr_pipeline_build, zr_pipeline_read          what is computed, in which order
 *       -> zr_pipeline_lower                       and what moves in between
 *       -> zr_pipeline_check                       proved, and timed on a virtual clock, before anything runs
 *       -> zr_pipeline_slots                       the memory that it takes between ranks
 *
 * Thread-safety: none. */
#ifndef ZR_SHARD_PIPELINE_H
#define ZR_SHARD_PIPELINE_H

#include <stdbool.h>
#include <stdint.h>

/* X(name, as it is written, whether a micro-batch belongs to it) */
#define ZR_PIPE_MAP(X)                                                                                       \
    X(FORWARD, "F", true)                                                                                    \
    X(BACKWARD, "B", true)                                                                                   \
    X(BACKWARD_INPUT, "I", true)  /* the gradient of the stage's input alone */                              \
    X(BACKWARD_WEIGHT, "W", true) /* that of its weights, which follows */                                   \
    X(SEND_F, "SEND_F", true)     /* what this stage gave, to the next one's rank */                         \
    X(RECV_F, "RECV_F", true)     /* what this stage takes */                                                \
    X(SEND_B, "SEND_B", true)     /* the gradient of this stage's input, to the rank of the one before */    \
    X(RECV_B, "RECV_B", true)                                                                                \
    X(UNSHARD, "UNSHARD", false)                                                                             \
    X(RESHARD, "RESHARD", false)                                                                             \
    X(REDUCE_GRAD, "REDUCE_GRAD", false)

enum zr_pipe_kind {
#define X(name, text, has_micro_batch) ZR_PIPE_##name,
    ZR_PIPE_MAP(X)
#undef X
        ZR_PIPE_N_KINDS
};

static inline bool zr_pipe_computes(enum zr_pipe_kind kind)
{
    return kind <= ZR_PIPE_BACKWARD_WEIGHT;
}

/* With it a stage has the gradients of its weights of the micro-batch, and its backward is over. */
static inline bool zr_pipe_gives_weights(enum zr_pipe_kind kind)
{
    return kind == ZR_PIPE_BACKWARD || kind == ZR_PIPE_BACKWARD_WEIGHT;
}

/* A part of a backward. */
static inline bool zr_pipe_is_apart(enum zr_pipe_kind kind)
{
    return kind == ZR_PIPE_BACKWARD_INPUT || kind == ZR_PIPE_BACKWARD_WEIGHT;
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
    /* from 0; -1: none belongs to it */
    int32_t micro_batch;
    /* it and the one behind it, any two computations, are at the same time: "(3F1;0B2)OVERLAP_F_B" */
    bool with_next;
};

struct zr_pipe_row {
    struct zr_pipe_action *at;
    int64_t n, capacity;
};

struct zr_pipeline {
    int32_t n_ranks;
    /* one more than the last that an action names */
    int32_t n_stages, n_micro_batches;
    /* (n_ranks) what each does, in order */
    struct zr_pipe_row *rows;
    /* it has sends and receives, and not only what is computed */
    bool has_messages;
};

enum zr_pipeline_kind {
    ZR_GPIPE,       /* all forwards, then all backwards; with several stages per rank, stage after stage */
    ZR_1F1B,        /* as soon as there is a backward, it goes first */
    ZR_INTERLEAVED, /* the same over several stages per rank: stage s is rank s % n_ranks's */
    ZR_ZERO_BUBBLE, /* as 1F1B, gradients of weights apart, which fill what time is left (ZB-H1) */
};

/* The most of each, and of stages times micro-batches. */
#define ZR_PIPE_MOST_RANKS   65536
#define ZR_PIPE_MOST_NUMBERS (1 << 20)
#define ZR_PIPE_MOST_ALL     (INT64_C(1) << 24)

/* What is computed. forward_only: for evaluation. ZR_ERR_ARG: a number that the kind does not take, by name;
 * ZR_ERR_NOMEM. */
int zr_pipeline_build(struct zr_pipeline **out, enum zr_pipeline_kind kind, int32_t n_ranks,
                      int32_t stages_per_rank, int32_t n_micro_batches, bool forward_only);

/* PyTorch's CSV, computations alone or with all else: a line is a rank. Cells without anything, which only
 * show when a rank has nothing to do, are left out. What is read is not checked yet, but for numbers that
 * cannot be. ZR_ERR_IO; ZR_ERR_ARG with line and cell; ZR_ERR_NOMEM. */
int zr_pipeline_read(struct zr_pipeline **out, const char *path);
/* Replaces a file only when all is written; what is none, as a link or a pipe, is written to. ZR_ERR_IO. */
int zr_pipeline_write(const struct zr_pipeline *p, const char *path);

/* What an action costs, of a stage of one unit. */
struct zr_pipe_cost {
    int64_t forward_ns, backward_ns;
    /* the part of backward_ns that a gradient of weights takes, where it is apart */
    int64_t weight_ns;
    /* from the end of a computation to when another rank has what it gave */
    int64_t move_ns;
    /* (n_stages - 1) the same between a stage and the next, either way; NULL: move_ns */
    const int64_t *moves_ns;
    /* kept from a stage's forward to its backward, for one micro-batch */
    int64_t activation_bytes;
    /* (n_stages) units of each, 1 or more; NULL: one each */
    const int32_t *units;
};

/* On which it is decided which messages go first, where nothing was measured: a backward takes twice as
 * long as a forward. */
const struct zr_pipe_cost *zr_pipe_assumed_cost(void);

/* Adds messages to what is computed: sends and receives stand in the order in which they are ready by cost,
 * which is the same on both sides, so transports that block cannot stand still; a stage is gathered before
 * its first use and given up after its last, or earlier where more than most_unsharded (0: any number) would
 * be there, the one that is needed last going first; gradients are reduced after a stage's last backward.
 * Errors as of zr_pipeline_check, which it passes first; ZR_ERR_ARG for one that has more than computations,
 * or computes two stages at the same time where one may be whole. */
int zr_pipeline_lower(struct zr_pipeline **out, const struct zr_pipeline *p, const struct zr_pipe_cost *cost,
                      int32_t most_unsharded);

/* Slots for messages that every rank needs of what goes on from a stage to the next, and of what comes back,
 * where micro-batch m takes slot m % slots on both sides: what is received stays in its slot until its
 * stage's backward is done, that of weights too (in a schedule without, its forward), what is computed until
 * it was sent. Between
 * two stages of one rank, it is in its slot from where it is computed. p has messages, or one rank.
 * ZR_ERR_NOMEM. */
int zr_pipeline_slots(const struct zr_pipeline *p, int32_t *n_onward, int32_t *n_back);

struct zr_pipe_report;
/* Slots for gradients of tensors that the first and the last stage have, of which twice as many are on
 * their way; 0: with none would all ranks come to the end. report: of p. */
int32_t zr_pipeline_tied_slots(const struct zr_pipeline *p, const struct zr_pipe_report *report);

struct zr_pipe_rank {
    /* computing; and not, between the first action of any rank and the last of any */
    int64_t busy_ns, idle_ns;
    /* most stages' activations at a time, each of one micro-batch, and their bytes */
    int64_t peak_activations, peak_bytes;
    /* most stages at a time of which the parameters are whole; 0: the schedule does not say */
    int64_t peak_unsharded;
    int64_t n_sends;
};

/* From the first action's start. */
struct zr_pipe_time {
    int64_t start_ns, end_ns;
};

struct zr_pipe_report {
    /* (n_ranks) */
    struct zr_pipe_rank *ranks;
    /* from the first action to the end of the last: messages wait for nobody but their sender */
    int64_t span_ns;
    /* every stage adds up its gradients in the order of micro-batches */
    bool in_order;
    /* (n_ranks) of each computation of a row, in its order; for pictures */
    struct zr_pipe_time **times;
};

/* Everything that can be known before it runs: each stage is on one rank and takes each micro-batch once,
 * each way; nothing comes before what it needs, on its rank or by way of others; each message is sent once
 * and received once, in the same order on both sides, and the ranks go through to the end even where a send
 * waits for its receiver; a stage is whole while it is computed. Returns 0 with *report, which the caller
 * closes, or ZR_ERR_ARG with the first fault, its rank and action; ZR_ERR_NOMEM. */
int zr_pipeline_check(const struct zr_pipeline *p, const struct zr_pipe_cost *cost,
                      struct zr_pipe_report *report);
void zr_pipe_report_close(struct zr_pipe_report *report, const struct zr_pipeline *p);

/* NULL is allowed. */
void zr_pipeline_close(struct zr_pipeline *p);

/* ---- for the files of this folder, and tests ---- */

struct zr_pipeline *zr_pipeline_new(int32_t n_ranks);
/* Adds an action behind a rank's others. ZR_ERR_NOMEM. */
int zr_pipeline_add(struct zr_pipeline *p, int32_t rank, struct zr_pipe_action action);
/* As it is written: "2SEND_F0". Returns text. */
#define ZR_PIPE_TEXT 48
const char *zr_pipe_text(struct zr_pipe_action action, char text[ZR_PIPE_TEXT]);
/* What a computation of the stage takes. */
int64_t zr_pipe_ns(const struct zr_pipe_cost *cost, struct zr_pipe_action action);
/* Between stage edge and the next, on different ranks. */
int64_t zr_pipe_move_ns(const struct zr_pipe_cost *cost, int32_t edge);

/* That the costs of all actions together can be added up. ZR_ERR_ARG. */
int zr_pipe_check_costs(const struct zr_pipeline *p, const struct zr_pipe_cost *cost);

/* Where each stage is: (n_stages) ranks, or -1 where none has it; allocated. NULL: no memory. */
int32_t *zr_pipe_places(const struct zr_pipeline *p);

#endif
