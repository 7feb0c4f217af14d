/* SPDX-License-Identifier: Apache-2.0 */
/* hf_config.h: reads config.json of a Hugging Face folder into the sizes of a Llama-like model.
 *
 * Four classes of the transformers library are supported: LlamaForCausalLM, MistralForCausalLM,
 * Qwen2ForCausalLM and Qwen3ForCausalLM. A field that changes what the model computes, but is not implemented
 * here, is an error. The message names the field, its value and the allowed values. Missing fields get the
 * defaults of transformers, except that sizes must be there. */
#ifndef ZERO_BENCH_HF_CONFIG_H
#define ZERO_BENCH_HF_CONFIG_H

#include "zero/types.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HF_CONFIG_FILE "config.json"

/* How the frequencies of rotary positions are changed for contexts longer than those of pre-training. */
enum hf_rope_kind {
    /* They are not changed: frequency i is theta ^ (-2i / head_size). */
    HF_ROPE_PLAIN,
    /* All are divided by factor. */
    HF_ROPE_LINEAR,
    /* As in Llama 3.1: frequencies with wavelengths above original_context / low_freq_factor are divided by
     * factor. Those with wavelengths below original_context / high_freq_factor stay. Those between are
     * interpolated. */
    HF_ROPE_LLAMA3
};

struct hf_rope {
    enum hf_rope_kind kind;
    double theta;
    /* For HF_ROPE_LINEAR and HF_ROPE_LLAMA3. */
    double factor;
    /* For HF_ROPE_LLAMA3. low_freq_factor is below high_freq_factor. */
    double low_freq_factor, high_freq_factor;
    int64_t original_context;
};

#define HF_MAX_EOS 16

struct hf_config {
    /* Name of the class in transformers, such as "LlamaForCausalLM". Never freed. */
    const char *architecture;
    int64_t layers;
    /* Query heads, and key and value heads. kv_heads divides heads. */
    int64_t heads, kv_heads;
    /* Channels of a head, even. heads * head_size may differ from channels. */
    int64_t head_size;
    /* Channels between layers, and inside the MLP. */
    int64_t channels, hidden;
    /* The most tokens in a row. */
    int64_t context;
    int64_t vocab;
    /* Added to the mean square in RMSNorm. */
    double rms_eps;
    struct hf_rope rope;
    /* The head is the token embedding. */
    bool tied;
    /* q, k and v have biases (Qwen2). */
    bool qkv_bias;
    /* q and k of each head are normalised before the rotation (Qwen3). */
    bool qk_norm;
    /* The dtype of the weights in the folder. 0: the file does not say. */
    enum zero_dtype dtype;
    /* The token that begins a text. -1: none. */
    int64_t bos;
    /* The tokens that end a text. */
    int64_t eos[HF_MAX_EOS];
    int32_t n_eos;
    /* The names of unknown fields, which were ignored, for a message: "a, b". "": there are none. */
    char ignored[512];
};

/* Reads dir/config.json. Returns 0 or an error:
 *
 *     ZERO_ERR_IO      the file cannot be read, or is not JSON
 *     ZERO_ERR_ARG     a field is missing, or has an impossible value
 *     ZERO_ERR_NOTSUP  a field has a value that is not implemented here */
int hf_config_read(struct hf_config *out, const char *dir);
/* Parses the n bytes of such a file. `file` is its name in messages. */
int hf_config_parse(struct hf_config *out, const char *file, const char *text, size_t n);

#endif
