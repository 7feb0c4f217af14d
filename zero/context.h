/* SPDX-License-Identifier: Apache-2.0 */
/* context.h: struct zero_ctx, and the functions that the files of zero/ share. */
#ifndef ZR_ZERO_CONTEXT_H
#define ZR_ZERO_CONTEXT_H

#include "comm/backend.h"
#include "comm/flight.h"
#include "comm/flight_peers.h"
#include "comm/meet/open_names.h"
#include "comm/meet/rendezvous.h"
#include "comm/meet/user_comm.h"
#include "comm/mesh.h"
#include "kernels/host/host_memory.h"
#include "shard/engine/engine.h"
#include "zero/checkpoint/files.h"
#include "zero/checkpoint/folder_lock.h"
#include "zero/checkpoint/manifest.h"
#include "zero/config.h"
#include "zero/progress.h"
#include "zero/state_file.h"

/* Maps a tensor of this rank's table to the whole model: its number there, and its first element. With tp the
 * element counts within this rank's part of the tensor. */
struct zr_whole_at {
    int32_t tensor;
    int64_t first;
};

/* whole.c: the tensors of the whole model, as checkpoints list them: those of all pipeline stages. */
struct zr_whole {
    int32_t n;
    /* (n) The layout's tensors, or with pipeline stages those of all stages with all layers. The latter have
     * names, shapes and kinds alone. Their grad says whether a tensor is trained, and is not followed. */
    struct zr_tensor *tensors;
    /* (the layout's n_tensors) where each tensor of the layout is in `tensors`. NULL: it has the same number,
     * and all of it is there */
    struct zr_whole_at *at;
    uint64_t hash;
    /* whether tensors is allocated here; otherwise it is the layout's */
    bool owns_tensors;
    /* grad of trained tensors points here */
    void *trained;
};

/* memory.c: how another rank shares memory with this one. */
struct zr_sharer {
    /* it runs on this rank's machine */
    bool same_machine;
    /* the memory control groups that both are in, a bit for each */
    uint32_t groups;
    /* the host memory that it allocates, by its plan or by the present call */
    int64_t bytes;
};

struct zero_ctx {
    struct zr_config config;
    struct zr_world world;
    /* how long zero_wrap waits for the other ranks (cfg.launch.start_timeout_ms) */
    int64_t start_ms;
    /* how ranks exchange bytes before they meet; gather is NULL if they cannot, comm is the program's
     * communicator */
    struct zr_user_comm user_comm;
    /* the backend that the program's communicator belongs to; NULL: it gives none */
    const struct zr_backend *user_comm_backend;
    /* the backend that cfg.launch.backend names, which ranks compare when they meet; NULL: auto */
    const struct zr_backend *asked_backend;
    /* which ranks share a host, and the groups of ranks along each axis */
    struct zr_topology topology;
    struct zr_mesh mesh;

    struct zr_layout *layout;
    struct zr_plan *plan;
    struct zr_whole whole;
    /* the actions that this rank takes in a step, and the next of them (schedule.c) */
    struct zr_schedule *schedule;
    struct zr_loop *loop;
    /* NULL for world 1 */
    struct zr_rendezvous *rendezvous;
    /* this context's name in the process's list; NULL: it has no other ranks, or its name was taken */
    struct zr_open_name *open_name;
    /* how zero_wrap waits for the other ranks */
    struct zr_waiting waiting;

    struct zr_device *device;
    /* free memory of the GPU when it was last asked */
    int64_t gpu_free_bytes;
    /* memory of the host when ranks agreed on the plan (agree.c) */
    struct zr_host_memory memory;
    /* (world) by rank */
    struct zr_sharer *sharers;

    /* check mode: watches the device and the communicators. NULL: cfg.debug.check is off */
    struct zr_check *check;

    /* Communicators by role (struct zr_engine_parts). One may have several roles, and is closed once. */
    struct zr_comm *comm[ZR_ROLES];
    /* the backend that opens them, known once zr_prepare has run */
    const struct zr_backend *backend;

    struct zr_engine *engine;
    /* the flight recorder, open once this rank's number is known */
    struct zr_flight *flight;
    /* the recorders of the other ranks on this host; NULL: there are none */
    struct zr_flight_peers *flight_peers;

