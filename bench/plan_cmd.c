/* plan_cmd.c: zero-bench plan: what every stage would take, from zero_plan alone. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/plan_model.h"
#include "bench/report.h"
#include "bench/stage_table.h"
#include "bench/train.h"

#include "kernels/device.h"

#include <string.h>

struct plan_options {
    struct model_options model;
    int64_t params; /* 0: the model's own */
    int64_t world, accum, prefetch, budget;
    int64_t shard_group; /* 0: no hybrids */
    int dtype, optimizer, wire_dtype, deterministic;
    bool json;
};

static const struct option_row rows[] = {
    {"params", "N", "A GPT of this many parameters, such as 7.5e9, instead of a named model", 1,
     OPTION_INT(struct plan_options, params, 1, 1000000000000000)},
    {"dtype", "f32|bf16", "Of weights and gradients (bf16)", 1,
     OPTION_WORD(struct plan_options, dtype, option_dtypes)},
    {.help = "Sharding:", .group = 2},
    {"world", "N", "Ranks (1)", 2, OPTION_INT(struct plan_options, world, 1, 1000000)},
    {"shard-group", "N", "Groups of N ranks, a number that divides the world: tells of HSDP and HFSDP, too",
     2, OPTION_INT(struct plan_options, shard_group, 1, 1000000)},
    {"tp", "N",
     "Layers in parts, on N ranks each, which have the same data: tells what one of them takes (1)", 2,
     OPTION_INT(struct plan_options, model.own.tp, 1, 1024)},
    {"optimizer", "NAME", "One of:" OPTION_OPTIMIZERS " (adamw)", 2,
     OPTION_WORD(struct plan_options, optimizer, option_optimizers)},
    {"accum", "N", "Micro-batches per step (1)", 2, OPTION_INT(struct plan_options, accum, 1, 100000)},
    {"prefetch", "N", "Units gathered ahead (2)", 2, OPTION_INT(struct plan_options, prefetch, 0, 10000)},
    {"budget", "BYTES", "For gathered parameters at stage 3 (what prefetch needs)", 2,
     OPTION_BYTES(struct plan_options, budget, 1)},
    {"wire-dtype", "f32|bf16", "Of gradients between ranks (that of the model)", 2,
     OPTION_WORD(struct plan_options, wire_dtype, option_dtypes)},
    {"deterministic", "on|off",
     "Sums in a fixed order (on; with --shard-group and --accum above 1 off, each group taken for a host)", 2,
     OPTION_WORD(struct plan_options, deterministic, option_on_off)},
    {"json", NULL, "A JSON line per stage", 3, OPTION_FLAG(struct plan_options, json)},
    {0},
};

static const struct option_table table = {
    .rows = rows,
    .doc = "Tells the memory per rank and the bytes on the wire per step at every stage, beside the "
           "formula of the "
           "ZeRO paper (arXiv:1910.02054), without allocating or sending anything; and the time that "
           "planning took.",
    .read_word = option_refuse_word,
    OPTIONS_WITH_MODEL(struct plan_options),
};

/* For cfg.log behind stage 0, which has been warned of everything else: what comes of groups. */
static void report_groups(void *arg, const char *line)
{
    (void)arg;
    if (strstr(line, "hybrid is ") || strstr(line, "deterministic is off"))
        fprintf(stderr, "libzero: %s\n", line);
}

/* Of rank 0, in a world that is met by nobody. */
static int open_mesh(const struct plan_options *o, int hybrid, const struct zero_config *cfg,
                     zero_mesh **mesh)
{
    struct zero_config place = *cfg;
    const struct zero_axis axes[] = {{"dp_replicate", hybrid ? -1 : 1},
                                     {"dp_shard", hybrid ? (int32_t)o->shard_group : -1},
                                     {"tp", (int32_t)o->model.config.tp}};
    place.rendezvous = "tcp://127.0.0.1:1";
    return zero_mesh_open(mesh, axes, 3, &place);
}

