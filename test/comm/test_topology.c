/* SPDX-License-Identifier: Apache-2.0 */
/* test_topology.c: tests which ranks are found to be on one host. Covers ranks that pose as several hosts,
 * ranks that cannot map each other's memory, ranks in real containers, and ranks that fail on the way. */
#include "comm/topology.h"
#include "test/cmocka.h"
#include "test/comm/ranks.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

/* What the ranks of a test pretend, and what must come of it. */
struct posed {
    const char *what;
    int machine[MAX_RANKS], container[MAX_RANKS]; /* per rank; any numbers */
    const char *part[MAX_RANKS];                  /* per rank; NULL: "" */
    int (*open[MAX_RANKS])(void *arg, int rank, int pid, int fd);
    int host[MAX_RANKS];   /* expected; any numbers, equal for ranks on one host */
    const char *why;       /* expected text in the reason; NULL: no reason */
    bool real;             /* nothing is pretended */
    bool lacks[MAX_RANKS]; /* the rank cannot make a file */
};

static _Thread_local bool may_make_no_file;

int __real_memfd_create(const char *name, unsigned flags);
int __wrap_memfd_create(const char *name, unsigned flags);

int __wrap_memfd_create(const char *name, unsigned flags)
{
    errno = EMFILE;
    return may_make_no_file ? -1 : __real_memfd_create(name, flags);
}

static void pose(const struct posed *p, int rank, struct zr_identity *id)
{
    memset(id, 0x55, sizeof *id); /* nothing may rely on bytes after a text's end */
    snprintf(id->machine, sizeof id->machine, "machine %d", p->machine[rank]);
    snprintf(id->host_name, sizeof id->host_name, "node%d", p->machine[rank]);
    snprintf(id->host_id, sizeof id->host_id, "%s", p->part[rank] ? p->part[rank] : "");
    id->pid_namespace = (uint64_t)p->container[rank];
    id->open = p->open[rank];
    id->arg = NULL;
}

/* Meets the others, and probes. */
static int meet_and_probe(struct rank *me, const struct zr_identity *id, int err, struct zr_topology *t)
{
    uv_loop_t loop;
    struct zr_rendezvous *rdv = NULL;
    memset(t, 0x55, sizeof *t);
    uv_loop_init(&loop);
    int met = zr_rendezvous_open(&loop, &me->w, 30000, &rdv);
    if (!met && err)
        met = zr_fail(err, "rank %d has no luck", me->w.rank);
    met = rdv ? zr_topology_probe(rdv, id, met, t) : met;
    note_error(me, met);
    zr_rendezvous_free(rdv);
    uv_loop_close(&loop);
    return met;
}

/* --- invariants of any topology --- */

static int32_t expected_host(const int *host, int32_t rank)
{
    int32_t n = 0;
    for (int32_t r = 0;; r++) {
        int32_t first = 0;
        while (host[first] != host[r])
            first++;
        if (first != r)
            continue;
        if (host[r] == host[rank])
            return n;
        n++;
    }
}

/* Returns the number of ranks that come before this one in the order of places. */
static int32_t expected_place(const int *host, int32_t world, int32_t rank)
{
    int32_t n = 0, mine = expected_host(host, rank);
    for (int32_t r = 0; r < world; r++) {
        int32_t other = expected_host(host, r);
        n += other < mine || (other == mine && r < rank);
    }
    return n;
}

