/* SPDX-License-Identifier: Apache-2.0 */
/* meeting.h: what tests of the rendezvous do with it: ranks that meet and part, and sockets that speak to it
 * by hand. */
#ifndef ZR_TEST_COMM_MEETING_H
#define ZR_TEST_COMM_MEETING_H

#include "comm/meet/link.h"
#include "test/comm/ranks.h"

enum { LONG_MS = 30000, SHORT_MS = 1500 };

/* A loop of the rank's own, and what it meets the others by. */
struct meeting {
    uv_loop_t loop;
    /* NULL: it could not be opened */
    struct zr_rendezvous *r;
};

/* Returns what zr_rendezvous_open does; to be parted from in any case. */
int meet(struct meeting *m, const struct zr_world *w, int64_t timeout_ms);
/* Closes what is open; false when handles were left on the loop. */
bool part(struct meeting *m);

/* Meets, within LONG_MS or the int64_t that me->arg points to, notes how that went, and parts. */
void open_and_note(struct rank *me);

/* Everyone gives its rank. */
int exchange_ranks(struct meeting *m);

/* This host has meeting_host; else it is printed that it has not. */
bool can_meet(void);

/* Of meeting_host. */
union zr_address loopback(int port);
/* A socket that listens on a port that this process holds; -1: it cannot be had. */
int listen_at(int port);
/* A socket connected to it; -1: nobody listens there. */
int dial_once(int port);
/* The same, waiting (bounded) until somebody listens. */
int dial(int port);

/* A frame and its payload, terminated; false: there is none, or it is too large. */
bool read_frame(int fd, struct zr_frame *f, char *payload, size_t n_payload);
/* What rank 0 says first, into s. */
bool read_challenge(int fd, struct zr_shake *s);

struct spoken_hello {
    struct zr_frame frame;
    struct zr_hello hello;
};
/* What a rank of w's job answers to it. */
struct spoken_hello hello_of(const struct zr_world *w, struct zr_shake *s, int rank, int world);
/* Dials rank 0 of me's job and says hello; the socket, where rank 0's answer is still to be read; else -1. */
int greet(const struct rank *me, int rank, int world);

#endif
