/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_earlier.c: checkpoints that earlier libraries wrote, byte for byte, load at every stage
 * into what they were saved from. Expected values are what the library that saved them read after a load. */
#include "test/checkpoint/checkpoint_of_format_1.h"
#include "test/checkpoint/checkpoint_of_format_2.h"
#include "test/checkpoint/checkpoint_of_format_3.h"
#include "test/checkpoint/saved_model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cmocka.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

static const struct earlier {
    int format, world;
    const struct earlier_file *files;
    int n_files;
    int32_t of_layers; /* optimizer of the tensor `layers`; 0: the model's, AdamW */
    uint64_t hash;     /* of masters and states */
    bool rank_data;
} earlier[] = {
    {1, 2, format_1_files, COUNT(format_1_files), 0, UINT64_C(0xb48746d2b6ca68bb), false},
    {2, 3, format_2_files, COUNT(format_2_files), ZERO_LION, UINT64_C(0x9948d61cea59bc35), false},
    {3, 3, format_3_files, COUNT(format_3_files), ZERO_LION, UINT64_C(0x9948d61cea59bc35), true},
};

static char base[64];

static void write_file(const char *dir, const struct earlier_file *file)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", dir, file->name);
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    for (int i = 0; i < file->bytes; i++) {
        unsigned byte;
        assert_int_equal(sscanf(file->hex + 2 * i, "%2x", &byte), 1);
        fputc((int)byte, f);
    }
    assert_int_equal(fclose(f), 0);
}

static void check_values(zero_ctx *z, const struct earlier *e)
{
    static const int counts[] = {200, 5};
    uint64_t hash = 0;
    float frozen[3];
    for (int k = 0; k < 2; k++)
        for (int v = ZERO_VALUE_MASTER; v < ZERO_VALUE_STATE + (k == 0 && e->of_layers == ZERO_LION ? 1 : 2);
             v++) {
            float x[200];
            memset(x, 0xa5, sizeof x);
            CHECK_OK(zero_read(z, k, v, 0, counts[k], x));
            hash = XXH64(x, (size_t)counts[k] * sizeof *x, hash);
        }
    assert_true(hash == e->hash);
    CHECK_OK(zero_read(z, 2, ZERO_VALUE_PARAM, 0, 3, frozen));
    assert_true(frozen[0] == 0.5f && frozen[1] == 1.5f && frozen[2] == 2.5f);
}

static void check_data(zero_ctx *z, const struct earlier *e)
{
    const void *note;
    int64_t n_note, bytes;
    int32_t n_saved;
    CHECK_OK(zero_get_user_data(z, &note, &n_note));
    assert_int_equal(n_note, 6);
    assert_memory_equal(note, "seed 7", 6);
    for (int r = 0; r < e->world; r++) {
        char expected[32], found[32] = "";
        CHECK_OK(zero_find_rank_data(z, r, &n_saved, &bytes));
        assert_int_equal(n_saved, e->world);
        if (!e->rank_data) {
            assert_int_equal(bytes, 0);
            continue;
        }
        memset(expected, 0, sizeof expected); /* what rank r gave ended with r bytes of zero */
        assert_int_equal(bytes, snprintf(expected, sizeof expected, "rank %d's own", r) + r);
        CHECK_OK(zero_read_rank_data(z, r, 0, bytes - r, found));
        assert_string_equal(found, expected);
    }
}

/* Loads it into the model that it is of, but for what the caller changes. */
static void load(const struct earlier *e, int stage, int32_t optimizer, int32_t of_layers,
                 const char *refused)
{
    void *w = calloc(200, 4), *b = calloc(5, 2), *f = calloc(3, 4), *own[] = {w, b, f}, *gw = NULL,
         *gb = NULL;
    struct zero_tensor t[3] = {
        {.name = "layers",
         .param = &w,
         .grad = &gw,
         .shape = {2, 100},
         .dtype = ZERO_F32,
         .optimizer = of_layers,
         .flags = ZERO_STACKED},
        {.name = "bias", .param = &b, .grad = &gb, .shape = {5}, .dtype = ZERO_BF16, .unit = 2},
        {.name = "scale", .param = &f, .shape = {3}, .dtype = ZERO_F32, .unit = 2}};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    zero_ctx *z;
    cfg.stage = stage;
    cfg.launch.world = 1;
    cfg.optimizer = optimizer;
    CHECK_OK(zero_wrap(&z, t, 3, &cfg));
    for (int i = 0; i < 3; i++)
        free(own[i]);
    if (refused) {
        assert_int_equal(zero_load(z, base), ZERO_ERR_ARG);
        assert_non_null(strstr(zero_last_error(), refused));
    } else {
        CHECK_OK(zero_load(z, base));
        check_values(z, e);
        check_data(z, e);
    }
    zero_unwrap(&z);
}

static void loads(const struct earlier *e)
{
    char dir[128], command[128];
    snprintf(base, sizeof base, "/tmp/zero-format-XXXXXX");
    assert_non_null(mkdtemp(base));
    snprintf(dir, sizeof dir, "%s/save-00000001-step-00000002", base);
    assert_int_equal(mkdir(dir, 0755), 0);
    for (int i = 0; i < e->n_files; i++)
        write_file(dir, &e->files[i]);
    for (int stage = 0; stage < 4; stage++)
        load(e, stage, ZERO_ADAMW, e->of_layers, NULL);
    load(e, 1, ZERO_RMSPROP, e->of_layers ? e->of_layers : ZERO_ADAMW,
         "the optimizer of tensor bias is adamw with 2 states there, and rmsprop with 1 in this model");
    load(e, 1, ZERO_AUTO, ZERO_SGD,
         e->of_layers
             ? "the optimizer of tensor layers is lion with 1 states there, and sgd with 0 in this model"
             : "the optimizer of tensor layers is adamw with 2 states there, and sgd with 0 in this model");
    snprintf(command, sizeof command, "rm -r %s", base);
    assert_int_equal(system(command), 0);
}

static void format_1_loads(void **state)
{
    (void)state;
    loads(&earlier[0]);
}

static void format_2_loads(void **state)
{
    (void)state;
    loads(&earlier[1]);
}

static void format_3_loads(void **state)
{
    (void)state;
    loads(&earlier[2]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(format_1_loads),
        cmocka_unit_test(format_2_loads),
        cmocka_unit_test(format_3_loads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
