/* SPDX-License-Identifier: Apache-2.0 */
/* llama_names.c: one row for each tensor, in the order of enum llama_tensor. What a model or a part of it
 * lacks is left out of the table for zero_wrap and of the map of names. */
#include "bench/llama/llama_names.h"
#include "kernels/error.h"

#include <stdio.h>
#include <string.h>

/* Sizes of dimensions, by the letters of the header. END ends a shape. */
enum size { END, C, H, A, K, F, U, N_SIZES };

/* Stacked tensors have L before these dimensions, and "model.layers.N." before their names. NORM: the
 * gradient is of this rank's tokens under sequence parallelism. PER_HEAD: it is of this rank's heads. */
enum kind { MATRIX, BIAS, NORM, PER_HEAD };

static const struct row {
    const char *name;
    bool stacked;
    enum kind kind;
    enum size shape[3];
} rows[LLAMA_N_TENSORS] = {
    [LLAMA_EMBED] = {"model.embed_tokens.weight", false, MATRIX, {U, C}},
    [LLAMA_NORM1] = {"input_layernorm.weight", true, NORM, {C}},
    [LLAMA_Q] = {"self_attn.q_proj.weight", true, MATRIX, {A, C}},
    [LLAMA_K] = {"self_attn.k_proj.weight", true, MATRIX, {K, C}},
    [LLAMA_V] = {"self_attn.v_proj.weight", true, MATRIX, {K, C}},
    [LLAMA_Q_BIAS] = {"self_attn.q_proj.bias", true, BIAS, {A}},
    [LLAMA_K_BIAS] = {"self_attn.k_proj.bias", true, BIAS, {K}},
    [LLAMA_V_BIAS] = {"self_attn.v_proj.bias", true, BIAS, {K}},
    [LLAMA_Q_NORM] = {"self_attn.q_norm.weight", true, PER_HEAD, {H}},
    [LLAMA_K_NORM] = {"self_attn.k_norm.weight", true, PER_HEAD, {H}},
    [LLAMA_O] = {"self_attn.o_proj.weight", true, MATRIX, {C, A}},
    [LLAMA_NORM2] = {"post_attention_layernorm.weight", true, NORM, {C}},
    [LLAMA_GATE] = {"mlp.gate_proj.weight", true, MATRIX, {F, C}},
    [LLAMA_UP] = {"mlp.up_proj.weight", true, MATRIX, {F, C}},
    [LLAMA_DOWN] = {"mlp.down_proj.weight", true, MATRIX, {C, F}},
    [LLAMA_NORM] = {"model.norm.weight", false, NORM, {C}},
    [LLAMA_HEAD] = {"lm_head.weight", false, MATRIX, {U, C}},
};

static int64_t tp_of(const struct llama_part *p)
{
    return p->tp > 1 ? p->tp : 1;
}

int64_t llama_part_vocab(const struct llama_part *p)
{
    return (p->config->vocab + tp_of(p) - 1) / tp_of(p);
}

static bool has_tensor(const struct llama_part *p, enum llama_tensor number)
{
    const struct hf_config *c = p->config;
    switch (number) {
    case LLAMA_EMBED:
        return !p->no_embedding || (c->tied && !p->no_head);
    case LLAMA_Q_BIAS:
    case LLAMA_K_BIAS:
    case LLAMA_V_BIAS:
        return c->qkv_bias;
    case LLAMA_Q_NORM:
    case LLAMA_K_NORM:
        return c->qk_norm;
    case LLAMA_NORM:
        return !p->no_head;
    case LLAMA_HEAD:
        return !c->tied && !p->no_head;
    default:
        return true;
    }
}

struct llama_units llama_units_of(const struct llama_part *p)
{
    bool embedding = has_tensor(p, LLAMA_EMBED), head = has_tensor(p, LLAMA_HEAD);
    struct llama_units u = {.embedding = embedding ? 0 : -1, .first_layer = embedding};
    u.n = u.first_layer + (int32_t)p->layers + head;
    u.head = head ? u.n - 1 : -1;
    return u;
}

static int32_t unit_of(const struct llama_part *p, enum llama_tensor number)
{
    struct llama_units u = llama_units_of(p);
    if (rows[number].stacked)
        return u.first_layer;
    return number == LLAMA_EMBED || p->config->tied ? u.embedding : u.head;
}

