/* SPDX-License-Identifier: Apache-2.0 */
/* toy_net.h: a small model and ranks that are threads, for tests of the public interface.
 *
 * The gradient depends on the weights that the model reads, on the step and on the global micro-batch. So a
 * lost, doubled or stale value changes the trained weights. The model has a stacked tensor, f32 and bf16
 * tensors, a frozen tensor, and one whose gradient is overwritten. */
#ifndef ZR_TEST_ZERO_TOY_NET_H
#define ZR_TEST_ZERO_TOY_NET_H

#include "test/first_error.h"
#include "zero/zero.h"

#include <stdbool.h>
#include <stdint.h>

enum { TOY_TENSORS = 5, TOY_UNITS = 4, TOY_FROZEN = 3, TOY_STACKED = 1, MAX_TOY_RANKS = 16 };

struct toy {
    /* the pointers that zero_wrap takes over */
    void *param[TOY_TENSORS], *grad[TOY_TENSORS];
    /* memory that toy_make allocates */
    void *own[TOY_TENSORS];
    struct zero_tensor table[TOY_TENSORS];
};

/* Called before the model touches a unit that it has opened. A GPU test sets it to wait for the model's
 * stream. NULL: no wait. */
extern void (*toy_wait)(void);

/* Makes initial weights, which are equal on every rank. */
void toy_make(struct toy *m);
void toy_free(struct toy *m);
int64_t toy_elems(int tensor);
/* Whether the model's pointers are where toy_make set them. */
bool toy_untouched(const struct toy *m);

/* Each returns the first error. brackets may be false at stages 0 and 1. micro: the global micro-batch. */
int toy_forward(struct toy *m, zero_ctx *z, bool brackets);
int toy_backward(struct toy *m, zero_ctx *z, bool brackets, int step, int micro);
/* Adds the unit's gradient of one micro-batch. The caller opens and closes the bracket. */
void toy_add_gradient(struct toy *m, int unit, int step, int micro);
/* Writes x to the first element of a trainable tensor's current gradient. */
void toy_poison_gradient(struct toy *m, int tensor, float x);

/* Hashes every weight, master and state (n_states of them). Collective. */
int toy_hash(zero_ctx *z, int n_states, uint64_t *hash);

/* One rank, as a thread or a forked process. */
struct toy_rank {
    int rank, world;
    char url[64];
    void *arg;
    /* error code, for the test to read */
    int err;
    /* zero_last_error() after err */
    char text[2048];
    /* a duration, for the test to read; each test defines which */
    int64_t ms;
    uint64_t hash;
    /* what went wrong; "": nothing. Ranks write it because cmocka's asserts work only on the test's main
     * thread. */
    char wrong[4096];
};

/* Stages above 3 are hybrids, with groups of 2 ranks. */
enum { TOY_HSDP = 4, TOY_HFSDP = 5, TOY_STAGES = 6, TOY_HYBRID_WORLD = 4 };
struct zero_config toy_config(struct toy_rank *r, int stage);
/* A cfg.debug.log that drops each line. */
void toy_forget_line(void *arg, const char *line);
/* Hybrids run with TOY_HYBRID_WORLD ranks only, which makes two groups. Stages run in smaller worlds. */
bool toy_has_stage(int world, int stage);
/* Stores code and zero_last_error(). */
void toy_note(struct toy_rank *r, int code);
/* Appends to r->wrong. */
void toy_wrong(struct toy_rank *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

void toy_set_ranks(int world, void *arg, struct toy_rank *out);
/* Runs fn on world threads and ignores the outcome. */
void toy_ranks(int world, void (*fn)(struct toy_rank *r), void *arg, struct toy_rank *out);

/* Fails the test unless each rank has err 0 and nothing in wrong. Main thread only. what: the case's name in
 * the message. */
void toy_assert_well(const struct toy_rank *r, int world, const char *what);

/* Runs fn on world threads, and fails the test unless all went well. */
void toy_run(int world, void (*fn)(struct toy_rank *r), void *arg, struct toy_rank *r, const char *what);

/* Runs fn on one and on two threads at each stage, and fails the test unless all went well. *stage has the
 * stage. */
void toy_at_each_stage(void (*fn)(struct toy_rank *r), void *arg, int *stage, const char *what);

/* Makes a model and wraps it. Stores and returns the error. toy_close unwraps and frees, also after an
 * error. */
int toy_open(struct toy_rank *r, struct toy *m, zero_ctx **z, const struct zero_config *cfg);
void toy_close(struct toy *m, zero_ctx **z);

/* Makes the call unless an earlier one failed, and stores its failure. For functions with `err` and a rank
 * `r`. */
#define TOY_TRY(call)                                                                                        \
    do {                                                                                                     \
        if (!err && (err = (call)))                                                                          \
            toy_note(r, err);                                                                                \
    } while (0)

/* Makes the call, and returns from the function if it fails. */
#define OR_RETURN(call)                                                                                      \
    do {                                                                                                     \
        int err_ = (call);                                                                                   \
        if (err_)                                                                                            \
            return err_;                                                                                     \
    } while (0)

/* Checks that a call failed: err must be code, and zero_last_error() must contain says. */
void toy_expect(struct toy_rank *r, int err, int code, const char *says);

int64_t toy_now_ms(void);

/* Make and remove a folder for a test's files. path ends in XXXXXX, as for mkdtemp. toy_remove_folders is a
 * group teardown, which removes folders that a failed test left. Main thread only. */
void toy_make_folder(char *path);
void toy_remove_folder(const char *path);
/* Replaces the random id of all exports below path, in files and file names, by a fixed one. Exports of equal
 * weights then have equal bytes, and zero_import still accepts them. */
void toy_forget_export_ids(const char *path);
int toy_remove_folders(void **state);

/* Resources of a process that a context may have left behind. */
struct toy_holdings {
    /* n_maps: mappings of memfds, which are the arenas of ranks */
    int n_fds, n_threads, n_maps;
};
struct toy_holdings toy_holdings(void);
/* Whether the process holds the same as before, now or soon. A joined thread stays listed for a moment. */
bool toy_holds_no_more(struct toy_holdings before, struct toy_holdings *now);
/* Check that this process holds no more than before. The first notes a leak for the rank, the second fails
 * the test. */
void toy_check_nothing_left(struct toy_rank *r, struct toy_holdings before);
void toy_assert_nothing_left(struct toy_holdings before);

#endif
