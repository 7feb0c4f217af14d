/* SPDX-License-Identifier: Apache-2.0 */
/* call_log.h: records the program's calls so that ranks can compare them.
 *
 * If a collective differs between ranks, the programs made different calls before it. Each rank keeps its
 * latest calls where the others can read them. So an error can name the first calls that differ, as the
 * program made them. */
#ifndef ZR_COMM_MEET_CALL_LOG_H
#define ZR_COMM_MEET_CALL_LOG_H

#include "kernels/phase.h"

#include <stdatomic.h>

/* X(name, function, what follows its name in messages) */
#define ZR_CALL_MAP(X)                                                                                       \
    X(BEGIN, "zero_begin", "")                                                                               \
    X(END, "zero_end", "")                                                                                   \
    X(MICRO, "zero_micro", "")                                                                               \
    X(STEP, "zero_step", "")                                                                                 \
    X(NORM, "zero_norm", "")                                                                                 \
    X(DROP, "zero_drop", "")                                                                                 \
    X(GATHER_ALL, "zero_gather_all", "")                                                                     \
    X(CARRY, "zero_carry", "")                                                                               \
    X(TUNE_CLIP, "zero_tune", "(clip)")                                                                      \
    X(TUNE_GRAD_SCALE, "zero_tune", "(grad_scale)")                                                          \
    X(TUNE_LR_SCALE, "zero_tune", "(lr_scale)")                                                              \
    X(TUNE_BETA1, "zero_tune", "(beta1)")                                                                    \
    X(TUNE_BETA2, "zero_tune", "(beta2)")                                                                    \
    X(TUNE_EPS, "zero_tune", "(eps)")                                                                        \
    X(TUNE_DECAY, "zero_tune", "(weight_decay)")                                                             \
    X(TUNE_ACCUM, "zero_tune", "(grad_accum_steps)")                                                         \
    X(SET_STEP, "zero_set_step", "")                                                                         \
    X(RELEASE_ALL, "zero_release_all", "")                                                                   \
    X(READ, "zero_read", "")                                                                                 \
    X(WRITE, "zero_write", "")                                                                               \
    X(MEAN, "zero_mean", "")                                                                                 \
    X(LOSS_SCALE, "zero_loss_scale", "")                                                                     \
    X(ALL_REDUCE_SUM, "zero_all_reduce", "(sum)")                                                            \
    X(ALL_REDUCE_MAX, "zero_all_reduce", "(max)")                                                            \
    X(ALL_GATHER, "zero_all_gather", "")                                                                     \
    X(REDUCE_SCATTER, "zero_reduce_scatter", "")                                                             \
    X(ALL_TO_ALL, "zero_all_to_all", "")                                                                     \
    X(SHIFT_BEGIN, "zero_shift_begin", "")                                                                   \
    X(SHIFT_END, "zero_shift_end", "")                                                                       \
    X(BROADCAST_TP, "zero_broadcast", "(tp)")                                                                \
    X(BROADCAST_CP, "zero_broadcast", "(cp)")                                                                \
    X(EXPECT_EQUAL, "zero_expect_equal", "")                                                                 \
    X(EXPECT_ROWS, "zero_expect_rows", "")                                                                   \
    X(BROADCAST_PP, "zero_broadcast", "(pp)")                                                                \
    X(EVALUATE, "zero_evaluate", "")                                                                         \
    X(NEXT, "zero_next", "")                                                                                 \
    X(FINISH, "zero_finish", "")                                                                             \
    X(SYNC_BUFFERS, "zero_sync_buffers", "")                                                                 \
    X(SAVE, "zero_save", "")                                                                                 \
    X(SAVE_WAIT, "zero_save_wait", "")                                                                       \
    X(LOAD, "zero_load", "")                                                                                 \
    X(EXPORT, "zero_export", "")                                                                             \
    X(IMPORT, "zero_import", "")                                                                             \
    X(UNWRAP, "zero_unwrap", "")                                                                             \
    X(WRAP, "zero_wrap", "")

enum zr_call_name {
    ZR_CALL_NONE,
#define ZR_CALL_ENUM(name, function, detail) ZR_CALL_##name,
    ZR_CALL_MAP(ZR_CALL_ENUM)
#undef ZR_CALL_ENUM
};

/* Returns the function's name, as "zero_tune". Any number may be passed. */
const char *zr_call_function(enum zr_call_name name);

/* One call. */
struct zr_logged_call {
    enum zr_call_name name;
    /* For BEGIN and END; otherwise 0. */
    enum zero_phase phase;
    /* The unit of BEGIN and END, the tensor of READ and WRITE; -1 for other calls. */
    int32_t subject;
    /* 1 + the number of earlier zero_step calls. 0 if the call belongs to no step, as zero_wrap. */
    uint32_t step;
    /* The other arguments that must be equal on all ranks: one number, or a hash of several. 0: none. */
    uint64_t args;
};

/* Calls that are kept. In large models these are some micro-batches. Over NCCL, ranks compare calls once in a
 * step. */
