/* SPDX-License-Identifier: Apache-2.0 */
/* hub.h: the inside of a rendezvous: a star, with rank 0 in the middle and a link to each other rank.
 *
 * rendezvous.c holds what callers see: opening, detaching, closing; hub_exchange.c exchanging; hub_wait.c how
 * they wait. hub_find.c holds at which addresses ranks meet, hub_file.c those that a file says,
 * hub_interface.c by which of this host's interfaces, hub_listen.c rank 0's sockets there, hub_meet.c how
 * ranks are let in and unidentified connections kept out, hub_reach.c how the others reach rank 0, hub.c who
 * is lost or fails and how it ends, hub_calls.c how ranks compare what their programs called, hub_message.c
 * messages of whoever uses it, hub_beat.c how a silent end is found, hub_names.c what becomes of ranks that
 * wait with another name. The first failure is kept; before the detach it is what the blocking calls return,
 * after it what on_failed is told, unless it is this rank's own. */
#ifndef ZR_COMM_HUB_H
#define ZR_COMM_HUB_H

#include "comm/meet/called.h"
#include "comm/meet/link.h"
#include "comm/meet/meeting_file.h"
#include "comm/meet/net_lookup.h"
#include "comm/meet/open_names.h"
#include "comm/meet/rendezvous.h"

/* That a rank leaves is a failure at once only while all ranks wait for each other; between exchanges it may
 * have had nothing left to do here. */
enum zr_phase { ZR_PHASE_MEET, ZR_PHASE_IDLE, ZR_PHASE_EXCHANGE };

/* What kept a rank from reaching rank 0; a later entry says more. */
enum zr_trouble {
    ZR_TROUBLE_NONE,
    ZR_TROUBLE_NOBODY,  /* nobody was reached */
    ZR_TROUBLE_SILENT,  /* somebody takes the connection and has not answered yet */
    ZR_TROUBLE_ENDED,   /* and closed it */
    ZR_TROUBLE_STRANGE, /* and said something else */
    ZR_TROUBLE_REFUSED, /* and knows the protocol, but not our key or job */
    ZR_TROUBLE_NAME,    /* it was rank 0, which waits with another name */
    ZR_TROUBLE_WAIT     /* it was rank 0, which waits for others */
};

enum zr_member_state { ZR_MEMBER_EMPTY, ZR_MEMBER_HERE, ZR_MEMBER_LEFT, ZR_MEMBER_LOST };

/* What is known of one rank. Rank 0 has a link to each other rank, and the others have one to rank 0. */
struct zr_member {
    enum zr_member_state state;
    struct zr_link *link;
    /* What has come from it for the exchange under way: GIVE or VERDICT; 0: nothing yet. */
    uint16_t gave;
    char *given;
    size_t n_given;
    int32_t given_about;
    /* it was lost before the detach, and on_lost is still to be called */
    bool unreported;
    /* how; NULL: it was not, or there was no memory for it */
    char *how;
    /* rank 0: the name with which it waits, which is not this rank's; NULL: none, or there was no memory */
    char *waits_as;
    /* the call that it told last (hub_beat.c); NULL: it told none, or there was no memory for it */
    char *last_heard;
    /* rank 0, of a comparison: the calls of its program; NULL: they are not here yet */
    struct zr_called_ring *calls;
};

/* Rank 0: of what the programs of all ranks called. */
struct zr_comparison {
    bool begun;
    /* who asked for it, and the failure that it had met */
    int rank, code;
    char text[ZR_FRAME_TEXT_BYTES];
};

/* An address at which others connect. */
struct zr_listener {
    uv_tcp_t tcp;
    /* closed in forked children */
    struct zr_kept_socket kept;
    /* not closed yet; and somebody waits there to be let in */
    bool is_open, is_awaited;
};

struct zr_rendezvous {
    uv_loop_t *loop;
    struct zr_world w;
    int64_t timeout_ms;
    enum zr_phase phase;
    /* (world), by rank */
    struct zr_member *members;
    /* all that are not closed yet, unidentified connections included */
    struct zr_link *links;
    /* incoming links that have not proved to be a rank's */
    int n_unidentified;
    /* rank 0: the ranks that have come, itself included */
    int n_here;

