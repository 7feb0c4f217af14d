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

/* Reads the key from ZERO_JOB_KEY (32 to 128 hex digits), or from the file that ZERO_JOB_KEY_FILE names: the
 * same digits, mode 0600 or 0400, owned by this user. If neither is set, n_bytes is 0. An error names the
 * variable and never its value. */
int zr_job_key_find(struct zr_job_key *key);

/* Makes a key of 128 random bits, for callers that can bring it to all ranks. */
int zr_job_key_make(struct zr_job_key *key);

/* The longest name of a context. */
enum { ZR_NAME_CHARS = 63 };
struct zr_open_name;
struct zr_log;

/* How ranks wait for each other at zero_wrap, which may be long. Messages then name start_timeout_ms. */
struct zr_waiting {
    /* Every remind_ms a line says for whom this rank waits. */
    struct zr_log *log;
    int64_t remind_ms;
    /* Says, on the thread that waits, whether a rank's process has ended and cannot come, and how it ended.
     * NULL: nobody knows. */
    bool (*has_ended)(void *arg, int rank, char *how, size_t n_how);
    void *arg;
};

/* Warns the log of a wait that goes on. text: for whom, and since when; limit: what bounds the wait, as
 * " (start_timeout_ms)". */
enum { ZR_WAIT_CHARS = 2560 };
void zr_waiting_warn(const struct zr_waiting *w, const char *text, int64_t ms, const char *limit);

/* How a launcher started a rank, if its job, rank and world do not say it. Ranks that were started for
 * different jobs, or different parts of one, refuse each other. All bytes of it travel. */
struct zr_start {
    /* The launcher's name for its job, if ZERO_JOB replaces it: "Open MPI's job 1234.1". "": not known. */
    char job[120];
    /* Rank and world of variables that may be left over, if the configuration gives a smaller world. world 0:
     * there are none. */
    int32_t rank, world;
};

/* Who this rank is, and where it meets the others. */
struct zr_world {
    /* --- its place --- */

    int rank, world;
    /* As a launcher says. has_local_rank false: no launcher says it, and it is the rank. */
    int local_rank;
    bool has_local_rank;
    /* Where rank and world were found, for the log: "config", "zero-run", "ZERO_RANK", "torchrun",
     * "Open MPI", "MPICH", "Slurm", "RANK", "alone", "nccl_comm", "mpi_comm". */
    char source[64];
    /* What says how large the world is, for messages: "SLURM_NTASKS is 4". "": nothing to say. */
    char size_from[96];
    /* What the log should warn of: launchers that disagree, though each may be right. "": nothing. */
    char note[192];
    /* The configuration gave rank and world. */
    bool is_given;

    /* --- where rank 0 is: host and port, a list, or a file --- */

    /* Rank 0's host. "" if world is 1, or with a list or a file. */
    char host[256];
    int port;
    /* The addresses by which rank 0 itself has said that it can be reached, with that port. It listens on all
     * of its addresses, or on its interface, and the others try these one after the other. 0: none. */
    int n_at;
    union zr_address at[ZR_LOOKUP_MOST];
    /* A file, or a folder for it, in which rank 0 says at which address it waits. "": none. */
    char file[1024];
    /* This host was taken as rank 0's, because nothing says on how many hosts the ranks are. */
    bool is_host_assumed;
    /* The port follows from ZERO_JOB. Ranks with another ZERO_JOB, or none, look elsewhere. */
    bool is_port_of_own_job;
    /* Nothing says where rank 0 is, and ranks are to tell each other over MPI (zr_world_find_by_mpi). Until
     * then host and file are "", and port and n_at are 0. */
    bool by_mpi;
    /* Where the address was found, for the log: "ZERO_RENDEZVOUS", "SLURM_STEP_NODELIST". */
    char way[40];
    /* The network interface of this host, by its name or one of its addresses, on which rank 0 listens, and
     * from which the others connect beyond loopback. "": any. Ranks may have different ones. */
    char interface[64];

    /* --- who may meet it --- */

