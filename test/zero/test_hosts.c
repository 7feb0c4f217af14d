/* SPDX-License-Identifier: Apache-2.0 */
/* test_hosts.c: contexts whose ranks are on several hosts, or claim to be. Tests what shared memory refuses,
 * what is logged, and how memory is divided. On the GPU stand-in, the bits of training, values and
 * checkpoints must not depend on hosts. */
#include "comm/identity.h"
#include "kernels/host/host_memory.h"
#include "test/cmocka.h"
#include "test/zero/toy_net.h"
#include "test/zero/where.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STEPS = 2, WORLD = 4 };

struct setup {
    const char *what;
    int machine[WORLD], container[WORLD];
    int cannot_open; /* the rank whose memory cannot be mapped; -1: none */
    int code;
    const char *says; /* part of every rank's error, log or zero_stats.path */
    /* for training: each rank's micro-batch, and the folder of a checkpoint to load or to save */
    int stage, micro[WORLD];
    const char *load, *save;
    /* each machine has 1 byte left; a memory control group has, with an equal id on all machines */
    bool machine_is_full, group_is_full;
    /* for pipeline stages: bytes that the machine, and a memory control group, have left; 0: enough */
    int64_t machine_has, group_has;
    /* the memory that zero_gather_all finds; NULL: it is not called */
    const struct setup *then;
};

/* --- hosts that ranks claim --- */

static _Thread_local const struct setup *setup_here;
static _Thread_local int rank_here;

static int refuse(void *arg, int rank, int pid, int fd)
{
    errno = EACCES;
    return -1;
}

void __real_zr_identity_read(struct zr_identity *out);
void __wrap_zr_identity_read(struct zr_identity *out);

void __wrap_zr_identity_read(struct zr_identity *out)
{
    const struct setup *s = setup_here;
    __real_zr_identity_read(out);
    if (!s)
        return;
    snprintf(out->machine, sizeof out->machine, "machine %d", s->machine[rank_here]);
    snprintf(out->host_name, sizeof out->host_name, "node%d", s->machine[rank_here]);
    out->pid_namespace = (uint64_t)s->container[rank_here];
    out->open = s->cannot_open == rank_here ? refuse : NULL;
}

void __real_zr_host_memory_look(const char *root, struct zr_host_memory *out);
void __wrap_zr_host_memory_look(const char *root, struct zr_host_memory *out);

void __wrap_zr_host_memory_look(const char *root, struct zr_host_memory *out)
{
    const struct setup *s = setup_here;
    __real_zr_host_memory_look(root, out);
    if (s && s->machine_is_full)
        out->free_bytes = 1;
    if (s && s->machine_has)
        out->free_bytes = s->machine_has;
    if (s && (s->group_is_full || s->group_has)) {
        out->n_groups = 1;
        out->group[0] = (struct zr_memory_group){
            .id = 77, .free_bytes = s->group_is_full ? 1 : s->group_has, .path = "/slice"};
    }
}

static void pose(const struct toy_rank *r)
{
    setup_here = r->arg;
    rank_here = r->rank;
}

/* --- errors and log lines --- */

struct lines {
    char text[8192];
};

static void keep_line(void *arg, const char *line)
{
    struct lines *l = arg;
    size_t used = strlen(l->text);
    snprintf(l->text + used, sizeof l->text - used, "%s\n", line);
}

static void wrap_on_hosts(struct toy_rank *r)
{
    struct toy m;
    struct lines log = {""};
    zero_ctx *z = NULL;
    pose(r);
    toy_make(&m);
    struct zero_config cfg = toy_config(r, 2);
    cfg.debug.log = keep_line;
    cfg.debug.log_arg = &log;
    toy_note(r, zero_wrap(&z, m.table, TOY_TENSORS, &cfg));
    zero_unwrap(&z);
    if (!r->err)
        snprintf(r->text, sizeof r->text, "%.2047s", log.text);
    if (r->err && !toy_untouched(&m))
        toy_wrong(r, "something was changed");
    toy_free(&m);
}

