/* SPDX-License-Identifier: Apache-2.0 */
/* agree.c: compares the settings and plans of all ranks before the first collective. The message names what
 * differs. A fault that one rank finds is an error on all ranks. */
#include "comm/first_error.h"
#include "zero/context.h"

#include <ctype.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

/* This process's command line without the folder of its program. Ranks compare it to notice that they run
 * different programs. */
struct command_line {
    /* hash without decimal digits, which may be a rank, a port or a device; 0: not known */
    uint64_t hash;
    /* its beginning, on one line */
    char text[128];
};

/* Appends an argument with its control characters replaced. A text that does not fit ends in "...". */
static void append(struct command_line *out, const char *arg)
{
    size_t used = strlen(out->text), room = sizeof out->text - used;
    int n = snprintf(out->text + used, room, "%s%s", used ? " " : "", arg);
    for (char *p = out->text + used; *p; p++)
        if (iscntrl((unsigned char)*p))
            *p = '?';
    if (n >= (int)room)
        strcpy(out->text + sizeof out->text - sizeof "...", "...");
}

static void read_command_line(struct command_line *out)
{
    char *arg = NULL;
    size_t room = 0;
    memset(out, 0, sizeof *out);
    FILE *f = fopen("/proc/self/cmdline", "re");
    for (bool is_first = true; f && getdelim(&arg, &room, 0, f) > 0; is_first = false) {
        const char *slash = is_first ? strrchr(arg, '/') : NULL, *from = slash ? slash + 1 : arg;
        size_t n = 0;
        append(out, from);
        for (; *from; from++)
            if (!isdigit((unsigned char)*from))
                arg[n++] = *from;
        out->hash = XXH64(arg, n, out->hash + 1);
    }
    if (!f || !feof(f))
        out->hash = 0;
    free(arg);
    if (f)
        fclose(f);
}

/* What a rank sends to the others: its settings and its plan, as numbers and hashes. */
struct fingerprint {
    /* its own failure, or 0 */
    int32_t err;
    double version, hybrid, dp_replicate, dp_shard, stage, n_optim_groups, clip, grad_scale, grad_sum;
    double save_async, device, backend, copy_engine, check, init_from;
    double pp, cp, tp, schedule, stages_per_rank, activation_bytes;
    double grad_in_place, grad_accum_steps, max_grad_accum_steps, prefetch, param_budget_bytes, deterministic,
        wire_dtype, grad_sum_dtype, states, seed, n_order, n_tensors;
    uint64_t optim_hash, layout_hash, plan_hash, tied_hash, schedule_hash;
    uint64_t groups[ZR_MAX_MEMORY_GROUPS]; /* memory control groups with a limit; 0: none */
    int64_t host_bytes;
    /* These need not be equal, but rarely differ on purpose. */
    uint64_t sources;
    int64_t save_keep, trace, timeout_ms;
    struct command_line command;
};

/* Fields that must be equal on all ranks. Causes stand before their consequences, because the first
 * difference is reported. */
#define FINGERPRINT_FIELDS(X)                                                                                \
    X(version)                                                                                               \
    X(device)                                                                                                \
    X(backend)                                                                                               \
    X(pp)                                                                                                    \
    X(cp)                                                                                                    \
    X(tp)                                                                                                    \
    X(schedule)                                                                                              \
    X(activation_bytes)                                                                                      \
    X(hybrid)                                                                                                \
    X(dp_replicate)                                                                                          \
    X(dp_shard)                                                                                              \
    X(stage)                                                                                                 \
    X(n_optim_groups)                                                                                        \
    X(clip)                                                                                                  \
    X(grad_scale)                                                                                            \
    X(grad_sum)                                                                                              \
    X(grad_accum_steps)                                                                                      \
    X(max_grad_accum_steps)                                                                                  \
    X(grad_in_place)                                                                                         \
    X(prefetch)                                                                                              \
    X(param_budget_bytes)                                                                                    \
    X(deterministic)                                                                                         \
    X(wire_dtype)                                                                                            \
    X(grad_sum_dtype)                                                                                        \
    X(states)                                                                                                \
    X(seed)                                                                                                  \
    X(save_async)                                                                                            \
    X(init_from)                                                                                             \
    X(copy_engine)                                                                                           \
    X(check)

