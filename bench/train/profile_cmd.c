/* SPDX-License-Identifier: Apache-2.0 */
/* profile_cmd.c: zero-bench profile: where the time of training steps on the host goes, and what each part
 * would take at the machine's limits. All ranks first measure these limits at the same time, on the threads
 * that the part has.
 *
 * What a part would take:
 *     products, attention     their multiplications and additions at the best square product's speed
 *     other compute           bytes that cannot be left out, at the speed of a copy
 *     optimizer               its arrays at the speed of a loop that only reads and writes them
 *     norm                    this rank's slice of the gradient at the speed of a loop that only reads it
 *     all else                nothing */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/kernels/host.h"
#include "bench/report/report.h"
#include "bench/train/profile.h"
#include "bench/train/train.h"

#include <math.h>
#include <stdio.h>

struct profile_options {
    /* stage -1: not given */
    struct train_options train;
    /* measured steps */
    int64_t steps;
    int64_t params, rounds;
    bool json;
    const char *data;
};

#define OPTION_STRUCT struct profile_options
static const struct option_row rows[] = {
    {"dtype", "f32|bf16", "Of weights, gradients and activations (f32)",
     OPTION_WORD(train.dtype, option_dtypes)},
    {"data", "PATH", "A file of text, or a folder of them (the C headers under /usr/include)",
     OPTION_TEXT(data)},
    {"batch", "N", "Rows in a micro-batch of one rank (4)", OPTION_INT(train.batch, 1, 1000000)},
    {"accum", "N", "Micro-batches per step and rank (1)", OPTION_INT(train.accum, 1, 100000)},
    {"steps", "N", "Steps that are measured, after 2 that are not (5)",
     OPTION_INT(steps, 1, PROFILE_MAX_STEPS)},
    {"plain", NULL, "The same model without libzero, on one rank", OPTION_FLAG(train.plain)},
    {"stage", "0..3", "What is sharded (0)", OPTION_INT(train.stage, 0, 3)},
    MODEL_CP_ROWS(train.model.),
    MODEL_RECOMPUTE_ROW(train.model.),
    {"threads", "N", "Of each rank, for its products and layers (1)", OPTION_INT(train.threads, 1, 1024)},
    {"params", "N", "Elements of the arrays by which limits are measured (8e6)",
     OPTION_INT(params, 1, INT64_C(10000000000))},
    {"rounds", "N", "Measured rounds of the limits; the median counts (5)", OPTION_INT(rounds, 1, 1000)},
    {"json", NULL, "One JSON line", OPTION_FLAG(json)},
    {0},
};

/* Refuses options that do not go together. */
static error_t finish(struct argp_state *state, void *options)
{
    struct profile_options *o = options;
    if (o->train.plain && o->train.stage >= 0)
        return option_fault(state, "--plain: has no --stage, which is libzero's");
    o->train.stage = o->train.stage >= 0 ? o->train.stage : 0;
    char fault[128];
    if (model_cp_fault(&o->train.model.config, fault, sizeof fault))
        return option_fault(state, "%s", fault);
    if (o->train.plain && o->train.model.config.cp > 1)
        return option_fault(state, "--cp: not with --plain");
    int64_t most = profile_most_micro_batches(o->train.model.config.layers, o->steps);
    if (!o->train.plain && o->steps * o->train.accum > most)
        return option_fault(
            state,
            "--steps, --accum: %lld micro-batches would be measured; with --layers %lld the timeline has "
            "room for %lld",
            (long long)(o->steps * o->train.accum), (long long)o->train.model.config.layers, (long long)most);
    return 0;
}

static const struct option_table table = {
    .rows = rows,
    .doc = "Where the steps of a training on the host go, on as many ranks as zero-run starts; the table is "
           "rank 0's.",
    .read_word = option_refuse_word,
    .finish = finish,
    OPTIONS_WITH_MODEL(struct profile_options, train.model),
};

enum { N_WARM_STEPS = 2 };

