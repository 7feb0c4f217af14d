/* SPDX-License-Identifier: Apache-2.0 */
/* shm_arena.c: makes, finds and maps the segments of a shared-memory communicator.
 *
 * Each step that may fail on one rank ends with an exchange of its result, so that either all ranks go on or
 * none does. A rank without memory for that exchange reports it by zr_rendezvous_fail. */
#include "comm/meet/rendezvous.h"
#include "comm/shared_memory.h"
#include "comm/shm/shm.h"
#include "kernels/alloc.h"
#include "kernels/host/host_memory.h"
#include "kernels/limits.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

_Static_assert(sizeof(struct zr_shm_head) <= ZR_SHM_HEAD_BYTES, "the header has its pages");
_Static_assert(ZR_SHM_SIZE <= ZR_MAX_SOURCES, "sum_tree takes a source from every rank");

static const uint64_t segment_magic = 0x7a65726f2073686d;

/* What a rank tells the others in each exchange: its error, its memory, and where they can open it. Fields
 * that an exchange does not need are 0. */
struct record {
    int32_t err;
    int32_t pid, role;
    int32_t head_fd, arena_fd;
    uint64_t nonce;     /* of the header */
    uint64_t arena_ino; /* of the arena's file */
    int64_t bytes, room;
    int32_t first;     /* rank at the first place of the group */
    int32_t n_machine; /* ranks on this machine; room is the free memory of the machine */
};

/* Exchanges records among all ranks of the world. err is this rank's result. Returns the first failure of any
 * rank. This is zr_rendezvous_agree_and_exchange, except that the loss of a rank comes before this rank's own
 * failure, which may be a consequence: a dead rank's memory is gone. */
static int agree_records(struct zr_shm *m, int err, struct record *mine, struct record *all)
{
    struct zr_saved_error own;
    bool failed = false;
    mine->err = zr_error_save(&own, err);
    int met = zr_rendezvous_exchange(m->rdv, mine, sizeof *mine, all);
    for (int r = 0; !met && r < zr_rendezvous_world(m->rdv); r++)
        failed |= all[r].err != 0;
    if (failed)
        met = zr_rendezvous_agree(m->rdv, err ? zr_error_restore(&own) : 0);
    return met ? zr_fail_more(met, "%s", m->name) : 0;
}

/* --- this rank's segments --- */

struct name {
    char text[64];
};

static struct name name_segment(const struct zr_shm *m, const char *what)
{
    struct name n;
    snprintf(n.text, sizeof n.text, "zero-%s-%s-%d", m->name, what, zr_shm_self(m));
    return n;
}

static int make_head(struct zr_shm *m, struct record *mine)
{
    char *p;
    int err = zr_shared_make(name_segment(m, "head").text, ZR_SHM_HEAD_BYTES, &mine->head_fd, &p);
    if (err)
        return err;
    struct zr_shm_head *h = m->peer[m->base.group.rank].head = (struct zr_shm_head *)p;
    if (getrandom(&mine->nonce, sizeof mine->nonce, 0) != sizeof mine->nonce)
        mine->nonce = (uint64_t)zr_now_ns() ^ (uint64_t)(uintptr_t)p;
    h->nonce = mine->nonce;
    h->magic = segment_magic;
    return 0;
}

/* --- a peer's segments --- */

static int open_peer(struct zr_shm *m, int place, const struct record *record, int64_t bytes)
{
    struct zr_shm_peer *peer = &m->peer[place];
    struct zr_shared_at at = {
        .rank = zr_comm_rank(&m->base, place), .pid = record->pid, .fd = record->head_fd};
    char *p;
    peer->pid = record->pid;
    /* Open it before the segments. If another process has the number by then, the nonce shows it. */
    if (peer->pid != getpid())
        peer->pidfd = (int)syscall(SYS_pidfd_open, peer->pid, 0);
    if (peer->pidfd < 0 && peer->pid != getpid() && zr_is_descriptor_limit(errno)) {
        char why[ZR_SYSTEM_WORDS];
        return zr_fail(ZERO_ERR_SYSTEM, "watching process %d, which is rank %d: %s", record->pid, at.rank,
                       zr_system_words(errno, why));
    }
    int err = zr_shared_map(&at, ZR_SHM_HEAD_BYTES, PROT_READ | PROT_WRITE, &p);
    if (err)
        return err;
    peer->head = (struct zr_shm_head *)p;
    if (peer->head->magic != segment_magic || peer->head->nonce != record->nonce)
        return zr_fail(ZERO_ERR_SYSTEM,
                       "process %d has descriptor %d, but it is not the shared memory of rank %d",
                       record->pid, record->head_fd, at.rank);
    at.fd = record->arena_fd;
    at.inode = record->arena_ino;
    /* Read-only, so that a stray write faults. */
    return zr_shared_map(&at, bytes, PROT_READ, &peer->arena);
}

static int open_peers(struct zr_shm *m, const struct record *all)
{
    int err = 0;
    for (int i = 0; i < m->base.group.size && !err; i++)
        if (i != m->base.group.rank)
            err = open_peer(m, i, &all[zr_comm_rank(&m->base, i)], m->base.held->bytes);
    return err;
}

