/* SPDX-License-Identifier: Apache-2.0 */
/* config.c: resolves a configuration. It fills in defaults, checks the head (size and version) that tells
 * which zero.h the program was built with, and checks what depends on several fields. */
#include "zero/config.h"
#include "comm/meet/rendezvous.h"
#include "kernels/alloc.h"
#include "shard/plan.h"
#include "shard/tp_cut.h"

#include <stdlib.h>
#include <string.h>

static bool is_name(const char *name)
{
    size_t n = strnlen(name, ZR_NAME_CHARS + 1);
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)name[i] < ' ' || name[i] == 0x7f)
            return false;
    return n <= ZR_NAME_CHARS;
}

void zr_config_print_name(const char *name, char *out, size_t n_out)
{
    size_t used = 0;
    out[0] = 0;
    for (; name && *name; name++) {
        unsigned char c = (unsigned char)*name;
        bool is_control = c < ' ' || c == 0x7f;
        size_t n = is_control ? 4 : 1;
        if (used + n >= n_out)
            return;
        used += (size_t)snprintf(out + used, n_out - used, is_control ? "\\x%02x" : "%c", c);
    }
}

static int check_name(const struct zero_config *c)
{
    char shown[128];
    if (!c->launch.name || is_name(c->launch.name))
        return 0;
    zr_config_print_name(c->launch.name, shown, sizeof shown);
    return zr_fail(ZERO_ERR_ARG,
                   "name is \"%s\"; allowed: up to %d characters, none of them a control character", shown,
                   ZR_NAME_CHARS);
}

static int check_together(const struct zero_config *c)
{
    int32_t most = c->max_grad_accum_steps ? c->max_grad_accum_steps : c->grad_accum_steps;
    if (c->launch.world > 0 && c->launch.rank >= c->launch.world)
        return zr_fail(ZERO_ERR_ARG, "rank is %d; allowed: 0 to %d (world is %d)", c->launch.rank,
                       c->launch.world - 1, c->launch.world);
    if (c->launch.world == 0 && c->launch.rank != 0)
        return zr_fail(ZERO_ERR_ARG,
                       "rank is %d but world is 0; allowed: both given, or both 0 to look in the environment",
                       c->launch.rank);
    if (c->max_grad_accum_steps && c->max_grad_accum_steps < c->grad_accum_steps)
        return zr_fail(ZERO_ERR_ARG,
                       "max_grad_accum_steps is %d but grad_accum_steps is %d; allowed: 0, or at least "
                       "grad_accum_steps",
                       c->max_grad_accum_steps, c->grad_accum_steps);
    if (c->memory.grad_in_place && c->deterministic > 0 && most > 1)
        return zr_fail(
            ZERO_ERR_ARG,
            "grad_in_place is 1 and deterministic is 1, with %sgrad_accum_steps %d: gradients that "
            "the model adds up itself are not added in the fixed order that deterministic "
            "promises; set only one of the two",
            c->max_grad_accum_steps ? "max_" : "", most);
    if (!c->init != (c->init_from != ZERO_INIT_CALL))
        return zr_fail(ZERO_ERR_ARG,
                       "init is %s but init_from is %s; allowed: both init and ZERO_INIT_CALL, or neither",
                       c->init ? "set" : "NULL", c->init ? "not ZERO_INIT_CALL" : "ZERO_INIT_CALL");
    if (c->launch.nccl_comm && c->device != ZERO_DEVICE_CUDA)
        return zr_fail(ZERO_ERR_ARG,
                       "nccl_comm is set but device is host; allowed: device cuda, or nccl_comm NULL");
    if (c->launch.mpi_comm && c->device != ZERO_DEVICE_HOST)
        return zr_fail(ZERO_ERR_ARG,
                       "mpi_comm is set but device is cuda; allowed: device host, or mpi_comm NULL");
    if (c->launch.exchange && !c->launch.world)
        return zr_fail(ZERO_ERR_ARG, "exchange is set but world is 0; allowed: rank and world given with it");
    if (c->launch.exchange && (c->launch.mpi_comm || c->launch.nccl_comm))
        return zr_fail(ZERO_ERR_ARG, "exchange and %s are set; allowed: one of them, as each lets ranks meet",
                       c->launch.mpi_comm ? "mpi_comm" : "nccl_comm");
    if (c->memory.states == ZERO_STATES_FILE && c->checkpoint.save_async)
        return zr_fail(ZERO_ERR_ARG,
                       "states is file and save_async is 1; allowed: one of them, as a snapshot "
                       "has masters and states in memory");
    if (c->memory.n_order < 0)
        return zr_fail(ZERO_ERR_ARG, "n_order is %d; allowed: 0 and more", c->memory.n_order);
    if (!c->memory.order != (c->memory.n_order == 0))
        return zr_fail(ZERO_ERR_ARG, "order is %s but n_order is %d; allowed: both given, or NULL and 0",
                       c->memory.order ? "set" : "NULL", c->memory.n_order);
    return 0;
}