    /* rank 0: one, or one of each family */
    struct zr_listener listener[2];
    uv_timer_t deadline, retry;
    /* until the next look at what may be said of a long wait; and when it began, and the log was told last */
    uv_timer_t look;
    int64_t wait_ms, reminded_ms;
    /* that look is due */
    bool looks;
    /* what bounds the waits, for messages; "": it has no name */
    const char *limit;
    /* how long the other end of a link may take to prove what it is */
    uv_timer_t patience;
    /* how long ranks may take to send their calls */
    uv_timer_t answers;
    /* rank 0: until the next one is let in, where there are too many unidentified connections */
    uv_timer_t admit;
    /* NULL: none is under way */
    struct zr_lookup *lookup;
    /* Rank 0: where it listens. Others: where they try to reach it, at to[to_now] now. Of a name those that
     * were found last, at found_ms. */
    union zr_address to[ZR_LOOKUP_MOST];
    int n_to, to_now;
    int64_t found_ms;
    /* What rank 0 has written, or what was read last; n 0: nothing was. */
    struct zr_meeting_file file;
    /* rank 0: and it has not removed it */
    bool has_written;
    /* the listeners, the timers and the asynchronous handles: those that are not closed yet */
    int n_handles;
    /* rank 0: another context of this process has handed a connection over */
    uv_async_t handed;
    bool awaits_handed;
    /* rank 0: since when it tries to listen; 0: not yet */
    int64_t listen_ms;
    /* listeners that are not closed yet */
    int n_listening;
    int64_t started_ms;
    /* others: since when what listens at to[refused_at] refuses us; 0: nobody does */
    int64_t refused_ms;
    int refused_at;
    /* For the message of a timeout, what went wrong while waiting: the latest, or an earlier one that says
     * more, since an attempt that has just begun knows less than one that was answered. */
    enum zr_trouble worst;
    char trouble[640], trouble_before[640];

    /* the deadline has passed */
    bool late;
    /* every rank is here */
    bool ready;
    /* others: rank 0 knows us, and we know it */
    bool accepted;
    /* the bytes of each rank in the exchange under way, for VERDICT the most; 0: none is under way */
    size_t n_expected;
    /* when it began */
    int64_t exchange_ms;
    /* of the frames that the others send for it: GIVE or VERDICT */
    enum zr_frame_type exchange_of;
    /* others: the result of the exchange under way */
    char *all;
    size_t n_all;
    int32_t all_about;

    /* of the first failure */
    int code;
    char text[1024];
    bool detached, closing;
    void (*on_lost)(void *arg, int rank, const char *why);
    void (*on_failed)(void *arg, int code, const char *text);
    /* given to both */
    void *arg;
    void (*describe)(void *arg, int rank, char *text, size_t n_text);
    void *describe_arg;
    void (*see)(void *arg, int rank, struct zr_rank_seen *out);
    void *see_arg;
    /* which links need beats; NULL: all. The caller's */
    const struct zr_topology *hosts;
    uv_timer_t beat;
    /* when it is to come next */
    int64_t beat_due_ms;

    void (*on_message)(void *arg, int from, const void *data, size_t n);
    /* messages that came before the detach; NULL: none */
    struct zr_message *messages;
    /* they have been delivered, so others are delivered as they come */
    bool may_deliver;

    /* What this rank reports, from any thread to the loop's. */
    uv_async_t report;
    uv_mutex_t report_lock;
    /* with the lock: detached and not closing, so report is open */
    bool may_report;
    /* with the lock: the first that was reported; 0: nothing was */
    int report_code;
    /* the loop's thread: that became the first failure */
    bool reported;
    char report_text[ZR_FRAME_TEXT_BYTES];
    /* what is said of it if the process exits before it was sent */
    struct zr_last_failure last_failure;

    /* The calls of this rank's program that every rank must make, which is what is compared. The flight
     * recorder has no arguments, few calls, and those that were refused, so it cannot stand in for it. */
    struct zr_called_ring calls;
    /* What this rank wants compared: likewise from any thread to the loop's. */
    /* with report_lock: the first doubt; 0: there is none */
    int doubt_code;
    /* the loop's thread: it has gone to rank 0 */
    bool doubt_sent;
    char doubt_text[ZR_FRAME_TEXT_BYTES];
    struct zr_comparison comparison;
};

