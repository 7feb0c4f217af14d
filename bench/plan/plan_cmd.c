/* SPDX-License-Identifier: Apache-2.0 */
/* plan_cmd.c: zero-bench plan, which prints what every stage would take. It only calls zero_plan. */
#include "bench/plan/plan_cmd.h"
#include "bench/commands.h"
#include "bench/llama/lora_config.h"
#include "bench/plan/stages.h"
#include "bench/schedule/pipeline_stages.h"

#include "kernels/device.h"

#include <string.h>

#define OPTION_STRUCT struct plan_options
static const struct option_row rows[] = {
    {"params", "N", "A GPT of this many parameters, such as 7.5e9, instead of a named model",
     OPTION_INT(params, 1, 1000000000000000)},
    {"dtype", "f32|bf16", "Of weights and gradients (bf16)", OPTION_WORD(dtype, option_dtypes)},
    LORA_ROWS(model.),
    {.help = "Sharding:"},
    {"world", "N", "Ranks (1)", OPTION_INT(world, 1, 1000000)},
    {"dp-shard", "N", "Groups of N ranks, a number that divides the world: tells of HSDP and HFSDP, too",
     OPTION_INT(dp_shard, 1, 1000000)},
    PLAN_MESH_ROWS(),
    MODEL_RECOMPUTE_ROW(model.),
    {"optimizer", "NAME", "One of:" OPTION_OPTIMIZERS " (adamw)", OPTION_WORD(optimizer, option_optimizers)},
    {"accum", "N", "Micro-batches per step (1; with --pp two for each of its ranks)",
     OPTION_INT(accum, 1, 100000)},
    {"micro-batches", "N", "The same", OPTION_INT(micro_batches, 1, 100000)},
    {"batch", "ROWS", "Of a micro-batch: tells of the activations that the model keeps, too (with --pp: 1)",
     OPTION_INT(batch, 1, 1000000)},
    {"prefetch", "N", "Units gathered ahead (2)", OPTION_INT(prefetch, 0, 10000)},
    {"budget", "BYTES", "For gathered parameters at stage 3 (what prefetch needs)", OPTION_BYTES(budget, 1)},
    {"wire-dtype", "f32|bf16", "Of gradients between ranks (that of the model)",
     OPTION_WORD(wire_dtype, option_dtypes)},
    {"deterministic", "on|off",
     "Sums in a fixed order (on; off with --device cuda, and with --dp-shard and --accum above 1, each group "
     "taken for a host)",
     OPTION_WORD(deterministic, option_on_off)},
    {"device", "host|cuda", "Where the model is to compute (host)", OPTION_WORD(device, option_devices)},
    PRECISION_ROWS(states.),
    STATES_ROW(states.),
    {"json", NULL, "A JSON line per stage", OPTION_FLAG(json), .group = 3},
    {0},
};

/* Refuses axes that do not fit the model or the world. */
static error_t check_axes(struct argp_state *state, const struct plan_options *o)
{
    long long tp = (long long)plan_tp(o), pp = (long long)o->pp, cp = (long long)plan_cp(o);
    long long stages = pp * (long long)o->stages_per_rank, world = (long long)o->world;
    struct model_config c = plan_sizes(&o->model.config, o->params);
    long long tokens = (long long)(o->batch * model_own_context(&c));
    char fault[128];
    if (!o->params && model_tp_fault(&c, fault, sizeof fault))
        return option_fault(state, "%s", fault);
    if ((!o->params || c.cp_form != MODEL_CP_EXCHANGE) && model_cp_fault(&c, fault, sizeof fault))
        return option_fault(state, "%s", fault);
    if (c.sequence && (tp == 1 || !o->batch || tokens % tp))
        return option_fault(state,
                            "--sequence-parallel: is of activations, which --batch asks for, and for --tp of "
                            "2 or more, which divides the %lld tokens of a micro-batch",
                            tokens);
    if (pp > 1 && !c.channels)
        return option_fault(state, "--params: %lld are too few for layers in %lld part%s and in %lld stages",
                            (long long)o->params, tp, tp == 1 ? "" : "s", pp);
    if (stages > c.layers)
        return option_fault(state, "--pp: %lld stages are more than the %lld layers", stages,
                            (long long)c.layers);
    if (cp > 1 && world % (pp * cp * tp))
        return option_fault(
            state,
            "--cp: %lld ranks for each row, of %lld part%s in %lld stage%s, do not divide the "
            "world of %lld (--world)",
            cp, tp, tp == 1 ? "" : "s", pp, pp == 1 ? "" : "s", world);
    if (pp > 1 && world % (pp * tp))
        return option_fault(state,
                            "--pp: %lld stages of layers in %lld part%s do not divide the world of %lld "
                            "(--world)",
                            pp, tp, tp == 1 ? "" : "s", world);
    return 0;
}

