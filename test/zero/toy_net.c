/* SPDX-License-Identifier: Apache-2.0 */
/* toy_net.c: implements toy_net.h: the model, ranks as threads, and checks for leaked descriptors, threads
 * and folders. */
#include "test/zero/toy_net.h"
#include "test/cmocka.h"
#include "test/held_port.h"
#include "test/kernels/random.h"
#include "test/stand_in/half.h"

#include <dirent.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include <uv.h>

static const struct zero_tensor shape_of[TOY_TENSORS] = {
    {.name = "embedding", .shape = {33, 5}, .dtype = ZERO_F32, .unit = 0},
    {.name = "layers", .shape = {2, 40, 3}, .dtype = ZERO_F32, .unit = 1, .flags = ZERO_STACKED},
    {.name = "bias", .shape = {70}, .dtype = ZERO_BF16, .unit = 1, .flags = ZERO_NO_DECAY},
    {.name = "frozen", .shape = {20}, .dtype = ZERO_F32, .unit = 2},
    {.name = "head", .shape = {257}, .dtype = ZERO_BF16, .unit = 3, .flags = ZERO_GRAD_OVERWRITE},
};

void (*toy_wait)(void);

static int open_unit(zero_ctx *z, bool brackets, int unit, enum zero_phase phase)
{
    int err = brackets ? zero_begin(z, unit, phase) : 0;
    if (toy_wait)
        toy_wait();
    return err;
}

/* Returns a number in [-1, 1). */
static float noise(uint64_t a, uint64_t b)
{
    return random_unit(random_mix(random_mix(a) + b));
}

static float load(int t, const void *p, int64_t i)
{
    if (shape_of[t].dtype == ZERO_F32)
        return ((const float *)p)[i];
    return bf16_to_float(((const uint16_t *)p)[i]);
}

static void store(int t, void *p, int64_t i, float f)
{
    if (shape_of[t].dtype == ZERO_F32)
        ((float *)p)[i] = f;
    else
        ((uint16_t *)p)[i] = bf16_from_float(f);
}

int64_t toy_elems(int tensor)
{
    int64_t n = 1;
    for (int d = 0; shape_of[tensor].shape[d]; d++)
        n *= shape_of[tensor].shape[d];
    return n;
}

void toy_make(struct toy *m)
{
    memset(m, 0, sizeof *m);
    for (int t = 0; t < TOY_TENSORS; t++) {
        int64_t n = toy_elems(t);
        m->own[t] = m->param[t] = malloc((size_t)n * 4);
        for (int64_t i = 0; i < n; i++)
            store(t, m->own[t], i, noise((uint64_t)t + 1000, (uint64_t)i));
        m->table[t] = shape_of[t];
        m->table[t].param = &m->param[t];
        m->table[t].grad = t == TOY_FROZEN ? NULL : &m->grad[t];
    }
}

void toy_free(struct toy *m)
{
    for (int t = 0; t < TOY_TENSORS; t++)
        free(m->own[t]);
    memset(m, 0, sizeof *m);
}

bool toy_untouched(const struct toy *m)
{
    for (int t = 0; t < TOY_TENSORS; t++)
        if (m->param[t] != m->own[t] || m->grad[t])
            return false;
    return true;
}

int toy_forward(struct toy *m, zero_ctx *z, bool brackets)
{
    volatile float seen = 0;
    int err = 0;
    for (int u = 0; !err && u < TOY_UNITS; u++) {
        err = open_unit(z, brackets, u, ZERO_FORWARD);
        for (int t = 0; !err && t < TOY_TENSORS; t++)
            if (shape_of[t].unit == u)
                seen += load(t, m->param[t], 0);
        if (!err && brackets)
            err = zero_end(z, u, ZERO_FORWARD);
    }
    (void)seen;
    return err;
}

void toy_add_gradient(struct toy *m, int unit, int step, int micro)
{
    for (int t = 0; t < TOY_TENSORS; t++) {
        int64_t slices = shape_of[t].flags & ZERO_STACKED ? shape_of[t].shape[0] : 1,
                slice = unit - shape_of[t].unit;
        int64_t n = toy_elems(t) / slices;
        if (t == TOY_FROZEN || slice < 0 || slice >= slices)
            continue;
        for (int64_t i = slice * n; i < (slice + 1) * n; i++) {
            float g = 0.25f * load(t, m->param[t], i) +
                      0.125f * noise((uint64_t)(step * 64 + micro), (uint64_t)t << 32 | (uint64_t)i);
            float old = shape_of[t].flags & ZERO_GRAD_OVERWRITE ? 0 : load(t, m->grad[t], i);
            store(t, m->grad[t], i, old + g);
        }
    }
}

int toy_backward(struct toy *m, zero_ctx *z, bool brackets, int step, int micro)
{
    int err = 0;
    for (int u = TOY_UNITS; !err && u-- > 0;) {
        err = open_unit(z, brackets, u, ZERO_BACKWARD);
        if (!err)
            toy_add_gradient(m, u, step, micro);
        if (!err && brackets)
            err = zero_end(z, u, ZERO_BACKWARD);
    }
    return err;
}

