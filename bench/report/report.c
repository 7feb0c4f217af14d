/* SPDX-License-Identifier: Apache-2.0 */
/* report.c: prints the steps and the result of zero-bench train, and the formats that all commands share. */
#include "bench/report/report.h"
#include "bench/arguments.h"
#include "bench/report/loss_plot.h"

#include "kernels/alloc.h"
#include "kernels/device.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LINE_INTERVAL_NS 500000000
#define N_WARM_STEPS     2

struct report_size report_bytes(int64_t bytes)
{
    static const char units[][3] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
    double x = (double)bytes;
    int u = 0;
    while (fabs(x) >= 999.5 && u < 6) {
        x /= 1000;
        u++;
    }
    struct report_size s;
    int digits = u == 0 || fabs(x) >= 99.95 ? 0 : fabs(x) >= 9.995 ? 1 : 2;
    snprintf(s.text, sizeof s.text, "%.*f %s", digits, x, units[u]);
    return s;
}

json_t *report_bytes_json(const struct zero_bytes *b)
{
    json_t *o = json_object();
#define FIELD(name, text) json_object_set_new(o, #name, json_integer(b->name));
    ZERO_MEM_MAP(FIELD)
#undef FIELD
    json_object_set_new(o, "total", json_integer(b->total));
    return o;
}

json_t *report_rank_json(const struct report_rank *r, int32_t pp_rank)
{
    return json_pack("{s:i, s:o, s:o, s:I, s:I}", "pp_rank", (int)pp_rank, "planned_bytes",
                     report_bytes_json(&r->planned), "bytes", report_bytes_json(&r->allocated),
                     "activation_bytes", (json_int_t)r->activation_bytes, "peak_rss_bytes",
                     (json_int_t)r->peak_rss_bytes);
}

json_t *report_number(double x)
{
    return isfinite(x) ? json_real(x) : json_null();
}

void report_line(json_t *object)
{
    json_dumpf(object, stdout, JSON_COMPACT);
    fputc('\n', stdout);
    fflush(stdout);
    json_decref(object);
}

int64_t report_now_ns(void)
{
    return zr_now_ns();
}

void report_text(const struct report *r, const char *fmt, ...)
{
    if (r->quiet || r->json)
        return;
    va_list ap;
    va_start(ap, fmt);
    vprintf(fmt, ap);
    va_end(ap);
    fflush(stdout);
}

/* Grows the arrays for one more step. */
static int make_room(struct report *r)
{
    int64_t capacity = r->capacity ? 2 * r->capacity : 1024;
    if (r->n_steps < r->capacity)
        return 0;
    ZR_TRY(ZR_GROW(r->ms, capacity, "the times of %lld steps", (long long)capacity));
    ZR_TRY(ZR_GROW(r->loss, capacity, "the losses of %lld steps", (long long)capacity));
    r->capacity = capacity;
    return 0;
}

static void print_step_json(const struct report_step *s)
{
    report_line(json_pack("{s:s, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "event", "step", "step",
                          (json_int_t)s->step, "loss", report_number(s->loss), "grad_norm",
                          report_number(s->grad_norm), "lr", report_number(s->lr), "ms", report_number(s->ms),
                          "tokens_per_s", report_number(s->tokens_per_s), "mfu", report_number(s->mfu),
                          "seconds_left", report_number(s->seconds_left)));
}

static void print_step(const struct report_step *s)
{
    printf("step %6lld   loss %7.4f   norm %8.4f   %8.1f ms   %9.0f tokens/s   %9s%s\n", (long long)s->step,
           s->loss, s->grad_norm, s->ms, s->tokens_per_s, report_bytes(s->resident_bytes).text,
           s->skipped ? "   skipped: a gradient was not finite" : "");
    fflush(stdout);
}

/* What matters most stands first, because a terminal of 80 columns does not have room for all. */
static void show_progress(struct report *r, const struct report_step *s)
{
    char mfu[24] = "", left[48] = "";
    int64_t n = s->seconds_left < 1e8 ? (int64_t)(s->seconds_left + 0.5) : -1;
    if (s->mfu > 0)
        snprintf(mfu, sizeof mfu, "  %.1f%% MFU", 100 * s->mfu);
    if (n >= 3600)
        snprintf(left, sizeof left, "  %lld:%02d:%02d left", (long long)(n / 3600), (int)(n / 60 % 60),
                 (int)(n % 60));
    else if (n >= 0)
        snprintf(left, sizeof left, "  %d:%02d left", (int)(n / 60), (int)(n % 60));
    progress_show(&r->progress, s->share_done, "step %lld  loss %.3f%s  %.0f tokens/s%s  %.0f ms  %s",
                  (long long)s->step, s->loss, left, s->tokens_per_s, mfu, s->ms,
                  report_bytes(s->resident_bytes).text);
}

