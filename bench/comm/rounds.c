/* SPDX-License-Identifier: Apache-2.0 */
/* rounds.c: measures and checks the collectives of zero-bench comm.
 *
 * An agreement (COMM_AGREE) is zr_comm_agree: a small all-reduce of 64-bit words in place. The first half of
 * the words become their sums over the ranks, the others their maxima. */
#include "bench/comm/rounds.h"
#include "bench/comm/values.h"
#include "kernels/alloc.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    SLICE_ALIGN = 128,
    HOST_BUFFER_BYTES = 1 << 20,
    CONTROL_BYTES = 4096,
    N_WARM_ROUNDS = 2,
    /* A round repeats a row's call until it has moved about CALLS_BYTES, at most MAX_CALLS times. */
    MAX_CALLS = 20,
    CALLS_BYTES = 1 << 20,
    /* time from the last rank's arrival to the common start of all ranks on a machine */
    START_NS = 200000,
};

_Static_assert(COMM_MAX_ROWS * sizeof(uint64_t) <= CONTROL_BYTES, "a word for each row");

const char *const comm_op_names[COMM_OPS] = {
    [COMM_ALL_GATHER] = "all_gather", [COMM_REDUCE_SCATTER] = "reduce_scatter", [COMM_AGREE] = "agree"};

const char *comm_row_name(const struct comm_row *row)
{
    return row->mpi_call != COMM_NO_MPI_CALL ? zr_mpi_own_name((enum zr_mpi_own)row->mpi_call)
           : row->backend                    ? row->backend->kind->name
           : row->op == COMM_ALL_GATHER      ? "copy limit"
                                             : "add limit";
}

int64_t comm_slice(int64_t bytes, int n)
{
    int64_t slice = bytes / n / SLICE_ALIGN * SLICE_ALIGN;
    return slice ? slice : SLICE_ALIGN;
}

/* ---- memory ---- */

/* Places the regions of all collectives in an arena. Returns the arena's size. */
static int64_t lay_out(struct comm_rounds *b, int64_t slice)
{
    int64_t region = (b->n * slice + 255) / 256 * 256;
    int64_t sum = slice / zr_dtype_bytes(b->dtype) * (int64_t)sizeof(float);
    b->gather_at = 0;
    b->reduce_at = region;
    b->sum_at = 2 * region;
    b->words_at = b->sum_at + (sum + 255) / 256 * 256;
    b->control_at = b->words_at + COMM_MAX_AGREE;
    return b->control_at + CONTROL_BYTES;
}

/* Whether the collective has a limit. An agreement has none. The limit of reduce-scatters adds one slice for
 * each rank in one call of the kernel, which takes at most ZR_MAX_SOURCES slices. */
static bool has_limit(const struct comm_rounds *b, enum comm_op op)
{
    return op == COMM_ALL_GATHER ? b->n > 1 : op == COMM_REDUCE_SCATTER && b->n <= ZR_MAX_SOURCES;
}

/* Whether MPI's own collectives may be measured. This is an upper bound, for memory that is planned before
 * the backends are open. */
static bool may_have_mpi(const struct comm_rounds *b)
{
    const char mpi[] = "mpi";
    return b->n > 1 && !b->asked.cuda &&
           (!b->asked.backends || b->asked.backends & comm_backend_bit(mpi, strlen(mpi)));
}

static int64_t mpi_input_bytes(const struct comm_rounds *b, int64_t slice)
{
    bool sums = b->asked.ops >> COMM_REDUCE_SCATTER & 1;
    return may_have_mpi(b) && sums && b->dtype == ZERO_BF16 ? b->n * slice * 2 : 0;
}

static bool is_asked(const struct comm_rounds *b, enum comm_op op)
{
    return b->asked.ops >> op & 1;
}

