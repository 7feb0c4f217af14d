/* SPDX-License-Identifier: Apache-2.0 */
/* batch_norm_net.h: a small classifier with batch normalization (arXiv:1502.03167): linear, normalize,
 * relu, linear, normalize, relu, linear, softmax.
 *
 * Training normalizes by the statistics of the micro-batch, and evaluation by running statistics. Once per
 * step the mean over the step's micro-batches moves these by a part of MOMENTUM. */
#ifndef TEST_BATCH_NORM_NET_H
#define TEST_BATCH_NORM_NET_H

#include <stdint.h>

#define BN_LAYERS  3
#define BN_INPUTS  10
#define BN_WIDTH   12
#define BN_CLASSES 3
#define BN_ROWS    24 /* rows of a micro-batch, and of an evaluation */

/* One linear layer and its normalization, which the last layer lacks. */
struct bn_layer {
    int inputs, outputs;
    /* (outputs, inputs) and (outputs) */
    float *w, *b, *dw, *db;
    /* (outputs); NULL: not normalized */
    float *gamma, *beta, *dgamma, *dbeta;
    /* (outputs) */
    float *running_mean, *running_variance;
    /* (1) micro-batches seen by all ranks together */
    int64_t *n_batches;
    /* sums over this step's micro-batches */
    double mean_sum[BN_WIDTH], variance_sum[BN_WIDTH];
    /* From the last forward: the normalized values, their factor, and the output before relu. */
    float x[BN_ROWS * BN_WIDTH], normal[BN_ROWS * BN_WIDTH], y[BN_ROWS * BN_WIDTH], factor[BN_WIDTH];
};

struct bn_net {
    struct bn_layer layers[BN_LAYERS];
    /* gradient of the output of the layer that backward reaches next */
    float delta[BN_ROWS * BN_WIDTH];
};

/* Returns 0, or -1 without memory. */
int bn_open(struct bn_net *net, uint64_t seed);
/* Frees all memory that the net holds. */
void bn_close(struct bn_net *net);

/* Fills the rows of a step's micro-batch `micro`, (BN_ROWS, BN_INPUTS), and the class of each row. */
void bn_data(uint64_t seed, int step, int micro, float *input, int *truth);

/* Runs layer l, whose input is (BN_ROWS, inputs). With training 0 it uses the running statistics. */
void bn_forward(struct bn_layer *l, const float *input, int training);
/* Computes the loss of the last layer's output, as a mean over rows, and net->delta. */
double bn_loss(struct bn_net *net, const int *truth);
/* Adds to the layer's gradients, and turns net->delta into that of its input. */
void bn_backward(struct bn_net *net, int layer);
/* Updates the running statistics by the n micro-batches of this rank since the last call; all is the
 * number over all ranks. */
void bn_run(struct bn_layer *l, int n, int all);

#endif
