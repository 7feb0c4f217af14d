/* SPDX-License-Identifier: Apache-2.0 */
/* test_config.c: configuration: defaults, text form, environment variables, limits and messages of every
 * field. */
#include "test/cmocka.h"
#include "zero/context.h"

#include <float.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void assert_message(const char *part)
{
    if (!strstr(zero_last_error(), part))
        fail_msg("\"%s\" is not in \"%s\"", part, zero_last_error());
}

static void refuse(const struct zero_config *cfg, const char *message)
{
    struct zr_config c;
    memset(&c, 0x5a, sizeof c);
    assert_int_equal(zr_config_resolve(cfg, &c), ZERO_ERR_ARG);
    assert_message(message);
    for (size_t i = 0; i < sizeof c; i++) /* a failed call writes nothing */
        assert_int_equal(((unsigned char *)&c)[i], 0x5a);
}

static struct zr_config accepted(const struct zero_config *cfg)
{
    struct zr_config c;
    int err = zr_config_resolve(cfg, &c);
    if (err)
        fail_msg("refused: %s", zero_last_error());
    zr_log_close(c.log); /* most callers read only the options, and release nothing */
    free(c.groups);
    c.log = c.options.log = NULL;
    c.groups = NULL;
    return c;
}

static int clear_environment(void **state)
{
    static const char *const names[] = {"ZERO_STAGE",
                                        "ZERO_BACKEND",
                                        "ZERO_TIMEOUT_MS",
                                        "ZERO_HYBRID",
                                        "ZERO_DP_SHARD",
                                        "ZERO_DP_REPLICATE",
                                        "ZERO_TP",
                                        "ZERO_PP",
                                        "ZERO_CP",
                                        "ZERO_SHARD_GROUP",
                                        "ZERO_OPTIMIZER",
                                        "ZERO_BETA1",
                                        "ZERO_BETA2",
                                        "ZERO_EPS",
                                        "ZERO_WEIGHT_DECAY",
                                        "ZERO_CLIP",
                                        "ZERO_GRAD_SCALE",
                                        "ZERO_GRAD_SUM",
                                        "ZERO_PREFETCH",
                                        "ZERO_DETERMINISTIC",
                                        "ZERO_WIRE_DTYPE",
                                        "ZERO_TRACE",
                                        "ZERO_GRAD_ACCUM_STEPS",
                                        "ZERO_PARAM_BUDGET_BYTES",
                                        "ZERO_RANK",
                                        "ZERO_WORLD_SIZE",
                                        "ZERO_STGE",
                                        "ZERO_N_STATES",
                                        "ZERO_WORLD"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        unsetenv(names[i]);
    return 0;
}

static void test_defaults(void **state)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_config begun; /* as in a program without C macros */
    memset(&begun, 0x5a, sizeof begun);
    assert_int_equal(zero_config_init(&begun, sizeof begun), 0);
    struct zr_config both[2] = {accepted(&cfg), accepted(&begun)};
    for (int i = 0; i < 2; i++) {
        const struct zr_options *o = &both[i].options;
        assert_int_equal(o->stage, 0);
        assert_int_equal(o->n_optims, 1);
        const struct zr_optim *h = &o->optim[0];
        assert_int_equal(h->optimizer, ZERO_ADAMW);
        assert_true(h->beta1 == 0.9f && h->beta2 == 0.999f && h->eps == 1e-8f);
        assert_true(h->lr_scale == 1 && h->weight_decay == 0 && o->clip == 0 && o->grad_scale == 1);
        assert_int_equal(o->grad_accum_steps, 1);
        assert_false(o->grad_sum);
        assert_null(o->update);
        assert_int_equal(h->n_states, 2);
        assert_int_equal(o->prefetch, 2);
        assert_int_equal(o->param_budget_bytes, -1);
        assert_true(o->deterministic);
        assert_int_equal(o->wire_dtype, 0);
        assert_int_equal(o->grad_sum_dtype, ZERO_F32);
        assert_int_equal(o->states, ZERO_STATES_DEVICE);
        assert_int_equal(o->seed, 0);
        assert_null(o->order);
        assert_int_equal(o->n_order, 0);
        assert_int_equal(o->timeout_ms, 30000);
        assert_false(o->trace);
        assert_false(o->save_async);
        assert_int_equal(o->save_keep, 0);
        assert_false(o->check);
        assert_int_equal(both[i].user.launch.world, 0);
        assert_int_equal(both[i].user.device, ZERO_DEVICE_HOST);
        assert_int_equal(both[i].user.launch.copy_engine, ZERO_AUTO);
        const struct zero_mesh *mesh = &both[i].user.mesh;
        assert_true(mesh->pp == 1 && mesh->dp_replicate == 1 && mesh->cp == 1 && mesh->tp == 1);
        assert_int_equal(mesh->dp_shard, 0);
        assert_int_equal(both[i].user.hybrid, ZERO_HSDP);
        assert_int_equal(zr_config_start_ms(&both[i].user), 600000);
        assert_int_equal(o->hybrid, ZR_HYBRID_NONE);
        zr_config_release(&both[i]);
    }
    zr_config_release(NULL);
}

static int an_update(void *arg, const struct zero_update *u)
{
    return 0;
}

static void test_defaults_by_optimizer(void **state)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.optim.optimizer = ZERO_SGD;
    struct zr_optim o = accepted(&cfg).options.optim[0];
    assert_true(o.optimizer == ZERO_SGD && o.beta1 == 0 && o.n_states == 0);
    cfg.optim.beta1 = 0.5f;
    o = accepted(&cfg).options.optim[0];
    assert_true(o.beta1 == 0.5f && o.n_states == 1);
    cfg = (struct zero_config)ZERO_CONFIG_INIT;
    cfg.optim.optimizer = ZERO_RMSPROP;
    o = accepted(&cfg).options.optim[0];
    assert_true(o.beta2 == 0.99f && o.n_states == 1);
    cfg.optim.optimizer = ZERO_ADAM;
    o = accepted(&cfg).options.optim[0];
    assert_true(o.optimizer == ZERO_ADAM && o.beta2 == 0.999f && o.n_states == 2);
    cfg = (struct zero_config)ZERO_CONFIG_INIT;
    cfg.optim.update = an_update;
    cfg.optim.n_states = 3;
    struct zr_config c = accepted(&cfg);
    assert_true(c.options.optim[0].optimizer == 0 && c.options.optim[0].n_states == 3);
    assert_ptr_equal(c.user.optim.update, an_update);
    assert_null(c.options.update); /* the library installs an adapter there later */
}

