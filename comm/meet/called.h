/* SPDX-License-Identifier: Apache-2.0 */
/* called.h: the calls of the program, as ranks compare them.
 *
 * If a collective differs between ranks, calls of the program differed before it. Each rank keeps its
 * latest calls where the others can read them. So an error can name the first calls that were not the
 * same, in the program's own words. */
#ifndef ZR_COMM_CALLED_H
#define ZR_COMM_CALLED_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* X(name, text) */
#define ZR_CALLED_MAP(X)                                                                                     \
    X(BEGIN, "zero_begin")                                                                                   \
    X(END, "zero_end")                                                                                       \
    X(MICRO, "zero_micro")                                                                                   \
    X(STEP, "zero_step")                                                                                     \
    X(NORM, "zero_norm")                                                                                     \
    X(DROP, "zero_drop")                                                                                     \
    X(GATHER_ALL, "zero_gather_all")                                                                         \
    X(CARRY, "zero_carry")                                                                                   \
    X(TUNE_CLIP, "zero_tune(clip)")                                                                          \
    X(TUNE_GRAD_SCALE, "zero_tune(grad_scale)")                                                              \
    X(TUNE_LR_SCALE, "zero_tune(lr_scale)")                                                                  \
    X(TUNE_BETA1, "zero_tune(beta1)")                                                                        \
    X(TUNE_BETA2, "zero_tune(beta2)")                                                                        \
    X(TUNE_EPS, "zero_tune(eps)")                                                                            \
    X(TUNE_DECAY, "zero_tune(weight_decay)")                                                                 \
    X(TUNE_ACCUM, "zero_tune(grad_accum_steps)")                                                             \
    X(SET_STEP, "zero_set_step")                                                                             \
    X(RELEASE_ALL, "zero_release_all")                                                                       \
    X(READ, "zero_read")                                                                                     \
    X(WRITE, "zero_write")                                                                                   \
    X(MEAN, "zero_mean")                                                                                     \
    X(LOSS_SCALE, "zero_loss_scale")                                                                         \
    X(ALL_REDUCE_SUM, "zero_all_reduce(sum)")                                                                \
    X(ALL_REDUCE_MAX, "zero_all_reduce(max)")                                                                \
    X(ALL_GATHER, "zero_all_gather")                                                                         \
    X(REDUCE_SCATTER, "zero_reduce_scatter")                                                                 \
    X(BROADCAST_TP, "zero_broadcast(tp)")                                                                    \
    X(EXPECT_EQUAL, "zero_expect_equal")                                                                     \
    X(BROADCAST_PP, "zero_broadcast(pp)")                                                                    \
    X(EVALUATE, "zero_evaluate")                                                                             \
    X(NEXT, "zero_next")                                                                                     \
    X(FINISH, "zero_finish")                                                                                 \
    X(SYNC_BUFFERS, "zero_sync_buffers")                                                                     \
    X(SAVE, "zero_save")                                                                                     \
    X(SAVE_WAIT, "zero_save_wait")                                                                           \
    X(LOAD, "zero_load")                                                                                     \
    X(EXPORT, "zero_export")                                                                                 \
    X(IMPORT, "zero_import")                                                                                 \
    X(UNWRAP, "zero_unwrap")                                                                                 \
    X(WRAP, "zero_wrap")

enum zr_called_name {
    ZR_CALLED_NONE,
#define ZR_CALLED_ENUM(name, text) ZR_CALLED_##name,
    ZR_CALLED_MAP(ZR_CALLED_ENUM)
#undef ZR_CALLED_ENUM
};

/* One call. */
struct zr_called {
    enum zr_called_name name;
    /* BEGIN and END: the bracket is one of backward, not of forward. */
    bool backward;
    /* The unit of BEGIN and END, the tensor of READ and WRITE; -1 for other calls. */
    int32_t subject;
    /* 1 and the number of zero_step calls before it; 0: it belongs to no step, as zero_wrap. */
    uint32_t step;
    /* The other arguments that must be equal on all ranks: one number, or a hash of several. 0: there are
     * none. */
    uint64_t args;
};

/* Calls that are kept. In large models these are some micro-batches; over NCCL, ranks compare what they do
 * once in a step. */
enum { ZR_CALLED_KEPT = 2048 };

/* The latest calls of one rank. In shared memory: written by its own thread, read by any process. */
struct zr_called_ring {
    struct {
        /* 1-based number of the call; 0 while it is being written */
        _Atomic uint64_t n;
        _Atomic uint64_t what, args;
    } at[ZR_CALLED_KEPT];
    /* calls so far */
    _Atomic uint64_t n;
};

/* A copy of them, as it travels to another rank. */
struct zr_called_copy {
    /* calls so far */
    uint64_t n;
    struct {
        /* what is 0 for a call that is not kept */
        uint64_t what, args;
    } at[ZR_CALLED_KEPT];
};

/* Packs a call without its args into one word, which is read whole, and back. Any word is some call, with
 * an unknown name that of no call. */
uint64_t zr_called_pack(const struct zr_called *c);
struct zr_called zr_called_unpack(uint64_t what, uint64_t args);

/* "zero_begin(unit 3, backward) in step 12" */
#define ZR_CALLED_CHARS 96
void zr_called_describe(const struct zr_called *c, char text[ZR_CALLED_CHARS]);

void zr_called_put(struct zr_called_ring *ring, const struct zr_called *c);

/* The call gives a number that waits for the next zero_step, which compares them. Another rank may call it
 * earlier or later. */
bool zr_called_is_for_step(enum zr_called_name name);

/* A call among the ranks of tp alone. */
bool zr_called_is_of_tp(enum zr_called_name name);

/* Tells which of two ranks seems to have left out the call that the other one made. */
enum zr_called_gap { ZR_CALLED_GAP_NONE, ZR_CALLED_GAP_A, ZR_CALLED_GAP_B };

/* Writes "rank 1 called zero_begin(unit 3, backward) in step 12; rank 0 called zero_read(tensor 2) in step
 * 12; every rank must make the same calls, in the same order". It adds which rank left a call out, if that
 * is known. */
#define ZR_CALLED_BOTH_CHARS 432
void zr_called_report(int rank_a, const struct zr_called *a, int rank_b, const struct zr_called *b,
                      enum zr_called_gap gap, char text[ZR_CALLED_BOTH_CHARS]);

/* Copies a ring, on any thread. What is put meanwhile may be missing. */
void zr_called_copy(const struct zr_called_ring *ring, struct zr_called_copy *out);
/* Fills a ring from a copy, whoever sent it. */
void zr_called_restore(struct zr_called_ring *ring, const struct zr_called_copy *from);

/* Returns the number of the first call that both have made and that is not the same, as far back as both
 * are kept. The first call is 1; 0: there is none. */
uint64_t zr_called_differ(const struct zr_called_ring *a, const struct zr_called_ring *b,
                          struct zr_called *of_a, struct zr_called *of_b);
/* For calls number n, which differ: one rank has left out the other's call if it made the call that follows
 * there. The other rank may not have come to the next call yet, since calls of tensor parallelism wait. Then
 * what followed earlier, as in the layer before, decides. Only calls of tensor parallelism are looked at. */
enum zr_called_gap zr_called_left_out(const struct zr_called_ring *a, const struct zr_called_ring *b,
                                      uint64_t n);
/* The latest call. Returns false if there is none. */
bool zr_called_last(const struct zr_called_ring *ring, struct zr_called *out);

#endif
