/* SPDX-License-Identifier: Apache-2.0 */
/* test_differences.c: settings that may differ between ranks, but rarely do on purpose. One log line of rank
 * 0 names all differences. */
#include "test/cmocka.h"
#include "test/comm/ranks.h"
#include "test/zero/toy_net.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { HANG_S = 120 };

/* Added to the source hash of this rank's library, so that it differs from the other ranks'. */
static uint64_t other_sources;

uint64_t __real_zr_source_hash(void);
uint64_t __wrap_zr_source_hash(void);
uint64_t __wrap_zr_source_hash(void)
{
    return __real_zr_source_hash() + other_sources;
}

/* Address of this process's command line. main starts the program again with a known one, which a rank may
 * overwrite. */
static char *command_line;
enum { CHANGED_BYTES = sizeof "/a/differ\0train A 11\n" };

struct lines {
    int n;
    char text[1024];
};

static void take_line(void *arg, const char *line)
{
    struct lines *l = arg;
    if (!strstr(line, "ranks differ"))
        return;
    l->n++;
    snprintf(l->text, sizeof l->text, "%s", line);
}

/* What differs on rank 1, and parts of the expected line. */
struct difference {
    uint64_t sources;
    int save_keep, trace, timeout_ms;
    const char *command; /* CHANGED_BYTES long; NULL: the same as on other ranks */
    const char *says, *then;
};

static void wrap(struct rank *me)
{
    const struct difference *d = me->arg;
    struct toy_rank r = {.rank = me->w.rank, .world = me->w.world};
    struct lines lines = {0};
    struct toy m;
    zero_ctx *z;
    alarm(HANG_S);
    snprintf(r.url, sizeof r.url, "tcp://127.0.0.1:%d", me->w.port);
    struct zero_config cfg = toy_config(&r, 1);
    cfg.debug.log = take_line;
    cfg.debug.log_arg = &lines;
    if (me->w.rank == 1) {
        other_sources = d->sources;
        cfg.checkpoint.save_keep = d->save_keep;
        cfg.debug.trace = d->trace;
        cfg.launch.timeout_ms = d->timeout_ms ? d->timeout_ms : cfg.launch.timeout_ms;
        if (d->command)
            memcpy(command_line, d->command, CHANGED_BYTES);
    }
    toy_make(&m);
    RANK_CHECK(me, zero_wrap(&z, m.table, TOY_TENSORS, &cfg) == 0, "%s", zero_last_error());
    RANK_CHECK(me, zero_unwrap(&z) == 0, "%s", zero_last_error());
    toy_free(&m);
    RANK_CHECK(me, lines.n == (me->w.rank == 0 && d->says), "%d lines: %s", lines.n, lines.text);
    RANK_CHECK(me, !lines.n || strstr(lines.text, d->says), "%s", lines.text);
    RANK_CHECK(me, !d->then || !lines.n || strstr(lines.text, d->then), "%s", lines.text);
}

static void test_differences(void **state)
{
    static const struct difference all[] = {
        {.says = NULL},
        {.sources = 1, .says = "rank 1's libzero was built from different sources than rank 0's"},
        {.save_keep = 3, .says = "save_keep is 3 on rank 1 and 0 on rank 0"},
        {.trace = 1, .says = "trace is 1 on rank 1 and 0 on rank 0"},
        {.timeout_ms = 40000, .says = "timeout_ms is 40000 on rank 1 and 30000 on rank 0"},
        {.command = "/b/differ\0train A 22\n"},
        {.command = "/b/differ\0train B 22\n",
         .says = "the command line is \"differ train B 22? xxx",
         .then = "xxx...\" on rank 1 and \"differ train A 11? xxx"},
        {.sources = 1,
         .save_keep = 3,
         .trace = 1,
         .timeout_ms = 40000,
         .says = "rank 1's libzero was built from different sources than rank 0's; save_keep is 3 on rank 1 "
                 "and 0 on rank 0; trace is 1 on rank 1 and 0 on rank 0; timeout_ms is 40000 on rank 1"},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        struct difference d = all[i];
        run_ranks(true, 3, wrap, &d, NULL);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_differences)};
    if (argc == 1) {
        char long_one[200], *args[] = {"/a/differ", "train A 11\n", long_one, NULL};
        memset(long_one, 'x', sizeof long_one - 1);
        long_one[sizeof long_one - 1] = 0;
        execv("/proc/self/exe", args);
        return 1;
    }
    command_line = argv[0];
    return cmocka_run_group_tests(tests, NULL, NULL);
}
