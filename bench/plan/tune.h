/* SPDX-License-Identifier: Apache-2.0 */
/* tune.h: zero-bench tune, after its options are read: candidates, their order, the probe, what is told. */
#ifndef ZERO_BENCH_TUNE_H
#define ZERO_BENCH_TUNE_H

#include "bench/hybrids.h"
#include "bench/train/train.h"

/* Timed steps of a candidate, in two rounds. */
#define TUNE_MOST_STEPS 100

/* With which gradients on the wire candidates are made: the tensors' own dtype, bf16, both. */
enum tune_wire { TUNE_WIRE_OWN, TUNE_WIRE_BF16, TUNE_WIRE_ANY };

struct tune_options {
    struct model_options model;
    /* 0: the model's own */
    int64_t params;
    /* enum zero_dtype, zero_optimizer, tune_wire, zero_device; deterministic as in struct zero_config */
    int dtype, optimizer, wire, device, deterministic;
    int64_t world, accum;
    /* ranks on each host */
    int64_t per_host;
    /* the only size of groups; 0: every one that divides */
    int64_t dp_shard;
    /* bytes of a rank; 0: none */
    int64_t limit;

    /* candidates to time, and steps of each */
    int64_t n_probe, steps;
    int64_t batch, threads, gpu;
    const char *data;
    bool json, log;
};

/* One configuration, and what the plan says of it. */
struct candidate {
    /* as in struct zero_config */
    int32_t stage, hybrid, dp_shard, prefetch, wire_dtype, deterministic;
    int64_t budget;

    struct zero_bytes bytes;
    /* received by a rank in a step: all, and what of it comes from other hosts */
    int64_t wire_bytes, between_bytes;
    /* its memory is within the limit */
    bool fits;
    /* it rounds gradients to bf16, which was not allowed */
    bool refused;

    /* (n_ms) of the probe's steps, ascending, means over ranks: the same on every rank; 0: not probed */
    double ms[TUNE_MOST_STEPS];
    int64_t n_ms;
};

/* All of them in their order: the first fits, if any does. */
struct candidates {
    struct candidate *all;
    int64_t n, capacity;
    /* enough for the head of a table */
    int64_t n_params;
    int32_t n_units;
};

/* Plans all candidates and puts them in their order. Returns 0, or an enum zero_err with failed_text();
 * tune_free either way. */
int tune_plan(const struct tune_options *o, struct candidates *c);
void tune_free(struct candidates *c);

/* Why the first of two comes before the other. */
enum tune_reason {
    TUNE_SAME,
    TUNE_FITS,     /* the other does not */
    TUNE_ALLOWED,  /* the other rounds gradients, which was not allowed */
    TUNE_HIDDEN,   /* the other waits for every gather */
    TUNE_BETWEEN,  /* fewer bytes between hosts */
    TUNE_ALL,      /* fewer bytes in all */
    TUNE_PREFETCH, /* gathers further ahead */
    TUNE_MEMORY,
    TUNE_SIMPLER
};
/* Negative where a comes first; *reason may not be NULL. */
int tune_compare(const struct candidate *a, const struct candidate *b, enum tune_reason *reason);
/* How many times as long as a byte inside a host one between hosts has to take for the chosen candidate, the
 * first of the order, to need the least time for its bytes too; 0: it has the fewest of both. */
double tune_ratio(const struct candidates *c, int64_t chosen);
/* Differ in prefetch and budget at most. */
bool tune_same_kind(const struct candidate *a, const struct candidate *b);

/* Trains with the first n_probe kinds that fit, on all ranks together, in two rounds, the second backwards.
 * Returns 0; or what zero-bench train returned, having told it, and no candidate has times. */
int tune_probe(const struct tune_options *o, struct candidates *c);
/* The best candidate has times. */
bool tune_probed(const struct candidates *c);
/* Which candidate is chosen: the first, unless one that was probed is faster by more than noise. */
int64_t tune_choose(const struct candidates *c);
/* The times that a quarter of the steps are below and above; the candidate was probed. */
double tune_lower_ms(const struct candidate *c);
double tune_upper_ms(const struct candidate *c);
double tune_median_ms(const struct candidate *c);

/* "HFSDP in groups of 4"; "HFSDP in groups of 4, prefetch 1, budget 12.3 MB". */
struct tune_name {
    char text[128];
};
struct tune_name tune_kind_name(const struct candidate *c);
struct tune_name tune_name(const struct candidate *c);

void tune_report(const struct tune_options *o, const struct candidates *c, int64_t chosen);
void tune_report_json(const struct tune_options *o, const struct candidates *c, int64_t chosen);

#endif
