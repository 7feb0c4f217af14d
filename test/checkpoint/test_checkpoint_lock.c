/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_lock.c: tests that only one run at a time saves into a folder. That holds by whatever path
 * a run names the folder, and if it changes its working directory meanwhile. */
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static char base[] = "/tmp/zero-checkpoint-XXXXXX", run[sizeof base + 8], link_to_run[sizeof base + 8],
            moved[sizeof base + 8], lock_file[sizeof run + 8], moved_lock_file[sizeof moved + 8];

static const struct model_options alone = {.stage = 1, .world = 1, .keep = 1};

static int remove_one(void *arg, const char *name)
{
    char path[ZR_PATH_BYTES];
    return zr_path_join(path, arg, name) || zr_folder_remove(&zr_files_posix, path, NULL);
}

/* Removes a folder with its checkpoints. Any other file in it is an error. */
static void clear(char *path)
{
    assert_int_equal(zr_folder_walk(&zr_files_posix, path, NULL, remove_one, path), 0);
    assert_int_equal(rmdir(path), 0);
}

static void save(struct model_rank *m, void *arg)
{
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_save(m->z, arg, NULL));
    CHECK_OK(zero_save_wait(m->z, NULL));
}

static void refuse(struct model_rank *m, void *arg)
{
    CHECK_OK(model_steps(m, 1));
    for (int i = 0; i < 2; i++) {
        CHECK_THAT(zero_save(m->z, i ? link_to_run : run, NULL) == ZERO_ERR_IO);
        CHECK_THAT(strstr(zero_last_error(), run) &&
                   strstr(zero_last_error(), "another run saves into this"));
        model_check(strstr(zero_last_error(), arg) != NULL, __FILE__, __LINE__, arg);
    }
    CHECK_OK(model_steps(m, 1));    /* training goes on */
    CHECK_OK(zero_load(m->z, run)); /* needs no lock */
}

/* ---- two contexts ---- */

static void save_beside(struct model_rank *m, void *arg)
{
    char other[sizeof base + 8];
    save(m, run);
    uint64_t hash = model_hash(m);
    model_run(&alone, refuse, arg);
    snprintf(other, sizeof other, "%s/other", base);
    model_run(&alone, save, other);
    clear(other);
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_load(m->z, link_to_run));
    CHECK_THAT(model_hash(m) == hash);
    save(m, link_to_run); /* its own lock does not stop it, whatever path it uses */
    CHECK_THAT(!access(lock_file, F_OK));
}

static void test_two_contexts(void **state)
{
    for (int world = 1; world < 3; world++) {
        struct model_options o = {.stage = 3, .world = world, .keep = 2};
        if (world == 1)
            model_run(&o, save_beside, "another of its contexts");
        else
            model_run(&o, save, run);
        assert_int_equal(access(lock_file, F_OK), -1); /* gone with its holder */
    }
    model_run(&alone, save, run);
    clear(run);
}

/* More folders than it keeps locked. */
static void save_into_many(struct model_rank *m, void *arg)
{
    char folder[sizeof base + 16];
    for (int turn = 0; turn < 2; turn++)
        for (int i = 0; i < ZR_MAX_FOLDER_LOCKS + 3; i++) {
            snprintf(folder, sizeof folder, "%s/many%d", base, i);
            CHECK_OK(zero_save(m->z, folder, NULL));
            CHECK_THAT(m->z->locks.n <= ZR_MAX_FOLDER_LOCKS);
        }
}

static void test_many_folders(void **state)
{
    char folder[sizeof base + 16];
    model_run(&alone, save_into_many, NULL);
    for (int i = 0; i < ZR_MAX_FOLDER_LOCKS + 3; i++) {
        snprintf(folder, sizeof folder, "%s/many%d", base, i);
        clear(folder);
    }
}

/* ---- a renamed or removed folder, and files of the user's ---- */

