/* SPDX-License-Identifier: Apache-2.0 */
/* wrap_report.c: the log lines of a successful zero_wrap: what the configuration means here, and what is
 * allowed but rarely meant. */
#include "zero/checkpoint/save.h"
#include "zero/context.h"

/* Says how gradients are added up if cfg.memory.grad_in_place or grad_sum_dtype is set. */
static void report_how_gradients_add_up(struct zero_ctx *z)
{
    const struct zr_options *o = &z->config.options;
    if (o->grad_sum_dtype == ZERO_BF16 && o->deterministic && zr_most_micro_batches(o) > 1 &&
        z->world.rank == 0)
        zr_info(o->log,
                "grad_sum_dtype is bf16: the bits depend on grad_accum_steps, because sums are rounded after "
                "each micro-batch");
    if (!o->grad_in_place || zr_most_micro_batches(o) == 1)
        return;
    if (z->plan->spec.reduce_each)
        zr_info(o->log, "grad_in_place is 1, but a tensor has ZERO_GRAD_OVERWRITE, so every micro-batch is "
                        "reduced on its own");
    else
        zr_info(o->log, "grad_in_place is 1: the model adds up its %d micro-batches, so deterministic is off",
                zr_most_micro_batches(o));
}

/* The default stream is right only if the kernels of the model run there, which the library cannot see. */
static void report_default_stream(struct zero_ctx *z)
{
    if (z->config.user.device == ZERO_DEVICE_CUDA && !z->config.user.stream)
        zr_warn(
            z->config.options.log,
            "cfg.stream is NULL: the library works with CUDA's legacy default stream. Nothing orders it with "
            "kernels on another stream, such as one made with cudaStreamNonBlocking: set cfg.stream to the "
            "one that the model computes on (cudaStreamLegacy if the default stream is meant)");
}

/* Says why units are resident although the table does not declare it, and what to change. */
static const char *why_resident(const struct zr_options *o)
{
    if (o->param_budget_bytes >= 0)
        return " because param_budget_bytes holds them all; lower it, or use stage 2";
    if (o->prefetch > 0)
        return " because slots and shards would take as much memory; lower prefetch, or use stage 2";
    return " because slots and shards would take as much memory; use stage 2";
}

/* Reports a stage that shards nothing, or at stage 3 no parameters: likely a launcher was forgotten, or a
 * budget is larger than the model. At stage 3 that is a warning, since brackets then save no memory. Stages 1
 * and 2 cost no more than stage 0 on one rank, where programs are tried out, so there it is information. */
static void report_nothing_sharded(const struct zero_ctx *z)
{
    int32_t n = z->layout->n_units, n_resident = 0, n_declared = 0; /* declared: by flags of the table */
    char declared[64] = "";
    int stage = z->config.options.stage;
    struct zr_log *log = z->config.options.log;
    void (*say)(struct zr_log *, const char *, ...) = z->plan->placement.shards_params ? zr_warn : zr_info;
    if (stage == 0 || z->world.rank != 0) /* all ranks have the same plan */
        return;
    for (int32_t u = 0; u < n; u++) {
        n_resident += z->plan->resident[u];
        n_declared += z->layout->units[u].asked_resident;
    }
    if (n_declared)
        snprintf(declared, sizeof declared, ", %d of them by ZERO_RESIDENT or ZERO_TIED", n_declared);
    if (z->plan->world == 1 && z->world.world > 1)
        say(log,
            "stage %d shards nothing: each part of the model is on one rank (pp is %d, tp %d, the world %d)",
            stage, z->mesh.pp, z->mesh.tp, z->world.world);
    else if (z->plan->world == 1)
        say(log, "stage %d shards nothing: this is rank 0 of world 1, found in: %s (%s)", stage,
            z->world.source, z->world.size_from);
    else if (!z->plan->placement.shards_params)
        return;
    else if (n_resident == n)
        zr_warn(log, "stage 3 shards no parameters: all %d units are resident%s%s%s", n, declared,
                n_declared > 0 && n_declared < n ? ", the others" : "",
                n_declared == n ? "; use stage 2" : why_resident(&z->config.options));
    else if (n_resident)
        zr_info(log, "%d of %d units are resident%s", n_resident, n, declared);
}