static void check_topology(struct rank *me, const struct zr_topology *t, const int *host)
{
    int32_t world = me->w.world, rank = me->w.rank, n_hosts = 0, local_size = 0, local_rank = 0;
    RANK_CHECK(me, t->world == world && t->rank == rank, "rank %d of %d", t->rank, t->world);
    for (int32_t r = 0; r < world; r++) {
        int32_t place = expected_place(host, world, r), number = expected_host(host, r);
        const struct zr_host *h = &t->hosts[number];
        RANK_CHECK(me, t->host_of[r] == number, "rank %d is on host %d, not %d", r, t->host_of[r], number);
        RANK_CHECK(me, t->place_of[r] == place && t->rank_at[place] == r, "rank %d is at place %d, not %d", r,
                   t->place_of[r], place);
        RANK_CHECK(me, h->lowest_rank <= r && t->host_of[h->lowest_rank] == number, "host %d begins with %d",
                   number, h->lowest_rank);
        n_hosts = number + 1 > n_hosts ? number + 1 : n_hosts;
        local_size += number == t->host;
        local_rank += number == t->host && r < rank;
    }
    RANK_CHECK(me, t->n_hosts == n_hosts, "%d hosts, not %d", t->n_hosts, n_hosts);
    RANK_CHECK(me, t->host == expected_host(host, rank), "I am on host %d", t->host);
    RANK_CHECK(me, t->local_size == local_size && t->local_rank == local_rank, "%d of %d here, not %d of %d",
               t->local_rank, t->local_size, local_rank, local_size);
    RANK_CHECK(me, t->hosts[t->host].n_ranks == local_size, "%d ranks", t->hosts[t->host].n_ranks);
    RANK_CHECK(me, t->rank_at[0] == 0, "place 0 is rank %d", t->rank_at[0]);
}

static int count_descriptors(void)
{
    int n = 0;
    DIR *d = opendir("/proc/self/fd");
    while (d && readdir(d))
        n++;
    if (d)
        closedir(d);
    return n;
}

static void probe_posed(struct rank *me)
{
    const struct posed *p = me->arg;
    struct zr_identity id;
    struct zr_topology t;
    int before = count_descriptors();
    pose(p, me->w.rank, &id);
    may_make_no_file = p->lacks[me->w.rank];
    if (p->real && p->part[me->w.rank]) /* each rank is a process */
        setenv("ZERO_HOST_ID", p->part[me->w.rank], 1);
    RANK_CHECK(me, meet_and_probe(me, p->real ? NULL : &id, 0, &t) == 0, "%s: %s", p->what, zr_error_text());
    RANK_CHECK(me, !me->forked || count_descriptors() == before, "%s: %d descriptors, %d before", p->what,
               count_descriptors(), before);
    check_topology(me, &t, p->host);
    RANK_CHECK(me, p->why ? strstr(t.why, p->why) != NULL : !t.why[0], "%s: why: \"%s\"", p->what, t.why);
    snprintf(me->note, sizeof me->note, "%s", t.why);
    zr_topology_free(&t);
    zr_topology_free(&t);
}

/* All ranks report the same reason. */
static void run_posed(struct posed *p, int world, bool forked)
{
    const struct rank *r = run_ranks(forked, world, probe_posed, p, NULL);
    for (int i = 1; i < world; i++)
        assert_string_equal(r[i].note, r[0].note);
}

/* --- hosts --- */

static void test_real(void **state)
{
    struct posed p = {.what = "this machine", .real = true};
    for (int world = 1; world <= 8; world++)
        run_posed(&p, world, world % 3 == 2);
}

static void test_several_hosts(void **state)
{
    for (int world = 1; world <= 8; world++)
        for (int each = 1; each <= world; each++) {
            struct posed block = {.what = "block-wise"}, cyclic = {.what = "cyclic"};
            for (int r = 0; r < world; r++) {
                block.host[r] = block.machine[r] = r / each;
                cyclic.host[r] = cyclic.machine[r] = r % each;
            }
            run_posed(&block, world, false);
            run_posed(&cyclic, world, (world + each) % 5 == 0);
        }
    struct posed unequal = {
        .what = "unequal", .machine = {4, 4, 7, 4, 1, 7, 4, 4}, .host = {4, 4, 7, 4, 1, 7, 4, 4}};
    run_posed(&unequal, 8, true);
    uint64_t seed = fresh_seed("several hosts");
    for (int i = 0; i < 60; i++) {
        struct posed any = {.what = "any"};
        int world = (int)random_in(&seed, 1, 8), most = (int)random_in(&seed, 0, world);
        for (int r = 0; r < world; r++)
            any.host[r] = any.machine[r] = (int)random_in(&seed, 0, most);
        run_posed(&any, world, false);
    }
}

