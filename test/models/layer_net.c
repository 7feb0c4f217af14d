/* SPDX-License-Identifier: Apache-2.0 */
/* layer_net.c: the layers of layer_net.h. */
#include "test/models/layer_net.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define LEAK 0.1f

static float random_weight(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)(*state >> 40) * 0x1p-23f - 1.0f;
}

static void axpy(int n, float a, const float *x, float *y)
{
    for (int i = 0; i < n; i++)
        y[i] += a * x[i];
}

static void scal(int n, float a, float *x)
{
    for (int i = 0; i < n; i++)
        x[i] *= a;
}

static void activate(struct layer l)
{
    if (!l.linear)
        for (int i = 0; i < l.batch * l.outputs; i++)
            l.output[i] = l.output[i] > 0.0f ? l.output[i] : LEAK * l.output[i];
}

static void gradient(struct layer l)
{
    if (!l.linear)
        for (int i = 0; i < l.batch * l.outputs; i++)
            l.delta[i] *= l.output[i] > 0.0f ? 1.0f : LEAK;
}

/* --- convolutional ----------------------------------------------------------------------------------------
 */

/* Index of the image element under filter element (ky, kx) at output (y, x), or -1 if it is outside. */
static int under(struct layer l, int k, int y, int x, int ky, int kx)
{
    int iy = y + ky - l.pad, ix = x + kx - l.pad;
    return iy < 0 || ix < 0 || iy >= l.h || ix >= l.w ? -1 : (k * l.h + iy) * l.w + ix;
}

static void forward_convolutional(struct layer l, struct pass p)
{
    for (int b = 0; b < l.batch; b++)
        for (int o = 0; o < l.out_c; o++)
            for (int y = 0; y < l.out_h; y++)
                for (int x = 0; x < l.out_w; x++) {
                    float sum = l.biases[o];
                    for (int k = 0; k < l.c; k++)
                        for (int ky = 0; ky < l.size; ky++)
                            for (int kx = 0; kx < l.size; kx++) {
                                int i = under(l, k, y, x, ky, kx);
                                if (i >= 0)
                                    sum += l.weights[((o * l.c + k) * l.size + ky) * l.size + kx] *
                                           p.input[b * l.inputs + i];
                            }
                    l.output[b * l.outputs + (o * l.out_h + y) * l.out_w + x] = sum;
                }
    activate(l);
}

/* Sums over the whole batch before it adds to the updates. */
static void backward_convolutional(struct layer l, struct pass p)
{
    gradient(l);
    int area = l.out_h * l.out_w;
    for (int o = 0; o < l.out_c && !l.frozen; o++) {
        float bias = 0.0f;
        for (int b = 0; b < l.batch; b++)
            for (int i = 0; i < area; i++)
                bias += l.delta[b * l.outputs + o * area + i];
        l.bias_updates[o] += bias;
        for (int k = 0; k < l.c; k++)
            for (int ky = 0; ky < l.size; ky++)
                for (int kx = 0; kx < l.size; kx++) {
                    float sum = 0.0f;
                    for (int b = 0; b < l.batch; b++)
                        for (int y = 0; y < l.out_h; y++)
                            for (int x = 0; x < l.out_w; x++) {
                                int i = under(l, k, y, x, ky, kx);
                                if (i >= 0)
                                    sum += l.delta[b * l.outputs + (o * l.out_h + y) * l.out_w + x] *
                                           p.input[b * l.inputs + i];
                            }
                    l.weight_updates[((o * l.c + k) * l.size + ky) * l.size + kx] += sum;
                }
    }
    if (p.delta == NULL)
        return;
    for (int b = 0; b < l.batch; b++)
        for (int o = 0; o < l.out_c; o++)
            for (int y = 0; y < l.out_h; y++)
                for (int x = 0; x < l.out_w; x++)
                    for (int k = 0; k < l.c; k++)
                        for (int ky = 0; ky < l.size; ky++)
                            for (int kx = 0; kx < l.size; kx++) {
                                int i = under(l, k, y, x, ky, kx);
                                if (i >= 0)
                                    p.delta[b * l.inputs + i] +=
                                        l.weights[((o * l.c + k) * l.size + ky) * l.size + kx] *
                                        l.delta[b * l.outputs + (o * l.out_h + y) * l.out_w + x];
                            }
}

/* --- maxpool ----------------------------------------------------------------------------------------------
 */

