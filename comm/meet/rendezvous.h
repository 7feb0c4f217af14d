/* SPDX-License-Identifier: Apache-2.0 */
/* rendezvous.h: how ranks find each other, exchange small blobs before any communicator exists, and later
 * learn of a rank's death or failure.
 *
 * Rank 0 listens on TCP, the others connect, and every message goes through rank 0. The sockets stay open
 * while the context lives, and show failures. A socket that closes without a goodbye is a lost rank, and
 * rank 0 tells the others. A rank that cannot go on says so before it leaves. Everything happens on one libuv
 * loop, which the caller gives. Before zr_rendezvous_detach the blocking calls run that loop on the calling
 * thread. Afterwards whoever runs the loop (the context's own thread) gets on_lost and on_failed there. */
#ifndef ZR_COMM_RENDEZVOUS_H
#define ZR_COMM_RENDEZVOUS_H

#include "comm/meet/called.h"
#include "comm/meet/frame.h"
#include "comm/meet/net_address.h"
#include "kernels/error.h"

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

/* The secret that the ranks of one job share, and by which they know each other when they meet (handshake.h).
 * It is in the environment, or in a file that only this user may read; never on a command line, which every
 * user of a host can see. It is not printed and does not travel. */
enum { ZR_JOB_KEY_MIN_BYTES = 16, ZR_JOB_KEY_MAX_BYTES = 64 };

struct zr_job_key {
    /* 0: this job has no key */
    int32_t n_bytes;
    uint8_t bytes[ZR_JOB_KEY_MAX_BYTES];
};

/* From ZERO_JOB_KEY, 32 to 128 hex digits, or the file that ZERO_JOB_KEY_FILE names: the same digits, mode
 * 0600 or 0400, owned by this user. Neither set: 0, and n_bytes is 0. What is wrong is an error that names
 * the variable and never its value. */
int zr_job_key_find(struct zr_job_key *key);

/* 128 random bits, for whoever starts the ranks or has another way to bring it to all of them. */
int zr_job_key_make(struct zr_job_key *key);

/* The longest name of a context. */
enum { ZR_NAME_CHARS = 63 };
struct zr_open_name;
struct zr_log;

/* How ranks wait for each other at zero_wrap, which may be long. Messages then name start_timeout_ms. */
struct zr_waiting {
    /* every so many ms a line says for whom this rank waits */
    struct zr_log *log;
    int64_t remind_ms;
    /* On the thread that waits: whether a rank's process has ended and cannot come, and how. NULL: nobody
     * knows. */
    bool (*has_ended)(void *arg, int rank, char *how, size_t n_how);
    void *arg;
};

/* Warns the log of a wait that goes on. text: for whom, and since when; limit: what bounds the wait, as
 * " (start_timeout_ms)". */
enum { ZR_WAIT_CHARS = 2560 };
void zr_waiting_warn(const struct zr_waiting *w, const char *text, int64_t ms, const char *limit);

/* How a launcher started a rank, where its job, number and world do not say it. Ranks that were started
 * for different jobs, or different parts of one, refuse each other. All bytes of it travel. */
struct zr_start {
    /* The launcher's own name of its job, where ZERO_JOB replaces it: "Open MPI's job 1234.1". "": it is not
     * known. */
    char job[120];
    /* The rank and world of variables that may be left over, where the configuration gives a smaller world.
     * world 0: there are none. */
    int32_t rank, world;
};

/* Who we are. */
struct zr_world {
    int rank, world;
    /* as a launcher says; has_local_rank false: none does, and it is the rank */
    int local_rank;
    bool has_local_rank;
    /* of rank 0; "" when world == 1, or where there is a file or a list */
    char host[256];