error_t plan_finish_axes(struct argp_state *state, struct plan_options *o)
{
    const char *fault = pipe_options_fault(o->schedule, o->pp, o->stages_per_rank);
    if (fault)
        return option_fault(state, "%s", fault);
    pipe_options_default(&o->schedule, &o->accum, o->pp);
    o->batch = o->batch || o->pp == 1 ? o->batch : 1;
    return check_axes(state, o);
}

static error_t finish(struct argp_state *state, void *options)
{
    struct plan_options *o = options;
    const char *fault = states_fault(&o->states, o->dtype);
    if (fault)
        return option_fault(state, "%s", fault);
    if (o->accum && o->micro_batches)
        return option_fault(state, "--micro-batches: says what --accum does");
    o->accum = o->accum ? o->accum : o->micro_batches;
    return plan_finish_axes(state, o);
}

static const struct option_table table = {
    .rows = rows,
    .doc = "Tells the memory per rank and the bytes on the wire per step at every stage, beside the "
           "formula of the "
           "ZeRO paper (arXiv:1910.02054), without allocating or sending anything; and the time that "
           "planning took.",
    .read_word = option_refuse_word,
    .finish = finish,
    OPTIONS_WITH_MODEL(struct plan_options, model),
};

/* Log callback after stage 0, whose plan has printed all other warnings: passes on those about groups. */
static void report_groups(void *arg, const char *line)
{
    (void)arg;
    if (strstr(line, "dp_replicate ") || strstr(line, "deterministic is off"))
        fprintf(stderr, "libzero: %s\n", line);
}

struct plan_optimizer plan_optimizer(const struct plan_options *o)
{
    struct plan_optimizer out;
    char states[STATES_TEXT];
    states_text(&o->states, states);
    snprintf(out.text, sizeof out.text, "%s%s%s", option_word_of(option_optimizers, o->optimizer),
             *states ? ", " : "", states);
    return out;
}

int64_t plan_tp(const struct plan_options *o)
{
    return o->model.config.tp > 1 ? o->model.config.tp : 1;
}

int64_t plan_cp(const struct plan_options *o)
{
    return o->model.config.cp > 1 ? o->model.config.cp : 1;
}

struct zero_config plan_config(const struct plan_options *o, int stage, int hybrid,
                               const struct plan_rank *rank)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.stage = stage;
    hybrid_to_config(&cfg, hybrid, o->world / (o->pp * plan_cp(o) * plan_tp(o)), o->dp_shard);
    cfg.mesh.pp = (int32_t)o->pp;
    cfg.mesh.cp = (int32_t)plan_cp(o);
    cfg.mesh.tp = (int32_t)plan_tp(o);
    /* any rank of this pipeline stage; here the first */
    cfg.launch.rank = (int32_t)(rank->pp_at * (o->world / o->pp));
    cfg.launch.world = (int32_t)o->world;
    cfg.device = o->device;
    cfg.optim.optimizer = o->optimizer;
    cfg.optim.beta1 = 0.9f;
    cfg.grad_accum_steps = (int32_t)o->accum;
    cfg.memory.prefetch = (int32_t)o->prefetch;
    cfg.memory.param_budget_bytes = o->budget;
    cfg.memory.wire_dtype = o->wire_dtype;
    cfg.deterministic = o->deterministic;
    states_to_config(&o->states, &cfg);
    cfg.memory.states_dir = o->states.states == ZERO_STATES_FILE ? "." : NULL; /* a plan opens no file */
    cfg.memory.order = rank->order;
    cfg.memory.n_order = rank->n_order;
    cfg.pipeline.schedule = o->schedule;
    cfg.pipeline.stages_per_rank = (int32_t)o->stages_per_rank;
    cfg.pipeline.activation_bytes = o->pp > 1 ? plan_move_bytes(o) : 0;
    return cfg;
}

int plan_column(const struct plan_options *o, int column, const struct plan_rank *rank,
                struct zero_plan_info *info, int64_t *ns)
{
    struct zero_config cfg = plan_config(o, stage_of_column(column), hybrid_of_column(column), rank);
    cfg.debug.log = column > 0 && rank->pp_at == 0 ? report_groups : NULL;
    int64_t start = zr_now_ns();
    int err = zero_plan(rank->tensors, rank->n, &cfg, info);
    *ns = zr_now_ns() - start;
    if (err) {
        fprintf(stderr, "zero-bench plan: stage %d: %s\n", cfg.stage, zero_last_error());
        return err == ZERO_ERR_ARG || err == ZERO_ERR_BUDGET ? EXIT_USAGE : EXIT_FAILURE;
    }
    return 0;
}