/* Each group has separate numbers, and the defaults of its optimizer. */
static void test_groups(void **state)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    struct zero_optim groups[2] = {ZERO_OPTIM_INIT, ZERO_OPTIM_INIT};
    groups[0].optimizer = ZERO_LION;
    groups[0].lr_scale = 0;
    groups[1].beta1 = 0.5f;
    groups[1].weight_decay = 2;
    cfg.optim_groups = groups;
    cfg.n_optim_groups = 2;
    setenv("ZERO_BETA1", "0.25", 1); /* applies to group 0 */
    struct zr_options o = accepted(&cfg).options;
    clear_environment(state);
    assert_int_equal(o.n_optims, 3);
    assert_true(o.optim[0].optimizer == ZERO_ADAMW && o.optim[0].beta1 == 0.25f &&
                o.optim[0].weight_decay == 0);
    assert_true(o.optim[1].optimizer == ZERO_LION && o.optim[1].lr_scale == 0 && o.optim[1].beta1 == 0.9f &&
                o.optim[1].beta2 == 0.99f && o.optim[1].n_states == 1);
    assert_true(o.optim[2].optimizer == ZERO_ADAMW && o.optim[2].beta1 == 0.5f &&
                o.optim[2].beta2 == 0.999f && o.optim[2].weight_decay == 2);
    groups[1].eps = NAN;
    refuse(&cfg, "optim_groups[1]: eps is nan; allowed: a finite number");
}

static char logged[512];

static void keep_line(void *arg, const char *line)
{
    assert_ptr_equal(arg, logged);
    assert_null(strchr(line, '\n'));
    strncat(logged, line, sizeof logged - strlen(logged) - 1);
}

static void test_zero_means_zero(void **state)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    *logged = 0;
    cfg.debug.log = keep_line;
    cfg.debug.log_arg = logged;
    cfg.optim.beta1 = cfg.optim.beta2 = cfg.optim.eps = 0;
    cfg.memory.prefetch = cfg.deterministic = cfg.launch.copy_engine = 0;
    cfg.memory.param_budget_bytes = 0;
    struct zr_config c = accepted(&cfg);
    struct zr_options o = c.options;
    const struct zr_optim *h = &o.optim[0];
    assert_true(h->beta1 == 0 && h->beta2 == 0 && h->eps == 0);
    assert_int_equal(o.prefetch, 0);
    assert_int_equal(o.param_budget_bytes, 0);
    assert_false(o.deterministic);
    assert_int_equal(c.user.launch.copy_engine, 0);
    assert_string_equal(
        logged, "warning: eps is 0: a weight whose gradient has been 0 in every step becomes NaN (0 / 0)");
    *logged = 0;
    cfg.optim.optimizer = ZERO_SGD; /* SGD divides by nothing */
    accepted(&cfg);
    assert_string_equal(logged, "");
}

/* Accepted text, the field's value after it, and refused text. zero_config_set refuses an empty value; in the
 * environment, an empty variable counts as unset. */
struct text_case {
    const char *key, *whole_key; /* whole_key: with the group */
    size_t offset;
    char type; /* i int32, l int64, f float, d double */
    bool env;
    const char *good;
    double raw;
    const char *bad, *allowed;
};

/* group: the nested struct with its dot, or empty */
#define AT(group, name) #name, #group #name, offsetof(struct zero_config, group name)

