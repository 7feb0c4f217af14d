/* SPDX-License-Identifier: Apache-2.0 */
/* verify_cmd.c: zero-bench verify, which proves the library's schedule on a simulated device, and times it
 * there (shard/verify/verify.h). */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/report/report.h"

#include "kernels/device.h"
#include "shard/verify/verify.h"

#include <stdio.h>

struct verify_options {
    int64_t seeds, seed;
    int64_t world, stage, units, elements, tokens, prefetch, accum, pp, per_rank;
    int schedule;
    double tflops, memory_gb, near_gb, far_gb;
    const char *one_case, *trace;
    bool json, mutants, exhaustive, time;
};

static const struct option_word schedules[] = {{"gpipe", ZR_RUN_GPIPE},
                                               {"1f1b", ZR_RUN_1F1B},
                                               {"interleaved", ZR_RUN_INTERLEAVED},
                                               {"zero-bubble", ZR_RUN_ZERO_BUBBLE},
                                               {0}};

#define OPTION_STRUCT struct verify_options
static const struct option_row rows[] = {
    {"seeds", "N", "Random configurations to run (2000)", OPTION_INT(seeds, 1, INT64_MAX)},
    {"seed", "S", "The first of them (1)", OPTION_INT(seed, 0, INT64_MAX)},
    {"case", "TEXT", "Run one configuration, as a report prints it", OPTION_TEXT(one_case)},
    {"mutants", NULL,
     "Take waits, records, fences and jobs away, one at a time: each must be noticed within the seeds",
     OPTION_FLAG(mutants)},
    {"exhaustive", NULL, "Every interleaving of host threads: 2 and 3 ranks, up to 4 units",
     OPTION_FLAG(exhaustive)},
    {"json", NULL, "JSON lines", OPTION_FLAG(json)},
    {"time", NULL, "Step time on the virtual clock, with the options below", OPTION_FLAG(time), .group = 2},
    {"trace", "FILE", "Also a Chrome trace of up to 16 ranks", OPTION_TEXT(trace)},
    {"world", "N", "Ranks, 8 a node (16)", OPTION_INT(world, 1, 64)},
    {"stage", "N", "0 to 3 (3)", OPTION_INT(stage, 0, 3)},
    {"units", "N", "Units (32)", OPTION_INT(units, 1, 1000)},
    {"elements", "N", "bf16 parameters of a unit (200e6)", OPTION_INT(elements, 1, INT64_C(1) << 36)},
    {"tokens", "N", "Tokens of a rank's micro-batch (8192)", OPTION_INT(tokens, 1, 1 << 30)},
    {"prefetch", "N", "Units gathered ahead (2)", OPTION_INT(prefetch, 0, 100)},
    {"accum", "N", "Micro-batches of a step (1)", OPTION_INT(accum, 1, 64)},
    {"pp", "N", "Pipeline stages, or ranks of several each, that take a part of the units (1)",
     OPTION_INT(pp, 1, 64)},
    {"schedule", "gpipe|1f1b|interleaved|zero-bubble",
     "With --pp: in which order they take micro-batches (1f1b)", OPTION_WORD(schedule, schedules)},
    {"stages-per-rank", "N", "With --pp: stages of each rank (1; interleaved: 2)",
     OPTION_INT(per_rank, 1, 4)},
    {"tflops", "X", "Of compute, 10^12 a second (400)", OPTION_DOUBLE(tflops, 1e-6, 1e6)},
    {"memory", "GB/S", "Device memory (3000)", OPTION_DOUBLE(memory_gb, 1e-6, 1e6)},
    {"near", "GB/S", "To ranks of the node (400)", OPTION_DOUBLE(near_gb, 1e-6, 1e6)},
    {"far", "GB/S", "To ranks of other nodes (50)", OPTION_DOUBLE(far_gb, 1e-6, 1e6)},
    {0},
};

static const struct option_table table = {
    .rows = rows,
    .doc = "Runs the engine's schedule for many configurations on a simulated device that knows which bytes "
           "every operation reads "
           "and writes: anything that is not ordered is reported, with the configuration that replays it.",
    .read_word = option_refuse_word,
};

