/* SPDX-License-Identifier: Apache-2.0 */
/* test_host_memory.c: tests how much host memory is found to be free, with folders that stand in for /proc
 * and /sys. */
#include "kernels/host/host_memory.h"
#include "test/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MIB (INT64_C(1) << 20)
/* The host reports 1000 MiB available without swap, or with 300 MiB of swap, 200 of them free. */
#define MEMINFO                                                                                              \
    {                                                                                                        \
        "proc/meminfo", "MemTotal: 2097152 kB\nMemFree: 10 kB\nMemAvailable: 1024000 kB\nSwapTotal: 0 "      \
                        "kB\nSwapFree: 0 kB\n"                                                               \
    }
#define MEMINFO_SWAP                                                                                         \
    {                                                                                                        \
        "proc/meminfo", "MemAvailable: 1024000 kB\nSwapTotal: 307200 kB\nSwapFree: 204800 kB\n"              \
    }
#define V2      "sys/fs/cgroup"
#define V1      "sys/fs/cgroup/memory"
#define NONE_V1 "9223372036854771712\n" /* cgroup version 1's "no limit" */

enum { MAX_FILES = 14, MAX_GROUPS = 3 };

/* A file; with text NULL, a folder of that name, which cannot be read as a file. */
struct file {
    const char *path, *text;
};

struct row {
    const char *what;
    struct file files[MAX_FILES];
    int64_t host; /* MiB; -1: unknown */
    struct {
        const char *path; /* below /sys/fs/cgroup */
        int64_t mib;
    } groups[MAX_GROUPS];
    int64_t least; /* MiB; -1: unknown */
};