    int port;
    /* Where rank 0 itself has said that it can be reached, with that port: it listens at all of its
     * addresses, or of its interface, and the others try these one after the other. 0: host says where
     * it is. */
    int n_at;
    union zr_address at[ZR_LOOKUP_MOST];
    /* where rank 0 writes at which address it waits, and the others read it: a file, or a folder for it; "":
     * at host and port */
    char file[1024];
    /* where it was found, for the log: "config", "zero-run", "ZERO_RANK", "torchrun", "Open MPI", "MPICH",
     * "Slurm", "RANK", "alone", "nccl_comm", "mpi_comm" */
    char source[64];
    /* what says how large the world is, for messages: "SLURM_NTASKS is 4"; "": nothing to say */
    char size_from[96];
    /* what the log should warn of: launchers that disagree, though each may be right; "": nothing */
    char note[192];
    /* the configuration gave rank and world */
    bool is_given;
    /* host was taken for this one, for nothing said on how many the ranks are */
    bool is_host_assumed;
    /* port follows from ZERO_JOB, and ranks that have another one or none look elsewhere */
    bool is_port_of_own_job;
    /* Nothing says where rank 0 is, and ranks are to tell each other over MPI (zr_world_find_by_mpi): host
     * and file are "", port is 0 and n_at too until then. */
    bool by_mpi;
    /* where it was found where rank 0 is, for the log: "ZERO_RENDEZVOUS", "SLURM_STEP_NODELIST" */
    char way[40];
    /* The network interface of this host, by its name or one of its addresses, on which rank 0 listens, and
     * from which the others connect, beyond loopback; "": any. Ranks may have different ones. */
    char interface[64];
    /* name that keeps two jobs apart; ranks whose names differ refuse each other */
    char job[128];
    struct zr_start start;
    /* How many forks lie between the process that the launcher started and this one, which has its variables
     * unchanged. Parents may be ranks of the same numbers. */
    int forks;
    /* cfg.launch.name: ranks whose contexts have other names do not meet */
    char name[ZR_NAME_CHARS + 1];
    /* this context among those of the process (open_names.h); NULL: it knows no others. Used until ranks have
     * met */
    struct zr_open_name *open_name;
    /* NULL: in silence. Until the rendezvous is detached it stays the caller's */
    const struct zr_waiting *waiting;
    /* of the job, where its launcher counts restarts; ranks of different ones do not meet */
    int attempt;
    /* whoever has it is a rank; none: ranks meet on loopback only */
    struct zr_job_key key;
    /* Rank 0 goes on listening once all have met, and keeps its file: it tells a rank of the job that comes
     * later, or another rank 0, why it is refused. */
    bool tells_late;
};

/* Fills *w: want_rank and want_world (want_world > 0), else what a launcher's variables say (launcher.h),
 * else world 1; the key by zr_job_key_find where world > 1. want_url ("tcp://host:port", "file:///path" or
 * NULL) replaces the address found.
 * Errors: ARG  a text is wrong, a rank is outside [0, world), a variable is missing, or two launchers
 *              contradict each other; the message names the variable, its value and what is allowed */
int zr_world_find(int want_rank, int want_world, const char *want_url, struct zr_world *w);

/* The same of ranks that can tell each other over MPI where they meet: where Open MPI's or MPICH's launcher
 * has started them and no address is given, w->by_mpi, and neither loopback nor a list of hosts is looked
 * for. The variables of such a launcher must agree with what is found; zero-run is refused. */
int zr_world_find_by_mpi(int want_rank, int want_world, const char *want_url, struct zr_world *w);

/* A communicator that the program lends, and this rank in it. */
struct zr_lent_ranks {
    /* "nccl_comm" */
    const char *name;
    int rank, world;
    /* this rank in MPI_COMM_WORLD; job_world 0: not known */
    int job_rank, job_world;
};

/* The same where the program lends a communicator, whose rank and world count. want_rank and want_world
 * (want_world > 0) must be the same. A launcher's variables must say the same, or what MPI_COMM_WORLD says.
 * The address is want_url's or ZERO_RENDEZVOUS; else port is 0, for the ranks to tell each other over the
 * communicator, and host what MASTER_ADDR says, or "". */
int zr_world_lent(const struct zr_lent_ranks *c, int want_rank, int want_world, const char *want_url,
                  struct zr_world *w);

/* Sets w->interface: what ZERO_INTERFACE says, else want; NULL or "": any. ZR_ERR_ARG where world > 1 and
 * this host has no such, naming those it has, or the number of rank 0 is on another of its own; w is then as
 * it was. */
int zr_world_interface(const char *want, struct zr_world *w);
/* The ranks of w meet over loopback, where there is no choice. */
bool zr_world_is_on_loopback(const struct zr_world *w);

struct zr_rendezvous;
struct zr_topology;

/* Collective, blocking up to timeout_ms. Fails on all ranks that got as far, naming what is missing ("1 of 4
 * ranks did not come: rank 3"). world 1 makes no socket. */