static void test_posed_containers(void **state)
{
    struct posed p = {.what = "containers",
                      .machine = {0, 0, 1, 0, 1, 0},
                      .container = {5, 6, 5, 5, 5, 6},
                      .host = {0, 1, 2, 0, 2, 1},
                      .why = "rank 0 and rank 1 are in different process namespaces"};
    run_posed(&p, 6, false);
}

/* --- ranks that cannot open a peer's file --- */

static int refuse_all(void *arg, int rank, int pid, int fd)
{
    errno = EACCES;
    return -1;
}

static int refuse_rank_2(void *arg, int rank, int pid, int fd)
{
    struct zr_identity plain = {.open = NULL};
    return rank == 2 ? refuse_all(arg, rank, pid, fd) : zr_identity_open(&plain, rank, pid, fd);
}

/* Opens files that are not the peer's, as when a number has been reused. */
static int open_nothing(void *arg, int rank, int pid, int fd)
{
    return memfd_create("another", MFD_CLOEXEC);
}

static int open_zeros(void *arg, int rank, int pid, int fd)
{
    int other = open_nothing(arg, rank, pid, fd);
    return ftruncate(other, 4096) ? -1 : other;
}

static void test_cannot_open(void **state)
{
    struct posed last = {.what = "rank 3 cannot",
                         .open = {[3] = refuse_all},
                         .host = {0, 0, 0, 1, 0},
                         .why = "rank 3 cannot open the memory of rank 0: Permission denied"};
    struct posed two = {.what = "ranks 1 and 3 cannot",
                        .open = {[1] = refuse_all, [3] = refuse_all},
                        .host = {0, 1, 0, 2, 0},
                        .why = "rank 1 cannot open the memory of rank 0"};
    /* The other ranks were not asked whether they can see each other. */
    struct posed head = {.what = "rank 0 cannot see rank 2",
                         .open = {[0] = refuse_rank_2},
                         .host = {0, 1, 2, 3, 4},
                         .why = "rank 0 cannot open the memory of rank 2: Permission denied"};
    struct posed second_host = {.what = "nor can one of the second host",
                                .machine = {0, 1, 0, 1, 1},
                                .open = {[4] = refuse_all},
                                .host = {0, 1, 0, 1, 2},
                                .why = "rank 4 cannot open the memory of rank 1"};
    struct posed shorter = {.what = "an empty file",
                            .open = {[1] = open_nothing},
                            .host = {0, 1, 0, 0, 0},
                            .why =
                                "rank 1 cannot open the memory of rank 0: it was replaced by another file"};
    struct posed zeros = {.what = "a file of zeros",
                          .open = {[2] = open_zeros},
                          .host = {0, 0, 1, 0, 0},
                          .why = "rank 2 cannot open the memory of rank 0: it was replaced by another file"};
    struct posed *const all[] = {&last, &two, &head, &second_host, &shorter, &zeros};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        run_posed(all[i], 5, false);
        run_posed(all[i], 5, true);
    }
}

/* --- hosts split by ZERO_HOST_ID --- */

/* ZERO_HOST_ID splits what would be one host, and joins nothing. */
static void test_parts(void **state)
{
    struct posed two = {.what = "two parts",
                        .part = {"a", "a", "b", "a", "b"},
                        .host = {0, 0, 1, 0, 1},
                        .why = "ZERO_HOST_ID is \"a\" on rank 0 and \"b\" on rank 2"};
    struct posed one = {.what = "only one rank has it",
                        .part = {NULL, NULL, "b"},
                        .host = {0, 0, 1, 0},
                        .why = "ZERO_HOST_ID is not set on rank 0 and \"b\" on rank 2"};
    struct posed machines = {.what = "the same on two machines",
                             .machine = {0, 1, 0, 1},
                             .part = {"a", "a", "a", "a"},
                             .host = {0, 1, 0, 1}};
    struct posed containers = {.what = "the same in two containers",
                               .container = {5, 6, 6, 5},
                               .part = {"a", "a", "b", "b"},
                               .host = {0, 1, 2, 3},
                               .why = "rank 0 and rank 1 are in different process namespaces"};
    struct posed apart = {.what = "a rank of one part cannot open",
                          .part = {"a", "b", "a", "b", "b"},
                          .open = {[3] = refuse_all},
                          .host = {0, 1, 0, 2, 1},
                          .why = "ZERO_HOST_ID is \"a\" on rank 0 and \"b\" on rank 1"};
    struct posed real = {.what = "this machine, in the environment",
                         .real = true,
                         .part = {"rack 7", "rack 7", NULL, "rack 8"},
                         .host = {0, 0, 1, 2},
                         .why = "ZERO_HOST_ID is \"rack 7\" on rank 0 and not set on rank 2"};
    run_posed(&two, 5, true);
    run_posed(&one, 4, false);
    run_posed(&machines, 4, false);
    run_posed(&containers, 4, false);
    run_posed(&apart, 5, false);
    run_posed(&real, 4, true);
}

