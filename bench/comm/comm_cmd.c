/* SPDX-License-Identifier: Apache-2.0 */
/* comm_cmd.c: zero-bench comm. It measures how fast ranks gather and reduce over each backend, and how fast
 * the machine copies and adds. It prints a table like that of nccl-tests, and checks the values. */
#include "bench/arguments.h"
#include "bench/comm/plot.h"
#include "bench/comm/rounds.h"
#include "bench/commands.h"
#include "bench/report/plot.h"
#include "bench/report/report.h"

#include "kernels/alloc.h"
#include "zero/zero.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define MAX_BYTES (INT64_C(1) << 40)

struct comm_options {
    struct comm_asked asked;
    int64_t group, across;
    const char *ops, *plot;
    int device, dtype, deterministic;
    bool json, flat;
};

/* ---- options ---- */

/* Reads a list of words, "a,b". bit returns the bit of a word, or 0 if there is no such word; allowed
 * names them all. */
static error_t read_list(struct argp_state *state, const struct option_row *row, const char *arg,
                         int64_t (*bit)(const char *word, size_t n), const char *allowed, int64_t *to)
{
    int64_t bits = 0;
    for (const char *at = arg;; at++) {
        size_t n = strcspn(at, ",");
        int64_t one = bit(at, n);
        if (!one)
            return option_fault(state, "--%s: '%.*s' is not %s", row->name, (int)n, at, allowed);
        bits |= one;
        at += n;
        if (!*at)
            break;
    }
    *to = bits;
    return 0;
}

static int64_t op_bit(const char *word, size_t n)
{
    for (int op = 0; op < COMM_OPS; op++)
        if (strlen(comm_op_names[op]) == n && !memcmp(comm_op_names[op], word, n))
            return INT64_C(1) << op;
    return 0;
}

static error_t read_backends(struct argp_state *state, const struct option_row *row, char *arg, void *options)
{
    struct comm_options *o = options;
    return read_list(state, row, arg, comm_backend_bit, comm_backend_names(), &o->asked.backends);
}

static error_t read_ops(struct argp_state *state, const struct option_row *row, char *arg, void *options)
{
    struct comm_options *o = options;
    o->ops = arg;
    return read_list(state, row, arg, op_bit, "all_gather, reduce_scatter or agree", &o->asked.ops);
}

/* Reads sizes such as "1Ki:64Mi", or one size. */
static error_t read_sizes(struct argp_state *state, const struct option_row *row, char *arg, void *options)
{
    struct comm_options *o = options;
    const struct option_row half = {.name = row->name, .min = 1};
    char *colon = strchr(arg, ':');
    if (colon)
        *colon = 0;
    error_t err = option_bytes(state, &half, arg, &o->asked.from_bytes);
    o->asked.to_bytes = o->asked.from_bytes;
    if (!err && colon)
        err = option_bytes(state, &half, colon + 1, &o->asked.to_bytes);
    if (err)
        return err;
    if (o->asked.from_bytes > o->asked.to_bytes || o->asked.to_bytes > MAX_BYTES)
        return option_fault(state, "--%s: from %lld to %lld is not from less to more, up to 1Ti", row->name,
                            (long long)o->asked.from_bytes, (long long)o->asked.to_bytes);
    return 0;
}

static error_t finish(struct argp_state *state, void *options)
{
    struct comm_options *o = options;
    struct comm_asked *a = &o->asked;
    if (o->group && o->across)
        return option_fault(state, "--across: does not go with --group");
    a->from_bytes = a->from_bytes ? a->from_bytes : 1 << 10;
    a->to_bytes = a->to_bytes ? a->to_bytes : 64 << 20;
    a->ops = a->ops ? a->ops : (1 << COMM_OPS) - 1;
    a->group = o->group ? o->group : o->across;
    a->across = o->across != 0;
    a->dtype = o->dtype == ZERO_BF16 ? ZERO_BF16 : ZERO_F32;
    a->deterministic = o->deterministic;
    a->cuda = o->device == ZERO_DEVICE_CUDA;
    a->flat = o->flat;
    return 0;
}

