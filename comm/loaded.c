/* SPDX-License-Identifier: Apache-2.0 */
/* loaded.c: looks for a function in the program and in every loaded library, without loading one. */
#include "comm/loaded.h"

#include <dlfcn.h>
#include <link.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct names {
    char **name;
    int n;
};

/* Adds the name of a loaded library to the list (a callback of dl_iterate_phdr). */
static int note_name(struct dl_phdr_info *info, size_t size, void *arg)
{
    struct names *all = arg;
    (void)size;
    if (!info->dlpi_name || !info->dlpi_name[0]) /* the program itself, which RTLD_DEFAULT covers */
        return 0;
    char **more = realloc(all->name, (size_t)(all->n + 1) * sizeof *more), *copy = strdup(info->dlpi_name);
    if (more)
        all->name = more;
    if (more && copy)
        all->name[all->n++] = copy;
    else
        free(copy);
    return 0;
}

/* Counts the function `name` of a library in *s, unless it was found before. */
static void look_in(void *handle, const char *name, struct zr_loaded *s)
{
    void *function = dlsym(handle, name);
    if (!function || (s->n > 0 && function == s->function[0]) || (s->n > 1 && function == s->function[1]))
        return;
    if (s->n == 0)
        s->handle = handle;
    if (s->n < 2)
        s->function[s->n] = function;
    s->n++;
}

struct zr_loaded zr_loaded_find(const char *function)
{
    struct names all = {0};
    struct zr_loaded s = {0};
    look_in(RTLD_DEFAULT, function, &s);
    dl_iterate_phdr(note_name,
                    &all); /* this call holds the loader's lock, so libraries are opened afterwards */
    for (int i = 0; i < all.n; i++) {
        void *handle = dlopen(all.name[i], RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
        int before = s.n;
        if (handle)
            look_in(handle, function, &s);
        if (handle && (s.n == before || before > 0)) /* only the first library that has it stays open */
            dlclose(handle);
        free(all.name[i]);
    }
    free(all.name);
    return s;
}

void zr_loaded_path(void *function, char *path, size_t n_path)
{
    Dl_info info;
    bool known = function && dladdr(function, &info) && info.dli_fname;
    snprintf(path, n_path, "%s", known ? info.dli_fname : "an unknown file");
}
