/* SPDX-License-Identifier: Apache-2.0 */
/* mesh.c: projects a step of a job on the mesh of dp, cp, tp and pp.
 *
 * Ranks are numbered as struct zero_mesh says: those of a tp group are neighbours, and pipeline stages are
 * world / pp apart. In this file, a rank of the pipeline is a number from 0 to pp - 1.
 *
 *   dp    runs on the virtual clock (run.c), for each kind of rank: the first, the last, those between
 *   tp    is time that compute waits, by formula: 2 (tp - 1) / tp of the bytes over the slower kind of links,
 *         and a latency for each step of the ring
 *   cp    is counted as tp is, for gathers of keys and values and sums of their gradients; its ranks are
 *         tp apart, and shard parameters together with those of dp
 *   pp    runs the library's schedule on its virtual clock (bench/schedule/pipeline_stages.h). A forward and
 *         backward pass together take as long as one more micro-batch takes in the run of dp; each stage's
 *         share is in proportion to its compute. What happens once in a step (the first gather, the last
 *         reduction, the update) is added at the end, from the rank where it takes longest. */
#include "bench/scale/scale.h"
#include "bench/schedule/pipeline_stages.h"

#include "kernels/device.h"

#include <math.h>

/* The times of one rank of the pipeline. */
struct rank_time {
    /* seconds of one more micro-batch, and of what happens once in a step */
    double micro_s, once_s;
    struct scale_part_time job_run; /* a run that takes as much memory as the job */
    int64_t wire_bytes, outer_bytes;
};

struct mesh_run {
    const struct scale_job *j;
    int64_t tp, cp, pp, dp, per_rank;
    /* (pp) like[r] is the lowest rank with the same layers as rank r (pipe_find_alike). times has entries for
     * those ranks only */
    int64_t like[PIPE_MAX_STAGES];
    struct rank_time times[PIPE_MAX_STAGES];
    int n_simulated;
};

static int64_t n_stages(const struct mesh_run *r)
{
    return r->pp * r->per_rank;
}

bool scale_has_mesh(const struct scale_job *job)
{
    return job->tp > 1 || job->cp > 1 || job->pp > 1 || job->activations;
}

int64_t scale_element_bytes(const struct scale_job *j)
{
    return j->dtype == ZERO_BF16 ? 2 : 4;
}

int64_t scale_own_tokens(const struct scale_job *j)
{
    return j->batch * j->context / (j->cp > 1 ? j->cp : 1);
}

int64_t scale_move_bytes(const struct scale_job *job)
{
    return scale_own_tokens(job) * job->model->channels * scale_element_bytes(job);
}

/* Seconds of a ring of n ranks, `stride` apart, that goes through `bytes` so many times. */
static double ring_s(const struct scale_job *job, int64_t n, int64_t stride, int64_t bytes, int times)
{
    const struct scale_machine *m = job->machine;
    int64_t on_host = stride < m->per_host ? m->per_host / stride : 1, hosts = n > on_host ? n / on_host : 1,
            near = n / hosts - 1;
    double passed = times * (double)(n - 1) / (double)n * (double)bytes;
    double near_s = near ? passed / (m->near_bytes_per_s * job->link_fraction) : 0;
    double far_s = hosts > 1 ? passed / ((double)(near + 1) * m->far_bytes_per_s * job->link_fraction) : 0;
    double steps_ns =
        times * ((double)(n - hosts) * (double)m->near_ns + (double)(hosts - 1) * (double)m->far_ns);
    return fmax(near_s, far_s) + steps_ns * 1e-9;
}

double scale_all_reduce_s(const struct scale_job *job, int64_t bytes)
{
    return ring_s(job, job->tp, 1, bytes, 2);
}

/* Elements of a layer's keys and values, of all ranks of cp. */
static int64_t kv_elems(const struct scale_job *j)
{
    return j->batch * j->context * scale_kv_elems(j->model, j->tp > 1 ? j->tp : 1);
}

double scale_gather_s(const struct scale_job *job, int64_t element_bytes)
{
    return ring_s(job, job->cp, job->tp > 1 ? job->tp : 1, kv_elems(job) * element_bytes, 1);
}

/* ---- what goes together ---- */

