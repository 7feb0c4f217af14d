/* SPDX-License-Identifier: Apache-2.0 */
/* plan_cmd.h: the options of zero-bench plan and what it makes of them. tune shares most of it. */
#ifndef ZERO_BENCH_PLAN_CMD_H
#define ZERO_BENCH_PLAN_CMD_H

#include "bench/plan/stages.h"
#include "bench/report/report.h"
#include "bench/report/stage_table.h"
#include "bench/states.h"

struct plan_options {
    struct model_options model;
    /* 0: those of the model */
    int64_t params;
    int64_t world, accum, prefetch, budget;
    /* 0: no hybrids */
    int64_t dp_shard;
    int64_t pp, stages_per_rank;
    /* 0: not given */
    int64_t micro_batches;
    /* rows of a micro-batch; 0: activations are not printed */
    int64_t batch;
    int dtype, optimizer, wire_dtype, deterministic;
    struct states_options states;
    /* enum zero_device */
    int device;
    /* enum zero_schedule; -1: not given */
    int schedule;
    bool json;
};

/* The options of the mesh, for plan and tune. `in` is empty or the field, with a dot, that has the struct
 * plan_options in OPTION_STRUCT. */
#define PLAN_MESH_ROWS(in)                                                                                   \
    {"tp", "N",                                                                                              \
     "Layers in parts, on N ranks each, which have the same data: tells what one of them takes (1)",         \
     OPTION_INT(in model.own.tp, 1, 1024)},                                                                  \
        MODEL_CP_ROWS(in model.),                                                                            \
        {"pp", "N",                                                                                          \
         "Layers in so many stages of a pipeline, on ranks of their own, or in --stages-per-rank times as "  \
         "many: tells what the fullest rank takes (1)",                                                      \
         OPTION_INT(in pp, 1, PIPE_MAX_STAGES)},                                                             \
        {"sequence-parallel", NULL,                                                                          \
         "With --tp and --batch: activations between products are cut by rows, a part on each of the N",     \
         OPTION_FLAG(in model.own.sequence)},                                                                \
        {"schedule", "1f1b|gpipe|interleaved|zero-bubble",                                                   \
         "With --pp: the order in which stages take micro-batches; interleaved, for several on a rank, "     \
         "keeps more of them than 1f1b (1f1b)",                                                              \
         OPTION_WORD(in schedule, pipe_schedules)},                                                          \
    {                                                                                                        \
        "stages-per-rank", "N",                                                                              \
            "With --pp and --schedule interleaved or gpipe: stages on each of its ranks (1)",                \
            OPTION_INT(in stages_per_rank, 1, PIPE_MAX_OWN)                                                  \
    }

/* The optimizer for a table's head, with what differs from the default precision:
 * "adamw, masters remainder". */
struct plan_optimizer {
    char text[STATES_TEXT + 16];
};
struct plan_optimizer plan_optimizer(const struct plan_options *o);

/* The defaults of zero-bench plan. */
struct plan_options plan_defaults(void);

/* Fills in what was not given of the mesh, the micro-batches and their rows. Refuses axes that do not fit
 * each other, the model or the world, as a finish of arguments.h does. A world of 0 is not known yet. */
error_t plan_finish_axes(struct argp_state *state, struct plan_options *o);

/* The tensor-parallel ranks, and the context-parallel ones: 1 if --tp or --cp was not given. */
int64_t plan_tp(const struct plan_options *o);
int64_t plan_cp(const struct plan_options *o);

/* Returns the configuration to plan a rank with. hybrid is an enum hybrid. */
struct zero_config plan_config(const struct plan_options *o, int stage, int hybrid,
                               const struct plan_rank *rank);

/* Plans one column (bench/report/stage_table.h) for a rank. *ns is the time that planning took. Returns 0,
 * or the program's exit code after one line on stderr. */
int plan_column(const struct plan_options *o, int column, const struct plan_rank *rank,
                struct zero_plan_info *info, int64_t *ns);

/* Bytes of a micro-batch's activations between two layers. */
int64_t plan_move_bytes(const struct plan_options *o);

/* Bytes that a rank receives in a step for attention between the ranks of cp, in so many layers. */
int64_t plan_cp_bytes(const struct plan_options *o, int64_t layers);

/* Bytes of activations that a stage with so many layers keeps of a micro-batch. `stage` is its number in
 * the model. The buffers of --cp are plan_cp_room(). */
int64_t plan_kept_bytes(const struct plan_options *o, int64_t layers, int64_t stage);

/* Bytes of the activations inside one layer. With --recompute each stage has them once, and with
 * --schedule zero-bubble also once for each layer of a micro-batch that is between the two parts of its
 * backward pass. Without --recompute 0. */
int64_t plan_layer_bytes(const struct plan_options *o);

/* Bytes of the buffers for attention with --cp, once for a stage. */
int64_t plan_cp_room(const struct plan_options *o);

/* Plans all pipeline stages, if pp is above 1, and prints the result. tensors are those of the whole
 * model. Returns the program's exit code. */
int plan_pipeline(const struct plan_options *o, const struct zero_tensor *tensors, int32_t n);

/* Adds to a line of --json what --cp brings: the buffers of attention, and what it receives in so many
 * layers. */
void plan_add_cp(const struct plan_options *o, json_t *line, int64_t layers);

/* Rows of the table about states that are not in the device's memory. */
void plan_print_states(const struct plan_options *o, const struct zero_plan_info *info, int n_columns);

/* A line of --json about one column. The caller may add fields, and prints it. */
json_t *plan_line(const struct plan_options *o, int column, const struct zero_plan_info *info, int64_t ns);

#endif