static void expect_refused(const struct setup *s)
{
    struct toy_rank r[WORLD];
    toy_ranks(WORLD, wrap_on_hosts, (void *)s, r);
    for (int k = 0; k < WORLD; k++)
        if (r[k].err != s->code || r[k].wrong[0] || !strstr(r[k].text, s->says))
            fail_msg("%s: rank %d: %d \"%s\", expected %d \"%s\"; %s", s->what, k, r[k].err, r[k].text,
                     s->code, s->says, r[k].wrong);
}

static void shared_memory_is_refused(void **state)
{
    const struct setup machines = {.what = "two machines",
                                   .machine = {0, 0, 1, 1},
                                   .cannot_open = -1,
                                   .code = ZERO_ERR_NOTSUP,
                                   .says =
                                       "shared memory needs all ranks on one host: rank 0 is on \"node0\", "
                                       "rank 2 on \"node1\""};
    const struct setup containers = {
        .what = "two containers",
        .container = {7, 8, 7, 7},
        .cannot_open = -1,
        .code = ZERO_ERR_NOTSUP,
        .says = "rank 0 (\"node0\") and rank 1 (\"node0\") are in different containers"};
    const struct setup no_access = {.what = "no access",
                                    .cannot_open = 3,
                                    .code = ZERO_ERR_NOTSUP,
                                    .says = "rank 3 cannot open the memory of rank 0: Permission denied"};
    const struct setup well = {.what = "one host", .cannot_open = -1, .says = "rank "};
    expect_refused(&machines);
    expect_refused(&containers);
    expect_refused(&no_access);
    expect_refused(&well);
}

/* Wraps with a launcher's local rank, and looks for the warning that it contradicts the hosts that ranks
 * found. Two ranks could then use one GPU. Ranks are processes, because the launcher's variables belong to a
 * process. */
static int wrap_as_launched(const struct toy_rank *at, const char *local_rank, const char *expected)
{
    struct toy_rank r = *at;
    struct toy m;
    struct lines log = {""};
    char rank[16], world[16];
    zero_ctx *z = NULL;
    struct zero_config cfg = toy_config(&r, 2);
    snprintf(rank, sizeof rank, "%d", r.rank);
    snprintf(world, sizeof world, "%d", r.world);
    setenv("ZERO_RANK", rank, 1);
    setenv("ZERO_WORLD_SIZE", world, 1);
    setenv("ZERO_LOCAL_RANK", local_rank, 1);
    cfg.launch.rank = cfg.launch.world = 0;
    cfg.debug.log = keep_line;
    cfg.debug.log_arg = &log;
    toy_make(&m);
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    zero_unwrap(&z);
    toy_free(&m);
    bool as_expected = *expected ? strstr(log.text, expected) != NULL : !strstr(log.text, "local rank");
    if (err || !as_expected)
        fprintf(stderr, "rank %d: %d %s, expected \"%s\" in: %s\n", r.rank, err, zero_last_error(), expected,
                log.text);
    return err || !as_expected;
}

static void local_ranks_are_compared(void **state)
{
    static const char *const said[2][2] = {{"0", "1"}, {"0", "0"}};
    for (int i = 0; i < 2; i++) {
        struct toy_rank r[2];
        pid_t id[2];
        toy_set_ranks(2, NULL, r);
        fflush(NULL);
        for (int k = 0; k < 2; k++)
            if ((id[k] = fork()) == 0)
                _exit(wrap_as_launched(&r[k], said[i][k],
                                       i == 1 && k == 1 ? "zero-run says that this is local rank 0, but "
                                                          "among the 2 ranks that share memory it is number 1"
                                                        : ""));
        for (int k = 0; k < 2; k++) {
            int status = 1;
            waitpid(id[k], &status, 0);
            assert_int_equal(status, 0);
        }
    }
}

