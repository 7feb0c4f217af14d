/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_inside.h: declarations that the stand-in's files share.
 *
 * One lock protects everything except the work itself. Lock, unlock and the data that they protect are
 * hidden from ThreadSanitizer. The only order it sees is the one that CUDA promises, which ORDER_AFTER and
 * ORDER_BEFORE declare for operations. */
#ifndef ZR_TEST_STAND_IN_INSIDE_H
#define ZR_TEST_STAND_IN_INSIDE_H

#include "test/stand_in/stand_in.h"

#include <pthread.h>

#if defined(__SANITIZE_THREAD__)
#define STAND_IN_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define STAND_IN_TSAN 1
#endif
#endif

#ifdef STAND_IN_TSAN
void AnnotateIgnoreReadsBegin(const char *file, int line);
void AnnotateIgnoreReadsEnd(const char *file, int line);
void AnnotateIgnoreWritesBegin(const char *file, int line);
void AnnotateIgnoreWritesEnd(const char *file, int line);
void AnnotateIgnoreSyncBegin(const char *file, int line);
void AnnotateIgnoreSyncEnd(const char *file, int line);
void __tsan_acquire(void *at);
void __tsan_release(void *at);
#define ORDER_AFTER(op)  __tsan_acquire(op)
#define ORDER_BEFORE(op) __tsan_release(op)
#else
#define ORDER_AFTER(op)  ((void)(op))
#define ORDER_BEFORE(op) ((void)(op))
#endif

/* Work of the stream itself, which cannot block; a host function; and other work, which may block. */
enum si_kind { SI_OTHER, SI_SHORT, SI_HOST_FUNCTION };

/* Work on a stream, or a position in it. It lives until it has run and nobody holds a reference. */
struct si_op {
    int n_refs;
    bool done;
    /* NULL: nothing to do; it only marks a position */
    void (*fn)(void *arg);
    void (*drop)(void *arg);
    void *arg;
    enum si_kind kind;
    int64_t done_ns;
    struct CUstream_st *stream;
    /* the work of another stream in front of it in the hardware queue, which must start first; referenced */
    struct si_op *behind;
    /* started; another operation may wait for that; seen by the walk of that number */
    bool started, is_awaited;
    unsigned walk;
    struct si_op *next;
    int n_after;
    /* operations that must be done first; a reference is held to each */
    struct si_op *after[];
};

struct CUstream_st {
    int device;
    unsigned flags;
    int priority;
    /* the hardware queue that it shares with other streams */
    int queue;
    bool alive, ending;
    /* list of operations that wait or run */
    struct si_op *first, *end;
    /* the first operation runs, and is a short one */
    bool running_short;
    /* the last operation ever queued, referenced; NULL: none yet */
    struct si_op *last;
    /* there is work to do */
    pthread_cond_t cond;
    enum cudaStreamCaptureStatus capture;
    /* the mode of the open capture, and the thread that began it */
    enum cudaStreamCaptureMode capture_mode;
    pthread_t capture_thread;
    struct CUstream_st *next;
};

struct CUevent_st {
    int device;
    unsigned flags;
    bool alive;
    /* referenced; NULL: never recorded */
    struct si_op *record;
    struct CUevent_st *next;
};

enum { SI_MAX_QUEUES = 32 };

struct si_device {
    int64_t used_bytes;
    /* the result of every call after the device is lost, when no work runs; 0: not lost */
    cudaError_t lost;
    /* the NULL stream, made at its first use */
    struct CUstream_st *legacy;
    bool has_context;
    /* only one host function runs at a time, on any stream */
    bool host_function_runs;
    /* the last operation put into each hardware queue, referenced; NULL: none */
    struct si_op *queue_end[SI_MAX_QUEUES];
};

struct si_state {
    pthread_mutex_t lock;
    /* an operation is done */
    pthread_cond_t moved;
    struct stand_in_machine machine;
    struct si_device device[STAND_IN_MAX_DEVICES];
    /* all streams ever made, until stand_in_end */
    struct CUstream_st *streams;
    struct CUevent_st *events;
    /* number of stream threads */
    int n_threads;
    /* hardware queues of each device, and walks over operations so far */
    int n_queues;
    unsigned n_walks;
    int64_t n_host_waits;
    bool forbid_unrecorded;
    uint64_t seed;
};

extern struct si_state si;

void si_lock(void);
void si_unlock(void);
/* Waits on cond with the lock held. */
void si_wait(pthread_cond_t *cond);

/* The calling thread's current device. */
int si_device(void);
/* Returns a handle's stream; for NULL, the NULL stream. Returns NULL with *err set if there is no such
 * stream. Call with the lock held. */
struct CUstream_st *si_stream(const char *call, cudaStream_t handle, cudaError_t *err);
/* Puts an operation on s, ordered after s and the NULL stream's work. The caller gets a reference. Returns
 * NULL without memory. Call with the lock held. */
struct si_op *si_put(struct CUstream_st *s, void (*fn)(void *arg), void *arg, void (*drop)(void *arg),
                     struct si_op *after);
/* Drops a reference; op may be NULL. Call with the lock held. */
void si_let_go(struct si_op *op);
/* Waits until op (NULL: nothing) is done, and orders the caller after it. Counts as a host wait. Call with
 * the lock held. */
void si_wait_for(struct si_op *op);
/* Does what stand_in_put does, for any kind of work. */
cudaError_t si_put_work(cudaStream_t stream, const char *what, void (*fn)(void *arg), void *arg,
                        void (*drop)(void *arg), enum si_kind kind);
/* For a lost device: waits for the work that runs there, and orders the caller after everything that ran.
 * Call with the lock held. */
void si_wait_for_lost(int device);
/* Waits for all streams of a device (-1: of all devices). Call with the lock held. */
void si_wait_for_device(int device);

/* stand_in_memory.c: forgets freed ranges. What is still allocated is misuse. Call with the lock held. */
void si_memory_end(void);
void si_streams_end(void);
extern _Thread_local bool si_in_host_function;
void si_misuse_locked(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* Returns whether p is in live memory, or just behind it. */
bool si_is_in_block(const void *p);
/* Finds the allocation, live or freed, that contains p. Call with the lock held. */
bool si_find_any(const void *p, struct stand_in_range *out);

/* stand_in_closed.c: takes memory of a device and gives it back; at stand_in_end its addresses are used
 * again. Call with the lock held. */
void *si_closed_take(int device, size_t bytes);
void si_closed_release(void *at, size_t bytes);
void si_closed_end(void);
/* Makes a kernel's arguments accessible to it: translates each address of device memory in the bytes. */
void si_reach_arguments(void *closure, size_t bytes);
/* Ends what stand_in_touch began. */
void si_touch_end(void);
/* This thread is a stream's. */
extern _Thread_local bool si_on_stream;

/* stand_in_capture.c: returns what a call of that name must return because a stream is being captured.
 * Returns 0 if the call is safe, no stream is being captured, or the calling thread's mode allows it. Call
 * with the lock held. */
cudaError_t si_unsafe_in_capture(const char *call);
/* Refuses work for a stream that is being captured as misuse, since graphs are not modelled. Returns 0 if
 * it is not. Call with the lock held. */
cudaError_t si_refuse_captured(const char *call, const struct CUstream_st *s);

/* stand_in_launch.c: frees the fibers of this stream's thread. */
void si_fibers_end(void);

#define SI_BEGIN(call)                                                                                       \
    do {                                                                                                     \
        cudaError_t begun = stand_in_begin(call);                                                            \
        if (begun)                                                                                           \
            return stand_in_done(begun);                                                                     \
    } while (0)

#endif
