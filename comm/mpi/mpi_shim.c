/* SPDX-License-Identifier: Apache-2.0 */
/* mpi_shim.c: the module libzero-mpi.so, which is the table of mpi_shim.h over one MPI library. It is the
 * only file that sees mpi.h.
 *
 * MPI 3.0 is enough. Nothing here waits for, cancels or frees a request. Cancelling a complete request aborts
 * MPICH, and cancelling a request of a peer that died can do the same. */
#include "comm/mpi/mpi_shim.h"

#include <mpi.h>

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Static_assert(MPI_VERSION >= 3, "MPI 3.0 is needed: collectives that do not block");

#define SHOWN      __attribute__((visibility("default")))
#define TEXT_OF(x) #x
#define NUMBER(x)  TEXT_OF(x)
#ifdef OPEN_MPI
#define COMPILED NUMBER(OMPI_MAJOR_VERSION) "." NUMBER(OMPI_MINOR_VERSION) "." NUMBER(OMPI_RELEASE_VERSION)
#define NAME     "Open MPI"
#else
#define COMPILED MPICH_VERSION
#define NAME     "MPICH"
#endif

/* MPI counts in an int. So pieces of a multiple of this many bytes, which all long ones are, are made of such
 * units. */
enum { UNIT = 64 };

struct zr_mpi_world {
    MPI_Comm comm[ZR_MPI_COMMS];
    bool has_comm[ZR_MPI_COMMS];
    /* How often it was borrowed. 0: the shim made it. */
    int n_borrowed[ZR_MPI_COMMS];
    /* MPI_REQUEST_NULL: free. All slots from high on are free. */
    MPI_Request request[ZR_MPI_SLOTS];
    int high;
    /* Arrays, as gcc takes MPICH's MPI_STATUSES_IGNORE for an array without elements. */
    MPI_Status status[ZR_MPI_SLOTS];
    int index[ZR_MPI_SLOTS];
    int keyval;
    bool has_keyval;
    /* A communicator of this rank alone, whose errors are returned. poll uses it if nothing is pending. */
    MPI_Comm alone;
    bool has_alone;
    /* Protects fn and fn_arg. */
    pthread_mutex_t lock;
    void (*fn)(void *arg);
    void *fn_arg;
};

static struct zr_mpi_world the_world = {.lock = PTHREAD_MUTEX_INITIALIZER};

static int mpi_class_of(int code)
{
    int class = code;
    if (code != MPI_SUCCESS)
        MPI_Error_class(code, &class);
    return class;
}

/* ---- the process's MPI ---- */

static struct zr_mpi_world *shim_world(void)
{
    return &the_world;
}

static void shim_library(struct zr_mpi_world *w, char *text, size_t n)
{
    char all[MPI_MAX_LIBRARY_VERSION_STRING + 1] = "";
    int length = 0;
    (void)w;
    MPI_Get_library_version(all, &length);
    all[strcspn(all, "\n")] = 0;
    snprintf(text, n, "%s", all);
}

static const void *shim_address(void)
{
    /* POSIX lets a data pointer hold a function's. */
    int (*function)(char *, int *) = MPI_Get_library_version;
    const void *at;
    memcpy(&at, &function, sizeof at);
    return at;
}

static bool shim_is_initialized(struct zr_mpi_world *w)
{
    int flag = 0;
    (void)w;
    MPI_Initialized(&flag);
    return flag;
}

static bool shim_is_finalized(struct zr_mpi_world *w)
{
    int flag = 0;
    (void)w;
    MPI_Finalized(&flag);
    return flag;
}

static enum zr_mpi_level mpi_level_of(int provided)
{
    return provided >= MPI_THREAD_MULTIPLE     ? ZR_MPI_MULTIPLE
           : provided >= MPI_THREAD_SERIALIZED ? ZR_MPI_SERIALIZED
                                               : ZR_MPI_FUNNELED_OR_LESS;
}

