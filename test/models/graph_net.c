/* SPDX-License-Identifier: Apache-2.0 */
/* graph_net.c: the operators, the builder and the runs of graph_net.h. */
#include "test/models/graph_net.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_NODES 40

static int node_len(const struct gnode *p)
{
    int n = 1;
    for (int i = 0; i < p->n_dim; i++)
        n *= p->d[i];
    return n;
}

/* --- operators --------------------------------------------------------------------------------------------
 */

/* (B, n) times (m, n)^T: (B, m) */
static int op_cmul(struct gnode *p, int action)
{
    struct gnode *q = p->child[0], *w = p->child[1];
    int B = q->d[0], n = q->d[1], m = w->d[0];
    for (int b = 0; b < B; b++)
        for (int j = 0; j < m; j++) {
            const float *row = w->x + j * n, *in = q->x + b * n;
            if (action == GN_FORWARD) {
                float s = 0.0f;
                for (int i = 0; i < n; i++)
                    s += in[i] * row[i];
                p->x[b * m + j] = s;
            } else {
                float d = p->g[b * m + j];
                for (int i = 0; i < n && q->g; i++)
                    q->g[b * n + i] += d * row[i];
                for (int i = 0; i < n && w->g; i++)
                    w->g[j * n + i] += d * in[i];
            }
        }
    return 0;
}

/* (B, m) plus (m) on each row */
static int op_add(struct gnode *p, int action)
{
    struct gnode *q = p->child[0], *c = p->child[1];
    int B = q->d[0], m = q->d[1];
    for (int b = 0; b < B; b++)
        for (int j = 0; j < m; j++) {
            if (action == GN_FORWARD) {
                p->x[b * m + j] = q->x[b * m + j] + c->x[j];
            } else {
                if (q->g)
                    q->g[b * m + j] += p->g[b * m + j];
                if (c->g)
                    c->g[j] += p->g[b * m + j];
            }
        }
    return 0;
}

static int op_tanh(struct gnode *p, int action)
{
    struct gnode *q = p->child[0];
    for (int i = 0, n = node_len(p); i < n; i++) {
        if (action == GN_FORWARD)
            p->x[i] = tanhf(q->x[i]);
        else
            q->g[i] += p->g[i] * (1.0f - p->x[i] * p->x[i]);
    }
    return 0;
}

static int op_sigm(struct gnode *p, int action)
{
    struct gnode *q = p->child[0];
    for (int i = 0, n = node_len(p); i < n; i++) {
        if (action == GN_FORWARD)
            p->x[i] = 1.0f / (1.0f + expf(-q->x[i]));
        else
            q->g[i] += p->g[i] * (p->x[i] * (1.0f - p->x[i]));
    }
    return 0;
}

/* Binary cross-entropy of predictions (B, m) and truth (B, m): the sum over m, averaged over the batch,
 * (1). */
static int op_ce_bin(struct gnode *p, int action)
{
    static const float tiny = 1e-9f;
    struct gnode *y = p->child[0], *t = p->child[1];
    int n = node_len(y);
    float scale = 1.0f / (float)y->d[0], cost = 0.0f;
    for (int i = 0; i < n; i++) {
        if (action == GN_FORWARD)
            cost -= t->x[i] * logf(y->x[i] + tiny) + (1.0f - t->x[i]) * logf(1.0f - y->x[i] + tiny);
        else
            y->g[i] -=
                p->g[0] * scale * (t->x[i] / (y->x[i] + tiny) - (1.0f - t->x[i]) / (1.0f - y->x[i] + tiny));
    }
    if (action == GN_FORWARD)
        p->x[0] = cost * scale;
    return 0;
}

/* --- building ---------------------------------------------------------------------------------------------
 */

struct builder {
    struct gnet *a;
    int layer, failed;
    uint64_t random;
};

static struct gnode *new_node(struct builder *b, int n_dim, int d0, int d1)
{
    struct gnode *p = calloc(1, sizeof *p);
    if (p == NULL || b->a->n == MAX_NODES) {
        free(p);
        b->failed = 1;
        return NULL;
    }
    b->a->v[b->a->n++] = p;
    p->n_dim = (uint8_t)n_dim;
    p->d[0] = d0;
    p->d[1] = d1;
    p->layer = -1;
    p->x = calloc((size_t)node_len(p), sizeof(float));
    p->g = calloc((size_t)node_len(p), sizeof(float));
    if (p->x == NULL || p->g == NULL)
        b->failed = 1;
    return p;
}

static struct gnode *feed(struct builder *b, int batch, int m)
{
    struct gnode *p = new_node(b, 2, batch, m);
    if (p != NULL) {
        p->flag = GN_FEED;
        free(p->g);
        p->g = NULL;
    }
    return p;
}

static struct gnode *var(struct builder *b, const char *label, uint8_t flag, int n_dim, int m, int n)
{
    struct gnode *p = new_node(b, n_dim, m, n);
    if (p == NULL)
        return NULL;
    p->flag = flag;
    p->layer = b->layer;
    snprintf(p->label, sizeof p->label, "%s", label);
    for (int i = 0; i < node_len(p) && n_dim == 2 && !b->failed; i++) {
        b->random = b->random * 6364136223846793005u + 1442695040888963407u;
        p->x[i] = ((float)(b->random >> 40) * 0x1p-23f - 1.0f) * sqrtf(3.0f / (float)n);
    }
    return p;
}

static struct gnode *apply(struct builder *b, int (*op)(struct gnode *, int), struct gnode *q,
                           struct gnode *r, int m)
{
    if (b->failed)
        return NULL;
    struct gnode *p = op == op_ce_bin ? new_node(b, 1, 1, 0) : new_node(b, 2, q->d[0], m);
    if (p == NULL)
        return NULL;
    p->op = op;
    p->child[0] = q;
    p->child[1] = r;
    p->n_child = r ? 2 : 1;
    p->layer = b->layer;
    return p;
}

