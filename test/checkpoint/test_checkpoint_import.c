/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_import.c: fails each file call of an import in turn, and cuts its files short while
 * ranks read them. Runs on one rank and on several, with tensor parallelism and with pipeline stages, two
 * on some ranks.
 *
 * All ranks get an error that names the file, or none does. Each weight is all old or all new, and equal
 * on all ranks that have it, including a tied tensor's copy. The context stays usable. EVERY=n tests every
 * n-th call. */
#include "test/checkpoint/memory_files.h"
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"
#include "test/zero/pp_model.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FILE_BYTES = 1200, MAX_TENSORS = MAX_OWN * MAX_TABLE };

static int64_t every = 4;

/* ---- files that fail ---- */

static struct zr_files files, below;
/* reads so far, and how many of them succeed; after these every file ends at its first byte */
static _Atomic int64_t n_reads, n_good = INT64_MAX;

static int64_t cut_pread(void *arg, int fd, void *buf, size_t n, int64_t at)
{
    return n_reads++ < n_good ? below.pread(arg, fd, buf, n, at) : 0;
}

enum fault { ONCE, INTERRUPTED, CUT, N_FAULTS };

/* Shared by the ranks of a world. */
struct world {
    const struct mesh *mesh;
    struct memory_files *disk;
    pthread_barrier_t barrier;
    bool later;
    /* (rank) */
    int code[MAX_WORLD];
    int64_t n_calls;
    /* imports that failed and changed nothing; that failed and changed a part; that succeeded */
    int n_none, n_part, n_well;
};

static void meet(struct world *w)
{
    pthread_barrier_wait(&w->barrier);
}

/* Begins at the at-th call, or read, of all ranks together. */
static void begin_fault(struct world *w, int rank, enum fault fault, int64_t at)
{
    meet(w);
    if (rank == 0) {
        memory_files_fault(w->disk,
                           fault == ONCE          ? FAULT_EIO
                           : fault == INTERRUPTED ? FAULT_EINTR
                                                  : FAULT_NONE,
                           at, false);
        n_reads = 0;
        n_good = fault == CUT ? at - 1 : INT64_MAX;
    }
    meet(w);
}

/* Returns whether there were fewer calls. Checks that all ranks or none got an error. */
static bool end_fault(struct world *w, int rank, enum fault fault, int64_t at, int code)
{
    w->code[rank] = code;
    meet(w);
    if (rank == 0) {
        w->n_calls = fault == CUT ? n_reads : memory_files_calls(w->disk);
        memory_files_fault(w->disk, FAULT_NONE, 0, false);
        CHECK_THAT(memory_files_n_open(w->disk) == 0);
        n_good = INT64_MAX;
    }
    for (int r = 0; r < pp_world(w->mesh); r++)
        CHECK_THAT(w->code[r] == code);
    meet(w);
    return w->n_calls < at;
}

/* ---- values ---- */

/* A rank's tensors, as zero_read gives them. Masters are zero where there are none. */
struct values {
    unsigned char param[MAX_TENSORS][MAX_ELEMS * 4];
    float master[MAX_TENSORS][MAX_ELEMS];
};

static struct values *take_values(const struct model *m, zero_ctx *z)
{
    struct values *v = calloc(1, sizeof *v);
    CHECK_THAT(v != NULL);
    for (; v && m; m = m->next)
        for (int k = 0; k < m->n; k++) {
            int t = m->first_tensor + k;
            CHECK_OK(zero_read(z, t, ZERO_VALUE_PARAM, 0, m->own[k].n, v->param[t]));
            if (!m->own[k].copy && !pp_shapes[m->own[k].tensor].frozen)
                CHECK_OK(zero_read(z, t, ZERO_VALUE_MASTER, 0, m->own[k].n, v->master[t]));
        }
    return v;
}

/* Compares elements [first, first + n) of a tensor. */
static bool alike(const struct values *a, const struct values *b, int t, int64_t size, int64_t first,
                  int64_t n)
{
    return !memcmp(a->param[t] + first * size, b->param[t] + first * size, (size_t)(n * size)) &&
           !memcmp(a->master[t] + first, b->master[t] + first, (size_t)n * sizeof(float));
}

