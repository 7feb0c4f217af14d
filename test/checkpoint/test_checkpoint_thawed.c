/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_thawed.c: tests tensors that were frozen when saved and are trained when loaded, and the
 * reverse. They are f32 and bf16, on other worlds and at other stages. The weights have the saved bits. A
 * thawed tensor has masters of the same values and fresh states, and every other tensor is unchanged. A
 * log line reports this, another one that a unit's step count is not the thawed tensor's, and training
 * goes on.
 *
 * Also tests units that are split, which keep their counts and bits, and units of different counts that
 * are merged, which a log line names. */
#include "test/checkpoint/memory_files.h"
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Entries of saved_model.c's table. Two are trained and two are frozen, one of each dtype. */
enum { LAYERS_W = 1, POSITION = 3, MASK = 4, HEAD = 5, RUNNING = 7, N_STATES = 2, MOST = 7 * 33 * 21 };

/* Values of all tensors, as zero_read gives them; zeros where there are none. */
struct values {
    unsigned char param[MODEL_TENSORS][4 * MOST];
    float master[MODEL_TENSORS][MOST], state[N_STATES][MODEL_TENSORS][MOST];
    bool trained[MODEL_TENSORS];
};

/* Before, between and after two loads. */
static struct values at[3];
static struct memory_files *files;
static _Atomic int n_lines, n_mixed;

static int64_t elems(const struct zero_tensor *t)
{
    int64_t n = 1;
    for (int d = 0; d < 8 && t->shape[d]; d++)
        n *= t->shape[d];
    return n;
}

/* Rank 0's copy is for the test. */
static void take(struct model_rank *m, struct values *out)
{
    struct values *v = calloc(1, sizeof *v);
    CHECK_THAT(v != NULL);
    for (int t = 0; t < RUNNING; t++) {
        int64_t n = elems(&m->tensors[t]);
        CHECK_THAT(n <= MOST);
        CHECK_OK(zero_read(m->z, t, ZERO_VALUE_PARAM, 0, n, v->param[t]));
        v->trained[t] = m->tensors[t].grad != NULL;
        if (!v->trained[t])
            continue;
        CHECK_OK(zero_read(m->z, t, ZERO_VALUE_MASTER, 0, n, v->master[t]));
        for (int i = 0; i < N_STATES; i++)
            CHECK_OK(zero_read(m->z, t, ZERO_VALUE_STATE + i, 0, n, v->state[i][t]));
    }
    if (m->rank == 0)
        memcpy(out, v, sizeof *v);
    free(v);
}

/* Freezes a trained tensor and thaws a frozen one, of each dtype. */
static void change(struct zero_tensor *t, struct zero_config *cfg)
{
    static _Thread_local void *grad[2];
    t[LAYERS_W].grad = t[HEAD].grad = NULL;
    t[POSITION].grad = &grad[0];
    t[MASK].grad = &grad[1];
}

static void note(void *arg, const char *line)
{
    if (strstr(line, "continues from step")) {
        n_mixed++;
        CHECK_THAT(strstr(line, "0 steps have updated tensor ") && strstr(line, "from step 3,"));
    }
    if (!strstr(line, "frozen and are trained"))
        return;
    n_lines++;
    CHECK_THAT(
        strstr(line, " 2 of its tensors were frozen and are trained now, with fresh optimizer state ("));
    CHECK_THAT(strstr(line, "; 2 of its tensors were trained and are frozen now, without their optimizer"));
    CHECK_THAT(strstr(line, "(layers/w, ...)") && strstr(line, "(position, ...)"));
}

static void save_first(struct model_rank *m, void *arg)
{
    CHECK_OK(model_steps(m, 3));
    CHECK_OK(zero_save(m->z, "first", NULL));
    take(m, &at[0]);
}

static void change_and_save(struct model_rank *m, void *arg)
{
    CHECK_OK(zero_load(m->z, "first"));
    CHECK_THAT(model_t(m) == 3);
    take(m, &at[1]);
    CHECK_OK(zero_save(m->z, "second", NULL));
}

static void change_back(struct model_rank *m, void *arg)
{
    CHECK_OK(zero_load(m->z, "second"));
    take(m, &at[2]);
    m->step = 3;
    CHECK_OK(model_steps(m, 2));
}

static void compare(const struct values *before, const struct values *after)
{
    static const float zeros[MOST];
    for (int t = 0; t < RUNNING; t++) {
        assert_memory_equal(before->param[t], after->param[t], sizeof before->param[t]);
        if (before->trained[t] && after->trained[t])
            assert_memory_equal(before->master[t], after->master[t], sizeof before->master[t]);
        for (int i = 0; i < N_STATES; i++)
            assert_memory_equal(after->state[i][t],
                                before->trained[t] && after->trained[t] ? before->state[i][t] : zeros,
                                sizeof zeros);
        if (before->trained[t] || !after->trained[t])
            continue;
        bool is_bf16 = t == LAYERS_W || t == MASK;
        for (int i = 0; i < MOST; i++) {
            uint32_t bits = 0, master;
            memcpy((char *)&bits + (is_bf16 ? 2 : 0), after->param[t] + (is_bf16 ? 2 : 4) * i,
                   is_bf16 ? 2 : 4);
            memcpy(&master, &after->master[t][i], 4);
            assert_int_equal(master, bits);
        }
    }
}