    /* A name that keeps two jobs apart: ranks whose names differ refuse each other. */
    char job[128];
    struct zr_start start;
    /* Restarts of the job, if its launcher counts them. Ranks of different attempts do not meet. */
    int attempt;
    /* Whoever has it is a rank. Without a key, ranks meet on loopback only. */
    struct zr_job_key key;
    /* Forks between the process that the launcher started and this one, which has its variables unchanged.
     * Parents may be ranks of the same numbers. */
    int forks;
    /* cfg.launch.name: ranks whose contexts have other names do not meet. */
    char name[ZR_NAME_CHARS + 1];
    /* This context among those of the process (open_names.h). NULL: it knows no others. Used until ranks have
     * met. */
    struct zr_open_name *open_name;

    /* --- how it waits --- */

    /* NULL: in silence. It stays the caller's until the rendezvous is detached. */
    const struct zr_waiting *waiting;
    /* Rank 0 goes on listening once all have met, and keeps its file. It tells a rank of the job that comes
     * later, or another rank 0, why it is refused. */
    bool tells_late;
};

/* Fills *w from want_rank and want_world if want_world is more than 0, otherwise from a launcher's variables
 * (launcher.h), otherwise with world 1. If world is more than 1 it also finds the key. want_url
 * ("tcp://host:port", "file:///path" or NULL) replaces the address found.
 * Errors: ARG  a text is wrong, a rank is outside [0, world), a variable is missing, or two launchers
 *              contradict each other; the message names the variable, its value and what is allowed */
int zr_world_find(int want_rank, int want_world, const char *want_url, struct zr_world *w);

/* The same for ranks that can tell each other over MPI where they meet. If Open MPI's or MPICH's launcher has
 * started them and no address is given, it sets w->by_mpi, and looks for no loopback and no list of hosts.
 * The variables of such a launcher must agree with what is found. zero-run is refused. */
int zr_world_find_by_mpi(int want_rank, int want_world, const char *want_url, struct zr_world *w);

/* A communicator that the program lends, and this rank in it. */
struct zr_lent_ranks {
    /* "nccl_comm" */
    const char *name;
    int rank, world;
    /* This rank in MPI_COMM_WORLD. job_world 0: not known. */
    int job_rank, job_world;
};

/* The same for a program that lends a communicator, whose rank and world count. want_rank and want_world
 * (want_world > 0) must be equal to them. A launcher's variables must say the same, or what MPI_COMM_WORLD
 * says. The address is want_url's or ZERO_RENDEZVOUS. Without one, port is 0, because ranks tell each other
 * over the communicator, and host is what MASTER_ADDR says, or "". */
int zr_world_lent(const struct zr_lent_ranks *c, int want_rank, int want_world, const char *want_url,
                  struct zr_world *w);

/* Sets w->interface to what ZERO_INTERFACE says, otherwise to want; NULL or "": any.
 * Errors: ARG  world is more than 1, and this host has no such interface (the message names those it has), or
 *              rank 0's address is on another interface of this host; *w is unchanged */
int zr_world_interface(const char *want, struct zr_world *w);
/* Returns whether the ranks of w meet over loopback, where there is no choice of an interface. */
bool zr_world_is_on_loopback(const struct zr_world *w);

struct zr_rendezvous;
struct zr_topology;

/* ---- meeting ---- */

/* Meets the other ranks. If some do not come, it fails on all ranks that got as far, and names what is
 * missing ("1 of 4 ranks did not come: rank 3"). world 1 makes no socket.
 * Collective. Blocks up to timeout_ms. */
int zr_rendezvous_open(uv_loop_t *loop, const struct zr_world *w, int64_t timeout_ms,
                       struct zr_rendezvous **out);

int zr_rendezvous_rank(const struct zr_rendezvous *r);
int zr_rendezvous_world(const struct zr_rendezvous *r);

/* ---- what is known of other ranks: set up before the detach, and before another thread uses r ---- */

/* describe(arg, rank, text, n_text) writes, on any thread, what this process knows of a rank's last call,
 * this rank's too, as "zero_step in step 12", or "". The message of a rank's loss ends with it ("; its last
 * call was "), if any rank that hears of the loss knows it. Otherwise it ends with the call that the lost
 * rank told last over a link between hosts ("; last heard: "), if it told any. */
