/* SPDX-License-Identifier: Apache-2.0 */
/* test_timeline.c: tests the recorded timeline. It is written as a Chrome trace that a JSON reader
 * accepts, with the latest spans of each track and their nesting. */
#include "shard/engine/timeline.h"
#include "test/shard/failing_memory.h"
#include "test/shard/random_model.h"

#include <jansson.h>
#include <locale.h>
#include <unistd.h>

static char path[] = "/tmp/test_timeline.XXXXXX";

static struct zr_device *dev;

static int make_path(void **state)
{
    if (zr_host_device_open(&dev))
        return 1;
    int fd = mkstemp(path);
    return fd < 0 || close(fd);
}

static int remove_path(void **state)
{
    dev->ops->close(dev);
    return unlink(path);
}

/* Writes the timeline and reads it back. */
static json_t *written(const struct zr_timeline *t, int rank)
{
    json_error_t e;
    assert_int_equal(zr_timeline_write(t, rank, path), 0);
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &e);
    if (!root)
        fail_msg("%s:%d:%d: %s", path, e.line, e.column, e.text);
    assert_true(json_is_array(json_object_get(root, "traceEvents")));
    return root;
}

static const char *text(const json_t *event, const char *key)
{
    const char *s = json_string_value(json_object_get(event, key));
    assert_non_null(s);
    return s;
}

static int64_t whole(const json_t *event, const char *key)
{
    const json_t *v = json_object_get(event, key);
    assert_true(json_is_integer(v));
    return json_integer_value(v);
}

static double number(const json_t *event, const char *key)
{
    const json_t *v = json_object_get(event, key);
    assert_true(json_is_number(v));
    return json_number_value(v);
}

/* Returns the number of spans of one track, and stores them in the order of the file. */
static int spans_of(const json_t *root, int track, const json_t **out, int most)
{
    int n = 0;
    const json_t *events = json_object_get(root, "traceEvents");
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *e = json_array_get(events, i);
        if (strcmp(text(e, "ph"), "X") || whole(e, "tid") != track)
            continue;
        assert_true(n < most);
        out[n++] = e;
    }
    return n;
}

static void check_span(const json_t *e, const char *name, const char *category, int unit, int step, int rank)
{
    const json_t *args = json_object_get(e, "args");
    assert_string_equal(text(e, "name"), name);
    assert_string_equal(text(e, "cat"), category);
    assert_int_equal(whole(args, "unit"), unit);
    assert_int_equal(whole(args, "step"), step);
    assert_int_equal(whole(e, "pid"), rank);
    assert_true(number(e, "ts") >= 0 && number(e, "dur") >= 0);
}

static bool inside(const json_t *inner, const json_t *outer)
{
    double slack = 0.0011; /* times are written in nanoseconds */
    return number(inner, "ts") >= number(outer, "ts") - slack &&
           number(inner, "ts") + number(inner, "dur") <= number(outer, "ts") + number(outer, "dur") + slack;
}

static void an_empty_timeline(void **state)
{
    struct zr_timeline *t;
    assert_int_equal(zr_timeline_open(dev, 4, &t), 0);
    json_t *root = written(t, 3);
    int n_names = 0;
    const json_t *events = json_object_get(root, "traceEvents");
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *e = json_array_get(events, i);
        assert_string_equal(text(e, "ph"), "M");
        assert_int_equal(whole(e, "pid"), 3);
        const char *name = text(json_object_get(e, "args"), "name");
        if (!strcmp(text(e, "name"), "process_name"))
            assert_string_equal(name, "rank 3");
        else
            n_names += !strcmp(name, "model") || !strcmp(name, "gather") || !strcmp(name, "reduce");
    }
    assert_int_equal(n_names, 3);
    json_decref(root);
    zr_timeline_close(t);
    zr_timeline_close(NULL);
}

