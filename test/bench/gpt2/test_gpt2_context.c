/* SPDX-License-Identifier: Apache-2.0 */
/* test_gpt2_context.c: tests the model's context parallelism. The ranks are threads of this process, which
 * exchange values through memory of the host. Compiled once per dtype, as the model is. */
#include "bench/gpt2/gpt2.h"
#include "test/bench/gpt2/attention_reference.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"

#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

#ifdef MODEL_BF16 /* 8 bits of fraction in every activation */
#define TOLERANCE      0.01
#define GRAD_TOLERANCE 0.06
#else
#define TOLERANCE      2e-6
#define GRAD_TOLERANCE 2e-5
#endif

#ifdef MODEL_TEST_CUDA
#define CUDA true
#else
#define CUDA false
#endif

enum { MAX_CP = 4, B = 2, LAYERS = 2 };

static struct random_source rng;

/* ---- ranks ---- */

struct group {
    int32_t cp;
    pthread_barrier_t met;
    /* The arguments of each rank's current call. */
    char *said[MAX_CP];
    struct model_rows rows[MAX_CP];
};

struct member {
    struct group *group;
    struct compute compute;
    struct model m;
    /* Whole rows, (B, context), from which a rank takes its own. */
    const int32_t *tokens, *targets, *document_start;
    /* An open shift. */
    float *dst;
    const float *src;
    int64_t n;
    /* (B, context) The losses of this rank's tokens, at their places in the whole rows. */
    double *losses, loss;
    void (*run)(struct member *r);
    /* Arrays of attention, (B, context, ...). A rank reads its tokens of the first two, and writes those of
     * the others. */
    const real *qkv, *datty;
    real *atty, *dqkv;
    /* Bytes that this rank received of others. */
    int64_t received;
};

static int move(struct member *r, void *dst, const void *src, int64_t bytes)
{
    int err = r->compute.dev->ops->copy(r->compute.stream, dst, src, bytes);
    return err ? err : r->compute.dev->ops->stream_sync(r->compute.stream);
}

/* Shows this rank's bytes to all. They are valid until `part`. */
static int meet(struct member *r, const void *src, int64_t bytes)
{
    struct group *g = r->group;
    g->said[r->m.cp.part] = malloc((size_t)bytes);
    int err = move(r, g->said[r->m.cp.part], src, bytes);
    pthread_barrier_wait(&g->met);
    return err;
}

/* Copies the call's result to dst, and waits until no rank reads what was said. */
static int part(struct member *r, void *dst, const void *result, int64_t bytes)
{
    int err = move(r, dst, result, bytes);
    pthread_barrier_wait(&r->group->met);
    free(r->group->said[r->m.cp.part]);
    return err;
}

static int gather(void *arg, real *dst, const real *src, int64_t n)
{
    struct member *r = arg;
    size_t bytes = (size_t)n * sizeof *src;
    int err = meet(r, src, (int64_t)bytes);
    char *all = malloc((size_t)r->group->cp * bytes);
    for (int32_t c = 0; c < r->group->cp; c++)
        memcpy(all + (size_t)c * bytes, r->group->said[c], bytes);
    err = part(r, dst, all, r->group->cp * (int64_t)bytes) || err;
    r->received += (r->group->cp - 1) * (int64_t)bytes;
    free(all);
    return err;
}

static int scatter(void *arg, float *dst, const float *src, int64_t n)
{
    struct member *r = arg;
    int err = meet(r, src, r->group->cp * n * (int64_t)sizeof *src);
    float *sum = calloc((size_t)n, sizeof *sum);
    for (int32_t c = 0; c < r->group->cp; c++)
        for (int64_t i = 0; i < n; i++)
            sum[i] += ((const float *)(const void *)r->group->said[c])[r->m.cp.part * n + i];
    err = part(r, dst, sum, n * (int64_t)sizeof *sum) || err;
    r->received += (r->group->cp - 1) * n * (int64_t)sizeof *sum;
    free(sum);
    return err;
}

static int exchange(void *arg, real *dst, const real *src, int64_t n)
{
    struct member *r = arg;
    size_t bytes = (size_t)n * sizeof *src;
    int err = meet(r, src, r->group->cp * (int64_t)bytes);
    char *all = malloc((size_t)r->group->cp * bytes);
    for (int32_t c = 0; c < r->group->cp; c++)
        memcpy(all + (size_t)c * bytes, r->group->said[c] + (size_t)r->m.cp.part * bytes, bytes);
    err = part(r, dst, all, r->group->cp * (int64_t)bytes) || err;
    r->received += (r->group->cp - 1) * (int64_t)bytes;
    free(all);
    return err;
}