void zr_shm_unmap(struct zr_shm *m)
{
    for (int i = 0; i < m->base.group.size; i++) {
        struct zr_shm_peer *peer = &m->peer[i];
        zr_shared_unmap(peer->head, ZR_SHM_HEAD_BYTES);
        if (i != m->base.group.rank)
            zr_shared_unmap(peer->arena, m->base.held->bytes);
        if (peer->pidfd >= 0)
            close(peer->pidfd);
        *peer = (struct zr_shm_peer){.pidfd = -1};
    }
}

/* --- the whole opening --- */

/* Checks that the memory control groups of this rank have room for its own arena. Pages are charged to the
 * rank that owns them. zero/memory.c checks the sum over all ranks of a control group. */
static int check_groups(int64_t bytes, int64_t *on_host)
{
    struct zr_host_memory m;
    zr_host_memory_look("", &m);
    *on_host = m.free_bytes;
    for (int i = 0; i < m.n_groups; i++)
        if (bytes > m.group[i].free_bytes)
            return zr_fail(ZERO_ERR_NOMEM,
                           "%lld bytes of shared memory are needed, but %lld are left in memory control "
                           "group %s; raise the limit of that container or job",
                           (long long)bytes, (long long)m.group[i].free_bytes, m.group[i].path);
    return 0;
}

/* Checks that a rank's machine has room for the arenas of all ranks on it. If the whole world is there, their
 * sizes are known; otherwise they are assumed to be equal. */
static int check_room(const struct zr_shm *m, int rank, const struct record *all)
{
    const struct record *c = &all[rank];
    int world = zr_rendezvous_world(m->rdv);
    int64_t want = 0;
    bool fits = true;
    for (int i = 0; fits && i < c->n_machine; i++)
        fits = !__builtin_add_overflow(want, all[c->n_machine == world ? i : rank].bytes, &want);
    if (fits && want <= c->room)
        return 0;
    return zr_fail(
        ZERO_ERR_NOMEM,
        "%s: %d ranks need %lld bytes of shared memory each, but %lld are left on the host of rank %d",
        m->name, c->n_machine, (long long)c->bytes, (long long)c->room, rank);
}

/* Checks that roles are equal, sizes are equal within each group, and all arenas fit at once. Every rank
 * has the same numbers, and so the same result. */
static int check_sizes(struct zr_shm *m, const struct record *all)
{
    int world = zr_rendezvous_world(m->rdv), err = 0;
    for (int i = 0; i < world; i++) {
        if (all[i].role != all[0].role)
            return zr_fail(ZERO_ERR_MISMATCH, "rank 0 opens communicator \"%s\", rank %d \"%s\"",
                           zr_role_name((enum zr_role)all[0].role), i,
                           zr_role_name((enum zr_role)all[i].role));
        const struct record *first = &all[all[i].first];
        if (all[i].bytes != first->bytes)
            return zr_fail(ZERO_ERR_MISMATCH, "%s: the arena has %lld bytes on rank %d, %lld on rank %d",
                           m->name, (long long)all[i].bytes, i, (long long)first->bytes, all[i].first);
    }
    for (int i = 0; i < world && !err; i++)
        err = check_room(m, i, all);
    return err;
}

static struct record *new_records(const struct zr_shm *m)
{
    int world = zr_rendezvous_world(m->rdv);
    struct record *all;
    if (ZR_ZALLOC(all, world, "%d ranks of %s", world, m->name))
        zr_rendezvous_fail(m->rdv, ZERO_ERR_NOMEM);
    return all;
}

int zr_shm_arena(struct zr_comm *c, int64_t bytes, struct zr_arena **out)
{
    struct zr_shm *m = (struct zr_shm *)c;
    struct record mine = {.role = (int32_t)c->role,
                          .n_machine = m->n_machine,
                          .first = zr_comm_rank(c, 0),
                          .bytes = bytes},
                  *all = new_records(m);
    struct zr_arena *a = NULL;
    if (!all)
        return ZERO_ERR_NOMEM;
    int err =
        bytes > 0 && bytes <= INT64_MAX / 2
            ? 0
            : zr_fail(ZERO_ERR_ARG, "the arena is %lld bytes: more than 0 are allowed", (long long)bytes);
    if (!err)
        err = check_groups(bytes, &mine.room);
    err = agree_records(m, err, &mine, all);
    if (!err)
        err = check_sizes(m, all);
    if (!err) {
        err = zr_shared_arena("shm", name_segment(m, "arena").text, bytes, &a);
        err = agree_records(m, err, &mine, all);
    }
    free(all);
    if (err)
        zr_arena_drop(a);
    else
        *out = a;
    return err;
}

/* Makes this rank's header, and fills its record with what peers need to open its header and arena. */
static int fill_shm_record(struct zr_shm *m, struct record *mine)
{
    mine->arena_fd = zr_arena_fd(m->base.held);
    int err = zr_shared_inode(mine->arena_fd, &mine->arena_ino);
    return err ? err : make_head(m, mine);
}

int zr_shm_map(struct zr_shm *m, struct zr_arena *a)
{
    struct record mine = {.pid = (int32_t)getpid(), .role = (int32_t)m->base.role, .head_fd = -1},
                  *all = new_records(m);
    if (!all)
        return ZERO_ERR_NOMEM;
    m->peer[m->base.group.rank].arena = a->base;
    int err = agree_records(m, fill_shm_record(m, &mine), &mine, all);
    if (!err)
        err = agree_records(m, open_peers(m, all), &mine, all);
    if (mine.head_fd >= 0)
        close(mine.head_fd);
    if (err)
        zr_shm_unmap(m);
    free(all);
    return err;
}
