/* report.h: what zero-bench train tells: progress and tables for people, JSON lines for programs. */
#ifndef ZERO_BENCH_REPORT_H
#define ZERO_BENCH_REPORT_H

#include "bench/state_hash.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

struct report_step {
    int64_t step; /* 1-based */
    double loss;  /* mean over ranks, micro-batches and tokens */
    double grad_norm;
    double ms;
    double tokens_per_s; /* of all ranks together */
    int64_t resident_bytes;
    bool skipped;
};

struct report_summary {
    int32_t world, stage;        /* stage -1: not wrapped */
    int32_t hybrid, shard_group; /* as in struct zero_stats */
    const char *device;
    double loss; /* of the last step */
    char state_sha256[STATE_HASH_CHARS];
    struct zero_bytes bytes, planned_bytes; /* per rank */
    int64_t peak_rss_bytes;                 /* mean over ranks */
    int64_t peak_device_bytes;              /* of a GPU's memory, this rank's; 0 on the host */
    int64_t tokens_per_step;                /* of all ranks together */
    double flop_per_token, peak_tflops;     /* peak_tflops: of all ranks together; 0: not known */
    struct zero_traffic traffic;            /* of this rank, all steps */
};

/* One rank's output. Thread-safety: none. */
struct report {
    bool json;
    bool quiet; /* not the rank that talks: only keeps times */
    double *ms; /* (n_steps) */
    int64_t n_steps, capacity;
    double first_loss;
    int64_t last_line_ns;
};

/* Nanoseconds on a clock that does not jump. */
int64_t report_now_ns(void);

/* Prints a line for people; nothing with --json. */
void report_text(const struct report *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Tells of a step. On a terminal or in a log, steps that follow within half a second are left out, but for
 * the first and those with last set; as JSON every one is told. Returns 0 or a zr_err (no memory). */
int report_step(struct report *r, const struct report_step *s, bool last);
void report_summary(struct report *r, const struct report_summary *s);
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
/* A JSON number, or null for one that JSON cannot hold; a new reference. */
json_t *report_number(double x);
/* Prints object as one line and drops the reference. */
void report_line(json_t *object);

/* For cfg.log of a command that makes several contexts: warnings go to the standard error, but for those that
 * hold one of the texts at arg (const char **, ended by NULL); arg NULL: none goes, as the first context gave
 * them out. */
void report_warning(void *arg, const char *line);

#endif
