/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_stand_in.c: the stand-in's controls for tests, the start and end of its calls, and its
 * communicators. Messages and collectives are in mpi_stand_in_run.c. */
#include "test/stand_in/mpi_stand_in_inside.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define AS_IT_COMES                                                                                          \
    ((struct mpi_stand_in_machine){                                                                          \
        .n_ranks = 1, .level = ZR_MPI_MULTIPLE, .short_bytes = 4096, .library = "MPI stand-in 1.0"})

struct msi_state msi = {
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .moved = PTHREAD_COND_INITIALIZER,
    .machine = {.n_ranks = 1, .level = ZR_MPI_MULTIPLE, .short_bytes = 4096, .library = "MPI stand-in 1.0"}};

static _Thread_local int this_rank = -1;

void msi_misuse(const char *fmt, ...)
{
    va_list ap;
    if (msi.n_misuses++)
        return;
    va_start(ap, fmt);
    vsnprintf(msi.misuse, sizeof msi.misuse, fmt, ap);
    va_end(ap);
}

/* --- controls for tests --- */

struct mpi_stand_in_machine *mpi_stand_in_the_machine(void)
{
    return &msi.machine;
}

void mpi_stand_in_be(int rank)
{
    this_rank = rank;
    pthread_mutex_lock(&msi.lock);
    msi.world[rank].rank = rank;
    pthread_mutex_unlock(&msi.lock);
}

static void set_fault(const char *call, int rank, int k, int class, bool hangs)
{
    pthread_mutex_lock(&msi.lock);
    snprintf(msi.fail_call, sizeof msi.fail_call, "%s", call);
    msi.fail_rank = rank;
    msi.fail_k = k;
    msi.fail_class = class;
    msi.fail_hangs = hangs;
    pthread_mutex_unlock(&msi.lock);
}

void mpi_stand_in_fail(const char *call, int rank, int k, int class)
{
    set_fault(call, rank, k, class, false);
}

void mpi_stand_in_hang(const char *call, int rank, int k)
{
    set_fault(call, rank, k, MPI_STAND_IN_OTHER, true);
}

void mpi_stand_in_come_back(void)
{
    pthread_mutex_lock(&msi.lock);
    msi.ending = true;
    pthread_cond_broadcast(&msi.moved);
    pthread_mutex_unlock(&msi.lock);
}

void mpi_stand_in_die(int rank)
{
    pthread_mutex_lock(&msi.lock);
    msi.world[rank].died = true;
    pthread_mutex_unlock(&msi.lock);
}

static int count_comms(const struct zr_mpi_world *w)
{
    int n = 0;
    for (int i = 0; i < ZR_MPI_COMMS; i++)
        n += w->comm[i].team != NULL;
    return n;
}

void mpi_stand_in_counts(struct mpi_stand_in_counts *out)
{
    pthread_mutex_lock(&msi.lock);
    *out = msi.counts;
    for (int r = 0; r < MSI_RANKS; r++) {
        out->n_comms += count_comms(&msi.world[r]);
        out->n_pending += msi.world[r].n_pending;
        out->n_hung += msi.world[r].hung;
    }
    pthread_mutex_unlock(&msi.lock);
}

/* Reports objects that must not exist when MPI ends. Call with the lock held. */
static void report_what_is_left(const struct zr_mpi_world *w)
{
    int n_comms = count_comms(w);
    if (w->n_pending)
        msi_misuse("rank %d: %d requests are pending at the end", w->rank, w->n_pending);
    if (n_comms)
        msi_misuse("rank %d: %d communicators were not freed", w->rank, n_comms);
}

/* Calls the on_finalize function of each rank whose MPI was not finalized: it ends now. Call with the lock
 * held; releases it meanwhile. */
static void report_finalize(void)
{
    for (int r = 0; r < MSI_RANKS; r++) {
        const struct zr_mpi_world *w = &msi.world[r];
        void (*fn)(void *) = w->initialized && !w->finalized ? w->fn : NULL;
        void *arg = w->fn_arg;
        pthread_mutex_unlock(&msi.lock);
        if (fn)
            fn(arg);
        pthread_mutex_lock(&msi.lock);
    }
}

