/* SPDX-License-Identifier: Apache-2.0 */
/* job_key.c: see job_key.h. */
#include "comm/meet/job_key.h"
#include "kernels/limits.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

static int digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

/* text is not named in any message: it may be the key with one letter too many. */
static int parse(const char *name, const char *text, struct zr_job_key *key)
{
    size_t n = strlen(text);
    bool right = n >= 2 * ZR_JOB_KEY_MIN_BYTES && n <= 2 * ZR_JOB_KEY_MAX_BYTES && n % 2 == 0;
    for (size_t i = 0; i < n && right; i++)
        right = digit(text[i]) >= 0;
    if (!right)
        return zr_fail(ZR_ERR_ARG,
                       "%s has %zu characters and is not a key: an even number of %d to %d hex digits is "
                       "allowed (openssl rand -hex 16 makes one)",
                       name, n, 2 * ZR_JOB_KEY_MIN_BYTES, 2 * ZR_JOB_KEY_MAX_BYTES);
    key->n_bytes = (int32_t)(n / 2);
    for (size_t i = 0; i < n / 2; i++)
        key->bytes[i] = (uint8_t)(digit(text[2 * i]) << 4 | digit(text[2 * i + 1]));
    return 0;
}

static int read_open_file(int fd, const char *path, struct zr_job_key *key)
{
    struct stat st;
    char text[2 * ZR_JOB_KEY_MAX_BYTES + 3], name[320];
    size_t n = 0;
    if (fstat(fd, &st))
        return zr_fail(ZR_ERR_SYSTEM, "ZERO_JOB_KEY_FILE: %s: %s", path, strerror(errno));
    if (!S_ISREG(st.st_mode))
        return zr_fail(ZR_ERR_ARG, "ZERO_JOB_KEY_FILE: %s is not a file", path);
    if (st.st_uid != geteuid())
        return zr_fail(ZR_ERR_ARG,
                       "ZERO_JOB_KEY_FILE: %s belongs to user %ld: only a file of this user (%ld) is allowed",
                       path, (long)st.st_uid, (long)geteuid());
    if (st.st_mode & 0177)
        return zr_fail(ZR_ERR_ARG,
                       "ZERO_JOB_KEY_FILE: %s has mode %04o: only its owner may read a key, so chmod 600 it",
                       path, (unsigned)(st.st_mode & 07777));
    for (ssize_t got = 1; got != 0 && n < sizeof text - 1;) {
        got = read(fd, text + n, sizeof text - 1 - n);
        if (got < 0 && errno != EINTR)
            return zr_fail(ZR_ERR_IO, "ZERO_JOB_KEY_FILE: %s: %s", path, strerror(errno));
        n += got > 0 ? (size_t)got : 0;
    }
    while (n && (text[n - 1] == '\n' || text[n - 1] == '\r' || text[n - 1] == ' '))
        n--;
    text[n] = 0;
    snprintf(name, sizeof name, "ZERO_JOB_KEY_FILE: the text of %s", path);
    int err = parse(name, text, key);
    explicit_bzero(text, sizeof text);
    return err;
}

static int read_file(const char *path, struct zr_job_key *key)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
    char shown[208], why[ZR_SYSTEM_WORDS];
    if (fd < 0)
        return zr_fail(zr_is_descriptor_limit(errno) ? ZR_ERR_SYSTEM : ZR_ERR_ARG,
                       "ZERO_JOB_KEY_FILE: %.200s: %s", path, zr_system_words(errno, why));
    snprintf(shown, sizeof shown, "%.200s", path);
    int err = read_open_file(fd, shown, key);
    close(fd);
    return err;
}

int zr_job_key_find(struct zr_job_key *key)
{
    const char *text = getenv("ZERO_JOB_KEY"), *path = getenv("ZERO_JOB_KEY_FILE");
    *key = (struct zr_job_key){0};
    if (text && path)
        return zr_fail(ZR_ERR_ARG, "ZERO_JOB_KEY and ZERO_JOB_KEY_FILE are both set: one of them is allowed");
    if (text)
        return parse("ZERO_JOB_KEY", text, key);
    return path ? read_file(path, key) : 0;
}

int zr_job_key_make(struct zr_job_key *key)
{
    *key = (struct zr_job_key){.n_bytes = ZR_JOB_KEY_MIN_BYTES};
    if (getrandom(key->bytes, ZR_JOB_KEY_MIN_BYTES, 0) != ZR_JOB_KEY_MIN_BYTES)
        return zr_fail(ZR_ERR_SYSTEM, "no random bits for the job's key: %s", strerror(errno));
    return 0;
}