    /* Checkpoints. */
    /* the operating system's, unless a test put others here */
    const struct zr_files *files;
    /* masters and optimizer states, with cfg.memory.states = file; NULL: they are in memory */
    struct zr_state_file *states;
    /* the file that extents of a save or a load are in: states, or the one that is loaded */
    const struct zr_state_file *mapped;
    /* rank 0's locks on the folders that it saves into */
    struct zr_folder_locks locks;
    /* the save under way; NULL: none */
    struct zr_save *save;
    /* elements without values so far (init_later.c); NULL: all elements have values */
    struct zr_init_later *init_later;
    /* with pipeline stages: all ranks have agreed that every tensor has values */
    bool stages_have_values;
    /* saves begun so far */
    int64_t n_saves;
    /* the last checkpoint that all ranks know to be on the disk; "": none */
    char saved_path[ZR_PATH_BYTES];
    /* a warning was given that buffers differ between ranks */
    bool reported_unequal_buffers;
    /* a warning was given that weights which tp ranks share have become different */
    bool reported_tp_drift;
    /* micro-batches of all parts of the data, in all steps */
    int64_t n_micro;
    /* the model has called a collective over cp; the warning that it did not was given */
    bool has_used_cp, reported_unused_cp;
    /* zero_shift_begin was called on tp, and on cp, and zero_shift_end was not yet */
    bool is_shifting[2];
    /* zero_loss_scale was called for the next step, and for the last one */
    bool has_loss_scale, had_loss_scale;
    /* the warning about a step without zero_loss_scale was given */
    bool reported_no_loss_scale;
    /* counts the brackets of this step (missing_brackets.c) */
    struct zr_missing_brackets *missing_brackets;
    /* tells zero-run how far this rank is */
    struct zr_progress_map progress;
    /* the program's own data for the next saves, by enum zr_data_kind; NULL: none */
    struct zr_data *data[ZR_N_DATA];
    /* the files of the checkpoint that was loaded last; NULL: none was */
    struct zr_loaded_checkpoint *loaded;
    /* the program called zero_set_data since that load */
    bool data_set[ZR_N_DATA];
    /* the warning that the program did not call it was given */
    bool reported_no_data[ZR_N_DATA];
    /* list of the contexts that zero_unwrap could not free (unwrap.c) */
    struct zero_ctx *next_unfreed;
    /* (world * ZR_EXCHANGE_BYTES) the records of all ranks, for zr_engine_exchange. It is allocated early, so
     * that an exchange never lacks memory */
    void *from_all;
};

/* Tells the flight recorder that the program is in this call until the enclosing function returns. subject is
 * a unit or a tensor; -1: none. z may be NULL. */
#define ZR_IN_CALL(z, name, phase, subject)                                                                  \
    __attribute__((cleanup(zr_leave_call), unused)) struct zero_ctx *zr_in_call =                            \
        zr_enter_call(z, name, phase, subject)
static inline struct zero_ctx *zr_enter_call(struct zero_ctx *z, enum zr_call_name name,
                                             enum zero_phase phase, int32_t subject)
{
    if (z)
        zr_engine_enter(z->engine, name, phase, subject);
    return z;
}
static inline void zr_leave_call(struct zero_ctx **z)
{
    if (*z)
        zr_engine_leave((*z)->engine);
}

/* ---- call_rules.c ---- */

/* Checks the rules of a call. ZERO_ERR_ORDER if they do not hold, ZERO_ERR_ARG if z is NULL, or the failure
 * of a context that has failed. */
int zr_call_check(struct zero_ctx *z, enum zr_call_name name);
/* Checks a call that only needs a context that has not failed. z may be NULL. */
int zr_need_healthy(struct zero_ctx *z, const char *call);
/* ZERO_ERR_ORDER if no backward bracket has ended since the last step. */
int zr_need_gradients(const struct zero_ctx *z, const char *call);
/* Begins a call of the program: tells the flight recorder, and returns from the function if its rules do not
 * hold. */
#define ZR_BEGIN_CALL(z, name)                                                                               \
    ZR_IN_CALL(z, name, 0, -1);                                                                              \
    ZR_TRY(zr_call_check(z, name))

/* Return the number of data-parallel ranks, and this rank's number among them. Data-parallel ranks have the
 * same part of the model. Before the mesh is made, all ranks count as data-parallel. */
static inline int32_t zr_dp_world(const struct zero_ctx *z)
{
    return z->mesh.dp_shard ? z->mesh.dp_shard * z->mesh.dp_replicate : z->world.world;
}
static inline int32_t zr_dp_rank(const struct zero_ctx *z)
{
    return z->mesh.dp_shard ? z->world.rank % (z->world.world / z->mesh.pp) / z->mesh.tp : z->world.rank;
}
/* Returns the lowest rank that has the same part of the model as rank r. */
static inline int32_t zr_first_of_part(const struct zero_ctx *z, int32_t r)
{
    int32_t n_stage = z->world.world / z->mesh.pp;
    return r / n_stage * n_stage + r % z->mesh.tp;
}