/* Until the shift ends dst is full of NaN. src is read at the end, so that a change of it shows. */
static int shift_begin(void *arg, float *dst, const float *src, int64_t n)
{
    struct member *r = arg;
    float *nans = malloc((size_t)n * sizeof *nans);
    memset(nans, 0xFF, (size_t)n * sizeof *nans);
    int err = move(r, dst, nans, n * (int64_t)sizeof *nans);
    free(nans);
    if (r->dst)
        return zr_fail(ZERO_ERR_ORDER, "a shift is open");
    r->dst = dst;
    r->src = src;
    r->n = n;
    return err;
}

static int shift_end(void *arg)
{
    struct member *r = arg;
    int64_t bytes = r->n * (int64_t)sizeof(float);
    int err = meet(r, r->src, bytes);
    err = part(r, r->dst, r->group->said[(r->m.cp.part - 1 + r->group->cp) % r->group->cp], bytes) || err;
    r->dst = NULL;
    r->received += bytes;
    return err;
}

/* Written by hand, not with the library's zero_cp_rows. */
static void cut_rows(struct group *g, const struct model_config *c)
{
    int64_t T = c->context / g->cp;
    for (int32_t i = 0; i < g->cp; i++)
        g->rows[i] = c->cp_order == MODEL_CP_CONTIGUOUS
                         ? (struct model_rows){{i * T}, {T}}
                         : (struct model_rows){{i * (T / 2), (2 * g->cp - 1 - i) * (T / 2)}, {T / 2, T / 2}};
}

/* ---- a batch on one model, and on ranks ---- */

struct batch {
    int32_t *tokens, *targets, *document_start;
};

static void take_rows(struct member *r)
{
    struct model *m = &r->m;
    const struct model_rows own = model_rows_of(m, m->cp.part);
    int64_t context = m->config.context;
    for (int64_t b = 0, to = 0; b < m->B; b++)
        for (int i = 0; i < 2; i++)
            for (int64_t t = own.first[i]; t < own.first[i] + own.n[i]; t++, to++) {
                m->tokens[to] = r->tokens[b * context + t];
                m->targets[to] = r->targets[b * context + t];
                if (m->config.documents)
                    m->positions[to] = (int32_t)t - r->document_start[b * context + t];
            }
    if (m->config.documents)
        memcpy(m->document_start, r->document_start, (size_t)(m->B * context) * sizeof(int32_t));
}

static void put_losses(struct member *r)
{
    struct model *m = &r->m;
    const struct model_rows own = model_rows_of(m, m->cp.part);
    double *own_losses = malloc((size_t)model_own_tokens(m) * sizeof *own_losses), *from = own_losses;
    m->err = move(r, own_losses, m->losses, model_own_tokens(m) * (int64_t)sizeof *own_losses);
    for (int64_t b = 0; b < m->B; b++)
        for (int i = 0; i < 2; i++)
            for (int64_t t = own.first[i]; t < own.first[i] + own.n[i]; t++)
                r->losses[b * m->config.context + t] = *from++;
    free(own_losses);
}

/* A failure ends the program, because the other ranks wait for this one. */
static void die_if_failed(const struct member *r, int err)
{
    if (err) {
        fprintf(stderr, "rank %d of %lld: %s\n", r->m.cp.part, (long long)r->m.config.cp, zr_error_text());
        _exit(1);
    }
}

static void pass_backward(struct model *m, enum model_computes computes)
{
    model_begin_backward(m, computes);
    model_head_backward(m);
    for (int64_t l = m->config.layers; l-- > 0;)
        model_layer_backward(m, l);
    model_embed_backward(m);
    model_end_backward(m);
}

/* With two_parts, a backward pass in its two parts. */
static void run_model(struct member *r)
{
    struct model *m = &r->m;
    m->err = model_next_batch(m);
    take_rows(r);
    model_send_batch(m);
    model_embed_forward(m);
    for (int64_t l = 0; l < m->config.layers; l++)
        model_layer_forward(m, l);
    model_head_forward(m);
    put_losses(r);
    pass_backward(m, m->config.two_parts ? MODEL_INPUTS : MODEL_ALL);
    if (m->config.two_parts)
        pass_backward(m, MODEL_WEIGHTS);
    die_if_failed(r, m->err || model_send_loss(m) || model_take_loss(m, &r->loss));
}

static void poison(struct member *r, const struct model_block *block)
{
    void *nans = malloc((size_t)block->bytes);
    memset(nans, 0xFF, (size_t)block->bytes);
    die_if_failed(r, move(r, block->p, nans, block->bytes));
    free(nans);
}

