/* SPDX-License-Identifier: Apache-2.0 */
/* test_kills.c: kills one of four processes at a random moment of a random call, at every stage and with
 * groups, many times. The call of every survivor must soon end with an error that names the victim, and
 * nothing of the job may be left. Some victims are only stopped, which only a timeout finds.
 *
 * On the host, ranks use shared memory. On the GPU stand-in they use its NCCL, as one host or two, which
 * detects deaths in other ways.
 *
 * Environment variables: N_LOST=500 is the full count, and MOST_MS=2000 the time limit for survivors. Without
 * them the test is a sample, and only prints the slowest survivor. SEED repeats a run, and VERBOSE=1 prints
 * messages. */
#include "test/cmocka.h"
#include "test/zero/toy_net.h"
#include "test/zero/where.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <ftw.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* ANSWER_MS: time after a timeout in which ranks without shared memory compare their calls. */
enum { WORLD = 4, SAMPLE = 18, SAMPLE_MS = 15000, LONG_MS = 30000, HANG_MS = 120000, ANSWER_MS = 8000 };

/* What a rank is doing: a call, or calls of one kind. */
#define DOING_MAP(X)                                                                                         \
    X(NOTHING, "nothing")                                                                                    \
    X(WRAP, "zero_wrap")                                                                                     \
    X(BRACKETS, "brackets")                                                                                  \
    X(PARTS, "zero_all_reduce")                                                                              \
    X(ACTIONS, "zero_next, zero_finish")                                                                     \
    X(NORM, "zero_norm")                                                                                     \
    X(STEP, "zero_step")                                                                                     \
    X(GATHER, "zero_gather_all")                                                                             \
    X(READ, "zero_read")                                                                                     \
    X(SAVE, "zero_save")                                                                                     \
    X(UNWRAP, "zero_unwrap")

enum doing {
#define DOING_ENUM(id, text) id,
    DOING_MAP(DOING_ENUM)
#undef DOING_ENUM
        N_DOING
};

static const char *const doing_names[] = {
#define DOING_TEXT(id, text) [id] = text,
    DOING_MAP(DOING_TEXT)
#undef DOING_TEXT
};

/* One death. */
struct loss {
    int stage, victim, signal;
    /* when: in the nth call of this kind, after this part of the time that the previous one took */
    enum doing at;
    uint32_t nth;
    double part;
    bool async; /* saves run in the background */
    int tp, pp;
    int prefetch, timeout_ms, n_hosts;
    char folder[64];
};

/* One process, as the others see it. */
struct view {
    _Atomic int doing, before; /* before: what the rank did before doing */
    _Atomic uint32_t n[N_DOING];
    _Atomic int64_t took_us[N_DOING];
};

struct shared {
    struct toy_rank r[WORLD];
    struct view view[WORLD];
    _Atomic int64_t lost_ms; /* 0: no rank is lost yet */
};

static struct shared *shared;

static bool verbose;
/* most_ms: time limit for survivors; short_ms: timeout_ms of runs whose victim only a timeout finds */
static int64_t most_ms, short_ms;
static uint64_t seed;