/* --- training, on the GPU stand-in --- */

#define TRY(call)                                                                                            \
    do {                                                                                                     \
        if (!err && (err = (call)))                                                                          \
            toy_note(r, err);                                                                                \
    } while (0)

static _Thread_local struct zero_config open_cfg;

static void wait_for_model(void)
{
    where_wait(&open_cfg);
}

/* Checks that a load gives each rank's data. */
static int compare_rank_data(struct toy_rank *r, zero_ctx *z)
{
    int err = 0;
    for (int32_t k = 0; k < r->world; k++) {
        int32_t data = -1;
        struct zero_data_info info = {0};
        TRY(zero_read_data(z, k, 0, sizeof data, &data, &info));
        if (!err && (info.n_saved != r->world || info.bytes != sizeof data || data != 100 + k))
            toy_wrong(r, "rank %d of %d has saved %d, in %lld bytes", k, info.n_saved, data,
                      (long long)info.bytes);
    }
    return err;
}

static void train_on_hosts(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    struct toy m;
    struct zero_stats stats = {.path = NULL};
    zero_ctx *z = NULL;
    int32_t data = 100 + r->rank;
    int err = 0;
    pose(r);
    toy_make(&m);
    if (r->rank) /* the values of rank 0 are used */
        for (int t = 0; t < TOY_TENSORS; t++)
            memset(m.own[t], 0x33, (size_t)toy_elems(t) * 2);
    open_cfg = toy_config(r, s->stage);
    open_cfg.init_from = ZERO_INIT_RANK0;
    where_open(r->rank, &open_cfg);
    TRY(zero_wrap(&z, m.table, TOY_TENSORS, &open_cfg));
    if (s->load)
        TRY(zero_load(z, s->load));
    if (s->load)
        TRY(compare_rank_data(r, z));
    for (int step = 0; !err && step < STEPS; step++) {
        double mean = r->rank;
        TRY(toy_forward(&m, z, true));
        TRY(toy_backward(&m, z, true, step, s->micro[r->rank]));
        TRY(zero_step(z, 1e-2f, NULL));
        TRY(zero_mean(z, &mean, 1));
        if (!err && mean != (r->world - 1) / 2.0)
            toy_wrong(r, "the mean of all ranks is %g", mean);
    }
    TRY(zero_get_stats(z, &stats));
    if (!err && (stats.place.rank != r->rank || stats.place.world != r->world))
        toy_wrong(r, "it is rank %d of %d", stats.place.rank, stats.place.world);
    if (!err && !strstr(stats.path, s->says))
        toy_wrong(r, "gathers go by \"%s\", expected \"%s\"", stats.path, s->says);
    if (s->save)
        TRY(zero_set_data(z, ZERO_DATA_RANK, &data, sizeof data));
    if (s->save)
        TRY(zero_save(z, s->save, NULL));
    if (s->save)
        TRY(zero_save_wait(z, NULL));
    TRY(toy_hash(z, 2, &r->hash));
    zero_unwrap(&z);
    where_close(&open_cfg);
    toy_free(&m);
}

/* --- memory of machines and control groups --- */

static void wrap_where_memory_is_short(struct toy_rank *r)
{
    struct toy m;
    zero_ctx *z = NULL;
    pose(r);
    toy_make(&m);
    open_cfg = toy_config(r, 2);
    where_open(r->rank, &open_cfg);
    toy_note(r, zero_wrap(&z, m.table, TOY_TENSORS, &open_cfg));
    zero_unwrap(&z);
    where_close(&open_cfg);
    toy_free(&m);
}

static void expect_short(const struct setup *s)
{
    struct toy_rank r[WORLD];
    toy_ranks(WORLD, wrap_where_memory_is_short, (void *)s, r);
    for (int k = 0; k < WORLD; k++)
        if (r[k].err != ZERO_ERR_NOMEM || !strstr(r[k].text, s->says))
            fail_msg("%s: rank %d: %d \"%s\", expected \"%s\"", s->what, k, r[k].err, r[k].text, s->says);
}

