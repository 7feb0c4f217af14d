/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_data.c: tests that the program's data, of the job and of each rank, can be read by any
 * number of ranks later, complete or not at all. */
#include "test/checkpoint/memory_files.h"
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"
#include "zero/checkpoint/checkpoint_dir.h"
#include "zero/checkpoint/save.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define GUARD 16

static uint64_t seed;
static struct memory_files *disk;

/* Length of the data of the job (ZERO_DATA_JOB) or of a rank at a step: none, one byte, several blocks, or
 * less than a block. No two lengths are equal. */
static int64_t bytes_of(int whose, int64_t t)
{
    static const int64_t bytes[] = {(3 << 20) + 17, 0, 1, 70001};
    int64_t n = whose == ZERO_DATA_JOB ? (2 << 20) + 5 : bytes[whose % 4];
    return n > 1 ? n + t : n;
}

static unsigned char *data_of(int whose, int64_t t)
{
    int64_t n = bytes_of(whose, t);
    unsigned char *p = malloc((size_t)n + 1);
    uint64_t state = random_mix(seed + (uint64_t)(whose + 1) * 1000 + (uint64_t)t);
    for (int64_t i = 0; i < n; i++)
        p[i] = (unsigned char)(random_next(&state) >> 24);
    return p;
}

static void set_own(struct model_rank *m, int64_t t)
{
    for (int i = 0; i < 2; i++) {
        int whose = i ? ZERO_DATA_JOB : m->rank;
        int64_t n = bytes_of(whose, t);
        unsigned char *p = data_of(whose, t);
        if (i && m->rank > 0) /* this does not count */
            memset(p, 0x33, (size_t)n--);
        CHECK_OK(zero_set_data(m->z, i ? ZERO_DATA_JOB : ZERO_DATA_RANK, n ? p : NULL, n));
        memset(p, 0xee, (size_t)n); /* the data was copied */
        free(p);
    }
}

/* Reads [first, first + n), and checks that no other byte was written. */
static void read_part(struct model_rank *m, int whose, int64_t first, int64_t n,
                      const unsigned char *expected)
{
    unsigned char *got = malloc((size_t)n + 2 * GUARD);
    memset(got, 0xa5, (size_t)n + 2 * GUARD);
    CHECK_OK(zero_read_data(m->z, whose, first, n, got + GUARD, NULL));
    CHECK_THAT(!memcmp(got + GUARD, expected + first, (size_t)n));
    for (int i = 0; i < GUARD; i++)
        CHECK_THAT(got[i] == 0xa5 && got[GUARD + n + i] == 0xa5);
    free(got);
}

static void read_all(struct model_rank *m, int whose, int64_t t)
{
    int64_t n = bytes_of(whose, t);
    struct zero_data_info info = {.bytes = -1};
    uint64_t state = seed + (uint64_t)(m->rank * 10 + whose);
    unsigned char *p = data_of(whose, t);
    CHECK_OK(zero_read_data(m->z, whose, 0, 0, NULL, &info));
    CHECK_THAT(info.bytes == n);
    read_part(m, whose, 0, n, p);
    for (int i = 0; n && i < 4; i++) {
        int64_t first = (int64_t)(random_next(&state) % (uint64_t)n);
        read_part(m, whose, first, (int64_t)(random_next(&state) % (uint64_t)(n - first + 1)), p);
    }
    free(p);
}

/* ---- every world from every other ---- */

struct saved {
    int world;
    bool async;
};

static void save_twice(struct model_rank *m, void *arg)
{
    for (int t = 1; t <= 2; t++) {
        CHECK_OK(model_steps(m, 1));
        set_own(m, t);
        CHECK_OK(zero_save(m->z, "run", NULL));
        set_own(m, t + 10); /* data that is being saved does not change */
    }
    CHECK_OK(zero_save_wait(m->z, NULL));
}

