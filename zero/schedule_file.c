/* SPDX-License-Identifier: Apache-2.0 */
/* schedule_file.c: cfg.pipeline.schedule_file, a pipeline schedule of the program's own: read, and held
 * against what zero_next can give. That it can be run at all is for zr_pipeline_check to say. */
#include "shard/pipeline/pipeline.h"
#include "zero/context.h"

static int check_action(const struct zr_pipe_action *a, int32_t rank, int32_t n_ranks)
{
    char text[ZR_PIPE_TEXT];
    if (a->stage % n_ranks != rank)
        return zr_fail(ZR_ERR_NOTSUP,
                       "rank %d: %s; allowed: actions of stage %d, and with stages_per_rank above 1 of every "
                       "%dth after it",
                       rank, zr_pipe_text(*a, text), rank, n_ranks);
    if (a->with_next)
        return zr_fail(ZR_ERR_NOTSUP,
                       "rank %d: %s overlaps another action; allowed: F, B, I and W, one after the other",
                       rank, zr_pipe_text(*a, text));
    return 0;
}

static int check_actions(const struct zr_pipeline *p)
{
    int err = 0;
    for (int32_t r = 0; r < p->n_ranks; r++)
        for (int64_t i = 0; i < p->rows[r].n && !err; i++)
            err = check_action(&p->rows[r].at[i], r, p->n_ranks);
    return err;
}

int zr_schedule_read(const struct zr_config *c, struct zr_pipeline **out)
{
    const char *path = c->user.pipeline.schedule_file;
    int32_t pp = c->options.pp, n_micro = c->options.grad_accum_steps;
    int err = zr_pipeline_read(out, path);
    if (err)
        return zr_fail_more(err, "schedule_file");
    const struct zr_pipeline *p = *out;
    if (c->user.pipeline.schedule != ZERO_SCHEDULE_1F1B)
        err = zr_fail(ZR_ERR_ARG, "schedule is set too; allowed: one of schedule and schedule_file");
    else if (p->n_ranks != pp)
        err = zr_fail(ZR_ERR_ARG, "%d ranks; allowed: a line for each of pp, which is %d", p->n_ranks, pp);
    else if (p->n_stages != pp * c->user.pipeline.stages_per_rank)
        err = zr_fail(ZR_ERR_ARG, "%d stages; allowed: %d, as pp is %d and stages_per_rank %d", p->n_stages,
                      pp * c->user.pipeline.stages_per_rank, pp, c->user.pipeline.stages_per_rank);
    else if (p->n_micro_batches != n_micro)
        err = zr_fail(ZR_ERR_ARG, "%d micro-batches; allowed: grad_accum_steps, which is %d",
                      p->n_micro_batches, n_micro);
    else
        err = check_actions(p);
    return err ? zr_fail_more(err, "schedule_file %s", path) : 0;
}
