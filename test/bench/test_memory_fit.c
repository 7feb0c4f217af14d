/* SPDX-License-Identifier: Apache-2.0 */
/* test_memory_fit.c: which model a machine has the memory for. */
#include "bench/gpt2/gpt2_ops.h"
#include "bench/memory/fit.h"
#include "test/cmocka.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct model_config whole = {
    .ops = &gpt2_ops, .layers = 12, .heads = 12, .channels = 768, .context = 64, .vocab = 50257};

static struct model_options asked(void)
{
    return (struct model_options){.config = whole, .name = "gpt2-124M"};
}

static int64_t needed(const struct memory_fit *f, int64_t layers)
{
    struct model_config c = whole;
    int64_t bytes;
    c.layers = layers;
    assert_int_equal(memory_fit_needed(f, &c, &bytes), 0);
    return bytes;
}

/* Chooses a model with standard error in a file, whose text goes to said. */
static void choose(const struct memory_fit *f, struct model_options *m, char said[512])
{
    FILE *file = tmpfile();
    int err = dup(STDERR_FILENO);
    assert_non_null(file);
    assert_true(err >= 0 && dup2(fileno(file), STDERR_FILENO) >= 0);
    int status = memory_fit_choose(f, m, "who");
    dup2(err, STDERR_FILENO);
    close(err);
    rewind(file);
    said[fread(said, 1, 511, file)] = 0;
    fclose(file);
    assert_int_equal(status, 0);
}

/* Each of four ranks has 2 bytes per weight and gradient, and 4 for the gradient's sum, the gathered sum,
 * the master weight and each of two moments. README.md has the measured value, 2.32 GB on each rank. */
static void stage_0_of_the_table(void **state)
{
    const struct memory_fit f = {4, 1, ZERO_BF16, 0, ""};
    int64_t bytes = needed(&f, 12);
    assert_true(bytes > 4 * INT64_C(2320000000));
    assert_true(bytes < 4 * INT64_C(2900000000));
    const struct memory_fit more = {4, 8, ZERO_BF16, 0, ""};
    assert_true(needed(&more, 12) > bytes);
}

static void as_many_layers_as_fit(void **state)
{
    static const struct {
        int64_t fits, less, layers; /* the limit is what `fits` layers need, minus so many bytes */
        const char *name;
    } cases[] = {
        {12, 0, 12, "gpt2-124M"},
        {12, 1, 6, "gpt2-124M with 6 layers"},
        {6, 0, 6, "gpt2-124M with 6 layers"},
        {6, 1, 3, "gpt2-124M with 3 layers"},
        {1, 0, 1, "gpt2-124M with 1 layer"},
        {1, 1, 6, "gpt2-nano"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct memory_fit f = {4, 1, ZERO_BF16, 0, ""};
        struct model_options m = asked();
        char said[512];
        f.limit = needed(&f, cases[i].fits) - cases[i].less;
        choose(&f, &m, said);
        assert_string_equal(m.name, cases[i].name);
        assert_int_equal(m.config.layers, cases[i].layers);
        assert_int_equal(m.config.context, 64);
        bool smaller = strcmp(m.name, "gpt2-124M") != 0;
        assert_int_equal(smaller, strstr(said, "are allowed: taking") != NULL);
        assert_int_equal(smaller, strstr(said, cases[i].name) != NULL);
        assert_int_equal(said[0] != 0, smaller);
    }
}

/* Fewer layers come first, and then there is nothing smaller. */
static void the_smallest_is_taken_whatever_it_needs(void **state)
{
    const struct memory_fit f = {4, 1, ZERO_F32, 1, ""};
    struct model_options m = asked();
    char said[512];
    model_take_nano(&m);
    choose(&f, &m, said);
    assert_string_equal(m.name, "gpt2-nano with 1 layer");
    assert_int_equal(m.config.layers, 1);
}

static void put(const char *root, const char *at, const char *text)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", root, at);
    for (char *slash = strchr(path + strlen(root) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        mkdir(path, 0700);
        *slash = '/';
    }
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    fputs(text, f);
    fclose(f);
}

/* The host has 64 GB and much swap, which does not count. Then a memory control group allows less. */
static void the_host_and_memory_groups_are_asked(void **state)
{
    static const struct {
        const char *group, *limit, *used;
    } versions[] = {
        {"0::/a\n", "sys/fs/cgroup/a/memory.max", "sys/fs/cgroup/a/memory.current"},
        {"4:memory:/a\n", "sys/fs/cgroup/memory/a/memory.limit_in_bytes",
         "sys/fs/cgroup/memory/a/memory.usage_in_bytes"},
    };
    for (size_t i = 0; i < sizeof versions / sizeof versions[0]; i++) {
        char root[] = "/tmp/zero-fit-XXXXXX", said[512], text[32], command[64];
        assert_non_null(mkdtemp(root));
        struct memory_fit f = {4, 1, ZERO_BF16, 0, root};
        struct model_options m = asked();
        put(root, "proc/meminfo", "MemAvailable: 64000000 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n");
        choose(&f, &m, said);
        assert_string_equal(m.name, "gpt2-124M");
        put(root, "proc/self/cgroup", versions[i].group);
        snprintf(text, sizeof text, "%lld\n", (long long)needed(&f, 12) + 4096 - 1);
        put(root, versions[i].limit, text);
        put(root, versions[i].used, "4096\n"); /* one byte too little is left */
        choose(&f, &m, said);
        assert_string_equal(m.name, "gpt2-124M with 6 layers");
        assert_non_null(strstr(said, "are free"));
        snprintf(command, sizeof command, "rm -rf %s", root);
        assert_int_equal(system(command), 0);
    }
    char root[] = "/tmp/zero-fit-XXXXXX", said[512], command[64];
    assert_non_null(mkdtemp(root));
    struct memory_fit f = {4, 1, ZERO_BF16, 0, root};
    struct model_options m = asked();
    put(root, "proc/meminfo", "MemAvailable: 1000000 kB\nSwapTotal: 64000000 kB\nSwapFree: 64000000 kB\n");
    choose(&f, &m, said);
    assert_string_equal(m.name, "gpt2-nano");
    snprintf(command, sizeof command, "rm -rf %s", root);
    assert_int_equal(system(command), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(stage_0_of_the_table),
        cmocka_unit_test(as_many_layers_as_fit),
        cmocka_unit_test(the_smallest_is_taken_whatever_it_needs),
        cmocka_unit_test(the_host_and_memory_groups_are_asked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