/* Whether the mpi backend is open, so that MPI's own collectives can be measured. */
static bool has_mpi(const struct comm_rounds *b)
{
    for (int i = 0; i < b->ranks->n_backends; i++)
        if (comm_backend_is_mpi(&b->ranks->backend[i]))
            return b->n > 1;
    return false;
}

static int allocate_mpi_input(struct comm_rounds *b, int64_t bytes)
{
    void *at = NULL;
    int err = bytes ? b->ranks->dev->ops->alloc(b->ranks->dev, bytes, &at) : 0;
    b->mpi_input = at;
    b->mpi_input_bytes = bytes;
    return err;
}

static int allocate(struct comm_rounds *b, int64_t slice)
{
    struct zr_device *dev = b->ranks->dev;
    const struct zr_group *g = b->ranks->group;
    ZR_TRY(ZR_ZALLOC(b->times, COMM_MAX_ROWS * b->asked.rounds, "the times of %lld rounds",
                     (long long)b->asked.rounds));
    ZR_TRY(ZR_ZALLOC(b->source, b->n, "the sources of %d ranks", b->n));
    for (int i = 0; i < b->n; i++)
        b->source[i].rank = zr_group_member(g, i);
    int err = dev->ops->host_alloc(dev, HOST_BUFFER_BYTES, (void **)&b->host_buffer);
    err = err ? err : dev->ops->host_alloc(dev, CONTROL_BYTES, (void **)&b->control);
    err = err ? err : comm_limits_open(&b->limits, dev, b->ranks->stream, b->n, slice, b->dtype);
    return err || !has_mpi(b) ? err : allocate_mpi_input(b, mpi_input_bytes(b, slice));
}

int comm_rounds_open(struct comm_rounds *b, struct comm_ranks *r, const struct comm_asked *a)
{
    *b = (struct comm_rounds){
        .ranks = r, .asked = *a, .dtype = (enum zero_dtype)a->dtype, .n = r->group->size};
    int64_t slice = comm_slice(a->to_bytes, b->n), arena = lay_out(b, slice);
    int err = comm_ranks_open(r, a, slice, arena,
                              comm_limits_bytes(b->n, slice, b->dtype) + mpi_input_bytes(b, slice));
    return err ? err : allocate(b, slice);
}

void comm_rounds_close(struct comm_rounds *b)
{
    struct zr_device *dev = b->ranks ? b->ranks->dev : NULL;
    comm_limits_close(&b->limits);
    if (b->host_buffer)
        dev->ops->host_free(dev, b->host_buffer, HOST_BUFFER_BYTES);
    if (b->control)
        dev->ops->host_free(dev, b->control, CONTROL_BYTES);
    if (b->mpi_input)
        dev->ops->free(dev, b->mpi_input, b->mpi_input_bytes);
    free(b->times);
    free(b->source);
    memset(b, 0, sizeof *b);
}

/* ---- exchanges between ranks ---- */

/* Replaces the first n_sum values of b->control by their sums over all ranks, and the next n_max by the
 * largest. It works over any backend. */
static int merge(struct comm_rounds *b, const struct comm_backend *over, int n_sum, int n_max)
{
    struct comm_ranks *r = b->ranks;
    const struct zr_tag tag = {.unit = -1};
    char *at = over->arena + b->control_at;
    int64_t bytes = (n_sum + n_max) * (int64_t)sizeof *b->control;
    int err = r->dev->ops->copy(r->stream, at, b->control, bytes);
    err = err ? err : zr_comm_agree(over->all, r->stream, b->control_at, n_sum, n_max, &tag);
    err = err ? err : r->dev->ops->copy(r->stream, b->control, at, bytes);
    return err ? err : comm_ranks_sync(r);
}

/* Sleeps for most of the time, because another rank may need the core. */
static void wait_until(int64_t ns)
{
    int64_t left;
    while ((left = ns - zr_now_ns()) > 0)
        if (left > START_NS / 2)
            nanosleep(&(struct timespec){.tv_nsec = left - START_NS / 2}, NULL);
        else
            zr_relax();
}

