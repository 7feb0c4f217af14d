/* SPDX-License-Identifier: Apache-2.0 */
/* test_layout.c: tests that every element is in one flat and belongs to one rank, for any model and world. */
#include "test/shard/failing_memory.h"
#include "test/shard/random_model.h"

/* ---- invariants ---- */

static void check_pieces(const struct zr_layout *l)
{
    for (int32_t t = 0; t < l->n_tensors; t++) {
        const struct zr_tensor *x = &l->tensors[t];
        for (int32_t s = 0; s < x->n_layers; s++) {
            int32_t at = l->piece_of[l->layer_base[t] + s];
            CHECK(at >= 0 && at < l->n_pieces, "tensor %d layer %d", t, s);
            const struct zr_piece *p = &l->pieces[at];
            CHECK(p->tensor == t && p->layer == s && p->n == x->n_elems / x->n_layers, "tensor %d layer %d",
                  t, s);
            const struct zr_flat *f = zr_piece_flat(l, at);
            CHECK(at >= f->first_piece && at < f->first_piece + f->n_pieces, "piece %d", at);
            CHECK(f->unit == x->unit + s && f->dtype == x->dtype && f->trainable == (x->grad != NULL) &&
                      f->optimizer == (x->grad ? x->optimizer : ZR_OPTIMIZER_NONE) &&
                      f->n_states == (x->grad ? x->n_states : 0) &&
                      f->masters == (x->grad ? x->masters : ZERO_MASTERS_F32) &&
                      f->moments == (x->grad ? x->moments : ZERO_MOMENTS_F32),
                  "piece %d", at);
            CHECK(f->in_place == (l->in_place && x->stacked), "piece %d", at);
            CHECK(p->first * zr_dtype_bytes(f->dtype) % ZR_PIECE_ALIGN == 0, "piece %d", at);
        }
    }
    CHECK(l->n_pieces == l->layer_base[l->n_tensors], "every layer is one piece");
}

static int64_t granule_of(const struct zr_layout *l, const struct zr_piece *p)
{
    return zr_max(l->tensors[p->tensor].granule, 1);
}

/* Returns whether the flat may be cut at this element. */
static bool may_be_cut(const struct zr_layout *l, const struct zr_flat *f, int64_t at)
{
    for (int32_t i = 0; i < f->n_pieces; i++) {
        const struct zr_piece *p = &l->pieces[f->first_piece + i];
        if (at > p->first && at < p->first + p->n)
            return (at - p->first) % 32 == 0 && (at - p->first) % granule_of(l, p) == 0;
    }
    return true;
}

/* Blocks of 8-bit states count from the first element of a layer, and no slice cuts one. So a block of a flat
 * is a block of a layer. */
static void check_blocks(const struct zr_layout *l, const struct zr_flat *f)
{
    for (int32_t i = 0; i < f->n_pieces; i++)
        CHECK(l->pieces[f->first_piece + i].first % ZR_Q8_BLOCK == 0, "piece %d", i);
    for (int k = 0; k < l->world; k++) {
        int64_t first, n = zr_flat_owned(f, k, &first);
        CHECK(n == 0 || first % ZR_Q8_BLOCK == 0, "slice %d begins at %lld", k, (long long)first);
    }
    CHECK(f->fine_elems % ZR_Q8_BLOCK == 0 && f->inner_elems % ZR_Q8_BLOCK == 0 &&
              f->elems % ZR_Q8_BLOCK == 0,
          "%lld elements", (long long)f->elems);
}

/* Checks a cut into equal slices. */
static void check_equal_slices(const struct zr_layout *l, const struct zr_flat *f, int64_t end)
{
    int64_t size = zr_dtype_bytes(f->dtype);
    CHECK(f->fine.each % ZR_SHARD_ALIGN == 0 && f->fine.each > 0, "%lld", (long long)f->fine.each);
    CHECK(f->fine_elems * size == f->fine.each && f->elems == f->fine_elems * l->world, "%lld",
          (long long)f->fine_elems);
    if (!f->in_place)
        CHECK(f->fine.total == f->fine.each * l->world, "slices of a packed flat are equal");
    /* No more padding than rounding requires. */
    CHECK(f->fine.each - (end * size + l->world - 1) / l->world < ZR_SHARD_ALIGN, "%lld",
          (long long)f->fine.each);
}

