/* SPDX-License-Identifier: Apache-2.0 */
/* test_meeting_file.c: tests ranks that meet by a file: the file's text, files left by earlier jobs and
 * attempts, files that others may have put there, and that no file remains afterwards. */
#include "comm/meet/handshake.h"
#include "comm/meet/meeting_file.h"
#include "test/cmocka.h"
#include "test/comm/meet/meeting.h"
#include "test/held_port.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* --- a folder of the test's own --- */

static char folder[800];

static int make_folder(void **state)
{
    if (!getcwd(folder, sizeof folder - 32))
        return -1;
    strcat(folder, "/zero-test-meeting-XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

/* Writes the name of the folder's first file, in quotes, and returns the number of files. */
static int list_folder(char name[256])
{
    DIR *d = opendir(folder);
    int n = 0;
    for (struct dirent *e; (e = readdir(d));)
        if (e->d_name[0] != '.' && n++ == 0)
            snprintf(name, 256, "%.255s", e->d_name);
    closedir(d);
    return n;
}

static int remove_folder(void **state)
{
    char name[256], path[1100];
    while (list_folder(name)) {
        snprintf(path, sizeof path, "%s/%s", folder, name);
        if (unlink(path) && rmdir(path))
            return -1;
    }
    return rmdir(folder);
}

static void expect_nothing_left(void)
{
    char name[256];
    if (list_folder(name))
        fail_msg("%s is left", name);
}

static void put_file(const char *path, const char *text, size_t n, int mode)
{
    unlink(path);
    int fd = open(path, O_CREAT | O_EXCL | O_WRONLY, 0600);
    assert_true(fd >= 0 && write(fd, text, n) == (ssize_t)n && fchmod(fd, (mode_t)mode) == 0);
    close(fd);
}

static void path_in_folder(char path[1024])
{
    snprintf(path, 1024, "%.900s/meet", folder);
}

static struct zr_world world_by(const char *path, int rank, int world)
{
    struct zr_world w = {.rank = rank, .world = world, .key = {.n_bytes = 16, .bytes = "some other bytes"}};
    strcpy(w.job, "a job");
    snprintf(w.file, sizeof w.file, "%s", path);
    return w;
}

/* The file that rank 0 of w writes when it listens on this port of loopback. */
static struct zr_meeting_file file_of(const struct zr_world *w, int port)
{
    struct zr_meeting_file f;
    zr_meeting_file_begin(w, &f);
    f.n = 1;
    f.at[0] = loopback(port);
    return f;
}

/* --- the file's text --- */

static void any_file(uint64_t *seed, struct zr_meeting_file *f)
{
    struct zr_world w = {.world = (int)random_in(seed, 2, 65536),
                         .attempt = (int)random_in(seed, 0, 1 << 30)};
    w.key.n_bytes = (int)random_in(seed, 0, 1) * 16;
    w.key.bytes[0] = (uint8_t)random_in(seed, 0, 255);
    int n = (int)random_in(seed, 0, sizeof w.job - 1);
    for (int i = 0; i < n; i++)
        w.job[i] = (char)random_in(seed, 1, 255);
    zr_meeting_file_begin(&w, f);
    f->n = (int)random_in(seed, 1, ZR_LOOKUP_MAX);
    for (int i = 0; i < f->n; i++) {
        char number[64];
        if (random_in(seed, 0, 1))
            snprintf(number, sizeof number, "10.%d.0.%d", (int)random_in(seed, 0, 255),
                     (int)random_in(seed, 0, 255));
        else
            snprintf(number, sizeof number, "fd77:%x::%x", (unsigned)random_in(seed, 0, 65535),
                     (unsigned)random_in(seed, 1, 65535));
        assert_true(zr_address_parse(number, (int)random_in(seed, 1, 65535), &f->at[i]));
    }
}

static void expect_same(const struct zr_meeting_file *a, const struct zr_meeting_file *b)
{
    assert_true(a->attempt == b->attempt && a->world == b->world && a->n == b->n);
    assert_string_equal(a->mark, b->mark);
    assert_string_equal(a->job, b->job);
    assert_string_equal(a->host, b->host);
    for (int i = 0; i < a->n; i++)
        assert_true(zr_address_same(&a->at[i], &b->at[i]));
}

/* A printed file is read back unchanged. A truncated or extended text is refused. A text with one changed
 * byte is refused too, or reads as a file that can itself be printed and read back (an address has more
 * than one text). */
static void test_text(void **state)
{
    uint64_t seed = fresh_seed("text");
    for (int k = 0; k < 200; k++) {
        struct zr_meeting_file f, back, third;
        char text[ZR_MEETING_FILE_BYTES], again[ZR_MEETING_FILE_BYTES];
        any_file(&seed, &f);
        zr_meeting_file_print(&f, text);
        size_t n = strlen(text);
        assert_true(zr_meeting_file_parse(text, n, &back));
        zr_meeting_file_print(&back, again);
        assert_string_equal(text, again);
        expect_same(&f, &back);
        for (size_t cut = 0; cut < n; cut++)
            assert_false(zr_meeting_file_parse(text, cut, &back));
        text[n] = 'x';
        assert_false(zr_meeting_file_parse(text, n + 1, &back));
        text[n] = 0;
        text[random_in(&seed, 0, (int64_t)n - 1)] = (char)random_in(&seed, 0, 255);
        if (zr_meeting_file_parse(text, n, &back)) {
            zr_meeting_file_print(&back, again);
            assert_true(zr_meeting_file_parse(again, strlen(again), &third));
            expect_same(&back, &third);
        }
    }
}

/* A job has one mark for all its attempts. Another name or key gives another mark. */
static void test_mark(void **state)
{
    char a[33], b[33];
    struct zr_world w = world_by("/x", 0, 2);
    zr_shake_mark(&w, a);
    w.rank = 1;
    w.attempt = 3;
    zr_shake_mark(&w, b);
    assert_string_equal(a, b);
    w.job[0] = 'b';
    zr_shake_mark(&w, b);
    assert_string_not_equal(a, b);
    w.job[0] = 'a';
    w.key.bytes[15] ^= 1;
    zr_shake_mark(&w, b);
    assert_string_not_equal(a, b);
}

/* --- ranks that meet --- */

/* How the ranks of a test meet. */
static struct {
    char file[1024];
    /* the job has no key; rank 0 comes this many ms late */
    bool keyless;
    int late_ms;
    int64_t timeout_ms;
} way;

static void set_way(struct rank *r)
{
    r->w.host[0] = 0;
    r->w.port = 0;
    memcpy(r->w.file, way.file, sizeof way.file);
    if (way.keyless)
        r->w.key.n_bytes = 0;
}

static void meet_by_file(struct rank *me)
{
    struct meeting m;
    if (me->w.rank == 0)
        sleep_ms(way.late_ms);
    note_error(me, meet(&m, &me->w, way.timeout_ms ? way.timeout_ms : LONG_MS));
    if (!me->code)
        RANK_CHECK(me, exchange_ranks(&m) == 0, "%s", zr_error_text());
    RANK_CHECK(me, part(&m), "handles are left");
}

static void expect_all_meet(int n)
{
    struct rank *r = run_ranks(false, n, meet_by_file, NULL, set_way);
    for (int i = 0; i < n; i++)
        expect_rank(&r[i], 0, "");
}

static void reset_way(const char *file)
{
    memset(&way, 0, sizeof way);
    snprintf(way.file, sizeof way.file, "%s", file);
}

/* Ranks meet by a file and by a folder, with and without a key, rank 0 first or last. Afterwards no file
 * is left. */
static void test_meet(void **state)
{
    char path[1024], slash[1024];
    path_in_folder(path);
    snprintf(slash, sizeof slash, "%.900s/", folder);
    const char *const files[] = {path, folder, slash};
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < 4; k++) {
            reset_way(files[i]);
            way.keyless = k & 1;
            way.late_ms = k & 2 ? 60 : 0;
            expect_all_meet(2 + i);
            expect_nothing_left();
        }
    }
}