static void forget_all(void)
{
    for (struct msi_team *k = msi.teams, *next; k; k = next) {
        next = k->next;
        msi_forget(k);
        free(k);
    }
    for (struct msi_making *m = msi.makings, *next; m; m = next) {
        next = m->next;
        free(m);
    }
    msi.teams = NULL;
    msi.makings = NULL;
    memset(msi.world, 0, sizeof msi.world);
    msi.counts = (struct mpi_stand_in_counts){0};
    msi.machine = AS_IT_COMES;
    msi.fail_call[0] = 0;
    msi.n_misuses = 0;
    msi.ending = false;
}

int mpi_stand_in_end(const char **first)
{
    static char text[sizeof msi.misuse];
    bool disturbed = false;
    pthread_mutex_lock(&msi.lock);
    msi.ending = true;
    pthread_cond_broadcast(&msi.moved);
    while (msi.n_inside)
        pthread_cond_wait(&msi.moved, &msi.lock);
    for (int r = 0; r < MSI_RANKS; r++)
        disturbed |= msi.world[r].died || msi.world[r].hung;
    for (int r = 0; r < MSI_RANKS && !disturbed; r++)
        report_what_is_left(&msi.world[r]);
    report_finalize();
    int n = msi.n_misuses;
    snprintf(text, sizeof text, "%s", n ? msi.misuse : "");
    forget_all();
    pthread_mutex_unlock(&msi.lock);
    *first = text;
    return n;
}

/* --- calls --- */

/* Call with the lock held. */
static bool is_due(const struct zr_mpi_world *w, const char *call)
{
    if (strcmp(msi.fail_call, call) || msi.fail_rank != w->rank || --msi.fail_k != 0)
        return false;
    msi.fail_call[0] = 0;
    return true;
}

static int fault(struct zr_mpi_world *w, const char *call)
{
    bool fails_when_it_ends = !strcmp(call, "poll") && !msi.fail_hangs;
    if (fails_when_it_ends || !is_due(w, call))
        return 0;
    if (msi.fail_hangs) {
        w->hung = true;
        while (!msi.ending)
            pthread_cond_wait(&msi.moved, &msi.lock);
    }
    return msi.fail_class;
}

int msi_breaks_with(struct zr_mpi_world *w)
{
    return is_due(w, "progress") ? msi.fail_class : 0;
}

int msi_ends_with(struct zr_mpi_world *w)
{
    return !msi.fail_hangs && is_due(w, "poll") ? msi.fail_class : 0;
}

static void check_caller(struct zr_mpi_world *w, const char *call)
{
    if (w->n_inside > 1)
        msi_misuse("rank %d: %s is called while another call is under way", w->rank, call);
}

static bool check_state(struct zr_mpi_world *w, const char *call, bool before_init)
{
    if (w->initialized == before_init)
        msi_misuse("rank %d: %s is called %s MPI_Init", w->rank, call, before_init ? "after" : "before");
    else if (w->finalized)
        msi_misuse("rank %d: %s is called after MPI_Finalize", w->rank, call);
    else
        return true;
    return false;
}

int msi_enter(struct zr_mpi_world *w, const char *call, bool before_init)
{
    pthread_mutex_lock(&msi.lock);
    msi.n_inside++;
    w->n_inside++;
    int err = msi.ending ? MPI_STAND_IN_OTHER : 0;
    if (!err)
        check_caller(w, call);
    if (!err && !check_state(w, call, before_init))
        err = MPI_STAND_IN_OTHER;
    if (!err)
        err = fault(w, call);
    return err ? msi_leave(w, err) : 0;
}

int msi_leave(struct zr_mpi_world *w, int res)
{
    w->n_inside--;
    msi.n_inside--;
    if (msi.ending)
        pthread_cond_broadcast(&msi.moved);
    pthread_mutex_unlock(&msi.lock);
    return res;
}

/* --- the process's MPI --- */

static struct zr_mpi_world *world(void)
{
    pthread_mutex_lock(&msi.lock);
    if (this_rank < 0)
        msi_misuse("a thread that is no rank asks for MPI");
    pthread_mutex_unlock(&msi.lock);
    return &msi.world[this_rank < 0 ? 0 : this_rank];
}

static void library(struct zr_mpi_world *w, char *text, size_t n)
{
    (void)w;
    snprintf(text, n, "%s", msi.machine.library);
}

