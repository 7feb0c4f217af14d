/* SPDX-License-Identifier: Apache-2.0 */
/* test_checkpoint_links.c: tests symbolic links, FIFOs and devices in folders of checkpoints and weights.
 * A link to the folder itself is followed. Links inside the folder are not followed, and their targets
 * stay. Only regular files are opened, so nothing hangs. */
#include "test/checkpoint/saved_model.h"
#include "test/cmocka.h"
#include "test/zero/toy_net.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char folder[] = "/tmp/zero-links-XXXXXX";

static void run(const char *what)
{
    char command[600];
    snprintf(command, sizeof command, "cd '%s' && %s", folder, what);
    if (system(command))
        fail_msg("failed: %s", what);
}

static char *at(const char *name)
{
    static _Thread_local char path[200];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

/* A call, and the error expected on all ranks; NULL: it must work. */
struct attempt {
    int (*call)(struct model_rank *m, const char *path);
    const char *path, *says[2];
};

static void attempt(struct model_rank *m, void *arg)
{
    const struct attempt *a = arg;
    int err = a->call(m, at(a->path));
    if (!a->says[0]) {
        CHECK_OK(err);
        return;
    }
    CHECK_THAT(err == ZERO_ERR_IO || err == ZERO_ERR_ARG);
    for (int i = 0; i < 2; i++)
        if (!strstr(zero_last_error(), a->says[i])) {
            printf("\"%s\" is not in: %s\n", a->says[i], zero_last_error());
            CHECK_THAT(false);
        }
}

static void quiet(void *arg, const char *line)
{
}

static void expect(int (*call)(struct model_rank *, const char *), const char *path, const char *says,
                   const char *also)
{
    struct attempt a = {call, path, {says, also}};
    model_run(&(struct model_options){.world = 2, .stage = 2, .keep = 2, .log = quiet}, attempt, &a);
}

#define LATEST "run/save-00000003-step-00000003"

/* Makes one save more than cfg.checkpoint.save_keep keeps, each with data of the ranks. */
static int save_thrice(struct model_rank *m, const char *path)
{
    int err = 0;
    for (int i = 0; !err && i < 3; i++) {
        err = model_steps(m, 1);
        if (!err)
            err = zero_set_data(m->z, ZERO_DATA_RANK, "some bytes", 10);
        if (!err)
            err = zero_save(m->z, path, NULL);
    }
    return err;
}

static int load(struct model_rank *m, const char *path)
{
    return zero_load(m->z, path);
}

static int import(struct model_rank *m, const char *path)
{
    return zero_import(m->z, path, NULL, 0);
}

static int export(struct model_rank *m, const char *path)
{
    return zero_export(m->z, path, NULL, 0, 0);
}

static int make_folder(void **state)
{
    strcpy(folder + strlen(folder) - 6, "XXXXXX");
    toy_make_folder(folder);
    return 0;
}

static int remove_folder(void **state)
{
    toy_remove_folder(folder);
    return 0;
}

#define SUMS "find moved other -type f | sort | xargs sha256sum"

static void what_links_lead_to_stays(void **state)
{
    expect(save_thrice, "run", NULL, NULL);
    /* An old save that was moved to another disk, a link that looks like an unfinished save, and other
     * files in both. */
    run("mkdir moved other && echo mine > other/file && echo mine > other/manifest.json && "
        "old=$(ls run | head -1) && mv run/$old moved/ && echo mine > moved/$old/notes && "
        "ln -s ../moved/$old run/$old && ln -s ../other run/.save-00000009-step-00000001 && "
        "ln -s ../other run/save-00000001-step-00000001 && " SUMS " > sums");
    expect(save_thrice, "run", NULL, NULL);
    run(SUMS " | cmp - sums && test $(find run -type l | wc -l) = 3 && "
             "test $(find run -mindepth 1 -type d | wc -l) = 2");
    expect(load, "run", NULL, NULL);
}

static void a_link_to_the_folder_is_followed(void **state)
{
    run("mkdir real deep && ln -s real linked && ln -s ../linked deep/again");
    expect(save_thrice, "linked", NULL, NULL);
    expect(save_thrice, "deep/again", NULL, NULL);
    run("test $(ls real | wc -l) = 2 && test -L linked && test -L deep/again");
    expect(load, "deep/again", NULL, NULL);
    /* A link to one checkpoint is followed too. */
    run("ln -s real/$(ls real | tail -1) best");
    expect(load, "best", NULL, NULL);
}

static void linked_files_are_refused(void **state)
{
    static const char *const names[] = {"manifest.json", "shard-00001-of-00002.safetensors",
                                        "shard-00002-of-00002.safetensors.blocks"};
    char command[400];
    expect(save_thrice, "run", NULL, NULL);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(command, sizeof command, "mv " LATEST "/%s . && ln -s ../../%s " LATEST "/%s", names[i],
                 names[i], names[i]);
        run(command);
        expect(load, "run", names[i], "it is a symbolic link");
        snprintf(command, sizeof command, "rm " LATEST "/%s && mv %s " LATEST "/%s", names[i], names[i],
                 names[i]);
        run(command);
    }
    expect(load, "run", NULL, NULL);
    /* If the latest save is a link, loading the folder is refused. Loading the save's own path follows the
     * link. */
    run("mv " LATEST " . && ln -s ../save-00000003-step-00000003 " LATEST);
    expect(load, "run", "save-00000003-step-00000003", "it is a symbolic link");
    expect(load, LATEST, NULL, NULL);
    run("echo mine > file && ln -s ../file run/.lock");
    expect(save_thrice, "run", "run/.lock", "it is a symbolic link");
    run("test \"$(cat file)\" = mine");
}