/* Files left by an earlier job, by an earlier attempt or by a rank 0 that was killed mislead no rank, and
 * an empty file is no obstacle. */
static void test_left_over(void **state)
{
    char path[1024], text[ZR_MEETING_FILE_BYTES];
    path_in_folder(path);
    int other = held_port();
    for (int k = 0; k < 5; k++) {
        struct zr_world w = world_by(path, 0, 3);
        snprintf(w.job, sizeof w.job, "test %d", (int)getpid());
        w.key = (struct zr_job_key){.n_bytes = 16, .bytes = "a key of 16 byte"};
        if (k == 1)
            w.attempt = 1;
        if (k == 2)
            w.key.bytes[3] ^= 1;
        if (k == 3)
            strcat(w.job, "1");
        struct zr_meeting_file f = file_of(&w, other);
        zr_meeting_file_print(&f, text);
        put_file(path, text, k == 4 ? 0 : strlen(text), 0600);
        reset_way(path);
        way.late_ms = 100;
        expect_all_meet(3);
        expect_nothing_left();
    }
}

/* --- an old file that leads to another job's rank 0 --- */

enum { RANK_0_LATE_MS = 3600 }; /* longer than ranks accept refusals without a file */

static void refused_there(struct rank *me)
{
    struct meeting m;
    bool other = me->w.rank == 2;
    me->w.world = 2;
    if (other) { /* rank 0 of another job */
        me->w.rank = 0;
        me->w.key.bytes[0] ^= 1;
    } else {
        me->w.host[0] = 0;
        memcpy(me->w.file, way.file, sizeof way.file);
    }
    if (!other && me->w.rank == 0)
        sleep_ms(RANK_0_LATE_MS);
    note_error(me, meet(&m, &me->w, other ? RANK_0_LATE_MS + 500 : LONG_MS));
    RANK_CHECK(me, part(&m), "handles are left");
}