/* Warns if the table cuts no tensor over tp, because then all tp ranks train the same whole model. */
static void report_uncut_tp(const struct zero_ctx *z)
{
    for (int32_t i = 0; i < z->layout->n_tensors; i++)
        if (z->layout->tensors[i].cut)
            return;
    if (z->mesh.tp > 1 && z->mesh.pp == 1 && z->world.rank == 0)
        zr_warn(z->config.options.log,
                "tp is %d, but no tensor has tp_cut: every rank of tp has the whole model", z->mesh.tp);
}

/* Logs how long pipeline stages wait for each other at the beginning and the end of a step. */
static void report_bubble(const struct zero_ctx *z)
{
    int n = z->config.options.grad_accum_steps, pp = z->mesh.pp;
    if (pp > 1 && n < pp && z->world.rank == 0)
        zr_warn(z->config.options.log,
                "grad_accum_steps is %d, but pp is %d: with fewer micro-batches than stages some stages wait "
                "most of the time (%d of %d parts of a step)",
                n, pp, pp - 1, pp - 1 + n);
}

/* wire_dtype makes gradients narrower on their way, never wider. All ranks have the same. */
static void report_wire_dtype(const struct zero_ctx *z)
{
    if (z->config.options.wire_dtype != ZERO_F32 || z->plan->world == 1 || z->world.rank != 0)
        return;
    for (int32_t i = 0; i < z->layout->n_flats; i++) {
        const struct zr_flat *f = &z->layout->flats[i];
        if (f->trainable && f->dtype != ZERO_F32) {
            zr_warn(z->config.options.log,
                    "wire_dtype is f32, but gradients of %s are sent as they are: wire_dtype never widens; "
                    "their sums are %s anyway",
                    zr_dtype_name(f->dtype), zr_dtype_name(f->sum_dtype));
            return;
        }
    }
}

/* Warns about a setting for bf16 tensors where none is trained. g: a parameter group; -1: all of them. */
static void warn_without_bf16(const struct zero_ctx *z, int32_t g, const char *field, const char *value)
{
    char group[32] = "";
    for (int32_t i = 0; i < z->layout->n_tensors; i++) {
        const struct zr_tensor *t = &z->layout->tensors[i];
        if (t->grad && t->dtype == ZERO_BF16 && (g < 0 || t->group == g))
            return;
    }
    if (g > 0)
        snprintf(group, sizeof group, "optim_groups[%d]: ", g - 1);
    if (zr_stages(z) == 1)
        zr_warn(z->config.options.log,
                "%s%s is %s, which has no effect: it is for bf16 tensors, and none is trained", group, field,
                value);
}

/* Warns about moments of a group whose optimizer has no states. */
static void warn_without_states(const struct zero_ctx *z, int32_t g, const char *moments)
{
    char group[32] = "";
    if (g > 0)
        snprintf(group, sizeof group, "optim_groups[%d]: ", g - 1);
    zr_warn(z->config.options.log, "%smoments is %s, which has no effect: the optimizer has no states", group,
            moments);
}

/* Lists the parameter groups and what they update, if there is more than one, or if a group does not keep
 * masters and states in fp32. */
static void report_groups(const struct zero_ctx *z)
{
    const struct zr_options *o = &z->config.options;
    for (int32_t g = 0; z->world.rank == 0 && g < o->n_optims; g++) {
        enum zero_optimizer kind = o->optim[g].optimizer;
        const struct zr_value_text masters = zr_config_value_text("masters", o->optim[g].masters),
                                   moments = zr_config_value_text("moments", o->optim[g].moments);
        bool shorter = o->optim[g].masters || o->optim[g].moments;
        char precision[96] = "";
        if (o->n_optims == 1 && !shorter)
            continue;
        if (shorter)
            snprintf(precision, sizeof precision, "; masters %s, moments %s", masters.text, moments.text);
        if (o->optim[g].masters)
            warn_without_bf16(z, g, "masters", masters.text);
        if (o->optim[g].moments && !o->optim[g].n_states)
            warn_without_states(z, g, moments.text);
        const char *source = kind ? zr_optimizer_kind(kind)->source : "the program's";
        char states[128] = "";
        int32_t n_tensors = 0, n_trained = 0;
        int64_t n_elems = 0;
        for (int32_t i = 0; i < z->layout->n_tensors; i++) {
            const struct zr_tensor *t = &z->layout->tensors[i];
            bool trained = t->group == g && t->grad;
            n_tensors += t->group == g && !t->buffer;
            n_trained += trained;
            n_elems += trained ? t->n_elems : 0;
        }
        snprintf(states, sizeof states, "%d states per weight", o->optim[g].n_states);
        if (kind)
            zr_optimizer_list_states(kind, o->optim[g].n_states, states, sizeof states);
        zr_info(o->log, "group %d: %s (%s) updates %d tensors of %lld elements; %s%s", g,
                kind ? zr_optimizer_kind(kind)->name : "optim.update", source, n_trained, (long long)n_elems,
                states, precision);
        if (g && !n_tensors && zr_stages(z) == 1)
            zr_warn(o->log, "optim_groups[%d] has no tensor: no zero_tensor.group is %d", g - 1, g);
    }
}

