/* SPDX-License-Identifier: Apache-2.0 */
/* memory_files.c: the file system of memory_files.h. */
#include "test/checkpoint/memory_files.h"
#include "test/kernels/random.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_OPEN 64
#define NAME     128

struct bytes {
    unsigned char *p;
    int64_t n, room;
};

struct write {
    int64_t at;
    struct bytes data;
};

struct entry {
    char name[NAME];
    int node;
};

struct change { /* in a folder: `to` is node (-1: removed); `from`, if set, is gone */
    char from[NAME], to[NAME];
    int node;
};

struct entries {
    struct entry *e;
    int n;
};

struct node {
    bool is_folder;
    struct bytes now, durable;
    struct write *writes; /* not synced */
    int n_writes;
    struct entries names, durable_names;
    struct change *changes; /* not synced */
    int n_changes;
};

struct walk {
    struct entries names;
    int at;
};

struct memory_files {
    struct zr_files table;
    pthread_mutex_t lock;
    struct node *nodes; /* 0: the root */
    int n_nodes;
    int fds[MAX_OPEN]; /* nodes; -1: free */
    bool direct_fds[MAX_OPEN], locked[MAX_OPEN];
    enum memory_direct direct;
    int64_t n_direct;
    int n_walks;
    int64_t calls, fault_at;
    enum memory_fault fault;
    bool always;
};

/* ---- pieces ---- */

static struct bytes copy_bytes(struct bytes b)
{
    struct bytes c = {malloc((size_t)b.n + 1), b.n, b.n};
    memcpy(c.p, b.p ? b.p : (unsigned char *)"", (size_t)b.n);
    return c;
}

static void put_bytes(struct bytes *b, const void *data, int64_t n, int64_t at)
{
    if (at + n > b->n) {
        if (at + n > b->room) { /* files are written byte by byte too */
            b->room = 2 * (at + n);
            b->p = realloc(b->p, (size_t)b->room);
        }
        memset(b->p + b->n, 0, (size_t)(at + n - b->n));
        b->n = at + n;
    }
    if (n)
        memcpy(b->p + at, data, (size_t)n);
}

static struct entries copy_entries(struct entries x)
{
    struct entries c = {malloc(((size_t)x.n + 1) * sizeof *c.e), x.n};
    if (x.n)
        memcpy(c.e, x.e, (size_t)x.n * sizeof *c.e);
    return c;
}

static int find_entry(const struct entries *x, const char *name)
{
    for (int i = 0; i < x->n; i++)
        if (!strcmp(x->e[i].name, name))
            return i;
    return -1;
}

static void set_entry(struct entries *x, const char *name, int node)
{
    int i = find_entry(x, name);
    if (node < 0) {
        if (i >= 0)
            x->e[i] = x->e[--x->n];
        return;
    }
    if (i < 0) {
        x->e = realloc(x->e, ((size_t)x->n + 1) * sizeof *x->e);
        i = x->n++;
        snprintf(x->e[i].name, NAME, "%s", name);
    }
    x->e[i].node = node;
}

static void apply_change(struct entries *x, const struct change *c)
{
    if (*c->from)
        set_entry(x, c->from, -1);
    set_entry(x, c->to, c->node);
}

static void change_names(struct node *folder, const char *from, const char *to, int node)
{
    struct change c = {.node = node};
    snprintf(c.from, NAME, "%s", from);
    snprintf(c.to, NAME, "%s", to);
    folder->changes = realloc(folder->changes, ((size_t)folder->n_changes + 1) * sizeof c);
    folder->changes[folder->n_changes++] = c;
    apply_change(&folder->names, &c);
}

static void forget(struct node *n)
{
    for (int i = 0; i < n->n_writes; i++)
        free(n->writes[i].data.p);
    n->n_writes = n->n_changes = 0;
}

static void free_node(struct node *n)
{
    forget(n);
    free(n->writes);
    free(n->changes);
    free(n->now.p);
    free(n->durable.p);
    free(n->names.e);
    free(n->durable_names.e);
}

