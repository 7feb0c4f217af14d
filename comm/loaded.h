/* SPDX-License-Identifier: Apache-2.0 */
/* loaded.h: libraries that this process has loaded already, whoever did. Where a program brings a library of
 * its own, that is the one to use: what the program lends is that library's, and another one would take its
 * memory for something else. One that does not show its functions (linked statically into a program or
 * another library) cannot be seen. */
#ifndef ZR_COMM_LOADED_H
#define ZR_COMM_LOADED_H

#include <stddef.h>

struct zr_loaded {
    /* libraries that show the function, each once, whichever way they are come upon */
    int n;
    /* of the first two, the function; first what the program's own calls reach */
    void *function[2];
    /* of the first, to ask dlsym for others of its functions; not to be closed. Of the program's own calls it
     * is RTLD_DEFAULT. */
    void *handle;
};

struct zr_loaded zr_loaded_find(const char *function);

/* The file that a function is of, or words that nobody knows. */
void zr_loaded_path(void *function, char *path, size_t n_path);

#endif
