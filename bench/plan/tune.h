/* SPDX-License-Identifier: Apache-2.0 */
/* tune.h: the parts of zero-bench tune: candidates and their order, the probe, and the report. */
#ifndef ZERO_BENCH_TUNE_H
#define ZERO_BENCH_TUNE_H

#include "bench/hybrids.h"
#include "bench/plan/plan_cmd.h"

/* Most timed steps of a candidate, over both rounds. */
#define TUNE_MAX_STEPS 100

/* The gradients' dtype on the wire in the candidates: that of the tensors, bf16, or both. */
enum tune_wire { TUNE_WIRE_OWN, TUNE_WIRE_BF16, TUNE_WIRE_ANY };

/* A value of an option in plan.states: candidates try all its values. */
enum { TUNE_ANY = -1 };

struct tune_options {
    /* What candidates have in common: all but prefetch, budget and wire_dtype. dp_shard is the size of
     * groups; 0: every size that divides the data-parallel ranks. */
    struct plan_options plan;
    /* enum tune_wire */
    int wire;
    /* ranks on each host */
    int64_t per_host;
    /* bytes of a rank; 0: no limit */
    int64_t limit;

    /* number of candidates to time, and steps of each */
    int64_t n_probe, steps;
    /* as in struct train_options */
    const char *data;
    int64_t threads, gpu;
    bool log;
};

/* The ranks that read different data: those with the same part of the model and of each row. */
static inline int64_t tune_n_dp(const struct tune_options *o)
{
    return o->plan.world / (o->plan.pp * plan_cp(&o->plan) * plan_tp(&o->plan));
}

/* How far apart these ranks are. Parameters are sharded over cp as well, so a group of n of them has n * cp
 * members, which are tp apart. */
static inline int64_t tune_stride(const struct tune_options *o)
{
    return plan_cp(&o->plan) * plan_tp(&o->plan);
}

/* Whether n consecutive ranks from a multiple of n on lie inside one host, or fill hosts. */
static inline bool tune_on_hosts(const struct tune_options *o, int64_t n)
{
    return o->per_host % n == 0 || n % o->per_host == 0;
}

/* One configuration, and its plan. */
struct candidate {
    /* as in struct zero_config */
    int32_t stage, hybrid, dp_shard, prefetch, wire_dtype, deterministic;
    int64_t budget;
    struct states_options states;

    /* memory of the pipeline rank with the most, and its number; 0 without pp */
    struct zero_bytes bytes;
    int64_t pp_rank;
    /* bytes that a rank receives from data-parallel ranks in a step: all, and those of them from other hosts;
     * with pp, the most of any pipeline rank */
    int64_t wire_bytes, between_bytes;
    /* Any pipeline rank gathers parameters into slots. The largest memory of such a rank without its
     * slots. */
    bool gathers;
    int64_t without_slots;
    /* sums over the pipeline ranks that are planned, which tell two plans apart */
    int64_t sum_memory, sum_wire;
    /* Its memory is within the limit. */
    bool fits;
    /* It rounds gradients to bf16, and the options do not allow that. */
    bool refused;

    /* (n_ms) times of the probe's steps, ascending, each the mean over ranks; n_ms is 0 if it was not
     * probed */
    double ms[TUNE_MAX_STEPS];
    int64_t n_ms;
};

/* All candidates, best first. The first one fits if any does. */
struct candidates {
    struct candidate *all;
    int64_t n, capacity;
    /* for the head of the report */
    int64_t n_params;
    int32_t n_units;
};

/* Plans all candidates and sorts them. Returns 0 or an enum zero_err, with zr_error_text(). Call tune_free
 * in either case. */
int tune_plan(const struct tune_options *o, struct candidates *c);
void tune_free(struct candidates *c);

/* Why one candidate comes before another. */
enum tune_reason {
    TUNE_SAME,
    TUNE_FITS,     /* the other one does not fit */
    TUNE_ALLOWED,  /* the other one rounds gradients, which was not allowed */
    TUNE_HIDDEN,   /* the other one waits for every gather */
    TUNE_BETWEEN,  /* fewer bytes between hosts */
    TUNE_ALL,      /* fewer bytes in all */
    TUNE_PREFETCH, /* gathers further ahead */
    TUNE_MEMORY,
    TUNE_SIMPLER
};
/* Negative if a comes first. reason may not be NULL. */
int tune_compare(const struct candidate *a, const struct candidate *b, enum tune_reason *reason);
/* The first candidate receives the fewest bytes between hosts. Such a byte takes longer than a byte inside a
 * host. Returns the least ratio of these times at which the candidate also needs the least time for all
 * bytes. 0: at any ratio. */
double tune_ratio(const struct candidates *c, int64_t chosen);
/* Whether masters, moments or gradient sums are rounded, so that training ends in other bits. */
bool tune_is_inexact(const struct states_options *s);
/* Returns the bytes that count against the limit. States in host memory do not. */
int64_t tune_limited_bytes(const struct candidate *c);
/* Whether they differ at most in prefetch and budget. */
bool tune_same_kind(const struct candidate *a, const struct candidate *b);

/* Trains with the first n_probe kinds that fit, on all ranks together, in two rounds, the second in reverse
 * order. Returns 0, or the exit code of a run that failed with a message. Then no candidate has times. */
int tune_probe(const struct tune_options *o, struct candidates *c);
/* Whether the best candidate has times. */
bool tune_probed(const struct candidates *c);
/* The chosen candidate: the first one, unless another is faster in the probe by more than noise. */
int64_t tune_choose(const struct candidates *c);
/* Quartiles and median of the step times of a candidate that was probed. */
double tune_lower_ms(const struct candidate *c);
double tune_upper_ms(const struct candidate *c);
double tune_median_ms(const struct candidate *c);

/* Names such as "HFSDP in groups of 4" and "HFSDP in groups of 4, prefetch 1, budget 12.3 MB". Precisions
 * that change results follow the word "inexact". */
struct tune_name {
    char text[256];
};
struct tune_name tune_kind_name(const struct candidate *c);
struct tune_name tune_name(const struct candidate *c);

void tune_report(const struct tune_options *o, const struct candidates *c, int64_t chosen);
void tune_report_json(const struct tune_options *o, const struct candidates *c, int64_t chosen);

#endif
