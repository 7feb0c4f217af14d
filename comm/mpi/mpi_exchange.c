/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_exchange.c: ranks exchange cards over MPI before they meet (gather of struct zr_user_comm). They use
 * the program's communicator, or MPI_COMM_WORLD if a launcher of MPI has started them and nothing else says
 * where they meet. libzero's communicators are made from it later (mpi_open.c).
 *
 * Every rank sends its card to rank 0, which checks them once the last has come, and sends each rank the
 * result. Cards may belong to a zero_wrap that their rank has given up since. So rank 0 counts a rank only
 * once that rank has confirmed that it still waits. A rank that gives up afterwards asks rank 0 whether it
 * was in time. Notes carry cfg.launch.name, so contexts of one process may meet in any order.
 *
 * No call here waits inside MPI. So a late rank blocks no other context of the process, and a zero_wrap that
 * fails leaves nothing pending in MPI. The messages use the communicator itself, with a separate tag. A new
 * communicator would have to be made first, and that call waits for every rank. */
#include "comm/first_error.h"
#include "comm/meet/user_comm.h"
#include "comm/mpi/mpi_comm.h"
#include "kernels/alloc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* REST_MS: time for sent messages to leave. GRACE_MS: most time that a rank waits longer than rank 0, to
 * receive from it who is missing. LISTED: most ranks that a message names. */
enum { MEETING_TAG = ZR_MPI_TAG_MAX, REST_MS = 1000, GRACE_MS = 2000, LISTED = 8 };
static const char LIMIT[] = " (start_timeout_ms)";

/* Kinds of notes. From other ranks to rank 0:
 *
 *    CARD   the rank is in zero_wrap; its card follows
 *    HERE   the rank has got SEEN, and still waits
 *    GONE   the rank no longer waits
 *
 * From rank 0 to others:
 *
 *    SEEN   rank 0 is in zero_wrap, in the context that the note names
 *    RESULT the card of rank 0 follows, which has checked all cards, or a failure
 *    LEFT   rank 0 has got GONE in time, and sends no RESULT */
enum note_kind { CARD = 1, HERE, GONE, SEEN, RESULT, LEFT };

struct note {
    int32_t kind;
    /* The failure that RESULT reports. */
    ZR_FIRST_ERROR(256);
    char name[sizeof((struct zr_world *)0)->name];
    /* Number of the zero_wrap of the rank that is not rank 0. */
    uint64_t attempt;
};

/* A note with what follows it. */
struct post {
    int64_t bytes;
    struct note note;
    uint64_t more[];
};
_Static_assert(sizeof(struct note) % sizeof(uint64_t) == 0, "more follows without a gap");

struct message {
    struct message *next;
    struct zr_mpi_batch batch;
    int from;
    /* Rank 0, which waits in another context, has answered it. */
    bool is_answered;
    struct post *post;
};

/* Another rank, as rank 0 knows it. */
struct arrival {
    /* The attempt that the rank's card belongs to. 0: no card has come. */
    uint64_t attempt;
    /* The rank has confirmed that attempt. */
    bool is_here;
};

/* A zero_wrap of this process. */
struct meeting {
    struct meeting *next;
    struct zr_mpi_process *process;
    const struct zr_world *w;
    /* Name of the communicator: "mpi_comm". */
    const char *over;
    int64_t ms, begun_ns, reminded_ns, until_ns;
    struct channel *channel;
    uint64_t attempt;
    struct message *sent;
    /* Bytes of a card. On rank 0 all has those of all ranks (w->world), and on others that of rank 0. */
    size_t bytes;
    char *all;
    /* On rank 0: (w->world) the state of the ranks; the number of ranks here, including rank 0. */
    struct arrival *come;
    int n_here;
    /* On other ranks: rank 0 has come; it has come only in a context of other_name; it has answered LEFT; the
     * failure that RESULT reported, if any. */
    bool is_seen, has_other_name, has_left;
    struct zr_saved_error reported;
    char other_name[sizeof((struct zr_world *)0)->name];
};

/* A communicator that contexts of this process meet over, or that has messages which no context has taken
 * yet. */