int zr_rendezvous_open(uv_loop_t *loop, const struct zr_world *w, int64_t timeout_ms,
                       struct zr_rendezvous **out);

/* describe(arg, rank, text, n_text), on any thread, writes what this process knows of a rank's last call,
 * this one's too, as "zero_step in step 12", or "". It stands behind the message of a rank's loss ("; its
 * last call was "), where the rank knows it that sees the loss, or one that is told of it; else the call that
 * the lost rank has told last, over a link between hosts ("; last heard: "), if it has told any. Before the
 * detach, and before another thread uses r. */
void zr_rendezvous_describe(struct zr_rendezvous *r,
                            void (*describe)(void *arg, int rank, char *text, size_t n_text), void *arg);
/* "; its last call was zero_step in step 12", or "": as describe has it. Any thread, until r is freed. */
enum { ZR_LAST_CALL_CHARS = 224 };
void zr_rendezvous_last_call(const struct zr_rendezvous *r, int rank, char text[ZR_LAST_CALL_CHARS]);

/* A look at the process of a rank on this host. */
struct zr_rank_seen {
    /* by SIGSTOP or a debugger: it does nothing until it is continued */
    bool is_stopped;
    /* the failure that it recorded, and when (zr_now_ns); 0: none */
    int code;
    int64_t failed_ns;
    char text[ZR_FRAME_TEXT_BYTES];
};

/* see(arg, rank, out), on any thread, fills *out, with 0 for a rank of another host. A rank that is lost
 * after it has recorded a failure is no cause: all ranks then hear of that failure. Before the detach, and
 * before another thread uses r. */
void zr_rendezvous_watch(struct zr_rendezvous *r, void (*see)(void *arg, int rank, struct zr_rank_seen *out),
                         void *arg);
/* The first rank of this host whose process is stopped; -1: none is. Any thread, until r is freed. */
int zr_rendezvous_stopped(const struct zr_rendezvous *r);
/* "; rank 3 is stopped, by SIGSTOP or a debugger", with its last call, or "". */
enum { ZR_STOPPED_CHARS = 64 + ZR_LAST_CALL_CHARS };
void zr_rendezvous_describe_stopped(const struct zr_rendezvous *r, int rank, char text[ZR_STOPPED_CHARS]);
/* The failure that a rank of this host recorded (rank -1: the earliest that any other rank did), with the
 * rank that found it in its text; 0: none. Any thread, until r is freed. */
int zr_rendezvous_recorded(const struct zr_rendezvous *r, int rank, char text[ZR_FRAME_TEXT_BYTES]);

/* Explains a failure by this host's flight recorders, so that no other rank has to be asked. If another rank
 * recorded a failure before, returns its code, with its message as *why. Else, if code is ZR_ERR_TIMEOUT and
 * a rank is stopped, returns code, with that rank behind text. Else 0. Any thread, until r is freed. */
int zr_rendezvous_explain(const struct zr_rendezvous *r, int code, const char *text,
                          char why[ZR_FRAME_TEXT_BYTES]);

/* Which rank is on which host. After the detach both ends of a link send a beat every timeout_ms / 16 (10 to
 * 1000 ms), and an end that has heard nothing for three fourths of timeout_ms is lost, with all of its host
 * that are silent too, which on_lost names; a link inside a host needs no beats. t stays the caller's and is
 * there until r is freed. Before the detach; NULL, or not called: every rank may be on a host of its own. */
void zr_rendezvous_hosts(struct zr_rendezvous *r, const struct zr_topology *t);

/* From the detach on an end of a link may be silent for ms, whatever timeout_ms was when ranks met. Equal on
 * all ranks. Before the detach. */
void zr_rendezvous_silence(struct zr_rendezvous *r, int64_t ms);

/* Another limit than zr_rendezvous_open was given, which is for the start: of what blocks from now on, and of
 * the silence between hosts after the detach. More than 0. Local; before the detach. */
void zr_rendezvous_limit(struct zr_rendezvous *r, int64_t timeout_ms);

/* Collective, blocking: every rank gives n bytes (equal on all ranks, checked) and gets world*n, in rank
 * order. Only before zr_rendezvous_detach. A rank lost meanwhile is an error on all. */
int zr_rendezvous_exchange(struct zr_rendezvous *r, const void *mine, size_t n, void *all);

