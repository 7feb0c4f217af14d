/* SPDX-License-Identifier: Apache-2.0 */
/* pipeline_csv.c: reads and writes pipeline schedules in the CSV of PyTorch's torch.distributed.pipelining. A
 * line is a rank and a cell is an action. "(3F1;0B2)OVERLAP_F_B" is two computations at the same time. */
#include "kernels/alloc.h"
#include "kernels/error.h"
#include "kernels/limits.h"
#include "shard/pipeline/pipeline.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct {
    const char *text;
    bool has_micro_batch;
} kinds[ZR_PIPE_N_KINDS] = {
#define X(name, text, has_micro_batch) {text, has_micro_batch},
    ZR_PIPE_MAP(X)
#undef X
};

static const char overlap[] = "OVERLAP_F_B";

/* ---- reading ---- */

/* Reads digits at *at into *number, and moves *at past them. */
static bool read_number(const char **at, int32_t *number)
{
    int64_t n = 0;
    const char *p = *at;
    for (; *p >= '0' && *p <= '9'; p++) {
        n = 10 * n + (*p - '0');
        if (n >= ZR_PIPE_MAX_NUMBERS)
            return false;
    }
    bool any = p > *at;
    *at = p;
    *number = (int32_t)n;
    return any;
}

/* Reads the longest matching name, so that SEND_F1 is not read as kind "S". */
static bool read_kind(const char **at, enum zr_pipe_kind *kind)
{
    size_t longest = 0;
    for (int k = 0; k < ZR_PIPE_N_KINDS; k++) {
        size_t n = strlen(kinds[k].text);
        if (n > longest && strncmp(*at, kinds[k].text, n) == 0) {
            longest = n;
            *kind = (enum zr_pipe_kind)k;
        }
    }
    *at += longest;
    return longest > 0;
}

static bool read_action(const char **at, struct zr_pipe_action *a)
{
    *a = (struct zr_pipe_action){.micro_batch = -1};
    return read_number(at, &a->stage) && read_kind(at, &a->kind) &&
           (!kinds[a->kind].has_micro_batch || read_number(at, &a->micro_batch));
}

/* Returns a cell without surrounding spaces and quotes. */
static char *trim(char *text)
{
    text += strspn(text, " \t\r\n\"");
    size_t n = strlen(text);
    while (n && strchr(" \t\r\n\"", text[n - 1]))
        text[--n] = 0;
    return text;
}

/* Returns 0, ZERO_ERR_NOMEM, or 1 if the cell is not an action. */
static int read_cell(struct zr_pipeline *p, int32_t rank, const char *cell)
{
    struct zr_pipe_action a[2];
    int n = 0;
    if (*cell == '(') {
        do {
            cell++;
            if (n == 2 || !read_action(&cell, &a[n]) || !zr_pipe_computes(a[n].kind))
                return 1;
            n++;
        } while (*cell == ';');
        if (n != 2 || *cell++ != ')' || strncmp(cell, overlap, strlen(overlap)) != 0)
            return 1;
        cell += strlen(overlap);
        a[0].with_next = true;
    } else if (*cell) {
        if (!read_action(&cell, &a[0]))
            return 1;
        n = 1;
    }
    if (*cell)
        return 1;
    int err = 0;
    for (int i = 0; i < n && !err; i++)
        err = zr_pipeline_add(p, rank, a[i]);
    return err;
}

static int read_line(struct zr_pipeline *p, int32_t rank, char *line, const char *path)
{
    int err = 0, column = 1;
    for (char *next; line && !err; line = next, column++) {
        next = strchr(line, ',');
        if (next)
            *next++ = 0;
        const char *cell = trim(line);
        err = read_cell(p, rank, cell);
        if (err > 0)
            err = zr_fail(ZERO_ERR_ARG,
                          "%s, line %d, cell %d: \"%.40s\" is not an action: a stage, a kind and a "
                          "micro-batch, as in 2F0 or 1SEND_B3, with numbers below %d",
                          path, rank + 1, column, cell, ZR_PIPE_MAX_NUMBERS);
    }
    return err;
}

/* Adds an empty row. */
static int add_rank(struct zr_pipeline *p, const char *path)
{
    if (p->n_ranks == ZR_PIPE_MAX_RANKS)
        return zr_fail(ZERO_ERR_ARG, "%s: more than %d ranks", path, ZR_PIPE_MAX_RANKS);
    ZR_TRY(ZR_GROW(p->rows, p->n_ranks + 1, "a pipeline schedule of %d ranks", p->n_ranks + 1));
    p->rows[p->n_ranks++] = (struct zr_pipe_row){0};
    return 0;
}