struct channel {
    struct channel *next;
    struct zr_mpi_process *process;
    int32_t comm;
    int n_borrowed;
    struct meeting *meetings;
    /* Messages in the order in which MPI delivers them. */
    struct message *first;
    /* Messages that contexts have left behind, and that MPI may still be sending. */
    struct message *unsent;
};

/* A thread that holds the lock must not enter MPI; one inside MPI may take it. */
static struct channel *channels;
static uint64_t last_attempt;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* --- channels --- */

/* Finds or makes a channel. Called with the lock held. Returns NULL if there is no memory. */
static struct channel *channel_of(struct zr_mpi_process *p, int32_t comm)
{
    struct channel *c = channels;
    while (c && (c->process != p || c->comm != comm))
        c = c->next;
    if (c || !(c = calloc(1, sizeof *c)))
        return c;
    c->process = p;
    c->comm = comm;
    c->next = channels;
    channels = c;
    return c;
}

static int join_channel(struct meeting *k, void *user_comm)
{
    struct zr_mpi_process *p = k->process;
    const struct zr_mpi_shim *shim = zr_mpi_shim_of(p);
    int32_t comm;
    int err = zr_mpi_enter(p, k->ms);
    if (err)
        return err;
    int class = shim->borrow(zr_mpi_world_of(p), user_comm, &comm);
    pthread_mutex_lock(&lock);
    struct channel *c = class ? NULL : channel_of(p, comm);
    if (c) {
        c->n_borrowed++;
        k->attempt = ++last_attempt;
        k->next = c->meetings;
        c->meetings = k;
        k->channel = c;
    }
    pthread_mutex_unlock(&lock);
    if (!class && !c)
        shim->free(zr_mpi_world_of(p), comm);
    zr_mpi_leave(p);
    return class ? zr_mpi_say(p, class, k->over)
           : c   ? 0
                 : zr_fail(ZERO_ERR_NOMEM, "%s: no memory to meet over it", k->over);
}

static void free_message(struct message *m)
{
    free(m->post);
    free(m);
}

/* Frees what MPI has sent. Called with the lock held. */
static void free_sent(struct channel *c)
{
    for (struct message **at = &c->unsent, *m; (m = *at);) {
        if (atomic_load(&m->batch.n_left)) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        free_message(m);
    }
}

/* Gives the communicator back if no context meets over it, no message has come, and all are sent. Called
 * with the lock held. */
static void drop_channel(struct channel *c)
{
    struct channel **at = &channels;
    free_sent(c);
    if (c->meetings || c->first || c->unsent)
        return;
    while (c->n_borrowed-- > 0)
        zr_mpi_shim_of(c->process)->free(zr_mpi_world_of(c->process), c->comm);
    while (*at != c)
        at = &(*at)->next;
    *at = c->next;
    free(c);
}

/* The channel stays if MPI cannot be entered any more. */
static void leave_channel(struct meeting *k)
{
    struct meeting **at = &k->channel->meetings;
    bool inside = !zr_mpi_enter(k->process, REST_MS);
    pthread_mutex_lock(&lock);
    while (*at != k)
        at = &(*at)->next;
    *at = k->next;
    if (inside)
        drop_channel(k->channel);
    pthread_mutex_unlock(&lock);
    if (inside)
        zr_mpi_leave(k->process);
}

/* --- messages --- */

/* Returns a note that `bytes` may follow, or NULL with a message. */
static struct post *make_post(const struct meeting *k, const struct note *note, size_t bytes)
{
    struct post *p = calloc(1, sizeof *p + bytes);
    if (!p) {
        zr_fail(ZERO_ERR_NOMEM, "%s: no memory to meet over it", k->over);
        return NULL;
    }
    p->bytes = (int64_t)(sizeof p->note + bytes);
    p->note = *note;
    memcpy(p->note.name, k->w->name, sizeof p->note.name);
    return p;
}

