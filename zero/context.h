/* SPDX-License-Identifier: Apache-2.0 */
/* context.h: what a zero_ctx holds, from the device up. */
#ifndef ZR_ZERO_CONTEXT_H
#define ZR_ZERO_CONTEXT_H

#include "comm/backend.h"
#include "comm/flight.h"
#include "comm/flight_peers.h"
#include "comm/meet/open_names.h"
#include "comm/meet/rendezvous.h"
#include "comm/mesh.h"
#include "kernels/host/host_memory.h"
#include "shard/engine/engine.h"
#include "zero/checkpoint/files.h"
#include "zero/checkpoint/folder_lock.h"
#include "zero/checkpoint/manifest.h"
#include "zero/config.h"
#include "zero/progress.h"

/* Where a tensor of this rank's table is in the whole model: which it is there, and from which element on, of
 * the whole or, where it is cut over tp, of this rank's part of it. */
struct zr_place {
    int32_t tensor;
    int64_t first;
};

/* whole.c: the tensors that files speak of: those of all pipeline stages. */
struct zr_whole {
    int32_t n;
    /* (n) as the layout's, with all layers of all stages; with stages there are names, shapes and kinds
     * alone: grad says whether it is trained, and is not followed */
    struct zr_tensor *tensors;
    /* (the layout's n_tensors) NULL: each is all there is */
    struct zr_place *own;
    uint64_t hash;
    /* else tensors are the layout's */
    bool own_memory;
    /* what grad points at */
    void *trained;
};

/* memory.c: a rank as one that takes of the same memory. */
struct zr_sharer {
    /* on this rank's machine; in which of its memory control groups, a bit for each */
    bool machine;
    uint32_t groups;
    /* of the host's memory that it takes, by its plan or at once */
    int64_t bytes;
};

struct zero_ctx {
    struct zr_config config;
    struct zr_world world;
    /* how long opening waits for the others (cfg.launch.start_timeout_ms) */
    int64_t start_ms;
    /* cfg.launch.nccl_comm or cfg.launch.mpi_comm, and whose it is; NULL: there is none */
    void *lent;
    const struct zr_backend *lent_of;
    /* cfg.launch.backend's row, NULL: auto; for ranks that tell each other where they meet */
    const struct zr_backend *asked;
    /* who shares a host with whom, and the groups over its places */
    struct zr_topology topology;
    struct zr_mesh mesh;

    struct zr_layout *layout;
    struct zr_plan *plan;
    struct zr_whole whole;
    /* which actions this rank takes in a step, and where it is (schedule.c) */
    struct zr_schedule *schedule;
    struct zr_loop *loop;
    /* NULL for world 1 */
    struct zr_rendezvous *rendezvous;
    /* this context among those of the process; NULL: it meets nobody, or its name was taken */
    struct zr_open_name *open_name;
    /* how it waits for the other ranks */
    struct zr_waiting waiting;

    struct zr_device *device;
    /* when it was last asked */
    int64_t gpu_free_bytes;
    /* when ranks agreed on the plan (agree.c) */
    struct zr_host_memory memory;
    /* (world) */
    struct zr_sharer *sharers;

    /* what watches device and communicators; NULL: cfg.debug.check is off */
    struct zr_check *check;

    /* By role (struct zr_engine_parts); closed once each. */
    struct zr_comm *comm[ZR_ROLES];
    /* what opened them, from zr_prepare on */
    const struct zr_backend *backend;
    /* of these the one that gathers, as it is under a check */
    struct zr_comm *gathers;

    struct zr_engine *engine;
    /* from when it is known who this rank is */
    struct zr_flight *flight;
    /* those of this host's ranks; NULL: there is nobody to meet */
    struct zr_flight_peers *flight_peers;

