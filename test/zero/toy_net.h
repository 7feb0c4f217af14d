/* SPDX-License-Identifier: Apache-2.0 */
/* toy_net.h: a small model that is wrapped, trained and looked at, and ranks that are threads, for tests of
 * what goes wrong.
 *
 * Its gradient depends on the weights it is shown, on the step and on the global micro-batch, so whatever is
 * lost, doubled or stale changes what is trained. It has what zero.h offers: a stacked tensor, f32 and bf16,
 * a frozen one, one that is overwritten. */
#ifndef ZR_TEST_ZERO_TOY_NET_H
#define ZR_TEST_ZERO_TOY_NET_H

#include "test/first_error.h"
#include "zero/zero.h"

#include <stdbool.h>
#include <stdint.h>

enum { TOY_TENSORS = 5, TOY_UNITS = 4, TOY_FROZEN = 3, TOY_STACKED = 1, MOST_TOY_RANKS = 16 };

struct toy {
    /* the model's own pointers */
    void *param[TOY_TENSORS], *grad[TOY_TENSORS];
    /* its own memory */
    void *own[TOY_TENSORS];
    struct zero_tensor table[TOY_TENSORS];
};

/* Called before the model touches a unit it has opened; NULL, as on the host: nothing. On a GPU: waits for
 * the model's stream. */
extern void (*toy_wait)(void);

/* Fresh weights, the same on every rank. */
void toy_make(struct toy *m);
void toy_free(struct toy *m);
int64_t toy_elems(int tensor);
/* The model's pointers stand where toy_make left them. */
bool toy_untouched(const struct toy *m);

/* Each returns the first error. brackets false: for stages 0 and 1. micro: of all ranks. */
int toy_forward(struct toy *m, zero_ctx *z, bool brackets);
int toy_backward(struct toy *m, zero_ctx *z, bool brackets, int step, int micro);
/* The unit's share of the gradient, added to what is there; the bracket is the caller's. */
void toy_add_gradient(struct toy *m, int unit, int step, int micro);
/* Puts x in the first element of a trainable tensor's gradient as it stands now. */
void toy_poison_gradient(struct toy *m, int tensor, float x);

/* Collective: a hash of every weight, master and moment (n_states of them). */
int toy_hash(zero_ctx *z, int n_states, uint64_t *hash);

/* One rank, as a thread or a forked process. */
struct toy_rank {
    int rank, world;
    char url[64];
    void *arg;
    /* for the test to read */
    int err;
    /* what zero_last_error says of err */
    char text[2048];
    /* for the test to read; each test says what it measures */
    int64_t ms;
    uint64_t hash;
    /* "" when all is well: cmocka's asserts only work on the test's own thread */
    char wrong[4096];
};

/* ZERO_CONFIG_INIT with rank, world and rendezvous filled in. */
/* Behind stage 3: hybrids, in groups of 2 ranks. */
enum { TOY_HSDP = 4, TOY_HFSDP = 5, TOY_STAGES = 6, TOY_HYBRID_WORLD = 4 };
struct zero_config toy_config(struct toy_rank *r, int stage);
/* For cfg.debug.log: what is said is not looked at. */
void toy_forget_line(void *arg, const char *line);
/* Hybrids are tried in one world only, where there are two groups, and stages in smaller ones. */
bool toy_has_stage(int world, int stage);
/* Notes code and zero_last_error(). */
void toy_note(struct toy_rank *r, int code);
/* Appends to wrong. */
void toy_wrong(struct toy_rank *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

void toy_set_ranks(int world, void *arg, struct toy_rank *out);
/* Runs fn on world threads; does not look at the outcome. */
void toy_ranks(int world, void (*fn)(struct toy_rank *r), void *arg, struct toy_rank *out);

/* On the test's own thread: fails, and says what, unless each rank has neither err nor anything wrong. */
void toy_assert_well(const struct toy_rank *r, int world, const char *what);

/* Runs fn on world threads; fails, and says what, unless all went well. */
void toy_run(int world, void (*fn)(struct toy_rank *r), void *arg, struct toy_rank *r, const char *what);

/* Runs fn on one and on two threads at each stage, which is written to *stage; fails unless all went well. */
void toy_at_each_stage(void (*fn)(struct toy_rank *r), void *arg, int *stage, const char *what);

/* Makes a model and wraps it; notes the error, and returns it. Then toy_close unwraps and frees, also after
 * an error. */
int toy_open(struct toy_rank *r, struct toy *m, zero_ctx **z, const struct zero_config *cfg);
void toy_close(struct toy *m, zero_ctx **z);

/* In a function that has `err` and a rank `r`: makes the call unless one has failed before, and notes its
 * failure. */
#define TOY_TRY(call)                                                                                        \
    do {                                                                                                     \
        if (!err && (err = (call)))                                                                          \
            toy_note(r, err);                                                                                \
    } while (0)

/* In a function that returns an error: makes the call, and returns its failure. */
#define OR_RETURN(call)                                                                                      \
    do {                                                                                                     \
        int err_ = (call);                                                                                   \
        if (err_)                                                                                            \
            return err_;                                                                                     \
    } while (0)

/* A call that has to fail: something is wrong unless err is code and zero_last_error() has says in it. */
void toy_expect(struct toy_rank *r, int err, int code, const char *says);

int64_t toy_now_ms(void);

/* A new folder for a test's files: path ends with XXXXXX, as for mkdtemp. It is removed by the second, with
 * what is in it, or, where a test fails before that, by the third, a group's teardown. On the test's own
 * thread. */
void toy_make_folder(char *path);
void toy_remove_folder(const char *path);
/* Replaces the random id of the exports in the folders below path, in files and in their names, by a fixed
 * one. Exports of equal weights are then equal byte by byte, and can still be imported. */
void toy_forget_export_ids(const char *path);
int toy_remove_folders(void **state);

/* What a process holds that a context may have left behind. */
struct toy_holdings {
    /* n_maps: mappings of memfds, which are the arenas of ranks */
    int n_fds, n_threads, n_maps;
};
struct toy_holdings toy_holdings(void);
/* The same as before, now or soon: a joined thread is still listed for a moment. */
bool toy_holds_no_more(struct toy_holdings before, struct toy_holdings *now);
/* If this process holds more than before: the first notes it for the rank, the second fails the test. */
void toy_check_nothing_left(struct toy_rank *r, struct toy_holdings before);
void toy_assert_nothing_left(struct toy_holdings before);

#endif