static const struct text_case text_cases[] = {
    {AT(, stage), 'i', true, "3", 3, "4", "allowed: 0, 1, 2, 3"},
    {AT(, stage), 'i', true, "0", 0, "-1", "allowed: 0, 1, 2, 3"},
    {AT(, stage), 'i', true, "+2", 2, "2x", "allowed: 0, 1, 2, 3"},
    {AT(, stage), 'i', true, "1", 1, "", "allowed: 0, 1, 2, 3"},
    {AT(, stage), 'i', true, "1", 1, " 1", "allowed: 0, 1, 2, 3"},
    {AT(, stage), 'i', true, "1", 1, "0x1", "allowed: 0, 1, 2, 3"},
    {AT(, stage), 'i', true, "1", 1, "4294967297", "allowed: 0, 1, 2, 3"}, /* 1 in 32 bits */
    {AT(, stage), 'i', true, "1", 1, "99999999999999999999", "allowed: 0, 1, 2, 3"},
    {AT(launch., backend), 'i', true, "shm", 2, "tcp", "allowed: auto, self, shm, nccl, mpi"},
    {AT(launch., backend), 'i', true, "SELF", 1, "99", "allowed: auto, self, shm, nccl, mpi"},
    {AT(launch., backend), 'i', true, "nccl", 3, "NCCL2", "allowed: auto, self, shm, nccl, mpi"},
    {AT(launch., backend), 'i', true, "auto", 0, "shm ", "allowed: auto, self, shm"},
    {AT(launch., rank), 'i', false, "5", 5, "-1", "allowed: 0 to world - 1"},
    {AT(launch., world), 'i', false, "8", 8, "-1", "allowed: 1 and more"},
    {AT(launch., timeout_ms), 'l', true, "1500", 1500, "0", "allowed: 1 to 2147483647"},
    {AT(launch., timeout_ms), 'l', true, "2147483647", 2147483647, "2147483648", "allowed: 1 to 2147483647"},
    {AT(optim., optimizer), 'i', true, "adamw", 1, "adagrad", "allowed: adamw, adam, sgd, rmsprop"},
    {AT(optim., optimizer), 'i', true, "adam", 2, "99", "allowed: adamw, adam, sgd, rmsprop"},
    {AT(optim., optimizer), 'i', true, "sgd", 3, "-2", "allowed: adamw, adam, sgd, rmsprop"},
    {AT(optim., optimizer), 'i', true, "nesterov", 6, "auto", "rmsprop, lion, nesterov"},
    {AT(optim., lr_scale), 'f', true, "0", 0, "-1", "allowed: a finite number, 0 or more"},
    {AT(optim., optimizer), 'i', true, "rmsprop", 4, "rms", "allowed: adamw, adam, sgd, rmsprop"},
    {AT(optim., beta1), 'f', true, "0.75", 0.75, "1", "allowed: 0 and more, less than 1; auto (-1)"},
    {AT(optim., beta1), 'f', true, "-1", -1, "nan", "allowed: 0 and more, less than 1"},
    {AT(optim., beta1), 'f', true, "auto", -1, "-0.5", "allowed: 0 and more, less than 1"},
    {AT(optim., beta1), 'f', true, "0", 0, "automatic", "allowed: 0 and more, less than 1"},
    {AT(optim., beta2), 'f', true, "0.5", 0.5, "1.5", "allowed: 0 and more, less than 1"},
    {AT(optim., eps), 'f', true, "0.25", 0.25, "inf", "allowed: a finite number"},
    {AT(optim., eps), 'f', true, "0.125", 0.125, "1e-60", "allowed: a finite number"}, /* would round to 0 */
    {AT(optim., eps), 'f', true, "Auto", -1, "-1e-8", "allowed: a finite number, 0 or more; auto (-1)"},
    {AT(optim., weight_decay), 'f', true, "0.5", 0.5, "-0.5", "allowed: a finite number, 0 or more"},
    {AT(optim., weight_decay), 'f', true, "5e-1", 0.5, "1e39", "allowed: a finite number, 0 or more"},
    {AT(, clip), 'f', true, "1", 1, "-1", "allowed: a finite number, 0 or more"},
    {AT(, clip), 'f', true, "1.5", 1.5, "1,5", "allowed: a finite number, 0 or more"},
    {AT(, grad_scale), 'd', true, "-0.125", -0.125, "1e400", "allowed: a finite number other than 0"},
    {AT(, grad_scale), 'd', true, "1e300", 1e300, "0", "allowed: a finite number other than 0"},
    {AT(, grad_accum_steps), 'i', true, "16", 16, "0", "allowed: 1 and more"},
    {AT(, max_grad_accum_steps), 'i', true, "16", 16, "-1", "1 and more, or 0 for grad_accum_steps"},
    {AT(, grad_sum), 'i', true, "1", 1, "2", "allowed: 0, 1"},
    {AT(, grad_sum), 'i', true, "on", 1, "-1", "allowed: 0, 1"},
    {AT(optim., n_states), 'i', false, "4", 4, "5", "allowed: 0, 1, 2, 3, 4"},
    {AT(memory., prefetch), 'i', true, "7", 7, "-1", "allowed: 1 and more, or 0 for none"},
    {AT(memory., prefetch), 'i', true, "none", 0, "2147483648", "or 0 for none"},
    {AT(memory., param_budget_bytes), 'l', true, "4096", 4096, "-2", "auto (-1) for what prefetch needs"},
    {AT(memory., param_budget_bytes), 'l', true, "64Mi", 64 << 20, "64m",
     "auto (-1) for what prefetch needs"},
    {AT(memory., param_budget_bytes), 'l', true, "64MiB", 64 << 20, "64B",
     "auto (-1) for what prefetch needs"},
    {AT(memory., param_budget_bytes), 'l', true, "3k", 3000, "3 k", "auto (-1) for what prefetch needs"},
    {AT(memory., param_budget_bytes), 'l', true, "3M", 3e6, "k", "auto (-1) for what prefetch needs"},
    {AT(memory., param_budget_bytes), 'l', true, "3G", 3e9, "1.5G", "auto (-1) for what prefetch needs"},
    {AT(memory., param_budget_bytes), 'l', true, "3Ki", 3072, "9223372036854775807k",
     "auto (-1) for what prefetch needs"},
    {AT(memory., param_budget_bytes), 'l', true, "64MiB", 64 << 20, "64B",
     "auto (-1) for what prefetch needs"},
    {AT(, deterministic), 'i', true, "off", 0, "2", "allowed: on (1), off (0), auto (-1)"},
    {AT(, deterministic), 'i', true, "on", 1, "yes", "allowed: on (1), off (0), auto (-1)"},
    {AT(, deterministic), 'i', true, "auto", -1, "-2", "allowed: on (1), off (0), auto (-1)"},
    {AT(memory., wire_dtype), 'i', true, "bf16", 2, "f16", "allowed: f32, bf16, or 0"},
    {AT(memory., wire_dtype), 'i', true, "f32", 1, "fp32", "allowed: f32, bf16, or 0"},
    {AT(memory., grad_sum_dtype), 'i', true, "bf16", 2, "f16", "allowed: f32, bf16, or 0"},
    {AT(memory., states), 'i', true, "file", ZERO_STATES_FILE, "disk", "device (0), host (1), file (2)"},
    {AT(memory., seed), 'l', true, "9007199254740991", INT64_C(9007199254740991), "9007199254740992",
     "allowed: 0 to 9007199254740991"},
    {AT(optim., masters), 'i', true, "none", ZERO_MASTERS_NONE, "bf16", "f32 (0), remainder (1), none (2)"},
    {AT(optim., moments), 'i', true, "q8", ZERO_MOMENTS_Q8, "8", "f32 (0), bf16 (1), q8 (2)"},
    {AT(debug., trace), 'i', true, "1", 1, "-1", "allowed: 0, 1"},
    {AT(checkpoint., save_async), 'i', true, "on", 1, "2", "allowed: 0, 1"},
    {AT(checkpoint., save_keep), 'i', true, "3", 3, "-1", "1 and more, or 0 for all"},
    {AT(debug., check), 'i', true, "1", 1, "2", "allowed: 0, 1"},
    {AT(, device), 'i', true, "cuda", ZERO_DEVICE_CUDA, "gpu", "allowed: host, cuda"},
    {AT(, device), 'i', true, "host", ZERO_DEVICE_HOST, "0", "allowed: host, cuda"},
    {AT(launch., copy_engine), 'i', true, "off", 0, "2", "allowed: on (1), off (0), auto (-1)"},
    {AT(launch., copy_engine), 'i', true, "auto", -1, "-2", "allowed: on (1), off (0), auto (-1)"},
    {AT(memory., grad_in_place), 'i', true, "on", 1, "2", "allowed: 0, 1"},
    {AT(, hybrid), 'i', true, "HSDP", ZERO_HSDP, "fsdp", "allowed: hsdp (0), hfsdp (1)"},
    {AT(, hybrid), 'i', true, "hfsdp", ZERO_HFSDP, "none", "for neither, set dp_replicate to 1"},
    {AT(mesh., pp), 'i', true, "4", 4, "0", "allowed: 1 and more"},
    {AT(mesh., dp_replicate), 'i', true, "auto", -1, "0", "1 and more; auto (-1) for one replica per host"},
    {AT(mesh., dp_replicate), 'i', true, "2", 2, "-2", "1 and more; auto (-1)"},
    {AT(mesh., dp_shard), 'i', true, "0", 0, "auto", "1 and more, or 0 for what the other axes leave"},
    {AT(mesh., cp), 'i', true, "1", 1, "0", "allowed: 1 to 64"},
    {AT(mesh., tp), 'i', true, "2", 2, "65", "allowed: 1 to 64"},
    {AT(launch., start_timeout_ms), 'l', true, "1500", 1500, "0", "allowed: 1 to 2147483647; auto (-1)"},
    {AT(launch., start_timeout_ms), 'l', true, "auto", -1, "-2", "allowed: 1 to 2147483647; auto (-1)"},
};
#define N_TEXT (sizeof text_cases / sizeof *text_cases)

