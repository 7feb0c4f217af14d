/* SPDX-License-Identifier: Apache-2.0 */
/* run.h: the parts of zero-run, the launcher of ranks. On one node it depends on libuv alone; several meet as
 * ranks do (comm/meet/).
 *
 *     run.c        the command line, and what it says about errors in it
 *     run_env.c    the environment of each rank
 *     run_exec.c   the last steps inside a rank's process before the program starts
 *     run_job.c    this node's part of a job: signals, its ranks, its output
 *     run_lead.c   node 0: who failed first, another attempt or the exit code
 *     run_decide.c which of the two
 *     run_follow.c the other nodes: they do what node 0 says
 *     run_nodes.c  how nodes meet, compare what they were given, and talk
 *     run_progress.c   how far ranks have come, as they leave it behind
 *     run_ranks.c  the ranks of one attempt: started, signalled, ended
 *     run_descendants.c  the processes that ranks have started
 *     run_flight.c what a rank did last, for whoever asks why it ended
 *     run_lines.c  a rank's output, whole line by whole line
 *     run_terminal.c   a pseudo-terminal for a rank's standard output
 *
 * Everything runs on the main thread's loop; only the writing of output is done by libuv's worker threads, so
 * that a slow reader never keeps a signal waiting. */
#ifndef ZR_ZERO_RUN_H
#define ZR_ZERO_RUN_H

#include "zero/run/run_decide.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

enum { ZR_RUN_KEY_CHARS = 129, ZR_RUN_LAST_CHARS = 256 };
/* Exit codes, as POSIX shells have them, of what is no program. */
enum { ZR_RUN_NOT_RUNNABLE = 126, ZR_RUN_NOT_FOUND = 127 };

struct zr_run_options {
    int n_ranks;
    /* ranks write to this process's own descriptors */
    bool raw;
    struct zr_run_limits limits;
    /* MASTER_PORT; 0: a free one */
    int port;
    /* where the program was found; NULL: it was not, which the other nodes are to learn */
    const char *path;
    /* arguments of the program, ended by NULL */
    char **argv;
    /* ZERO_JOB_KEY of the ranks, hex digits */
    char key[ZR_RUN_KEY_CHARS];
    /* 1: this node alone */
    int n_nodes, node;
    /* of node 0, where nodes meet; with one node: not used */
    char meet_host[256];
    int meet_port;
    /* or the file, or folder for it, in which node 0 says where it is; "": at host and port */
    char meet_file[1024];
    /* how long nodes wait for each other at the beginning, and how long one may be silent later */
    int64_t meet_ms, silent_ms;
};

/* The ranks of this node in one attempt. */
struct zr_run_start {
    /* of the job, from 0 */
    int attempt;
    /* ranks of the job; those of this node are n_ranks, from first_rank on */
    int world, first_rank, n_ranks;
    int node;
    /* grad_accum_steps; 0: as the program has it */
    int accum;
    /* where rank 0 listens: MASTER_ADDR, MASTER_PORT */
    char host[256];
    int port;
    /* tells one job from another, on this host and over time */
    char job[64];
};

/* How far ranks have come. */
struct zr_run_reached {
    /* the highest step; -1: no rank has said */
    int64_t t;
    /* their grad_accum_steps; 0: no rank has said */
    int accum;
};

/* run_progress.c */

struct zr_progress;
struct zr_run_progress {
    /* (n_ranks), of this node's ranks */
    struct zr_progress *of;
    int n_ranks, fd;
    /* by which they find it */
    char path[48];
};

/* For the life of zero-run. 0 or a libuv error. */
int zr_run_progress_open(struct zr_run_progress *p, int n_ranks);
/* Before an attempt. */
void zr_run_progress_clear(struct zr_run_progress *p);
/* A rank of this node has ended, by a signal or with code. */
void zr_run_progress_ended(struct zr_run_progress *p, int local_rank, int code, int signum);
/* After it, whatever became of the ranks. */
struct zr_run_reached zr_run_progress_read(const struct zr_run_progress *p);

/* run_exec.c */

#define ZR_RUN_EXEC "--exec-rank" /* zero-run --exec-rank PARENT PATH ARGV0 ARGS...: not for users */

