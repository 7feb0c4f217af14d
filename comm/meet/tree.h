/* SPDX-License-Identifier: Apache-2.0 */
/* tree.h: the ranks of a world as a tree. What is below a rank is a run of ranks behind it, [rank, rank +
 * span): blobs that it gathers from there are in rank order, and what is lost with it is a range. Up to
 * fan_out + 1 ranks it is a star.
 *
 * Pure arithmetic, O(depth). */
#ifndef ZR_COMM_TREE_H
#define ZR_COMM_TREE_H

enum { ZR_TREE_FAN_OUT = 64 };

struct zr_tree {
    int rank;
    /* -1: of rank 0 */
    int parent;
    /* ranks from this one on that are below it, itself included */
    int span;
    /* child k is rank + 1 + k * each, and has `each` ranks, the last maybe fewer */
    int n_children, each;
};

static inline struct zr_tree zr_tree_of(int world, int fan_out, int rank)
{
    struct zr_tree t = {.parent = -1, .span = world};
    for (;;) {
        int below = t.span - 1;
        t.each = (below + fan_out - 1) / fan_out;
        t.n_children = below ? (below + t.each - 1) / t.each : 0;
        if (t.rank == rank)
            return t;
        int child = t.rank + 1 + (rank - t.rank - 1) / t.each * t.each;
        int left = t.rank + t.span - child;
        t.parent = t.rank;
        t.span = left < t.each ? left : t.each;
        t.rank = child;
    }
}

static inline int zr_tree_child(const struct zr_tree *t, int k)
{
    return t->rank + 1 + k * t->each;
}

/* Ranks of child k's run. */
static inline int zr_tree_child_span(const struct zr_tree *t, int k)
{
    int left = t->rank + t->span - zr_tree_child(t, k);
    return left < t->each ? left : t->each;
}

/* Which child's run a rank lies in; -1: it is not below, or it is t's own. */
static inline int zr_tree_child_to(const struct zr_tree *t, int rank)
{
    return rank > t->rank && rank < t->rank + t->span ? (rank - t->rank - 1) / t->each : -1;
}

/* Links between this rank and the furthest below it. The first child's run is as long as any. */
static inline int zr_tree_height(struct zr_tree t, int fan_out)
{
    int height = 0;
    for (int span = t.span; span > 1; height++)
        span = (span - 1 + fan_out - 1) / fan_out;
    return height;
}

#endif