static int new_node(struct memory_files *m, bool is_folder)
{
    m->nodes = realloc(m->nodes, ((size_t)m->n_nodes + 1) * sizeof *m->nodes);
    m->nodes[m->n_nodes] = (struct node){.is_folder = is_folder};
    return m->n_nodes++;
}

/* Finds the folder of path, and the name in it. Paths begin at the root, with or without a slash. */
static int find_parent(struct memory_files *m, const char *path, char name[NAME])
{
    int at = 0;
    while (*path == '/')
        path++;
    for (;;) {
        size_t n = strcspn(path, "/");
        snprintf(name, NAME, "%.*s", (int)n, path);
        path += n;
        while (*path == '/')
            path++;
        if (!*path)
            return at;
        int i = strcmp(name, ".") ? find_entry(&m->nodes[at].names, name) : -2;
        at = i == -2 ? at : i >= 0 ? m->nodes[at].names.e[i].node : -1;
        if (at < 0)
            return -ENOENT;
        if (!m->nodes[at].is_folder)
            return -ENOTDIR;
    }
}

static int find_node(struct memory_files *m, const char *path)
{
    char name[NAME];
    int parent = find_parent(m, path, name);
    if (parent < 0)
        return parent;
    if (!*name || !strcmp(name, "."))
        return parent;
    int i = find_entry(&m->nodes[parent].names, name);
    return i < 0 ? -ENOENT : m->nodes[parent].names.e[i].node;
}

/* ---- faults ---- */

/* Takes the lock. Returns 0, a negative errno to return at once (the lock is released), or 1 for a short
 * transfer. */
static int enter(struct memory_files *m, bool transfers)
{
    pthread_mutex_lock(&m->lock);
    m->calls++;
    int result = 0;
    if (m->fault != FAULT_NONE &&
        (m->calls == m->fault_at || (m->calls > m->fault_at && (m->always || m->fault == FAULT_DEAD))))
        result = m->fault == FAULT_ENOSPC  ? -ENOSPC
                 : m->fault == FAULT_EINTR ? -EINTR
                 : m->fault == FAULT_SHORT ? transfers
                                           : -EIO;
    if (result < 0)
        pthread_mutex_unlock(&m->lock);
    return result;
}

static int leave(struct memory_files *m, int result)
{
    pthread_mutex_unlock(&m->lock);
    return result;
}

/* ---- the function table ---- */

static int do_open(void *arg, const char *path, int flags, unsigned mode)
{
    struct memory_files *m = arg;
    char name[NAME];
    (void)mode;
    int err = enter(m, false);
    if (err < 0)
        return err;
    int node = find_node(m, path);
    if (node == -ENOENT && flags & O_CREAT) {
        int parent = find_parent(m, path, name);
        if (parent < 0)
            return leave(m, parent);
        node = new_node(m, false);
        change_names(&m->nodes[parent], "", name, node);
    } else if (node >= 0 && flags & O_EXCL) {
        return leave(m, -EEXIST);
    }
    if (node < 0)
        return leave(m, node);
    if (flags & O_DIRECT && m->direct == DIRECT_NOT_OPENED)
        return leave(m, -EINVAL);
    if (flags & O_TRUNC)
        m->nodes[node].now.n = 0;
    for (int fd = 0; fd < MAX_OPEN; fd++)
        if (m->fds[fd] < 0) {
            m->fds[fd] = node;
            m->direct_fds[fd] = flags & O_DIRECT;
            m->locked[fd] = false;
            return leave(m, fd);
        }
    return leave(m, -EMFILE);
}

static bool is_refused(struct memory_files *m, int fd, const void *buf, size_t n, int64_t at)
{
    if (!m->direct_fds[fd])
        return false;
    bool refused = m->direct != DIRECT_WORKS || (uintptr_t)buf % ZR_DIRECT_ALIGN || n % ZR_DIRECT_ALIGN ||
                   at % ZR_DIRECT_ALIGN;
    m->n_direct += !refused;
    return refused;
}

