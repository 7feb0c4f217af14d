/* SPDX-License-Identifier: Apache-2.0 */
/* layer_net.h: a small image classifier like darknet's: an array of layer structs, each with its own
 * calloc'd weights and functions. The structs are passed by value.
 *
 * weight_updates and bias_updates hold the NEGATIVE gradient, SUMMED over the batch. The cost layer's delta
 * is truth minus prediction, and net_update adds learning_rate/batch times the updates to the weights. */
#ifndef TEST_LAYER_NET_H
#define TEST_LAYER_NET_H

#include <stdint.h>

enum layer_kind { LAYER_CONVOLUTIONAL, LAYER_MAXPOOL, LAYER_CONNECTED, LAYER_SOFTMAX };

struct layer;

/* The data of a pass through the net. */
struct pass {
    /* (batch, inputs) of this layer */
    const float *input;
    /* (batch, inputs) delta of the layer below, which backward adds to; NULL: there is no layer below */
    float *delta;
    /* (batch, classes) one-hot; NULL in backward */
    const float *truth;
};

struct update_args {
    /* number of images that the updates are summed over */
    int batch;
    float learning_rate, momentum, decay;
};

struct layer {
    enum layer_kind kind;
    int batch;
    /* size of the input image */
    int h, w, c;
    /* size of the output */
    int out_h, out_w, out_c;
    /* per image */
    int inputs, outputs;
    /* side of a filter or pool; zeros around the input image */
    int size, pad;
    int n_weights, n_biases;
    /* 1: no leaky activation */
    int linear;
    /* 1: not trained */
    int frozen;

    /* (out_c, c, size, size) or (outputs, inputs) */
    float *weights;
    /* (out_c) or (outputs) */
    float *biases;
    /* like weights */
    float *weight_updates;
    float *bias_updates;

    /* (batch, outputs) each; delta is the negative gradient of output */
    float *output, *delta;
    /* of a maxpool: the source of each output */
    int *indexes;
    /* of a softmax: (1), summed over the batch */
    float *cost;

    void (*forward)(struct layer, struct pass);
    void (*backward)(struct layer, struct pass);
};

struct net {
    int n, batch;
    struct layer *layers;
    float learning_rate, momentum, decay;
};

/* An 8x8 image with one channel: conv 3x3 to 5, maxpool 2, connected 18, connected n_classes, softmax. */
#define NET_SIDE    8
#define NET_CLASSES 4
/* Returns NULL if there is no memory. */
struct net *net_new(int batch, uint64_t seed);
void net_free(struct net *net);

/* input (batch, 64), truth (batch, classes). net_forward returns the mean cost, as net_cost does after it. */
float net_forward(struct net *net, const float *input, const float *truth);
void net_backward(struct net *net, const float *input);
/* Returns the input of layer i in a pass, for callers that run the layers one by one. */
struct pass net_pass(const struct net *net, int i, const float *input, const float *truth);
float net_cost(const struct net *net);

/* Momentum SGD. Adds the updates to the weights and biases of layers that are trained, and then multiplies
 * the updates by momentum. The next batch adds to what is left. */
void net_update(struct net *net, struct update_args a);
/* Does the same for n weights and their updates. a.decay is 0 for biases. */
void update_weights(int n, float *weights, float *updates, struct update_args a);

#endif