static void open_member(struct member *r, struct group *g, const struct model_config *c, int32_t part_number)
{
    r->group = g;
    assert_int_equal(compute_open(&r->compute, CUDA, 0, 1), 0);
    assert_int_equal(model_open(&r->m, c, B, &r->compute), 0);
    assert_int_equal(model_open_params(&r->m, 7), 0);
    assert_int_equal(model_open_grads(&r->m), 0);
    if (c->cp > 1)
        r->m.cp = (struct model_cp){.part = part_number,
                                    .rows = g->rows,
                                    .gather = gather,
                                    .scatter = scatter,
                                    .exchange = exchange,
                                    .shift_begin = shift_begin,
                                    .shift_end = shift_end,
                                    .arg = r};
    poison(r, &r->m.kept[0].acts_memory);
    poison(r, &r->m.kept[0].stats_memory);
}

static void close_member(struct member *r)
{
    model_close(&r->m);
    compute_close(&r->compute);
}

static void *start(void *arg)
{
    struct member *r = arg;
    r->run(r);
    return NULL;
}

/* Opens a model on each rank, which calls run(). The ranks' models stay open. */
static void run_ranks(struct member *r, struct group *g, const struct model_config *c, const struct batch *b,
                      double *losses, void (*run)(struct member *r))
{
    pthread_t threads[MAX_CP];
    *g = (struct group){.cp = c->cp > 1 ? (int32_t)c->cp : 1};
    cut_rows(g, c);
    assert_int_equal(pthread_barrier_init(&g->met, NULL, (unsigned)g->cp), 0);
    for (int32_t i = 0; i < g->cp; i++) {
        r[i].tokens = b->tokens;
        r[i].targets = b->targets;
        r[i].document_start = b->document_start;
        r[i].losses = losses;
        r[i].run = run;
        open_member(&r[i], g, c, i);
    }
    for (int32_t i = 0; i < g->cp; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, start, &r[i]), 0);
    for (int32_t i = 0; i < g->cp; i++)
        pthread_join(threads[i], NULL);
    pthread_barrier_destroy(&g->met);
}

/* ---- the result of a batch ---- */

/* The mean of the losses, each token's loss, and the mean gradient of the ranks in double. */
struct result {
    double loss, *losses, *grads;
    int64_t n_grads, activation_bytes, statistics_bytes;
};

static struct result result_of(const struct model_config *c, const struct batch *b)
{
    struct member r[MAX_CP] = {0};
    struct group g;
    struct result out = {.losses = calloc((size_t)(B * c->context), sizeof(double))};
    run_ranks(r, &g, c, b, out.losses, run_model);
    out.n_grads = r[0].m.grads_memory.bytes / (int64_t)sizeof(real);
    out.grads = calloc((size_t)out.n_grads, sizeof *out.grads);
    out.activation_bytes = model_activation_bytes(&r[0].m);
    out.statistics_bytes = r[0].m.kept[0].stats_memory.bytes;
    real *x = malloc((size_t)out.n_grads * sizeof *x);
    for (int32_t i = 0; i < g.cp; i++) {
        assert_int_equal(move(&r[i], x, r[i].m.grads_memory.p, r[i].m.grads_memory.bytes), 0);
        for (int64_t k = 0; k < out.n_grads; k++)
            out.grads[k] += (double)to_float(x[k]) / g.cp;
        out.loss += r[i].loss / g.cp;
        close_member(&r[i]);
    }
    free(x);
    return out;
}

static void free_result(struct result *r)
{
    free(r->losses);
    free(r->grads);
}

static void draw_batch(struct batch *b, const struct model_config *c)
{
    int64_t n = B * c->context;
    b->tokens = malloc((size_t)n * sizeof *b->tokens);
    b->targets = malloc((size_t)n * sizeof *b->targets);
    b->document_start = calloc((size_t)n, sizeof *b->document_start);
    for (int64_t i = 0; i < n; i++) {
        b->tokens[i] = (int32_t)random_below(&rng, c->vocab);
        b->targets[i] = (int32_t)random_below(&rng, c->vocab);
        if (c->documents) /* one token in 8 begins a document */
            b->document_start[i] =
                (int32_t)(i % c->context == 0 || random_below(&rng, 8) == 0 ? i % c->context
                                                                            : b->document_start[i - 1]);
    }
}

static void free_batch(struct batch *b)
{
    free(b->tokens);
    free(b->targets);
    free(b->document_start);
}

static const char *name_of(const struct model_config *c)
{
    static char text[128];
    snprintf(text, sizeof text, "cp %lld, %s, %s%s%s", (long long)c->cp,
             option_word_of(model_cp_forms, c->cp_form), option_word_of(model_cp_orders, c->cp_order),
             c->documents ? ", documents" : "", c->cp_heads ? ", some heads" : "");
    return text;
}

static double distance(const double *x, const double *y, int64_t n, double *size)
{
    double d = 0;
    *size = 0;
    for (int64_t i = 0; i < n; i++) {
        d += (x[i] - y[i]) * (x[i] - y[i]);
        *size += y[i] * y[i];
    }
    *size = sqrt(*size);
    return sqrt(d);
}

