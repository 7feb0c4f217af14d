/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_inside.h: what the stand-in's files share.
 *
 * One lock for everything that is not the work itself. Under ThreadSanitizer, lock and unlock, and what is
 * read and written between them, are hidden: the edges it sees are only those that CUDA promises, drawn by
 * ORDER_AFTER and ORDER_BEFORE on operations. */
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

/* Work that cannot block, on the stream's own account; a host function; and other work, which may block. */
enum si_kind { SI_OTHER, SI_SHORT, SI_HOST_FUNCTION };

/* Work on a stream, or a place in it. Lives until it has run and nobody holds it. */
struct si_op {
    int n_refs;
    bool done;
    /* NULL: there is nothing to do, and it only marks a place */
    void (*fn)(void *arg);
    void (*drop)(void *arg);
    void *arg;
    enum si_kind kind;
    int64_t done_ns;
    struct si_op *next;
    int n_after;
    /* operations that must be done first, each of them held */
    struct si_op *after[];
};

struct CUstream_st {
    int device;
    unsigned flags;
    int priority;
    bool alive, ending;
    /* list of operations that wait or run */
    struct si_op *first, *end;
    /* the first runs, and is a short one */
    bool running_short;
    /* the last that was ever put, held; NULL: none was */
    struct si_op *last;
    /* there is something to do */
    pthread_cond_t cond;
    enum cudaStreamCaptureStatus capture;
    /* of the capture that is open, and who began it */
    enum cudaStreamCaptureMode capture_mode;
    pthread_t capture_thread;
    struct CUstream_st *next;
};

struct CUevent_st {
    int device;
    unsigned flags;
    bool alive;
    /* held; NULL: it was never recorded */
    struct si_op *record;
    struct CUevent_st *next;
};

struct si_device {
    int64_t used_bytes;
    /* what every call returns once the device is lost, when no work runs; 0: it is not */
    cudaError_t lost;
    /* the NULL stream, made at its first use */
    struct CUstream_st *legacy;
    bool has_context;
    /* one host function at a time, whatever stream it is on */
    bool host_function_runs;
};

struct si_state {
    pthread_mutex_t lock;
    /* an operation is done */
    pthread_cond_t moved;
    struct stand_in_machine machine;
    struct si_device device[STAND_IN_MOST_DEVICES];
    /* all that there ever were, until stand_in_end */
    struct CUstream_st *streams;
    struct CUevent_st *events;
    /* threads of streams */
    int n_threads;
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
/* A handle's stream, the NULL stream's own for NULL; NULL with *err set when there is none such. Lock held.
 */
struct CUstream_st *si_stream(const char *call, cudaStream_t handle, cudaError_t *err);
/* Puts an operation on s, with its own order and that of the NULL stream; the caller holds what is returned.
 * Lock held. NULL: no memory. */
struct si_op *si_put(struct CUstream_st *s, void (*fn)(void *arg), void *arg, void (*drop)(void *arg),
                     struct si_op *after);
/* Lock held. NULL is allowed. */
void si_let_go(struct si_op *op);
/* Waits until op (NULL: nothing) is done, and orders the caller after it. Lock held. Counted as a host wait.
 */
void si_wait_for(struct si_op *op);
/* As stand_in_put, for work of any kind. */
cudaError_t si_put_work(cudaStream_t stream, const char *what, void (*fn)(void *arg), void *arg,
                        void (*drop)(void *arg), enum si_kind kind);
/* On a device that is lost: lets what runs there end, and orders the caller after all that ran. Lock held. */
void si_wait_for_lost(int device);
/* Waits for all streams of a device (-1: of all). Lock held. */
void si_wait_for_device(int device);

/* stand_in_memory.c: forgets freed ranges; what is still allocated is misuse. Lock held. */
void si_memory_end(void);
void si_streams_end(void);
extern _Thread_local bool si_in_host_function;
void si_misuse_locked(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* stand_in_capture.c. What a call of that name must return at once because a stream is being captured: 0 if
 * it is not one of the unsafe ones, or nobody captures, or the calling thread's mode allows it. Lock held. */
cudaError_t si_unsafe_in_capture(const char *call);
/* Work for a stream that is being captured: misuse, for graphs are not modelled. 0: it is not. Lock held. */
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
