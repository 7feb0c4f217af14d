/* SPDX-License-Identifier: Apache-2.0 */
/* hub.h: the inside of a rendezvous: a star, with rank 0 in the middle and a link to each other rank.
 *
 * rendezvous.c has what callers see. find.c knows at which addresses ranks meet. admit.c is how rank 0
 * listens and lets ranks in, and reach.c how the others reach it. hub.c handles frames, failures, losses
 * and the end. compare.c compares what programs called, and beat.c finds ranks that are silent.
 *
 * The first failure is kept. Before the detach the blocking calls return it. Afterwards on_failed gets it,
 * unless it is this rank's own. */
#ifndef ZR_COMM_HUB_H
#define ZR_COMM_HUB_H

#include "comm/meet/called.h"
#include "comm/meet/link.h"
#include "comm/meet/meeting_file.h"
#include "comm/meet/net_address.h"
#include "comm/meet/open_names.h"
#include "comm/meet/rendezvous.h"

/* That a rank leaves is a failure at once only while all ranks wait for each other. Between exchanges it may
 * have nothing left to do here. */
enum zr_phase { ZR_PHASE_MEET, ZR_PHASE_IDLE, ZR_PHASE_EXCHANGE };

/* Why a rank has not reached rank 0 yet. A later entry says more. */
enum zr_trouble {
    ZR_TROUBLE_NONE,
    ZR_TROUBLE_NOBODY,  /* nobody was reached */
    ZR_TROUBLE_SILENT,  /* somebody took the connection and has not answered yet */
    ZR_TROUBLE_ENDED,   /* somebody closed the connection */
    ZR_TROUBLE_STRANGE, /* somebody said something else */
    ZR_TROUBLE_REFUSED, /* somebody knows the protocol, but not our key or job */
    ZR_TROUBLE_NAME,    /* it was rank 0, which waits with another name */
    ZR_TROUBLE_WAIT     /* it was rank 0, which waits for other ranks */
};

enum zr_member_state { ZR_MEMBER_EMPTY, ZR_MEMBER_HERE, ZR_MEMBER_LEFT, ZR_MEMBER_LOST };

/* One rank, as this one knows it. */
struct zr_member {
    enum zr_member_state state;
    /* Rank 0 has one to each other rank, and the others have one to rank 0. */
    struct zr_link *link;
    /* Its part of the exchange under way: GIVE or VERDICT; 0: nothing has come yet. */
    uint16_t gave;
    char *given;
    size_t n_given;
    int32_t given_about;
    /* It was lost before the detach, and on_lost is still to be called. */
    bool unreported;
    /* How it was lost. NULL: it was not, or there was no memory. */
    char *how;
    /* Rank 0: the name with which it waits, if that is not this rank's. NULL: none, or no memory. */
    char *waits_as;
    /* The call that it told last (beat.c). NULL: none, or no memory. */
    char *last_heard;
    /* Rank 0, in a comparison: the calls of its program. NULL: they are not here yet. */
    struct zr_called_ring *calls;
};

/* A failure that any thread hands to the loop's. code 0: none. */
struct zr_reported {
    int code;
    char text[ZR_FRAME_TEXT_BYTES];
};

/* Rank 0 compares what the programs of all ranks called. */
struct zr_comparison {
    bool begun;
    /* who asked for it, and the failure that it had met */
    int rank, code;
    char text[ZR_FRAME_TEXT_BYTES];
};