static int read_all(struct zr_pipeline *p, FILE *f, const char *path)
{
    char *line = NULL;
    size_t capacity = 0;
    int64_t number = 0;
    int err = 0;
    p->n_ranks = 0;
    errno = 0;
    for (ssize_t n; !err && (n = getline(&line, &capacity, f)) > 0;) {
        number++;
        if (strspn(line, " \t\r\n") == (size_t)n) /* a rank without actions if another line follows */
            continue;
        while (!err && p->n_ranks < number)
            err = add_rank(p, path);
        if (!err && strlen(line) != (size_t)n)
            err = zr_fail(ZERO_ERR_ARG, "%s, line %d: it contains a zero byte", path, p->n_ranks);
        if (!err)
            err = read_line(p, p->n_ranks - 1, line, path);
    }
    free(line);
    if (!err && !feof(f)) /* also if getline had no memory */
        err = zr_fail(ZERO_ERR_IO, "%s: %s", path, errno ? strerror(errno) : "it could not be read");
    if (!err && !p->n_stages)
        err = zr_fail(ZERO_ERR_ARG, "%s: no action is in it", path);
    if (!err && (int64_t)p->n_stages * p->n_micro_batches > ZR_PIPE_MAX_ALL)
        err = zr_fail(ZERO_ERR_ARG, "%s: %d stages and %d micro-batches: their product may be at most %lld",
                      path, p->n_stages, p->n_micro_batches, (long long)ZR_PIPE_MAX_ALL);
    return err;
}

int zr_pipeline_read(struct zr_pipeline **out, const char *path)
{
    char why[ZR_SYSTEM_WORDS];
    *out = NULL;
    FILE *f = fopen(path, "r");
    if (!f)
        return zr_fail(ZERO_ERR_IO, "%s: %s", path, zr_system_words(errno, why));
    struct zr_pipeline *p = zr_pipeline_new(1);
    int err = p ? read_all(p, f, path) : ZERO_ERR_NOMEM;
    fclose(f);
    if (err)
        zr_pipeline_close(p);
    else
        *out = p;
    return err;
}

/* ---- writing ---- */

static void write_row(FILE *f, const struct zr_pipe_row *row)
{
    char text[ZR_PIPE_TEXT];
    for (int64_t i = 0; i < row->n; i++) {
        const bool first = row->at[i].with_next, second = i && row->at[i - 1].with_next;
        fprintf(f, "%s%s%s", i && !second ? "," : "", first ? "(" : "", zr_pipe_text(row->at[i], text));
        if (first)
            fputc(';', f);
        if (second)
            fprintf(f, ")%s", overlap);
    }
    fputs("\r\n", f);
}

/* A link, a pipe or a device is written directly instead of being replaced. */
static bool is_replaced(const char *path)
{
    struct stat there;
    return lstat(path, &there) != 0 || S_ISREG(there.st_mode);
}

int zr_pipeline_write(const struct zr_pipeline *p, const char *path)
{
    char beside[4096], why[ZR_SYSTEM_WORDS];
    struct zr_large_write guard;
    const bool replaced = is_replaced(path);
    int n = replaced ? snprintf(beside, sizeof beside, "%s.%d.new", path, (int)getpid())
                     : snprintf(beside, sizeof beside, "%s", path);
    if (n >= (int)sizeof beside)
        return zr_fail(ZERO_ERR_IO, "%.80s...: the path is too long", path);
    FILE *f = fopen(beside, replaced ? "wx" : "w"); /* never overwrites another file */
    if (!f)
        return zr_fail(ZERO_ERR_IO, "%s: %s", beside, zr_system_words(errno, why));
    zr_large_write_begin(&guard);
    for (int32_t r = 0; r < p->n_ranks; r++)
        write_row(f, &p->rows[r]);
    errno = 0;
    bool wrong = ferror(f);
    wrong |= fclose(f) != 0;
    zr_large_write_end(&guard);
    if (!wrong && (!replaced || rename(beside, path) == 0))
        return 0;
    int err =
        zr_fail(ZERO_ERR_IO, "%s: %s", path, errno ? zr_system_words(errno, why) : "it could not be written");
    if (replaced)
        remove(beside);
    return err;
}
