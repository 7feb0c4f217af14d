/* SPDX-License-Identifier: Apache-2.0 */
/* flight_cmd.c: zero-bench flight FILE... It prints what the ranks of a job did last, from their flight
 * recorders. */
#include "bench/arguments.h"
#include "bench/commands.h"
#include "bench/flight/merge.h"
#include "bench/report/report.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

struct flight_options {
    bool json;
    char **paths;
    int n_paths;
};

#define OPTION_STRUCT struct flight_options
static const struct option_row rows[] = {
    {"json", NULL, "A JSON line per rank and finding", OPTION_FLAG(json)},
    {0},
};

static error_t take_path(struct argp_state *state, const struct option_row *row, char *arg, void *to)
{
    struct flight_options *o = to;
    (void)state, (void)row;
    o->paths[o->n_paths++] = arg;
    return 0;
}

static error_t finish(struct argp_state *state, void *options)
{
    const struct flight_options *o = options;
    if (o->n_paths)
        return 0;
    return option_fault(
        state, "which files? ZERO_FLIGHT_DIR or zero-run --flight names the folder where ranks write "
               "them");
}

static const struct option_table table = {
    .rows = rows,
    .doc = "Merges the files that ranks (or zero-run, for those that were killed) wrote into the folder of "
           "ZERO_FLIGHT_DIR, and says which rank is dead, made another operation than the others, or is "
           "late, and in which call.",
    .args_doc = "FILE...",
    .read_word = take_path,
    .finish = finish,
};

/* Says what became of a rank. code: it wrote an error into its recorder. has_ended: zero-run has added how
 * its process ended. */
static const char *state_of(const struct zr_flight_view *v)
{
    return zr_flight_ended_by_launcher(v) ? "ended"
           : v->has_ended && v->signal    ? "killed"
           : v->has_ended                 ? "exited"
           : v->code                      ? "failed"
           : v->state == ZR_FLIGHT_CLOSED ? "unwrapped"
                                          : "running";
}

/* Lists each role with its operations begun and finished, such as "gather 12/11". A role is the purpose of a
 * communicator; its size, in ranks, is 0 if the rank has no such communicator. */
static void list_roles(const struct zr_flight_view *v, char *text, size_t n_text)
{
    size_t at = 0;
    text[0] = 0;
    for (int r = 0; r < ZR_ROLES && at < n_text; r++)
        if (v->role[r].size)
            at += (size_t)snprintf(text + at, n_text - at, "%s%s %llu/%llu", at ? ", " : "",
                                   zr_role_name((enum zr_role)r), (unsigned long long)v->role[r].started,
                                   (unsigned long long)v->role[r].finished);
}

/* Replaces bytes that a terminal or JSON cannot take. The file may contain anything. */
static void make_plain(const char *from, char *text, size_t n_text)
{
    snprintf(text, n_text, "%s", from);
    for (char *c = text; *c; c++)
        *c = *c < 32 || *c > 126 ? '?' : *c;
}

static void print_rank(const struct zr_flight_view *v)
{
    char call[ZR_CALL_LOG_CHARS], roles[256], host[ZR_FLIGHT_NAME], text[ZR_FLIGHT_TEXT];
    bool inside;
    int64_t ns; /* since the call began or, if it has returned, since it returned */
    make_plain(v->host, host, sizeof host);
    make_plain(v->text, text, sizeof text);
    flight_last_call(v, call, &inside, &ns);
    list_roles(v, roles, sizeof roles);
    printf("%-5d %-16.16s %-9s %-6s %10.3f s  %-44s %s\n", v->rank, host, state_of(v),
           inside ? "in" : "after", (double)ns * 1e-9, call[0] ? call : "no call", roles);
    if (v->code)
        printf("      %s\n", text);
}

static void print_rank_json(const struct zr_flight_view *v)
{
    char call[ZR_CALL_LOG_CHARS], host[ZR_FLIGHT_NAME], text[ZR_FLIGHT_TEXT];
    bool inside;
    int64_t ns;
    make_plain(v->host, host, sizeof host);
    make_plain(v->text, text, sizeof text);
    flight_last_call(v, call, &inside, &ns);
    json_t *roles = json_object();
    for (int r = 0; r < ZR_ROLES; r++)
        if (v->role[r].size)
            json_object_set_new(roles, zr_role_name((enum zr_role)r),
                                json_pack("{s:i, s:I, s:I, s:I}", "size", v->role[r].size, "issued",
                                          (json_int_t)v->role[r].issued, "started",
                                          (json_int_t)v->role[r].started, "finished",
                                          (json_int_t)v->role[r].finished));
    report_line(json_pack(
        "{s:i, s:i, s:i, s:i, s:s, s:s, s:s, s:b, s:o, s:i, s:s, s:o}", "rank", v->rank, "world", v->world,
        "attempt", v->attempt, "pid", v->pid, "host", host, "state", state_of(v), "call", call, "in_call",
        inside, "for_s", report_number((double)ns * 1e-9), "code", v->code, "failure", text, "roles", roles));
}

struct findings {
    bool json;
    int n;
};

static void on_finding(void *arg, const struct flight_finding *f)
{
    struct findings *all = arg;
    all->n++;
    if (all->json)
        report_line(json_pack("{s:i, s:s, s:s, s:s}", "rank", f->rank, "finding", flight_kind_name(f->kind),
                              "call", f->call, "text", f->text));
    else
        printf("%srank %d %s\n", all->n == 1 ? "\n" : "", f->rank, f->text);
}

int flight_command(const char *name, int argc, char **argv)
{
    struct flight_options o = {.paths = calloc((size_t)argc, sizeof *o.paths)};
    struct flight f;
    if (!o.paths) {
        fprintf(stderr, "%s: no memory for %d names\n", name, argc);
        return EXIT_FAILURE;
    }
    int status = options_parse(&table, name, argc, argv, &o);
    if (!status)
        status = flight_open(&f, name, o.paths, o.n_paths);
    free(o.paths);
    if (status)
        return status;
    struct findings all = {.json = o.json};
    if (!o.json)
        printf("%-5s %-16s %-9s %-6s %12s  %-44s %s\n", "rank", "host", "state", "", "for", "call",
               "operations begun/finished");
    for (int32_t i = 0; i < f.n; i++) {
        if (o.json)
            print_rank_json(f.rank[i].view);
        else
            print_rank(f.rank[i].view);
    }
    flight_judge(&f, on_finding, &all);
    if (!all.n && !o.json)
        printf("\nno rank stands out: none is dead, different or late\n");
    flight_close(&f);
    return 0;
}
