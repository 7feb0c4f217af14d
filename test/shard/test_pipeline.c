/* SPDX-License-Identifier: Apache-2.0 */
/* test_pipeline.c: tests pipeline schedules. Named schedules have the published bubble and number of
 * activations. Any valid order is accepted, with messages too, and runs where sends block. Each kind of
 * invalid order gives an error that names it. */
#include "kernels/error.h"
#include "shard/pipeline/pipeline.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"
#include "test/shard/failing_memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct zr_pipe_cost unit_cost = {
    .forward_ns = 1000, .backward_ns = 2000, .weight_ns = 1000, .activation_bytes = 10};

static void expect_ok(int err)
{
    if (err)
        fail_msg("%d: %s", err, zr_error_text());
}

static void same_schedule(const struct zr_pipeline *a, const struct zr_pipeline *b)
{
    assert_int_equal(a->n_ranks, b->n_ranks);
    assert_int_equal(a->n_stages, b->n_stages);
    assert_int_equal(a->n_micro_batches, b->n_micro_batches);
    assert_int_equal(a->has_messages, b->has_messages);
    for (int32_t r = 0; r < a->n_ranks; r++) {
        assert_int_equal(a->rows[r].n, b->rows[r].n);
        for (int64_t i = 0; i < a->rows[r].n; i++) {
            const struct zr_pipe_action x = a->rows[r].at[i], y = b->rows[r].at[i];
            if (x.kind != y.kind || x.stage != y.stage || x.micro_batch != y.micro_batch ||
                x.with_next != y.with_next)
                fail_msg("rank %d, action %lld", r, (long long)i);
        }
    }
}

/* A schedule that is written and read again is the same. */
static void goes_through_a_file(const struct zr_pipeline *p)
{
    char path[] = "/tmp/zero-test-pipeline-XXXXXX";
    struct zr_pipeline *again;
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    close(fd);
    expect_ok(zr_pipeline_write(p, path));
    expect_ok(zr_pipeline_read(&again, path));
    same_schedule(p, again);
    zr_pipeline_close(again);
    unlink(path);
}

/* ---- named schedules ---- */

struct shape {
    enum zr_pipeline_kind kind;
    int32_t ranks, per_rank, n;
};

/* Published figures: the bubble is from Narayanan et al. 2021, section 2.2, and the most activations
 * follow from the forwards before the first backward. ZB-H1 is from Qi et al. 2024, table 1. */
static void has_published_figures(const struct shape *s, const struct zr_pipe_report *report)
{
    const int64_t F = unit_cost.forward_ns, B = unit_cost.backward_ns, v = s->per_rank, p = s->ranks,
                  n = s->n;
    const int64_t round = n / (n / p);
    for (int32_t r = 0; r < s->ranks; r++) {
        const struct zr_pipe_rank *rank = &report->ranks[r];
        int64_t first = s->kind == ZR_GPIPE         ? n * v
                        : s->kind == ZR_1F1B        ? p - r
                        : s->kind == ZR_ZERO_BUBBLE ? p
                                                    : (v - 1) * round + 2 * (p - 1 - r) + 1;
        first = first < n * v ? first : n * v;
        assert_int_equal(rank->busy_ns, n * v * (F + B));
        if (s->kind == ZR_ZERO_BUBBLE)
            assert_int_equal(rank->idle_ns, (p - 1) * (F + B - 2 * unit_cost.weight_ns));
        else if (s->kind != ZR_GPIPE || v == 1) /* F and B are those of a stage, a v-th of a rank */
            assert_int_equal(rank->idle_ns, (p - 1) * (F + B));
        assert_int_equal(rank->peak_activations, first);
        assert_int_equal(rank->peak_bytes, 10 * first);
    }
}

static void test_published(void **state)
{
    for (int k = 0; k < 4 * 9 * 4 * 3; k++) {
        struct shape s = {(enum zr_pipeline_kind)(k % 4), 1 + k / 4 % 9, 1 + k / 36 % 4, 0};
        struct zr_pipeline *p, *lowered;
        struct zr_pipe_report report;
        s.n = s.ranks * (2 + k / 144);
        if ((s.kind == ZR_1F1B || s.kind == ZR_ZERO_BUBBLE) && s.per_rank > 1)
            continue;
        expect_ok(zr_pipeline_build(&p, s.kind, s.ranks, s.per_rank, s.n, false));
        expect_ok(zr_pipeline_check(p, &unit_cost, &report));
        assert_true(report.in_order);
        has_published_figures(&s, &report);
        zr_pipe_report_close(&report, p);
        for (int32_t most = 0; most < 3; most++) {
            expect_ok(zr_pipeline_lower(&lowered, p, &unit_cost, most));
            expect_ok(zr_pipeline_check(lowered, &unit_cost, &report));
            has_published_figures(&s, &report);
            for (int32_t r = 0; r < s.ranks; r++)
                assert_true(report.ranks[r].peak_unsharded > 0 &&
                            (!most || report.ranks[r].peak_unsharded <= most));
            zr_pipe_report_close(&report, lowered);
            goes_through_a_file(lowered);
            zr_pipeline_close(lowered);
        }
        goes_through_a_file(p);
        zr_pipeline_close(p);
    }
}

static void test_forward_only(void **state)
{
    struct zr_pipeline *p, *lowered;
    struct zr_pipe_report report;
    expect_ok(zr_pipeline_build(&p, ZR_1F1B, 4, 1, 6, true));
    expect_ok(zr_pipeline_lower(&lowered, p, &unit_cost, 0));
    expect_ok(zr_pipeline_check(lowered, &unit_cost, &report));
    assert_int_equal(report.span_ns, (6 + 3) * 1000);
    for (int r = 0; r < 4; r++) {
        assert_int_equal(report.ranks[r].peak_activations, 1);
        assert_int_equal(report.ranks[r].n_sends, r < 3 ? 6 : 0);
    }
    zr_pipe_report_close(&report, lowered);
    zr_pipeline_close(lowered);
    zr_pipeline_close(p);
}

