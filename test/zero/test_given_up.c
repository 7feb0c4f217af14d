/* SPDX-License-Identifier: Apache-2.0 */
/* test_given_up.c: the memory that the model's pointers had before zero_wrap. A copy of the pointers from
 * before still computes with it. Without check mode the loss is then finite and wrong, and in check mode it
 * is NaN. Shared or read-only memory is left unchanged. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct plan {
    int stage;
    bool check;
};

/* Computes a loss from an f32 tensor of m, which may be a copy from before zero_wrap. */
static float loss_of(const struct toy *m, int tensor)
{
    float sum = 0;
    for (int64_t i = 0; i < toy_elems(tensor); i++)
        sum += ((const float *)m->param[tensor])[i] * ((const float *)m->param[tensor])[i];
    return sum;
}

static void trains_a_copy(struct toy_rank *r)
{
    const struct plan *p = r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    toy_make(&m);
    struct zero_config cfg = toy_config(r, p->stage);
    cfg.debug.check = p->check;
    const struct toy copy = m;
    const float before = loss_of(&copy, 0);
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    for (int step = 0; !err && step < 3; step++) {
        err = toy_forward(&m, z, true);
        for (int t = 0; !err && t <= TOY_FROZEN; t++) {
            float loss = m.table[t].dtype == ZERO_F32 ? loss_of(&copy, t) : 1;
            if (m.table[t].dtype == ZERO_F32 && !isfinite(loss) != p->check)
                toy_wrong(r, "step %d, tensor %d: the copy's loss is %g", step, t, (double)loss);
            if (t == 0 && !p->check && loss != before)
                toy_wrong(r, "without check the copy's loss went from %g to %g", (double)before,
                          (double)loss);
        }
        if (!err)
            err = toy_backward(&m, z, true, step, r->rank);
        if (!err)
            err = zero_step(z, 1e-2f, NULL);
    }
    for (int t = 0; !err && p->check && t < TOY_TENSORS; t++)
        for (int64_t i = 0; m.table[t].dtype == ZERO_BF16 && i < toy_elems(t); i++)
            if ((((uint16_t *)copy.param[t])[i] & 0x7fff) <= 0x7f80)
                toy_wrong(r, "element %lld of tensor %d is a number", (long long)i, t);
    if (!err)
        err = toy_hash(z, 2, &r->hash);
    toy_note(r, err);
    zero_unwrap(&z);
    toy_free(&m);
}

static uint64_t run(void (*fn)(struct toy_rank *r), struct plan p, int world)
{
    struct toy_rank r[MAX_TOY_RANKS];
    toy_ranks(world, fn, &p, r);
    for (int i = 0; i < world; i++)
        if (r[i].err || r[i].wrong[0])
            fail_msg("stage %d check %d world %d rank %d: %s %s", p.stage, p.check, world, i, r[i].text,
                     r[i].wrong);
    return r[0].hash;
}

static void test_copies(void **state)
{
    for (int world = 1; world <= 2; world++)
        for (int stage = 0; stage < 4; stage++) {
            uint64_t plain = run(trains_a_copy, (struct plan){stage, false}, world);
            assert_int_equal(run(trains_a_copy, (struct plan){stage, true}, world), plain);
        }
}

/* ---- kinds of memory ---- */

enum { PAGES = 3 };

static void *map(size_t n_bytes, int fd, int flags)
{
    void *at = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, flags | (fd < 0 ? MAP_ANONYMOUS : 0), fd, 0);
    return at == MAP_FAILED ? NULL : at;
}

static bool all_equal(const char *a, const char *b, size_t n_bytes, const char *nan)
{
    for (size_t i = 0; i < n_bytes; i++)
        if (a[i] != (nan ? nan[i % 2] : b[i]))
            return false;
    return true;
}

/* Four tensors: in a shared mapping of a file, in a private mapping of it, in read-only memory, and in memory
 * whose second page is read-only. */
static void test_kinds_of_memory(void **state)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), n_bytes = PAGES * page;
    const uint16_t nan_bits = 0x7fc0;
    char nan[2];
    memcpy(nan, &nan_bits, sizeof nan);
    enum { SHARED, FILE_PRIVATE, READ_ONLY, PARTLY, N };
    static const char *const names[N] = {"shared", "file", "read-only", "partly"};
    char *at[N], *was = malloc(n_bytes), *in_file = malloc(n_bytes);
    void *param[N], *grad[N] = {0};
    struct zero_tensor table[N] = {0};
    int fd = memfd_create("weights", MFD_CLOEXEC);
    assert_non_null(was);
    assert_non_null(in_file);
    assert_true(fd >= 0);
    for (size_t i = 0; i < n_bytes / sizeof(float); i++)
        ((float *)(void *)was)[i] = 0.5f + (float)(i % 97);
    assert_int_equal(pwrite(fd, was, n_bytes, 0), (ssize_t)n_bytes);
    for (int i = 0; i < N; i++) {
        at[i] = i == SHARED         ? map(n_bytes, fd, MAP_SHARED)
                : i == FILE_PRIVATE ? map(n_bytes, fd, MAP_PRIVATE)
                                    : map(n_bytes, -1, MAP_PRIVATE);
        assert_non_null(at[i]);
        if (i >= READ_ONLY)
            memcpy(at[i], was, n_bytes);
        param[i] = at[i];
        table[i] = (struct zero_tensor){.name = names[i],
                                        .param = &param[i],
                                        .grad = &grad[i],
                                        .shape = {(int64_t)(n_bytes / sizeof(float))},
                                        .dtype = ZERO_F32,
                                        .unit = i};
    }
    assert_int_equal(mprotect(at[READ_ONLY], n_bytes, PROT_READ), 0);
    assert_int_equal(mprotect(at[PARTLY] + page, page, PROT_READ), 0);
    struct zero_config cfg = ZERO_CONFIG_INIT;
    zero_ctx *z = NULL;
    cfg.debug.check = 1;
    cfg.launch.world = 1;
    int err = zero_wrap(&z, table, N, &cfg);
    if (err)
        fail_msg("%s", zero_last_error());
    assert_true(all_equal(at[SHARED], was, n_bytes, NULL));
    assert_true(all_equal(at[READ_ONLY], was, n_bytes, NULL));
    assert_true(all_equal(at[FILE_PRIVATE], NULL, n_bytes, nan));
    assert_true(all_equal(at[PARTLY], NULL, page, nan));
    assert_true(all_equal(at[PARTLY] + page, was + page, page, NULL));
    assert_true(all_equal(at[PARTLY] + 2 * page, NULL, page, nan));
    assert_int_equal(pread(fd, in_file, n_bytes, 0), (ssize_t)n_bytes);
    assert_memory_equal(in_file, was, n_bytes);
    for (int i = 0; i < N; i++) { /* zero_wrap took over the original values */
        assert_int_equal(zero_read(z, i, ZERO_VALUE_PARAM, 0, (int64_t)(n_bytes / sizeof(float)), in_file),
                         0);
        assert_memory_equal(in_file, was, n_bytes);
    }
    assert_int_equal(zero_unwrap(&z), 0);
    for (int i = 0; i < N; i++)
        munmap(at[i], n_bytes);
    close(fd);
    free(was);
    free(in_file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_copies),
        cmocka_unit_test(test_kinds_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