/* Ranks in containers share no memory, but they share the machine. Machines never share a control group, even
 * if their groups have equal ids. */
static void memory_is_divided_among_the_ranks_of_a_machine(void **state)
{
    const struct setup containers = {.what = "containers",
                                     .container = {7, 8, 9, 7},
                                     .cannot_open = -1,
                                     .machine_is_full = true,
                                     .says = "bytes for each of 4 ranks on this machine, which has 1 free"};
    const struct setup machines = {.what = "machines",
                                   .machine = {0, 1, 0, 1},
                                   .cannot_open = -1,
                                   .machine_is_full = true,
                                   .says = "bytes for each of 2 ranks on this machine, which has 1 free"};
    const struct setup groups = {.what = "groups of one number",
                                 .machine = {0, 1, 0, 1},
                                 .cannot_open = -1,
                                 .group_is_full = true,
                                 .says = "each of 2 ranks in memory control group /slice, which has 1 free"};
    if (!where_has_gpu) {
        print_message("skipped: no NCCL here\n");
        return;
    }
    expect_short(&containers);
    expect_short(&machines);
    expect_short(&groups);
}

/* ---- pipeline stages of different size ---- */

enum { LARGE = 1 << 18, SMALL = 64 };

static int64_t elems_of_stage(int rank)
{
    return rank ? SMALL : LARGE;
}

/* Wraps one of two pipeline stages. The first has nearly all of the model. r->ms returns the planned
 * bytes. */
static void wrap_stage(struct toy_rank *r)
{
    const struct setup *s = r->arg;
    const int64_t n = elems_of_stage(r->rank);
    float *memory = calloc((size_t)n, sizeof *memory);
    void *param = memory, *grad = NULL;
    const struct zero_tensor table = {
        .name = r->rank ? "small" : "large",
        .param = &param,
        .grad = &grad,
        .shape = {2, n / 2},
        .dtype = ZERO_F32,
        .flags = ZERO_STACKED,
    };
    struct zero_config cfg = toy_config(r, 3);
    struct zero_stats stats;
    zero_ctx *z = NULL;
    cfg.debug.log = toy_forget_line;
    cfg.pipeline.activation_bytes = 64;
    cfg.grad_accum_steps = 2;
    cfg.mesh.pp = 2;
    pose(r);
    int err = zero_wrap(&z, &table, 1, &cfg);
    toy_note(r, err);
    if (!err)
        toy_note(r, err = zero_get_stats(z, &stats));
    r->ms = err ? 0 : stats.planned.total;
    setup_here = s->then;
    if (!err && s->then)
        toy_note(r, zero_gather_all(z, 0));
    setup_here = NULL;
    zero_unwrap(&z);
    free(memory);
}

/* says: part of every rank's error; NULL: no error */
static void expect_stages(const struct setup *s, const char *says, int64_t needed[2])
{
    struct toy_rank r[2];
    toy_ranks(2, wrap_stage, (void *)s, r);
    for (int k = 0; k < 2; k++) {
        bool well = says ? r[k].err == ZERO_ERR_NOMEM && strstr(r[k].text, says) != NULL : !r[k].err;
        if (!well)
            fail_msg("%s: rank %d: %d \"%s\", expected \"%s\"", s->what, k, r[k].err, r[k].text,
                     says ? says : "no error");
        needed[k] = r[k].ms;
    }
}