static int64_t tokens_of(const struct plan_options *o, const struct model_config *c)
{
    return o->batch * model_own_context(c);
}

static int64_t dtype_bytes(const struct plan_options *o)
{
    return o->dtype == ZERO_BF16 ? 2 : 4;
}

int64_t plan_move_bytes(const struct plan_options *o)
{
    struct model_config c = plan_sizes(&o->model.config, o->params);
    return train_stage_bytes(&c, o->batch, dtype_bytes(o));
}

int64_t plan_kept_bytes(const struct plan_options *o, int64_t layers, int64_t stage)
{
    struct model_config c = plan_sizes(&o->model.config, o->params);
    c.layers = layers;
    c.no_embedding = stage > 0;
    c.no_head = stage < o->pp * o->stages_per_rank - 1;
    return tokens_of(o, &c) * model_kept_elems(&c) * dtype_bytes(o);
}

int64_t plan_layer_bytes(const struct plan_options *o)
{
    struct model_config c = plan_sizes(&o->model.config, o->params);
    return tokens_of(o, &c) * model_layer_elems(&c) * dtype_bytes(o);
}

int64_t plan_cp_room(const struct plan_options *o)
{
    struct model_config c = plan_sizes(&o->model.config, o->params);
    struct model_cp_room room = model_cp_room(&c, o->batch, dtype_bytes(o));
    return room.reals * dtype_bytes(o) + room.floats * (int64_t)sizeof(float);
}

int64_t plan_cp_bytes(const struct plan_options *o, int64_t layers)
{
    struct model_config c = plan_sizes(&o->model.config, o->params);
    return layers * model_cp_bytes(&c, o->batch, dtype_bytes(o)) * (o->accum ? o->accum : 1);
}

/* Rows of the table about --cp. */
static void print_cp(const struct plan_options *o, int n_columns, int64_t layers)
{
    int64_t room[N_COLUMNS], received[N_COLUMNS];
    for (int c = 0; c < n_columns; c++) {
        room[c] = plan_cp_room(o);
        received[c] = plan_cp_bytes(o, layers);
    }
    stage_table_bytes("buffers of attention", room, n_columns);
    stage_table_bytes("received for attention", received, n_columns);
}

void plan_print_states(const struct plan_options *o, const struct zero_plan_info *info, int n_columns)
{
    int64_t host[N_COLUMNS], file[N_COLUMNS];
    for (int c = 0; c < n_columns; c++) {
        host[c] = info[c].host_bytes;
        file[c] = info[c].file_bytes;
    }
    if (o->states.states && o->device == ZERO_DEVICE_CUDA)
        stage_table_bytes("of it in host memory", host, n_columns);
    if (o->states.states == ZERO_STATES_FILE)
        stage_table_bytes("and in a file", file, n_columns);
}

static void print_table(const struct plan_options *o, const struct zero_plan_info *info, const int64_t *ns,
                        int n_columns, int32_t n_units)
{
    struct zero_bytes bytes[N_COLUMNS];
    int64_t paper[N_COLUMNS], wire[N_COLUMNS], outer[N_COLUMNS];
    for (int c = 0; c < n_columns; c++) {
        bytes[c] = info[c].bytes;
        paper[c] = info[c].paper_bytes;
        wire[c] = info[c].traffic.wire_bytes;
        outer[c] = hybrid_of_column(c) ? info[c].traffic.outer_bytes : -1;
    }
    char parts[64] = "";
    if (o->model.config.tp > 1)
        snprintf(parts, sizeof parts, " of one of %lld parts", (long long)o->model.config.tp);
    printf("%lld parameters%s in %d units, %s, %s, %lld rank%s\n\n", (long long)info[0].n_params, parts,
           n_units, option_word_of(option_dtypes, o->dtype), plan_optimizer(o).text, (long long)o->world,
           o->world == 1 ? "" : "s");
    stage_table_head("per rank", n_columns);
    stage_table_memory(bytes, "total", n_columns);
    plan_print_states(o, info, n_columns);
    if (o->batch) {
        int64_t kept[N_COLUMNS];
        for (int c = 0; c < n_columns; c++)
            kept[c] =
                plan_kept_bytes(o, plan_sizes(&o->model.config, o->params).layers, 0) + plan_layer_bytes(o);
        stage_table_bytes("activations besides", kept, n_columns);
        if (plan_cp(o) > 1)
            print_cp(o, n_columns, plan_sizes(&o->model.config, o->params).layers);
    }
    stage_table_bytes("the ZeRO paper says", paper, n_columns);
    stage_table_bytes("received per step", wire, n_columns);
    if (n_columns > N_STAGES)
        stage_table_bytes("from other groups", outer, n_columns);
    stage_table_ms("time to plan", ns, n_columns);
}