/* ---- slots ---- */

/* The micro-batch in each slot of a rank; -1: none that is still needed. */
struct slots {
    int32_t n, of[64];
};

static bool fill(struct slots *s, int32_t micro)
{
    bool free = s->of[micro % s->n] < 0;
    s->of[micro % s->n] = micro;
    return free;
}

static void leave(struct slots *s, int32_t micro)
{
    if (s->of[micro % s->n] == micro)
        s->of[micro % s->n] = -1;
}

/* Follows a rank's actions for one stage: no message takes a slot that is still needed. The first stage
 * sends nothing back, and the last sends nothing on. */
static bool stage_fits(const struct zr_pipeline *p, int32_t stage, int32_t onward, int32_t back,
                       bool forward_only)
{
    const struct zr_pipe_row *row = &p->rows[stage % p->n_ranks];
    struct slots in = {.n = onward}, out = {.n = onward}, grad_in = {.n = back}, grad_out = {.n = back};
    struct slots *all[] = {&in, &out, &grad_in, &grad_out};
    bool fits = true;
    for (int k = 0; k < 4; k++)
        memset(all[k]->of, 0xff, sizeof all[k]->of);
    for (int64_t i = 0; i < row->n; i++) {
        int32_t m = row->at[i].micro_batch;
        if (row->at[i].stage != stage)
            continue;
        switch (row->at[i].kind) {
        case ZR_PIPE_RECV_F:
            fits &= fill(&in, m);
            break;
        case ZR_PIPE_FORWARD:
            if (stage < p->n_stages - 1)
                fits &= fill(&out, m);
            if (forward_only)
                leave(&in, m);
            break;
        case ZR_PIPE_SEND_F:
            leave(&out, m);
            break;
        case ZR_PIPE_RECV_B:
            fits &= fill(&grad_in, m);
            break;
        case ZR_PIPE_BACKWARD:
        case ZR_PIPE_BACKWARD_INPUT:
        case ZR_PIPE_BACKWARD_WEIGHT:
            if (stage > 0 && row->at[i].kind != ZR_PIPE_BACKWARD_WEIGHT)
                fits &= fill(&grad_out, m);
            if (row->at[i].kind == ZR_PIPE_BACKWARD_INPUT)
                break;
            leave(&in, m);
            leave(&grad_in, m);
            break;
        case ZR_PIPE_SEND_B:
            leave(&grad_out, m);
            break;
        default:
            break;
        }
    }
    return fits;
}

/* Checks a stage and the next on the same rank: each reads what the other wrote in its slot. */
static bool fits_within(const struct zr_pipeline *p, int32_t stage, int32_t onward, int32_t back,
                        bool forward_only)
{
    struct slots out = {.n = onward}, grad = {.n = back};
    bool fits = true;
    memset(out.of, 0xff, sizeof out.of);
    memset(grad.of, 0xff, sizeof grad.of);
    for (int64_t i = 0; i < p->rows[0].n && stage < p->n_stages - 1; i++) {
        const struct zr_pipe_action *a = &p->rows[0].at[i];
        bool forward = a->kind == ZR_PIPE_FORWARD, next = a->stage == stage + 1;
        if (!zr_pipe_computes(a->kind) || (a->stage != stage && !next))
            continue;
        if (forward && !next)
            fits &= fill(&out, a->micro_batch);
        if (next && forward == forward_only)
            leave(&out, a->micro_batch);
        if (!forward && next)
            fits &= fill(&grad, a->micro_batch);
        if (!forward && !next)
            leave(&grad, a->micro_batch);
    }
    return fits;
}

static bool all_fit(const struct zr_pipeline *p, int32_t onward, int32_t back, bool forward_only)
{
    for (int32_t s = 0; s < p->n_stages; s++)
        if (!(p->n_ranks > 1 ? stage_fits : fits_within)(p, s, onward, back, forward_only))
            return false;
    return true;
}

/* There are as many slots as needed, and no more. */
static void test_slots(void **state)
{
    for (int32_t ranks = 2; ranks <= 6; ranks++)
        for (int32_t n = 1; n <= 13; n++)
            for (int k = 0; k < 6; k++) {
                enum zr_pipeline_kind kind = k % 3 == 2 ? ZR_ZERO_BUBBLE : k % 3 ? ZR_GPIPE : ZR_1F1B;
                bool forward_only = k >= 3;
                struct zr_pipeline *p, *lowered;
                int32_t onward = -1, back = -1;
                expect_ok(zr_pipeline_build(&p, kind, ranks, 1, n, forward_only));
                expect_ok(zr_pipeline_lower(&lowered, p, &unit_cost, 0));
                expect_ok(zr_pipeline_slots(lowered, &onward, &back));
                assert_true(all_fit(lowered, onward, back, forward_only));
                assert_true(onward == 1 || !all_fit(lowered, onward - 1, n, forward_only));
                assert_true(back == 1 || !all_fit(lowered, n, back - 1, forward_only));
                if (kind != ZR_GPIPE && !forward_only)
                    assert_int_equal(onward, ranks < n ? ranks : n);
                if (kind == ZR_GPIPE && !forward_only)
                    assert_int_equal(onward, n);
                zr_pipeline_close(lowered);
                zr_pipeline_close(p);
            }
}

/* The same for several stages on a rank, each with its own slots. */
static void test_slots_of_several(void **state)
{
    for (int32_t ranks = 1; ranks <= 5; ranks++)
        for (int32_t per_rank = 2; per_rank <= 3; per_rank++)
            for (int32_t n = 1; n <= 20; n++)
                for (int k = 0; k < 4; k++) {
                    enum zr_pipeline_kind kind = k % 2 ? ZR_GPIPE : ZR_INTERLEAVED;
                    bool forward_only = k >= 2;
                    struct zr_pipeline *p, *lowered;
                    int32_t onward = -1, back = -1;
                    if (kind == ZR_INTERLEAVED && n > ranks && n % (n / ranks))
                        continue;
                    expect_ok(zr_pipeline_build(&p, kind, ranks, per_rank, n, forward_only));
                    expect_ok(zr_pipeline_lower(&lowered, p, &unit_cost, 0));
                    expect_ok(zr_pipeline_slots(lowered, &onward, &back));
                    assert_true(all_fit(lowered, onward, back, forward_only));
                    assert_true(onward == 1 || !all_fit(lowered, onward - 1, n, forward_only));
                    assert_true(back == 1 || !all_fit(lowered, n, back - 1, forward_only));
                    zr_pipeline_close(lowered);
                    zr_pipeline_close(p);
                }
}