    /* Checkpoints. */
    /* the operating system's, unless a test put others here */
    const struct zr_files *files;
    /* rank 0's, of the folders that it saves into */
    struct zr_folder_locks locks;
    /* begun and not ended; NULL: none */
    struct zr_save *save;
    /* what has no values yet (awaited.c); NULL: all have */
    struct zr_awaited *awaited;
    /* with pipeline stages: all ranks have agreed that it is so on each */
    bool stages_have_values;
    /* saves begun so far */
    int64_t n_saves;
    /* The last that all ranks know to be on the disk; "": none. */
    char saved_path[ZR_PATH_BYTES];
    bool reported_unequal_buffers;
    /* weights that have drifted apart over tp were reported */
    bool reported_apart;
    /* micro-batches of all ranks, in all steps */
    int64_t n_micro;
    /* zero_loss_scale was called for the step to come; for the step before; a warning said that a step had
     * none */
    bool has_loss_scale, had_loss_scale, reported_no_loss_scale;
    /* brackets of this step */
    struct zr_left_out *left_out;
    /* for zero-run */
    struct zr_progress_map progress;
    /* the program's own data for the next saves, by enum zr_data_kind; NULL: none */
    struct zr_data *data[ZR_N_DATA];
    /* the files of the checkpoint that was loaded last; NULL: none was */
    struct zr_loaded *loaded;
    /* since that load: the program called zero_set_data; a warning said that it did not */
    bool data_set[ZR_N_DATA], reported_no_data[ZR_N_DATA];
    /* of those that are left where they are (unwrap.c) */
    struct zero_ctx *next_left;
    /* world * ZR_EXCHANGE_BYTES, for zr_engine_exchange: what ranks tell each other must not fail for want of
     * memory */
    void *from_all;
};

/* The program is in this call until the function that says so returns: for the flight recorder. subject:
 * unit or tensor, -1: none. z may be NULL. */
#define ZR_IN_CALL(z, name, backward, subject)                                                               \
    __attribute__((cleanup(zr_leave_call), unused)) struct zero_ctx *zr_in_call =                            \
        zr_enter_call(z, name, backward, subject)
static inline struct zero_ctx *zr_enter_call(struct zero_ctx *z, enum zr_called_name name, bool backward,
                                             int32_t subject)
{
    if (z)
        zr_engine_enter(z->engine, name, backward, subject);
    return z;
}
static inline void zr_leave_call(struct zero_ctx **z)
{
    if (*z)
        zr_engine_leave((*z)->engine);
}

/* Among the data-parallel ranks, which have the same part of the model: how many, and this rank's number.
 * Once the mesh is made; else as if the model were whole. */
static inline int32_t zr_dp_world(const struct zero_ctx *z)
{
    return z->mesh.inner ? z->mesh.inner * z->mesh.outer : z->world.world;
}
static inline int32_t zr_dp_rank(const struct zero_ctx *z)
{
    return z->mesh.inner ? z->world.rank % (z->world.world / z->mesh.stages) / z->mesh.parts : z->world.rank;
}
/* The lowest rank that has the same part of the same stage as rank r. */
static inline int32_t zr_first_of_part(const struct zero_ctx *z, int32_t r)
{
    int32_t n_stage = z->world.world / z->mesh.stages;
    return r / n_stage * n_stage + r % z->mesh.parts;
}

/* whole.c. make: over the rendezvous, all ranks, once the plan is agreed on: ZR_ERR_MISMATCH for a name that
 * two stages have and that is not one tensor, ZR_ERR_NOMEM; without stages local. free: a zeroed one too. */
int zr_whole_make(struct zero_ctx *z);
void zr_whole_free(struct zr_whole *w);
/* Pipeline stages of the whole model. */
static inline int32_t zr_stages(const struct zero_ctx *z)
{
    return z->mesh.stages * z->config.user.pipeline.stages_per_rank;
}

static inline struct zr_place zr_place_of(const struct zero_ctx *z, int32_t tensor)
{
    return z->whole.own ? z->whole.own[tensor] : (struct zr_place){.tensor = tensor};
}

/* find_place.c: who this rank is, by cfg, which was checked, and the environment. */
int zr_find_rank(const struct zero_config *cfg, struct zr_world *out);

/* tensors.c: checks the model's table and copies it. On success *out belongs to the caller (zr_tensors_free).
 * values: what *param must point at. */