/* Collective, blocking, as an exchange of how it went: err is 0 or a failure of this rank's, with this
 * thread's message. 0 on all ranks, or on all the code and message of the rank that speaks (comm/verdict.h),
 * "rank 2: " before it on the others. Where ranks cannot reach each other: err, if it is not 0, with its
 * message; else that failure. */
int zr_rendezvous_agree(struct zr_rendezvous *r, int err);

/* This rank cannot go on: with code and this thread's message every other rank's running or next exchange
 * fails. For what happens where the others go straight to an exchange. Not collective, does not block; only
 * before zr_rendezvous_detach. Returns code, with the message as it was. */
int zr_rendezvous_fail(struct zr_rendezvous *r, int code);

/* What a rank that waits for something else hears of the others meanwhile: 0, or the failure of any, as the
 * next exchange would meet it. Not collective, does not wait; on the thread that may run the loop. After the
 * detach others are told, and it does nothing: 0. */
int zr_rendezvous_look(struct zr_rendezvous *r);

/* From now on the loop belongs to another thread. on_lost(arg, rank, why) is called on the loop's thread,
 * once per lost rank; on_failed(arg, code, text) once, with the first failure that a rank reports before this
 * one does. Both may call zr_rendezvous_close, and may be NULL. That thread should have SIGPIPE blocked, as
 * libuv may finish a write at a time of its own; the blocking calls see to that themselves. */
void zr_rendezvous_detach(struct zr_rendezvous *r, void (*on_lost)(void *arg, int rank, const char *why),
                          void (*on_failed)(void *arg, int code, const char *text), void *arg);

/* This rank has failed: the others' on_failed gets code (negative) and text, which is cut where it is longer
 * than a frame may carry. Only the first failure of a job travels: after another rank's was heard, or a
 * second time, this does nothing. A ZR_ERR_PEER, which is most often what another rank's failure looks like
 * from here, is kept until zr_rendezvous_close. Any thread, does not block; before the detach and after
 * zr_rendezvous_close it does nothing. */
void zr_rendezvous_report(struct zr_rendezvous *r, int code, const char *text);

/* n bytes (1 to 64 KiB) to another rank, of which one is rank 0, or from rank 0 to all others (-1): they
 * arrive once and in order, or their receiver is lost. ZR_ERR_PEER: it is, or has left; ZR_ERR_NOMEM. After
 * the detach, on the loop's thread; does not block. */
int zr_rendezvous_send(struct zr_rendezvous *r, int to, const void *data, size_t n);
/* on_message(arg of the detach, from, data, n), on the loop's thread, gets them; data is valid during the
 * call, which may close the rendezvous. Before the detach; NULL: they are dropped. */
void zr_rendezvous_on_message(struct zr_rendezvous *r,
                              void (*on_message)(void *arg, int from, const void *data, size_t n));

/* This rank's program makes a call that every rank must make: kept for a comparison. One thread at a time,
 * at any time. */
void zr_rendezvous_called(struct zr_rendezvous *r, const struct zr_called *c);
/* This rank has met what calls of the programs that differ may explain. Rank 0 gets the latest calls of all
 * ranks, and then every rank's on_failed, this one's too, gets one failure: the first calls that were not the
 * same (ZR_ERR_MISMATCH); where there are none, code and text, for ZR_ERR_TIMEOUT with the rank whose program
 * is behind, and the ranks that gave no answer within timeout_ms / 2, at most 5 s; or another failure, if one
 * is known by then. Only what a rank asks first is asked. Where rank 0 does not answer nothing comes, so the
 * caller bounds its wait. Any thread, does not block. false: nothing will come: before the detach, after
 * zr_rendezvous_close, and in a world of 1. */
bool zr_rendezvous_compare(struct zr_rendezvous *r, int code, const char *text);

/* On the loop's thread: sends what was reported, says goodbye and starts closing the handles; the loop must
 * run until they are closed, then zr_rendezvous_free. A failed or single rank may do this at any time. */
void zr_rendezvous_close(struct zr_rendezvous *r);
/* Where closing is not finished, or not even begun, it runs the loop for it (at most some 300 ms): then only
 * on the thread that may run the loop. NULL is allowed. */
void zr_rendezvous_free(struct zr_rendezvous *r);

int zr_rendezvous_rank(const struct zr_rendezvous *r);
int zr_rendezvous_world(const struct zr_rendezvous *r);

#endif