/* Counts the new weights, among those whose old value differs. */
static int count_new(const struct model *m, const struct values *now, const struct values *before,
                     const struct values *after, int *n_all)
{
    int n_new = 0;
    for (*n_all = 0; m; m = m->next)
        for (int k = 0; k < m->n; k++)
            for (int l = 0; l < m->own[k].n_layers; l++) {
                int t = m->first_tensor + k;
                int64_t n = m->own[k].n / m->own[k].n_layers,
                        size = pp_shapes[m->own[k].tensor].dtype == ZERO_BF16 ? 2 : 4;
                if (alike(before, after, t, size, l * n, n))
                    continue;
                bool is_new = alike(now, after, t, size, l * n, n);
                CHECK_THAT(is_new || alike(now, before, t, size, l * n, n));
                n_new += is_new;
                ++*n_all;
            }
    return n_new;
}

/* Weights that several ranks have are equal, and so is a tied tensor on both of its pipeline stages. */
static void check_alike(struct world *w, int rank, const struct model *m, zero_ctx *z)
{
    const struct mesh *mesh = w->mesh;
    int n_stage = mesh->dp * mesh->tp;
    CHECK_OK(pp_look(m, z, &pp_found[rank][0]));
    meet(w);
    const struct bits *own = &pp_found[rank][0],
                      *like = &pp_found[rank / n_stage * n_stage + rank % mesh->tp][0];
    CHECK_THAT(own->all == like->all && own->tied == like->tied);
    if (rank / n_stage == mesh->pp - 1)
        CHECK_THAT(own->tied == pp_found[rank % mesh->tp][0].tied);
    meet(w);
}

/* ---- one rank ---- */

struct one_rank {
    int rank;
    struct world *w;
    struct model *m;
    struct place at;
    zero_ctx *z;
    struct map map;
};

static void open_rank(struct toy_rank *r, struct one_rank *out)
{
    struct world *w = ((void **)r->arg)[1];
    const struct setup s = {.mesh = w->mesh, .later = w->later};
    struct toy_rank with = *r;
    with.arg = (void *)(uintptr_t)&s;
    *out = (struct one_rank){.rank = r->rank, .w = w};
    CHECK_OK(pp_wrap(&with, &out->m, &out->at, &out->z));
    out->z->files = &files;
    pp_make_map(out->m, &out->map, true);
}

static void close_rank(struct one_rank *o)
{
    CHECK_OK(zero_unwrap(&o->z));
    pp_free(o->m);
}

static void export_both(struct toy_rank *r)
{
    struct one_rank o;
    open_rank(r, &o);
    CHECK_OK(zero_export(o.z, "old", o.map.list, o.map.n, FILE_BYTES));
    for (int step = 0; step < STEPS; step++)
        CHECK_OK(pp_step(o.m, o.z, step, &o.at));
    CHECK_OK(zero_export(o.z, "new", o.map.list, o.map.n, FILE_BYTES));
    close_rank(&o);
}

static int import(struct one_rank *o, const char *folder)
{
    return zero_import(o->z, folder, o->map.list, o->map.n);
}

static void check_error(int err)
{
    CHECK_THAT(err == ZERO_ERR_IO);
    CHECK_THAT(strstr(zero_last_error(), "zero_import") && strstr(zero_last_error(), "new/model"));
}

/* Ends with the new weights. */
static void fail_in_turn(struct one_rank *o, enum fault fault, const struct values *before,
                         const struct values *after)
{
    struct world *w = o->w;
    bool done = false;
    for (int64_t k = 1, i = 0; !done; k += every, i++) {
        int n_all, n_new;
        CHECK_OK(import(o, "old"));
        begin_fault(w, o->rank, fault, k);
        int err = import(o, "new");
        if (err)
            check_error(err);
        done = end_fault(w, o->rank, fault, k, err);
        CHECK_THAT(!err || (!done && fault != INTERRUPTED));
        struct values *now = take_values(o->m, o->z);
        n_new = count_new(o->m, now, before, after, &n_all);
        free(now);
        CHECK_THAT(err || n_new == n_all);
        if (o->rank == 0) {
            w->n_well += !err;
            w->n_none += err && n_new == 0;
            w->n_part += err && n_new > 0;
        }
        check_alike(w, o->rank, o->m, o->z);
        if (i % 3 == 0) { /* and training goes on from there */
            CHECK_OK(pp_step(o->m, o->z, (int)i, &o->at));
            check_alike(w, o->rank, o->m, o->z);
        }
    }
    CHECK_OK(import(o, "new"));
}