int report_step(struct report *r, const struct report_step *s, bool last)
{
    int err = make_room(r);
    if (err)
        return err;
    r->first_loss = r->n_steps ? r->first_loss : s->loss;
    r->first_step = r->n_steps ? r->first_step : s->step;
    r->loss[r->n_steps] = s->loss;
    r->ms[r->n_steps++] = s->ms;
    if (r->quiet)
        return 0;
    if (r->json) {
        print_step_json(s);
        return 0;
    }
    if (r->n_steps == 1)
        r->progress = progress_on(stdout);
    int64_t now = zr_now_ns();
    bool has_bar = r->progress.file != NULL;
    if (last || r->n_steps == 1 || s->skipped || (!has_bar && now - r->last_line_ns >= LINE_INTERVAL_NS)) {
        progress_clear(&r->progress);
        print_step(s);
        r->last_line_ns = now;
    } else if (has_bar) {
        show_progress(r, s);
    }
    return 0;
}

void report_evaluation(struct report *r, int64_t step, double loss, double best_loss, int64_t best_step)
{
    if (r->quiet)
        return;
    if (r->json) {
        report_line(json_pack("{s:s, s:I, s:o, s:o, s:I}", "event", "evaluation", "step", (json_int_t)step,
                              "loss", report_number(loss), "best_loss", report_number(best_loss), "best_step",
                              (json_int_t)best_step));
        return;
    }
    progress_clear(&r->progress);
    printf("step %6lld   held out: loss %7.4f", (long long)step, loss);
    if (best_step != step)
        printf("   (%7.4f after step %lld)", best_loss, (long long)best_step);
    printf("\n");
    fflush(stdout);
}

void report_empty_step(struct report *r, int64_t step)
{
    if (r->quiet)
        return;
    if (r->json) {
        report_line(json_pack("{s:s, s:I}", "event", "empty_step", "step", (json_int_t)step));
        return;
    }
    progress_clear(&r->progress);
    printf("step %6lld: no token counts (--mask)\n", (long long)step);
    fflush(stdout);
}