static enum zr_mpi_level shim_thread_level(struct zr_mpi_world *w)
{
    int provided = MPI_THREAD_SINGLE;
    (void)w;
    MPI_Query_thread(&provided);
    return mpi_level_of(provided);
}

static int shim_init(struct zr_mpi_world *w, enum zr_mpi_level want, enum zr_mpi_level *level)
{
    int provided = MPI_THREAD_SINGLE;
    (void)w;
    int err = MPI_Init_thread(
        NULL, NULL, want == ZR_MPI_MULTIPLE ? MPI_THREAD_MULTIPLE : MPI_THREAD_SERIALIZED, &provided);
    if (!err)
        err = MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    *level = mpi_level_of(provided);
    return mpi_class_of(err);
}

static int shim_finalize(struct zr_mpi_world *w)
{
    (void)w;
    return mpi_class_of(MPI_Finalize());
}

/* MPI_Finalize deletes the attributes of MPI_COMM_SELF before it does anything else. */
static int finalize_begins(MPI_Comm comm, int keyval, void *value, void *extra)
{
    struct zr_mpi_world *w = value;
    (void)comm, (void)keyval, (void)extra;
    pthread_mutex_lock(&w->lock);
    void (*fn)(void *) = w->fn;
    void *arg = w->fn_arg;
    pthread_mutex_unlock(&w->lock);
    if (fn)
        fn(arg);
    if (w->has_alone)
        MPI_Comm_free(&w->alone);
    w->has_alone = false;
    return MPI_SUCCESS;
}

static int make_alone(struct zr_mpi_world *w)
{
    int err = MPI_Comm_dup(MPI_COMM_SELF, &w->alone);
    w->has_alone = !err;
    return err ? err : MPI_Comm_set_errhandler(w->alone, MPI_ERRORS_RETURN);
}

static int shim_on_finalize(struct zr_mpi_world *w, void (*fn)(void *arg), void *arg)
{
    int err = MPI_SUCCESS;
    pthread_mutex_lock(&w->lock);
    w->fn = fn;
    w->fn_arg = arg;
    pthread_mutex_unlock(&w->lock);
    if (!w->has_keyval && fn) {
        err = MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, finalize_begins, &w->keyval, NULL);
        if (!err)
            err = MPI_Comm_set_attr(MPI_COMM_SELF, w->keyval, w);
        w->has_keyval = !err;
        if (!err)
            err = make_alone(w);
    }
    return mpi_class_of(err);
}

static void shim_error(struct zr_mpi_world *w, int code, char *text, size_t n)
{
    char all[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    (void)w;
    if (MPI_Error_string(code, all, &length))
        snprintf(all, sizeof all, "error %d of MPI", code);
    all[strcspn(all, "\n")] = 0;
    snprintf(text, n, "%s", all);
}

/* ---- communicators ---- */

static MPI_Comm of_user_comm(void *user_comm)
{
    return user_comm ? *(MPI_Comm *)user_comm : MPI_COMM_WORLD;
}

static int shim_rank_of(struct zr_mpi_world *w, void *user_comm, int *rank, int *size)
{
    MPI_Comm comm = of_user_comm(user_comm);
    int between = 0;
    (void)w;
    *rank = -1;
    *size = 0;
    if (comm == MPI_COMM_NULL)
        return 0;
    int err = MPI_Comm_test_inter(comm, &between);
    if (!err && between) /* an intercommunicator has two groups, so a rank has no single number */
        return MPI_ERR_COMM;
    if (!err)
        err = MPI_Comm_rank(comm, rank);
    if (!err)
        err = MPI_Comm_size(comm, size);
    return mpi_class_of(err);
}

static int free_index(const struct zr_mpi_world *w)
{
    for (int i = 0; i < ZR_MPI_COMMS; i++)
        if (!w->has_comm[i])
            return i;
    return -1;
}

/* Adds a communicator that the shim made. */
static int keep_comm(struct zr_mpi_world *w, MPI_Comm comm, int32_t at, int32_t *out)
{
    int err = MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN);
    w->comm[at] = comm;
    w->has_comm[at] = true;
    *out = at;
    return mpi_class_of(err);
}