static void forward_maxpool(struct layer l, struct pass p)
{
    for (int b = 0; b < l.batch; b++)
        for (int k = 0; k < l.c; k++)
            for (int y = 0; y < l.out_h; y++)
                for (int x = 0; x < l.out_w; x++) {
                    int best = -1;
                    for (int i = 0; i < l.size * l.size; i++) {
                        int at = b * l.inputs + (k * l.h + y * l.size + i / l.size) * l.w + x * l.size +
                                 i % l.size;
                        if (best < 0 || p.input[at] > p.input[best])
                            best = at;
                    }
                    int out = b * l.outputs + (k * l.out_h + y) * l.out_w + x;
                    l.indexes[out] = best;
                    l.output[out] = p.input[best];
                }
}

static void backward_maxpool(struct layer l, struct pass p)
{
    for (int i = 0; i < l.batch * l.outputs; i++)
        p.delta[l.indexes[i]] += l.delta[i];
}

/* --- connected --------------------------------------------------------------------------------------------
 */

static void forward_connected(struct layer l, struct pass p)
{
    for (int b = 0; b < l.batch; b++)
        for (int o = 0; o < l.outputs; o++) {
            float sum = l.biases[o];
            for (int i = 0; i < l.inputs; i++)
                sum += l.weights[o * l.inputs + i] * p.input[b * l.inputs + i];
            l.output[b * l.outputs + o] = sum;
        }
    activate(l);
}

static void backward_connected(struct layer l, struct pass p)
{
    gradient(l);
    for (int o = 0; o < l.outputs && !l.frozen; o++) {
        float bias = 0.0f;
        for (int b = 0; b < l.batch; b++)
            bias += l.delta[b * l.outputs + o];
        l.bias_updates[o] += bias;
        for (int i = 0; i < l.inputs; i++) {
            float sum = 0.0f;
            for (int b = 0; b < l.batch; b++)
                sum += l.delta[b * l.outputs + o] * p.input[b * l.inputs + i];
            l.weight_updates[o * l.inputs + i] += sum;
        }
    }
    if (p.delta != NULL)
        for (int b = 0; b < l.batch; b++)
            for (int o = 0; o < l.outputs; o++)
                axpy(l.inputs, l.delta[b * l.outputs + o], l.weights + o * l.inputs, p.delta + b * l.inputs);
}

/* --- softmax and cost -------------------------------------------------------------------------------------
 */

static void forward_softmax(struct layer l, struct pass p)
{
    *l.cost = 0.0f;
    for (int b = 0; b < l.batch; b++) {
        const float *in = p.input + b * l.inputs;
        float *out = l.output + b * l.outputs, max = in[0], sum = 0.0f;
        for (int i = 1; i < l.inputs; i++)
            max = in[i] > max ? in[i] : max;
        for (int i = 0; i < l.inputs; i++)
            sum += out[i] = expf(in[i] - max);
        for (int i = 0; i < l.inputs; i++) {
            out[i] /= sum;
            l.delta[b * l.outputs + i] = p.truth[b * l.outputs + i] - out[i];
            if (p.truth[b * l.outputs + i] > 0.0f)
                *l.cost -= logf(out[i]);
        }
    }
}

static void backward_softmax(struct layer l, struct pass p)
{
    axpy(l.batch * l.inputs, 1.0f, l.delta, p.delta);
}

/* --- the net ----------------------------------------------------------------------------------------------
 */

static int make_layer(struct layer *l, int batch)
{
    size_t n = (size_t)(batch * l->outputs);
    l->batch = batch;
    l->output = calloc(n, sizeof(float));
    l->delta = calloc(n, sizeof(float));
    int missing = l->output == NULL || l->delta == NULL;
    if (l->n_weights > 0) {
        l->weights = calloc((size_t)l->n_weights, sizeof(float));
        l->biases = calloc((size_t)l->n_biases, sizeof(float));
        l->weight_updates = calloc((size_t)l->n_weights, sizeof(float));
        l->bias_updates = calloc((size_t)l->n_biases, sizeof(float));
        missing |=
            l->weights == NULL || l->biases == NULL || l->weight_updates == NULL || l->bias_updates == NULL;
    }
    if (l->kind == LAYER_MAXPOOL)
        missing |= (l->indexes = calloc(n, sizeof(int))) == NULL;
    if (l->kind == LAYER_SOFTMAX)
        missing |= (l->cost = calloc(1, sizeof(float))) == NULL;
    return missing ? -1 : 0;
}

static struct layer convolutional(int h, int w, int c, int n, int size)
{
    return (struct layer){.kind = LAYER_CONVOLUTIONAL,
                          .h = h,
                          .w = w,
                          .c = c,
                          .out_h = h,
                          .out_w = w,
                          .out_c = n,
                          .inputs = h * w * c,
                          .outputs = h * w * n,
                          .size = size,
                          .pad = size / 2,
                          .n_weights = n * c * size * size,
                          .n_biases = n,
                          .forward = forward_convolutional,
                          .backward = backward_convolutional};
}

