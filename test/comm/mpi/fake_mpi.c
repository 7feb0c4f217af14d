/* SPDX-License-Identifier: Apache-2.0 */
/* fake_mpi.c: a library that looks like an MPI to code that searches for one and asks for its version. */
#include <stdio.h>

#if defined FAKE_OMPI
#define TEXT "Open MPI v9.8.7, package: none, ident: 9.8.7"
#elif defined FAKE_MPICH
#define TEXT "MPICH Version:\t9.8.7\nMPICH Release date:\tnever\n"
#elif defined FAKE_INTEL
#define TEXT "Intel(R) MPI Library 2021.6 for Linux* OS\n"
#else
#define TEXT "Somebody's MPI 1.0"
#endif

__attribute__((visibility("default"))) int MPI_Get_library_version(char *text, int *length);

int MPI_Get_library_version(char *text, int *length)
{
    *length = sprintf(text, "%s", TEXT);
    return 0;
}
