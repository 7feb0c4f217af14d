/* SPDX-License-Identifier: Apache-2.0 */
/* frame.h: the frames that ranks exchange before any communicator exists: a head of fixed size and a payload.
 * A reader cuts a stream of bytes into frames.
 *
 * A sender does not decide how much memory a frame needs. The reader limits the payload. The limit is small
 * for a connection that has not proved to be a rank's. For a rank it is what the current exchange needs. */
#ifndef ZR_COMM_FRAME_H
#define ZR_COMM_FRAME_H

#include <stddef.h>
#include <stdint.h>

enum {
    /* The word "zero" in little-endian bytes. */
    ZR_FRAME_MAGIC = 0x6f72657a,
    ZR_FRAME_VERSION = 9,
    /* Bytes of the longest message that is sent. */
    ZR_FRAME_TEXT_BYTES = 1024,
    /* Most bytes of a payload before both sides know each other. */
    ZR_FRAME_SHAKE_BYTES = 2048,
    /* Most bytes of a payload after that, unless a larger one is expected. */
    ZR_FRAME_SMALL_BYTES = 64 * 1024,
};

enum zr_frame_type {
    /* 0 -> a new connection: prove that you belong to this job. Payload: rank 0's nonce. */
    ZR_FRAME_CHALLENGE = 1,
    /* Rank -> 0: I am here. About: the attempt. Payload: struct zr_hello. */
    ZR_FRAME_HELLO,
    /* 0 -> rank: you are accepted. Payload: rank 0's proof. */
    ZR_FRAME_ACCEPT,
    /* 0 -> rank: all ranks are here. */
    ZR_FRAME_READY,
    /* 0 -> rank: you are refused. About: the code. Payload: rank 0's proof and the message. An unidentified
     * connection gets no payload. */
    ZR_FRAME_REFUSE,
    /* 0 -> rank: try again; you belong to this job, but rank 0 waits with another name. Payload: rank 0's
     * proof, and which ranks wait with which name. */
    ZR_FRAME_AGAIN,
    /* Rank -> 0: my part of an exchange. */
    ZR_FRAME_GIVE,
    /* 0 -> rank: the parts of all ranks, in rank order. */
    ZR_FRAME_ALL,
    /* The current step failed. About: the code. Payload: the message. */
    ZR_FRAME_FAIL,
    /* 0 -> rank: a rank was lost. About: the rank. Payload: how. */
    ZR_FRAME_LOST,
    /* The sender leaves on purpose. */
    ZR_FRAME_GOODBYE,
    /* The sender's process ends with its context open. About: the code of a failure that it had before, or 0.
     * Payload: its message. */
    ZR_FRAME_EXIT,
    /* 0 -> rank: send your program's latest calls. */
    ZR_FRAME_ASK_CALLS,
    /* Rank -> 0: the latest calls, one frame for each communicator. Payload: struct calls_frame (compare.c).
     * If about is not 0, the sender asks for a comparison of all ranks. About is then the code of its
     * failure, and the message follows the calls of the last frame. */
    ZR_FRAME_CALLS,
    /* 0 <-> rank: a message of the rendezvous' user. About: the rank that it is for. -1: all. */
    ZR_FRAME_MESSAGE,
    /* Both ways of a link between hosts: the sender is alive. Payload: its program's last call as text, if
     * known. */
    ZR_FRAME_BEAT,
    /* Rank -> 0: this rank's result. 0 -> rank: the common result. About: the code. Payload: the rank that
     * failed (int32_t) and its message. */
    ZR_FRAME_RESULT
};

/* Precedes every payload, in the sender's byte order. magic shows a sender with the other order. */
struct zr_frame {
    uint32_t magic;
    uint16_t version, type;
    /* Bytes of the payload that follows. */
    uint32_t n_bytes;
    int32_t rank, world;
    int32_t about;
};

/* A frame that is being read. If all but most_bytes is zero, nothing has come yet. */
struct zr_frame_reader {
    struct zr_frame head;
    /* (head.n_bytes) The payload and a 0 after it. NULL: none. */
    char *payload;
    /* Bytes of head and payload so far. */
    size_t n_in;
    /* Most bytes of a payload. */
    uint32_t most_bytes;
};

enum zr_frame_state {
    ZR_FRAME_UNFINISHED,
    /* Head and payload are complete: use them, then call zr_frame_next. */
    ZR_FRAME_WHOLE,
    /* The bytes belong to another protocol. */
    ZR_FRAME_STRANGE,
    /* The head is complete and announces more than most_bytes. The owner gives up, or raises most_bytes and
     * calls zr_frame_took with 0. */
    ZR_FRAME_LARGE,
    ZR_FRAME_NO_MEMORY
};

/* Returns where the next bytes go, and at most how many. That is never 0 while the frame is UNFINISHED. */
char *zr_frame_room(struct zr_frame_reader *r, size_t *n);
/* Records that n bytes were put there. Returns the new state of the frame. */
enum zr_frame_state zr_frame_took(struct zr_frame_reader *r, size_t n);
/* Frees the payload, if it is still there, and begins the next frame. */
void zr_frame_next(struct zr_frame_reader *r);

#endif