/* Returns when all ranks are here. On one host they return at the same time; clocks of several hosts
 * differ. */
static int start_together(struct comm_rounds *b, const struct comm_backend *over)
{
    b->control[0] = (uint64_t)zr_now_ns();
    int err = merge(b, over, 0, 1);
    if (!err && b->ranks->topology.n_hosts == 1)
        wait_until((int64_t)b->control[0] + START_NS);
    return err;
}

/* ---- operations ---- */

static struct zr_cut cut_of(const struct comm_rounds *b)
{
    return (struct zr_cut){.each = b->slice, .total = b->bytes};
}

static int64_t n_words(const struct comm_rounds *b)
{
    return b->bytes / (int64_t)sizeof(uint64_t);
}

/* The number of elements in a slice. */
static int64_t n_elements(const struct comm_rounds *b)
{
    return b->slice / zr_dtype_bytes(b->dtype);
}

static int issue_backend(struct comm_rounds *b, enum comm_op op, struct comm_backend *backend)
{
    const struct zr_tag tag = {.unit = -1};
    struct zr_stream *s = b->ranks->stream;
    int64_t words = n_words(b);
    const struct zr_gather_seg gather = {
        .src = b->gather_at, .dst = b->gather_at, .in_place = true, .cut = cut_of(b)};
    const struct zr_reduce_seg reduce = {
        .src = b->reduce_at, .dst = b->sum_at, .cut = cut_of(b), .dtype = b->dtype};
    switch (op) {
    case COMM_ALL_GATHER:
        return zr_comm_all_gather(backend->gather, s, &gather, 1, &tag);
    case COMM_REDUCE_SCATTER:
        return zr_comm_reduce_scatter(backend->reduce, s, &reduce, 1, &tag);
    default:
        return zr_comm_agree(backend->reduce, s, b->words_at, (int32_t)(words / 2),
                             (int32_t)(words - words / 2), &tag);
    }
}

/* Enqueues a call of MPI's own. Its gathers move bytes of any type. */
static int issue_mpi_call(struct comm_rounds *b, const struct comm_row *row)
{
    struct comm_backend *backend = row->backend;
    const enum zr_mpi_own call = (enum zr_mpi_own)row->mpi_call;
    struct zr_stream *s = b->ranks->stream;
    const char *from = b->mpi_input ? b->mpi_input : backend->arena + b->reduce_at;
    if (row->op == COMM_ALL_GATHER)
        return zr_mpi_own_put(backend->gather, s, call, NULL, (float *)(backend->arena + b->gather_at),
                              b->slice / (int64_t)sizeof(float));
    return zr_mpi_own_put(backend->reduce, s, call, (const float *)from,
                          (float *)(backend->arena + b->sum_at), n_elements(b));
}

/* Enqueues a row's call. */
static int issue(struct comm_rounds *b, const struct comm_row *row)
{
    struct zr_stream *s = b->ranks->stream;
    return row->mpi_call != COMM_NO_MPI_CALL ? issue_mpi_call(b, row)
           : row->backend                    ? issue_backend(b, row->op, row->backend)
           : row->op == COMM_ALL_GATHER      ? comm_limits_copy(&b->limits, s, b->n, b->slice)
                                             : comm_limits_add(&b->limits, s, b->n, b->slice);
}

/* Times a row's call on this rank. */
static int measure(struct comm_rounds *b, const struct comm_row *row, uint64_t *ns)
{
    int64_t calls = CALLS_BYTES / b->bytes;
    calls = calls < 1 ? 1 : calls > MAX_CALLS ? MAX_CALLS : calls;
    int err = start_together(b, row->backend ? row->backend : &b->ranks->backend[0]);
    int64_t start = zr_now_ns();
    for (int64_t i = 0; i < calls && !err; i++)
        err = issue(b, row);
    err = err ? err : comm_ranks_sync(b->ranks);
    *ns = (uint64_t)((zr_now_ns() - start) / calls);
    return err;
}