static void test_any_parts(void **state)
{
    static const char *const names[] = {"", "part 1", "part 2"};
    uint64_t seed = fresh_seed("parts");
    for (int i = 0; i < 40; i++) {
        struct posed any = {.what = "any parts"};
        int world = (int)random_in(&seed, 1, 8), first[2] = {-1, -1};
        for (int r = 0; r < world; r++) {
            int part = (int)random_in(&seed, 0, 2), machine = any.machine[r] = (int)random_in(&seed, 0, 1);
            any.part[r] = names[part];
            any.host[r] = machine * 3 + part;
            if (first[machine] >= 0 && first[machine] != part)
                any.why = "ZERO_HOST_ID is ";
            first[machine] = part;
        }
        run_posed(&any, world, false);
    }
}

/* Texts that differ only beyond the length that is sent are still different. */
static void test_long_parts(void **state)
{
    struct zr_identity a, b;
    char text[300];
    for (int n = 1; n < (int)sizeof text; n++) {
        memset(text, 'x', (size_t)n);
        text[n] = 0;
        setenv("ZERO_HOST_ID", text, 1);
        zr_identity_read(&a);
        text[n - 1] = 'y';
        setenv("ZERO_HOST_ID", text, 1);
        zr_identity_read(&b);
        assert_string_not_equal(a.host_id, b.host_id);
        assert_true(n < (int)sizeof b.host_id ? !strcmp(b.host_id, text) : b.host_id[24] == '~');
    }
    unsetenv("ZERO_HOST_ID");
    zr_identity_read(&a);
    assert_string_equal(a.host_id, "");
}

/* --- ranks that have no file to open --- */

/* A rank without a file is alone; the others of its host stay together. */
static void test_cannot_make(void **state)
{
    struct posed last = {.what = "rank 3 has no file",
                         .lacks = {[3] = true},
                         .host = {0, 0, 0, 1, 0},
                         .why =
                             "rank 3 cannot share memory: making a shared memory file: Too many open files"};
    struct posed first = {.what = "rank 0 has no file",
                          .lacks = {[0] = true},
                          .host = {0, 1, 1, 1, 1},
                          .why = "rank 0 cannot share memory: making a shared memory file"};
    struct posed two = {.what = "ranks 0 and 2 have no file",
                        .lacks = {[0] = true, [2] = true},
                        .host = {0, 1, 2, 1, 1},
                        .why = "rank 0 cannot share memory"};
    struct posed all_of_them = {.what = "nobody has a file",
                                .lacks = {true, true, true, true, true},
                                .host = {0, 1, 2, 3, 4},
                                .why = "rank 1 cannot share memory"};
    struct posed containers = {.what = "a container, and no file",
                               .container = {5, 6, 5, 6, 5},
                               .lacks = {[4] = true},
                               .host = {0, 1, 0, 1, 2},
                               .why = "rank 0 and rank 1 are in different process namespaces"};
    struct posed machines = {.what = "no file on a machine of its own",
                             .machine = {0, 1, 0, 0, 0},
                             .lacks = {[1] = true},
                             .host = {0, 1, 0, 0, 0}};
    struct posed *const all[] = {&last, &first, &two, &all_of_them, &containers, &machines};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        run_posed(all[i], 5, false);
        run_posed(all[i], 5, true);
    }
}