/* Returns the place nearest to an element, and the lower of two equally near. Searches all places. */
static int64_t nearest_place(const struct zr_layout *l, const struct zr_flat *f, int64_t wanted, int64_t n)
{
    int64_t best = 0;
    for (int32_t i = 0; i < f->n_pieces; i++) {
        const struct zr_piece *p = &l->pieces[f->first_piece + i];
        for (int64_t k = 0; k < p->n; k += 32)
            if (k % granule_of(l, p) == 0 && llabs(p->first + k - wanted) < llabs(best - wanted))
                best = p->first + k;
    }
    return llabs(n - wanted) < llabs(best - wanted) ? n : best;
}

static int64_t look_for_most(struct zr_cut c, int32_t n)
{
    c.most = 0;
    return zr_cut_most(&c, n);
}

/* The recorded size of the largest slices equals the size found, for every cut made from the list. */
static void check_most(const struct zr_layout *l, const struct zr_flat *f)
{
    const struct zr_cut sums = zr_flat_sums_cut(f, &f->inner);
    CHECK(f->fine.most > 0 && f->fine.most == look_for_most(f->fine, l->world), "%lld",
          (long long)f->fine.most);
    CHECK(f->inner.most > 0 && f->inner.most == look_for_most(f->inner, l->inner), "%lld",
          (long long)f->inner.most);
    CHECK(sums.most > 0 && sums.most == look_for_most(sums, l->inner), "%lld", (long long)sums.most);
    for (int32_t k = 0; k < l->inner; k++) {
        const struct zr_cut groups = zr_flat_groups_cut(f, k);
        CHECK(zr_cut_most(&groups, l->outer) == look_for_most(groups, l->outer), "inner slice %d", k);
    }
}

/* Checks a cut in which each slice ends at the place nearest to the end of an equal slice. The reserved
 * size is that of the largest slice. */
static void check_places(const struct zr_layout *l, const struct zr_flat *f, int64_t end)
{
    int64_t size = zr_dtype_bytes(f->dtype), n = f->fine.total / size, most = 0;
    CHECK(l->has_places && f->fine.each == 0 && l->world > 1, "unit %d", f->unit);
    CHECK(f->in_place || f->fine.total == zr_round_up(end * size, ZR_PIECE_ALIGN), "%lld bytes",
          (long long)f->fine.total);
    for (int k = 0; k < l->world; k++) {
        int64_t at = zr_cut_at(&f->fine, k) / size, want = nearest_place(l, f, n * k / l->world, n);
        CHECK(at == want, "place %d is element %lld, not %lld", k, (long long)at, (long long)want);
        most = zr_max(most, zr_cut_bytes(&f->fine, k));
    }
    CHECK(f->fine_elems * size == zr_round_up(most, ZR_SHARD_ALIGN), "%lld", (long long)f->fine_elems);
    check_most(l, f);
    CHECK(f->elems * size == zr_round_up(f->fine.total, ZR_SHARD_ALIGN), "%lld", (long long)f->elems);
}

/* Pieces do not overlap, and gaps follow them. Owners cover every element once, and cut pieces only at
 * multiples of 32 elements and of their granules. */