static void fifos_are_refused(void **state)
{
    static const char *const names[] = {"manifest.json", "shard-00001-of-00002.safetensors",
                                        "shard-00002-of-00002.safetensors.blocks"};
    char command[400];
    expect(save_thrice, "run", NULL, NULL);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(command, sizeof command, "mv " LATEST "/%s . && mkfifo " LATEST "/%s", names[i], names[i]);
        run(command);
        expect(load, "run", names[i], "it is a FIFO, a socket or a device");
        snprintf(command, sizeof command, "mv -f %s " LATEST "/%s", names[i], names[i]);
        run(command);
    }
    run("mkfifo run/.lock");
    expect(save_thrice, "run", "run/.lock", "it is a FIFO, a socket or a device");
}

/* Reads a rank's data after the file was replaced by a FIFO. */
static void read_rank_data_of_fifo(struct model_rank *m, void *arg)
{
    char data[10];
    CHECK_OK(zero_load(m->z, at("run")));
    CHECK_OK(zero_read_data(m->z, 1, 0, 10, data, NULL));
    double met = 0;
    CHECK_OK(zero_mean(m->z, &met, 1));
    if (m->rank == 0) {
        run("cd " LATEST
            " && rm shard-00002-of-00002.safetensors && mkfifo shard-00002-of-00002.safetensors");
    }
    CHECK_OK(zero_mean(m->z, &met, 1));
    CHECK_THAT(zero_read_data(m->z, 1, 0, 10, data, NULL) == ZERO_ERR_IO);
    CHECK_THAT(strstr(zero_last_error(), "it is a FIFO") != NULL);
}

static void so_they_are_for_rank_data(void **state)
{
    expect(save_thrice, "run", NULL, NULL);
    model_run(&(struct model_options){.world = 2, .stage = 2, .log = quiet}, read_rank_data_of_fifo, NULL);
}

/* In Hugging Face's cache weight files are links. */
static void weights_may_be_links_to_files(void **state)
{
    expect(export, "weights", NULL, NULL);
    run("mkdir cache && mv weights/model.safetensors blob && ln -s ../blob cache/model.safetensors");
    expect(import, "cache", NULL, NULL);
    run("rm cache/* && mkfifo cache/model.safetensors");
    expect(import, "cache", "cache/model.safetensors", "it is a FIFO, a socket or a device");
    expect(export, "cache", "(model.safetensors)", "did not write");
    run("rm cache/* && ln -s /dev/zero cache/model.safetensors");
    expect(import, "cache", "cache/model.safetensors", "it is a FIFO, a socket or a device");
    expect(export, "cache", "(model.safetensors)", "did not write");
    run("rm cache/* && mkfifo cache/model.safetensors.index.json");
    expect(import, "cache", "cache/model.safetensors.index.json", "it is a FIFO, a socket or a device");
}

static void one_file_of_weights_may_be_named(void **state)
{
    expect(export, "weights", NULL, NULL);
    run("mkdir other && mv weights/model.safetensors other/adapter.safetensors && echo {} > "
        "other/model.safetensors");
    expect(import, "other/adapter.safetensors", NULL, NULL);
    expect(import, "other/none.safetensors", "other/none.safetensors", "no such file");
    expect(import, "none/adapter.safetensors", "none/adapter.safetensors", "no such file");
    expect(import, "other/model.safetensors", "other/model.safetensors", "");
}

/* A link without a target is reported differently from a link that libzero does not follow. */
static void links_that_lead_nowhere_are_named(void **state)
{
    static const char nothing[] = "it is a symbolic link to something that does not exist",
                      itself[] = "it is a symbolic link that leads back to itself";
    static int (*const calls[])(struct model_rank *, const char *) = {save_thrice, load, export, import};
    static const char *const names[] = {LATEST, LATEST "/manifest.json",
                                        LATEST "/shard-00001-of-00002.safetensors"};
    char command[400];
    run("ln -s gone nothing && ln -s itself itself && ln -s turn back && ln -s back turn");
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        expect(calls[i], "nothing", "nothing", nothing);
        expect(calls[i], "nothing/run", "nothing", nothing);
        expect(calls[i], "itself", "itself", itself);
        expect(calls[i], "back/run", "back", itself);
    }
    expect(save_thrice, "run", NULL, NULL);
    expect(export, "weights", NULL, NULL);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        for (int loops = 0; loops < 2; loops++) {
            snprintf(command, sizeof command, "mv %s kept && ln -s $(basename %s) %s", names[i],
                     loops ? names[i] : "gone", names[i]);
            run(command);
            expect(load, "run", names[i], loops ? itself : nothing);
            snprintf(command, sizeof command, "rm %s && mv kept %s", names[i], names[i]);
            run(command);
        }
    run("ln -s gone run/.lock");
    expect(save_thrice, "run", "run/.lock", nothing);
    run("rm run/.lock weights/model.safetensors && ln -s gone weights/model.safetensors");
    expect(import, "weights", "weights/model.safetensors", nothing);
    expect(export, "weights", "(model.safetensors)", "did not write");
    run("rm weights/* && ln -s model.safetensors weights/model.safetensors");
    expect(import, "weights", "weights/model.safetensors", itself);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, make_folder, remove_folder)
    const struct CMUnitTest tests[] = {
        TEST(what_links_lead_to_stays),          TEST(a_link_to_the_folder_is_followed),
        TEST(linked_files_are_refused),          TEST(fifos_are_refused),
        TEST(so_they_are_for_rank_data),         TEST(weights_may_be_links_to_files),
        TEST(links_that_lead_nowhere_are_named), TEST(one_file_of_weights_may_be_named),
    };
    return cmocka_run_group_tests(tests, NULL, toy_remove_folders);
}