/* --- real containers --- */

struct container {
    int flags; /* for unshare */
    bool is_host_of_its_own;
    struct posed expect;
};

/* Continues in new namespaces, which only a new process may enter. */
static void probe_inside(struct rank *r, const struct container *c)
{
    RANK_CHECK(r, unshare(CLONE_NEWUSER | c->flags) == 0, "unshare: %s", strerror(errno));
    RANK_CHECK(r, !(c->flags & CLONE_NEWUTS) || sethostname("another-name", 12) == 0, "sethostname: %s",
               strerror(errno));
    pid_t child = fork();
    RANK_CHECK(r, child >= 0, "fork: %s", strerror(errno));
    if (child == 0) {
        probe_posed(r);
        fflush(NULL);
        _exit(0);
    }
    int status = 0;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    RANK_CHECK(r, r->wrong[0] || status == 0, "the one inside ended with status 0x%x", (unsigned)status);
}

static void probe_in_container(struct rank *me)
{
    const struct container *c = me->arg;
    me->arg = (void *)&c->expect;
    if (me->w.rank != 1) {
        probe_posed(me);
        return;
    }
    probe_inside(me, c);
    fflush(NULL);
    _exit(0); /* LeakSanitizer fails outside its namespaces */
}

static bool can_unshare(int flags)
{
    int status = 1;
    pid_t child = fork();
    if (child == 0)
        _exit(unshare(CLONE_NEWUSER | flags) ? 1 : 0);
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    return child > 0 && status == 0;
}

static void test_containers(void **state)
{
    struct container own_processes = {
        .flags = CLONE_NEWPID,
        .expect = {.what = "a process namespace of its own",
                   .real = true,
                   .host = {0, 1, 0},
                   .why = "rank 0 and rank 1 are in different process namespaces (containers)"}};
    /* This container also has its own user namespace, so it may not look into the others, though they may
     * look into it. */
    struct container renamed = {
        .flags = CLONE_NEWUTS,
        .expect = {
            .what = "another host name and user namespace", .real = true, .host = {0, 1, 0}, .why = "rank"}};
    struct container *const all[] = {&own_processes, &renamed};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        if (can_unshare(all[i]->flags))
            run_ranks(true, 3, probe_in_container, all[i], NULL);
        else
            print_message("skipped: %s: namespaces may not be made here\n", all[i]->expect.what);
    }
}

/* --- ranks that fail --- */

struct failing {
    int err[MAX_RANKS]; /* per rank, before it probes */
    int lacks_memory;   /* the rank whose k-th allocation fails; -1: none */
    int k;
    int dies; /* the rank that dies before it answers; -1: none */
    /* The rank that dies after it has answered, before the lowest rank looks at its memory; 0: none. */
    int dies_later;
};

static _Thread_local int allocations_left = -1;

void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size);

void *__wrap_calloc(size_t n, size_t size)
{
    return allocations_left >= 0 && allocations_left-- == 0 ? NULL : __real_calloc(n, size);
}

static int die(void *arg, int rank, int pid, int fd)
{
    raise(SIGKILL);
    return -1;
}

/* Sends what it found, waits for the others, and ends a little later. */
static int die_later(void *arg, int rank, int pid, int fd)
{
    const struct itimerval soon = {.it_value.tv_usec = 200000};
    setitimer(ITIMER_REAL, &soon, NULL);
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    return open(path, O_RDWR | O_CLOEXEC);
}

/* Opens the memory of a rank that dies later only after its death. */
static int open_late(void *arg, int rank, int pid, int fd)
{
    const struct failing *f = arg;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
    int got = open(path, O_RDWR | O_CLOEXEC);
    for (int i = 0; rank == f->dies_later && got >= 0 && i < 3000; i++) {
        close(got);
        usleep(10000);
        got = open(path, O_RDWR | O_CLOEXEC);
    }
    return got;
}