static int plan_column(const struct plan_options *o, int column, const struct zero_tensor *tensors, int32_t n,
                       int32_t layers, struct zero_plan_info *info, int64_t *ns)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.stage = stage_of_column(column);
    cfg.hybrid = hybrid_of_column(column);
    bool parts = o->model.config.tp > 1;
    if (cfg.hybrid && !parts)
        cfg.shard_group = (int32_t)o->shard_group;
    cfg.log = column > 0 ? report_groups : NULL;
    cfg.world = (int32_t)o->world;
    cfg.optimizer = o->optimizer;
    cfg.beta1 = 0.9f;
    cfg.grad_accum_steps = (int32_t)o->accum;
    cfg.prefetch = (int32_t)o->prefetch;
    cfg.param_budget_bytes = o->budget;
    cfg.wire_dtype = o->wire_dtype;
    cfg.deterministic = o->deterministic;
    struct zero_call *order = malloc((size_t)TRAIN_N_CALLS(layers) * sizeof *order);
    if (!order) {
        fprintf(stderr, "zero-bench plan: no memory for %d units\n", layers);
        return EXIT_FAILURE;
    }
    train_call_order(order, layers);
    cfg.order = order;
    cfg.n_order = TRAIN_N_CALLS(layers);
    zero_mesh *mesh = NULL;
    int err = parts ? open_mesh(o, cfg.hybrid, &cfg, &mesh) : 0;
    cfg.mesh = mesh;
    int64_t start = zr_now_ns();
    err = err ? err : zero_plan(tensors, n, &cfg, info);
    *ns = zr_now_ns() - start;
    zero_mesh_close(&mesh);
    free(order);
    if (err) {
        fprintf(stderr, "zero-bench plan: stage %d: %s\n", cfg.stage, zero_last_error());
        return err == ZERO_ERR_ARG || err == ZERO_ERR_BUDGET ? EXIT_USAGE : EXIT_FAILURE;
    }
    return 0;
}

static void print_table(const struct plan_options *o, const struct zero_plan_info *info, const int64_t *ns,
                        int n_columns, int32_t layers)
{
    struct zero_bytes bytes[N_COLUMNS];
    int64_t paper[N_COLUMNS], wire[N_COLUMNS], outer[N_COLUMNS];
    for (int s = 0; s < n_columns; s++) {
        bytes[s] = info[s].bytes;
        paper[s] = info[s].paper_bytes;
        wire[s] = info[s].traffic.wire_bytes;
        outer[s] = hybrid_of_column(s) ? info[s].traffic.outer_bytes : -1;
    }
    char parts[64] = "";
    if (o->model.config.tp > 1)
        snprintf(parts, sizeof parts, " of one of %lld parts", (long long)o->model.config.tp);
    printf("%lld parameters%s in %d units, %s, %s, %lld rank%s\n\n", (long long)info[0].n_params, parts,
           layers + 1, option_word_of(option_dtypes, o->dtype),
           option_word_of(option_optimizers, o->optimizer), (long long)o->world, o->world == 1 ? "" : "s");
    stage_table_head("per rank", n_columns);
    stage_table_memory(bytes, "total", n_columns);
    stage_table_bytes("the ZeRO paper says", paper, n_columns);
    stage_table_bytes("received per step", wire, n_columns);
    if (n_columns > N_STAGES)
        stage_table_bytes("from other groups", outer, n_columns);
    stage_table_ms("time to plan", ns, n_columns);
}

static void print_line(int column, const struct zero_plan_info *info, int64_t ns)
{
    json_t *line = json_pack("{s:i, s:o, s:I, s:I, s:I}", "stage", stage_of_column(column), "bytes",
                             report_bytes_json(&info->bytes), "paper_bytes", (json_int_t)info->paper_bytes,
                             "wire_bytes", (json_int_t)info->traffic.wire_bytes, "plan_ns", (json_int_t)ns);
    int hybrid = hybrid_of_column(column);
    if (hybrid) {
        json_object_set_new(line, "hybrid", json_string(option_word_of(option_hybrids, hybrid)));
        json_object_set_new(line, "shard_group", json_integer(info->shard_group));
        json_object_set_new(line, "outer_bytes", json_integer(info->traffic.outer_bytes));
    }
    report_line(line);
}

int plan_command(const char *name, int argc, char **argv)
{
    struct plan_options o = {.world = 1,
                             .accum = 1,
                             .prefetch = 2,
                             .budget = ZERO_AUTO,
                             .deterministic = ZERO_AUTO,
                             .dtype = ZERO_BF16,
                             .optimizer = ZERO_ADAMW};
    int status = options_parse(&table, name, argc, argv, &o);
    if (status)
        return status;
    if (o.model.config.tp > 1 && !o.params && o.model.config.heads % o.model.config.tp) {
        fprintf(stderr, "zero-bench plan: --tp: %lld parts do not divide the %lld heads\n",
                (long long)o.model.config.tp, (long long)o.model.config.heads);
        return EXIT_USAGE;
    }
    struct zero_tensor tensors[PLAN_N_TENSORS];
    int32_t layers, n = plan_model(tensors, &layers, &o.model.config, o.params, o.dtype);
    struct zero_plan_info info[N_COLUMNS];
    int64_t ns[N_COLUMNS];
    int n_columns = o.shard_group ? N_COLUMNS : N_STAGES;
    for (int s = 0; s < n_columns; s++) {
        status = plan_column(&o, s, tensors, n, layers, &info[s], &ns[s]);
        if (status)
            return status;
    }
    if (!o.json) {
        print_table(&o, info, ns, n_columns, layers);
        return 0;
    }
    for (int s = 0; s < n_columns; s++)
        print_line(s, &info[s], ns[s]);
    return 0;
}