#define OPTION_STRUCT struct comm_options
static const struct option_row rows[] = {
    {"backend", "LIST", "Backends to measure, with commas between them (all that can be here)",
     OPTION_BY(read_backends)},
    {"op", "LIST", "all_gather, reduce_scatter, agree, with commas between them (all)", OPTION_BY(read_ops)},
    {"bytes", "FROM[:TO]", "Sizes of the whole region, all ranks' slices together (1Ki:64Mi)",
     OPTION_BY(read_sizes)},
    {"factor", "N", "From one size to the next (4)", OPTION_INT(asked.factor, 2, 1 << 20)},
    {"group", "N", "In groups of so many ranks, all at the same time (all ranks)",
     OPTION_INT(group, 1, 1 << 20)},
    {"across", "N", "Between groups of so many ranks", OPTION_INT(across, 1, 1 << 20)},
    {"dtype", "f32|bf16", "Of the elements (f32)", OPTION_WORD(dtype, option_dtypes)},
    {"deterministic", "on|off", "Sums in the fixed tree (as the backend does by itself)",
     OPTION_WORD(deterministic, option_on_off)},
    {"device", "host|cuda", "Whose memory (host)", OPTION_WORD(device, option_devices)},
    {"rounds", "N", "Measured rounds; the median counts (21)", OPTION_INT(asked.rounds, 1, 100000)},
    {"flat", NULL, "Over MPI inside a host, too, where it would use shared memory there", OPTION_FLAG(flat)},
    {"plot", "FILE", "Draw bandwidths over sizes into FILE.svg or FILE.png, with gnuplot", OPTION_PLOT(plot)},
    {"json", NULL, "A JSON line for each row", OPTION_FLAG(json)},
    {0},
};

static const struct option_table table = {
    .rows = rows,
    .doc =
        "How fast ranks gather and reduce, beside what the machine copies and adds, and whether the values "
        "are right. A rank alone, or several with zero-run -n N.",
    .read_word = option_refuse_word,
    .finish = finish,
};

/* ---- reports, by rank 0 ---- */

/* The figures of a row. The bandwidths are in GB/s and have the names of nccl-tests. */
struct figures {
    /* of one call: the median over rounds, and the least */
    double ms, ms_min;
    /* bytes of the region per time, and bytes that a rank must receive from others per time */
    double algbw, busbw;
    /* busbw of the row's limit; NAN: no limit */
    double limit;
    /* the row's bandwidth as a share of its limit; NAN: no limit */
    double of_limit;
};

/* Returns the bytes that a rank must receive from others for each byte of the region, with the best
 * algorithm. */
static double bus_part(const struct comm_rounds *b, enum comm_op op)
{
    return (op == COMM_AGREE ? 2.0 : 1.0) * (b->n - 1) / b->n;
}

/* Ratios are taken round by round, because other load on the machine then hits both sides. sorted is
 * (rounds). */
static struct figures figures_of(const struct comm_rounds *b, const struct comm_row *row, double *sorted)
{
    struct figures f = {.limit = NAN, .of_limit = NAN};
    int64_t n = b->asked.rounds;
    double bytes = (double)b->bytes;
    if (row->limit) {
        memcpy(sorted, row->limit->ns, (size_t)n * sizeof *sorted);
        f.limit = bytes / report_median(sorted, n) * bus_part(b, row->op);
        for (int64_t i = 0; i < n; i++)
            sorted[i] = row->limit->ns[i] / row->ns[i];
        f.of_limit = report_median(sorted, n);
    }
    memcpy(sorted, row->ns, (size_t)n * sizeof *sorted);
    double ns = report_median(sorted, n);
    f.ms = ns * 1e-6;
    f.ms_min = sorted[0] * 1e-6;
    f.algbw = bytes / ns;
    f.busbw = f.algbw * bus_part(b, row->op);
    return f;
}

static bool has_mpi_own(const struct comm_ranks *r)
{
    for (int i = 0; i < r->n_backends; i++)
        if (comm_backend_is_mpi(&r->backend[i]))
            return r->group->size > 1;
    return false;
}

/* MPI's own collectives have long names. */
static int name_width(const struct comm_ranks *r)
{
    return has_mpi_own(r) ? (int)strlen("MPI_Ireduce_scatter_block") : (int)strlen("copy limit");
}