/* Keeps the failure if it is the first; rank 0 tells the others. Returns code. */
int zr_hub_fail(struct zr_rendezvous *r, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* The same, of what this rank finds, and rank 0 is told, if it can be. Before the detach. */
int zr_hub_fail_all(struct zr_rendezvous *r, int code, const char *text);
/* Notes what went wrong while waiting. */
void zr_hub_note(struct zr_rendezvous *r, enum zr_trouble trouble, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Rank 0 starts to listen, the others to connect. What goes wrong at once is kept as a failure. */
void zr_hub_start(struct zr_rendezvous *r);
int64_t zr_hub_now_ms(struct zr_rendezvous *r);
/* A link of ours, -1 for its rank, with the cap of those who have not proved anything. NULL: no memory. */
struct zr_link *zr_hub_add_link(struct zr_rendezvous *r);

/* hub_wait.c. Runs the loop until done or failed, or until timeout_ms are over, from now on or since from_ms.
 * Returns the failure. say writes for whom this rank waits, and has waited ms. That text is the failure when
 * the time is over, and is logged before, unless say returns false: then another rank knows better. */
typedef bool zr_hub_say_wait(const struct zr_rendezvous *r, int64_t ms, char text[ZR_WAIT_CHARS]);
int zr_hub_run_until(struct zr_rendezvous *r, bool (*done)(const struct zr_rendezvous *r),
                     zr_hub_say_wait *say);
/* Names what bounded a wait of ms that is over: " (start_timeout_ms)"; "" for one that goes on. */
const char *zr_hub_limit(const struct zr_rendezvous *r, int64_t ms);
int zr_hub_run_from(struct zr_rendezvous *r, int64_t from_ms, bool (*done)(const struct zr_rendezvous *r),
                    zr_hub_say_wait *say);
/* `late` is false, and true in ms. */
void zr_hub_start_deadline(struct zr_rendezvous *r, int64_t ms);
/* Rank 0: every other rank has come. */
bool zr_hub_all_came(const struct zr_rendezvous *r);
/* How much longer the others wait than rank 0, and how long rank 0 stays after a failure to tell those who
 * come. */
int64_t zr_hub_stay_ms(const struct zr_rendezvous *r);
/* "rank 2, rank 5" of those that missing() names; returns their number. */
int zr_hub_list_ranks(const struct zr_rendezvous *r, bool (*missing)(const struct zr_rendezvous *r, int rank),
                      char *text, size_t n_text);

/* hub_find.c. Finds the addresses of w.host, at once or later, and then listens or connects. */
void zr_hub_find(struct zr_rendezvous *r);
/* Fails, for this process can open no descriptor: error is EMFILE or ENFILE. */
void zr_hub_no_descriptor(struct zr_rendezvous *r, int error, const char *what_for);
/* Where ranks meet: "10.77.0.1:29500", "[fd77::1]:29500", "node0:29500 (10.77.0.1, fd77::1)". */
enum { ZR_PLACE_CHARS = 768 };
void zr_hub_say_place(const struct zr_rendezvous *r, char text[ZR_PLACE_CHARS]);

/* hub_interface.c. Rank 0: where it is to listen, into to, by the interface that was asked for; that this
 * cannot be is a failure. false: none was, or ranks meet on loopback. */
bool zr_hub_take_interface(struct zr_rendezvous *r);
/* Rank 0: on what it listens: " (on eth0 (10.77.0.1, fd77::1), lo (127.0.0.1, ::1))"; "": loopback alone. */
void zr_hub_say_listening(const struct zr_rendezvous *r, char *text, size_t n_text);
/* By which addresses a socket that is bound there is reached: all by which other hosts may come, those of one
 * link alone left out, and loopback last; or the one that was bound. Returns their number, 1 and more. */
int zr_hub_reachable_at(const union zr_address *bound, union zr_address at[ZR_LOOKUP_MOST]);
/* Others: from which address to go to to[to_now]: 0, *from; 1: from any; UV_EADDRNOTAVAIL: the interface that
 * was asked for has none of that family. */
int zr_hub_source(const struct zr_rendezvous *r, union zr_address *from);
/* Others: a name may stand for loopback on its own host (127.0.1.1): rank 0 is on this one then, and listens
 * on the interface that was asked for, whose addresses take the place of those in to. */
void zr_hub_leave_loopback(struct zr_rendezvous *r);
/* That interface, or this host, has an address of the family that reaches beyond loopback and a link. */
bool zr_hub_has_family(const struct zr_rendezvous *r, int family);
/* Others: from where this rank goes there: " (10.77.0.2 on eth0)"; "" where it cannot tell. */
enum { ZR_SELF_CHARS = ZR_ADDRESS_CHARS + ZR_INTERFACE_CHARS + 8 };
void zr_hub_say_self(const struct zr_rendezvous *r, char text[ZR_SELF_CHARS]);

/* hub_file.c, where w.file is set. Rank 0 listens, and then writes the file. */
void zr_hub_listen_for_file(struct zr_rendezvous *r);
void zr_hub_write_file(struct zr_rendezvous *r);
#define ZR_HUB_TWO_JOBS "jobs that meet in one folder at a time need a ZERO_JOB or a key of their own"
/* The same in a while: another rank 0 was faster, or waits there with another name. */
void zr_hub_write_file_later(struct zr_rendezvous *r);
/* The file that was there leads to no rank 0 of this job: it is replaced. */
void zr_hub_no_first(struct zr_rendezvous *r);
/* Rank 0: nobody is to come any more. */
void zr_hub_remove_file(struct zr_rendezvous *r);
/* The others: the addresses to try; false: it says none, which is noted. */
bool zr_hub_read_file(struct zr_rendezvous *r);
/* As zr_hub_say_place. */
void zr_hub_say_file(const struct zr_rendezvous *r, char text[ZR_PLACE_CHARS]);

/* hub_listen.c. Rank 0. */
void zr_hub_listen(struct zr_rendezvous *r);
/* fd, which is bound and listens, is taken over. Returns a libuv error. */
int zr_hub_hand_over(struct zr_rendezvous *r, struct zr_listener *s, int fd);
/* Stops, whether anybody came or not. */
void zr_hub_stop_listening(struct zr_rendezvous *r);

/* hub.c. To rank 0 (from the others), or to all others that are here (from rank 0). What cannot be sent is
 * returned. */
int zr_hub_send_all(struct zr_rendezvous *r, enum zr_frame_type type, int32_t about, const void *payload,
                    size_t n);
/* READY, or rank 0 has heard of all: every rank is here. */
void zr_hub_all_here(struct zr_rendezvous *r);

/* hub_meet.c. Rank 0: somebody waits at a listener. */
void zr_hub_admit(struct zr_rendezvous *r);
/* Drops incoming links that have taken too long to prove what they are. */
void zr_hub_drop_slow(struct zr_rendezvous *r);
/* Everyone is here: no more unidentified connections. */
void zr_hub_seal(struct zr_rendezvous *r);
/* Rank 0: a frame of a connection that has not proved to be a rank's. */
void zr_hub_hello(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f, const char *payload);

/* Rank 0: takes over a connection whose HELLO another context of this process has read. */
void zr_hub_take_handed(struct zr_rendezvous *r, const struct zr_handed *h);
/* Rank 0: refuses a rank that has proved what it is. */
void zr_hub_refuse(struct zr_rendezvous *r, struct zr_link *l, enum zr_frame_type type, int code,
                   const char *text);

/* hub_names.c. Rank 0, before the meeting: takes connections that other contexts of this process hand
 * over. */
int zr_hub_await_handed(struct zr_rendezvous *r);
/* Afterwards. Does nothing where it does not await any. */
void zr_hub_ignore_handed(struct zr_rendezvous *r);
/* Rank 0: l is of a rank that waits with another name. */
void zr_hub_other_name(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f,
                       const char *payload);
/* Rank 0: a rank has come with this rank's name. */
void zr_hub_has_come(struct zr_rendezvous *r, int rank);
/* Rank 0: "cfg.launch.name is "gen" on rank 0, rank 2 and "disc" on rank 1"; "" where no other name was
 * heard. */
enum { ZR_NAMES_CHARS = 512 };
void zr_hub_say_names(const struct zr_rendezvous *r, char text[ZR_NAMES_CHARS]);

/* hub_reach.c: the others. */
void zr_hub_connect(struct zr_rendezvous *r);
/* The connection to rank 0's address was made, or failed. */
void zr_hub_on_connect(struct zr_link *l, int status);
/* A frame from there, before both sides know each other. */
void zr_hub_answer(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f, const char *payload);
/* In how many ms to ask again for what may not be there yet: the longer this rank has waited, the later. */
int zr_hub_again_ms(struct zr_rendezvous *r);
/* Tries again in so many ms, or in a moment. */
void zr_hub_retry_in(struct zr_rendezvous *r, int ms);
void zr_hub_retry(struct zr_rendezvous *r);
/* Gives a link up that says nothing, and tries again. */
void zr_hub_give_up_slow(struct zr_rendezvous *r);

/* hub.c. */
/* What this process knows of a rank's last call (zr_rendezvous_describe), or "". Any thread. */
enum { ZR_HUB_CALL_CHARS = 192 };
void zr_hub_describe(const struct zr_rendezvous *r, int rank, char text[ZR_HUB_CALL_CHARS]);
/* What stands before it in messages; and before a call that is only known to have been. */
#define ZR_HUB_LAST_CALL  "; its last call was "
#define ZR_HUB_LAST_HEARD "; last heard: "
/* What stands behind a failure, before the number of the rank that found it and ")". */
#define ZR_HUB_FOUND_BY " (found by rank "

extern const struct zr_link_calls zr_hub_calls;
/* Sends to rank (0 when we are not). What cannot be sent is a failure, which is returned. */
int zr_hub_send(struct zr_rendezvous *r, int rank, enum zr_frame_type type, const void *payload, size_t n);
/* The same with a number, to a rank that is here. What cannot be sent is no failure yet, and is returned; a
 * connection that is broken is told later. */
int zr_hub_send_about(struct zr_rendezvous *r, int rank, enum zr_frame_type type, int32_t about,
                      const void *payload, size_t n);
/* An exchange begins of n bytes from each rank, or, for VERDICT, at most; 0: it is over. What is large and
 * waits is read now. */
void zr_hub_expect(struct zr_rendezvous *r, enum zr_frame_type of, size_t n);
/* Of a frame of it that comes from this rank. */
size_t zr_hub_expected(const struct zr_rendezvous *r, int rank);
/* Rank 0 fails, for what another rank sent for it is not what this one does. */
int zr_hub_differ(struct zr_rendezvous *r, int rank, uint16_t type, size_t n);
/* The link leads to a rank of ours: if this process exits, that rank is told. */
void zr_hub_keep(struct zr_rendezvous *r, struct zr_link *l);
/* Fails if a rank is already gone, so that an exchange cannot be whole. Returns the failure. */
int zr_hub_check(struct zr_rendezvous *r);
/* Tells on_lost, and whoever is linked with this rank, of ranks lost before the detach, and on_failed of a
 * failure. */
void zr_hub_report_unreported(struct zr_rendezvous *r);
/* Sends what this rank has reported, if it is the first failure known here. leaving: a ZR_ERR_PEER too. */
void zr_hub_send_report(struct zr_rendezvous *r, bool leaving);
/* Tells on_failed of the failure, once it can be told. */
void zr_hub_report_failure(struct zr_rendezvous *r);

/* hub_calls.c, all on the loop's thread. Sends what this rank wants compared. */
void zr_hub_compare(struct zr_rendezvous *r);
/* Rank 0 asks for this rank's calls. */
void zr_hub_asked(struct zr_rendezvous *r);
/* Rank 0: a rank's calls have come. code: as the frame's about. false: it makes no sense. */
bool zr_hub_on_calls(struct zr_rendezvous *r, int rank, int code, const char *payload, size_t n);
/* Frees what is kept of a comparison. */
void zr_hub_forget_comparison(struct zr_rendezvous *r);

/* hub_beat.c: begins, at the detach. */
void zr_hub_beat(struct zr_rendezvous *r);
/* A rank's has come. payload: the call that it tells; NULL: none. */
void zr_hub_on_beat(struct zr_rendezvous *r, int rank, const char *payload);
/* The other end of a rank's link is lost without its having closed. */
void zr_hub_lose(struct zr_rendezvous *r, struct zr_link *l, const char *why);
/* The same, with another that was told: of this one nobody is. */
void zr_hub_let_go(struct zr_rendezvous *r, struct zr_link *l);

/* hub_message.c: a message has come, which is kept before the detach. false: too many are. */
bool zr_hub_message(struct zr_rendezvous *r, int from, const char *data, size_t n);
/* The loop's thread has it from now on: what was kept is delivered. */
void zr_hub_deliver(struct zr_rendezvous *r);
void zr_hub_forget_messages(struct zr_rendezvous *r);

/* Says goodbye and closes every handle. */
void zr_hub_close(struct zr_rendezvous *r);
/* Nothing of it is left on the loop. */
bool zr_hub_closed(const struct zr_rendezvous *r);

#endif
