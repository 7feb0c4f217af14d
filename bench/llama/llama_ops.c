/* SPDX-License-Identifier: Apache-2.0 */
/* llama_ops.c: the functions of a Llama's struct model_ops: its tensors, their initial values, their
 * published names, and its sizes. Tensors that a model or a pipeline stage lacks are left out of the table
 * for zero_wrap and of the map of names. With adapters, all other tensors are frozen: they have no
 * gradient. */
#include "bench/llama/llama_ops.h"
#include "bench/train/state_hash.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- tensors ---- */

/* Sizes of dimensions, by the letters of llama_ops.h; tensor parallelism cuts the last four. END ends a
 * shape. */
enum size { END, OF_C, OF_HS, OF_LR, OF_A, OF_K, OF_F, OF_U, N_SIZES };

/* The kinds of tensors differ in how a tensor-parallel rank computes their gradient, if tp does not cut them.
 * For NORM, the gradient covers this rank's tokens under sequence parallelism. For PER_HEAD, it covers this
 * rank's heads. For ADAPTER, it covers this rank's outputs or inputs. Such gradients are summed over the
 * ranks (ZERO_TP_PARTIAL). */
enum kind { MATRIX, BIAS, NORM, PER_HEAD, ADAPTER };

/* The two matrices of an adapter, with the names that PEFT gives them after "model.layers.N.". */
#define ADAPTER_OF(target, module, outputs, inputs)                                                          \
    [LLAMA_LORA_A + (target)] = {module ".lora_A.weight", true, ADAPTER, {OF_LR, inputs}},                   \
                    [LLAMA_LORA_B + (target)] = {module ".lora_B.weight", true, ADAPTER, {outputs, OF_LR}}

static const struct row {
    const char *name;
    /* L comes before the dimensions, and "model.layers.N." before the name. */
    bool stacked;
    enum kind kind;
    enum size shape[3];
} rows[LLAMA_N_TENSORS] = {
    [LLAMA_EMBED] = {"model.embed_tokens.weight", false, MATRIX, {OF_U, OF_C}},
    [LLAMA_NORM1] = {"input_layernorm.weight", true, NORM, {OF_C}},
    [LLAMA_Q] = {"self_attn.q_proj.weight", true, MATRIX, {OF_A, OF_C}},
    [LLAMA_K] = {"self_attn.k_proj.weight", true, MATRIX, {OF_K, OF_C}},
    [LLAMA_V] = {"self_attn.v_proj.weight", true, MATRIX, {OF_K, OF_C}},
    [LLAMA_Q_BIAS] = {"self_attn.q_proj.bias", true, BIAS, {OF_A}},
    [LLAMA_K_BIAS] = {"self_attn.k_proj.bias", true, BIAS, {OF_K}},
    [LLAMA_V_BIAS] = {"self_attn.v_proj.bias", true, BIAS, {OF_K}},
    [LLAMA_Q_NORM] = {"self_attn.q_norm.weight", true, PER_HEAD, {OF_HS}},
    [LLAMA_K_NORM] = {"self_attn.k_norm.weight", true, PER_HEAD, {OF_HS}},
    [LLAMA_O] = {"self_attn.o_proj.weight", true, MATRIX, {OF_C, OF_A}},
    [LLAMA_NORM2] = {"post_attention_layernorm.weight", true, NORM, {OF_C}},
    [LLAMA_GATE] = {"mlp.gate_proj.weight", true, MATRIX, {OF_F, OF_C}},
    [LLAMA_UP] = {"mlp.up_proj.weight", true, MATRIX, {OF_F, OF_C}},
    [LLAMA_DOWN] = {"mlp.down_proj.weight", true, MATRIX, {OF_C, OF_F}},
    [LLAMA_NORM] = {"model.norm.weight", false, NORM, {OF_C}},
    [LLAMA_HEAD] = {"lm_head.weight", false, MATRIX, {OF_U, OF_C}},
    ADAPTER_OF(LORA_Q, "self_attn.q_proj", OF_A, OF_C),
    ADAPTER_OF(LORA_K, "self_attn.k_proj", OF_K, OF_C),
    ADAPTER_OF(LORA_V, "self_attn.v_proj", OF_K, OF_C),
    ADAPTER_OF(LORA_O, "self_attn.o_proj", OF_C, OF_A),
    ADAPTER_OF(LORA_GATE, "mlp.gate_proj", OF_F, OF_C),
    ADAPTER_OF(LORA_UP, "mlp.up_proj", OF_F, OF_C),
    ADAPTER_OF(LORA_DOWN, "mlp.down_proj", OF_C, OF_F),
};
#undef ADAPTER_OF

