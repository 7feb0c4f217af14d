/* SPDX-License-Identifier: Apache-2.0 */
/* hub_file.c: ranks that meet by a file (meeting_file.h): rank 0 listens at a free port and writes the file,
 * the others read it again and again until it leads them to rank 0. If a file of its job is there already,
 * rank 0 first goes where that leads. It replaces the file only if no other rank 0 of this job answers,
 * because two jobs would take each other's ranks. What is at an address that an old file names may be
 * anything. If it refuses a rank, that is no reason to give up, because rank 0 may be about to write another
 * file. */
#include "comm/meet/hub.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

void zr_hub_listen_for_file(struct zr_rendezvous *r)
{
    zr_address_parse(r->w.key.n_bytes ? "::" : "127.0.0.1", 0, &r->to[0]);
    r->n_to = 1;
    if (r->w.key.n_bytes && r->w.interface[0]) { /* one address, for two may not have one free port */
        struct zr_interfaces mine;
        int err = zr_interfaces_find("interface", r->w.interface, &mine);
        if (err) {
            zr_hub_fail(r, err, "rank 0: %s", zr_error_text());
            return;
        }
        r->to[0] = mine.of[0].address;
    }
    zr_hub_listen(r);
}

/* Returns whether a file of this job is there, and this rank 0 tries to reach the one that wrote it. If not,
 * may_replace says whether there is a file that leads nowhere. */
static bool goes_to_first(struct zr_rendezvous *r, bool *may_replace)
{
    char why[ZR_MEETING_WHY_CHARS];
    int found = zr_meeting_file_read(&r->w, &r->file, why);
    *may_replace = found != ZR_MEETING_FILE_ABSENT;
    if (found)
        return false;
    r->n_to = r->file.n;
    r->to_now = 0;
    memcpy(r->to, r->file.at, sizeof r->to);
    if (!r->w.key.n_bytes && !zr_address_is_loopback(&r->to[0]))
        return false; /* without a key this rank would not have met anybody there either */
    zr_hub_connect(r);
    return true;
}

void zr_hub_no_first(struct zr_rendezvous *r)
{
    (void)zr_meeting_file_remove(&r->w, &r->file);
    r->worst = ZR_TROUBLE_NONE; /* what went wrong there is no reason why others do not come */
    r->trouble[0] = r->trouble_before[0] = 0;
    zr_hub_write_file(r);
}

static void write_later(uv_timer_t *t)
{
    zr_hub_write_file(t->data);
}

void zr_hub_write_file_later(struct zr_rendezvous *r)
{
    if (!r->code && !r->closing)
        uv_timer_start(&r->retry, write_later, (uint64_t)zr_hub_again_ms(r), 0);
}

void zr_hub_write_file(struct zr_rendezvous *r)
{
    union zr_address bound;
    bool may_replace;
    /* It may be ready without: another context of this process has handed all others over. */
    if (r->ready || r->code || goes_to_first(r, &may_replace))
        return;
    int n = sizeof bound, err = uv_tcp_getsockname(&r->listener[0].tcp, &bound.any, &n);
    if (err) {
        zr_hub_fail(r, ZR_ERR_SYSTEM, "rank 0: its port is not known: %s", uv_strerror(err));
        return;
    }
    r->w.port = zr_address_port(&bound);
    zr_meeting_file_begin(&r->w, &r->file);
    r->file.n = zr_hub_reachable_at(&bound, r->file.at);
    err = zr_meeting_file_write(&r->w, &r->file, may_replace);
    r->has_written = !err;
    if (err == ZR_MEETING_FILE_TAKEN) {
        zr_hub_write_file_later(r);
    } else if (err) {
        zr_hub_fail(r, err, "rank 0: %s", zr_error_text());
        zr_hub_stop_listening(r);
    }
}

void zr_hub_remove_file(struct zr_rendezvous *r)
{
    if (r->has_written)
        (void)zr_meeting_file_remove(&r->w, &r->file);
    r->has_written = false;
}

bool zr_hub_read_file(struct zr_rendezvous *r)
{
    char why[ZR_MEETING_WHY_CHARS];
    r->n_to = 0;
    if (zr_meeting_file_read(&r->w, &r->file, why)) {
        zr_hub_note(r, ZR_TROUBLE_NOBODY, "%s", why);
        return false;
    }
    r->n_to = r->file.n;
    memcpy(r->to, r->file.at, sizeof r->to);
    return true;
}

/* A name does not decide where a rank is, but it says enough of why loopback does not lead to rank 0. */
static bool is_elsewhere(const struct zr_meeting_file *f)
{
    char host[sizeof f->host] = "";
    return gethostname(host, sizeof host - 1) == 0 && strcmp(host, f->host) != 0;
}

void zr_hub_say_file(const struct zr_rendezvous *r, char text[ZR_PLACE_CHARS])
{
    char path[ZR_MEETING_PATH_CHARS], at[ZR_ADDRESS_CHARS];
    zr_meeting_file_path(&r->w, path);
    int n = snprintf(text, ZR_PLACE_CHARS, "file://%.240s", path);
    if (!r->file.n)
        return;
    zr_address_print(&r->file.at[0], at);
    n += snprintf(text + n, (size_t)(ZR_PLACE_CHARS - n), " (\"%s\": %s%s)", r->file.host, at,
                  r->file.n > 1 ? ", ..." : "");
    if (r->w.rank == 0 && r->has_written && !zr_meeting_file_is_there(&r->w, &r->file))
        snprintf(text + n, (size_t)(ZR_PLACE_CHARS - n), ", which was removed or replaced meanwhile");
    else if (r->w.rank != 0 && !r->w.key.n_bytes && is_elsewhere(&r->file))
        snprintf(text + n, (size_t)(ZR_PLACE_CHARS - n),
                 "; without a key ranks meet on one host only: set ZERO_JOB_KEY");
}
