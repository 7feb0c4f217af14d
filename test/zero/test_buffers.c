/* SPDX-License-Identifier: Apache-2.0 */
/* test_buffers.c: ZERO_BUFFER, which is state that is not trained, but agrees over ranks and is saved. The
 * model keeps the memory of buffers, on the host or on the GPU stand-in. */
#include "test/cmocka.h"
#include "test/kernels/random.h"
#include "test/stand_in/half.h"
#include "test/zero/sample.h"
#include "test/zero/toy_net.h"
#include "test/zero/where.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { N_BUFFERS = 4, FIRST = 0, N_TENSORS = TOY_TENSORS + N_BUFFERS };
enum { BIG, HALF, COUNT, COUNTS };

/* The first buffer is larger than the staging memory for values. */
static const struct {
    const char *name;
    int64_t n, size;
    enum zero_dtype dtype;
} buffers[N_BUFFERS] = {{"statistics", 70001, 4, ZERO_F32},
                        {"half", 77, 2, ZERO_BF16},
                        {"count", 1, 8, ZERO_I64},
                        {"counts", 4099, 4, ZERO_I32}};

struct plan {
    int stage, shift; /* shift: each rank's buffers hold another rank's values */
    bool save_async, check;
    int32_t how;
    char dir[64];
};

/* One rank with its model. */
struct program {
    struct toy_rank *rank;
    const struct plan *plan;
    struct toy model;
    struct zero_tensor table[N_TENSORS];
    void *buffer[N_BUFFERS];
    struct zero_config cfg;
    zero_ctx *z;
    pthread_mutex_t lock;
    char lines[4096];
};

static void keep_line(void *arg, const char *line)
{
    struct program *p = arg;
    pthread_mutex_lock(&p->lock);
    size_t n = strlen(p->lines);
    snprintf(p->lines + n, sizeof p->lines - n, "%s\n", line);
    pthread_mutex_unlock(&p->lock);
}

/* Returns small and large magnitudes, so that another order of additions rounds to other bits. */
static float number(int rank, int b, int64_t i)
{
    float x = random_unit(random_mix((uint64_t)(rank * 31 + b) * 0x9e3779b97f4a7c15u + (uint64_t)i));
    return ldexpf(x, (int)(random_mix((uint64_t)i * 7 + (uint64_t)rank) % 40) - 20);
}

static void put(void *at, int b, int64_t i, double x)
{
    float f = (float)x;
    uint16_t half = bf16_from_float(f);
    int64_t whole = (int64_t)x;
    int32_t narrow = (int32_t)x;
    const void *from = b == BIG     ? (void *)&f
                       : b == HALF  ? (void *)&half
                       : b == COUNT ? (void *)&whole
                                    : &narrow;
    memcpy((char *)at + i * buffers[b].size, from, (size_t)buffers[b].size);
}

static double get(const void *at, int b, int64_t i)
{
    float f;
    uint16_t half;
    int64_t whole;
    int32_t narrow;
    void *to = b == BIG     ? (void *)&f
               : b == HALF  ? (void *)&half
               : b == COUNT ? (void *)&whole
                            : (void *)&narrow;
    memcpy(to, (const char *)at + i * buffers[b].size, (size_t)buffers[b].size);
    return b == BIG     ? (double)f
           : b == HALF  ? (double)bf16_to_float(half)
           : b == COUNT ? (double)whole
                        : narrow;
}

/* Returns a value of rank `source`'s buffer. Integers are equal on all ranks. */
static double value_of(int source, int b, int64_t i)
{
    if (b >= COUNT)
        return (double)(3 + i + b);
    float x = number(source, b, i);
    return (double)(b == HALF ? bf16_to_float(bf16_from_float(x)) : x);
}

static void fill(struct program *p, int source)
{
    where_wait(&p->cfg);
    for (int b = 0; b < N_BUFFERS; b++)
        for (int64_t i = 0; i < buffers[b].n; i++)
            put(p->buffer[b], b, i, value_of(source, b, i));
}

static void expect(struct program *p, const char *what, double (*value)(int arg, int b, int64_t i), int arg)
{
    where_wait(&p->cfg);
    for (int b = 0; b < N_BUFFERS; b++)
        for (int64_t i = 0; i < buffers[b].n; i++)
            if (get(p->buffer[b], b, i) != value(arg, b, i)) {
                toy_wrong(p->rank, "%s: element %lld of %s is %.17g, expected %.17g\n", what, (long long)i,
                          buffers[b].name, get(p->buffer[b], b, i), value(arg, b, i));
                return;
            }
}