static bool has_tensor(const struct model_config *stage, enum llama_tensor number)
{
    const struct hf_config *c = stage->hf;
    if (number >= LLAMA_LORA_A)
        return lora_has(stage, (number - LLAMA_LORA_A) % LORA_N_TARGETS);
    switch (number) {
    case LLAMA_EMBED:
        return !stage->no_embedding || (c->tied && !stage->no_head);
    case LLAMA_Q_BIAS:
    case LLAMA_K_BIAS:
    case LLAMA_V_BIAS:
        return c->qkv_bias;
    case LLAMA_Q_NORM:
    case LLAMA_K_NORM:
        return c->qk_norm;
    case LLAMA_NORM:
        return !stage->no_head;
    case LLAMA_HEAD:
        return !c->tied && !stage->no_head;
    default:
        return true;
    }
}

static struct model_units units_of(const struct model_config *stage)
{
    bool embedding = has_tensor(stage, LLAMA_EMBED), own_head = has_tensor(stage, LLAMA_HEAD);
    struct model_units u = {.embedding = stage->no_embedding ? -1 : 0, .first_layer = embedding};
    u.n = u.first_layer + (int32_t)stage->layers + own_head;
    u.head = stage->no_head ? -1 : own_head ? u.n - 1 : 0;
    return u;
}

static int32_t unit_of(const struct model_config *stage, enum llama_tensor number)
{
    struct model_units u = units_of(stage);
    if (rows[number].stacked)
        return u.first_layer;
    return number == LLAMA_EMBED ? 0 : u.head;
}

static bool is_frozen(const struct model_config *c, enum llama_tensor number)
{
    return c->lora_rank && rows[number].kind != ADAPTER;
}

static uint32_t flags_of(const struct model_config *stage, enum llama_tensor number, bool stores)
{
    const struct row *r = &rows[number];
    bool whole = r->shape[0] < OF_A && r->shape[1] < OF_A,
         is_matrix = r->kind == MATRIX || r->kind == ADAPTER;
    bool partial = stage->tp > 1 && (r->kind == PER_HEAD || (r->kind == NORM && stage->sequence) ||
                                     (r->kind == ADAPTER && whole));
    bool tied = number == LLAMA_EMBED && stage->hf->tied && stage->no_embedding != stage->no_head;
    /* the embedding adds to its gradient, unless the head has the same weights and stores its product
     * first */
    bool adds = number == LLAMA_EMBED && (!stage->hf->tied || stage->no_head);
    uint32_t always = (r->stacked ? ZERO_STACKED : 0) | (tied ? ZERO_TIED : 0);
    return is_frozen(stage, number) ? always
                                    : always | (is_matrix ? 0 : ZERO_NO_DECAY) |
                                          (is_matrix && stores && !adds ? ZERO_GRAD_OVERWRITE : 0) |
                                          (partial ? ZERO_TP_PARTIAL : 0);
}

/* Fills in the shape, and the dimension along which tp cuts the tensor: that of the heads, of the MLP or of
 * the token ids. */
static void set_shape(struct zero_tensor *t, const struct model_config *stage, enum llama_tensor number)
{
    const int64_t sizes[N_SIZES] = {[OF_C] = stage->channels,
                                    [OF_HS] = model_head_size(stage),
                                    [OF_LR] = stage->lora_rank,
                                    [OF_A] = model_part_channels(stage),
                                    [OF_K] = model_part_kv_channels(stage),
                                    [OF_F] = model_part_hidden(stage),
                                    [OF_U] = model_part_vocab(stage)};
    const enum size *shape = rows[number].shape;
    int first = rows[number].stacked;
    if (rows[number].stacked)
        t->shape[0] = stage->layers;
    for (int d = 0; shape[d] != END; d++) {
        t->shape[first + d] = sizes[shape[d]];
        if (stage->tp > 1 && shape[d] >= OF_A)
            t->tp_cut = ZERO_TP_CUT(first + d);
        if (stage->tp > 1 && shape[d] == OF_U)
            t->tp_size = stage->vocab;
    }
}

