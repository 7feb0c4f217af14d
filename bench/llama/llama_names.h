/* SPDX-License-Identifier: Apache-2.0 */
/* llama_names.h: the tensors of a Llama-like model: their table for zero_wrap, and their published names for
 * zero_import and zero_export.
 *
 * Every published matrix is one tensor, stacked over the layers. q, k and v are not fused, nor are the MLP's
 * gate and up. With grouped-query attention the rows of q, k and v differ in number, and tp would have to
 * divide each separately, but tp_blocks divides a tensor in equal blocks. A fused tensor would also need
 * several names for the rows of one layer, but a zero_weight names a whole layer.
 *
 * Letters of shapes; tensor parallelism cuts the last four:
 *
 *     L  layers                     A  channels of all heads of q
 *     C  channels between layers    K  channels of all heads of k, and of v
 *     H  channels of a head         F  channels of the MLP
 *                                   U  token ids
 */
#ifndef ZERO_BENCH_LLAMA_NAMES_H
#define ZERO_BENCH_LLAMA_NAMES_H

#include "bench/llama/hf_config.h"
#include "zero/zero.h"

/* A tensor's number in the whole model, and its index in the model's arrays of pointers. */
enum llama_tensor {
    LLAMA_EMBED,  /* (U, C), also the head of a tied model */
    LLAMA_NORM1,  /* (L, C), before attention */
    LLAMA_Q,      /* (L, A, C) */
    LLAMA_K,      /* (L, K, C) */
    LLAMA_V,      /* (L, K, C) */
    LLAMA_Q_BIAS, /* (L, A), with qkv_bias */
    LLAMA_K_BIAS, /* (L, K) */
    LLAMA_V_BIAS, /* (L, K) */
    LLAMA_Q_NORM, /* (L, H), with qk_norm */
    LLAMA_K_NORM, /* (L, H) */
    LLAMA_O,      /* (L, C, A) */
    LLAMA_NORM2,  /* (L, C), before the MLP */
    LLAMA_GATE,   /* (L, F, C) */
    LLAMA_UP,     /* (L, F, C) */
    LLAMA_DOWN,   /* (L, C, F) */
    LLAMA_NORM,   /* (C), after the last layer */
    LLAMA_HEAD,   /* (U, C), not in a tied model */
    LLAMA_N_TENSORS
};

/* What a rank has of the model, or one of its pipeline stages. */
struct llama_part {
    const struct hf_config *config;
    /* Tensor-parallel size. 0 and 1: none. */
    int64_t tp;
    /* Sequence parallelism: with tp above 1, ranks compute norms of different tokens. */
    bool sequence;
    /* Layers first_layer .. first_layer + layers - 1, and what is missing before and after them. */
    int64_t first_layer, layers;
    bool no_embedding, no_head;
};

/* U, the token ids of a tensor-parallel rank. The last rank may have unused ids at the end. */
int64_t llama_part_vocab(const struct llama_part *p);

/* Units of a part, numbered from 0 in the order of the forward pass. -1: the part has no such unit. */
struct llama_units {
    /* The embedding. In a tied model also the last norm, because this unit is used last, too. */
    int32_t embedding;
    /* Each layer is a unit. */
    int32_t first_layer;
    /* The last norm and the head of an untied model. */
    int32_t head;
    /* Number of units. */
    int32_t n;
};
struct llama_units llama_units_of(const struct llama_part *p);

/* llama_describe takes these from the model. */
struct llama_pointers {
    /* (LLAMA_N_TENSORS) each. */
    void **params, **grads;
    /* Of all tensors. */
    enum zero_dtype dtype;
    /* Backward stores the gradients of matrices. If false, it adds to them. An embedding that is no head
     * always gets sums. */
    bool stores;
};

/* Fills in the table of a part for zero_wrap, with each tensor's number, and returns how many there are. The
 * embedding of a tied model is ZERO_TIED if its first and last stage differ. */
int32_t llama_describe(struct zero_tensor table[LLAMA_N_TENSORS], int32_t number[LLAMA_N_TENSORS],
                       const struct llama_part *p, const struct llama_pointers *pointers);

/* Checks that tp divides heads, kv_heads and hidden. ZERO_ERR_ARG names the one that it does not divide. */
int llama_check_tp(const struct hf_config *c, int64_t tp);

#define LLAMA_NAME_BYTES      64
#define LLAMA_N_NAMES(layers) ((LLAMA_N_TENSORS - 3) * (layers) + 3)

/* Fills in the map of a part for zero_import and zero_export, layer by layer, and returns its number of
 * entries, at most LLAMA_N_NAMES(layers). Each rank reads and writes only what it has. number (n_tensors) is
 * that of llama_describe. Names are stored in text, which has as many rows as map. */
int32_t llama_names(struct zero_weight *map, char (*text)[LLAMA_NAME_BYTES], const int32_t *number,
                    int32_t n_tensors, const struct llama_part *p);

#endif