static void fill_fingerprint(const struct zero_ctx *z, bool failed, struct fingerprint *c)
{
    memset(c, 0, sizeof *c);
    for (int i = 0; i < z->memory.n_groups; i++)
        c->groups[i] = z->memory.group[i].id;
    c->stages_per_rank = z->config.user.pipeline.stages_per_rank;
    c->sources = zr_source_hash();
    c->save_keep = z->config.user.checkpoint.save_keep;
    c->trace = z->config.user.debug.trace;
    c->timeout_ms = z->config.user.launch.timeout_ms;
    read_command_line(&c->command);
    if (failed)
        return;
    const struct zr_options *o = &z->config.options;
    c->host_bytes = zr_memory_host_bytes(z);
    c->version = ZERO_VERSION_MAJOR * 1e6 + ZERO_VERSION_MINOR * 1e3 + ZERO_VERSION_PATCH;
    c->device = z->config.user.device;
    c->backend = zr_backend_number(z->backend);
    c->copy_engine = z->config.user.launch.copy_engine;
    c->init_from = z->config.user.init_from;
    c->pp = o->pp;
    c->cp = o->cp;
    c->tp = o->tp;
    c->schedule = z->config.user.pipeline.schedule;
    c->activation_bytes = (double)z->config.user.pipeline.activation_bytes;
    c->hybrid = z->config.user.hybrid;
    c->dp_replicate = z->config.place.n_dp_replicate;
    c->dp_shard = z->config.place.n_dp_shard;
    c->stage = o->stage;
    c->n_optim_groups = o->n_optims - 1;
    c->optim_hash = XXH64(o->optim, (size_t)o->n_optims * sizeof *o->optim, 0);
    c->clip = (double)o->clip;
    c->grad_scale = o->grad_scale;
    c->grad_sum = o->grad_sum;
    c->grad_accum_steps = o->grad_accum_steps;
    c->max_grad_accum_steps = zr_most_micro_batches(o);
    c->grad_in_place = o->grad_in_place;
    c->prefetch = o->prefetch;
    c->param_budget_bytes = (double)o->param_budget_bytes;
    c->deterministic = o->deterministic;
    c->wire_dtype = o->wire_dtype;
    c->grad_sum_dtype = o->grad_sum_dtype;
    c->states = o->states;
    c->seed = (double)o->seed;
    c->n_order = o->n_order;
    c->save_async = o->save_async;
    /* At other stages one rank may use check mode alone. At stage 3 check mode changes the plan. */
    bool of_all = z->plan->placement.shards_params || z->plan->hop[ZR_OUTER].sums_whole || o->tp > 1 ||
                  o->cp > 1 || zr_stages(z) > 1;
    c->check = z->layout->gaps || (o->check && of_all);
    c->n_tensors = z->layout->n_tensors;
    c->layout_hash = z->layout->hash;
    c->plan_hash = z->plan->hash;
    c->tied_hash = zr_ties_hash(z->layout);
    c->schedule_hash = zr_schedule_file_hash(z->schedule);
}

/* Returns the lowest rank of r's pipeline stage. The ranks must agree on pp. */
static int first_of_stage(const struct zero_ctx *z, const struct fingerprint *fingerprints, int r)
{
    int ranks_per_stage = z->world.world / (int)fingerprints[0].pp;
    return r / ranks_per_stage * ranks_per_stage;
}

/* Returns the number of tensors of the pipeline stage that has most. */
static int32_t most_tensors(const struct zero_ctx *z, const struct fingerprint *fingerprints)
{
    double most = 0;
    for (int r = 0; r < z->world.world; r++)
        most = fingerprints[r].n_tensors > most ? fingerprints[r].n_tensors : most;
    return (int32_t)most;
}

enum { NAME_CHARS = 64 };

/* Gives rank r's name of tensors[i] to all ranks. Other pipeline stages have other tensors at that index. */
static int name_on(struct zero_ctx *z, int32_t i, int32_t r, char out[NAME_CHARS])
{
    char mine[NAME_CHARS] = "", (*all)[NAME_CHARS] = calloc((size_t)z->world.world, sizeof *all);
    if (i < z->layout->n_tensors)
        snprintf(mine, sizeof mine, "%s", z->layout->tensors[i].name);
    if (!all)
        return zr_rendezvous_fail(
            z->rendezvous,
            zr_fail(ZERO_ERR_NOMEM, "ranks disagree on tensors[%d] (%s); no memory to find out which ranks",
                    i, mine));
    int err = zr_rendezvous_exchange(z->rendezvous, mine, sizeof mine, all);
    snprintf(out, NAME_CHARS, "%.*s", NAME_CHARS - 1, all[r]);
    free(all);
    return err;
}

