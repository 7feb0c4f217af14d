/* save.c: zero_save and zero_save_kept: who does what when, over all ranks.
 *
 * 1. All ranks agree that it may begin; rank 0 makes the folder, under a name that is no checkpoint's.
 * 2. On each, a thread of its own writes the rank's file (save_shard.c) from memory that nobody writes: the
 *    model's thread waits, or (asynchronous) the snapshot is read.
 * 3. All learn that every file is written and synced: by exchanges while they wait, or from the records of a
 *    step.
 * 4. Rank 0's thread checks the others' tables, writes the manifest, gives the folder its name and removes
 *    old ones.
 * 5. All learn that, or of the failure, by exchanges in zero_save_wait, the next zero_save, zero_load or
 *    zero_unwrap.
 *
 * While ranks wait for each other's disks they keep exchanging, so that a slow disk is not a lost peer. */
#include "zero/checkpoint/save.h"
#include "kernels/thread.h"
#include "zero/checkpoint/checkpoint_dir.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

enum state { WRITING, WRITTEN, COMMITTED, FAILED };

struct zr_save {
    struct zero_ctx *z;
    int64_t number;
    char root[ZR_PATH_BYTES], folder[ZR_PATH_BYTES], name[ZR_CHECKPOINT_NAME_BYTES];
    struct zr_extents extents;
    struct zr_manifest manifest; /* rank 0's */
    struct zr_rank_data *rank_data;

    struct zr_thread thread;
    bool started, copying; /* copying: the snapshot was asked for */
    bool kept;             /* by zero_save_kept */
    uv_mutex_t lock;
    uv_cond_t changed;
    _Atomic bool cancelled;
    /* Under the lock. */
    bool readable, commit_reported; /* readable: the memory may be read */
    enum state state;
    int err;
    char text[ZR_ERROR_BYTES];
};

/* Of what shapes the numbers, not of where they lie. */
static uint64_t config_hash(const struct zr_options *o)
{
    const struct zr_hyper *h = &o->hyper[o->optimizer];
    double v[] = {(double)o->optimizer,
                  (double)h->beta1,
                  (double)h->beta2,
                  (double)h->eps,
                  (double)h->weight_decay,
                  (double)o->clip,
                  o->grad_scale,
                  o->grad_sum,
                  (double)zr_states_of(o, ZR_OPTIMIZER_NONE),
                  o->deterministic,
                  (double)o->grad_accum_steps,
                  (double)o->wire_dtype};
    return XXH64(v, sizeof v, 0);
}

/* ---- the thread ---- */

static void set_state(struct zr_save *s, enum state state, int err)
{
    uv_mutex_lock(&s->lock);
    s->state = err ? FAILED : state;
    s->err = err;
    if (err)
        snprintf(s->text, sizeof s->text, "%s", zr_error_text());
    uv_cond_broadcast(&s->changed);
    uv_mutex_unlock(&s->lock);
}

/* Waits for a flag under the lock; false when cancelled first. */
static bool await(struct zr_save *s, const bool *flag)
{
    uv_mutex_lock(&s->lock);
    while (!*flag && !s->cancelled)
        uv_cond_wait(&s->changed, &s->lock);
    bool got = *flag;
    uv_mutex_unlock(&s->lock);
    return got;
}

static void raise_flag(struct zr_save *s, bool *flag)
{
    uv_mutex_lock(&s->lock);
    *flag = true;
    uv_cond_broadcast(&s->changed);
    uv_mutex_unlock(&s->lock);
}

static void on_snapshot(void *arg)
{
    struct zr_save *s = arg;
    raise_flag(s, &s->readable);
}