static int make_of(struct zr_mpi_world *w, MPI_Comm parent, const int32_t *member, int n, int tag,
                   int32_t *out)
{
    MPI_Group all = MPI_GROUP_NULL, part = MPI_GROUP_NULL;
    MPI_Comm comm = MPI_COMM_NULL;
    int at = free_index(w);
    *out = -1;
    if (at < 0)
        return MPI_ERR_OTHER;
    int err = MPI_Comm_group(parent, &all);
    if (!err)
        err = MPI_Group_incl(all, n, member, &part);
    if (!err)
        err = MPI_Comm_create_group(parent, part, tag, &comm);
    if (part != MPI_GROUP_NULL)
        MPI_Group_free(&part);
    if (all != MPI_GROUP_NULL)
        MPI_Group_free(&all);
    return err ? mpi_class_of(err) : keep_comm(w, comm, at, out);
}

static int shim_make(struct zr_mpi_world *w, void *user_comm, const int32_t *member, int n, int tag,
                     int32_t *comm)
{
    return make_of(w, of_user_comm(user_comm), member, n, tag, comm);
}

static int shim_make_from(struct zr_mpi_world *w, int32_t parent, const int32_t *member, int n, int tag,
                          int32_t *comm)
{
    return make_of(w, w->comm[parent], member, n, tag, comm);
}

static int shim_copy(struct zr_mpi_world *w, int32_t comm, int32_t *out)
{
    MPI_Comm other = MPI_COMM_NULL;
    int at = free_index(w);
    *out = -1;
    if (at < 0)
        return MPI_ERR_OTHER;
    int err = MPI_Comm_dup(w->comm[comm], &other);
    return err ? mpi_class_of(err) : keep_comm(w, other, at, out);
}

static int shim_borrow(struct zr_mpi_world *w, void *user_comm, int32_t *out)
{
    MPI_Comm comm = of_user_comm(user_comm);
    int at = 0;
    while (at < ZR_MPI_COMMS && !(w->n_borrowed[at] && w->comm[at] == comm))
        at++;
    if (at == ZR_MPI_COMMS)
        at = free_index(w);
    *out = at;
    if (at < 0)
        return MPI_ERR_OTHER;
    w->comm[at] = comm;
    w->has_comm[at] = true;
    w->n_borrowed[at]++;
    return 0;
}

static int shim_free(struct zr_mpi_world *w, int32_t comm)
{
    if (w->n_borrowed[comm]) {
        w->has_comm[comm] = --w->n_borrowed[comm] > 0;
        return 0;
    }
    w->has_comm[comm] = false;
    return mpi_class_of(MPI_Comm_free(&w->comm[comm]));
}

/* ---- requests ---- */

/* Takes the lowest free slot, so that poll has few to test. Returns NULL if there is none. */
static MPI_Request *take_slot(struct zr_mpi_world *w, int32_t *slot)
{
    int i = 0;
    while (i < w->high && w->request[i] != MPI_REQUEST_NULL)
        i++;
    *slot = i < ZR_MPI_SLOTS ? i : -1;
    if (i == ZR_MPI_SLOTS)
        return NULL;
    if (i == w->high)
        w->high++;
    w->request[i] = MPI_REQUEST_NULL;
    return &w->request[i];
}

static void lower_high(struct zr_mpi_world *w)
{
    while (w->high > 0 && w->request[w->high - 1] == MPI_REQUEST_NULL)
        w->high--;
}

/* Frees the slot if the request could not be begun. */
static int begun_in(struct zr_mpi_world *w, int err, int32_t *slot)
{
    if (err) {
        w->request[*slot] = MPI_REQUEST_NULL;
        *slot = -1;
        lower_high(w);
    }
    return mpi_class_of(err);
}

static int shim_send(struct zr_mpi_world *w, int32_t comm, const void *at, int64_t bytes, int to, int tag,
                     int32_t *slot)
{
    MPI_Request *r = take_slot(w, slot);
    return r ? begun_in(w, MPI_Isend(at, (int)bytes, MPI_BYTE, to, tag, w->comm[comm], r), slot) : 0;
}

