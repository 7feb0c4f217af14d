/* SPDX-License-Identifier: Apache-2.0 */
/* hub.h: internals of a rendezvous: a star, with rank 0 in the middle and a link to each other rank.
 *
 *    rendezvous.c  the public calls
 *    find.c        the addresses at which ranks meet
 *    admit.c       rank 0 listens and lets ranks in
 *    reach.c       the other ranks connect to rank 0
 *    hub.c         frames, failures, losses, and closing
 *    compare.c     compares what programs called
 *    beat.c        finds ranks that are silent
 *
 * The first failure is kept. Before the detach the blocking calls return it. Afterwards on_failed gets it,
 * unless this rank reported it. */
#ifndef ZR_COMM_HUB_H
#define ZR_COMM_HUB_H

#include "comm/meet/call_log.h"
#include "comm/meet/link.h"
#include "comm/meet/meeting_file.h"
#include "comm/meet/net_address.h"
#include "comm/meet/open_names.h"
#include "comm/meet/rendezvous.h"

/* The current activity of the ranks. While all ranks wait for each other, a rank that leaves is a failure at
 * once. Between exchanges it may have nothing left to do here. */
enum zr_phase { ZR_PHASE_MEET, ZR_PHASE_IDLE, ZR_PHASE_EXCHANGE };

/* Why a rank has not reached rank 0 yet. A later entry gives more information. */
enum zr_trouble {
    ZR_TROUBLE_NONE,
    ZR_TROUBLE_NOBODY,  /* no connection was accepted */
    ZR_TROUBLE_SILENT,  /* a connection was accepted, but there is no answer yet */
    ZR_TROUBLE_ENDED,   /* the other side closed the connection */
    ZR_TROUBLE_STRANGE, /* the other side does not speak the protocol */
    ZR_TROUBLE_REFUSED, /* the other side speaks the protocol, but has another key or job */
    ZR_TROUBLE_NAME,    /* it was rank 0, which waits with another name */
    ZR_TROUBLE_WAIT     /* it was rank 0, which waits for other ranks */
};

enum zr_member_state { ZR_MEMBER_EMPTY, ZR_MEMBER_HERE, ZR_MEMBER_LEFT, ZR_MEMBER_LOST };

/* One rank, as this one knows it. */
struct zr_member {
    enum zr_member_state state;
    /* The link to this member. Rank 0 has one to each other rank, and the others have one to rank 0. */
    struct zr_link *link;
    /* The rank's part of the current exchange. gave is GIVE or RESULT, or 0 if nothing has come yet. */
    uint16_t gave;
    char *given;
    size_t n_given;
    int32_t given_about;
    /* The rank was lost before the detach, and on_lost was not called yet. */
    bool unreported;
    /* How the rank was lost. NULL: it was not lost, or there was no memory. */
    char *how;
    /* Rank 0: the name with which it waits, if that differs from this rank's. NULL: none, or no memory. */
    char *waits_as;
    /* The call that its latest beat named (beat.c). NULL: none, or no memory. */
    char *last_heard;
    /* Rank 0, during a comparison: its program's calls. */
    struct zr_shared_calls calls[ZR_SHARED_CALLS];
    /* The ranks with the most and the fewest calls, among those that must make these calls too. -1: no other
     * rank is known that must make them. */
    int ahead[ZR_SHARED_CALLS], behind[ZR_SHARED_CALLS];
    /* All of them have come. */
    bool has_answered;
};

/* A failure that any thread passes to the loop's thread. code 0: none. */
struct zr_reported {
    int code;
    char text[ZR_FRAME_TEXT_BYTES];
};

/* Rank 0's comparison of what the programs of all ranks called. */
struct zr_comparison {
    bool begun;
    /* The rank that asked for it, and its failure. */
    int rank, code;
    char text[ZR_FRAME_TEXT_BYTES];
};

/* An address at which rank 0 listens. */
struct zr_listener {
    uv_tcp_t tcp;
    /* The socket, which is closed in forked children. */
    struct zr_kept_socket kept;
    /* is_open: not closed yet. is_awaited: a connection waits there to be accepted. */
    bool is_open, is_awaited;
};

struct zr_rendezvous {
    uv_loop_t *loop;
    struct zr_world w;
    int64_t timeout_ms;
    /* The limit of waits, for messages, as " (start_timeout_ms)". "": it has no name. */
    const char *limit;
    enum zr_phase phase;
    /* (world) By rank. */
    struct zr_member *members;
    /* All links that are not closed yet, including unidentified connections. */
    struct zr_link *links;
    /* Number of listeners, timers and asynchronous handles that are not closed yet. */
    int n_handles;

    /* --- how ranks meet --- */