static void check_result(const struct model_config *c, const struct result *got, const struct result *want)
{
    double size;
    for (int64_t i = 0; i < B * c->context; i++)
        if (!(fabs(got->losses[i] - want->losses[i]) <= TOLERANCE * want->losses[i]))
            fail_msg("%s: token %lld: loss %.9g, not %.9g", name_of(c), (long long)i, got->losses[i],
                     want->losses[i]);
    if (!(fabs(got->loss - want->loss) <= TOLERANCE * want->loss))
        fail_msg("%s: loss %.9g, not %.9g", name_of(c), got->loss, want->loss);
    double error = distance(got->grads, want->grads, want->n_grads, &size);
    if (!(error <= GRAD_TOLERANCE * size))
        fail_msg("%s: gradients differ by %.3g of their size", name_of(c), error / size);
}

static struct model_config with_cp(struct model_config c, int64_t cp, int form, int order)
{
    c.cp = cp;
    c.cp_form = form;
    c.cp_order = order;
    return c;
}

/* Heads for 2, 3 and 4 ranks, and rows for as many ranks in zigzag order. */
static const struct model_config whole_model = {
    .ops = &gpt2_ops, .layers = LAYERS, .heads = 12, .channels = 96, .context = 72, .vocab = 37};

/* The stand-in for a GPU is slow, so there each form has one layout, and some rows are short. */
#ifdef MODEL_TEST_STAND_IN
#define HAS_LAYOUT(cp, form, order) ((cp) == (form) + 1 && (order) == MODEL_CP_ZIGZAG)
enum { MOST_DOCUMENTS = 4, GROUPED_CONTEXT = 24 };
#else
#define HAS_LAYOUT(cp, form, order) true
enum { MOST_DOCUMENTS = INT_MAX, GROUPED_CONTEXT = 72 };
#endif
#define EACH_LAYOUT(cp, form, order)                                                                         \
    for (int64_t cp = 2; cp <= MAX_CP; cp++)                                                                 \
        for (int form = MODEL_CP_GATHER; form <= MODEL_CP_RING; form++)                                      \
            for (int order = MODEL_CP_CONTIGUOUS; order <= MODEL_CP_ZIGZAG; order++)                         \
                if (HAS_LAYOUT(cp, form, order))

/* ---- tests ---- */

/* Each token's loss and the gradients are those of one rank. */
static void test_forms(void **state)
{
    (void)state;
    for (int documents = 0; documents < 2; documents++) {
        struct model_config c = whole_model;
        struct batch b;
        c.documents = documents;
        c.head_size = documents ? 12 : 0; /* attention that is wider than the model */
        draw_batch(&b, &c);
        struct result want = result_of(&c, &b);
        EACH_LAYOUT(cp, form, order)
        {
            struct model_config part_of = with_cp(c, cp, form, order);
            part_of.two_parts = order == MODEL_CP_ZIGZAG;
            part_of.recompute = cp % 2 == 0;
            part_of.cp_heads = form == MODEL_CP_GATHER && cp == 3 ? 4 : 0;
            struct result got = result_of(&part_of, &b);
            check_result(&part_of, &got, &want);
            free_result(&got);
        }
        free_result(&want);
        free_batch(&b);
    }
}

/* The loss of a token is that of its document alone in a row. */
static void test_documents_are_alone(void **state)
{
    (void)state;
    struct model_config c = whole_model;
    struct batch b;
    c.documents = true;
    draw_batch(&b, &c);
    struct result packed = result_of(&c, &b);
    for (int64_t first = 0, n, k = 0; first < B * c.context && k < MOST_DOCUMENTS; first += n, k++) {
        int64_t end = first + 1;
        while (end % c.context && b.document_start[end] == b.document_start[first])
            end++;
        n = end - first;
        struct model_config one = c;
        struct batch alone;
        one.documents = false;
        draw_batch(&alone, &one);
        memcpy(alone.tokens, b.tokens + first, (size_t)n * sizeof *b.tokens);
        memcpy(alone.targets, b.targets + first, (size_t)n * sizeof *b.targets);
        struct result want = result_of(&one, &alone);
        for (int64_t i = 0; i < n; i++)
            if (!(fabs(packed.losses[first + i] - want.losses[i]) <= TOLERANCE * want.losses[i]))
                fail_msg("token %lld: loss %.9g, not %.9g", (long long)(first + i), packed.losses[first + i],
                         want.losses[i]);
        free_result(&want);
        free_batch(&alone);
    }
    free_result(&packed);
    free_batch(&b);
}