static void every_kind_on_its_track(void **state)
{
    static const char *const name[ZR_SPAN_COUNT] = {"forward",
                                                    "backward",
                                                    "wait",
                                                    "step",
                                                    "all_gather",
                                                    "reduce_scatter",
                                                    "norm",
                                                    "update",
                                                    "reduce_scatter outer",
                                                    "all_gather outer"};
    struct zr_timeline *t;
    assert_int_equal(zr_timeline_open(dev, 16, &t), 0);
    for (int k = 0; k < ZR_SPAN_COUNT; k++) {
        int unit = k == ZR_SPAN_STEP || k == ZR_SPAN_NORM ? -1 : 10 + k;
        zr_timeline_begin(t, (enum zr_track)(k % ZR_TRACK_COUNT), (enum zr_span_kind)k, unit,
                          (uint32_t)(100 + k));
        zr_timeline_end(t, (enum zr_track)(k % ZR_TRACK_COUNT), (enum zr_span_kind)k, unit);
    }
    json_t *root = written(t, 0);
    for (int track = 0; track < ZR_TRACK_COUNT; track++) {
        const json_t *span[16];
        int n = spans_of(root, track, span, 16), at = 0;
        for (int k = track; k < ZR_SPAN_COUNT; k += ZR_TRACK_COUNT, at++) {
            char expected[32];
            int unit = k == ZR_SPAN_STEP || k == ZR_SPAN_NORM ? -1 : 10 + k;
            snprintf(expected, sizeof expected, unit < 0 ? "%s" : "%s %d", name[k], unit);
            check_span(span[at], expected, name[k], unit, 100 + k, 0);
        }
        assert_int_equal(at, n);
    }
    json_decref(root);
    zr_timeline_close(t);
}

/* Brackets nest and end in any order, and one unit may be open in both phases. Spans that are still open
 * are left out. */
static void nesting(void **state)
{
    struct zr_timeline *t;
    const json_t *span[16];
    assert_int_equal(zr_timeline_open(dev, 16, &t), 0);
#define BEGIN(kind, unit) zr_timeline_begin(t, ZR_TRACK_MODEL, kind, unit, 1)
#define END(kind, unit)   zr_timeline_end(t, ZR_TRACK_MODEL, kind, unit)
    BEGIN(ZR_SPAN_BACKWARD, 0);
    BEGIN(ZR_SPAN_FORWARD, 0);
    usleep(10);
    END(ZR_SPAN_FORWARD, 0);
    BEGIN(ZR_SPAN_BACKWARD, 1);
    BEGIN(ZR_SPAN_WAIT, 1);
    END(ZR_SPAN_WAIT, 1);
    END(ZR_SPAN_BACKWARD, 0); /* before the inner span */
    END(ZR_SPAN_BACKWARD, 1);
    BEGIN(ZR_SPAN_FORWARD, 0); /* begun again: ends separately */
    END(ZR_SPAN_FORWARD, 0);
    END(ZR_SPAN_FORWARD, 7); /* never begun */
    BEGIN(ZR_SPAN_BACKWARD, 2);
#undef BEGIN
#undef END
    json_t *root = written(t, 0);
    assert_int_equal(spans_of(root, ZR_TRACK_MODEL, span, 16), 5);
    check_span(span[0], "backward 0", "backward", 0, 1, 0);
    check_span(span[1], "forward 0", "forward", 0, 1, 0);
    check_span(span[2], "backward 1", "backward", 1, 1, 0);
    check_span(span[3], "wait 1", "wait", 1, 1, 0);
    check_span(span[4], "forward 0", "forward", 0, 1, 0);
    assert_true(inside(span[1], span[0]) && inside(span[3], span[2]) && inside(span[3], span[0]));
    assert_false(inside(span[2], span[0]));
    assert_true(number(span[1], "dur") >= 9);
    assert_true(number(span[4], "ts") >= number(span[2], "ts") + number(span[2], "dur") - 0.0011);
    json_decref(root);
    zr_timeline_close(t);
}

static double end_of(const json_t *e)
{
    return number(e, "ts") + number(e, "dur");
}

/* An end belongs to the open span of its kind and unit. Without one it is ignored. */
static void ends_find_their_spans(void **state)
{
    struct zr_timeline *t;
    const json_t *span[8];
    assert_int_equal(zr_timeline_open(dev, 8, &t), 0);
    zr_timeline_begin(t, ZR_TRACK_MODEL, ZR_SPAN_BACKWARD, 0, 1);
    zr_timeline_begin(t, ZR_TRACK_MODEL, ZR_SPAN_FORWARD, 0, 1);
    zr_timeline_end(t, ZR_TRACK_MODEL, ZR_SPAN_BACKWARD, 0); /* the outer span first */
    usleep(10);
    zr_timeline_end(t, ZR_TRACK_MODEL, ZR_SPAN_FORWARD, 0);
    usleep(10);
    zr_timeline_begin(t, ZR_TRACK_MODEL, ZR_SPAN_STEP, -1, 1);
    zr_timeline_end(t, ZR_TRACK_MODEL, ZR_SPAN_FORWARD, 0); /* once too often */
    zr_timeline_end(t, ZR_TRACK_MODEL, ZR_SPAN_STEP, -1);
    json_t *root = written(t, 0);
    assert_int_equal(spans_of(root, ZR_TRACK_MODEL, span, 8), 3);
    assert_true(end_of(span[0]) + 9 <= end_of(span[1]));
    assert_true(end_of(span[1]) + 9 <= number(span[2], "ts"));
    json_decref(root);
    zr_timeline_close(t);
}

