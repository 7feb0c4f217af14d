/* SPDX-License-Identifier: Apache-2.0 */
/* graph_net.h: a computational graph like KANN's: nodes with one operator each, in an array in topological
 * order. The values and gradients of all trained nodes are in two vectors, x and g. The nodes point into
 * these, and an optimizer sees only the vectors. */
#ifndef TEST_GRAPH_NET_H
#define TEST_GRAPH_NET_H

#include <stdint.h>

/* Flags of a leaf. */
enum { GN_VAR = 1, GN_CONST = 2, GN_FEED = 4 };
enum { GN_FORWARD, GN_BACKWARD };

struct gnode {
    /* for leaves only */
    uint8_t flag;
    /* number of used elements of d; d[0] of an inner node is the batch */
    uint8_t n_dim;
    int d[2];
    int n_child;
    struct gnode *child[2];
    /* NULL: a leaf */
    int (*op)(struct gnode *p, int action);
    /* the net's layer that it belongs to; -1: none */
    int layer;
    char label[32];
    /* value; a variable's value is in the net's x */
    float *x;
    /* gradient; NULL if not trained */
    float *g;
};

struct gnet {
    int n;
    struct gnode **v;
    /* elements of all variables */
    int n_var;
    /* (n_var) values and gradients of the variables */
    float *x, *g;
    struct gnode *in, *truth, *cost;
};

/* A classifier of pairs of numbers: in -> dense "in" -> shared -> dense "mid" -> shared again -> dense
 * "out" -> sigmoid and cross-entropy. freeze_mid makes that layer constant. Returns NULL without memory. */
#define GN_IN     8 /* bits: two numbers of 4 bits */
#define GN_OUT    5 /* bits of their sum */
#define GN_HIDDEN 14
#define GN_LAYERS 4
struct gnet *gnet_new(int batch, uint64_t seed, int freeze_mid);
void gnet_free(struct gnet *a);

/* Runs the graph on the contents of in->x and truth->x. Returns the mean cost, and computes gradients if
 * cal_grad. */
float gnet_cost(struct gnet *a, int cal_grad);
/* Computes the gradients, after gnet_cost(a, 0). */
void gnet_grad(struct gnet *a);

/* Does the same node by node. gnet_cost is gnet_node(FORWARD) for i in 0..n-1, gnet_seed(), and
 * gnet_node(BACKWARD) for i in n-1..0. */
void gnet_node(struct gnet *a, int i, int action);
/* Sets the gradients of the inner nodes to zero, and that of the cost to 1. */
void gnet_seed(struct gnet *a);

/* Zeroes the gradients of the variables, as frameworks of this kind do before each pass. */
void gnet_zero_grad(struct gnet *a);

/* Hinton's RMSprop over n elements of a vector x; r is its running mean square. */
void gnet_rmsprop(int n, float lr, float decay, const float *g, float *x, float *r);

#endif
