/* SPDX-License-Identifier: Apache-2.0 */
/* test_mpi_hung.c: a call of MPI that does not return. Every rank's step ends with an error, also on the rank
 * that is inside the call, and zero_unwrap ends. If the call returns later, it does no harm, even after a
 * zero_read or zero_write that gave up. */
#include "test/cmocka.h"
#include "test/kernels/random.h"
#include "test/stand_in/mpi_stand_in.h"
#include "test/zero/toy_net.h"
#include "test/zero/where.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WORLD = 4, STEPS = 200, LIMIT_MS = 1500, LONG_MS = 60000 };

struct plan {
    /* hung, k: the rank whose k-th poll after its first step does not return */
    int stage, hung, k;
    bool check;
    /* ranks read and write values instead of training; then most drawn k are in a broadcast, after which the
     * copy to the caller's memory is queued */
    bool values;
    char log[WORLD][4096];
};

/* Functions of the stand-in that libzero has loaded. */
static struct {
    void (*hang)(const char *call, int rank, int k);
    void (*come_back)(void);
    void (*counts)(struct mpi_stand_in_counts *out);
    int (*end)(const char **first);
    struct mpi_stand_in_machine *(*the_machine)(void);
} mpi;

static void *function(const char *name)
{
    void *library = dlopen(getenv("MPI_STAND_IN"), RTLD_NOW | RTLD_LOCAL);
    void *at = library ? dlsym(library, name) : NULL;
    if (!at)
        fail_msg("%s", dlerror());
    return at;
}

static void keep_line(void *arg, const char *line)
{
    struct toy_rank *r = arg;
    char *log = ((struct plan *)r->arg)->log[r->rank];
    size_t n = strlen(log);
    snprintf(log + n, sizeof((struct plan *)0)->log[0] - n, "%s\n", line);
}

extern void __lsan_disable(void) __attribute__((weak));
extern void __lsan_enable(void) __attribute__((weak));

/* Moves values until a call fails. After that the memory belongs to the program again, also when MPI's call
 * returns. */
static void move_values(struct toy_rank *r, zero_ctx *z)
{
    const struct plan *p = r->arg;
    int64_t n = toy_elems(1), changed = 0;
    size_t bytes = (size_t)n * sizeof(float);
    unsigned char *own = calloc(1, bytes);
    int err = own ? 0 : ZERO_ERR_NOMEM;
    for (int i = 0; !err && i < STEPS; i++) {
        if (i == 1 && r->rank == p->hung)
            mpi.hang("poll", r->rank, p->k);
        err = FIRST_ERROR(zero_read(z, 1, ZERO_VALUE_STATE, 0, n, (float *)own),
                          zero_write(z, 1, ZERO_VALUE_STATE, 0, n, (float *)own));
    }
    toy_note(r, err);
    if (!own)
        return;
    memset(own, 0xab, bytes);
    if (r->rank == p->hung)
        mpi.come_back();
    sleep(1);
    for (size_t i = 0; i < bytes; i++)
        changed += own[i] != 0xab;
    if (changed)
        toy_wrong(r, "%lld bytes were written after the call had returned", (long long)changed);
    free(own);
}

static void make_steps(struct toy_rank *r, zero_ctx *z, struct toy *m)
{
    const struct plan *p = r->arg;
    int err = 0;
    for (int step = 0; !err && step < STEPS; step++) {
        if (step == 1 && r->rank == p->hung)
            mpi.hang("poll", r->rank, p->k);
        err = FIRST_ERROR(toy_forward(m, z, true), toy_backward(m, z, true, step, r->rank),
                          zero_step(z, 1e-2f, NULL));
    }
    toy_note(r, err);
}

static void train(struct toy_rank *r)
{
    const struct plan *p = r->arg;
    struct toy m;
    zero_ctx *z = NULL;
    if (__lsan_disable)
        __lsan_disable(); /* memory that MPI may still use is leaked on purpose */
    toy_make(&m);
    struct zero_config cfg = toy_config(r, p->stage);
    where_open(r->rank, &cfg);
    cfg.launch.timeout_ms = LIMIT_MS;
    cfg.debug.check = p->check;
    cfg.debug.log = keep_line;
    cfg.debug.log_arg = r;
    int err = zero_wrap(&z, m.table, TOY_TENSORS, &cfg);
    if (err)
        toy_wrong(r, "zero_wrap: %s", zero_last_error());
    if (err)
        toy_note(r, err);
    else if (p->values)
        move_values(r, z);
    else
        make_steps(r, z, &m);
    int64_t from = toy_now_ms();
    zero_unwrap(&z);
    r->ms = toy_now_ms() - from;
    toy_free(&m);
    where_close(&cfg);
    if (__lsan_enable)
        __lsan_enable();
}

/* Whether the hung rank's log names what was left behind. That is the operation, or only requests that other
 * ranks never answered, if MPI's call returned before zero_unwrap. */
static bool left_behind(const struct plan *p)
{
    const char *log = p->log[p->hung];
    return strstr(log, "an operation of the communicator has not returned") ||
           (p->values && strstr(log, "other ranks do not answer pending requests"));
}

static void run_hung(bool values)
{
    struct random_source random = random_open();
    const char *text = getenv("N_HUNG");
    for (int i = 0, n = text ? atoi(text) : 2; i < n; i++) {
        struct toy_rank r[MAX_TOY_RANKS];
        struct mpi_stand_in_counts counts;
        static struct plan p;
        const char *first;
        p = (struct plan){.stage = values ? 3 : (int)random_below(&random, 4),
                          .hung = (int)random_below(&random, WORLD),
                          .k = (int)(values ? 8 + random_below(&random, 23) : 1 + random_below(&random, 200)),
                          .check = i % 2,
                          .values = values};
        print_message("stage %d, poll %d of rank %d, check %d\n", p.stage, p.k, p.hung, p.check);
        mpi.the_machine()->n_ranks = WORLD;
        toy_ranks(WORLD, train, &p, r);
        mpi.counts(&counts);
        for (int k = 0; k < WORLD; k++)
            if (!r[k].err || r[k].wrong[0] || r[k].ms > LONG_MS)
                fail_msg("rank %d: code %d \"%s\" %s, zero_unwrap %lld ms", k, r[k].err, r[k].text,
                         r[k].wrong, (long long)r[k].ms);
        if (!left_behind(&p))
            fail_msg("rank %d logs \"%s\"", p.hung, p.log[p.hung]);
        assert_int_equal(counts.n_hung, 1);
        mpi.end(&first);
    }
}

static void test_poll(void **state)
{
    run_hung(false);
}

static void test_values(void **state)
{
    run_hung(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_poll), cmocka_unit_test(test_values)};
    void *at[] = {function("mpi_stand_in_hang"), function("mpi_stand_in_counts"),
                  function("mpi_stand_in_end"), function("mpi_stand_in_the_machine"),
                  function("mpi_stand_in_come_back")};
    memcpy(&mpi.hang, &at[0], sizeof at[0]);
    memcpy(&mpi.counts, &at[1], sizeof at[1]);
    memcpy(&mpi.end, &at[2], sizeof at[2]);
    memcpy(&mpi.the_machine, &at[3], sizeof at[3]);
    memcpy(&mpi.come_back, &at[4], sizeof at[4]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