/* The ring keeps the latest spans of each track, whatever the other tracks do. A span that stays open
 * longer than its place is kept is dropped. */
static void the_latest_are_kept(void **state)
{
    FOR_CASES(r, 40)
    {
        enum { KEPT = 20 };
        struct zr_timeline *t;
        const json_t *span[KEPT + 1];
        int n_spans = 1 + (int)random_below(&r, KEPT), n = (int)random_below(&r, 100);
        assert_int_equal(zr_timeline_open(dev, n_spans, &t), 0);
        zr_timeline_begin(t, ZR_TRACK_MODEL, ZR_SPAN_FORWARD, 1000, 0); /* open around all others */
        for (int i = 0; i < n; i++) {
            for (int track = 0; track < ZR_TRACK_COUNT; track++) {
                zr_timeline_begin(t, (enum zr_track)track, ZR_SPAN_GATHER, i, (uint32_t)i);
                zr_timeline_end(t, (enum zr_track)track, ZR_SPAN_GATHER, i);
            }
        }
        zr_timeline_end(t, ZR_TRACK_MODEL, ZR_SPAN_FORWARD, 1000);
        json_t *root = written(t, 1);
        for (int track = 0; track < ZR_TRACK_COUNT; track++) {
            int outer = track == ZR_TRACK_MODEL && n + 1 <= n_spans, kept = n < n_spans ? n : n_spans;
            int got = spans_of(root, track, span, KEPT + 1);
            CHECK(got == kept + outer, "track %d has %d spans of %d, room for %d", track, got, n, n_spans);
            for (int i = 0; i < kept; i++)
                CHECK(whole(json_object_get(span[i + outer], "args"), "unit") == n - kept + i, "span %d", i);
            CHECK(!outer || whole(json_object_get(span[0], "args"), "unit") == 1000, "the outer span");
        }
        json_decref(root);
        zr_timeline_close(t);
    }
}

static void stand(void *arg)
{
    usleep((useconds_t) * (int64_t *)arg);
}

/* Marks on a stream are recorded when the stream reaches them. */
static void marks_on_a_stream(void **state)
{
    struct zr_timeline *t;
    struct zr_stream *s;
    const json_t *span[200];
    assert_int_equal(zr_timeline_open(dev, 200, &t), 0);
    assert_int_equal(dev->ops->stream_open(dev, ZR_STREAM_QUEUE, "test", NULL, &s), 0);
    /* The stream is held for a while. What was marked meanwhile counts from when it goes on. */
    int64_t hold_us = 2000;
    assert_int_equal(zr_timeline_mark(t, s, ZR_TRACK_GATHER, ZR_SPAN_GATHER, 0, 7, false), 0);
    assert_int_equal(zr_timeline_mark(t, s, ZR_TRACK_GATHER, ZR_SPAN_GATHER, 0, 7, true), 0);
    assert_int_equal(dev->ops->call(s, stand, &hold_us, sizeof hold_us), 0);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(zr_timeline_mark(t, s, ZR_TRACK_REDUCE, ZR_SPAN_REDUCE, i, 7, false), 0);
        assert_int_equal(zr_timeline_mark(t, s, ZR_TRACK_REDUCE, ZR_SPAN_REDUCE, i, 7, true), 0);
    }
    assert_int_equal(zr_timeline_mark(NULL, s, ZR_TRACK_REDUCE, ZR_SPAN_REDUCE, 0, 7, false), 0);
    assert_int_equal(dev->ops->stream_sync(s), 0);
    json_t *root = written(t, 0);
    assert_int_equal(spans_of(root, ZR_TRACK_GATHER, span, 200), 1);
    double stood = end_of(span[0]); /* the stream was blocked after that */
    assert_int_equal(spans_of(root, ZR_TRACK_REDUCE, span, 200), 100);
    assert_true(number(span[0], "ts") >= stood + (double)hold_us - 1);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(whole(json_object_get(span[i], "args"), "unit"), i);
        assert_true(i == 0 || number(span[i], "ts") >= number(span[i - 1], "ts"));
    }
    json_decref(root);
    dev->ops->stream_close(s);
    zr_timeline_close(t);
}

