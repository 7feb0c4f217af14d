/* SPDX-License-Identifier: Apache-2.0 */
/* rendezvous.h: how ranks find each other, exchange small records before any communicator exists, and later
 * learn of a rank's death or failure.
 *
 * Rank 0 listens on TCP, the others connect, and every message goes through rank 0. The sockets stay open
 * while the context lives, and show failures. A socket that closes without a goodbye is a lost rank, and rank
 * 0 reports it to the others. A rank that cannot go on reports this before it leaves. Everything runs on one
 * libuv loop, which the caller provides. Before zr_rendezvous_detach the blocking calls run that loop on the
 * calling thread. Afterwards another thread (the context's own) runs the loop, and gets on_lost and
 * on_failed. */
#ifndef ZR_COMM_RENDEZVOUS_H
#define ZR_COMM_RENDEZVOUS_H

#include "comm/meet/call_log.h"
#include "comm/meet/frame.h"
#include "comm/meet/net_address.h"
#include "kernels/error.h"

#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

/* The secret that the ranks of one job share, and by which they recognize each other (handshake.h). It is in
 * the environment, or in a file that only this user may read. It is never on a command line, which every user
 * of a host can see. It is not printed and not sent. */
enum { ZR_JOB_KEY_MIN_BYTES = 16, ZR_JOB_KEY_MAX_BYTES = 64 };

struct zr_job_key {
    /* 0: this job has no key. */
    int32_t n_bytes;
    uint8_t bytes[ZR_JOB_KEY_MAX_BYTES];
};

/* Reads the key from ZERO_JOB_KEY (32 to 128 hex digits), or from the file that ZERO_JOB_KEY_FILE names: the
 * same digits, mode 0600 or 0400, owned by this user. If neither is set, n_bytes is 0. An error names the
 * variable and never its value. */
int zr_job_key_find(struct zr_job_key *key);

/* Makes a key of 128 random bits, for callers that can bring it to all ranks. */
int zr_job_key_make(struct zr_job_key *key);

/* Most characters of a context's name. */
enum { ZR_NAME_CHARS = 63 };
struct zr_open_name;
struct zr_log;

/* How ranks wait for each other at zero_wrap, which may be long. Messages then name start_timeout_ms. */
struct zr_waiting {
    /* Log and interval of the lines that say which ranks this rank waits for. */
    struct zr_log *log;
    int64_t remind_ms;
    /* Returns whether a rank's process has ended, and how it ended. *has_begun: it had begun to meet this
     * rank. Called on the thread that waits. NULL: unknown. */
    bool (*has_ended)(void *arg, int rank, bool *has_begun, char *how, size_t n_how);
    void *arg;
};

/* Logs a warning about a wait that goes on. text says which ranks are awaited, and since when. limit is what
 * limits the wait, as " (start_timeout_ms)". */
enum { ZR_WAIT_CHARS = 2560 };
void zr_waiting_warn(const struct zr_waiting *w, const char *text, int64_t ms, const char *limit);
/* Writes "rank 1 ended before it came to zero_wrap: its program returned 0", or "in zero_wrap". */
enum { ZR_ENDED_CHARS = 192 };
void zr_waiting_say_ended(int rank, bool has_begun, const char *how, char text[ZR_ENDED_CHARS]);

/* How a launcher started a rank, if its job, rank and world do not show it. Ranks that were started for
 * different jobs, or different parts of one, refuse each other. All bytes of it are sent. */
struct zr_start {
    /* The launcher's name for its job, if ZERO_JOB replaces it: "Open MPI's job 1234.1". "": not known. */
    char job[120];
    /* Rank and world of variables that may be left over, if the configuration gives a smaller world. world 0:
     * none. */
    int32_t rank, world;
};

/* Who this rank is, and where it meets the others. */
struct zr_world {
    /* --- its place --- */

    int rank, world;
    /* Number on this host, from a launcher. has_local_rank false: no launcher gives it, and it is the
     * rank. */
    int local_rank;
    bool has_local_rank;
    /* Where rank and world were found, for the log: "config", "zero-run", "ZERO_RANK", "torchrun",
     * "Open MPI", "MPICH", "Slurm", "RANK", "alone", "nccl_comm", "mpi_comm", "exchange". */
    char source[64];
    /* The source of the world's size, for messages: "SLURM_NTASKS is 4". "": none. */
    char size_from[96];
    /* A warning for the log: launchers disagree, though each may be right. "": none. */
    char note[192];
    /* The configuration gave rank and world. */
    bool is_given;

    /* --- where rank 0 is: host and port, a list, or a file --- */