/* The other ranks' tables and sizes, into the manifest. */
static int collect_files(struct zr_save *s)
{
    const struct zr_files *fs = s->z->files;
    struct zr_manifest *m = &s->manifest;
    int err = 0;
    for (int r = 0; !err && r < m->n_files; r++) {
        struct zr_manifest_file *f = &m->files[r];
        char path[ZR_PATH_BYTES], beside[ZR_PATH_BYTES + 8], *table = NULL;
        bool missing;
        int64_t n;
        int fd;
        err = zr_path_join(path, s->folder, f->name);
        if (!err)
            err = zr_file_find(fs, path, &missing, &fd);
        if (err)
            return err;
        err = zr_file_size(fs, fd, path, &f->bytes);
        zr_file_close(fs, fd, path);
        snprintf(beside, sizeof beside, "%s%s", path, ZR_BLOCKS_SUFFIX);
        if (!err)
            err = zr_file_load(fs, beside, INT32_MAX, &missing, &table, &n);
        struct zr_checksum *sums = NULL;
        if (!err)
            err = zr_blocks_parse(beside, (unsigned char *)table, n, f->bytes, &sums);
        if (!err)
            f->blocks = zr_checksum_of(table, n);
        free(sums);
        free(table);
    }
    return err;
}

/* As zero_load will find it. */
static int read_back(struct zr_save *s)
{
    struct zr_manifest m;
    bool broken;
    int err = zr_checkpoint_open(s->z->files, s->folder, &broken, &m);
    if (err)
        return zr_fail_more(err, "read back");
    zr_manifest_free(&m);
    return 0;
}

static int commit(struct zr_save *s)
{
    const struct zr_files *fs = s->z->files;
    int err = collect_files(s);
    if (!err)
        err = zr_checkpoint_seal(fs, s->folder, &s->manifest);
    if (!err)
        err = read_back(s);
    if (!err)
        err = zr_checkpoint_publish(fs, s->root, s->name);
    return err;
}

/* Training goes on meanwhile, and has more to do. Of this thread and those that it starts; nothing is lost
 * where it cannot be done. */
static void step_back(void)
{
#ifdef __linux__ /* elsewhere it would be the whole process */
    setpriority(PRIO_PROCESS, 0, 10);
#endif
}

static void run(void *arg)
{
    struct zr_save *s = arg;
    struct zero_ctx *z = s->z;
    struct zr_device *dev = zr_engine_device(z->engine);
    char name[64];
    if (zr_engine_snapshot(z->engine))
        step_back();
    if (zr_engine_snapshot(z->engine) || dev->ops->host_memory)
        dev = NULL;
    zr_shard_name(z->world.rank, z->world.world, name);
    int err = await(s, &s->readable) ? 0 : zr_fail(ZR_ERR_FAILED, "%s: given up", s->folder);
    if (!err)
        err = zr_shard_write(z->files, s->folder, name, z->layout, &s->extents, dev, &s->cancelled);
    set_state(s, WRITTEN, err);
    if (err)
        return;
    zr_engine_report_least(z->engine, s->number);
    if (z->world.rank != 0 || !await(s, &s->commit_reported))
        return;
    err = commit(s);
    if (!err) {
        zr_info(z->config.options.log, "saved %s/%s", s->root, s->name);
        if (zr_checkpoint_prune(z->files, s->root, s->name, z->config.options.save_keep))
            zr_warn(z->config.options.log, "old checkpoints could not be removed: %s", zr_error_text());
    }
    set_state(s, COMMITTED, err);
}

/* ---- beginning ---- */