static void report_row(const struct comm_options *o, const struct comm_rounds *b, const struct comm_row *row,
                       const struct figures *f)
{
    const char *backend = comm_row_name(row);
    int64_t bytes = b->bytes;
    if (o->json) {
        json_t *ms = json_array();
        for (int64_t i = 0; i < b->asked.rounds; i++)
            json_array_append_new(ms, report_number(row->ns[i] * 1e-6));
        report_line(json_pack(
            "{s:s, s:s, s:s, s:s?, s:I, s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "event", "row", "op",
            comm_op_names[row->op], "backend", backend, "path", row->backend ? row->backend->path : NULL,
            "bytes", (json_int_t)bytes, "slice", (json_int_t)b->slice, "ms", report_number(f->ms), "ms_min",
            report_number(f->ms_min), "rounds_ms", ms, "algbw", report_number(f->algbw), "busbw",
            report_number(f->busbw), "limit", report_number(f->limit), "of_limit", report_number(f->of_limit),
            "wrong", row->backend ? json_integer(row->wrong) : json_null()));
        return;
    }
    char limit[24] = "-", of_limit[24] = "-", wrong[24] = "-";
    if (isfinite(f->of_limit)) {
        snprintf(limit, sizeof limit, "%.2f", f->limit);
        snprintf(of_limit, sizeof of_limit, "%.0f%%", 100 * f->of_limit);
    }
    if (row->backend)
        snprintf(wrong, sizeof wrong, "%lld", (long long)row->wrong);
    printf("%-14s  %-*s  %11lld  %11lld  %11.1f  %7.2f  %7.2f  %7s  %8s  %7s\n", comm_op_names[row->op],
           name_width(b->ranks), backend, (long long)bytes, (long long)b->slice, f->ms * 1e3, f->algbw,
           f->busbw, limit, of_limit, wrong);
}

/* The processor's name, such as "AMD EPYC 9654 96-Core Processor", or "" if the kernel does not say. */
static const char *processor(void)
{
    static char text[128], line[256];
    FILE *f = fopen("/proc/cpuinfo", "re");
    while (f && !text[0] && fgets(line, sizeof line, f))
        if (sscanf(line, "model name : %127[^\n]", text) != 1)
            text[0] = 0;
    if (f)
        fclose(f);
    return text;
}

static void report_head(const struct comm_options *o, const struct comm_ranks *r)
{
    const struct comm_asked *a = &o->asked;
    const char *dtype = zr_dtype_name((enum zero_dtype)a->dtype);
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    if (o->json) {
        report_line(json_pack("{s:s, s:i, s:i, s:i, s:b, s:b, s:s, s:s, s:I, s:s, s:I, s:s, s:s}", "event",
                              "comm", "ranks", r->world.world, "hosts", r->topology.n_hosts, "group",
                              r->group->size, "across", a->across != 0, "flat", a->flat != 0, "device",
                              option_word_of(option_devices, o->device), "dtype", dtype, "rounds",
                              (json_int_t)a->rounds, "machine", processor(), "cores", (json_int_t)cores,
                              "version", zero_version(), "left_out", r->left_out));
        return;
    }
    printf("# %d %s, %d %s, %s of %d; %s; medians of %lld rounds, the slowest rank's time\n", r->world.world,
           r->world.world == 1 ? "rank" : "ranks", r->topology.n_hosts,
           r->topology.n_hosts == 1 ? "host" : "hosts", a->across ? "groups across" : "groups",
           r->group->size, dtype, (long long)a->rounds);
    printf("# %s, %ld cores, libzero %s\n", processor(), cores, zero_version());
    for (int i = 0; i < r->n_backends; i++)
        if (strcmp(r->backend[i].kind->name, r->backend[i].path))
            printf("# %s: %s\n", r->backend[i].kind->name, r->backend[i].path);
    if (r->left_out[0])
        printf("# left out: %s\n", r->left_out);
    printf("# bytes: of the region, all slices together; bandwidths in GB/s (1e9)\n");
    if (has_mpi_own(r) && a->dtype == ZERO_BF16)
        printf("# MPI has no bf16: its own sums are of as many elements of fp32\n");
    printf("%-14s  %-*s  %11s  %11s  %11s  %7s  %7s  %7s  %8s  %7s\n", "# op", name_width(r), "backend",
           "bytes", "slice", "time us", "algbw", "busbw", "limit", "of limit", "wrong");
    fflush(stdout);
}

/* ---- the command ---- */

/* The result of all sizes. */
struct outcome {
    int64_t wrong;
    double *sorted;
    /* (n_points) points of the picture, if one was asked for */
    struct comm_point *point;
    int n_points;
};