static const struct row rows[] = {
    {"no groups", {MEMINFO}, 1000, {{0}}, 1000},
    {"swap", {MEMINFO_SWAP}, 1200, {{0}}, 1200},
    {"swap, half of it in compressed memory, which is no more of it",
     {MEMINFO_SWAP,
      {"proc/swaps", "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
                     "/dev/zram0                              partition\t204800\t\t102400\t\t100\n"
                     "/dev/sda2                               partition\t102400\t\t0\t\t-2\n"}},
     1100,
     {{0}},
     1100},
    {"swap in compressed memory alone, as far as it can be read",
     {MEMINFO_SWAP,
      {"proc/swaps", "Filename Type Size Used Priority\n/dev/zram0 partition 307200 0 100\n/dev/zram1 x\n"}},
     1000,
     {{0}},
     1000},
    {"nothing can be read", {{"sys/x", ""}}, -1, {{0}}, -1},
    {"folders where files should be", {{"proc/meminfo", NULL}, {"proc/self/cgroup", NULL}}, -1, {{0}}, -1},
    {"meminfo without what is looked for",
     {{"proc/meminfo", "MemFree: 5 kB\nSwapFree: 1024 kB\n"}},
     -1,
     {{0}},
     -1},
    {"meminfo of garbage",
     {{"proc/meminfo", "MemAvailable: lots\nSwapFree: -7 kB\n\n:\nMemAvailable"}},
     -1,
     {{0}},
     -1},
    {"version 2",
     {MEMINFO,
      {"proc/self/cgroup", "0::/a\n"},
      {V2 "/a/memory.max", "104857600\n"},
      {V2 "/a/memory.current", "62914560\n"},
      {V2 "/a/memory.stat", "anon 41943040\nfile 20971520\ninactive_file 8388608\nactive_file "
                            "2097152\nslab_reclaimable 1048576\n"}},
     1000,
     {{"/a", 51}},
     51},
    {"version 2, nested, limits outside and no number between",
     {MEMINFO,
      {"proc/self/cgroup", "0::/a/b/c\n"},
      {V2 "/a/memory.max", "1073741824\n"},
      {V2 "/a/memory.current", "1048576000\n"},
      {V2 "/a/b/memory.max", "max\n"},
      {V2 "/a/b/memory.current", "1048576000\n"},
      {V2 "/a/b/c/memory.max", "209715200\n"},
      {V2 "/a/b/c/memory.current", "104857600\n"}},
     1000,
     {{"/a/b/c", 100}, {"/a", 24}},
     24},
    {"version 2, more used than allowed",
     {MEMINFO,
      {"proc/self/cgroup", "0::/a\n"},
      {V2 "/a/memory.max", "1048576\n"},
      {V2 "/a/memory.current", "2097152\n"}},
     1000,
     {{"/a", 0}},
     0},
    {"version 2, swap without a limit of the group's",
     {MEMINFO_SWAP,
      {"proc/self/cgroup", "0::/a\n"},
      {V2 "/a/memory.max", "104857600\n"},
      {V2 "/a/memory.current", "0\n"}},
     1200,
     {{"/a", 300}},
     300},
    {"version 2, a group that may not swap",
     {MEMINFO_SWAP,
      {"proc/self/cgroup", "0::/a\n"},
      {V2 "/a/memory.max", "104857600\n"},
      {V2 "/a/memory.current", "0\n"},
      {V2 "/a/memory.swap.max", "0\n"},
      {V2 "/a/memory.swap.current", "0\n"}},
     1000,
     {{"/a", 100}},
     100},
    {"version 2, an outer group that may swap a little, and has no limit of memory",
     {MEMINFO_SWAP,
      {"proc/self/cgroup", "0::/a/b\n"},
      {V2 "/a/memory.max", "max\n"},
      {V2 "/a/memory.current", "0\n"},
      {V2 "/a/memory.swap.max", "31457280\n"},
      {V2 "/a/memory.swap.current", "10485760\n"},
      {V2 "/a/b/memory.max", "104857600\n"},
      {V2 "/a/b/memory.current", "0\n"},
      {V2 "/a/b/memory.swap.max", "max\n"},
      {V2 "/a/b/memory.swap.current", "0\n"}},
     1020,
     {{"/a/b", 120}},
     120},
    {"version 2 in a container: the path is the host's, what is mounted the container's",
     {MEMINFO,
      {"proc/self/cgroup", "0::/docker/0123\n"},
      {V2 "/memory.max", "104857600\n"},
      {V2 "/memory.current", "41943040\n"}},
     1000,
     {{"", 60}},
     60},
    {"version 2, a path that leaves what is mounted",
     {MEMINFO,
      {"proc/self/cgroup", "0::/../../outside\n"},
      {V2 "/memory.max", "104857600\n"},
      {V2 "/memory.current", "0\n"},
      {"outside/memory.max", "1\n"},
      {"outside/memory.current", "0\n"},
      {"sys/outside/memory.max", "1\n"},
      {"sys/outside/memory.current", "0\n"}},
     1000,
     {{"", 100}},
     100},
    {"version 1",
     {MEMINFO,
      {"proc/self/cgroup", "12:cpuset:/x\n4:cpu,memory:/a\n1:name=systemd:/x\n0::/x\n"},
      {V1 "/a/memory.limit_in_bytes", "104857600\n"},
      {V1 "/a/memory.usage_in_bytes", "62914560\n"},
      {V1 "/a/memory.stat",
       "cache 20971520\ninactive_file 1\ntotal_inactive_file 8388608\ntotal_active_file 2097152\n"},
      {V1 "/memory.limit_in_bytes", NONE_V1},
      {V1 "/memory.usage_in_bytes", "5\n"}},
     1000,
     {{"/memory/a", 50}},
     50},
    {"version 1, memory and swap together",
     {MEMINFO_SWAP,
      {"proc/self/cgroup", "4:memory:/a\n"},
      {V1 "/a/memory.limit_in_bytes", "104857600\n"},
      {V1 "/a/memory.usage_in_bytes", "62914560\n"},
      {V1 "/a/memory.memsw.limit_in_bytes", "136314880\n"},
      {V1 "/a/memory.memsw.usage_in_bytes", "62914560\n"},
      {V1 "/a/memory.stat", "total_inactive_file 10485760\n"}},
     1200,
     {{"/memory/a", 80}},
     80},
    {"version 1, swap without a limit of its own",
     {MEMINFO_SWAP,
      {"proc/self/cgroup", "4:memory:/a\n"},
      {V1 "/a/memory.limit_in_bytes", "104857600\n"},
      {V1 "/a/memory.usage_in_bytes", "104857600\n"},
      {V1 "/a/memory.memsw.limit_in_bytes", NONE_V1},
      {V1 "/a/memory.memsw.usage_in_bytes", "104857600\n"}},
     1200,
     {{"/memory/a", 200}},
     200},
    {"version 1 beside version 2, which has a group with a limit too",
     {MEMINFO,
      {"proc/self/cgroup", "4:memory:/a\n0::/b\n"},
      {V1 "/a/memory.limit_in_bytes", "104857600\n"},
      {V1 "/a/memory.usage_in_bytes", "0\n"},
      {V2 "/unified/b/memory.max", "73400320\n"},
      {V2 "/unified/b/memory.current", "0\n"}},
     1000,
     {{"/memory/a", 100}, {"/unified/b", 70}},
     70},
    {"limits and uses that are garbage are none",
     {MEMINFO,
      {"proc/self/cgroup", "\n:\n::\n0::\n0::relative\n0::/a/b/c/d\nno colon\n0::/a/b"},
      {V2 "/a/b/memory.max", "\n"},
      {V2 "/a/b/memory.current", "12\n"},
      {V2 "/a/memory.max", "104857600\n"},
      {V2 "/a/memory.current", "some\n"},
      {V2 "/memory.max", "-5\n"},
      {V2 "/memory.current", "0\n"}},
     1000,
     {{0}},
     1000},
    {"a limit that cannot be read is none",
     {MEMINFO, {"proc/self/cgroup", "0::/a\n"}, {V2 "/a/memory.max", NULL}, {V2 "/a/memory.current", "0\n"}},
     1000,
     {{0}},
     1000},
    {"a limit larger than any number",
     {MEMINFO,
      {"proc/self/cgroup", "0::/a\n"},
      {V2 "/a/memory.max", "99999999999999999999999\n"},
      {V2 "/a/memory.current", "0\n"}},
     1000,
     {{0}},
     1000},
};