/* Reports that tensors[i] differs between two ranks. */
static int fail_tensor(struct zero_ctx *z, int32_t i, int32_t r, int32_t first)
{
    char name[NAME_CHARS];
    ZR_TRY(name_on(z, i, r, name));
    return zr_fail(ZERO_ERR_MISMATCH,
                   "tensors[%d] (%s on rank %d): rank %d and rank %d differ in its name, shape, dtype, "
                   "tp_cut, tp_blocks, tp_size, unit, pp_stage, uses, flags, group, "
                   "granule or whether it has a gradient",
                   i, name, r, r, first);
}

/* Names the first tensor that differs between a rank and the first rank of its pipeline stage. All ranks have
 * the same hashes, so they find the same one. */
static int name_tensor(struct zero_ctx *z, const struct fingerprint *fingerprints)
{
    int32_t n = most_tensors(z, fingerprints), world = z->world.world;
    uint64_t *mine = calloc((size_t)n, sizeof *mine), *all = malloc((size_t)n * (size_t)world * sizeof *all);
    int err = ZERO_ERR_NOMEM;
    if (!mine || !all) {
        zr_fail(err, "ranks disagree on tensors; no memory to find out which ones");
        zr_rendezvous_fail(z->rendezvous, err);
        goto out;
    }
    for (int32_t i = 0; i < z->layout->n_tensors; i++)
        mine[i] = zr_tensor_hash(&z->layout->tensors[i], 0);
    err = zr_rendezvous_exchange(z->rendezvous, mine, (size_t)n * sizeof *mine, all);
    for (int32_t i = 0; !err && i < n; i++)
        for (int32_t r = 1; !err && r < world; r++) {
            int first = first_of_stage(z, fingerprints, r);
            if (all[(size_t)r * (size_t)n + (size_t)i] != all[(size_t)first * (size_t)n + (size_t)i])
                err = fail_tensor(z, i, r, first);
        }
    if (!err)
        err = zr_fail(ZERO_ERR_MISMATCH, "ranks have different layouts");
out:
    free(mine);
    free(all);
    return err;
}

/* Reports that a rank and the first rank of its pipeline stage, or of the world, have different values. */
static int fail_field(const char *field, double value, int rank, double first_value, int first, bool of_stage)
{
    bool is_optimizer = !strcmp(field, "optimizer"); /* The number of auto is 0. */
    struct zr_value_text a = zr_config_value_text(field, value), b = zr_config_value_text(field, first_value);
    return zr_fail(ZERO_ERR_MISMATCH, "%s is %s on rank %d and %s on rank %d; all ranks%s must have the same",
                   field, is_optimizer && value == 0 ? "optim.update" : a.text, rank,
                   is_optimizer && first_value == 0 ? "optim.update" : b.text, first,
                   of_stage ? " of a pipeline stage" : "");
}

#define GROUP_FIELDS(X)                                                                                      \
    X(optimizer)                                                                                             \
    X(n_states)                                                                                              \
    X(lr_scale)                                                                                              \
    X(beta1)                                                                                                 \
    X(beta2)                                                                                                 \
    X(eps)                                                                                                   \
    X(weight_decay)                                                                                          \
    X(masters)                                                                                               \
    X(moments)