static void put_old_file(struct rank *r)
{
    char text[ZR_MEETING_FILE_BYTES];
    if (r->w.rank != 0)
        return;
    struct zr_world w = r->w;
    w.world = 2;
    struct zr_meeting_file f = file_of(&w, w.port);
    zr_meeting_file_print(&f, text);
    put_file(way.file, text, strlen(text), 0600);
}

/* An old file of this job leads to an address that another job uses by now. That job refuses this job's
 * ranks until rank 0 comes: they must wait for the next file. */
static void test_refused_there(void **state)
{
    char path[1024];
    path_in_folder(path);
    reset_way(path);
    struct rank *r = run_ranks(false, 3, refused_there, NULL, put_old_file);
    expect_rank(&r[0], 0, "");
    expect_rank(&r[1], 0, "");
    expect_rank(&r[2], ZERO_ERR_TIMEOUT, "1 of 2 ranks did not come");
    expect_nothing_left();
}

/* --- two jobs in one folder --- */

/* Jobs of two ranks each, and attempts of one job, that meet in one folder at the same time do not notice
 * each other. */
static void of_many_jobs(struct rank *r)
{
    set_way(r);
    r->w.attempt = r->w.rank / 2 % 2;
    snprintf(r->w.job, sizeof r->w.job, "test %d, job %d", (int)getpid(), r->w.rank / 4);
    r->w.world = 2;
    r->w.rank %= 2;
}

/* Jobs without a name, such as ranks started by hand, differ by their keys. */
static void of_many_keys(struct rank *r)
{
    set_way(r);
    r->w.job[0] = 0;
    r->w.key = (struct zr_job_key){.n_bytes = 16, .bytes = "a key of 16 byte"};
    r->w.key.bytes[15] = (uint8_t)(r->w.rank / 2);
    r->w.world = 2;
    r->w.rank %= 2;
}