struct dense {
    struct gnode *w, *b;
    int m, layer;
};

static struct dense new_dense(struct builder *b, const char *name, uint8_t flag, int m, int n)
{
    struct dense d = {.m = m, .layer = b->layer};
    char label[32];
    snprintf(label, sizeof label, "%s.w", name);
    d.w = var(b, label, flag, 2, m, n);
    snprintf(label, sizeof label, "%s.b", name);
    d.b = var(b, label, flag, 1, m, 0);
    b->layer++;
    return d;
}

static struct gnode *dense(struct builder *b, struct dense d, struct gnode *in)
{
    int layer = b->layer;
    b->layer = d.layer;
    struct gnode *p = apply(b, op_add, apply(b, op_cmul, in, d.w, d.m), d.b, d.m);
    b->layer = layer;
    return p;
}

/* Moves all variables into one vector, and their gradients into another. */
static int collate(struct gnet *a)
{
    for (int i = 0; i < a->n; i++)
        if (a->v[i]->flag & (GN_VAR | GN_CONST))
            a->n_var += node_len(a->v[i]);
    a->x = calloc((size_t)a->n_var, sizeof(float));
    a->g = calloc((size_t)a->n_var, sizeof(float));
    if (a->x == NULL || a->g == NULL)
        return -1;
    int at = 0;
    for (int i = 0; i < a->n; i++) {
        struct gnode *p = a->v[i];
        if (!(p->flag & (GN_VAR | GN_CONST)))
            continue;
        memcpy(a->x + at, p->x, (size_t)node_len(p) * sizeof(float));
        free(p->x);
        free(p->g);
        p->x = a->x + at;
        p->g = p->flag & GN_CONST ? NULL : a->g + at;
        at += node_len(p);
    }
    return 0;
}

struct gnet *gnet_new(int batch, uint64_t seed, int freeze_mid)
{
    struct gnet *a = calloc(1, sizeof *a);
    if (a == NULL)
        return NULL;
    struct builder b = {.a = a, .random = seed};
    a->v = calloc(MAX_NODES, sizeof *a->v);
    if (a->v == NULL) {
        free(a);
        return NULL;
    }
    a->in = feed(&b, batch, GN_IN);
    a->truth = feed(&b, batch, GN_OUT);
    struct dense in = new_dense(&b, "in", GN_VAR, GN_HIDDEN, GN_IN);
    struct dense shared = new_dense(&b, "shared", GN_VAR, GN_HIDDEN, GN_HIDDEN);
    struct dense mid = new_dense(&b, "mid", freeze_mid ? GN_CONST : GN_VAR, GN_HIDDEN, GN_HIDDEN);
    struct dense out = new_dense(&b, "out", GN_VAR, GN_OUT, GN_HIDDEN);
    b.layer = -1; /* later nodes have no variables, except those of dense() */
    struct gnode *t = apply(&b, op_tanh, dense(&b, in, a->in), NULL, GN_HIDDEN);
    t = apply(&b, op_tanh, dense(&b, shared, t), NULL, GN_HIDDEN);
    t = apply(&b, op_tanh, dense(&b, mid, t), NULL, GN_HIDDEN);
    t = apply(&b, op_tanh, dense(&b, shared, t), NULL, GN_HIDDEN);
    t = apply(&b, op_sigm, dense(&b, out, t), NULL, GN_OUT);
    a->cost = apply(&b, op_ce_bin, t, a->truth, 1);
    if (b.failed || collate(a) != 0) {
        gnet_free(a);
        return NULL;
    }
    return a;
}

void gnet_free(struct gnet *a)
{
    if (a == NULL)
        return;
    int collated = a->x != NULL || a->n_var > 0;
    for (int i = 0; i < a->n; i++) {
        struct gnode *p = a->v[i];
        if (!(collated && (p->flag & (GN_VAR | GN_CONST)))) {
            free(p->x);
            free(p->g);
        }
        free(p);
    }
    free(a->x);
    free(a->g);
    free(a->v);
    free(a);
}

/* --- running ----------------------------------------------------------------------------------------------
 */

void gnet_node(struct gnet *a, int i, int action)
{
    if (a->v[i]->op != NULL)
        a->v[i]->op(a->v[i], action);
}

void gnet_seed(struct gnet *a)
{
    for (int i = 0; i < a->n; i++)
        if (a->v[i]->n_child > 0)
            memset(a->v[i]->g, 0, (size_t)node_len(a->v[i]) * sizeof(float));
    a->cost->g[0] = 1.0f;
}

void gnet_zero_grad(struct gnet *a)
{
    for (int i = 0; i < a->n; i++)
        if ((a->v[i]->flag & GN_VAR) && a->v[i]->g != NULL)
            memset(a->v[i]->g, 0, (size_t)node_len(a->v[i]) * sizeof(float));
}

void gnet_grad(struct gnet *a)
{
    gnet_seed(a);
    for (int i = a->n; i-- > 0;)
        gnet_node(a, i, GN_BACKWARD);
}

float gnet_cost(struct gnet *a, int cal_grad)
{
    for (int i = 0; i < a->n; i++)
        gnet_node(a, i, GN_FORWARD);
    if (cal_grad)
        gnet_grad(a);
    return a->cost->x[0];
}

void gnet_rmsprop(int n, float lr, float decay, const float *g, float *x, float *r)
{
    for (int i = 0; i < n; i++) {
        r[i] = (1.0f - decay) * g[i] * g[i] + decay * r[i];
        x[i] -= lr * g[i] / sqrtf(1e-6f + r[i]);
    }
}