enum zr_values_in {
    /* in a plan: pointers are not followed */
    ZR_VALUES_UNSEEN,
    ZR_VALUES_IN_MODEL,
    /* on rank 0, whose values others take */
    ZR_VALUES_IN_RANK0,
    /* with somebody else: *param may be NULL */
    ZR_VALUES_ELSEWHERE
};
/* Of this rank, by cfg.init_from (wrap.c). */
enum zr_values_in zr_values_in(const struct zero_ctx *z);
int zr_tensors_check(const struct zero_tensor *tensors, int32_t n, const struct zero_config *cfg,
                     enum zr_values_in values, struct zr_tensor **out);

/* prepare.c. Local: which backend, how the model is laid out, and the plan. On failure out holds what there
 * is, which the caller frees. */
struct zr_prepared {
    const struct zr_backend *backend;
    struct zr_layout *layout;
    struct zr_schedule *schedule;
    struct zr_plan *plan;
};
int zr_prepare(struct zr_config *c, int world, const struct zero_tensor *tensors, int32_t n_tensors,
               enum zr_values_in values, struct zr_prepared *out);

/* ties.c. Local. take: before the layout; what a tied tensor is on this rank's stage, for which options have
 * pp. bytes: of all of them, in a slot; sum_bytes: of their sums. hash: of what both stages must have alike;
 * 0: they have none. */
int zr_ties_take(const struct zr_config *c, struct zr_tensor *t, int32_t n);
int64_t zr_ties_bytes(const struct zr_layout *l);
int64_t zr_ties_sum_bytes(const struct zr_layout *l);
uint64_t zr_ties_hash(const struct zr_layout *l);

/* schedule.c.
 *   make     local: the schedule, which config's options take their order and memory of (which lie in it)
 *   bracket  ZR_ERR_ORDER for a bracket outside of an action, of another phase, or of another stage's unit
 *   over     ZR_ERR_ORDER while actions of the step are left, of which some were taken, or pp is above 1
 *   drop     the same where messages are on their way, or an action is open
 *   step     the step was taken, or given up
 * And in_actions: ZR_ERR_ORDER for a call that waits for other ranks, while actions of a pipeline are left.
 */
int zr_refuse_in_actions(const struct zero_ctx *z, const char *call);
int zr_schedule_make(struct zr_config *c, const struct zr_layout *l, struct zr_schedule **out);
void zr_schedule_free(struct zr_schedule *s);
const struct zr_pipe_room *zr_schedule_room(const struct zr_schedule *s);
uint64_t zr_schedule_file_hash(const struct zr_schedule *s);
struct zr_pipeline;
/* schedule_file.c: *out, which the caller closes in any case, is what cfg.pipeline.schedule_file says. */
int zr_schedule_read(const struct zr_config *c, struct zr_pipeline **out);
int zr_schedule_bracket(const struct zero_ctx *z, const char *call, const struct zr_core_event *ev);
int zr_schedule_over(const struct zero_ctx *z, const char *call);
int zr_schedule_drop(const struct zero_ctx *z);
void zr_schedule_step(struct zero_ctx *z);

/* backend.c.
 *   row      of a number in ZERO_BACKEND_MAP; NULL for any other, as auto is. number: of a row
 *   of_lent  the row for what a configuration lends on its device, which goes to *lent; NULL: nothing
 *   choose   the row for a configuration, and with it the default of options.deterministic; what does not go
 *            together is refused
 *   open     local for the device, collective and blocking for the communicators
 *   abort    before they are closed with a rank that may be gone, for which closing might wait: keeps this
 *            thread's message, which is the cause
 *   path     how bytes travel, once there are arenas */
const struct zr_backend *zr_backend_row(int32_t number);
int32_t zr_backend_number(const struct zr_backend *row);
const struct zr_backend *zr_backend_of_lent(const struct zero_config *c, void **lent);
int zr_backend_choose(struct zr_config *config, int world, const struct zr_backend **out);
/* Whether z->backend can join the ranks, as they lie on hosts; else the message says how they do, and what
 * could. */
int zr_backend_check_hosts(const struct zero_ctx *z);
int zr_backend_open_device(struct zero_ctx *z);
int zr_backend_open_comms(struct zero_ctx *z);
void zr_backend_abort_comms(struct zero_ctx *z, int err);
void zr_backend_close_comms(struct zero_ctx *z);
const char *zr_backend_path(const struct zero_ctx *z);