static void test_many_jobs(void **state)
{
    for (int by_key = 0; by_key < 2; by_key++) {
        reset_way(folder);
        struct rank *r = run_ranks(false, 8, meet_by_file, NULL, by_key ? of_many_keys : of_many_jobs);
        for (int i = 0; i < 8; i++)
            expect_rank(&r[i], 0, "");
        expect_nothing_left();
    }
}

/* --- two jobs in one folder that nothing tells apart --- */

/* Rank 0 of a second job with the same name and key comes when the first job's file exists; without a key,
 * at the same time. */
static void come_as_rank_0(struct rank *me)
{
    struct meeting m;
    struct zr_meeting_file f;
    char why[ZR_MEETING_WHY_CHARS];
    bool is_late = me->w.rank == 1 && !way.keyless;
    me->w.rank = 0;
    for (int i = 0; is_late && zr_meeting_file_read(&me->w, &f, why) && i < 10000; i++)
        sleep_ms(1);
    note_error(me, meet(&m, &me->w, LONG_MS));
    RANK_CHECK(me, part(&m), "handles are left");
}

static void test_two_rank_0s(void **state)
{
    for (int k = 0; k < 2; k++) {
        reset_way(folder);
        way.keyless = k;
        struct rank *r = run_ranks(true, 2, come_as_rank_0, NULL, set_way);
        int second = k && strncmp(r[0].note, "another rank 0", 14) == 0 ? 0 : 1;
        expect_rank(&r[!second], ZERO_ERR_MISMATCH, "rank 0 is there twice: here and at ");
        expect_rank(&r[!second], ZERO_ERR_MISMATCH, "need a ZERO_JOB or a key of their own");
        expect_rank(&r[second], ZERO_ERR_MISMATCH, "another rank 0 of this job is already there, on \"");
        expect_rank(&r[second], ZERO_ERR_MISMATCH, "need a ZERO_JOB or a key of their own");
        expect_nothing_left();
    }
}

/* Contexts with two names, whose rank 0s are different processes, meet in turn. */
static void of_two_names(struct rank *r)
{
    set_way(r);
    snprintf(r->w.name, sizeof r->w.name, "part %d", r->w.rank / 2);
    r->w.world = 2;
    r->w.rank %= 2;
}

static void test_turns(void **state)
{
    reset_way(folder);
    struct rank *r = run_ranks(true, 4, meet_by_file, NULL, of_two_names);
    for (int i = 0; i < 4; i++)
        expect_rank(&r[i], 0, "");
    expect_nothing_left();
}

/* --- files and folders that cannot be used --- */

static void expect_text(int code, int want, const char *text)
{
    if (code != want || !strstr(zr_error_text(), text))
        fail_msg("code %d: \"%s\", expected %d with \"%s\"", code, zr_error_text(), want, text);
}

static void expect_meeting(const struct zr_world *w, int64_t timeout_ms, int want, const char *text)
{
    struct meeting m;
    expect_text(meet(&m, w, timeout_ms), want, text);
    assert_int_equal(uv_loop_close(&m.loop), 0);
}

