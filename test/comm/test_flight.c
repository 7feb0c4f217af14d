/* SPDX-License-Identifier: Apache-2.0 */
/* test_flight.c: tests the flight recorder. What was recorded can be read by this process, by another one
 * after SIGKILL, while it is being written, and from a file. Anything else is refused. */
#include "comm/flight_view.h"
#include "test/cmocka.h"

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static unsigned seed;

static uint32_t next_random(void)
{
    seed = seed * 1664525u + 1013904223u;
    return seed >> 8;
}

static int begin(void **state)
{
    const char *given = getenv("SEED");
    seed = given ? (unsigned)strtoul(given, NULL, 10) : (unsigned)time(NULL) ^ (unsigned)getpid() << 8;
    print_message("SEED=%u\n", seed);
    *state = malloc(sizeof(struct zr_flight_view));
    unsetenv("ZERO_FLIGHT_FD");
    unsetenv("ZERO_FLIGHT_DIR");
    return *state ? 0 : -1;
}

static int end(void **state)
{
    free(*state);
    return 0;
}

static struct zr_flight *open_one(int rank, int world)
{
    const struct zr_flight_owner owner = {.rank = rank, .world = world, .attempt = 2, .job = "a job/1"};
    struct zr_flight *f;
    char why[ZR_FLIGHT_TEXT];
    assert_int_equal(zr_flight_open(&owner, &f, why), 0);
    assert_string_equal(why, "");
    return f;
}

/* The n-th call; its fields follow from n. */
static struct zr_logged_call call_of(uint64_t n)
{
    return (struct zr_logged_call){
        .name = n % 2 ? ZR_CALL_BEGIN : ZR_CALL_END,
        .phase = n % 3 ? ZERO_FORWARD : ZERO_BACKWARD,
        .subject = (int32_t)(n * 7 % 1000),
        .step = (uint32_t)(n % 100000 + 1),
    };
}

/* The n-th operation; its fields follow from n. */
static enum zr_role role_of(uint64_t n)
{
    return (enum zr_role)(n * n % ZR_ROLES);
}

static enum zr_op op_of(uint64_t n)
{
    return (enum zr_op)(1 + n * 5 % (ZR_OPS - 1));
}

static struct zr_flight_mark issue(struct zr_flight *f, uint64_t n)
{
    struct zr_tag tag = {.unit = (int32_t)(n % 97) - 1,
                         .step = (uint32_t)(n / 3),
                         .call_hash = n * 31,
                         .from = {.queued_ns = (int64_t)n, .call = n ^ 77}};
    zr_flight_issue(f, role_of(n), op_of(n), (int64_t)n * 128, &tag);
    return tag.mark;
}

static void check_op(const struct zr_flight_op *o)
{
    uint64_t n = o->serial;
    assert_int_equal(o->role, role_of(n));
    assert_int_equal(o->op, op_of(n));
    assert_int_equal(o->unit, (int32_t)(n % 97) - 1);
    assert_int_equal(o->step, n / 3);
    assert_int_equal(o->bytes, n * 128);
    assert_int_equal(o->call_hash, n * 31);
    assert_int_equal(o->call, n ^ 77);
    assert_int_equal(o->queued_ns, n);
    assert_true(o->issued_ns > 0);
}

/* Records a random number of calls and operations. The last call can be read, and the last operations in
 * order, with how they ended. */