static double raw(const struct zero_config *cfg, const struct text_case *t)
{
    const char *at = (const char *)cfg + t->offset;
    int32_t i;
    int64_t l;
    float f;
    double d;
    switch (t->type) {
    case 'i':
        memcpy(&i, at, sizeof i);
        return i;
    case 'l':
        memcpy(&l, at, sizeof l);
        return (double)l;
    case 'f':
        memcpy(&f, at, sizeof f);
        return (double)f;
    default:
        memcpy(&d, at, sizeof d);
        return d;
    }
}

static void test_set(void **state)
{
    for (size_t i = 0; i < N_TEXT; i++) {
        const struct text_case *t = &text_cases[i];
        struct zero_config cfg = ZERO_CONFIG_INIT, other = ZERO_CONFIG_INIT;
        if (zero_config_set(&cfg, t->key, t->good))
            fail_msg("%s = %s: %s", t->key, t->good, zero_last_error());
        if (raw(&cfg, t) != t->raw)
            fail_msg("%s = %s gave %g", t->key, t->good, raw(&cfg, t));
        /* No other field changed. */
        size_t bytes = t->type == 'i' || t->type == 'f' ? 4 : 8;
        memcpy((char *)&other + t->offset, (char *)&cfg + t->offset, bytes);
        assert_memory_equal(&cfg, &other, sizeof cfg);

        if (zero_config_set(&cfg, t->key, t->bad) != ZERO_ERR_ARG)
            fail_msg("%s = \"%s\" was taken", t->key, t->bad);
        char start[128];
        snprintf(start, sizeof start, "%s is \"%s\"; allowed: ", t->key, t->bad);
        assert_message(start);
        assert_message(t->allowed);
        assert_memory_equal(&cfg, &other, sizeof cfg); /* nothing changed */

        struct zero_config same = ZERO_CONFIG_INIT;
        assert_int_equal(zero_config_set(&same, t->whole_key, t->good), 0);
        assert_memory_equal(&cfg, &same, sizeof cfg);
    }
}

static void test_environment(void **state)
{
    for (size_t i = 0; i < N_TEXT; i++) {
        const struct text_case *t = &text_cases[i];
        char name[64] = "ZERO_";
        for (size_t k = 0; k <= strlen(t->key); k++)
            name[5 + k] = (char)(t->key[k] >= 'a' ? t->key[k] - 'a' + 'A' : t->key[k]);
        struct zero_config cfg = ZERO_CONFIG_INIT;
        cfg.stage = 3; /* hybrids exist at stage 3 only */
        setenv(name, t->good, 1);
        struct zr_config c = accepted(&cfg);
        if (raw(&c.user, t) != (t->env ? t->raw : raw(&cfg, t)))
            fail_msg("%s=%s gave %g", name, t->good, raw(&c.user, t));
        setenv(name, t->bad, 1);
        if (t->env && *t->bad) {
            char start[128];
            snprintf(start, sizeof start, "%s is \"%s\"; allowed: ", name, t->bad);
            refuse(&cfg, start);
            assert_message(t->allowed);
        } else {
            accepted(&cfg); /* not a variable, or empty: counts as unset */
        }
        unsetenv(name);
    }
    /* The environment overrides the program and follows the same rules. */
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.stage = 1;
    setenv("ZERO_STAGE", "3", 1);
    setenv("ZERO_OPTIMIZER", "sgd", 1);
    setenv("ZERO_PREFETCH", "none", 1);
    setenv("ZERO_RANK", "not ours to read", 1);
    setenv("ZERO_WORLD_SIZE", "nor this", 1);
    struct zr_options o = accepted(&cfg).options;
    assert_true(o.stage == 3 && o.optim[0].optimizer == ZERO_SGD && o.optim[0].n_states == 0 &&
                o.prefetch == 0);
    setenv("ZERO_HYBRID", "hfsdp", 1);
    setenv("ZERO_DP_REPLICATE", "auto", 1);
    setenv("ZERO_DP_SHARD", "8", 1);
    setenv("ZERO_TP", "2", 1);
    setenv("ZERO_PP", "3", 1);
    struct zr_config c = accepted(&cfg);
    assert_true(c.user.hybrid == ZERO_HFSDP && c.user.mesh.dp_replicate == ZERO_AUTO &&
                c.user.mesh.dp_shard == 8 && c.user.mesh.tp == 2 && c.user.mesh.pp == 3);
    clear_environment(state);
}

