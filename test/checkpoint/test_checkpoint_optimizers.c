/* test_checkpoint_optimizers.c: checkpoints of models whose tensors have optimizers of their own, of another
 * kind than the model's, and of before there were such. */
#include "test/checkpoint/checkpoint_of_format_1.h"
#include "test/checkpoint/memory_files.h"
#include "test/checkpoint/saved_model.h"
#include "zero/checkpoint/manifest.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cmocka.h>

#define STEPS 3
#define MORE  4

static struct memory_files *files;

/* embedding, layers/w, layers/b, position, mask, head, scale */
static void mixed(struct zero_tensor *t, struct zero_config *cfg)
{
    t[0].optimizer = ZERO_LION;
    t[0].lr_scale = 0.25f;
    t[1].optimizer = ZERO_SGD; /* no state */
    t[2].optimizer = ZERO_NESTEROV;
    t[2].decay_scale = 3;
    t[5].optimizer = ZERO_RMSPROP;
    (void)cfg;
}

/* ---- from every stage and world into every other ---- */

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
    CHECK_OK(zero_save(m->z, dir));
    uint64_t hash = model_hash(m);
    CHECK_OK(model_steps(m, MORE));
    uint64_t later = model_hash(m);
    CHECK_OK(zero_save_wait(m->z));
    if (m->rank == 0) {
        saved[i].hash = hash;
        saved[i].later = later;
    }
}

static void load_all(struct model_rank *m, void *arg)
{
    int self = *(int *)arg;
    for (int k = 1; k <= N_WAYS; k++) {
        int i = (self + k) % N_WAYS; /* its own last */
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
    (void)state;
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
    (void)arg, (void)u;
    return 0;
}

static void another(struct zero_tensor *t, struct zero_config *cfg)
{
    mixed(t, cfg);
    switch (change) {
    case 0:
        t[0].optimizer = 0;
        break;
    case 1: /* the same name, with momentum: what tensors without a name have stays */
        cfg->optimizer = ZERO_SGD;
        cfg->beta1 = 0.5f;
        t[6].optimizer = ZERO_ADAMW;
        break;
    case 2:
        cfg->optimizer = ZERO_ADAM;
        break;
    default:
        cfg->update = own_update;
        cfg->n_states = 1;
        for (int i = 0; i < MODEL_TENSORS; i++) {
            t[i].optimizer = 0;
            t[i].decay_scale = 0;
        }
    }
}

static void load_refused(struct model_rank *m, void *arg)
{
    (void)arg;
    uint64_t before = model_hash(m);
    CHECK_THAT(zero_load(m->z, "/way2") == ZERO_ERR_ARG);
    if (!strstr(zero_last_error(), reported[change]))
        fprintf(stderr, "not said: %s\n", reported[change]);
    CHECK_THAT(strstr(zero_last_error(), reported[change]) != NULL);
    CHECK_THAT(model_hash(m) == before);
}

static void another_optimizer_is_refused(void **state)
{
    (void)state;
    for (change = 0; change < N_CHANGES; change++) {
        struct model_options o = {
            .stage = 2, .world = 2, .files = memory_files_table(files), .change = another};
        model_run(&o, load_refused, NULL);
    }
}

/* By default or by name, and whatever the rates: those are the program's. */
static void renamed(struct zero_tensor *t, struct zero_config *cfg)
{
    mixed(t, cfg);
    cfg->optimizer = ZERO_LION;
    t[0].optimizer = 0;
    t[6].optimizer = ZERO_ADAMW;
    t[0].lr_scale = t[2].decay_scale = 1;
}

static void load_same(struct model_rank *m, void *arg)
{
    (void)arg;
    CHECK_OK(zero_load(m->z, "/way2"));
    CHECK_THAT(model_hash(m) == saved[2].hash);
}

static void default_and_name_are_one(void **state)
{
    (void)state;
    struct model_options o = {.stage = 3, .world = 2, .files = memory_files_table(files), .change = renamed};
    model_run(&o, load_same, NULL);
    memory_files_close(files);
}

/* ---- the format before ---- */

static char base[] = "/tmp/zero-format-XXXXXX";

static void write_file(const char *dir, int k)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, format_1_files[k].name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    for (int i = 0; i < format_1_files[k].bytes; i++) {
        unsigned byte;
        assert_int_equal(sscanf(format_1_files[k].hex + 2 * i, "%2x", &byte), 1);
        fputc((int)byte, f);
    }
    assert_int_equal(fclose(f), 0);
}