/* In a locale with decimal commas the file still has points. */
static void points_in_every_locale(void **state)
{
    static const char *const names[] = {"de_DE.UTF-8", "de_DE", "fr_FR.UTF-8", "nl_NL.UTF-8", "ru_RU.UTF-8"};
    bool found = false;
    for (size_t i = 0; !found && i < sizeof names / sizeof *names; i++)
        found = setlocale(LC_NUMERIC, names[i]) != NULL;
    if (!found)
        skip();
    struct zr_timeline *t;
    assert_int_equal(zr_timeline_open(dev, 4, &t), 0);
    zr_timeline_begin(t, ZR_TRACK_MODEL, ZR_SPAN_STEP, -1, 1);
    usleep(10);
    zr_timeline_end(t, ZR_TRACK_MODEL, ZR_SPAN_STEP, -1);
    assert_int_equal(zr_timeline_write(t, 0, path), 0);
    setlocale(LC_NUMERIC, "C");
    json_error_t e;
    json_t *root = json_load_file(path, 0, &e);
    if (!root)
        fail_msg("%d:%d: %s", e.line, e.column, e.text);
    const json_t *span[1];
    assert_int_equal(spans_of(root, ZR_TRACK_MODEL, span, 1), 1);
    json_decref(root);
    zr_timeline_close(t);
}

static void nothing_to_record_to(void **state)
{
    zr_timeline_begin(NULL, ZR_TRACK_MODEL, ZR_SPAN_STEP, -1, 1);
    zr_timeline_end(NULL, ZR_TRACK_MODEL, ZR_SPAN_STEP, -1);
}

static void files_that_cannot_be_written(void **state)
{
    struct zr_timeline *t;
    assert_int_equal(zr_timeline_open(dev, 2000, &t), 0);
    assert_int_equal(zr_timeline_write(t, 0, "/nonexistent/trace.json"), ZERO_ERR_IO);
    assert_string_equal(zr_error_text(), "/nonexistent/trace.json: No such file or directory");
    /* A full disk is noticed at the end of a short file and in the middle of a long one. */
    for (int n = 0; n <= 2000; n += 2000) {
        for (int i = 0; i < n; i++) {
            zr_timeline_begin(t, ZR_TRACK_MODEL, ZR_SPAN_FORWARD, i, 1);
            zr_timeline_end(t, ZR_TRACK_MODEL, ZR_SPAN_FORWARD, i);
        }
        assert_int_equal(zr_timeline_write(t, 0, "/dev/full"), ZERO_ERR_IO);
        assert_string_equal(zr_error_text(), "/dev/full: No space left on device");
    }
    zr_timeline_close(t);
}

static void out_of_memory_leaves_nothing(void **state)
{
    int64_t live = n_live;
    for (int64_t k = 0, err = ZERO_ERR_NOMEM; err; k++) {
        struct zr_timeline *t = NULL;
        n_allocs = 0;
        fail_at = k;
        err = zr_timeline_open(dev, 8, &t);
        fail_at = -1;
        assert_true(err == 0 || err == ZERO_ERR_NOMEM);
        assert_true(err == 0 || (!t && (strstr(zr_error_text(), "no memory for a timeline of 8 spans") ||
                                        strstr(zr_error_text(), "cannot allocate"))));
        assert_true(err || k == 2 + ZR_TRACK_COUNT);
        zr_timeline_close(t);
        assert_int_equal(n_live, live);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_empty_timeline),
        cmocka_unit_test(every_kind_on_its_track),
        cmocka_unit_test(nesting),
        cmocka_unit_test(ends_find_their_spans),
        cmocka_unit_test(the_latest_are_kept),
        cmocka_unit_test(marks_on_a_stream),
        cmocka_unit_test(points_in_every_locale),
        cmocka_unit_test(nothing_to_record_to),
        cmocka_unit_test(files_that_cannot_be_written),
        cmocka_unit_test(out_of_memory_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, make_path, remove_path);
}