/* Stages of 1, 3, 1 and 1 units, with transfer times between ranks; worked out by hand. */
static void test_uneven(void **state)
{
    static const int32_t units[] = {1, 3, 1, 1};
    struct zr_pipe_cost cost = unit_cost;
    struct zr_pipeline *p;
    struct zr_pipe_report report;
    cost.units = units;
    cost.move_ns = 500;
    expect_ok(zr_pipeline_build(&p, ZR_GPIPE, 4, 1, 1, false));
    expect_ok(zr_pipeline_check(p, &cost, &report));
    assert_int_equal(report.span_ns, (1 + 3 + 1 + 1) * 3000 + 6 * 500);
    assert_int_equal(report.ranks[1].busy_ns, 9000);
    assert_int_equal(report.ranks[1].peak_bytes, 30);
    assert_int_equal(report.times[3][0].start_ns, 5000 + 3 * 500);
    zr_pipe_report_close(&report, p);
    /* Each link has its own time in both directions. In backward the last stage's link comes first. */
    static const int64_t moves_ns[] = {100, 0, 7000};
    cost.moves_ns = moves_ns;
    expect_ok(zr_pipeline_check(p, &cost, &report));
    assert_int_equal(report.span_ns, (1 + 3 + 1 + 1) * 3000 + 2 * (100 + 7000));
    assert_int_equal(report.times[2][0].start_ns, 4000 + 100);
    assert_int_equal(report.times[2][1].start_ns, 5000 + 100 + 7000 + 3000 + 7000);
    zr_pipe_report_close(&report, p);
    static const int64_t wrong_ns[] = {100, -1, 7000}, too_long_ns[] = {0, 0, INT64_MAX / 3};
    cost.moves_ns = wrong_ns;
    assert_int_equal(zr_pipeline_check(p, &cost, &report), ZERO_ERR_ARG);
    cost.moves_ns = too_long_ns;
    assert_int_equal(zr_pipeline_check(p, &cost, &report), ZERO_ERR_ARG);
    zr_pipeline_close(p);
}

/* ---- any valid order ---- */

/* A random schedule in progress: stages on any rank, micro-batches in any order, backwards whole or split
 * in two, and some computations in pairs. */
struct drawing {
    struct zr_pipeline *p;
    struct random_source *r;
    int32_t *rank_of;
    /* (stages, micro-batches): 1: forward, 2: gradient of the input, 4: of the weights */
    uint8_t *done;
    int32_t S, M;
    /* stage s is on rank s % ranks, its weight gradients are in the order of micro-batches, and those of the
     * first stage come after those of the last */
    bool tied;
    /* the rank that drew the last action */
    int32_t latest;
};

static uint8_t *done_of(const struct drawing *d, int32_t s, int32_t m)
{
    return &d->done[s * d->M + m];
}

static bool chance(struct random_source *r, int percent)
{
    return random_below(r, 100) < percent;
}

/* Sometimes makes two consecutive actions of a rank start together. All that the second needs must exist
 * before the first, unless it is the first itself. */
static void draw_pair(struct drawing *d, int32_t rank)
{
    struct zr_pipe_row *row = &d->p->rows[rank];
    struct zr_pipe_action *a = row->n > 1 ? &row->at[row->n - 2] : NULL;
    bool second = row->n > 2 && a[-1].with_next;
    if (rank != d->latest || !a || second || !chance(d->r, 40) || a[0].micro_batch == a[1].micro_batch)
        return;
    a->with_next = true;
}

/* Whether the stage may compute the micro-batch's weight gradients now. */
static bool may_weigh(const struct drawing *d, int32_t s, int32_t m)
{
    return !d->tied ||
           ((m == 0 || *done_of(d, s, m - 1) & 4) && (s > 0 || d->S == 1 || *done_of(d, d->S - 1, m) & 4));
}

/* Draws one action that is ready. Returns false if none is left. */
static bool draw_one(struct drawing *d)
{
    const int64_t n = (int64_t)d->S * d->M, from = random_below(d->r, n);
    for (int64_t k = 0; k < n; k++) {
        const int32_t s = (int32_t)((from + k) % n / d->M), m = (int32_t)((from + k) % n % d->M);
        uint8_t *done = done_of(d, s, m);
        struct zr_pipe_action a = {.stage = s, .micro_batch = m};
        if (!(*done & 1) && (s == 0 || *done_of(d, s - 1, m) & 1)) {
            a.kind = ZR_PIPE_FORWARD;
            *done |= 1;
        } else if (*done == 1 && (s == d->S - 1 || *done_of(d, s + 1, m) & 2)) {
            bool whole = chance(d->r, 60) && may_weigh(d, s, m);
            a.kind = whole ? ZR_PIPE_BACKWARD : ZR_PIPE_BACKWARD_INPUT;
            *done |= whole ? 6 : 2;
        } else if (*done == 3 && may_weigh(d, s, m)) {
            a.kind = ZR_PIPE_BACKWARD_WEIGHT;
            *done |= 4;
        } else {
            continue;
        }
        expect_ok(zr_pipeline_add(d->p, d->rank_of[s], a));
        draw_pair(d, d->rank_of[s]);
        d->latest = d->rank_of[s];
        return true;
    }
    return false;
}