/* backend_asks.c. Local, alike on all ranks.
 *   ask_roles  what every role's communicator is to move; of which group is left open
 *   is_ragged  slices of some list of places, or their sums, are too large to be packed
 *   reserve    what the communicators want of the plan (options.gather_scratch_bytes and the like), and pack
 */
void zr_backend_ask_roles(const struct zr_backend *b, const struct zr_layout *l, const struct zr_options *o,
                          struct zr_role_ask ask[ZR_ROLES]);
bool zr_backend_is_ragged(const struct zr_backend *b, const struct zr_layout *l, const struct zr_options *o);
void zr_backend_reserve(struct zr_config *config, const struct zr_backend *b, const struct zr_layout *layout);

/* agree.c: collective over the rendezvous (none needed for world 1). local_err and this thread's message go
 * to the others; returns local_err, or another rank's with its message, or ZR_ERR_MISMATCH naming the field,
 * tensor and ranks that differ. z->layout and z->plan may be NULL when local_err is not 0. */
int zr_agree_on_plan(struct zero_ctx *z, int local_err);
/* The same for a later phase of zero_wrap: all succeed or all fail. */
int zr_agree_on_success(struct zero_ctx *z, int local_err);

/* The same at any time after zero_wrap, over the control communicator. Blocking, between steps. */
int zr_agree_in_run(struct zero_ctx *z, int local_err);

/* The same for a call of one pipeline stage's ranks: an error that a rank has alone then ends the context. */
int zr_agree_in_stage(struct zero_ctx *z, int local_err);

/* awaited.c.
 *   refuse           ZR_ERR_ORDER while the tensor (negative: any) has not all its values; of a context that
 *                    has failed, that failure
 *   refuse_all       the same of any tensor, for a call of all ranks: with pipeline stages, of any stage.
 *                    Collective there, until all have
 *   nothing_written  no tensor but buffers has a value or a state that zero_write gave it
 *   reserve          before a write, so that note cannot fail
 *   note             of a write to each part's elements, or to those of the whole tensor
 *   loaded           all have them now */
int zr_awaited_open(struct zero_ctx *z);
void zr_awaited_close(struct zero_ctx *z);
int zr_awaited_refuse(struct zero_ctx *z, const char *call, int32_t tensor);
int zr_awaited_refuse_all(struct zero_ctx *z, const char *call);
bool zr_awaited_nothing_written(const struct zero_ctx *z);
int zr_awaited_reserve(struct zero_ctx *z, int32_t tensor);
void zr_awaited_note(struct zero_ctx *z, int32_t tensor, bool whole, int64_t first, int64_t n);
void zr_awaited_loaded(struct zero_ctx *z);

/* first_values.c. One warning for the first NaN or infinity among the weights that this rank owns. Local. */
void zr_first_values_report(struct zero_ctx *z);

/* calls.c. As zero_read and zero_write, of a range that was checked; kind as in zr_engine_read. A tied tensor
 * is written on the first stage; on the last it is noted that it has values, which zr_engine_tied_values
 * brings before. */
int zr_values_read(struct zero_ctx *z, int32_t tensor, int kind, int64_t first, int64_t n, void *dst);
int zr_values_write(struct zero_ctx *z, int32_t tensor, int kind, int64_t first, int64_t n, const void *src);

/* buffers.c. exist: in the whole model. are_saved_here: this rank saves its stage's. check: local;
 * ZR_ERR_ORDER for one whose *param is NULL. compare: collective, blocking; whether all ranks' are equal
 * (whole_numbers: of these only), else this thread's message names the first that is not. */
bool zr_buffers_exist(const struct zero_ctx *z);
bool zr_buffers_are_saved_here(const struct zero_ctx *z);
int zr_buffers_check(const struct zero_ctx *z);
int zr_buffers_compare(struct zero_ctx *z, bool whole_numbers, bool *equal);

/* program_data.c. Data that the program gave. The context and the saves under way hold it. keep: NULL is
 * allowed, and returned. */