/* Checks whether another context may save into the folder. */
static void try_beside(const char *folder, bool is_free)
{
    char copy[ZR_PATH_BYTES];
    snprintf(copy, sizeof copy, "%s", folder);
    if (is_free)
        model_run(&alone, save, copy);
    else
        model_run(&alone, refuse, "another of its contexts");
}

static int export_to(struct model_rank *m, const char *folder)
{
    return zero_export(m->z, folder, NULL, 0, 0);
}

static void save_beside_another(struct model_rank *m, void *arg)
{
    struct model_rank *first = arg;
    save(m, run);
    CHECK_THAT(!access(moved_lock_file, F_OK));
    /* The first context's lock moved with the renamed folder. Releasing it does not release this one. */
    CHECK_THAT(zero_save(first->z, run, NULL) == ZERO_ERR_IO);
    CHECK_THAT(strstr(zero_last_error(), "another of its contexts") != NULL);
    zr_folder_unlock_all(&first->z->locks);
    CHECK_THAT(!access(lock_file, F_OK) && access(moved_lock_file, F_OK) == -1);
}

static void rename_and_save(struct model_rank *m, void *arg)
{
    char command[200];
    save(m, run);
    CHECK_THAT(!rename(run, moved));
    save(m, run);
    CHECK_THAT(!access(lock_file, F_OK) && access(moved_lock_file, F_OK) == -1);
    try_beside(run, false);
    try_beside(moved, true);
    CHECK_THAT(!unlink(lock_file));
    save(m, run);
    try_beside(run, false);
    clear(moved);
    CHECK_THAT(!rename(run, moved) && !mkdir(run, 0777));
    CHECK_OK(export_to(m, run)); /* takes another lock, and releases it */
    CHECK_THAT(access(lock_file, F_OK) == -1);
    snprintf(command, sizeof command, "rm -r '%s' '%s'", run, moved);
    CHECK_THAT(!system(command));
    save(m, run);
    try_beside(run, false);
    CHECK_THAT(!rename(run, moved));
    model_run(&alone, save_beside_another, m);
    snprintf(command, sizeof command, "rm -r '%s' '%s'", run, moved);
    CHECK_THAT(!system(command));
}

static void test_renamed_folder(void **state)
{
    model_run(&alone, rename_and_save, NULL);
}