static char root[] = "/tmp/zero-memory-XXXXXX";

static void shell(const char *format)
{
    char command[256];
    snprintf(command, sizeof command, format, root);
    assert_int_equal(system(command), 0);
}

static void make_folders(char *path)
{
    for (char *slash = strchr(path + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0700);
        *slash = '/';
    }
}

static void make_file(const char *at, const char *text)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s%s", root, at, text ? "" : "/");
    make_folders(path);
    FILE *f = text ? fopen(path, "w") : NULL;
    if (f)
        assert_true(fputs(text, f) >= 0 && !fclose(f));
}

static void make(const struct row *row)
{
    shell("rm -rf %s/*");
    for (int i = 0; i < MAX_FILES && row->files[i].path; i++)
        make_file(row->files[i].path, row->files[i].text);
}

static int64_t bytes_of(int64_t mib)
{
    return mib < 0 ? INT64_MAX : mib * MIB;
}

static void each_row(void **state)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct row *row = &rows[i];
        struct zr_host_memory m;
        memset(&m, 0x5a, sizeof m);
        make(row);
        zr_host_memory_look(root, &m);
        int n = 0;
        while (n < MAX_GROUPS && row->groups[n].path)
            n++;
        if (m.free_bytes != bytes_of(row->host) || m.n_groups != n ||
            zr_host_memory_least(&m) != bytes_of(row->least))
            fail_msg("%s: host %lld, %d groups, least %lld", row->what, (long long)m.free_bytes, m.n_groups,
                     (long long)zr_host_memory_least(&m));
        for (int k = 0; k < n; k++) {
            char path[512];
            snprintf(path, sizeof path, "/sys/fs/cgroup%s", row->groups[k].path);
            if (strcmp(m.group[k].path, path) != 0 || m.group[k].free_bytes != bytes_of(row->groups[k].mib))
                fail_msg("%s: group %s has %lld", row->what, m.group[k].path,
                         (long long)m.group[k].free_bytes);
        }
    }
}