/* Wraps the model. Rank 0's buffers hold value_of(0), and those of other ranks hold nonsense. */
static int open_program(struct program *p, struct toy_rank *r)
{
    *p = (struct program){.rank = r, .plan = r->arg};
    pthread_mutex_init(&p->lock, NULL);
    toy_make(&p->model);
    p->cfg = toy_config(r, p->plan->stage);
    p->cfg.checkpoint.save_async = p->plan->save_async;
    p->cfg.debug.check = p->plan->check;
    p->cfg.debug.log = keep_line;
    p->cfg.debug.log_arg = p;
    where_open(r->rank, &p->cfg);
    memcpy(p->table + N_BUFFERS, p->model.table, sizeof p->model.table);
    for (int b = 0; b < N_BUFFERS; b++) {
        p->buffer[b] = where_alloc((size_t)(buffers[b].n * buffers[b].size));
        p->table[FIRST + b] = (struct zero_tensor){.name = buffers[b].name,
                                                   .param = &p->buffer[b],
                                                   .shape = {buffers[b].n},
                                                   .dtype = buffers[b].dtype,
                                                   .unit = b - 1, /* ignored */
                                                   .flags = ZERO_BUFFER};
    }
    fill(p, r->rank);
    for (int b = COUNT; r->rank && b < N_BUFFERS; b++)
        put(p->buffer[b], b, 0, 99);
    return zero_wrap(&p->z, p->table, N_TENSORS, &p->cfg);
}

static void close_program(struct program *p, int err)
{
    void *was[N_BUFFERS];
    memcpy(was, p->buffer, sizeof was);
    toy_note(p->rank, err);
    zero_unwrap(&p->z);
    if (memcmp(was, p->buffer, sizeof was) != 0)
        toy_wrong(p->rank, "zero_unwrap moved a buffer\n");
    for (int b = 0; b < N_BUFFERS; b++)
        where_release(p->buffer[b]);
    where_close(&p->cfg);
    toy_free(&p->model);
    pthread_mutex_destroy(&p->lock);
}

/* says: text that every rank's error contains; NULL: any */
static void run(void (*fn)(struct toy_rank *r), const struct plan *p, int world, int code, const char *says)
{
    struct toy_rank r[MAX_TOY_RANKS];
    toy_ranks(world, fn, (void *)(uintptr_t)p, r);
    for (int i = 0; i < world; i++) {
        if (r[i].wrong[0] || r[i].err != code)
            fail_msg("stage %d, world %d, rank %d: %d %s\n%s", p->stage, world, i, r[i].err, r[i].text,
                     r[i].wrong);
        if (says && !strstr(r[i].text, says))
            fail_msg("stage %d, world %d, rank %d: \"%s\" does not say \"%s\"", p->stage, world, i, r[i].text,
                     says);
    }
}

/* ---- agreement ---- */

static int mean_world;

static double mean_value(int arg, int b, int64_t i)
{
    __float128 sum = 0; /* 113 bits hold it exactly */
    for (int r = 0; r < mean_world; r++)
        sum += (__float128)value_of(r, b, i);
    if (b >= COUNT)
        return value_of(0, b, i);
    float mean = (float)((double)sum / mean_world);
    return (double)(b == HALF ? bf16_to_float(bf16_from_float(mean)) : mean);
}

static void agrees(struct toy_rank *r)
{
    struct program *p = calloc(1, sizeof *p);
    int err = open_program(p, r), source = (r->rank + p->plan->shift) % r->world;
    if (!err)
        expect(p, "after zero_wrap", value_of, 0);
    fill(p, source);
    if (!err)
        err = zero_sync_buffers(p->z, ZERO_SYNC_MEAN);
    if (!err)
        expect(p, "the mean", mean_value, 0);
    fill(p, source);
    if (!err)
        err = zero_sync_buffers(p->z, ZERO_SYNC_RANK0);
    if (!err)
        expect(p, "rank 0's", value_of, p->plan->shift % r->world);
    close_program(p, err);
    free(p);
}

