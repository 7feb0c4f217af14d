/* SPDX-License-Identifier: Apache-2.0 */
/* gpt2_ops.c: the tensors of a GPT-2, their initial values and their published names, and its sizes. */
#include "bench/gpt2/gpt2_ops.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- tensors ---- */

enum tensor {
    WTE, /* also the head's weights */
    WPE,
    LN1W,
    LN1B,
    QKVW,
    QKVB,
    ATTPROJW,
    ATTPROJB,
    LN2W,
    LN2B,
    FCW,
    FCB,
    FCPROJW,
    FCPROJB,
    LNFW,
    LNFB
};

/* Whether a stage has a tensor. */
static bool has_tensor(const struct model_config *stage, int32_t number)
{
    if (number == WTE)
        return !stage->no_embedding || !stage->no_head;
    if (number == WPE)
        return !stage->no_embedding;
    return number < LNFW || !stage->no_head;
}

static struct model_units units_of(const struct model_config *stage)
{
    int32_t first = has_tensor(stage, WTE) ? 1 : 0;
    return (struct model_units){.embedding = stage->no_embedding ? -1 : 0,
                                .first_layer = first,
                                .head = stage->no_head ? -1 : 0,
                                .n = first + (int32_t)stage->layers};
}

/* The table of all tensors of a stage's layers. Unit 0 is what the model uses first and last: embeddings,
 * last norm and head. The tensors of all layers are stacked: one tensor has a slice for each layer.
 *
 * The letters of shapes are those of struct model_config. U, A and F are this rank's share of the token ids,
 * the attention's channels and the MLP's channels, which tensor parallelism cuts. */
static void fill_table(struct zero_tensor out[GPT2_N_TENSORS], const struct model_config *c,
                       const struct model_pointers *p)
{
    int64_t L = c->layers, C = c->channels, U = model_part_vocab(c);
    int64_t A = model_part_channels(c), F = model_part_hidden(c);
    int32_t matrix = p->stores ? ZERO_GRAD_OVERWRITE : 0, layers = units_of(c).first_layer;
    bool tp = c->tp > 1;
    uint32_t norm = ZERO_NO_DECAY | (c->sequence ? ZERO_TP_PARTIAL : 0);
    /* A whole tensor; and one that tensor parallelism cuts along `dim`, in `blocks` equal blocks each. */
    /* clang-format off */
#define TENSOR(name, t, unit, flags, ...) \
    [t] = {name, &p->params[t], &p->grads[t], {__VA_ARGS__}, p->dtype, unit, flags}
#define CUT(name, t, unit, flags, dim, blocks, ...) \
    [t] = {name, &p->params[t], &p->grads[t], {__VA_ARGS__}, p->dtype, unit, flags, \
           .tp_cut = tp ? ZERO_TP_CUT(dim) : 0, .tp_blocks = tp ? blocks : 0}
    /* clang-format on */
    const struct zero_tensor table[GPT2_N_TENSORS] = {
        CUT("wte", WTE, 0, matrix, 0, 1, U, C),
        TENSOR("wpe", WPE, 0, 0, c->context, C),
        TENSOR("ln1w", LN1W, layers, ZERO_STACKED | norm, L, C),
        TENSOR("ln1b", LN1B, layers, ZERO_STACKED | norm, L, C),
        CUT("qkvw", QKVW, layers, ZERO_STACKED | matrix, 1, 3, L, 3 * A, C),
        CUT("qkvb", QKVB, layers, ZERO_STACKED | ZERO_NO_DECAY, 1, 3, L, 3 * A),
        CUT("attprojw", ATTPROJW, layers, ZERO_STACKED | matrix, 2, 1, L, C, A),
        TENSOR("attprojb", ATTPROJB, layers, ZERO_STACKED | ZERO_NO_DECAY, L, C),
        TENSOR("ln2w", LN2W, layers, ZERO_STACKED | norm, L, C),
        TENSOR("ln2b", LN2B, layers, ZERO_STACKED | norm, L, C),
        CUT("fcw", FCW, layers, ZERO_STACKED | matrix, 1, 1, L, F, C),
        CUT("fcb", FCB, layers, ZERO_STACKED | ZERO_NO_DECAY, 1, 1, L, F),
        CUT("fcprojw", FCPROJW, layers, ZERO_STACKED | matrix, 2, 1, L, C, F),
        TENSOR("fcprojb", FCPROJB, layers, ZERO_STACKED | ZERO_NO_DECAY, L, C),
        TENSOR("lnfw", LNFW, 0, norm, C),
        TENSOR("lnfb", LNFB, 0, norm, C),
    };
#undef TENSOR
#undef CUT
    memcpy(out, table, sizeof table);
    if (tp)
        out[WTE].tp_size = c->vocab;
}