static void test_misspelt_variable(void **state)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.debug.log = keep_line;
    cfg.debug.log_arg = logged;
    setenv("ZERO_STAGE", "2", 1);
    setenv("ZERO_RANK", "1", 1);
    setenv("ZERO_ISA", "avx2", 1);
    setenv("ZERO_FAIL_ALLOC", "7", 1);
    setenv("ZERO_LOG", "off", 1);
    *logged = 0;
    assert_int_equal(accepted(&cfg).options.stage, 2);
    assert_string_equal(logged, "");
    setenv("ZERO_STGE", "3", 1);
    assert_int_equal(accepted(&cfg).options.stage, 2);
    assert_string_equal(logged, "warning: ZERO_STGE is not known and was ignored; did you mean ZERO_STAGE?");
    unsetenv("ZERO_STGE");
    *logged = 0;
    setenv("ZERO_PREFETCHED_UNITS", "3", 1);
    assert_int_equal(accepted(&cfg).options.stage, 2);
    assert_string_equal(
        logged, "warning: ZERO_PREFETCHED_UNITS is not known and was ignored; the nearest is ZERO_PREFETCH");
    unsetenv("ZERO_PREFETCHED_UNITS");
    static const char *const misspelt[][2] = {
        {"ZERO_STAEG", "; did you mean ZERO_STAGE?"},
        {"ZERO_RANKS", "; did you mean ZERO_RANK?"},
        {"ZERO_WORLDSIZE", "; did you mean ZERO_WORLD_SIZE?"},
        {"ZERO_RENDEZVOS", "; did you mean ZERO_RENDEZVOUS?"},
        {"ZERO_stage", "; did you mean ZERO_STAGE?"},
        {"ZERO_SHARD_GROUP", " is not known and was ignored; "},
        {"ZERO_SHARD_GROUP", "ZERO_DP_REPLICATE"},
        {"ZERO_MPI", " is not known and was ignored: -Dmpi chooses the MPI when libzero is built"},
        {"ZERO_MPI_SHIMS", " is not known and was ignored: the module for MPI lies beside libzero.so"},
        {"ZERO_A_NAME_THAT_IS_LONGER_THAN_ANY_VARIABLE_THAT_THIS_LIBRARY_EVER_KNEW",
         "; the nearest is ZERO_"}};
    for (size_t i = 0; i < sizeof misspelt / sizeof *misspelt; i++) {
        *logged = 0;
        setenv(misspelt[i][0], "3", 1);
        accepted(&cfg);
        if (!strstr(logged, misspelt[i][0]) || !strstr(logged, misspelt[i][1]))
            fail_msg("%s: \"%s\"", misspelt[i][0], logged);
        unsetenv(misspelt[i][0]);
    }
    *logged = 0;
    setenv("ZERO_TEST_SEED", "3", 1); /* read by the tests only */
    accepted(&cfg);
    assert_string_equal(logged, "");
    unsetenv("ZERO_TEST_SEED");
    unsetenv("ZERO_LOG");
    unsetenv("ZERO_ISA");
    unsetenv("ZERO_FAIL_ALLOC");
    clear_environment(state);
}

static void test_bad_fields(void **state)
{
#define BAD(field, value, message)                                                                           \
    do {                                                                                                     \
        struct zero_config cfg = ZERO_CONFIG_INIT;                                                           \
        cfg.field = value;                                                                                   \
        refuse(&cfg, message);                                                                               \
    } while (0)
    BAD(stage, 4, "stage is 4; allowed: 0, 1, 2, 3");
    BAD(stage, -1, "stage is -1; allowed: 0, 1, 2, 3");
    BAD(launch.backend, 99, "backend is 99; allowed: auto, self, shm, nccl, mpi");
    BAD(launch.rank, -1, "rank is -1; allowed: 0 to world - 1");
    BAD(launch.rank, 2, "rank is 2 but world is 0; allowed: ");
    BAD(launch.world, -1, "world is -1; allowed: 1 and more");
    BAD(launch.timeout_ms, -30, "timeout_ms is -30; allowed: 1 to 2147483647");
    BAD(launch.timeout_ms, INT64_MAX, "timeout_ms is 9223372036854775807; allowed: ");
    BAD(launch.timeout_ms, 0, "timeout_ms is 0; allowed: 1 to 2147483647");
    BAD(launch.start_timeout_ms, 0, "start_timeout_ms is 0; allowed: 1 to 2147483647; auto (-1)");
    BAD(launch.name, "0123456789012345678901234567890123456789012345678901234567890123",
        "name is \"0123456789012345678901234567890123456789012345678901234567890123\"; allowed: up to 63 "
        "characters, none of them a control character");
    BAD(launch.name, "a\nb\x7f",
        "name is \"a\\x0ab\\x7f\"; allowed: up to 63 characters, none of them a control character");
    BAD(optim.optimizer, 0,
        "optimizer is 0: a struct zero_optim starts from ZERO_OPTIM_INIT; allowed: adamw, adam, sgd, "
        "rmsprop");
    BAD(optim.optimizer, 99, "optimizer is 99; allowed: adamw, adam, sgd, rmsprop");
    BAD(optim.beta1, 1.0f, "beta1 is 1; allowed: 0 and more, less than 1");
    BAD(optim.beta1, -0.5f, "beta1 is -0.5; allowed: 0 and more, less than 1; auto (-1)");
    BAD(optim.eps, -1e-8f, "eps is -9.99999994e-09; allowed: a finite number, 0 or more; auto (-1)");
    BAD(optim.eps, NAN, "eps is nan; allowed: ");
    BAD(optim.beta1, NAN, "beta1 is nan; allowed: ");
    BAD(optim.beta2, 2.5f, "beta2 is 2.5; allowed: 0 and more, less than 1");
    BAD(optim.beta2, -INFINITY, "beta2 is -inf; allowed: ");
    BAD(optim.eps, INFINITY, "eps is inf; allowed: a finite number");
    BAD(optim.weight_decay, -0.5f, "weight_decay is -0.5; allowed: a finite number, 0 or more");
    BAD(clip, -1.0f, "clip is -1; allowed: a finite number, 0 or more");
    BAD(clip, NAN, "clip is nan; allowed: ");
    BAD(grad_scale, (double)NAN, "grad_scale is nan; allowed: a finite number other than 0");
    BAD(grad_scale, 0, "grad_scale is 0; allowed: a finite number other than 0");
    BAD(grad_scale, (double)-INFINITY, "grad_scale is -inf; allowed: ");
    BAD(grad_accum_steps, -4, "grad_accum_steps is -4; allowed: 1 and more");
    BAD(grad_accum_steps, 0, "grad_accum_steps is 0; allowed: 1 and more");
    BAD(grad_sum, 2, "grad_sum is 2; allowed: 0, 1");
    BAD(optim.n_states, 5, "n_states is 5; allowed: 0, 1, 2, 3, 4");
    BAD(optim.n_states, 1, "n_states is 1 but update is NULL; allowed: 0");
    BAD(memory.param_budget_bytes, -2, "param_budget_bytes is -2; allowed: bytes");
    BAD(memory.prefetch, -1, "prefetch is -1; allowed: 1 and more, or 0 for none");
    BAD(device, 0, "device is 0; allowed: host, cuda");
    BAD(launch.copy_engine, -2, "copy_engine is -2; allowed: on (1), off (0), auto (-1)");
    BAD(hybrid, 2, "hybrid is 2; allowed: hsdp (0), hfsdp (1); for neither, set dp_replicate to 1");
    BAD(mesh.dp_replicate, 0, "dp_replicate is 0; allowed: 1 and more; auto (-1) for one replica per host");
    BAD(mesh.dp_shard, -1, "dp_shard is -1; allowed: 1 and more, or 0 for what the other axes leave");
    BAD(mesh.tp, 0, "tp is 0; allowed: 1 to 64");
    BAD(mesh.tp, 65, "tp is 65; allowed: 1 to 64");
    BAD(optim.weight_decay, NAN, "weight_decay is nan; allowed: ");
    BAD(deterministic, 2, "deterministic is 2; allowed: on (1), off (0), auto (-1)");
    BAD(memory.wire_dtype, 3, "wire_dtype is f16; allowed: f32, bf16, or 0");
    BAD(memory.wire_dtype, -1, "wire_dtype is -1; allowed: f32, bf16, or 0");
    BAD(memory.n_order, -1, "n_order is -1; allowed: 0 and more");
    BAD(memory.n_order, 3, "order is NULL but n_order is 3; allowed: both");
    BAD(debug.trace, 7, "trace is 7; allowed: 0, 1");
#undef BAD
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.launch.world = cfg.launch.rank = 3;
    refuse(&cfg, "rank is 3; allowed: 0 to 2 (world is 3)");
    cfg = (struct zero_config)ZERO_CONFIG_INIT;
    cfg.optim.update = an_update;
    cfg.optim.optimizer = ZERO_ADAM;
    refuse(&cfg, "optimizer is adam but update is set");
    cfg.optim.optimizer = ZERO_ADAMW;
    cfg.optim.beta1 = 0;
    refuse(&cfg,
           "beta1 is 0, beta2 -1, eps -1 and weight_decay 0, but update is set, which uses only lr_scale");
    /* With grad_in_place the model's own sums have no fixed order. An explicit deterministic is then refused,
     * and the default becomes 0. If there is nothing to sum in place, both may be set. */
    cfg = (struct zero_config)ZERO_CONFIG_INIT;
    cfg.stage = 1;
    cfg.memory.grad_in_place = cfg.deterministic = 1;
    cfg.grad_accum_steps = 4;
    refuse(&cfg, "grad_in_place is 1 and deterministic is 1, with grad_accum_steps 4");
    cfg.deterministic = ZERO_AUTO;
    assert_false(accepted(&cfg).options.deterministic);
    cfg.deterministic = 1;
    cfg.stage = 2;
    refuse(&cfg, "grad_in_place is 1 and deterministic is 1, with grad_accum_steps 4");
    cfg.max_grad_accum_steps = 3;
    refuse(&cfg, "max_grad_accum_steps is 3 but grad_accum_steps is 4; allowed: 0, or at least");
    cfg.grad_accum_steps = 1;
    refuse(&cfg, "grad_in_place is 1 and deterministic is 1, with max_grad_accum_steps 3");
    cfg.max_grad_accum_steps = 0;
    assert_true(accepted(&cfg).options.deterministic);
    struct zero_call call = {0, ZERO_FORWARD, 0};
    cfg = (struct zero_config)ZERO_CONFIG_INIT;
    cfg.memory.order = &call;
    refuse(&cfg, "order is set but n_order is 0");
}