static void test_what_is_recorded_is_read(void **state)
{
    struct zr_flight_view *v = *state;
    for (int round = 0; round < 20; round++) {
        struct zr_flight *f = open_one(round % 5, 5);
        uint64_t n_calls = next_random() % 200,
                 n_ops = next_random() % 3 ? next_random() % 100 : next_random() % 10000;
        uint64_t of_role[ZR_ROLES] = {0}, kept = n_ops < ZR_FLIGHT_OPS ? n_ops : ZR_FLIGHT_OPS;
        bool inside = next_random() % 2;
        for (uint64_t n = 1; n <= n_calls; n++) {
            const struct zr_logged_call call = call_of(n), nested = call_of(n + 1);
            zr_flight_enter(f, &call);
            if (next_random() % 4 == 0) { /* a part of the file */
                zr_flight_enter(f, &nested);
                zr_flight_leave(f);
            }
            if (n < n_calls || !inside)
                zr_flight_leave(f);
        }
        for (uint64_t n = 1; n <= n_ops; n++) {
            struct zr_flight_mark m = issue(f, n);
            assert_int_equal(m.serial, n);
            of_role[role_of(n)]++;
            if (n % 3)
                zr_flight_start(&m);
            if (n % 3 == 2)
                zr_flight_finish(&m);
        }
        zr_flight_copy(f, v);
        assert_int_equal(zr_flight_check(v), 0);
        assert_int_equal(v->rank, round % 5);
        assert_int_equal(v->attempt, 2);
        assert_int_equal(v->pid, getpid());
        assert_string_equal(v->job, "a job/1");
        assert_int_equal(v->call.number, n_calls);
        if (n_calls) {
            const struct zr_logged_call call = call_of(n_calls);
            assert_int_equal(v->call.call, zr_call_log_pack(&call));
            if (inside)
                assert_int_equal(v->call.left_ns, 0);
            else
                assert_true(v->call.left_ns >= v->call.entered_ns);
        }
        assert_int_equal(v->n_ops, kept);
        for (uint64_t i = 0; i < kept; i++) {
            const struct zr_flight_op *o = &v->ops[i];
            assert_int_equal(o->serial, n_ops - kept + 1 + i);
            check_op(o);
            assert_int_equal(o->started_ns != 0, o->serial % 3 != 0);
            assert_int_equal(o->finished_ns != 0, o->serial % 3 == 2);
        }
        for (int r = 0; r < ZR_ROLES; r++)
            assert_int_equal(v->role[r].issued, of_role[r]);
        zr_flight_close(f);
    }
}

static void test_last_words(void **state)
{
    struct zr_flight_view *v = *state;
    struct zr_flight *f = open_one(1, 2);
    const struct zr_logged_call call = {
        .name = ZR_CALL_END, .phase = ZERO_BACKWARD, .subject = 3, .step = 12};
    char text[512];
    zr_flight_copy(f, v);
    zr_flight_last_words(v, text, sizeof text);
    assert_string_equal(text, "");
    zr_flight_enter(f, &call);
    zr_flight_copy(f, v);
    zr_flight_last_words(v, text, sizeof text);
    assert_string_equal(text, "; its last call was zero_end(unit 3, backward) in step 12");
    struct zr_tag tag = {.unit = 2, .step = 12};
    zr_flight_issue(f, ZR_ROLE_GATHER, ZR_OP_ALL_GATHER, 4096, &tag);
    zr_flight_leave(f);
    zr_flight_copy(f, v);
    zr_flight_last_words(v, text, sizeof text);
    assert_string_equal(text,
                        "; its last call was zero_end(unit 3, backward) in step 12, which had returned; "
                        "all_gather seq 1 unit 2 of gather had not begun");
    zr_flight_start(&tag.mark);
    zr_flight_issue(f, ZR_ROLE_GATHER, ZR_OP_ALL_GATHER, 4096, &(struct zr_tag){.unit = 3});
    zr_flight_copy(f, v);
    zr_flight_last_words(v, text, sizeof text);
    assert_non_null(strstr(text, "; all_gather seq 1 unit 2 of gather had begun"));
    zr_flight_close(f);
}

/* The rank process: it is killed while it records. */
static void be_killed(int fd, int ready, uint64_t n_ops)
{
    char text[16];
    snprintf(text, sizeof text, "%d", fd);
    setenv("ZERO_FLIGHT_FD", text, 1);
    struct zr_flight *f = open_one(3, 4);
    const struct zr_logged_call call = call_of(41);
    zr_flight_enter(f, &call);
    zr_flight_job(f, "REDUCE", 9);
    for (uint64_t n = 1; n <= n_ops; n++)
        issue(f, n);
    if (write(ready, "x", 1) == 1)
        for (;;)
            pause();
    _exit(1);
}

static void test_it_is_read_after_sigkill(void **state)
{
    struct zr_flight_view *v = *state;
    int fd = zr_flight_make(), ends[2];
    uint64_t n_ops = 1 + next_random() % 9000;
    char byte;
    assert_true(fd >= 0);
    assert_false(zr_flight_look(fd, v)); /* no process has it yet */
    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    for (int attempt = 0; attempt < 2; attempt++) { /* the second one takes it over */
        pid_t pid = fork();
        if (pid == 0)
            be_killed(fd, ends[1], n_ops + (uint64_t)attempt);
        assert_int_equal(read(ends[0], &byte, 1), 1);
        kill(pid, SIGKILL);
        assert_int_equal(waitpid(pid, NULL, 0), pid);
        assert_true(zr_flight_look(fd, v));
        assert_int_equal(v->pid, pid);
        assert_int_equal(v->rank, 3);
        assert_int_equal(v->state, ZR_FLIGHT_OPEN);
        const struct zr_logged_call call = call_of(41);
        assert_int_equal(v->call.number, 1);
        assert_int_equal(v->call.call, zr_call_log_pack(&call));
        assert_int_equal(v->call.left_ns, 0);
        assert_string_equal(v->loop.name, "REDUCE");
        assert_int_equal(v->loop.unit, 9);
        assert_int_equal(v->ops[v->n_ops - 1].serial, n_ops + (uint64_t)attempt);
        check_op(&v->ops[v->n_ops - 1]);
    }
    close(ends[0]);
    close(ends[1]);
    close(fd);
}

