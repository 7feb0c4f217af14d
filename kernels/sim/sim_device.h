/* SPDX-License-Identifier: Apache-2.0 */
/* sim_device.h: a device that computes nothing and checks everything: N ranks in one process on a virtual
 * clock.
 *
 *   sim_device_inside.h  its inside, and its files
 *   recorder.h           clocks of all ranks, and who touched which bytes
 *   comm/sim/sim.h       collectives between the ranks
 *
 * Each stream and each host thread is a line of the recorder. Every operation declares which bytes it reads
 * and writes, and what it expects them to hold. So one run stands for all the orders that the device could
 * have chosen. Only the order of the host threads has to be varied.
 *
 * Thread-safety: none. All ranks run on one thread. zr_sim_host selects the simulated host thread that makes
 * the calls. */
#ifndef ZR_KERNELS_SIM_DEVICE_H
#define ZR_KERNELS_SIM_DEVICE_H

#include "kernels/check/recorder.h"

/* Lines of one rank: three host threads, and after them its streams. */
enum { ZR_SIM_MODEL, ZR_SIM_LOOP, ZR_SIM_READER, ZR_SIM_FIRST_STREAM };

/* Returns one rank's contribution to a gradient as a number. Contributions may be added up; a lost or a
 * doubled one changes the sum. */
