/* SPDX-License-Identifier: Apache-2.0 */
/* test_cp.c: tests context parallelism: which rows a rank has; collectives over cp, beside tp; shifts that go
 * on while other calls are made; and training, which has the bits of as many data-parallel ranks. */
#include "test/cmocka.h"
#include "test/first_error.h"
#include "test/zero/sample.h"
#include "test/zero/toy_net.h"
#include "test/zero/where.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- rows ---- */

/* Every row belongs to one rank. With zigzag, causal attention is the same work for all: query p has p + 1
 * keys. */
static void check_rows(int32_t cp, int64_t rows, enum zero_cp_order order)
{
    int64_t first[2], n[2], pairs = -1, seen = 0;
    char *owner = calloc((size_t)rows + 1, 1);
    for (struct zero_place p = {.n_cp = cp}; p.cp < cp; p.cp++) {
        int64_t own_pairs = 0;
        assert_int_equal(zero_cp_rows(&p, rows, order, first, n), 0);
        assert_int_equal(n[0] + n[1], rows / cp);
        assert_true(order == ZERO_CP_ZIGZAG || n[1] == 0);
        for (int k = 0; k < 2; k++)
            for (int64_t i = first[k]; i < first[k] + n[k]; i++) {
                assert_true(i >= 0 && i < rows && !owner[i]++);
                own_pairs += i + 1;
                seen++;
            }
        assert_true(order != ZERO_CP_ZIGZAG || pairs < 0 || pairs == own_pairs);
        pairs = own_pairs;
    }
    assert_int_equal(seen, rows);
    free(owner);
}

static void rows_of_ranks(void **state)
{
    for (int32_t cp = 1; cp <= 9; cp++)
        for (int64_t k = 0; k < 4; k++) {
            check_rows(cp, 2 * cp * k, ZERO_CP_ZIGZAG);
            check_rows(cp, cp * k, ZERO_CP_CONTIGUOUS);
        }
    int64_t first[2] = {-7, -7}, n[2] = {-7, -7};
    const struct zero_place p = {.n_cp = 3, .cp = 2}, bad = {.n_cp = 3, .cp = 3};
    static const struct {
        int64_t rows;
        int order;
        const char *says;
    } refused[] = {
        {9, ZERO_CP_ZIGZAG, "rows is 9; allowed: 0 and more, a multiple of 6 (2 * cp, with ZERO_CP_ZIGZAG)"},
        {8, ZERO_CP_CONTIGUOUS,
         "rows is 8; allowed: 0 and more, a multiple of 3 (cp, with ZERO_CP_CONTIGUOUS)"},
        {-6, ZERO_CP_ZIGZAG, "rows is -6"},
        {6, 0, "order is 0; allowed: ZERO_CP_CONTIGUOUS, ZERO_CP_ZIGZAG"},
        {6, 3, "order is 3"}};
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        assert_int_equal(zero_cp_rows(&p, refused[i].rows, (enum zero_cp_order)refused[i].order, first, n),
                         ZERO_ERR_ARG);
        assert_non_null(strstr(zero_last_error(), refused[i].says));
    }
    assert_int_equal(zero_cp_rows(NULL, 6, ZERO_CP_ZIGZAG, first, n), ZERO_ERR_ARG);
    assert_int_equal(zero_cp_rows(&p, 6, ZERO_CP_ZIGZAG, NULL, n), ZERO_ERR_ARG);
    assert_int_equal(zero_cp_rows(&p, 6, ZERO_CP_ZIGZAG, first, NULL), ZERO_ERR_ARG);
    assert_int_equal(zero_cp_rows(&bad, 6, ZERO_CP_ZIGZAG, first, n), ZERO_ERR_ARG);
    assert_true(first[0] == -7 && n[1] == -7);
}

static void places(void **state)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_place p;
    cfg.launch.world = 96;
    cfg.launch.rendezvous = "tcp://127.0.0.1:4000";
    cfg.mesh = (struct zero_mesh){.pp = 2, .dp_replicate = 2, .dp_shard = 0, .cp = 3, .tp = 2};
    for (int32_t r = 0; r < 96; r++) {
        cfg.launch.rank = r;
        assert_int_equal(zero_find_place(&cfg, &p), 0);
        assert_true(p.n_cp == 3 && p.n_data == 8 && p.n_dp_shard == 4);
        assert_int_equal(p.data, p.dp_replicate * 4 + p.dp_shard);
        assert_int_equal(r, ((p.pp * 8 + p.data) * 3 + p.cp) * 2 + p.tp);
    }
}