static int64_t do_pread(void *arg, int fd, void *buf, size_t n, int64_t at)
{
    struct memory_files *m = arg;
    int err = enter(m, true);
    if (err < 0)
        return err;
    if (is_refused(m, fd, buf, n, at))
        return leave(m, -EINVAL);
    const struct bytes *b = &m->nodes[m->fds[fd]].now;
    int64_t left = b->n > at ? b->n - at : 0, k = (int64_t)n < left ? (int64_t)n : left;
    if (err && k > 1)
        k = 1;
    if (k)
        memcpy(buf, b->p + at, (size_t)k);
    leave(m, 0);
    return k;
}

static void write_node(struct node *node, const void *data, int64_t n, int64_t at)
{
    put_bytes(&node->now, data, n, at);
    if ((node->n_writes & (node->n_writes - 1)) == 0) /* full at every power of two */
        node->writes = realloc(node->writes, ((size_t)node->n_writes * 2 + 1) * sizeof *node->writes);
    struct bytes written = {.p = (unsigned char *)(uintptr_t)data, .n = n};
    node->writes[node->n_writes++] = (struct write){at, copy_bytes(written)};
}

static int64_t do_pwrite(void *arg, int fd, const void *buf, size_t n, int64_t at)
{
    struct memory_files *m = arg;
    int err = enter(m, true);
    if (err < 0)
        return err;
    if (is_refused(m, fd, buf, n, at))
        return leave(m, -EINVAL);
    if (err && n > 1)
        n = 1;
    write_node(&m->nodes[m->fds[fd]], buf, (int64_t)n, at);
    leave(m, 0);
    return (int64_t)n;
}

/* Only the last byte is written. Like any write it may be lost, and the length with it. */
static int do_allocate(void *arg, int fd, int64_t bytes)
{
    struct memory_files *m = arg;
    int err = enter(m, false);
    if (err < 0)
        return err;
    struct node *node = &m->nodes[m->fds[fd]];
    if (bytes > node->now.n)
        write_node(node, "", 1, bytes - 1);
    return leave(m, 0);
}

static int do_fsync(void *arg, int fd)
{
    struct memory_files *m = arg;
    int err = enter(m, false);
    if (err < 0)
        return err;
    struct node *node = &m->nodes[m->fds[fd]];
    free(node->durable.p);
    free(node->durable_names.e);
    node->durable = copy_bytes(node->now);
    node->durable_names = copy_entries(node->names);
    forget(node);
    return leave(m, 0);
}

static int do_close(void *arg, int fd)
{
    struct memory_files *m = arg;
    /* The descriptor is closed even on an error, as on Linux. */
    pthread_mutex_lock(&m->lock);
    m->fds[fd] = -1;
    pthread_mutex_unlock(&m->lock);
    int err = enter(m, false);
    return err < 0 ? err : leave(m, 0);
}

static int64_t do_size(void *arg, int fd)
{
    struct memory_files *m = arg;
    int err = enter(m, false);
    if (err < 0)
        return err;
    const struct node *n = &m->nodes[m->fds[fd]];
    int64_t size = n->is_folder ? -EISDIR : n->now.n;
    leave(m, 0);
    return size;
}

static int do_rename(void *arg, const char *from, const char *to)
{
    struct memory_files *m = arg;
    char a[NAME], b[NAME];
    int err = enter(m, false);
    if (err < 0)
        return err;
    int node = find_node(m, from), parent = find_parent(m, from, a);
    if (node < 0)
        return leave(m, node);
    if (find_parent(m, to, b) != parent)
        return leave(m, -EXDEV); /* no test does that */
    int old = find_entry(&m->nodes[parent].names, b);
    if (old >= 0 && m->nodes[m->nodes[parent].names.e[old].node].is_folder)
        return leave(m, -ENOTEMPTY);
    change_names(&m->nodes[parent], a, b, node);
    return leave(m, 0);
}