static int check_tp(const struct scale_job *j)
{
    const struct scale_model *m = j->model;
    long long tp = (long long)j->tp;
    if (j->tp <= 1)
        return 0;
    if (m->heads % j->tp || m->kv_heads % j->tp || m->hidden % j->tp)
        return zr_fail(ZERO_ERR_ARG,
                       "--tp: %lld parts do not divide the %lld heads, %lld of keys and values, and %lld "
                       "channels between of %s",
                       tp, (long long)m->heads, (long long)m->kv_heads, (long long)m->hidden, m->name);
    if (j->tp > j->machine->per_host ? j->tp % j->machine->per_host : j->machine->per_host % j->tp)
        return zr_fail(ZERO_ERR_ARG,
                       "--tp: %lld parts lie on hosts of %d GPUs unevenly: allowed is what divides these, or "
                       "several hosts",
                       tp, j->machine->per_host);
    return 0;
}

/* Rows are cut in zigzag order. */
static int check_cp(const struct scale_job *j)
{
    long long cp = (long long)j->cp;
    int64_t n = (j->tp > 1 ? j->tp : 1) * j->cp;
    if (j->cp <= 1)
        return 0;
    if (j->context % (2 * j->cp))
        return zr_fail(ZERO_ERR_ARG,
                       "--cp: the zigzag order cuts a row in %lld parts, which do not divide the %lld tokens",
                       2 * cp, (long long)j->context);
    if (n > j->machine->per_host ? n % j->machine->per_host : j->machine->per_host % n)
        return zr_fail(ZERO_ERR_ARG,
                       "--cp: %lld ranks with --tp lie on hosts of %d GPUs unevenly: allowed is what divides "
                       "these, or several hosts",
                       (long long)n, j->machine->per_host);
    return 0;
}

static int check_mesh(const struct mesh_run *r)
{
    const struct scale_job *j = r->j;
    int err = check_tp(j);
    err = err ? err : check_cp(j);
    if (err)
        return err;
    bool several = r->per_rank > 1;
    if (n_stages(r) > j->model->layers)
        return zr_fail(ZERO_ERR_ARG, "--pp%s: %lld stages are more than the %lld layers of %s",
                       several ? " and --stages-per-rank" : "", (long long)n_stages(r),
                       (long long)j->model->layers, j->model->name);
    if (r->cp > 1 && j->world % (r->tp * r->cp * r->pp))
        return zr_fail(
            ZERO_ERR_ARG,
            "--cp: %lld ranks for each row, in %lld parts and %lld %s, do not divide the %lld GPUs",
            (long long)r->cp, (long long)r->tp, (long long)r->pp, several ? "GPUs with stages" : "stages",
            (long long)j->world);
    if (j->world % (r->tp * r->pp))
        return zr_fail(
            ZERO_ERR_ARG, "--pp, --tp: %lld %s of layers in %lld parts do not divide the %lld GPUs",
            (long long)r->pp, several ? "GPUs with stages" : "stages", (long long)r->tp, (long long)j->world);
    return 0;
}

/* ---- ranks and their stages ---- */

static int64_t layers_of(const struct mesh_run *r, int64_t stage)
{
    return pipe_layers_of(r->j->model->layers, n_stages(r), stage);
}

static const struct rank_time *time_of(const struct mesh_run *r, int64_t rank)
{
    return &r->times[r->like[rank]];
}

/* The first stage also has the embedding, and the last stage the head. */
static struct scale_units units_of_stage(const struct mesh_run *r, int64_t stage)
{
    int32_t before = 0;
    if (r->pp == 1)
        return (struct scale_units){0, scale_n_units(r->j->model)};
    for (int64_t s = 0; s < stage; s++)
        before += (int32_t)layers_of(r, s);
    return (struct scale_units){.first = stage ? before + 1 : 0,
                                .n =
                                    (int32_t)layers_of(r, stage) + (stage == 0) + (stage == n_stages(r) - 1)};
}