static const char *phase_name(const struct zero_call *call)
{
    return zr_phase_name(call->phase);
}

static int check_call(const struct zero_call *call, int i)
{
    if (call->unit < 0)
        return zr_fail(ZERO_ERR_ARG, "order[%d].unit is %d; allowed: 0 and more", i, call->unit);
    if (call->phase < ZERO_FORWARD || call->phase > ZERO_BACKWARD_WEIGHT)
        return zr_fail(ZERO_ERR_ARG,
                       "order[%d].phase is %d; allowed: 1 (ZERO_FORWARD), 2 (ZERO_BACKWARD), "
                       "3 (ZERO_BACKWARD_INPUT), 4 (ZERO_BACKWARD_WEIGHT)",
                       i, call->phase);
    if (call->is_end > 1)
        return zr_fail(ZERO_ERR_ARG, "order[%d].is_end is %d; allowed: 0 (begin), 1 (end)", i, call->is_end);
    return 0;
}

struct place {
    int32_t unit, at;
};

static int by_unit(const void *a, const void *b)
{
    const struct place *x = a, *y = b;
    return x->unit != y->unit ? (x->unit > y->unit) - (x->unit < y->unit) : (x->at > y->at) - (x->at < y->at);
}

/* Brackets of different units may overlap in any way; those of one unit nest. So each unit's own calls, taken
 * by themselves, must be a well-formed sequence of brackets. */
static int check_brackets(const struct zero_call *order, struct place *places, int n)
{
    qsort(places, (size_t)n, sizeof *places, by_unit);
    /* places[0..n_open) holds the open brackets of this unit. Those places were read already. */
    int n_open = 0;
    for (int i = 0; i < n; i++) {
        struct place p = places[i];
        const struct zero_call *call = &order[p.at];
        if (!call->is_end) {
            places[n_open++] = p;
        } else if (n_open == 0) {
            return zr_fail(ZERO_ERR_ARG,
                           "order[%d] ends unit %d (%s), which is not open; allowed: balanced brackets", p.at,
                           p.unit, phase_name(call));
        } else if (order[places[n_open - 1].at].phase != call->phase) {
            return zr_fail(ZERO_ERR_ARG,
                           "order[%d] ends unit %d (%s), whose innermost open bracket, order[%d], is %s",
                           p.at, p.unit, phase_name(call), places[n_open - 1].at,
                           phase_name(&order[places[n_open - 1].at]));
        } else {
            n_open--;
        }
        if (n_open > 0 && (i + 1 == n || places[i + 1].unit != p.unit)) {
            int at = places[n_open - 1].at;
            return zr_fail(ZERO_ERR_ARG,
                           "order[%d] begins unit %d (%s), which is never ended; allowed: balanced brackets",
                           at, p.unit, phase_name(&order[at]));
        }
    }
    return 0;
}

/* Checks the order and copies it. */
static int resolve_order(const struct zero_config *c, struct zero_call **out)
{
    int n = c->memory.n_order, err = 0;
    *out = NULL;
    if (n == 0)
        return 0;
    struct zero_call *calls;
    struct place *places = NULL;
    err = ZR_ZALLOC(calls, n, "an order of %d calls", n);
    if (!err)
        err = ZR_ZALLOC(places, n, "an order of %d calls", n);
    for (int i = 0; !err && i < n; i++) {
        const struct zero_call *call = &c->memory.order[i];
        err = check_call(call, i);
        calls[i] = *call;
        places[i] = (struct place){call->unit, i};
    }
    if (!err)
        err = check_brackets(calls, places, n);
    free(places);
    if (err)
        free(calls);
    else
        *out = calls;
    return err;
}

/* PyTorch waits as long for an NCCL process group, and torchrun for its agents. */
enum { START_MS = 600000 };

int64_t zr_config_start_ms(const struct zero_config *c)
{
    return c->launch.start_timeout_ms != ZERO_AUTO ? c->launch.start_timeout_ms
           : c->launch.timeout_ms > START_MS       ? c->launch.timeout_ms
                                                   : START_MS;
}