static int do_mkdir(void *arg, const char *path, unsigned mode)
{
    struct memory_files *m = arg;
    char name[NAME];
    (void)mode;
    int err = enter(m, false);
    if (err < 0)
        return err;
    int parent = find_parent(m, path, name);
    if (parent < 0)
        return leave(m, parent);
    if (find_node(m, path) >= 0)
        return leave(m, -EEXIST);
    int node = new_node(m, true);
    change_names(&m->nodes[parent], "", name, node);
    return leave(m, 0);
}

static int remove_name(void *arg, const char *path, bool folder)
{
    struct memory_files *m = arg;
    char name[NAME];
    int err = enter(m, false);
    if (err < 0)
        return err;
    int node = find_node(m, path);
    if (node < 0)
        return leave(m, node);
    if (m->nodes[node].is_folder != folder)
        return leave(m, folder ? -ENOTDIR : -EISDIR);
    if (m->nodes[node].names.n)
        return leave(m, -ENOTEMPTY);
    int parent = find_parent(m, path, name);
    change_names(&m->nodes[parent], "", name, -1);
    return leave(m, 0);
}

static int do_unlink(void *arg, const char *path)
{
    return remove_name(arg, path, false);
}

static int do_rmdir(void *arg, const char *path)
{
    return remove_name(arg, path, true);
}

static int do_opendir(void *arg, const char *path, void **out)
{
    struct memory_files *m = arg;
    int err = enter(m, false);
    if (err < 0)
        return err;
    int node = find_node(m, path);
    if (node < 0)
        return leave(m, node);
    if (!m->nodes[node].is_folder)
        return leave(m, -ENOTDIR);
    struct walk *w = calloc(1, sizeof *w);
    w->names = copy_entries(m->nodes[node].names);
    *out = w;
    m->n_walks++;
    return leave(m, 0);
}

static int do_readdir(void *arg, void *dir, char *name, size_t name_bytes)
{
    struct memory_files *m = arg;
    struct walk *w = dir;
    int err = enter(m, false);
    if (err < 0)
        return err;
    if (w->at == w->names.n)
        return leave(m, 0);
    snprintf(name, name_bytes, "%s", w->names.e[w->at++].name);
    return leave(m, 1);
}

static int do_closedir(void *arg, void *dir)
{
    struct memory_files *m = arg;
    struct walk *w = dir;
    free(w->names.e);
    free(w);
    pthread_mutex_lock(&m->lock);
    m->n_walks--;
    pthread_mutex_unlock(&m->lock);
    int err = enter(m, false);
    return err < 0 ? err : leave(m, 0);
}

static int do_lock(void *arg, int fd)
{
    struct memory_files *m = arg;
    int err = enter(m, false);
    if (err < 0)
        return err;
    for (int other = 0; other < MAX_OPEN; other++)
        if (other != fd && m->fds[other] == m->fds[fd] && m->locked[other])
            return leave(m, -EAGAIN);
    m->locked[fd] = true;
    return leave(m, 0);
}

static int do_is_at(void *arg, int fd, const char *path)
{
    struct memory_files *m = arg;
    int err = enter(m, false);
    return err < 0 ? err : leave(m, find_node(m, path) == m->fds[fd]);
}

static int do_absolute(void *arg, const char *path, char *out, size_t out_bytes)
{
    struct memory_files *m = arg;
    int err = enter(m, false);
    if (err < 0)
        return err;
    int n = snprintf(out, out_bytes, "%s", path); /* all paths begin at the root */
    return leave(m, (size_t)n < out_bytes ? 0 : -ENAMETOOLONG);
}

/* ---- for tests ---- */

struct memory_files *memory_files_open(void)
{
    struct memory_files *m = calloc(1, sizeof *m);
    m->table = (struct zr_files){.open = do_open,
                                 .pread = do_pread,
                                 .pwrite = do_pwrite,
                                 .fsync = do_fsync,
                                 .allocate = do_allocate,
                                 .close = do_close,
                                 .size = do_size,
                                 .rename = do_rename,
                                 .mkdir = do_mkdir,
                                 .unlink = do_unlink,
                                 .rmdir = do_rmdir,
                                 .opendir = do_opendir,
                                 .readdir = do_readdir,
                                 .closedir = do_closedir,
                                 .lock = do_lock,
                                 .is_at = do_is_at,
                                 .absolute = do_absolute,
                                 .arg = m};
    pthread_mutex_init(&m->lock, NULL);
    memset(m->fds, 0xff, sizeof m->fds);
    new_node(m, true);
    return m;
}