static struct layer maxpool(struct layer below, int size)
{
    int h = below.out_h / size, w = below.out_w / size;
    return (struct layer){.kind = LAYER_MAXPOOL,
                          .h = below.out_h,
                          .w = below.out_w,
                          .c = below.out_c,
                          .out_h = h,
                          .out_w = w,
                          .out_c = below.out_c,
                          .inputs = below.outputs,
                          .outputs = h * w * below.out_c,
                          .size = size,
                          .forward = forward_maxpool,
                          .backward = backward_maxpool};
}

static struct layer connected(int inputs, int outputs, int linear)
{
    return (struct layer){.kind = LAYER_CONNECTED,
                          .inputs = inputs,
                          .outputs = outputs,
                          .linear = linear,
                          .n_weights = inputs * outputs,
                          .n_biases = outputs,
                          .forward = forward_connected,
                          .backward = backward_connected};
}

static struct layer softmax(int inputs)
{
    return (struct layer){.kind = LAYER_SOFTMAX,
                          .inputs = inputs,
                          .outputs = inputs,
                          .forward = forward_softmax,
                          .backward = backward_softmax};
}

struct net *net_new(int batch, uint64_t seed)
{
    struct net *net = calloc(1, sizeof *net);
    if (net == NULL)
        return NULL;
    net->n = 5;
    net->batch = batch;
    net->learning_rate = 0.1f;
    net->momentum = 0.9f;
    net->decay = 0.0005f;
    net->layers = calloc((size_t)net->n, sizeof *net->layers);
    if (net->layers == NULL) {
        free(net);
        return NULL;
    }
    struct layer *l = net->layers;
    l[0] = convolutional(NET_SIDE, NET_SIDE, 1, 5, 3);
    l[1] = maxpool(l[0], 2);
    l[2] = connected(l[1].outputs, 18, 0);
    l[3] = connected(l[2].outputs, NET_CLASSES, 1);
    l[4] = softmax(NET_CLASSES);
    for (int i = 0; i < net->n; i++) {
        if (make_layer(&l[i], batch) != 0) {
            net_free(net);
            return NULL;
        }
        float scale = l[i].n_weights > 0 ? sqrtf(2.0f * (float)l[i].n_biases / (float)l[i].n_weights) : 0.0f;
        for (int k = 0; k < l[i].n_weights; k++)
            l[i].weights[k] = scale * random_weight(&seed);
    }
    return net;
}

void net_free(struct net *net)
{
    if (net == NULL)
        return;
    for (int i = 0; i < net->n; i++) {
        struct layer l = net->layers[i];
        free(l.weights);
        free(l.biases);
        free(l.weight_updates);
        free(l.bias_updates);
        free(l.output);
        free(l.delta);
        free(l.indexes);
        free(l.cost);
    }
    free(net->layers);
    free(net);
}

struct pass net_pass(const struct net *net, int i, const float *input, const float *truth)
{
    return (struct pass){.input = i > 0 ? net->layers[i - 1].output : input,
                         .delta = i > 0 ? net->layers[i - 1].delta : NULL,
                         .truth = truth};
}

float net_cost(const struct net *net)
{
    return *net->layers[net->n - 1].cost / (float)net->batch;
}

float net_forward(struct net *net, const float *input, const float *truth)
{
    for (int i = 0; i < net->n; i++) {
        struct layer l = net->layers[i];
        memset(l.delta, 0, (size_t)(l.batch * l.outputs) * sizeof(float));
        l.forward(l, net_pass(net, i, input, truth));
    }
    return net_cost(net);
}

void net_backward(struct net *net, const float *input)
{
    for (int i = net->n; i-- > 0;) {
        struct layer l = net->layers[i];
        l.backward(l, net_pass(net, i, input, NULL));
    }
}

void update_weights(int n, float *weights, float *updates, struct update_args a)
{
    axpy(n, -a.decay * (float)a.batch, weights, updates);
    axpy(n, a.learning_rate / (float)a.batch, updates, weights);
    scal(n, a.momentum, updates);
}

void net_update(struct net *net, struct update_args a)
{
    struct update_args no_decay = a;
    no_decay.decay = 0.0f;
    for (int i = 0; i < net->n; i++) {
        struct layer l = net->layers[i];
        if (l.n_weights > 0 && !l.frozen) {
            update_weights(l.n_biases, l.biases, l.bias_updates, no_decay);
            update_weights(l.n_weights, l.weights, l.weight_updates, a);
        }
    }
}
