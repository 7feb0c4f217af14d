/* SPDX-License-Identifier: Apache-2.0 */
/* run.h: the parts of zero-run, which starts and watches the ranks of a job. It links libuv and comm/, not
 * libzero. A node is one zero-run, usually a machine. Several nodes meet as ranks do (comm/meet/).
 *
 *     run.c              the command line
 *     run_env.c          the environment of each rank
 *     run_exec.c         the last steps in a rank's process before the program starts
 *     run_job.c          this node's part of a job: signals, its ranks, its output
 *     run_lead.c         node 0: which rank failed first, and then another attempt or the exit code
 *     run_decide.c       whether there is another attempt
 *     run_follow.c       the other nodes, which do what node 0 says
 *     run_nodes.c        how nodes meet, compare their options and exchange messages
 *     run_progress.c     how far ranks have come
 *     run_ranks.c        the ranks of one attempt: starts, signals and ends them
 *     run_descendants.c  the processes that ranks have started
 *     run_flight.c       the last call of a rank, for messages about its end
 *     run_output.c       forwards the output of ranks, line by line
 *     run_terminal.c     a pseudo-terminal for a rank's standard output
 *
 * Everything runs on the main thread's loop, except that libuv's worker threads write output. So a slow
 * reader never delays a signal. */
#ifndef ZR_ZERO_RUN_H
#define ZR_ZERO_RUN_H

#include "zero/run/run_decide.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

enum { ZR_RUN_KEY_BYTES = 129, ZR_RUN_MESSAGE_BYTES = 256 };
/* Exit codes of POSIX shells for what cannot be run. */
enum { ZR_RUN_NOT_RUNNABLE = 126, ZR_RUN_NOT_FOUND = 127 };

struct zr_run_options {
    int n_ranks;
    /* Ranks write to this process's own descriptors. */
    bool raw;
    struct zr_run_limits limits;
    /* MASTER_PORT. 0: a free one. */
    int port;
    /* Path of the program. NULL: it was not found, which the other nodes must learn. */
    const char *path;
    /* Arguments of the program, ended by NULL. */
    char **argv;
    /* ZERO_JOB_KEY of the ranks, in hex digits. */
    char key[ZR_RUN_KEY_BYTES];
    /* Number of nodes (1: this node alone), and the number of this one. */
    int n_nodes, node;
    /* Host and port of node 0, where nodes meet. Not used with one node. */
    char meet_host[256];
    int meet_port;
    /* File, or folder for it, in which node 0 writes its address. "": nodes use meet_host and meet_port. */
    char meet_file[1024];
    /* Milliseconds that nodes wait for each other at the beginning, and that a node may be silent later. */
    int64_t meet_ms, silent_ms;
};

/* The ranks that a node runs in one attempt. */
struct zr_run_assignment {
    /* Number of the attempt in the job, from 0. */
    int attempt;
    /* Ranks of the job. Those of this node are n_ranks, from first_rank on. */
    int world, first_rank, n_ranks;
    int node;
    /* grad_accum_steps. 0: the program's own number. */
    int accum;
    /* Address at which rank 0 listens: MASTER_ADDR, MASTER_PORT. */
    char host[256];
    int port;
    /* ZERO_JOB: a name that no other job has, on this node and over time. */
    char job[64];
};

/* How far ranks have come. */
struct zr_run_reached {
    /* The highest step. -1: no rank has reported one. */
    int64_t step;
    /* The ranks' grad_accum_steps. 0: no rank has reported it. */
    int accum;
};

/* run_progress.c */

struct zr_progress;
struct zr_run_progress {
    /* (n_ranks) Records of this node's ranks. */
    struct zr_progress *records;
    int n_ranks, fd;
    /* Path by which ranks open the records. */
    char path[48];
};

/* Opens the records, for the life of zero-run. Returns 0 or a libuv error. */
int zr_run_progress_open(struct zr_run_progress *p, int n_ranks);
/* Resets the records before an attempt. */
void zr_run_progress_clear(struct zr_run_progress *p);
/* Records that a rank of this node has ended, with code or by a signal. */
void zr_run_progress_ended(struct zr_run_progress *p, int local_rank, int code, int signum);
/* Returns how far the ranks have come. Call it after an attempt, however the ranks ended. */
struct zr_run_reached zr_run_progress_read(const struct zr_run_progress *p);

/* run_exec.c */

#define ZR_RUN_EXEC "--exec-rank" /* zero-run --exec-rank PARENT PATH ARGV0 ARGS...: not for users */