static int fill_manifest(struct zero_ctx *z, struct zr_manifest *m)
{
    const struct zr_layout *l = z->layout;
    const struct zr_options *o = &z->config.options;
    struct zr_engine_facts facts;
    zr_engine_facts(z->engine, &facts);
    *m = (struct zr_manifest){.format = 3, /* or 2, when no rank has data of its own */
                              .t = facts.t,
                              .n_skipped = facts.n_skipped,
                              .n_micro = z->n_micro,
                              .world = z->world.world,
                              .stage = o->stage,
                              .n_states = z->plan->states_of[ZR_OPTIMIZER_NONE],
                              .config_hash = config_hash(o),
                              .layout_hash = l->hash};
    snprintf(m->version, sizeof m->version, "%s", zero_version());
    snprintf(m->optimizer, sizeof m->optimizer, "%s", zr_optimizer_name(o->optimizer));
    m->tensors = calloc((size_t)l->n_tensors, sizeof *m->tensors);
    m->files = calloc((size_t)m->world, sizeof *m->files);
    m->user = z->n_user_data ? malloc((size_t)z->n_user_data) : NULL;
    bool ok = m->tensors && m->files && (m->user || !z->n_user_data);
    m->n_user = ok ? z->n_user_data : 0;
    if (ok && m->n_user)
        memcpy(m->user, z->user_data, (size_t)m->n_user);
    for (int32_t i = 0; ok && i < l->n_tensors; i++, m->n_tensors++) {
        struct zr_manifest_tensor *t = &m->tensors[i];
        t->name = strdup(l->tensors[i].name);
        snprintf(t->dtype, sizeof t->dtype, "%s", zr_kind_dtype(&l->tensors[i], ZR_VALUE_PARAM));
        t->n_dims = zr_tensor_dims(&l->tensors[i]);
        memcpy(t->shape, l->tensors[i].shape, sizeof t->shape);
        t->trainable = l->tensors[i].grad != NULL;
        if (t->trainable) {
            enum zr_optimizer kind = l->tensors[i].optimizer;
            snprintf(t->optimizer, sizeof t->optimizer, "%s", zr_optimizer_name(zr_kind_of(o, kind)));
            t->n_states = z->plan->states_of[kind];
        }
        t->buffer = l->tensors[i].buffer;
        ok = t->name != NULL;
    }
    for (int32_t r = 0; ok && r < m->world; r++, m->n_files++)
        zr_shard_name(r, m->world, m->files[r].name);
    return ok ? 0 : zr_fail(ZR_ERR_NOMEM, "no memory for a manifest of %d tensors", l->n_tensors);
}

static void free_save(struct zr_save *s)
{
    free(s->extents.list);
    zr_rank_data_drop(s->rank_data);
    zr_manifest_free(&s->manifest);
    uv_mutex_destroy(&s->lock);
    uv_cond_destroy(&s->changed);
    free(s);
}

/* Both fit: see open_save. */
static void name_folder(struct zr_save *s)
{
    char hidden[ZR_CHECKPOINT_NAME_BYTES + 1];
    snprintf(hidden, sizeof hidden, ".%s", s->name);
    zr_path_join(s->folder, s->root, hidden);
}

/* All that can be found out before anything is written. */
static int open_save(struct zero_ctx *z, const char *dir, bool kept, struct zr_save **out)
{
    struct zr_save *s = calloc(1, sizeof *s);
    if (!s)
        return zr_fail(ZR_ERR_NOMEM, "no memory for a save");
    if (uv_mutex_init(&s->lock)) {
        free(s);
        return zr_fail(ZR_ERR_SYSTEM, "a mutex could not be made");
    }
    if (uv_cond_init(&s->changed)) {
        uv_mutex_destroy(&s->lock);
        free(s);
        return zr_fail(ZR_ERR_SYSTEM, "a condition could not be made");
    }
    s->z = z;
    s->kept = kept;
    s->commit_reported = z->world.world == 1;
    int longest = ZR_PATH_BYTES - 3 * ZR_CHECKPOINT_NAME_BYTES;
    /* The program may change its working directory while the file is written. */
    int err = zr_path_absolute(z->files, dir, s->root);
    if (!err && strlen(s->root) > (size_t)longest)
        err = zr_fail(ZR_ERR_ARG, "dir has %zu characters from the root on; allowed: %d", strlen(s->root),
                      longest);
    if (!err)
        err = zr_buffers_check(z);
    if (!err)
        err = zr_extents_of(z, zr_engine_snapshot(z->engine),
                            z->world.rank == 0 ? z->plan->snapshot_buffers_at : -1, &s->extents);
    s->rank_data = zr_rank_data_keep(z->rank_data);
    if (s->rank_data) {
        s->extents.rank_data = s->rank_data->data;
        s->extents.rank_data_bytes = s->rank_data->bytes;
    }
    if (!err)
        err = zr_shard_check(z->layout, &s->extents);
    if (!err && z->world.rank == 0)
        err = fill_manifest(z, &s->manifest);
    if (!err && z->world.rank == 0)
        err = zr_manifest_check(&s->manifest);
    if (err) {
        free_save(s);
        return err;
    }
    *out = s;
    return 0;
}

struct begun {
    int32_t err;
    char name[ZR_CHECKPOINT_NAME_BYTES];
    char text[ZR_EXCHANGE_BYTES - 4 - ZR_CHECKPOINT_NAME_BYTES];
};

