/* SPDX-License-Identifier: Apache-2.0 */
/* lora_config.h: which adapters (lora.h) a model has: the options of a command line, and adapter_config.json
 * of the PEFT library. A folder of PEFT has the adapters' weights beside it, in LORA_WEIGHTS_FILE. */
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

/* Adapters of a layer. */
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

/* Options of adapters. `in` is the field, with a dot, that has the struct model_options in OPTION_STRUCT. */
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

/* Takes the options in `own` over into c, whose sizes are known, with defaults. */
error_t lora_take_options(struct argp_state *state, struct model_config *c, const struct model_config *own);

/* Reads dir's LORA_CONFIG_FILE. If c has adapters, they must be the same; otherwise c gets those of the file.
 * Returns 0 or ZERO_ERR_IO (the file cannot be read, or is not JSON), ZERO_ERR_ARG (a field is missing, not
 * possible or not the same), ZERO_ERR_NOTSUP (a kind of adapter that is not implemented here). */
int lora_config_read(struct model_config *c, const char *dir);

/* Writes dir's LORA_CONFIG_FILE. base: the folder of the model. Returns 0 or a zero_err. */
int lora_config_write(const struct model_config *c, const char *dir, const char *base);

#endif