static void report_fault(const struct verify_options *o, struct zr_verify_case *c, struct zr_verify_result *r)
{
    char whole[1024], small[1024];
    zr_verify_describe(c, whole, sizeof whole);
    zr_verify_shrink(c, NULL, r);
    zr_verify_describe(c, small, sizeof small);
    if (o->json)
        report_line(json_pack("{s:s, s:s, s:s}", "case", whole, "shrunk", small, "report", r->text));
    else
        printf("%s\n  shrunk to: %s\n  %s\n", whole, small, r->text);
}

/* Totals over all schedules that were run. */
struct verified {
    int64_t n_faults, n_ops, n_accesses, n_ranks, n_refused, n_died, n_starved, n_reordered, n_snapshots;
    int64_t n_meshes, n_cp, n_tied, n_several, n_apart;
};

static void count_case(struct verified *v, const struct zr_verify_case *c, const struct zr_verify_result *r)
{
    v->n_ops += r->n_ops;
    v->n_accesses += r->n_accesses;
    v->n_ranks += c->world;
    v->n_refused += r->refused != 0;
    v->n_died += r->died;
    v->n_starved += r->starved;
    v->n_reordered += r->reordered;
    v->n_snapshots += r->n_snapshots;
    v->n_meshes += c->pp > 1 || c->tp > 1 || c->cp > 1 || c->per_rank > 1;
    v->n_cp += c->cp > 1;
    v->n_tied += c->tied;
    v->n_several += c->per_rank > 1;
    v->n_apart += zr_case_is_apart(c);
}

static void report_verified(const struct verify_options *o, const struct verified *v, double s)
{
    const struct {
        const char *key;
        int64_t n;
    } counts[] = {{"seed", o->seed},
                  {"schedules", o->seeds},
                  {"reports", v->n_faults},
                  {"ranks", v->n_ranks},
                  {"operations", v->n_ops},
                  {"accesses", v->n_accesses},
                  {"refused", v->n_refused},
                  {"dead_rank", v->n_died},
                  {"allocation_refused", v->n_starved},
                  {"order_changed", v->n_reordered},
                  {"snapshots", v->n_snapshots},
                  {"meshes", v->n_meshes},
                  {"with_cp", v->n_cp},
                  {"tied", v->n_tied},
                  {"several_stages_on_a_rank", v->n_several},
                  {"backwards_apart", v->n_apart}};
    if (!o->json) {
        printf("%lld schedules from seed %lld: %lld reports; %lld ranks, %lld operations, %lld accesses "
               "checked, "
               "%lld snapshots read; %lld on a mesh of several axes, %lld with cp, %lld with a tied tensor, "
               "%lld with "
               "several stages on a rank, %lld with backwards apart; %lld schedules with a rank that dies, "
               "%lld with an allocation refused, "
               "%lld in "
               "which the model changes its order, %lld refused as too small; %.1f s, %.0f schedules/s\n",
               (long long)o->seeds, (long long)o->seed, (long long)v->n_faults, (long long)v->n_ranks,
               (long long)v->n_ops, (long long)v->n_accesses, (long long)v->n_snapshots,
               (long long)v->n_meshes, (long long)v->n_cp, (long long)v->n_tied, (long long)v->n_several,
               (long long)v->n_apart, (long long)v->n_died, (long long)v->n_starved,
               (long long)v->n_reordered, (long long)v->n_refused, s, (double)o->seeds / s);
        return;
    }
    json_t *line = json_object();
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++)
        json_object_set_new(line, counts[i].key, json_integer((json_int_t)counts[i].n));
    json_object_set_new(line, "seconds", report_number(s));
    json_object_set_new(line, "schedules_per_s", report_number((double)o->seeds / s));
    report_line(line);
}