/* ---- collectives ---- */

enum { MAX_N = 70000, MAX_CP = 4, BEHIND = 64 };

struct setup {
    int stage, cp, tp;
    bool check;
};

/* One rank's place and memory. */
struct rank {
    struct toy_rank *r;
    zero_ctx *z;
    struct zero_place p;
    float *src, *dst;
};

/* Small whole numbers, whose sums are exact. Ranks along other axes have others. */
static float number(const struct rank *k, int32_t cp, int64_t i)
{
    int64_t rank = k->p.rank + (cp - k->p.cp) * k->p.n_tp;
    return (float)((rank * 131 + i * 7) % 1009 - 500);
}

static void prepare(const struct rank *k, int64_t n_src, int64_t n_dst)
{
    for (int64_t i = 0; i < n_src; i++)
        k->src[i] = number(k, k->p.cp, i);
    memset(k->dst, 0xff, (size_t)(n_dst + BEHIND) * sizeof *k->dst);
}

static void expect(const struct rank *k, const char *what, int64_t n, int64_t bad)
{
    for (int64_t i = n; i < n + BEHIND; i++)
        bad += k->dst[i] == k->dst[i]; /* not NaN any more */
    if (bad)
        toy_wrong(k->r, "%s over cp %d, to %lld elements: %lld are wrong", what, k->p.n_cp, (long long)n,
                  (long long)bad);
}

static int sum_all(const struct rank *k, int64_t n)
{
    int64_t bad = 0;
    prepare(k, n, n);
    OR_RETURN(zero_all_reduce(k->z, ZERO_AXIS_CP, k->dst, k->src, n, ZERO_F32, ZERO_SUM));
    for (int64_t i = 0; i < n; i++) {
        float sum = 0;
        for (int32_t c = 0; c < k->p.n_cp; c++)
            sum += number(k, c, i);
        bad += k->dst[i] != sum;
    }
    expect(k, "sum", n, bad);
    return 0;
}

static int gather(const struct rank *k, int64_t n)
{
    int64_t bad = 0;
    prepare(k, n, n * k->p.n_cp);
    OR_RETURN(zero_all_gather(k->z, ZERO_AXIS_CP, k->dst, k->src, n, ZERO_F32));
    for (int32_t c = 0; c < k->p.n_cp; c++)
        for (int64_t i = 0; i < n; i++)
            bad += k->dst[c * n + i] != number(k, c, i);
    expect(k, "gather", n * k->p.n_cp, bad);
    return 0;
}

static int scatter(const struct rank *k, int64_t n)
{
    int64_t bad = 0;
    prepare(k, n * k->p.n_cp, n);
    OR_RETURN(zero_reduce_scatter(k->z, ZERO_AXIS_CP, k->dst, k->src, n, ZERO_F32));
    for (int64_t i = 0; i < n; i++) {
        float sum = 0;
        for (int32_t c = 0; c < k->p.n_cp; c++)
            sum += number(k, c, k->p.cp * n + i);
        bad += k->dst[i] != sum;
    }
    expect(k, "scatter", n, bad);
    return 0;
}

static int exchange(const struct rank *k, int64_t n)
{
    int64_t bad = 0;
    prepare(k, n * k->p.n_cp, n * k->p.n_cp);
    OR_RETURN(zero_all_to_all(k->z, ZERO_AXIS_CP, k->dst, k->src, n, ZERO_F32));
    for (int32_t c = 0; c < k->p.n_cp; c++)
        for (int64_t i = 0; i < n; i++)
            bad += k->dst[c * n + i] != number(k, c, k->p.cp * n + i);
    expect(k, "all-to-all", n * k->p.n_cp, bad);
    return 0;
}