static int ascending(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double report_median(double *x, int64_t n)
{
    qsort(x, (size_t)n, sizeof *x, ascending);
    return n % 2 ? x[n / 2] : (x[n / 2 - 1] + x[n / 2]) / 2;
}

double report_ms_median(const struct report *r)
{
    int64_t skip = r->n_steps > N_WARM_STEPS ? N_WARM_STEPS : 0, n = r->n_steps - skip;
    double *sorted = n ? malloc((size_t)n * sizeof *sorted) : NULL;
    if (!sorted)
        return NAN;
    memcpy(sorted, r->ms + skip, (size_t)n * sizeof *sorted);
    double median = report_median(sorted, n);
    free(sorted);
    return median;
}

/* Tokens per second of the median step. */
static double tokens_per_s(const struct report *r, const struct report_summary *s)
{
    return (double)s->tokens_per_step / report_ms_median(r) * 1e3;
}

/* Model FLOPs utilization (Chowdhery et al., arXiv:2204.02311, appendix B): the share of the devices' peak
 * that the model's own arithmetic takes. NaN if the peak is not known. */
static double used_share(const struct report *r, const struct report_summary *s)
{
    return s->peak_tflops > 0 ? tokens_per_s(r, s) * s->flop_per_token / (s->peak_tflops * 1e12) : NAN;
}

/* Prints speed, loss and traffic. outer_bytes also counts the all-reduce that ends a step (the agreement),
 * which n_outer does not count. */
static void print_steps(const struct report *r, const struct report_summary *s)
{
    double n_steps = (double)r->n_steps;
    printf("\n%lld steps, loss %.4f -> %.4f, median step %.1f ms\n", (long long)r->n_steps, r->first_loss,
           s->loss, report_ms_median(r));
    if (s->peak_tflops > 0) {
        printf("%.0f tokens/s: the model's arithmetic takes %.1f%% of what the device can do\n",
               tokens_per_s(r, s), 100 * used_share(r, s));
    }
    printf("received per step and rank: %s in %.1f all-gathers, %.1f reduce-scatters, %.1f all-reduces\n",
           report_bytes(s->traffic.wire_bytes / r->n_steps).text, (double)s->traffic.n_all_gather / n_steps,
           (double)s->traffic.n_reduce_scatter / n_steps, (double)s->traffic.n_all_reduce / n_steps);
    if (s->hybrid)
        printf("of these from other groups: %s in %.1f reductions and gathers, and the agreement\n",
               report_bytes(s->traffic.outer_bytes / r->n_steps).text, (double)s->traffic.n_outer / n_steps);
}

static void print_ranks(const struct report_summary *s)
{
    printf("\n%-20s %12s %12s %12s %13s\n", "rank of the pipeline", "planned", "allocated", "activations",
           "peak resident");
    for (int32_t i = 0; i < s->n_ranks; i++) {
        const struct report_rank *k = &s->ranks[i];
        printf("%-20d %12s %12s %12s %13s\n", i, report_bytes(k->planned.total).text,
               report_bytes(k->allocated.total).text, report_bytes(k->activation_bytes).text,
               report_bytes(k->peak_rss_bytes).text);
    }
}

static json_t *ranks_json(const struct report_summary *s)
{
    json_t *list = json_array();
    for (int32_t i = 0; i < s->n_ranks; i++)
        json_array_append_new(list, report_rank_json(&s->ranks[i], i));
    return list;
}

static void print_summary(const struct report *r, const struct report_summary *s)
{
    if (r->n_steps)
        print_steps(r, s);
    else
        printf("\nno step was made\n");
    printf("\n%-20s %12s %12s\n", "memory per rank", "planned", "allocated");
#define ROW(field, title)                                                                                    \
    if (s->planned_bytes.field || s->bytes.field) {                                                          \
        printf("%-20s %12s %12s\n", title, report_bytes(s->planned_bytes.field).text,                        \
               report_bytes(s->bytes.field).text);                                                           \
    }
    ZERO_MEM_MAP(ROW)
    ROW(total, "total")
#undef ROW
    if (s->library_bytes)
        printf("%-20s %12s %12s\n", "NCCL's own", "", report_bytes(s->library_bytes).text);
    printf("%-20s %12s %12s\n", "activations", "", report_bytes(s->activation_bytes).text);
    printf("%-20s %12s %12s\n", "peak resident", "", report_bytes(s->peak_rss_bytes).text);
    if (s->peak_device_bytes)
        printf("%-20s %12s %12s\n", "peak of the GPU", "", report_bytes(s->peak_device_bytes).text);
    if (s->n_ranks)
        print_ranks(s);
    printf("\nstate sha256 %s\n", s->state_sha256);
    fflush(stdout);
}

void report_summary(struct report *r, const struct report_summary *s)
{
    if (r->quiet)
        return;
    if (!r->json) {
        print_summary(r, s);
        return;
    }
    json_t *collectives =
        json_pack("{s:I, s:I, s:I, s:I}", "all_gather", (json_int_t)s->traffic.n_all_gather, "reduce_scatter",
                  (json_int_t)s->traffic.n_reduce_scatter, "all_reduce", (json_int_t)s->traffic.n_all_reduce,
                  "wire_bytes", (json_int_t)s->traffic.wire_bytes);
    json_t *line = json_pack(
        "{s:s, s:i, s:o, s:s, s:o, s:s, s:o, s:o, s:I, s:I, s:o, s:o, s:o, s:o, s:o}", "event", "summary",
        "world", (int)s->world, "stage", s->stage < 0 ? json_null() : json_integer(s->stage), "device",
        s->device, "loss", report_number(s->loss), "state_sha256", s->state_sha256, "bytes",
        report_bytes_json(&s->bytes), "planned_bytes", report_bytes_json(&s->planned_bytes), "peak_rss_bytes",
        (json_int_t)s->peak_rss_bytes, "peak_device_bytes", (json_int_t)s->peak_device_bytes, "ms_median",
        report_number(report_ms_median(r)), "tokens_per_s", report_number(tokens_per_s(r, s)),
        "flop_per_token", report_number(s->flop_per_token), "mfu", report_number(used_share(r, s)),
        "collectives", collectives);
    json_object_set_new(line, "activation_bytes", json_integer(s->activation_bytes));
    states_add_json(&s->states, line);
    if (s->library_bytes)
        json_object_set_new(line, "library_bytes", json_integer(s->library_bytes));
    if (s->hybrid) {
        json_object_set_new(line, "hybrid", json_string(option_word_of(option_hybrids, s->hybrid)));
        json_object_set_new(line, "dp_shard", json_integer(s->dp_shard));
        json_object_set_new(collectives, "outer", json_integer(s->traffic.n_outer));
        json_object_set_new(collectives, "outer_bytes", json_integer(s->traffic.outer_bytes));
    }
    if (s->n_ranks)
        json_object_set_new(line, "pp_ranks", ranks_json(s));
    report_line(line);
}

int report_plot(const struct report *r, const char *path, const char *title)
{
    const struct loss_curve curve = {.loss = r->loss, .n = r->n_steps, .first = r->first_step};
    return loss_plot(path, title, "zero-bench train", &curve, 1);
}

void report_close(struct report *r)
{
    progress_clear(&r->progress);
    free(r->ms);
    free(r->loss);
    *r = (struct report){0};
}

void report_warning(void *arg, const char *line)
{
    const char *const *left_out = arg;
    bool print = left_out && strncmp(line, "warning: ", 9) == 0;
    for (int i = 0; print && left_out[i]; i++)
        print = !strstr(line, left_out[i]);
    if (print)
        fprintf(stderr, "libzero: %s\n", line);
}