static void check_flat(const struct zr_layout *l, const struct zr_flat *f)
{
    int64_t size = zr_dtype_bytes(f->dtype), end = 0, owned = 0, n = f->fine.total / size;
    int64_t gap = l->gaps && f->trainable && !f->in_place ? ZR_GAP_BYTES / size : 0;
    CHECK(f->n_pieces > 0 && n * size == f->fine.total, "%lld bytes", (long long)f->fine.total);
    for (int32_t k = 0; k < f->n_pieces; k++) {
        const struct zr_piece *p = &l->pieces[f->first_piece + k];
        CHECK(p->first >= end && p->n > 0, "piece %d", k);
        end = p->first + p->n + gap;
    }
    CHECK(end <= n, "pieces end at %lld of %lld", (long long)end, (long long)n);
    if (f->in_place)
        CHECK(f->n_pieces == 1 && end == n, "a flat in place is its one layer");
    check_blocks(l, f);
    if (f->fine.at)
        check_places(l, f, end);
    else
        check_equal_slices(l, f, end);
    for (int r = 0; r < l->world; r++) {
        int64_t first, k = zr_flat_owned(f, r, &first);
        CHECK(k >= 0 && k <= f->fine_elems, "rank %d owns %lld", r, (long long)k);
        CHECK(k == 0 || first == owned, "rank %d starts at %lld, the last ended at %lld", r, (long long)first,
              (long long)owned);
        owned += k;
        CHECK(k == 0 || may_be_cut(l, f, first), "rank %d begins at element %lld", r, (long long)first);
    }
    CHECK(owned == n, "%lld of %lld elements have an owner", (long long)owned, (long long)n);
}

/* The flats of a unit lie side by side in each of its buffers: full parameters, gradients, and one rank's
 * shards. */
static void check_unit(const struct zr_layout *l, const struct zr_unit *u)
{
    int64_t param = 0, grad = 0, shard = 0, elems = 0;
    bool trainable = false;
    CHECK(u->n_flats > 0, "a unit without flats");
    for (int32_t i = 0; i < u->n_flats; i++) {
        const struct zr_flat *f = &l->flats[u->first_flat + i];
        CHECK(f->unit == u - l->units, "flat %d", i);
        trainable |= f->trainable;
        elems += f->trainable ? f->elems : 0;
        if (f->in_place)
            continue;
        for (int32_t j = 0; j < i; j++) {
            const struct zr_flat *g = &l->flats[u->first_flat + j];
            CHECK(g->in_place || g->dtype != f->dtype || g->trainable != f->trainable ||
                      g->optimizer != f->optimizer || g->n_states != f->n_states ||
                      g->masters != f->masters || g->moments != f->moments,
                  "two packed flats of one key");
        }
        CHECK(f->param_at >= param && f->param_at % ZR_PIECE_ALIGN == 0, "flat %d", i);
        param = f->param_at + f->fine.total;
        CHECK(f->shard_at >= shard && f->shard_at % ZR_PIECE_ALIGN == 0, "flat %d", i);
        shard = f->shard_at + f->inner_elems * zr_dtype_bytes(f->dtype);
        if (!f->trainable)
            continue;
        CHECK(f->grad_at >= grad && f->grad_at % ZR_PIECE_ALIGN == 0, "flat %d", i);
        grad = f->grad_at + f->fine.total;
    }
    CHECK(param <= u->param_bytes && u->param_bytes - param < ZR_PIECE_ALIGN, "%lld",
          (long long)u->param_bytes);
    CHECK(grad <= u->grad_bytes && u->grad_bytes - grad < ZR_PIECE_ALIGN, "%lld", (long long)u->grad_bytes);
    CHECK(shard <= u->shard_bytes && u->shard_bytes - shard < ZR_PIECE_ALIGN, "%lld",
          (long long)u->shard_bytes);
    CHECK(elems == u->elems && trainable == u->trainable, "%lld", (long long)u->elems);
}

/* The layers of a stacked tensor form one buffer with the model's own stride. The buffers lie side by
 * side. */