static void run(int way, struct model_options o, void (*fn)(struct model_rank *m, void *arg))
{
    static const int worlds[] = {1, 2, 3, 4}, stages[] = {3, 0, 2, 1};
    o.world = worlds[way % 4];
    o.stage = stages[way / 4 % 4];
    o.prefetch = way % 3 - 1;
    o.log = note;
    o.files = memory_files_table(files);
    model_run(&o, fn, NULL);
}

static void frozen_and_trained_change_places(void **state)
{
    for (int way = 0; way < 16; way++) {
        files = memory_files_open();
        n_lines = n_mixed = 0;
        run(way, (struct model_options){.async = way % 2}, save_first);
        assert_int_equal(n_lines, 0);
        run(way + 5, (struct model_options){.change = change, .scrambled = true}, change_and_save);
        assert_int_equal(n_lines, 1);
        assert_int_equal(n_mixed, 1);
        run(way + 10, (struct model_options){.scrambled = true, .async = way % 3 == 0}, change_back);
        assert_int_equal(n_lines, 2);
        assert_int_equal(n_mixed, 2);
        compare(&at[0], &at[1]);
        compare(&at[1], &at[2]);
        memory_files_close(files);
    }
}

/* ---- units that are split or merged ---- */

/* Moves the head from the first unit into a new unit after it. */
static void split_the_first_unit(struct zero_tensor *t, struct zero_config *cfg)
{
    for (int i = 0; i < RUNNING; i++)
        t[i].unit += t[i].unit > 0 || i == HEAD;
}

/* leaves_out: the units without a backward, for each of three steps. */
struct split {
    bool at_save, at_load;
    unsigned leaves_out[3];
    uint64_t saved_hash, hash;
};

static void save_counts(struct model_rank *m, void *arg)
{
    struct split *s = arg;
    for (int i = 0; i < 3; i++) {
        m->leaves_out = s->leaves_out[i];
        CHECK_OK(model_steps(m, 1));
    }
    m->leaves_out = 0;
    CHECK_OK(zero_save(m->z, "counts", NULL));
    CHECK_OK(model_steps(m, 2));
    uint64_t hash = model_hash(m);
    if (m->rank == 0)
        s->saved_hash = hash;
}

static void load_counts(struct model_rank *m, void *arg)
{
    struct split *s = arg;
    CHECK_OK(zero_load(m->z, "counts"));
    m->step = 3;
    CHECK_OK(model_steps(m, 2));
    uint64_t hash = model_hash(m);
    if (m->rank == 0)
        s->hash = hash;
}

static char merged[600];

static void note_merged(void *arg, const char *line)
{
    if (!strstr(line, "continues from step"))
        return;
    n_mixed++;
    snprintf(merged, sizeof merged, "%s", line);
}

static void run_counts(struct split *s, int way)
{
    struct model_options o = {.world = 1 + way % 2, .stage = way % 4, .log = note_merged};
    files = memory_files_open();
    o.files = memory_files_table(files);
    o.change = s->at_save ? split_the_first_unit : NULL;
    n_mixed = 0;
    model_run(&o, save_counts, s);
    o.scrambled = true;
    o.stage = 3 - o.stage;
    o.change = s->at_load ? split_the_first_unit : NULL;
    model_run(&o, load_counts, s);
    memory_files_close(files);
}

static void a_unit_that_is_split_goes_on(void **state)
{
    for (int way = 0; way < 4; way++) {
        struct split s = {.at_load = true, .leaves_out = {0, 1, 1}};
        run_counts(&s, way);
        assert_int_equal(n_mixed, 0);
        assert_true(s.hash == s.saved_hash);
    }
}

static void units_that_are_merged_are_named(void **state)
{
    for (int way = 0; way < 4; way++) {
        struct split s = {.at_save = true, .leaves_out = {0, 1, 3}};
        run_counts(&s, way);
        assert_int_equal(n_mixed, 1);
        assert_non_null(
            strstr(merged, "1 steps have updated tensor embedding, but its unit 0 continues from step 2,"));
        assert_non_null(
            strstr(merged, "(1 tensors or layers in all, and the steps that updated each: embedding 1)"));
        assert_true(s.hash != s.saved_hash);
        /* All units took the same number of steps: no log line, and the same bits. */
        s = (struct split){.at_save = true, .leaves_out = {0, 3, 3}};
        run_counts(&s, way);
        assert_int_equal(n_mixed, 0);
        assert_true(s.hash == s.saved_hash);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(frozen_and_trained_change_places),
        cmocka_unit_test(a_unit_that_is_split_goes_on),
        cmocka_unit_test(units_that_are_merged_are_named),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