/* Other calls over the axis may come while the shift is open. */
static int shift(const struct rank *k, enum zero_axis axis, int32_t by, int64_t n, bool between)
{
    const int32_t size = axis == ZERO_AXIS_CP ? k->p.n_cp : k->p.n_tp,
                  at = axis == ZERO_AXIS_CP ? k->p.cp : k->p.tp, from = ((at - by) % size + size) % size;
    struct rank sender = *k;
    float other[33];
    int64_t bad = 0;
    if (axis == ZERO_AXIS_TP) { /* as if the sender were this rank */
        sender.p.rank += from - at;
        sender.p.cp = 0;
    }
    prepare(k, n, n);
    OR_RETURN(zero_shift_begin(k->z, axis, by, k->dst, k->src, n, ZERO_F32));
    for (int i = 0; i < 33; i++)
        other[i] = (float)(k->p.cp + i);
    if (between) {
        OR_RETURN(zero_all_reduce(k->z, ZERO_AXIS_CP, other, other, 33, ZERO_F32, ZERO_SUM));
        for (int i = 0; i < 33; i++)
            bad += other[i] != (float)(k->p.n_cp * (k->p.n_cp - 1) / 2 + k->p.n_cp * i);
    }
    OR_RETURN(zero_shift_end(k->z, axis));
    for (int64_t i = 0; i < n; i++)
        bad += k->dst[i] != number(&sender, axis == ZERO_AXIS_CP ? from : 0, i);
    expect(k, "shift", n, bad);
    return 0;
}

static int64_t cp_bytes(const struct rank *k)
{
    struct zero_stats stats = {0};
    return zero_get_stats(k->z, &stats) ? -1 : stats.cp_bytes;
}

/* What a rank receives is known exactly, also where an array goes in several pieces. */
static int count_bytes(const struct rank *k)
{
    const int64_t n = MAX_N, others = k->p.n_cp - 1;
    int64_t before = cp_bytes(k);
    OR_RETURN(gather(k, n));
    int64_t gathered = cp_bytes(k) - before;
    OR_RETURN(exchange(k, n));
    int64_t exchanged = cp_bytes(k) - before - gathered;
    OR_RETURN(shift(k, ZERO_AXIS_CP, 1, n, false));
    int64_t shifted = cp_bytes(k) - before - gathered - exchanged;
    if (gathered != n * 4 * others || exchanged != n * 4 * others || shifted != (others ? n * 4 : 0))
        toy_wrong(k->r, "%lld, %lld and %lld bytes were received", (long long)gathered, (long long)exchanged,
                  (long long)shifted);
    return 0;
}

static int call_all(const struct rank *k)
{
    static const int64_t sizes[] = {0, 1, 33, 1000, MAX_N};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        OR_RETURN(sum_all(k, sizes[i]));
        OR_RETURN(gather(k, sizes[i]));
        OR_RETURN(scatter(k, sizes[i]));
        OR_RETURN(exchange(k, sizes[i]));
        for (int32_t by = -3; by <= 5; by++)
            OR_RETURN(shift(k, ZERO_AXIS_CP, by, sizes[i], by % 2));
        OR_RETURN(shift(k, ZERO_AXIS_TP, 1, sizes[i], i % 2));
    }
    return count_bytes(k);
}

static int wrong_calls(const struct rank *k)
{
    struct toy_rank *r = k->r;
    zero_ctx *z = k->z;
    float *x = k->src, *y = k->dst;
    toy_expect(r, zero_all_to_all(NULL, ZERO_AXIS_CP, y, x, 4, ZERO_F32), ZERO_ERR_ARG, "z is NULL");
    toy_expect(r, zero_all_to_all(z, ZERO_AXIS_PP, y, x, 4, ZERO_F32), ZERO_ERR_ARG,
               "zero_all_to_all: axis is 3; allowed: ZERO_AXIS_TP, ZERO_AXIS_CP");
    toy_expect(r, zero_all_to_all(z, ZERO_AXIS_CP, x, x, 4, ZERO_F32), ZERO_ERR_ARG, "overlap");
    toy_expect(r, zero_all_to_all(z, ZERO_AXIS_CP, x + 4 * k->p.n_cp - 1, x, 4, ZERO_F32), ZERO_ERR_ARG,
               "zero_all_to_all: dst and src overlap; allowed: no overlap");
    toy_expect(r, zero_all_to_all(z, ZERO_AXIS_CP, y, x, -1, ZERO_F32), ZERO_ERR_ARG, "n is -1");
    toy_expect(r, zero_shift_begin(z, ZERO_AXIS_CP, 1, x + 3, x, 4, ZERO_F32), ZERO_ERR_ARG,
               "zero_shift_begin: dst and src overlap");
    toy_expect(r, zero_shift_begin(z, ZERO_AXIS_CP, 1, y, x, 4, (enum zero_dtype)9), ZERO_ERR_ARG,
               "zero_shift_begin: dtype is 9");
    toy_expect(r, zero_shift_end(z, ZERO_AXIS_CP), ZERO_ERR_ORDER, "zero_shift_end: no shift is open");
    OR_RETURN(zero_shift_begin(z, ZERO_AXIS_CP, 1, y, x, 4, ZERO_F32));
    toy_expect(r, zero_shift_begin(z, ZERO_AXIS_CP, 1, y + 8, x, 4, ZERO_F32), ZERO_ERR_ORDER,
               "zero_shift_begin: a shift is open on this axis");
    toy_expect(r, zero_shift_end(z, ZERO_AXIS_TP), ZERO_ERR_ORDER, "zero_shift_end: no shift is open");
    return zero_shift_end(z, ZERO_AXIS_CP);
}