/* A changed token changes no bit of another document's losses. It changes its own. */
static void test_one_changed_token(void **state)
{
    (void)state;
    EACH_LAYOUT(cp, form, order)
    {
        struct model_config c = with_cp(whole_model, cp, form, order);
        struct batch b;
        c.documents = true;
        draw_batch(&b, &c);
        struct result before = result_of(&c, &b);
        int64_t at = (int64_t)random_below(&rng, B * c.context);
        b.tokens[at] = (b.tokens[at] + 1) % (int32_t)c.vocab;
        struct result after = result_of(&c, &b);
        for (int64_t i = 0; i < B * c.context; i++) {
            bool same_document =
                i / c.context == at / c.context && b.document_start[i] == b.document_start[at];
            bool changes = after.losses[i] != before.losses[i];
            if (changes && (!same_document || i < at))
                fail_msg("%s: token %lld changes the loss of token %lld", name_of(&c), (long long)at,
                         (long long)i);
            if (!changes && i == at)
                fail_msg("%s: token %lld changes nothing", name_of(&c), (long long)at);
        }
        free_result(&before);
        free_result(&after);
        free_batch(&b);
    }
}

/* ---- attention alone ---- */

/* Heads of queries and of keys, channels of a head, and tensor-parallel ranks. */
static const struct heads {
    int64_t heads, kv_heads, head_size, tp;
} grouped[] = {{24, 12, 8, 2}, {24, 12, 8, 1}, {24, 6, 3, 1}, {24, 2, 8, 1}, {12, 1, 16, 1}};
enum { N_GROUPED = sizeof grouped / sizeof *grouped };

static struct model_config with_heads(struct model_config c, struct heads h)
{
    c.heads = h.heads;
    c.kv_heads = h.kv_heads;
    c.head_size = h.head_size;
    c.tp = h.tp;
    return c;
}

enum { GUARD = 64 }; /* poisoned elements behind an array */

static void check(const struct member *r, bool good, const char *what)
{
    die_if_failed(r, good ? 0 : zr_fail(ZERO_ERR_ORDER, "%s", what));
}

static bool is_poison(const char *from, const char *to)
{
    while (from < to && *from == (char)0xFF)
        from++;
    return from >= to;
}

/* Copies this rank's rows of whole (B, context, width) to own (B, T, width), or back. */
static void copy_rows(const struct member *r, real *whole, real *own, int64_t width, bool back)
{
    const struct model_rows rows = model_rows_of(&r->m, r->m.cp.part);
    for (int64_t b = 0; b < B; b++)
        for (int i = 0; i < 2; own += rows.n[i++] * width) {
            real *at = whole + (b * r->m.config.context + rows.first[i]) * width;
            memcpy(back ? at : own, back ? own : at, (size_t)(rows.n[i] * width) * sizeof *own);
        }
}

/* Returns an array of this rank's rows on the device, with a guard. Without whole it is poisoned. */
static real *open_rows(struct member *r, const real *whole, int64_t width)
{
    int64_t n = model_own_tokens(&r->m) * width, bytes = (n + GUARD) * (int64_t)sizeof(real);
    real *own = malloc((size_t)bytes);
    void *there;
    memset(own, 0xFF, (size_t)bytes);
    if (whole)
        copy_rows(r, (real *)(uintptr_t)whole, own, width, false);
    die_if_failed(r, r->compute.dev->ops->alloc(r->compute.dev, bytes, &there) || move(r, there, own, bytes));
    free(own);
    return there;
}

/* Frees such an array, and copies its rows to whole unless it is NULL. */
static void close_rows(struct member *r, real *there, real *whole, int64_t width, const char *what)
{
    int64_t n = model_own_tokens(&r->m) * width, bytes = (n + GUARD) * (int64_t)sizeof(real);
    real *own = malloc((size_t)bytes);
    die_if_failed(r, move(r, own, there, bytes));
    check(r, is_poison((char *)(own + n), (char *)(own + n + GUARD)), what);
    if (whole)
        copy_rows(r, whole, own, width, true);
    r->compute.dev->ops->free(r->compute.dev, there, bytes);
    free(own);
}

/* Checks that only the bytes from `first` on were written in a block of memory. If rounding is not negative,
 * the last of these bytes were written too, but for less than `rounding` at the end. */
static void check_written(struct member *r, const struct model_block *block, const void *first, int64_t bytes,
                          int64_t rounding, const char *what)
{
    char *here = malloc((size_t)block->bytes);
    int64_t from = first ? (const char *)first - (const char *)block->p : 0, to = from + bytes;
    die_if_failed(r, move(r, here, block->p, block->bytes));
    check(r, is_poison(here, here + from) && is_poison(here + to, here + block->bytes), what);
    check(r, rounding < 0 || !bytes || !is_poison(here + to - rounding, here + to), what);
    free(here);
}