static const char *call_of(bool kept)
{
    return kept ? "zero_save_kept" : "zero_save";
}

/* What each rank was asked for, before anything is written. */
struct wanted {
    int64_t rank_data; /* bytes */
    int32_t kept;
    uint32_t numbers; /* of zero_tune and zero_set_step, hashed */
};

/* Of data that a program took from a checkpoint, and does not give to the next. */
static void report_no_rank_data(struct zero_ctx *z, int64_t bytes)
{
    int64_t before = zr_loaded_ranks_bytes(z->loaded);
    if (bytes || !before || z->rank_data_set || z->reported_no_rank_data || z->world.rank)
        return;
    z->reported_no_rank_data = true;
    zr_warn(z->config.options.log,
            "the checkpoint loaded has %lld bytes of its ranks' own data and the one now saved none: "
            "zero_set_rank_data gives them after zero_load",
            (long long)before);
}

static int agree_on_contents(struct zero_ctx *z, struct zr_save *s)
{
    struct wanted mine = {.rank_data = s->extents.rank_data_bytes,
                          .kept = s->kept,
                          .numbers = zr_tuned_digest(z->engine, 0)},
                  *all = z->from_all;
    int err = 0;
    int64_t bytes = 0;
    if (z->world.world == 1)
        all[0] = mine;
    else
        err = zr_engine_exchange(z->engine, &mine, sizeof mine, all);
    for (int r = 1; !err && r < z->world.world; r++)
        if (all[r].kept != all[0].kept)
            err = zr_fail(ZR_ERR_MISMATCH,
                          "rank %d calls %s and rank 0 %s; every rank must make the same calls", r,
                          call_of(all[r].kept), call_of(all[0].kept));
        else if (all[r].numbers != all[0].numbers)
            err = zr_fail(
                ZR_ERR_MISMATCH,
                "rank %d has other numbers by zero_tune or zero_set_step than rank 0; every rank must "
                "make the same calls",
                r);
    for (int r = 0; !err && r < z->world.world; r++) {
        bytes += all[r].rank_data;
        if (z->world.rank == 0)
            s->manifest.files[r].rank_data = all[r].rank_data;
    }
    s->manifest.format = bytes ? 3 : 2;
    if (!err)
        report_no_rank_data(z, bytes);
    return err;
}

/* Rank 0 makes the folder, and tells all its name. */
static int make_folder(struct zero_ctx *z, struct zr_save *s)
{
    struct begun mine = {0}, *all = z->from_all;
    struct zr_engine_facts facts;
    zr_engine_facts(z->engine, &facts);
    if (z->world.rank == 0)
        mine.err = zr_checkpoint_begin(z->files, &z->locks, z->config.options.log, s->root, facts.t, s->kept,
                                       mine.name);
    if (mine.err)
        snprintf(mine.text, sizeof mine.text, "%s", zr_error_text());
    int err = 0;
    if (z->world.world == 1)
        all[0] = mine;
    else
        err = zr_engine_exchange(z->engine, &mine, sizeof mine, all);
    if (!err && all[0].err)
        err = zr_fail(all[0].err, "%s%.*s", z->world.rank ? "rank 0: " : "", (int)sizeof all->text - 1,
                      all[0].text);
    if (err)
        return err;
    snprintf(s->name, sizeof s->name, "%.*s", ZR_CHECKPOINT_NAME_BYTES - 1, all[0].name);
    name_folder(s);
    return 0;
}

/* ---- ending ---- */

struct status {
    int32_t state, err;
    char text[ZR_EXCHANGE_BYTES - 8];
};

static enum state look(struct zr_save *s, int64_t wait_ns)
{
    int64_t until = zr_now_ns() + wait_ns;
    uv_mutex_lock(&s->lock);
    bool rank0 = s->z->world.rank == 0;
    for (;;) {
        int64_t left = until - zr_now_ns();
        bool busy =
            s->state == WRITING || (rank0 && s->commit_reported && s->state == WRITTEN && !s->cancelled);
        if (!busy || left <= 0)
            break;
        uv_cond_timedwait(&s->changed, &s->lock, (uint64_t)left);
    }
    enum state state = s->state;
    uv_mutex_unlock(&s->lock);
    return state;
}