static int32_t describe(struct zero_tensor *table, int32_t *number, const struct model_config *stage,
                        const struct model_pointers *pointers)
{
    int32_t n = 0;
    for (int32_t i = 0; i < LLAMA_N_TENSORS; i++) {
        if (!has_tensor(stage, i))
            continue;
        table[n] = (struct zero_tensor){.name = rows[i].name,
                                        .param = &pointers->params[i],
                                        .grad = is_frozen(stage, i) ? NULL : &pointers->grads[i],
                                        .dtype = pointers->dtype,
                                        .unit = unit_of(stage, i),
                                        .flags = flags_of(stage, i, pointers->stores)};
        set_shape(&table[n], stage, i);
        number[n++] = i;
    }
    return n;
}

/* Weights are normally distributed with deviation 0.02, times 1/sqrt(2L) in residual projections. Norms are 1
 * and biases 0. In an adapter, B is 0. A is normally distributed with variance 1 / (3 * inputs), which is the
 * variance of PEFT's uniform values. */
static void starts_of(const struct model_config *c, struct model_start *out)
{
    struct model_config whole = *c;
    whole.tp = 0;
    int64_t A = model_part_channels(&whole), F = model_part_hidden(&whole);
    for (int i = 0; i < LLAMA_N_TENSORS; i++) {
        double deviation = rows[i].kind == MATRIX ? 0.02 : 0;
        if (i == LLAMA_O || i == LLAMA_DOWN)
            deviation /= sqrt(2.0 * (double)c->layers);
        if (i >= LLAMA_LORA_A && i < LLAMA_LORA_B)
            deviation = 1 / sqrt(3.0 * (double)(rows[i].shape[1] == OF_A   ? A
                                                : rows[i].shape[1] == OF_F ? F
                                                                           : c->channels));
        bool norm = rows[i].kind == NORM || rows[i].kind == PER_HEAD;
        out[i] = (struct model_start){deviation, norm ? 1 : 0};
    }
}

/* ---- names ---- */

/* Names one tensor. layer is its number in the stage; in the whole model it is first_layer + layer. */
static struct zero_weight name_one(char text[MODEL_NAME_BYTES], int32_t tensor, int32_t number,
                                   int64_t first_layer, int32_t layer)
{
    const struct row *r = &rows[number];
    if (r->stacked)
        snprintf(text, MODEL_NAME_BYTES, "%smodel.layers.%lld.%s",
                 r->kind == ADAPTER ? "base_model.model." : "", (long long)(first_layer + layer), r->name);
    else
        snprintf(text, MODEL_NAME_BYTES, "%s", r->name);
    return (struct zero_weight){text, tensor, r->stacked ? ZERO_SLICE(layer) : 0, 0};
}

static int32_t names_of(struct zero_weight *map, char (*text)[MODEL_NAME_BYTES], const int32_t *number,
                        int32_t n_tensors, const struct model_config *stage)
{
    int32_t n = 0, end;
    for (int32_t i = 0; i < n_tensors; i = end) {
        bool stacked = rows[number[i]].stacked;
        for (end = i + 1; end < n_tensors && rows[number[end]].stacked == stacked; end++)
            ;
        for (int32_t l = 0; l < (stacked ? stage->layers : 1); l++)
            for (int32_t t = i; t < end; t++, n++)
                map[n] = name_one(text[n], t, number[t], stage->first_layer, l);
    }
    return n;
}

static int32_t n_names(const struct model_config *stage)
{
    return (LLAMA_N_TENSORS - 3) * (int32_t)stage->layers + 3;
}

/* ---- sizes ---- */