void zr_config_legible(const struct zero_config *cfg, struct zero_config *out)
{
    const struct zero_config plain = ZERO_CONFIG_INIT;
    *out = zr_config_check_head(cfg) ? plain : *cfg;
    zr_config_apply_legible(out);
    if (out->launch.timeout_ms < 1)
        out->launch.timeout_ms = plain.launch.timeout_ms;
    if (out->launch.start_timeout_ms < 1)
        out->launch.start_timeout_ms = plain.launch.start_timeout_ms;
}

static float or_default(float value, float fallback)
{
    return value == ZERO_AUTO ? fallback : value;
}

static struct zr_options resolve_fields(const struct zero_config *c)
{
    struct zr_options o = {
        .stage = c->stage,
        .n_optims = 1 + c->n_optim_groups,
        .clip = c->clip,
        .grad_scale = c->grad_scale,
        .grad_accum_steps = c->grad_accum_steps,
        .max_grad_accum_steps = c->max_grad_accum_steps,
        .grad_sum = c->grad_sum,
        .prefetch = c->memory.prefetch,
        .param_budget_bytes = c->memory.param_budget_bytes,
        .grad_in_place = c->memory.grad_in_place,
        .compares_tp = true,
        .wire_dtype = (enum zero_dtype)c->memory.wire_dtype,
        .grad_sum_dtype = c->memory.grad_sum_dtype ? (enum zero_dtype)c->memory.grad_sum_dtype : ZERO_F32,
        .seed = c->memory.seed,
        .states = (enum zero_states)c->memory.states,
        .timeout_ms = c->launch.timeout_ms,
        .trace = c->debug.trace,
        .save_async = c->checkpoint.save_async,
        .save_keep = c->checkpoint.save_keep,
        .check = c->debug.check,
    };
    /* deterministic auto is off if the model adds up micro-batches itself; see also zr_backend_choose. */
    o.deterministic = c->deterministic && !(o.grad_in_place && zr_most_micro_batches(&o) > 1);
    return o;
}

/* ---- parameter groups ---- */

/* With its own update, a group has lr_scale and no other number. */
static int check_own_update(const struct zero_optim *g)
{
    if (g->masters || g->moments)
        return zr_fail(ZERO_ERR_ARG,
                       "masters is %s and moments is %s, but update is set, which computes in fp32; allowed: "
                       "f32 and f32",
                       zr_config_value_text("masters", g->masters).text,
                       zr_config_value_text("moments", g->moments).text);
    if (g->optimizer != ZERO_ADAMW)
        return zr_fail(ZERO_ERR_ARG,
                       "optimizer is %s but update is set as well; allowed: one of the two (optimizer adamw, "
                       "the default)",
                       zr_config_value_text("optimizer", g->optimizer).text);
    if (g->beta1 != ZERO_AUTO || g->beta2 != ZERO_AUTO || g->eps != ZERO_AUTO || g->weight_decay != 0)
        return zr_fail(ZERO_ERR_ARG,
                       "beta1 is %.9g, beta2 %.9g, eps %.9g and weight_decay %.9g, but update is set, which "
                       "uses only lr_scale; allowed: auto (-1), and weight_decay 0",
                       (double)g->beta1, (double)g->beta2, (double)g->eps, (double)g->weight_decay);
    return 0;
}

static int check_group(const struct zero_optim *g)
{
    if (g->optimizer == 0)
        return zr_fail(ZERO_ERR_ARG,
                       "optimizer is 0: a struct zero_optim starts from ZERO_OPTIM_INIT; allowed: %s",
                       ZR_OPTIMIZER_KEYS);
    int err = zr_config_check_optim(g);
    if (err || g->update)
        return err ? err : check_own_update(g);
    if (g->n_states != 0)
        return zr_fail(
            ZERO_ERR_ARG,
            "n_states is %d but update is NULL; allowed: 0 (the states of a named optimizer are known)",
            g->n_states);
    return 0;
}

static struct zr_optim resolve_group(const struct zero_optim *g)
{
    if (g->update)
        return (struct zr_optim){.n_states = g->n_states, .lr_scale = g->lr_scale};
    enum zero_optimizer kind = (enum zero_optimizer)g->optimizer;
    const struct zr_optimizer_kind *row = zr_optimizer_kind(kind);
    struct zr_optim out = {.optimizer = kind,
                           .lr_scale = g->lr_scale,
                           .beta1 = or_default(g->beta1, row->beta1),
                           .beta2 = or_default(g->beta2, row->beta2),
                           .eps = or_default(g->eps, row->eps),
                           .weight_decay = g->weight_decay,
                           .masters = (enum zero_masters)g->masters,
                           .moments = (enum zero_moments)g->moments};
    out.n_states = zr_optimizer_states(kind, out.beta1);
    return out;
}

