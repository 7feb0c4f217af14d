/* SPDX-License-Identifier: Apache-2.0 */
/* llama_references.h: reads a folder in references/: a small model, and what transformers computes for it.
 * make_references.py says how each value was made. Failures fail the test, so these functions are for its
 * main thread. */
#ifndef ZR_TEST_BENCH_LLAMA_REFERENCES_H
#define ZR_TEST_BENCH_LLAMA_REFERENCES_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include <jansson.h>

struct llama_references {
    /* Steps of training, rows of a batch, tokens of a row, token ids. */
    int64_t steps, rows, tokens, vocab;
    /* (steps, rows, tokens) each. */
    int32_t *inputs, *targets;
    /* (rows, tokens, vocab) of batch 0 before any step, in f32. */
    double *logits;
    /* (steps) in f32, batch i before step i; and of batch 0 in f64. */
    double *losses, loss;
    /* AdamW. Tensors with one dimension have no weight decay. */
    double lr, beta1, beta2, eps, weight_decay;
    json_t *root;
};

/* Reads folder/references.json. */
void llama_references_open(struct llama_references *r, const char *folder);
void llama_references_close(struct llama_references *r);

/* The gradient of a tensor for batch 0, in f64: its norm, and elements[i] for element i * stride. */
struct llama_gradient {
    double norm, elements[64];
    int64_t stride, n;
};
/* name: the tensor's published name. */
struct llama_gradient llama_references_gradient(const struct llama_references *r, const char *name);

/* One weight of a folder. The caller frees it. */
struct llama_weight {
    char dtype[8];
    json_t *shape;
    char *bytes;
    size_t n;
};
/* Returns whether the folder's files have it. These functions are for any thread. */
bool llama_load_weight(const char *folder, const char *name, struct llama_weight *w);
void llama_free_weight(struct llama_weight *w);

/* A file of JSON, and the header of a file of weights. *at: where its data begin in *f, which the caller
 * closes. NULL: it cannot be read. */
json_t *llama_load_json(const char *folder, const char *name);
json_t *llama_load_header(const char *folder, const char *name, long *at, FILE **f);

#endif
