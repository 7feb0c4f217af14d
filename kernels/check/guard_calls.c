/* SPDX-License-Identifier: Apache-2.0 */
/* guard_calls.c: replaces entries in the tables of imported functions, so that calls check their memory
 * before the kernel touches it. */
#include "kernels/check/guard_calls.h"

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <link.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#if defined(__x86_64__)
enum { JUMP_SLOT = R_X86_64_JUMP_SLOT, GLOB_DAT = R_X86_64_GLOB_DAT };
#elif defined(__aarch64__)
enum { JUMP_SLOT = R_AARCH64_JUMP_SLOT, GLOB_DAT = R_AARCH64_GLOB_DAT };
#else
enum { JUMP_SLOT = -1, GLOB_DAT = -1 }; /* there is no such entry: nothing is replaced */
#endif

typedef void (*look_fn)(const char *call, const void *at, size_t n, bool write);
static _Atomic(look_fn) look;

static void see(const char *call, const void *at, size_t n, bool write)
{
    look_fn fn = atomic_load(&look);
    int kept = errno;
    if (fn && n > 0)
        fn(call, at, n, write);
    errno = kept;
}

static void see_items(const char *call, const void *at, size_t size, size_t n, bool write)
{
    size_t bytes;
    see(call, at, __builtin_mul_overflow(size, n, &bytes) ? SIZE_MAX : bytes, write);
}

static void see_vector(const char *call, const struct iovec *v, size_t n, bool write)
{
    for (size_t i = 0; i < n; i++)
        see(call, v[i].iov_base, v[i].iov_len, write);
}

/* ---- functions that look first, and then call the C library's ---- */