static struct scale_part part_of(const struct mesh_run *r, int64_t rank, int64_t accum, bool free_links)
{
    const struct scale_model *m = r->j->model;
    bool tied_apart = r->pp > 1 && scale_n_units(m) == m->layers + 1;
    struct scale_part part = {.n_own = (int32_t)r->per_rank,
                              .dp = r->dp,
                              .accum = accum,
                              .free_links = free_links,
                              .tied_head = tied_apart && rank == r->pp - 1,
                              .tied_embedding = tied_apart && rank == 0};
    for (int64_t k = 0; k < r->per_rank; k++)
        part.own[k] = units_of_stage(r, k * r->pp + rank);
    return part;
}

/* Takes the difference between runs of two and of four micro-batches. */
static int time_rank(struct mesh_run *r, int64_t rank, bool free_links)
{
    struct rank_time *t = &r->times[rank];
    struct scale_part two = part_of(r, rank, 2, free_links), four = part_of(r, rank, 4, free_links),
                      same = part_of(r, rank, r->j->accum < 2 ? 1 : 2, free_links);
    struct scale_part_time a, b;
    if (r->like[rank] != rank)
        return 0;
    int err = scale_part_run(r->j, &two, &a);
    if (!err)
        err = scale_part_run(r->j, &four, &b);
    if (!err)
        err = scale_part_run(r->j, &same, &t->job_run);
    if (err)
        return err;
    t->micro_s = (b.step_s - a.step_s) / 2;
    t->once_s = fmax(a.step_s - 2 * t->micro_s, 0);
    t->wire_bytes = a.wire_bytes + (r->j->accum - 2) * (b.wire_bytes - a.wire_bytes) / 2;
    t->outer_bytes = a.outer_bytes + (r->j->accum - 2) * (b.outer_bytes - a.outer_bytes) / 2;
    r->n_simulated += a.n_simulated;
    return 0;
}

/* The time to move activations to the next stage, taken between the two ranks that are furthest apart. Two
 * stages inside one host use its links. The last rank of the pipeline sends to the first. */
static int64_t move_ns(const struct mesh_run *r, int64_t stage)
{
    const struct scale_machine *m = r->j->machine;
    int64_t rank = stage % r->pp, n = r->tp * r->dp, from = rank == r->pp - 1 ? 0 : rank;
    int64_t first = from * n, last = (rank == r->pp - 1 ? r->pp : rank + 2) * n - 1;
    bool near = first / m->per_host == last / m->per_host;
    double rate = (near ? m->near_bytes_per_s : m->far_bytes_per_s) * r->j->link_fraction;
    return (near ? m->near_ns : m->far_ns) + (int64_t)((double)scale_move_bytes(r->j) / rate * 1e9);
}

/* Bytes of a micro-batch with `elems` elements for each token. */
static int64_t bytes_of_tokens(const struct scale_job *j, int64_t elems)
{
    return elems * scale_own_tokens(j) * scale_element_bytes(j);
}

/* Bytes of activations that a stage keeps for one micro-batch. */
static int64_t kept_bytes(const struct mesh_run *r, int64_t stage)
{
    const struct scale_job *j = r->j;
    int64_t C = j->model->channels, layers = layers_of(r, stage);
    int64_t elems = (j->recompute ? layers * C : layers * scale_kept_elems(j->model, r->tp)) - C;
    elems += stage == 0 ? C : 0;
    elems += stage == n_stages(r) - 1 ? 2 * C + (j->model->vocab + r->tp - 1) / r->tp : 0;
    return bytes_of_tokens(j, elems);
}

/* Runs the pipeline's schedule, given the time of each stage's forward pass. */
static int run_schedule(const struct mesh_run *r, const int32_t *forward_ns, bool free_links,
                        struct pipe_result *pipe)
{
    static int64_t moves_ns[PIPE_MAX_STAGES * PIPE_MAX_OWN], kept[PIPE_MAX_STAGES * PIPE_MAX_OWN];
    for (int64_t s = 0; s < n_stages(r); s++) {
        moves_ns[s] = move_ns(r, s);
        kept[s] = kept_bytes(r, s);
    }
    const struct pipe_times times = {.schedule = r->j->schedule,
                                     .pp = (int32_t)r->pp,
                                     .per_rank = (int32_t)r->per_rank,
                                     .micro_batches = (int32_t)r->j->accum,
                                     .forward_ns = forward_ns,
                                     .backward = r->j->recompute ? 3 : 2,
                                     .moves_ns = free_links ? NULL : moves_ns,
                                     .kept_bytes = kept};
    int err = pipe_simulate(&times, pipe);
    return err ? zr_fail_more(err, "--pp") : 0;
}

