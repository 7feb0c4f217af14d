/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_disk.c: tests the operating system's file system when it is full, read-only, or not
 * writable by this user. */
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#define NOBODY    65534
#define PAGE      4096
#define MAX_FILES 64

static char base[] = "/tmp/zero-checkpoint-XXXXXX", disk[sizeof base + 8], run[sizeof disk + 8];
static char no_mount[256]; /* why it cannot be mounted */

/* ---- a small disk, in a namespace that ends with the process ---- */

static bool write_text(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY);
    bool ok = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0)
        close(fd);
    return ok;
}

static bool enter_namespace(void)
{
    char map[64];
    unsigned uid = geteuid(), gid = getegid();
    if (uid == 0)
        return !unshare(CLONE_NEWNS) && !mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL);
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS))
        return false;
    snprintf(map, sizeof map, "0 %u 1", uid);
    if (!write_text("/proc/self/uid_map", map))
        return false;
    snprintf(map, sizeof map, "0 %u 1", gid);
    return write_text("/proc/self/setgroups", "deny") && write_text("/proc/self/gid_map", map);
}

static int open_disk(void **state)
{
    static bool entered;
    if (!entered && !enter_namespace()) {
        snprintf(no_mount, sizeof no_mount, "no namespace to mount in: %s", strerror(errno));
        return 0;
    }
    entered = true;
    if (mount("none", disk, "tmpfs", 0, "size=4m,nr_inodes=64"))
        snprintf(no_mount, sizeof no_mount, "no tmpfs can be mounted: %s", strerror(errno));
    return 0;
}

static int close_disk(void **state)
{
    return *no_mount ? 0 : umount(disk);
}

static bool is_there(void)
{
    if (*no_mount)
        printf("skipped: %s\n", no_mount);
    return !*no_mount;
}

/* Takes bytes and files, so that exactly this much is left for others. */
static void fill_disk(int64_t free_pages, int64_t free_files)
{
    char path[sizeof disk + 32];
    int64_t pages = 0, files = 0;
    /* Found by allocating, since a file system's own figures are not reliable. */
    for (; files < MAX_FILES; files++) {
        snprintf(path, sizeof path, "%s/filler%lld", disk, (long long)files);
        int fd = open(path, O_CREAT | O_EXCL | O_WRONLY, 0666);
        if (fd < 0)
            break;
        close(fd);
    }
    snprintf(path, sizeof path, "%s/filler0", disk);
    int fd = open(path, O_WRONLY);
    char page[PAGE] = {1};
    while (write(fd, page, PAGE) == PAGE)
        pages++;
    assert_int_equal(ftruncate(fd, zr_max(pages - free_pages, 0) * PAGE), 0);
    close(fd);
    for (int64_t i = zr_max(files - free_files, 1); i < files; i++) {
        snprintf(path, sizeof path, "%s/filler%lld", disk, (long long)i);
        unlink(path);
    }
}

static void empty_disk(void)
{
    char path[sizeof disk + 32];
    for (int i = 0; i < MAX_FILES; i++) {
        snprintf(path, sizeof path, "%s/filler%d", disk, i);
        unlink(path);
    }
}

struct story {
    pthread_barrier_t barrier;
    int64_t n_refused;
};

static void alone(struct model_rank *m, struct story *s, void (*fn)(int64_t, int64_t), int64_t a, int64_t b)
{
    pthread_barrier_wait(&s->barrier);
    if (m->rank == 0)
        fn(a, b);
    pthread_barrier_wait(&s->barrier);
}

static void empty(int64_t a, int64_t b)
{
    empty_disk();
}

/* Saves with this much space left. The save is done, or refused and nothing is lost. */
static bool try_save(struct model_rank *m, struct story *s, int64_t pages, int64_t files,
                     const uint64_t hash[3])
{
    alone(m, s, fill_disk, pages, files);
    int err = zero_save(m->z, run, NULL);
    if (!err)
        err = zero_save_wait(m->z, NULL);
    if (err) {
        CHECK_THAT(err == ZERO_ERR_IO && strstr(zero_last_error(), "no space left on device") &&
                   strstr(zero_last_error(), disk));
        CHECK_OK(zero_load(m->z, run));
        CHECK_THAT(model_hash(m) == hash[1] && model_t(m) == 1);
        m->step = 1;
        CHECK_OK(model_steps(m, 1));
        s->n_refused += m->rank == 0;
    }
    CHECK_THAT(model_hash(m) == hash[2]);
    alone(m, s, empty, 0, 0);
    return !err;
}

/* Makes one committed save, and the state of a second. */
static void begin(struct model_rank *m, uint64_t hash[3])
{
    for (int i = 1; i <= 2; i++) {
        CHECK_OK(model_steps(m, 1));
        hash[i] = model_hash(m);
        if (i == 1)
            CHECK_OK(zero_save(m->z, run, NULL));
        CHECK_OK(zero_save_wait(m->z, NULL));
    }
}