/* Checks the message of a rank other than 0 that was led nowhere. */
static void test_not_led(void **state)
{
    char path[1024], text[ZR_MEETING_FILE_BYTES], place[1200];
    path_in_folder(path);
    struct zr_world w = world_by(path, 1, 2), other = w;
    struct zr_meeting_file f = file_of(&w, held_port());
    zr_meeting_file_print(&f, text);
    size_t n = strlen(text);
    snprintf(place, sizeof place, "waited 60 ms for rank 0 at file://%.240s", path);
    expect_meeting(&w, 60, ZERO_ERR_TIMEOUT, place);
    expect_meeting(&w, 60, ZERO_ERR_TIMEOUT, "there is no such file on this host: rank 0 has not started");
    put_file(path, text, 0, 0600);
    expect_meeting(&w, 60, ZERO_ERR_TIMEOUT, "the file is empty");
    put_file(path, "a\nb \xff", 5, 0600);
    expect_meeting(&w, 60, ZERO_ERR_TIMEOUT, "the file has other contents (5 bytes, \"a?b ?\")");
    put_file(path, text, n - 1, 0600);
    expect_meeting(&w, 60, ZERO_ERR_TIMEOUT, "the file has other contents");
    put_file(path, text, n, 0622);
    expect_meeting(&w, 60, ZERO_ERR_TIMEOUT, "mode 0622 and is not trusted: others than its owner may write");
    unlink(path);
    assert_int_equal(symlink("/dev/null", path), 0);
    expect_meeting(&w, 60, ZERO_ERR_TIMEOUT, "it is a symbolic link");
    put_file(path, text, n, 0600); /* nobody listens there */
    expect_meeting(&w, 60, ZERO_ERR_TIMEOUT, "connection refused: rank 0 has not started, or has given up");
    other.attempt = 7;
    f = file_of(&other, held_port());
    zr_meeting_file_print(&f, text);
    put_file(path, text, strlen(text), 0600);
    expect_meeting(&w, 60, ZERO_ERR_TIMEOUT,
                   "the file is of attempt 7 of this job, but this rank is of attempt 0");
    strcpy(other.job, "another\n");
    f = file_of(&other, held_port());
    zr_meeting_file_print(&f, text);
    put_file(path, text, strlen(text), 0600);
    expect_meeting(&w, 60, ZERO_ERR_TIMEOUT,
                   "is of another job, \"another?\" (attempt 7, 2 ranks, rank 0 on \"");
    unlink(path);
    snprintf(w.file, sizeof w.file, "%.900s/none/meet", folder);
    expect_meeting(&w, 60, ZERO_ERR_TIMEOUT, "its folder does not exist on this host: No such file");
    expect_nothing_left();
}

/* Rank 0 does not replace what belongs to somebody else, and says where it cannot write. */
static void test_not_written(void **state)
{
    char path[1024], there[16];
    path_in_folder(path);
    struct zr_world w = world_by(path, 0, 2);
    put_file(path, "my thesis", 9, 0600);
    expect_meeting(&w, 200, ZERO_ERR_ARG, "/meet exists and is not a file of libzero, so it is not replaced");
    int fd = open(path, O_RDONLY);
    assert_int_equal(read(fd, there, sizeof there), 9);
    assert_memory_equal(there, "my thesis", 9);
    close(fd);
    snprintf(w.file, sizeof w.file, "%.900s/meet/below", folder);
    expect_meeting(&w, 200, ZERO_ERR_IO, "/meet/below exists and cannot be read: Not a directory");
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    memcpy(w.file, path, sizeof w.file);
    expect_meeting(&w, 200, ZERO_ERR_ARG, "/meet exists and is not a regular file, so it is not replaced");
    unlink(path);
    assert_int_equal(symlink("/dev/null", path), 0);
    expect_meeting(&w, 200, ZERO_ERR_IO, "cannot be read: it is a symbolic link");
    unlink(path);
    snprintf(w.file, sizeof w.file, "%.900s/none/", folder);
    expect_meeting(&w, 200, ZERO_ERR_IO, "cannot write where ranks meet: ");
    expect_nothing_left();
}

/* --- a rank that does not come --- */

static void but_rank_2(struct rank *me)
{
    if (me->w.rank == 2 && way.late_ms) { /* somebody replaces the file instead */
        struct zr_world w = me->w;
        struct zr_meeting_file f;
        char why[ZR_MEETING_WHY_CHARS], text[ZR_MEETING_FILE_BYTES];
        for (int i = 0; i < 10000 && zr_meeting_file_read(&w, &f, why); i++)
            sleep_ms(1);
        w.key.bytes[0] ^= 1;
        f = file_of(&w, 1);
        zr_meeting_file_print(&f, text);
        put_file(way.file, text, strlen(text), 0600);
    } else if (me->w.rank != 2) {
        meet_by_file(me);
    }
}