    /* Rank 0's host. "" if world is 1, or with a list or a file. */
    char host[256];
    int port;
    /* Addresses by which rank 0 has said that it can be reached, with that port. It listens on all of its
     * addresses, or on its interface, and the others try these one after the other. 0: none. */
    int n_at;
    union zr_address at[ZR_LOOKUP_MAX];
    /* A file, or a folder for it, in which rank 0 writes its address. "": none. */
    char file[1024];
    /* This host is assumed to be rank 0's, because nothing says on how many hosts the ranks are. */
    bool is_host_assumed;
    /* The port follows from ZERO_JOB. Ranks with another ZERO_JOB, or none, look elsewhere. */
    bool is_port_of_own_job;
    /* Nothing says where rank 0 is, and ranks will agree on it over MPI (zr_world_find_by_mpi). Until then
     * host and file are "", and port and n_at are 0. */
    bool by_mpi;
    /* Where the address was found, for the log: "ZERO_RENDEZVOUS", "SLURM_STEP_NODELIST". */
    char way[40];
    /* The network interface of this host, by name or by one of its addresses. Rank 0 listens on it, and the
     * others connect from it beyond loopback. "": any. Ranks may have different ones. */
    char interface[64];

    /* --- which ranks may meet it --- */

    /* A name that keeps two jobs apart: ranks whose names differ refuse each other. */
    char job[128];
    struct zr_start start;
    /* Restarts of the job, if its launcher counts them. Ranks of different attempts do not meet. */
    int attempt;
    /* Processes with this key are accepted as ranks. Without a key, ranks meet on loopback only. */
    struct zr_job_key key;
    /* Number of forks between the process that the launcher started and this one, which has its variables
     * unchanged. Parents may be ranks with the same numbers. */
    int forks;
    /* cfg.launch.name: ranks whose contexts have other names do not meet. */
    char name[ZR_NAME_CHARS + 1];
    /* This context in the list of open_names.h. NULL: it does not know other contexts. Used until ranks have
     * met. */
    struct zr_open_name *open_name;

    /* --- how it waits --- */

    /* NULL: log nothing. Must stay valid until the rendezvous is detached. */
    const struct zr_waiting *waiting;
    /* Rank 0 keeps listening after all have met, and keeps its file. Ranks of the job that come later, and
     * another rank 0, then learn why they are refused. */
    bool tells_late;
};

/* Fills *w from want_rank and want_world if want_world is more than 0, otherwise from a launcher's variables
 * (launcher.h), otherwise with world 1. If world is more than 1 it also finds the key. want_url
 * ("tcp://host:port", "file:///path" or NULL) replaces the address found.
 * Errors: ARG  a text is wrong, a rank is outside [0, world), a variable is missing, or two launchers
 *              contradict each other; the message names the variable, its value and what is allowed */
int zr_world_find(int want_rank, int want_world, const char *want_url, struct zr_world *w);

/* The same for ranks that can agree over MPI on where they meet. If Open MPI's or MPICH's launcher has
 * started them and no address is given, it sets w->by_mpi, and looks for no loopback and no list of hosts.
 * The variables of such a launcher must agree with what is found. zero-run is refused. */
int zr_world_find_by_mpi(int want_rank, int want_world, const char *want_url, struct zr_world *w);

/* This rank in the program's communicator, or in its exchange. */
struct zr_user_comm_ranks {
    /* "nccl_comm", "exchange" */
    const char *name;
    int rank, world;
    /* This rank in MPI_COMM_WORLD. job_world 0: unknown. */
    int job_rank, job_world;
};

/* The same for ranks that can exchange bytes already (comm/meet/user_comm.h), whose rank and world count.
 * want_rank and want_world (want_world > 0) must be equal to them. A launcher's variables must give the same,
 * or match MPI_COMM_WORLD. The address is want_url's or ZERO_RENDEZVOUS. Without one, port is 0, because
 * ranks exchange it, and host is what MASTER_ADDR says, or "". */
int zr_world_of_user_comm(const struct zr_user_comm_ranks *c, int want_rank, int want_world,
                          const char *want_url, struct zr_world *w);

/* Sets w->interface to what ZERO_INTERFACE says, otherwise to want; NULL or "": any.
 * Errors: ARG  world is more than 1, and this host has no such interface (the message names those it has), or
 *              rank 0's address is on another interface of this host; *w is unchanged */
int zr_world_interface(const char *want, struct zr_world *w);
/* Returns whether the ranks of w meet over loopback. Then there is no choice of an interface. */
bool zr_world_is_on_loopback(const struct zr_world *w);