static const void *address(void)
{
    return &msi;
}

static bool is_initialized(struct zr_mpi_world *w)
{
    pthread_mutex_lock(&msi.lock);
    bool is = w->initialized;
    pthread_mutex_unlock(&msi.lock);
    return is;
}

static bool is_finalized(struct zr_mpi_world *w)
{
    pthread_mutex_lock(&msi.lock);
    bool is = w->finalized;
    pthread_mutex_unlock(&msi.lock);
    return is;
}

static enum zr_mpi_level thread_level(struct zr_mpi_world *w)
{
    pthread_mutex_lock(&msi.lock);
    enum zr_mpi_level level = w->level;
    if (!w->initialized || w->finalized)
        msi_misuse("rank %d: thread_level is called while MPI is not there", w->rank);
    pthread_mutex_unlock(&msi.lock);
    return level;
}

/* Call with the lock held. */
static void begin(struct zr_mpi_world *w, enum zr_mpi_level want)
{
    w->initialized = true;
    w->level = want < msi.machine.level ? want : msi.machine.level;
    w->random = (uint64_t)w->rank + 1;
    msi.counts.n_init++;
}

static int init(struct zr_mpi_world *w, enum zr_mpi_level want, enum zr_mpi_level *level)
{
    int err = msi_enter(w, "init", true);
    if (err)
        return err;
    begin(w, want);
    *level = w->level;
    return msi_leave(w, 0);
}

/* Call with the lock held; releases it meanwhile. */
static void end(struct zr_mpi_world *w)
{
    void (*fn)(void *) = w->fn;
    void *arg = w->fn_arg;
    pthread_mutex_unlock(&msi.lock);
    if (fn)
        fn(arg);
    pthread_mutex_lock(&msi.lock);
    report_what_is_left(w);
    w->finalized = true;
    msi.counts.n_finalize++;
}

static int finalize(struct zr_mpi_world *w)
{
    int err = msi_enter(w, "finalize", false);
    if (err)
        return err;
    end(w);
    return msi_leave(w, 0);
}

void mpi_stand_in_program_init(int rank, enum zr_mpi_level level)
{
    struct zr_mpi_world *w = &msi.world[rank];
    pthread_mutex_lock(&msi.lock);
    w->rank = rank;
    if (check_state(w, "MPI_Init_thread", true))
        begin(w, level);
    pthread_mutex_unlock(&msi.lock);
}

void mpi_stand_in_program_finalize(int rank)
{
    struct zr_mpi_world *w = &msi.world[rank];
    pthread_mutex_lock(&msi.lock);
    if (check_state(w, "MPI_Finalize", false))
        end(w);
    if (w->n_inside && !w->hung)
        msi_misuse("rank %d: MPI_Finalize is called while another call is under way", w->rank);
    pthread_mutex_unlock(&msi.lock);
}

static int on_finalize(struct zr_mpi_world *w, void (*fn)(void *arg), void *arg)
{
    int err = msi_enter(w, "on_finalize", false);
    if (err)
        return err;
    w->fn = fn;
    w->fn_arg = arg;
    return msi_leave(w, 0);
}

static void error(struct zr_mpi_world *w, int code, char *text, size_t n)
{
    (void)w;
    snprintf(text, n, "error of class %d", code);
}

/* --- communicators --- */

/* The members of the program's communicator, as ranks of MPI_COMM_WORLD. Call with the lock held. */
static struct mpi_stand_in_comm of_user_comm(const void *user_comm)
{
    struct mpi_stand_in_comm all = {.n = msi.machine.n_ranks};
    for (int i = 0; i < all.n; i++)
        all.member[i] = i;
    return user_comm ? *(const struct mpi_stand_in_comm *)user_comm : all;
}

static int place_of(const int32_t *member, int n, int rank)
{
    for (int i = 0; i < n; i++)
        if (member[i] == rank)
            return i;
    return -1;
}

static int rank_of(struct zr_mpi_world *w, void *user_comm, int *rank, int *size)
{
    int err = msi_enter(w, "rank_of", false);
    if (err)
        return err;
    struct mpi_stand_in_comm all = of_user_comm(user_comm);
    *rank = place_of(all.member, all.n, w->rank);
    *size = all.n;
    return msi_leave(w, 0);
}

