/* graph_net.h: a computational graph in the manner of KANN: nodes with an operator each, in an array in
 * topological order. The values and gradients of all trained nodes lie in two collated vectors, x and g, into
 * which the nodes point; an optimizer sees only the vectors. */
#ifndef TEST_GRAPH_NET_H
#define TEST_GRAPH_NET_H

#include <stdint.h>

enum { GN_VAR = 1, GN_CONST = 2, GN_FEED = 4 }; /* flags of a leaf */
enum { GN_FORWARD, GN_BACKWARD };

struct gnode {
    uint8_t flag;  /* leaves only */
    uint8_t n_dim; /* of d; d[0] of an inner node is the batch */
    int d[2];
    int n_child;
    struct gnode *child[2];
    int (*op)(struct gnode *p, int action); /* NULL: a leaf */
    int layer;                              /* of the net; -1: none */
    char label[32];
    float *x; /* value; of a variable: into the collated x */
    float *g; /* gradient; NULL for what is not trained */
};

struct gnet {
    int n;
    struct gnode **v;
    int n_var; /* elements of all variables */
    float *x;  /* (n_var) */
    float *g;  /* (n_var) */
    struct gnode *in, *truth, *cost;
};

/* A classifier of pairs of numbers: in -> dense "in" -> shared -> dense "mid" -> the same shared once more ->
 * dense "out"
 * -> sigmoid and cross-entropy. freeze_mid: that layer is constant. NULL without memory. */
#define GN_IN     8 /* bits: two numbers of 4 */
#define GN_OUT    5 /* bits of their sum */
#define GN_HIDDEN 14
#define GN_LAYERS 4
struct gnet *gnet_new(int batch, uint64_t seed, int freeze_mid);
void gnet_free(struct gnet *a);

/* Runs the graph on what in->x and truth->x hold; returns the mean cost, with gradients if cal_grad. */
float gnet_cost(struct gnet *a, int cal_grad);
void gnet_grad(struct gnet *a); /* the gradients alone, after gnet_cost(a, 0) */

/* The same node by node: gnet_cost is gnet_node(FORWARD) for i in 0..n-1, gnet_seed(), and
 * gnet_node(BACKWARD) for i in n-1..0. */
void gnet_node(struct gnet *a, int i, int action);
void gnet_seed(struct gnet *a); /* zeroes the gradients of the inner nodes, but the cost's: 1 */

/* Zeroes the gradients of the variables that have one, as frameworks of this kind do before each pass. */
void gnet_zero_grad(struct gnet *a);

/* Hinton's RMSprop over n elements of a collated vector x; r: its running mean square. */
void gnet_rmsprop(int n, float lr, float decay, const float *g, float *x, float *r);

#endif