    /* Every rank is here. */
    bool ready;
    /* Rank 0 has accepted this rank, and this rank has verified rank 0. */
    bool accepted;
    int64_t started_ms;
    /* Rank 0: number of incoming connections that have not proved to be a rank's. */
    int n_unidentified;
    /* Rank 0: number of ranks that have come, including itself. */
    int n_here;
    /* Rank 0: one listener for each family; how many are not closed yet; when it began to try to listen (0:
     * not yet). */
    struct zr_listener listener[2];
    int n_listening;
    int64_t listen_ms;
    /* Rank 0: time until the next connection is accepted, while there are too many unidentified ones. */
    uv_timer_t admit;
    /* Rank 0: another context of this process has passed a connection to this one. */
    uv_async_t handed;
    bool awaits_handed;
    /* Rank 0: where it listens. Others: where they try to reach it, now at to[to_now]. The addresses of a
     * name were found at found_ms. */
    union zr_address to[ZR_LOOKUP_MAX];
    int n_to, to_now;
    int64_t found_ms;
    /* The look-up in progress, or NULL. */
    struct zr_lookup *lookup;
    /* The file that rank 0 has written, or that was read last; n 0: none. has_written: rank 0 has not removed
     * it yet. */
    struct zr_meeting_file file;
    bool has_written;
    /* Time until the next try. */
    uv_timer_t retry;
    /* Time that the other end of a link may take to prove what it is. */
    uv_timer_t patience;
    /* Others: when the listener at to[refused_at] began to refuse this rank. 0: it does not. */
    int64_t refused_ms;
    int refused_at;
    /* For the message of a timeout: the last trouble, and an earlier trouble that gives more information. A
     * new attempt may know less than one that was answered. */
    enum zr_trouble worst;
    char trouble[640], trouble_before[640];

    /* --- how the blocking calls wait --- */

    /* Sets `late` when the deadline has passed. */
    uv_timer_t deadline;
    bool late;
    /* Sets `looks` when a long wait should be looked at. wait_ms: when the wait began. reminded_ms: when it
     * was last logged. */
    uv_timer_t look;
    bool looks;
    int64_t wait_ms, reminded_ms;
    /* Bytes of each rank in the current exchange, or the most for RESULT. 0: there is none. exchange_ms:
     * when it began. exchange_of: GIVE or RESULT, which the others send for it. */
    size_t n_expected;
    int64_t exchange_ms;
    enum zr_frame_type exchange_of;
    /* Others: the result of the exchange. */
    char *all;
    size_t n_all;
    int32_t all_about;

    /* --- failures and callbacks --- */

    /* Code of the first failure. 0: none. */
    int code;
    char text[1024];
    bool detached, closing;
    void (*on_lost)(void *arg, int rank, const char *why);
    void (*on_failed)(void *arg, int code, const char *text);
    void (*on_message)(void *arg, int from, const void *data, size_t n);
    /* Argument of these three. */
    void *arg;
    struct zr_known_ranks known;
    /* Messages that came before the detach. Once these are delivered, later ones are delivered as they
     * come. */
    struct zr_message *messages;
    bool may_deliver;
    /* The ranks of each host, so that links between hosts are known. NULL: all links need beats. Owned by the
     * caller. */
    const struct zr_topology *hosts;
    uv_timer_t beat;
    /* Number of ticks in the interval between two beats to a rank, the next tick, and when it is due. */
    int n_beat_ticks, beat_tick;
    int64_t beat_due_ms;

    /* --- from any thread to the loop's thread --- */

    uv_async_t report;
    uv_mutex_t report_lock;
    /* Protected by the lock: detached and not closing, so report is open. */
    bool may_report;
    /* Protected by the lock: the first failure that this rank reported, and the first that it wants explained
     * by a comparison. */
    struct zr_reported reported, doubted;
    /* Used by the loop's thread: reported became the first failure; doubted was sent to rank 0. */
    bool has_reported, has_doubted;
    /* The last word if the process exits before the report was sent. */
    struct zr_last_failure last_failure;

    /* --- what programs called --- */

    struct zr_comparison comparison;
    /* Time that ranks may take to send their calls. */
    uv_timer_t answers;
};

/* ---- hub.c: sending ---- */

int64_t zr_hub_now_ms(struct zr_rendezvous *r);
extern const struct zr_link_calls zr_hub_calls;
/* Makes a link without proof from the other end. Its rank is -1, and its payloads must be small. Returns NULL
 * if there is no memory. */
struct zr_link *zr_hub_add_link(struct zr_rendezvous *r);
/* Marks that the link leads to a rank of this job. If this process exits, a last word is sent on it. */
void zr_hub_keep(struct zr_rendezvous *r, struct zr_link *l);
/* Sends to a rank; does nothing if the rank is not here. An error means that it could not be sent, which is
 * no failure of the rendezvous yet. on_end reports a broken connection later. */
