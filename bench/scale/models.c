/* SPDX-License-Identifier: Apache-2.0 */
/* models.c: sizes of published models, from the config.json of their checkpoints: GPT-2 (Radford et al.
 * 2019), Llama 2 (Touvron et al., arXiv:2307.09288), Llama 3 (Llama team, arXiv:2407.21783) and Qwen2.5
 * (Qwen team, arXiv:2412.15115). MPT is as llm-foundry trains it in its benchmarks: GPT-2's blocks, with
 * biases, learned positions and another vocabulary. Their number of parameters agrees with its table. */
#include "bench/scale/scale.h"

#include <string.h>

/* The fields of struct scale_model in order. The last three are llama, qkv_bias and tied. */
#define GPT(name, layers, heads, channels, context, vocab)                                                   \
    {                                                                                                        \
        name, layers, heads, heads, channels, 4 * channels, context, vocab, false, false, false              \
    }
#define LLAMA(name, layers, heads, kv_heads, channels, hidden, context, vocab)                               \
    {                                                                                                        \
        name, layers, heads, kv_heads, channels, hidden, context, vocab, true, false, false                  \
    }
#define QWEN(name, layers, heads, kv_heads, channels, hidden, vocab, tied)                                   \
    {                                                                                                        \
        name, layers, heads, kv_heads, channels, hidden, 32768, vocab, true, true, tied                      \
    }

static const struct scale_model models[] = {
    GPT("gpt2-124M", 12, 12, 768, 1024, 50257),
    GPT("gpt2-355M", 24, 16, 1024, 1024, 50257),
    GPT("gpt2-774M", 36, 20, 1280, 1024, 50257),
    GPT("gpt2-1.5B", 48, 25, 1600, 1024, 50257),
    LLAMA("llama-2-7B", 32, 32, 32, 4096, 11008, 4096, 32000),
    LLAMA("llama-2-13B", 40, 40, 40, 5120, 13824, 4096, 32000),
    LLAMA("llama-2-70B", 80, 64, 8, 8192, 28672, 4096, 32000),
    LLAMA("llama-3-8B", 32, 32, 8, 4096, 14336, 8192, 128256),
    LLAMA("llama-3-70B", 80, 64, 8, 8192, 28672, 8192, 128256),
    LLAMA("llama-3-405B", 126, 128, 8, 16384, 53248, 8192, 128256),
    QWEN("qwen2.5-0.5B", 24, 14, 2, 896, 4864, 151936, true),
    QWEN("qwen2.5-1.5B", 28, 12, 2, 1536, 8960, 151936, true),
    QWEN("qwen2.5-3B", 36, 16, 2, 2048, 11008, 151936, true),
    QWEN("qwen2.5-7B", 28, 28, 4, 3584, 18944, 152064, false),
    QWEN("qwen2.5-14B", 48, 40, 8, 5120, 13824, 152064, false),
    GPT("mpt-125m", 12, 12, 768, 2048, 50368),
    GPT("mpt-350m", 24, 16, 1024, 2048, 50368),
    GPT("mpt-760m", 24, 12, 1536, 2048, 50368),
    GPT("mpt-1b", 24, 16, 2048, 2048, 50368),
    GPT("mpt-3b", 32, 20, 2560, 2048, 50368),
    GPT("mpt-7b", 32, 32, 4096, 2048, 50368),
    GPT("mpt-13b", 40, 40, 5120, 2048, 50368),
    GPT("mpt-30b", 48, 56, 7168, 2048, 50368),
    GPT("mpt-70b", 80, 64, 8192, 2048, 50368),
};
enum { N_MODELS = sizeof models / sizeof *models };

const char *scale_model_names(void)
{
    static char text[512];
    if (text[0])
        return text;
    for (int i = 0; i < N_MODELS; i++)
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s%s", i ? ", " : "", models[i].name);
    return text;
}

const struct scale_model *scale_model_of(const char *name)
{
    for (int i = 0; i < N_MODELS; i++)
        if (!strcmp(models[i].name, name))
            return &models[i];
    return NULL;
}