static void write_lock_file(const char *text, size_t n)
{
    FILE *f = fopen(lock_file, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(text, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static void refuse_users_file(struct model_rank *m, void *arg)
{
    CHECK_OK(model_steps(m, 1));
    for (int i = 0; i < 2; i++) {
        CHECK_THAT((i ? export_to(m, run) : zero_save(m->z, run, NULL)) == ZERO_ERR_ARG);
        CHECK_THAT(strstr(zero_last_error(), "/run/.lock: libzero did not make this file") != NULL);
    }
}

static void save_beside_refused(struct model_rank *m, void *arg)
{
    save(m, run);
    model_run(&alone, refuse, "(it is not known which)");
}

static void export_once(struct model_rank *m, void *arg)
{
    CHECK_OK(export_to(m, run));
}

static void test_files_of_the_user(void **state)
{
    char text[300], found[sizeof text], remove_weights[sizeof run + 40];
    snprintf(remove_weights, sizeof remove_weights, "rm '%s'/model.safetensors", run);
    static const struct {
        const char *text;
        size_t n;
    } theirs[] = {{"mine\n", 5},
                  {"process of my own", 17},
                  {"process 12\n", 11},
                  {"\0\0x", 3},
                  {"process 1 on host a ", 300}},
      ours[] = {{"process 12 on host ", 19}, {"process 12 on host a\0\0", 22}},
      either[] = {{"", 0}, {"\0\0\0", 3}, {"p", 1}, {"process 12", 10}, {"process 12\0", 11}};
    assert_int_equal(mkdir(run, 0777), 0);
    for (size_t i = 0; i < sizeof theirs / sizeof *theirs; i++) {
        memset(text, ' ', sizeof text);
        memcpy(text, theirs[i].text, theirs[i].n < 20 ? theirs[i].n : 20);
        write_lock_file(text, theirs[i].n);
        model_run(&alone, refuse_users_file, NULL);
        FILE *f = fopen(lock_file, "r");
        assert_non_null(f);
        assert_int_equal(fread(found, 1, sizeof found, f), theirs[i].n);
        assert_memory_equal(found, text, theirs[i].n);
        assert_int_equal(fclose(f), 0);
    }
    /* The next save takes over lock files left by killed runs and power failures. */
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++) {
        write_lock_file(ours[i].text, ours[i].n);
        model_run(&alone, save, run);
        assert_int_equal(access(lock_file, F_OK), -1);
    }
    /* A file that may be the user's is locked, and not changed. */
    for (size_t i = 0; i < 2 * sizeof either / sizeof *either; i++) {
        size_t n = either[i / 2].n;
        write_lock_file(either[i / 2].text, n);
        model_run(&alone, i % 2 ? export_once : save_beside_refused, NULL);
        FILE *f = fopen(lock_file, "r");
        assert_non_null(f);
        assert_int_equal(fread(found, 1, sizeof found, f), n);
        assert_memory_equal(found, either[i / 2].text, n);
        assert_int_equal(fclose(f), 0);
    }
    assert_int_equal(unlink(lock_file), 0);
    assert_int_equal(system(remove_weights), 0);
    clear(run);
}

/* ---- two processes ---- */

struct child {
    bool has_child; /* that outlives it */
    /* pipes: the lock is held; its child lives until the test closes this; its child has ended */
    int reported[2], life[2], ended[2];
};

static void hold(struct model_rank *m, void *arg)
{
    struct child *c = arg;
    char byte = 0;
    save(m, run);
    if (c->has_child && !fork()) {
        struct zr_folder_locks inherited = m->z->locks;
        inherited.list[0].fd = dup(inherited.list[0].fd);
        zr_folder_unlock_all(&inherited); /* like zero_unwrap in a child: the lock is its parent's */
        close(c->reported[1]);
        while (read(c->life[0], &byte, 1) > 0) {
        }
        close(m->z->locks.list[0].fd); /* before `ended`, which _exit might close first */
        _exit(0);
    }
    close(c->ended[1]);
    CHECK_THAT(write(c->reported[1], &byte, 1) == 1);
    for (;;)
        pause();
}

static void hold_in_child(bool has_child)
{
    struct child c = {.has_child = has_child};
    char byte, holder[64];
    assert_int_equal(pipe(c.reported) | pipe(c.life) | pipe(c.ended), 0);
    fflush(stdout);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (!pid) {
        close(c.life[1]);
        model_run(&alone, hold, &c);
        _exit(1);
    }
    close(c.reported[1]);
    close(c.ended[1]);
    assert_int_equal(read(c.reported[0], &byte, 1), 1); /* none on failure */
    snprintf(holder, sizeof holder, "process %d on host ", (int)pid);
    model_run(&alone, refuse, holder);
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    if (has_child) {
        model_run(&alone, refuse, "its child process still holds the lock");
        close(c.life[1]);
        assert_int_equal(read(c.ended[0], &byte, 1), 0); /* it ends */
    } else {
        close(c.life[1]);
    }
    model_run(&alone, save, run); /* what a kill leaves is no lock */
    assert_int_equal(access(lock_file, F_OK), -1);
    clear(run);
    close(c.reported[0]);
    close(c.life[0]);
    close(c.ended[0]);
}

static void test_two_processes(void **state)
{
    hold_in_child(false);
    hold_in_child(true);
}

/* ---- file systems without locks ---- */

static int no_lock(void *arg, int fd)
{
    return -ENOLCK;
}

static void count_warnings(void *arg, const char *line)
{
    *(int *)arg += strstr(line, "the file system has no locks") != NULL;
}

static void test_no_locks(void **state)
{
    struct zr_files files = zr_files_posix;
    int n = 0;
    files.lock = no_lock;
    struct model_options o = {
        .stage = 1, .world = 1, .keep = 1, .files = &files, .log = count_warnings, .log_arg = &n};
    model_run(&o, save, run);
    assert_int_equal(n, 1);
    remove(lock_file); /* libzero left it, because without locks it cannot tell whether another run uses it */
    clear(run);
}

/* ---- a working directory that changes ---- */

static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;

/* Files are opened after the test has changed its directory. */
static int open_later(void *arg, const char *path, int flags, unsigned mode)
{
    bool waits = flags & O_CREAT && strstr(path, "shard-");
    if (waits)
        pthread_mutex_lock(&gate);
    int fd = zr_files_posix.open(arg, path, flags, mode);
    if (waits)
        pthread_mutex_unlock(&gate);
    return fd;
}

static void save_and_move(struct model_rank *m, void *arg)
{
    CHECK_OK(model_steps(m, 1));
    uint64_t hash = model_hash(m);
    CHECK_THAT(!chdir(base));
    pthread_mutex_lock(&gate);
    CHECK_OK(zero_save(m->z, "run", NULL));
    CHECK_THAT(!chdir("/"));
    pthread_mutex_unlock(&gate);
    CHECK_OK(zero_save_wait(m->z, NULL));
    CHECK_OK(model_steps(m, 1));
    CHECK_OK(zero_load(m->z, run));
    CHECK_THAT(model_hash(m) == hash);
}

static void test_change_of_directory(void **state)
{
    struct zr_files files = zr_files_posix;
    files.open = open_later;
    struct model_options o = {.stage = 2, .world = 1, .async = true, .files = &files};
    model_run(&o, save_and_move, NULL);
    clear(run);
}

static void check_path(const char *path, const char *expected)
{
    char out[ZR_PATH_BYTES];
    assert_int_equal(zr_path_absolute(&zr_files_posix, path, out), 0);
    assert_string_equal(out, expected);
}

static void test_paths(void **state)
{
    char here[ZR_PATH_BYTES], expected[2 * ZR_PATH_BYTES], longest[ZR_PATH_BYTES + 1];
    assert_int_equal(chdir(base), 0);
    assert_non_null(getcwd(here, sizeof here));
    assert_int_equal(mkdir(run, 0777), 0);
    snprintf(expected, sizeof expected, "%s/run", here);
    check_path("run", expected);
    check_path("./run//", expected);
    check_path(run, expected);
    check_path("link", expected); /* a link to run */
    check_path(".", here);
    assert_int_equal(rmdir(run), 0);
    check_path("run/", expected);
    snprintf(expected, sizeof expected, "%s/none/such", here);
    check_path("none/such", expected); /* nothing of it need exist */
    check_path("/", "/");
    check_path("/none/such/", "/none/such");
    memset(longest, 'x', ZR_PATH_BYTES);
    longest[ZR_PATH_BYTES] = 0;
    assert_int_equal(zr_path_absolute(&zr_files_posix, longest, expected), ZERO_ERR_ARG);
    assert_int_equal(chdir("/"), 0);
}

int main(void)
{
    if (!mkdtemp(base))
        return 1;
    snprintf(run, sizeof run, "%s/run", base);
    snprintf(link_to_run, sizeof link_to_run, "%s/link", base);
    snprintf(lock_file, sizeof lock_file, "%s/.lock", run);
    snprintf(moved, sizeof moved, "%s/moved", base);
    snprintf(moved_lock_file, sizeof moved_lock_file, "%s/.lock", moved);
    if (symlink(run, link_to_run))
        return 1;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_contexts),   cmocka_unit_test(test_many_folders),
        cmocka_unit_test(test_two_processes),  cmocka_unit_test(test_no_locks),
        cmocka_unit_test(test_paths),          cmocka_unit_test(test_change_of_directory),
        cmocka_unit_test(test_renamed_folder), cmocka_unit_test(test_files_of_the_user),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    return unlink(link_to_run) | rmdir(base) | failed;
}
