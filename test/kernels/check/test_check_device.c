/* SPDX-License-Identifier: Apache-2.0 */
/* test_check_device.c: runs the device suite on the host device with race checks. Also tests what the
 * checks find: two streams without an order between them, and buffers that peers may still read after a
 * collective. */
#include "kernels/check/check_device.h"
#include "test/cmocka.h"
#include "test/kernels/device_suite.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct bed {
    struct zr_device *host, *dev;
    struct zr_check *check;
    struct zr_stream *a, *b, *model;
    struct zr_event *e;
    char *x;
};

enum { BYTES = 4096 };

static void open_bed(struct bed *t, int world)
{
    assert_int_equal(zr_host_device_open(&t->host), 0);
    assert_int_equal(zr_check_open(t->host, 0, world, &t->check), 0);
    t->dev = zr_check_device(t->check);
    const struct zr_device_ops *d = t->dev->ops;
    assert_int_equal(d->stream_open(t->dev, ZR_STREAM_QUEUE, "a", NULL, &t->a), 0);
    assert_int_equal(d->stream_open(t->dev, ZR_STREAM_QUEUE, "b", NULL, &t->b), 0);
    assert_int_equal(d->stream_open(t->dev, ZR_STREAM_CALLER, "model", NULL, &t->model), 0);
    assert_int_equal(d->event_open(t->dev, &t->e), 0);
    void *p;
    assert_int_equal(d->alloc(t->dev, BYTES, &p), 0);
    t->x = p;
    zr_check_doing(t->check, "test", 3, 7);
}

/* Closes everything. found is what a report must contain; NULL: there must be no report. */
static void close_bed(struct bed *t, const char *found)
{
    const struct zr_device_ops *d = t->dev->ops;
    char text[ZR_ERROR_BYTES] = "";
    bool any = zr_check_found(t->check, text, sizeof text);
    if (any != (found != NULL) || (found && !strstr(text, found)))
        fail_msg("found \"%s\" instead of \"%s\"", text, found ? found : "");
    d->stream_close(t->a);
    d->stream_close(t->b);
    d->stream_close(t->model);
    d->event_close(t->e);
    d->free(t->dev, t->x, BYTES);
    zr_check_close(t->check);
    t->host->ops->close(t->host);
}

static void test_two_streams(void **state)
{
    struct bed t;
    for (int ordered = 0; ordered < 2; ordered++)
        for (int apart = 0; apart < 2; apart++) {
            open_bed(&t, 1);
            const struct zr_device_ops *d = t.dev->ops;
            d->zero(t.a, t.x, 1024);
            if (ordered) {
                d->event_record(t.e, t.a);
                d->stream_wait(t.b, t.e);
            }
            d->zero(t.b, t.x + (apart ? 1024 : 1020), 1024);
            close_bed(&t,
                      ordered || apart
                          ? NULL
                          : "race on rank 0's device memory at +1020: zero (test, unit 3, step 7) on rank "
                            "0's b overwrites what zero (test, unit 3, step 7) on rank 0's a wrote");
        }
}

static void wait_for_word(void *arg)
{
    while (!atomic_load(*(atomic_bool **)arg))
        zr_relax();
}

/* The check passes the question whether a stream has room to the device below. */
static void test_room(void **state)
{
    enum { MANY = 5000 };
    struct bed t;
    atomic_bool word = false, *at = &word;
    open_bed(&t, 1);
    const struct zr_device_ops *d = t.dev->ops;
    assert_int_equal(zr_stream_reserve(t.dev, t.a, MANY), 0);
    d->call(t.a, wait_for_word, &at, sizeof at);
    d->call(t.b, wait_for_word, &at, sizeof at);
    assert_true(zr_stream_has_room(t.dev, t.a, MANY));
    assert_false(zr_stream_has_room(t.dev, t.a, 2 * MANY));
    assert_false(zr_stream_has_room(t.dev, t.b, MANY));
    atomic_store(&word, true);
    close_bed(&t, NULL);
}

/* Two reads are no race. A read and a write are one. */
static void test_reads(void **state)
{
    struct bed t;
    static char out[2][64];
    for (int write = 0; write < 2; write++) {
        open_bed(&t, 1);
        const struct zr_device_ops *d = t.dev->ops;
        d->copy(t.a, out[0], t.x, 64);
        if (write)
            d->copy(t.b, t.x + 32, out[1], 32);
        else
            d->copy(t.b, out[1], t.x, 64);
        close_bed(&t, write ? "on rank 0's a reads, and nothing orders them" : NULL);
    }
}

