/* SPDX-License-Identifier: Apache-2.0 */
/* llama_references.c: nested arrays of JSON become arrays of C. */
#include "test/bench/llama/llama_references.h"
#include "test/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double number(const json_t *value)
{
    assert_true(json_is_number(value));
    return json_number_value(value);
}

static int64_t length(const json_t *array)
{
    assert_true(json_array_size(array) > 0);
    return (int64_t)json_array_size(array);
}

/* Copies the numbers of an array, or of the arrays in it, and returns where the next one goes. */
static double *flatten(const json_t *value, double *to)
{
    if (json_is_array(value)) {
        for (size_t i = 0; i < json_array_size(value); i++)
            to = flatten(json_array_get(value, i), to);
        return to;
    }
    *to = number(value);
    return to + 1;
}

/* The caller frees the n numbers. */
static double *numbers(const json_t *array, int64_t n)
{
    double *to = malloc((size_t)n * sizeof *to);
    assert_non_null(to);
    assert_ptr_equal(flatten(array, to), to + n);
    return to;
}

/* Rows have one token more than inputs: the last target. */
static void take_tokens(struct llama_references *r, const json_t *tokens)
{
    const json_t *batch = json_array_get(tokens, 0);
    r->steps = length(tokens);
    r->rows = length(batch);
    r->tokens = length(json_array_get(batch, 0)) - 1;
    int64_t n = r->steps * r->rows;
    double *all = numbers(tokens, n * (r->tokens + 1));
    r->inputs = malloc((size_t)(n * r->tokens) * sizeof *r->inputs);
    r->targets = malloc((size_t)(n * r->tokens) * sizeof *r->targets);
    assert_true(r->inputs && r->targets);
    for (int64_t i = 0; i < n; i++)
        for (int64_t t = 0; t < r->tokens; t++) {
            r->inputs[i * r->tokens + t] = (int32_t)all[i * (r->tokens + 1) + t];
            r->targets[i * r->tokens + t] = (int32_t)all[i * (r->tokens + 1) + t + 1];
        }
    free(all);
}

void llama_references_open(struct llama_references *r, const char *folder)
{
    char path[1100];
    snprintf(path, sizeof path, "%s/references.json", folder);
    *r = (struct llama_references){.root = json_load_file(path, 0, NULL)};
    if (!r->root)
        fail_msg("%s cannot be read", path);
    take_tokens(r, json_object_get(r->root, "tokens"));
    const json_t *logits = json_object_get(r->root, "logits"), *adamw = json_object_get(r->root, "optimizer"),
                 *betas = json_object_get(adamw, "betas");
    r->vocab = length(json_array_get(json_array_get(logits, 0), 0));
    r->logits = numbers(logits, r->rows * r->tokens * r->vocab);
    r->losses = numbers(json_object_get(r->root, "losses"), r->steps);
    r->loss = number(json_object_get(r->root, "loss"));
    r->lr = number(json_object_get(adamw, "lr"));
    r->beta1 = number(json_array_get(betas, 0));
    r->beta2 = number(json_array_get(betas, 1));
    r->eps = number(json_object_get(adamw, "eps"));
    r->weight_decay = number(json_object_get(adamw, "weight_decay"));
}

void llama_references_close(struct llama_references *r)
{
    free(r->inputs);
    free(r->targets);
    free(r->logits);
    free(r->losses);
    json_decref(r->root);
}

struct llama_gradient llama_references_gradient(const struct llama_references *r, const char *name)
{
    struct llama_gradient g = {0};
    const json_t *from = json_object_get(json_object_get(r->root, "gradients"), name),
                 *elements = json_object_get(from, "elements");
    if (!from)
        fail_msg("%s has no gradient", name);
    g.norm = number(json_object_get(from, "norm"));
    g.stride = (int64_t)number(json_object_get(from, "stride"));
    g.n = length(elements);
    assert_true(g.stride > 0 && g.n <= (int64_t)(sizeof g.elements / sizeof *g.elements));
    flatten(elements, g.elements);
    return g;
}

json_t *llama_load_json(const char *folder, const char *name)
{
    char path[1100];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return json_load_file(path, 0, NULL);
}

json_t *llama_load_header(const char *folder, const char *name, long *at, FILE **f)
{
    char path[1100], *text;
    unsigned char length[8];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    *f = fopen(path, "rb");
    if (!*f || fread(length, 1, sizeof length, *f) != sizeof length)
        return NULL;
    size_t n = length[0] | (size_t)length[1] << 8 | (size_t)length[2] << 16;
    text = malloc(n);
    n = fread(text, 1, n, *f);
    *at = (long)(8 + n);
    json_t *header = json_loadb(text, n, 0, NULL);
    free(text);
    return header;
}

bool llama_load_weight(const char *folder, const char *name, struct llama_weight *w)
{
    json_t *index = llama_load_json(folder, "model.safetensors.index.json");
    const char *file = json_string_value(json_object_get(json_object_get(index, "weight_map"), name));
    FILE *f = NULL;
    long at;
    json_t *header = llama_load_header(folder, index ? file : "model.safetensors", &at, &f),
           *entry = json_object_get(header, name), *range = json_object_get(entry, "data_offsets");
    long begin = (long)json_integer_value(json_array_get(range, 0)),
         end = (long)json_integer_value(json_array_get(range, 1));
    *w = (struct llama_weight){.n = (size_t)(end - begin), .bytes = malloc((size_t)(end - begin) + 1)};
    bool ok = entry && !fseek(f, at + begin, SEEK_SET) && fread(w->bytes, 1, w->n, f) == w->n;
    if (ok) {
        snprintf(w->dtype, sizeof w->dtype, "%s", json_string_value(json_object_get(entry, "dtype")));
        w->shape = json_incref(json_object_get(entry, "shape"));
    }
    json_decref(header);
    json_decref(index);
    if (f)
        fclose(f);
    return ok;
}

void llama_free_weight(struct llama_weight *w)
{
    json_decref(w->shape);
    free(w->bytes);
}