/* Loads it into the model that it is of, but for what the caller changes. Values as they were read by the
 * library that saved them. */
static void load_before(int stage, int32_t optimizer, int32_t of_layers, const char *refused)
{
    void *w = malloc(800), *b = malloc(10), *f = malloc(12), *own[] = {w, b, f}, *gw = NULL, *gb = NULL;
    memset(w, 0, 800), memset(b, 0, 10), memset(f, 0, 12);
    struct zero_tensor t[3] = {
        {.name = "layers",
         .param = &w,
         .grad = &gw,
         .shape = {2, 100},
         .dtype = ZERO_F32,
         .flags = ZERO_STACKED},
        {.name = "bias", .param = &b, .grad = &gb, .shape = {5}, .dtype = ZERO_BF16, .unit = 2},
        {.name = "scale", .param = &f, .shape = {3}, .dtype = ZERO_F32, .unit = 2}};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    zero_ctx *z;
    uint64_t hash = 0;
    const void *note;
    int64_t n_note;
    float frozen[3];
    cfg.stage = stage;
    cfg.world = 1;
    cfg.optimizer = optimizer;
    t[0].optimizer = of_layers;
    CHECK_OK(zero_wrap(&z, t, 3, &cfg));
    for (int i = 0; i < 3; i++)
        free(own[i]);
    if (refused) {
        assert_int_equal(zero_load(z, base), ZERO_ERR_ARG);
        assert_non_null(strstr(zero_last_error(), refused));
        zero_unwrap(&z);
        return;
    }
    CHECK_OK(zero_load(z, base));
    for (int k = 0; k < 2; k++)
        for (int v = ZERO_VALUE_MASTER; v < ZERO_VALUE_STATE + 2; v++) {
            float x[200];
            int n = k ? 5 : 200;
            CHECK_OK(zero_read(z, k, v, 0, n, x));
            hash = XXH64(x, (size_t)n * sizeof *x, hash);
        }
    assert_true(hash == UINT64_C(0xb48746d2b6ca68bb));
    CHECK_OK(zero_read(z, 2, ZERO_VALUE_PARAM, 0, 3, frozen));
    assert_true(frozen[0] == 0.5f && frozen[1] == 1.5f && frozen[2] == 2.5f);
    CHECK_OK(zero_get_user_data(z, &note, &n_note));
    assert_int_equal(n_note, 6);
    assert_memory_equal(note, "seed 7", 6);
    zero_unwrap(&z);
}

static void format_1_loads(void **state)
{
    (void)state;
    char dir[64], command[128];
    assert_non_null(mkdtemp(base));
    snprintf(dir, sizeof dir, "%s/save-00000001-step-00000002", base);
    assert_int_equal(mkdir(dir, 0755), 0);
    for (size_t i = 0; i < sizeof format_1_files / sizeof *format_1_files; i++)
        write_file(dir, (int)i);
    for (int stage = 0; stage < 4; stage++)
        load_before(stage, ZERO_ADAMW, 0, NULL);
    load_before(
        1, ZERO_RMSPROP, ZERO_ADAMW,
        "the optimizer of tensor bias is adamw with 2 states there, and rmsprop with 1 in this model");
    load_before(1, ZERO_AUTO, ZERO_SGD,
                "the optimizer of tensor layers is adamw with 2 states there, and sgd with 0 in this model");
    snprintf(command, sizeof command, "rm -r %s", base);
    assert_int_equal(system(command), 0);
}

/* An optimizer of a later library, or of one built with more of them. */
static void unknown_names_are_read(void **state)
{
    (void)state;
    int64_t shape = 3;
    struct zr_manifest_tensor t = {
        .name = strdup("w"), .dtype = "F32", .n_dims = 1, .trainable = true, .n_states = 3};
    struct zr_manifest_file f = {.name = "shard-00001-of-00001.safetensors", .bytes = 8};
    struct zr_manifest m = {.format = 2,
                            .version = "9",
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
    snprintf(m.optimizer, sizeof m.optimizer, "adamw");
    assert_int_equal(zr_manifest_print(&m, &text, &n), 0);
    assert_true(zr_manifest_bytes(&m) >= n);
    assert_int_equal(zr_manifest_parse("m", text, n, &again), 0);
    assert_string_equal(again.tensors[0].optimizer, "muon");
    assert_int_equal(again.tensors[0].n_states, 3);
    assert_int_equal(again.format, 2);
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
        cmocka_unit_test(format_1_loads),
        cmocka_unit_test(unknown_names_are_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