/* The sum over both pipeline stages counts, not twice the larger one. */
static void memory_is_that_of_all_stages_of_a_machine(void **state)
{
    int64_t needs[2], none[2];
    char says[160];
    struct setup s = {.what = "enough", .cannot_open = -1};
    expect_stages(&s, NULL, needs);
    int64_t both = needs[0] + needs[1];
    assert_true(needs[0] > needs[1] + LARGE);
    s = (struct setup){.what = "just enough", .cannot_open = -1, .machine_has = both};
    expect_stages(&s, NULL, none);
    s = (struct setup){.what = "just enough of a group", .cannot_open = -1, .group_has = both};
    expect_stages(&s, NULL, none);
    s = (struct setup){.what = "one byte too few", .cannot_open = -1, .machine_has = both - 1};
    snprintf(says, sizeof says,
             "the plans of 2 ranks on this machine need %lld bytes together, but %lld are free; this rank's",
             (long long)both, (long long)both - 1);
    expect_stages(&s, says, none);
    s = (struct setup){.what = "one byte too few in a group", .cannot_open = -1, .group_has = both - 1};
    snprintf(says, sizeof says,
             "the plans of 2 ranks in memory control group /slice need %lld bytes together, but",
             (long long)both);
    expect_stages(&s, says, none);
    const int64_t all = (LARGE + SMALL) * (int64_t)sizeof(float);
    struct setup then = {.cannot_open = -1, .machine_has = all};
    s = (struct setup){.what = "just enough for all parameters", .cannot_open = -1, .then = &then};
    expect_stages(&s, NULL, none);
    then.machine_has--;
    s.what = "too little for all parameters";
    snprintf(says, sizeof says, "needs %lld bytes for 2 ranks on this machine together, but %lld are free",
             (long long)all, (long long)all - 1);
    expect_stages(&s, says, none);
}

static uint64_t hash_of(const struct setup *s, const char *what)
{
    struct toy_rank r[WORLD];
    toy_run(WORLD, train_on_hosts, (void *)s, r, what);
    for (int k = 1; k < WORLD; k++)
        assert_int_equal(r[k].hash, r[0].hash);
    return r[0].hash;
}

/* Sums follow the order of ranks on any hosts, and a checkpoint continues on other hosts with the same bits.
 * Ranks are placed in blocks, round-robin and unevenly. */
static void bits_do_not_depend_on_hosts(void **state)
{
    static const int on[][WORLD] = {{0, 0, 0, 0}, {3, 3, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 1}, {0, 1, 1, 0}};
    enum { N = sizeof on / sizeof *on };
    char dir[] = "zero-test-hosts-XXXXXX";
    if (!where_has_gpu) {
        print_message("skipped: no NCCL here\n");
        return;
    }
    assert_non_null(mkdtemp(dir));
    toy_wait = wait_for_model;
    for (int stage = 0; stage < TOY_STAGES; stage++) {
        uint64_t expected = 0, loaded = 0;
        for (int i = 0; i < N; i++) {
            struct setup s = {.cannot_open = -1, .stage = stage, .micro = {0, 1, 2, 3}, .save = dir};
            memcpy(s.machine, on[i], sizeof s.machine);
            s.says = i == 0 || stage < TOY_HSDP ? "plain: copy_engine is off" : "";
            uint64_t hash = hash_of(&s, "hosts");
            expected = i ? expected : hash;
            assert_int_equal(hash, expected);
            if (i % 2)
                continue;
            /* load it on the next hosts */
            s.load = dir;
            s.save = NULL;
            memcpy(s.machine, on[(i + 1) % N], sizeof s.machine);
            s.says = "";
            hash = hash_of(&s, "loaded");
            loaded = i ? loaded : hash;
            assert_int_equal(hash, loaded);
        }
        assert_true(loaded != expected);
    }
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", dir);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shared_memory_is_refused),
        cmocka_unit_test(local_ranks_are_compared),
        cmocka_unit_test(memory_is_divided_among_the_ranks_of_a_machine),
        cmocka_unit_test(memory_is_that_of_all_stages_of_a_machine),
        cmocka_unit_test(bits_do_not_depend_on_hosts),
    };
    return cmocka_run_group_tests_name("hosts", tests, NULL, NULL);
}
