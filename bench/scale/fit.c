/* SPDX-License-Identifier: Apache-2.0 */
/* fit.c: measurements, and the fractions of data sheets that explain them; see scale.h.
 *
 * What is made least is the sum of squares of the logarithms of predicted over measured: twice as fast is as
 * wrong as half as fast. Given the links' fraction, each model's own is found by itself, so there are two
 * searches of one variable, one inside the other. */
#include "bench/scale/scale.h"

#include "kernels/device.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- reading ---- */

/* A field that is a whole number from 1 to `most`; absent: stays as it is. */
static bool read_count(const json_t *row, const char *key, int64_t most, int64_t *to, char *text, size_t n)
{
    const json_t *v = json_object_get(row, key);
    if (!v)
        return true;
    if (json_is_integer(v) && json_integer_value(v) >= 1 && json_integer_value(v) <= most) {
        *to = json_integer_value(v);
        return true;
    }
    snprintf(text, n, "\"%s\" is not a whole number from 1 to %lld", key, (long long)most);
    return false;
}

static bool read_flag(const json_t *row, const char *key, bool *to, char *text, size_t n)
{
    const json_t *v = json_object_get(row, key);
    if (v && !json_is_boolean(v)) {
        snprintf(text, n, "\"%s\" is neither true nor false", key);
        return false;
    }
    *to = v ? json_is_true(v) : *to;
    return true;
}

static bool read_names(const json_t *row, struct scale_job *j, char *text, size_t n)
{
    const json_t *model = json_object_get(row, "model"), *machine = json_object_get(row, "machine");
    if (model)
        j->model = json_is_string(model) ? scale_model_of(json_string_value(model)) : NULL;
    if (machine)
        j->machine = json_is_string(machine) ? scale_machine_of(json_string_value(machine)) : NULL;
    if (!j->model)
        snprintf(text, n, "\"model\" is not %s", scale_model_names());
    else if (!j->machine)
        snprintf(text, n, "\"machine\" is not %s", scale_machine_names());
    else if (!j->context)
        j->context = j->model->context;
    return j->model && j->machine;
}

/* Tokens a second, of one GPU or of all, or MFU in percent. */
static bool read_measured(const json_t *row, struct scale_row *r, char *text, size_t n)
{
    static const char *const keys[] = {"tokens_per_s_per_gpu", "tokens_per_s", "mfu_percent"};
    double given[3];
    for (int i = 0; i < 3; i++) {
        const json_t *v = json_object_get(row, keys[i]);
        if (v && (!json_is_number(v) || json_number_value(v) <= 0)) {
            snprintf(text, n, "\"%s\" is not a number above 0", keys[i]);
            return false;
        }
        given[i] = json_number_value(v);
    }
    double one = given[0], all = given[1], mfu = given[2];
    const struct scale_job *j = &r->job;
    r->tokens_per_s_per_gpu =
        one > 0   ? one
        : all > 0 ? all / (double)j->world
                  : mfu / 100 * j->machine->flop_per_s / scale_flop_per_token(j->model, j->context);
    if (r->tokens_per_s_per_gpu > 0)
        return true;
    snprintf(text, n, "it has no \"tokens_per_s_per_gpu\", \"tokens_per_s\" or \"mfu_percent\" above 0");
    return false;
}

/* A row may say how many parameters its model has, to be sure that it is the same model. */
static bool read_size(const json_t *row, const struct scale_job *j, char *text, size_t n)
{
    int64_t said = 0, is = scale_n_params(j->model, j->context);
    bool ok = read_count(row, "n_params", INT64_MAX, &said, text, n);
    if (!ok || !said || said == is)
        return ok;
    snprintf(text, n, "\"n_params\" is %lld, and %s has %lld with a context of %lld", (long long)said,
             j->model->name, (long long)is, (long long)j->context);
    return false;
}

/* A field that nobody reads is one that somebody means to be read. */
static bool knows_fields(const json_t *row, char *text, size_t n)
{
    static const char *const known[] = {"machine",   "model",        "world",
                                        "batch",     "context",      "accum",
                                        "recompute", "held_out",     "tokens_per_s_per_gpu",
                                        "n_params",  "tokens_per_s", "mfu_percent"};
    enum { N_KNOWN = sizeof known / sizeof *known };
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)row, key, value)
    {
        int i = 0;
        while (i < N_KNOWN && strcmp(key, known[i]))
            i++;
        if (i == N_KNOWN) {
            snprintf(text, n, "\"%s\" is no field of a row", key);
            return false;
        }
    }
    return true;
}

static bool read_row(const json_t *row, struct scale_row *r, char *text, size_t n)
{
    struct scale_job *j = &r->job;
    if (!json_is_object(row)) {
        snprintf(text, n, "it is not an object");
        return false;
    }
    if (!json_object_get(row, "world")) {
        snprintf(text, n, "it has no \"world\"");
        return false;
    }
    return knows_fields(row, text, n) && read_names(row, j, text, n) &&
           read_count(row, "world", SCALE_MOST_RANKS, &j->world, text, n) &&
           read_count(row, "batch", SCALE_MOST_BATCH, &j->batch, text, n) &&
           read_count(row, "context", SCALE_MOST_CONTEXT, &j->context, text, n) &&
           read_count(row, "accum", SCALE_MOST_ACCUM, &j->accum, text, n) &&
           read_flag(row, "recompute", &j->recompute, text, n) &&
           read_flag(row, "held_out", &r->held_out, text, n) && read_size(row, j, text, n) &&
           read_measured(row, r, text, n);
}