/* Copies the groups to *out and checks each. Group 0 is named by its fields alone. */
static int copy_groups(const struct zero_config *c, struct zero_optim **out)
{
    if (c->n_optim_groups < 0 || c->n_optim_groups >= ZR_MAX_OPTIMS)
        return zr_fail(ZERO_ERR_ARG, "n_optim_groups is %d; allowed: 0 to %d", c->n_optim_groups,
                       ZR_MAX_OPTIMS - 1);
    if (!c->optim_groups != (c->n_optim_groups == 0))
        return zr_fail(ZERO_ERR_ARG,
                       "optim_groups is %s but n_optim_groups is %d; allowed: both given, or NULL and 0",
                       c->optim_groups ? "set" : "NULL", c->n_optim_groups);
    int32_t n = 1 + c->n_optim_groups;
    struct zero_optim *groups;
    int err = ZR_ALLOC(groups, n, "%d parameter groups", n);
    for (int32_t i = 0; !err && i < n; i++) {
        groups[i] = i ? c->optim_groups[i - 1] : c->optim;
        err = check_group(&groups[i]);
        if (err && i)
            zr_fail_more(err, "optim_groups[%d]", i - 1);
    }
    if (err)
        free(groups);
    else
        *out = groups;
    return err;
}

/* The update divides by the root of the second moment, which is 0 for a weight that never had a gradient. */
static void report_zero_eps(const struct zr_config *c)
{
    for (int32_t i = 0; i < c->options.n_optims; i++) {
        const struct zr_optim *g = &c->options.optim[i];
        char entry[32] = "";
        if (!g->optimizer || g->eps != 0 || !zr_optimizer_kind(g->optimizer)->eps_divides)
            continue;
        if (i)
            snprintf(entry, sizeof entry, "optim_groups[%d]: ", i - 1);
        zr_warn(c->log, "%seps is 0: a weight whose gradient has been 0 in every step becomes NaN (0 / 0)",
                entry);
    }
}

static int resolve(const struct zero_config *user, bool has_log, struct zr_config *out)
{
    struct zr_config c = {0};
    int err;
    ZR_TRY(zr_config_check_head(user));
    c.user = *user;
    if (has_log)
        ZR_TRY(zr_log_open(c.user.debug.log, c.user.debug.log_arg, getenv("ZERO_LOG"), &c.log));
    if ((err = zr_config_apply_env(&c.user, c.log)) || (err = copy_groups(&c.user, &c.groups)) ||
        (err = zr_config_check_fields(&c.user)) || (err = check_name(&c.user)) ||
        (err = check_together(&c.user)) || (err = resolve_order(&c.user, &c.order))) {
        free(c.groups);
        zr_log_close(c.log);
        return err;
    }
    c.options = resolve_fields(&c.user);
    for (int32_t i = 0; i < c.options.n_optims; i++)
        c.options.optim[i] = resolve_group(&c.groups[i]);
    report_zero_eps(&c);
    c.options.log = c.log;
    c.options.order = c.order;
    c.options.n_order = c.user.memory.n_order;
    *out = c;
    return 0;
}

int zr_config_resolve(const struct zero_config *user, struct zr_config *out)
{
    return resolve(user, true, out);
}

int zr_config_resolve_silently(const struct zero_config *user, struct zr_config *out)
{
    return resolve(user, false, out);
}

void zr_config_release(struct zr_config *config)
{
    if (!config)
        return;
    free(config->order);
    free(config->groups);
    config->groups = NULL;
    zr_log_close(config->log);
    config->log = config->options.log = NULL;
    config->order = NULL;
    config->options.order = NULL;
    config->options.n_order = 0;
}

/* Gives each tensor the optimizer, the number of states and the precisions of its group. */
static void apply_groups(const struct zr_options *o, struct zr_tensor *t, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        t[i].optimizer = o->optim[t[i].group].optimizer;
        t[i].n_states = o->optim[t[i].group].n_states;
        t[i].masters = t[i].dtype == ZERO_BF16 ? o->optim[t[i].group].masters : ZERO_MASTERS_F32;
        t[i].moments = o->optim[t[i].group].moments;
        t[i].sum_dtype = t[i].dtype == ZERO_BF16 ? o->grad_sum_dtype : ZERO_F32;
    }
}

/* Refuses bf16 sums of gradients that optim.update takes, which are fp32. */
static int check_sums(const struct zr_tensor *t, int32_t n)
{
    for (int32_t i = 0; i < n; i++)
        if (t[i].grad && t[i].sum_dtype == ZERO_BF16 && !t[i].optimizer)
            return zr_fail(
                ZERO_ERR_ARG,
                "tensors[%d] (%s): grad_sum_dtype is bf16, but its parameter group has update set, "
                "which takes fp32 gradients; allowed: f32, or a named optimizer",
                i, t[i].name);
    return 0;
}