void zr_rendezvous_describe(struct zr_rendezvous *r,
                            void (*describe)(void *arg, int rank, char *text, size_t n_text), void *arg);
/* Writes "; its last call was zero_step in step 12", or "". Any thread, until r is freed. */
enum { ZR_LAST_CALL_CHARS = 224 };
void zr_rendezvous_last_call(const struct zr_rendezvous *r, int rank, char text[ZR_LAST_CALL_CHARS]);

/* A look at the process of a rank on this host. */
struct zr_rank_seen {
    /* It is stopped by SIGSTOP or a debugger, and does nothing until it is continued. */
    bool is_stopped;
    /* The failure that it recorded, and when (zr_now_ns); 0: none. */
    int code;
    int64_t failed_ns;
    char text[ZR_FRAME_TEXT_BYTES];
};

/* see(arg, rank, out) fills *out on any thread, with zeros for a rank of another host. A rank that is lost
 * after it has recorded a failure is not the cause: all ranks then hear of that failure. */
void zr_rendezvous_watch(struct zr_rendezvous *r, void (*see)(void *arg, int rank, struct zr_rank_seen *out),
                         void *arg);
/* Returns the first rank of this host whose process is stopped; -1: none. Any thread, until r is freed. */
int zr_rendezvous_stopped(const struct zr_rendezvous *r);
/* Writes "; rank 3 is stopped, by SIGSTOP or a debugger", with its last call; "" for rank -1. */
enum { ZR_STOPPED_CHARS = 64 + ZR_LAST_CALL_CHARS };
void zr_rendezvous_describe_stopped(const struct zr_rendezvous *r, int rank, char text[ZR_STOPPED_CHARS]);
/* Returns the failure that a rank of this host recorded (rank -1: the earliest of any other rank), with the
 * rank that found it in its text; 0: none. Any thread, until r is freed. */
int zr_rendezvous_recorded(const struct zr_rendezvous *r, int rank, char text[ZR_FRAME_TEXT_BYTES]);

/* Explains a failure by this host's flight recorders, so that no other rank has to be asked. If another rank
 * recorded a failure before, it returns that code, with the message in why. Otherwise, if code is
 * ZR_ERR_TIMEOUT and a rank is stopped, it returns code, with text and that rank in why. Otherwise it returns
 * 0. Any thread, until r is freed. */
int zr_rendezvous_explain(const struct zr_rendezvous *r, int code, const char *text,
                          char why[ZR_FRAME_TEXT_BYTES]);

/* Says which rank is on which host. After the detach both ends of a link between hosts send a beat every
 * timeout_ms / 16 (10 to 1000 ms). An end that has heard nothing for three fourths of timeout_ms takes the
 * other end for lost. All ranks of that host that are silent too are lost with it. t stays the caller's
 * until r is freed. NULL, or not called: every rank may be on another host. */
void zr_rendezvous_hosts(struct zr_rendezvous *r, const struct zr_topology *t);

/* From the detach on, an end of a link may be silent for ms, whatever timeout_ms was when ranks met. Equal on
 * all ranks. */
void zr_rendezvous_silence(struct zr_rendezvous *r, int64_t ms);

/* ---- before the detach ---- */

/* Replaces the limit that zr_rendezvous_open was given, which is for the start: for what blocks from now on,
 * and for the silence between hosts after the detach. More than 0. Local. */
void zr_rendezvous_limit(struct zr_rendezvous *r, int64_t timeout_ms);

/* Gives n bytes, equal on all ranks (checked), and gets world * n bytes, in rank order. A rank that is lost
 * meanwhile is an error on all ranks.
 * Collective. Blocks. */
int zr_rendezvous_exchange(struct zr_rendezvous *r, const void *mine, size_t n, void *all);