/* Expects an error about the head of a configuration, which records the version that wrote it. */
static void refuse_head(struct zero_config *cfg, const char *message)
{
    refuse(cfg, message);
    struct zero_config before = *cfg;
    assert_int_equal(zero_config_set(cfg, "stage", "1"), ZERO_ERR_ARG);
    assert_message(message);
    assert_message("zero_config_set");
    assert_memory_equal(cfg, &before, sizeof before);
}

static void test_head(void **state)
{
    struct zr_config c;
    struct zero_config cfg = ZERO_CONFIG_INIT, none;
    assert_int_equal(zr_config_resolve(NULL, &c), ZERO_ERR_ARG);
    assert_message("cfg is NULL; it must be a configuration initialised by ZERO_CONFIG_INIT");
    memset(&none, 0, sizeof none);
    refuse_head(&none, "the configuration was not initialised: its size and version are 0; initialise it by "
                       "ZERO_CONFIG_INIT or zero_config_init");
    memset(&none, 0xa5, sizeof none);
    refuse_head(&none, "version is 0xa5a5a5a5 and size is ");
    assert_message("did not initialise cfg by ZERO_CONFIG_INIT");

    /* The program was built with another zero.h. */
    const struct {
        size_t size;
        uint32_t version;
    } heads[] = {{0, ZERO_ABI_VERSION},
                 {8, ZERO_ABI_VERSION},
                 {sizeof cfg - 8, ZERO_ABI_VERSION},
                 {sizeof cfg + 8, ZERO_ABI_VERSION},
                 {(size_t)-1, ZERO_ABI_VERSION},
                 {sizeof cfg, 0},
                 {sizeof cfg, ZERO_ABI_VERSION - 1},
                 {sizeof cfg, ZERO_ABI_VERSION + 1}};
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++) {
        char text[128];
        cfg.size = heads[i].size;
        cfg.version = heads[i].version;
        snprintf(text, sizeof text, "version is 0x%x and size is %zu; allowed: 0x%x and %zu", cfg.version,
                 cfg.size, ZERO_ABI_VERSION, sizeof cfg);
        refuse_head(&cfg, text);
        assert_message("the program was built with another zero.h");
        if (cfg.size == sizeof cfg)
            continue;
        memset(&none, 0x5a, sizeof none);
        const struct zero_config before = none;
        assert_int_equal(zero_config_init(&none, cfg.size), ZERO_ERR_ARG);
        snprintf(text, sizeof text, "zero_config_init: size is %zu; allowed: %zu", cfg.size, sizeof cfg);
        assert_message(text);
        assert_message("the program was built with another zero.h");
        assert_memory_equal(&none, &before, sizeof none);
    }
    assert_int_equal(zero_config_init(NULL, sizeof cfg), ZERO_ERR_ARG);
    assert_message("cfg is NULL");
}