static void load_anywhere(struct model_rank *m, void *arg)
{
    const struct saved *s = arg;
    struct zero_data_info info = {.n_saved = -1};
    char x[4];
    CHECK_THAT(zero_read_data(m->z, 0, 0, 0, NULL, &info) == ZERO_ERR_ORDER && info.n_saved == -1);
    for (int t = 2; t >= 1; t--) {
        char path[64];
        snprintf(path, sizeof path, "run/save-%08d-step-%08d", t, t);
        CHECK_OK(zero_load(m->z, path));
        CHECK_OK(zero_read_data(m->z, 0, 0, 1, x, &info));
        CHECK_THAT(info.n_saved == s->world && info.bytes == bytes_of(0, t));
        for (int r = ZERO_DATA_JOB; r < s->world; r++)
            read_all(m, r, t);
    }
    info = (struct zero_data_info){.bytes = -1};
    CHECK_THAT(zero_read_data(m->z, s->world, 0, 1, x, &info) == ZERO_ERR_ARG);
    CHECK_THAT(strstr(zero_last_error(), "zero_read_data: whose is") != NULL);
    CHECK_THAT(zero_read_data(m->z, ZERO_DATA_RANK, 0, 0, NULL, &info) == ZERO_ERR_ARG);
    CHECK_THAT(zero_read_data(m->z, 0, bytes_of(0, 1) - 3, 4, x, &info) == ZERO_ERR_ARG);
    CHECK_THAT(strstr(zero_last_error(), "saved rank 0 has") != NULL);
    CHECK_THAT(zero_read_data(m->z, ZERO_DATA_JOB, bytes_of(ZERO_DATA_JOB, 1), 1, x, &info) == ZERO_ERR_ARG);
    CHECK_THAT(strstr(zero_last_error(), "the job has") != NULL);
    CHECK_THAT(zero_read_data(m->z, 0, -1, 1, x, &info) == ZERO_ERR_ARG);
    CHECK_THAT(zero_read_data(m->z, 0, 0, -1, x, &info) == ZERO_ERR_ARG);
    CHECK_THAT(zero_read_data(m->z, 0, INT64_MAX, INT64_MAX, x, &info) == ZERO_ERR_ARG);
    CHECK_THAT(zero_read_data(m->z, 0, 0, 1, NULL, &info) == ZERO_ERR_ARG && info.bytes == -1);
    CHECK_OK(zero_read_data(m->z, 0, bytes_of(0, 1), 0, NULL, NULL));
}

static void test_every_world(void **state)
{
    static const int worlds[] = {1, 2, 4};
    for (int w = 0; w < 3; w++) {
        struct saved s = {.world = worlds[w], .async = w % 2};
        disk = memory_files_open();
        struct model_options o = {
            .stage = w + 1, .world = s.world, .async = s.async, .files = memory_files_table(disk)};
        model_run(&o, save_twice, &s);
        o.scrambled = true;
        for (int to = 0; to < 3; to++) {
            o.world = worlds[to];
            o.stage = 3 - to;
            model_run(&o, load_anywhere, &s);
        }
        assert_int_equal(memory_files_n_open(disk), 0);
        memory_files_close(disk);
    }
}

/* ---- how long data lives ---- */

static pthread_mutex_t lines_lock = PTHREAD_MUTEX_INITIALIZER;
static char lines[8192];

static void keep_line(void *arg, const char *line)
{
    pthread_mutex_lock(&lines_lock);
    size_t n = strlen(lines);
    snprintf(lines + n, sizeof lines - n, "%s\n", line);
    pthread_mutex_unlock(&lines_lock);
}

/* Rank 0 checks after all ranks have come this far. */
static void look(struct model_rank *m, bool reported, bool has_data)
{
    static const char *const keys[] = {"\"job_data\":", "\"rank_data\":"};
    static const char *const says[] = {
        "bytes of the job's data, but this save has none: call zero_set_data",
        "bytes of its ranks' own data, but this save has none: call zero_set_data"};
    const char *path;
    char manifest[ZR_PATH_BYTES + 16];
    int64_t *n;
    CHECK_OK(zr_engine_barrier(m->z->engine));
    CHECK_OK(zero_save_wait(m->z, &path));
    if (m->rank == 0) {
        snprintf(manifest, sizeof manifest, "%s/manifest.json", path);
        const unsigned char *text = memory_files_content(disk, manifest, &n);
        for (int k = 0; k < 2; k++) {
            const char *of_rank_0 = text ? memmem(text, (size_t)*n, keys[k], strlen(keys[k])) : NULL;
            CHECK_THAT(of_rank_0 && (of_rank_0[strlen(keys[k])] != '0') == has_data);
            CHECK_THAT((strstr(lines, says[k]) != NULL) == reported);
        }
        *lines = 0;
    }
    CHECK_OK(zr_engine_barrier(m->z->engine));
}