/* Reports a seed that nothing uses. */
static void report_seed(const struct zero_ctx *z)
{
    const struct zr_options *o = &z->config.options;
    if (o->seed && z->world.rank == 0 && !zr_rounds_at_random(z))
        zr_info(o->log, "seed is %lld, which has no effect: nothing is rounded at random",
                (long long)o->seed);
}

/* Reports the file of states of rank 0, and warns if it saves no memory. */
static void report_state_file(const struct zero_ctx *z)
{
    const struct zr_state_file *f = z->states;
    const struct zr_files *fs = f->file.fs;
    const int64_t buffers = z->plan->bytes[ZR_MEM_STATE_BUFFERS];
    struct zr_log *log = z->config.options.log;
    zr_info(log, "masters and states are in a file in %s: %lld bytes per rank", f->folder,
            (long long)f->bytes);
    if (fs->is_in_memory && fs->is_in_memory(fs->arg, f->file.fd))
        zr_warn(log, "states_dir %s keeps its files in memory; choose a folder on a disk", f->folder);
    if (buffers >= f->bytes)
        zr_warn(log,
                "states is file, but its buffers take %lld bytes of host memory, and the file has only %lld: "
                "states = %s takes no more memory",
                (long long)buffers, (long long)f->bytes, z->device->ops->host_memory ? "device" : "host");
}

/* Says where masters and states are, if that is not the device's memory. */
static void report_states(const struct zero_ctx *z)
{
    const struct zr_plan *p = z->plan;
    struct zr_log *log = z->config.options.log;
    if (z->world.rank == 0 && z->config.user.memory.states_dir && p->states != ZERO_STATES_FILE)
        zr_warn(log, "states_dir is set, but states is %s: it has no effect",
                zr_config_value_text("states", p->states).text);
    if (p->states == ZERO_STATES_DEVICE || z->world.rank != 0)
        return;
    if (p->states == ZERO_STATES_FILE && !p->file_bytes)
        zr_info(log, "states is file, but rank 0 keeps neither masters nor states, so it has no file");
    else if (p->states == ZERO_STATES_FILE)
        report_state_file(z);
    else if (z->device->ops->compute_on_caller)
        zr_info(log, "states is host, which has no effect: the device is the host");
    else
        zr_info(log, "masters and states are in host memory: %lld bytes per rank",
                (long long)(p->bytes[ZR_MEM_MASTER] + p->bytes[ZR_MEM_MOMENTS]));
}

void zr_wrap_report(struct zero_ctx *z)
{
    zr_info(z->config.options.log, "%s, %s, %lld bytes per rank for %lld parameters", z->plan->placement.name,
            zr_backend_path(z), (long long)z->plan->total_bytes, (long long)z->layout->n_params);
    report_nothing_sharded(z);
    report_uncut_tp(z);
    report_bubble(z);
    report_groups(z);
    report_seed(z);
    report_states(z);
    report_how_gradients_add_up(z);
    report_default_stream(z);
    report_wire_dtype(z);
    if (z->config.options.grad_sum_dtype == ZERO_BF16 && z->world.rank == 0)
        warn_without_bf16(z, -1, "grad_sum_dtype", "bf16");
}
