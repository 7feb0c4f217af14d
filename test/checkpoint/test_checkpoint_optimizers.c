/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_optimizers.c: tests checkpoints of models in which tensors have their own optimizers, of
 * other kinds than the model's. */
#include "test/checkpoint/memory_files.h"
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"
#include "zero/checkpoint/manifest.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#define STEPS 3
#define MORE  4

static struct memory_files *files;

/* Parameter groups 1 to 6. */
#define DEFAULTS .beta1 = ZERO_AUTO, .beta2 = ZERO_AUTO, .eps = ZERO_AUTO
static const struct zero_optim groups[] = {
    {.optimizer = ZERO_LION, .lr_scale = 0.25f, .weight_decay = 0.1f, DEFAULTS},
    {.optimizer = ZERO_SGD, .lr_scale = 1, .weight_decay = 0.1f, DEFAULTS}, /* no state */
    {.optimizer = ZERO_NESTEROV, .lr_scale = 1, .weight_decay = 0.3f, DEFAULTS},
    {.optimizer = ZERO_RMSPROP, .lr_scale = 1, .weight_decay = 0.1f, DEFAULTS},
    {.optimizer = ZERO_ADAMW, .lr_scale = 1, .weight_decay = 0.1f, DEFAULTS},
    {.optimizer = ZERO_NESTEROV, .lr_scale = 0.5f, DEFAULTS},
};

/* embedding, layers/w, layers/b, position, mask, head, scale */
static void mixed(struct zero_tensor *t, struct zero_config *cfg)
{
    t[0].group = 1;
    t[1].group = 2;
    t[2].group = 3;
    t[5].group = 4;
    cfg->optim_groups = groups;
    cfg->n_optim_groups = sizeof groups / sizeof *groups;
}

/* ---- from every stage and world to every other ---- */

static const struct {
    int stage, world;
} ways[] = {{0, 1}, {0, 3}, {1, 2}, {1, 3}, {2, 2}, {3, 1}, {3, 4}};
enum { N_WAYS = sizeof ways / sizeof *ways };

static struct {
    uint64_t hash, later;
} saved[N_WAYS];

static struct model_options options_of(int i)
{
    return (struct model_options){.stage = ways[i].stage,
                                  .world = ways[i].world,
                                  .async = i % 2,
                                  .files = memory_files_table(files),
                                  .change = mixed};
}

static void save_one(struct model_rank *m, void *arg)
{
    int i = *(int *)arg;
    char dir[16];
    snprintf(dir, sizeof dir, "/way%d", i);
    CHECK_OK(model_steps(m, STEPS));
    CHECK_OK(zero_save(m->z, dir, NULL));
    uint64_t hash = model_hash(m);
    CHECK_OK(model_steps(m, MORE));
    uint64_t later = model_hash(m);
    CHECK_OK(zero_save_wait(m->z, NULL));
    if (m->rank == 0) {
        saved[i].hash = hash;
        saved[i].later = later;
    }
}

static void load_all(struct model_rank *m, void *arg)
{
    int self = *(int *)arg;
    for (int k = 1; k <= N_WAYS; k++) {
        int i = (self + k) % N_WAYS; /* its own comes last */
        char dir[16];
        snprintf(dir, sizeof dir, "/way%d", i);
        CHECK_OK(zero_load(m->z, dir));
        CHECK_THAT(model_hash(m) == saved[i].hash);
    }
    m->step = STEPS;
    CHECK_OK(model_steps(m, MORE));
    CHECK_THAT(model_hash(m) == saved[self].later);
}

static void every_way(void **state)
{
    files = memory_files_open();
    for (int i = 0; i < N_WAYS; i++) {
        struct model_options o = options_of(i);
        model_run(&o, save_one, &i);
    }
    for (int i = 0; i < N_WAYS; i++) {
        struct model_options o = options_of(i);
        o.scrambled = true;
        model_run(&o, load_all, &i);
    }
}

/* ---- into another model ---- */