/* Prepares what zero_wrap takes, and the rank's arrays. */
static void open_rank(struct rank *k, const struct setup *s, struct zero_config *cfg, struct toy *m)
{
    cfg->mesh.cp = s->cp;
    cfg->mesh.tp = s->tp ? s->tp : 1;
    cfg->debug.check = s->check;
    k->src = malloc((MAX_N * MAX_CP + BEHIND) * sizeof(float));
    k->dst = malloc((MAX_N * MAX_CP + BEHIND) * sizeof(float));
    where_open(k->r->rank, cfg);
    toy_make(m);
}

static void collectives_of_rank(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct zero_config cfg = toy_config(r, s->stage);
    struct rank k = {.r = r};
    struct toy m;
    cfg.debug.log = toy_forget_line;
    open_rank(&k, s, &cfg, &m);
    int err = 0;
    TOY_TRY(zero_wrap(&k.z, m.table, TOY_TENSORS, &cfg));
    if (!err)
        zero_find_place(&cfg, &k.p);
    TOY_TRY(call_all(&k));
    TOY_TRY(wrong_calls(&k));
    TOY_TRY(zero_unwrap(&k.z));
    toy_free(&m);
    free(k.src);
    free(k.dst);
}

static void collectives(void **state)
{
    static const int meshes[][3] = {{1, 1, 1}, {2, 2, 1}, {3, 3, 1}, {4, 4, 1},
                                    {4, 2, 2}, {8, 2, 2}, {6, 3, 1}};
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        struct setup s = {.stage = (int)i % 4, .cp = meshes[i][1], .tp = meshes[i][2], .check = i % 2};
        struct toy_rank r[MAX_TOY_RANKS];
        char what[64];
        snprintf(what, sizeof what, "world %d, cp %d, tp %d", meshes[i][0], s.cp, s.tp);
        toy_run(meshes[i][0], collectives_of_rank, &s, r, what);
    }
}

/* ---- check mode ---- */

static char said[4096];
static pthread_mutex_t said_lock = PTHREAD_MUTEX_INITIALIZER;

static void keep_line(void *arg, const char *line)
{
    if (!strstr(line, " of cp"))
        return;
    pthread_mutex_lock(&said_lock);
    snprintf(said + strlen(said), sizeof said - strlen(said), "%s\n", line);
    pthread_mutex_unlock(&said_lock);
}

/* A use that check mode notices. */
enum use {
    RIGHT_ROWS,
    MISSING_ROW,
    SHARED_ROW,
    SHARED_END,
    SAME_ROWS,
    SAME_SHIFTED,
    OTHER_ORDER,
    OTHER_ROW,
    USES
};

static const struct {
    int code;
    const char *says, *logs;
} noticed[USES] = {
    [MISSING_ROW] = {ZERO_ERR_MISMATCH, "zero_expect_rows: check: no rank of cp has row 7", NULL},
    [SHARED_ROW] = {ZERO_ERR_MISMATCH, "check: row 2 belongs to two ranks of cp, rank 0 and rank 1", NULL},
    [SHARED_END] = {ZERO_ERR_MISMATCH, "check: row 10 belongs to two ranks of cp, rank 0 and rank 1", NULL},
    [SAME_ROWS] = {0, NULL, "src is the same on rank 1 and rank 2 of cp: each must have rows of its own"},
    [SAME_SHIFTED] = {0, NULL, "zero_shift_begin in step 1: src is the same on rank 1 and rank 2 of cp"},
    [OTHER_ORDER] = {0, NULL, "rank 0 and rank 2 of cp have given this array and the one before in opposite"},
    [OTHER_ROW] = {ZERO_ERR_MISMATCH, "src is not the same on all ranks of cp: rank 0 and rank 1 differ",
                   NULL},
};