static uint64_t draw(void)
{
    seed += 0x9e3779b97f4a7c15u;
    uint64_t x = seed;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static int64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static void sleep_us(int64_t us)
{
    nanosleep(&(struct timespec){.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000}, NULL);
}

/* ---- ranks ---- */

/* Makes a call of kind `what`, unless an earlier one failed. */
#define DO(what, call)                                                                                       \
    do {                                                                                                     \
        if (!err) {                                                                                          \
            int64_t from_us = now_us();                                                                      \
            atomic_store(&v->before, atomic_load(&v->doing));                                                \
            atomic_store(&v->doing, what);                                                                   \
            atomic_fetch_add(&v->n[what], 1); /* last: end_victim waits for it */                            \
            err = (call);                                                                                    \
            atomic_store(&v->took_us[what], now_us() - from_us);                                             \
            failed_in = err ? what : failed_in;                                                              \
        }                                                                                                    \
    } while (0)

/* Returns the number of the host that a rank claims to be on. */
static int host_of(const struct loss *l, int rank)
{
    return rank * l->n_hosts / WORLD;
}

static const struct zero_config *of_this_rank;

static void wait_for_unit(void)
{
    where_wait(of_this_rank);
}

/* Renames the tensors of the second pipeline stage, except for layers, which spans both. */
static void name_apart(struct toy *m)
{
    static const char *const names[TOY_TENSORS] = {"embedding 1", "layers", "bias 1", "frozen 1", "head 1"};
    for (int i = 0; i < TOY_TENSORS; i++)
        m->table[i].name = names[i];
}

/* Trains, saves and so on until a call fails. Returns its error, and its kind in *in. If none fails, ends
 * after the zero_unwrap in which the victim was to die. */
static int work(struct toy_rank *r, struct zero_config *cfg, zero_ctx **z, struct toy *m, enum doing *in)
{
    const struct loss *l = r->arg;
    struct view *v = &shared->view[r->rank];
    enum doing failed_in = NOTHING;
    int err = 0;
    float x[8] = {0}, *activations = where_alloc(sizeof x);
    double value = r->rank;
    cfg->launch.timeout_ms = l->timeout_ms;
    cfg->launch.start_timeout_ms = l->timeout_ms;
    cfg->checkpoint.save_async = l->async;
    cfg->memory.prefetch = l->prefetch;
    cfg->checkpoint.save_keep = 2;
    cfg->mesh.pp = l->pp > 1 ? l->pp : 1;
    cfg->mesh.tp = l->tp > 1 ? l->tp : 1;
    cfg->pipeline.activation_bytes = 64;
    cfg->grad_accum_steps = l->pp;
    if (l->pp > 1 && r->rank >= WORLD / l->pp)
        name_apart(m);
    DO(WRAP, zero_wrap(z, m->table, TOY_TENSORS, cfg));
    for (uint32_t round = 0; !err && *z; round++) {
        for (int step = 0; step < 2; step++) {
            struct zero_action a = {.micro_batch = l->pp > 1 ? 0 : -1};
            while (!err && a.micro_batch >= 0) {
                DO(ACTIONS, zero_next(*z, &a));
                if (a.micro_batch >= 0 && a.phase == ZERO_FORWARD)
                    DO(BRACKETS, toy_forward(m, *z, true));
                else if (a.micro_batch >= 0)
                    DO(BRACKETS, toy_backward(m, *z, true, step, r->rank));
                if (a.micro_batch >= 0)
                    DO(ACTIONS, zero_finish(*z));
            }
            if (l->pp == 1)
                DO(BRACKETS, toy_forward(m, *z, true));
            if (l->tp > 1)
                DO(PARTS, zero_all_reduce(*z, ZERO_AXIS_TP, activations, activations, 8, ZERO_F32, ZERO_SUM));
            if (l->pp == 1)
                DO(BRACKETS, toy_backward(m, *z, true, step, r->rank / l->tp));
            if (step)
                DO(NORM, zero_norm(*z, &value));
            DO(STEP, zero_step(*z, 1e-2f, NULL));
        }
        DO(GATHER, zero_gather_all(*z, 0));
        DO(GATHER, zero_release_all(*z));
        DO(READ, zero_read(*z, 0, 0, 0, 8, x));
        DO(READ, zero_mean(*z, &value, 1));
        DO(SAVE, zero_save(*z, l->folder, NULL));
        if (l->at == UNWRAP && round == l->nth)
            DO(UNWRAP, zero_unwrap(z));
    }
    atomic_store(&v->before, atomic_load(&v->doing));
    atomic_store(&v->doing, NOTHING);
    *in = failed_in;
    where_release(activations);
    return err;
}

extern int __lsan_do_recoverable_leak_check(void) __attribute__((weak));

/* Runs the process of one rank. */
static void live(struct toy_rank *r)
{
    const struct loss *l = r->arg;
    struct toy_holdings before = toy_holdings(), now;
    struct zero_config cfg = toy_config(r, l->stage);
    struct toy m;
    zero_ctx *z = NULL;
    enum doing in;
    char cause[sizeof r->text], misuse[1024];
    toy_make(&m);
    where_enter(host_of(l, r->rank));
    where_open(r->rank, &cfg);
    of_this_rank = &cfg;
    toy_wait = wait_for_unit;
    int err = work(r, &cfg, &z, &m, &in);
    while (!err && r->rank == l->victim)
        pause(); /* the victim waits to be killed */
    r->ms = toy_now_ms() - atomic_load(&shared->lost_ms);
    toy_note(r, err);
    r->hash = in;
    if (!atomic_load(&shared->lost_ms) && (err || z))
        toy_wrong(r, "it failed before anyone was lost");
    snprintf(cause, sizeof cause, "%s", r->text);
    if (z && (zero_unwrap(&z) != err || !strstr(cause, zero_last_error())))
        toy_wrong(r, "zero_unwrap says something else: %.300s", zero_last_error());
    toy_free(&m);
    where_close(&cfg);
    if (!where_leave(misuse, sizeof misuse))
        toy_wrong(r, "%s", misuse);
    if (!toy_holds_no_more(before, &now))
        toy_wrong(r, "fds %d -> %d, threads %d -> %d, maps %d -> %d", before.n_fds, now.n_fds,
                  before.n_threads, now.n_threads, before.n_maps, now.n_maps);
    if (__lsan_do_recoverable_leak_check && __lsan_do_recoverable_leak_check())
        toy_wrong(r, "memory was left");
}

/* ---- the process that kills ---- */

static void fork_ranks(struct loss *l, pid_t pid[WORLD])
{
    memset(shared, 0, sizeof *shared);
    toy_set_ranks(WORLD, l, shared->r);
    fflush(stdout);
    fflush(stderr);
    for (int i = 0; i < WORLD; i++) {
        pid[i] = fork();
        assert_true(pid[i] >= 0);
        if (pid[i] == 0) {
            live(&shared->r[i]);
            _exit(0);
        }
    }
}

/* Kills or stops the victim at the moment that l describes. */
static void end_victim(const struct loss *l, pid_t pid)
{
    const struct view *v = &shared->view[l->victim];
    int64_t until = now_us() + HANG_MS * 1000LL;
    uint32_t nth = l->at == WRAP || l->at == UNWRAP ? 1 : l->nth;
    while (atomic_load(&v->n[l->at]) < nth && now_us() < until)
        sleep_us(20);
    int64_t took_us = atomic_load(&v->took_us[l->at]);
    int64_t at_us = now_us() + (int64_t)(l->part * (double)(took_us ? took_us : 4000));
    while (now_us() < at_us)
        ;
    atomic_store(&shared->lost_ms, toy_now_ms());
    if (l->signal == SIGSTOP)
        where_stop(pid);
    else
        kill(pid, l->signal);
}

/* Waits until all ranks have ended. Kills a stopped victim after the others have ended. */
static void await_end(const struct loss *l, pid_t pid[WORLD])
{
    int64_t until = toy_now_ms() + HANG_MS;
    for (int left = WORLD, i = 0; left; i = (i + 1) % WORLD) {
        int status;
        bool late = toy_now_ms() > until;
        for (int k = 0; k < WORLD; k++)
            if (pid[k] && (late || (left == 1 && k == l->victim)))
                kill(pid[k], SIGKILL);
        if (pid[i] && waitpid(pid[i], &status, WNOHANG) == pid[i]) {
            pid[i] = 0;
            left--;
            if (late && i != l->victim)
                toy_wrong(&shared->r[i], "it hung");
            else if (i == l->victim ? !WIFSIGNALED(status) : status != 0)
                toy_wrong(&shared->r[i], "it ended with status 0x%x", (unsigned)status);
        }
        if (i == 0)
            sleep_us(500);
    }
}

/* ---- leftovers ---- */

static int count_names(const char *folder, const char *begin)
{
    DIR *d = opendir(folder);
    int n = 0;
    for (struct dirent *e; d && (e = readdir(d));)
        n += !strncmp(e->d_name, begin, strlen(begin));
    if (d)
        closedir(d);
    return n;
}

/* Fails the test if a process, a listener at the port, or a shared-memory name is left. A process that a rank
 * had started would be a child of this process now. */
static void assert_nothing_left(void)
{
    int status;
    pid_t other = waitpid(-1, &status, WNOHANG);
    if (other >= 0)
        fail_msg("process %d is left", (int)other);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    a.sin_port = htons((uint16_t)atoi(strrchr(shared->r[0].url, ':') + 1));
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(fd, (struct sockaddr *)&a, sizeof a) == 0)
        fail_msg("somebody listens at %s", shared->r[0].url);
    close(fd);
    assert_int_equal(count_names("/dev/shm", "zero"), 0);
}