static int keep_point(struct outcome *out, const struct comm_rounds *b, const struct comm_row *row,
                      const struct figures *f)
{
    ZR_TRY(ZR_GROW(out->point, out->n_points + 1, "a picture"));
    out->point[out->n_points++] = (struct comm_point){.op = row->op,
                                                      .row_name = comm_row_name(row),
                                                      .is_limit = !row->backend,
                                                      .bytes = b->bytes,
                                                      .busbw = f->busbw};
    return 0;
}

static int report_rows(const struct comm_options *o, const struct comm_rounds *b, struct outcome *out)
{
    int err = 0;
    for (int k = 0; k < b->n_rows && !err; k++) {
        const struct comm_row *row = &b->row[k];
        struct figures f = figures_of(b, row, out->sorted);
        out->wrong += row->wrong;
        if (b->ranks->world.rank == 0)
            report_row(o, b, row, &f);
        err = o->plot ? keep_point(out, b, row, &f) : 0;
    }
    fflush(stdout);
    return err;
}

static int run_sizes(struct comm_options *o, struct comm_rounds *b, struct outcome *out)
{
    const struct comm_asked *a = &o->asked;
    int64_t before = 0;
    int err = 0;
    for (int64_t bytes = a->from_bytes; bytes <= a->to_bytes && !err; bytes *= a->factor) {
        int64_t slice = comm_slice(bytes, b->n);
        if (slice == before)
            continue;
        before = slice;
        err = comm_rounds_run(b, slice);
        err = err ? err : report_rows(o, b, out);
    }
    return err;
}

/* Collective. Returns 0 or a zero_err. */
static int run(struct comm_options *o, struct comm_ranks *r, struct comm_rounds *b, struct outcome *out)
{
    int err = comm_ranks_meet(r, &o->asked);
    if (err)
        return err;
    if (o->plot && r->group->size == 1)
        return zr_fail(ZERO_ERR_ARG, "--plot: one rank gathers nothing: zero-run -n 2 zero-bench comm");
    err = comm_rounds_open(b, r, &o->asked);
    if (err)
        return err;
    ZR_TRY(ZR_ZALLOC(out->sorted, o->asked.rounds, "%lld times", (long long)o->asked.rounds));
    if (r->world.rank == 0)
        report_head(o, r);
    return run_sizes(o, b, out);
}

/* Whether the options or this machine do not allow the run, which is known before anything is measured. */
static bool is_usage(int err)
{
    return err == ZERO_ERR_ARG || err == ZERO_ERR_NOTSUP || err == ZERO_ERR_MISMATCH;
}

/* Called by rank 0. */
static int draw(const struct comm_options *o, const struct comm_ranks *r, int n, const struct outcome *out)
{
    char title[128];
    snprintf(title, sizeof title, "%d ranks, %s of %d, %s", r->world.world,
             o->asked.across ? "groups across" : "groups", n, zr_dtype_name((enum zero_dtype)o->asked.dtype));
    return comm_plot(o->plot, title, out->point, out->n_points);
}

/* Returns the exit status, after a line about wrong elements. Called by one rank, because a launcher ends all
 * ranks when one fails. */
static int exit_status(const char *name, const struct outcome *out)
{
    if (out->wrong)
        fprintf(stderr, "%s: %lld elements were wrong\n", name, (long long)out->wrong);
    return out->wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}

int comm_command(const char *name, int argc, char **argv)
{
    struct comm_options o = {.asked = {.rounds = 21, .factor = 4},
                             .device = ZERO_DEVICE_HOST,
                             .dtype = ZERO_F32,
                             .deterministic = ZERO_AUTO};
    int status = options_parse(&table, name, argc, argv, &o);
    if (status)
        return status;
    struct comm_ranks ranks = {0};
    struct comm_rounds rounds = {0};
    struct outcome out = {0};
    int err = run(&o, &ranks, &rounds, &out), n = rounds.n;
    struct zr_saved_error kept;
    zr_error_save(&kept, err);
    comm_rounds_close(&rounds);
    zr_error_restore(&kept);
    comm_ranks_close(&ranks, err);
    if (err) {
        fprintf(stderr, "%s: %s\n", name, zr_error_text());
        status = is_usage(err) ? EXIT_USAGE : EXIT_FAILURE;
    } else if (ranks.world.rank == 0) {
        status = exit_status(name, &out);
        if (o.plot && draw(&o, &ranks, n, &out))
            status = EXIT_FAILURE;
    }
    free(out.sorted);
    free(out.point);
    return status;
}
