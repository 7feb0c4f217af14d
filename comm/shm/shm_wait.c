/* SPDX-License-Identifier: Apache-2.0 */
/* shm_wait.c: waits for peers in shared memory, and fails together with them.
 *
 * A rank spins for a moment if there are cores to spare. Then it sleeps on the word of a missing peer, a
 * futex in shared memory. Between sleeps it looks for what may keep a peer from coming: a failure, a
 * process that has ended, a communicator that was closed, the deadline. It keeps the first failure and
 * writes it into its own header, where every peer finds it. So all ranks fail with the same cause. */
#include "comm/meet/rendezvous.h"
#include "comm/shm/shm.h"
#include "kernels/asserts.h"

#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SLICE_NS = 50 * 1000 * 1000, EXPLAIN_NS = 300 * 1000 * 1000, YIELDS = 4, MAX_HOPS = 4 };

/* Not FUTEX_PRIVATE, as the other side may be another process. */
static void futex_wake(_Atomic uint32_t *word)
{
    syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void futex_wait(_Atomic uint32_t *word, uint32_t seen, int64_t ns)
{
    struct timespec t = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    syscall(SYS_futex, word, FUTEX_WAIT, seen, &t, NULL, 0);
}

static _Atomic uint32_t *word_of(struct zr_shm_head *h, enum zr_shm_word word)
{
    return word == ZR_SHM_ENTERED ? &h->entered : word == ZR_SHM_MIDDLE ? &h->middle : &h->done;
}

static bool reached(uint32_t word, uint64_t seq)
{
    return (int32_t)(word - (uint32_t)seq) >= 0;
}

/* --- failing --- */

void zr_shm_wake_all(struct zr_shm *m)
{
    for (int i = 0; i < m->base.group.size; i++) {
        futex_wake(&m->peer[i].head->entered);
        futex_wake(&m->peer[i].head->middle);
        futex_wake(&m->peer[i].head->done);
    }
}

/* Called with the lock held. */
static void write_abort(struct zr_shm *m, int found_by)
{
    struct zr_shm_head *h = m->peer[m->base.group.rank].head;
    h->abort_rank = found_by;
    atomic_store(&h->abort_code, zr_first_report(&m->failure, h->abort_text, sizeof h->abort_text));
    for (int i = 0; i < m->base.group.size; i++)
        atomic_store(&m->peer[i].head->alarm, 1);
}

int zr_shm_fail(struct zr_shm *m, int code, int found_by, const char *text)
{
    pthread_mutex_lock(&m->lock);
    bool first = !zr_first_code(&m->failure);
    if (first) {
        m->found_by = found_by;
        zr_first_keep(&m->failure, code, text);
        atomic_store(&m->alarm, 1);
    }
    if (m->mapped && m->peer[m->base.group.rank].head->abort_code == 0)
        write_abort(m, m->found_by);
    bool report = first && m->mapped;
    pthread_mutex_unlock(&m->lock);
    if (report)
        zr_shm_wake_all(m);
    for (int r = 0; first && r < ZR_ROLES; r++)
        if (m->sibling[r] && m->sibling[r] != m)
            zr_shm_fail(m->sibling[r], code, found_by, text);
    return zr_first_code(&m->failure);
}

static int fail_op(struct zr_shm *m, int code, const struct zr_post *mine, const char *what)
{
    char op[96], text[ZR_SHM_TEXT];
    zr_post_describe(mine, op, sizeof op);
    snprintf(text, sizeof text, "%s: %s", op, what);
    return zr_shm_fail(m, code, zr_shm_self(m), text);
}

/* --- comparing --- */

int zr_shm_place_of(const struct zr_shm *k, int32_t rank)
{
    for (int i = 0; k && atomic_load(&k->mapped) && i < k->base.group.size; i++)
        if (zr_comm_rank(&k->base, i) == rank)
            return i;
    return -1;
}

/* Fails with the first calls of the programs that differ, if this rank and the peer made different ones.
 * *compared: some calls of both are known, otherwise unchanged. */
static bool fail_called(struct zr_shm *m, const struct zr_post *mine, int place, bool *compared)
{
    const struct zr_call_log *of_own, *of_other;
    struct zr_logged_call own, other;
    char text[ZR_SHM_TEXT], calls[ZR_CALL_LOG_BOTH_CHARS], op[96];
    int32_t rank = zr_comm_rank(&m->base, place);
    if (!zr_rendezvous_common_calls(m->rdv, rank, &of_own, &of_other))
        return false;
    uint64_t n = zr_call_log_differ(of_own, of_other, &own, &other);
    *compared |= zr_call_log_overlap(of_own, of_other);
    if (!n)
        return false;
    zr_call_log_report(rank, &other, zr_shm_self(m), &own, zr_call_log_left_out(of_other, of_own, n), calls);
    zr_post_describe(mine, op, sizeof op);
    snprintf(text, sizeof text, "%s (%s)", calls, op);
    zr_shm_fail(m, ZERO_ERR_MISMATCH, zr_shm_self(m), text);
    return true;
}

static int fail_mismatch(struct zr_shm *m, const struct zr_post *mine, int place,
                         const struct zr_post *theirs)
{
    char what[512];
    bool compared = false;
    if (fail_called(m, mine, place, &compared))
        return zr_first_code(&m->failure);
    zr_post_differ(zr_comm_rank(&m->base, place), theirs, zr_shm_self(m), mine, what, sizeof what);
    size_t n = strlen(what);
    zr_call_log_report_none(compared, what + n, sizeof what - n);
    return fail_op(m, ZERO_ERR_MISMATCH, mine, what);
}

/* Removes the peers that have arrived from the mask. Fails if one of them is at another operation. */
static uint64_t take_arrived(struct zr_shm *m, const struct zr_post *mine, enum zr_shm_word word,
                             uint64_t missing)
{
    for (uint64_t left = missing; left; left &= left - 1) {
        int i = __builtin_ctzll(left);
        struct zr_shm_head *h = m->peer[i].head;
        if (!reached(atomic_load_explicit(word_of(h, word), memory_order_acquire), mine->seq))
            continue;
        missing &= ~(UINT64_C(1) << i);
        const struct zr_post *theirs = &h->post[mine->seq % ZR_SHM_POSTS];
        if (word == ZR_SHM_ENTERED && !zr_post_same(mine, theirs))
            fail_mismatch(m, mine, i, theirs);
    }
    return missing;
}

/* --- looking around --- */

static bool process_ended(const struct zr_shm_peer *peer)
{
    if (peer->pid == getpid())
        return false;
    if (peer->pidfd < 0) /* an old kernel: this cannot detect a zombie */
        return kill(peer->pid, 0) < 0 && errno == ESRCH;
    struct pollfd p = {.fd = peer->pidfd, .events = POLLIN};
    return poll(&p, 1, 0) == 1 && (p.revents & POLLIN);
}

int zr_shm_adopt(struct zr_shm *m)
{
    char text[ZR_SHM_TEXT];
    for (int i = 0; m->mapped && i < m->base.group.size && !zr_first_code(&m->failure); i++) {
        const struct zr_shm_head *h = m->peer[i].head;
        int code = i == m->base.group.rank ? 0 : atomic_load(&h->abort_code);
        if (code) {
            snprintf(text, sizeof text, "%.*s", (int)sizeof text - 1, h->abort_text);
            zr_shm_fail(m, code, h->abort_rank, text);
        }
    }
    return zr_first_code(&m->failure);
}

/* Adopts a failure of any linked communicator. */
static int adopt_any(struct zr_shm *m)
{
    for (int r = 0; r < ZR_ROLES; r++) {
        struct zr_shm *k = m->sibling[r];
        if (k && atomic_load(&k->mapped) && atomic_load(&k->peer[k->base.group.rank].head->alarm))
            zr_shm_adopt(k);
    }
    return zr_first_code(&m->failure);
}

/* A peer that ended may have failed before, in a group that this rank is not in. Then its failure is the
 * cause. */
static int adopt_recorded(struct zr_shm *m, int32_t rank)
{
    char text[ZR_FRAME_TEXT_BYTES];
    int code = zr_rendezvous_recorded(m->rdv, rank, text);
    return code ? zr_shm_fail(m, code, rank, text) : 0;
}

/* Fails if a missing peer will not come any more, or made different calls. The mask is computed again
 * before a peer counts as lost, as arriving may have been the last thing that it did. */
static int look_for_lost(struct zr_shm *m, const struct zr_post *mine, enum zr_shm_word word,
                         uint64_t missing)
{
    for (uint64_t left = missing; left; left &= left - 1) {
        int i = __builtin_ctzll(left);
        bool compared = false;
        if (fail_called(m, mine, i, &compared))
            return zr_first_code(&m->failure);
        bool closed = atomic_load(&m->peer[i].head->closed);
        if (!closed && !process_ended(&m->peer[i]))
            continue;
        if (!(take_arrived(m, mine, word, UINT64_C(1) << i)))
            continue; /* it arrived before it ended */
        if (adopt_any(m) || adopt_recorded(m, zr_comm_rank(&m->base, i)))
            return zr_first_code(&m->failure);
        /* Wait a little: the rendezvous or another rank may know why it ended. */
        int64_t now = zr_now_ns();
        m->ended_ns = m->ended_ns ? m->ended_ns : now;
        if (!closed && now - m->ended_ns < EXPLAIN_NS)
            continue;
        int32_t rank = zr_comm_rank(&m->base, i);
        char what[128 + ZR_LAST_CALL_CHARS], last[ZR_LAST_CALL_CHARS];
        zr_rendezvous_last_call(m->rdv, rank, last);
        snprintf(what, sizeof what,
                 closed ? "rank %d has closed its communicator: it called zero_unwrap before this rank%s"
                        : "rank %d was lost: its process ended%s",
                 rank, last);
        return fail_op(m, ZERO_ERR_PEER, mine, what);
    }
    return zr_first_code(&m->failure);
}

bool zr_shm_last(struct zr_shm *m, int place, struct zr_post *last)
{
    const struct zr_shm_head *h = m->peer[place].head;
    uint32_t at = atomic_load(&h->entered);
    *last = at ? h->post[at % ZR_SHM_POSTS] : (struct zr_post){.seq = 0};
    return at != 0 && atomic_load(&h->finished) != at;
}

/* An operation of another communicator that a peer is in, and whether it waits for this rank there. */
struct elsewhere {
    const struct zr_shm *in; /* NULL: nowhere */
    struct zr_post at;
    bool for_me;
};

/* Whether rank is in an operation there that this rank has not come to. */
static bool waits_for_me_in(struct zr_shm *k, int32_t rank)
{
    struct zr_post there;
    int at = zr_shm_place_of(k, rank);
    return at >= 0 && zr_shm_last(k, at, &there) &&
           !reached(atomic_load(&k->peer[k->base.group.rank].head->entered), there.seq);
}

static struct elsewhere find_elsewhere(const struct zr_shm *m, int place)
{
    struct elsewhere found = {.in = NULL};
    for (int r = 0; r < ZR_ROLES && !found.for_me; r++) {
        struct zr_shm *k = m->sibling[r];
        struct zr_post there;
        int32_t rank = zr_comm_rank(&m->base, place);
        int at = k == m ? -1 : zr_shm_place_of(k, rank);
        if (at >= 0 && zr_shm_last(k, at, &there))
            found = (struct elsewhere){k, there, waits_for_me_in(k, rank)};
    }
    return found;
}

/* The linked communicator with the most ranks. */
static struct zr_shm *widest_of(struct zr_shm *m)
{
    struct zr_shm *widest = m;
    for (int r = 0; r < ZR_ROLES; r++) {
        struct zr_shm *k = m->sibling[r];
        if (k && atomic_load(&k->mapped) && k->base.group.size > widest->base.group.size)
            widest = k;
    }
    return widest;
}

static void note_wait(struct zr_shm *m, int32_t rank)
{
    const struct zr_shm *w = widest_of(m);
    atomic_store(&w->peer[w->base.group.rank].head->waits_for[m->base.role], rank + 1);
}

/* Returns the rank, other than this one, that a rank waits for in any of its communicators. -1: none. */
static int32_t whom_it_awaits(const struct zr_shm *w, int32_t rank)
{
    int at = zr_shm_place_of(w, rank);
    for (int r = 0; at >= 0 && r < ZR_ROLES; r++) {
        int32_t other = atomic_load(&w->peer[at].head->waits_for[r]) - 1;
        if (other >= 0 && other != zr_shm_self(w))
            return other;
    }
    return -1;
}

/* Whether rank waits for a third rank, in a communicator where it does not wait for this one. That rank may
 * still come, once the third rank does. */
static bool awaits_another(struct zr_shm *m, int32_t rank)
{
    const struct zr_shm *w = widest_of(m);
    int at = zr_shm_place_of(w, rank);
    for (int r = 0; at >= 0 && r < ZR_ROLES; r++) {
        int32_t other = atomic_load(&w->peer[at].head->waits_for[r]) - 1;
        if (other >= 0 && other != zr_shm_self(m) && !waits_for_me_in(m->sibling[r], rank))
            return true;
    }
    return false;
}

/* Writes the chain of ranks that a late rank waits for, as the cause may be in a group that this rank is not
 * in. In a cycle each rank is named once. */
static void describe_waits(struct zr_shm *m, int32_t rank, char *text, size_t n_text)
{
    const struct zr_shm *w = widest_of(m);
    int32_t named[MAX_HOPS + 1] = {rank};
    size_t used = 0;
    bool around = false;
    text[0] = 0;
    for (int hop = 0; hop < MAX_HOPS && used < n_text && !around; hop++) {
        int32_t other = whom_it_awaits(w, named[hop]);
        if (other < 0)
            return;
        used +=
            (size_t)snprintf(text + used, n_text - used, "; rank %d waits for rank %d", named[hop], other);
        named[hop + 1] = other;
        for (int i = 0; i <= hop; i++)
            around |= named[i] == other;
    }
}

/* Fails because a process of this host is stopped, which explains why other ranks do not come. */
static int fail_stopped(struct zr_shm *m, const struct zr_post *mine, uint64_t missing, int32_t stopped,
                        int64_t waited_ms)
{
    int place = zr_shm_place_of(m, stopped);
    char why[ZR_STOPPED_CHARS], what[128 + ZR_STOPPED_CHARS];
    if (place < 0 || !(missing >> place & 1))
        place = __builtin_ctzll(missing);
    zr_rendezvous_describe_stopped(m->rdv, stopped, why);
    snprintf(what, sizeof what, "rank %d waited %lld ms for rank %d%s", zr_shm_self(m), (long long)waited_ms,
             zr_comm_rank(&m->base, place), why);
    return fail_op(m, ZERO_ERR_TIMEOUT, mine, what);
}

/* Fails after the deadline. A rank that waits only for this rank, in another communicator, makes different
 * calls. Any other rank is late, and the message says where it is and what its program called last. */
static int fail_late(struct zr_shm *m, const struct zr_post *mine, uint64_t missing, int64_t waited_ms)
{
    int place = __builtin_ctzll(missing), n_more = __builtin_popcountll(missing) - 1;
    int32_t stopped = zr_rendezvous_stopped(m->rdv);
    if (stopped >= 0)
        return fail_stopped(m, mine, missing, stopped, waited_ms);
    struct zr_post here;
    struct elsewhere there = find_elsewhere(m, place);
    for (uint64_t left = missing & (missing - 1); left && !there.for_me; left &= left - 1) {
        int i = __builtin_ctzll(left);
        struct elsewhere other = find_elsewhere(m, i);
        if (other.for_me) {
            place = i;
            there = other;
        }
    }
    char where[96], besides[192] = "", more[64] = "", what[896], op[96];
    char last[ZR_LAST_CALL_CHARS], waits[192] = "";
    zr_shm_last(m, place, &here);
    zr_post_where(&here, where, sizeof where);
    if (there.in) {
        zr_post_describe(&there.at, op, sizeof op);
        snprintf(besides, sizeof besides, " here and waits in %s: %s", there.in->name, op);
        if (there.for_me)
            snprintf(besides, sizeof besides, " here and waits for rank %d in %s: %s", zr_shm_self(m),
                     there.in->name, op);
    }
    zr_rendezvous_last_call(m->rdv, zr_comm_rank(&m->base, place), last);
    if (n_more)
        snprintf(more, sizeof more, ", and for %d more", n_more);
    bool other_calls = there.for_me && !awaits_another(m, zr_comm_rank(&m->base, place));
    if (!other_calls)
        describe_waits(m, zr_comm_rank(&m->base, place), waits, sizeof waits);
    snprintf(what, sizeof what, "rank %d waited %lld ms (timeout_ms) for rank %d, which is %s%s%s%s%s",
             zr_shm_self(m), (long long)waited_ms, zr_comm_rank(&m->base, place), where, besides, more, last,
             waits);
    return fail_op(m, other_calls ? ZERO_ERR_MISMATCH : ZERO_ERR_TIMEOUT, mine, what);
}

/* --- waiting --- */

void zr_shm_raise(struct zr_shm *m, enum zr_shm_word word, uint64_t seq)
{
    struct zr_shm_head *h = m->peer[m->base.group.rank].head;
    /* This rank writes the word and then reads waiters. A sleeper writes waiters and then reads the word.
     * All are sequentially consistent, so that one sees the other. */
    /* Peers wait for the word to pass. */
    ZR_ASSERT((int32_t)((uint32_t)seq - atomic_load(word_of(h, word))) > 0);
    atomic_store(word_of(h, word), (uint32_t)seq);
    if (atomic_load(&h->waiters))
        futex_wake(word_of(h, word));
}

static uint64_t spin(struct zr_shm *m, const struct zr_post *mine, enum zr_shm_word word, uint64_t missing)
{
    missing = take_arrived(m, mine, word, missing);
    for (int i = 0; m->spin_ns == 0 && missing && i < YIELDS; i++) {
        sched_yield(); /* with more ranks than cores, the peer may need this core */
        missing = take_arrived(m, mine, word, missing);
    }
    if (m->spin_ns == 0 || !missing)
        return missing;
    int64_t until = zr_now_ns() + m->spin_ns;
    do {
        for (int i = 0; i < 32 && missing; i++) {
            zr_relax();
            missing = take_arrived(m, mine, word, missing);
        }
    } while (missing && zr_now_ns() < until);
    return missing;
}

static void sleep_on(struct zr_shm_head *h, enum zr_shm_word word, uint64_t seq, int64_t ns)
{
    atomic_fetch_add(&h->waiters, 1);
    uint32_t seen = atomic_load(word_of(h, word));
    if (!reached(seen, seq))
        futex_wait(word_of(h, word), seen, ns);
    atomic_fetch_sub(&h->waiters, 1);
}

int zr_shm_wait(struct zr_shm *m, const struct zr_post *mine, enum zr_shm_word word)
{
    int size = m->base.group.size;
    uint64_t all = size == 64 ? UINT64_MAX : (UINT64_C(1) << size) - 1;
    uint64_t missing = spin(m, mine, word, all & ~(UINT64_C(1) << m->base.group.rank));
    if (!missing)
        return zr_first_code(&m->failure);
    const int64_t begun = zr_now_ns();
    int64_t looked = begun, last = begun, waited = 0;
    while (missing && !adopt_any(m)) {
        int64_t left = m->timeout_ns - waited;
        note_wait(m, zr_comm_rank(&m->base, __builtin_ctzll(missing)));
        if (left > 0)
            sleep_on(m->peer[__builtin_ctzll(missing)].head, word, mine->seq,
                     left < SLICE_NS ? left : SLICE_NS);
        missing = take_arrived(m, mine, word, missing);
        int64_t now = zr_now_ns();
        if (!missing || zr_first_code(&m->failure))
            break;
        /* A longer turn does not count in full: this process was stopped or had no core, and the others may
         * have been, too. */
        waited += now - last < 2 * SLICE_NS ? now - last : 2 * SLICE_NS;
        last = now;
        if (waited >= m->timeout_ns)
            return adopt_any(m) ? zr_first_code(&m->failure)
                                : fail_late(m, mine, missing, (now - begun) / 1000000);
        if (now - looked >= SLICE_NS) {
            looked = now;
            if (look_for_lost(m, mine, word, missing))
                break;
            missing = take_arrived(m, mine, word, missing);
        }
    }
    if (!missing)
        note_wait(m, -1);
    return zr_first_code(&m->failure);
}