/* An address at which rank 0 listens. */
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
    /* what bounds the waits, for messages, as " (start_timeout_ms)"; "": it has no name */
    const char *limit;
    enum zr_phase phase;
    /* (world), by rank */
    struct zr_member *members;
    /* all that are not closed yet, unidentified connections included */
    struct zr_link *links;
    /* listeners, timers and asynchronous handles that are not closed yet */
    int n_handles;

    /* --- how ranks meet --- */

    /* Every rank is here. */
    bool ready;
    /* Rank 0 knows this rank, and this rank knows rank 0. */
    bool accepted;
    int64_t started_ms;
    /* Rank 0: incoming connections that have not proved to be a rank's. */
    int n_unidentified;
    /* Rank 0: the ranks that have come, itself included. */
    int n_here;
    /* Rank 0: one of each family; how many are not closed yet; since when it tries to listen, 0: not yet. */
    struct zr_listener listener[2];
    int n_listening;
    int64_t listen_ms;
    /* Rank 0: until the next one is let in, while there are too many unidentified connections. */
    uv_timer_t admit;
    /* Rank 0: another context of this process has handed a connection over. */
    uv_async_t handed;
    bool awaits_handed;
    /* Rank 0: where it listens. Others: where they try to reach it, now at to[to_now]. The addresses of a
     * name were found at found_ms. */
    union zr_address to[ZR_LOOKUP_MOST];
    int n_to, to_now;
    int64_t found_ms;
    /* NULL: no look-up is under way. */
    struct zr_lookup *lookup;
    /* What rank 0 has written, or what was read last; n 0: nothing. And rank 0 has not removed it yet. */
    struct zr_meeting_file file;
    bool has_written;
    /* Until the next try. */
    uv_timer_t retry;
    /* How long the other end of a link may take to prove what it is. */
    uv_timer_t patience;
    /* Others: since when whoever listens at to[refused_at] refuses this rank; 0: nobody does. */
    int64_t refused_ms;
    int refused_at;
    /* For the message of a timeout: what went wrong last, or an earlier trouble that says more. An attempt
     * that has just begun knows less than one that was answered. */
    enum zr_trouble worst;
    char trouble[640], trouble_before[640];

    /* --- how the blocking calls wait --- */

    /* until `late`: the deadline has passed */
    uv_timer_t deadline;
    bool late;
    /* until `looks`: it is time to look what may be said of a long wait; when the wait began, and the log was
     * told last */
    uv_timer_t look;
    bool looks;
    int64_t wait_ms, reminded_ms;
    /* Bytes of each rank in the exchange under way, for VERDICT the most; 0: none is under way. When it
     * began, and what the others send for it: GIVE or VERDICT. */
    size_t n_expected;
    int64_t exchange_ms;
    enum zr_frame_type exchange_of;
    /* Others: its result. */
    char *all;
    size_t n_all;
    int32_t all_about;

    /* --- failures, and what callers hear --- */

    /* The first failure; 0: none. */
    int code;
    char text[1024];
    bool detached, closing;
    void (*on_lost)(void *arg, int rank, const char *why);
    void (*on_failed)(void *arg, int code, const char *text);
    void (*on_message)(void *arg, int from, const void *data, size_t n);
    /* of these three */
    void *arg;
    void (*describe)(void *arg, int rank, char *text, size_t n_text);
    void *describe_arg;
    void (*see)(void *arg, int rank, struct zr_rank_seen *out);
    void *see_arg;
    /* Messages that came before the detach. Once these are delivered, others are as they come. */
    struct zr_message *messages;
    bool may_deliver;
    /* Says which links need beats; NULL: all. The caller's. */
    const struct zr_topology *hosts;
    uv_timer_t beat;
    /* when it is to come next */
    int64_t beat_due_ms;

    /* --- from any thread to the loop's --- */

    uv_async_t report;
    uv_mutex_t report_lock;
    /* With the lock: detached and not closing, so report is open. */
    bool may_report;
    /* With the lock: the first failure that this rank reported, and the first that it wants explained by a
     * comparison. */
    struct zr_reported reported, doubted;
    /* The loop's thread: the first became the first failure; the second has gone to rank 0. */
    bool has_reported, has_doubted;
    /* The last word if the process exits before the report was sent. */
    struct zr_last_failure last_failure;

    /* --- what programs called --- */

    /* This rank's calls that every rank must make. The flight recorder cannot stand in for them: it has no
     * arguments, few calls, and those that were refused. */
    struct zr_called_ring calls;
    struct zr_comparison comparison;
    /* How long ranks may take to send their calls. */
    uv_timer_t answers;
};

/* ---- hub.c: sending ---- */

int64_t zr_hub_now_ms(struct zr_rendezvous *r);
extern const struct zr_link_calls zr_hub_calls;
/* Makes a link, for which nobody has proved anything yet: its rank is -1, and it may carry little. NULL: no
 * memory. */
struct zr_link *zr_hub_add_link(struct zr_rendezvous *r);
/* The link leads to a rank of ours. If this process exits, it says a last word there. */
void zr_hub_keep(struct zr_rendezvous *r, struct zr_link *l);
/* Sends to a rank; does nothing if that is not here. Returns an error if it cannot be sent, which is no
 * failure of the rendezvous yet. on_end reports a broken connection later. */
int zr_hub_send(struct zr_rendezvous *r, int rank, enum zr_frame_type type, int32_t about,
                const void *payload, size_t n);