static int read_rows(const json_t *rows, const struct scale_job *like, struct scale_rows *out, char *text,
                     size_t n)
{
    int count = (int)json_array_size(rows);
    out->row = calloc((size_t)count + 1, sizeof *out->row);
    for (int i = 0; out->row && i < count; i++) {
        int used = snprintf(text, n, "row %d: ", i + 1);
        out->row[i].job = *like;
        if (!read_row(json_array_get(rows, (size_t)i), &out->row[i], text + used, n - (size_t)used))
            return -1;
    }
    out->n = out->row ? count : 0;
    if (!out->row)
        snprintf(text, n, "no memory for %d rows", count);
    return out->row ? 0 : -1;
}

int scale_rows_read(const char *path, const struct scale_job *like, struct scale_rows *out, char *text,
                    size_t n)
{
    json_error_t why;
    json_t *file = json_load_file(path, 0, &why), *rows = json_object_get(file, "rows");
    *out = (struct scale_rows){0};
    int err = -1;
    if (!file)
        snprintf(text, n, "%s: line %d: %s", path, why.line, why.text);
    else if (!json_is_array(rows) || !json_array_size(rows))
        snprintf(text, n, "%s: it has no rows: {\"rows\": [{\"model\": ..., \"world\": ...}, ...]}", path);
    else
        err = read_rows(rows, like, out, text, n);
    json_decref(file);
    if (err)
        scale_rows_free(out);
    return err;
}

void scale_rows_free(struct scale_rows *r)
{
    free(r->row);
    *r = (struct scale_rows){0};
}

/* ---- fitting ---- */

/* Rows that have one compute fraction: the same model on the same machine, recomputed or not. */
static bool of_one_kind(const struct scale_row *a, const struct scale_row *b)
{
    return a->job.model == b->job.model && a->job.machine == b->job.machine &&
           a->job.recompute == b->job.recompute;
}

static int predict(const struct scale_rows *rows, int i)
{
    struct scale_row *r = &rows->row[i];
    double step_s;
    int err = scale_step(&r->job, &step_s);
    r->predicted = err ? 0 : (double)(r->job.batch * r->job.context * r->job.accum) / step_s;
    return err ? zr_fail_more(err, "row %d", i + 1) : 0;
}

struct fitting {
    struct scale_rows *rows;
    int first; /* the kind is this row's */
    int err;
};

/* The squares of the kind's logarithms. */
static double kind_error(struct fitting *f, double compute)
{
    double sum = 0;
    for (int i = f->first; i < f->rows->n && !f->err; i++) {
        struct scale_row *r = &f->rows->row[i];
        if (r->held_out || !of_one_kind(r, &f->rows->row[f->first]))
            continue;
        r->job.compute_fraction = compute;
        f->err = predict(f->rows, i);
        double off = f->err ? 0 : log(r->predicted / r->tokens_per_s_per_gpu);
        sum += off * off;
    }
    return sum;
}

/* Golden section (Kiefer 1953) over the logarithm of a fraction. */
static double least(struct fitting *f, double (*error)(struct fitting *f, double x), int rounds, double *at)
{
    const double cut = 0.6180339887498949;
    double lo = log(0.02), hi = 0, a = hi - cut * (hi - lo), b = lo + cut * (hi - lo);
    double ea = error(f, exp(a)), eb = error(f, exp(b));
    for (int i = 0; i < rounds && !f->err; i++) {
        if (ea < eb) {
            hi = b;
            b = a;
            eb = ea;
            a = hi - cut * (hi - lo);
            ea = error(f, exp(a));
        } else {
            lo = a;
            a = b;
            ea = eb;
            b = lo + cut * (hi - lo);
            eb = error(f, exp(b));
        }
    }
    *at = exp((lo + hi) / 2);
    return error(f, *at);
}

/* The first row to fit of its kind. */
static bool is_first(const struct scale_rows *r, int i)
{
    for (int k = 0; k < i; k++)
        if (!r->row[k].held_out && of_one_kind(&r->row[k], &r->row[i]))
            return false;
    return !r->row[i].held_out;
}

enum { KIND_ROUNDS = 14, LINK_ROUNDS = 8 };

static double links_error(struct fitting *f, double links)
{
    double sum = 0, at;
    for (int i = 0; i < f->rows->n; i++)
        f->rows->row[i].job.link_fraction = links;
    for (int i = 0; i < f->rows->n && !f->err; i++) {
        f->first = i;
        if (is_first(f->rows, i))
            sum += least(f, kind_error, KIND_ROUNDS, &at);
    }
    return sum;
}

/* The fraction of the row's kind; of all kinds, where it has none. */
static double compute_for(const struct scale_rows *r, const struct scale_row *row)
{
    double sum = 0;
    int n = 0;
    for (int i = 0; i < r->n; i++) {
        if (r->row[i].held_out)
            continue;
        if (of_one_kind(&r->row[i], row))
            return r->row[i].job.compute_fraction;
        if (is_first(r, i)) {
            sum += r->row[i].job.compute_fraction;
            n++;
        }
    }
    return sum / n;
}

int scale_fit(struct scale_rows *r)
{
    struct fitting f = {.rows = r};
    double links;
    r->n_fitted = 1;
    for (int i = 0; i < r->n; i++)
        r->n_fitted += is_first(r, i);
    if (r->n_fitted == 1)
        return zr_fail(ZR_ERR_ARG, "all of the %d rows are held out: none is left to fit", r->n);
    least(&f, links_error, LINK_ROUNDS, &links);
    for (int i = 0; i < r->n && !f.err; i++) {
        if (!r->row[i].held_out)
            continue;
        r->row[i].job.compute_fraction = compute_for(r, &r->row[i]);
        f.err = predict(r, i);
    }
    return f.err;
}