/* Looks a program up as execvp would. On success returns 0 and allocates *out. Otherwise prints the reason on
 * standard error, and returns the exit code that a shell would give, 126 or 127. */
int zr_run_find(const char *name, char **out);

/* Runs inside the rank's process. Makes sure that the process dies with zero-run, and becomes the program.
 * Returns an exit code if it cannot. */
int zr_run_exec(int argc, char **argv);

/* run_env.c */

/* The descriptor through which a rank gets the memory of its flight recorder. */
enum { ZR_RUN_FLIGHT_FD = 3 };

/* Makes the environment of one rank, NULL-terminated, in one allocation that the caller frees. NULL: out of
 * memory. progress: the path of the records. flight: the rank gets ZR_RUN_FLIGHT_FD. */
char **zr_run_environment(const struct zr_run_options *o, const struct zr_run_assignment *s, int local_rank,
                          const char *progress, bool flight);

/* run_flight.c */

/* Makes the memory of a rank's flight recorder. Returns a descriptor, or a negative errno. */
int zr_run_flight_make(void);
/* Describes the last call of a rank that has ended: "; its last call was ...". "" if fd is negative, or the
 * rank had no open context. */
void zr_run_flight_last_call(int fd, char last[ZR_RUN_MESSAGE_BYTES]);
struct zr_run_end;
/* Writes the recorder's file into ZERO_FLIGHT_DIR if that is set and the rank did not end normally. Blocks on
 * the disk. why: why the file could not be written, or "". */
void zr_run_flight_write(int fd, const struct zr_run_end *end, char why[ZR_RUN_MESSAGE_BYTES]);

/* run_descendants.c */

struct zr_run_pids {
    int *pids;
    int n;
};
/* Returns the live processes that descend from this one, without those in `except` and their descendants. The
 * caller frees the list. It is empty if /proc cannot be read. */
struct zr_run_pids zr_run_descendants(const struct zr_run_pids *except);

/* run_job.c */

/* Runs this node's ranks in all attempts to their end. Returns the exit code of zero-run. */
int zr_run_job(const struct zr_run_options *o);

/* run_terminal.c */

/* Opens a pseudo-terminal. ends[0]: our end, to be read. ends[1]: the rank's standard output. n_prefix:
 * columns of the prefix of each line. Returns 0, or a libuv error after which nothing is open. */
int zr_run_terminal(uv_file ends[2], int n_prefix);

/* run_output.c */

/* One of our output descriptors. Text is queued, and a worker thread writes it, a buffer at a time. */
struct zr_sink {
    uv_loop_t *loop;
    int fd;
    struct zr_sink_buffer {
        char *data;
        size_t n, cap;
    } filling, writing;
    /* The worker is writing a buffer. */
    bool busy;
    /* The worker's result: 0 or an errno. */
    int result;
    /* The first failure, an errno. 0: none. After it, text is dropped. */
    int error;
    uv_work_t work;
    /* Called when a buffer was written, or has failed. */
    void (*on_written)(struct zr_sink *sink);
    /* For the owner of the sink. */
    void *arg;
};

void zr_sink_init(struct zr_sink *s, uv_loop_t *loop, int fd, void (*on_written)(struct zr_sink *),
                  void *arg);
void zr_sink_put(struct zr_sink *s, const char *text, size_t n);
/* Whether no more text should be put for now. */
bool zr_sink_full(const struct zr_sink *s);
/* Whether nothing waits to be written, or the descriptor is lost. */
bool zr_sink_idle(const struct zr_sink *s);

/* One output stream of one rank. Splits what arrives into lines, and puts each with a prefix into the
 * sink. */
struct zr_rank_output {
    uv_poll_t poll;
    int fd;
    struct zr_sink *sink;
    char prefix[24];
    /* The line whose end has not arrived yet. */
    char *partial;
    size_t n_partial, cap_partial;
    bool open, reading;
    /* Called when the stream is closed and all that was read is in the sink. */
    void (*on_end)(struct zr_rank_output *l);
    void *arg;
};

/* Takes over fd, the non-blocking read end of a pipe or a terminal. It is closed at the end of the stream.
 * Returns 0 or a libuv error. */
int zr_rank_output_open(struct zr_rank_output *l, uv_loop_t *loop, uv_file fd, int rank, struct zr_sink *sink,
                        void (*on_end)(struct zr_rank_output *), void *arg);
/* Reads while the sink has room. Call it when that has changed. */
void zr_rank_output_update(struct zr_rank_output *l);
/* Stops reading, and on_end follows. Does nothing if the stream was closed already, or never opened. */
void zr_rank_output_close(struct zr_rank_output *l);

#endif