void memory_files_close(struct memory_files *m)
{
    for (int i = 0; i < m->n_nodes; i++)
        free_node(&m->nodes[i]);
    free(m->nodes);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

const struct zr_files *memory_files_table(struct memory_files *m)
{
    return &m->table;
}

struct memory_files *memory_files_crash(struct memory_files *m, uint64_t seed)
{
    struct memory_files *c = memory_files_open();
    c->nodes = realloc(c->nodes, (size_t)m->n_nodes * sizeof *c->nodes);
    /* With random bits alone, everything or nothing would seldom stay. Both are likely in reality. */
    uint64_t s = seed, keep = seed % 8 == 0 ? 0 : seed % 8 == 1 ? 100 : 20 + random_next(&s) % 60;
    for (int i = 0; i < m->n_nodes; i++) {
        const struct node *n = &m->nodes[i];
        struct bytes data = copy_bytes(n->durable);
        struct entries names = copy_entries(n->durable_names);
        for (int k = 0; k < n->n_writes; k++)
            if (random_next(&s) % 100 < keep) {
                int64_t whole = n->writes[k].data.n,
                        part = random_next(&s) % 4 && keep < 100
                                   ? whole
                                   : 1 + (int64_t)(random_next(&s) % (uint64_t)whole);
                put_bytes(&data, n->writes[k].data.p, keep == 100 ? whole : part, n->writes[k].at);
            }
        for (int k = 0; k < n->n_changes; k++)
            if (random_next(&s) % 100 < keep)
                apply_change(&names, &n->changes[k]);
        c->nodes[i] = (struct node){.is_folder = n->is_folder,
                                    .now = data,
                                    .durable = copy_bytes(data),
                                    .names = names,
                                    .durable_names = copy_entries(names)};
    }
    c->n_nodes = m->n_nodes;
    return c;
}

void memory_files_fault(struct memory_files *m, enum memory_fault fault, int64_t at, bool always)
{
    pthread_mutex_lock(&m->lock);
    m->fault = fault;
    m->fault_at = at;
    m->always = always;
    m->calls = 0;
    pthread_mutex_unlock(&m->lock);
}

void memory_files_direct(struct memory_files *m, enum memory_direct direct)
{
    m->direct = direct;
}

int64_t memory_files_n_direct(const struct memory_files *m)
{
    return m->n_direct;
}

int64_t memory_files_calls(const struct memory_files *m)
{
    return m->calls;
}

int memory_files_n_open(const struct memory_files *m)
{
    int n = m->n_walks;
    for (int i = 0; i < MAX_OPEN; i++)
        n += m->fds[i] >= 0 && !m->locked[i];
    return n;
}

unsigned char *memory_files_content(struct memory_files *m, const char *path, int64_t **size)
{
    int node = find_node(m, path);
    if (node < 0 || m->nodes[node].is_folder)
        return NULL;
    *size = &m->nodes[node].now.n;
    return m->nodes[node].now.p;
}

bool memory_files_flip(struct memory_files *m, const char *path, int64_t n_behind, unsigned char bits)
{
    int64_t *n;
    pthread_mutex_lock(&m->lock);
    unsigned char *p = memory_files_content(m, path, &n);
    bool there = p && *n > n_behind;
    if (there)
        p[*n - 1 - n_behind] ^= bits;
    pthread_mutex_unlock(&m->lock);
    return there;
}

void memory_files_put(struct memory_files *m, const char *path, const void *data, int64_t n)
{
    int fd = do_open(m, path, O_CREAT | O_TRUNC | O_WRONLY, 0);
    do_pwrite(m, fd, data, (size_t)n, 0);
    do_fsync(m, fd);
    do_close(m, fd);
}