static int run_seeds(const char *name, const struct verify_options *o)
{
    struct verified v = {0};
    int64_t start = zr_now_ns();
    for (int64_t i = 0; i < o->seeds; i++) {
        struct zr_verify_case c;
        struct zr_verify_result r;
        zr_verify_case_random((uint64_t)(o->seed + i), &c);
        if (o->one_case && zr_verify_parse(o->one_case, &c)) {
            fprintf(stderr, "%s: --case: %s\n", name, zr_error_text());
            return EXIT_USAGE;
        }
        if (zr_verify_run(&c, NULL, &r)) {
            fprintf(stderr, "%s: seed %lld: %s\n", name, (long long)c.seed, zr_error_text());
            return EXIT_FAILURE;
        }
        count_case(&v, &c, &r);
        if (r.n_reports && v.n_faults++ < 10)
            report_fault(o, &c, &r);
    }
    report_verified(o, &v, (double)(zr_now_ns() - start) / 1e9);
    return v.n_faults ? EXIT_FAILURE : EXIT_SUCCESS;
}

static int run_mutants(const struct verify_options *o)
{
    int n = zr_mutant_count(), n_caught = 0, n_linked = 0;
    for (int i = 0; i < n; i++) {
        const struct zr_mutant *m = zr_mutant_at(i);
        struct zr_verify_result r;
        int64_t n_acted, at = zr_mutant_hunt(m, (uint64_t)o->seed, o->seeds, &n_acted, &r);
        const char *link = zr_mutant_link(m);
        n_caught += at >= 0;
        n_linked += link != NULL;
        if (o->json)
            report_line(json_pack("{s:s, s:s?, s:b, s:I, s:s}", "mutant", zr_mutant_name(m), "known_from",
                                  link, "caught", at >= 0, "seeds", (json_int_t)(at + 1), "report",
                                  at >= 0 ? r.text : ""));
        else
            printf("%-8s %s%s%s\n", at >= 0 ? "caught" : "SURVIVED", zr_mutant_name(m), link ? "  " : "",
                   link ? link : "");
    }
    if (o->json)
        report_line(
            json_pack("{s:i, s:i, s:i}", "mutants", n, "caught", n_caught, "known_from_elsewhere", n_linked));
    else
        printf("%d of %d mutants caught, %d of them known from elsewhere\n", n_caught, n, n_linked);
    return n_caught == n ? EXIT_SUCCESS : EXIT_FAILURE;
}

static int run_exhaustive(const char *name, const struct verify_options *o)
{
    struct zr_search_result r;
    int64_t start = zr_now_ns();
    if (zr_verify_search(4, 3, ZR_SEARCH_SOUND, &r)) {
        fprintf(stderr, "%s: %s\n", name, zr_error_text());
        return EXIT_FAILURE;
    }
    double s = (double)(zr_now_ns() - start) / 1e9;
    if (o->json)
        report_line(json_pack("{s:I, s:I, s:I, s:I, s:s, s:o}", "configurations", (json_int_t)r.n_configs,
                              "states", (json_int_t)r.n_states, "moves", (json_int_t)r.n_edges, "bad",
                              (json_int_t)r.n_bad, "report", r.text, "seconds", report_number(s)));
    else
        printf("%lld configurations, %lld states, %lld moves: %lld bad%s%s; %.1f s\n", (long long)r.n_configs,
               (long long)r.n_states, (long long)r.n_edges, (long long)r.n_bad, r.n_bad ? ": " : "", r.text,
               s);
    return r.n_bad ? EXIT_FAILURE : EXIT_SUCCESS;
}

/* Divides the model that is timed over pipeline stages of one unit each; its size stays the same. */
static int read_stages(const char *name, const struct verify_options *o, struct zr_verify_case *c,
                       struct zr_verify_speed *speed)
{
    bool interleaved = o->schedule == ZR_RUN_INTERLEAVED;
    c->pp = (int)o->pp;
    c->per_rank = o->per_rank ? (int)o->per_rank : interleaved ? 2 : 1;
    int n = c->pp * c->per_rank;
    if (n > 1) {
        c->schedule = o->schedule < 0 ? ZR_RUN_1F1B : o->schedule;
        c->n_units = 1;
        speed->unit_elems = o->elements * o->units / n;
        c->deterministic = true; /* as by default on CPUs */
    }
    if (zr_verify_possible(c) && (n > 1 || o->schedule < 0))
        return 0;
    fprintf(stderr,
            "%s: --world %d, --pp %d, --stages-per-rank %d, --schedule and --accum %d do not go together: "
            "stages divide the world, 1f1b and zero-bubble have one stage on each rank, and the interleaved "
            "schedule takes micro-batches in equal rounds of as many as --pp, or more\n",
            name, c->world, c->pp, c->per_rank, c->accum);
    return EXIT_USAGE;
}