static uint32_t flags_of(const struct llama_part *p, enum llama_tensor number, bool stores)
{
    const struct row *r = &rows[number];
    bool partial = tp_of(p) > 1 && (r->kind == PER_HEAD || (r->kind == NORM && p->sequence));
    bool tied = number == LLAMA_EMBED && p->config->tied && p->no_embedding != p->no_head;
    /* what the embedding's rows get is added, unless the head's product stores a gradient before */
    bool adds = number == LLAMA_EMBED && (!p->config->tied || p->no_head);
    return (r->stacked ? ZERO_STACKED : 0) | (r->kind != MATRIX ? ZERO_NO_DECAY : 0) |
           (r->kind == MATRIX && stores && !adds ? ZERO_GRAD_OVERWRITE : 0) |
           (partial ? ZERO_TP_PARTIAL : 0) | (tied ? ZERO_TIED : 0);
}

/* Fills in the shape, and how tp cuts it: along the dimension that is a share of the heads, of the MLP or of
 * the token ids. */
static void set_shape(struct zero_tensor *t, const struct llama_part *p, enum llama_tensor number)
{
    const struct hf_config *c = p->config;
    const int64_t tp = tp_of(p);
    const int64_t sizes[N_SIZES] = {[C] = c->channels,
                                    [H] = c->head_size,
                                    [A] = c->heads / tp * c->head_size,
                                    [K] = c->kv_heads / tp * c->head_size,
                                    [F] = c->hidden / tp,
                                    [U] = llama_part_vocab(p)};
    const enum size *shape = rows[number].shape;
    int first = rows[number].stacked;
    if (rows[number].stacked)
        t->shape[0] = p->layers;
    for (int d = 0; shape[d] != END; d++) {
        t->shape[first + d] = sizes[shape[d]];
        if (tp > 1 && shape[d] >= A)
            t->tp_cut = ZERO_TP_CUT(first + d);
        if (tp > 1 && shape[d] == U)
            t->tp_size = c->vocab;
    }
}

int32_t llama_describe(struct zero_tensor table[LLAMA_N_TENSORS], int32_t number[LLAMA_N_TENSORS],
                       const struct llama_part *p, const struct llama_pointers *pointers)
{
    int32_t n = 0;
    for (int32_t i = 0; i < LLAMA_N_TENSORS; i++) {
        if (!has_tensor(p, i) || (rows[i].stacked && !p->layers))
            continue;
        table[n] = (struct zero_tensor){.name = rows[i].name,
                                        .param = &pointers->params[i],
                                        .grad = &pointers->grads[i],
                                        .dtype = pointers->dtype,
                                        .unit = unit_of(p, i),
                                        .flags = flags_of(p, i, pointers->stores)};
        set_shape(&table[n], p, i);
        number[n++] = i;
    }
    return n;
}

int llama_check_tp(const struct hf_config *c, int64_t tp)
{
    const struct {
        const char *what;
        int64_t n;
    } cut[] = {{"attention heads (num_attention_heads)", c->heads},
               {"heads of keys and values (num_key_value_heads)", c->kv_heads},
               {"channels of the MLP (intermediate_size)", c->hidden}};
    for (size_t i = 0; tp > 1 && i < sizeof cut / sizeof *cut; i++)
        if (cut[i].n % tp)
            return zr_fail(ZERO_ERR_ARG, "--tp: %lld ranks do not divide the model's %lld %s", (long long)tp,
                           (long long)cut[i].n, cut[i].what);
    return 0;
}

int32_t llama_names(struct zero_weight *map, char (*text)[LLAMA_NAME_BYTES], const int32_t *number,
                    int32_t n_tensors, const struct llama_part *p)
{
    int32_t n = 0, end;
    for (int32_t i = 0; i < n_tensors; i = end) {
        bool stacked = rows[number[i]].stacked;
        for (end = i + 1; end < n_tensors && rows[number[end]].stacked == stacked; end++)
            ;
        for (int32_t l = 0; l < (stacked ? p->layers : 1); l++)
            for (int32_t t = i; t < end; t++, n++) {
                if (stacked)
                    snprintf(text[n], LLAMA_NAME_BYTES, "model.layers.%lld.%s",
                             (long long)(p->first_layer + l), rows[number[t]].name);
                else
                    snprintf(text[n], LLAMA_NAME_BYTES, "%s", rows[number[t]].name);
                map[n] = (struct zero_weight){text[n], t, stacked ? ZERO_SLICE(l) : 0, 0};
            }
    }
    return n;
}
