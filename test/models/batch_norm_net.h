/* SPDX-License-Identifier: Apache-2.0 */
/* batch_norm_net.h: a small classifier with batch normalization (arXiv:1502.03167): linear, normalize, relu,
 * linear, normalize, relu, linear, softmax. Training normalizes by the statistics of the micro-batch, and
 * evaluation by running ones, which the net keeps per step: the mean over the step's micro-batches moves them
 * by a part of MOMENTUM. */
#ifndef TEST_BATCH_NORM_NET_H
#define TEST_BATCH_NORM_NET_H

#include <stdint.h>

#define BN_LAYERS  3
#define BN_INPUTS  10
#define BN_WIDTH   12
#define BN_CLASSES 3
#define BN_ROWS    24 /* of a micro-batch, and of an evaluation */

/* One linear layer and, but for the last, its normalization. */
struct bn_layer {
    int inputs, outputs;
    /* (outputs, inputs) and (outputs) */
    float *w, *b, *dw, *db;
    /* (outputs); NULL: not normalized */
    float *gamma, *beta, *dgamma, *dbeta;
    /* (outputs) */
    float *running_mean, *running_variance;
    /* (1) micro-batches seen, by all ranks together */
    int64_t *n_batches;
    /* of this step's micro-batches */
    double mean_sum[BN_WIDTH], variance_sum[BN_WIDTH];
    /* Of the last forward: normalized and its factor, before relu. */
    float x[BN_ROWS * BN_WIDTH], normal[BN_ROWS * BN_WIDTH], y[BN_ROWS * BN_WIDTH], factor[BN_WIDTH];
};

struct bn_net {
    struct bn_layer layers[BN_LAYERS];
    /* of the output of the layer that backward comes to next */
    float delta[BN_ROWS * BN_WIDTH];
};

/* 0, or -1 without memory. */
int bn_open(struct bn_net *net, uint64_t seed);
/* Frees what the net still has. */
void bn_close(struct bn_net *net);

/* Rows of micro-batch `micro` of a step: (BN_ROWS, BN_INPUTS), and the class of each. */
void bn_data(uint64_t seed, int step, int micro, float *input, int *truth);

/* Layer l, whose input is (BN_ROWS, inputs). training 0: by the running statistics. */
void bn_forward(struct bn_layer *l, const float *input, int training);
/* From the last layer's output: the loss, mean over rows, and net->delta. */
double bn_loss(struct bn_net *net, const int *truth);
/* Adds to the layer's gradients, and takes net->delta to its input's. */
void bn_backward(struct bn_net *net, int layer);
/* The running statistics go on, by the n micro-batches of this rank since the last time; all: of all ranks.
 */
void bn_run(struct bn_layer *l, int n, int all);

#endif
