/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline.c: zero-bench plan --pp, which plans every rank of a pipeline. Ranks between the first and the
 * last with the same number of layers share a plan; the activations that they keep differ. */
#include "bench/plan/plan_cmd.h"
#include "bench/plan/stages.h"
#include "bench/schedule/pipeline_stages.h"

#include "kernels/device.h"

#include <string.h>

/* The plans of one rank: for each column of the table (bench/report/stage_table.h) the result, and the time
 * that planning took. */
struct rank_plan {
    struct zero_plan_info info[N_COLUMNS];
    int64_t ns[N_COLUMNS];
};

struct planning {
    const struct plan_options *o;
    const struct zero_tensor *tensors;
    int32_t n;
    int n_columns;
    int64_t layers;
    /* (pp) like[r] is the lowest rank whose plan rank r shares, as pipe_find_alike finds it; plans has
     * entries for those ranks only */
    int64_t like[PIPE_MAX_STAGES];
    struct rank_plan plans[PIPE_MAX_STAGES];
    /* the simulated schedule: the bubble, and what each rank keeps */
    struct pipe_result pipe;
};

static int64_t n_stages(const struct planning *p)
{
    return p->o->pp * p->o->stages_per_rank;
}

static int64_t layers_of(const struct planning *p, int64_t stage)
{
    return pipe_layers_of(p->layers, n_stages(p), stage);
}

static int64_t layers_of_rank(const struct planning *p, int64_t rank)
{
    return pipe_layers_of_rank(p->layers, p->o->pp, p->o->stages_per_rank, rank);
}

static const struct zero_plan_info *info_of(const struct planning *p, int64_t rank, int column)
{
    return &p->plans[p->like[rank]].info[column];
}

/* ---- planning ---- */

static int plan_rank(struct planning *p, int64_t rank)
{
    struct rank_plan *plan = &p->plans[rank];
    struct plan_rank own;
    if (p->like[rank] != rank)
        return 0;
    const struct model_config sizes = plan_sizes(&p->o->model.config, p->o->params);
    if (!plan_rank_of(&own, &sizes, p->tensors, p->n, p->layers, p->o->pp, p->o->stages_per_rank, rank)) {
        fprintf(stderr, "zero-bench plan: no memory for the calls of %lld layers\n",
                (long long)layers_of_rank(p, rank));
        return EXIT_FAILURE;
    }
    int status = 0;
    for (int c = 0; !status && c < p->n_columns; c++)
        status = plan_column(p->o, c, &own, &plan->info[c], &plan->ns[c]);
    free(own.order);
    return status;
}

/* The forward passes that a backward pass takes as long as. */
static int32_t backward_of(const struct plan_options *o)
{
    return o->model.config.recompute ? 3 : 2;
}

/* Simulates the schedule. The forward pass of a stage takes as many nanoseconds as it has layers. */
static int time_stages(struct planning *p)
{
    static int32_t layers[PIPE_MAX_STAGES * PIPE_MAX_OWN];
    static int64_t kept[PIPE_MAX_STAGES * PIPE_MAX_OWN], between[PIPE_MAX_STAGES * PIPE_MAX_OWN];
    for (int64_t s = 0; s < n_stages(p); s++) {
        layers[s] = (int32_t)layers_of(p, s);
        kept[s] = plan_kept_bytes(p->o, layers[s], s);
        between[s] = layers[s] * plan_layer_bytes(p->o);
    }
    const struct pipe_times t = {.schedule = p->o->schedule,
                                 .pp = (int32_t)p->o->pp,
                                 .per_rank = (int32_t)p->o->stages_per_rank,
                                 .micro_batches = (int32_t)p->o->accum,
                                 .forward_ns = layers,
                                 .backward = backward_of(p->o),
                                 .kept_bytes = kept,
                                 .between_bytes = between};
    if (!pipe_simulate(&t, &p->pipe))
        return 0;
    fprintf(stderr, "zero-bench plan: --pp: %s\n", zr_error_text());
    return EXIT_USAGE;
}

/* Bytes of activations that a rank keeps, at most, and of the buffers that each of its stages has for
 * --recompute and --cp. */
static int64_t kept_bytes(const struct planning *p, int64_t rank)
{
    return p->pipe.kept_bytes[rank] + p->o->stages_per_rank * (plan_layer_bytes(p->o) + plan_cp_room(p->o));
}

/* Memory of a rank, activations included. */
static int64_t all_bytes(const struct planning *p, int64_t rank, int column)
{
    return info_of(p, rank, column)->bytes.total + kept_bytes(p, rank);
}