static void check_in_place(const struct zr_layout *l)
{
    int64_t param = 0, grad = 0;
    for (int32_t t = 0; t < l->n_tensors; t++) {
        const struct zr_tensor *x = &l->tensors[t];
        if (!l->in_place || !x->stacked)
            continue;
        int64_t bytes = x->n_elems * zr_dtype_bytes(x->dtype), stride = bytes / x->n_layers;
        const struct zr_flat *first = zr_piece_flat(l, l->piece_of[l->layer_base[t]]);
        for (int32_t s = 0; s < x->n_layers; s++) {
            const struct zr_flat *f = zr_piece_flat(l, l->piece_of[l->layer_base[t] + s]);
            CHECK(f->param_at == first->param_at + s * stride && f->fine.total == stride,
                  "tensor %d layer %d", t, s);
            CHECK(!x->grad || f->grad_at == first->grad_at + s * stride, "tensor %d layer %d", t, s);
        }
        CHECK(first->param_at >= param && first->param_at % ZR_PIECE_ALIGN == 0, "tensor %d", t);
        param = first->param_at + bytes;
        if (!x->grad)
            continue;
        CHECK(first->grad_at >= grad && first->grad_at % ZR_PIECE_ALIGN == 0, "tensor %d", t);
        grad = first->grad_at + bytes + (l->gaps ? ZR_GAP_BYTES : 0);
    }
    CHECK(param <= l->in_place_param_bytes && l->in_place_param_bytes - param < ZR_PIECE_ALIGN, "parameters");
    CHECK(grad <= l->in_place_grad_bytes && l->in_place_grad_bytes - grad < ZR_PIECE_ALIGN, "gradients");
}

static void check_layout(const struct zr_layout *l)
{
    int64_t state = 0, n_params = 0;
    int32_t flats = 0, pieces = 0;
    check_pieces(l);
    for (int32_t u = 0; u < l->n_units; u++) {
        CHECK(l->units[u].first_flat == flats, "unit %d", u);
        flats += l->units[u].n_flats;
        check_unit(l, &l->units[u]);
    }
    CHECK(flats == l->n_flats, "%d flats", flats);
    for (int32_t i = 0; i < l->n_flats; i++) {
        const struct zr_flat *f = &l->flats[i];
        CHECK(f->first_piece == pieces, "flat %d", i);
        pieces += f->n_pieces;
        check_flat(l, f);
        if (!f->trainable)
            continue;
        state += f->fine_elems;
    }
    CHECK(pieces == l->n_pieces && state == l->state_elems, "%d pieces, %lld", pieces, (long long)state);
    check_in_place(l);
    for (int32_t t = 0; t < l->n_tensors; t++)
        n_params += l->tensors[t].n_elems;
    CHECK(n_params == l->n_params, "%lld parameters", (long long)l->n_params);
}

/* Gives some tensors of a model a granule, up to a whole layer. */
static void random_granules(struct random_source *r, struct zr_tensor *t, int32_t n)
{
    static const int64_t some[] = {1, 2, 16, 32, 33, 48, 64, 100, 128, 300};
    for (int32_t i = 0; i < n; i++) {
        int64_t layer = t[i].n_elems / t[i].n_layers;
        if (chance(r, 50))
            t[i].granule = zr_min(layer, chance(r, 20) ? 1 + random_below(r, layer)
                                                       : some[random_below(r, sizeof some / sizeof *some)]);
    }
}

static void lay_out_in_groups(struct zr_tensor *t, int32_t n, int inner, int outer, bool in_place, bool gaps)
{
    struct zr_layout *l;
    int world = inner * outer;
    assert_int_equal(zr_layout_make(t, n, inner, outer, in_place, gaps, &l), 0);
    CHECK(l->gaps == gaps, "world %d", world);
    CHECK(l->world == world && l->in_place == in_place && l->n_tensors == n, "world %d", world);
    check_layout(l);
    zr_layout_free(l);
}

static void lay_out(struct zr_tensor *t, int32_t n, int world, bool in_place, bool gaps)
{
    lay_out_in_groups(t, n, world, 1, in_place, gaps);
}

/* ---- tests ---- */

static void any_model_in_any_world(void **state)
{
    FOR_CASES(r, 10000)
    {
        int32_t n;
        struct zr_tensor *t = random_tensors(&r, 12, &n);
        lay_out(t, n, 1 + (int)random_below(&r, 16), chance(&r, 50), chance(&r, 50));
    }
}

static void any_granules_in_any_world(void **state)
{
    FOR_CASES(r, 5000)
    {
        int32_t n;
        struct zr_tensor *t = random_tensors(&r, 6, &n);
        random_granules(&r, t, n);
        lay_out_in_groups(t, n, 1 + (int)random_below(&r, 16),
                          chance(&r, 70) ? 1 : 2 + (int)random_below(&r, 4), chance(&r, 50), chance(&r, 50));
    }
}