/* Rank 0: the same to all others. On other ranks it does nothing. */
int zr_hub_send_all(struct zr_rendezvous *r, enum zr_frame_type type, int32_t about, const void *payload,
                    size_t n);

/* ---- hub.c: failures and losses ---- */

/* Keeps the failure if it is the first. Rank 0 then tells the others. Returns the code that is kept. */
int zr_hub_fail(struct zr_rendezvous *r, int code, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* The same for a failure that this rank has found itself. It also tells rank 0. Before the detach. */
int zr_hub_fail_all(struct zr_rendezvous *r, int code, const char *text);
/* Notes what went wrong while waiting. */
void zr_hub_note(struct zr_rendezvous *r, enum zr_trouble trouble, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));
/* Hands a failure to the loop's thread, if none was handed to it as *report before. Returns whether that
 * thread still listens. Any thread. */
bool zr_hub_put_report(struct zr_rendezvous *r, struct zr_reported *report, int code, const char *text);
/* Returns what was handed over as *report. */
struct zr_reported zr_hub_take_report(struct zr_rendezvous *r, const struct zr_reported *report);
/* Sends what this rank has reported, if it is the first failure known here. leaving: a ZR_ERR_PEER too. */
void zr_hub_send_report(struct zr_rendezvous *r, bool leaving);
/* Tells on_failed of the failure, once it can be told. */
void zr_hub_report_failure(struct zr_rendezvous *r);
/* Tells on_lost, and rank 0 the others, of ranks lost before the detach, and on_failed of a failure. */
void zr_hub_report_unreported(struct zr_rendezvous *r);
/* Fails if a rank is already gone, so that an exchange cannot be whole. Returns the failure. */
int zr_hub_check(struct zr_rendezvous *r);
/* The other end of a link is lost, though it has not closed the link. */
void zr_hub_lose(struct zr_rendezvous *r, struct zr_link *l, const char *why);
/* The same for a link that is lost together with another one. Nobody hears of it. */
void zr_hub_let_go(struct zr_rendezvous *r, struct zr_link *l);
/* What this process knows of a rank's last call (zr_rendezvous_describe), or "". Any thread. */
enum { ZR_HUB_CALL_CHARS = 192 };
void zr_hub_describe(const struct zr_rendezvous *r, int rank, char text[ZR_HUB_CALL_CHARS]);
/* In messages: stands before a rank's last call; and before one that may not be its last. */
#define ZR_HUB_LAST_CALL  "; its last call was "
#define ZR_HUB_LAST_HEARD "; last heard: "
/* In messages: stands behind a failure, before the number of the rank that found it and ")". */
#define ZR_HUB_FOUND_BY " (found by rank "

/* ---- hub.c: exchanges, messages, the end ---- */

/* Every rank is here. */
void zr_hub_all_here(struct zr_rendezvous *r);
/* An exchange begins of n bytes from each rank, or, for VERDICT, at most n; 0: it is over. A large frame that
 * waits is read now. */
void zr_hub_expect(struct zr_rendezvous *r, enum zr_frame_type of, size_t n);
/* Bytes of a frame of the exchange that comes from this rank. */
size_t zr_hub_expected(const struct zr_rendezvous *r, int rank);
/* Rank 0 fails because another rank sent something else for the exchange than it does. */
int zr_hub_differ(struct zr_rendezvous *r, int rank, uint16_t type, size_t n);
/* The loop's thread delivers messages from now on; those that were kept come first. */
void zr_hub_deliver(struct zr_rendezvous *r);
void zr_hub_forget_messages(struct zr_rendezvous *r);
/* Says goodbye and closes every handle. */
void zr_hub_close(struct zr_rendezvous *r);
/* Nothing of it is left on the loop. */
bool zr_hub_closed(const struct zr_rendezvous *r);
void zr_hub_handle_closed(uv_handle_t *h);

/* ---- find.c ---- */

/* Finds where ranks meet, at once or later, and then listens (rank 0) or connects (the others). */
void zr_hub_find(struct zr_rendezvous *r);
/* Fails because this process can open no descriptor: error is EMFILE or ENFILE. */
void zr_hub_no_descriptor(struct zr_rendezvous *r, int error, const char *what_for);
/* In how many ms to ask again for what may not be there yet: the longer this rank has waited, the later. */
int zr_hub_again_ms(struct zr_rendezvous *r);
/* Writes where ranks meet: "10.77.0.1:29500", "[fd77::1]:29500", "node0:29500 (10.77.0.1, fd77::1)", or the
 * file. */