static int remove_one(const char *path, const struct stat *s, int kind, struct FTW *at)
{
    return remove(path);
}

/* ---- many deaths ---- */

static int n_at[N_DOING], n_cases;
static int64_t slowest_ms;
static struct loss slowest;
static enum doing slowest_at;

/* Whether a call in an error message is of this kind. */
static bool is_of(enum doing what, const char *call)
{
    static const char *const names[N_DOING][2] = {[WRAP] = {"zero_wrap"},
                                                  [BRACKETS] = {"zero_begin(unit ", "zero_end(unit "},
                                                  [PARTS] = {"zero_all_reduce(sum) in "},
                                                  [ACTIONS] = {"zero_next in ", "zero_finish in "},
                                                  [NORM] = {"zero_norm in "},
                                                  [STEP] = {"zero_step in "},
                                                  [GATHER] = {"zero_gather_all in ", "zero_release_all in "},
                                                  [READ] = {"zero_read(tensor 0) in ", "zero_mean in "},
                                                  [SAVE] = {"zero_save in "},
                                                  [UNWRAP] = {"zero_unwrap in "}};
    for (int i = 0; i < 2; i++)
        if (names[what][i] && !strncmp(call, names[what][i], strlen(names[what][i])))
            return true;
    return false;
}

/* Whether the rank knows the victim's last call: it can read it, or rank 0 can and reports it. */
static bool may_know(const struct loss *l, int rank)
{
    int host = host_of(l, l->victim);
    return host_of(l, rank) == host || (l->victim && host_of(l, 0) == host);
}