/* A table of copies touches its rows, and not the gaps between them. */
static void test_tables(void **state)
{
    struct bed t;
    for (int at = 64; at <= 128; at += 64) {
        open_bed(&t, 1);
        const struct zr_device_ops *d = t.dev->ops;
        struct zr_copy_rows rows = {t.x, t.x + 1024, 64, 160, 128, 128};
        d->copy_rows(t.a, &rows, 1);
        d->zero(t.b, t.x + at, 64);
        d->zero(t.b, t.x + 1024 + 64, 64);
        close_bed(&t, at == 64
                          ? NULL
                          : "at +128: zero (test, unit 3, step 7) on rank 0's b overwrites what copy_rows");
        open_bed(&t, 1);
        d = t.dev->ops;
        d->zero(t.b, t.x + 1024 + at, 64);
        rows = (struct zr_copy_rows){t.x, t.x + 1024, 64, 160, 128, 128};
        d->copy_rows(t.a, &rows, 1);
        close_bed(&t, at == 64 ? NULL
                               : "at +1152: copy_rows (test, unit 3, step 7) on rank 0's a reads what zero");
    }
}

/* A refused operation touches nothing, so nothing races with it. */
static void test_refused(void **state)
{
    const enum zero_dtype none = (enum zero_dtype)9;
    struct bed t;
    open_bed(&t, 1);
    const struct zr_device_ops *d = t.dev->ops;
    float *x = (float *)t.x;
    const void *src[] = {t.x + 1024};
    const struct zr_sum_range sums[] = {{x, 0, 16, false}};
    const struct zr_update u = {
        .kind = ZERO_SGD, .grad_dtype = ZERO_F32, .param_dtype = none, .n = 16, .master = x, .param = x};
    assert_int_equal(d->cast(t.a, x, ZERO_F32, src[0], none, 16), ZERO_ERR_ARG);
    assert_int_equal(d->cast(t.a, x, ZERO_F32, src[0], ZERO_F16, 16), ZERO_ERR_NOTSUP);
    assert_int_equal(d->cast(t.a, x, ZERO_F32, src[0], ZERO_BF16, -1), ZERO_ERR_ARG);
    assert_int_equal(d->add(t.a, x, src[0], none, 16), ZERO_ERR_ARG);
    assert_int_equal(d->sum_tree(t.a, x, src, 1, none, 16, true), ZERO_ERR_ARG);
    assert_int_equal(d->sum_ranges(t.a, sums, 1, src, 1, none), ZERO_ERR_ARG);
    assert_int_equal(d->maximum(t.a, x, src, 1, none, 16), ZERO_ERR_ARG);
    assert_int_equal(d->digest(t.a, (uint64_t *)t.x, src[0], -1, 0), ZERO_ERR_ARG);
    assert_int_equal(d->update(t.a, &u), ZERO_ERR_ARG);
    assert_int_equal(d->update_spans(t.a, &u, NULL, 65), ZERO_ERR_ARG);
    d->zero(t.b, t.x, BYTES);
    close_bed(&t, NULL);
}

/* The spans of an update touch their elements of every array, and no others. */
static void test_spans(void **state)
{
    struct bed t;
    for (int at = 0; at < 192; at += 64) {
        open_bed(&t, 1);
        const struct zr_device_ops *d = t.dev->ops;
        static const struct zr_step_scalars scalars;
        const struct zr_update u = {.kind = ZERO_SGD,
                                    .grad_dtype = ZERO_F32,
                                    .n = 48,
                                    .master = (float *)t.x,
                                    .grad = (float *)(t.x + 1024),
                                    .state = {(float *)(t.x + 512)},
                                    .scalars = &scalars};
        const struct zr_update_span spans[] = {{32, 16, 0, 0}, {0, 16, 0, 0}};
        d->zero(t.b, t.x + 1024 + at, 64);
        d->update_spans(t.a, &u, spans, 2);
        close_bed(&t, at == 0    ? "at +1024: update (test, unit 3, step 7) on rank 0's a reads"
                      : at == 64 ? NULL
                                 : "at +1152: update (test, unit 3, step 7) on rank 0's a reads");
    }
}