/* ---- values ---- */

static uint64_t seed_of(enum comm_op op)
{
    return ((uint64_t)op + 1) << 32;
}

/* A range of device memory. It passes through b->host_buffer, a chunk at a time. */
struct range {
    char *at;
    int64_t bytes;
    enum zero_dtype dtype;
};

/* Bytes of the chunk that begins at `at`. */
static int64_t chunk_bytes(const struct range *x, int64_t at)
{
    return x->bytes - at < HOST_BUFFER_BYTES ? x->bytes - at : HOST_BUFFER_BYTES;
}

/* Copies b->host_buffer to the chunk at `at`, or back. */
static int copy_chunk(struct comm_rounds *b, const struct range *x, int64_t at, bool back)
{
    const struct zr_device_ops *dev = b->ranks->dev->ops;
    char *there = x->at + at;
    ZR_TRY(dev->copy(b->ranks->stream, back ? b->host_buffer : there, back ? there : b->host_buffer,
                     chunk_bytes(x, at)));
    return dev->stream_sync(b->ranks->stream);
}

/* Fills a range with the values of a source, or, if source is NULL, with bits that are NaN in every dtype. */
static int fill(struct comm_rounds *b, struct range x, const struct comm_source *source)
{
    int64_t size = zr_dtype_bytes(x.dtype);
    for (int64_t at = 0; at < x.bytes; at += HOST_BUFFER_BYTES) {
        if (source)
            comm_values_fill(b->host_buffer, x.dtype, *source, at / size, chunk_bytes(&x, at) / size);
        else
            memset(b->host_buffer, 0xff, (size_t)chunk_bytes(&x, at));
        ZR_TRY(copy_chunk(b, &x, at, false));
    }
    return 0;
}

static struct range slice_range(const struct comm_rounds *b, const struct comm_backend *backend, int i)
{
    return (struct range){backend->arena + b->gather_at + i * b->slice, b->slice, b->dtype};
}

static struct range sum_range(const struct comm_rounds *b, const struct comm_backend *backend)
{
    return (struct range){backend->arena + b->sum_at, n_elements(b) * (int64_t)sizeof(float), ZERO_F32};
}

/* Fills the input of an agreement. */
static int fill_words(struct comm_rounds *b, const struct comm_backend *backend)
{
    const struct zr_device_ops *dev = b->ranks->dev->ops;
    const struct comm_source source = {.seed = seed_of(COMM_AGREE), .rank = b->ranks->world.rank};
    comm_words_fill((uint64_t *)b->host_buffer, source, n_words(b));
    int err = dev->copy(b->ranks->stream, backend->arena + b->words_at, b->host_buffer, n_words(b) * 8);
    return err ? err : dev->stream_sync(b->ranks->stream);
}

/* Fills the inputs of a backend's gathers and sums. They keep their values in all calls. Ours and MPI's
 * own sums only read them. MPI's own gather may write this rank's slice, but leaves the same values there. */
static int fill_inputs(struct comm_rounds *b, const struct comm_backend *backend)
{
    int32_t me = b->ranks->world.rank;
    const struct comm_source gathered = {seed_of(COMM_ALL_GATHER), me},
                             reduced = {seed_of(COMM_REDUCE_SCATTER), me};
    ZR_TRY(fill(b, slice_range(b, backend, b->ranks->group->rank), &gathered));
    return fill(b, (struct range){backend->arena + b->reduce_at, b->bytes, b->dtype}, &reduced);
}

/* Fills the fp32 input of MPI's sums, if they have one. */
static int fill_mpi_input(struct comm_rounds *b)
{
    const struct comm_source source = {seed_of(COMM_REDUCE_SCATTER), b->ranks->world.rank};
    struct range all = {b->mpi_input, b->n * n_elements(b) * (int64_t)sizeof(float), ZERO_F32};
    return b->mpi_input ? fill(b, all, &source) : 0;
}

