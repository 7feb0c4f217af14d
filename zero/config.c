/* SPDX-License-Identifier: Apache-2.0 */
/* config.c: resolves a configuration: defaults, and what can only be checked with several fields in hand. */
#include "zero/config.h"
#include "comm/meet/rendezvous.h"
#include "shard/plan.h"

#include <stdlib.h>
#include <string.h>

_Static_assert((int)ZR_HSDP == (int)ZERO_HYBRID_HSDP && (int)ZR_HFSDP == (int)ZERO_HYBRID_HFSDP,
               "one number each");

static int check_hybrid(const struct zero_config *c)
{
    static const char *const names[] = {"none", "hsdp", "hfsdp"};
    struct zr_placement place;
    if (zr_placement_make(c->stage, (enum zr_hybrid)c->hybrid, false, 1, 1, &place))
        return zr_fail(ZR_ERR_ARG,
                       "hybrid is %s but stage is %d; allowed: stage 3 with a hybrid, or hybrid none",
                       names[c->hybrid], c->stage);
    return 0;
}

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
    return zr_fail(ZR_ERR_ARG,
                   "name is \"%s\"; allowed: up to %d characters, none of them a control character", shown,
                   ZR_NAME_CHARS);
}

static int check_together(const struct zero_config *c)
{
    if (c->launch.world > 0 && c->launch.rank >= c->launch.world)
        return zr_fail(ZR_ERR_ARG, "rank is %d; allowed: 0 to %d (world is %d)", c->launch.rank,
                       c->launch.world - 1, c->launch.world);
    if (c->launch.world == 0 && c->launch.rank != 0)
        return zr_fail(ZR_ERR_ARG,
                       "rank is %d but world is 0; allowed: both given, or both 0 to look in the environment",
                       c->launch.rank);
    if (c->update && c->optimizer != ZERO_AUTO)
        return zr_fail(
            ZR_ERR_ARG,
            "optimizer is %s but update is set as well; allowed: one of the two (optimizer ZERO_AUTO)",
            zr_config_value_text("optimizer", c->optimizer).text);
    if (!c->update && c->n_states != 0)
        return zr_fail(
            ZR_ERR_ARG,
            "n_states is %d but update is NULL; allowed: 0 (the states of a named optimizer are known)",
            c->n_states);
    if (c->memory.grad_in_place && c->deterministic > 0 && c->grad_accum_steps > 1)
        return zr_fail(
            ZR_ERR_ARG,
            "grad_in_place is 1 and deterministic is 1, with grad_accum_steps %d: gradients that "
            "the model adds up itself are not added in the fixed order that deterministic promises; set one "
            "of the two",
            c->grad_accum_steps);
    if (!c->init != (c->init_from != ZERO_INIT_CALL))
        return zr_fail(ZR_ERR_ARG,
                       "init is %s but init_from is %s; allowed: both init and ZERO_INIT_CALL, or neither",
                       c->init ? "set" : "NULL", c->init ? "not ZERO_INIT_CALL" : "ZERO_INIT_CALL");
    if (c->launch.nccl_comm && c->device != ZERO_DEVICE_CUDA)
        return zr_fail(ZR_ERR_ARG,
                       "nccl_comm is set but device is host; allowed: device cuda, or nccl_comm NULL");
    if (c->launch.mpi_comm && c->device != ZERO_DEVICE_HOST)
        return zr_fail(ZR_ERR_ARG,
                       "mpi_comm is set but device is cuda; allowed: device host, or mpi_comm NULL");
    if (c->memory.n_order < 0)
        return zr_fail(ZR_ERR_ARG, "n_order is %d; allowed: 0 and more", c->memory.n_order);
    if (!c->memory.order != (c->memory.n_order == 0))
        return zr_fail(ZR_ERR_ARG, "order is %s but n_order is %d; allowed: both given, or NULL and 0",
                       c->memory.order ? "set" : "NULL", c->memory.n_order);
    return check_hybrid(c);
}

static const char *phase_name(const struct zr_call *call)
{
    return zr_phase_name(call->backward, call->apart);
}