static void set_and_forget(struct model_rank *m, void *arg)
{
    struct zero_data_info info;
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_save(m->z, "run", NULL));
    look(m, false, false);
    CHECK_OK(zero_load(m->z, "run")); /* this one has no such data */
    for (int r = ZERO_DATA_JOB; r < m->world; r++) {
        CHECK_OK(zero_read_data(m->z, r, 0, 0, NULL, &info));
        CHECK_THAT(info.n_saved == m->world && info.bytes == 0);
    }
    set_own(m, 1);
    CHECK_OK(zero_save(m->z, "run", NULL));
    look(m, false, true);
    CHECK_OK(zero_save(m->z, "run", NULL)); /* the data goes with all later saves */
    look(m, false, true);
    CHECK_OK(zero_load(m->z, "run"));
    for (int r = ZERO_DATA_JOB; r < m->world; r++)
        read_all(m, r, 1);
    CHECK_THAT(zero_load(m->z, "nowhere") == ZERO_ERR_IO); /* changes nothing */
    read_all(m, 0, 1);
    CHECK_OK(zero_save(m->z, "run", NULL)); /* it belonged to the time before the load */
    look(m, true, false);
    CHECK_OK(zero_save(m->z, "run", NULL)); /* reported once */
    look(m, false, false);
    read_all(m, 0, 1); /* still the data of the loaded one */
    CHECK_OK(zero_load(m->z, "run/save-00000002-step-00000001"));
    CHECK_OK(zero_set_data(m->z, ZERO_DATA_RANK, NULL, 0)); /* on purpose */
    CHECK_OK(zero_set_data(m->z, ZERO_DATA_JOB, NULL, 0));
    CHECK_OK(zero_save(m->z, "run", NULL));
    look(m, false, false);
}

static void test_until_when(void **state)
{
    for (int world = 1; world <= 3; world += 2) {
        disk = memory_files_open();
        *lines = 0;
        model_run(
            &(struct model_options){
                .stage = 2, .world = world, .log = keep_line, .files = memory_files_table(disk)},
            set_and_forget, NULL);
        memory_files_close(disk);
    }
}

/* ---- damaged and removed files ---- */

static void save_own(struct model_rank *m, void *arg)
{
    CHECK_OK(model_steps(m, 1));
    set_own(m, 1);
    CHECK_OK(zero_save(m->z, "run", NULL));
}

#define ONE    "run/save-00000001-step-00000001"
#define SHARD1 ONE "/shard-00001-of-00004.safetensors"
#define SHARD4 ONE "/shard-00004-of-00004.safetensors"

static void flip_at(struct model_rank *m, const char *path, int64_t from_end)
{
    CHECK_OK(zr_engine_barrier(m->z->engine));
    if (m->rank == 0)
        CHECK_THAT(memory_files_flip(disk, path, from_end, 8));
    CHECK_OK(zr_engine_barrier(m->z->engine));
}

/* The rank's data is at the end of the file. */
static void flip(struct model_rank *m, const char *path)
{
    flip_at(m, path, (int64_t)(seed % 1000));
}

/* The job's data comes before it, in rank 0's file. */
static void flip_job(struct model_rank *m)
{
    flip_at(m, SHARD1, bytes_of(0, 1) + (int64_t)(seed % 1000));
}