/* Every rank that came names the one that did not, and the meeting point. Rank 0's file is gone
 * afterwards; a file that has replaced it stays. */
static void test_who_is_missing(void **state)
{
    char path[1024], name[256];
    path_in_folder(path);
    for (int replaced = 0; replaced < 2; replaced++) {
        reset_way(path);
        way.timeout_ms = 1000;
        way.late_ms = replaced;
        struct rank *r = run_ranks(false, 3, but_rank_2, NULL, set_way);
        expect_rank(&r[0], ZERO_ERR_TIMEOUT, "of 3 ranks did not come to file://");
        expect_rank(&r[0], ZERO_ERR_TIMEOUT, "/meet (\"");
        expect_rank(&r[0], ZERO_ERR_TIMEOUT, "rank 2");
        if (replaced)
            expect_rank(&r[0], ZERO_ERR_TIMEOUT, "), which was removed or replaced meanwhile");
        else
            expect_rank(&r[1], ZERO_ERR_TIMEOUT, "1 of 3 ranks did not come to file://");
        assert_int_equal(list_folder(name), replaced);
        unlink(path);
    }
}

/* --- no rank reads half a file --- */

enum { REWRITES = 400 };

struct rewriting {
    struct zr_world w;
    int err;
};

static void *rewrite(void *arg)
{
    struct rewriting *g = arg;
    for (int i = 0; i < REWRITES && !g->err; i++) {
        struct zr_meeting_file f = file_of(&g->w, 1000 + i);
        f.n = 1 + i % ZR_LOOKUP_MAX;
        for (int k = 1; k < f.n; k++)
            f.at[k] = f.at[0];
        g->err = zr_meeting_file_write(&g->w, &f, true);
    }
    return NULL;
}

/* A reader of a file that is replaced again and again reads a whole one each time. */
static void test_whole(void **state)
{
    char path[1024], why[ZR_MEETING_WHY_CHARS];
    path_in_folder(path);
    struct rewriting g = {.w = world_by(path, 0, 2)};
    struct zr_meeting_file f = file_of(&g.w, 1000), last;
    pthread_t id;
    assert_int_equal(zr_meeting_file_write(&g.w, &f, false), 0);
    struct stat st;
    assert_true(stat(path, &st) == 0 && (st.st_mode & 0777) == 0600);
    assert_int_equal(pthread_create(&id, NULL, rewrite, &g), 0);
    int port = 0;
    while (port < 1000 + REWRITES - 1) {
        bool read = zr_meeting_file_read(&g.w, &last, why) == 0;
        int now = read ? zr_address_port(&last.at[last.n - 1]) : -1;
        if (now < port) {
            pthread_join(id, NULL);
            fail_msg("port %d after %d: %s", now, port, read ? "" : why);
        }
        port = now;
    }
    pthread_join(id, NULL);
    assert_int_equal(g.err, 0);
    assert_int_equal(zr_meeting_file_write(&g.w, &f, false), ZR_MEETING_FILE_TAKEN);
    assert_false(zr_meeting_file_remove(&g.w, &f)); /* it was replaced */
    assert_true(zr_meeting_file_remove(&g.w, &last));
    expect_nothing_left();
}

int main(void)
{
#define IN_FOLDER(test) cmocka_unit_test_setup_teardown(test, make_folder, remove_folder)
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text), cmocka_unit_test(test_mark),   IN_FOLDER(test_meet),
        IN_FOLDER(test_left_over),   IN_FOLDER(test_refused_there), IN_FOLDER(test_many_jobs),
        IN_FOLDER(test_not_led),     IN_FOLDER(test_not_written),   IN_FOLDER(test_who_is_missing),
        IN_FOLDER(test_whole),       IN_FOLDER(test_two_rank_0s),   IN_FOLDER(test_turns),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