enum { ZR_PLACE_CHARS = 768 };
void zr_hub_say_place(const struct zr_rendezvous *r, char text[ZR_PLACE_CHARS]);
/* Others: from which address to go to to[to_now]. Returns 0 and *from; 1: from any; UV_EADDRNOTAVAIL: the
 * interface that was asked for has none of that family. */
int zr_hub_source(const struct zr_rendezvous *r, union zr_address *from);
/* Others: writes from where this rank goes there: " (10.77.0.2 on eth0)"; "" if it cannot tell. */
enum { ZR_SELF_CHARS = ZR_ADDRESS_CHARS + ZR_INTERFACE_CHARS + 8 };
void zr_hub_say_self(const struct zr_rendezvous *r, char text[ZR_SELF_CHARS]);
/* The interface that was asked for, or this host, has an address of the family that reaches beyond loopback
 * and a single link. */
bool zr_hub_has_family(const struct zr_rendezvous *r, int family);

/* Rank 0 listens, and writes the file; or later, because another rank 0 was faster, or waits there with
 * another name. */
void zr_hub_write_file(struct zr_rendezvous *r);
void zr_hub_write_file_later(struct zr_rendezvous *r);
/* Rank 0: the file that was there leads to no rank 0 of this job, and is replaced. */
void zr_hub_no_first(struct zr_rendezvous *r);
/* Rank 0: nobody is to come any more. */
void zr_hub_remove_file(struct zr_rendezvous *r);
#define ZR_HUB_TWO_JOBS "jobs that meet in one folder at a time need a ZERO_JOB or a key of their own"

/* ---- admit.c: rank 0 ---- */

/* Begins to meet, on every rank. What goes wrong at once is kept as a failure. */
void zr_hub_start(struct zr_rendezvous *r);
void zr_hub_listen(struct zr_rendezvous *r);
/* Stops, whether anybody came or not. */
void zr_hub_stop_listening(struct zr_rendezvous *r);
/* Somebody waits at a listener. */
void zr_hub_admit(struct zr_rendezvous *r);
/* A frame of a connection that has not proved to be a rank's. */
void zr_hub_hello(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f, const char *payload);
/* Every other rank has come. */
bool zr_hub_all_came(const struct zr_rendezvous *r);
/* Everyone is here: no more unidentified connections. */
void zr_hub_seal(struct zr_rendezvous *r);
/* Before the meeting: takes connections that other contexts of this process hand over. */
int zr_hub_await_handed(struct zr_rendezvous *r);
/* After the meeting. Does nothing if none are awaited. */
void zr_hub_ignore_handed(struct zr_rendezvous *r);
/* Writes "cfg.launch.name is "gen" on rank 0, rank 2 and "disc" on rank 1"; "" if no other name was heard. */
enum { ZR_NAMES_CHARS = 512 };
void zr_hub_say_names(const struct zr_rendezvous *r, char text[ZR_NAMES_CHARS]);

/* ---- reach.c: the others ---- */

void zr_hub_connect(struct zr_rendezvous *r);
/* The connection to rank 0's address was made, or failed. */
void zr_hub_on_connect(struct zr_link *l, int status);
/* A frame from there, before both sides know each other. */
void zr_hub_answer(struct zr_rendezvous *r, struct zr_link *l, const struct zr_frame *f, const char *payload);
/* Tries again in a moment. */
void zr_hub_retry(struct zr_rendezvous *r);
/* Gives up a link that says nothing, and tries again. */
void zr_hub_give_up_slow(struct zr_rendezvous *r);

/* ---- compare.c, all on the loop's thread ---- */

/* Sends what this rank wants compared. */
void zr_hub_compare(struct zr_rendezvous *r);
/* Rank 0 asks for this rank's calls. */
void zr_hub_asked(struct zr_rendezvous *r);
/* Rank 0: a rank's calls have come. code: the frame's about. Returns false if it makes no sense. */
bool zr_hub_on_calls(struct zr_rendezvous *r, int rank, int code, const char *payload, size_t n);
void zr_hub_forget_comparison(struct zr_rendezvous *r);

/* ---- beat.c ---- */

/* Begins to send and await beats, at the detach. */
void zr_hub_beat(struct zr_rendezvous *r);
/* A rank's beat has come. payload: the call that it tells; NULL: none. */
void zr_hub_on_beat(struct zr_rendezvous *r, int rank, const char *payload);

#endif