/* X(name, result, parameters, arguments, call that looks) */
#define CALLS(X)                                                                                             \
    X(write, ssize_t, (int fd, const void *p, size_t n), (fd, p, n), see("write", p, n, false))              \
    X(read, ssize_t, (int fd, void *p, size_t n), (fd, p, n), see("read", p, n, true))                       \
    X(__read_chk, ssize_t, (int fd, void *p, size_t n, size_t room), (fd, p, n, room),                       \
      see("read", p, n, true))                                                                               \
    X(pwrite, ssize_t, (int fd, const void *p, size_t n, off_t at), (fd, p, n, at),                          \
      see("pwrite", p, n, false))                                                                            \
    X(pwrite64, ssize_t, (int fd, const void *p, size_t n, off64_t at), (fd, p, n, at),                      \
      see("pwrite", p, n, false))                                                                            \
    X(pread, ssize_t, (int fd, void *p, size_t n, off_t at), (fd, p, n, at), see("pread", p, n, true))       \
    X(pread64, ssize_t, (int fd, void *p, size_t n, off64_t at), (fd, p, n, at), see("pread", p, n, true))   \
    X(__pread_chk, ssize_t, (int fd, void *p, size_t n, off_t at, size_t room), (fd, p, n, at, room),        \
      see("pread", p, n, true))                                                                              \
    X(__pread64_chk, ssize_t, (int fd, void *p, size_t n, off64_t at, size_t room), (fd, p, n, at, room),    \
      see("pread", p, n, true))                                                                              \
    X(writev, ssize_t, (int fd, const struct iovec *v, int n), (fd, v, n),                                   \
      see_vector("writev", v, n > 0 ? (size_t)n : 0, false))                                                 \
    X(readv, ssize_t, (int fd, const struct iovec *v, int n), (fd, v, n),                                    \
      see_vector("readv", v, n > 0 ? (size_t)n : 0, true))                                                   \
    X(pwritev, ssize_t, (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at),                    \
      see_vector("pwritev", v, n > 0 ? (size_t)n : 0, false))                                                \
    X(pwritev64, ssize_t, (int fd, const struct iovec *v, int n, off64_t at), (fd, v, n, at),                \
      see_vector("pwritev", v, n > 0 ? (size_t)n : 0, false))                                                \
    X(preadv, ssize_t, (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at),                     \
      see_vector("preadv", v, n > 0 ? (size_t)n : 0, true))                                                  \
    X(preadv64, ssize_t, (int fd, const struct iovec *v, int n, off64_t at), (fd, v, n, at),                 \
      see_vector("preadv", v, n > 0 ? (size_t)n : 0, true))                                                  \
    X(send, ssize_t, (int fd, const void *p, size_t n, int flags), (fd, p, n, flags),                        \
      see("send", p, n, false))                                                                              \
    X(recv, ssize_t, (int fd, void *p, size_t n, int flags), (fd, p, n, flags), see("recv", p, n, true))     \
    X(__recv_chk, ssize_t, (int fd, void *p, size_t n, size_t room, int flags), (fd, p, n, room, flags),     \
      see("recv", p, n, true))                                                                               \
    X(sendto, ssize_t,                                                                                       \
      (int fd, const void *p, size_t n, int flags, const struct sockaddr *to, socklen_t n_to),               \
      (fd, p, n, flags, to, n_to), see("sendto", p, n, false))                                               \
    X(recvfrom, ssize_t, (int fd, void *p, size_t n, int flags, struct sockaddr *from, socklen_t *n_from),   \
      (fd, p, n, flags, from, n_from), see("recvfrom", p, n, true))                                          \
    X(sendmsg, ssize_t, (int fd, const struct msghdr *m, int flags), (fd, m, flags),                         \
      see_vector("sendmsg", m->msg_iov, m->msg_iovlen, false))                                               \
    X(recvmsg, ssize_t, (int fd, struct msghdr *m, int flags), (fd, m, flags),                               \
      see_vector("recvmsg", m->msg_iov, m->msg_iovlen, true))                                                \
    X(fwrite, size_t, (const void *p, size_t size, size_t n, FILE *f), (p, size, n, f),                      \
      see_items("fwrite", p, size, n, false))                                                                \
    X(fwrite_unlocked, size_t, (const void *p, size_t size, size_t n, FILE *f), (p, size, n, f),             \
      see_items("fwrite", p, size, n, false))                                                                \
    X(fread, size_t, (void *p, size_t size, size_t n, FILE *f), (p, size, n, f),                             \
      see_items("fread", p, size, n, true))                                                                  \
    X(fread_unlocked, size_t, (void *p, size_t size, size_t n, FILE *f), (p, size, n, f),                    \
      see_items("fread", p, size, n, true))                                                                  \
    X(__fread_chk, size_t, (void *p, size_t room, size_t size, size_t n, FILE *f), (p, room, size, n, f),    \
      see_items("fread", p, size, n, true))                                                                  \
    X(__fread_unlocked_chk, size_t, (void *p, size_t room, size_t size, size_t n, FILE *f),                  \
      (p, room, size, n, f), see_items("fread", p, size, n, true))

#define DEFINE(name, result, parameters, arguments, sees)                                                    \
    static result(*real_##name) parameters;                                                                  \
    static result my_##name parameters                                                                       \
    {                                                                                                        \
        sees;                                                                                                \
        return real_##name arguments;                                                                        \
    }
CALLS(DEFINE)
#undef DEFINE

static const struct exchange {
    const char *name;
    void *mine;
    void **real; /* function that the name stood for, which may be another library's */
} exchanges[] = {
#define ENTRY(name, result, parameters, arguments, sees) {#name, (void *)my_##name, (void **)&real_##name},
    CALLS(ENTRY)
#undef ENTRY
};

static const struct exchange *find(const char *name)
{
    for (size_t i = 0; i < sizeof exchanges / sizeof *exchanges; i++)
        if (!strcmp(exchanges[i].name, name))
            return &exchanges[i];
    return NULL;
}

/* ---- the tables of imported functions ---- */

struct object {
    uintptr_t base, relro, relro_end; /* relro: pages that the loader made read-only */
    const ElfW(Sym) * symbols;
    const char *names;
};

static void put(const struct object *o, void **slot, void *value)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), at = (uintptr_t)slot & ~(page - 1);
    bool closed = at >= o->relro && at < o->relro_end;
    if (closed && mprotect((void *)at, page, PROT_READ | PROT_WRITE))
        return;
    __atomic_store_n(slot, value, __ATOMIC_RELEASE);
    if (closed)
        mprotect((void *)at, page, PROT_READ);
}