int zr_hub_send(struct zr_rendezvous *r, int rank, enum zr_frame_type type, int32_t about,
                const void *payload, size_t n);
/* Rank 0: sends to all others. On other ranks it does nothing. */
int zr_hub_send_all(struct zr_rendezvous *r, enum zr_frame_type type, int32_t about, const void *payload,
                    size_t n);

/* ---- hub.c: failures and losses ---- */

/* Keeps the failure if it is the first. Rank 0 then sends it to the others. Returns the code that is kept. */
int zr_hub_fail(struct zr_rendezvous *r, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Like zr_hub_fail, for a failure that this rank has found itself. It is also sent to rank 0. Call it before
 * the detach. */
int zr_hub_fail_all(struct zr_rendezvous *r, int code, const char *text);
/* Notes what went wrong during a wait. */
void zr_hub_note(struct zr_rendezvous *r, enum zr_trouble trouble, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Passes a failure to the loop's thread, if *report is still empty. Returns whether that thread still
 * listens. Any thread. */
bool zr_hub_put_report(struct zr_rendezvous *r, struct zr_reported *report, int code, const char *text);
/* Returns what was passed as *report. */
struct zr_reported zr_hub_take_report(struct zr_rendezvous *r, const struct zr_reported *report);
/* Sends what this rank has reported, if it is the first failure known here. leaving: also if it is
 * ZERO_ERR_PEER. */
void zr_hub_send_report(struct zr_rendezvous *r, bool leaving);
/* Calls on_failed with the failure, if that is allowed now. */
void zr_hub_report_failure(struct zr_rendezvous *r);
/* Calls on_lost for ranks that were lost before the detach, and on_failed for a failure. Rank 0 also sends
 * these losses to the others. */
void zr_hub_report_unreported(struct zr_rendezvous *r);
/* Fails if a rank is already gone, so that an exchange cannot be complete. Returns the failure. */
int zr_hub_check(struct zr_rendezvous *r);
/* Treats the other end of a link as lost, though it has not closed the link. */
void zr_hub_lose(struct zr_rendezvous *r, struct zr_link *l, const char *why);
/* Like zr_hub_lose, for a link that is lost together with another one. The loss is not reported. */
void zr_hub_let_go(struct zr_rendezvous *r, struct zr_link *l);
/* Write what this process knows of a rank (zr_rendezvous_know). Any thread. */
enum { ZR_HUB_CALL_CHARS = 192 };
void zr_hub_describe(const struct zr_rendezvous *r, int rank, char text[ZR_HUB_CALL_CHARS]);
void zr_hub_see(const struct zr_rendezvous *r, int rank, struct zr_rank_seen *out);
/* Text in messages before a rank's last call, and before one that may not be its last. */
#define ZR_HUB_LAST_CALL  "; its last call was "
#define ZR_HUB_LAST_HEARD "; last heard: "
/* Text in messages after a failure, before the number of the rank that found it and ")". */
#define ZR_HUB_FOUND_BY " (found by rank "

/* ---- hub.c: exchanges, messages, closing ---- */

/* Marks every rank as here. */
void zr_hub_all_here(struct zr_rendezvous *r);
/* Begins an exchange of n bytes from each rank (at most n for RESULT), or ends it with n 0. A large frame
 * that waits is read now. */
void zr_hub_expect(struct zr_rendezvous *r, enum zr_frame_type of, size_t n);
/* Bytes that this rank sends in a frame of the exchange. */
size_t zr_hub_expected(const struct zr_rendezvous *r, int rank);
/* Fails on rank 0 because another rank sent something else for the exchange. */
int zr_hub_differ(struct zr_rendezvous *r, int rank, uint16_t type, size_t n);
/* Delivers the messages that were kept, and all later ones as they come. On the loop's thread. */
void zr_hub_deliver(struct zr_rendezvous *r);
void zr_hub_forget_messages(struct zr_rendezvous *r);
/* Says goodbye and closes every handle. */
void zr_hub_close(struct zr_rendezvous *r);
/* Whether nothing of it is left on the loop. */
bool zr_hub_closed(const struct zr_rendezvous *r);
void zr_hub_handle_closed(uv_handle_t *h);

/* ---- find.c ---- */

/* Finds where ranks meet, at once or later, and then listens (rank 0) or connects (the others). */
void zr_hub_find(struct zr_rendezvous *r);
/* Fails because this process cannot open a descriptor: error is EMFILE or ENFILE. */
void zr_hub_no_descriptor(struct zr_rendezvous *r, int error, const char *what_for);
/* Time in ms until a file or an address is looked for again. It grows with the time that this rank has
 * waited. */
int zr_hub_again_ms(struct zr_rendezvous *r);
/* Writes where ranks meet: "10.77.0.1:29500", "[fd77::1]:29500", "node0:29500 (10.77.0.1, fd77::1)", or the
 * file. */
enum { ZR_PLACE_CHARS = 768 };
void zr_hub_say_place(const struct zr_rendezvous *r, char text[ZR_PLACE_CHARS]);
/* Others: finds the local address for connecting to to[to_now]. Returns 0 and *from; 1: any address;
 * UV_EADDRNOTAVAIL: the interface that was asked for has no address of that family. */
int zr_hub_source(const struct zr_rendezvous *r, union zr_address *from);
/* Others: writes the local address of that connection: " (10.77.0.2 on eth0)". "" if it is unknown. */
enum { ZR_SELF_CHARS = ZR_ADDRESS_CHARS + ZR_INTERFACE_CHARS + 8 };
void zr_hub_say_self(const struct zr_rendezvous *r, char text[ZR_SELF_CHARS]);
/* Whether the interface that was asked for, or this host, has an address of the family that reaches beyond
 * loopback and a single link. */
bool zr_hub_has_family(const struct zr_rendezvous *r, int family);

/* Rank 0, which listens: writes the file now, or later. It does so later if another rank 0 was faster, or
 * waits there with another name. */
void zr_hub_write_file(struct zr_rendezvous *r);
void zr_hub_write_file_later(struct zr_rendezvous *r);
/* Rank 0: replaces the existing file, which leads to no rank 0 of this job. */
void zr_hub_no_first(struct zr_rendezvous *r);
/* Rank 0: removes the file, as no more ranks are expected. */
void zr_hub_remove_file(struct zr_rendezvous *r);
#define ZR_HUB_TWO_JOBS "jobs that meet in one folder at a time need a ZERO_JOB or a key of their own"

/* ---- admit.c: rank 0 ---- */

/* Begins to meet, on every rank. An immediate error is kept as a failure. */
void zr_hub_start(struct zr_rendezvous *r);
void zr_hub_listen(struct zr_rendezvous *r);
/* Stops listening, whether or not ranks came. */
void zr_hub_stop_listening(struct zr_rendezvous *r);
/* Accepts a connection that waits at a listener. */
void zr_hub_admit(struct zr_rendezvous *r);
/* Handles a frame of a connection that has not proved to be a rank's. */
void zr_hub_hello(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f, const char *payload);
/* Whether every other rank has come. */
bool zr_hub_all_came(const struct zr_rendezvous *r);
/* Ends the meeting when all ranks are here: no more unidentified connections. */
void zr_hub_seal(struct zr_rendezvous *r);
/* Before the meeting: accepts connections that other contexts of this process pass on. */
int zr_hub_await_handed(struct zr_rendezvous *r);
/* After the meeting: ends that. Does nothing if none are awaited. */
void zr_hub_ignore_handed(struct zr_rendezvous *r);
/* Writes "cfg.launch.name is "gen" on rank 0, rank 2 and "disc" on rank 1". "" if no other name is known. */
enum { ZR_NAMES_CHARS = 512 };
void zr_hub_say_names(const struct zr_rendezvous *r, char text[ZR_NAMES_CHARS]);

/* ---- reach.c: the other ranks ---- */

void zr_hub_connect(struct zr_rendezvous *r);
/* Handles the result of connecting to rank 0's address. */
void zr_hub_on_connect(struct zr_link *l, int status);
/* Handles a frame from there, before both sides have proved what they are. */
void zr_hub_answer(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f, const char *payload);
/* Tries again in a moment. */
void zr_hub_retry(struct zr_rendezvous *r);
/* Gives up a link without an answer, and tries again. */
void zr_hub_give_up_slow(struct zr_rendezvous *r);

/* ---- compare.c, all on the loop's thread ---- */

/* Sends this rank's request for a comparison. */
void zr_hub_compare(struct zr_rendezvous *r);
/* Answers rank 0's request for this rank's calls. */
void zr_hub_asked(struct zr_rendezvous *r);
/* Rank 0: handles a rank's calls. code is the frame's about. Returns false if the payload is invalid. */
bool zr_hub_on_calls(struct zr_rendezvous *r, int rank, int code, const char *payload, size_t n);
void zr_hub_forget_comparison(struct zr_rendezvous *r);

/* ---- beat.c ---- */

/* Begins to send and await beats, at the detach. */
void zr_hub_beat(struct zr_rendezvous *r);
/* Handles a rank's beat. payload is the call that it names. NULL: none. */
void zr_hub_on_beat(struct zr_rendezvous *r, int rank, const char *payload);

#endif
