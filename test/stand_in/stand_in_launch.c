/* SPDX-License-Identifier: Apache-2.0 */
/* stand_in_launch.c: runs kernels on the CPU.
 *
 * The blocks of a grid run one after another on the stream's thread, in a random order. The threads of a
 * block are fibers. They run one at a time, in a random order, until each ends or waits. They wait at
 * __syncthreads for the whole block, or in a warp's exchange for the lanes of its mask. Some random warps
 * fall behind the others as far as barriers allow. A thread that never waits needs no separate fiber.
 *
 * If no thread can go on, or a thread ends that others wait for, the kernel has diverged. That is misuse,
 * and the device is lost. */
#include "test/stand_in/stand_in_inside.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#define STAND_IN_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define STAND_IN_ASAN 1
#endif
#endif
#ifdef STAND_IN_ASAN
#include <sanitizer/common_interface_defs.h>
enum { STACK_BYTES = 256 << 10 };
#else
enum { STACK_BYTES = 64 << 10 };
#endif

enum { WARP = 32, MAX_THREADS = 1024 };

/* As the C++ header declares them. */
struct index {
    unsigned int x, y, z;
};
extern __thread struct index threadIdx, blockIdx, blockDim, gridDim;
__thread struct index threadIdx, blockIdx, blockDim, gridDim;
void __syncthreads(void);
void __syncwarp(unsigned int mask);
uint64_t stand_in_exchange(unsigned int mask, uint64_t value, int src);
unsigned int __ballot_sync(unsigned int mask, int predicate);

enum state { FRESH, READY, AT_BLOCK, AT_WARP, ENDED };

struct fiber {
    void *sp;
#ifndef __x86_64__
    ucontext_t context;
#endif
    char *stack;
    void *fake; /* for AddressSanitizer */
    struct fiber *next;
};

struct thread {
    enum state state;
    struct fiber *fiber;
    struct index at;
    unsigned int mask;
    uint64_t value[2]; /* of even and odd exchanges, which may overlap */
    unsigned int n_exchanges;
};

/* The state of one stream's thread. */
struct runner {
    struct fiber self; /* the scheduler's own context */
    struct fiber *free;
    struct thread thread[MAX_THREADS];
    int order[MAX_THREADS], n, current;
    void (*run)(void *closure);
    void *closure;
    uint64_t random;
    const void *stack; /* of the scheduler, for AddressSanitizer */
    size_t stack_bytes;
};

static __thread struct runner *runner;

static uint64_t draw(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static void shuffle(int *order, int n, uint64_t *random)
{
    for (int i = n; i > 1; i--) {
        int j = (int)(draw(random) % (uint64_t)i), t = order[i - 1];
        order[i - 1] = order[j];
        order[j] = t;
    }
}

/* --- fibers --- */

#ifdef __x86_64__
/* Saves the registers that a call must keep on this stack, and continues where to's stack was left. */
void si_switch(void **from, void *to);
__asm__(".text\n"
        ".globl si_switch\n"
        ".hidden si_switch\n"
        ".type si_switch, @function\n"
        "si_switch:\n"
        "  pushq %rbp\n"
        "  pushq %rbx\n"
        "  pushq %r12\n"
        "  pushq %r13\n"
        "  pushq %r14\n"
        "  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n"
        "  popq %r14\n"
        "  popq %r13\n"
        "  popq %r12\n"
        "  popq %rbx\n"
        "  popq %rbp\n"
        "  ret\n"
        ".size si_switch, .-si_switch\n");
#endif

static void jump(struct fiber *from, struct fiber *to)
{
#ifdef __x86_64__
    si_switch(&from->sp, to->sp);
#else
    swapcontext(&from->context, &to->context);
#endif
}

static void to_scheduler(struct fiber *f)
{
    struct runner *r = runner;
#ifdef STAND_IN_ASAN
    __sanitizer_start_switch_fiber(&f->fake, r->stack, r->stack_bytes);
#endif
    jump(f, &r->self);
#ifdef STAND_IN_ASAN
    __sanitizer_finish_switch_fiber(f->fake, &r->stack, &r->stack_bytes);
#endif
}

/* Runs threads of blocks, one after another, for ever. */
static void fiber_main(void)
{
    struct runner *r = runner;
#ifdef STAND_IN_ASAN
    __sanitizer_finish_switch_fiber(NULL, &r->stack, &r->stack_bytes);
#endif
    for (;;) {
        struct thread *t = &r->thread[r->current];
        r->run(r->closure);
        t->state = ENDED;
        to_scheduler(t->fiber);
    }
}

static struct fiber *fiber_get(struct runner *r)
{
    struct fiber *f = r->free;
    if (f) {
        r->free = f->next;
        return f;
    }
    f = calloc(1, sizeof *f);
    char *stack =
        mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!f || stack == MAP_FAILED) {
        fprintf(stderr, "stand-in: no memory for a fiber\n");
        abort();
    }
    mprotect(stack, 4096, PROT_NONE);
    f->stack = stack;
#ifdef __x86_64__
    void **top = (void **)(stack + STACK_BYTES) - 2; /* after the return, the stack looks as after a call */
    top[0] = (void *)fiber_main;
    f->sp = top - 6;
    memset(f->sp, 0, 6 * sizeof(void *));
#else
    getcontext(&f->context);
    f->context.uc_stack.ss_sp = stack;
    f->context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&f->context, fiber_main, 0);