static int misuse(const struct rank *k, enum use use)
{
    const int64_t half = 100;
    int64_t first[2], n[2];
    OR_RETURN(zero_cp_rows(&k->p, 12, ZERO_CP_ZIGZAG, first, n));
    n[1] -= use == MISSING_ROW && k->p.cp == 2;
    n[0] += use == SHARED_ROW && k->p.cp == 0;
    n[1] += 2 * (use == SHARED_END && k->p.cp == 1);
    if (use <= SHARED_END)
        return zero_expect_rows(k->z, 12, first, n);
    prepare(k, 2 * half, 2 * half * k->p.n_cp);
    for (int64_t i = 0; i < 2 * half && use <= SAME_SHIFTED && k->p.cp == 2; i++)
        k->src[i] = number(k, 1, i);
    if (use == SAME_SHIFTED)
        return FIRST_ERROR(zero_shift_begin(k->z, ZERO_AXIS_CP, 1, k->dst, k->src, half, ZERO_F32),
                           zero_shift_end(k->z, ZERO_AXIS_CP));
    if (use == OTHER_ROW)
        return zero_expect_equal(k->z, ZERO_AXIS_CP, k->src, half, ZERO_F32);
    const bool turned = use == OTHER_ORDER && k->p.cp == 2;
    OR_RETURN(zero_all_gather(k->z, ZERO_AXIS_CP, k->dst, k->src + (turned ? half : 0), half, ZERO_F32));
    return zero_all_gather(k->z, ZERO_AXIS_CP, k->dst, k->src + (turned ? 0 : half), half, ZERO_F32);
}

static void checked_rank(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct zero_config cfg = toy_config(r, 2);
    struct rank k = {.r = r};
    struct toy m;
    int err = 0;
    cfg.debug.log = keep_line;
    open_rank(&k, s, &cfg, &m);
    TOY_TRY(zero_wrap(&k.z, m.table, TOY_TENSORS, &cfg));
    TOY_TRY(zero_find_place(&cfg, &k.p));
    if (!err && s->check && noticed[s->stage].code)
        toy_expect(r, misuse(&k, (enum use)s->stage), noticed[s->stage].code, noticed[s->stage].says);
    else
        TOY_TRY(misuse(&k, (enum use)s->stage));
    zero_unwrap(&k.z);
    toy_free(&m);
    free(k.src);
    free(k.dst);
}

/* Without check mode nothing is said. */
static void what_check_mode_says(void **state)
{
    for (int use = 0; use < USES; use++)
        for (int check = 0; check < 2; check++) {
            struct setup s = {.stage = use, .cp = 3, .check = check};
            struct toy_rank r[MAX_TOY_RANKS];
            char what[64];
            snprintf(what, sizeof what, "use %d, check %d", use, check);
            said[0] = 0;
            toy_run(3, checked_rank, &s, r, what);
            const char *logs = check ? noticed[use].logs : NULL;
            if (logs ? !strstr(said, logs) : *said && !noticed[use].code)
                fail_msg("%s: \"%s\" is not in \"%s\"", what, logs ? logs : "nothing", said);
        }
}

/* ---- ranks that differ ---- */