static void fill_up(struct model_rank *m, void *arg)
{
    struct story *s = arg;
    uint64_t hash[3];
    begin(m, hash);
    for (int64_t pages = 0; !try_save(m, s, pages, 64, hash); pages++)
        CHECK_THAT(pages < 512);
    CHECK_OK(zero_load(m->z, run)); /* the save that had enough space */
    CHECK_THAT(model_hash(m) == hash[2]);
}

static void run_out_of_files(struct model_rank *m, void *arg)
{
    struct story *s = arg;
    uint64_t hash[3];
    begin(m, hash);
    for (int64_t files = 0; !try_save(m, s, 512, files, hash); files++)
        CHECK_THAT(files < 32);
    CHECK_OK(zero_load(m->z, run));
    CHECK_THAT(model_hash(m) == hash[2]);
}

static void with_disk(void (*fn)(struct model_rank *m, void *arg), bool async)
{
    struct story s = {0};
    struct model_options o = {.stage = 2, .world = 2, .async = async, .keep = 1};
    assert_int_equal(pthread_barrier_init(&s.barrier, NULL, 2), 0);
    model_run(&o, fn, &s);
    pthread_barrier_destroy(&s.barrier);
    printf("%lld saves onto a full disk refused\n", (long long)s.n_refused);
    assert_true(s.n_refused > 2);
}

static void test_full(void **state)
{
    if (!is_there())
        skip();
    with_disk(fill_up, false);
}

static void test_full_asynchronous(void **state)
{
    if (!is_there())
        skip();
    with_disk(fill_up, true);
}

static void test_no_more_files(void **state)
{
    if (!is_there())
        skip();
    with_disk(run_out_of_files, false);
}

/* ---- folders that may be read, and not written ---- */

static void refuse_writing(struct model_rank *m, const char *why)
{
    uint64_t hash = model_hash(m);
    CHECK_THAT(zero_save(m->z, run, NULL) == ZERO_ERR_IO);
    CHECK_THAT(strstr(zero_last_error(), run) && strstr(zero_last_error(), why));
    CHECK_THAT(model_hash(m) == hash);
    CHECK_OK(zero_load(m->z, run));
    CHECK_THAT(model_t(m) == 1);
}

static void on_read_only(struct model_rank *m, void *arg)
{
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_save(m->z, run, NULL));
    CHECK_OK(model_steps(m, 1));
    zr_folder_unlock_all(&m->z->locks); /* a file open for writing, which cannot be there */
    CHECK_THAT(!mount(NULL, disk, NULL, MS_REMOUNT | MS_RDONLY, NULL));
    refuse_writing(m, "read-only file system");
    CHECK_THAT(!mount(NULL, disk, NULL, MS_REMOUNT, NULL));
    CHECK_OK(zero_save(m->z, run, NULL));
}

static void test_read_only(void **state)
{
    if (!is_there())
        skip();
    model_run(&(struct model_options){.stage = 1, .world = 1}, on_read_only, NULL);
}

/* Root may write anywhere, so it acts as another user here. */
static void on_closed_folder(struct model_rank *m, void *arg)
{
    bool root = *(bool *)arg;
    if (root)
        CHECK_THAT(!seteuid(NOBODY));
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_save(m->z, run, NULL));
    CHECK_OK(model_steps(m, 1));
    CHECK_THAT(!chmod(run, 0555));
    refuse_writing(m, "permission denied");
    CHECK_THAT(!chmod(run, 0755));
    CHECK_OK(zero_save(m->z, run, NULL));
    if (root)
        CHECK_THAT(!seteuid(0));
}

static void test_closed_folder(void **state)
{
    bool root = geteuid() == 0;
    if (root && (chmod(base, 0755) || chown(disk, NOBODY, NOBODY) || seteuid(NOBODY) || seteuid(0))) {
        printf("skipped: root cannot be anybody else: %s\n", strerror(errno));
        skip();
    }
    model_run(&(struct model_options){.stage = 1, .world = 1, .keep = 1}, on_closed_folder, &root);
}

static int remove_one(void *arg, const char *name)
{
    char path[ZR_PATH_BYTES];
    return zr_path_join(path, arg, name) || zr_folder_remove(&zr_files_posix, path, NULL);
}

int main(void)
{
    if (!mkdtemp(base))
        return 1;
    snprintf(disk, sizeof disk, "%s/disk", base);
    snprintf(run, sizeof run, "%s/run", disk);
    if (mkdir(disk, 0755))
        return 1;
    /* The order matters: in a namespace that makes us root, no folder is closed to us. */
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_closed_folder),
        cmocka_unit_test_setup_teardown(test_full, open_disk, close_disk),
        cmocka_unit_test_setup_teardown(test_full_asynchronous, open_disk, close_disk),
        cmocka_unit_test_setup_teardown(test_no_more_files, open_disk, close_disk),
        cmocka_unit_test_setup_teardown(test_read_only, open_disk, close_disk),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    zr_folder_walk(&zr_files_posix, run, NULL, remove_one, run);
    rmdir(run);
    return rmdir(disk) | rmdir(base) | failed;
}
