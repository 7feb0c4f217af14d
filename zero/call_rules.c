/* SPDX-License-Identifier: Apache-2.0 */
/* call_rules.c: what must hold when a call begins. The table documents ZERO_ERR_ORDER: a call whose rules do
 * not hold returns that code, and changes nothing. ALL_VALUES alone asks the other ranks, which may fail.
 *
 * Some rules depend on arguments, so the call checks them itself:
 *
 *     zero_begin  compares its bracket with the schedule and with open brackets
 *     zero_end    needs an open bracket of the unit and phase
 *     zero_read   needs values of one tensor only
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
static const unsigned table[] = {
    [ZR_CALL_BEGIN] = VALUES,
    [ZR_CALL_END] = VALUES,
    [ZR_CALL_MICRO] = VALUES,
    [ZR_CALL_NORM] = HEALTHY | VALUES | ACTIONS_OVER | GRADIENTS,
    [ZR_CALL_STEP] = VALUES | ACTIONS_OVER | GRADIENTS,
    [ZR_CALL_DROP] = HEALTHY,
    [ZR_CALL_CARRY] = HEALTHY,
    [ZR_CALL_MEAN] = HEALTHY | NO_ACTIONS,
    [ZR_CALL_LOSS_SCALE] = SETS_STEP,
    [ZR_CALL_TUNE_CLIP] = SETS_STEP,
    [ZR_CALL_SET_STEP] = SETS_STEP,
    [ZR_CALL_EVALUATE] = SETS_STEP | NO_GATHER_ALL | ALL_VALUES,
    [ZR_CALL_NEXT] = HEALTHY | NO_BRACKET | NO_GATHER_ALL | ALL_VALUES,
    [ZR_CALL_FINISH] = HEALTHY | NO_BRACKET,
    [ZR_CALL_BROADCAST_PP] = HEALTHY | NO_ACTIONS,
    [ZR_CALL_SYNC_BUFFERS] = HEALTHY | NO_BRACKET | NO_ACTIONS,
    [ZR_CALL_READ] = NO_BRACKET | NO_ACTIONS,
    [ZR_CALL_WRITE] = NO_BRACKET | NO_ACTIONS | NO_GATHER_ALL,
    [ZR_CALL_GATHER_ALL] = HEALTHY | NO_BRACKET | NO_ACTIONS | ALL_VALUES,
    [ZR_CALL_RELEASE_ALL] = HEALTHY | NO_BRACKET | NO_ACTIONS,
    [ZR_CALL_SAVE] = SETS_STEP | ALL_VALUES,
    [ZR_CALL_SAVE_WAIT] = HEALTHY | NO_ACTIONS,
    [ZR_CALL_LOAD] = SETS_STEP | NO_GATHER_ALL,
    [ZR_CALL_EXPORT] = HEALTHY | NO_BRACKET | NO_ACTIONS | ALL_VALUES,
    [ZR_CALL_IMPORT] = HEALTHY | NO_BRACKET | NO_ACTIONS | NO_GATHER_ALL,
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
    const char *call = zr_call_function(name);
    unsigned rules = table[name];
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