static int shim_receive(struct zr_mpi_world *w, int32_t comm, void *at, int64_t bytes, int from, int tag,
                        int32_t *slot)
{
    MPI_Request *r = take_slot(w, slot);
    return r ? begun_in(w, MPI_Irecv(at, (int)bytes, MPI_BYTE, from, tag, w->comm[comm], r), slot) : 0;
}

static int shim_probe(struct zr_mpi_world *w, int32_t comm, int tag, int *from, int64_t *bytes)
{
    MPI_Status status;
    int flag = 0, n = 0, err = MPI_Iprobe(MPI_ANY_SOURCE, tag, w->comm[comm], &flag, &status);
    if (!err && flag)
        err = MPI_Get_count(&status, MPI_BYTE, &n);
    *from = !err && flag ? status.MPI_SOURCE : -1;
    *bytes = n;
    return mpi_class_of(err);
}

/* Makes a type with one element of this many bytes, and the next element at stride. */
static int make_type(int64_t bytes, int64_t stride, MPI_Datatype *out)
{
    MPI_Datatype unit = MPI_BYTE, part = MPI_DATATYPE_NULL;
    bool of_units = bytes % UNIT == 0;
    int err = of_units ? MPI_Type_contiguous(UNIT, MPI_BYTE, &unit) : 0;
    if (!err)
        err = MPI_Type_contiguous((int)(of_units ? bytes / UNIT : bytes), unit, &part);
    if (!err)
        err = MPI_Type_create_resized(part, 0, stride, out);
    if (!err)
        err = MPI_Type_commit(out);
    if (part != MPI_DATATYPE_NULL)
        MPI_Type_free(&part);
    if (unit != MPI_BYTE && unit != MPI_DATATYPE_NULL)
        MPI_Type_free(&unit);
    return err;
}

static int shim_all_gather(struct zr_mpi_world *w, int32_t comm, const void *own, void *to, int64_t bytes,
                           int64_t stride, int32_t *slot)
{
    MPI_Datatype type = MPI_BYTE;
    bool plain = bytes == stride && bytes < ZR_MPI_PIECE_BYTES;
    MPI_Request *r = take_slot(w, slot);
    if (!r)
        return 0;
    int err = plain ? 0 : make_type(bytes, stride, &type);
    if (!err)
        err = MPI_Iallgather(own ? own : MPI_IN_PLACE, plain ? (int)bytes : 1, type, to,
                             plain ? (int)bytes : 1, type, w->comm[comm], r);
    if (type != MPI_BYTE && type != MPI_DATATYPE_NULL)
        MPI_Type_free(&type); /* a pending request keeps it */
    return begun_in(w, err, slot);
}

static int shim_broadcast(struct zr_mpi_world *w, int32_t comm, void *at, int64_t bytes, int root,
                          int32_t *slot)
{
    MPI_Request *r = take_slot(w, slot);
    return r ? begun_in(w, MPI_Ibcast(at, (int)bytes, MPI_BYTE, root, w->comm[comm], r), slot) : 0;
}

static int shim_all_reduce(struct zr_mpi_world *w, int32_t comm, void *at, int n, MPI_Datatype type,
                           MPI_Op op, int32_t *slot)
{
    MPI_Request *r = take_slot(w, slot);
    return r ? begun_in(w, MPI_Iallreduce(MPI_IN_PLACE, at, n, type, op, w->comm[comm], r), slot) : 0;
}

static int shim_all_max(struct zr_mpi_world *w, int32_t comm, int64_t *at, int n, int32_t *slot)
{
    return shim_all_reduce(w, comm, at, n, MPI_INT64_T, MPI_MAX, slot);
}

static int shim_all_sum(struct zr_mpi_world *w, int32_t comm, uint64_t *at, int n, int32_t *slot)
{
    return shim_all_reduce(w, comm, at, n, MPI_UINT64_T, MPI_SUM, slot);
}