struct zr_rendezvous;
struct zr_topology;

/* ---- meeting ---- */

/* Meets the other ranks. If some do not come, it fails on all ranks that got as far, and names those that are
 * missing ("1 of 4 ranks did not come: rank 3"). world 1 makes no socket.
 * Collective. Blocks up to timeout_ms. */
int zr_rendezvous_open(uv_loop_t *loop, const struct zr_world *w, int64_t timeout_ms,
                       struct zr_rendezvous **out);

int zr_rendezvous_rank(const struct zr_rendezvous *r);
int zr_rendezvous_world(const struct zr_rendezvous *r);

/* ---- knowledge of other ranks: set up before the detach, and before another thread uses r ---- */

/* Writes "; its last call was zero_step in step 12", or "". Any thread, until r is freed. */
enum { ZR_LAST_CALL_CHARS = 224 };
void zr_rendezvous_last_call(const struct zr_rendezvous *r, int rank, char text[ZR_LAST_CALL_CHARS]);

/* A look at the process of a rank on this host. */
struct zr_rank_seen {
    /* The process is stopped by SIGSTOP or a debugger, and does nothing until it is continued. */
    bool is_stopped;
    /* The failure that the process recorded, and when (zr_now_ns). 0: none. */
    int code;
    int64_t failed_ns;
    char text[ZR_FRAME_TEXT_BYTES];
};

/* What this process can read about the ranks of its host, this one included. Any thread may call the
 * functions; NULL ones know nothing. */
struct zr_known_ranks {
    /* Writes a rank's last call, as "zero_step in step 12", or "". The message of a rank's loss ends with it
     * ("; its last call was "), if any rank that receives it knows the call. Otherwise it ends with the call
     * that the lost rank sent last over a link between hosts ("; last heard: "), if it sent any. */
    void (*last_call)(void *arg, int rank, char *text, size_t n_text);
    /* Fills *out, with zeros for a rank of another host. A rank that is lost after it has recorded a failure
     * is not the cause: that failure is then reported to all ranks. */
    void (*see)(void *arg, int rank, struct zr_rank_seen *out);
    /* Writes this rank's calls over out, which is zero, in the same order on all ranks. */
    void (*shared_calls)(void *arg, struct zr_shared_calls out[ZR_SHARED_CALLS]);
    /* Gives the calls that this rank and another must both make, as each has made them. Returns false if they
     * are unknown. */
    bool (*common_calls)(void *arg, int rank, const struct zr_call_log **own,
                         const struct zr_call_log **other);
    void *arg;
};
void zr_rendezvous_know(struct zr_rendezvous *r, const struct zr_known_ranks *known);
/* As common_calls above. Any thread, until r is freed. */
bool zr_rendezvous_common_calls(const struct zr_rendezvous *r, int rank, const struct zr_call_log **own,
                                const struct zr_call_log **other);
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
 * ZERO_ERR_TIMEOUT and a rank is stopped, it returns code, with text and that rank in why. Otherwise it
 * returns 0. Any thread, until r is freed. */
int zr_rendezvous_explain(const struct zr_rendezvous *r, int code, const char *text,
                          char why[ZR_FRAME_TEXT_BYTES]);

/* Sets which rank is on which host. After the detach both ends of a link between hosts send a beat every
 * timeout_ms / 16 (10 to 1000 ms). An end that has received nothing for three fourths of timeout_ms treats
 * the other end as lost. All ranks of that host that are silent too are lost with it. t must stay valid until
 * r is freed. NULL, or not called: every rank may be on another host. */
void zr_rendezvous_hosts(struct zr_rendezvous *r, const struct zr_topology *t);

/* Sets how many ms an end of a link may be silent after the detach, whatever timeout_ms was when ranks met.
 * Equal on all ranks. */
void zr_rendezvous_silence(struct zr_rendezvous *r, int64_t ms);

/* ---- before the detach ---- */

/* Replaces the limit that zr_rendezvous_open was given, which is for the start. The new one is for later
 * blocking calls, and for the silence between hosts after the detach. More than 0. Local. */
void zr_rendezvous_limit(struct zr_rendezvous *r, int64_t timeout_ms);

/* Exchanges n bytes of each rank. n is equal on all ranks (checked). all gets world * n bytes, in rank order.
 * A rank that is lost meanwhile is an error on all ranks.
 * Collective. Blocks. */
int zr_rendezvous_exchange(struct zr_rendezvous *r, const void *mine, size_t n, void *all);