/* whole.c. Collects the tensors of all pipeline stages, once the plans agree. Collective over the rendezvous
 * with pipeline stages, otherwise local. ZERO_ERR_MISMATCH if two stages use a name for different tensors;
 * ZERO_ERR_NOMEM. */
int zr_whole_make(struct zero_ctx *z);
/* A zeroed struct is allowed. */
void zr_whole_free(struct zr_whole *w);
/* Returns the number of pipeline stages of the whole model. */
static inline int32_t zr_stages(const struct zero_ctx *z)
{
    return z->mesh.pp * z->config.user.pipeline.stages_per_rank;
}

/* Returns where a tensor of this rank's table is in the whole model. */
static inline struct zr_whole_at zr_whole_at(const struct zero_ctx *z, int32_t tensor)
{
    return z->whole.at ? z->whole.at[tensor] : (struct zr_whole_at){.tensor = tensor};
}

/* find_place.c: finds this rank's number and world from cfg, which was checked, and the environment. */
int zr_find_rank(const struct zero_config *cfg, struct zr_world *out);

/* The place of the parameters' first values. */
enum zr_values_in {
    /* unknown, as in a plan: pointers are not followed */
    ZR_VALUES_UNSEEN,
    ZR_VALUES_IN_MODEL,
    /* in rank 0's model, and this is rank 0 */
    ZR_VALUES_IN_RANK0,
    /* not in this rank's model: *param may be NULL */
    ZR_VALUES_ELSEWHERE
};
/* wrap.c. Returns where they are for this rank, by cfg.init_from. */
enum zr_values_in zr_values_in(const struct zero_ctx *z);
/* tensors.c: checks the model's table and copies it. On success the caller frees *out (zr_tensors_free). */
int zr_tensors_check(const struct zero_tensor *tensors, int32_t n, const struct zero_config *cfg,
                     enum zr_values_in values, struct zr_tensor **out);

/* wrap.c. Chooses the backend and makes the layout, the schedule and the plan. Local. On failure the
 * caller frees what out holds. */
struct zr_prepared {
    const struct zr_backend *backend;
    struct zr_layout *layout;
    struct zr_schedule *schedule;
    struct zr_plan *plan;
};
int zr_prepare(struct zr_config *c, int world, const struct zero_tensor *tensors, int32_t n_tensors,
               enum zr_values_in values, struct zr_prepared *out);

/* ties.c. Local. Sets what a tied tensor is on this rank's pipeline stage, before the layout is made. */
int zr_ties_take(const struct zr_config *c, struct zr_tensor *t, int32_t n);
/* Return the bytes of all tied tensors in a slot, and of their gradient sums. */
int64_t zr_ties_bytes(const struct zr_layout *l);
int64_t zr_ties_sum_bytes(const struct zr_layout *l);
/* Returns a hash of what must be equal on both stages. 0: there are no tied tensors. */
uint64_t zr_ties_hash(const struct zr_layout *l);

/* schedule.c. ZERO_ERR_ORDER if the pipeline has actions left, for a call that waits for other ranks. */
int zr_refuse_in_actions(const struct zero_ctx *z, const char *call);
/* Makes the schedule. The options of c then point at its order and memory. Local. */
int zr_schedule_make(struct zr_config *c, const struct zr_layout *l, struct zr_schedule **out);
void zr_schedule_free(struct zr_schedule *s);
const struct zr_pipe_room *zr_schedule_room(const struct zr_schedule *s);
uint64_t zr_schedule_file_hash(const struct zr_schedule *s);
/* ZERO_ERR_ORDER if the bracket is outside an action, or has another phase or pipeline stage than the
 * action. */
int zr_schedule_bracket(const struct zero_ctx *z, const char *call, const struct zr_core_event *ev);
/* ZERO_ERR_ORDER if the step has actions left, and some were taken or the pipeline has several stages. */
int zr_schedule_over(const struct zero_ctx *z, const char *call);
/* ZERO_ERR_ORDER if an action is open, messages are on their way, or the pipeline has nothing to drop. */
int zr_schedule_drop(const struct zero_ctx *z);
/* Begins the next step, after zero_step or zero_drop. */
void zr_schedule_step(struct zero_ctx *z);
/* zero_tune of grad_accum_steps: the next steps and evaluations have n micro-batches. */
int zr_schedule_tune(struct zero_ctx *z, int32_t n);

/* ---- backend.c ---- */