/* Fills the memory of a row's result with NaN, except for COMM_AGREE. An agreement works in place, so its
 * input is renewed instead. */
static int poison_result(struct comm_rounds *b, const struct comm_row *row)
{
    if (row->op == COMM_AGREE)
        return fill_words(b, row->backend);
    if (row->op == COMM_REDUCE_SCATTER)
        return fill(b, sum_range(b, row->backend), NULL);
    for (int i = 0; i < b->n; i++)
        if (i != b->ranks->group->rank)
            ZR_TRY(fill(b, slice_range(b, row->backend, i), NULL));
    return 0;
}

static int check_gather(struct comm_rounds *b, struct comm_row *row)
{
    int64_t size = zr_dtype_bytes(b->dtype);
    for (int i = 0; i < b->n; i++) {
        const struct range slice = slice_range(b, row->backend, i);
        for (int64_t at = 0; at < slice.bytes; at += HOST_BUFFER_BYTES) {
            ZR_TRY(copy_chunk(b, &slice, at, true));
            row->wrong += comm_values_differ(b->host_buffer, b->dtype, b->source[i], at / size,
                                             chunk_bytes(&slice, at) / size);
        }
    }
    return 0;
}

static int check_sum(struct comm_rounds *b, struct comm_row *row)
{
    bool is_ours = row->mpi_call == COMM_NO_MPI_CALL;
    const struct comm_sum sum = {.source = b->source,
                                 .n_sources = b->n,
                                 .dtype = is_ours ? b->dtype : ZERO_F32,
                                 .exact = is_ours && row->backend->reduce->ops->deterministic &&
                                          b->n <= ZR_MAX_SOURCES};
    const struct range result = sum_range(b, row->backend);
    const int64_t size = sizeof(float), first = b->ranks->group->rank * n_elements(b);
    for (int64_t at = 0; at < result.bytes; at += HOST_BUFFER_BYTES) {
        ZR_TRY(copy_chunk(b, &result, at, true));
        row->wrong += comm_values_sum_differs((float *)b->host_buffer, &sum, first + at / size,
                                              chunk_bytes(&result, at) / size);
    }
    return 0;
}

static int check_words(struct comm_rounds *b, struct comm_row *row)
{
    const struct zr_device_ops *dev = b->ranks->dev->ops;
    int64_t n = n_words(b);
    int err = dev->copy(b->ranks->stream, b->host_buffer, row->backend->arena + b->words_at, n * 8);
    err = err ? err : dev->stream_sync(b->ranks->stream);
    row->wrong += comm_words_differ((uint64_t *)b->host_buffer, b->source, b->n, n / 2, n - n / 2);
    return err;
}

/* Poisons the result, makes one call, and compares. Before a call of MPI's own, ranks meet in a barrier.
 * MPI's gather may write this rank's slice, which others may still read after a gather of ours (comm.h). Our
 * calls do not write that slice, so they need no barrier. */
static int check_row(struct comm_rounds *b, struct comm_row *row)
{
    for (int i = 0; i < b->n; i++)
        b->source[i].seed = seed_of(row->op);
    int err = row->mpi_call == COMM_NO_MPI_CALL ? 0 : merge(b, row->backend, 0, 1);
    err = err ? err : poison_result(b, row);
    err = err ? err : issue(b, row);
    err = err ? err : comm_ranks_sync(b->ranks);
    if (err)
        return err;
    return row->op == COMM_ALL_GATHER       ? check_gather(b, row)
           : row->op == COMM_REDUCE_SCATTER ? check_sum(b, row)
                                            : check_words(b, row);
}

static int check_all(struct comm_rounds *b)
{
    for (int k = 0; k < b->n_rows; k++)
        if (b->row[k].backend)
            ZR_TRY(check_row(b, &b->row[k]));
    return 0;
}

/* ---- rounds ---- */