static void test_unknown_key(void **state)
{
    static const char *const keys[][2] = {{"stge", "stage"},
                                          {"Stage", "stage"},
                                          {"weight-decay", "weight_decay"},
                                          {"accum", "grad_accum_steps"},
                                          {"grad_accum", "grad_accum_steps"},
                                          {"grad_accum_step", "grad_accum_steps"},
                                          {"timeout", "timeout_ms"},
                                          {"wire", "wire_dtype"},
                                          {"prefetch_depth", "prefetch"},
                                          {"param_budget", "param_budget_bytes"},
                                          {"beta3", "beta1"},
                                          {"shard_group", "dp_replicate"},
                                          {"optim.states", "memory.states"},
                                          {"memory.prefetched", "memory.prefetch"},
                                          {"memory.memory.states", "memory.states"},
                                          {"mesh.shard_group", "mesh.dp_replicate"},
                                          {"launch.stge", "stage"},
                                          {".stage", "stage"},
                                          {"memory.", "mesh.pp"},
                                          {"", "pp"}};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char text[128];
        assert_int_equal(zero_config_set(&cfg, keys[i][0], "1"), ZERO_ERR_ARG);
        snprintf(text, sizeof text, "there is no configuration key \"%s\"; the nearest is \"", keys[i][0]);
        assert_message(text);
        snprintf(text, sizeof text, "the nearest is \"%s\"", keys[i][1]);
        assert_message(text);
    }
    assert_int_equal(zero_config_set(&cfg, "mpi", "ompi"), ZERO_ERR_ARG);
    assert_message("there is no configuration key \"mpi\": -Dmpi chooses the MPI when libzero is built");
    assert_int_equal(zero_config_set(&cfg, "launch.mpi", "ompi"), ZERO_ERR_ARG);
    assert_message("there is no configuration key \"launch.mpi\": -Dmpi chooses");
    char longest[5000];
    memset(longest, 'x', sizeof longest);
    longest[sizeof longest - 1] = 0;
    assert_int_equal(zero_config_set(&cfg, longest, "1"), ZERO_ERR_ARG);
    assert_int_equal(zero_config_set(&cfg, "stage", longest), ZERO_ERR_ARG);
    const struct zero_config untouched = ZERO_CONFIG_INIT;
    assert_memory_equal(&cfg, &untouched, sizeof cfg);
}

static void test_not_settable(void **state)
{
    static const char *const keys[] = {"size",     "rendezvous",   "update",      "update_arg", "order",
                                       "n_order",  "stream",       "log",         "log_arg",    "nccl_comm",
                                       "exchange", "exchange_arg", "mpi_comm",    "version",    "interface",
                                       "name",     "optim_groups", "memory.order"};
    struct zero_config cfg = ZERO_CONFIG_INIT;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        char text[64];
        assert_int_equal(zero_config_set(&cfg, keys[i], "1"), ZERO_ERR_ARG);
        snprintf(text, sizeof text, "%s cannot be set from text: it is ", keys[i]);
        assert_message(text);
    }
    assert_int_equal(zero_config_set(NULL, "stage", "1"), ZERO_ERR_ARG);
    assert_message("cfg is NULL");
    assert_int_equal(zero_config_set(&cfg, NULL, "1"), ZERO_ERR_ARG);
    assert_message("key is NULL");
    assert_int_equal(zero_config_set(&cfg, "stage", NULL), ZERO_ERR_ARG);
    assert_message("value is NULL");
}

static void test_locale(void **state)
{
    /* Locales that write 1.5 as 1,5; skipped if the machine has none. */
    if (!setlocale(LC_NUMERIC, "de_DE.UTF-8") && !setlocale(LC_NUMERIC, "fr_FR.UTF-8"))
        skip();
    struct zero_config cfg = ZERO_CONFIG_INIT;
    int err = zero_config_set(&cfg, "clip", "1.5");
    setlocale(LC_NUMERIC, "C");
    assert_int_equal(err, 0);
    assert_true(cfg.clip == 1.5f);
}

#define F ZERO_FORWARD
#define B ZERO_BACKWARD

static void refuse_order(const struct zero_call *order, int n, const char *message)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.memory.order = order;
    cfg.memory.n_order = n;
    refuse(&cfg, message);
}

static void test_order(void **state)
{
    /* An embedding held open around a layer, overlap, nesting of one unit, and recompute inside backward. */
    const struct zero_call good[] = {{0, F, 0}, {1, F, 0}, {0, F, 1}, {1, F, 1}, {5, F, 0},
                                     {5, F, 0}, {5, F, 1}, {5, F, 1}, {1, B, 0}, {1, F, 0},
                                     {1, F, 1}, {0, B, 0}, {1, B, 1}, {0, B, 1}};
    const int n = sizeof good / sizeof *good;
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.memory.order = good;
    cfg.memory.n_order = n;
    struct zr_config c = accepted(&cfg);
    assert_int_equal(c.options.n_order, n);
    assert_ptr_equal(c.options.order, c.order);
    for (int i = 0; i < n; i++) {
        assert_int_equal(c.order[i].unit, good[i].unit);
        assert_int_equal(c.order[i].phase, good[i].phase);
        assert_int_equal(c.order[i].is_end, good[i].is_end);
    }
    zr_config_release(&c);
    assert_null(c.options.order);
    zr_config_release(&c); /* a second release is harmless */

    for (int cut = 1; cut < n; cut++) { /* a prefix is valid exactly if nothing is open after it */
        int open = 0;
        for (int i = 0; i < cut; i++)
            open += good[i].is_end ? -1 : 1;
        cfg.memory.n_order = cut;
        struct zr_config part;
        int err = zr_config_resolve(&cfg, &part);
        assert_int_equal(err, open ? ZERO_ERR_ARG : 0);
        if (!err)
            zr_config_release(&part);
        else
            assert_message("which is never ended");
    }

    refuse_order((struct zero_call[]){{-1, F, 0}, {-1, F, 1}}, 2, "order[0].unit is -1; allowed: 0 and more");
    refuse_order((struct zero_call[]){{0, F, 0}, {0, 5, 1}}, 2,
                 "order[1].phase is 5; allowed: 1 (ZERO_FORWARD), 2");
    refuse_order((struct zero_call[]){{0, 0, 0}, {0, F, 1}}, 2,
                 "order[0].phase is 0; allowed: 1 (ZERO_FORWARD), 2");
    refuse_order((struct zero_call[]){{0, F, 0}, {0, F, 2}}, 2,
                 "order[1].is_end is 2; allowed: 0 (begin), 1 (end)");
    refuse_order((struct zero_call[]){{0, F, 0}, {1, F, 1}}, 2,
                 "order[0] begins unit 0 (forward), which is never ended");
    refuse_order((struct zero_call[]){{0, F, 0}, {0, F, 1}, {0, B, 1}}, 3,
                 "order[2] ends unit 0 (backward), which is not open");
    refuse_order((struct zero_call[]){{7, B, 1}}, 1, "order[0] ends unit 7 (backward), which is not open");
    refuse_order((struct zero_call[]){{2, B, 0}, {2, F, 0}, {2, B, 1}, {2, F, 1}}, 4,
                 "order[2] ends unit 2 (backward), whose innermost open bracket, order[1], is forward");
    refuse_order((struct zero_call[]){{2, B, 0}, {2, F, 0}, {2, F, 1}}, 3,
                 "order[0] begins unit 2 (backward), which is never ended");
}

