/* SPDX-License-Identifier: Apache-2.0 */
/* verify_time.c: runs a case on the virtual clock, with all ranks or by symmetry, and writes a trace of
 * it. */
#include "shard/verify/verify_world.h"

#include <stdio.h>
#include <string.h>

/* Rank 0 runs the first forward and the last backward of a step, also with pipeline stages. */
static void note_span(struct zr_verify_span *s, const char *name, int64_t from_ns, int64_t to_ns)
{
    bool backward = !strncmp(name, "backward", strlen("backward")); /* also of inputs or weights */
    if (!s->from_ns && (backward || !strcmp(name, "forward")))
        s->from_ns = from_ns;
    if (backward)
        s->to_ns = to_ns;
    if (!strcmp(name, "agree"))
        s->norm_ns = to_ns;
}

/* Writes the Trace Event Format: a process is a rank, a thread is one of its lines. */
void zr_time_ran(void *arg, const struct zr_info *info, const char *line, int rank, int64_t from_ns,
                 int64_t to_ns)
{
    struct zr_verify_world *v = arg;
    (void)line;
    if (rank == 0)
        note_span(&v->span, info->name, from_ns, to_ns);
    if (v->trace && rank < 16 && to_ns > from_ns)
        fprintf(v->trace,
                "{\"name\":\"%s\",\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%lld.%03d,\"dur\":%lld.%03d,"
                "\"args\":{\"unit\":%d,"
                "\"step\":%u,\"during\":\"%s\"}},\n",
                info->name, rank, zr_sim_line_number(v->sim, info->line), (long long)(from_ns / 1000),
                (int)(from_ns % 1000), (long long)((to_ns - from_ns) / 1000), (int)((to_ns - from_ns) % 1000),
                info->unit, info->step, info->during);
}

void zr_trace_name_lines(struct zr_verify_world *v)
{
    const struct zr_recorder *rec = zr_sim_recorder(v->sim);
    for (int32_t i = 0; v->trace && i < rec->n_lines && rec->lines[i].rank < 16; i++)
        fprintf(v->trace,
                "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":\"%s\"}},\n",
                rec->lines[i].rank, zr_sim_line_number(v->sim, i), rec->lines[i].name);
}

int zr_verify_scale(const struct zr_verify_case *c, const struct zr_verify_speed *speed,
                    struct zr_verify_time *out, struct zr_verify_result *result)
{
    struct zr_verify_world v = {.c = c, .speed = speed, .by_symmetry = true};
    if (c->granule || c->dealt || c->dead >= 0 || c->poison >= 0 || c->values)
        return zr_fail(ZERO_ERR_ARG,
                       "by symmetry ranks are alike: granule, dealt, dead, poison and values are of "
                       "cases whose ranks differ");
    return zr_verify_world_run(&v, result, out);
}

int zr_verify_time(const struct zr_verify_case *c, const struct zr_verify_speed *speed, const char *path,
                   struct zr_verify_time *out, struct zr_verify_result *result)
{
    struct zr_verify_world v = {.c = c, .speed = speed};
    FILE *trace = path ? fopen(path, "w") : NULL;
    if (path && !trace)
        return zr_fail(ZERO_ERR_IO, "%s cannot be written", path);
    v.trace = trace;
    if (trace)
        fprintf(trace, "[\n");
    int err = zr_verify_world_run(&v, result, out);
    if (trace) {
        fprintf(trace, "{\"name\":\"libzero\",\"ph\":\"M\",\"pid\":0,\"args\":{}}]\n");
        if (fclose(trace) && !err)
            err = zr_fail(ZERO_ERR_IO, "%s could not be written", path);
    }
    return err;
}
