/* SPDX-License-Identifier: Apache-2.0 */
/* report.h: what zero-bench train prints, for people and as JSON, and formats that all commands share. */
#ifndef ZERO_BENCH_REPORT_H
#define ZERO_BENCH_REPORT_H

#include "bench/report/progress_bar.h"
#include "bench/states.h"
#include "bench/train/state_hash.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

struct report_step {
    /* counted from 1 */
    int64_t step;
    /* mean over ranks, micro-batches and tokens */
    double loss;
    double grad_norm;
    double ms;
    /* of all ranks together */
    double tokens_per_s;
    int64_t resident_bytes;
    /* progress of the run, 0 to 1, and the time that is left; infinite if it has no end */
    double share_done, seconds_left;
    double lr;
    /* share of the devices' peak that the model's arithmetic takes; NaN: the peak is not known */
    double mfu;
    bool skipped;
};

/* Memory of one rank of a pipeline. */
struct report_rank {
    /* memory of the library */
    struct zero_bytes planned, allocated;
    /* of the model */
    int64_t activation_bytes;
    /* peak of the process's resident memory, as a mean over the ranks with the same pipeline stages. A page
     * that n ranks map counts as 1/n (Pss, see bench/resident.h). */
    int64_t peak_rss_bytes;
};

struct report_summary {
    /* stage is -1 if the model is not wrapped */
    int32_t world, stage;
    struct states_options states;
    /* enum hybrid; dp_shard as in struct zero_stats */
    int32_t hybrid, dp_shard;
    const char *device;
    /* of the last step */
    double loss;
    char state_sha256[STATE_HASH_CHARS];
    /* of one rank */
    struct zero_bytes bytes, planned_bytes;
    /* what NCCL took of the GPU besides, which bytes leave out (struct zero_stats); 0: not known */
    int64_t library_bytes;
    /* peak of the process's resident memory, as a mean over all ranks. A page that n ranks map counts as 1/n
     * (Pss, see bench/resident.h). */
    int64_t peak_rss_bytes;
    /* GPU memory in use, of this rank; 0 on the host */
    int64_t peak_device_bytes;
    /* the model's activations, of this rank */
    int64_t activation_bytes;
    /* of all ranks together */
    int64_t tokens_per_step;
    /* of a token; peak of all ranks together, 0: not known */
    double flop_per_token, peak_tflops;
    /* of this rank, over all steps */
    struct zero_traffic traffic;
    /* (n_ranks) the ranks of the pipeline; NULL and 0 without one */
    struct report_rank *ranks;
    int32_t n_ranks;
};

/* One rank's output. Not thread-safe. */
struct report {
    bool json;
    /* This rank prints nothing, and only keeps times. */
    bool quiet;
    /* (n_steps) each step's time and loss */
    double *ms, *loss;
    int64_t n_steps, capacity;
    /* number of the first step */
    int64_t first_step;
    double first_loss;
    /* shown if standard output is a terminal */
    struct progress progress;
    int64_t last_line_ns;
};

/* Nanoseconds of a monotonic clock. */
int64_t report_now_ns(void);

/* Prints a line for people; nothing with --json. */
void report_text(const struct report *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Prints a step. In a log, steps within half a second of the last line are left out, except the first and
 * the last. On a terminal a bar shows them all. JSON has a line for each. Returns 0 or a zero_err (no
 * memory). */
int report_step(struct report *r, const struct report_step *s, bool last);
/* Prints the loss of held-out rows after a step, and the lowest one so far. */
void report_evaluation(struct report *r, int64_t step, double loss, double best_loss, int64_t best_step);
/* Prints that a step had no token that counts in the loss, so that it was left out. */
void report_empty_step(struct report *r, int64_t step);
void report_summary(struct report *r, const struct report_summary *s);
/* Draws the losses into path. Returns 0, or 1 after one line on stderr. */
int report_plot(const struct report *r, const char *path, const char *title);
/* The median of x (n >= 1), which it sorts. */
double report_median(double *x, int64_t n);
/* The median step in milliseconds, without the first two, which fill caches and slots. */
double report_ms_median(const struct report *r);
void report_close(struct report *r);

/* A size such as "31.4 GB", with three digits and decimal units. */
struct report_size {
    char text[24];
};
struct report_size report_bytes(int64_t bytes);

/* {"param_shards":, ..., "total":}, as a new reference. */
json_t *report_bytes_json(const struct zero_bytes *b);
/* {"pp_rank":, "planned_bytes":, "bytes":, "activation_bytes":, "peak_rss_bytes":}, as a new reference.
 * pp_rank counts the ranks of the pipeline from 0. */
json_t *report_rank_json(const struct report_rank *r, int32_t pp_rank);
/* A JSON number, or null for one that JSON cannot hold; a new reference. */
json_t *report_number(double x);
/* Prints object as one line and drops the reference. */
void report_line(json_t *object);

/* A cfg.debug.log for commands that open several contexts. It prints warnings on stderr, except those that
 * contain one of the texts at arg (const char **, ended by NULL). If arg is NULL it prints none. */
void report_warning(void *arg, const char *line);

#endif