void toy_poison_gradient(struct toy *m, int tensor, float x)
{
    store(tensor, m->grad[tensor], 0, x);
}

int toy_hash(zero_ctx *z, int n_states, uint64_t *hash)
{
    unsigned char *bytes = malloc(8192);
    *hash = 0xcbf29ce484222325u;
    int err = 0;
    for (int t = 0; !err && t < TOY_TENSORS; t++)
        for (int k = 0; !err && k < (t == TOY_FROZEN ? 1 : ZERO_VALUE_STATE + n_states); k++) {
            size_t size = k == ZERO_VALUE_PARAM && shape_of[t].dtype == ZERO_BF16 ? 2 : 4,
                   n = (size_t)toy_elems(t) * size;
            memset(bytes, 0xff, n);
            err = zero_read(z, t, k, 0, toy_elems(t), bytes);
            for (size_t i = 0; !err && i < n; i++)
                *hash = (*hash ^ bytes[i]) * 0x100000001b3u;
        }
    free(bytes);
    return err;
}

/* ---- ranks ---- */

struct zero_config toy_config(struct toy_rank *r, int stage)
{
    struct zero_config cfg = ZERO_CONFIG_INIT;
    cfg.stage = stage < TOY_HSDP ? stage : 3;
    if (stage >= TOY_HSDP) {
        cfg.hybrid = stage == TOY_HSDP ? ZERO_HSDP : ZERO_HFSDP;
        cfg.mesh.dp_replicate = r->world / 2;
    }
    cfg.launch.rank = r->rank;
    cfg.launch.world = r->world;
    cfg.launch.rendezvous = r->world > 1 ? r->url : NULL;
    cfg.launch.timeout_ms = cfg.launch.start_timeout_ms = 30000;
    cfg.optim.weight_decay = 0.1f;
    return cfg;
}

void toy_forget_line(void *arg, const char *line)
{
}

bool toy_has_stage(int world, int stage)
{
    return (stage >= TOY_HSDP) == (world == TOY_HYBRID_WORLD);
}

void toy_note(struct toy_rank *r, int code)
{
    r->err = code;
    snprintf(r->text, sizeof r->text, "%s", zero_last_error());
}

void toy_wrong(struct toy_rank *r, const char *fmt, ...)
{
    size_t used = strlen(r->wrong);
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(r->wrong + used, sizeof r->wrong - used, fmt, ap);
    va_end(ap);
    used = strlen(r->wrong);
    snprintf(r->wrong + used, sizeof r->wrong - used, "; ");
}

static unsigned n_worlds;

void toy_set_ranks(int world, void *arg, struct toy_rank *out)
{
    int port = held_port();
    char job[64];
    snprintf(job, sizeof job, "%ld-%u", (long)getpid(), n_worlds++);
    setenv("ZERO_JOB_KEY", "0f1e2d3c4b5a69788796a5b4c3d2e1f0", 0);
    setenv("ZERO_JOB", job, 1); /* turns away ranks of an earlier, failed world */
    for (int i = 0; i < world; i++) {
        memset(&out[i], 0, sizeof out[i]);
        out[i].rank = i;
        out[i].world = world;
        out[i].arg = arg;
        snprintf(out[i].url, sizeof out[i].url, "tcp://127.0.0.1:%d", port);
    }
}

struct start {
    void (*fn)(struct toy_rank *r);
    struct toy_rank *r;
};

static void *run(void *arg)
{
    struct start *s = arg;
    s->fn(s->r);
    return NULL;
}

void toy_ranks(int world, void (*fn)(struct toy_rank *r), void *arg, struct toy_rank *out)
{
    pthread_t thread[MAX_TOY_RANKS];
    struct start s[MAX_TOY_RANKS];
    toy_set_ranks(world, arg, out);
    for (int i = 0; i < world; i++) {
        s[i] = (struct start){fn, &out[i]};
        pthread_create(&thread[i], NULL, run, &s[i]);
    }
    for (int i = 0; i < world; i++)
        pthread_join(thread[i], NULL);
}

void toy_assert_well(const struct toy_rank *r, int world, const char *what)
{
    for (int k = 0; k < world; k++)
        if (r[k].err || r[k].wrong[0])
            fail_msg("%s: rank %d of %d: %d %s %s", what, k, world, r[k].err, r[k].text, r[k].wrong);
}

void toy_run(int world, void (*fn)(struct toy_rank *r), void *arg, struct toy_rank *r, const char *what)
{
    toy_ranks(world, fn, arg, r);
    toy_assert_well(r, world, what);
}

void toy_at_each_stage(void (*fn)(struct toy_rank *r), void *arg, int *stage, const char *what)
{
    for (int world = 1; world <= 2; world++)
        for (*stage = 0; *stage <= 3; ++*stage) {
            struct toy_rank r[2];
            toy_run(world, fn, arg, r, what);
        }
}