static int run_stages(struct mesh_run *r, bool free_links, struct pipe_result *pipe, double *step_s)
{
    static int32_t forward_ns[PIPE_MAX_STAGES * PIPE_MAX_OWN];
    double once_s = 0;
    int err = 0, forwards = r->j->recompute ? 4 : 3; /* forward plus backward, in forward passes */
    for (int64_t rank = 0; !err && rank < r->pp; rank++) {
        err = time_rank(r, rank, free_links);
        once_s = fmax(once_s, time_of(r, rank)->once_s);
    }
    for (int64_t s = 0; !err && s < n_stages(r); s++) {
        const struct rank_time *t = time_of(r, s % r->pp);
        double ns = t->micro_s * t->job_run.share[s / r->pp] * 1e9 / forwards;
        forward_ns[s] = (int32_t)fmin(fmax(ns, 1), 1e9);
        if (ns > 1e9)
            err = zr_fail(ZERO_ERR_ARG,
                          "--pp: a stage's forward takes %.3g s, more than 1 s: --batch or --context is too "
                          "large, or --compute too small",
                          ns * 1e-9);
    }
    err = err ? err : run_schedule(r, forward_ns, free_links, pipe);
    *step_s = err ? 0 : (double)pipe->span_ns * 1e-9 + once_s;
    return err;
}

/* ---- bytes ---- */

/* Buffers of attention over cp: keys and values as they arrive and in order, and their gradients in fp32. */
static int64_t cp_room(const struct mesh_run *r)
{
    return r->cp > 1 ? 2 * kv_elems(r->j) * (scale_element_bytes(r->j) + (int64_t)sizeof(float)) : 0;
}

/* The activations that the rank's stages keep. With recomputation, one layer's are there in full too. */
static int64_t activation_bytes(const struct mesh_run *r, int64_t rank, const struct pipe_result *pipe)
{
    const struct scale_job *j = r->j;
    return pipe->kept_bytes[rank] + r->per_rank * cp_room(r) +
           (j->recompute ? bytes_of_tokens(j, scale_kept_elems(j->model, r->tp)) : 0);
}

/* Memory between stages: message slots, and, if the embedding is tied, its copy and what its gradients
 * pass through (a slot, and an fp32 sum if there are several micro-batches). */
static int64_t bytes_between(const struct mesh_run *r, int64_t rank, const struct pipe_result *pipe)
{
    const struct scale_job *j = r->j;
    const struct scale_model *m = j->model;
    bool tied = scale_n_units(m) == m->layers + 1, outer = rank == 0 || rank == r->pp - 1;
    int64_t slot = (scale_move_bytes(j) + 4095) / 4096 * 4096;
    int64_t words = (m->vocab + r->tp - 1) / r->tp * m->channels * scale_element_bytes(j);
    int64_t bytes = pipe->n_slots * slot;
    if (r->pp == 1 || !tied)
        return bytes;
    int64_t sum = j->accum > 1 ? words / scale_element_bytes(j) * (int64_t)sizeof(float) : 0;
    return bytes + (outer ? words + sum : 0) + (rank == r->pp - 1 ? words : 0);
}

/* All-reduces over tp in one micro-batch. */
static int64_t n_sums(const struct mesh_run *r, int64_t rank)
{
    int64_t layers = pipe_layers_of_rank(r->j->model->layers, r->pp, r->per_rank, rank);
    return layers * (r->j->recompute ? 6 : 4) + (rank == 0) + (rank == r->pp - 1);
}

static int64_t tp_bytes(const struct mesh_run *r, int64_t rank)
{
    return r->j->accum * n_sums(r, rank) * (2 * (r->tp - 1) * (scale_move_bytes(r->j) / r->tp));
}

static int64_t cp_bytes(const struct mesh_run *r, int64_t rank)
{
    int64_t layers = pipe_layers_of_rank(r->j->model->layers, r->pp, r->per_rank, rank);
    int64_t each = scale_element_bytes(r->j) * (r->j->recompute ? 3 : 2) + (int64_t)sizeof(float);
    return r->j->accum * layers * (r->cp - 1) * (kv_elems(r->j) / r->cp) * each;
}