static void refuse_damage(struct model_rank *m, void *arg)
{
    unsigned char *x = malloc((size_t)bytes_of(0, 1));
    uint64_t hash = model_hash(m);
    flip(m, SHARD1);
    CHECK_THAT(zero_load(m->z, "run/save-00000001-step-00000001") == ZERO_ERR_IO);
    CHECK_THAT(strstr(zero_last_error(), SHARD1) && strstr(zero_last_error(), "damaged"));
    CHECK_THAT(model_hash(m) == hash && zero_read_data(m->z, 0, 0, 0, NULL, NULL) == ZERO_ERR_ORDER);
    flip(m, SHARD1);
    flip(m, SHARD4);
    CHECK_THAT(zero_load(m->z, ONE) == ZERO_ERR_IO && strstr(zero_last_error(), SHARD4));
    flip(m, SHARD4);
    flip_job(m);
    CHECK_THAT(zero_load(m->z, ONE) == ZERO_ERR_IO && strstr(zero_last_error(), SHARD1));
    flip_job(m);
    CHECK_OK(zero_load(m->z, ONE));
    flip_job(m); /* after the load */
    CHECK_THAT(zero_read_data(m->z, ZERO_DATA_JOB, 0, bytes_of(ZERO_DATA_JOB, 1), x, NULL) == ZERO_ERR_IO);
    CHECK_THAT(strstr(zero_last_error(), "zero_read_data: " SHARD1) && strstr(zero_last_error(), "damaged"));
    flip_job(m);
    read_all(m, ZERO_DATA_JOB, 1);
    flip(m, SHARD1); /* after the load */
    CHECK_THAT(zero_read_data(m->z, 0, 0, bytes_of(0, 1), x, NULL) == ZERO_ERR_IO);
    CHECK_THAT(strstr(zero_last_error(), "zero_read_data: " SHARD1) && strstr(zero_last_error(), "damaged"));
    read_all(m, 3, 1); /* data of other ranks is intact */
    flip(m, SHARD1);
    read_all(m, 0, 1);
    /* A save removes the checkpoint, and another one gets its name. */
    set_own(m, 2);
    CHECK_OK(zero_save(m->z, "run", NULL));
    CHECK_THAT(zero_read_data(m->z, 0, 0, 1, x, NULL) == ZERO_ERR_IO);
    CHECK_THAT(strstr(zero_last_error(), SHARD1) && strstr(zero_last_error(), "no such file"));
    CHECK_OK(zr_engine_barrier(m->z->engine));
    free(x);
}

static void test_damage(void **state)
{
    for (int world = 1; world <= 2; world++) {
        disk = memory_files_open();
        struct model_options o = {.stage = 1, .world = 4, .keep = 1, .files = memory_files_table(disk)};
        model_run(&o, save_own, NULL);
        o.world = world;
        o.scrambled = true;
        model_run(&o, refuse_damage, NULL);
        memory_files_close(disk);
    }
}

/* A manifest and a file contradict each other, though each has a valid checksum. */
static void refuse_mixtures(struct model_rank *m, void *arg)
{
    struct zr_manifest manifest;
    bool broken;
    CHECK_OK(zr_checkpoint_open(m->z->files, ONE, &broken, &manifest));
    CHECK_THAT(manifest.files[0].data[ZR_DATA_RANK] == bytes_of(0, 1));
    uint64_t hash = model_hash(m);
    manifest.files[0].data[ZR_DATA_RANK]++;
    CHECK_OK(zr_checkpoint_seal(m->z->files, ONE, &manifest));
    CHECK_THAT(zero_load(m->z, ONE) == ZERO_ERR_IO);
    CHECK_THAT(strstr(zero_last_error(), "it lacks entry rank_data of 3145747 bytes") != NULL);
    manifest.files[0].data[ZR_DATA_RANK]--;
    manifest.files[1].data[ZR_DATA_RANK] = 5; /* it has none */
    CHECK_OK(zr_checkpoint_seal(m->z->files, ONE, &manifest));
    CHECK_THAT(zero_load(m->z, ONE) == ZERO_ERR_IO);
    CHECK_THAT(strstr(zero_last_error(), "it lacks entry rank_data of 5 bytes") != NULL);
    manifest.files[1].data[ZR_DATA_RANK] = 0;
    manifest.files[0].data[ZR_DATA_RANK] = 0; /* it has some */
    CHECK_OK(zr_checkpoint_seal(m->z->files, ONE, &manifest));
    CHECK_THAT(zero_load(m->z, ONE) == ZERO_ERR_IO);
    CHECK_THAT(strstr(zero_last_error(), "entry rank_data is not named TENSOR/KIND/FIRST") != NULL);
    manifest.files[0].data[ZR_DATA_RANK] = bytes_of(0, 1);
    manifest.files[0].data[ZR_DATA_JOB]--;
    CHECK_OK(zr_checkpoint_seal(m->z->files, ONE, &manifest));
    CHECK_THAT(zero_load(m->z, ONE) == ZERO_ERR_IO);
    CHECK_THAT(strstr(zero_last_error(), "it lacks entry job_data of 2097157 bytes") != NULL);
    CHECK_THAT(model_hash(m) == hash);
    manifest.files[0].data[ZR_DATA_JOB]++;
    CHECK_OK(zr_checkpoint_seal(m->z->files, ONE, &manifest));
    CHECK_OK(zero_load(m->z, ONE));
    read_all(m, 0, 1);
    zr_manifest_free(&manifest);
}