#endif
    return f;
}

void si_fibers_end(void)
{
    struct runner *r = runner;
    if (!r)
        return;
    while (r->free) {
        struct fiber *f = r->free;
        r->free = f->next;
        munmap(f->stack, STACK_BYTES);
        free(f);
    }
    free(r);
    runner = NULL;
}

static void run_thread(struct runner *r, int i)
{
    struct thread *t = &r->thread[i];
    if (t->state == FRESH)
        t->fiber = fiber_get(r);
    t->state = READY;
    r->current = i;
    threadIdx = t->at;
#ifdef STAND_IN_ASAN
    __sanitizer_start_switch_fiber(&r->self.fake, t->fiber->stack, STACK_BYTES);
#endif
    jump(&r->self, t->fiber);
#ifdef STAND_IN_ASAN
    __sanitizer_finish_switch_fiber(r->self.fake, NULL, NULL);
#endif
    if (t->state == ENDED) {
        t->fiber->next = r->free;
        r->free = t->fiber;
        t->fiber = NULL;
    }
}

/* --- waiting threads --- */

static void wait_in(enum state state)
{
    struct thread *t = &runner->thread[runner->current];
    t->state = state;
    to_scheduler(t->fiber);
}

void __syncthreads(void)
{
    wait_in(AT_BLOCK);
}

uint64_t stand_in_exchange(unsigned int mask, uint64_t value, int src)
{
    struct runner *r = runner;
    struct thread *t = &r->thread[r->current], *warp = t - r->current % WARP;
    unsigned int turn = t->n_exchanges++ % 2;
    t->value[turn] = value;
    t->mask = mask;
    if (!(mask >> r->current % WARP & 1))
        stand_in_misuse("a lane calls with a mask that it is not in");
    wait_in(AT_WARP);
    if (!(mask >> src & 1))
        stand_in_misuse("a shuffle reads lane %d, which is not in its mask %08x", src, mask);
    return warp[src].value[turn];
}

void __syncwarp(unsigned int mask)
{
    stand_in_exchange(mask, 0, runner->current % WARP);
}

unsigned int __ballot_sync(unsigned int mask, int predicate)
{
    struct runner *r = runner;
    struct thread *t = &r->thread[r->current], *warp = t - r->current % WARP;
    unsigned int turn = t->n_exchanges % 2, bits = 0;
    stand_in_exchange(mask, predicate != 0, r->current % WARP);
    for (int i = 0; i < WARP; i++)
        if (mask >> i & 1)
            bits |= (unsigned int)warp[i].value[turn] << i;
    return bits;
}

/* Releases the threads whose wait is over, and returns their number. */
static int release(struct runner *r, int n_at_block, int n_ended)
{
    int freed = 0;
    if (n_at_block > 0 && n_at_block + n_ended == r->n) {
        if (n_ended)
            stand_in_misuse("a thread ended that others of its block wait for in __syncthreads");
        for (int i = 0; i < r->n; i++)
            if (r->thread[i].state == AT_BLOCK)
                r->thread[i].state = READY, freed++;
    }
    for (int base = 0; base < r->n; base += WARP) {
        for (int lane = 0; lane < WARP && base + lane < r->n; lane++) {
            struct thread *t = &r->thread[base + lane];
            unsigned int mask = t->mask;
            bool all = t->state == AT_WARP;
            for (int i = 0; i < WARP && all; i++)
                if (mask >> i & 1)
                    all = base + i < r->n && r->thread[base + i].state == AT_WARP &&
                          r->thread[base + i].mask == mask &&
                          r->thread[base + i].n_exchanges % 2 == t->n_exchanges % 2;
            for (int i = 0; i < WARP && all; i++)
                if (mask >> i & 1)
                    r->thread[base + i].state = READY, freed++;
        }
    }
    return freed;
}

/* --- blocks --- */

