/* SPDX-License-Identifier: Apache-2.0 */
/* meeting.h: helpers for tests of the rendezvous: ranks that meet and leave, and raw sockets that speak
 * its protocol. */
#ifndef ZR_TEST_COMM_MEETING_H
#define ZR_TEST_COMM_MEETING_H

#include "comm/meet/link.h"
#include "test/comm/ranks.h"

enum { LONG_MS = 30000, SHORT_MS = 1500 };

/* A loop of this rank, and its rendezvous. */
struct meeting {
    uv_loop_t loop;
    /* NULL: opening failed */
    struct zr_rendezvous *r;
};

/* Returns what zr_rendezvous_open returns. Call part() in any case. */
int meet(struct meeting *m, const struct zr_world *w, int64_t timeout_ms);
/* Closes what is open. Returns false if handles were left on the loop. */
bool part(struct meeting *m);

/* Meets within LONG_MS, or within the int64_t at me->arg; notes the result, and parts. */
void open_and_note(struct rank *me);

/* Exchanges the ranks' numbers and checks them. */
int exchange_ranks(struct meeting *m);

/* Returns whether this host has meeting_host. If not, prints that. */
bool can_meet(void);

/* meeting_host with this port. */
union zr_address loopback(int port);
/* Returns a socket that listens on a port held by this process, or -1 if it fails. */
int listen_at(int port);
/* Returns a socket connected to that port, or -1 if nobody listens there. */
int dial_once(int port);
/* Does the same, but waits a bounded time until somebody listens. */
int dial(int port);

/* Reads a frame and its payload, and terminates the payload. Returns false if there is none or it is too
 * large. */
bool read_frame(int fd, struct zr_frame *f, char *payload, size_t n_payload);
/* Reads rank 0's first message into s. */
bool read_challenge(int fd, struct zr_shake *s);

struct spoken_hello {
    struct zr_frame frame;
    struct zr_hello hello;
};
/* The answer of a rank of w's job to that message. */
struct spoken_hello hello_of(const struct zr_world *w, struct zr_shake *s, int rank, int world);
/* Dials rank 0 of me's job and says hello. Returns the socket, with rank 0's answer still unread, or -1. */
int greet(const struct rank *me, int rank, int world);

#endif