void toy_expect(struct toy_rank *r, int err, int code, const char *says)
{
    if (err != code || !strstr(zero_last_error(), says))
        toy_wrong(r, "%d \"%s\", expected %d \"%s\"", err, zero_last_error(), code, says);
}

int64_t toy_now_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

int toy_open(struct toy_rank *r, struct toy *m, zero_ctx **z, const struct zero_config *cfg)
{
    *z = NULL;
    toy_make(m);
    int err = zero_wrap(z, m->table, TOY_TENSORS, cfg);
    if (err)
        toy_note(r, err);
    return err;
}

void toy_close(struct toy *m, zero_ctx **z)
{
    zero_unwrap(z);
    toy_free(m);
}

/* ---- what a process holds ---- */

static int count_entries(const char *folder)
{
    DIR *d = opendir(folder);
    int n = 0;
    for (struct dirent *e; d && (e = readdir(d));)
        n += e->d_name[0] != '.';
    if (d)
        closedir(d);
    return n;
}

static struct toy_holdings look(void)
{
    struct toy_holdings h = {.n_fds = count_entries("/proc/self/fd"),
                             .n_threads = count_entries("/proc/self/task")};
    char line[512];
    FILE *f = fopen("/proc/self/maps", "re");
    while (f && fgets(line, sizeof line, f))
        h.n_maps += strstr(line, "memfd:zero") != NULL;
    if (f)
        fclose(f);
    return h;
}

static bool same(struct toy_holdings a, struct toy_holdings b)
{
    return a.n_fds == b.n_fds && a.n_threads == b.n_threads && a.n_maps == b.n_maps;
}

static void *nothing(void *arg)
{
    return arg;
}

struct toy_holdings toy_holdings(void)
{
    /* Warm up before the first count. libuv opens a pipe with a process's first loop and keeps it. The first
     * two worlds keep their ports. A sanitizer starts a thread with the program's first one. */
    static bool warm;
    uv_loop_t first;
    pthread_t thread;
    if (!warm && uv_loop_init(&first) == 0)
        uv_loop_close(&first);
    if (!warm && pthread_create(&thread, NULL, nothing, NULL) == 0)
        pthread_join(thread, NULL);
    for (unsigned n = n_worlds; !warm && n < 2; n++)
        held_port();
    warm = true;
    struct toy_holdings h = look();
    for (int n_same = 0, i = 0; n_same < 5 && i < 500; i++) {
        struct toy_holdings again = look();
        n_same = same(h, again) ? n_same + 1 : 0;
        h = again;
        nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL);
    }
    return h;
}

bool toy_holds_no_more(struct toy_holdings before, struct toy_holdings *now)
{
    for (int i = 0; i < 3000; i++) {
        *now = look();
        if (same(*now, before))
            return true;
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    return false;
}

/* ---- folders ---- */

enum { MAX_FOLDERS = 64 };
static char folders[MAX_FOLDERS][64];

void toy_make_folder(char *path)
{
    int i = 0;
    while (i < MAX_FOLDERS && folders[i][0])
        i++;
    assert_true(i < MAX_FOLDERS && strlen(path) < sizeof *folders);
    assert_non_null(mkdtemp(path));
    strcpy(folders[i], path);
}

static int remove_all(const char *path)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%.63s'", path);
    return system(command);
}

void toy_remove_folder(const char *path)
{
    for (int i = 0; i < MAX_FOLDERS; i++)
        if (!strcmp(folders[i], path))
            folders[i][0] = 0;
    assert_int_equal(remove_all(path), 0);
}

void toy_forget_export_ids(const char *path)
{
    char command[512];
    snprintf(
        command, sizeof command,
        "cd '%s' && find . -name 'model*' -exec sed -i "
        "'s/\\(libzero_export\": *\"\\)[0-9a-f]*/\\10000000000000000/; s/model-[0-9a-f]*-0/model-0/' {} + && "
        "for f in $(find . -name 'model-*-of-*'); do mv $f $(echo $f | sed 's/model-[0-9a-f]*-0/model-0/'); "
        "done",
        path);
    assert_int_equal(system(command), 0);
}

int toy_remove_folders(void **state)
{
    int err = 0;
    for (int i = 0; i < MAX_FOLDERS; i++)
        if (folders[i][0])
            err |= remove_all(folders[i]);
    memset(folders, 0, sizeof folders);
    return err;
}

void toy_check_nothing_left(struct toy_rank *r, struct toy_holdings before)
{
    struct toy_holdings now;
    if (!toy_holds_no_more(before, &now))
        toy_wrong(r, "fds %d -> %d, threads %d -> %d, maps %d -> %d", before.n_fds, now.n_fds,
                  before.n_threads, now.n_threads, before.n_maps, now.n_maps);
}

void toy_assert_nothing_left(struct toy_holdings before)
{
    struct toy_rank r = {0};
    toy_check_nothing_left(&r, before);
    if (r.wrong[0])
        fail_msg("%s", r.wrong);
}
