/* SPDX-License-Identifier: Apache-2.0 */
/* random_model.h: random models to lay out and plan: tensors of odd sizes, mixed dtypes, frozen and
 * stacked ones, in any order.
 *
 * Every case has its own seed, which a failure prints. SEED=that seed makes it the first case of a run. */
#ifndef ZR_TEST_SHARD_RANDOM_MODEL_H
#define ZR_TEST_SHARD_RANDOM_MODEL_H

#include "shard/layout.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"

/* The seed of the case being run. */
static uint64_t case_seed;

/* Fails the test with the case's seed. */
#define CHECK(condition, ...)                                                                                \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            print_error("SEED=%llu: %s: ", (unsigned long long)case_seed, #condition);                       \
            print_error(__VA_ARGS__);                                                                        \
            print_error("\n");                                                                               \
            fail();                                                                                          \
        }                                                                                                    \
    } while (0)

/* Runs body for n cases; `r` is the source of each. */
#define FOR_CASES(r, n)                                                                                      \
    struct random_source r = random_open();                                                                  \
    case_seed = r.state;                                                                                     \
    for (int case_i = 0; case_i < (n); case_i++, r.state = ++case_seed)

static inline bool chance(struct random_source *r, int percent)
{
    return random_below(r, 100) < percent;
}

/* A target for tensors' pointers; a layout never follows them. */
static void *model_pointer;

static inline int64_t random_size(struct random_source *r)
{
    static const int64_t sizes[] = {1,  15,  16,  17,  31,  32,       33,   63,
                                    64, 100, 127, 128, 129, 17 * 257, 8100, 64 * 297};
    if (chance(r, 30))
        return 1 + random_below(r, 3000);
    return sizes[random_below(r, sizeof sizes / sizeof *sizes)];
}

static inline struct zr_tensor make_tensor(const char *name, int64_t n_elems, int32_t unit)
{
    struct zr_tensor t = {.name = strdup(name),
                          .param = &model_pointer,
                          .grad = &model_pointer,
                          .dtype = ZERO_F32,
                          .n_elems = n_elems,
                          .n_layers = 1,
                          .n_states = 2,
                          .unit = unit};
    assert_non_null(t.name);
    return t;
}

/* Makes t a stack of n_layers of its size, and the first of them is in t's unit. */
static inline void stack_tensor(struct zr_tensor *t, int64_t n_layers)
{
    t->stacked = true;
    t->n_layers = n_layers;
    t->n_elems *= n_layers;
}

static inline struct zr_tensor random_tensor(struct random_source *r, int32_t i, int32_t unit,
                                             int frozen_percent)
{
    char name[32];
    snprintf(name, sizeof name, "t%d", i);
    struct zr_tensor t = make_tensor(name, random_size(r), unit);
    if (chance(r, frozen_percent))
        t.grad = NULL;
    t.dtype = chance(r, 50) ? ZERO_F32 : ZERO_BF16;
    t.no_decay = chance(r, 30);
    t.overwrite = chance(r, 30);
    t.resident = chance(r, 4);
    return t;
}

/* Gives some tensors of every other model an optimizer; the program updates the others. Drawn from the
 * model itself, so that the seeds' models do not change. */
static inline void mix_optimizers(struct zr_tensor *t, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (n % 2 && (t[i].n_elems + i) % 3 == 0)
            t[i].optimizer = (enum zero_optimizer)((t[i].n_elems / 3 + i) % ZR_OPTIMIZER_COUNT);
        t[i].n_states =
            t[i].optimizer ? zr_optimizer_states(t[i].optimizer, i % 2 ? 0.9f : 0) : n % (ZR_MAX_STATES + 1);
    }
}

/* Gives tensors of an optimizer all precisions of masters and states, drawn from the model itself too. */
static inline void mix_precisions(struct zr_tensor *t, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        if (t[i].optimizer && t[i].dtype == ZERO_BF16)
            t[i].masters = (enum zero_masters)((t[i].n_elems + i) % 3);
        if (t[i].optimizer)
            t[i].moments = (enum zero_moments)((t[i].n_elems / 3 + i) % 3);
    }
}

/* Gives some tensors of every third model a granule, drawn from the model itself too. */
static inline void mix_granules(struct zr_tensor *t, int32_t n)
{
    for (int32_t i = 0; n % 3 == 0 && i < n; i++) {
        int64_t layer = t[i].n_elems / t[i].n_layers;
        if ((layer + i) % 3)
            t[i].granule = layer % 2 ? layer : layer / 2;
    }
}

/* Returns a table of *n tensors over 1 to max_units units without gaps, which zr_layout_make can take
 * over. */
static inline struct zr_tensor *random_tensors(struct random_source *r, int32_t max_units, int32_t *n)
{
    enum { MOST = 200 };
    struct zr_tensor *t = calloc(MOST, sizeof *t);
    assert_non_null(t);
    int32_t n_units = 1 + (int32_t)random_below(r, max_units), n_stacked = (int32_t)random_below(r, 4);
    int frozen_percent = chance(r, 20) ? 90 : chance(r, 50) ? 30 : 0;
    bool *covered = calloc((size_t)n_units, sizeof *covered);
    assert_non_null(covered);
    *n = 0;
    for (int32_t k = 0; k < n_stacked; k++) {
        int32_t unit = (int32_t)random_below(r, n_units);
        t[*n] = random_tensor(r, *n, unit, frozen_percent);
        stack_tensor(&t[*n], 1 + random_below(r, n_units - unit));
        memset(covered + unit, 1, (size_t)t[*n].n_layers);
        ++*n;
    }
    for (int32_t u = 0; u < n_units; u++) {
        int32_t k = (int32_t)random_below(r, 4);
        for (k = k || covered[u] ? k : 1; k > 0 && *n < MOST; k--, ++*n)
            t[*n] = random_tensor(r, *n, u, frozen_percent);
    }
    free(covered);
    for (int32_t i = *n; i > 1; i--) {
        int32_t j = (int32_t)random_below(r, i);
        struct zr_tensor swap = t[i - 1];
        t[i - 1] = t[j];
        t[j] = swap;
    }
    mix_optimizers(t, *n);
    mix_precisions(t, *n);
    mix_granules(t, *n);
    return t;
}

#endif