static void fail_imports(struct toy_rank *r)
{
    struct one_rank o;
    open_rank(r, &o);
    CHECK_OK(import(&o, "old"));
    struct values *before = take_values(o.m, o.z);
    CHECK_OK(import(&o, "new"));
    struct values *after = take_values(o.m, o.z);
    for (enum fault fault = 0; fault < N_FAULTS; fault++) {
        fail_in_turn(&o, fault, before, after);
        struct values *now = take_values(o.m, o.z);
        CHECK_THAT(!memcmp(now, after, sizeof *now));
        free(now);
    }
    free(before);
    free(after);
    close_rank(&o);
}

/* Imports before the model has values. Afterwards every rank has no values to begin with, or all of them. */
static void fail_first_import(struct toy_rank *r)
{
    int64_t at = *(int64_t *)((void **)r->arg)[0];
    struct zero_action a;
    struct one_rank o;
    open_rank(r, &o);
    begin_fault(o.w, o.rank, ONCE, at);
    int err = import(&o, "new");
    if (err)
        check_error(err);
    end_fault(o.w, o.rank, ONCE, at, err);
    if (err) {
        CHECK_THAT(zero_evaluate(o.z) == ZERO_ERR_ORDER && strstr(zero_last_error(), "has values for"));
        CHECK_THAT(zero_next(o.z, &a) == ZERO_ERR_ORDER);
        CHECK_OK(import(&o, "new"));
    }
    check_alike(o.w, o.rank, o.m, o.z);
    CHECK_OK(pp_step(o.m, o.z, 0, &o.at));
    check_alike(o.w, o.rank, o.m, o.z);
    if (o.rank == 0)
        (*(err ? &o.w->n_part : &o.w->n_well))++;
    close_rank(&o);
}

/* ---- tests ---- */

static const struct mesh meshes[] = {{1, 1, 1, 0}, {1, 2, 1, 3},    {1, 2, 2, 2},
                                     {2, 2, 1, 3}, {2, 1, 2, 1, 2}, {3, 2, 1, 0, 2}};
enum { N_MESHES = sizeof meshes / sizeof *meshes };

static void run_world(struct world *w, void (*fn)(struct toy_rank *r), int64_t at)
{
    struct toy_rank r[MAX_WORLD];
    char what[TEXT];
    void *arg[] = {&at, w};
    int n = pp_world(w->mesh);
    assert_int_equal(pthread_barrier_init(&w->barrier, NULL, (unsigned)n), 0);
    toy_run(n, fn, arg, r, pp_text(w->mesh, "imported", what));
    pthread_barrier_destroy(&w->barrier);
}

/* Makes the old and new weights of one rank. */
static struct world open_world(void)
{
    struct world w = {.mesh = &meshes[0], .disk = memory_files_open()};
    below = files = *memory_files_table(w.disk);
    files.pread = cut_pread;
    run_world(&w, export_both, 0);
    return w;
}

static void imports_fail_on_all_ranks(void **state)
{
    struct world w = open_world();
    char what[TEXT];
    for (int i = 0; i < N_MESHES; i++) {
        w.mesh = &meshes[i];
        w.n_none = w.n_part = w.n_well = 0;
        run_world(&w, fail_imports, 0);
        printf("%s: %lld reads; %d imports failed before a weight was changed, %d later, %d did not\n",
               pp_text(w.mesh, "imported", what), (long long)w.n_calls, w.n_none, w.n_part, w.n_well);
        assert_true(w.n_none > 0 && w.n_part > 0 && w.n_well > 0);
    }
    memory_files_close(w.disk);
}

static void so_they_do_before_there_are_values(void **state)
{
    struct world w = open_world();
    w.later = true;
    for (int i = 0; i < N_MESHES; i++) {
        w.mesh = &meshes[i];
        w.n_part = 0;
        run_world(&w, fail_first_import, 1 << 20);
        int64_t n_calls = w.n_calls;
        for (int part = 0; part < 4; part++)
            run_world(&w, fail_first_import, 1 + n_calls * part / 5);
        assert_true(w.n_part > 2);
    }
    memory_files_close(w.disk);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(imports_fail_on_all_ranks),
        cmocka_unit_test(so_they_do_before_there_are_values),
    };
    const char *n = getenv("EVERY");
    every = n ? atoll(n) : every;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