static bool is_same(const struct msi_making *m, const struct msi_making *as, int place)
{
    return m->parent == as->parent && m->tag == as->tag && m->n == as->n && !m->here[place] &&
           !memcmp(m->member, as->member, (size_t)as->n * sizeof *as->member);
}

static struct msi_making *making_of(const struct msi_making *as, int place)
{
    for (struct msi_making *m = msi.makings; m; m = m->next)
        if (is_same(m, as, place))
            return m;
    struct msi_making *m = malloc(sizeof *m);
    *m = *as;
    m->next = msi.makings;
    msi.makings = m;
    return m;
}

static void drop_making(struct msi_making *m)
{
    struct msi_making **at = &msi.makings;
    while (*at != m)
        at = &(*at)->next;
    *at = m->next;
    free(m);
}

static struct msi_team *found_team(int n, const int32_t *member)
{
    struct msi_team *k = calloc(1, sizeof *k);
    k->n = n;
    memcpy(k->member, member, (size_t)n * sizeof *member);
    k->next = msi.teams;
    msi.teams = k;
    return k;
}

/* Waits for the others. Returns NULL if the test ends. Call with the lock held. */
static struct msi_team *meet(const struct msi_making *as, int place)
{
    struct msi_making *m = making_of(as, place);
    m->here[place] = true;
    if (++m->n_here == m->n)
        m->made = found_team(m->n, m->member);
    pthread_cond_broadcast(&msi.moved);
    while (!m->made && !msi.ending)
        pthread_cond_wait(&msi.moved, &msi.lock);
    struct msi_team *k = m->made;
    if (++m->n_gone == m->n)
        drop_making(m);
    return k;
}

/* Call with the lock held. Returns an error class. */
static int join(struct zr_mpi_world *w, const struct msi_making *as, int32_t *comm)
{
    int at = 0, place = place_of(as->member, as->n, w->rank);
    *comm = -1;
    if (place < 0)
        msi_misuse("rank %d makes a communicator of which it is not", w->rank);
    while (at < ZR_MPI_COMMS && w->comm[at].team)
        at++;
    if (place < 0 || at == ZR_MPI_COMMS)
        return MPI_STAND_IN_OTHER;
    struct msi_team *k = meet(as, place);
    if (!k)
        return MPI_STAND_IN_OTHER;
    w->comm[at] = (struct msi_comm){.team = k, .place = place};
    *comm = at;
    return 0;
}

/* Describes the communicator made of these members. Returns false if they are not ranks of the parent. */
static bool describe(const int32_t *of, int n_of, const int32_t *member, int n, struct msi_making *out)
{
    out->n = n;
    for (int i = 0; i < n; i++) {
        if (member[i] < 0 || member[i] >= n_of || place_of(member, i, member[i]) >= 0) {
            msi_misuse("a communicator of rank %d twice, or of a rank that is not there", member[i]);
            return false;
        }
        out->member[i] = of[member[i]];
    }
    return true;
}

static int make(struct zr_mpi_world *w, void *user_comm, const int32_t *member, int n, int tag, int32_t *comm)
{
    int err = msi_enter(w, "make", false);
    if (err)
        return err;
    struct mpi_stand_in_comm all = of_user_comm(user_comm);
    struct msi_making as = {.tag = tag};
    err = describe(all.member, all.n, member, n, &as) ? join(w, &as, comm) : MPI_STAND_IN_OTHER;
    return msi_leave(w, err);
}

static bool check_comm(struct zr_mpi_world *w, const char *call, int32_t comm)
{
    bool there = comm >= 0 && comm < ZR_MPI_COMMS && w->comm[comm].team;
    if (!there)
        msi_misuse("rank %d: %s of a communicator that is not there", w->rank, call);
    return there;
}

static int make_from(struct zr_mpi_world *w, int32_t parent, const int32_t *member, int n, int tag,
                     int32_t *comm)
{
    int err = msi_enter(w, "make_from", false);
    if (err)
        return err;
    if (!check_comm(w, "make_from", parent))
        return msi_leave(w, MPI_STAND_IN_COMM);
    const struct msi_team *k = w->comm[parent].team;
    struct msi_making as = {.parent = k, .tag = tag};
    err = describe(k->member, k->n, member, n, &as) ? join(w, &as, comm) : MPI_STAND_IN_OTHER;
    return msi_leave(w, err);
}