/* A table of sums reads its range of every source, and reads a destination that it adds to. */
static void test_tables_of_sums(void **state)
{
    struct bed t;
    for (int at = 0; at <= 1024; at += 256)
        for (int add = 0; add < 2; add++) {
            open_bed(&t, 1);
            const struct zr_device_ops *d = t.dev->ops;
            static char out[64];
            const void *src[] = {t.x + 1024, t.x + 1792};
            const struct zr_sum_range sums[] = {{(float *)t.x, 64, 16, add},
                                                {(float *)(t.x + 512), 256, 16, add}};
            if (at == 0)
                d->copy(t.b, out, t.x, 64);
            else
                d->zero(t.b, t.x + 1024 + at, 64);
            d->sum_ranges(t.a, sums, 2, src, 2, ZERO_F32);
            /* 1024 + 256 lies in the first source. 1024 + 1024 lies in the first, and at 64 in the second. */
            close_bed(&t, at == 0     ? "sum_ranges (test, unit 3, step 7) on rank 0's a overwrites what copy"
                          : at == 256 ? "at +1280: sum_ranges (test, unit 3, step 7) on rank 0's a reads"
                          : at == 1024 ? "at +2048: sum_ranges (test, unit 3, step 7) on rank 0's a reads"
                                       : NULL);
        }
}

/* A maximum reads every source and writes its destination. A digest reads its bytes, and adds to the sum. */
static void test_raw_bits(void **state)
{
    static const struct {
        int64_t at;
        const char *maximum, *digest;
    } rows[] = {{0, "maximum (test, unit 3, step 7) on rank 0's a overwrites what copy",
                 "digest (test, unit 3, step 7) on rank 0's a overwrites what copy"},
                {1024, "at +1024: maximum (test, unit 3, step 7) on rank 0's a reads",
                 "at +1024: digest (test, unit 3, step 7) on rank 0's a reads"},
                {1792, "at +1792: maximum (test, unit 3, step 7) on rank 0's a reads", NULL}};
    struct bed t;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int digests = 0; digests < 2; digests++) {
            open_bed(&t, 1);
            const struct zr_device_ops *d = t.dev->ops;
            static char out[8];
            const void *src[] = {t.x + 1024, t.x + 1792};
            if (i == 0)
                d->copy(t.b, out, t.x, 8);
            else
                d->zero(t.b, t.x + rows[i].at, 64);
            if (digests)
                d->digest(t.a, (uint64_t *)t.x, t.x + 1024, 64, 0);
            else
                d->maximum(t.a, t.x, src, 2, ZERO_F32, 16);
            close_bed(&t, digests ? rows[i].digest : rows[i].maximum);
        }
}

/* A wait covers what was recorded when the wait was called. */
static void test_old_record(void **state)
{
    struct bed t;
    open_bed(&t, 1);
    const struct zr_device_ops *d = t.dev->ops;
    d->event_record(t.e, t.a);
    d->stream_wait(t.b, t.e);
    d->zero(t.a, t.x, 64);
    d->event_record(t.e, t.a); /* too late for the wait above */
    d->zero(t.b, t.x, 64);
    close_bed(&t, "race");
}

static void test_host_waits(void **state)
{
    struct bed t;
    for (int how = 0; how < 4; how++) {
        open_bed(&t, 1);
        const struct zr_device_ops *d = t.dev->ops;
        struct zr_access seen = {t.x, 64, false};
        d->zero(t.a, t.x, 64);
        d->event_record(t.e, t.a);
        if (how == 1)
            d->stream_sync(t.a);
        if (how == 2)
            d->event_sync(t.e);
        while (how == 3 && !d->event_query(t.e))
            ;
        zr_declare(t.dev, NULL, &seen, 1);
        close_bed(&t, how ? NULL
                          : "race on rank 0's device memory at +0: host (test, unit 3, step 7) on rank 0's "
                            "model's thread reads");
    }
}

static void nothing_at_all(void *arg)
{
}