/* Whether text names an earlier call of a victim on another host, if one has been reported. */
static bool names_what_it_heard(const struct view *v, const char *text)
{
    static const char heard[] = "; last heard: zero_";
    bool has_run = atomic_load(&v->n[READ]) > 1; /* its loop has run long enough to report a call */
    return strstr(text, " seq ") && (strstr(text, heard) || !has_run);
}

/* Whether a survivor's error names a call: the victim's last one, or zero_wrap if the victim was there. For a
 * victim on another host it may be an earlier call. Over NCCL, a stopped rank may be known only by the
 * survivor's own collective, or by the call of a rank that waits for it. */
static bool names_the_call(const struct loss *l, int rank, const char *text)
{
    static const char last[] = "; its last call was ";
    const struct view *v = &shared->view[l->victim];
    enum doing at = (enum doing)atomic_load(&v->doing), before = (enum doing)atomic_load(&v->before);
    const char *said = strstr(text, last), *call = said ? said + strlen(last) : "";
    if (where_has_gpu && l->signal == SIGSTOP && strstr(text, " seq ")) /* the survivor's own operation */
        return true;
    if (!may_know(l, rank) && !said && names_what_it_heard(v, text))
        return true;
    if (!said)
        return strstr(text, "zero_wrap: ") && (at == WRAP || before == WRAP);
    return l->signal == SIGSTOP || is_of(at, call) || is_of(before, call);
}

static void check_survivor(const struct loss *l, enum doing at, const struct toy_rank *r)
{
    char who[16];
    snprintf(who, sizeof who, "rank %d", l->victim);
    enum doing in = (enum doing)r->hash;
    int64_t allowed = most_ms;
    /* A rank that unwrapped together with the victim has no error. A victim that never came, or is stopped,
     * is found by timeout. */
    bool well = r->err == 0 && l->at == UNWRAP && (at == UNWRAP || at == NOTHING);
    bool by_time = l->signal == SIGSTOP ? r->err == ZERO_ERR_TIMEOUT || where_has_gpu
                                        : r->err == ZERO_ERR_TIMEOUT && at == WRAP;
    allowed += by_time ? l->timeout_ms + (where_has_gpu ? ANSWER_MS : 0) : 0;
    bool named = (r->err == ZERO_ERR_PEER || (r->err == ZERO_ERR_TIMEOUT && by_time)) &&
                 strstr(r->text, who) && names_the_call(l, r->rank, r->text);
    if (verbose)
        printf("  rank %d: %d in %s after %lld ms: %.300s\n", r->rank, r->err, doing_names[in],
               (long long)r->ms, r->text);
    if (r->wrong[0] || !(well || (named && r->ms <= allowed)))
        fail_msg("stage %d, tp %d, rank %d %s in %s: rank %d: code %d in %s after %lld ms: \"%s\"; %s",
                 l->stage, l->tp, l->victim, l->signal == SIGSTOP ? "stopped" : "killed", doing_names[at],
                 r->rank, r->err, doing_names[in], (long long)r->ms, r->text, r->wrong);
    if (named && !by_time && r->ms > slowest_ms) {
        slowest_ms = r->ms;
        slowest = *l;
        slowest_at = at;
    }
}