static int change;
static const char *const reported[] = {
    "the optimizer of tensor embedding is lion with 1 states there, and adamw with 2 in this model",
    "the optimizer of tensor layers/w is sgd with 0 states there, and sgd with 1 in this model",
    "the optimizer of tensor scale is adamw with 2 states there, and adam with 2 in this model",
    "the optimizer of tensor embedding is lion with 1 states there, and user with 1 in this model",
};
enum { N_CHANGES = sizeof reported / sizeof *reported };

static int own_update(void *arg, const struct zero_update *u)
{
    return 0;
}

static void another(struct zero_tensor *t, struct zero_config *cfg)
{
    mixed(t, cfg);
    switch (change) {
    case 0:
        t[0].group = 0;
        break;
    case 1: /* the same name, with momentum: the other tensors' state is kept */
        cfg->optim.optimizer = ZERO_SGD;
        cfg->optim.beta1 = 0.5f;
        t[1].group = 0;
        t[6].group = 5;
        break;
    case 2:
        cfg->optim.optimizer = ZERO_ADAM;
        break;
    default:
        cfg->optim.update = own_update;
        cfg->optim.n_states = 1;
        cfg->optim.weight_decay = 0;
        for (int i = 0; i < MODEL_TENSORS; i++)
            t[i].group = 0;
    }
}

static void load_refused(struct model_rank *m, void *arg)
{
    uint64_t before = model_hash(m);
    CHECK_THAT(zero_load(m->z, "/way2") == ZERO_ERR_ARG);
    if (!strstr(zero_last_error(), reported[change]))
        fprintf(stderr, "not said: %s\n", reported[change]);
    CHECK_THAT(strstr(zero_last_error(), reported[change]) != NULL);
    CHECK_THAT(model_hash(m) == before);
}

static void another_optimizer_is_refused(void **state)
{
    for (change = 0; change < N_CHANGES; change++) {
        struct model_options o = {
            .stage = 2, .world = 2, .files = memory_files_table(files), .change = another};
        model_run(&o, load_refused, NULL);
    }
}

/* Other groups of the same kinds with other rates. Rates belong to the program. */
static void renamed(struct zero_tensor *t, struct zero_config *cfg)
{
    mixed(t, cfg);
    cfg->optim.optimizer = ZERO_LION;
    t[0].group = 0;
    t[2].group = 6;
    t[6].group = 5;
}

static void load_same(struct model_rank *m, void *arg)
{
    CHECK_OK(zero_load(m->z, "/way2"));
    CHECK_THAT(model_hash(m) == saved[2].hash);
}

static void default_and_name_are_one(void **state)
{
    struct model_options o = {.stage = 3, .world = 2, .files = memory_files_table(files), .change = renamed};
    model_run(&o, load_same, NULL);
    memory_files_close(files);
}

/* An optimizer of a later library, or of one built with more optimizers. */
static void unknown_names_are_read(void **state)
{
    int64_t shape = 3, updates = 0;
    struct zr_manifest_tensor t = {.name = strdup("w"),
                                   .dtype = "F32",
                                   .n_dims = 1,
                                   .trainable = true,
                                   .n_states = 3,
                                   .updates = &updates,
                                   .n_updates = 1};
    struct zr_manifest_file f = {.name = "shard-00001-of-00001.safetensors", .bytes = 8};
    struct zr_manifest m = {.version = "9",
                            .world = 1,
                            .n_tensors = 1,
                            .n_files = 1,
                            .tensors = &t,
                            .files = &f},
                       again;
    char *text;
    int64_t n;
    memcpy(t.shape, &shape, sizeof shape);
    snprintf(t.optimizer, sizeof t.optimizer, "muon");
    assert_int_equal(zr_manifest_print(&m, &text, &n), 0);
    assert_true(zr_manifest_bytes(&m) >= n);
    assert_int_equal(zr_manifest_parse("m", text, n, &again), 0);
    assert_string_equal(again.tensors[0].optimizer, "muon");
    assert_int_equal(again.tensors[0].n_states, 3);
    zr_manifest_free(&again);
    free(text);
    free(t.name);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_way),
        cmocka_unit_test(another_optimizer_is_refused),
        cmocka_unit_test(default_and_name_are_one),
        cmocka_unit_test(unknown_names_are_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
