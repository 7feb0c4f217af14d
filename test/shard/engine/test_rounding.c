/* SPDX-License-Identifier: Apache-2.0 */
/* test_rounding.c: tests the element numbers that noise depends on. Tensor parallelism and pipeline stages
 * may cut a tensor. Each of its elements must then have its number in the whole tensor. */
#include "shard/engine/issue.h"
#include "shard/tp_cut.h"
#include "test/shard/random_model.h"

#include <string.h>

/* A stacked tensor, and one rank's part of it. Layers have two dimensions. tp cuts one of them. */
struct drawn {
    struct zr_tensor whole, part;
    int32_t tp;
    int64_t layer_elems;
};

static struct zr_tensor make(int64_t n_layers, int64_t a, int64_t b)
{
    return (struct zr_tensor){.name = (char *)(uintptr_t) "stacked",
                              .grad = &model_pointer,
                              .shape = {n_layers, a, b},
                              .n_elems = n_layers * a * b,
                              .n_layers = n_layers,
                              .stacked = true};
}

static void draw(struct random_source *r, struct drawn *d)
{
    const int64_t n_layers = 1 + random_below(r, 4), blocks = chance(r, 40) ? 1 + random_below(r, 3) : 1,
                  dim = 1 + random_below(r, 2);
    int64_t each = blocks * (1 + random_below(r, 20)), other = 1 + random_below(r, 70), rows;
    d->tp = 1 + (int32_t)random_below(r, 4);
    rows = each * d->tp -
           (blocks == 1 && d->tp > 1 ? random_below(r, each) : 0); /* the last part may end in padding */
    d->whole = dim == 1 ? make(n_layers, rows, other) : make(n_layers, other, rows);
    d->part = dim == 1 ? make(n_layers, each, other) : make(n_layers, other, each);
    d->part.cut = true;
    d->part.cut_dim = (int32_t)dim;
    d->part.cut_blocks = (int32_t)blocks;
    d->part.cut_size = rows;
    d->layer_elems = rows * other;
}

static void open_engine(struct zr_engine *e, struct zr_layout *l, struct zr_tensor *t)
{
    static int64_t first_layer;
    first_layer = 0;
    *l = (struct zr_layout){.n_tensors = 1, .tensors = t};
    *e = (struct zr_engine){.layout = l, .tp = 1, .first_layer = &first_layer, .opt = {.seed = 7}};
}

/* Returns the noise of this rank's element `at` of a layer. The rank has `before` layers of the whole tensor
 * before the first. */
static struct zr_rounding rounding_of(const struct drawn *d, int32_t part, int64_t before, int32_t layer,
                                      int64_t at, int64_t step)
{
    struct zr_engine e;
    struct zr_layout l;
    struct zr_tensor t = part < 0 ? d->whole : d->part;
    const struct zr_piece p = {.layer = layer, .n = t.n_elems / t.n_layers};
    open_engine(&e, &l, &t);
    e.tp = part < 0 ? 1 : d->tp;
    e.tp_rank = part < 0 ? 0 : part;
    zr_engine_set_first(&e, 0, before * p.n);
    return zr_rounding_from(&e, &p, at, step);
}

/* Checks all elements of a part's layer behind element `from`. */
static void check_part(const struct drawn *d, int32_t part, int64_t before, int32_t layer, int64_t from)
{
    const struct zr_tp_cut cut = zr_tp_of_tensor(&d->part, d->tp);
    const int64_t n = d->part.n_elems / d->part.n_layers;
    const struct zr_rounding own = rounding_of(d, part, before, layer, from, 3),
                             whole = rounding_of(d, -1, 0, (int32_t)before + layer, 0, 3);
    CHECK(!memcmp(own.key, whole.key, sizeof own.key), "the keys differ");
    for (int64_t i = 0; i < n - from; i++) {
        const struct zr_tp_run run = zr_tp_run_of_part(&cut, part, layer * n + from + i);
        if (run.whole < 0)
            continue;
        const int64_t in_layer = run.whole - layer * d->layer_elems, number = zr_rounding_element(&own, i);
        CHECK(number == zr_rounding_element(&whole, in_layer), "part %d, element %lld: number %lld", part,
              (long long)(from + i), (long long)number);
        CHECK(number == (before + layer) * zr_round_up(d->layer_elems, ZR_Q8_BLOCK) + in_layer,
              "element %lld: number %lld", (long long)in_layer, (long long)number);
    }
}

static void parts_have_the_numbers_of_the_whole(void **state)
{
    FOR_CASES(r, 3000)
    {
        struct drawn d;
        draw(&r, &d);
        const int64_t n = d.part.n_elems / d.part.n_layers;
        check_part(&d, (int32_t)random_below(&r, d.tp), random_below(&r, 3),
                   (int32_t)random_below(&r, d.part.n_layers), chance(&r, 50) ? 0 : random_below(&r, n));
    }
}

/* Noise depends on the seed, the step and the name. */
static void keys_differ(void **state)
{
    struct drawn d = {.whole = make(1, 4, 8)};
    struct zr_engine e;
    struct zr_layout l;
    const struct zr_piece p = {.n = 32};
    open_engine(&e, &l, &d.whole);
    const struct zr_rounding first = zr_rounding_from(&e, &p, 0, 1);
    for (int way = 0; way < 3; way++) {
        open_engine(&e, &l, &d.whole);
        e.opt.seed += way == 0;
        d.whole.name = (char *)(uintptr_t)(way == 1 ? "other" : "stacked");
        const struct zr_rounding other = zr_rounding_from(&e, &p, 0, 1 + (way == 2));
        assert_memory_not_equal(first.key, other.key, sizeof first.key);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(parts_have_the_numbers_of_the_whole),
                                       cmocka_unit_test(keys_differ)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