static struct zr_layout *with_granules(const int64_t *elems, const int64_t *granule, int32_t n, int world)
{
    struct zr_tensor *t = calloc((size_t)n, sizeof *t);
    struct zr_layout *l;
    for (int32_t i = 0; i < n; i++) {
        t[i] = make_tensor("t", elems[i], 0);
        t[i].granule = granule[i];
    }
    assert_int_equal(zr_layout_make(t, n, world, 1, false, false, &l), 0);
    return l;
}

/* A granule that divides 32 changes nothing, not even the hash. A granule of a whole tensor leaves some
 * ranks without elements. */
static void known_granules(void **state)
{
    const int64_t elems[] = {1000, 640}, none[] = {0, 0}, small[] = {16, 32}, rows[] = {0, 96},
                  whole[] = {1000, 640};
    struct zr_layout *l = with_granules(elems, none, 2, 4), *same = with_granules(elems, small, 2, 4);
    assert_true(same->hash == l->hash && !same->has_places);
    assert_int_equal(same->flats[0].fine.each, l->flats[0].fine.each);
    zr_layout_free(same);
    struct zr_layout *cut = with_granules(elems, rows, 2, 4);
    /* Pieces at 0 and 1024, 1664 elements in all. A quarter is 416, and three quarters are 1248 = 1024 +
     * 224. */
    const int64_t want[] = {0, 416, 832, 1024 + 192, 1664};
    assert_true(cut->has_places && cut->hash != l->hash);
    for (int k = 0; k <= 4; k++)
        assert_int_equal(zr_cut_at(&cut->flats[0].fine, k), want[k] * 4);
    assert_int_equal(cut->flats[0].fine_elems, 448);
    zr_layout_free(cut);
    cut = with_granules(elems, whole, 2, 4);
    const int64_t halves[] = {0, 0, 1024, 1024, 1664};
    for (int k = 0; k <= 4; k++)
        assert_int_equal(zr_cut_at(&cut->flats[0].fine, k), halves[k] * 4);
    zr_layout_free(cut);
    cut = with_granules(elems, whole, 2, 1);
    assert_false(cut->has_places);
    zr_layout_free(cut);
    zr_layout_free(l);
}

/* Shapes that broke other implementations, each in every world. */
static void known_shapes(void **state)
{
    static const int64_t sizes[] = {1, 15, 8100, 17 * 257, 17, 64 * 297};
    enum { N = sizeof sizes / sizeof *sizes };
    for (int world = 1; world <= 16; world++) {
        for (int kind = 0; kind < 4; kind++) {
            for (int i = 0; i < N; i++) {
                struct zr_tensor *t = calloc(1, sizeof *t);
                *t = make_tensor("alone", sizes[i], 0);
                lay_out(t, 1, world, kind & 1, kind & 2);
            }
            struct zr_tensor *t = calloc(100, sizeof *t);
            for (int i = 0; i < 100; i++)
                t[i] = make_tensor("layer", 100, i);
            lay_out(t, 100, world, kind & 1, kind & 2);
            t = calloc(N, sizeof *t);
            for (int i = 0; i < N; i++) {
                t[i] = make_tensor("mixed", sizes[i], 0);
                t[i].dtype = i % 2 ? ZERO_BF16 : ZERO_F32;
                t[i].grad = i % 3 ? &model_pointer : NULL;
            }
            lay_out(t, N, world, kind & 1, kind & 2);
            t = calloc(3, sizeof *t);
            t[0] = make_tensor("weights", 17 * 257, 1);
            stack_tensor(&t[0], 100);
            t[1] = make_tensor("biases", 17, 1);
            stack_tensor(&t[1], 100);
            t[2] = make_tensor("embedding", 64 * 297, 0);
            lay_out(t, 3, world, kind & 1, kind & 2);
        }
    }
}