/* Returns the row with a number in ZERO_BACKEND_MAP. NULL if there is none, as for auto. */
const struct zr_backend *zr_backend_row(int32_t number);
/* Returns the number of a row. */
int32_t zr_backend_number(const struct zr_backend *row);
/* Returns the row that a communicator of the program belongs to, and the communicator in *comm. NULL: cfg has
 * no communicator. */
const struct zr_backend *zr_backend_of_user_comm(const struct zero_config *c, void **comm);
/* Chooses the row for a configuration, and the default of options.deterministic. Refuses a configuration that
 * contradicts itself. */
int zr_backend_choose(struct zr_config *config, int world, const struct zr_backend **out);
/* Refuses a backend that cannot join ranks on several hosts. The message says which backends can. */
int zr_backend_check_hosts(const struct zero_ctx *z);
/* Local. */
int zr_backend_open_device(struct zero_ctx *z);
/* Collective. Blocks. */
int zr_backend_open_comms(struct zero_ctx *z);
/* Makes it safe to close the communicators after a rank was lost. Keeps this thread's message, which names
 * the cause. */
void zr_backend_abort_comms(struct zero_ctx *z, int err);
void zr_backend_close_comms(struct zero_ctx *z);
/* Returns how bytes travel. Call it once the arenas exist. */
const char *zr_backend_path(const struct zero_ctx *z);

/* Sets what the communicators need of the plan (options.gather_scratch_bytes and so on). Local. The result is
 * equal on all ranks. */
void zr_backend_reserve(struct zr_config *config, const struct zr_backend *b, const struct zr_layout *layout);

/* agree.c: compares the plans of all ranks. Collective over the rendezvous; local for world 1. Every rank
 * sends local_err and this thread's message. Returns local_err, or another rank's error with its message, or
 * ZERO_ERR_MISMATCH naming the field, tensor and ranks that differ. z->layout and z->plan may be NULL if
 * local_err is not 0. */
int zr_agree_on_plan(struct zero_ctx *z, int local_err);
/* Ends a later phase of zero_wrap, so that all ranks succeed or all fail. Returns as zr_agree_on_plan does.
 */
int zr_agree_on_success(struct zero_ctx *z, int local_err);

/* The same after zero_wrap, over the control communicator. Blocks. Call it between steps. */
int zr_agree_in_run(struct zero_ctx *z, int local_err);

/* The same among the ranks of one pipeline stage. An error that one rank has alone ends the context. */
int zr_agree_in_stage(struct zero_ctx *z, int local_err);

/* ---- init_later.c ---- */

int zr_init_later_open(struct zero_ctx *z);
void zr_init_later_close(struct zero_ctx *z);
/* ZERO_ERR_ORDER if the tensor lacks values; a negative number means any tensor. Returns the failure of a
 * context that has failed. */
int zr_init_later_require(struct zero_ctx *z, const char *call, int32_t tensor);
/* The same for all tensors. With pipeline stages it checks those of every stage, and is collective until
 * every tensor has values. */
int zr_init_later_require_all(struct zero_ctx *z, const char *call);
/* Whether zero_write has written no parameter and no state so far. */
bool zr_init_later_nothing_written(const struct zero_ctx *z);
/* Grows the list before a write, so that zr_init_later_note cannot fail. */
int zr_init_later_reserve(struct zero_ctx *z, int32_t tensor);
/* Records a write. first counts elements of this part, or with whole set of the whole tensor. */
void zr_init_later_note(struct zero_ctx *z, int32_t tensor, bool whole, int64_t first, int64_t n);
/* Records that every tensor has values. */
void zr_init_later_loaded(struct zero_ctx *z);

/* first_values.c. Warns about the first NaN or infinity among the weights that this rank owns. Local. */
void zr_first_values_report(struct zero_ctx *z);

/* calls.c. Read and write a range that was checked; kind as in zr_engine_read. A tied tensor is written on
 * the first pipeline stage. The last stage only records that it has values, which zr_engine_tied_values
 * brings. */
int zr_values_read(struct zero_ctx *z, int32_t tensor, int kind, int64_t first, int64_t n, void *dst);
int zr_values_write(struct zero_ctx *z, int32_t tensor, int kind, int64_t first, int64_t n, const void *src);

/* ---- buffers.c ---- */

/* Whether the whole model has buffers. */
bool zr_buffers_exist(const struct zero_ctx *z);
/* Whether this rank saves the buffers of its pipeline stage. */
bool zr_buffers_are_saved_here(const struct zero_ctx *z);
/* ZERO_ERR_ORDER if the *param of a buffer is NULL. Local. */
int zr_buffers_check(const struct zero_ctx *z);
/* Compares buffers over all ranks. If they differ, this thread's message names the first that does.
 * integers_only: compares only buffers of integers. Collective. Blocks. */