static int check_call(const struct zero_call *call, int i)
{
    if (call->unit < 0)
        return zr_fail(ZR_ERR_ARG, "order[%d].unit is %d; allowed: 0 and more", i, call->unit);
    if (call->phase < ZERO_FORWARD || call->phase > ZERO_BACKWARD_WEIGHT)
        return zr_fail(ZR_ERR_ARG,
                       "order[%d].phase is %d; allowed: 1 (ZERO_FORWARD), 2 (ZERO_BACKWARD), "
                       "3 (ZERO_BACKWARD_INPUT), 4 (ZERO_BACKWARD_WEIGHT)",
                       i, call->phase);
    if (call->is_end > 1)
        return zr_fail(ZR_ERR_ARG, "order[%d].is_end is %d; allowed: 0 (begin), 1 (end)", i, call->is_end);
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
static int check_brackets(const struct zr_call *order, struct place *places, int n)
{
    qsort(places, (size_t)n, sizeof *places, by_unit);
    int n_open =
        0; /* the open brackets of the unit at hand are kept in places[0..n_open), which was read already */
    for (int i = 0; i < n; i++) {
        struct place p = places[i];
        const struct zr_call *call = &order[p.at];
        if (!call->is_end) {
            places[n_open++] = p;
        } else if (n_open == 0) {
            return zr_fail(ZR_ERR_ARG,
                           "order[%d] ends unit %d (%s), which is not open; allowed: balanced brackets", p.at,
                           p.unit, phase_name(call));
        } else if (order[places[n_open - 1].at].backward != call->backward ||
                   order[places[n_open - 1].at].apart != call->apart) {
            return zr_fail(ZR_ERR_ARG,
                           "order[%d] ends unit %d (%s), whose innermost open bracket, order[%d], is %s",
                           p.at, p.unit, phase_name(call), places[n_open - 1].at,
                           phase_name(&order[places[n_open - 1].at]));
        } else {
            n_open--;
        }
        if (n_open > 0 && (i + 1 == n || places[i + 1].unit != p.unit)) {
            int at = places[n_open - 1].at;
            return zr_fail(ZR_ERR_ARG,
                           "order[%d] begins unit %d (%s), which is never ended; allowed: balanced brackets",
                           at, p.unit, phase_name(&order[at]));
        }
    }
    return 0;
}

/* Checks the order and hands out a copy in the lower floors' own form. */
static int resolve_order(const struct zero_config *c, struct zr_call **out)
{
    int n = c->memory.n_order, err = n ? zr_config_needs(c, offsetof(struct zero_config, call_size)) : 0;
    *out = NULL;
    if (n == 0 || err)
        return err;
    struct zr_call *calls = calloc((size_t)n, sizeof *calls);
    struct place *places = calloc((size_t)n, sizeof *places);
    if (!calls || !places)
        err = zr_fail(ZR_ERR_NOMEM, "no memory for an order of %d calls", n);
    for (int i = 0; !err && i < n; i++) {
        struct zero_call call;
        zr_copy_in(&call, sizeof call, c->memory.order, i, c->call_size);
        err = check_call(&call, i);
        calls[i] =
            (struct zr_call){.unit = call.unit,
                             .backward = call.phase == ZERO_BACKWARD || call.phase == ZERO_BACKWARD_WEIGHT,
                             .is_end = call.is_end,
                             .apart = call.phase >= ZERO_BACKWARD_INPUT};
        places[i] = (struct place){call.unit, i};
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

/* As long as PyTorch lets a process group of NCCL start, and torchrun its agents meet. */
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
    *out = plain;
    (void)zr_config_widen(cfg, out);
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
    enum zr_optimizer kind = c->optimizer == ZERO_AUTO ? ZR_ADAMW : (enum zr_optimizer)c->optimizer;
    struct zr_options o = {
        .stage = c->stage,
        .hybrid = (enum zr_hybrid)c->hybrid,
        .optimizer = c->update ? ZR_OPTIMIZER_NONE : kind,
        .n_states = c->n_states,
        .clip = c->clip,
        .grad_scale = c->grad_scale,
        .grad_accum_steps = c->grad_accum_steps,
        .grad_sum = c->grad_sum,
        .prefetch = c->memory.prefetch,
        .param_budget_bytes = c->memory.param_budget_bytes,
        /* deterministic that nobody asked for is turned off instead; see zr_backend_choose. */
        .deterministic = c->deterministic && !(c->memory.grad_in_place && c->grad_accum_steps > 1),
        .grad_in_place = c->memory.grad_in_place,
        .compares_tp = true,
        .wire_dtype = (enum zr_dtype)c->memory.wire_dtype,
        .timeout_ms = c->launch.timeout_ms,
        .trace = c->debug.trace,
        .save_async = c->checkpoint.save_async,
        .save_keep = c->checkpoint.save_keep,
        .check = c->debug.check,
    };
    for (int i = 1; i < ZR_OPTIMIZER_COUNT; i++) {
        const struct zr_optimizer_kind *row = zr_optimizer_kind((enum zr_optimizer)i);
        bool chosen = i == (int)kind; /* whose numbers are the configuration's */
        o.hyper[i] = (struct zr_hyper){.beta1 = chosen ? or_default(c->beta1, row->beta1) : row->beta1,
                                       .beta2 = chosen ? or_default(c->beta2, row->beta2) : row->beta2,
                                       .eps = chosen ? or_default(c->eps, row->eps) : row->eps,
                                       .weight_decay = c->weight_decay};
    }
    return o;
}

/* The update divides by the root of the second moment, which is 0 until a weight has had a gradient. */
static void report_zero_eps(const struct zr_config *c)
{
    enum zr_optimizer kind = c->options.optimizer;
    if (kind && c->options.hyper[kind].eps == 0 && zr_optimizer_kind(kind)->eps_divides)
        zr_warn(c->log, "eps is 0: a weight whose gradient has been 0 in every step becomes NaN (0 / 0)");
}

static int resolve(const struct zero_config *user, bool has_log, struct zr_config *out)
{
    struct zr_config c = {0};
    int err = zr_config_widen(user, &c.user);
    if (err)
        return err;
    if (has_log && (err = zr_log_open(c.user.debug.log, c.user.debug.log_arg, getenv("ZERO_LOG"), &c.log)))
        return err;
    if ((err = zr_config_apply_env(&c.user, c.log)) || (err = zr_config_check_fields(&c.user)) ||
        (err = check_name(&c.user)) || (err = check_together(&c.user)) ||
        (err = resolve_order(&c.user, &c.order))) {
        zr_log_close(c.log);
        return err;
    }
    c.options = resolve_fields(&c.user);
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
    zr_log_close(config->log);
    config->log = config->options.log = NULL;
    config->order = NULL;
    config->options.order = NULL;
    config->options.n_order = 0;
}

/* What each tensor's optimizer means beside the configuration. */
static int check_optimizers(const struct zr_config *config, struct zr_tensor *t, int32_t n)
{
    const struct zr_options *o = &config->options;
    for (int32_t i = 0; i < n; i++) {
        if (o->optimizer == ZR_OPTIMIZER_NONE && t[i].optimizer)
            return zr_fail(
                ZR_ERR_ARG,
                "tensors[%d] (%s): optimizer is %s but cfg.update is set, which updates every tensor; "
                "allowed: 0",
                i, t[i].name, zr_optimizer_kind(t[i].optimizer)->name);
        if (o->optimizer == ZR_OPTIMIZER_NONE && t[i].decay_scale != 0 && t[i].decay_scale != 1)
            return zr_fail(
                ZR_ERR_ARG,
                "tensors[%d] (%s): decay_scale is %g but cfg.update is set, whose decay is its own; "
                "allowed: 0 or 1",
                i, t[i].name, (double)t[i].decay_scale);
        if (t[i].optimizer == o->optimizer) /* named or not, they are one kind */
            t[i].optimizer = ZR_OPTIMIZER_NONE;
    }
    return 0;
}

int zr_config_layout(const struct zr_config *config, struct zr_tensor *tensors, int32_t n_tensors, int world,
                     struct zr_layout **out)
{
    const struct zr_options *o = &config->options;
    struct zr_placement place;
    int err = zr_placement_in(o, world, &place);
    if (!err)
        err = check_optimizers(config, tensors, n_tensors);
    if (err) {
        zr_tensors_free(tensors, n_tensors);
        return err;
    }
    /* Where the memory behind a gradient cannot be closed to the model. */
    bool gaps = o->check && place.model_holds && config->user.device != ZERO_DEVICE_CUDA;
    return zr_layout_make(tensors, n_tensors, place.size[ZR_INNER], place.size[ZR_OUTER], place.model_holds,
                          gaps, out);
}