/* Bytes per token that the parts between products must read and write. A layer's forward pass has two
 * layernorms, GELU and two residual copies; its backward pass has two layernorms with the residual's
 * gradient, GELU, and the gradients of four biases. With recompute it has the forward pass again, but for one
 * residual copy. The loss goes once over logits (fp32) and their gradient. */
static double compute_bytes(const struct profile_options *o)
{
    const struct model_config *c = &o->train.model.config;
    const double size = o->train.dtype == ZERO_BF16 ? 2 : 4, C = (double)c->channels,
                 F = (double)model_part_hidden(c), biases = 2 * C + F + (double)model_part_qkv(c);
    const double forward = 8 * C + 2 * F, backward = 8 * C + 3 * F + biases;
    const double again = c->recompute ? forward - 2 * C : 0;
    return size * (double)c->layers * (forward + backward + again) + (double)c->vocab * (4 + size);
}

/* Seconds per step that each part would take at its limit. */
static void at_limits(double seconds[PROFILE_N_PARTS], const struct profile_options *o,
                      const struct profile *p, const struct kernels_host *h)
{
    const bool bf16 = o->train.dtype == ZERO_BF16;
    const double steps = (double)p->n_steps, n = (double)p->n_kept;
    const double tokens =
        (double)(o->train.batch * o->train.accum * model_own_context(&o->train.model.config));
    const struct kernels_host_row *product = kernels_host_row(h, bf16 ? "product bf16" : "product f32");
    const struct kernels_host_row *adamw = kernels_host_row(h, bf16 ? "adamw bf16" : "adamw f32");
    for (int i = 0; i < PROFILE_N_PARTS; i++)
        seconds[i] = 0;
    seconds[PROFILE_PRODUCTS] = p->flop[PROFILE_PRODUCTS] / steps / product->limit;
    seconds[PROFILE_ATTENTION] = p->flop[PROFILE_ATTENTION] / steps / product->limit;
    seconds[PROFILE_COMPUTE] = tokens * compute_bytes(o) / kernels_host_row(h, "copy")->limit_of_all;
    /* libzero updates on one thread */
    const double update_limit = o->train.plain ? adamw->limit_of_all : adamw->limit;
    seconds[PROFILE_OPTIMIZER] = n * (double)adamw->bytes / update_limit;
    if (!o->train.plain) { /* the plain optimizer includes the norm */
        /* At all stages a rank takes the norm of its slice only. */
        const double slice = (double)model_n_params(&o->train.model.config) / p->world;
        seconds[PROFILE_NORM] = 4 * slice / kernels_host_row(h, "sum of squares")->limit;
    }
}

/* The mean of the ranks' CPU time in attention divided by the largest: 1 if all have as much work. */
static double balance(const struct profile *p)
{
    double sum = 0, largest = 0;
    for (int32_t c = 0; c < p->n_cp; c++) {
        sum += p->attention_cpu_ms[c];
        largest = fmax(largest, p->attention_cpu_ms[c]);
    }
    return largest > 0 ? sum / p->n_cp / largest : 1;
}

static void print_balance(const struct profile *p)
{
    printf("CPU time in attention, ms in a step, of each rank of a row:");
    for (int32_t c = 0; c < p->n_cp; c++)
        printf(" %.3f", p->attention_cpu_ms[c] / (double)p->n_steps);
    printf("; mean / largest %.3f\n", balance(p));
}