json_t *plan_line(const struct plan_options *o, int column, const struct zero_plan_info *info, int64_t ns)
{
    json_t *line = json_pack("{s:i, s:o, s:I, s:I, s:I}", "stage", stage_of_column(column), "bytes",
                             report_bytes_json(&info->bytes), "paper_bytes", (json_int_t)info->paper_bytes,
                             "wire_bytes", (json_int_t)info->traffic.wire_bytes, "plan_ns", (json_int_t)ns);
    int hybrid = hybrid_of_column(column);
    states_add_json(&o->states, line);
    if (o->states.states) {
        json_object_set_new(line, "host_bytes", json_integer(info->host_bytes));
        json_object_set_new(line, "file_bytes", json_integer(info->file_bytes));
    }
    if (hybrid) {
        json_object_set_new(line, "hybrid", json_string(option_word_of(option_hybrids, hybrid)));
        json_object_set_new(line, "dp_shard", json_integer(info->dp_shard));
        json_object_set_new(line, "outer_bytes", json_integer(info->traffic.outer_bytes));
    }
    return line;
}

void plan_add_cp(const struct plan_options *o, json_t *line, int64_t layers)
{
    if (plan_cp(o) == 1)
        return;
    json_object_set_new(line, "cp", json_integer(plan_cp(o)));
    json_object_set_new(line, "cp_room_bytes", json_integer(plan_cp_room(o)));
    json_object_set_new(line, "cp_bytes", json_integer(plan_cp_bytes(o, layers)));
}

/* Adds what the model takes besides the library. */
static void add_activations(const struct plan_options *o, json_t *line)
{
    int64_t layers = plan_sizes(&o->model.config, o->params).layers;
    json_object_set_new(line, "activation_bytes",
                        json_integer(plan_kept_bytes(o, layers, 0) + plan_layer_bytes(o)));
    plan_add_cp(o, line, layers);
}

/* Plans without pipeline stages: each rank has all layers, or its tp part of them. */
static int plan_whole(const struct plan_options *o, const struct zero_tensor *tensors, int32_t n,
                      int32_t layers)
{
    struct zero_plan_info info[N_COLUMNS];
    int64_t ns[N_COLUMNS];
    int n_columns = o->dp_shard ? N_COLUMNS : N_STAGES, status = 0;
    const struct model_config sizes = plan_sizes(&o->model.config, o->params);
    struct plan_rank rank;
    if (!plan_rank_of(&rank, &sizes, tensors, n, layers, 1, 1, 0)) {
        fprintf(stderr, "zero-bench plan: no memory for %d units\n", layers);
        return EXIT_FAILURE;
    }
    for (int c = 0; !status && c < n_columns; c++)
        status = plan_column(o, c, &rank, &info[c], &ns[c]);
    free(rank.order);
    if (!status && !o->json)
        print_table(o, info, ns, n_columns, plan_n_units(tensors, n));
    for (int c = 0; !status && o->json && c < n_columns; c++) {
        json_t *line = plan_line(o, c, &info[c], ns[c]);
        if (o->batch)
            add_activations(o, line);
        report_line(line);
    }
    return status;
}

struct plan_options plan_defaults(void)
{
    return (struct plan_options){.world = 1,
                                 .pp = 1,
                                 .stages_per_rank = 1,
                                 .schedule = -1,
                                 .prefetch = 2,
                                 .budget = ZERO_AUTO,
                                 .deterministic = ZERO_AUTO,
                                 .dtype = ZERO_BF16,
                                 .device = ZERO_DEVICE_HOST,
                                 .optimizer = ZERO_ADAMW};
}

int plan_command(const char *name, int argc, char **argv)
{
    struct plan_options o = plan_defaults();
    int status = options_parse(&table, name, argc, argv, &o);
    if (status)
        return status;
    struct zero_tensor tensors[PLAN_N_TENSORS];
    int32_t layers, n = plan_model(tensors, &layers, &o.model.config, o.params, o.dtype);
    return o.pp > 1 ? plan_pipeline(&o, tensors, n) : plan_whole(&o, tensors, n, layers);
}