/* If there are more nested groups than fit, the nearest ones count. */
static void nested_deeply(void **state)
{
    enum { DEPTH = ZR_MAX_MEMORY_GROUPS + 4 };
    char path[256] = "", text[512];
    shell("rm -rf %s/*");
    for (int i = 1; i <= DEPTH; i++) {
        size_t end = strlen(path);
        snprintf(path + end, sizeof path - end, "/%d", i);
        snprintf(text, sizeof text, V2 "%s/memory.current", path);
        make_file(text, "0\n");
        snprintf(text, sizeof text, V2 "%s/memory.max", path);
        make_file(text, "4096\n");
    }
    snprintf(text, sizeof text, "0::%s\n", path);
    make_file("proc/self/cgroup", text);
    struct zr_host_memory m;
    zr_host_memory_look(root, &m);
    assert_int_equal(m.n_groups, ZR_MAX_MEMORY_GROUPS);
    snprintf(text, sizeof text, "/sys/fs/cgroup%s", path);
    assert_string_equal(m.group[0].path, text);
    for (int i = 1; i < m.n_groups; i++)
        assert_true(m.group[i].id != m.group[0].id);
}

/* A path that does not fit, and lines longer than any buffer. */
static void long_lines(void **state)
{
    char *line = malloc(100000);
    assert_non_null(line);
    shell("rm -rf %s/*");
    memset(line, 'a', 99999);
    memcpy(line, "0::/", 4);
    memcpy(line + 50000, "\n4:memory:/", 11);
    line[99999] = 0;
    make_file("proc/self/cgroup", line);
    make_file(V2 "/memory.max", "1048576\n");
    make_file(V2 "/memory.current", "0\n");
    struct zr_host_memory m;
    zr_host_memory_look(root, &m);
    assert_int_equal(m.n_groups, 1);
    assert_string_equal(m.group[0].path, "/sys/fs/cgroup");
    free(line);
}

/* Free swap is limited by every group. */
static void swap_is_reported_apart(void **state)
{
    struct zr_host_memory m;
    shell("rm -rf %s/*");
    make_file("proc/meminfo", "MemAvailable: 1024000 kB\nSwapTotal: 307200 kB\nSwapFree: 204800 kB\n");
    zr_host_memory_look(root, &m);
    assert_int_equal(m.swap_bytes, 200 * MIB);
    make_file("proc/self/cgroup", "0::/a\n");
    make_file(V2 "/a/memory.swap.max", "31457280\n");
    make_file(V2 "/a/memory.swap.current", "10485760\n");
    zr_host_memory_look(root, &m);
    assert_int_equal(m.swap_bytes, 20 * MIB);
    assert_int_equal(m.free_bytes, 1020 * MIB);
}

/* The real host gives plausible values. */
static void this_host(void **state)
{
    struct zr_host_memory m;
    zr_host_memory_look("", &m);
    assert_true(m.free_bytes > 0 && zr_host_memory_least(&m) >= 0);
    assert_true(zr_host_memory_least(&m) <= m.free_bytes);
}

static int open_root(void **state)
{
    return !mkdtemp(root);
}

static int remove_root(void **state)
{
    shell("rm -rf %s");
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_row),   cmocka_unit_test(nested_deeply),
        cmocka_unit_test(long_lines), cmocka_unit_test(swap_is_reported_apart),
        cmocka_unit_test(this_host),
    };
    return cmocka_run_group_tests(tests, open_root, remove_root);
}
