/* SPDX-License-Identifier: Apache-2.0 */
/* test_cpp_program.cc: a program in C++ gets the same default configuration as the C library, and trains. */
#include <zero/zero.h>

#include <cstdio>
#include <cstring>

static int fail(const char *what)
{
    std::fprintf(stderr, "%s: %s\n", what, zero_last_error());
    return 1;
}

static bool operator==(const zero_optim &a, const zero_optim &b)
{
    bool same = true;
#define SAME(field, value) same = same && a.field == b.field;
    ZERO_OPTIM_DEFAULTS(SAME)
#undef SAME
    return same && a.weight_decay == b.weight_decay && a.n_states == b.n_states && a.update == b.update &&
           a.update_arg == b.update_arg;
}

/* Compares every field that has a default other than 0, and some of the others. Padding may differ. */
static bool alike(const zero_config &a, const zero_config &b)
{
    bool same = true;
#define SAME(field, value) same = same && a.field == b.field;
    ZERO_CONFIG_DEFAULTS(SAME)
#undef SAME
    return same && a.stage == b.stage && a.launch.world == b.launch.world &&
           a.memory.order == b.memory.order && a.n_optim_groups == b.n_optim_groups && a.clip == b.clip &&
           a.debug.check == b.debug.check && a.launch.nccl_comm == b.launch.nccl_comm;
}

int main()
{
    zero_config cfg = ZERO_CONFIG_INIT, begun_in_c;
    if (zero_config_init(&begun_in_c, sizeof begun_in_c))
        return fail("zero_config_init");
    if (!alike(cfg, begun_in_c))
        return fail("ZERO_CONFIG_INIT in C++ and in C differ");

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
    zero_optim groups[2] = {ZERO_OPTIM_INIT, ZERO_OPTIM_INIT};
    groups[1].optimizer = ZERO_SGD;
    groups[1].lr_scale = 0.5f;
    cfg.optim_groups = groups;
    cfg.n_optim_groups = 2;
    tensor.group = 2;
    zero_ctx *z;
    zero_step_info info;
    zero_stats stats;
    if (zero_wrap(&z, &tensor, 1, &cfg))
        return fail("zero_wrap");
    for (int i = 0; i < 4; i++)
        static_cast<float *>(grad)[i] = 0.5f;
    if (zero_step(z, 4.0f, &info) || zero_get_stats(z, &stats) ||
        zero_read(z, 0, ZERO_VALUE_PARAM, 0, 4, back) || zero_unwrap(&z))
        return fail("a step");
    for (int i = 0; i < 4; i++)
        if (back[i] != static_cast<float>(i))
            return fail("the weights are wrong");
    if (info.t != 1 || info.grad_norm != 1 || stats.n_steps != 1 || std::strcmp(stats.backend, "self") != 0)
        return fail("what it was told is wrong");
    return 0;
}