static inline uint64_t zr_sim_contribution(int rank, uint32_t step, int32_t flat, int32_t contribution)
{
    uint64_t x =
        (uint64_t)rank << 48 ^ (uint64_t)step << 32 ^ (uint64_t)(uint32_t)flat << 12 ^ (uint64_t)contribution;
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

/* A range that an operation touches. READ checks that its bytes hold `content`, ADD adds it to a gradient,
 * and SET overwrites. PLAIN accesses neither check nor change what the bytes hold. */
enum zr_sim_how { ZR_SIM_READ, ZR_SIM_ADD, ZR_SIM_SET, ZR_SIM_PLAIN_READ, ZR_SIM_PLAIN_WRITE };
struct zr_sim_touch {
    const void *at;
    int64_t bytes;
    enum zr_sim_how how;
    struct zr_content content;
};

struct zr_sim;

/* The calls that order lines; see `drop`. */
enum zr_sim_edge { ZR_SIM_RECORD, ZR_SIM_WAIT, ZR_SIM_EVENT_SYNC, ZR_SIM_STREAM_SYNC, ZR_SIM_CLEAR };

/* Flaws of a communicator, with which tests show that the checker notices them. */
enum zr_sim_comm_flaw {
    ZR_SIM_GATHER_STARTS_ALONE = 1,
    ZR_SIM_REDUCE_STARTS_ALONE = 2,
    ZR_SIM_REDUCE_LEAVES_ALONE = 4,
    ZR_SIM_EXCHANGE_STARTS_ALONE = 8,
    ZR_SIM_EXCHANGE_LEAVES_ALONE = 16,
    ZR_SIM_BROADCAST_STARTS_ALONE = 32,
    ZR_SIM_BROADCAST_LEAVES_ALONE = 64,
    ZR_SIM_NO_BARRIER = 128,
    /* only in the barriers of jobs */
    ZR_SIM_NO_BARRIER_IN_STEP = 256,
    ZR_SIM_AGREE_STARTS_ALONE = 512,
    ZR_SIM_AGREE_LEAVES_ALONE = 1024,
    /* each half of the ranks agrees separately */
    ZR_SIM_AGREE_APART = 2048,
    ZR_SIM_NO_GATHER = 4096,
    /* ranks meet in an agreement, but each keeps its unchanged record */
    ZR_SIM_AGREE_MOVES_NOTHING = 8192,
    /* each rank combines its part of all records, but does not take the other parts */
    ZR_SIM_AGREE_MOVES_A_PART = 16384,
    ZR_SIM_BROADCAST_MOVES_NOTHING = 32768,
    /* of all-to-alls, shifts, and gathers of arrays */
    ZR_SIM_PARTS_START_ALONE = 65536,
    ZR_SIM_PARTS_LEAVE_ALONE = 131072,
    ZR_SIM_PARTS_MOVE_NOTHING = 262144
};

/* How a collective uses the links. */
enum zr_sim_links {
    /* Each member receives from every other one over its links. Near and far links work at once. */
    ZR_SIM_LINKS_DIRECT,
    /* As NCCL's rings. For each member that a host has in the group, a ring goes from host to host. A host
     * receives all slices but one, also those of its members, over the network links of all its members. It
     * passes them on inside. Each member on the way costs a latency. */
    ZR_SIM_LINKS_RING
};

struct zr_sim_options {
    /* Simulated ranks: all of them, or representatives (comm/sim/symmetry.h). */
    int world;
    /* Most streams that a rank may have open at a time. 0: 5. */
    int n_streams;
    /* The model's stream is the calling thread, as on the host device. */
    bool compute_on_caller;
    /* Answer of event queries. 0: the truth. 1: yes, after waiting until it is true. 2: no. */
    int event_done;

    /* Number of the allocation, stream or event that fails, counted from 1 over all ranks. 0: none. */
    int64_t fail_alloc;

    /* Called while a host thread waits for the device. It lets other threads go on, and returns. */
    void (*yield)(void *arg, int rank);
    /* Returns true if the call is to be left out (a mutant). event and stream may be NULL. */
    bool (*drop)(void *arg, enum zr_sim_edge edge, int rank, const struct zr_event *event,
                 const struct zr_stream *stream);
    /* Returns the content that the sum of gradients of a flat must have in `step`. */
    struct zr_content (*whole_grad)(void *arg, int32_t flat, uint32_t step);
    /* Returns whether a gradient of this rank is not a number in this step. */
    bool (*poisoned)(void *arg, int rank, uint32_t step);
    /* Called when n elements of a rank are squared and added up, for a norm. NULL: not called. */
    void (*squared)(void *arg, int rank, int64_t n);
    /* Called after an operation ran, for a trace. NULL: not called. */
    void (*ran)(void *arg, const struct zr_info *info, const char *line, int rank, int64_t from_ns,
                int64_t to_ns);
    void *arg;
    /* comm_flaws: enum zr_sim_comm_flaw. flawed_roles: 1 << enum zr_role of each communicator that has them.
     * 0: all. */
    unsigned comm_flaws, flawed_roles;

    /* Speeds. With memory_bytes_per_s 0, device operations take no time. states_bytes_per_s: of the memory
     * that has masters and states. 0: they are in the device's memory. */
    double memory_bytes_per_s, states_bytes_per_s, near_bytes_per_s, far_bytes_per_s;
    int64_t launch_ns, near_ns, far_ns;
    int ranks_per_node;
    enum zr_sim_links links;
    /* Communicators move arrays of the program themselves, as NCCL's do (zr_comm_arrays). They do not add
     * arrays up. */
    bool moves_arrays;
    /* Contents of bytes are not checked, because some operations that would write them are not simulated. */
    bool contents_unknown;
};

int zr_sim_open(const struct zr_sim_options *opt, struct zr_sim **out);
/* Call it after everything on its devices was closed. w may be NULL. */
void zr_sim_close(struct zr_sim *w);

/* Returns the device of a rank, which is closed with the world. */
struct zr_device *zr_sim_device(struct zr_sim *w, int rank);

/* zr_sim_line_at returns a rank's line by its number: a host thread, or a stream from ZR_SIM_FIRST_STREAM on.
 * zr_sim_line_number returns the number of a line. */
struct zr_line *zr_sim_line_at(struct zr_sim *w, int rank, int number);
int zr_sim_line_number(const struct zr_sim *w, int32_t line);

/* Selects the host thread of rank (ZR_SIM_MODEL, ZR_SIM_LOOP or ZR_SIM_READER) that makes the calls from here
 * on. Returns its line. */
struct zr_line *zr_sim_host(struct zr_sim *w, int rank, int thread);

/* Puts work of the model's code on a stream, between its brackets. name must outlive the world. */
int zr_sim_compute(struct zr_stream *s, const char *name, const struct zr_sim_touch *touch, int n,
                   int64_t ns);
/* Does the same on the selected host thread, at once. */
void zr_sim_host_touch(struct zr_sim *w, const char *name, const struct zr_sim_touch *touch, int n);

/* zr_sim_register adds memory that is not the device's but takes part, such as the model's buffers or results
 * on the host. zr_sim_mark sets its content. */
int zr_sim_register(struct zr_sim *w, int rank, const char *name, const void *at, int64_t bytes);
void zr_sim_mark(struct zr_sim *w, const void *at, int64_t bytes, struct zr_content content);
/* Returns the bytes that rank holds now. *peak is the most that it ever held. Registered memory does not
 * count. */
int64_t zr_sim_held(const struct zr_sim *w, int rank, int64_t *peak);

/* Returns the record of what was done and found so far. */
struct zr_recorder *zr_sim_recorder(struct zr_sim *w);

int64_t zr_sim_now(const struct zr_line *line);
const struct zr_sim_options *zr_sim_config(const struct zr_sim *w);

/* zr_sim_line_of returns a stream's line. zr_sim_idle returns whether nothing is left on the stream. */
struct zr_line *zr_sim_line_of(struct zr_stream *s);
bool zr_sim_idle(const struct zr_stream *s);
struct zr_sim *zr_sim_of(const struct zr_stream *s);

/* Ends a rank's process: its queued work does not run, and new work is dropped. */
void zr_sim_kill(struct zr_sim *w, int rank);
/* Returns a number that grows whenever anything happens. */
int64_t zr_sim_activity(const struct zr_sim *w);
/* Runs an optimizer's update that a function of the model does, in the current operation. */
void zr_sim_user_update(struct zr_sim *w, const struct zr_update *u);
/* Copies bytes, with their contents, in the current operation of a stream, or on the selected host thread.
 * Returns whether it was a stream. Tests use it to read and write memory that stands for a file. */
bool zr_sim_move(struct zr_sim *w, void *dst, const void *src, int64_t bytes);
/* Return and select the line of the host thread that makes the calls. */
struct zr_line *zr_sim_speaker(const struct zr_sim *w);
void zr_sim_speak(struct zr_sim *w, struct zr_line *host);

/* ---- for comm/sim/sim.h ---- */

/* Puts an operation that needs more than one rank. start is called when the stream reaches it. It returns
 * true if the operation is over; otherwise the stream waits for zr_sim_resume. */
int zr_sim_put(struct zr_stream *s, const char *name, int32_t unit, uint32_t step,
               bool (*start)(void *arg, struct zr_stream *s), void *arg);
void zr_sim_resume(struct zr_stream *s);

/* zr_sim_begin begins a new operation on the line, to which the accesses that follow belong. zr_sim_spend
 * adds its time to the line's clock. */
void zr_sim_begin(struct zr_sim *w, struct zr_line *l, const char *name, int32_t unit, uint32_t step);
void zr_sim_spend(struct zr_sim *w, struct zr_line *l, int64_t ns);

#endif