int zr_buffers_compare(struct zero_ctx *z, bool integers_only, bool *equal);

/* ---- program_data.c ---- */

/* The program's own data, held by the context and the saves under way. */
struct zr_data {
    /* changed on one thread only */
    int32_t n_holders;
    int64_t bytes;
    char content[];
};
/* Adds a holder, and returns d. NULL is allowed in both. */
struct zr_data *zr_data_keep(struct zr_data *d);
void zr_data_drop(struct zr_data *d);
/* The files of a loaded checkpoint, for zero_read_data. prepare may fail, and changes nothing then. use takes
 * them over, and drops the data that zero_set_data was given before the load. */
int zr_loaded_checkpoint_prepare(struct zero_ctx *z, const char *folder, const struct zr_manifest *m,
                                 struct zr_loaded_checkpoint **out);
void zr_loaded_checkpoint_use(struct zero_ctx *z, struct zr_loaded_checkpoint *loaded);
void zr_loaded_checkpoint_free(struct zr_loaded_checkpoint *l);
/* Bytes of the program's data of one enum zr_data_kind in all files. 0 if l is NULL. */
int64_t zr_loaded_checkpoint_bytes(const struct zr_loaded_checkpoint *l, int kind);

/* save.c. Ends a save that was begun, and returns its error. Collective while the context is healthy. After a
 * failure it only frees what this rank has of it. */
int zr_save_end(struct zero_ctx *z);
/* Called after a step. Rank 0 may commit once the step's records say that all files are written. */
void zr_save_notice(struct zero_ctx *z);

/* ---- memory.c ---- */

/* state_file.c. Open the file of masters and states, if cfg.memory.states is file; return the functions with
 * which the engine reads and writes it; close it. Local. zr_states_close takes NULL. */
int zr_states_open(struct zero_ctx *z);
struct zr_state_io zr_states_io(struct zero_ctx *z);
void zr_states_close(struct zr_state_file *states);

/* Refuses the plans of this host's ranks if together they do not fit its free memory, or that of a memory
 * control group. Call it after zr_agree_on_plan, which collects what each rank needs. */
int zr_memory_check(struct zero_ctx *z);
/* Refuses a plan that does not fit the GPU. communicators: called again once they are open, because NCCL has
 * allocated memory by then. */
int zr_memory_check_gpu(struct zero_ctx *z, bool communicators);
/* Returns the host memory that the plan needs. */
int64_t zr_memory_host_bytes(const struct zero_ctx *z);
/* Collects how many more bytes each rank is about to allocate on the host. Collective. Blocks. */
int zr_memory_ask(struct zero_ctx *z, int64_t bytes);
/* ZERO_ERR_NOMEM if the host lacks the bytes that were asked for, or without host set the GPU these bytes. */
int zr_memory_check_room(struct zero_ctx *z, int64_t bytes, bool host);

/* Returns a hash of the sources that this library was built from (source_hash.py). */
uint64_t zr_source_hash(void);

/* wrap_report.c. Writes the log lines of a successful zero_wrap. */
void zr_wrap_report(struct zero_ctx *z);

/* unwrap.c. Closes what was opened, in whatever phase zero_wrap is. Keeps this thread's message, although
 * leaving the rendezvous may fail after a rank was lost. */
void zr_tear_down(struct zero_ctx *z);

/* loss_scale.c. Called when a step ends: by zero_step, and by zero_drop. */
void zr_loss_scale_step(struct zero_ctx *z);
/* collectives.c. Called at the end of a step: warns once if the model has not used cp. */
void zr_collectives_step(struct zero_ctx *z);
void zr_loss_scale_drop(struct zero_ctx *z);

/* missing_brackets.c: counts the brackets that end, to find units that a step leaves out. step is called by
 * zero_step, drop by zero_drop. */
int zr_missing_brackets_open(struct zero_ctx *z);
void zr_missing_brackets_close(struct zero_ctx *z);
void zr_missing_brackets_count(struct zero_ctx *z, int32_t unit, enum zero_phase phase);
void zr_missing_brackets_step(struct zero_ctx *z);
void zr_missing_brackets_drop(struct zero_ctx *z);

/* old_params.c: with cfg.debug.check, fills the memory that the model's pointers still point at with NaN. */
void zr_old_params_fill(const struct zero_ctx *z);

/* stats.c */
void zr_plan_to_bytes(const int64_t bytes[ZR_MEM_COUNT], struct zero_bytes *out);

#endif