/* Names the first number of a parameter group that differs between rank r and rank 0. */
static int compare_group(const struct zr_optim *group, const struct zr_optim *first_group, int32_t i, int r)
{
    int err = 0;
#define COMPARE(field)                                                                                       \
    if (!err && group->field != first_group->field)                                                          \
        err = fail_field(#field, (double)group->field, r, (double)first_group->field, 0, false);
    GROUP_FIELDS(COMPARE)
#undef COMPARE
    return err && i ? zr_fail_more(err, "optim_groups[%d]", i - 1) : err;
}

/* Names the parameter group that differs. All ranks have equally many groups. */
static int name_group(struct zero_ctx *z)
{
    const struct zr_options *o = &z->config.options;
    size_t bytes = (size_t)o->n_optims * sizeof *o->optim;
    struct zr_optim *all = malloc(bytes * (size_t)z->world.world);
    if (!all)
        return zr_rendezvous_fail(
            z->rendezvous,
            zr_fail(ZERO_ERR_NOMEM, "ranks disagree on parameter groups; no memory to find out which ones"));
    int err = zr_rendezvous_exchange(z->rendezvous, o->optim, bytes, all);
    for (int r = 1; !err && r < z->world.world; r++)
        for (int32_t i = 0; !err && i < o->n_optims; i++)
            err = compare_group(&all[r * o->n_optims + i], &all[i], i, r);
    free(all);
    return err;
}

/* Compares the number at this offset of the fingerprint among the ranks of each pipeline stage, which have
 * the same tensors. */
static int compare_in_stages(const struct zero_ctx *z, const struct fingerprint *fingerprints,
                             const char *field, size_t at)
{
    for (int r = 1; r < z->world.world; r++) {
        int first = first_of_stage(z, fingerprints, r);
        double value, first_value;
        memcpy(&value, (const char *)&fingerprints[r] + at, sizeof value);
        memcpy(&first_value, (const char *)&fingerprints[first] + at, sizeof first_value);
        if (value != first_value)
            return fail_field(field, value, r, first_value, first, fingerprints[0].pp > 1);
    }
    return 0;
}

/* Compares stages_per_rank. This comes before the errors of single ranks, which may be consequences. For
 * example, which tensors a rank checks depends on its pipeline stage. */
static int compare_stages(const struct zero_ctx *z, const struct fingerprint *fingerprints)
{
    for (int r = 1; r < z->world.world; r++)
        if (fingerprints[r].stages_per_rank != fingerprints[0].stages_per_rank)
            return fail_field("stages_per_rank", fingerprints[r].stages_per_rank, r,
                              fingerprints[0].stages_per_rank, 0, false);
    return 0;
}

/* Compares the tied tensors of the first and the last pipeline stage. The ranks of one stage have the same
 * ones. */
static int compare_ties(const struct zero_ctx *z, const struct fingerprint *fingerprints)
{
    int last = first_of_stage(z, fingerprints, z->world.world - 1);
    if (fingerprints[0].tied_hash == fingerprints[last].tied_hash)
        return 0;
    int without = !fingerprints[0].tied_hash ? 0 : !fingerprints[last].tied_hash ? last : -1;
    if (without >= 0)
        return zr_fail(ZERO_ERR_MISMATCH,
                       "rank %d has a tensor with ZERO_TIED, and rank %d has none: the first and the last "
                       "pipeline stage must both have it",
                       last - without, without);
    return zr_fail(ZERO_ERR_MISMATCH,
                   "rank %d and rank %d differ in their tensors with ZERO_TIED: the first and the last "
                   "pipeline stage must list the same ones in the same order, with equal name, shape, dtype, "
                   "tp_cut, ZERO_TP_PARTIAL and ZERO_WHOLE, both with or both without a gradient",
                   last, 0);
}

static int compare(struct zero_ctx *z, const struct fingerprint *fingerprints)
{
    int world = z->world.world;
    for (int r = 1; r < world; r++) {
#define COMPARE(field)                                                                                       \
    if (fingerprints[r].field != fingerprints[0].field)                                                      \
        return fail_field(#field, fingerprints[r].field, r, fingerprints[0].field, 0, false);
        FINGERPRINT_FIELDS(COMPARE)
#undef COMPARE
    }
    for (int r = 1; r < world; r++)
        if (fingerprints[r].optim_hash != fingerprints[0].optim_hash)
            return name_group(z);
    ZR_TRY(compare_in_stages(z, fingerprints, "n_tensors", offsetof(struct fingerprint, n_tensors)));
    for (int r = 1; r < world; r++)
        if (fingerprints[r].schedule_hash != fingerprints[0].schedule_hash)
            return zr_fail(ZERO_ERR_MISMATCH,
                           "rank %d and rank 0 read different schedules from schedule_file, or only one of "
                           "them has set it",
                           r);
    for (int r = 1; r < world; r++)
        if (fingerprints[r].layout_hash != fingerprints[first_of_stage(z, fingerprints, r)].layout_hash)
            return name_tensor(z, fingerprints);
    /* An order that the program does not declare follows from the tensors. */
    ZR_TRY(compare_in_stages(z, fingerprints, "n_order", offsetof(struct fingerprint, n_order)));
    for (int r = 1; r < world; r++)
        if (fingerprints[r].plan_hash != fingerprints[first_of_stage(z, fingerprints, r)].plan_hash)
            return zr_fail(ZERO_ERR_MISMATCH,
                           "order on rank %d differs from rank %d's; all ranks must make the same calls", r,
                           first_of_stage(z, fingerprints, r));
    return compare_ties(z, fingerprints);
}

/* Appends the values of rank r and rank 0. */
static int say_other(char *text, size_t n_text, const char *field, int64_t on_rank, int r, int64_t on_rank_0)
{
    return snprintf(text, n_text, "; %s is %lld on rank %d and %lld on rank 0", field, (long long)on_rank, r,
                    (long long)on_rank_0);
}

/* For each of these fields, rank 0 logs the first rank that differs from it. Training goes on. */
static void report_others(const struct zero_ctx *z, const struct fingerprint *fingerprints)
{
    char text[768] = "";
    size_t used = 0;
    bool sources = true, save_keep = true, trace = true, timeout_ms = true, command = true;
    for (int r = 1; z->world.rank == 0 && r < z->world.world; r++) {
        if (fingerprints[0].err || fingerprints[r].err) /* The configuration of that rank may be unknown. */
            continue;
        if (sources && fingerprints[r].sources != fingerprints[0].sources) {
            used += (size_t)snprintf(text + used, sizeof text - used,
                                     "; rank %d's libzero was built from different sources than rank 0's", r);
            sources = false;
        }
#define COMPARE(field)                                                                                       \
    if (field && fingerprints[r].field != fingerprints[0].field) {                                           \
        used += (size_t)say_other(text + used, sizeof text - used, #field, fingerprints[r].field, r,         \
                                  fingerprints[0].field);                                                    \
        field = false;                                                                                       \
    }
        COMPARE(save_keep)
        COMPARE(trace)
        COMPARE(timeout_ms)
#undef COMPARE
        const struct command_line *on_rank = &fingerprints[r].command, *on_rank_0 = &fingerprints[0].command;
        if (command && on_rank->hash && on_rank_0->hash && on_rank->hash != on_rank_0->hash) {
            used += (size_t)snprintf(text + used, sizeof text - used,
                                     "; the command line is \"%.127s\" on rank %d and \"%.127s\" on rank 0",
                                     on_rank->text, r, on_rank_0->text);
            command = false;
        }
    }
    if (used)
        zr_warn(z->config.options.log, "ranks differ, which is probably a mistake: %s", text + 2);
}

/* Records which ranks share memory with this one. Memory control groups are numbered by machine, so another
 * machine may use the same number. */
static void note_sharers(struct zero_ctx *z, const struct fingerprint *fingerprints)
{
    for (int r = 0; r < z->world.world; r++) {
        struct zr_sharer *s = &z->sharers[r];
        *s = (struct zr_sharer){.same_machine = zr_topology_same_machine(&z->topology, r),
                                .bytes = fingerprints[r].host_bytes};
        for (int i = 0; s->same_machine && i < z->memory.n_groups; i++)
            for (int k = 0; k < ZR_MAX_MEMORY_GROUPS; k++)
                if (fingerprints[r].groups[k] == z->memory.group[i].id)
                    s->groups |= UINT32_C(1) << i;
    }
}

/* Sends the error to the other ranks, which wait for this rank. */
static int no_memory_to_compare(struct zero_ctx *z, int local_err)
{
    int err =
        local_err ? local_err : zr_fail(ZERO_ERR_NOMEM, "no memory to compare %d ranks", z->world.world);
    return zr_rendezvous_fail(z->rendezvous, err);
}

int zr_agree_on_plan(struct zero_ctx *z, int local_err)
{
    zr_host_memory_look("", &z->memory);
    if (!z->rendezvous)
        return local_err;
    struct fingerprint mine, *all = calloc((size_t)z->world.world, sizeof *all);
    if (!all)
        return no_memory_to_compare(z, local_err);
    fill_fingerprint(z, local_err != 0, &mine);
    int err = zr_rendezvous_agree_and_exchange(z->rendezvous, local_err, &mine.err, sizeof mine, all);
    /* If the ranks could not exchange their fingerprints, all is zero, and these two find no difference. */
    report_others(z, all);
    if (compare_stages(z, all))
        err = ZERO_ERR_MISMATCH;
    if (!err)
        err = compare(z, all);
    if (!err)
        note_sharers(z, all);
    free(all);
    return err;
}

int zr_agree_on_success(struct zero_ctx *z, int local_err)
{
    return z->rendezvous ? zr_rendezvous_agree(z->rendezvous, local_err) : local_err;
}

struct success_in_run {
    ZR_FIRST_ERROR(ZR_EXCHANGE_BYTES - sizeof(int32_t));
};

int zr_agree_in_run(struct zero_ctx *z, int local_err)
{
    if (z->world.world == 1)
        return local_err;
    struct success_in_run mine, *all = z->from_all;
    zr_first_error_put(&mine, local_err);
    int err = zr_engine_exchange(z->engine, &mine, sizeof mine, all);
    return zr_first_error(err, &mine, all, z->world.world, z->world.rank);
}

int zr_agree_in_stage(struct zero_ctx *z, int local_err)
{
    if (z->mesh.pp == 1)
        return zr_agree_in_run(z, local_err);
    return local_err ? zr_engine_fail(z->engine, local_err, zr_error_text()) : 0;
}