static void test_agreement(void **state)
{
    static const int worlds[] = {1, 2, 3, 5, 8};
    for (int w = 0; w < 5; w++)
        for (int stage = 0; stage <= 3; stage += 3)
            for (int shift = 0; shift < 2; shift++) {
                if (!sample_has())
                    continue;
                mean_world = worlds[w];
                run(agrees, &(struct plan){.stage = stage, .shift = shift}, worlds[w], 0, NULL);
            }
    mean_world = TOY_HYBRID_WORLD;
    for (int stage = TOY_HSDP; stage <= TOY_HFSDP; stage++)
        run(agrees, &(struct plan){.stage = stage}, TOY_HYBRID_WORLD, 0, NULL);
}

/* A mean of counters that differ is refused, and nothing changes. */
static void counters_differ(struct toy_rank *r)
{
    struct program *p = calloc(1, sizeof *p);
    int err = open_program(p, r);
    fill(p, r->rank);
    if (r->rank == 2)
        put(p->buffer[COUNTS], COUNTS, 4098, 1);
    if (!err)
        err = zero_sync_buffers(p->z, ZERO_SYNC_MEAN);
    where_wait(&p->cfg);
    if (r->rank == 2)
        put(p->buffer[COUNTS], COUNTS, 4098, value_of(0, COUNTS, 4098));
    expect(p, "after the error", value_of, r->rank);
    char text[sizeof r->text];
    snprintf(text, sizeof text, "%s", zero_last_error());
    if (zero_sync_buffers(p->z, ZERO_SYNC_MEAN))
        toy_wrong(r, "and it does not go on: %s\n", zero_last_error());
    close_program(p, err);
    snprintf(r->text, sizeof r->text, "%s", text);
    free(p);
}

static void test_counters_differ(void **state)
{
    for (int stage = 0; stage < 4; stage++)
        run(counters_differ, &(struct plan){.stage = stage}, 3, ZERO_ERR_MISMATCH,
            "zero_sync_buffers: integers have no mean: element 4098 of buffer counts differs between rank "
            "2");
}

/* ---- reads and writes ---- */

static void reads_and_writes(struct toy_rank *r)
{
    struct program *p = calloc(1, sizeof *p);
    int err = open_program(p, r);
    float *x = malloc((size_t)buffers[BIG].n * 4);
    int64_t count = -1, n = buffers[BIG].n - 17;
    fill(p, r->rank);
    if (!err)
        err = zero_read(p->z, FIRST + BIG, ZERO_VALUE_PARAM, 11, n, r->rank == 1 ? NULL : x);
    for (int64_t i = 0; !err && r->rank != 1 && i < n; i++)
        if ((double)x[i] != value_of(0, BIG, 11 + i)) {
            toy_wrong(r, "element %lld is %g\n", (long long)(11 + i), (double)x[i]);
            break;
        }
    if (!err)
        err = zero_read(p->z, FIRST + COUNT, ZERO_VALUE_PARAM, 0, 1, &count);
    if (!err && count != 3 + COUNT)
        toy_wrong(r, "the count is %lld\n", (long long)count);
    count = 1234567890123;
    if (!err)
        err = zero_write(p->z, FIRST + COUNT, ZERO_VALUE_PARAM, 0, 1, r->rank ? NULL : &count);
    where_wait(&p->cfg);
    if (!err && get(p->buffer[COUNT], COUNT, 0) != 1234567890123.0)
        toy_wrong(r, "the count was not written\n");
    for (int64_t i = 0; i < n; i++)
        x[i] = r->rank ? -1 : (float)i;
    if (!err)
        err = zero_write(p->z, FIRST + BIG, ZERO_VALUE_PARAM, 11, n, x);
    where_wait(&p->cfg);
    for (int64_t i = 0; !err && i < buffers[BIG].n; i++) {
        bool inside = i >= 11 && i < 11 + n;
        double want = inside ? (double)(i - 11) : value_of(r->rank, BIG, i);
        if (get(p->buffer[BIG], BIG, i) != want) {
            toy_wrong(r, "element %lld is %g, expected %g\n", (long long)i, get(p->buffer[BIG], BIG, i),
                      want);
            break;
        }
    }
    static const int32_t values[] = {ZERO_VALUE_MASTER, ZERO_VALUE_STATE};
    for (int i = 0; !err && i < 2; i++)
        if (zero_read(p->z, FIRST, values[i], 0, 1, x) != ZERO_ERR_ARG ||
            !strstr(zero_last_error(), "tensor statistics is a buffer"))
            toy_wrong(r, "value %d: %s\n", values[i], zero_last_error());
    free(x);
    close_program(p, err);
    free(p);
}