/* Two contexts of one process: the second does not write into the first one's recorder. */
static void test_one_context_has_it(void **state)
{
    struct zr_flight_view *v = *state;
    int fd = zr_flight_make();
    char text[16];
    snprintf(text, sizeof text, "%d", fd);
    setenv("ZERO_FLIGHT_FD", text, 1);
    struct zr_flight *a = open_one(0, 3), *b = open_one(1, 3);
    assert_true(zr_flight_look(fd, v));
    assert_int_equal(v->rank, 0);
    zr_flight_copy(b, v);
    assert_int_equal(v->rank, 1);
    zr_flight_close(b);
    zr_flight_close(a);
    assert_true(zr_flight_look(fd, v));
    assert_int_equal(v->state, ZR_FLIGHT_CLOSED);
    a = open_one(2, 3); /* the next context has it */
    assert_true(zr_flight_look(fd, v));
    assert_int_equal(v->rank, 2);
    assert_int_equal(v->state, ZR_FLIGHT_OPEN);
    zr_flight_close(a);
    close(fd);
    /* A file that is no recorder is left alone. */
    int other = memfd_create("other", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    snprintf(text, sizeof text, "%d", other);
    setenv("ZERO_FLIGHT_FD", text, 1);
    assert_int_equal(write(other, "kept", 4), 4);
    a = open_one(0, 1);
    zr_flight_close(a);
    assert_int_equal(pread(other, text, 4, 0), 4);
    assert_memory_equal(text, "kept", 4);
    assert_false(zr_flight_look(other, v));
    close(other);
    unsetenv("ZERO_FLIGHT_FD");
}

struct busy {
    struct zr_flight *f;
    uint64_t n;
};

static void *write_many(void *arg)
{
    struct busy *b = arg;
    for (uint64_t n = 1; n <= b->n; n++) {
        const struct zr_logged_call call = call_of(n);
        zr_flight_enter(b->f, &call);
        struct zr_flight_mark m = issue(b->f, n);
        zr_flight_start(&m);
        zr_flight_finish(&m);
        zr_flight_leave(b->f);
    }
    return NULL;
}

/* A reader sees whole entries while they are written. */
static void test_a_reader_meanwhile(void **state)
{
    struct zr_flight_view *v = *state;
    struct busy b = {open_one(0, 1), 100000};
    pthread_t writer;
    uint64_t seen = 0;
    assert_int_equal(pthread_create(&writer, NULL, write_many, &b), 0);
    while (seen < b.n) {
        zr_flight_copy(b.f, v);
        assert_int_equal(zr_flight_check(v), 0);
        for (int i = 0; i < v->n_ops; i++)
            check_op(&v->ops[i]);
        if (v->call.number) {
            const struct zr_logged_call call = call_of(v->call.number);
            assert_int_equal(v->call.call, zr_call_log_pack(&call));
        }
        seen = v->n_ops ? v->ops[v->n_ops - 1].serial : 0;
    }
    pthread_join(writer, NULL);
    zr_flight_close(b.f);
}

enum { READERS = 4, READS_MS = 300 };

struct spinning {
    struct zr_flight *f;
    _Atomic bool is_over;
    _Atomic int n_missing, n_torn;
};

static void *spin(void *arg)
{
    struct spinning *s = arg;
    for (uint64_t n = 2; !atomic_load(&s->is_over); n++) {
        const struct zr_logged_call call = call_of(n);
        zr_flight_enter(s->f, &call);
        zr_flight_leave(s->f);
    }
    return NULL;
}

static void *read_spinning(void *arg)
{
    struct spinning *s = arg;
    int64_t until_ns = zr_now_ns() + READS_MS * INT64_C(1000000);
    while (zr_now_ns() < until_ns) {
        struct zr_flight_call c;
        bool has_read = zr_flight_read_call(zr_flight_record_of(s->f), &c);
        const struct zr_logged_call call = call_of(c.number);
        s->n_missing += !has_read;
        s->n_torn += c.number ? c.call != zr_call_log_pack(&call) : c.call || c.entered_ns;
    }
    return NULL;
}

/* Readers that are interrupted while the program makes many calls get a whole call. */
static void test_calls_in_quick_succession(void **state)
{
    struct spinning s = {.f = open_one(0, 1)};
    pthread_t writer, reader[READERS];
    const struct zr_logged_call call = call_of(1);
    zr_flight_enter(s.f, &call);
    zr_flight_leave(s.f);
    assert_int_equal(pthread_create(&writer, NULL, spin, &s), 0);
    for (int i = 0; i < READERS; i++)
        assert_int_equal(pthread_create(&reader[i], NULL, read_spinning, &s), 0);
    for (int i = 0; i < READERS; i++)
        pthread_join(reader[i], NULL);
    atomic_store(&s.is_over, true);
    pthread_join(writer, NULL);
    assert_int_equal(s.n_torn, 0);
    assert_int_equal(s.n_missing, 0);
    zr_flight_close(s.f);
}

/* The calls of two recorders for the communicator that both ranks are in. Ranks of different pipeline stages
 * share only the world's. Ranks 2 and 3 share the rows of a sequence, and their calls are those of cp. */
static void test_calls_of_two_ranks(void **state)
{
    static const int32_t stage[2][2] = {{0, 1}, {2, 3}}, all[] = {0, 1, 2, 3};
    const struct zr_logged_call begin = call_of(1), end = call_of(2);
    struct zr_shared_calls shared[ZR_SHARED_CALLS];
    struct zr_flight *f[4];
    for (int i = 0; i < 4; i++) {
        f[i] = open_one(i, 4);
        zr_flight_shared_calls(zr_flight_record_of(f[i]), shared);
        for (int k = 0; k < ZR_SHARED_CALLS; k++)
            assert_null(shared[k].log);
        zr_flight_role(f[i], ZR_ROLE_CONTROL,
                       &(struct zr_group){.size = 2, .rank = i % 2, .members = stage[i / 2]});
        if (i > 1)
            zr_flight_role(f[i], ZR_ROLE_CP,
                           &(struct zr_group){.size = 2, .rank = i - 2, .members = stage[1]});
        zr_flight_role(f[i], ZR_ROLE_WORLD, &(struct zr_group){.size = 4, .rank = i, .members = all});
        zr_flight_called(f[i], ZR_ROLE_CONTROL, &begin);
        zr_flight_called(f[i], ZR_ROLE_CONTROL, i == 1 ? &begin : &end);
        zr_flight_called(f[i], ZR_ROLE_WORLD, &end);
        for (int k = 0; k < 3 && i > 1; k++)
            zr_flight_called(f[i], ZR_ROLE_CP, k == i ? &end : &begin);
    }
    for (int i = 1; i < 4; i++) {
        const struct zr_call_log *own, *other;
        struct zr_logged_call of_own, of_other;
        assert_true(
            zr_flight_common_calls(zr_flight_record_of(f[0]), zr_flight_record_of(f[i]), &own, &other));
        assert_int_equal(own->n, i == 1 ? 2 : 1);
        assert_int_equal(zr_call_log_differ(own, other, &of_own, &of_other), i == 1 ? 2 : 0);
    }
    const struct zr_call_log *two, *three;
    struct zr_logged_call of_two, of_three;
    assert_true(zr_flight_common_calls(zr_flight_record_of(f[2]), zr_flight_record_of(f[3]), &two, &three));
    assert_int_equal(zr_call_log_differ(two, three, &of_two, &of_three), 3);
    zr_flight_shared_calls(zr_flight_record_of(f[3]), shared);
    assert_true(shared[0].log->n == 2 && shared[0].size == 2 && !shared[1].log);
    assert_true(shared[2].log->n == 3 && shared[2].size == 2);
    assert_true(shared[3].log->n == 1 && shared[3].size == 4);
    for (int i = 0; i < 4; i++)
        zr_flight_close(f[i]);
}

static void fill(struct zr_flight *f, int n_ops)
{
    const struct zr_logged_call call = call_of(5);
    zr_flight_role(f, ZR_ROLE_GATHER, &(struct zr_group){.size = 4, .rank = 3});
    zr_flight_enter(f, &call);
    for (int n = 1; n <= n_ops; n++)
        issue(f, (uint64_t)n);
    zr_flight_fail(f, ZERO_ERR_PEER, "rank 2 was lost");
    zr_flight_fail(f, ZERO_ERR_ARG, "not the first");
}

static void test_files(void **state)
{
    struct zr_flight_view *v = *state, *read = malloc(sizeof *read);
    char folder[] = "/tmp/test_flight.XXXXXX", path[ZR_FLIGHT_PATH], want[64], again[ZR_FLIGHT_PATH];
    assert_non_null(read);
    assert_non_null(mkdtemp(folder));
    struct zr_flight *f = open_one(3, 4);
    fill(f, (int)(next_random() % 5000));
    assert_int_equal(zr_flight_save(f, path), 0); /* nobody has asked for a file */
    assert_string_equal(path, "");
    zr_flight_close(f);
    setenv("ZERO_FLIGHT_DIR", folder, 1);
    f = open_one(3, 4);
    fill(f, (int)(next_random() % 5000));
    assert_int_equal(zr_flight_save(f, path), 0);
    snprintf(want, sizeof want, "%s/flight-a_job_1-attempt2-rank3", folder);
    assert_string_equal(path, want);
    assert_int_equal(zr_flight_save(f, again), 0); /* a recorder is saved once */
    assert_string_equal(again, "");
    assert_int_equal(zr_flight_read_file(path, read), 0);
    assert_int_equal(read->code, ZERO_ERR_PEER);
    assert_string_equal(read->text, "rank 2 was lost");
    zr_flight_copy(f, v);
    v->copied_ns = read->copied_ns;
    assert_int_equal(zr_flight_bytes(v), zr_flight_bytes(read));
    assert_memory_equal(v, read, zr_flight_bytes(v));
    /* Any other file is refused, and the message names it. */
    assert_int_equal(truncate(path, (off_t)zr_flight_bytes(v) - 1 - next_random() % 3000), 0);
    assert_int_equal(zr_flight_read_file(path, read), ZERO_ERR_ARG);
    assert_non_null(strstr(zr_error_text(), path));
    unlink(path);
    assert_int_equal(zr_flight_read_file(path, read), ZERO_ERR_IO);
    assert_non_null(strstr(zr_error_text(), path));
    rmdir(folder);
    assert_int_equal(zr_flight_write_file(v, folder, path), ZERO_ERR_IO);
    assert_non_null(strstr(zr_error_text(), folder));
    zr_flight_close(f);
    unsetenv("ZERO_FLIGHT_DIR");
    free(read);
}

/* A file with random damage is refused, or its values are in range. */
static void test_damage(void **state)
{
    struct zr_flight_view *v = *state, *read = malloc(sizeof *read);
    struct zr_flight *f = open_one(0, 4);
    char text[512];
    int n_refused = 0;
    assert_non_null(read);
    fill(f, 3);
    zr_flight_copy(f, v);
    size_t n = zr_flight_bytes(v);
    unsigned char *data = malloc(n);
    assert_non_null(data);
    for (int round = 0; round < 20000; round++) {
        memcpy(data, v, n);
        for (uint32_t k = 1 + next_random() % 3; k > 0; k--)
            data[next_random() % n] ^= (unsigned char)(1u << next_random() % 8);
        if (zr_flight_parse(data, n, read)) {
            n_refused++;
            continue;
        }
        assert_in_range(read->rank, 0, read->world - 1);
        zr_flight_last_words(read, text, sizeof text);
        for (int i = 0; i < read->n_ops; i++) {
            assert_in_range(read->ops[i].role, 0, ZR_ROLES - 1);
            assert_in_range(read->ops[i].op, ZR_OP_ALL_GATHER, ZR_OPS - 1);
        }
    }
    assert_true(n_refused > 100);
    free(data);
    free(read);
    zr_flight_close(f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_what_is_recorded_is_read, begin, end),
        cmocka_unit_test_setup_teardown(test_last_words, begin, end),
        cmocka_unit_test_setup_teardown(test_it_is_read_after_sigkill, begin, end),
        cmocka_unit_test_setup_teardown(test_one_context_has_it, begin, end),
        cmocka_unit_test_setup_teardown(test_a_reader_meanwhile, begin, end),
        cmocka_unit_test(test_calls_in_quick_succession),
        cmocka_unit_test(test_calls_of_two_ranks),
        cmocka_unit_test_setup_teardown(test_files, begin, end),
        cmocka_unit_test_setup_teardown(test_damage, begin, end),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