static struct zr_pipeline *draw(struct random_source *r, bool tied)
{
    struct drawing d = {
        .r = r, .S = (int32_t)(1 + random_below(r, 9)), .M = (int32_t)(1 + random_below(r, 7)), .tied = tied};
    int32_t ranks = (int32_t)(1 + random_below(r, tied && d.S > 8 ? 8 : d.S));
    if (tied)
        d.S -= d.S % ranks;
    d.p = zr_pipeline_new(ranks);
    d.rank_of = malloc((size_t)d.S * sizeof *d.rank_of);
    d.done = calloc((size_t)d.S * (size_t)d.M, 1);
    assert_true(d.p && d.rank_of && d.done);
    for (int32_t s = 0; s < d.S; s++)
        d.rank_of[s] = s < ranks ? s : tied ? s % ranks : (int32_t)random_below(r, ranks);
    while (draw_one(&d)) {
    }
    free(d.rank_of);
    free(d.done);
    return d.p;
}

static struct zr_pipe_cost draw_cost(struct random_source *r, int32_t n_stages, int32_t *units)
{
    struct zr_pipe_cost cost = {.forward_ns = 1 + random_below(r, 5),
                                .backward_ns = 2 + random_below(r, 9),
                                .move_ns = random_below(r, 4),
                                .units = chance(r, 50) ? units : NULL};
    cost.weight_ns = 1 + random_below(r, cost.backward_ns - 1);
    for (int32_t s = 0; s < n_stages; s++)
        units[s] = (int32_t)(1 + random_below(r, 4));
    return cost;
}

static int n_cases(void)
{
    const char *text = getenv("N_PIPELINES");
    return text ? atoi(text) : 2000;
}

static void test_any_order(void **state)
{
    struct random_source r = random_open();
    for (int k = 0; k < n_cases(); k++) {
        uint64_t seed = r.state;
        int32_t units[16], most = 2 * (int32_t)random_below(&r, 3);
        struct zr_pipeline *p = draw(&r, false), *lowered;
        struct zr_pipe_cost cost = draw_cost(&r, p->n_stages, units);
        struct zr_pipe_report of_p, report;
        if (zr_pipeline_check(p, &cost, &of_p) || zr_pipeline_lower(&lowered, p, &cost, most) ||
            zr_pipeline_check(lowered, &cost, &report))
            fail_msg("SEED=%llu: %s", (unsigned long long)seed, zr_error_text());
        if (report.span_ns != of_p.span_ns || report.in_order != of_p.in_order)
            fail_msg("SEED=%llu: messages change the time", (unsigned long long)seed);
        for (int32_t rank = 0; rank < p->n_ranks && most; rank++)
            if (report.ranks[rank].peak_unsharded > most)
                fail_msg("SEED=%llu: rank %d has %lld stages", (unsigned long long)seed, rank,
                         (long long)report.ranks[rank].peak_unsharded);
        zr_pipe_report_close(&report, lowered);
        zr_pipe_report_close(&of_p, p);
        if (k % 50 == 0)
            goes_through_a_file(lowered);
        zr_pipeline_close(lowered);
        zr_pipeline_close(p);
    }
}

/* ---- messages of tied tensors ---- */

/* Returns the action of the other rank that goes with a message. */
static struct zr_pipe_action other_end(const struct zr_pipeline *p, const struct zr_pipe_action *a)
{
    struct zr_pipe_action b = *a;
    if (a->kind == ZR_PIPE_TIE) {
        b.stage = a->stage ? 0 : p->n_stages - 1;
        return b;
    }
    b.kind = a->kind == ZR_PIPE_SEND_F   ? ZR_PIPE_RECV_F
             : a->kind == ZR_PIPE_RECV_F ? ZR_PIPE_SEND_F
             : a->kind == ZR_PIPE_SEND_B ? ZR_PIPE_RECV_B
                                         : ZR_PIPE_SEND_B;
    b.stage += a->kind == ZR_PIPE_SEND_F || a->kind == ZR_PIPE_RECV_B ? 1 : -1;
    return b;
}

/* Whether all ranks finish if both ends of every message wait for each other. */
static bool ends_with_waits(const struct zr_pipeline *p)
{
    int64_t at[8] = {0}, left = 0;
    for (int32_t r = 0; r < p->n_ranks; r++)
        left += p->rows[r].n;
    for (bool any = true; any && left;) {
        any = false;
        for (int32_t r = 0; r < p->n_ranks; r++) {
            if (at[r] == p->rows[r].n)
                continue;
            const struct zr_pipe_action *a = &p->rows[r].at[at[r]];
            bool message = zr_pipe_sends(a->kind) || zr_pipe_receives(a->kind) || a->kind == ZR_PIPE_TIE;
            struct zr_pipe_action b = message ? other_end(p, a) : *a;
            int32_t peer = b.stage % p->n_ranks;
            const struct zr_pipe_action *its = &p->rows[peer].at[at[peer]];
            if (message && (at[peer] == p->rows[peer].n || its->kind != b.kind || its->stage != b.stage ||
                            its->micro_batch != b.micro_batch))
                continue;
            at[r]++;
            at[peer] += message;
            left -= 1 + message;
            any = true;
        }
    }
    return !left;
}

/* Returns the index in the row of the message, or of the action that computes the weights' gradients. */
static int64_t find_in_row(const struct zr_pipe_row *row, bool message, int32_t stage, int32_t micro_batch)
{
    for (int64_t i = 0; i < row->n; i++)
        if ((message ? row->at[i].kind == ZR_PIPE_TIE : zr_pipe_gives_weights(row->at[i].kind)) &&
            row->at[i].stage == stage && row->at[i].micro_batch == micro_batch)
            return i;
    fail_msg("stage %d, micro-batch %d is missing", stage, micro_batch);
    return -1;
}

/* The first stage receives a gradient before it computes its own. The last stage sends it after it has
 * computed it, and before it needs the slot again. */
static void has_tie_places(const struct zr_pipeline *p, int32_t slots)
{
    const int32_t end = p->n_stages - 1;
    const struct zr_pipe_row *first = &p->rows[0], *last = &p->rows[end % p->n_ranks];
    for (int32_t m = 0; m < p->n_micro_batches; m++) {
        int64_t sent = find_in_row(last, true, end, m);
        assert_true(find_in_row(first, true, 0, m) < find_in_row(first, false, 0, m));
        assert_true(find_in_row(last, false, end, m) < sent);
        assert_true(m + slots >= p->n_micro_batches || sent < find_in_row(last, false, end, m + slots));
    }
    assert_true(ends_with_waits(p));
}