static void test_reads_and_writes(void **state)
{
    for (int world = 1; world <= 3; world++)
        for (int stage = 0; stage <= 3; stage += 3)
            run(reads_and_writes, &(struct plan){.stage = stage}, world, 0, NULL);
}

/* ---- checkpoints ---- */

static void saves(struct toy_rank *r)
{
    struct program *p = calloc(1, sizeof *p);
    int err = open_program(p, r);
    bool unequal = !getenv("ZERO_CHECK"); /* in check mode this is an error */
    for (int i = 0; !err && i < 2; i++) {
        fill(p, i && unequal ? r->rank : 0); /* equal at first, then unequal */
        err = zero_save(p->z, p->plan->dir, NULL);
        fill(p, 5); /* zero_save has returned, so the model may write */
    }
    if (!err)
        err = zero_save_wait(p->z, NULL);
    bool reported =
        strstr(p->lines, "zero_save saves rank 0's buffers, but element 0 of buffer statistics differs");
    if (!err && reported != (unequal && r->world > 1 && r->rank == 0))
        toy_wrong(r, "lines: %s\n", p->lines);
    if (!err)
        err = zero_export(p->z, p->plan->dir, NULL, 0, 100000);
    close_program(p, err);
    free(p);
}

static void loads(struct toy_rank *r)
{
    struct program *p = calloc(1, sizeof *p);
    int err = open_program(p, r);
    fill(p, r->rank + 1);
    if (!err)
        err = zero_load(p->z, p->plan->dir);
    if (!err)
        expect(p, "loaded", value_of, 0);
    fill(p, r->rank + 1);
    if (!err)
        err = zero_import(p->z, p->plan->dir, NULL, 0);
    if (!err)
        expect(p, "imported", value_of, 5);
    close_program(p, err);
    free(p);
}

static void in_check(struct toy_rank *r)
{
    struct program *p = calloc(1, sizeof *p);
    int err = open_program(p, r);
    fill(p, r->rank);
    if (!err)
        err = zero_save(p->z, p->plan->dir, NULL);
    char text[sizeof r->text];
    snprintf(text, sizeof text, "%s", zero_last_error());
    if (zero_sync_buffers(p->z, ZERO_SYNC_MEAN) || zero_save(p->z, p->plan->dir, NULL))
        toy_wrong(r, "after zero_sync_buffers: %s\n", zero_last_error());
    close_program(p, err);
    snprintf(r->text, sizeof r->text, "%s", text);
    free(p);
}

static void test_saved(void **state)
{
    char folder[] = "/tmp/zero-buffers-XXXXXX", command[64];
    assert_non_null(mkdtemp(folder));
    for (int world = 1; world <= 3; world++)
        for (int async = 0; async < 2; async++) {
            struct plan p = {.stage = world % 2 ? 3 : 1, .save_async = async}, q = {.stage = (2 + world) % 4};
            snprintf(p.dir, sizeof p.dir, "%s/%d-%d", folder, world, async);
            snprintf(q.dir, sizeof q.dir, "%s", p.dir);
            run(saves, &p, world, 0, NULL);
            run(loads, &q, 4 - world, 0, NULL);
        }
    struct plan c = {.stage = 2, .check = true};
    snprintf(c.dir, sizeof c.dir, "%s/check", folder);
    run(in_check, &c, 2, ZERO_ERR_MISMATCH, "call zero_sync_buffers first: element 0 of buffer statistics");
    snprintf(command, sizeof command, "rm -rf %s", folder);
    assert_int_equal(system(command), 0);
}

/* ---- wrong calls ---- */

static void pointer_gone(struct toy_rank *r)
{
    static const char want[] = "*param of buffer half is NULL";
    struct program *p = calloc(1, sizeof *p);
    int err = open_program(p, r);
    void *was = p->buffer[HALF];
    if (r->rank == r->world - 1)
        p->buffer[HALF] = NULL;
    for (int i = 0; !err && i < 3; i++) {
        float x[1];
        const char *call[] = {"zero_sync_buffers", "zero_read", "zero_save"};
        int got = i == 0   ? zero_sync_buffers(p->z, ZERO_SYNC_RANK0)
                  : i == 1 ? zero_read(p->z, FIRST, ZERO_VALUE_PARAM, 0, 1, x)
                           : zero_save(p->z, "/tmp/zero-buffers-none", NULL);
        if (got != ZERO_ERR_ORDER || !strstr(zero_last_error(), want))
            toy_wrong(r, "%s: %d %s\n", call[i], got, zero_last_error());
    }
    p->buffer[HALF] = where_alloc(200);
    where_wait(&p->cfg);
    put(p->buffer[HALF], HALF, 0, 3);
    if (!err)
        err = zero_sync_buffers(p->z, ZERO_SYNC_RANK0); /* the model may move a buffer */
    where_wait(&p->cfg);
    if (!err && get(p->buffer[HALF], HALF, 0) != 3)
        toy_wrong(r, "it has lost its value\n");
    where_release(was);
    close_program(p, err);
    free(p);
}