/* Each stage of a rank receives from the stage before it and from the one after it. The model's first and
 * last stages have one neighbour. */
static int64_t pp_bytes(const struct mesh_run *r, int64_t rank)
{
    int64_t n = 2 * r->per_rank - (rank == 0) - (rank == r->pp - 1);
    return r->j->accum * scale_move_bytes(r->j) * n;
}

/* Reports the memory of the fullest rank, and the traffic of the rank that receives most. */
static void take_bytes(const struct mesh_run *r, const struct pipe_result *pipe, struct scale_result *out)
{
    int64_t most = -1;
    for (int64_t k = 0; k < r->pp; k++) {
        const struct rank_time *t = time_of(r, k);
        int64_t library = t->job_run.memory_bytes + bytes_between(r, k, pipe);
        int64_t acts = activation_bytes(r, k, pipe);
        int64_t received = t->wire_bytes + tp_bytes(r, k) + cp_bytes(r, k) + pp_bytes(r, k);
        if (library + acts > most) {
            most = library + acts;
            out->memory_bytes = library;
            out->host_bytes = t->job_run.host_bytes;
            out->activation_bytes = acts;
        }
        if (received > out->received_bytes) {
            out->received_bytes = received;
            out->outer_bytes = t->outer_bytes;
            out->tp_bytes = tp_bytes(r, k);
            out->cp_bytes = cp_bytes(r, k);
            out->pp_bytes = pp_bytes(r, k);
        }
    }
}

/* ---- a step ---- */

/* Without a pipeline the step itself is simulated, with all its micro-batches. */
static int run_whole(struct mesh_run *r, bool free_links, struct pipe_result *pipe, double *step_s)
{
    struct scale_part part = part_of(r, 0, r->j->accum, free_links);
    struct rank_time *t = &r->times[0];
    int err = scale_part_run(r->j, &part, &t->job_run);
    *pipe = (struct pipe_result){.kept_bytes = {kept_bytes(r, 0)}};
    *step_s = t->job_run.step_s;
    t->wire_bytes = t->job_run.wire_bytes;
    t->outer_bytes = t->job_run.outer_bytes;
    r->n_simulated += t->job_run.n_simulated;
    return err;
}

int scale_run(const struct scale_job *job, struct scale_result *out)
{
    static struct mesh_run r;
    static struct pipe_result pipe, unhindered;
    double step_s = 0, free_s = 0;
    r = (struct mesh_run){.j = job,
                          .tp = job->tp > 1 ? job->tp : 1,
                          .cp = job->cp > 1 ? job->cp : 1,
                          .pp = job->pp > 1 ? job->pp : 1,
                          .per_rank = job->stages_per_rank > 1 ? job->stages_per_rank : 1};
    int (*const run)(struct mesh_run *, bool, struct pipe_result *, double *) =
        r.pp > 1 ? run_stages : run_whole;
    int err = check_mesh(&r);
    r.dp = err ? 1 : job->world / (r.tp * r.pp);
    if (!err)
        pipe_find_alike(r.like, job->model->layers, r.pp, r.per_rank);
    if (!err)
        err = run(&r, true, &unhindered, &free_s);
    r.n_simulated = 0;
    if (!err)
        err = run(&r, false, &pipe, &step_s);
    if (err)
        return err;
    double tokens = (double)(scale_own_tokens(job) * job->accum) / (double)(r.tp * r.pp);
    *out = (struct scale_result){.step_s = step_s,
                                 .tokens_per_s_per_gpu = tokens / step_s,
                                 .exposed_s = round((step_s - free_s) * 1e9) / 1e9, /* whole nanoseconds */
                                 .mfu = scale_flop_per_token(job->model, job->context) * tokens / step_s /
                                        job->machine->flop_per_s,
                                 .n_simulated = r.n_simulated,
                                 .bubble = pipe.bubble * (double)pipe.span_ns * 1e-9 / step_s};
    take_bytes(&r, &pipe, out);
    if (!scale_has_mesh(job))
        out->activation_bytes = 0;
    return 0;
}
