/* SPDX-License-Identifier: Apache-2.0 */
/* call_rules.c: what must hold when a call begins. The table documents ZERO_ERR_ORDER: a call whose rules do
 * not hold returns that code, and changes nothing. ALL_VALUES alone asks the other ranks, which may fail.
 *
 * Some rules depend on arguments, so the call checks them itself:
 *
 *     zero_begin, zero_end  compare their bracket with the schedule and with open brackets
 *     zero_read             needs values of one tensor only
 *
 * zero_step, zero_read, zero_write, zero_broadcast and zero_evaluate check their arguments before these
 * rules, the other calls afterwards. */
#include "zero/context.h"

/* In the order in which they are checked. */
enum rule {
    /* The context has not failed, and this process called zero_wrap. A call without this rule checks it
     * elsewhere. */
    HEALTHY = 1 << 0,
    /* No bracket is open. */
    NO_BRACKET = 1 << 1,
    /* A pipeline has no actions left in this step or evaluation. The call waits for all ranks, but another
     * pipeline stage may wait for this one's next action. */
    NO_ACTIONS = 1 << 2,
    /* zero_gather_all does not hold all parameters, which the call would change. */
    NO_GATHER_ALL = 1 << 3,
    /* No backward bracket of the step has begun. */
    BETWEEN_STEPS = 1 << 4,
    /* After ZERO_INIT_LATER: every tensor of this rank has values. */
    VALUES = 1 << 5,
    /* The same for the tensors of all pipeline stages. This check is collective until it holds once. */
    ALL_VALUES = 1 << 6,
    /* All actions of a pipeline's step are over. */
    ACTIONS_OVER = 1 << 7,
    /* A backward bracket has ended since the last step. */
    GRADIENTS = 1 << 8,
    /* The call changes what the next step is taken with. */
    SETS_STEP = HEALTHY | NO_BRACKET | NO_ACTIONS | BETWEEN_STEPS,
};

/* Calls without a row need a healthy context only. zero_get_stats and zero_trace_write do not even need
 * that. */
static const struct {
    const char *call;
    unsigned rules;
} table[] = {
    [ZR_CALL_BEGIN] = {"zero_begin", VALUES},
    [ZR_CALL_END] = {"zero_end", VALUES},
    [ZR_CALL_MICRO] = {"zero_micro", VALUES},
    [ZR_CALL_NORM] = {"zero_norm", HEALTHY | VALUES | ACTIONS_OVER | GRADIENTS},
    [ZR_CALL_STEP] = {"zero_step", VALUES | ACTIONS_OVER | GRADIENTS},
    [ZR_CALL_DROP] = {"zero_drop", HEALTHY},
    [ZR_CALL_CARRY] = {"zero_carry", HEALTHY},
    [ZR_CALL_MEAN] = {"zero_mean", HEALTHY | NO_ACTIONS},
    [ZR_CALL_LOSS_SCALE] = {"zero_loss_scale", SETS_STEP},
    [ZR_CALL_TUNE_CLIP] = {"zero_tune", SETS_STEP},
    [ZR_CALL_SET_STEP] = {"zero_set_step", SETS_STEP},
    [ZR_CALL_EVALUATE] = {"zero_evaluate", SETS_STEP | NO_GATHER_ALL | ALL_VALUES},
    [ZR_CALL_NEXT] = {"zero_next", HEALTHY | NO_BRACKET | NO_GATHER_ALL | ALL_VALUES},
    [ZR_CALL_FINISH] = {"zero_finish", HEALTHY | NO_BRACKET},
    [ZR_CALL_BROADCAST_PP] = {"zero_broadcast", HEALTHY | NO_ACTIONS},
    [ZR_CALL_SYNC_BUFFERS] = {"zero_sync_buffers", HEALTHY | NO_BRACKET | NO_ACTIONS},
    [ZR_CALL_READ] = {"zero_read", NO_BRACKET | NO_ACTIONS},
    [ZR_CALL_WRITE] = {"zero_write", NO_BRACKET | NO_ACTIONS | NO_GATHER_ALL},
    [ZR_CALL_GATHER_ALL] = {"zero_gather_all", HEALTHY | NO_BRACKET | NO_ACTIONS | ALL_VALUES},
    [ZR_CALL_RELEASE_ALL] = {"zero_release_all", HEALTHY | NO_BRACKET | NO_ACTIONS},
    [ZR_CALL_SAVE] = {"zero_save", SETS_STEP | ALL_VALUES},
    [ZR_CALL_SAVE_WAIT] = {"zero_save_wait", HEALTHY | NO_ACTIONS},
    [ZR_CALL_LOAD] = {"zero_load", SETS_STEP | NO_GATHER_ALL},
    [ZR_CALL_EXPORT] = {"zero_export", HEALTHY | NO_BRACKET | NO_ACTIONS | ALL_VALUES},
    [ZR_CALL_IMPORT] = {"zero_import", HEALTHY | NO_BRACKET | NO_ACTIONS | NO_GATHER_ALL},
};

int zr_need_healthy(struct zero_ctx *z, const char *call)
{
    return z ? zr_engine_check(z->engine) : zr_fail(ZERO_ERR_ARG, "%s: z is NULL", call);
}

int zr_need_gradients(const struct zero_ctx *z, const char *call)
{
    if (!zr_engine_wrote_nothing(z->engine) || zr_engine_open_unit(z->engine) >= 0)
        return 0;
    return zr_fail(ZERO_ERR_ORDER,
                   "%s: no backward bracket has ended since the last step; call it once for every "
                   "grad_accum_steps backward passes",
                   call);
}

int zr_call_check(struct zero_ctx *z, enum zr_call_name name)
{
    const char *call = table[name].call;
    unsigned rules = table[name].rules;
    if (!z || rules & HEALTHY)
        ZR_TRY(zr_need_healthy(z, call));
    int32_t open = rules & NO_BRACKET ? zr_engine_open_unit(z->engine) : -1;
    if (open >= 0)
        return zr_fail(ZERO_ERR_ORDER, "%s: unit %d has an open bracket; end it first", call, open);
    if (rules & NO_ACTIONS)
        ZR_TRY(zr_refuse_in_actions(z, call));
    if (rules & NO_GATHER_ALL && zr_engine_holds_all(z->engine))
        return zr_fail(ZERO_ERR_ORDER,
                       "%s: zero_gather_all holds all parameters; call zero_release_all first", call);
    if (rules & BETWEEN_STEPS && !zr_engine_between_steps(z->engine))
        return zr_fail(ZERO_ERR_ORDER,
                       "%s: a step has begun; call it before the step's first backward or after zero_step",
                       call);
    if (rules & VALUES)
        ZR_TRY(zr_init_later_require(z, call, -1));
    if (rules & ALL_VALUES)
        ZR_TRY(zr_init_later_require_all(z, call));
    if (rules & ACTIONS_OVER)
        ZR_TRY(zr_schedule_over(z, call));
    return rules & GRADIENTS ? zr_need_gradients(z, call) : 0;
}