/* The rank among [from, to) with the most memory, activations included, or -1. */
static int64_t fullest(const struct planning *p, int64_t from, int64_t to, int column)
{
    int64_t best = -1;
    for (int64_t rank = from; rank < to; rank++)
        if (best < 0 || all_bytes(p, rank, column) > all_bytes(p, best, column))
            best = rank;
    return best;
}

/* Bytes received from other stages in a step. Tied tensors are not counted. */
static int64_t moved_bytes(const struct planning *p, int64_t rank)
{
    int64_t neighbours = 0;
    for (int64_t s = rank; s < n_stages(p); s += p->o->pp)
        neighbours += (s > 0) + (s < n_stages(p) - 1);
    return neighbours * p->o->accum * plan_move_bytes(p->o);
}

/* ---- printing ---- */

static void print_head(const struct planning *p)
{
    const struct plan_options *o = p->o;
    struct model_config c = plan_sizes(&o->model.config, o->params);
    long long tp = c.tp > 1 ? (long long)c.tp : 1;
    printf("%lld parameters%s, %s, %s, %lld ranks: %lld pipeline stages of %lld to %lld of %lld layers",
           (long long)plan_n_params(p->tensors, p->n), tp > 1 ? " of a part" : "",
           option_word_of(option_dtypes, o->dtype), plan_optimizer(o).text, (long long)o->world,
           (long long)n_stages(p), (long long)(p->layers / n_stages(p)),
           (long long)((p->layers + n_stages(p) - 1) / n_stages(p)), (long long)p->layers);
    if (o->stages_per_rank > 1)
        printf(", %lld on each rank", (long long)o->stages_per_rank);
    printf(", data on %lld ranks", (long long)(o->world / (o->pp * plan_cp(o) * tp)));
    if (plan_cp(o) > 1)
        printf(", each row on %lld", (long long)plan_cp(o));
    if (tp > 1)
        printf(", each layer in %lld parts", tp);
    printf("\n%s, %lld micro-batches of %lld x %lld tokens: stages stand still for %.2f%% of a step",
           option_word_of(pipe_schedules, o->schedule), (long long)o->accum, (long long)o->batch,
           (long long)c.context, 100 * p->pipe.bubble);
    int64_t parts = pipe_parts(o->schedule, o->stages_per_rank, backward_of(o));
    char factor[24] = "";
    if (parts > 1)
        snprintf(factor, sizeof factor, "%lld", (long long)parts);
    printf(" (%.2f%%, (p-1)/(%sm+p-1), where all have as many layers)\n",
           100 * (double)(o->pp - 1) / (double)(parts * o->accum + o->pp - 1),
           o->stages_per_rank > 1 ? "v" : factor);
    printf("Activations are those of bench/model, kept from forward to backward, %s computed again; not "
           "counted are attention's matrices, statistics, scratch%s\n\n",
           o->model.config.recompute ? "those inside layers" : "nothing",
           o->schedule == ZERO_SCHEDULE_ZERO_BUBBLE ? ", gradients between the parts of a backward" : "");
}

/* Prints the fullest of some ranks, activations included, if there are any. */
static void print_part(const struct planning *p, const char *name, int64_t from, int64_t to)
{
    int64_t bytes[N_COLUMNS];
    for (int c = 0; c < p->n_columns && from < to; c++)
        bytes[c] = all_bytes(p, fullest(p, from, to, c), c);
    if (from < to)
        stage_table_bytes(name, bytes, p->n_columns);
}