/* Takes the post over if it returns 0. */
static int send_post(struct meeting *k, int to, struct post *post)
{
    struct zr_mpi_process *p = k->process;
    struct message *m;
    int32_t slot = -1;
    int class = 0, err = ZR_ZALLOC(m, 1, "a meeting over %s", k->over);
    int64_t until_ns = zr_now_ns() + k->ms * 1000000;
    while (!err && !class && slot < 0) { /* other contexts of the process may take all the room */
        err = zr_mpi_enter(p, k->ms);
        if (err)
            break;
        class = zr_mpi_shim_of(p)->send(zr_mpi_world_of(p), k->channel->comm, &post->note, post->bytes, to,
                                        MEETING_TAG, &slot);
        if (slot >= 0)
            zr_mpi_begun(p, slot, &m->batch);
        zr_mpi_leave(p);
        if (slot < 0 && !class && !zr_mpi_poll(p) && zr_now_ns() > until_ns)
            err = zr_fail(ZERO_ERR_TIMEOUT, "%s: MPI could not take a request for %lld ms (start_timeout_ms)",
                          k->over, (long long)k->ms);
    }
    if (slot < 0) {
        free(m);
        return err ? err : zr_mpi_say(p, class, "MPI_Isend");
    }
    m->post = post;
    m->next = k->sent;
    k->sent = m;
    return 0;
}

/* Sends a note, which more[bytes] follows. */
static int send_note(struct meeting *k, int to, const struct note *note, const void *more, size_t bytes)
{
    struct post *post = make_post(k, note, bytes);
    if (!post)
        return ZERO_ERR_NOMEM;
    if (bytes)
        memcpy(post->more, more, bytes);
    int err = send_post(k, to, post);
    if (err)
        free(post);
    return err;
}

/* Returns a message with room for so many bytes. NULL: no memory, or no rank of this libzero sent them. */
static struct message *make_message(const struct meeting *k, int from, int64_t bytes)
{
    struct message *m = NULL;
    if (bytes >= (int64_t)sizeof(struct note) && (m = calloc(1, sizeof *m))) {
        m->from = from;
        m->post = make_post(k, &(struct note){0}, (size_t)bytes - sizeof(struct note));
    }
    if (m && !m->post) {
        free(m);
        m = NULL;
    }
    return m;
}

/* Receives a message that has arrived, whichever context of the process it is for. *more: there was one. */
static int receive_note(struct meeting *k, bool *more)
{
    struct zr_mpi_process *p = k->process;
    const struct zr_mpi_shim *shim = zr_mpi_shim_of(p);
    struct message *m = NULL, **at = &k->channel->first;
    int32_t slot = -1;
    int64_t bytes;
    int from, err = zr_mpi_enter(p, k->ms);
    *more = false;
    if (err)
        return err;
    int class = shim->probe(zr_mpi_world_of(p), k->channel->comm, MEETING_TAG, &from, &bytes);
    if (!class && from >= 0 && (m = make_message(k, from, bytes)))
        class = shim->receive(zr_mpi_world_of(p), k->channel->comm, &m->post->note, bytes, from, MEETING_TAG,
                              &slot);
    *more = slot >= 0;
    if (*more) {
        zr_mpi_begun(p, slot, &m->batch);
        pthread_mutex_lock(&lock);
        while (*at)
            at = &(*at)->next;
        *at = m;
        pthread_mutex_unlock(&lock);
    } else if (m) {
        free_message(m);
    }
    zr_mpi_leave(p);
    return class ? zr_mpi_say(p, class, "MPI_Iprobe") : 0;
}

/* Waits for sent messages to leave. Returns false if MPI keeps one. The channel then keeps its memory. */
static bool have_left(struct meeting *k)
{
    int64_t until_ns = zr_now_ns() + REST_MS * INT64_C(1000000);
    bool left = true;
    for (struct message *m = k->sent, *next; m; m = next) {
        next = m->next;
        while (atomic_load(&m->batch.n_left) && !zr_mpi_ended(k->process) && zr_now_ns() < until_ns)
            if (!zr_mpi_poll(k->process))
                nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        left &= !atomic_load(&m->batch.n_left);
        pthread_mutex_lock(&lock);
        m->next = k->channel->unsent;
        k->channel->unsent = m;
        pthread_mutex_unlock(&lock);
    }
    k->sent = NULL;
    return left;
}