/* One rank gathers as many bytes in another dtype. Over NCCL this is found when the ranks next compare. */
static void differing_rank(struct toy_rank *r)
{
    struct zero_config cfg = toy_config(r, 1);
    struct toy m;
    zero_ctx *z = NULL;
    float *src = calloc(32, sizeof *src), *dst = calloc(64, sizeof *dst);
    int err = 0, failed = 0;
    cfg.mesh.cp = 2;
    cfg.debug.log = toy_forget_line;
    where_open(r->rank, &cfg);
    toy_make(&m);
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    for (int step = 0; !err && !failed && step < 4; step++) {
        const bool other = r->rank == 1 && step == 1;
        failed = failed ? failed : toy_forward(&m, z, true);
        failed = failed ? failed
                        : zero_all_gather(z, ZERO_AXIS_CP, dst, src, other ? 64 : 32,
                                          other ? ZERO_BF16 : ZERO_F32);
        failed = failed ? failed : toy_backward(&m, z, true, step, r->rank);
        failed = failed ? failed : zero_step(z, 0.01f, NULL);
    }
    if (!err)
        toy_expect(r, failed, ZERO_ERR_MISMATCH, "zero_all_gather");
    zero_unwrap(&z);
    toy_free(&m);
    free(src);
    free(dst);
}

static void calls_that_differ(void **state)
{
    struct toy_rank r[MAX_TOY_RANKS];
    toy_run(4, differing_rank, NULL, r, "ranks of cp make different calls");
}

/* Check mode adds collectives, so all ranks must be in it. */
static void checked_alone(struct toy_rank *r)
{
    struct zero_config cfg = toy_config(r, 1);
    struct toy m;
    zero_ctx *z = NULL;
    cfg.mesh.cp = 2;
    cfg.debug.check = r->rank == 1;
    cfg.debug.log = toy_forget_line;
    toy_make(&m);
    toy_expect(r, zero_wrap(&z, m.table, TOY_TENSORS, &cfg), ZERO_ERR_MISMATCH,
               "check is 1 on rank 1 and 0 on rank 0");
    toy_free(&m);
}

static void check_mode_of_one_rank(void **state)
{
    struct toy_rank r[MAX_TOY_RANKS];
    toy_run(2, checked_alone, NULL, r, "one rank checks");
}

/* ---- shifts that are not ended, or that fail ---- */

static _Atomic int n_missing;

static void count_missing(void *arg, const char *line)
{
    n_missing += strstr(line, "zero_shift_end is missing") != NULL;
}

/* Rank 1 leaves before it shifts. Otherwise no rank ends its shift. */
static void leaving_rank(struct toy_rank *r)
{
    const bool *leaves = r->arg;
    struct zero_config cfg = toy_config(r, 1);
    struct toy m;
    zero_ctx *z = NULL;
    float *src = calloc(MAX_N, sizeof *src), *dst = calloc(MAX_N, sizeof *dst);
    int err = 0;
    cfg.mesh.cp = 2;
    cfg.launch.timeout_ms = 3000;
    cfg.debug.log = count_missing;
    where_open(r->rank, &cfg);
    toy_make(&m);
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    if (!err && !(*leaves && r->rank == 1))
        TOY_TRY(zero_shift_begin(z, ZERO_AXIS_CP, 1, dst, src, MAX_N, ZERO_F32));
    if (!err && *leaves && r->rank == 0) {
        int ended = zero_shift_end(z, ZERO_AXIS_CP), again = zero_shift_end(z, ZERO_AXIS_CP);
        if (!ended || again != ended)
            toy_wrong(r, "a shift without the other rank ended with %d, and again with %d", ended, again);
    }
    zero_unwrap(&z);
    toy_free(&m);
    free(src);
    free(dst);
}

static void shifts_that_stay_open(void **state)
{
    for (int leaves = 0; leaves < 2; leaves++) {
        bool arg = leaves;
        struct toy_rank r[MAX_TOY_RANKS];
        n_missing = 0;
        toy_run(2, leaving_rank, &arg, r, leaves ? "a rank leaves" : "no rank ends its shift");
        assert_int_equal(n_missing, leaves ? 0 : 2);
    }
}

/* ---- training ---- */

static _Atomic int n_lines;

static void count_line(void *arg, const char *line)
{
    n_lines += strstr(line, "no collective over it") != NULL;
}

/* The toy model has no rows. Its gradients belong to a rank, so ranks along cp are like data-parallel
 * ranks. */