/* Looks path up as execvp would: returns 0 and allocates *out, or the exit code a shell would give, 126 or
 * 127, and says why on standard error. */
int zr_run_find(const char *name, char **out);

/* Inside the rank's process: makes sure it dies with zero-run, and becomes the program. Returns an exit code
 * when it cannot. */
int zr_run_exec(int argc, char **argv);

/* run_env.c */

/* The descriptor by which a rank has its flight recorder's memory. */
enum { ZR_RUN_FLIGHT_FD = 3 };

/* The environment of one rank, NULL-terminated, in one allocation to be freed; NULL: out of memory.
 * progress: the path; flight: it is given that descriptor. */
char **zr_run_environment(const struct zr_run_options *o, const struct zr_run_start *s, int local_rank,
                          const char *progress, bool flight);

/* run_flight.c */

/* The memory of a rank's recorder; a negative errno: there is none. */
int zr_run_flight_make(void);
/* "; its last call was ...", of a rank that has ended, had fd (negative: none), and was in the library or
 * between its calls; else "". */
void zr_run_flight_words(int fd, char last[ZR_RUN_LAST_CHARS]);
/* Writes its file, where ZERO_FLIGHT_DIR wants one; blocks as long as its disk does. why: that it could not,
 * else "". */
struct zr_run_end;
void zr_run_flight_write(int fd, const struct zr_run_end *end, char why[ZR_RUN_LAST_CHARS]);

/* run_descendants.c */

struct zr_run_pids {
    int *of;
    int n;
};
/* Processes that live and descend from this one, without those in except and their descendants; of is to be
 * freed. None where /proc cannot be read. */
struct zr_run_pids zr_run_descendants(const struct zr_run_pids *except);

/* run_job.c */

/* Runs this node's ranks of all attempts to their end. Returns the exit code of zero-run. */
int zr_run_job(const struct zr_run_options *o);

/* run_terminal.c */

/* ends[0]: ours, to be read; ends[1]: the rank's standard output. n_prefix: columns that lines get before
 * them. Returns 0 or a libuv error; nothing is open then. */
int zr_run_terminal(uv_file ends[2], int n_prefix);

/* run_lines.c */

/* One of our output descriptors. Text is queued, and written by a worker thread a buffer at a time. */
struct zr_sink {
    uv_loop_t *loop;
    int fd;
    struct zr_sink_buffer {
        char *data;
        size_t n, cap;
    } filling, writing;
    /* the worker has the buffer being written */
    bool busy;
    /* of the worker: 0 or an errno */
    int result;
    /* the first failure, an errno; text is dropped from then on */
    int error;
    uv_work_t work;
    /* a buffer went out, or failed */
    void (*on_written)(struct zr_sink *sink);
    /* of whoever owns the sink */
    void *arg;
};

void zr_sink_init(struct zr_sink *s, uv_loop_t *loop, int fd, void (*on_written)(struct zr_sink *),
                  void *arg);
void zr_sink_put(struct zr_sink *s, const char *text, size_t n);
/* True where whoever fills it is to stop for now. */
bool zr_sink_full(const struct zr_sink *s);
/* True where nothing waits to be written, or the descriptor is lost. */
bool zr_sink_idle(const struct zr_sink *s);

/* One output stream of one rank: splits what comes into lines and puts each, prefixed, into the sink. */
struct zr_lines {
    uv_poll_t poll;
    int fd;
    struct zr_sink *sink;
    char prefix[24];
    /* the line that has no end yet */
    char *partial;
    size_t n_partial, cap_partial;
    bool open, reading;
    /* the stream is closed, and everything that was read was put */
    void (*on_end)(struct zr_lines *l);
    void *arg;
};

/* Takes fd, the read end of a pipe or a terminal, non-blocking; it is closed at the end. Returns 0 or a libuv
 * error. */
int zr_lines_open(struct zr_lines *l, uv_loop_t *loop, uv_file fd, int rank, struct zr_sink *sink,
                  void (*on_end)(struct zr_lines *), void *arg);
/* Reads while its sink has room; to be called when that changed. */
void zr_lines_update(struct zr_lines *l);
/* No more is read. on_end follows; where that was, or the stream was never opened, this does nothing. */
void zr_lines_close(struct zr_lines *l);

#endif