static bool is_named(const struct note *n, const struct meeting *k)
{
    return !strncmp(n->name, k->w->name, sizeof n->name);
}

static bool is_answer(const struct note *n)
{
    return n->kind == SEEN || n->kind == RESULT || n->kind == LEFT;
}

/* Whether this is an answer to k, which is not rank 0. */
static bool answers(const struct post *p, const struct meeting *k)
{
    if (p->note.kind == RESULT && p->bytes != (int64_t)(sizeof p->note + k->bytes))
        return false;
    return is_answer(&p->note) && p->note.attempt == k->attempt;
}

/* Whether no context waits for this answer any more. Called with the lock held. */
static bool is_stale(const struct channel *c, const struct post *p)
{
    const struct meeting *k = c->meetings;
    while (k && (k->w->rank == 0 || !answers(p, k)))
        k = k->next;
    return is_answer(&p->note) && !k;
}

static bool is_for(const struct meeting *k, const struct post *p)
{
    if (k->w->rank == 0)
        return !is_answer(&p->note) && is_named(&p->note, k);
    return answers(p, k);
}

/* Returns the next message for k, to be freed, or NULL if there is none. */
static struct message *take_next(struct meeting *k)
{
    struct message **at = &k->channel->first, *found = NULL;
    pthread_mutex_lock(&lock);
    while (*at && !found && !atomic_load(&(*at)->batch.n_left)) {
        struct message *m = *at;
        bool stale = is_stale(k->channel, m->post);
        if (!stale && !is_for(k, m->post)) {
            at = &m->next;
            continue;
        }
        *at = m->next;
        if (stale)
            free_message(m);
        else
            found = m;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* Receives messages, polls, and rests. Returns 0, 1 if the time is over, or the failure. */
static int rest(struct meeting *k)
{
    bool more = true;
    int err = zr_mpi_ended(k->process);
    while (!err && more)
        err = receive_note(k, &more);
    if (!err && !zr_mpi_poll(k->process))
        nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
    return err ? err : zr_now_ns() > k->until_ns;
}

/* --- descriptions of the wait --- */

/* Describes which ranks k has waited for, for so many ms. limit: what limits that time, or "". */
typedef void describe_fn(struct meeting *k, int64_t ms, const char *limit, char text[ZR_WAIT_CHARS]);

static void remind_of(struct meeting *k, describe_fn *describe)
{
    const struct zr_waiting *w = k->w->waiting;
    char text[ZR_WAIT_CHARS];
    int64_t now = zr_now_ns();
    if (!w || now - k->reminded_ns < w->remind_ms * 1000000)
        return;
    k->reminded_ns = now;
    describe(k, (now - k->begun_ns) / 1000000, "", text);
    zr_waiting_warn(w, text, k->ms, LIMIT);
}

static int say_over(struct meeting *k, describe_fn *describe)
{
    char text[ZR_WAIT_CHARS];
    describe(k, k->ms, LIMIT, text);
    return zr_fail(ZERO_ERR_TIMEOUT, "%s", text);
}

/* --- rank 0 --- */

/* Sends this context's name to ranks that wait under another name. */
static int answer_other_names(struct meeting *k)
{
    int err = 0;
    for (bool all = false; !all && !err;) {
        struct note answer = {.kind = SEEN};
        int to = -1;
        pthread_mutex_lock(&lock);
        struct message *m = k->channel->first;
        while (m && !atomic_load(&m->batch.n_left) &&
               (m->is_answered || m->post->note.kind != CARD || is_named(&m->post->note, k)))
            m = m->next;
        all = !m || atomic_load(&m->batch.n_left);
        if (!all) {
            m->is_answered = true;
            answer.attempt = m->post->note.attempt;
            to = m->from;
        }
        pthread_mutex_unlock(&lock);
        if (!all)
            err = send_note(k, to, &answer, NULL, 0);
    }
    return err;
}

/* Handles a note. Its bytes replace earlier ones of its rank. */
static int take_note(struct meeting *k, int from, const struct post *p)
{
    const struct note *n = &p->note;
    struct arrival *a = &k->come[from];
    struct note answer = {.kind = n->kind == CARD ? SEEN : LEFT, .attempt = n->attempt};
    if (n->kind != CARD && a->attempt != n->attempt)
        return 0;
    k->n_here += (n->kind == HERE) - a->is_here;
    *a = (struct arrival){n->kind == GONE ? 0 : n->attempt, n->kind == HERE};
    if (n->kind == HERE)
        return 0;
    if (n->kind == CARD && p->bytes == (int64_t)(sizeof *n + k->bytes))
        memcpy(k->all + (size_t)from * k->bytes, p->more, k->bytes);
    return send_note(k, from, &answer, NULL, 0);
}

static int take_notes(struct meeting *k)
{
    int err = 0;
    for (struct message *m; !err && (m = take_next(k)); free_message(m))
        err = take_note(k, m->from, m->post);
    return err ? err : answer_other_names(k);
}

/* Finds a rank that has come under another name. Returns -1 if there is none. The rank may have given up in
 * the meantime, as all ranks do at about the same time. Called with the lock held. */
static int find_other_name(const struct meeting *k, char name[sizeof k->other_name])
{
    int rank = -1;
    for (const struct message *m = k->channel->first; m && !atomic_load(&m->batch.n_left); m = m->next)
        if (m->post->note.kind == CARD && !is_named(&m->post->note, k) && !k->come[m->from].attempt) {
            rank = m->from;
            memcpy(name, m->post->note.name, sizeof k->other_name);
        }
    return rank;
}

static void describe_missing(struct meeting *k, int64_t ms, const char *limit, char text[ZR_WAIT_CHARS])
{
    char who[LISTED * 20 + 8] = "", name[sizeof k->other_name], names[2 * sizeof name + 64] = "";
    size_t used = 0;
    int n = 0;
    for (int i = 1; i < k->w->world; i++) {
        if (k->come[i].is_here)
            continue;
        if (n < LISTED)
            used += (size_t)snprintf(who + used, sizeof who - used, "%srank %d", n ? ", " : "", i);
        else if (n == LISTED)
            snprintf(who + used, sizeof who - used, ", ...");
        n++;
    }
    pthread_mutex_lock(&lock);
    int other = find_other_name(k, name);
    pthread_mutex_unlock(&lock);
    if (other >= 0)
        snprintf(names, sizeof names, "; cfg.launch.name is \"%s\" on rank 0 and \"%.*s\" on rank %d",
                 k->w->name, (int)sizeof name - 1, name, other);
    snprintf(text, ZR_WAIT_CHARS,
             "%d of %d ranks did not come to zero_wrap of the context \"%s\" over %s in %lld ms%s: %s%s", n,
             k->w->world, k->w->name, k->over, (long long)ms, limit, who, names);
}

/* Checks the cards, and sends the result to the ranks that have come, or why there is none. */
static int answer_all(struct meeting *k, int err)
{
    struct note answer = {.kind = RESULT};
    struct zr_saved_error kept;
    zr_error_save(&kept, zr_first_error_put(&answer, err));
    if (!err)
        zr_user_comm_check((struct zr_user_comm_card *)k->all, k->over, k->w);
    for (int i = 1, failed = 0; i < k->w->world && !failed; i++) {
        answer.attempt = k->come[i].attempt;
        failed = answer.attempt ? send_note(k, i, &answer, k->all, k->bytes) : 0;
        if (failed && !err)
            zr_error_save(&kept, failed);
    }
    return zr_error_restore(&kept);
}

static int collect(struct meeting *k)
{
    k->n_here = 1;
    int err = take_notes(k);
    while (!err && k->n_here < k->w->world) {
        remind_of(k, describe_missing);
        err = rest(k);
        err = err == 1 ? say_over(k, describe_missing) : err ? err : take_notes(k);
    }
    return answer_all(k, err);
}

/* --- the other ranks --- */

static void describe_unanswered(struct meeting *k, int64_t ms, const char *limit, char text[ZR_WAIT_CHARS])
{
    char where[2 * sizeof k->other_name + 64];
    if (k->is_seen)
        snprintf(where, sizeof where, ", which has come and waits for other ranks");
    else if (k->has_other_name)
        snprintf(where, sizeof where, ": cfg.launch.name is \"%.*s\" on rank 0 and \"%s\" on rank %d",
                 (int)sizeof k->other_name - 1, k->other_name, k->w->name, k->w->rank);
    else
        snprintf(where, sizeof where, ", which has not come");
    snprintf(text, ZR_WAIT_CHARS,
             "rank %d waited %lld ms%s in zero_wrap of the context \"%s\" for rank 0 of %s%s", k->w->rank,
             (long long)ms, limit, k->w->name, k->over, where);
}

/* Rank 0 is there. Confirms to it that this rank still waits. */
static int confirm(struct meeting *k)
{
    int64_t grace_ms = k->ms / 8 < GRACE_MS ? k->ms / 8 : GRACE_MS;
    struct note here = {.kind = HERE, .attempt = k->attempt};
    if (!k->is_seen)
        k->until_ns += grace_ms * 1000000;
    k->is_seen = true;
    return send_note(k, 0, &here, NULL, 0);
}

/* Takes the card of rank 0, and the failure that it reports, if any. */
static void take_card(struct meeting *k, const struct post *p)
{
    memcpy(k->all, p->more, k->bytes);
    zr_error_save(&k->reported, p->note.err ? zr_fail(zr_first_error_code(p->note.err), "%.*s",
                                                      (int)sizeof p->note.text - 1, p->note.text)
                                            : 0);
}

/* Returns 0 if RESULT has not come yet, 1 if it has, or the failure. */
static int take_answer(struct meeting *k)
{
    int res = 0;
    for (struct message *m; !res && (m = take_next(k)); free_message(m)) {
        const struct note *n = &m->post->note;
        k->has_left |= n->kind == LEFT;
        if (n->kind == RESULT) {
            take_card(k, m->post);
            res = 1;
        } else if (n->kind == SEEN && is_named(n, k)) {
            res = confirm(k);
        } else if (n->kind == SEEN) {
            k->has_other_name = true;
            memcpy(k->other_name, n->name, sizeof k->other_name);
        }
    }
    return res;
}

/* Returns 0 if the time is over or rank 0 has answered LEFT, 1 if RESULT has come, or the failure. */
static int await_answer(struct meeting *k)
{
    int res = 0;
    while (!res && !k->has_left && zr_now_ns() <= k->until_ns) {
        remind_of(k, describe_unanswered);
        res = rest(k);
        res = res < 0 ? res : take_answer(k);
    }
    return res;
}

/* Tells rank 0 that this rank no longer waits. If rank 0 counts on it, RESULT may be on its way, and is then
 * the answer. Returns as await_answer. */
static int leave_rank_0(struct meeting *k)
{
    const struct note gone = {.kind = GONE, .attempt = k->attempt};
    k->until_ns = zr_now_ns() + REST_MS * INT64_C(1000000);
    int err = send_note(k, 0, &gone, NULL, 0);
    return err || !k->is_seen ? err : await_answer(k);
}

static int ask_rank_0(struct meeting *k, const void *mine)
{
    const struct note card = {.kind = CARD, .attempt = k->attempt};
    struct zr_saved_error kept;
    int res = send_note(k, 0, &card, mine, k->bytes);
    res = res ? res : await_answer(k);
    if (res != 1) {
        zr_error_save(&kept, res ? res : say_over(k, describe_unanswered));
        res = leave_rank_0(k);
    }
    return zr_error_restore(res == 1 ? &k->reported : &kept);
}

/* --- all ranks --- */

static int gather_notes(struct meeting *k, const void *mine)
{
    if (k->w->rank != 0)
        return ask_rank_0(k, mine);
    k->come = calloc((size_t)k->w->world, sizeof *k->come);
    if (!k->come)
        return zr_fail(ZERO_ERR_NOMEM, "%s: no memory to meet over it", k->over);
    memcpy(k->all, mine, k->bytes);
    int err = collect(k);
    free(k->come);
    return err;
}

/* After a success MPI goes on to work, also if a message has not left yet: its rank still waits for it. If
 * that rank has died, the message is pending when the process ends, which then skips MPI_Finalize. */
int zr_mpi_exchange_over(struct zr_mpi_process *p, const struct zr_user_comm *c, const void *mine, void *all,
                         size_t bytes)
{
    int64_t now = zr_now_ns();
    struct meeting k = {.process = p,
                        .w = c->w,
                        .over = c->name,
                        .ms = c->timeout_ms,
                        .begun_ns = now,
                        .reminded_ns = now,
                        .until_ns = now + c->timeout_ms * 1000000,
                        .bytes = bytes,
                        .all = all};
    struct zr_saved_error kept;
    bool rests = true;
    int err = join_channel(&k, c->comm);
    zr_error_save(&kept, err ? err : gather_notes(&k, mine));
    if (!err) {
        rests = have_left(&k);
        leave_channel(&k);
    }
    if (kept.code)
        zr_mpi_process_drop(p, c->log, rests);
    else
        zr_mpi_process_leave_looking(p, c->log);
    return zr_error_restore(&kept);
}

/* --- the program's communicator, and MPI_COMM_WORLD --- */

/* Opens MPI, which must have begun: otherwise there could be no communicator. The caller drops it. */
static int open_user_comm(int64_t ms, struct zr_log *log, struct zr_mpi_process **out)
{
    struct zr_mpi_library lib;
    int err = zr_mpi_load(NULL, &lib);
    *out = NULL;
    if (!err && !lib.shim->is_initialized(lib.world))
        err = zr_fail(ZERO_ERR_ORDER, "mpi_comm is set, but MPI has not begun: MPI_Init_thread comes first");
    return err ? err : zr_mpi_process_open(&lib, ms, NULL, log, out);
}

static int ask_user_comm(struct zr_mpi_process *p, void *user_comm, int64_t ms, int *rank, int *world)
{
    int err = zr_mpi_rank_of(p, user_comm, ms, rank, world);
    if (err)
        return err;
    return *rank >= 0 ? 0 : zr_fail(ZERO_ERR_ARG, "mpi_comm points to MPI_COMM_NULL on this rank");
}

int zr_mpi_user_comm_world(void *user_comm, int64_t timeout_ms, int *rank, int *world)
{
    struct zr_mpi_process *p;
    int err = open_user_comm(timeout_ms, NULL, &p);
    if (err)
        return err;
    err = ask_user_comm(p, user_comm, timeout_ms, rank, world);
    zr_mpi_process_drop(p, NULL, true);
    return err;
}

int zr_mpi_job_world(int64_t timeout_ms, int *rank, int *world)
{
    return zr_mpi_user_comm_world(NULL, timeout_ms, rank, world);
}

/* Opens MPI for ranks that a launcher of MPI has started, and checks that this rank's number is the one in
 * the launcher's variables. Nothing is logged about the MPI here, as that happens when communicators are
 * opened. */
static int open_world(const struct zr_user_comm *c, struct zr_mpi_process **out)
{
    struct zr_mpi_library lib;
    int rank, size, err = zr_mpi_check_launcher();
    err = err ? err : zr_mpi_load(NULL, &lib);
    err = err ? err : zr_mpi_check_launched(&lib);
    err = err ? err : zr_mpi_process_open(&lib, c->timeout_ms, NULL, c->log, out);
    if (err)
        return err;
    err = zr_mpi_rank_of(*out, NULL, c->timeout_ms, &rank, &size);
    err = err ? err : zr_mpi_check_rank(c->w->rank, c->w->world, c->w->size_from, rank, size);
    if (err)
        zr_mpi_process_drop(*out, c->log, true);
    return err;
}

int zr_mpi_exchange(struct zr_user_comm *c, const void *mine, void *all, size_t bytes)
{
    struct zr_mpi_process *p;
    int err = c->comm ? open_user_comm(c->timeout_ms, c->log, &p) : open_world(c, &p);
    return err ? err : zr_mpi_exchange_over(p, c, mine, all, bytes);
}