static void lose(struct loss *l)
{
    pid_t pid[WORLD];
    strcpy(l->folder, "/tmp/zero-kills-XXXXXX");
    assert_non_null(mkdtemp(l->folder));
    where_fork();
    fork_ranks(l, pid);
    end_victim(l, pid[l->victim]);
    await_end(l, pid);
    where_reap();
    enum doing at = (enum doing)atomic_load(&shared->view[l->victim].doing);
    nftw(l->folder, remove_one, 8, FTW_DEPTH | FTW_PHYS);
    if (verbose)
        printf("%d: stage %d, rank %d %s in %s (%s), %s\n", n_cases, l->stage, l->victim,
               l->signal == SIGSTOP ? "stopped" : "killed", doing_names[at], doing_names[l->at],
               l->async ? "saves in the background" : "saves");
    for (int k = 0; k < WORLD; k++)
        if (k != l->victim)
            check_survivor(l, at, &shared->r[k]);
    assert_string_equal(shared->r[l->victim].wrong, "");
    assert_nothing_left();
    n_at[at]++;
    n_cases++;
}

static struct loss any_loss(int i, int signal)
{
    struct loss l = {.stage = i % TOY_STAGES,
                     .victim = (int)(draw() % WORLD),
                     .signal = signal,
                     .at = (enum doing)(WRAP + draw() % (N_DOING - WRAP)),
                     .nth = 1 + (uint32_t)(draw() % 4),
                     .part = (double)(draw() % 1000) / 1000,
                     .async = draw() % 2,
                     /* with a higher value the toy model is never gathered again */
                     .prefetch = (int)(draw() % 2),
                     .n_hosts = 1};
    /* tensor parallelism, pipeline stages, or neither */
    int kind = l.stage <= 3 ? (int)(draw() % 3) : 0;
    l.tp = kind == 1 ? 2 : 1;
    l.pp = kind == 2 ? 2 : 1;
    if ((l.at == PARTS && l.tp == 1) || (l.at == ACTIONS && l.pp == 1))
        l.at = BRACKETS;
    if (where_has_gpu)
        l.n_hosts += (int)(draw() % 2);
    /* Only a victim that dies before ranks have met, and one that is stopped, is found by timeout. */
    l.timeout_ms = signal == SIGSTOP || l.at == WRAP ? (int)short_ms : LONG_MS;
    return l;
}

static int n_lost(void)
{
    const char *given = getenv("N_LOST");
    return given ? atoi(given) : SAMPLE;
}

static void killed_at_any_moment(void **state)
{
    int64_t from = toy_now_ms();
    for (int i = 0; i < n_lost(); i++) {
        struct loss l = any_loss(i, SIGKILL);
        lose(&l);
    }
    printf("%d killed in %lld s; the slowest survivor knew after %lld ms (stage %d, rank %d in %s).",
           n_lost(), (long long)(toy_now_ms() - from) / 1000, (long long)slowest_ms, slowest.stage,
           slowest.victim, doing_names[slowest_at]);
    for (int k = 0; k < N_DOING; k++)
        printf(" %s %d%s", doing_names[k], n_at[k], k == N_DOING - 1 ? "\n" : ",");
}

static void stopped_at_any_moment(void **state)
{
    for (int i = 0; i < (n_lost() + 17) / 18; i++) {
        struct loss l = any_loss((int)(draw() % TOY_STAGES), SIGSTOP);
        lose(&l);
    }
}

int main(void)
{
    const char *given = getenv("SEED"), *most = getenv("MOST_MS");
    verbose = getenv("VERBOSE");
    seed = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
    most_ms = most ? atoll(most) : SAMPLE_MS;
    short_ms = most_ms < SAMPLE_MS ? 2000 : 5000; /* on a busy machine a save may take long */
    printf("SEED=%llu\n", (unsigned long long)seed);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    const struct CMUnitTest tests[] = {cmocka_unit_test(killed_at_any_moment),
                                       cmocka_unit_test(stopped_at_any_moment)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
