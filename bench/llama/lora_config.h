/* SPDX-License-Identifier: Apache-2.0 */
/* lora_config.h: the choice of adapters (lora.h) of a model, by command-line options or by the
 * adapter_config.json of the PEFT library. A PEFT folder also has the adapters' weights, in
 * LORA_WEIGHTS_FILE. */
#ifndef ZERO_BENCH_LORA_CONFIG_H
#define ZERO_BENCH_LORA_CONFIG_H

#include "bench/model/model_config.h"

#define LORA_CONFIG_FILE  "adapter_config.json"
#define LORA_WEIGHTS_FILE "adapter_model.safetensors"

/* The matrices of a layer that may have an adapter. */
enum lora_target { LORA_Q, LORA_K, LORA_V, LORA_O, LORA_GATE, LORA_UP, LORA_DOWN, LORA_N_TARGETS };

static inline bool lora_has(const struct model_config *c, int target)
{
    return c->lora_rank && (c->lora_targets >> target & 1);
}

/* The number of adapters in a layer. */
static inline int64_t lora_n(const struct model_config *c)
{
    int64_t n = 0;
    for (int t = 0; t < LORA_N_TARGETS; t++)
        n += lora_has(c, t);
    return n;
}

/* The factor of an adapter's product. */
static inline double lora_scale(const struct model_config *c)
{
    return c->lora_alpha / (double)c->lora_rank;
}

/* The options of adapters. `in` is as in MODEL_CP_ROWS. */
#define LORA_ROWS(in)                                                                                        \
    {"lora", "RANK",                                                                                         \
     "With a folder as --model: train adapters of this rank, not the model's weights (none)",                \
     OPTION_INT(in own.lora_rank, 1, 65536)},                                                                \
        {"lora-alpha", "X", "With --lora: adapters are scaled by X / RANK (2 * RANK)",                       \
         OPTION_DOUBLE(in own.lora_alpha, 1e-6, 1e6)},                                                       \
    {                                                                                                        \
        "lora-targets", "LIST",                                                                              \
            "With --lora: some of q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj (all)",            \
            .read = lora_read_targets, .at = OPTION_AT(OPTION_STRUCT, in own.lora_targets, uint32_t : 0)     \
    }
option_reader lora_read_targets;

/* Copies the options in `own` to c, checks them, and fills in the defaults. The sizes in c are known. */
error_t lora_take_options(struct argp_state *state, struct model_config *c, const struct model_config *own);

/* Reads dir's LORA_CONFIG_FILE. If c has adapters, the file must have the same; otherwise c gets those of the
 * file. Returns 0 or an error:
 *
 *     ZERO_ERR_IO      the file cannot be read, or is not JSON
 *     ZERO_ERR_ARG     a field is missing, impossible, or different from c
 *     ZERO_ERR_NOTSUP  the adapters are of a kind that is not implemented here */
int lora_config_read(struct model_config *c, const char *dir);

/* Writes dir's LORA_CONFIG_FILE. base is the folder of the model. Returns 0 or a zero_err. */
int lora_config_write(const struct model_config *c, const char *dir, const char *base);

#endif