static int32_t describe(struct zero_tensor *table, int32_t *number, const struct model_config *stage,
                        const struct model_pointers *pointers)
{
    struct zero_tensor all[GPT2_N_TENSORS];
    int32_t n = 0;
    fill_table(all, stage, pointers);
    if (stage->no_embedding || stage->no_head) {
        all[WTE].flags |= ZERO_TIED;
        if (!stage->no_embedding) /* it adds to the head's gradient */
            all[WTE].flags &= ~ZERO_GRAD_OVERWRITE;
    }
    for (int32_t t = 0; t < GPT2_N_TENSORS; t++) {
        if (!has_tensor(stage, t))
            continue;
        table[n] = all[t];
        number[n++] = t;
    }
    return n;
}

/* Weights are normal with deviation 0.02, in residual projections smaller by 1/sqrt(2L); norms are 1 and
 * biases 0. */
static void starts_of(const struct model_config *c, struct model_start *out)
{
    const double deviation = 0.02, projection = deviation / sqrt(2.0 * (double)c->layers);
    const struct model_start starts[GPT2_N_TENSORS] = {
        [WTE] = {deviation, 0},  [WPE] = {deviation, 0},       [LN1W] = {0, 1},
        [QKVW] = {deviation, 0}, [ATTPROJW] = {projection, 0}, [LN2W] = {0, 1},
        [FCW] = {deviation, 0},  [FCPROJW] = {projection, 0},  [LNFW] = {0, 1},
    };
    memcpy(out, starts, sizeof starts);
}

/* ---- names ---- */

/* The published names. The published matrices are (in, out), the model's (out, in). */
static const struct {
    const char *name;
    bool stacked, transposed;
} names[] = {
    {"wte.weight", false, false},
    {"wpe.weight", false, false},
    {"h.%d.ln_1.weight", true, false},
    {"h.%d.ln_1.bias", true, false},
    {"h.%d.attn.c_attn.weight", true, true},
    {"h.%d.attn.c_attn.bias", true, false},
    {"h.%d.attn.c_proj.weight", true, true},
    {"h.%d.attn.c_proj.bias", true, false},
    {"h.%d.ln_2.weight", true, false},
    {"h.%d.ln_2.bias", true, false},
    {"h.%d.mlp.c_fc.weight", true, true},
    {"h.%d.mlp.c_fc.bias", true, false},
    {"h.%d.mlp.c_proj.weight", true, true},
    {"h.%d.mlp.c_proj.bias", true, false},
    {"ln_f.weight", false, false},
    {"ln_f.bias", false, false},
};

/* Names one tensor. layer is its number in the stage; in the whole model it is first_layer + layer. */
static struct zero_weight name_one(char text[MODEL_NAME_BYTES], int32_t tensor, int32_t number,
                                   int32_t first_layer, int32_t layer)
{
    bool stacked = names[number].stacked;
    if (stacked)
        snprintf(text, MODEL_NAME_BYTES, "h.%d%s", first_layer + layer,
                 names[number].name + 4); /* the name after "h.%d" */
    else
        snprintf(text, MODEL_NAME_BYTES, "%s", names[number].name);
    return (struct zero_weight){text, tensor, stacked ? ZERO_SLICE(layer) : 0, names[number].transposed};
}