static void leave_out_ties(struct zr_pipeline *p)
{
    for (int32_t r = 0; r < p->n_ranks; r++) {
        int64_t n = 0;
        for (int64_t i = 0; i < p->rows[r].n; i++)
            if (p->rows[r].at[i].kind != ZR_PIPE_TIE)
                p->rows[r].at[n++] = p->rows[r].at[i];
        p->rows[r].n = n;
    }
}

/* Where weight gradients are not apart, the messages change nothing else in a row, and need no more slots.
 * Attempts with too few slots leave no trace. Returns whether there is a place for all messages. */
static bool places_ties(struct zr_pipeline *p, bool apart)
{
    struct zr_pipeline *before, *after;
    struct zr_pipe_report report;
    expect_ok(zr_pipeline_lower(&before, p, &unit_cost, 0));
    expect_ok(zr_pipeline_lower(&after, p, &unit_cost, 0));
    expect_ok(zr_pipeline_check(after, &unit_cost, &report));
    int32_t least = zr_pipeline_tied_slots(after, &report), slots = least;
    expect_ok(zr_pipeline_place_ties(after, &slots));
    bool placed = slots > 0;
    if (placed) {
        assert_true(slots >= least);
        assert_true(apart || slots == least);
        has_tie_places(after, slots);
    }
    if (apart) {
        int32_t same = slots;
        expect_ok(zr_pipeline_place_ties(before, &same));
        assert_int_equal(same, slots);
    } else {
        leave_out_ties(after);
    }
    same_schedule(before, after);
    zr_pipe_report_close(&report, after);
    zr_pipeline_close(after);
    zr_pipeline_close(before);
    zr_pipeline_close(p);
    return placed;
}

static void named_places_ties(enum zr_pipeline_kind kind, int32_t ranks, int32_t per_rank, int32_t n)
{
    struct zr_pipeline *p;
    expect_ok(zr_pipeline_build(&p, kind, ranks, per_rank, n, false));
    assert_true(places_ties(p, kind == ZR_ZERO_BUBBLE));
}

static void test_ties(void **state)
{
    for (int32_t ranks = 2; ranks <= 6; ranks++)
        for (int32_t n = 1; n <= 20; n++) {
            named_places_ties(ZR_1F1B, ranks, 1, n);
            named_places_ties(ZR_GPIPE, ranks, 1, n);
            named_places_ties(ZR_ZERO_BUBBLE, ranks, 1, n);
            for (int32_t per_rank = 2; per_rank <= 3; per_rank++) {
                named_places_ties(ZR_GPIPE, ranks, per_rank, n);
                if (n <= ranks || n % (n / ranks) == 0)
                    named_places_ties(ZR_INTERLEAVED, ranks, per_rank, n);
            }
        }
}

static void test_ties_in_any_order(void **state)
{
    struct random_source r = random_open();
    for (int k = 0; k < n_cases(); k++) {
        uint64_t seed = r.state;
        struct zr_pipeline *p = draw(&r, true);
        if (p->n_ranks == 1)
            zr_pipeline_close(p);
        else if (!places_ties(p, true))
            fail_msg("SEED=%llu: no place", (unsigned long long)seed);
    }
}

/* ---- invalid orders ---- */

static struct zr_pipeline *read_bytes(const char *text, size_t n)
{
    char path[] = "/tmp/zero-test-pipeline-XXXXXX";
    struct zr_pipeline *p = NULL;
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, n), (ssize_t)n);
    close(fd);
    int err = zr_pipeline_read(&p, path);
    unlink(path);
    return err ? NULL : p;
}

static struct zr_pipeline *read_text(const char *text)
{
    return read_bytes(text, strlen(text));
}

/* Mistakes that a person makes, and mistakes of other projects' schedules, with the numbers of their
 * issues. */