/* How often a rank that waits looks up. */
static uint64_t tick_ns(const struct zero_ctx *z)
{
    return (uint64_t)zr_min(z->config.options.timeout_ms / 4, 1000) * 1000000;
}

/* Until every rank is done, one way or the other. */
static int meet(struct zero_ctx *z, struct zr_save *s)
{
    int world = z->world.world;
    int64_t tick = (int64_t)tick_ns(z);
    if (world == 1) {
        while (look(s, tick) < COMMITTED) {
            int err = zr_engine_check(z->engine); /* its snapshot may never come */
            if (err)
                return err;
        }
        return 0;
    }
    struct status *all = z->from_all;
    int err = 0;
    for (;;) {
        struct status mine = {.state = (int32_t)look(s, tick)};
        if (mine.state == FAILED) {
            mine.err = s->err;
            snprintf(mine.text, sizeof mine.text, "%.*s", (int)sizeof mine.text - 1, s->text);
        }
        err = zr_engine_exchange(z->engine, &mine, sizeof mine, all);
        if (err)
            break;
        int n_writing = 0, failed = -1;
        for (int r = world; r-- > 0;) {
            n_writing += all[r].state == WRITING;
            failed = all[r].state == FAILED ? r : failed;
        }
        if (failed >= 0) {
            atomic_store(&s->cancelled, true);
            if (!n_writing) {
                if (failed != z->world.rank) {
                    s->err = all[failed].err;
                    snprintf(s->text, sizeof s->text, "rank %d: %.*s", failed, (int)sizeof all->text,
                             all[failed].text);
                }
                break;
            }
        } else if (all[0].state == COMMITTED) {
            break;
        } else if (!n_writing && !s->commit_reported) {
            raise_flag(s, &s->commit_reported);
        }
    }
    return err;
}

/* A save that was given up may end before its snapshot is complete; whoever uses that memory next may not.
 * Ends when the context fails. */
static int await_copies(struct zero_ctx *z, struct zr_save *s)
{
    int err = 0;
    bool complete = !s->copying;
    while (!complete && !err) {
        uv_mutex_lock(&s->lock);
        if (!s->readable)
            uv_cond_timedwait(&s->changed, &s->lock, tick_ns(z));
        complete = s->readable;
        uv_mutex_unlock(&s->lock);
        if (!complete)
            err = zr_engine_check(z->engine);
    }
    return err;
}

int zr_save_end(struct zero_ctx *z)
{
    struct zr_save *s = z->save;
    char text[ZR_ERROR_BYTES];
    if (!s)
        return 0;
    z->save = NULL;
    int err = zr_engine_check(z->engine);
    if (!err)
        err = meet(z, s);
    if (!err)
        err = await_copies(z, s);
    zr_engine_forget_snapshot(z->engine); /* after a failure it may still be on the stream */
    if (err)
        snprintf(text, sizeof text, "%s", zr_error_text());
    uv_mutex_lock(&s->lock);
    atomic_store(&s->cancelled, true);
    uv_cond_broadcast(&s->changed);
    uv_mutex_unlock(&s->lock);
    if (s->started)
        zr_thread_join(&s->thread);
    zr_engine_snapshot_read(z->engine);
    if (!err && s->err) {
        err = s->err;
        snprintf(text, sizeof text, "%s", s->text);
        if (z->world.rank == 0 && zr_folder_remove(z->files, s->folder, ZR_MANIFEST_NAME))
            zr_warn(z->config.options.log, "what a failed save left could not be removed: %s",
                    zr_error_text());
    }
    if (!err)
        zr_path_join(z->saved_path, s->root, s->name); /* fits: see open_save */
    free_save(s);
    return err ? zr_fail(err, "%s", text) : 0;
}

void zr_save_notice(struct zero_ctx *z)
{
    struct zr_save *s = z->save;
    if (s && zr_engine_least(z->engine) >= s->number && !s->commit_reported)
        raise_flag(s, &s->commit_reported);
}

/* ---- the calls ---- */

static int check_call(struct zero_ctx *z, const char *call)
{
    int err = zr_refuse_in_bracket(z, call);
    if (err)
        return err;
    if (!zr_engine_between_steps(z->engine))
        return zr_fail(ZR_ERR_ORDER,
                       "%s: a step has begun; call it before the first backward or after zero_step", call);
    return zr_engine_check(z->engine);
}