/* The buffers of model_cp_room are all that attention needs, and no larger. */
static void check_room(struct member *r)
{
    struct model *m = &r->m;
    const struct model_cp_room room = model_cp_room(&m->config, B, sizeof(real));
    bool last = m->cp.part == m->config.cp - 1; /* in a ring others may not need all */
    check_written(r, &m->kept[0].acts_memory, m->acts.shared, room.reals * (int64_t)sizeof(real),
                  last ? 128 * (int64_t)sizeof(real) : -1, "reals of model_cp_room");
    check_written(r, &m->kept[0].stats_memory, m->stats.shared, room.floats * (int64_t)sizeof(float),
                  last ? 128 * (int64_t)sizeof(float) : -1, "floats of model_cp_room");
}

static void run_backward(struct member *r, const real *atty, const real *qkv)
{
    struct model *m = &r->m;
    int64_t A = model_part_channels(&m->config), row = model_part_qkv(&m->config);
    real *datty = open_rows(r, r->datty, A), *dqkv = open_rows(r, NULL, row);
    die_if_failed(r, model_context_backward(m, LAYERS - 1, dqkv, datty, atty, qkv));
    close_rows(r, datty, NULL, A, "datty");
    close_rows(r, dqkv, r->dqkv, row, "dqkv");
    /* statistics have other arrays before `shared` that attention uses */
    int64_t others = (char *)m->stats.logits - (char *)m->kept[0].stats_memory.p;
    poison(r, &(struct model_block){m->kept[0].stats_memory.p, others});
    if (m->config.cp > 1)
        check_room(r);
    check(r, r->received == model_cp_bytes(&m->config, B, sizeof(real)), "model_cp_bytes");
}

/* Attention of the last layer, without any other part of the model. Without datty, forward only. */
static void run_attention(struct member *r)
{
    struct model *m = &r->m;
    int64_t A = model_part_channels(&m->config), row = model_part_qkv(&m->config);
    real *qkv = open_rows(r, r->qkv, row), *atty = open_rows(r, NULL, A);
    m->err = model_next_batch(m);
    take_rows(r);
    model_send_batch(m);
    die_if_failed(r, m->err || model_context_forward(m, LAYERS - 1, atty, qkv));
    if (r->datty)
        run_backward(r, atty, qkv);
    close_rows(r, qkv, NULL, row, "qkv");
    close_rows(r, atty, r->atty, A, "atty");
}

/* Attention's inputs and results of whole rows. */
struct whole {
    int64_t A, row, n;
    real *qkv, *datty, *atty, *dqkv;
};

static real *draw_reals(int64_t n)
{
    real *x = malloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = from_float((float)random_below(&rng, 1 << 20) * 0x1p-18f - 2);
    return x;
}

static struct whole open_whole(const struct model_config *c)
{
    struct whole w = {model_part_channels(c), model_part_qkv(c), B * c->context, NULL, NULL, NULL, NULL};
    w.qkv = draw_reals(w.n * w.row);
    w.datty = draw_reals(w.n * w.A);
    w.atty = draw_reals(w.n * w.A);
    w.dqkv = draw_reals(w.n * w.row);
    return w;
}

static void close_whole(struct whole *w)
{
    free(w->qkv);
    free(w->datty);
    free(w->atty);
    free(w->dqkv);
}

static void attend(const struct model_config *c, const struct batch *b, const struct whole *w, bool backward)
{
    struct member r[MAX_CP] = {0};
    struct group g;
    for (int i = 0; i < MAX_CP; i++) {
        r[i].qkv = w->qkv;
        r[i].datty = backward ? w->datty : NULL;
        r[i].atty = w->atty;
        r[i].dqkv = w->dqkv;
    }
    run_ranks(r, &g, c, b, NULL, run_attention);
    for (int32_t i = 0; i < g.cp; i++)
        close_member(&r[i]);
}

/* In the gather form attention has the bits of one rank for the same queries, keys and values. */
static void test_bits_of_gather(void **state)
{
    (void)state;
    for (int documents = 0; documents < 2; documents++) {
        struct model_config c = documents ? with_heads(whole_model, grouped[1]) : whole_model;
        struct batch b;
        c.documents = documents;
        draw_batch(&b, &c);
        struct whole w = open_whole(&c);
        attend(&c, &b, &w, false);
        real *want = malloc((size_t)(w.n * w.A) * sizeof *want);
        memcpy(want, w.atty, (size_t)(w.n * w.A) * sizeof *want);
        for (int64_t cp = 2; cp <= MAX_CP; cp++)
            for (int order = MODEL_CP_CONTIGUOUS; order <= MODEL_CP_ZIGZAG; order++) {
                struct model_config part_of = with_cp(c, cp, MODEL_CP_GATHER, order);
                part_of.cp_heads = cp == 3 ? 2 : 0;
                attend(&part_of, &b, &w, false);
                if (memcmp(want, w.atty, (size_t)(w.n * w.A) * sizeof *want))
                    fail_msg("%s: other bits than one rank's", name_of(&part_of));
            }
        free(want);
        close_whole(&w);
        free_batch(&b);
    }
}