static const struct {
    const char *text, *says;
} wrong[] = {
    /* computations */
    {"0F0,0F1,0B0\n1F0,1F1,1B0,1B1\n", "rank 0: 0B1 is missing"},
    {"0F0,0B0,0B1\n1F0,1F1,1B0,1B1\n", "rank 0: 0B1 comes before 0F1, which it needs"},
    {"0F0,0F0,0B0\n1F0,1B0\n", "rank 0: 0F0 is there twice"},
    {"0F0,0B0,0B0\n1F0,1B0\n", "rank 0: 0B0 is there twice"},
    {"0F0,0I0,0B0\n1F0,1B0\n", "rank 0: 0B0 is there twice, or an earlier action has already done it"},
    {"0F0,0I0\n1F0,1B0\n",
     "rank 0: 0W0 is missing"}, /* pytorch#144530, #153833: weights without a gradient */
    {"0F0,0W0,0I0\n1F0,1B0\n", "rank 0: 0W0 comes before 0I0"},
    {"0F0,0B0\n1F0\n", "rank 1: 1B0 is missing"},
    {"0F0,1F0,0B0\n1F0,1B0\n", "rank 0: 1F0, but stage 1 is rank 1's"},
    {"0F0,0B0\n2F0,2B0\n", "stage 1 of 3 is on no rank"},
    {"1B0,1F0\n0F0,0B0\n", "rank 0: 1B0 comes before 1F0"},
    {"0F0,1F0,1B0,0B0,2B0\n2F0\n", "rank 0: 2B0, but stage 2 is rank 1's"},
    {"1F0,0F0,0B0,1B0\n",
     "ranks wait for each other: rank 0 is at 1F0, which waits for rank 0"}, /* on one rank */
    /* pytorch#127332: the stages of two ranks cross, each behind the other rank's */
    {"0F0,2F0,0F1,2F1,2B0,2B1,0B0,0B1\n1F0,3F0,3B0,1F1,3F1,3B1,1B1,1B0\n", NULL},
    {"0F0,2F1,0F1,2F0,2B0,2B1,0B0,0B1\n1F0,3F0,1F1,3F1,3B0,3B1,1B0,1B1\n",
     "rank 0 is at 2F1, which waits for rank 1; rank 1 is at 3F0, which waits for rank 0"},
    {"(0F1;1F1)OVERLAP_F_B,0F0,1F0,0B0,0B1,1B0,1B1\n",
     "rank 0 is at 1F1, which waits for rank 0"}, /* actions that start together need each other */
    {"0F0,(0I0;0W0)OVERLAP_F_B\n", "0W0 is computed at the same time as 0I0, which it needs"},
    {"0F0,0B0\n,\n", "rank 1 does nothing"},
    /* messages */
    {"0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", NULL},
    {"0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "rank 0: 0SEND_F0 is missing"},
    {"0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "rank 0: 0B0 comes before 0RECV_B0"},
    {"0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "rank 0: 0SEND_F0 comes before 0F0"},
    {"0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n", "rank 1: 1F0 comes before 1RECV_F0"},
    {"0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n", "rank 0: 0SEND_F0 is there twice"},
    {"0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0\n", "rank 1: 1SEND_B0 is missing"},
    {"0F0,0SEND_F0,1RECV_F0,1F0,1B0,0B0\n", "rank 0: 0SEND_F0 has no peer"},
    {"0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1SEND_F0,1B0,1SEND_B0\n", "rank 1: 1SEND_F0 has no peer"},
    /* pytorch#165664: a receive comes before the send that the other side waits for */
    {"0F0,0RECV_B0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
     "if a send waits for its receiver, ranks wait for each other: rank 0 is at 0RECV_B0, which waits for "
     "rank 1; rank 1 is at 1RECV_F0, which waits for rank 0"},
    /* pytorch#172668: both send first */
    {"0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
     "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
     "rank 0 is at 0SEND_F1, which waits for rank 1; rank 1 is at 1SEND_B0, which waits for rank 0"},
    /* messages between two ranks are received in another order than sent: NCCL matches them by order */
    {"0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0B0,0RECV_B1,0B1\n"
     "1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1\n",
     "rank 0's 0SEND_F1 would meet rank 1's 1RECV_F0"},
    /* gathered parameters, and summed gradients */
    {"0UNSHARD,0F0,0RESHARD,0B0,0REDUCE_GRAD\n", "rank 0: 0B0 is computed while stage 0 is not gathered"},
    {"0UNSHARD,0UNSHARD,0F0,0B0\n", "stage 0 is already gathered when it is to be gathered"},
    {"0UNSHARD,0F0,0B0,0RESHARD,0RESHARD\n", "stage 0 is not gathered when it is to be freed"},
    {"0F0,0B0,0REDUCE_GRAD,0F1,0B1\n", "0REDUCE_GRAD comes before 1 of its 2 micro-batches"},
    {"0F0,0F1,0B0,0B1,0REDUCE_GRAD,0REDUCE_GRAD\n", "0REDUCE_GRAD is there twice"},
    {"0F0,0B0,0REDUCE_GRAD\n1F0,1B0\n", "rank 1: 1REDUCE_GRAD is missing"},
    {"0UNSHARD,0F0,0B0,1UNSHARD\n1F0,1B0\n", "stage 1, which it gathers or reduces, is rank 1's"},
};

static void test_wrong(void **state)
{
    for (size_t k = 0; k < sizeof wrong / sizeof *wrong; k++) {
        struct zr_pipeline *p = read_text(wrong[k].text);
        struct zr_pipe_report report;
        if (!p)
            fail_msg("%s: %s", wrong[k].text, zr_error_text());
        int err = zr_pipeline_check(p, &unit_cost, &report);
        if (wrong[k].says ? err != ZERO_ERR_ARG || !strstr(zr_error_text(), wrong[k].says) : err != 0)
            fail_msg("\n%s: %d: %s", wrong[k].text, err, zr_error_text());
        if (!err)
            zr_pipe_report_close(&report, p);
        zr_pipeline_close(p);
    }
}

static struct zr_pipeline *copy_of(const struct zr_pipeline *p)
{
    struct zr_pipeline *copy = zr_pipeline_new(p->n_ranks);
    assert_non_null(copy);
    for (int32_t r = 0; r < p->n_ranks; r++)
        for (int64_t i = 0; i < p->rows[r].n; i++)
            expect_ok(zr_pipeline_add(copy, r, p->rows[r].at[i]));
    return copy;
}

/* An action of a schedule with messages is left out, doubled, or moved to another micro-batch. Each change
 * is reported. Exception: a stage may stay gathered at the end, so a missing last release, or one more
 * gather, is valid. */
static void test_mutants(void **state)
{
    struct random_source r = random_open();
    for (int k = 0; k < n_cases(); k++) {
        uint64_t seed = r.state;
        struct zr_pipeline *p = draw(&r, false), *lowered;
        struct zr_pipe_report report;
        expect_ok(zr_pipeline_lower(&lowered, p, &unit_cost, 2 * (int32_t)random_below(&r, 2)));
        struct zr_pipeline *mutant = copy_of(lowered);
        int32_t rank = (int32_t)random_below(&r, p->n_ranks);
        struct zr_pipe_row *row = &mutant->rows[rank];
        int64_t i = random_below(&r, row->n), how = random_below(&r, 3);
        struct zr_pipe_action a = row->at[i];
        char text[ZR_PIPE_TEXT];
        if (a.kind == ZR_PIPE_RESHARD || (a.kind == ZR_PIPE_REDUCE_GRAD && p->n_stages == 1) ||
            (i && row->at[i - 1].with_next) || a.with_next)
            how = 1;
        if (a.kind == ZR_PIPE_UNSHARD)
            how = 0;
        if (how == 0) {
            memmove(&row->at[i], &row->at[i + 1], (size_t)(row->n - i - 1) * sizeof *row->at);
            row->n--;
        } else if (how == 1 || a.micro_batch < 0 || p->n_micro_batches == 1) {
            expect_ok(zr_pipeline_add(mutant, rank, a));
        } else {
            row->at[i].micro_batch = (a.micro_batch + 1) % p->n_micro_batches;
        }
        if (zr_pipeline_check(mutant, &unit_cost, &report) == 0)
            fail_msg("SEED=%llu: rank %d, action %lld, %s, mutant %lld is not noticed",
                     (unsigned long long)seed, rank, (long long)i, zr_pipe_text(a, text), (long long)how);
        zr_pipeline_close(mutant);
        zr_pipeline_close(lowered);
        zr_pipeline_close(p);
    }
}

/* ---- bad input ---- */

static void test_numbers(void **state)
{
    static const struct {
        struct shape s;
        const char *says;
    } bad[] = {
        {{ZR_1F1B, 0, 1, 1}, "the pipeline has 0 ranks"},
        {{ZR_1F1B, 70000, 1, 1}, "the pipeline has 70000 ranks; allowed: 1 to 65536"},
        {{ZR_1F1B, 2, 2, 4}, "1F1B has one stage per rank, not 2"},
        {{ZR_ZERO_BUBBLE, 2, 2, 4}, "the zero-bubble schedule has one stage per rank, not 2"},
        {{ZR_GPIPE, 2, 0, 4}, "2 ranks with 0 stages each"},
        {{ZR_GPIPE, 2, 1, 0}, "and 0 micro-batches"},
        {{ZR_GPIPE, 65536, 16, 1000000}, "their product at most"},
        {{ZR_GPIPE, 2, 1 << 20, 1}, "at most 1048576 stages"},
        {{ZR_INTERLEAVED, 4, 2, 9}, "cannot divide 9 micro-batches evenly into 2 rounds on 4 ranks"},
    };
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
        const struct shape *s = &bad[k].s;
        struct zr_pipeline *p;
        assert_int_equal(zr_pipeline_build(&p, s->kind, s->ranks, s->per_rank, s->n, false), ZERO_ERR_ARG);
        if (p || !strstr(zr_error_text(), bad[k].says))
            fail_msg("%zu: %s", k, zr_error_text());
    }
}

static void test_files(void **state)
{
    static const char *const bad[] = {"F0\n",
                                      "0\n",
                                      "0F\n",
                                      "0X1\n",
                                      "0F0x\n",
                                      "-1F0\n",
                                      "0F-1\n",
                                      "0SEND_F\n",
                                      "0UNSHARD1\n",
                                      "99999999999F0\n",
                                      "0F1048576\n",
                                      "(0F0;0F1)\n",
                                      "(0F0)OVERLAP_F_B\n",
                                      "(0F0;0F1;0F2)OVERLAP_F_B\n",
                                      "(0F0;0UNSHARD)OVERLAP_F_B\n",
                                      "(0F0;0F1)OVERLAP_F_Bx\n"};
    char cell[64];
    for (size_t k = 0; k < sizeof bad / sizeof *bad; k++) {
        assert_null(read_text(bad[k]));
        if (!strstr(zr_error_text(), "line 1, cell 1") || !strstr(zr_error_text(), "is not an action"))
            fail_msg("%s: %s", bad[k], zr_error_text());
        snprintf(cell, sizeof cell, "0F0\n0B0, ,%s", bad[k]);
        assert_null(read_text(cell));
        if (!strstr(zr_error_text(), "line 2, cell 3"))
            fail_msg("%s: %s", cell, zr_error_text());
    }
    assert_null(read_text(""));
    assert_non_null(strstr(zr_error_text(), "no action is in it"));
    assert_null(read_text("1000000F1000000\n"));
    assert_non_null(strstr(zr_error_text(), "their product may be at most"));
    struct zr_pipeline *p;
    assert_null(read_bytes("0F0,0B0\0,1F0\n", 13));
    assert_non_null(strstr(zr_error_text(), "line 1: it contains a zero byte"));
    assert_int_equal(zr_pipeline_read(&p, "/nonexistent/x.csv"), ZERO_ERR_IO);
    /* the form that PyTorch writes: quoted or empty cells, lines that end in both characters */
    p = read_text("0F0,,\"0B0\"\r\n, 1F0 ,1B0,\r\n");
    assert_non_null(p);
    assert_int_equal(p->rows[0].n + p->rows[1].n, 4);
    assert_int_equal(zr_pipeline_write(p, "/nonexistent/x.csv"), ZERO_ERR_IO);
    zr_pipeline_close(p);
    /* Blank lines at the end are no ranks. A blank line between others is a rank without actions. */
    p = read_text("0F0,0B0\n\n1F0,1B0\r\n \t\r\n\n");
    assert_non_null(p);
    assert_int_equal(p->n_ranks, 3);
    assert_int_equal(p->rows[1].n, 0);
    assert_int_equal(p->rows[2].n, 2);
    zr_pipeline_close(p);
}

/* Something that is no file is not replaced. A link is followed. */
static void test_link(void **state)
{
    char folder[] = "/tmp/zero-test-pipeline-XXXXXX", file[64], link[64], beside[80];
    struct zr_pipeline *p, *again;
    struct stat there;
    assert_non_null(mkdtemp(folder));
    snprintf(file, sizeof file, "%s/file", folder);
    snprintf(link, sizeof link, "%s/link", folder);
    snprintf(beside, sizeof beside, "%s.new", link);
    expect_ok(zr_pipeline_build(&p, ZR_1F1B, 2, 1, 4, false));
    assert_int_equal(symlink(file, link), 0);
    expect_ok(zr_pipeline_write(p, link));
    assert_int_equal(lstat(link, &there), 0);
    assert_true(S_ISLNK(there.st_mode));
    assert_int_not_equal(access(beside, F_OK), 0);
    expect_ok(zr_pipeline_read(&again, file));
    same_schedule(p, again);
    zr_pipeline_close(again);
    zr_pipeline_close(p);
    unlink(link);
    unlink(file);
    rmdir(folder);
}

/* Files with some bytes changed are read or refused, and valid or not, but do no harm. */
static void test_garbled(void **state)
{
    static const char bytes[] = "0123456789FBIW,;()\n\r \"SEND_RCVUHA-x";
    const char right[] =
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0I1,0W1,0REDUCE_GRAD,0RESHARD\r\n"
        "1RECV_F0,1UNSHARD,1F0,1RECV_F1,1SEND_B0,(1F1;1B0)OVERLAP_F_B,1B1,1SEND_B1\r\n";
    struct random_source r = random_open();
    int n_read = 0, n_right = 0;
    for (int k = 0; k < n_cases(); k++) {
        char text[sizeof right];
        struct zr_pipe_report report;
        memcpy(text, right, sizeof right);
        for (int64_t n = random_below(&r, 4); n >= 0; n--)
            text[random_below(&r, sizeof right - 1)] = bytes[random_below(&r, sizeof bytes - 1)];
        struct zr_pipeline *p = read_text(text);
        n_read += p != NULL;
        if (p && zr_pipeline_check(p, &unit_cost, &report) == 0) {
            n_right++;
            zr_pipe_report_close(&report, p);
        }
        zr_pipeline_close(p);
    }
    assert_true(n_read > 0 && n_read < n_cases() && n_right < n_read);
}

static void test_costs(void **state)
{
    struct zr_pipe_cost cost = unit_cost;
    struct zr_pipeline *p;
    struct zr_pipe_report report;
    expect_ok(zr_pipeline_build(&p, ZR_1F1B, 1, 1, 4, false));
    for (int k = 0; k < 3; k++) {
        cost = unit_cost;
        *(k == 0 ? &cost.backward_ns : k == 1 ? &cost.move_ns : &cost.activation_bytes) = INT64_MAX / 3;
        assert_int_equal(zr_pipeline_check(p, &cost, &report), ZERO_ERR_ARG);
        assert_non_null(strstr(zr_error_text(), "63 bits"));
        assert_null(report.ranks);
    }
    cost = unit_cost;
    cost.weight_ns = cost.backward_ns + 1;
    assert_int_equal(zr_pipeline_check(p, &cost, &report), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "the cost of weights is above the cost of backward"));
    zr_pipeline_close(p);
}

/* A file cannot express pairs. */
static void test_pairs(void **state)
{
    for (int k = 0; k < 3; k++) { /* of the last, of three, of what does not compute */
        struct zr_pipeline *p = read_text(k < 2 ? "0F0,0F1,0F2,0B0,0B1,0B2\n" : "0UNSHARD,0F0,0B0\n");
        struct zr_pipe_report report;
        assert_non_null(p);
        p->rows[0].at[k == 0 ? 5 : 0].with_next = true;
        p->rows[0].at[1].with_next = k == 1;
        assert_int_equal(zr_pipeline_check(p, &unit_cost, &report), ZERO_ERR_ARG);
        assert_non_null(strstr(zr_error_text(), "has no other action to be computed with"));
        zr_pipeline_close(p);
    }
}

static void test_what_cannot_be_lowered(void **state)
{
    struct zr_pipe_cost free_forward = unit_cost;
    struct zr_pipeline *p = read_text("0UNSHARD,0F0,0B0\n"), *lowered;
    free_forward.forward_ns = 0;
    assert_int_equal(zr_pipeline_lower(&lowered, p, &unit_cost, 0), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "rank 0: 0UNSHARD: the schedule already has messages"));
    zr_pipeline_close(p);
    p = read_text("0F0,0B0\n");
    assert_int_equal(zr_pipeline_lower(&lowered, p, &free_forward, 0), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "0F0 takes no time"));
    zr_pipeline_close(p);
    p = read_text("0F0,0F1,1F0,1F1,(1B0;0F2)OVERLAP_F_B,0B0,1F2,1B1,0B1,1B2,0B2\n");
    assert_int_equal(zr_pipeline_lower(&lowered, p, &unit_cost, 1), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), "stages 1 and 0 at the same time, but only one may be gathered"));
    expect_ok(zr_pipeline_lower(&lowered, p, &unit_cost, 2));
    zr_pipeline_close(lowered);
    zr_pipeline_close(p);
    p = read_text("0F0,0B1\n");
    assert_int_equal(zr_pipeline_lower(&lowered, p, &unit_cost, 0), ZERO_ERR_ARG);
    assert_null(lowered);
    zr_pipeline_close(p);
}