static void moments(struct toy_rank *r)
{
    struct program *p = calloc(1, sizeof *p);
    int err = open_program(p, r);
    for (int32_t how = 0; !err && how < 4; how += 3)
        if (zero_sync_buffers(p->z, how) != ZERO_ERR_ARG ||
            !strstr(zero_last_error(), "allowed: ZERO_SYNC_MEAN (1), ZERO_SYNC_RANK0 (2)"))
            toy_wrong(r, "how %d: %s\n", how, zero_last_error());
    if (!err)
        /* a buffer also has unit 1 in its entry, which must not matter */
        err = zero_begin(p->z, 1, ZERO_FORWARD);
    if (!err && zero_sync_buffers(p->z, ZERO_SYNC_MEAN) != ZERO_ERR_ORDER)
        toy_wrong(r, "within a bracket: %s\n", zero_last_error());
    if (!err)
        err = zero_end(p->z, 1, ZERO_FORWARD);
    if (!err)
        expect(p, "behind the bracket", value_of, 0);
    close_program(p, err);
    free(p);
}

static void all_at_once(struct toy_rank *r)
{
    struct program *p = calloc(1, sizeof *p);
    int err = open_program(p, r);
    void *was[N_BUFFERS];
    memcpy(was, p->buffer, sizeof was);
    if (!err)
        err = zero_gather_all(p->z, 0);
    if (!err)
        expect(p, "with all parameters", value_of, 0);
    fill(p, r->rank);
    if (!err)
        err = zero_release_all(p->z);
    if (!err)
        expect(p, "after zero_release_all", value_of, r->rank);
    if (memcmp(was, p->buffer, sizeof was) != 0)
        toy_wrong(r, "a buffer was moved\n");
    close_program(p, err);
    free(p);
}

static void ranks_differ(struct toy_rank *r)
{
    struct program *p = calloc(1, sizeof *p);
    int err = open_program(p, r);
    fill(p, r->rank);
    if (!err)
        err = zero_sync_buffers(p->z, r->rank ? ZERO_SYNC_MEAN : ZERO_SYNC_RANK0);
    expect(p, "after the error", value_of, r->rank);
    close_program(p, err);
    free(p);
}

static void test_wrong_moments(void **state)
{
    assert_int_equal(zero_sync_buffers(NULL, ZERO_SYNC_MEAN), ZERO_ERR_ARG);
    for (int world = 1; world <= 2; world++) {
        run(pointer_gone, &(struct plan){.stage = 2}, world, 0, NULL);
        run(moments, &(struct plan){.stage = 3}, world, 0, NULL);
        for (int stage = 0; stage < 4; stage++)
            run(all_at_once, &(struct plan){.stage = stage, .check = stage & 1}, world, 0, NULL);
    }
    run(ranks_differ, &(struct plan){.stage = 1}, 2, ZERO_ERR_MISMATCH,
        "zero_sync_buffers: how is ZERO_SYNC_MEAN on rank 1 and ZERO_SYNC_RANK0 on rank 0");
}

