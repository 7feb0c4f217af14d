/* SPDX-License-Identifier: Apache-2.0 */
/* states.h: the options for bytes per parameter, which several commands share: in what precision gradient
 * sums, masters and moments are kept, and in which memory. */
#ifndef ZERO_BENCH_STATES_H
#define ZERO_BENCH_STATES_H

#include "bench/arguments.h"
#include "zero/zero.h"

#include <jansson.h>

/* Zeros are the library's defaults. */
struct states_options {
    /* enum zero_dtype; 0: f32 */
    int grad_sum;
    /* enum zero_masters, enum zero_moments, enum zero_states */
    int masters, moments, states;
    /* folder for the file of --states file; NULL: none */
    const char *dir;
    /* seed of rounding at random */
    int64_t seed;
};

/* Words of enum zero_masters, enum zero_moments and enum zero_states. */
extern const struct option_word option_masters[], option_moments[], option_states[];

/* The options of precision. `in` names the field of OPTION_STRUCT that is a struct states_options, followed
 * by a dot. */
#define PRECISION_ROWS(in)                                                                                   \
    {"grad-sum-dtype", "f32|bf16", "The dtype in which gradients of a bf16 model are added up (f32)",        \
     OPTION_WORD(in grad_sum, option_dtypes)},                                                               \
        {"masters", "f32|remainder|none",                                                                    \
         "Masters of bf16 weights; remainder: only the 16 bits that the weights lack, with the same "        \
         "results; none: weights are rounded at random (f32)",                                               \
         OPTION_WORD(in masters, option_masters)},                                                           \
    {                                                                                                        \
        "moments", "f32|bf16|q8",                                                                            \
            "States of the optimizer; q8: 8 bits, and a scale for 32 elements; bf16 and q8 are rounded at "  \
            "random (f32)",                                                                                  \
            OPTION_WORD(in moments, option_moments)                                                          \
    }

/* The option of the memory that holds masters and moments, and of the folder of its file. `in` is as in
 * PRECISION_ROWS. */
#define STATES_ROW(in)                                                                                       \
    {                                                                                                        \
        "states", "device|host|file",                                                                        \
            "Where masters and moments are: in the device's memory, in the host's, or in a file (device)",   \
            OPTION_WORD(in states, option_states)                                                            \
    }
#define STATES_DIR_ROW(in)                                                                                   \
    {                                                                                                        \
        "states-dir", "DIR",                                                                                 \
            "With --states file: the folder of the file, on a local disk; nothing stays there",              \
            OPTION_TEXT(in dir)                                                                              \
    }

/* Returns what is wrong with the options for a model of this enum zero_dtype, or NULL. */
const char *states_fault(const struct states_options *s, int dtype);
/* Returns what is wrong with the folder, for a command that makes the file, or NULL. */
const char *states_dir_fault(const struct states_options *s);
/* Whether any of them differs from the default. */
bool states_given(const struct states_options *s);
void states_to_config(const struct states_options *s, struct zero_config *cfg);
/* What a run uses, with a model of this enum zero_dtype. Variables may have changed the options. */
struct states_options states_of_run(const struct zero_stats *stats, int dtype);
/* Adds "grad_sum_dtype", "masters", "moments" and "states" to a line of --json. */
void states_add_json(const struct states_options *s, json_t *line);

/* Writes what differs from the defaults, such as "masters remainder, moments q8", or "". */
#define STATES_TEXT 96
const char *states_text(const struct states_options *s, char text[STATES_TEXT]);

#endif