static void print_table(const struct planning *p)
{
    struct zero_bytes bytes[N_COLUMNS];
    struct zero_plan_info infos[N_COLUMNS];
    int64_t fullest_rank[N_COLUMNS], paper[N_COLUMNS], wire[N_COLUMNS], outer[N_COLUMNS], moved[N_COLUMNS],
        attention[N_COLUMNS], kept[N_COLUMNS], n_kept[N_COLUMNS], all[N_COLUMNS], ns[N_COLUMNS] = {0};
    bool several = p->o->stages_per_rank > 1;
    for (int c = 0; c < p->n_columns; c++) {
        int64_t rank = fullest_rank[c] = fullest(p, 0, p->o->pp, c);
        const struct zero_plan_info *info = info_of(p, rank, c);
        bytes[c] = info->bytes;
        infos[c] = *info;
        kept[c] = kept_bytes(p, rank);
        n_kept[c] = p->pipe.kept[rank];
        all[c] = all_bytes(p, rank, c);
        paper[c] = info->paper_bytes;
        wire[c] = info->traffic.wire_bytes;
        outer[c] = hybrid_of_column(c) ? info->traffic.outer_bytes : -1;
        moved[c] = moved_bytes(p, rank);
        attention[c] = plan_cp_bytes(p->o, layers_of_rank(p, rank));
        for (int64_t r = 0; r < p->o->pp; r++)
            ns[c] += p->like[r] == r ? p->plans[r].ns[c] : 0;
    }
    print_head(p);
    stage_table_head("per rank", p->n_columns);
    stage_table_counts(several ? "fullest rank of pp" : "fullest stage of pp", fullest_rank, p->n_columns);
    stage_table_memory(bytes, "total", p->n_columns);
    plan_print_states(p->o, infos, p->n_columns);
    stage_table_counts("micro-batches kept", n_kept, p->n_columns);
    stage_table_bytes("activations of these", kept, p->n_columns);
    stage_table_bytes("with activations", all, p->n_columns);
    print_part(p, several ? "  so the first rank" : "  so the first stage", 0, 1);
    print_part(p, "  between, the fullest", 1, p->o->pp - 1);
    print_part(p, "  the last", p->o->pp - 1, p->o->pp);
    stage_table_bytes("the ZeRO paper says", paper, p->n_columns);
    stage_table_bytes("received per step", wire, p->n_columns);
    if (p->n_columns > N_STAGES)
        stage_table_bytes("from other groups", outer, p->n_columns);
    stage_table_bytes("from other stages", moved, p->n_columns);
    if (plan_cp(p->o) > 1)
        stage_table_bytes("received for attention", attention, p->n_columns);
    stage_table_ms("time to plan", ns, p->n_columns);
}

static json_t *rank_json(const struct planning *p, int64_t rank, int column)
{
    const struct zero_plan_info *info = info_of(p, rank, column);
    json_t *object =
        json_pack("{s:I, s:I, s:I, s:o, s:I, s:I, s:I, s:I}", "pp_rank", (json_int_t)rank, "layers",
                  (json_int_t)layers_of_rank(p, rank), "n_params", (json_int_t)info->n_params, "bytes",
                  report_bytes_json(&info->bytes), "kept", (json_int_t)p->pipe.kept[rank], "activation_bytes",
                  (json_int_t)kept_bytes(p, rank), "wire_bytes", (json_int_t)info->traffic.wire_bytes,
                  "moved_bytes", (json_int_t)moved_bytes(p, rank));
    if (hybrid_of_column(column))
        json_object_set_new(object, "outer_bytes", json_integer(info->traffic.outer_bytes));
    return object;
}

/* Fields that are also printed without --pp describe the fullest rank. */
static void print_json(const struct planning *p, int column)
{
    int64_t rank = fullest(p, 0, p->o->pp, column);
    json_t *line = plan_line(p->o, column, info_of(p, rank, column), p->plans[p->like[rank]].ns[column]);
    json_t *ranks = json_array();
    for (int64_t i = 0; i < p->o->pp; i++)
        json_array_append_new(ranks, rank_json(p, i, column));
    json_object_set_new(line, "pp", json_integer(p->o->pp));
    json_object_set_new(line, "schedule", json_string(option_word_of(pipe_schedules, p->o->schedule)));
    if (p->o->stages_per_rank > 1)
        json_object_set_new(line, "stages_per_rank", json_integer(p->o->stages_per_rank));
    json_object_set_new(line, "micro_batches", json_integer(p->o->accum));
    json_object_set_new(line, "bubble", report_number(p->pipe.bubble));
    json_object_set_new(line, "pp_rank", json_integer(rank));
    json_object_set_new(line, "activation_bytes", json_integer(kept_bytes(p, rank)));
    json_object_set_new(line, "all_bytes", json_integer(all_bytes(p, rank, column)));
    plan_add_cp(p->o, line, layers_of_rank(p, rank));
    json_object_set_new(line, "pp_ranks", ranks);
    report_line(line);
}

int plan_pipeline(const struct plan_options *o, const struct zero_tensor *tensors, int32_t n)
{
    static struct planning p;
    p = (struct planning){.o = o,
                          .tensors = tensors,
                          .n = n,
                          .n_columns = o->dp_shard ? N_COLUMNS : N_STAGES,
                          .layers = plan_sizes(&o->model.config, o->params).layers};
    pipe_warn_of_few("zero-bench plan", o->accum, o->pp);
    int status = time_stages(&p);
    pipe_find_alike(p.like, p.layers, p.o->pp, p.o->stages_per_rank);
    for (int64_t r = 0; !status && r < o->pp; r++)
        status = plan_rank(&p, r);
    if (status)
        return status;
    if (!o->json)
        print_table(&p);
    for (int c = 0; o->json && c < p.n_columns; c++)
        print_json(&p, c);
    return 0;
}