static void test_mixtures(void **state)
{
    disk = memory_files_open();
    struct model_options o = {.stage = 2, .world = 4, .files = memory_files_table(disk)};
    model_run(&o, save_own, NULL);
    o.world = 1;
    o.scrambled = true;
    model_run(&o, refuse_mixtures, NULL);
    memory_files_close(disk);
}

/* ---- calls that fail ---- */

static void fail_reads(struct model_rank *m, void *arg)
{
    static const enum memory_fault faults[] = {FAULT_EIO, FAULT_EINTR, FAULT_SHORT};
    int64_t n = 200;
    unsigned char got[200], *expected = data_of(0, 1);
    CHECK_OK(zero_load(m->z, "run"));
    for (size_t f = 0; f < 3; f++) {
        int64_t n_failed = 0;
        for (int64_t k = 1, calls = k; calls >= k; k++) {
            memset(got, 0xa5, sizeof got);
            memory_files_fault(disk, faults[f], k, false);
            int err = zero_read_data(m->z, 0, 1 << 20, n, got, NULL);
            calls = memory_files_calls(disk);
            memory_files_fault(disk, FAULT_NONE, 0, false);
            CHECK_THAT(err == 0 || (err == ZERO_ERR_IO && faults[f] == FAULT_EIO));
            CHECK_THAT(err || !memcmp(got, expected + (1 << 20), (size_t)n));
            CHECK_THAT(memory_files_n_open(disk) == 0);
            n_failed += err != 0;
        }
        CHECK_THAT((n_failed > 0) == (faults[f] == FAULT_EIO));
    }
    free(expected);
}

static void test_reads_fail(void **state)
{
    disk = memory_files_open();
    struct model_options o = {.stage = 0, .world = 1, .files = memory_files_table(disk)};
    model_run(&o, save_own, NULL);
    model_run(&o, fail_reads, NULL);
    memory_files_close(disk);
}

/* ---- on a disk ---- */

static void read_from_elsewhere(struct model_rank *m, void *arg)
{
    char path[ZR_PATH_BYTES];
    const char *saved;
    CHECK_OK(model_steps(m, 1));
    set_own(m, 1);
    CHECK_OK(zero_save(m->z, "run", NULL));
    CHECK_OK(zero_save_wait(m->z, &saved));
    snprintf(path, sizeof path, "%s", saved);
    CHECK_OK(zero_load(m->z, "run"));
    CHECK_THAT(!chdir("/"));
    read_all(m, 0, 1);
    CHECK_OK(zr_folder_remove(&zr_files_posix, path, NULL));
    CHECK_THAT(!chdir(arg));
}

static void test_on_a_disk(void **state)
{
    char base[] = "/tmp/zero-checkpoint-XXXXXX";
    assert_non_null(mkdtemp(base));
    assert_int_equal(chdir(base), 0);
    model_run(&(struct model_options){.stage = 3, .world = 1}, read_from_elsewhere, base);
    assert_int_equal(rmdir("run"), 0);
    assert_int_equal(chdir("/"), 0);
    assert_int_equal(rmdir(base), 0);
}

int main(void)
{
    const char *given = getenv("SEED");
    seed = given ? strtoull(given, NULL, 0) : (uint64_t)time(NULL);
    printf("SEED=%llu\n", (unsigned long long)seed);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_world), cmocka_unit_test(test_until_when),
        cmocka_unit_test(test_damage),      cmocka_unit_test(test_mixtures),
        cmocka_unit_test(test_reads_fail),  cmocka_unit_test(test_on_a_disk),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