static void probe_failing(struct rank *me)
{
    struct failing *f = me->arg;
    struct zr_identity id;
    struct zr_topology t;
    uv_loop_t loop;
    struct zr_rendezvous *rdv;
    int err = f->err[me->w.rank];
    zr_identity_read(&id);
    id.open = f->dies == me->w.rank ? die : NULL;
    if (f->dies_later > 0) {
        id.open = f->dies_later == me->w.rank ? die_later : open_late;
        id.arg = f;
    }
    uv_loop_init(&loop);
    RANK_CHECK(me, zr_rendezvous_open(&loop, &me->w, 30000, &rdv) == 0, "%s", zr_error_text());
    if (err)
        zr_fail(err, "rank %d has no luck", me->w.rank);
    memset(&t, 0x55, sizeof t);
    allocations_left = f->lacks_memory == me->w.rank ? f->k : -1;
    err = zr_topology_probe(rdv, &id, err, &t);
    allocations_left = -1;
    note_error(me, err);
    RANK_CHECK(me, err && !t.host_of && !t.hosts, "it went on, or holds something: %d", err);
    zr_rendezvous_free(rdv);
    RANK_CHECK(me, uv_loop_close(&loop) == 0, "handles are left");
}

static void mark_dying(struct rank *r)
{
    const struct failing *f = r->arg;
    r->dies = f->dies == r->w.rank || (f->dies_later > 0 && f->dies_later == r->w.rank);
}

static void test_failure_before(void **state)
{
    struct failing f = {.err = {[1] = ZERO_ERR_ARG, [3] = ZERO_ERR_IO}, .lacks_memory = -1, .dies = -1};
    for (int forked = 0; forked < 2; forked++) {
        const struct rank *r = run_ranks(forked, 5, probe_failing, &f, NULL);
        for (int i = 0; i < 5; i++)
            expect_rank(&r[i], ZERO_ERR_ARG, i == 1 ? "rank 1 has no luck" : "rank 1: rank 1 has no luck");
    }
}

static void test_failure_within(void **state)
{
    struct failing f = {.lacks_memory = 2, .dies = -1};
    for (f.k = 0; f.k < 5; f.k++) {
        const struct rank *r = run_ranks(f.k % 2, 4, probe_failing, &f, NULL);
        for (int i = 0; i < 4; i++)
            expect_rank(&r[i], ZERO_ERR_NOMEM,
                        i == 2 ? "no memory to ask 4 ranks" : "rank 2: no memory to ask 4 ranks");
    }
    f.lacks_memory = -1;
    f.dies = 2;
    const struct rank *r = run_ranks(true, 4, probe_failing, &f, mark_dying);
    for (int i = 0; i < 4; i++)
        if (i != 2)
            expect_rank(&r[i], ZERO_ERR_PEER, "rank 2");
}

/* It is reported as lost, and not as a rank on another host. */
static void test_dies_when_it_has_answered(void **state)
{
    struct failing f = {.lacks_memory = -1, .dies = -1};
    for (f.dies_later = 1; f.dies_later < 4; f.dies_later++) {
        char name[32];
        snprintf(name, sizeof name, "rank %d", f.dies_later);
        const struct rank *r = run_ranks(true, 4, probe_failing, &f, mark_dying);
        for (int i = 0; i < 4; i++)
            if (i != f.dies_later)
                expect_rank(&r[i], ZERO_ERR_PEER, name);
    }
}

/* --- a topology made without other ranks --- */

static void expect_hosts(int world, int local_size, const char *text)
{
    struct zr_topology t;
    char list[256];
    assert_int_equal(zr_topology_assume(world, local_size, &t), 0);
    assert_int_equal(t.world, world);
    assert_true(t.rank == 0 && t.host == 0 && t.local_rank == 0 && !t.why[0]);
    for (int r = 0; r < world; r++)
        assert_true(t.place_of[r] == r && t.rank_at[r] == r);
    zr_topology_list_hosts(&t, list, sizeof list);
    assert_string_equal(list, text);
    zr_topology_free(&t);
}