/* Compares the heads of each token with those of the reference, which are (n, width), relative to their
 * length and to the mean length. */
static void compare_heads(const struct model_config *c, const char *what, const real *got, int64_t row,
                          const double *want, int64_t n, int64_t width, double tolerance)
{
    int64_t HS = model_head_size(c);
    double mean, size;
    distance(want, want, n * width, &mean);
    mean /= sqrt((double)(n * width / HS));
    for (int64_t i = 0; i < n * width; i += HS) {
        double x[128];
        for (int64_t k = 0; k < HS; k++)
            x[k] = (double)to_float(got[i / width * row + i % width + k]);
        double error = distance(x, want + i, HS, &size);
        if (!(error <= tolerance * (size + mean)))
            fail_msg(
                "%s, %lld heads, %lld of keys: %s: token %lld, channel %lld is off by %g, its length is %g",
                name_of(c), (long long)c->heads, (long long)c->kv_heads, what, (long long)(i / width),
                (long long)(i % width), error, size);
    }
}

static void compare_attention(const struct model_config *c, const struct whole *w,
                              const struct attention_reference *want)
{
    int64_t K_channels = model_part_kv_channels(c);
    compare_heads(c, "y", w->atty, w->A, want->y, w->n, w->A, TOLERANCE);
    compare_heads(c, "dq", w->dqkv, w->row, want->grads[Q], w->n, w->A, GRAD_TOLERANCE);
    compare_heads(c, "dk", w->dqkv + w->A, w->row, want->grads[K], w->n, K_channels, GRAD_TOLERANCE);
    compare_heads(c, "dv", w->dqkv + w->A + K_channels, w->row, want->grads[V], w->n, K_channels,
                  GRAD_TOLERANCE);
}

/* Heads of queries share heads of keys, and all heads together are narrower or wider than the model. The
 * ranks read and write no other memory than they should, and receive what model_cp_bytes says. */
static void test_grouped_heads(void **state)
{
    (void)state;
    for (int k = 0; k < N_GROUPED; k++) {
        struct model_config c = with_heads(whole_model, grouped[k]);
        struct batch b;
        char fault[128];
        c.documents = k % 2;
        c.context = GROUPED_CONTEXT;
        draw_batch(&b, &c);
        struct whole w = open_whole(&c);
        struct attention_reference want = {.B = B,
                                           .T = c.context,
                                           .NH = model_part_heads(&c),
                                           .n_kv = model_part_kv_heads(&c),
                                           .HS = c.head_size,
                                           .qkv = w.qkv,
                                           .dy = w.datty,
                                           .first = b.document_start};
        reference_open(&want);
        attend(&c, &b, &w, true);
        compare_attention(&c, &w, &want);
        EACH_LAYOUT(cp, form, order)
        {
            struct model_config part_of = with_cp(c, cp, form, order);
            part_of.cp_heads = form == MODEL_CP_GATHER && (cp + k) % 2 ? want.NH / want.n_kv : 0;
            if (model_cp_fault(&part_of, fault, sizeof fault))
                continue; /* too few heads of keys to exchange */
            attend(&part_of, &b, &w, true);
            compare_attention(&part_of, &w, &want);
        }
        reference_close(&want);
        close_whole(&w);
        free_batch(&b);
    }
}

/* The sizes that ranks must divide are named. Some ranks divide the heads of queries, but not those of
 * keys. */
