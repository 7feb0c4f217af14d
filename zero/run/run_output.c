/* SPDX-License-Identifier: Apache-2.0 */
/* run_output.c: forwards the output of ranks to our own descriptors, in whole lines.
 *
 * If a sink holds more than SINK_FULL bytes, its streams are not read. Their pipes fill, and the ranks wait
 * in write() as they would without zero-run. Nothing is dropped while somebody reads. */
#include "zero/run/run.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define READ_BYTES (64 << 10)
#define SINK_FULL  (1 << 20) /* bytes that wait; the lines of one read may come on top */
#define LINE_MAX_  (1 << 20) /* bytes; a longer line is split into lines of this size */

/* Makes room for n more bytes. */
static bool reserve(char **data, size_t used, size_t *cap, size_t n)
{
    if (*cap - used >= n)
        return true;
    size_t want = *cap ? *cap : 4096;
    while (want - used < n)
        want *= 2;
    char *grown = realloc(*data, want);
    if (!grown)
        return false;
    *data = grown;
    *cap = want;
    return true;
}

/* Runs on a worker thread. Other processes that share the descriptor may have made it non-blocking. */
static void write_all(uv_work_t *work)
{
    struct zr_sink *s = work->data;
    size_t done = 0;
    s->result = 0;
    while (done < s->writing.n && !s->result) {
        ssize_t n = write(s->fd, s->writing.data + done, s->writing.n - done);
        if (n >= 0)
            done += (size_t)n;
        else if (errno == EAGAIN)
            poll(&(struct pollfd){.fd = s->fd, .events = POLLOUT}, 1, -1);
        else if (errno != EINTR)
            s->result = errno;
    }
}

static void write_next(struct zr_sink *s);

static void sink_fail(struct zr_sink *s, int error)
{
    if (!s->error)
        s->error = error;
    s->filling.n = 0;
}

static void written(uv_work_t *work, int status)
{
    struct zr_sink *s = work->data;
    (void)status; /* never cancelled */
    s->busy = false;
    s->writing.n = 0;
    if (s->result)
        sink_fail(s, s->result);
    write_next(s);
    s->on_written(s);
}

static void write_next(struct zr_sink *s)
{
    if (s->busy || s->filling.n == 0)
        return;
    struct zr_sink_buffer empty = s->writing;
    s->writing = s->filling;
    s->filling = empty;
    s->busy = true;
    int err = uv_queue_work(s->loop, &s->work, write_all, written);
    if (err) { /* libuv reports one only for a NULL function */
        s->busy = false;
        sink_fail(s, -err);
    }
}

void zr_sink_init(struct zr_sink *s, uv_loop_t *loop, int fd, void (*on_written)(struct zr_sink *), void *arg)
{
    *s = (struct zr_sink){.loop = loop, .fd = fd, .on_written = on_written, .arg = arg};
    s->work.data = s;
}

/* Only queues text. The caller calls write_next after whole lines. */
static void sink_append(struct zr_sink *s, const char *text, size_t n)
{
    if (s->error || n == 0)
        return;
    if (!reserve(&s->filling.data, s->filling.n, &s->filling.cap, n)) {
        sink_fail(s, ENOMEM);
        return;
    }
    memcpy(s->filling.data + s->filling.n, text, n);
    s->filling.n += n;
}

void zr_sink_put(struct zr_sink *s, const char *text, size_t n)
{
    sink_append(s, text, n);
    write_next(s);
}

bool zr_sink_full(const struct zr_sink *s)
{
    return !s->error && s->filling.n + s->writing.n > SINK_FULL;
}

bool zr_sink_idle(const struct zr_sink *s)
{
    return !s->busy && s->filling.n == 0;
}

/* Puts the unfinished line, then text, then a newline. */
static void put_line(struct zr_rank_output *l, const char *text, size_t n)
{
    sink_append(l->sink, l->prefix, strlen(l->prefix));
    sink_append(l->sink, l->partial, l->n_partial);
    sink_append(l->sink, text, n);
    sink_append(l->sink, "\n", 1);
    l->n_partial = 0;
}

/* Appends to the unfinished line. */
static void keep_partial(struct zr_rank_output *l, const char *text, size_t n)
{
    if (n == 0)
        return;
    if (l->n_partial + n > LINE_MAX_) {
        put_line(l, text, n);
    } else if (!reserve(&l->partial, l->n_partial, &l->cap_partial, n)) {
        sink_fail(l->sink, ENOMEM);
    } else {
        memcpy(l->partial + l->n_partial, text, n);
        l->n_partial += n;
    }
}

static void closed(uv_handle_t *h)
{
    struct zr_rank_output *l = h->data;
    close(l->fd);
    free(l->partial);
    l->partial = NULL;
    l->on_end(l);
}

void zr_rank_output_close(struct zr_rank_output *l)
{
    if (!l->open)
        return;
    if (l->n_partial > 0)
        put_line(l, "", 0);
    write_next(l->sink);
    l->open = l->reading = false;
    uv_close((uv_handle_t *)&l->poll, closed);
}

/* Takes bytes that were read: puts whole lines, and keeps the rest. */
static void take(struct zr_rank_output *l, const char *at, size_t n)
{
    const char *end = at + n, *newline;
    while ((newline = memchr(at, '\n', (size_t)(end - at)))) {
        put_line(l, at, (size_t)(newline - at));
        at = newline + 1;
    }
    keep_partial(l, at, (size_t)(end - at));
}

/* Reads without a stream of libuv, which takes a terminal that hung up for empty after one read. */
static void on_readable(uv_poll_t *poll, int status, int events)
{
    static char bytes[READ_BYTES]; /* for all streams, because each call uses up what it reads */
    struct zr_rank_output *l = poll->data;
    (void)events;
    ssize_t n = read(l->fd, bytes, sizeof bytes);
    if (n > 0) {
        take(l, bytes, (size_t)n);
    } else if (n == 0 || status || (errno != EAGAIN && errno != EINTR)) {
        zr_rank_output_close(l); /* the end of the file, which a terminal reports as EIO */
    }
    write_next(l->sink);
    if (l->sink->error && zr_sink_idle(l->sink))
        l->sink->on_written(l->sink); /* memory ran out, which the owner must learn */
    zr_rank_output_update(l);
}

void zr_rank_output_update(struct zr_rank_output *l)
{
    bool want = l->open && !zr_sink_full(l->sink);
    if (want && !l->reading)
        l->reading = uv_poll_start(&l->poll, UV_READABLE, on_readable) == 0;
    else if (!want && l->reading) {
        uv_poll_stop(&l->poll);
        l->reading = false;
    }
}

int zr_rank_output_open(struct zr_rank_output *l, uv_loop_t *loop, uv_file fd, int rank, struct zr_sink *sink,
                        void (*on_end)(struct zr_rank_output *), void *arg)
{
    *l = (struct zr_rank_output){.fd = fd, .sink = sink, .on_end = on_end, .arg = arg};
    snprintf(l->prefix, sizeof l->prefix, "[%d] ", rank);
    int err = uv_poll_init(loop, &l->poll, fd);
    if (err)
        return err;
    l->poll.data = l;
    l->open = true;
    zr_rank_output_update(l);
    return 0;
}