/* Configuration, messages and communicators use the same name for a backend. */
static void test_backend_rows(void **state)
{
#define CHECK_ROW(name_, value, key, text)                                                                   \
    assert_string_equal(zr_backend_row(value)->name, #key);                                                  \
    assert_int_equal(zr_backend_number(zr_backend_row(value)), value);                                       \
    assert_non_null(zr_backend_row(value)->open);
    ZERO_BACKEND_MAP(CHECK_ROW)
#undef CHECK_ROW
    assert_null(zr_backend_row(ZERO_BACKEND_AUTO));
    assert_null(zr_backend_row(ZR_BACKEND_COUNT));
    assert_null(zr_backend_row(-1));
    struct zero_config cfg = ZERO_CONFIG_INIT;
    void *user_comm;
    cfg.launch.nccl_comm = &user_comm; /* it belongs to another device */
    assert_null(zr_backend_of_user_comm(&cfg, &user_comm));
    assert_null(user_comm);
    cfg.launch.mpi_comm = &cfg;
    assert_ptr_equal(zr_backend_of_user_comm(&cfg, &user_comm), zr_backend_row(ZERO_BACKEND_MPI));
    assert_ptr_equal(user_comm, &cfg);
    cfg.device = ZERO_DEVICE_CUDA;
    assert_ptr_equal(zr_backend_of_user_comm(&cfg, &user_comm), zr_backend_row(ZERO_BACKEND_NCCL));
    assert_ptr_equal(user_comm, cfg.launch.nccl_comm);
}

static void test_value_texts(void **state)
{
    static const struct {
        const char *key;
        double value;
        const char *text;
    } rows[] = {
        {"backend", ZERO_BACKEND_SHM, "shm"},
        {"device", ZERO_DEVICE_CUDA, "cuda"},
        {"hybrid", ZERO_HFSDP, "hfsdp"},
        {"wire_dtype", ZERO_BF16, "bf16"},
        {"wire_dtype", 0, "0"},
        {"masters", ZERO_MASTERS_REMAINDER, "remainder"},
        {"moments", ZERO_MOMENTS_Q8, "q8"},
        {"init_from", ZERO_INIT_RANK0, "rank0"},
        {"stage", 3, "3"},
        {"check", 1, "1"},
        {"beta1", 0.5, "0.5"},
        {"grad_scale", 1e300, "1e+300"},
        {"param_budget_bytes", 0x1p63, "9.22337204e+18"},
        {"seed", 1764501235, "1764501235"},
        {"seed", 0x1p53 - 1, "9007199254740991"},
        {"n_tensors", 1e6, "1000000"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        assert_string_equal(zr_config_value_text(rows[i].key, rows[i].value).text, rows[i].text);
}

static void test_backend(void **state)
{
    enum {
        AUTO = ZERO_BACKEND_AUTO,
        SELF = ZERO_BACKEND_SELF,
        SHM = ZERO_BACKEND_SHM,
        NCCL = ZERO_BACKEND_NCCL
    };
    enum { HOST = ZERO_DEVICE_HOST, CUDA = ZERO_DEVICE_CUDA };
    static const struct {
        int device, backend, world, out;
        const char *refused;
    } cases[] = {
        {HOST, AUTO, 1, SELF, NULL},
        {HOST, AUTO, 2, SHM, NULL},
        {HOST, SELF, 1, SELF, NULL},
        {HOST, SELF, 2, 0, "backend is self, which is for world 1, but world is 2; allowed: auto, shm"},
        {HOST, SHM, 1, SHM, NULL},
        {HOST, SHM, 4, SHM, NULL},
        {HOST, NCCL, 2, 0, "backend is nccl, but device is host; allowed: auto, shm"},
        {CUDA, AUTO, 1, SELF, NULL},
        {CUDA, AUTO, 8, NCCL, NULL},
        {CUDA, NCCL, 1, NCCL, NULL},
        {CUDA, SELF, 8, 0, "backend is self, which is for world 1, but world is 8; allowed: auto, nccl"},
        {CUDA, SHM, 1, 0, "backend is shm, but device is cuda; allowed: auto, nccl, self"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        for (int deterministic = -1; deterministic <= 1; deterministic++) {
            struct zero_config cfg = ZERO_CONFIG_INIT;
            cfg.device = cases[i].device;
            cfg.launch.backend = cases[i].backend;
            cfg.deterministic = deterministic;
            struct zr_config c = accepted(&cfg);
            const struct zr_backend *got = NULL;
            assert_int_equal(zr_backend_choose(&c, cases[i].world, &got),
                             cases[i].refused ? ZERO_ERR_ARG : 0);
            assert_ptr_equal(got, zr_backend_row(cases[i].out));
            if (cases[i].refused)
                assert_message(cases[i].refused);
            else /* the default where it costs nothing */
                assert_int_equal(c.options.deterministic,
                                 deterministic > 0 || (deterministic == ZERO_AUTO && cases[i].out != NCCL));
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_defaults_by_optimizer),
        cmocka_unit_test(test_groups),
        cmocka_unit_test(test_zero_means_zero),
        cmocka_unit_test(test_set),
        cmocka_unit_test(test_environment),
        cmocka_unit_test(test_misspelt_variable),
        cmocka_unit_test(test_bad_fields),
        cmocka_unit_test(test_head),
        cmocka_unit_test(test_unknown_key),
        cmocka_unit_test(test_not_settable),
        cmocka_unit_test(test_locale),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_backend),
        cmocka_unit_test(test_backend_rows),
        cmocka_unit_test(test_value_texts),
    };
    return cmocka_run_group_tests_name("config", tests, clear_environment, NULL);
}