static void test_assume(void **state)
{
    struct zr_topology t;
    expect_hosts(1, 0, "host 0 has 1 rank (0)");
    expect_hosts(8, 0, "host 0 has 8 ranks (0 to 7)");
    expect_hosts(7, 4, "host 0 has 4 ranks (0 to 3), host 1 has 3 (4 to 6)");
    expect_hosts(3, 2, "host 0 has 2 ranks (0, 1), host 1 has 1 (2)");
    assert_int_equal(zr_topology_assume(0, 0, &t), ZERO_ERR_ARG);
    assert_int_equal(zr_topology_assume(4, -1, &t), ZERO_ERR_ARG);
    assert_int_equal(zr_topology_probe(NULL, NULL, 0, &t), 0);
    assert_true(t.world == 1 && t.n_hosts == 1 && t.local_size == 1 && t.rank_at[0] == 0);
    zr_topology_free(&t);
    zr_fail(ZERO_ERR_IO, "already");
    assert_int_equal(zr_topology_probe(NULL, NULL, ZERO_ERR_IO, &t), ZERO_ERR_IO);
    assert_string_equal(zr_error_text(), "already");
    zr_topology_free(&t);
    zr_topology_free(NULL);
}

/* --- which ranks may share memory --- */

static void expect_apart(struct rank *me, const struct zr_topology *t, int a, int b, int c, const char *text)
{
    const int32_t members[] = {a, b, c};
    int err = zr_topology_one_host(t, members, 3);
    RANK_CHECK(me, err == (text ? ZERO_ERR_NOTSUP : 0), "%d, %d and %d: %d", a, b, c, err);
    RANK_CHECK(me, !text || strstr(zr_error_text(), text), "\"%s\" lacks \"%s\"", zr_error_text(), text);
}

static void ask_who_shares(struct rank *me)
{
    struct zr_identity id;
    struct zr_topology t;
    char list[256];
    pose(me->arg, me->w.rank, &id);
    RANK_CHECK(me, meet_and_probe(me, &id, 0, &t) == 0, "%s", zr_error_text());
    expect_apart(me, &t, 0, 2, 4, NULL);
    expect_apart(me, &t, 5, 3, 5, NULL);
    expect_apart(me, &t, 4, 2, 5,
                 "shared memory needs all ranks on one host: rank 4 is on \"node0\", rank 5 on \"node1\"");
    expect_apart(me, &t, 0, 0, 1,
                 "shared memory needs all ranks in one process namespace: rank 0 (\"node0\") and rank 1 "
                 "(\"node0\") are in different containers");
    expect_apart(me, &t, 2, 0, 7,
                 "shared memory needs all ranks on one host: ZERO_HOST_ID is not set on rank 2 and \"half\" "
                 "on rank 7, which makes it two hosts");
    expect_apart(me, &t, 6, 4, 2, "rank 6 cannot open the memory of rank 0: Permission denied");
    zr_topology_list_hosts(&t, list, sizeof list);
    RANK_CHECK(
        me,
        !strcmp(
            list,
            "host 0 has 3 ranks (0, 2, 4), host 1 has 1 (1), host 2 has 2 (3, 5), host 3 has 1 (6), host 4 "
            "has 1 (7)"),
        "%s", list);
    zr_topology_free(&t);
}

static void test_who_shares(void **state)
{
    struct posed p = {.machine = {0, 0, 0, 1, 0, 1, 0, 0},
                      .container = {1, 2, 1, 1, 1, 1, 1, 1},
                      .part = {[7] = "half"},
                      .open = {[6] = refuse_all}};
    run_ranks(false, 8, ask_who_shares, &p, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_real),
        cmocka_unit_test(test_several_hosts),
        cmocka_unit_test(test_posed_containers),
        cmocka_unit_test(test_cannot_open),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_any_parts),
        cmocka_unit_test(test_long_parts),
        cmocka_unit_test(test_cannot_make),
        cmocka_unit_test(test_containers),
        cmocka_unit_test(test_failure_before),
        cmocka_unit_test(test_failure_within),
        cmocka_unit_test(test_dies_when_it_has_answered),
        cmocka_unit_test(test_assume),
        cmocka_unit_test(test_who_shares),
    };
    return cmocka_run_group_tests_name("topology", tests, NULL, NULL);
}