/* Refuses granules of tensors that optim.update takes, if the parts of a file of states would cut them. */
static int check_granules(const struct zr_options *o, const struct zr_tensor *t, int32_t n)
{
    for (int32_t i = 0; o->states == ZERO_STATES_FILE && i < n; i++)
        if (t[i].grad && !t[i].optimizer && !zr_granule_fits(t[i].granule))
            return zr_fail(ZERO_ERR_ARG,
                           "tensors[%d] (%s): granule is %lld, and its parameter group has update set, but "
                           "states is file, which is updated in parts that cut granules; allowed: states "
                           "device or host, or a granule that divides %d",
                           i, t[i].name, (long long)t[i].granule, ZR_NORM_BLOCK);
    return 0;
}

/* Refuses 8-bit states of tensors whose blocks tp would cut, because a block has one scale. */
static int check_q8_cuts(const struct zr_options *o, const struct zr_tensor *t, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        const struct zr_tp_cut cut = zr_tp_of_tensor(&t[i], o->tp);
        const int64_t run = zr_tp_run_elems(&cut), one_layer = cut.part_elems / zr_max(t[i].n_layers, 1);
        const bool is_cut = run % ZR_Q8_BLOCK || (run < one_layer && zr_tp_run_stride(&cut) % ZR_Q8_BLOCK);
        if (cut.parts > 1 && t[i].grad && t[i].n_states && t[i].moments == ZERO_MOMENTS_Q8 && is_cut)
            return zr_fail(
                ZERO_ERR_ARG,
                "tensors[%d] (%s): moments is q8, which has blocks of %d elements, but tp %d cuts the "
                "tensor into runs of %lld elements; allowed: runs of whole blocks, or a parameter "
                "group with moments bf16 or f32",
                i, t[i].name, ZR_Q8_BLOCK, o->tp, (long long)run);
    }
    return 0;
}

int zr_config_layout(const struct zr_config *config, struct zr_tensor *tensors, int32_t n_tensors, int world,
                     struct zr_layout **out)
{
    const struct zr_options *o = &config->options;
    struct zr_placement place;
    int err = zr_placement_in(o, world, &place);
    apply_groups(o, tensors, n_tensors);
    err = err ? err : check_sums(tensors, n_tensors);
    err = err ? err : check_granules(o, tensors, n_tensors);
    err = err ? err : check_q8_cuts(o, tensors, n_tensors);
    if (err) {
        zr_tensors_free(tensors, n_tensors);
        return err;
    }
    /* Here guards cannot protect the memory behind a gradient, so gaps in the layout detect writes to it. */
    bool gaps = o->check && place.model_holds && config->user.device != ZERO_DEVICE_CUDA;
    return zr_layout_make(tensors, n_tensors, place.size[ZR_INNER], place.size[ZR_OUTER], place.model_holds,
                          gaps, out);
}

int zr_config_check_head(const struct zero_config *cfg)
{
    if (!cfg)
        return zr_fail(
            ZERO_ERR_ARG,
            "cfg is NULL; it must be a configuration initialised by ZERO_CONFIG_INIT or zero_config_init");
    if (cfg->size == sizeof *cfg && cfg->version == ZERO_ABI_VERSION)
        return 0;
    if (cfg->size == 0 && cfg->version == 0)
        return zr_fail(ZERO_ERR_ARG, "the configuration was not initialised: its size and version are 0; "
                                     "initialise it by ZERO_CONFIG_INIT or zero_config_init");
    return zr_fail(
        ZERO_ERR_ARG,
        "version is 0x%x and size is %zu; allowed: 0x%x and %zu, those of this library (%s): the program was "
        "built with another zero.h, or did not initialise cfg by ZERO_CONFIG_INIT or zero_config_init",
        cfg->version, cfg->size, ZERO_ABI_VERSION, sizeof *cfg, zero_version());
}

int zero_config_init(struct zero_config *cfg, size_t size)
{
    if (!cfg)
        return zr_fail(ZERO_ERR_ARG, "zero_config_init: cfg is NULL");
    if (size != sizeof *cfg)
        return zr_fail(ZERO_ERR_ARG,
                       "zero_config_init: size is %zu; allowed: %zu, the bytes of struct zero_config of this "
                       "library (%s): the program was built with another zero.h",
                       size, sizeof *cfg, zero_version());
    *cfg = (struct zero_config)ZERO_CONFIG_INIT;
    return 0;
}