enum { ZR_CALL_LOG_KEPT = 2048 };

/* The latest calls of one rank, in shared memory. One thread of the rank writes it; any process may read
 * it. */
struct zr_call_log {
    struct {
        /* Number of the call, from 1. 0 while it is being written. */
        _Atomic uint64_t n;
        _Atomic uint64_t what, args;
    } at[ZR_CALL_LOG_KEPT];
    /* Number of calls so far. */
    _Atomic uint64_t n;
};

/* A copy of a ring, in the form that is sent to another rank. */
struct zr_call_log_copy {
    /* Number of calls so far. */
    uint64_t n;
    struct {
        /* what is 0 for a call that is not kept. */
        uint64_t what, args;
    } at[ZR_CALL_LOG_KEPT];
};

/* A communicator for which each rank logs the calls that all of its ranks must make. */
struct zr_shared_calls {
    /* Identifies its ranks, and their number. */
    uint64_t group;
    int32_t size;
    /* This rank's calls. NULL: none are logged, and the rest is 0. */
    const struct zr_call_log *log;
};

/* Most of them on a rank: data, tensor and context parallelism, and the world. */
enum { ZR_SHARED_CALLS = 4 };

/* A rank that logs the calls of a communicator. */
struct zr_sharing_rank {
    /* As in struct zr_shared_calls, and the number of its calls. */
    uint64_t group, n_calls;
    int32_t size, rank;
    /* Set by zr_call_log_furthest. */
    int32_t ahead, behind;
};

/* For each of n ranks, sets ahead and behind to the ranks of its communicator with the most and the fewest
 * calls. Among equals the lowest rank counts. If a rank is alone, both are -1. Sorts s. */
void zr_call_log_furthest(struct zr_sharing_rank *s, int n);

/* Pack a call without its args into one word, which can be read at once, and unpack it. Any word unpacks to
 * some call. An unknown name has no text. */
uint64_t zr_call_log_pack(const struct zr_logged_call *c);
struct zr_logged_call zr_call_log_unpack(uint64_t what, uint64_t args);

/* "zero_begin(unit 3, backward) in step 12" */
#define ZR_CALL_LOG_CHARS 96
void zr_call_log_describe(const struct zr_logged_call *c, char text[ZR_CALL_LOG_CHARS]);

void zr_call_log_put(struct zr_call_log *ring, const struct zr_logged_call *c);

/* Whether the call sets a number that the next zero_step compares. Another rank may make the call earlier or
 * later. */
bool zr_call_log_is_for_step(enum zr_call_name name);

/* Whether the call is made among the ranks of tp or cp only. */
bool zr_call_log_is_of_axis(enum zr_call_name name);

/* The rank of two that seems to have omitted the call that the other one made. */
enum zr_call_log_gap { ZR_CALL_LOG_GAP_NONE, ZR_CALL_LOG_GAP_A, ZR_CALL_LOG_GAP_B };

/* Writes "rank 1 called zero_begin(unit 3, backward) in step 12; rank 0 called zero_read(tensor 2) in step
 * 12; every rank must make the same calls, in the same order". It adds which rank omitted a call, if that is
 * known. */
#define ZR_CALL_LOG_BOTH_CHARS 432
void zr_call_log_report(int rank_a, const struct zr_logged_call *a, int rank_b,
                        const struct zr_logged_call *b, enum zr_call_log_gap gap,
                        char text[ZR_CALL_LOG_BOTH_CHARS]);

/* Writes what to say if no call differs: "; the latest 2048 calls of the programs do not differ", or that
 * none could be compared. */
void zr_call_log_report_none(bool compared, char *text, size_t n_text);

/* Copies a ring. Calls that are added meanwhile may be missing. Any thread. */
void zr_call_log_copy(const struct zr_call_log *ring, struct zr_call_log_copy *out);
/* Fills a ring from a copy, whose content may be anything. */
void zr_call_log_restore(struct zr_call_log *ring, const struct zr_call_log_copy *from);

/* Returns the number of the first call that both have made and that differs, as far back as both are kept.
 * The first call is 1. 0: there is none. */
uint64_t zr_call_log_differ(const struct zr_call_log *a, const struct zr_call_log *b,
                            struct zr_logged_call *of_a, struct zr_logged_call *of_b);
/* Whether some call is kept in both, so that they can be compared. */
bool zr_call_log_overlap(const struct zr_call_log *a, const struct zr_call_log *b);
/* Finds which rank omitted a call, for calls number n, which differ. A rank has omitted the other's call if
 * it made the call that follows there. The other rank may not have come to the next call yet, since calls of
 * tensor parallelism wait. Then what followed earlier, as in the layer before, decides. Only calls of tensor
 * parallelism are considered. */
enum zr_call_log_gap zr_call_log_left_out(const struct zr_call_log *a, const struct zr_call_log *b,
                                          uint64_t n);
/* Reads the latest call. Returns false if there is none. */
bool zr_call_log_last(const struct zr_call_log *ring, struct zr_logged_call *out);

#endif
