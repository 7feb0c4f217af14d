/* SPDX-License-Identifier: Apache-2.0 */
/* frame.h: what travels between ranks before any communicator exists: a head of fixed size and a payload. A
 * reader cuts a stream of bytes into frames again.
 *
 * No sender is trusted to say how much memory a frame needs. The reader sets how large a payload may be:
 * small for a connection that has not proved to be a rank's, and for a rank what the exchange under way
 * needs. */
#ifndef ZR_COMM_FRAME_H
#define ZR_COMM_FRAME_H

#include <stddef.h>
#include <stdint.h>

enum {
    /* the word "zero" in little-endian bytes */
    ZR_FRAME_MAGIC = 0x6f72657a,
    ZR_FRAME_VERSION = 8,
    /* the longest message that travels */
    ZR_FRAME_TEXT_BYTES = 1024,
    /* the most that a payload may have before both sides know each other */
    ZR_FRAME_SHAKE_BYTES = 2048,
    /* the most that it may have after that, where nothing larger is expected */
    ZR_FRAME_SMALL_BYTES = 64 * 1024,
};

enum zr_frame_type {
    /* 0 -> whoever connects: prove that you belong to this job; payload: rank 0's nonce */
    ZR_FRAME_CHALLENGE = 1,
    /* rank -> 0: here I am; about: the attempt, payload: struct zr_hello */
    ZR_FRAME_HELLO,
    /* 0 -> rank: you are one of us; payload: rank 0's proof */
    ZR_FRAME_ACCEPT,
    /* 0 -> rank: everyone is here */
    ZR_FRAME_READY,
    /* 0 -> rank: you are not; about: the code, payload: rank 0's proof and the message. An unidentified
     * connection gets no payload */
    ZR_FRAME_REFUSE,
    /* 0 -> rank: try again; you are of this job, but rank 0 waits with another name. payload: rank 0's proof,
     * and which ranks wait with which name */
    ZR_FRAME_AGAIN,
    /* rank -> 0: my blob of an exchange */
    ZR_FRAME_GIVE,
    /* 0 -> rank: everyone's, in rank order */
    ZR_FRAME_ALL,
    /* what we were doing failed; about: the code, payload: the message */
    ZR_FRAME_FAIL,
    /* 0 -> rank: about: the rank that was lost, payload: how */
    ZR_FRAME_LOST,
    /* the sender leaves on purpose */
    ZR_FRAME_GOODBYE,
    /* the sender's process ends with its context open; about: the code of a failure that it had before,
     * payload: its message; 0: it had none */
    ZR_FRAME_EXIT,
    /* 0 -> rank: send your program's latest calls */
    ZR_FRAME_ASK_CALLS,
    /* rank -> 0: here they are; payload: struct zr_called_copy. If about is not 0, the sender asks for a
     * comparison of all ranks: about is the code of what it met, and the message stands behind the calls */
    ZR_FRAME_CALLS,
    /* 0 <-> rank: a message of whoever uses the rendezvous; about: the rank it is for, -1: all */
    ZR_FRAME_MESSAGE,
    /* both ways of a link between hosts: the sender is there; payload: its program's last call, a text, if it
     * is known */
    ZR_FRAME_BEAT,
    /* rank -> 0: how it went here; 0 -> rank: the result for all. about: the code, payload: the rank that
     * failed (int32_t) and its message */
    ZR_FRAME_VERDICT
};

/* Before every payload, in the sender's byte order: magic shows a sender of the other order. */
struct zr_frame {
    uint32_t magic;
    uint16_t version, type;
    /* of the payload after it */
    uint32_t n_bytes;
    int32_t rank, world;
    int32_t about;
};

/* A frame that is being read. All zero but most_bytes: nothing has come yet. */
struct zr_frame_reader {
    struct zr_frame head;
    /* (head.n_bytes), and a 0 after them; NULL: there is none */
    char *payload;
    /* bytes of head and payload so far */
    size_t n_in;
    /* the most that a payload may have */
    uint32_t most_bytes;
};

enum zr_frame_state {
    ZR_FRAME_UNFINISHED,
    /* head and payload are there: use them, then zr_frame_next */
    ZR_FRAME_WHOLE,
    /* this is another protocol */
    ZR_FRAME_STRANGE,
    /* the head is there and claims more than most_bytes: the owner gives up, or raises most_bytes and calls
     * zr_frame_took with 0 */
    ZR_FRAME_LARGE,
    ZR_FRAME_NO_MEMORY
};

/* Returns where the next bytes go, and how many at most (never 0 while UNFINISHED). */
char *zr_frame_room(struct zr_frame_reader *r, size_t *n);
/* n bytes were put there. Returns what the frame is now. */
enum zr_frame_state zr_frame_took(struct zr_frame_reader *r, size_t n);
/* Frees the payload, if it is still there, and begins the next frame. */
void zr_frame_next(struct zr_frame_reader *r);

#endif