static void train(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct zero_config cfg = toy_config(r, s->stage);
    struct zero_stats stats;
    struct toy m;
    zero_ctx *z = NULL;
    int err = 0;
    cfg.mesh.cp = s->cp;
    if (s->stage > 3)
        cfg.mesh.dp_replicate = 2;
    cfg.debug.log = count_line;
    where_open(r->rank, &cfg);
    toy_make(&m);
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    for (int step = 0; step < 3; step++) {
        TOY_TRY(toy_forward(&m, z, true));
        TOY_TRY(toy_backward(&m, z, true, step, step * r->world + r->rank));
        TOY_TRY(zero_expect_equal(z, ZERO_AXIS_CP, &step, 1, ZERO_I32)); /* does not count as a use of cp */
        TOY_TRY(zero_step(z, 0.01f, NULL));
    }
    TOY_TRY(toy_hash(z, 2, &r->hash));
    TOY_TRY(zero_get_stats(z, &stats));
    if (!err && memcmp(&stats.allocated, &stats.planned, sizeof stats.planned))
        toy_wrong(r, "allocated is not planned");
    if (!err && stats.n_micro != 3 * stats.place.n_data)
        toy_wrong(r, "%lld micro-batches of %d parts", (long long)stats.n_micro, stats.place.n_data);
    TOY_TRY(zero_unwrap(&z));
    toy_free(&m);
}

static void the_same_bits_as_data_parallel(void **state)
{
    for (int world = 2; world <= 8; world *= 2) {
        uint64_t want = 0;
        for (int stage = 0; stage < TOY_STAGES; stage++)
            for (int cp = 1; cp <= world; cp *= 2) {
                struct setup s = {.stage = stage, .cp = cp};
                struct toy_rank r[MAX_TOY_RANKS];
                char what[64];
                if ((stage > 3 && world < 2 * cp) || (want && !sample_has()))
                    continue;
                snprintf(what, sizeof what, "world %d, stage %d, cp %d", world, stage, cp);
                n_lines = 0;
                toy_run(world, train, &s, r, what);
                want = want ? want : r[0].hash;
                if (r[0].hash != want)
                    fail_msg("%s: other bits", what);
                assert_int_equal(n_lines, cp > 1);
            }
    }
}

/* ---- checkpoints ---- */

/* The folder, which a rank loads from, or saves into after some steps. */
struct saved {
    char folder[64];
    int cp;
    bool loads;
};

static void saving_rank(struct toy_rank *r)
{
    const struct saved *s = r->arg;
    struct zero_config cfg = toy_config(r, 3);
    struct toy m;
    zero_ctx *z = NULL;
    int err = 0;
    cfg.mesh.cp = s->cp;
    cfg.debug.log = toy_forget_line;
    where_open(r->rank, &cfg);
    toy_make(&m);
    TOY_TRY(zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    if (s->loads)
        TOY_TRY(zero_load(z, s->folder));
    for (int step = 0; !s->loads && step < 2; step++) {
        TOY_TRY(toy_forward(&m, z, true));
        TOY_TRY(toy_backward(&m, z, true, step, r->rank));
        TOY_TRY(zero_step(z, 0.01f, NULL));
    }
    if (!s->loads)
        TOY_TRY(zero_save(z, s->folder, NULL));
    TOY_TRY(toy_hash(z, 2, &r->hash));
    TOY_TRY(zero_unwrap(&z));
    toy_free(&m);
}

static void checkpoints_load_on_any_cp(void **state)
{
    static const int meshes[][2] = {{4, 2}, {4, 1}, {4, 4}, {2, 2}, {1, 1}, {6, 3}};
    struct saved s = {.folder = "/tmp/test_cp.XXXXXX"};
    struct toy_rank r[MAX_TOY_RANKS];
    char what[64], command[128];
    uint64_t want = 0;
    assert_non_null(mkdtemp(s.folder));
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        s.cp = meshes[i][1];
        s.loads = i > 0;
        snprintf(what, sizeof what, "world %d, cp %d", meshes[i][0], s.cp);
        toy_run(meshes[i][0], saving_rank, &s, r, what);
        want = i ? want : r[0].hash;
        if (r[0].hash != want)
            fail_msg("%s: other values", what);
    }
    snprintf(command, sizeof command, "rm -r %s", s.folder);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_of_ranks),
        cmocka_unit_test(places),
        cmocka_unit_test(collectives),
        cmocka_unit_test(what_check_mode_says),
        cmocka_unit_test(calls_that_differ),
        cmocka_unit_test(check_mode_of_one_rank),
        cmocka_unit_test(shifts_that_stay_open),
        cmocka_unit_test(the_same_bits_as_data_parallel),
        cmocka_unit_test(checkpoints_load_on_any_cp),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