static void exchange_all(const struct object *o, const ElfW(Rela) * r, size_t bytes, bool watch)
{
    for (const ElfW(Rela) *end = r + bytes / sizeof *r; r && r < end; r++) {
        int type = (int)ELF64_R_TYPE(r->r_info);
        const ElfW(Sym) *symbol = &o->symbols[ELF64_R_SYM(r->r_info)];
        if ((type != JUMP_SLOT && type != GLOB_DAT) || symbol->st_shndx != SHN_UNDEF)
            continue;
        const struct exchange *x = find(o->names + symbol->st_name);
        void **slot = (void **)(o->base + r->r_offset);
        if (x && watch && *x->real && *slot != x->mine)
            put(o, slot, x->mine);
        else if (x && !watch && *slot == x->mine)
            put(o, slot, *x->real);
    }
}

/* The loader has added the base to what it uses itself, but not in every object. */
static const void *address(uintptr_t base, uintptr_t at)
{
    return (const void *)(at < base ? base + at : at);
}

static int in_object(struct dl_phdr_info *info, size_t size, void *arg)
{
    const bool *watch = arg;
    const ElfW(Dyn) *d = NULL;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    struct object o = {.base = info->dlpi_addr};
    (void)size;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        if (p->p_type == PT_DYNAMIC)
            d = (const ElfW(Dyn) *)(o.base + p->p_vaddr);
        if (p->p_type == PT_GNU_RELRO) {
            o.relro = (o.base + p->p_vaddr) & ~(page - 1);
            o.relro_end = (o.base + p->p_vaddr + p->p_memsz) & ~(page - 1);
        }
    }
    const ElfW(Rela) * table[2] = {NULL, NULL}; /* relocations of calls, and of addresses */
    size_t bytes[2] = {0, 0};
    bool rela = true;
    for (; d && d->d_tag != DT_NULL; d++)
        switch (d->d_tag) {
        case DT_SYMTAB:
            o.symbols = address(o.base, d->d_un.d_ptr);
            break;
        case DT_STRTAB:
            o.names = address(o.base, d->d_un.d_ptr);
            break;
        case DT_JMPREL:
            table[0] = address(o.base, d->d_un.d_ptr);
            break;
        case DT_PLTRELSZ:
            bytes[0] = d->d_un.d_val;
            break;
        case DT_PLTREL:
            rela = d->d_un.d_val == DT_RELA;
            break;
        case DT_RELA:
            table[1] = address(o.base, d->d_un.d_ptr);
            break;
        case DT_RELASZ:
            bytes[1] = d->d_un.d_val;
            break;
        }
    for (int i = 0; i < 2 && rela && o.symbols && o.names; i++)
        exchange_all(&o, table[i], bytes[i], *watch);
    return 0;
}

void zr_guard_calls_watch(look_fn fn)
{
    bool watch = true;
    for (size_t i = 0; i < sizeof exchanges / sizeof *exchanges; i++)
        if (!*exchanges[i].real)
            *exchanges[i].real = dlsym(RTLD_DEFAULT, exchanges[i].name);
    atomic_store(&look, fn);
    dl_iterate_phdr(in_object, &watch);
}

void zr_guard_calls_forget(void)
{
    bool watch = false;
    dl_iterate_phdr(in_object, &watch);
    atomic_store(&look, NULL);
}