/* Agrees on the result of a step. err is 0, or a failure of this rank with this thread's message. Returns 0
 * on all ranks, or on all ranks the code and message of the lowest that failed (comm/first_error.h), with
 * "rank 2: " before it on the others. If ranks cannot reach each other it returns err, if that is not 0, with
 * its message, and otherwise why they cannot. Collective. Blocks. */
int zr_rendezvous_agree(struct zr_rendezvous *r, int err);

/* Exchanges n bytes of each rank, and agrees on the result of a step. mine points to the first member of this
 * rank's record, an int32_t, which gets err. Messages are only sent if a rank has failed. That keeps records
 * small, which matters because rank 0 sends every record to every rank. Returns as zr_rendezvous_agree does.
 * After a failure all has the records too, if the ranks could exchange them, and zeros otherwise. Collective.
 * Blocks. */
int zr_rendezvous_agree_and_exchange(struct zr_rendezvous *r, int err, int32_t *mine, size_t n, void *all);

/* Reports that this rank cannot go on: every other rank's running or next exchange fails with code and this
 * thread's message. Use it if the others go straight to an exchange. Returns code, with the message
 * unchanged. Local; does not block. */
int zr_rendezvous_fail(struct zr_rendezvous *r, int code);

/* For a rank that waits for something else: returns 0, or the failure of another rank, as the next exchange
 * would. After the detach it returns 0. Local; does not block. Call it on the thread that may run the
 * loop. */
int zr_rendezvous_look(struct zr_rendezvous *r);

/* ---- the detach, and after it ---- */

/* Passes the loop to another thread, which should have SIGPIPE blocked, because libuv may finish a write at
 * any time. On that thread on_lost(arg, rank, why) is called once per lost rank. on_failed(arg, code, text)
 * is called once, with the first failure that a rank reports before this one does. Both may call
 * zr_rendezvous_close, and may be NULL. */
void zr_rendezvous_detach(struct zr_rendezvous *r, void (*on_lost)(void *arg, int rank, const char *why),
                          void (*on_failed)(void *arg, int code, const char *text), void *arg);

/* Reports that this rank has failed: on_failed of the others gets code (negative) and text, cut to the size
 * of a frame. Only the first failure of a job is sent, so after another rank's failure, or a second time,
 * this does nothing. A ZERO_ERR_PEER is kept until zr_rendezvous_close, because it is most often a
 * consequence of another rank's failure. It does nothing before the detach and after zr_rendezvous_close. Any
 * thread; does not block. */
void zr_rendezvous_report(struct zr_rendezvous *r, int code, const char *text);

/* Sends n bytes (1 to 64 KiB) from a rank to rank 0, or from rank 0 to a rank, or to all others (-1). They
 * arrive once and in order, unless their receiver is lost.
 * Errors: PEER  that rank is lost or has left
 * On the loop's thread, after the detach; does not block. */
int zr_rendezvous_send(struct zr_rendezvous *r, int to, const void *data, size_t n);
/* Sets the receiver: on_message(arg of the detach, from, data, n), on the loop's thread. data is valid during
 * the call, which may close the rendezvous. NULL: messages are dropped. Call it before the detach. */
void zr_rendezvous_on_message(struct zr_rendezvous *r,
                              void (*on_message)(void *arg, int from, const void *data, size_t n));

/* Asks for a comparison of calls, after a failure that different calls of the programs may explain. Rank 0
 * then gets the latest calls of all ranks. on_failed of every rank, including this one, gets one of these
 * failures:
 *
 * - ZERO_ERR_MISMATCH with the first calls that differ.
 * - If none differ: code and text. For ZERO_ERR_TIMEOUT the text names the rank whose program is behind, and
 *   the ranks that did not answer within timeout_ms / 2, at most 5 s.
 * - Another failure, if one is known by then.
 *
 * Only a rank's first request counts. If rank 0 does not answer nothing comes, so the caller limits its wait.
 * Returns false if nothing will come: before the detach, after zr_rendezvous_close, and if world is 1. Any
 * thread; does not block. */
bool zr_rendezvous_compare(struct zr_rendezvous *r, int code, const char *text);

/* Sends what was reported, says goodbye and starts closing the handles. The loop must run until they are
 * closed; then call zr_rendezvous_free. A failed or single rank may do this at any time. On the loop's
 * thread. */
void zr_rendezvous_close(struct zr_rendezvous *r);
/* Frees r. If closing is not finished, or not begun, it runs the loop for that, for some 300 ms at most. Then
 * only the thread that may run the loop may call it. NULL is allowed. */
void zr_rendezvous_free(struct zr_rendezvous *r);

#endif