struct zr_data {
    /* counted on one thread */
    int32_t n_holders;
    int64_t bytes;
    char content[];
};
struct zr_data *zr_data_keep(struct zr_data *d);
void zr_data_drop(struct zr_data *d);
/* The files of a loaded checkpoint, for zero_read_data. prepare may fail and changes nothing. use takes them,
 * and drops what zero_set_data was given before the load. */
int zr_loaded_prepare(struct zero_ctx *z, const char *folder, const struct zr_manifest *m,
                      struct zr_loaded **out);
void zr_loaded_use(struct zero_ctx *z, struct zr_loaded *loaded);
void zr_loaded_free(struct zr_loaded *l);
/* Bytes of the program's data of one enum zr_data_kind in all files; 0 of NULL. */
int64_t zr_loaded_bytes(const struct zr_loaded *l, int kind);

/* save.c. Ends a save that was begun: collective while the context is healthy, else it only gives up what is
 * this rank's. Returns the save's failure. */
int zr_save_end(struct zero_ctx *z);
/* After a step: rank 0 may commit once the step's records say that all files are written. */
void zr_save_notice(struct zero_ctx *z);

/* memory.c.
 *   check       refuses plans that do not fit what the host, and its memory control groups, have free for all
 *               ranks that take of it: those of pipeline stages take different amounts. zr_agree_on_plan has
 *               asked them
 *   check_gpu   refuses a plan that does not fit the GPU; communicators: once more when they are open, and
 *               NCCL has taken its own
 *   host_bytes  what the plan takes of the host's memory
 *   ask         collective, blocking, after zero_wrap: so many bytes more are to be taken of it
 *   check_room  whether it has those bytes, or of a GPU each rank so many: ZR_ERR_NOMEM
 */
int zr_memory_check(struct zero_ctx *z);
int zr_memory_check_gpu(struct zero_ctx *z, bool communicators);
int64_t zr_memory_host_bytes(const struct zero_ctx *z);
int zr_memory_ask(struct zero_ctx *z, int64_t bytes);
int zr_memory_check_room(struct zero_ctx *z, int64_t bytes, bool host);

/* A hash of the sources that this library was built from (source_hash.py). */
uint64_t zr_source_hash(void);

/* command_line.c. This process's command line without the folder of its program. */
struct zr_command_line {
    /* without decimal digits, since programs are given their rank, a port or a device; 0: not known */
    uint64_t hash;
    /* its beginning, on one line */
    char text[128];
};
void zr_command_line_read(struct zr_command_line *out);

/* wrap_report.c. Tells the log of a context that has come about. */
void zr_wrap_report(struct zero_ctx *z);

/* unwrap.c. Closes what was opened, whatever phase of zero_wrap was reached. Keeps this thread's message: to
 * leave the rendezvous may fail where ranks are gone. */
void zr_tear_down(struct zero_ctx *z);

/* calls.c. Refuses the call while a bracket is open. */
int zr_refuse_in_bracket(const struct zero_ctx *z, const char *call);
/* Refuses the call while zero_gather_all holds all parameters, which it would change. */
int zr_refuse_in_all(const struct zero_ctx *z, const char *call);

/* Refuses the call of a context that has failed, inside a bracket, and once the gradients of a step have
 * begun, as far as calls tell. z may be NULL. */
int zr_need_no_step(struct zero_ctx *z, const char *call);

/* loss_scale.c: a step was taken, or given up. */
void zr_loss_scale_step(struct zero_ctx *z);
void zr_loss_scale_drop(struct zero_ctx *z);

/* left_out.c: a bracket has ended; a step was taken, or given up. */
int zr_left_out_open(struct zero_ctx *z);
void zr_left_out_close(struct zero_ctx *z);
void zr_left_out_count(struct zero_ctx *z, int32_t unit, enum zero_phase phase);
void zr_left_out_step(struct zero_ctx *z);
void zr_left_out_drop(struct zero_ctx *z);

/* given_up.c: with cfg.debug.check, what the model's pointers still point at is filled with NaN. */
void zr_given_up_fill(const struct zero_ctx *z);

/* stats.c */
void zr_plan_to_bytes(const int64_t bytes[ZR_MEM_COUNT], struct zero_bytes *out);

#endif