static void print(const struct profile_options *o, const struct profile *p, const double *limit)
{
    const double steps = (double)p->n_steps, total = (double)p->total_ns;
    double sum = 0;
    printf("%s, %s, %s, rank 0 of %d with %lld thread%s, %lld steps\n", o->train.model.name,
           option_word_of(option_dtypes, o->train.dtype), o->train.plain ? "not wrapped" : "wrapped",
           p->world, (long long)o->train.threads, o->train.threads == 1 ? "" : "s", (long long)p->n_steps);
    printf("%-24s %12s %9s %16s\n", "", "ms in a step", "of it", "ms at the limit");
    for (int i = 0; i < PROFILE_N_PARTS; i++) {
        printf("%-24s %12.3f %8.2f%% %16.3f\n", profile_names[i], (double)p->ns[i] * 1e-6 / steps,
               100 * (double)p->ns[i] / total, limit[i] * 1e3);
        sum += limit[i];
    }
    printf("%-24s %12.3f %8.2f%% %16.3f\n", "a step", total * 1e-6 / steps, 100.0, sum * 1e3);
    if (p->n_cp > 1)
        print_balance(p);
}

static void report(const struct profile_options *o, const struct profile *p, const struct kernels_host *h)
{
    double limit[PROFILE_N_PARTS];
    at_limits(limit, o, p, h);
    if (!o->json) {
        print(o, p, limit);
        return;
    }
    json_t *parts = json_array();
    for (int i = 0; i < PROFILE_N_PARTS; i++)
        json_array_append_new(parts, json_pack("{s:s, s:I, s:o, s:o, s:o}", "part", profile_names[i], "ns",
                                               (json_int_t)p->ns[i], "of_step",
                                               report_number((double)p->ns[i] / (double)p->total_ns), "flop",
                                               report_number(p->flop[i]), "ns_at_limit",
                                               report_number(limit[i] * 1e9 * (double)p->n_steps)));
    json_t *cpu = json_array();
    for (int32_t c = 0; c < p->n_cp; c++)
        json_array_append_new(cpu, report_number(p->attention_cpu_ms[c]));
    report_line(
        json_pack("{s:s, s:s, s:s, s:i, s:o, s:b, s:I, s:I, s:I, s:o, s:o, s:o, s:o}", "event", "profile",
                  "model", o->train.model.name, "dtype", option_word_of(option_dtypes, o->train.dtype),
                  "world", p->world, "stage", o->train.plain ? json_null() : json_integer(o->train.stage),
                  "plain", o->train.plain, "threads", (json_int_t)o->train.threads, "steps",
                  (json_int_t)p->n_steps, "ns", (json_int_t)p->total_ns, "parts", parts, "attention_cpu_ms",
                  cpu, "balance", report_number(balance(p)), "kernels", kernels_host_json(h)));
}

static int measure_limits(const char *name, const struct profile_options *o, struct compute *compute,
                          struct kernels_host **h)
{
    const struct kernels_host_options limits = {
        .n = o->params, .gemm = {512, 512, 512}, .n_rounds = o->rounds};
    int err = compute_open(compute, false, 0, (int)o->train.threads);
    err = err ? err : kernels_host_measure(h, compute, &limits);
    if (err)
        fprintf(stderr, "%s: %s\n", name, zr_error_text());
    return err;
}

static int run(const char *name, struct profile_options *o)
{
    struct profile p = {.n_warm = N_WARM_STEPS, .part = PROFILE_REST};
    struct train_options *t = &o->train;
    t->rate.lr = t->model.default_lr;
    t->steps = N_WARM_STEPS + o->steps;
    t->data = (struct train_files){&o->data, o->data != NULL};
    t->profile = &p;
    struct compute compute = {0};
    struct kernels_host *h = NULL;
    int status = measure_limits(name, o, &compute, &h) ? EXIT_FAILURE : EXIT_SUCCESS;
    if (!status)
        status = t->dtype == ZERO_BF16 ? train_run_bf16(t) : train_run_f32(t);
    if (!status && p.rank == 0)
        report(o, &p, h);
    kernels_host_close(h);
    compute_close(&compute);
    return status;
}

int profile_command(const char *name, int argc, char **argv)
{
    struct profile_options o = {.steps = 5, .params = 8000000, .rounds = 5};
    o.train = train_defaults(&(struct model_options){0});
    o.train.stage = -1;
    int status = options_parse(&table, name, argc, argv, &o);
    return status ? status : run(name, &o);
}