static int32_t names_of(struct zero_weight *map, char (*text)[MODEL_NAME_BYTES], const int32_t *number,
                        int32_t n_tensors, const struct model_config *stage)
{
    int32_t n = 0, end, first_layer = (int32_t)stage->first_layer, layers = (int32_t)stage->layers;
    for (int32_t i = 0; i < n_tensors; i = end) {
        bool stacked = names[number[i]].stacked;
        for (end = i + 1; end < n_tensors && names[number[end]].stacked == stacked; end++)
            ;
        for (int32_t l = 0; l < (stacked ? layers : 1); l++)
            for (int32_t t = i; t < end; t++, n++)
                map[n] = name_one(text[n], t, number[t], first_layer, l);
    }
    return n;
}

static int32_t n_names(const struct model_config *stage)
{
    return 12 * (int32_t)stage->layers + 4;
}

/* ---- sizes ---- */

static int64_t n_params(const struct model_config *c)
{
    int64_t C = c->channels;
    int64_t layer =
        12 * C * C + 13 * C; /* matrices with 3, 1, 4 and 4 C*C, their biases (9 C), two norms (4 C) */
    return (c->vocab + c->context) * C + c->layers * layer + 2 * C;
}

static double flop_per_token(const struct model_config *c)
{
    double weights = (double)(n_params(c) - c->context * c->channels);
    return 6 * weights + 12 * (double)c->layers * (double)c->channels * (double)c->context;
}

static int64_t kept_elems(const struct model_config *stage)
{
    /* A and F are this tp rank's part of the attention's channels and of the MLP's hidden ones. With sequence
     * parallelism each rank keeps its part of the tokens between products, which comes to C = A per token. */
    int64_t A = model_part_channels(stage), F = model_part_hidden(stage);
    int64_t C = stage->sequence ? A : stage->channels;
    /* per layer: two norms, two sums; q, k, v and the attention's output; the MLP before and after GELU */
    int64_t n = stage->layers * (4 * C + 4 * A + 2 * F) - C;
    n += stage->no_embedding ? 0 : C; /* the embedded tokens */
    /* the last norm and its input, and the logits */
    n += stage->no_head ? 0 : 2 * C + model_part_vocab(stage);
    return n;
}

/* Per token and layer:
 *
 *   16 C    ln1, qkv, atty, residual2, ln2, fch, fch_gelu and residual
 *
 * Per token:
 *
 *   V       dlogits
 *   16 C    embedded, lnf and the buffers of backward, which have less
 *
 * In fp32, whatever the dtype:
 *
 *   NH       per token and layer: logsum; and once more per token: dots
 *   T * V    logits of one row
 *   9 C      per token: rows of heads that attention copies (bench/model/attention.c), and four arrays of
 *            scores of at most 4 MiB */
static int64_t most_bytes(const struct model_config *c, int64_t B, int64_t element)
{
    int64_t L = c->layers, C = c->channels, T = c->context, V = c->vocab, NH = c->heads;
    int64_t scores = B * NH * T * T * 4, most = INT64_C(4) << 20;
    int64_t of_layers = L * B * T * 16 * C, of_ends = B * T * (V + 16 * C);
    int64_t in_fp32 = (L + 1) * B * T * NH + T * V + 9 * B * T * C;
    return (of_layers + of_ends) * element + in_fp32 * 4 + 4 * (scores < most ? scores : most);
}

const struct model_ops gpt2_ops = {
    .describe = describe,
    .units = units_of,
    .starts = starts_of,
    .names = names_of,
    .n_names = n_names,
    .n_params = n_params,
    .flop_per_token = flop_per_token,
    .kept_elems = kept_elems,
    .most_bytes = most_bytes,
    .passes_f32 = &gpt2_passes_f32,
    .passes_bf16 = &gpt2_passes_bf16,
};
