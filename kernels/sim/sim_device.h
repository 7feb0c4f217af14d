/* SPDX-License-Identifier: Apache-2.0 */
/* sim_device.h: a device that computes nothing and checks everything: N ranks in one process on a virtual
 * clock.
 *
 *   sim_device_inside.h   which of its files does what
 *   recorder.h            clocks of all of them, and who touched which bytes
 *   comm/sim/sim.h            collectives between the ranks
 *
 * Each stream and each host thread is a line of the recorder; every operation says which bytes it reads and
 * writes, and what it expects them to be. So one run speaks for all the orders that the device could have
 * chosen; only the host threads' order has to be varied.
 *
 * Thread-safety: none. All ranks live on one thread; zr_sim_host says which host thread is speaking. */
#ifndef ZR_KERNELS_SIM_DEVICE_H
#define ZR_KERNELS_SIM_DEVICE_H

#include "kernels/check/recorder.h"

/* Lines of one rank: three host threads, and behind them its streams. */
enum { ZR_SIM_MODEL, ZR_SIM_LOOP, ZR_SIM_READER, ZR_SIM_FIRST_STREAM };

/* One rank's contribution to a gradient, as a number that may be added up: a lost or a doubled one changes
 * the sum. */
static inline uint64_t zr_sim_share(int rank, uint32_t step, int32_t flat, int32_t contribution)
{
    uint64_t x =
        (uint64_t)rank << 48 ^ (uint64_t)step << 32 ^ (uint64_t)(uint32_t)flat << 12 ^ (uint64_t)contribution;
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* A range that an operation touches. READ checks that its bytes hold `content`, ADD adds that to a gradient,
 * SET overwrites. PLAIN: what they hold is neither looked at nor changed. */
enum zr_sim_how { ZR_SIM_READ, ZR_SIM_ADD, ZR_SIM_SET, ZR_SIM_PLAIN_READ, ZR_SIM_PLAIN_WRITE };
struct zr_sim_touch {
    const void *at;
    int64_t bytes;
    enum zr_sim_how how;
    struct zr_content content;
};

struct zr_sim;

/* The calls by which lines are ordered; see `drop`. */
enum zr_sim_edge { ZR_SIM_RECORD, ZR_SIM_WAIT, ZR_SIM_EVENT_SYNC, ZR_SIM_STREAM_SYNC, ZR_SIM_CLEAR };

/* Weaknesses of a communicator, to show that they are noticed. */
enum zr_sim_comm_flaw {
    ZR_SIM_GATHER_STARTS_ALONE = 1,
    ZR_SIM_REDUCE_STARTS_ALONE = 2,
    ZR_SIM_REDUCE_LEAVES_ALONE = 4,
    ZR_SIM_EXCHANGE_STARTS_ALONE = 8,
    ZR_SIM_EXCHANGE_LEAVES_ALONE = 16,
    ZR_SIM_BROADCAST_STARTS_ALONE = 32,
    ZR_SIM_BROADCAST_LEAVES_ALONE = 64,
    ZR_SIM_NO_BARRIER = 128,
    /* the barriers of jobs alone */
    ZR_SIM_NO_BARRIER_IN_STEP = 256,
    ZR_SIM_AGREE_STARTS_ALONE = 512,
    ZR_SIM_AGREE_LEAVES_ALONE = 1024,
    /* each half of the ranks agrees by itself */
    ZR_SIM_AGREE_APART = 2048,
    ZR_SIM_NO_GATHER = 4096,
    /* ranks meet in an agreement, and each keeps its own record */
    ZR_SIM_AGREE_MOVES_NOTHING = 8192,
    /* each puts its part of all records together, and does not take the others' parts */
    ZR_SIM_AGREE_MOVES_A_PART = 16384,
    ZR_SIM_BROADCAST_MOVES_NOTHING = 32768
};

/* How a collective uses the links. */
enum zr_sim_links {
    /* Each member takes from every other one, over its own links; near and far ones work at once. */
    ZR_SIM_LINKS_DIRECT,
    /* Along rings that go from host to host, one for each of a host's members in the group: all slices but
     * one come to a host, its own members' among them, over the network of all of them, and are passed on
     * inside. A latency for each member on the way. As NCCL's rings. */
    ZR_SIM_LINKS_RING
};

struct zr_sim_options {
    /* simulated ranks: all of them, or representatives (comm/sim/symmetry.h) */
    int world;
    /* that a rank may have open at a time; 0: 5 */
    int n_streams;
    /* as the host device: the model's stream is the calling thread */
    bool compute_on_caller;
    /* what a query answers: 0 the truth, 1 yes (after waiting until it is true), 2 no */
    int event_done;

    /* what is opened or allocated is counted from 1 over all ranks; this one fails; 0: none */
    int64_t fail_alloc;

    /* Called while a host thread has to wait for the device: lets others go on, and returns. */
    void (*yield)(void *arg, int rank);
    /* true: the call is left out (a mutant). event and stream may be NULL. */
    bool (*drop)(void *arg, enum zr_sim_edge edge, int rank, const struct zr_event *event,
                 const struct zr_stream *stream);
    /* Returns the content that the sum of gradients of a flat must have in `step`. */
    struct zr_content (*whole_grad)(void *arg, int32_t flat, uint32_t step);
    /* A gradient of this rank is not a number in this step. */
    bool (*poisoned)(void *arg, int rank, uint32_t step);
    /* n elements of a rank's are squared and added up, for a norm. NULL: nobody asks. */
    void (*squared)(void *arg, int rank, int64_t n);
    /* An operation ran: for a trace. NULL: none. */
    void (*ran)(void *arg, const struct zr_info *info, const char *line, int rank, int64_t from_ns,
                int64_t to_ns);
    void *arg;
    /* enum zr_sim_comm_flaw; of communicators of these roles, a bit each (1 << enum zr_role); 0: of all */
    unsigned comm_flaws, flawed_roles;

    /* Time. 0 bytes per second: everything takes no time. */
    double memory_bytes_per_s, near_bytes_per_s, far_bytes_per_s;
    int64_t launch_ns, near_ns, far_ns;
    int ranks_per_node;
    enum zr_sim_links links;
    /* Values of bytes are not checked, because some operations that would write them are not simulated. */
    bool contents_unknown;
};

int zr_sim_open(const struct zr_sim_options *opt, struct zr_sim **out);
/* NULL is allowed; after everything on its devices was closed. */
void zr_sim_close(struct zr_sim *w);

/* The device of a rank; closed with the world. */
struct zr_device *zr_sim_device(struct zr_sim *w, int rank);

/* A rank's line by its number: a host thread, or ZR_SIM_FIRST_STREAM and on; and that number of a line. */
struct zr_line *zr_sim_line_at(struct zr_sim *w, int rank, int number);
int zr_sim_line_number(const struct zr_sim *w, int32_t line);

/* From here on, calls come from this host thread (ZR_SIM_MODEL or ZR_SIM_LOOP) of rank, which is doing
 * `during`. Returns its line. */
struct zr_line *zr_sim_host(struct zr_sim *w, int rank, int thread);

/* What the model's own code does on a stream, between its brackets. name must outlive the world. */
int zr_sim_compute(struct zr_stream *s, const char *name, const struct zr_sim_touch *touch, int n,
                   int64_t ns);
/* The same by the host thread that speaks, now. */
void zr_sim_host_touch(struct zr_sim *w, const char *name, const struct zr_sim_touch *touch, int n);

/* Memory that is not the device's but takes part (the model's own buffers, results on the host). The second
 * says what it holds. */
int zr_sim_register(struct zr_sim *w, int rank, const char *name, const void *at, int64_t bytes);
void zr_sim_mark(struct zr_sim *w, const void *at, int64_t bytes, struct zr_content content);
/* Bytes that rank holds now, and the most it ever held, registered memory not counted. */
int64_t zr_sim_held(const struct zr_sim *w, int rank, int64_t *peak);

/* The record of what was done and found so far. */
struct zr_recorder *zr_sim_recorder(struct zr_sim *w);

int64_t zr_sim_now(const struct zr_line *line);
const struct zr_sim_options *zr_sim_config(const struct zr_sim *w);

/* A stream's line, and whether anything is left on it. */
struct zr_line *zr_sim_line_of(struct zr_stream *s);
bool zr_sim_idle(const struct zr_stream *s);
struct zr_sim *zr_sim_of(const struct zr_stream *s);

/* Takes all that is queued off a rank's streams, and lets it do nothing more: its process is gone. */
void zr_sim_kill(struct zr_sim *w, int rank);
/* Grows whenever anything happens. */
int64_t zr_sim_activity(const struct zr_sim *w);
/* An optimizer's update by a function of the model's, in the operation under way. */
void zr_sim_user_update(struct zr_sim *w, const struct zr_update *u);
/* Who speaks. */
struct zr_line *zr_sim_speaker(const struct zr_sim *w);
void zr_sim_speak(struct zr_sim *w, struct zr_line *host);

/* ---- for comm/sim/sim.h ---- */

/* An operation that takes more than one rank. start is called when the stream has come to it: true, it is
 * over; false, the stream stands until zr_sim_resume. */
int zr_sim_put(struct zr_stream *s, const char *name, int32_t unit, uint32_t step,
               bool (*start)(void *arg, struct zr_stream *s), void *arg);
void zr_sim_resume(struct zr_stream *s);

/* A new operation on the line: the accesses that follow are its. */
void zr_sim_begin(struct zr_sim *w, struct zr_line *l, const char *name, int32_t unit, uint32_t step);
void zr_sim_spend(struct zr_sim *w, struct zr_line *l, int64_t ns);

#endif