static int shim_reduce_block(struct zr_mpi_world *w, int32_t comm, const float *in, float *out, int64_t n,
                             int32_t *slot)
{
    MPI_Request *r = take_slot(w, slot);
    return r ? begun_in(w, MPI_Ireduce_scatter_block(in, out, (int)n, MPI_FLOAT, MPI_SUM, w->comm[comm], r),
                        slot)
             : 0;
}

static int scatter_sums(MPI_Comm comm, const float *in, float *out, int n)
{
    int size, err = MPI_Comm_size(comm, &size);
    int *count = err ? NULL : malloc((size_t)size * sizeof *count);
    if (!count)
        return err ? err : MPI_ERR_NO_MEM;
    for (int i = 0; i < size; i++)
        count[i] = n;
    err = MPI_Reduce_scatter(in, out, count, MPI_FLOAT, MPI_SUM, comm);
    free(count);
    return err;
}

/* MPI's own blocking collectives, which zero-bench comm compares ours with. Nothing else calls them. */
static int shim_own(struct zr_mpi_world *w, int32_t comm, enum zr_mpi_own_call call, const float *in,
                    float *out, int64_t n)
{
    MPI_Comm c = w->comm[comm];
    switch (call) {
    case ZR_MPI_ALLGATHER:
        return mpi_class_of(MPI_Allgather(MPI_IN_PLACE, 0, MPI_FLOAT, out, (int)n, MPI_FLOAT, c));
    case ZR_MPI_REDUCE_SCATTER:
        return mpi_class_of(scatter_sums(c, in, out, (int)n));
    case ZR_MPI_REDUCE_SCATTER_BLOCK:
        return mpi_class_of(MPI_Reduce_scatter_block(in, out, (int)n, MPI_FLOAT, MPI_SUM, c));
    }
    return MPI_ERR_OTHER;
}

static int shim_poll(struct zr_mpi_world *w, struct zr_mpi_done done[ZR_MPI_SLOTS])
{
    int n = 0, flag;
    if (w->high == 0) /* bytes of ended requests may still be on their way: any call lets MPI work */
        return w->has_alone ? -mpi_class_of(MPI_Iprobe(0, 0, w->alone, &flag, MPI_STATUS_IGNORE)) : 0;
    int err = mpi_class_of(MPI_Testsome(w->high, w->request, &n, w->index, w->status));
    if (err && err != MPI_ERR_IN_STATUS)
        return -err;
    if (n == MPI_UNDEFINED) /* all slots are free */
        n = 0;
    for (int i = 0; i < n; i++) {
        int slot = w->index[i];
        done[i] = (struct zr_mpi_done){slot, err ? mpi_class_of(w->status[i].MPI_ERROR) : 0};
        w->request[slot] = MPI_REQUEST_NULL;
    }
    lower_high(w);
    return n;
}

extern SHOWN const struct zr_mpi_shim zero_mpi_shim_1;
SHOWN const struct zr_mpi_shim zero_mpi_shim_1 = {
    .version = ZR_MPI_SHIM_VERSION,
    .bytes = sizeof(struct zr_mpi_shim),
    .name = NAME,
    .compiled = COMPILED,
    .world = shim_world,
    .library = shim_library,
    .address = shim_address,
    .is_initialized = shim_is_initialized,
    .is_finalized = shim_is_finalized,
    .thread_level = shim_thread_level,
    .init = shim_init,
    .finalize = shim_finalize,
    .on_finalize = shim_on_finalize,
    .error = shim_error,
    .rank_of = shim_rank_of,
    .make = shim_make,
    .make_from = shim_make_from,
    .copy = shim_copy,
    .borrow = shim_borrow,
    .free = shim_free,
    .send = shim_send,
    .receive = shim_receive,
    .probe = shim_probe,
    .all_gather = shim_all_gather,
    .broadcast = shim_broadcast,
    .all_max = shim_all_max,
    .all_sum = shim_all_sum,
    .reduce_block = shim_reduce_block,
    .own = shim_own,
    .poll = shim_poll,
};
