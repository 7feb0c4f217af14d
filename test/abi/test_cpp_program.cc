/* SPDX-License-Identifier: Apache-2.0 */
// test_cpp_program.cc: a program in C++: its configuration is begun as in C, and it trains.
#include <zero/zero.h>

#include <cstdio>
#include <cstring>

extern "C" const struct zero_config begun_in_c;

static int fail(const char *what)
{
    std::fprintf(stderr, "%s: %s\n", what, zero_last_error());
    return 1;
}

// Every field that has a default other than 0, and some of the others. Padding may differ.
static bool alike(const zero_config &a, const zero_config &b)
{
    bool same = true;
#define SAME(field, value) same = same && a.field == b.field;
    ZERO_CONFIG_DEFAULTS(SAME)
#undef SAME
    return same && a.stage == b.stage && a.launch.world == b.launch.world &&
           a.memory.order == b.memory.order && a.update == b.update && a.clip == b.clip &&
           a.debug.check == b.debug.check && a.launch.nccl_comm == b.launch.nccl_comm;
}

int main()
{
    zero_config cfg = ZERO_CONFIG_INIT, begun;
    if (!alike(cfg, begun_in_c))
        return fail("ZERO_CONFIG_INIT in C and in C++ differ");
    if (zero_config_init(&begun, sizeof begun))
        return fail("zero_config_init");
    begun.tensor_size = sizeof(zero_tensor);
    begun.call_size = sizeof(zero_call);
    begun.weight_size = sizeof(zero_weight);
    begun.step_info_size = sizeof(zero_step_info);
    begun.stats_size = sizeof(zero_stats);
    begun.plan_info_size = sizeof(zero_plan_info);
    begun.action_size = sizeof(zero_action);
    if (!alike(begun, begun_in_c))
        return fail("ZERO_CONFIG_INIT and zero_config_init differ");

    float weights[4] = {1, 2, 3, 4}, gradients[4] = {0, 0, 0, 0}, back[4];
    void *param = weights, *grad = gradients;
    zero_tensor tensor = zero_tensor();
    tensor.name = "w";
    tensor.param = &param;
    tensor.grad = &grad;
    tensor.shape[0] = 4;
    tensor.dtype = ZERO_F32;
    cfg.stage = 1;
    cfg.launch.world = 1;
    cfg.optimizer = ZERO_SGD;
    zero_ctx *z;
    zero_step_info info;
    zero_stats stats;
    if (zero_wrap(&z, &tensor, 1, &cfg))
        return fail("zero_wrap");
    for (int i = 0; i < 4; i++)
        static_cast<float *>(grad)[i] = 0.5f;
    if (zero_step(z, 2.0f, &info) || zero_get_stats(z, &stats) ||
        zero_read(z, 0, ZERO_VALUE_PARAM, 0, 4, back) || zero_unwrap(&z))
        return fail("a step");
    for (int i = 0; i < 4; i++)
        if (back[i] != static_cast<float>(i))
            return fail("the weights are wrong");
    if (info.t != 1 || info.grad_norm != 1 || stats.n_steps != 1 || std::strcmp(stats.backend, "self") != 0)
        return fail("what it was told is wrong");
    return 0;
}