/* Threads that will never end leave fibers that cannot be used again. */
static void drop_waiting(struct runner *r)
{
    for (int i = 0; i < r->n; i++)
        if (r->thread[i].fiber) {
            munmap(r->thread[i].fiber->stack, STACK_BYTES);
            free(r->thread[i].fiber);
        }
}

/* Returns false if the block diverged. */
static bool run_block(struct runner *r)
{
    for (int i = 0; i < r->n; i++) {
        struct thread *t = &r->thread[i];
        unsigned int u = (unsigned int)i;
        *t = (struct thread){
            .state = FRESH, .at = {u % blockDim.x, u / blockDim.x % blockDim.y, u / blockDim.x / blockDim.y}};
        r->order[i] = i;
    }
    uint32_t slow = (uint32_t)draw(&r->random); /* one bit per warp */
    for (;;) {
        int n_at_block = 0, n_ended = 0, n_held = 0;
        uint32_t held = draw(&r->random) % 8 ? slow : 0;
        shuffle(r->order, r->n, &r->random);
        for (int i = 0; i < r->n; i++) {
            struct thread *t = &r->thread[r->order[i]];
            if (t->state == FRESH || t->state == READY) {
                if (held >> r->order[i] / WARP & 1)
                    n_held++;
                else
                    run_thread(r, r->order[i]);
            }
            n_at_block += t->state == AT_BLOCK;
            n_ended += t->state == ENDED;
        }
        if (n_ended == r->n)
            return true;
        if (!release(r, n_at_block, n_ended) && !n_held) {
            stand_in_misuse(
                "the threads of a block wait for each other: a barrier or a shuffle that not all reach");
            drop_waiting(r);
            return false;
        }
    }
}

struct launch {
    void (*run)(void *closure);
    void *closure;
    void (*drop)(void *closure);
    struct dim3 grid, block;
    int device;
};

static uint64_t common_factor(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static void run_launch(void *arg)
{
    const struct launch *l = arg;
    if (!runner) {
        runner = calloc(1, sizeof *runner);
        if (!runner)
            abort();
    }
    struct runner *r = runner;
    uint64_t n_blocks = (uint64_t)l->grid.x * l->grid.y * l->grid.z;
    r->run = l->run;
    r->closure = l->closure;
    r->n = (int)(l->block.x * l->block.y * l->block.z);
    si_lock();
    r->random = draw(&si.seed);
    si_unlock();
    blockDim = (struct index){l->block.x, l->block.y, l->block.z};
    gridDim = (struct index){l->grid.x, l->grid.y, l->grid.z};
    /* i -> i * step + first, modulo n_blocks, visits every block once if step and n_blocks have no common
     * factor. */
    uint64_t first = draw(&r->random) % n_blocks, step = 1 + draw(&r->random) % n_blocks;
    while (common_factor(n_blocks, step) != 1)
        step = step % n_blocks + 1;
    for (uint64_t i = 0; i < n_blocks; i++) {
        uint64_t at = (uint64_t)(((unsigned __int128)i * step + first) % n_blocks);
        blockIdx = (struct index){(unsigned int)(at % l->grid.x), (unsigned int)(at / l->grid.x % l->grid.y),
                                  (unsigned int)(at / l->grid.x / l->grid.y)};
        if (!run_block(r)) {
            si_lock();
            si.device[l->device].lost = cudaErrorLaunchFailure;
            si_unlock();
            return;
        }
    }
}

static void drop_launch(void *arg)
{
    struct launch *l = arg;
    l->drop(l->closure);
    free(l);
}

cudaError_t stand_in_launch(void (*run)(void *closure), void *closure, size_t bytes,
                            void (*drop)(void *closure), struct dim3 grid, struct dim3 block,
                            size_t shared_bytes, cudaStream_t stream)
{
    cudaError_t err = stand_in_begin("cudaLaunchKernel");
    uint64_t threads = (uint64_t)block.x * block.y * block.z;
    if (!err && (threads == 0 || threads > MAX_THREADS || block.z > 64 || !grid.x || !grid.y || !grid.z ||
                 grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535))
        err = cudaErrorInvalidConfiguration;
    if (!err && shared_bytes) {
        stand_in_misuse("cudaLaunchKernel: dynamic shared memory is not modelled");
        err = cudaErrorNotSupported;
    }
    struct launch *l = err ? NULL : malloc(sizeof *l);
    if (!l) {
        drop(closure);
        return stand_in_done(err ? err : cudaErrorMemoryAllocation);
    }
    *l = (struct launch){run, closure, drop, grid, block, si_device()};
    si_reach_arguments(closure, bytes);
    return stand_in_done(si_put_work(stream, "cudaLaunchKernel", run_launch, l, drop_launch, SI_SHORT));
}