static void print_time(const struct zr_verify_case *c, const struct zr_verify_time *t)
{
    char stages[48] = "";
    if (c->pp * c->per_rank > 1)
        snprintf(stages, sizeof stages, ", %d pipeline stages", c->pp * c->per_rank);
    printf("stage %d, %d ranks%s: a step takes %.2f ms, %.2f ms of it compute, %.2f ms exposed: %.2f ms of "
           "these between the first forward and the last backward, %.2f ms behind it until the norm is "
           "known; %s a rank\n",
           c->stage, c->world, stages, (double)t->step_ns / 1e6, (double)t->compute_ns / 1e6,
           (double)t->exposed_ns / 1e6, (double)t->bubble_ns / 1e6, (double)t->norm_ns / 1e6,
           report_bytes(t->peak_bytes).text);
}

static int run_time(const char *name, const struct verify_options *o)
{
    struct zr_verify_case c = {.seed = (uint64_t)o->seed,
                               .stage = (int)o->stage,
                               .world = (int)o->world,
                               .n_units = (int)o->units,
                               .prefetch = (int)o->prefetch,
                               .accum = (int)o->accum,
                               .n_steps = 3,
                               .bf16 = true,
                               .declared = true,
                               .wait_result = true,
                               .poison = -1,
                               .dead = -1};
    struct zr_verify_speed speed = {.flops_per_s = o->tflops * 1e12,
                                    .memory_bytes_per_s = o->memory_gb * 1e9,
                                    .near_bytes_per_s = o->near_gb * 1e9,
                                    .far_bytes_per_s = o->far_gb * 1e9,
                                    .launch_ns = 4000,
                                    .near_ns = 5000,
                                    .far_ns = 15000,
                                    .ranks_per_node = 8,
                                    .tokens = (int)o->tokens,
                                    .unit_elems = o->elements};
    struct zr_verify_time t = {0};
    struct zr_verify_result r;
    if (read_stages(name, o, &c, &speed))
        return EXIT_USAGE;
    if (zr_verify_time(&c, &speed, o->trace, &t, &r)) {
        fprintf(stderr, "%s: %s\n", name, zr_error_text());
        return EXIT_FAILURE;
    }
    if (r.n_reports) {
        fprintf(stderr, "%s: %s\n", name, r.text);
        return EXIT_FAILURE;
    }
    if (o->json)
        report_line(json_pack("{s:i, s:i, s:o, s:o, s:o, s:I, s:i, s:i, s:o, s:o}", "stage", c.stage, "world",
                              c.world, "step_ms", report_number((double)t.step_ns / 1e6), "compute_ms",
                              report_number((double)t.compute_ns / 1e6), "exposed_ms",
                              report_number((double)t.exposed_ns / 1e6), "peak_bytes",
                              (json_int_t)t.peak_bytes, "pp", c.pp, "stages_per_rank", c.per_rank,
                              "bubble_ms", report_number((double)t.bubble_ns / 1e6), "norm_ms",
                              report_number((double)t.norm_ns / 1e6)));
    else
        print_time(&c, &t);
    return EXIT_SUCCESS;
}

int verify_command(const char *name, int argc, char **argv)
{
    struct verify_options o = {.seeds = 2000,
                               .seed = 1,
                               .world = 16,
                               .stage = 3,
                               .units = 32,
                               .elements = 200000000,
                               .tokens = 8192,
                               .prefetch = 2,
                               .accum = 1,
                               .pp = 1,
                               .schedule = -1,
                               .tflops = 400,
                               .memory_gb = 3000,
                               .near_gb = 400,
                               .far_gb = 50};
    int status = options_parse(&table, name, argc, argv, &o);
    if (status)
        return status;
    if (o.one_case)
        o.seeds = 1;
    return o.time || o.trace ? run_time(name, &o)
           : o.mutants       ? run_mutants(&o)
           : o.exhaustive    ? run_exhaustive(name, &o)
                             : run_seeds(name, &o);
}