/* Messages of zero_wrap and zero_plan about a table with one parameter "w" and one buffer "b". */
static void test_tables(void **state)
{
    static float w_memory[4], b_memory[8];
    static void *w, *grad, *b;
    static const struct {
        const char *says;
        uint32_t flags;
        enum zero_dtype dtype;
        bool has_grad, no_memory, shares, alone, no_flag;
        int32_t group;
        int64_t granule;
        int32_t uses;
        int unit_w;
    } rows[] = {
        {"tensors[1] (b): grad is set, but a ZERO_BUFFER is not trained", 0, ZERO_F32, .has_grad = true},
        {"tensors[1] (b): flags is 0x21; allowed with ZERO_BUFFER: no other flag", ZERO_STACKED, ZERO_F32},
        {"tensors[1] (b): flags is 0x28; allowed with ZERO_BUFFER: no other flag", ZERO_RESIDENT, ZERO_I32},
        {"tensors[1] (b): dtype is 9; allowed: ZERO_F32, ZERO_BF16, ZERO_I32, ZERO_I64", 0,
         (enum zero_dtype)9},
        {"tensors[1] (b): dtype is ZERO_I64, which is for a ZERO_BUFFER", 0, ZERO_I64, .no_flag = true},
        {"tensors[1] (b): *param is NULL", 0, ZERO_F32, .no_memory = true},
        {"tensors[1] (b): group is set, but a ZERO_BUFFER is not trained", 0, ZERO_F32, .group = 1},
        {"tensors[1] (b): granule is set, but a ZERO_BUFFER is not cut", 0, ZERO_F32, .granule = 1},
        {"tensors[1] (b): uses is set, but a ZERO_BUFFER belongs to no unit", 0, ZERO_F32, .uses = 1},
        {"*param of tensors w and b share memory", 0, ZERO_F32, .shares = true},
        {"all 1 tensors are buffers; a model has at least one parameter", 0, ZERO_F32, .alone = true},
        {"unit 0 has no tensor; units must be 0..1 without gaps (a buffer belongs to no unit", 0, ZERO_F32,
         .unit_w = 1},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct zero_config cfg = ZERO_CONFIG_INIT;
        struct zero_plan_info info;
        zero_ctx *z = NULL;
        w = w_memory;
        b = rows[i].no_memory ? NULL : rows[i].shares ? w_memory + 1 : b_memory;
        struct zero_tensor table[] = {
            {.name = "w", .param = &w, .shape = {4}, .dtype = ZERO_F32, .unit = rows[i].unit_w},
            {.name = "b",
             .param = &b,
             .grad = rows[i].has_grad ? &grad : NULL,
             .shape = {2},
             .dtype = rows[i].dtype,
             .group = rows[i].group,
             .granule = rows[i].granule,
             .uses = rows[i].uses,
             .flags = rows[i].flags | (rows[i].no_flag ? 0 : ZERO_BUFFER)}};
        if (rows[i].alone)
            table[0] = table[1];
        int err = zero_wrap(&z, table, rows[i].alone ? 1 : 2, &cfg);
        if (err != ZERO_ERR_ARG || (!rows[i].alone && !strstr(zero_last_error(), rows[i].says)))
            fail_msg("%s: %d %s", rows[i].says, err, zero_last_error());
        if (rows[i].no_memory || rows[i].shares)
            continue; /* zero_plan does not check this */
        err = zero_plan(table, rows[i].alone ? 1 : 2, &cfg, &info);
        if (err != ZERO_ERR_ARG || !strstr(zero_last_error(), rows[i].alone ? "all 1" : rows[i].says))
            fail_msg("zero_plan: %s: %d %s", rows[i].says, err, zero_last_error());
    }
}

/* The model keeps the memory of buffers, so the plan adds at most room for exchanges. */
static void test_plan(void **state)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_plan_info with, without;
    void *p[2], *g;
    struct zero_tensor table[] = {
        {.name = "w", .param = &p[0], .grad = &g, .shape = {1000, 1000}, .dtype = ZERO_F32},
        {.name = "b", .param = &p[1], .shape = {INT64_C(1) << 40}, .dtype = ZERO_I64, .flags = ZERO_BUFFER}};
    for (int stage = 0; stage < 4; stage++) {
        cfg.stage = stage;
        cfg.launch.world = 4;
        assert_int_equal(zero_plan(table, 1, &cfg, &without), 0);
        assert_int_equal(zero_plan(table, 2, &cfg, &with), 0);
        assert_int_equal(with.n_params, without.n_params);
        assert_int_equal(with.paper_bytes, without.paper_bytes);
        assert_true(with.bytes.total - without.bytes.total <= 1 << 20);
        assert_int_equal(with.bytes.total - with.bytes.exchange,
                         without.bytes.total - without.bytes.exchange);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_agreement),
        cmocka_unit_test(test_counters_differ),
        cmocka_unit_test(test_reads_and_writes),
        cmocka_unit_test(test_saved),
        cmocka_unit_test(test_wrong_moments),
        cmocka_unit_test(test_tables),
        cmocka_unit_test(test_plan),
    };
    return cmocka_run_group_tests_name("buffers", tests, NULL, NULL);
}