static int start(struct zero_ctx *z, struct zr_save *s)
{
    int err = 0;
    if (zr_engine_snapshot(z->engine)) {
        /* The model may write its buffers as soon as this call returns. */
        if (z->world.rank == 0 && z->layout->n_buffers)
            err = zr_engine_copy_buffers(z->engine,
                                         zr_engine_snapshot(z->engine) + z->plan->snapshot_buffers_at, false);
        if (err)
            return err;
        err = zr_engine_take_snapshot(z->engine, on_snapshot, s);
        s->copying = !err;
    } else {
        s->readable = true;
        err = zr_engine_drain(z->engine);
    }
    int thread = err ? 0 : zr_thread_start(&s->thread, "zero-save", run, s);
    if (thread)
        set_state(s, FAILED, thread);
    s->started = !err && !thread;
    return err;
}

/* What is saved is rank 0's. */
static int report_unequal_buffers(struct zero_ctx *z)
{
    bool equal, strict = z->config.options.check;
    if (z->world.world == 1 || !z->layout->n_buffers)
        return 0;
    int err = zr_buffers_compare(z, false, &equal);
    if (err || equal)
        return err;
    if (strict)
        err = zr_fail_more(ZR_ERR_MISMATCH, "zero_sync_buffers first");
    else if (z->world.rank == 0 && !z->reported_unequal_buffers)
        zr_warn(z->config.options.log, "zero_save saves rank 0's buffers, but %s; zero_sync_buffers first",
                zr_error_text());
    z->reported_unequal_buffers = true;
    return zr_agree_in_run(z, err); /* a rank may check alone */
}

static int save(zero_ctx *z, const char *dir, bool kept)
{
    const char *call = call_of(kept);
    if (!z || !dir || !*dir)
        return zr_fail(ZR_ERR_ARG, "%s: %s", call, !z ? "z is NULL" : "dir is NULL or empty");
    int err = check_call(z, call);
    if (!err)
        err = zr_awaited_refuse(z, call, -1);
    if (!err) {
        zr_engine_called(z->engine, kept ? ZR_CALLED_SAVE_KEPT : ZR_CALLED_SAVE, -1, 0);
        err = zr_save_end(z);
    }
    if (!err)
        err = zr_engine_settle(z->engine);
    if (err)
        return err;
    struct zr_save *s = NULL;
    err = zr_agree_in_run(z, open_save(z, dir, kept, &s));
    if (!err)
        err = agree_on_contents(z, s);
    if (!err)
        err = report_unequal_buffers(z);
    if (!err)
        err = make_folder(z, s);
    if (err) {
        if (s)
            free_save(s);
        return zr_fail_more(err, call);
    }
    s->number = ++z->n_saves;
    z->save = s;
    err = start(z, s);
    if (err || !zr_engine_snapshot(z->engine)) {
        int ended = zr_save_end(z);
        err = err ? err : ended;
    }
    return err ? zr_fail_more(err, call) : 0;
}

int zero_save(zero_ctx *z, const char *dir)
{
    return save(z, dir, false);
}

int zero_save_kept(zero_ctx *z, const char *dir)
{
    return save(z, dir, true);
}

int zero_save_wait(zero_ctx *z)
{
    if (!z)
        return zr_fail(ZR_ERR_ARG, "zero_save_wait: z is NULL");
    int err = zr_engine_check(z->engine);
    if (!err) {
        zr_engine_called(z->engine, ZR_CALLED_SAVE_WAIT, -1, 0);
        err = zr_save_end(z);
    }
    return err ? zr_fail_more(err, "zero_save_wait") : 0;
}

int zero_get_saved(zero_ctx *z, const char **path)
{
    if (!z || !path)
        return zr_fail(ZR_ERR_ARG, "zero_get_saved: %s is NULL", z ? "path" : "z");
    if (zr_engine_check_process(z->engine))
        return zr_fail_more(ZR_ERR_ORDER, "zero_get_saved");
    *path = *z->saved_path ? z->saved_path : NULL;
    return 0;
}