static int all_of_it(void)
{
    struct zr_pipeline *p = NULL, *lowered = NULL;
    struct zr_pipe_report report;
    int err = zr_pipeline_build(&p, ZR_INTERLEAVED, 3, 2, 6, false);
    err = err ? err : zr_pipeline_lower(&lowered, p, &unit_cost, 1);
    err = err ? err : zr_pipeline_check(lowered, &unit_cost, &report);
    if (!err)
        zr_pipe_report_close(&report, lowered);
    zr_pipeline_close(lowered);
    zr_pipeline_close(p);
    return err;
}

static void test_no_memory(void **state)
{
    int64_t live = n_live;
    int err = ZERO_ERR_NOMEM;
    for (int64_t k = 0; err; k++) {
        n_allocs = 0;
        fail_at = k;
        err = all_of_it();
        fail_at = -1;
        assert_true(err == 0 || err == ZERO_ERR_NOMEM);
        assert_int_equal(n_live, live);
        assert_true(err || k > 40);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_published),
        cmocka_unit_test(test_forward_only),
        cmocka_unit_test(test_slots),
        cmocka_unit_test(test_slots_of_several),
        cmocka_unit_test(test_uneven),
        cmocka_unit_test(test_any_order),
        cmocka_unit_test(test_ties),
        cmocka_unit_test(test_ties_in_any_order),
        cmocka_unit_test(test_wrong),
        cmocka_unit_test(test_mutants),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_link),
        cmocka_unit_test(test_costs),
        cmocka_unit_test(test_pairs),
        cmocka_unit_test(test_garbled),
        cmocka_unit_test(test_what_cannot_be_lowered),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests_name("pipeline schedules", tests, NULL, NULL);
}