static void test_calls_say_what_they_touch(void **state)
{
    struct bed t;
    open_bed(&t, 1);
    const struct zr_device_ops *d = t.dev->ops;
    struct zr_access used[] = {{t.x, 8, true}, {t.x + 64, 8, false}};
    int nothing = 0;
    zr_declare(t.dev, t.a, used, 2);
    d->call(t.a, nothing_at_all, &nothing, sizeof nothing);
    d->call(t.b, nothing_at_all, &nothing, sizeof nothing); /* touches nothing */
    d->zero(t.b, t.x + 8, 56);
    assert_false(zr_check_found(t.check, (char[8]){0}, 8));
    d->zero(t.b, t.x + 71, 1);
    close_bed(&t, "at +71: zero (test, unit 3, step 7) on rank 0's b overwrites what call");
}

/* A gather's source may be written again only when every rank is known to have passed the gather. */
static void test_others(void **state)
{
    struct bed t;
    for (int world = 1; world < 3; world++)
        for (int barrier = 0; barrier < 3; barrier++) {
            open_bed(&t, world);
            const struct zr_device_ops *d = t.dev->ops;
            struct zr_check_part read = {t.x, 64, ZR_OTHERS_READ};
            d->zero(t.a, t.x, 64);
            zr_check_collective(t.check, t.a, "all_gather", 5, 8, &read, world > 1, true, false);
            d->event_record(t.e, t.a);
            if (barrier == 1) /* says nothing of the gather */
                zr_check_collective(t.check, t.b, "exchange", 5, 8, NULL, 0, true, true);
            d->stream_wait(t.b, t.e);
            if (barrier == 2)
                zr_check_collective(t.check, t.b, "exchange", 5, 8, NULL, 0, true, true);
            d->zero(t.b, t.x, 64);
            close_bed(&t,
                      world == 1 || barrier == 2
                          ? NULL
                          : "what all_gather (test, unit 5, step 8) on another rank's a reads, and nothing "
                            "orders them");
        }
}

/* Other ranks may read only what they know to be written: before a meeting, and not by the same operation. */
static void test_others_read_too_early(void **state)
{
    struct bed t;
    for (int how = 0; how < 3; how++) {
        open_bed(&t, 2);
        struct zr_check_part write = {t.x, 64, ZR_MINE_WRITE}, read = {t.x, 64, ZR_OTHERS_READ},
                             both[] = {write, read};
        if (how == 2) {
            zr_check_collective(t.check, t.a, "all_gather", 5, 8, both, 2, true, false);
        } else {
            t.dev->ops->zero(t.a, t.x, 64);
            zr_check_collective(t.check, t.a, "all_gather", 5, 8, &read, 1, how == 0, false);
        }
        close_bed(&t, how == 0 ? NULL : "all_gather (test, unit 5, step 8) on another rank's a reads");
    }
}

static void test_snapshot(void **state)
{
    struct bed t;
    for (int known = 0; known < 2; known++) {
        open_bed(&t, 1);
        const struct zr_device_ops *d = t.dev->ops;
        d->zero(t.a, t.x, 64);
        zr_check_reader(t.check, t.a, t.x, 64);
        if (known)
            zr_check_reader_done(t.check);
        d->zero(t.a, t.x, 64);
        close_bed(&t, known ? NULL : "what read of a snapshot");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_streams),    cmocka_unit_test(test_reads),
        cmocka_unit_test(test_tables),         cmocka_unit_test(test_spans),
        cmocka_unit_test(test_tables_of_sums), cmocka_unit_test(test_raw_bits),
        cmocka_unit_test(test_refused),        cmocka_unit_test(test_old_record),
        cmocka_unit_test(test_host_waits),     cmocka_unit_test(test_calls_say_what_they_touch),
        cmocka_unit_test(test_others),         cmocka_unit_test(test_others_read_too_early),
        cmocka_unit_test(test_snapshot),       cmocka_unit_test(test_room),
    };
    struct zr_device *host;
    struct zr_check *check;
    if (zr_host_device_open(&host) || zr_check_open(host, 0, 1, &check)) {
        fprintf(stderr, "%s\n", zr_error_text());
        return 1;
    }
    int failed = zr_device_suite(zr_check_device(check));
    zr_check_close(check);
    host->ops->close(host);
#ifdef __SANITIZE_THREAD__
    (void)tests; /* these races are deliberate, and ThreadSanitizer would report them too */
    return failed;
#else
    return failed + cmocka_run_group_tests(tests, NULL, NULL);
#endif
}