static uint64_t hash_of(struct zr_tensor t, int world, bool in_place, int32_t n)
{
    struct zr_tensor *table = calloc((size_t)n, sizeof *table);
    struct zr_layout *l;
    table[0] = t;
    table[0].name = strdup(t.name);
    for (int32_t i = 1; i < n; i++)
        table[i] = make_tensor("other", 50, 0);
    assert_int_equal(zr_layout_make(table, n, world, 1, in_place, false, &l), 0);
    uint64_t h = l->hash;
    zr_layout_free(l);
    return h;
}

static void hash_covers_what_must_agree(void **state)
{
    void *elsewhere = NULL;
    struct zr_tensor base = make_tensor("a", 100, 0), t = base;
    uint64_t h = hash_of(base, 2, false, 2);
    assert_int_equal(h, hash_of(base, 2, false, 2));
    t.param = t.grad = &elsewhere;
    assert_int_equal(h, hash_of(t, 2, false, 2));
    assert_int_not_equal(h, hash_of(base, 3, false, 2));
    assert_int_not_equal(h, hash_of(base, 2, true, 2));
    assert_int_not_equal(h, hash_of(base, 2, false, 3));
#define DIFFERS(change)                                                                                      \
    t = base;                                                                                                \
    change;                                                                                                  \
    assert_int_not_equal(h, hash_of(t, 2, false, 2))
    char other_name[] = "b";
    DIFFERS(t.name = other_name);
    DIFFERS(t.grad = NULL);
    DIFFERS(t.dtype = ZERO_BF16);
    DIFFERS(t.n_elems = 101);
    DIFFERS(t.stacked = true);
    DIFFERS((t.stacked = true, t.n_layers = 2));
    DIFFERS(t.no_decay = true);
    DIFFERS(t.group = 1);
    DIFFERS(t.n_states = 1);
    DIFFERS(t.optimizer = ZERO_SGD);
    DIFFERS(t.masters = ZERO_MASTERS_NONE);
    DIFFERS(t.moments = ZERO_MOMENTS_Q8);
    DIFFERS(t.overwrite = true);
    DIFFERS(t.resident = true);
    DIFFERS(t.unit = 1);
    DIFFERS(t.granule = 33);
#undef DIFFERS
    free(base.name);
}

/* The order of the tensors is part of the layout. */
static void hash_covers_the_order(void **state)
{
    uint64_t h[2];
    for (int i = 0; i < 2; i++) {
        struct zr_tensor *t = calloc(2, sizeof *t);
        struct zr_layout *l;
        t[i] = make_tensor("a", 100, 0);
        t[1 - i] = make_tensor("b", 100, 0);
        assert_int_equal(zr_layout_make(t, 2, 2, 1, false, false, &l), 0);
        h[i] = l->hash;
        zr_layout_free(l);
    }
    assert_int_not_equal(h[0], h[1]);
}

static void refuse_gap(const int32_t *unit, const int64_t *n_layers, int32_t n, const char *message)
{
    struct zr_tensor *t = calloc((size_t)n, sizeof *t);
    struct zr_layout *l = NULL;
    for (int32_t i = 0; i < n; i++) {
        t[i] = make_tensor("t", 10, unit[i]);
        if (n_layers[i] > 1)
            stack_tensor(&t[i], n_layers[i]);
    }
    assert_int_equal(zr_layout_make(t, n, 2, 1, false, false, &l), ZERO_ERR_ARG);
    assert_null(l);
    if (!strstr(zr_error_text(), message))
        fail_msg("\"%s\" does not say \"%s\"", zr_error_text(), message);
}

static void gaps_are_refused(void **state)
{
    int64_t live = n_live;
    refuse_gap((int32_t[]){0, 2, 2}, (int64_t[]){1, 1, 1}, 3, "unit 1 has no tensor");
    refuse_gap((int32_t[]){1, 2}, (int64_t[]){1, 5}, 2, "unit 0 has no tensor");
    refuse_gap((int32_t[]){0, 4}, (int64_t[]){3, 2}, 2, "unit 3 has no tensor");
    refuse_gap((int32_t[]){0, 7}, (int64_t[]){1, 1}, 2, "unit 1 has no tensor; units must be 0..7");
    /* An array of this length must not be allocated. */
    refuse_gap((int32_t[]){0, INT32_MAX - 1}, (int64_t[]){1, 1}, 2,
               "unit 1 has no tensor; units must be 0..2147483646");
    assert_int_equal(n_live,
                     live - (3 + 2 + 2 + 2 + 2)); /* the names: strdup is not counted, but freeing is */
}

