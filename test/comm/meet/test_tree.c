/* SPDX-License-Identifier: Apache-2.0 */
/* test_tree.c: tests the tree that connects the ranks of a world. Every rank but 0 has one parent, the
 * ranks below a rank are consecutive and follow it, and everything is computed from the numbers alone. */
#include "comm/meet/tree.h"
#include "test/cmocka.h"

#include <stdlib.h>

static const int fan_outs[] = {1, 2, 3, 7, ZR_TREE_FAN_OUT};

/* The subtrees of t's children are consecutive and together cover all ranks below t. */
static void check_children(int world, int fan_out, const struct zr_tree *t)
{
    int at = t->rank + 1;
    for (int k = 0; k < t->n_children; k++) {
        struct zr_tree c = zr_tree_of(world, fan_out, zr_tree_child(t, k));
        assert_int_equal(c.rank, at);
        assert_int_equal(c.parent, t->rank);
        assert_int_equal(c.span, zr_tree_child_span(t, k));
        assert_int_equal(zr_tree_child_to(t, at), k);
        assert_int_equal(zr_tree_child_to(t, at + c.span - 1), k);
        at += c.span;
    }
    assert_int_equal(at, t->rank + t->span);
    assert_int_equal(zr_tree_child_to(t, t->rank), -1);
    assert_int_equal(zr_tree_child_to(t, t->rank - 1), -1);
    assert_int_equal(zr_tree_child_to(t, at), -1);
}

/* depth is that of each rank. Returns the height of the subtree of rank. */
static int height_below(int rank, int span, const int *depth)
{
    int most = 0;
    for (int x = rank; x < rank + span; x++)
        most = depth[x] - depth[rank] > most ? depth[x] - depth[rank] : most;
    return most;
}

static void check_world(int world, int fan_out)
{
    int *depth = calloc((size_t)world, sizeof *depth);
    assert_non_null(depth);
    for (int r = 0; r < world; r++) {
        struct zr_tree t = zr_tree_of(world, fan_out, r);
        assert_int_equal(t.rank, r);
        assert_true(t.span >= 1 && r + t.span <= world && t.n_children <= fan_out);
        assert_true(r == 0 ? t.parent == -1 : t.parent >= 0 && t.parent < r);
        check_children(world, fan_out, &t);
        depth[r] = r ? depth[t.parent] + 1 : 0;
    }
    for (int r = 0; r < world; r++) {
        struct zr_tree t = zr_tree_of(world, fan_out, r);
        assert_int_equal(zr_tree_height(t, fan_out), height_below(r, t.span, depth));
    }
    free(depth);
}

static void test_worlds(void **state)
{
    for (size_t i = 0; i < sizeof fan_outs / sizeof *fan_outs; i++)
        for (int world = 1; world <= 400; world += fan_outs[i] == 1 ? 37 : 1)
            check_world(world, fan_outs[i]);
    check_world(4096, ZR_TREE_FAN_OUT);
    check_world(4161, ZR_TREE_FAN_OUT);
    check_world(5000, ZR_TREE_FAN_OUT);
}

/* The tree is a star while one level is enough, and has two levels beyond that. */
static void test_shape(void **state)
{
    for (int world = 1; world <= ZR_TREE_FAN_OUT + 1; world++)
        assert_true(zr_tree_height(zr_tree_of(world, ZR_TREE_FAN_OUT, 0), ZR_TREE_FAN_OUT) == (world > 1));
    for (int world = ZR_TREE_FAN_OUT + 2; world <= 64 + 64 * 64 + 1; world++)
        assert_int_equal(zr_tree_height(zr_tree_of(world, ZR_TREE_FAN_OUT, 0), ZR_TREE_FAN_OUT), 2);
    struct zr_tree t = zr_tree_of(128, ZR_TREE_FAN_OUT, 0);
    assert_int_equal(t.n_children, 64);
    assert_int_equal(t.each, 2);
    t = zr_tree_of(4161, ZR_TREE_FAN_OUT, 66);
    assert_int_equal(t.parent, 0);
    assert_int_equal(t.span, 65);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_worlds), cmocka_unit_test(test_shape)};
    return cmocka_run_group_tests_name("tree", tests, NULL, NULL);
}