static void test_faults(void **state)
{
    (void)state;
    static const struct {
        struct model_config c;
        const char *tp, *cp;
    } cases[] = {
        {{.heads = 12, .kv_heads = 4, .hidden = 96, .tp = 4, .cp = 1}, "", ""},
        {{.heads = 12, .kv_heads = 4, .hidden = 96, .tp = 5}, "--tp: 5 parts do not divide the 12 heads", ""},
        {{.heads = 12, .kv_heads = 4, .tp = 6},
         "--tp: 6 parts do not divide the 4 heads of keys and values",
         ""},
        {{.heads = 12, .kv_heads = 4, .hidden = 90, .tp = 4},
         "--tp: 4 parts do not divide the 90 channels of the MLP",
         ""},
        {{.heads = 12, .kv_heads = 4, .cp = 6, .cp_form = MODEL_CP_EXCHANGE},
         "",
         "--cp-form exchange: 6 ranks do not divide the 4 heads of keys of each"},
        {{.heads = 12, .kv_heads = 4, .tp = 2, .cp = 3, .cp_form = MODEL_CP_EXCHANGE},
         "",
         "--cp-form exchange: 3 ranks do not divide the 2 heads of keys of each"},
        {{.heads = 12, .kv_heads = 4, .cp = 6, .cp_form = MODEL_CP_RING}, "", ""},
        {{.heads = 12, .kv_heads = 4, .cp = 2, .cp_heads = 6}, "", ""},
        {{.heads = 12, .kv_heads = 4, .cp = 2, .cp_heads = 4},
         "",
         "--cp-heads: 4 are not a multiple of the 3 heads that share one of keys"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c = cases[i].c;
        char text[128];
        c.context = 72;
        assert_int_equal(model_tp_fault(&c, text, sizeof text), *cases[i].tp != 0);
        assert_string_equal(text, cases[i].tp);
        assert_int_equal(model_cp_fault(&c, text, sizeof text), *cases[i].cp != 0);
        assert_string_equal(text, cases[i].cp);
    }
}

/* Buffers of backward have room for attention that is wider than the model, and for every bias. */
static void test_wide_buffers(void **state)
{
    (void)state;
    static const struct {
        int64_t head_size, hidden, wide, bias;
    } cases[] = {{0, 0, 96, 4 * 96}, {4, 0, 96, 4 * 96}, {12, 0, 144, 3 * 144}, {0, 500, 96, 500}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_config c = with_cp(whole_model, 2, MODEL_CP_GATHER, MODEL_CP_ZIGZAG);
        struct compute compute;
        struct model m;
        c.head_size = cases[i].head_size;
        c.hidden = cases[i].hidden;
        assert_int_equal(compute_open(&compute, CUDA, 0, 1), 0);
        assert_int_equal(model_open(&m, &c, B, &compute), 0);
        assert_true(m.acts.dbias - m.acts.dbtc >= model_own_tokens(&m) * cases[i].wide);
        assert_true(m.acts.shared - m.acts.dbias >= cases[i].bias);
        assert_true(m.stats.shared - m.stats.scratch >= cases[i].bias); /* on the host, one row of a bias */
        model_close(&m);
        compute_close(&compute);
    }
}

/* Activations are cut over the ranks. Besides there are the buffers that model_cp_room names. */
static void test_memory(void **state)
{
    (void)state;
    struct model_config c = whole_model;
    struct batch b;
    draw_batch(&b, &c);
    c.context = 48; /* arrays of all ranks are whole multiples of their alignment */
    struct result one = result_of(&c, &b);
    EACH_LAYOUT(cp, form, order)
    {
        struct model_config part_of = with_cp(c, cp, form, order);
        struct model_cp_room room = model_cp_room(&part_of, B, sizeof(real));
        struct result got = result_of(&part_of, &b);
        int64_t rest = got.activation_bytes - room.reals * (int64_t)sizeof(real) -
                       room.floats * (int64_t)sizeof(float),
                rounding = 24 * 256;
        if (!(rest <= one.activation_bytes / cp + rounding))
            fail_msg("%s: %lld bytes of activations, besides buffers, of %lld without cp", name_of(&part_of),
                     (long long)rest, (long long)one.activation_bytes);
        free_result(&got);
    }
    free_result(&one);
    free_batch(&b);
}

/* In zigzag order every rank has as many pairs of a query and a key that it sees. */
static void test_balance(void **state)
{
    (void)state;
    for (int32_t cp = 2; cp <= MAX_CP; cp++)
        for (int order = MODEL_CP_CONTIGUOUS; order <= MODEL_CP_ZIGZAG; order++) {
            struct model_config c = with_cp(whole_model, cp, MODEL_CP_GATHER, order);
            struct group g = {.cp = cp};
            int64_t pairs[MAX_CP] = {0}, most = 0;
            cut_rows(&g, &c);
            for (int32_t i = 0; i < cp; i++) {
                for (int k = 0; k < 2; k++)
                    for (int64_t t = 0; t < g.rows[i].n[k]; t++)
                        pairs[i] += g.rows[i].first[k] + t + 1;
                most = pairs[i] > most ? pairs[i] : most;
            }
            if (order == MODEL_CP_ZIGZAG)
                for (int32_t i = 1; i < cp; i++)
                    assert_int_equal(pairs[i], pairs[0]);
            else
                assert_true(pairs[0] < most);
        }
}

int main(void)
{
#ifdef MODEL_TEST_CUDA
    struct compute here;
    if (compute_open(&here, true, 0, 1)) {
        printf("%s\n", zr_error_text());
        return 77; /* skipped */
    }
    compute_close(&here);
#endif
    rng = random_open();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_forms),
        cmocka_unit_test(test_documents_are_alone),
        cmocka_unit_test(test_one_changed_token),
        cmocka_unit_test(test_bits_of_gather),
        cmocka_unit_test(test_grouped_heads),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_wide_buffers),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_balance),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