static struct comm_row *add_row(struct comm_rounds *b, enum comm_op op, struct comm_backend *backend,
                                struct comm_row *limit)
{
    struct comm_row *row = &b->row[b->n_rows];
    *row = (struct comm_row){.op = op,
                             .backend = backend,
                             .mpi_call = COMM_NO_MPI_CALL,
                             .limit = limit,
                             .ns = b->times + b->n_rows * b->asked.rounds};
    b->n_rows++;
    return row;
}

/* Adds MPI's own collectives. MPI counts elements in an int, over all ranks in some libraries. */
static void add_mpi_calls(struct comm_rounds *b, enum comm_op op, struct comm_backend *backend,
                          struct comm_row *limit)
{
    int first = op == COMM_ALL_GATHER ? ZR_MPI_OWN_ALLGATHER : ZR_MPI_OWN_REDUCE_SCATTER;
    int end = op == COMM_ALL_GATHER ? ZR_MPI_OWN_ALLGATHER + 1 : ZR_MPI_OWNS;
    if (op == COMM_AGREE || b->n == 1 || b->n * n_elements(b) > INT_MAX)
        return;
    for (int call = first; call < end; call++)
        add_row(b, op, backend, limit)->mpi_call = call;
}

static void choose_rows(struct comm_rounds *b)
{
    b->n_rows = 0;
    for (int op = 0; op < COMM_OPS; op++) {
        if (!is_asked(b, (enum comm_op)op) || (op == COMM_AGREE && b->bytes > COMM_MAX_AGREE))
            continue;
        struct comm_row *limit =
            has_limit(b, (enum comm_op)op) ? add_row(b, (enum comm_op)op, NULL, NULL) : NULL;
        for (int i = 0; i < b->ranks->n_backends; i++)
            add_row(b, (enum comm_op)op, &b->ranks->backend[i], limit);
        for (int i = 0; i < b->ranks->n_backends; i++)
            if (comm_backend_is_mpi(&b->ranks->backend[i]))
                add_mpi_calls(b, (enum comm_op)op, &b->ranks->backend[i], limit);
    }
}

/* Times are those of the slowest rank. */
static int run_round(struct comm_rounds *b, int64_t round)
{
    uint64_t ns[COMM_MAX_ROWS] = {0};
    int err = 0;
    for (int k = 0; k < b->n_rows && !err; k++) {
        int64_t i = (k + round + N_WARM_ROUNDS) % b->n_rows;
        err = measure(b, &b->row[i], &ns[i]);
    }
    if (err || round < 0)
        return err;
    memcpy(b->control, ns, sizeof ns);
    err = merge(b, &b->ranks->backend[0], 0, b->n_rows);
    for (int k = 0; k < b->n_rows; k++)
        b->row[k].ns[round] = (double)b->control[k];
    return err;
}

/* Adds up each row's wrong elements over all ranks. */
static int sum_wrong(struct comm_rounds *b)
{
    for (int k = 0; k < b->n_rows; k++)
        b->control[k] = (uint64_t)b->row[k].wrong;
    int err = merge(b, &b->ranks->backend[0], b->n_rows, 0);
    for (int k = 0; k < b->n_rows; k++)
        b->row[k].wrong = (int64_t)b->control[k];
    return err;
}

int comm_rounds_run(struct comm_rounds *b, int64_t slice)
{
    int err = 0;
    b->slice = slice;
    b->bytes = b->n * slice;
    choose_rows(b);
    for (int i = 0; i < b->ranks->n_backends && !err; i++)
        err = fill_inputs(b, &b->ranks->backend[i]);
    err = err ? err : fill_mpi_input(b);
    err = err ? err : check_all(b);
    for (int64_t round = -N_WARM_ROUNDS; round < b->asked.rounds && !err; round++)
        err = run_round(b, round);
    err = err ? err : check_all(b);
    return err ? err : sum_wrong(b);
}