/* Whether the model has a matrix for the head. Otherwise the head uses the embedding's. */
static bool has_head(const struct scale_model *m)
{
    return m->llama && !m->tied;
}

/* One unit for the embedding, one for each block, and one for the head if it is not tied. */
int32_t scale_n_units(const struct scale_model *m)
{
    return (int32_t)m->layers + 1 + has_head(m);
}

/* Channels of a block's keys, which are also those of its values. */
static int64_t kv_channels(const struct scale_model *m)
{
    return m->channels / m->heads * m->kv_heads;
}

/* The number of weights in a block that each token is multiplied by. */
static int64_t block_weights(const struct scale_model *m)
{
    int64_t kv = kv_channels(m);
    return m->channels * (2 * m->channels + 2 * kv) + (m->llama ? 3 : 2) * m->channels * m->hidden;
}

/* The scores and the sum over values, counted for the whole context as MFU does (Chowdhery et al.,
 * arXiv:2204.02311, appendix B). */
static double attention_flop(const struct scale_model *m, int64_t context)
{
    return 4.0 * (double)context * (double)m->channels;
}

/* One of tp parts of a block. */
static struct scale_unit block(const struct scale_model *m, int64_t context, int64_t tp)
{
    /* In a GPT the two norms and the biases after row-cut products are whole; the biases of q, k, v and of
     * the 4 C hidden channels are cut. */
    int64_t whole = m->llama ? 2 * m->channels : 6 * m->channels, cut = m->llama ? 0 : 7 * m->channels;
    cut += m->qkv_bias ? m->channels + 2 * kv_channels(m) : 0;
    return (struct scale_unit){
        .n_params = (block_weights(m) + cut) / tp + whole,
        .flop_per_token = (2.0 * (double)block_weights(m) + attention_flop(m, context)) / (double)tp};
}

struct scale_unit scale_part_of(const struct scale_model *m, int64_t context, int32_t unit, int64_t tp)
{
    /* this part of the embedding, or of the head, which is as large */
    int64_t embedding = (m->vocab + tp - 1) / tp * m->channels;
    if (unit > 0 && unit <= m->layers)
        return block(m, context, tp);
    if (has_head(m) && unit == 0)
        return (struct scale_unit){.n_params = embedding};
    if (has_head(m))
        return (struct scale_unit){.n_params = embedding + m->channels,
                                   .flop_per_token = 2.0 * (double)embedding};
    int64_t positions_and_norm = m->llama ? m->channels : context * m->channels + 2 * m->channels;
    return (struct scale_unit){.n_params = embedding + positions_and_norm,
                               .head_flop_per_token = 2.0 * (double)embedding};
}

struct scale_unit scale_unit_of(const struct scale_model *m, int64_t context, int32_t unit)
{
    return scale_part_of(m, context, unit, 1);
}

int64_t scale_n_last_norm(const struct scale_model *m)
{
    return m->llama ? m->channels : 2 * m->channels;
}

int64_t scale_kv_elems(const struct scale_model *m, int64_t tp)
{
    return 2 * kv_channels(m) / tp;
}

int64_t scale_kept_elems(const struct scale_model *m, int64_t tp)
{
    int64_t of_mlp =
        (m->llama ? 3 : 2) * m->hidden; /* Llama: gate, up and their product; GPT: before and after GELU */
    return 4 * m->channels + (2 * m->channels + 2 * kv_channels(m) + of_mlp) / tp;
}

int64_t scale_n_params(const struct scale_model *m, int64_t context)
{
    int64_t n = 0;
    for (int32_t u = 0; u < scale_n_units(m); u++)
        n += scale_unit_of(m, context, u).n_params;
    return n;
}

double scale_flop_per_token(const struct scale_model *m, int64_t context)
{
    double flop = 0;
    for (int32_t u = 0; u < scale_n_units(m); u++) {
        struct scale_unit unit = scale_unit_of(m, context, u);
        flop += 3 * (unit.flop_per_token + unit.head_flop_per_token);
    }
    return flop;
}