static int copy(struct zr_mpi_world *w, int32_t comm, int32_t *out)
{
    int err = msi_enter(w, "copy", false);
    if (err)
        return err;
    if (!check_comm(w, "copy", comm))
        return msi_leave(w, MPI_STAND_IN_COMM);
    const struct msi_team *k = w->comm[comm].team;
    struct msi_making as = {.parent = k, .n = k->n, .tag = -1};
    memcpy(as.member, k->member, sizeof as.member);
    return msi_leave(w, join(w, &as, out));
}

static struct msi_team *programs_team(const struct mpi_stand_in_comm *all)
{
    struct msi_team *k = msi.teams;
    while (k && !(k->is_programs && k->n == all->n &&
                  !memcmp(k->member, all->member, (size_t)all->n * sizeof *all->member)))
        k = k->next;
    if (!k)
        k = found_team(all->n, all->member);
    k->is_programs = true;
    return k;
}

static int borrow(struct zr_mpi_world *w, void *user_comm, int32_t *out)
{
    int at = 0, err = msi_enter(w, "borrow", false);
    *out = -1;
    if (err)
        return err;
    struct mpi_stand_in_comm all = of_user_comm(user_comm);
    struct msi_team *k = programs_team(&all);
    while (at < ZR_MPI_COMMS && w->comm[at].team != k)
        at++;
    for (int i = 0; at == ZR_MPI_COMMS && i < ZR_MPI_COMMS; i++)
        if (!w->comm[i].team)
            at = i;
    if (at == ZR_MPI_COMMS)
        return msi_leave(w, MPI_STAND_IN_OTHER);
    w->comm[at].team = k;
    w->comm[at].place = place_of(all.member, all.n, w->rank);
    w->comm[at].n_borrowed++;
    *out = at;
    return msi_leave(w, 0);
}

static void leave_team(struct msi_team *k)
{
    struct msi_team **at = &msi.teams;
    if (++k->n_left < k->n)
        return;
    while (*at != k)
        at = &(*at)->next;
    *at = k->next;
    msi_forget(k);
    free(k);
}

static int free_comm(struct zr_mpi_world *w, int32_t comm)
{
    int n = 0, err = msi_enter(w, "free", false);
    if (err)
        return err;
    if (!check_comm(w, "free", comm))
        return msi_leave(w, MPI_STAND_IN_COMM);
    for (int i = 0; i < w->high; i++)
        n += w->request[i].pending && w->request[i].comm == comm;
    if (w->comm[comm].n_borrowed) {
        if (--w->comm[comm].n_borrowed == 0)
            w->comm[comm].team = NULL;
        return msi_leave(w, 0);
    }
    if (n) {
        msi_misuse("rank %d: free of a communicator with %d requests pending", w->rank, n);
        return msi_leave(w, MPI_STAND_IN_OTHER);
    }
    leave_team(w->comm[comm].team);
    w->comm[comm].team = NULL;
    return msi_leave(w, 0);
}

const struct zr_mpi_shim *mpi_stand_in_shim(void)
{
    static const struct zr_mpi_shim shim = {
        .version = ZR_MPI_SHIM_VERSION,
        .bytes = sizeof shim,
        .name = "the MPI stand-in",
        .compiled = "1.0",
        .world = world,
        .library = library,
        .address = address,
        .is_initialized = is_initialized,
        .is_finalized = is_finalized,
        .thread_level = thread_level,
        .init = init,
        .finalize = finalize,
        .on_finalize = on_finalize,
        .error = error,
        .rank_of = rank_of,
        .make = make,
        .make_from = make_from,
        .copy = copy,
        .borrow = borrow,
        .free = free_comm,
        .send = msi_send,
        .receive = msi_receive,
        .probe = msi_probe,
        .all_gather = msi_all_gather,
        .broadcast = msi_broadcast,
        .all_max = msi_all_max,
        .all_sum = msi_all_sum,
        .reduce_block = msi_reduce_block,
        .own = msi_own,
        .poll = msi_poll,
    };
    return &shim;
}