/* Compares how something went. err is 0, or a failure of this rank with this thread's message. Returns 0 on
 * all ranks, or on all ranks the code and message of the lowest that failed (comm/verdict.h), with "rank 2: "
 * before it on the others. If ranks cannot reach each other it returns err, if that is not 0, with its
 * message, and otherwise why they cannot.
 * Collective. Blocks. */
int zr_rendezvous_agree(struct zr_rendezvous *r, int err);

/* This rank cannot go on: every other rank's running or next exchange fails with code and this thread's
 * message. For places where the others go straight to an exchange. Returns code, with the message unchanged.
 * Local; does not block. */
int zr_rendezvous_fail(struct zr_rendezvous *r, int code);

/* For a rank that waits for something else: returns 0, or the failure of another rank, as the next exchange
 * would. After the detach it returns 0. Local; does not block; on the thread that may run the loop. */
int zr_rendezvous_look(struct zr_rendezvous *r);

/* ---- the detach, and after it ---- */

/* From now on the loop belongs to another thread, which should have SIGPIPE blocked, because libuv may finish
 * a write at any time. On that thread on_lost(arg, rank, why) is called once per lost rank, and
 * on_failed(arg, code, text) once, with the first failure that a rank reports before this one does. Both may
 * call zr_rendezvous_close, and may be NULL. */
void zr_rendezvous_detach(struct zr_rendezvous *r, void (*on_lost)(void *arg, int rank, const char *why),
                          void (*on_failed)(void *arg, int code, const char *text), void *arg);

/* This rank has failed: on_failed of the others gets code (negative) and text, cut to what a frame may carry.
 * Only the first failure of a job travels, so after another rank's failure, or a second time, this does
 * nothing. A ZR_ERR_PEER is kept until zr_rendezvous_close, because most often it is what another rank's
 * failure looks like from here. It does nothing before the detach and after zr_rendezvous_close.
 * Any thread; does not block. */
void zr_rendezvous_report(struct zr_rendezvous *r, int code, const char *text);

/* Sends n bytes (1 to 64 KiB) from a rank to rank 0, or from rank 0 to a rank, or to all others (-1). They
 * arrive once and in order, unless their receiver is lost.
 * Errors: PEER  that rank is lost or has left
 * On the loop's thread, after the detach; does not block. */
int zr_rendezvous_send(struct zr_rendezvous *r, int to, const void *data, size_t n);
/* on_message(arg of the detach, from, data, n) gets them on the loop's thread. data is valid during the call,
 * which may close the rendezvous. NULL: they are dropped. To be called before the detach. */
void zr_rendezvous_on_message(struct zr_rendezvous *r,
                              void (*on_message)(void *arg, int from, const void *data, size_t n));

/* Keeps a call of this rank's program that every rank must make, for a comparison. One thread at a time. */
void zr_rendezvous_called(struct zr_rendezvous *r, const struct zr_called *c);
/* This rank has met a failure that different calls of the programs may explain. Rank 0 then gets the latest
 * calls of all ranks, and on_failed of every rank, this one's too, gets one failure:
 *   - ZR_ERR_MISMATCH with the first calls that differ;
 *   - if none differ, code and text, for ZR_ERR_TIMEOUT with the rank whose program is behind, and with the
 *     ranks that did not answer within timeout_ms / 2, at most 5 s;
 *   - or another failure, if one is known by then.
 * Only the first question of a rank is asked. If rank 0 does not answer nothing comes, so the caller bounds
 * its wait. Returns false if nothing will come: before the detach, after zr_rendezvous_close, and if world is
 * 1. Any thread; does not block. */
bool zr_rendezvous_compare(struct zr_rendezvous *r, int code, const char *text);

/* Sends what was reported, says goodbye and starts closing the handles. The loop must run until they are
 * closed, and then zr_rendezvous_free is called. A failed or single rank may do this at any time. On the
 * loop's thread. */
void zr_rendezvous_close(struct zr_rendezvous *r);
/* Frees r. If closing is not finished, or not even begun, it runs the loop for it, for some 300 ms at
 * most. Then only the thread that may run the loop may call it. NULL is allowed. */
void zr_rendezvous_free(struct zr_rendezvous *r);

#endif
