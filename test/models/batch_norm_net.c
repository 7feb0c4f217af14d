/* SPDX-License-Identifier: Apache-2.0 */
/* batch_norm_net.c: the net of batch_norm_net.h. */
#include "test/models/batch_norm_net.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define MOMENTUM 0.2
#define EPS      1e-5

static uint64_t hash(uint64_t a, uint64_t b)
{
    uint64_t z = (a ^ 0x6a09e667f3bcc909u) * 0x9e3779b97f4a7c15u + b;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static float uniform(uint64_t bits)
{
    return (float)(bits >> 40) * 0x1p-23f - 1.0f;
}

int bn_open(struct bn_net *net, uint64_t seed)
{
    static const int widths[BN_LAYERS + 1] = {BN_INPUTS, BN_WIDTH, BN_WIDTH, BN_CLASSES};
    memset(net, 0, sizeof *net);
    for (int i = 0; i < BN_LAYERS; i++) {
        struct bn_layer *l = &net->layers[i];
        l->inputs = widths[i];
        l->outputs = widths[i + 1];
        size_t n = (size_t)l->outputs, n_w = n * (size_t)l->inputs, size = sizeof(float);
        l->w = calloc(n_w, size);
        l->b = calloc(n, size);
        l->dw = calloc(n_w, size);
        l->db = calloc(n, size);
        if (!l->w || !l->b || !l->dw || !l->db)
            return -1;
        for (size_t k = 0; k < n_w; k++)
            l->w[k] = uniform(hash(hash(seed, (uint64_t)i), k)) * sqrtf(3.0f / (float)l->inputs);
        if (i == BN_LAYERS - 1)
            continue;
        l->gamma = calloc(n, size);
        l->beta = calloc(n, size);
        l->dgamma = calloc(n, size);
        l->dbeta = calloc(n, size);
        l->running_mean = calloc(n, size);
        l->running_variance = calloc(n, size);
        l->n_batches = calloc(1, sizeof *l->n_batches);
        if (!l->gamma || !l->beta || !l->dgamma || !l->dbeta || !l->running_mean || !l->running_variance ||
            !l->n_batches)
            return -1;
        for (size_t k = 0; k < n; k++)
            l->gamma[k] = l->running_variance[k] = 1.0f;
    }
    return 0;
}

void bn_close(struct bn_net *net)
{
    for (int i = 0; i < BN_LAYERS; i++) {
        struct bn_layer *l = &net->layers[i];
        free(l->w);
        free(l->b);
        free(l->dw);
        free(l->db);
        free(l->gamma);
        free(l->beta);
        free(l->dgamma);
        free(l->dbeta);
        free(l->running_mean);
        free(l->running_variance);
        free(l->n_batches);
    }
}

/* A sample's class is the place of the largest of three sums of its coordinates. One coordinate is far
 * from zero, so that the running statistics matter. */
void bn_data(uint64_t seed, int step, int micro, float *input, int *truth)
{
    for (int r = 0; r < BN_ROWS; r++) {
        uint64_t bits = hash(hash(seed, (uint64_t)step), (uint64_t)(micro * BN_ROWS + r));
        float sum[BN_CLASSES] = {0}, *x = input + (ptrdiff_t)r * BN_INPUTS;
        for (int i = 0; i < BN_INPUTS; i++) {
            bits = hash(bits, (uint64_t)i);
            x[i] = uniform(bits) * (float)(1 + i % 3) + (float)(2 * (i % 4));
            sum[i % BN_CLASSES] += uniform(bits);
        }
        truth[r] = 0;
        for (int c = 1; c < BN_CLASSES; c++)
            truth[r] = sum[c] > sum[truth[r]] ? c : truth[r];
    }
}

/* Normalizes one output over the rows. */
static void normalize(struct bn_layer *l, int o, int training)
{
    double mean = (double)l->running_mean[o], variance = (double)l->running_variance[o];
    if (training) {
        mean = variance = 0;
        for (int r = 0; r < BN_ROWS; r++)
            mean += (double)l->y[r * l->outputs + o] / BN_ROWS;
        for (int r = 0; r < BN_ROWS; r++)
            variance += pow((double)l->y[r * l->outputs + o] - mean, 2) / BN_ROWS;
        l->mean_sum[o] += mean;
        l->variance_sum[o] += variance;
    }
    l->factor[o] = (float)(1.0 / sqrt(variance + EPS));
    for (int r = 0; r < BN_ROWS; r++) {
        int i = r * l->outputs + o;
        l->normal[i] = (float)((double)l->y[i] - mean) * l->factor[o];
        l->y[i] = l->gamma[o] * l->normal[i] + l->beta[o];
    }
}

void bn_forward(struct bn_layer *l, const float *input, int training)
{
    memcpy(l->x, input, (size_t)(BN_ROWS * l->inputs) * sizeof(float));
    for (int r = 0; r < BN_ROWS; r++)
        for (int o = 0; o < l->outputs; o++) {
            float sum = l->b[o];
            for (int i = 0; i < l->inputs; i++)
                sum += l->w[o * l->inputs + i] * input[r * l->inputs + i];
            l->y[r * l->outputs + o] = sum;
        }
    for (int o = 0; l->gamma && o < l->outputs; o++)
        normalize(l, o, training);
    for (int i = 0; l->gamma && i < BN_ROWS * l->outputs; i++)
        l->y[i] = l->y[i] > 0.0f ? l->y[i] : 0.0f;
}

double bn_loss(struct bn_net *net, const int *truth)
{
    const struct bn_layer *l = &net->layers[BN_LAYERS - 1];
    double loss = 0.0;
    for (int r = 0; r < BN_ROWS; r++) {
        const float *y = l->y + (ptrdiff_t)r * BN_CLASSES;
        double p[BN_CLASSES], sum = 0.0;
        for (int c = 0; c < BN_CLASSES; c++)
            sum += p[c] = exp((double)y[c]);
        loss -= log(p[truth[r]] / sum) / BN_ROWS;
        for (int c = 0; c < BN_CLASSES; c++)
            net->delta[r * BN_CLASSES + c] = (float)((p[c] / sum - (c == truth[r])) / BN_ROWS);
    }
    return loss;
}

/* Turns delta from that of the normalized output into that of its input. */
static void backward_normalize(struct bn_layer *l, int o, float *delta)
{
    double sum = 0.0, with = 0.0;
    for (int r = 0; r < BN_ROWS; r++) {
        int i = r * l->outputs + o;
        sum += (double)delta[i];
        with += (double)delta[i] * (double)l->normal[i];
    }
    l->dgamma[o] += (float)with;
    l->dbeta[o] += (float)sum;
    for (int r = 0; r < BN_ROWS; r++) {
        int i = r * l->outputs + o;
        double d = (double)delta[i] - sum / BN_ROWS - (double)l->normal[i] * with / BN_ROWS;
        delta[i] = (float)(d * (double)l->gamma[o] * (double)l->factor[o]);
    }
}

void bn_backward(struct bn_net *net, int layer)
{
    struct bn_layer *l = &net->layers[layer];
    float below[BN_ROWS * BN_WIDTH] = {0};
    for (int i = 0; l->gamma && i < BN_ROWS * l->outputs; i++)
        net->delta[i] = l->y[i] > 0.0f ? net->delta[i] : 0.0f;
    for (int o = 0; l->gamma && o < l->outputs; o++)
        backward_normalize(l, o, net->delta);
    for (int r = 0; r < BN_ROWS; r++)
        for (int o = 0; o < l->outputs; o++) {
            float d = net->delta[r * l->outputs + o];
            l->db[o] += d;
            for (int i = 0; i < l->inputs; i++) {
                l->dw[o * l->inputs + i] += d * l->x[r * l->inputs + i];
                below[r * l->inputs + i] += d * l->w[o * l->inputs + i];
            }
        }
    memcpy(net->delta, below, sizeof below);
}

void bn_run(struct bn_layer *l, int n, int all)
{
    for (int o = 0; l->n_batches && o < l->outputs; o++) {
        l->running_mean[o] =
            (float)((1 - MOMENTUM) * (double)l->running_mean[o] + MOMENTUM * l->mean_sum[o] / n);
        l->running_variance[o] =
            (float)((1 - MOMENTUM) * (double)l->running_variance[o] + MOMENTUM * l->variance_sum[o] / n);
        l->mean_sum[o] = l->variance_sum[o] = 0.0;
    }
    if (l->n_batches)
        *l->n_batches += all;
}
