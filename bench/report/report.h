/* SPDX-License-Identifier: Apache-2.0 */
/* report.h: what zero-bench train tells: progress and tables for people, JSON lines for programs. */
#ifndef ZERO_BENCH_REPORT_H
#define ZERO_BENCH_REPORT_H

#include "bench/report/progress_bar.h"
#include "bench/train/state_hash.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

struct report_step {
    /* 1-based */
    int64_t step;
    /* mean over ranks, micro-batches and tokens */
    double loss;
    double grad_norm;
    double ms;
    /* of all ranks together */
    double tokens_per_s;
    int64_t resident_bytes;
    /* of the run's steps or time, so far: 0 to 1 */
    double share_done;
    bool skipped;
};

/* Memory of one rank of a pipeline. */
struct report_rank {
    /* of the library */
    struct zero_bytes planned, allocated;
    /* that the model takes for activations; and all, the mean over the ranks with the same stages */
    int64_t activation_bytes, peak_rss_bytes;
};

struct report_summary {
    /* stage is -1 where the model is not wrapped */
    int32_t world, stage;
    /* enum hybrid; and as in struct zero_stats */
    int32_t hybrid, dp_shard;
    const char *device;
    /* of the last step */
    double loss;
    char state_sha256[STATE_HASH_CHARS];
    /* of one rank */
    struct zero_bytes bytes, planned_bytes;
    /* besides these, as in struct zero_stats; 0: not known */
    int64_t library_bytes;
    /* mean over ranks */
    int64_t peak_rss_bytes;
    /* of a GPU's memory, this rank's; 0 on the host */
    int64_t peak_device_bytes;
    /* that the model takes for activations, this rank's */
    int64_t activation_bytes;
    /* of all ranks together */
    int64_t tokens_per_step;
    /* the second of all ranks together; 0: not known */
    double flop_per_token, peak_tflops;
    /* of this rank, all steps */
    struct zero_traffic traffic;
    /* (n_ranks) of the pipeline; without one NULL and 0 */
    struct report_rank *ranks;
    int32_t n_ranks;
};

/* One rank's output. Thread-safety: none. */
struct report {
    bool json;
    /* this rank reports nothing, and only keeps times */
    bool quiet;
    /* (n_steps) times of the steps, and their losses */
    double *ms, *loss;
    int64_t n_steps, capacity;
    /* number of the first */
    int64_t first_step;
    double first_loss;
    /* shown where the standard output is a terminal */
    struct progress progress;
    int64_t last_line_ns;
};

/* Nanoseconds on a clock that does not jump. */
int64_t report_now_ns(void);

/* Prints a line for people; nothing with --json. */
void report_text(const struct report *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Tells of a step. In a log, steps that follow within half a second are left out, but for the first and those
 * with last set; on a terminal a bar has them all. As JSON every one is told. Returns 0 or a zr_err (no
 * memory). */
int report_step(struct report *r, const struct report_step *s, bool last);
void report_summary(struct report *r, const struct report_summary *s);
/* Draws the losses into path, of which plot_can_draw() says that it can be. Returns 0, or 1 after one line on
 * stderr. */
int report_plot(const struct report *r, const char *path, const char *title);
/* Sorts x (n >= 1). */
double report_median(double *x, int64_t n);
/* The median step, in milliseconds, leaving out the first two, which fill caches and slots. */
double report_ms_median(const struct report *r);
void report_close(struct report *r);

/* "31.4 GB": three digits, decimal units. */
struct report_size {
    char text[24];
};
struct report_size report_bytes(int64_t bytes);

/* {"param_shards":, ..., "total":}; a new reference. */
json_t *report_bytes_json(const struct zero_bytes *b);
/* {"pp_stage":, "planned_bytes":, "bytes":, "activation_bytes":, "peak_rss_bytes":}; a new reference.
 * pp_stage: which rank of the pipeline it is. */
json_t *report_rank_json(const struct report_rank *r, int32_t pp_stage);
/* A JSON number, or null for one that JSON cannot hold; a new reference. */
json_t *report_number(double x);
/* Prints object as one line and drops the reference. */
void report_line(json_t *object);

/* For cfg.debug.log of a command that makes several contexts: warnings go to the standard error, but for
 * those that hold one of the texts at arg (const char **, ended by NULL); arg NULL: none goes, as the first
 * context gave them out. */
void report_warning(void *arg, const char *line);

#endif
