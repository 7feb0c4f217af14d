/* SPDX-License-Identifier: Apache-2.0 */
/* loaded.h: finds libraries that this process has already loaded. If a program brings a library such as MPI,
 * that one must be used: what the program lends belongs to it, and another one would misread it. A library
 * that does not export its functions, because it is linked statically, is not found. */
#ifndef ZR_COMM_LOADED_H
#define ZR_COMM_LOADED_H

#include <stddef.h>

/* The libraries in this process that export a function. */
struct zr_loaded {
    /* Number of libraries that export the function. Each counts once, even if it is found in several ways. */
    int n;
    /* The function in the first two libraries. The one that the program's own calls reach comes first. */
    void *function[2];
    /* Handle of the first library for dlsym; not to be closed. RTLD_DEFAULT for the one that the program's
     * own calls reach. */
    void *handle;
};

/* Looks for the libraries that export a function. */
struct zr_loaded zr_loaded_find(const char *function);

/* Writes the file that contains a function, or "an unknown file". */
void zr_loaded_path(void *function, char *path, size_t n_path);

#endif