static void out_of_memory_leaves_nothing(void **state)
{
    bool passed = false;
    for (int64_t k = 0; !passed; k++) {
        struct zr_tensor *t = calloc(3, sizeof *t);
        struct zr_layout *l = NULL;
        t[0] = make_tensor("a", 100, 0);
        t[1] = make_tensor("b", 100, 1);
        stack_tensor(&t[1], 3);
        t[2] = make_tensor("c", 100, 3);
        int64_t live = n_live;
        n_allocs = 0;
        fail_at = k;
        int err = zr_layout_make(t, 3, 2, 1, true, false, &l);
        fail_at = -1;
        passed = err == 0;
        if (passed) {
            assert_true(k >= 9);
            check_layout(l);
            zr_layout_free(l);
        } else {
            assert_int_equal(err, ZERO_ERR_NOMEM);
            assert_non_null(strstr(zr_error_text(), "no memory"));
            assert_null(l);
        }
        assert_int_equal(n_live, live - 1 - 3); /* the table and its names are freed too */
    }
}

/* With groups, every element has the same owner as without. A rank's part of a group's cut is what its
 * members of all groups own. */
static void groups_cut_the_same(void **state)
{

    FOR_CASES(r, 200)
    {
        int32_t n, inner = 1 + (int32_t)random_below(&r, 5), outer = 1 + (int32_t)random_below(&r, 5);
        struct random_source again = r;
        struct zr_layout *l, *flat;
        bool granules = case_i % 2;
        struct zr_tensor *t = random_tensors(&r, 6, &n);
        if (granules)
            random_granules(&r, t, n);
        assert_int_equal(zr_layout_make(t, n, inner, outer, false, false, &l), 0);
        t = random_tensors(&again, 6, &n);
        if (granules)
            random_granules(&again, t, n);
        assert_int_equal(zr_layout_make(t, n, inner * outer, 1, false, false, &flat), 0);
        CHECK(l->n_flats == flat->n_flats && (l->hash == flat->hash) == (outer == 1), "%d groups of %d",
              outer, inner);
        for (int32_t i = 0; i < l->n_flats; i++) {
            const struct zr_flat *f = &l->flats[i], *g = &flat->flats[i];
            CHECK(f->fine.total == g->fine.total && f->fine.each == g->fine.each &&
                      f->param_at == g->param_at && f->grad_at == g->grad_at,
                  "flat %d", i);
            for (int32_t at = 0; at < inner; at++) {
                struct zr_span in = zr_flat_span(f, (struct zr_where){at, 0}, ZR_LEVEL_INNER);
                int64_t end = in.first;
                for (int32_t group = 0; group < outer; group++) {
                    struct zr_where where = {at, group};
                    struct zr_span own = zr_flat_span(f, where, ZR_LEVEL_FINE);
                    int64_t first, k = zr_flat_owned(g, zr_layout_fine(l, where), &first);
                    CHECK(own.first == end && own.first == first && own.n == k, "flat %d, %d of group %d", i,
                          at, group);
                    end += own.n;
                }
                CHECK(end == in.first + in.n, "flat %d, %d of a group", i, at);
            }
            CHECK(zr_flat_span(f, (struct zr_where){0, 0}, ZR_LEVEL_ALL).n * zr_dtype_bytes(f->dtype) ==
                      f->inner.total,
                  "flat %d", i);
        }
        zr_layout_free(l);
        zr_layout_free(flat);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(groups_cut_the_same),
        cmocka_unit_test(any_model_in_any_world),
        cmocka_unit_test(any_granules_in_any_world),
        cmocka_unit_test(known_granules),
        cmocka_unit_test(known_shapes),
        cmocka_unit_test(hash_covers_what_must_agree),
        cmocka_unit_test(hash_covers_the_order),
        cmocka_unit_test(gaps_are_refused),
        cmocka_unit_test(out_of_memory_leaves_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
