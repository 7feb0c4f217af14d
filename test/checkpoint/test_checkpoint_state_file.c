/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_state_file.c: tests the file of optimizer states: what it holds, that it has no name, and
 * that a failure says what is missing. */
#include "test/checkpoint/memory_files.h"
#include "test/cmocka.h"
#include "test/kernels/random.h"
#include "zero/state_file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BYTES = (9 << 20) + 4096 };

static uint64_t seed = 1;

static int count_name(void *arg, const char *name)
{
    (void)name;
    ++*(int *)arg;
    return 0;
}

static int n_names(const struct zr_files *fs)
{
    int n = 0;
    zr_folder_walk(fs, "/", NULL, count_name, &n);
    return n;
}

static int cannot_reserve(void *arg, int fd, int64_t bytes)
{
    (void)arg, (void)fd, (void)bytes;
    return 0;
}

/* Writes and reads parts at random places, with and without alignment, and compares them with a copy. */
static void use_file(struct zr_state_file *f)
{
    unsigned char *copy = calloc(1, BYTES),
                  *buf = aligned_alloc(ZR_DIRECT_ALIGN, BYTES + 2 * ZR_DIRECT_ALIGN);
    for (int k = 0; k < 60; k++) {
        bool aligned = k % 2;
        int64_t at = (int64_t)(random_next(&seed) % BYTES), n = (int64_t)(random_next(&seed) % (5 << 20));
        if (aligned) {
            at -= at % ZR_DIRECT_ALIGN;
            n -= n % ZR_DIRECT_ALIGN;
        }
        n = BYTES - at < n ? BYTES - at : n;
        unsigned char *x = buf + (aligned ? 0 : random_next(&seed) % ZR_DIRECT_ALIGN);
        if (k % 3 == 0) {
            for (int64_t i = 0; i < n; i += 1 + (int64_t)(random_next(&seed) % 900))
                copy[at + i] = (unsigned char)random_next(&seed);
            memcpy(x, copy + at, (size_t)n);
            assert_int_equal(zr_state_file_write(f, x, n, at), 0);
        }
        memset(x, 0xff, (size_t)n);
        assert_int_equal(zr_state_file_read(f, x, n, at), 0);
        assert_memory_equal(x, copy + at, (size_t)n);
    }
    free(copy);
    free(buf);
}

static void test_contents(void **state)
{
    static const enum memory_direct ways[] = {DIRECT_WORKS, DIRECT_NOT_OPENED, DIRECT_NOT_MOVED};
    for (int w = 0; w < 6; w++) {
        struct memory_files *m = memory_files_open();
        struct zr_files fs = *memory_files_table(m);
        struct zr_state_file f;
        memory_files_direct(m, ways[w % 3]);
        if (w >= 3)
            fs.allocate = cannot_reserve;
        assert_int_equal(zr_state_file_open(&fs, "/", 3, BYTES, &f), 0);
        int64_t length;
        assert_int_equal(zr_file_size(&fs, f.file.fd, f.path, &length), 0);
        assert_int_equal(length, BYTES);
        assert_int_equal(n_names(&fs), 0);
        use_file(&f);
        assert_true((memory_files_n_direct(m) > 0) == (ways[w % 3] == DIRECT_WORKS));
        zr_state_file_close(&f);
        zr_state_file_close(&f);
        assert_int_equal(memory_files_n_open(m), 0);
        memory_files_close(m);
    }
}

/* Every call fails once. Without its space there is no file, and afterwards no descriptor. */
static void test_failures(void **state)
{
    for (int64_t at = 1; at < 12; at++)
        for (int kind = 0; kind < 4; kind++) {
            static const enum memory_fault faults[] = {FAULT_ENOSPC, FAULT_EIO, FAULT_EINTR, FAULT_SHORT};
            struct memory_files *m = memory_files_open();
            struct zr_files fs = *memory_files_table(m);
            struct zr_state_file f;
            if (at % 2)
                fs.allocate = cannot_reserve;
            memory_files_fault(m, faults[kind], at, kind < 2);
            int err = zr_state_file_open(&fs, "/", 0, BYTES, &f);
            if (err) {
                assert_int_equal(err, ZERO_ERR_IO);
                assert_true(kind < 2);
                assert_non_null(strstr(zr_error_text(), "states_dir /: a file of 9441280 bytes: "));
            }
            zr_state_file_close(&f);
            assert_int_equal(memory_files_n_open(m), 0);
            memory_files_close(m);
        }
}

static void test_transfer_fails(void **state)
{
    struct memory_files *m = memory_files_open();
    struct zr_state_file f;
    char *buf = aligned_alloc(ZR_DIRECT_ALIGN, BYTES);
    memset(buf, 7, BYTES);
    assert_int_equal(zr_state_file_open(memory_files_table(m), "/", 0, BYTES, &f), 0);
    memory_files_fault(m, FAULT_EIO, 2, true);
    assert_int_equal(zr_state_file_write(&f, buf, BYTES, 0), ZERO_ERR_IO);
    assert_non_null(strstr(zr_error_text(), ": write: "));
    memory_files_fault(m, FAULT_EIO, 1, true);
    assert_int_equal(zr_state_file_read(&f, buf, BYTES, 0), ZERO_ERR_IO);
    assert_non_null(strstr(zr_error_text(), ": read: "));
    zr_state_file_close(&f);
    memory_files_close(m);
    free(buf);
}

/* Opens a file, which has no name if the file system has such files. */
static int open_unnamed_only(void *arg, const char *path, int flags, unsigned mode)
{
    assert_false(flags & O_CREAT);
    return zr_files_posix.open(arg, path, flags, mode);
}

/* On a real file system, and in a folder that does not exist. */
static void test_real(void **state)
{
    char folder[] = "/tmp/zero-state-file-XXXXXX", name[64];
    struct zr_state_file f;
    assert_non_null(mkdtemp(folder));
    struct zr_files fs = zr_files_posix;
    int probe = open(folder, O_TMPFILE | O_RDWR, 0600);
    if (probe >= 0 && !close(probe))
        fs.open = open_unnamed_only;
    snprintf(name, sizeof name, "%s/probe", folder);
    probe = open(name, O_CREAT | O_RDWR | O_DIRECT, 0600);
    unlink(name);
    assert_int_equal(zr_state_file_open(&fs, folder, 1, BYTES, &f), 0);
    assert_true(f.file.direct >= 0 || probe < 0);
    if (probe >= 0)
        close(probe);
    use_file(&f);
    assert_int_equal(zr_folder_remove(&zr_files_posix, folder, NULL), 0); /* fails if a file is there */
    zr_state_file_close(&f);
    assert_int_equal(zr_state_file_open(&zr_files_posix, folder, 1, BYTES, &f), ZERO_ERR_IO);
    assert_non_null(strstr(zr_error_text(), folder));
    assert_non_null(strstr(zr_error_text(), "no such file"));
    zr_state_file_close(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_contents),
        cmocka_unit_test(test_failures),
        cmocka_unit_test(test_transfer_fails),
        cmocka_unit_test(test_real),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