/* The parameters of a whole model, and how many of them are trained. */
static int64_t count_params(const struct model_config *c, int64_t *trained)
{
    struct zero_tensor table[MODEL_MAX_TENSORS];
    struct model_config whole = *c;
    int64_t n = 0;
    whole.tp = 0;
    *trained = 0;
    for (int32_t i = model_describe(table, NULL, &whole, ZERO_F32); i-- > 0;) {
        n += tensor_elements(&table[i]);
        *trained += table[i].grad ? tensor_elements(&table[i]) : 0;
    }
    return n;
}

static int64_t n_params(const struct model_config *c)
{
    int64_t trained;
    return count_params(c, &trained);
}

/* A frozen weight has no product for its gradient. */
static double flop_per_token(const struct model_config *c)
{
    int64_t trained, n = count_params(c, &trained);
    double weights = (double)(n - (c->hf->tied ? 0 : c->vocab * c->channels));
    double attention = (double)(c->heads * model_head_size(c)); /* channels of all heads */
    double products = c->lora_rank ? 4 * weights + 2 * (double)trained : 6 * weights;
    return products + 12 * (double)c->layers * attention * (double)c->context;
}

static int64_t kept_elems(const struct model_config *stage)
{
    int64_t A = model_part_channels(stage), K = model_part_kv_channels(stage), F = model_part_hidden(stage);
    int64_t C = stage->sequence ? stage->channels / stage->tp : stage->channels;
    /* per layer: two norms, two sums; q and k before their norm; q, k, v and the attention's output; gate, up
     * and their product; the inputs of the adapters' second products */
    int64_t layer =
        4 * C + (stage->hf->qk_norm ? A + K : 0) + 2 * A + 2 * K + 3 * F + lora_n(stage) * stage->lora_rank;
    int64_t n = stage->layers * layer - C;
    n += stage->no_embedding ? 0 : C; /* the embedded tokens */
    /* the last norm and its input, and the logits */
    n += stage->no_head ? 0 : 2 * C + model_part_vocab(stage);
    return n;
}

/* The sum of kept_elems and, per token:
 *
 *   4 C + 2 (A + K) + F   the buffers of backward, which micro-batches share
 *   LR                    for each adapter of a layer: its gradient. These arrays are rounded up.
 *
 * In fp32, whatever the dtype:
 *
 *   3 (NH + kv heads)  per token and layer: logsum, and the norms of heads
 *   T * V              logits of one row
 *   HS                 per token of a row: the table of rotary positions
 *   9 A                per token: rows of heads that attention copies (bench/model/attention.c), and four
 *                      arrays of scores of at most 4 MiB */
static int64_t most_bytes(const struct model_config *c, int64_t B, int64_t element)
{
    int64_t T = c->context, A = model_part_channels(c), K = model_part_kv_channels(c),
            F = model_part_hidden(c);
    int64_t heads = model_part_heads(c) + model_part_kv_heads(c),
            scores = B * model_part_heads(c) * T * T * 4;
    int64_t most = INT64_C(4) << 20, buffers = 4 * c->channels + 2 * (A + K) + F + lora_n(c) * c->lora_rank;
    int64_t rounding = (c->layers + 1) * lora_n(c) * model_apart(1);
    int64_t in_fp32 = 3 * (c->layers + 1) * B * T * (heads + 2) + T * (c->vocab + model_head_size(c)) +
                      9 * B * T * (A > c->channels ? A : c->channels);
    return (B * T * (kept_elems(c) + buffers) + rounding) * element + in_fp32 * 4 +
           4 * (scores < most ? scores : most);
}

struct model_config llama_sizes(const struct hf_config *c)
{
    return (struct model_config){.ops = &llama_ops,
                                 .hf = c,
                                 .layers = c->layers,
                                 .heads = c->heads,
                                 .kv_heads = c->kv_heads,
                                 .channels = c->channels,
                                 .head_size = c->head_size,
                                 .hidden = c->hidden,
                                 .context = c->context,
                                 .vocab = c->vocab};
}

const struct model_ops llama_ops = {
    .describe = describe,
    .units = units_of,
    .starts = starts_of,
    .names = names_of,
    .n_names = n_names,
    .n_params = n_params,
    .flop_per_token = flop_per_token,
    .kept_elems = kept_elems,
    .most_bytes = most_bytes,
    .layers_use_positions = true,
    .passes_f32 = &llama_passes_f32,
    .passes_bf16 = &llama_passes_bf16,
};
